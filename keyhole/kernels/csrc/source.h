// Which tokens a sequence reads, handed out sixteen at a time. Tokens are counted through what is
// selected ("reading order"), so that any stretch of it can be one thread's work.

template <class T>
struct Source {
    const T *keys, *values;
    Pages key_pages, value_pages;
    const int32_t* table;    // of the sequence
    const int32_t* entries;  // selected tokens or pages, or null: everything
    int64_t unit, page_size;
    int64_t low, high;  // positions that are seen

    // The next tile from `at`; gives the place after it. Asks memory for what it hands out.
    int64_t next(int64_t at, int64_t end, int64_t D, int64_t Dv, Tile<T>& tile) const {
        tile.count = 0;
        while (tile.count < kTile && at < end) {
            int64_t position = at, run = 1;
            if (entries && unit == 1) {
                position = entries[at];
            } else if (entries) {
                const int64_t entry = at / unit, place = at - entry * unit;
                position = entries[entry] * unit + place;
                run = unit - place;
            } else {
                run = page_size - position % page_size;
            }
            if (run > end - at) run = end - at;
            if (run > kTile - tile.count) run = kTile - tile.count;
            at += run;
            if (position < low) {
                run -= low - position;
                position = low;
            }
            if (run > high - position) run = high - position;
            if (run <= 0) continue;
            add(position, run, tile);
        }
        for (int t = 0; t < tile.count; t++) {
            for (int64_t d = 0; d < D; d += 64 / sizeof(T)) __builtin_prefetch(tile.key[t] + d);
            if (Dv)
                for (int64_t d = 0; d < Dv; d += 64 / sizeof(T))
                    __builtin_prefetch(tile.value[t] + d);
        }
        for (int t = tile.count; tile.count && t < kTile; t++) {
            tile.key[t] = tile.key[0];  // read, but not counted
            tile.value[t] = tile.value[0];
        }
        return at;
    }

    void add(int64_t position, int64_t run, Tile<T>& tile) const {
        const int64_t entry = position / page_size, place = position - entry * page_size;
        const int64_t page = table[entry];
        const T* key = keys + page * key_pages.page_stride + place * key_pages.token_stride;
        const T* value = values + page * value_pages.page_stride + place * value_pages.token_stride;
        for (int64_t i = 0; i < run; i++) {
            tile.key[tile.count] = key + i * key_pages.token_stride;
            tile.value[tile.count] = value + i * value_pages.token_stride;
            tile.position[tile.count++] = position + i;
        }
    }
};
