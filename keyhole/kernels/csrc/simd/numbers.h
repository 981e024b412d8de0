// 16-bit numbers, as they lie in memory.
#pragma once

#include <cstdint>

namespace keyhole {

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

}  // namespace keyhole
