// Operations without arithmetic: writing into pages, choosing the best.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "arguments.h"

namespace keyhole {

namespace {

struct Buffer {
    void* data = nullptr;
    int64_t bytes = 0;
    ~Buffer() { std::free(data); }
};
thread_local Buffer buffers[8];

// Floats in the order in which torch sorts them, NaN last: 0.0 equals -0.0.
uint32_t ordered(float x) {
    if (x != x) return 0xffffffff;
    x += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Eleven, eleven and ten bits at a time, the highest first.
constexpr int kShift[] = {21, 10, 0}, kBits[] = {11, 11, 10};

// The k-th largest of `n` numbers given by `number`, and how many of its equals belong to the best k.
template <class Number>
uint32_t kth_largest(int64_t n, int64_t k, Number number, int64_t& equals) {
    uint32_t found = 0, known = 0;
    for (int round = 0; round < 3; round++) {
        int64_t histogram[1 << 11] = {};
        const uint32_t mask = (1u << kBits[round]) - 1;
        for (int64_t i = 0; i < n; i++) {
            const uint32_t x = number(i);
            if ((x & known) == found) histogram[x >> kShift[round] & mask]++;
        }
        uint32_t digit = mask;
        while (histogram[digit] < k) k -= histogram[digit--];
        found |= digit << kShift[round];
        known |= mask << kShift[round];
    }
    equals = k;
    return found;
}

void top_row(const TopIndices& a, const float* scores, int64_t valid, int32_t* out) {
    const int64_t n = std::min(valid, a.n), k = std::min(a.k, n);
    const uint32_t forced = ordered(INFINITY);
    auto number = [&](int64_t i) {
        return i < a.first || i >= valid - a.last ? forced : ordered(scores[i]);
    };
    int64_t count = 0;
    if (k == n) {
        for (; count < k; count++) out[count] = static_cast<int32_t>(count);
    } else if (k > 0) {
        int64_t equals;
        const uint32_t least = kth_largest(n, k, number, equals);
        for (int64_t i = 0; i < n && count < k; i++) {
            const uint32_t x = number(i);
            if (x > least || (x == least && equals-- > 0)) out[count++] = static_cast<int32_t>(i);
        }
    }
    std::fill(out + count, out + a.k, -1);
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

void top_indices(const TopIndices& a) {
#pragma omp parallel for schedule(dynamic) if (a.B * a.H * a.n > 1 << 14)
    for (int64_t i = 0; i < a.B * a.H; i++) {
        const int64_t valid = a.valid[i / a.H];
        top_row(a, a.scores + i * a.n, valid, a.indices + i * a.k);
        a.counts[i] = static_cast<int32_t>(std::min<int64_t>(valid, a.k));
    }
}

}  // namespace keyhole
