// Top-p trimming: the fewest best entries of a selection that hold a share of the scores.
#include <algorithm>
#include <cstring>
#include <functional>
#include <omp.h>

#include "arguments.h"

namespace keyhole {

namespace {

// As the reference clamps: NaN stays NaN.
float positive(float x) { return x < 0 ? 0 : x; }

// A sort key by score (NaN is the largest), then by position, larger if it is earlier. For floats
// of at least 0 the order is that of their bits.
uint64_t sortable(float score, int64_t place) {
    uint32_t bits = 0x7fffffff;
    if (score == score) std::memcpy(&bits, &score, 4);
    return uint64_t{bits & 0x7fffffff} << 32 | (0xffffffff - static_cast<uint32_t>(place));
}

int64_t place_of(uint64_t number) { return 0xffffffff - static_cast<int64_t>(number & 0xffffffff); }

float score_of(uint64_t number) {
    const uint32_t bits = static_cast<uint32_t>(number >> 32);
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
}

// Eight sums at once, in double precision: a single sum would be a dependency chain.
double sum_of_positive(const float* scores, int64_t n) {
    double sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int lane = 0; lane < 8; lane++) sums[lane] += positive(scores[i + lane]);
    for (; i < n; i++) sums[0] += positive(scores[i]);
    double sum = 0;
    for (double x : sums) sum += x;
    return sum;
}

// How many of the best are needed: each one before which the sum, with `before`, is less than
// `wanted`. Numbers are divided at the median until one is left, those of the needed half come
// first; a half whose sum is not enough is needed as a whole.
int64_t needed(uint64_t* numbers, int64_t n, double before, float wanted) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        std::nth_element(numbers + low, numbers + middle, numbers + high, std::greater<>());
        double better = before;
        for (int64_t i = low; i < middle; i++) better += score_of(numbers[i]);
        if (static_cast<float>(better) < wanted) {
            before = better + score_of(numbers[middle]);
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

void trim_row(const Trim& a, int64_t i, uint64_t* numbers) {
    const int64_t valid = a.valid[i / a.H];
    const int32_t* indices = a.indices + i * a.k;
    const float* scores = a.scores + i * a.n;
    const auto forced = [&](int32_t x) { return x < a.first || x >= valid - a.last; };
    const float wanted = a.share * static_cast<float>(sum_of_positive(scores, std::min(valid, a.n)));
    int64_t real = 0, free = 0;
    double before = 0;
    for (; real < a.k && indices[real] >= 0; real++) {
        const float score = positive(scores[indices[real]]);
        if (forced(indices[real])) before += score;
        else numbers[free++] = sortable(score, real);
    }
    int64_t taken = needed(numbers, free, before, wanted);
    if (const int64_t least = std::min(free, a.least - (real - free)); taken < least) {
        std::nth_element(numbers, numbers + least - 1, numbers + free, std::greater<>());
        taken = least;
    }
    // The selection's order is kept: remaining entries are marked in the list itself, then
    // compacted.
    int32_t* left = a.left + i * a.k;
    std::copy(indices, indices + real, left);
    for (int64_t j = taken; j < free; j++) left[place_of(numbers[j])] = -1;
    const int64_t count = std::remove(left, left + real, -1) - left;
    std::fill(left + count, left + a.k, -1);
    a.counts[i] = static_cast<int32_t>(count);
}

}  // namespace

void trim(const Trim& a) {
    auto* room = static_cast<uint64_t*>(workspace(0, omp_get_max_threads() * a.k * 8));
#pragma omp parallel for schedule(dynamic) if (a.B * a.H * a.n > 1 << 14)
    for (int64_t i = 0; i < a.B * a.H; i++) trim_row(a, i, room + omp_get_thread_num() * a.k);
}

}  // namespace keyhole
