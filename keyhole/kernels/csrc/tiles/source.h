// The tokens that a sequence reads, a tile at a time. Tokens are indexed in the order of the
// selection ("reading order"), so that any range of it can be one thread's task.

template <class T>
struct Source {
    const T *keys, *values;
    Pages key_pages, value_pages;
    const int32_t* table;    // of the sequence
    const int32_t* entries;  // selected tokens, pages or blocks of tokens, or null: all
    int64_t unit, page_size;
    int64_t low, high;  // visible positions
    LowRankKeys<T>* low_rank = nullptr;

    // The next tile from `at`; returns the index after it.
    template <int N>
    int64_t next(int64_t at, int64_t end, Tile<T, N>& tile) const {
        tile.count = 0;
        tile.rebuilt = 0;
        while (tile.count < N && at < end) {
            int64_t position = at, run = 1;
            if (entries && unit == 1) {
                position = entries[at];
            } else if (entries) {
                const int64_t entry = at / unit, place = at - entry * unit;
                position = entries[entry] * unit + place;
                run = unit - place;
                if (unit != page_size) {  // blocks of a prompt: a run ends with its page, too
                    const int64_t rest = page_size - (position - entry_of(position) * page_size);
                    if (run > rest) run = rest;
                }
            } else {
                run = page_size - (position - entry_of(position) * page_size);
            }
            if (run > end - at) run = end - at;
            if (run > N - tile.count) run = N - tile.count;
            at += run;
            if (position < low) {
                run -= low - position;
                position = low;
            }
            if (run > high - position) run = high - position;
            if (run <= 0) continue;
            add(position, run, tile);
        }
        if (entries && unit == 1)  // scattered in the table: prefetched too
            for (int i = 0; i < N && at + i < end; i++)
                __builtin_prefetch(table + entry_of(entries[at + i]));
        for (int t = tile.count; tile.count && t < N; t++) {
            tile.key[t] = tile.key[0];  // read, but ignored
            tile.value[t] = tile.value[0];
        }
        return at;
    }

    // Sizes are mostly powers of two, and dividing takes longer than all else here.
    int64_t entry_of(int64_t position) const {
        const bool power = (page_size & (page_size - 1)) == 0;
        return power ? position >> __builtin_ctzll(page_size) : position / page_size;
    }

    template <int N>
    void add(int64_t position, int64_t run, Tile<T, N>& tile) const {
        const int64_t entry = entry_of(position), place = position - entry * page_size;
        const int64_t page = table[entry];
        const T* key = keys + page * key_pages.page_stride + place * key_pages.token_stride;
        const T* value = values + page * value_pages.page_stride + place * value_pages.token_stride;
        if (low_rank)  // with tokens only, so that the run is one
            if (const T* row = low_rank->row(position, page, place)) {
                tile.rebuilt |= 1u << tile.count;
                key = row;
            }
        for (int64_t i = 0; i < run; i++) {
            tile.key[tile.count] = key + i * key_pages.token_stride;
            tile.value[tile.count] = value + i * value_pages.token_stride;
            tile.position[tile.count++] = position + i;
        }
    }
};

// The tiles of a range in order, each with a later one to prefetch: the next one, or the one after
// it where tiles are so small that memory latency exceeds the work. Several KV heads that read the
// same tokens take turns, tile by tile: a page holds one head after another, so that memory is read
// in its order.
template <class T, int N = kTile>
class Tiles {
  public:
    // `source`: of the first of `heads` KV heads. `numbers`: of a token, its key and its value.
    Tiles(const Source<T>& source, int heads, int64_t begin, int64_t end, int64_t numbers)
        : source_(source), heads_(heads), end_(end), at_(begin) {
        const bool tokens = source.entries && source.unit == 1;  // no gain there, on AVX2 a loss
        const int64_t bytes = numbers * sizeof(T);
        far_ = tokens || bytes > kSmall || N * bytes > kSmallTile ? 1 : 2;
        for (int i = 0; i <= far_; i++) fill(i);
    }
    bool left() const { return tiles_[now_].count > 0; }
    const Tile<T, N>& tile() const { return tiles_[now_]; }
    const Tile<T, N>* ahead() const {
        const Tile<T, N>& later = tiles_[(now_ + far_) % (far_ + 1)];
        return later.count ? &later : nullptr;
    }
    void advance() {
        fill(now_);
        now_ = now_ == far_ ? 0 : now_ + 1;
    }

  private:
    // Bytes of a token, of a tile; measured (benchmarks/LOG.md).
    static constexpr int64_t kSmall = 256, kSmallTile = 8192;

    // The tile after that of the slot before.
    void fill(int slot) {
        Tile<T, N>& tile = tiles_[slot];
        if (next_head_ == 0) {
            at_ = source_.next(at_, end_, tile);
        } else {
            const Tile<T, N>& before = tiles_[slot ? slot - 1 : far_];
            tile.count = before.count;
            for (int t = 0; t < N && tile.count; t++) {
                tile.key[t] = before.key[t] + source_.key_pages.head_stride;
                tile.value[t] = before.value[t] + source_.value_pages.head_stride;
                tile.position[t] = before.position[t];
            }
        }
        tile.head = next_head_;
        next_head_ = next_head_ + 1 == heads_ ? 0 : next_head_ + 1;
    }

    const Source<T> source_;
    const int heads_;
    const int64_t end_;
    int64_t at_;
    int far_, now_ = 0, next_head_ = 0;
    Tile<T, N> tiles_[3];
};
