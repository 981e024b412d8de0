// Rows of one sequence, one after another, as speculation verifies them: each reads what the row
// before it reads, and newer tokens. A block of such rows reads the tokens that they share once.

// Splits consist of whole tiles of any kind.
constexpr int64_t kWhole = 128;

// Tokens of a split, for a row that reads so many.
static inline int64_t chunk_size(int64_t tokens) {
    const int64_t size = rounded_up((tokens + 31) / 32, kWhole);
    return size < 512 ? 512 : size > 4096 ? 4096 : size;
}

class RowBlocks {
  public:
    explicit RowBlocks(const Attend& a) : a_(a) {
        first_ = static_cast<int64_t*>(workspace(7, (2 * a.B + 1) * sizeof(int64_t)));
        of_row_ = first_ + a.B + 1;
        for (int64_t b = 0; b < a.B; b++) {
            if (b == 0 || !extends(b)) first_[count_++] = b;
            of_row_[b] = count_ - 1;
        }
        first_[count_] = a.B;
    }

    int64_t count() const { return count_; }
    int64_t first(int64_t block) const { return first_[block]; }
    int64_t rows(int64_t block) const { return first_[block + 1] - first_[block]; }
    int64_t of(int64_t b) const { return of_row_[b]; }

    // The reading order of row b and a KV head: from `begin` to `end`.
    void range(int64_t b, int64_t h, int64_t& begin, int64_t& end) const {
        begin = 0;
        if (a_.indices) {
            end = a_.counts[list(b, h)] * a_.unit;
        } else {
            end = a_.lengths[b];
            if (a_.window && end > a_.window) begin = end - a_.window;
        }
    }
    const int32_t* indices(int64_t b, int64_t h) const {
        return a_.indices ? a_.indices + list(b, h) * a_.n : nullptr;
    }

    // Up to here, in reading order, the rows of a block see the same tokens, in whole tiles: a row's
    // tiles, and so its result, are those that it has by itself. A row that is alone shares nothing.
    int64_t shared(int64_t block, int64_t h) const {
        if (rows(block) == 1) return 0;
        int64_t begin, end;
        range(first_[block], h, begin, end);
        if (a_.indices) end -= end && a_.unit > 1 ? a_.unit : 0;  // a page that is not yet full
        return end / kWhole * kWhole;
    }

  private:
    int64_t list(int64_t b, int64_t h) const {
        return b * a_.index_heads + (a_.index_heads == 1 ? 0 : h);
    }

    // Whether row b, for each KV head, reads what row b - 1 reads and then newer tokens.
    bool extends(int64_t b) const {
        if (a_.low_rank || a_.keys.dim_stride != 1) return false;
        const int64_t before = a_.lengths[b - 1], length = a_.lengths[b];
        if (length < before || (a_.window && length > a_.window)) return false;
        const int32_t* table = a_.table + b * a_.table_stride;
        const int64_t pages = (before + a_.page_size - 1) / a_.page_size;
        if (!same(table - a_.table_stride, table, pages)) return false;
        for (int64_t h = 0; h < (a_.indices ? a_.index_heads : 1); h++)
            if (!extends(b, h)) return false;
        return true;
    }
    bool extends(int64_t b, int64_t h) const {
        int64_t begin, before, end;
        range(b - 1, h, begin, before);
        range(b, h, begin, end);
        if (end < before || chunk_size(end) != chunk_size(before)) return false;
        if (!a_.indices || before == 0) return true;
        const int32_t* entries = indices(b - 1, h);
        const int64_t count = before / a_.unit;
        return entries[count - 1] * a_.unit < a_.lengths[b - 1] &&
               same(entries, indices(b, h), count);
    }
    static bool same(const int32_t* one, const int32_t* other, int64_t count) {
        return memcmp(one, other, count * sizeof(int32_t)) == 0;
    }

    const Attend& a_;
    int64_t count_ = 0;
    int64_t *first_, *of_row_;  // the first row of each block; the block of each row
};
