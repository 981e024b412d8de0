// What Intel's matrix unit computes: attention in bfloat16 and to int8, and linear layers of inputs in
// bfloat16. The rest, and operands that do not fit, go to AVX-512.
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <string.h>

#include "arguments.h"
#include "numbers.h"

namespace keyhole {
namespace {

#include "vector_avx512.h"
#include "threads.h"
#include "tile.h"
#include "int8_tiles_avx512.h"
#include "low_rank.h"
#include "source.h"
#include "row_blocks.h"
#include "attend.h"
#include "matrix_unit_amx.h"
#include "matrix_tiles_amx.h"
#include "int8_tiles_amx.h"
#include "prompt_tiles_amx.h"
#include "prefill.h"
#include "linear.h"
#include "packed_linear.h"
#include "codes_avx512.h"
#include "linear_amx.h"

bool fits(int64_t D, int64_t Dv) { return D <= kMostColumns && Dv <= kMostColumns; }

// Query heads of a group that nearly fill the rows of an operand: with fewer, vectors are faster
// (benchmarks/LOG.md). Not the rows that share tokens: a row's result must not depend on those.
constexpr int64_t kFewestRows = 7;

void attend(const Attend& a) {
    if (a.dtype == DType::bfloat16 && fits(a.D, a.Dv) && !a.low_rank && a.keys.dim_stride == 1 &&
        a.Hq / a.Hkv >= kFewestRows)
        return Attention<bfloat16, bfloat16, MatrixForm>(a).run();
    if (a.dtype == DType::int8 && a.rounded)
        return Attention<int8, float, Int8MatrixForm>(a).run();
    avx512_path.attend(a);
}

void prefill(const Prefill& a) {
    if (a.dtype != DType::bfloat16 || !fits(a.D, a.Dv)) avx512_path.prefill(a);
    else if (a.stored == DType::int8) CausalAttention<int8, bfloat16>(a).run();
    else if (a.stored == DType::e4m3) CausalAttention<e4m3, bfloat16>(a).run();
    else CausalAttention<bfloat16>(a).run();
}

// Layers of one input have passes of their own: it takes a small part of the time to arrange.
void linear(const Linear& a) {
    if (a.next) linear(*a.next);
    if (a.dtype == DType::bfloat16 && a.I % 32 == 0 && a.O >= kTile && a.T > 0 &&
        a.T <= kMostTokens)
        return matrix_linear(a);
    Linear one = a;
    one.next = nullptr;
    avx512_path.linear(one);
}

void packed_linear(const PackedLinear& a) {
    // One or two tokens, and groups of sixteen codes, are too few for a product (benchmarks/LOG.md).
    if (a.T <= 2 || a.weight.group == 16 || a.dtype != DType::bfloat16)
        return avx512_path.packed_linear(a);
    for (const PackedLinear* part = &a; part; part = part->next) {
        PackedLinear one = *part;
        one.next = nullptr;
        one.O < kTile ? avx512_path.packed_linear(one) : multiply_in_digits(one);
    }
}

}  // namespace

extern const MatrixPath amx_path;
const MatrixPath amx_path = {attend, prefill, linear, packed_linear};

}  // namespace keyhole
