// Elastic loading: what is selected comes into a sequence's own buffer, what is there already stays.
#include <algorithm>
#include <cstring>
#include <omp.h>

#include "arguments.h"

namespace keyhole {

namespace {

enum Slot : int32_t { empty = 0, stale = 1, kept = 2 };

char* token(const Pages& pages, int64_t itemsize, int64_t page, int64_t head, int64_t place) {
    const int64_t at = page * pages.page_stride + head * pages.head_stride + place * pages.token_stride;
    return static_cast<char*>(const_cast<void*>(pages.data)) + at * itemsize;
}

// One sequence and KV head.
class List {
  public:
    List(const Exchange& a, int64_t b, int64_t h) : a_(a), b_(b), h_(h) {
        newest_ = (a.lengths[b] - 1) / a.unit;
        entries_ = a.entries + (a.rows[b] * a.H + h) * a.slots;
        used_ = a.used + (b * a.H + h) * a.n;
    }

    // `wanted`, `listed`: room for a bit per entry; `places` for a number, `slots` for one per slot.
    void run(uint64_t* wanted, uint64_t* listed, int32_t* places, int32_t* slots) {
        slots_ = slots;
        const int64_t words = (newest_ + 63) / 64, ordinary = a_.slots - 1;
        std::fill(wanted, wanted + words, 0);
        const int32_t* list = a_.indices + (b_ * a_.lists + (a_.lists == 1 ? 0 : h_)) * a_.n;
        for (int64_t i = 0; i < a_.n; i++)
            if (list[i] >= 0 && list[i] < newest_) wanted[list[i] / 64] |= uint64_t{1} << list[i] % 64;
        std::copy(wanted, wanted + words, listed);
        for (int64_t s = 0; s < ordinary; s++) {
            const int32_t entry = entries_[s];
            slots_[s] = empty;
            if (entry < 0) continue;
            if (entry >= newest_) {  // of a time when the sequence was longer
                entries_[s] = -1;
                continue;
            }
            const uint64_t bit = uint64_t{1} << entry % 64;
            slots_[s] = wanted[entry / 64] & bit ? kept : stale;
            wanted[entry / 64] &= ~bit;
            places[entry] = static_cast<int32_t>(s);
        }
        int64_t loaded = 0;
        for (int64_t word = 0; word < words; word++)
            for (uint64_t bits = wanted[word]; bits; bits &= bits - 1) {
                const int64_t entry = word * 64 + __builtin_ctzll(bits), slot = next_free(ordinary);
                entries_[slot] = static_cast<int32_t>(entry);
                places[entry] = static_cast<int32_t>(slot);
                copy(slot, entry, a_.unit);
                loaded++;
            }
        entries_[ordinary] = static_cast<int32_t>(newest_);
        const int64_t known = a_.lengths[b_] - 1 - newest_ * a_.unit;
        copy(ordinary, newest_, known);
        int64_t count = 0;
        for (int64_t word = 0; word < words; word++)
            for (uint64_t bits = listed[word]; bits; bits &= bits - 1)
                use(count, places[word * 64 + __builtin_ctzll(bits)]);
        use(count, static_cast<int32_t>(ordinary));
        std::fill(used_ + count, used_ + a_.n, -1);
        a_.counts[b_ * a_.H + h_] = static_cast<int32_t>(count);
        a_.moved[b_ * a_.H + h_] = static_cast<int32_t>(loaded * a_.unit + known);
    }

  private:
    // Empty slots first, in order, then those of entries that are not selected any more.
    int64_t next_free(int64_t ordinary) {
        while (slots_[at_] != free_)
            if (++at_ == ordinary) {
                at_ = 0;
                free_ = stale;
            }
        slots_[at_] = kept;
        return at_;
    }

    // A list without the newest entry, which no policy may give, has one slot too few.
    void use(int64_t& count, int32_t slot) const {
        if (count < a_.n) used_[count++] = slot;
    }

    // The first `count` tokens of an entry; they lie in one page on both sides.
    void copy(int64_t slot, int64_t entry, int64_t count) const {
        const int64_t size = a_.page_size, from = entry * a_.unit, to = slot * a_.unit;
        const int64_t page = a_.table[b_ * a_.table_stride + from / size];
        const int64_t own = a_.rows[b_] * (a_.slots * a_.unit / size) + to / size;
        copy(a_.keys, own, to % size, a_.from_keys, page, from % size, count, a_.D);
        if (a_.Dv) copy(a_.values, own, to % size, a_.from_values, page, from % size, count, a_.Dv);
    }

    void copy(const Pages& to, int64_t own, int64_t place, const Pages& from, int64_t page,
              int64_t first, int64_t count, int64_t dim) const {
        const int64_t size = a_.itemsize;
        if (to.token_stride == dim && from.token_stride == dim) {
            dim *= count;
            count = count > 0;
        }
        for (int64_t i = 0; i < count; i++)
            std::memcpy(token(to, size, own, h_, place + i), token(from, size, page, h_, first + i),
                        dim * size);
    }

    const Exchange& a_;
    const int64_t b_, h_;
    int64_t newest_, at_ = 0;
    int32_t *entries_, *used_, *slots_ = nullptr;
    Slot free_ = empty;
};

}  // namespace

void exchange(const Exchange& a) {
    const int64_t entries = a.M * a.page_size / a.unit, words = (entries + 63) / 64;
    const int64_t numbers = 2 * words + (entries + a.slots + 1) / 2;  // of 8 bytes, per thread
    auto* room = static_cast<uint64_t*>(workspace(0, omp_get_max_threads() * numbers * 8));
    // Below this, waking other threads costs more than it saves.
    const bool together = a.B * a.H * a.slots * a.unit * (a.D + a.Dv) * a.itemsize > 1 << 19;
#pragma omp parallel for schedule(dynamic) if (together)
    for (int64_t i = 0; i < a.B * a.H; i++) {
        uint64_t* own = room + omp_get_thread_num() * numbers;
        auto* places = reinterpret_cast<int32_t*>(own + 2 * words);
        List(a, i / a.H, i % a.H).run(own, own + words, places, places + entries);
    }
}

}  // namespace keyhole
