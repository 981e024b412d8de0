// The score of each token's cluster.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "arguments.h"

namespace keyhole {

namespace {

// Pages per task, and the prefetch distance in pages: pages are scattered in memory.
constexpr int64_t kPages = 64, kAhead = 8;

template <class Integer>
void spread_pages(const SpreadScores& a, int64_t b, int64_t begin, int64_t end) {
    const int64_t size = a.page_size, of_page = a.H * size;
    const auto* numbers = static_cast<const Integer*>(a.numbers);
    const int32_t* table = a.table + b * a.table_stride;
    for (int64_t entry = begin; entry < end; entry++) {
        if (entry + kAhead < end)
            for (int64_t i = 0; i < of_page; i += 64 / sizeof(Integer))
                __builtin_prefetch(numbers + table[entry + kAhead] * of_page + i);
        // The page's tokens between `first` and `ends` are in a cluster.
        const int64_t low = std::clamp<int64_t>(a.first - entry * size, 0, size);
        const int64_t high = std::clamp<int64_t>(a.ends[b] - entry * size, low, size);
        for (int64_t h = 0; h < a.H; h++) {
            const float* scores = a.scores + (b * a.H + h) * a.n;
            float* out = a.out + ((b * a.H + h) * a.M + entry) * size;
            const Integer* number = numbers + table[entry] * of_page + h * size;
            std::fill(out, out + low, INFINITY);
            for (int64_t i = low; i < high; i++) {
                // Negative numbers become large ones.
                const auto place = static_cast<uint64_t>(number[i]);
                out[i] = place < static_cast<uint64_t>(a.n) ? scores[place] : INFINITY;
            }
            std::fill(out + high, out + size, INFINITY);
        }
    }
}

}  // namespace

void spread_scores(const SpreadScores& a) {
    const int64_t pieces = (a.M + kPages - 1) / kPages;
#pragma omp parallel for schedule(dynamic) if (a.B * a.H * a.M * a.page_size > 1 << 14)
    for (int64_t i = 0; i < a.B * pieces; i++) {
        const int64_t b = i / pieces, begin = i % pieces * kPages;
        const int64_t end = std::min(a.M, begin + kPages);
        a.itemsize == 2 ? spread_pages<int16_t>(a, b, begin, end)
                        : spread_pages<int32_t>(a, b, begin, end);
    }
}

}  // namespace keyhole
