// Of every token of a sequence the score of the cluster that it is in.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "arguments.h"

namespace keyhole {

namespace {

template <class Integer>
void spread_as(const SpreadScores& a) {
    const auto* numbers = static_cast<const Integer*>(a.numbers);
    const int64_t N = a.M * a.page_size;
#pragma omp parallel for schedule(dynamic) if (a.B * a.H * N > 1 << 14)
    for (int64_t i = 0; i < a.B * a.H; i++) {
        const int64_t b = i / a.H, h = i % a.H;
        const int64_t end = std::min<int64_t>(N, a.ends[b]), first = std::min(a.first, end);
        const float* scores = a.scores + i * a.n;
        float* out = a.out + i * N;
        std::fill(out, out + first, INFINITY);
        for (int64_t at = first; at < end;) {
            const int64_t entry = at / a.page_size, page = a.table[b * a.table_stride + entry];
            const Integer* of_page = numbers + (page * a.H + h) * a.page_size;
            const int64_t begin = entry * a.page_size, stop = std::min(end, begin + a.page_size);
            for (; at < stop; at++) out[at] = scores[of_page[at - begin]];
        }
        std::fill(out + std::max(first, end), out + N, INFINITY);
    }
}

}  // namespace

void spread_scores(const SpreadScores& a) {
    a.itemsize == 2 ? spread_as<int16_t>(a) : spread_as<int32_t>(a);
}

}  // namespace keyhole
