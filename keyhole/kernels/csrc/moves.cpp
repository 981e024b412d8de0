// Operations without arithmetic: writing into pages, top-k, the score of each token's cluster.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>

#include "arguments.h"

namespace keyhole {

namespace {

struct Buffer {
    void* data = nullptr;
    int64_t bytes = 0;
    ~Buffer() { std::free(data); }
};
thread_local Buffer buffers[10];

// Floats in the order in which torch sorts them, NaN last: 0.0 equals -0.0.
uint32_t ordered(float x) {
    const float sum = x + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &sum, 4);
    const uint32_t sign = bits >> 31;
    return x != x ? 0xffffffff : bits ^ (0x80000000 | (0 - sign));
}

// Eleven, eleven and ten bits at a time, the highest first.
constexpr int kShift[] = {21, 10, 0}, kBits[] = {11, 11, 10};

// The k-th largest of `n` numbers, and how many ties belong to the best k. `room`: scratch for n.
uint32_t kth_largest(const uint32_t* numbers, int64_t n, int64_t k, uint32_t* room,
                     int64_t& equals) {
    // Adjacent numbers use separate counters: many are equal, and increments would depend on each
    // other.
    static constexpr int kApart = 4, kFew = 2048;
    uint32_t found = 0;
    for (int round = 0; round < 3 && n > kFew; round++) {
        const int shift = kShift[round];
        const uint32_t mask = (1u << kBits[round]) - 1;
        uint32_t histogram[kApart][1 << 11] = {};
        int64_t i = 0;
        for (; i + kApart <= n; i += kApart)
            for (int j = 0; j < kApart; j++) histogram[j][numbers[i + j] >> shift & mask]++;
        for (; i < n; i++) histogram[0][numbers[i] >> shift & mask]++;
        uint32_t digit = mask;
        for (;; digit--) {
            int64_t count = 0;
            for (int j = 0; j < kApart; j++) count += histogram[j][digit];
            if (count >= k) break;
            k -= count;
        }
        found |= digit << shift;
        int64_t left = 0;  // those with the same leading digits
        for (i = 0; i < n; i++) {
            room[left] = numbers[i];
            left += (numbers[i] >> shift & mask) == digit;
        }
        numbers = room;
        n = left;
    }
    if (n <= kFew) {
        if (numbers != room) std::copy(numbers, numbers + n, room);
        std::nth_element(room, room + k - 1, room + n, std::greater<>());
        found = room[k - 1];
        k -= std::count_if(room, room + k, [=](uint32_t x) { return x > found; });
    }
    equals = k;
    return found;
}

void top_row(const TopIndices& a, const float* scores, int64_t valid, int32_t* out) {
    const int64_t n = std::min(valid, a.n), k = std::min(a.k, n);
    int64_t count = 0;
    if (k == n) {
        for (; count < k; count++) out[count] = static_cast<int32_t>(count);
    } else if (k > 0) {
        auto* numbers = static_cast<uint32_t*>(workspace(5, 2 * n * 4));
        for (int64_t i = 0; i < n; i++) numbers[i] = ordered(scores[i]);
        const uint32_t forced = ordered(INFINITY);
        std::fill(numbers, numbers + std::min(a.first, n), forced);
        std::fill(numbers + std::min(n, std::max<int64_t>(0, valid - a.last)), numbers + n, forced);
        int64_t equals;
        const uint32_t least = kth_largest(numbers, n, k, numbers + n, equals);
        for (int64_t i = 0; i < n && count < k; i++) {
            const uint32_t x = numbers[i];
            if (x > least || (x == least && equals-- > 0)) out[count++] = static_cast<int32_t>(i);
        }
    }
    std::fill(out + count, out + a.k, -1);
}

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

// AMD's does: 1.4 to 1.8 times as fast on Zen 4 (benchmarks/LOG.md). Others were not measured.
#if defined(__x86_64__)
const bool ask_second_level = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
#else
const bool ask_second_level = false;
#endif

void* workspace(int which, int64_t bytes) {
    Buffer& buffer = buffers[which];
    if (buffer.bytes < bytes) {
        const int64_t size = (bytes + bytes / 4 + 63) / 64 * 64;  // sequences grow
        std::free(buffer.data);
        buffer.bytes = 0;
        buffer.data = std::aligned_alloc(64, size);
        if (!buffer.data) throw std::bad_alloc();
        buffer.bytes = size;
    }
    return buffer.data;
}

int64_t workspace_bytes() {
    int64_t bytes = 0;
    for (const Buffer& buffer : buffers) bytes += buffer.bytes;
    return bytes;
}

void append(const Append& a) {
    const int64_t size = a.D * a.itemsize;
#pragma omp parallel for schedule(static) if (a.T * a.Hkv * size > 1 << 18)
    for (int64_t i = 0; i < a.T * a.Hkv; i++) {
        const int64_t t = i / a.Hkv, h = i % a.Hkv, slot = a.slots[t];
        const int64_t page = slot / a.page_size, place = slot % a.page_size;
        std::memcpy(static_cast<char*>(a.pages) + (page * a.page_stride + h * a.head_stride +
                                                   place * a.token_stride) * a.itemsize,
                    static_cast<const char*>(a.rows) +
                        (t * a.row_stride + h * a.row_head_stride) * a.itemsize,
                    size);
    }
}

void top_k(const TopIndices& a) {
#pragma omp parallel for schedule(dynamic) if (a.B * a.H * a.n > 1 << 14)
    for (int64_t i = 0; i < a.B * a.H; i++) {
        const int64_t valid = a.valid[i / a.H];
        top_row(a, a.scores + i * a.n, valid, a.indices + i * a.k);
        a.counts[i] = static_cast<int32_t>(std::min<int64_t>(valid, a.k));
    }
}

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
