// One processor path: included once per path by a file that is compiled with that path's flags and
// defines KEYHOLE_PATH, its name, KEYHOLE_VECTOR, its vector type, and KEYHOLE_PROMPT_TILES, how its
// prompts read keys and values. Everything lies in a namespace of its own, and no template of the
// standard library is used, so that code for newer processors can never be linked in place of code
// for older ones.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <math.h>
#include <omp.h>
#include <string.h>

#include "arguments.h"
#include "numbers.h"

namespace keyhole {
namespace {

#include KEYHOLE_VECTOR
#include "threads.h"
#include "tile.h"
#include "low_rank.h"
#include "source.h"
#include "attend.h"
#include KEYHOLE_PROMPT_TILES
#include "prefill.h"
#include "bounds.h"
#include "summaries.h"
#include "linear.h"

template <class T>
void attend_as(const Attend& a) {
    Attention<T>(a).run();
}
template <class T>
void prefill_as(const Prefill& a) {
    CausalAttention<T>(a).run();
}

#define KEYHOLE_BY_DTYPE(name, function, Arguments)               \
    void name(const Arguments& a) {                               \
        switch (a.dtype) {                                        \
            case DType::float32: return function<float>(a);       \
            case DType::bfloat16: return function<bfloat16>(a);   \
            case DType::float16: return function<float16>(a);     \
        }                                                         \
    }
KEYHOLE_BY_DTYPE(any_attend, attend_as, Attend)
KEYHOLE_BY_DTYPE(any_prefill, prefill_as, Prefill)
KEYHOLE_BY_DTYPE(any_page_bounds, page_bounds, PageBounds)
KEYHOLE_BY_DTYPE(any_bound_scores, bound_scores, BoundScores)
KEYHOLE_BY_DTYPE(any_summary_scores, summary_scores, SummaryScores)
KEYHOLE_BY_DTYPE(any_linear, linear, Linear)
KEYHOLE_BY_DTYPE(any_packed_linear, packed_linear, PackedLinear)
KEYHOLE_BY_DTYPE(any_unpack, unpack, Unpack)
#undef KEYHOLE_BY_DTYPE

}  // namespace

extern const Path KEYHOLE_PATH;
const Path KEYHOLE_PATH = {any_attend,       any_prefill,        any_page_bounds,
                           any_bound_scores, any_summary_scores, any_linear,
                           any_packed_linear, any_unpack};

}  // namespace keyhole
