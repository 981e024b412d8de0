// How fast this machine reads what selected tokens are: rows of 256 bytes (128 numbers of bfloat16)
// anywhere in a cache of a gibibyte, a key and a value each, and nothing is computed. What `attend`
// over 2,048 tokens per KV head of 131,072 can at best be, on the same machine:
//
//   g++ -O3 -march=native -fopenmp benchmarks/rows.cpp -o /tmp/rows && OMP_WAIT_POLICY=PASSIVE /tmp/rows
//
// Before each reading another 256 MiB are read, as the rest of a decode step does; "warm" is without.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

constexpr size_t kRow = 256, kHeads = 8, kPage = 16, kTokens = 131072, kChosen = 2048;
constexpr size_t kBytes = 2 * kTokens * kHeads * kRow, kOther = 256 << 20, kHuge = 2 << 20;
constexpr int kRounds = 41, kAhead = 32;

char* memory(size_t bytes, bool huge) {
    void* p = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    auto* start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kHuge - 1) / kHuge * kHuge);
    madvise(start, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(start, 1, bytes);
    return start;
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double read_all(const char* from, size_t bytes) {
    uint64_t sum = 0;
    const double begin = seconds();
#pragma omp parallel for simd reduction(+ : sum) schedule(static)
    for (size_t i = 0; i < bytes / 8; i++) sum += reinterpret_cast<const uint64_t*>(from)[i];
    volatile uint64_t used = sum;
    (void)used;
    return seconds() - begin;
}

double read_rows(const char* from, const std::vector<size_t>& rows, int ahead) {
    uint64_t sum = 0;
    const double begin = seconds();
#pragma omp parallel for reduction(+ : sum) schedule(static)
    for (size_t i = 0; i < rows.size(); i++) {
        const char* next = from + rows[std::min(i + ahead, rows.size() - 1)];
        for (size_t line = 0; ahead && line < kRow; line += 64) __builtin_prefetch(next + line);
        const auto* row = reinterpret_cast<const uint64_t*>(from + rows[i]);
        for (size_t j = 0; j < kRow / 8; j++) sum += row[j];
    }
    volatile uint64_t used = sum;
    (void)used;
    return seconds() - begin;
}

int main() {
    std::mt19937_64 random(0);
    const char* other = memory(kOther, false);
    for (bool huge : {false, true}) {
        const char* cache = memory(kBytes, huge);
        std::vector<double> all;
        for (int i = 0; i < kRounds; i++) all.push_back(read_all(cache, kBytes / 2));
        std::sort(all.begin(), all.end());
        printf("{\"huge_pages\": %s, \"read_gb_per_s\": %.1f", huge ? "true" : "false",
               kBytes / 2 / all[0] / 1e9);
        for (int ahead : {0, kAhead})
            for (bool cold : {true, false}) {
                std::vector<double> times;
                for (int round = 0; round < kRounds; round++) {
                    std::vector<size_t> rows;  // a head's page of keys, then its page of values
                    for (size_t head = 0; head < kHeads; head++)
                        for (size_t i = 0; i < kChosen; i++) {
                            const size_t token = i * (kTokens / kChosen) + random() % (kTokens / kChosen);
                            const size_t page = (token / kPage * kHeads + head) * 2 * kPage;
                            rows.push_back((page + token % kPage) * kRow);
                            rows.push_back((page + kPage + token % kPage) * kRow);
                        }
                    if (cold) read_all(other, kOther);
                    times.push_back(read_rows(cache, rows, ahead));
                }
                std::sort(times.begin(), times.end());
                printf(", \"rows%s_%s_gb_per_s\": %.1f", ahead ? "_ahead" : "", cold ? "cold" : "warm",
                       2 * kRow * kHeads * kChosen / times[kRounds / 2] / 1e9);
            }
        printf("}\n");
        munmap(const_cast<char*>(cache), kBytes);
    }
}
