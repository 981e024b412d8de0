// 16-bit and 8-bit numbers, as they lie in memory.
#pragma once

#include <cstdint>

namespace keyhole {

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};
// 8-bit numbers. A row of them is followed by its scale, a float.
struct int8 {
    int8_t bits;
};
struct e4m3 {
    uint8_t bits;
};

// Bytes of the scale behind a row of numbers; 0 for numbers without one. `load` returns 1 / step of
// a number without its scale: an e4m3 is widened by way of float16, whose exponent has another bias.
template <class T>
struct Scaled {
    static constexpr int bytes = 0;
};
template <>
struct Scaled<int8> {
    static constexpr int bytes = 4;
    static constexpr float step = 1.0f, largest = 127.0f;
};
template <>
struct Scaled<e4m3> {
    static constexpr int bytes = 4;
    static constexpr float step = 256.0f, largest = 448.0f;
};

}  // namespace keyhole
