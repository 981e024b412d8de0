// One processor path: included once per path by a file that is compiled with that path's flags and
// defines KEYHOLE_PATH, its name, KEYHOLE_VECTOR, its vector type, KEYHOLE_PROMPT_TILES, how its
// prompts read keys and values, KEYHOLE_INT8_TILES, if it multiplies int8 without widening, and
// KEYHOLE_CODES, if it multiplies the codes of packed weights without making them floats.
// Everything lies in a namespace of its own, and no template of the standard library is used, so
// that code for newer processors can never be linked in place of code for older ones.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <math.h>
#include <omp.h>
#include <string.h>

#include <type_traits>

#include "arguments.h"
#include "numbers.h"

namespace keyhole {
namespace {

#include KEYHOLE_VECTOR
#include "threads.h"
#include "tile.h"
#ifdef KEYHOLE_INT8_TILES
#include KEYHOLE_INT8_TILES
#else
using Int8Digits = QueryForm<int8>;
#endif
#include "low_rank.h"
#include "source.h"
#include "row_blocks.h"
#include "attend.h"
#include KEYHOLE_PROMPT_TILES
#include "prefill.h"
#include "summaries.h"
#include "linear.h"
#include "packed_linear.h"
#ifdef KEYHOLE_CODES
#include KEYHOLE_CODES
#endif
#include "norm_rope.h"
#include "quantise.h"

// `K` of a call: the dtype in which keys and values are stored.
template <class T>
void prefill_as(const Prefill& a) {
    if (a.stored == DType::int8) CausalAttention<int8, T>(a).run();
    else if (a.stored == DType::e4m3) CausalAttention<e4m3, T>(a).run();
    else CausalAttention<T>(a).run();
}
template <class T>
void page_bounds_as(const PageBounds& a) {
    if (a.stored == DType::int8) page_bounds<int8, T>(a);
    else if (a.stored == DType::e4m3) page_bounds<e4m3, T>(a);
    else page_bounds<T>(a);
}
template <class T>
void quantise(const Append& a) {
    a.stored == DType::int8 ? quantise_as<T, int8>(a) : quantise_as<T, e4m3>(a);
}

void any_attend(const Attend& a) {
    switch (a.dtype) {
        case DType::float32: return Attention<float>(a).run();
        case DType::bfloat16: return Attention<bfloat16>(a).run();
        case DType::float16: return Attention<float16>(a).run();
        case DType::int8:
            if (a.rounded) return Attention<int8, float, Int8Digits>(a).run();
            return Attention<int8, float>(a).run();
        case DType::e4m3: return Attention<e4m3, float>(a).run();
    }
}

#define KEYHOLE_BY_DTYPE(name, function, Arguments)               \
    void name(const Arguments& a) {                               \
        switch (a.dtype) {                                        \
            case DType::float32: return function<float>(a);       \
            case DType::bfloat16: return function<bfloat16>(a);   \
            case DType::float16: return function<float16>(a);     \
            default: return;                                      \
        }                                                         \
    }
KEYHOLE_BY_DTYPE(any_prefill, prefill_as, Prefill)
KEYHOLE_BY_DTYPE(any_quantise, quantise, Append)
KEYHOLE_BY_DTYPE(any_page_bounds, page_bounds_as, PageBounds)
KEYHOLE_BY_DTYPE(any_bound_scores, bound_scores, BoundScores)
KEYHOLE_BY_DTYPE(any_summary_scores, summary_scores, SummaryScores)
KEYHOLE_BY_DTYPE(any_linear, linear, Linear)
KEYHOLE_BY_DTYPE(any_packed_linear, packed_linear, PackedLinear)
KEYHOLE_BY_DTYPE(any_unpack, unpack, Unpack)
KEYHOLE_BY_DTYPE(any_rms_norm, rms_norm, RmsNorm)
KEYHOLE_BY_DTYPE(any_apply_rope, apply_rope, Rope)
KEYHOLE_BY_DTYPE(any_swiglu, swiglu, Elementwise)
KEYHOLE_BY_DTYPE(any_add, add, Elementwise)
#undef KEYHOLE_BY_DTYPE

}  // namespace

extern const Path KEYHOLE_PATH;
const Path KEYHOLE_PATH = {any_attend,        any_prefill,  any_quantise,
                           any_page_bounds,   any_bound_scores,
                           any_summary_scores, any_linear,  any_packed_linear, any_unpack,
                           any_rms_norm,      any_apply_rope, any_swiglu, any_add};

}  // namespace keyhole
