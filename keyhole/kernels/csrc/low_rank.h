// Low-rank keys (ShadowKV), reconstructed as decode attention reads them: a tile's rows of
// coefficients times the basis, with RoPE re-applied.

template <class T>
class LowRankKeys {
  public:
    // Floats that a thread needs.
    static int64_t room(const Attend& a) {
        return (a.low_rank->R + kRows) * width(a) + kRows * rank(a) + kTile * width(a);
    }

    // The keys of one sequence and KV head.
    LowRankKeys(const Attend& a, int64_t b, int64_t h, float* room)
        : r_(*a.low_rank), D_(a.D), width_(width(a)), rank_(rank(a)), page_size_(a.page_size),
          first_(r_.first[b]), taken_(r_.taken + (b * a.Hkv + h) * r_.k), basis_(room),
          rows_(basis_ + r_.R * width_), found_(rows_ + kRows * rank_),
          keys_(reinterpret_cast<T*>(found_ + kRows * width_)) {
        for (int64_t r = 0; r < r_.R; r++)
            widen(static_cast<const T*>(r_.basis) + ((b * r_.R + r) * a.Hkv + h) * D_, D_,
                  basis_ + r * width_, width_);
        memset(rows_, 0, kRows * rank_ * sizeof(float));
    }

    // The coefficients of a token's key; null: its full key is read, as for tokens from `first` on
    // and for chunks in `taken`.
    const T* row(int64_t position, int64_t page, int64_t place) {
        if (position >= first_) return nullptr;
        const int64_t chunk = position / r_.chunk;
        if (chunk != chunk_) {
            chunk_ = chunk;
            is_taken_ = false;
            for (int64_t i = 0; i < r_.k; i++) is_taken_ |= taken_[i] == chunk;
        }
        if (is_taken_) return nullptr;
        return static_cast<const T*>(r_.coefficients) + (page * page_size_ + place) * r_.R;
    }

    // The tile with reconstructed keys, which are valid until the next tile.
    Tile<T> rebuilt(Tile<T> tile) {
        int waiting[kRows], number = 0;
        for (int t = 0; t < tile.count; t++) {
            if (tile.rebuilt >> t & 1) {
                widen(tile.key[t], r_.R, rows_ + number * rank_, rank_);
                waiting[number++] = t;
            }
            if (number < kRows && (t + 1 < tile.count || !number)) continue;
            multiply();
            for (int i = 0; i < number; i++) {
                T* key = keys_ + waiting[i] * D_;
                turn(found_ + i * width_, tile.position[waiting[i]], key);
                tile.key[waiting[i]] = key;
            }
            number = 0;
        }
        for (int t = tile.count; t < kTile; t++) tile.key[t] = tile.key[0];
        return tile;
    }

  private:
    static constexpr int kRows = 4, kColumns = 2 * Vector::width;
    static int64_t width(const Attend& a) { return rounded_up(a.D, kColumns); }
    static int64_t rank(const Attend& a) { return rounded_up(a.low_rank->R, Vector::width); }

    // Four rows [4, R] times the basis [R, D].
    void multiply() const {
        for (int64_t d = 0; d < width_; d += kColumns) {
            Vector low[kRows], high[kRows];
            for (int t = 0; t < kRows; t++) low[t] = high[t] = broadcast(0.0f);
            for (int64_t r = 0; r < r_.R; r++) {
                const Vector one = load(basis_ + r * width_ + d);
                const Vector two = load(basis_ + r * width_ + d + Vector::width);
                for (int t = 0; t < kRows; t++) {
                    const Vector c = broadcast(rows_[t * rank_ + r]);
                    low[t] = fma(c, one, low[t]);
                    high[t] = fma(c, two, high[t]);
                }
            }
            for (int t = 0; t < kRows; t++) {
                store(found_ + t * width_ + d, low[t]);
                store(found_ + t * width_ + d + Vector::width, high[t]);
            }
        }
    }

    // Rotates a key before RoPE to its position and writes it.
    void turn(float* key, int64_t position, T* out) const {
        const float* cos = r_.angles + position * 3 * r_.pairs;
        const float* sin = cos + 2 * r_.pairs;
        float *one = key + r_.turned_from, *two = one + r_.pairs;
        for (int64_t i = 0; i < r_.pairs; i += Vector::width) {
            const int64_t rest = r_.pairs - i;
            const Vector c = part(cos + i, rest), s = part(sin + i, rest);
            const Vector x = part(one + i, rest), y = part(two + i, rest);
            keep(one + i, x * c - y * s, rest);
            keep(two + i, y * c + x * s, rest);
        }
        for (int64_t d = 0; d < D_; d += Vector::width) keep(out + d, load(key + d), D_ - d);
    }

    static void widen(const T* from, int64_t n, float* to, int64_t size) {
        for (int64_t i = 0; i < size; i += Vector::width) store(to + i, part(from + i, n - i));
    }

    // A vector of `rest` valid numbers, which may be 0 or exceed its width.
    template <class Number>
    static Vector part(const Number* p, int64_t rest) {
        if (rest >= Vector::width) return load(p);
        return rest > 0 ? load(p, static_cast<int>(rest)) : broadcast(0.0f);
    }
    template <class Number>
    static void keep(Number* p, Vector x, int64_t rest) {
        if (rest >= Vector::width) store(p, x);
        else store(p, x, static_cast<int>(rest));
    }

    const LowRank& r_;
    const int64_t D_, width_, rank_, page_size_, first_;
    const int32_t* taken_;
    float *basis_, *rows_, *found_;  // [R, D], [4, R] and [4, D], padded
    T* keys_;                        // [16, D]
    int64_t chunk_ = -1;             // the last chunk looked up, and whether it is taken
    bool is_taken_ = false;
};
