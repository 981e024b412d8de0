// Sixteen tokens at a time: scores, online softmax (Milakov and Gimelshein, 2018), weighted values.
// Rows are query heads of one KV head; a block of rows keeps its sums in registers, so that a key or
// value is loaded once for all of them.

constexpr int kTile = 16;

static inline int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// N tokens of a sequence, or fewer; the pointers of missing ones are valid, too.
template <class T, int N = kTile>
struct Tile {
    static constexpr int size = N;
    int count = 0;
    int head = 0;  // which of the KV heads that read the tokens together
    const T* key[N];
    const T* value[N];
    int64_t position[N];
    uint32_t rebuilt = 0;  // bit mask of tokens whose `key` is a row of coefficients
};

// The scales of a tile's keys and values of 8 bits. A tile has 64 tokens at most.
struct Scales {
    alignas(64) float key[64], value[64];
};

// The scale behind a row of D numbers.
template <class T>
static inline float scale_of(const T* row, int64_t D) {
    float scale;
    memcpy(&scale, row + D, sizeof scale);
    return scale * Scaled<T>::step;
}
template <class T, int N>
static inline void read_scales(const Tile<T, N>& tile, int64_t D, int64_t Dv, bool values,
                               Scales& scales) {
    for (int t = 0; t < N; t++) scales.key[t] = scale_of(tile.key[t], D);
    for (int t = 0; values && t < N; t++) scales.value[t] = scale_of(tile.value[t], Dv);
}
// Multiplies the numbers of H rows by those of the N tokens.
template <int H, int N = kTile>
static inline void scale_rows(float* numbers, const float* by) {
    for (int t = 0; t < N; t += Vector::width) {
        const Vector scale = load(by + t);
        for (int h = 0; h < H; h++) {
            float* row = numbers + h * N + t;
            store(row, load(row) * scale);
        }
    }
}

// Prefetches a cache line, into L2 where that supports more outstanding misses than L1. Always
// inlined: GCC drops calls that do nothing else.
[[gnu::always_inline]] static inline void ask(const void* p, bool second = ask_second_level) {
    if (second) __builtin_prefetch(p, 0, 2);
    else __builtin_prefetch(p);
}

// Prefetches rows that are needed soon, a cache line at a time. A core supports a few dozen
// outstanding misses, so prefetches are spread over the work on earlier rows (benchmarks/LOG.md:
// twice as fast as all at once).
template <class T>
struct Ahead {
    static constexpr int line = 64 / sizeof(T);
    const T* const* rows;  // or null: no prefetch
    const int64_t size;  // numbers of a row, its scale included
    const bool contiguous;
    bool whole;
    const bool second = ask_second_level;

    Ahead(const T* const* rows, int64_t size)
        : rows(rows), size(size),
          contiguous(rows && rows[kTile - 1] - rows[0] == (kTile - 1) * size), whole(contiguous) {}

    // At column d, as many lines as N rows: one of each from t on, or in memory order for a
    // contiguous tile.
    template <int N>
    [[gnu::always_inline]] void ask_rows(int t, int64_t d) const {
        if (!rows || d % line) return;
        for (int n = 0; n < N; n++)
            ask(whole ? rows[t] + d * N + n * line : rows[t + n] + d, second);
        for (int n = 0; n < N && d == 0; n++) ask_end(t + n);
    }
    // At column d, as many lines as N vectors of row t, as above.
    template <int N>
    [[gnu::always_inline]] void ask_columns(int t, int64_t d) const {
        if (!rows || d % line) return;
        constexpr int numbers = N * Vector::width;
        const T* from = whole ? rows[0] + d * kTile + t * numbers : rows[t] + d;
        for (int i = 0; i < numbers; i += line) ask(from + i, second);
        if (d == 0) ask_end(t);
    }
    // The line of the scale behind row t: one more than its numbers take, for each row or, of a
    // contiguous tile, for the last one.
    [[gnu::always_inline]] void ask_end(int t) const {
        if (Scaled<T>::bytes && (!contiguous || t == 0))
            ask(rows[contiguous ? kTile - 1 : t] + size - 1, second);
    }
    // At column d, as many lines as all rows.
    [[gnu::always_inline]] void ask_tile(int64_t d) const {
        if (!rows || d % line) return;
        if (contiguous) {
            const T* from = rows[0] + d * kTile;
            for (int n = 0; n < kTile; n++) ask(from + n * line, second);
            if (d == 0) ask_end(0);
        } else {
            for (int n = 0; n < kTile; n++) ask(rows[n] + d, second);
            for (int n = 0; n < kTile && d == 0; n++) ask_end(n);
        }
    }
};

// exp(x) to 2 units in the last place; 0 below -87, NaN for NaN. Cephes' expf polynomial.
static inline Vector exponential(Vector x) {
    const Vector y = min(broadcast(88.0f), x);
    const Vector n = nearest(y * broadcast(1.44269504f));
    Vector r = fma(n, broadcast(-0.693359375f), y);  // ln 2 in two parts
    r = fma(n, broadcast(2.12194440e-4f), r);
    constexpr float c[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                           4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    Vector p = broadcast(c[0]);
    for (int i = 1; i < 6; i++) p = fma(p, r, broadcast(c[i]));
    p = fma(p * r, r, r) + broadcast(1.0f);
    return scaled(p, n, x, -87.0f);
}

// Scores [H][kTile] of H query rows and the keys of a tile; missing keys must point to valid
// memory. `ahead`: the keys that come next, or null.
template <class T, int H>
static inline void score_rows(const typename Product<T>::Query* query, int64_t stride,
                              const T* const* keys, int64_t D, float* scores,
                              const T* const* ahead) {
    using P = Product<T>;
    // N keys at a time fill a vector with sums, or with five rows two.
    constexpr int W = Vector::width, N = H == 5 ? 2 : W / H, vectors = (N * H + W - 1) / W;
    const int64_t whole = D / P::step * P::step;
    const int rest = static_cast<int>(D - whole);
    const Ahead<T> soon(ahead, D + Scaled<T>::bytes);
    for (int t = 0; t < kTile; t += N) {
        Vector sum[vectors * W];
        for (int i = 0; i < vectors * W; i++) sum[i] = broadcast(0.0f);
        const auto add = [&](int64_t d, const typename P::Key (&k)[N]) {
            for (int h = 0; h < H; h++) {
                const auto q = P::numbers(query + h * stride + d);
                for (int j = 0; j < N; j++) sum[h * N + j] = P::add(sum[h * N + j], q, k[j]);
            }
        };
        for (int64_t d = 0; d < whole; d += P::step) {
            typename P::Key k[N];
            soon.template ask_rows<N>(t, d);
            for (int j = 0; j < N; j++) k[j] = P::key(keys[t + j] + d);
            add(d, k);
        }
        if (rest) {
            typename P::Key k[N];
            soon.template ask_rows<N>(t, whole);
            for (int j = 0; j < N; j++) k[j] = P::key(keys[t + j] + whole, rest);
            add(whole, k);
        }
        float all[vectors * W];
        for (int i = 0; i < vectors * W; i += W) store(all + i, sums(sum + i));
        for (int h = 0; h < H; h++)
            for (int j = 0; j < N; j++) scores[h * kTile + t + j] = all[h * N + j];
    }
}

// Scores of any number of rows, as above.
template <class T>
static inline void score_all(const typename Product<T>::Query* query, int64_t stride, int64_t rows,
                             const T* const* keys, int64_t D, float* scores,
                             const T* const* ahead) {
    int64_t row = 0;
    if constexpr (Vector::width == 8)
        if (rows == 5) return score_rows<T, 5>(query, stride, keys, D, scores, ahead);
    for (; row + 4 <= rows; row += 4)
        score_rows<T, 4>(query + row * stride, stride, keys, D, scores + row * kTile,
                         row ? nullptr : ahead);
    for (; row + 2 <= rows; row += 2)
        score_rows<T, 2>(query + row * stride, stride, keys, D, scores + row * kTile,
                         row ? nullptr : ahead);
    for (; row < rows; row++)
        score_rows<T, 1>(query + row * stride, stride, keys, D, scores + row * kTile,
                         row ? nullptr : ahead);
}

// Adds the values of `count` tokens, weighted, to N vectors of H rows of `out`; of the last vector
// there are `last` numbers.
template <class T, int H, int N>
static inline void mix_columns(const float* weights, const T* const* values, int count, int64_t d,
                               float* out, int64_t stride, const Ahead<T>& soon,
                               int last = Vector::width) {
    constexpr int W = Vector::width;
    Vector sum[H][N];
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) sum[h][i] = load(out + h * stride + d + i * W);
    for (int t = 0; t < count; t++) {
        Vector v[N];
        soon.template ask_columns<N>(t, d);
        for (int i = 0; i < N; i++) {
            const T* value = values[t] + d + i * W;
            v[i] = i < N - 1 || last == W ? load(value) : load(value, last);
        }
        for (int h = 0; h < H; h++) {
            const Vector w = broadcast(weights[h * kTile + t]);
            for (int i = 0; i < N; i++) sum[h][i] = fma(w, v[i], sum[h][i]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) store(out + h * stride + d + i * W, sum[h][i]);
}

// All columns of H rows of `out` (padded to whole vectors), as above.
template <class T, int H>
static inline void mix_rows(const float* weights, const T* const* values, int count, int64_t Dv,
                            float* out, int64_t stride, const T* const* ahead) {
    constexpr int W = Vector::width, N = W / 4;  // vectors at a time
    Ahead<T> soon(ahead, Dv + Scaled<T>::bytes);
    // Memory order only with equal passes of a few lines, otherwise lines are missed.
    if (Dv % (N * W) != 0 || N * W < 2 * soon.line) soon.whole = false;
    int64_t d = 0;
    for (; d + N * W <= Dv; d += N * W)
        mix_columns<T, H, N>(weights, values, count, d, out, stride, soon);
    for (; d + 2 * W <= Dv; d += 2 * W)
        mix_columns<T, H, 2>(weights, values, count, d, out, stride, soon);
    for (; d + W <= Dv; d += W)
        mix_columns<T, H, 1>(weights, values, count, d, out, stride, soon);
    if (d < Dv)
        mix_columns<T, H, 1>(weights, values, count, d, out, stride, soon,
                             static_cast<int>(Dv - d));
}

// A row's running state: largest score, sum of weights relative to it, weighted values.
struct Rows {
    int64_t count, stride;  // stride of `out`: Dv padded to whole vectors
    float *largest, *weight, *out;  // `weight`: a vector of parts for each row

    // `number` of these rows, from `first` on.
    Rows some(int64_t first, int64_t number) const {
        return {number, stride, largest + first, weight + first * Vector::width,
                out ? out + first * stride : nullptr};
    }
    void clear() const {
        for (int64_t h = 0; h < count; h++) largest[h] = -INFINITY;
        for (int64_t i = 0; i < count * Vector::width; i++) weight[i] = 0.0f;
        for (int64_t i = 0; i < count * stride; i++) out[i] = 0.0f;
    }
};

static inline Vector capped(Vector s, float softcap) {
    // tanh(x) = 1 - 2 / (exp(2x) + 1)
    const Vector e = exponential(s * broadcast(2.0f / softcap));
    const Vector t = broadcast(1.0f) - broadcast(2.0f) / (e + broadcast(1.0f));
    return t * broadcast(softcap);
}

// A row's new largest score; rescales its running state. Rare, and so kept out of line.
[[gnu::noinline]] static void raise(const Rows& rows, int64_t row, float top) {
    constexpr int W = Vector::width;
    const Vector shrink = broadcast(expf(rows.largest[row] - top));
    rows.largest[row] = top;
    store(rows.weight + row * W, load(rows.weight + row * W) * shrink);
    float* out = rows.out + row * rows.stride;
    for (int64_t d = 0; d < rows.stride; d += W) store(out + d, load(out + d) * shrink);
}

// Turns the scores of one row into weights, in place, and updates its running state.
template <int N = kTile>
[[gnu::always_inline]] static inline void weigh(float* scores, const Rows& rows, int64_t row) {
    constexpr int W = Vector::width;
    Vector high = load(scores);
    for (int t = W; t < N; t += W) high = max(high, load(scores + t));
    // Rare after the first few tiles: finding the largest score takes longer than everything else.
    if (any_above(high, broadcast(rows.largest[row]))) raise(rows, row, largest(high));
    const float now = rows.largest[row];
    const Vector origin = broadcast(now == -INFINITY ? 0.0f : now);
    Vector sum = load(rows.weight + row * W);
    for (int t = 0; t < N; t += W) {
        const Vector w = exponential(load(scores + t) - origin);
        store(scores + t, w);
        sum = sum + w;
    }
    store(rows.weight + row * W, sum);
}

// Scores of H rows, scaled and capped; tokens that a row must not see score -infinity. A row sees
// positions above `after[row]` and up to `until[row]`; null: all.
template <class T, int H, int N>
static inline void finish_scores(float* scores, const Tile<T, N>& tile, const Scoring& how,
                                 const int64_t* after, const int64_t* until) {
    constexpr int W = Vector::width;
    for (int i = 0; i < H * N; i += W) {
        Vector s = load(scores + i) * broadcast(how.scale);
        if (how.softcap != 0.0f) s = capped(s, how.softcap);
        store(scores + i, s);
    }
    for (int h = 0; h < H; h++) {
        for (int t = tile.count; t < N; t++) scores[h * N + t] = -INFINITY;
        if (until)
            for (int t = 0; t < tile.count; t++)
                if (tile.position[t] > until[h] || tile.position[t] <= after[h])
                    scores[h * N + t] = -INFINITY;
    }
}

// One block of H rows over one tile. `raw`, if any, takes the scores: [H] rows of `raw_stride`.
// `ahead`: the tile that comes next, or null. `scales`: of a tile of 8-bit numbers, else null.
template <class T, int H>
static inline void attend_rows(const typename Product<T>::Query* query, int64_t query_stride,
                               const Tile<T>& tile, int64_t D, int64_t Dv, const Scoring& how,
                               const Rows& rows, int64_t row, float* raw, int64_t raw_stride,
                               const int64_t* after, const int64_t* until, const Tile<T>* ahead,
                               const Scales* scales) {
    alignas(64) float scores[H * kTile];
    score_rows<T, H>(query + row * query_stride, query_stride, tile.key, D, scores,
                     ahead ? ahead->key : nullptr);
    if (scales) scale_rows<H>(scores, scales->key);
    finish_scores<T, H>(scores, tile, how, after ? after + row : nullptr,
                        until ? until + row : nullptr);
    if (raw)
        for (int h = 0; h < H; h++)
            memcpy(raw + (row + h) * raw_stride, scores + h * kTile, tile.count * sizeof(float));
    if (!rows.out) return;
    for (int h = 0; h < H; h++) weigh(scores + h * kTile, rows, row + h);
    if (scales) scale_rows<H>(scores, scales->value);
    mix_rows<T, H>(scores, tile.value, tile.count, Dv, rows.out + row * rows.stride, rows.stride,
                   ahead ? ahead->value : nullptr);
}

template <class T>
static inline void attend_tile(const typename Product<T>::Query* query, int64_t query_stride,
                               const Tile<T>& tile, int64_t D, int64_t Dv, const Scoring& how,
                               const Rows& rows, float* raw, int64_t raw_stride,
                               const int64_t* after, const int64_t* until, const Tile<T>* ahead,
                               const Scales* scales = nullptr) {
    int64_t row = 0;
    for (; row + 4 <= rows.count; row += 4)
        attend_rows<T, 4>(query, query_stride, tile, D, Dv, how, rows, row, raw, raw_stride, after,
                          until, row ? nullptr : ahead, scales);
    for (; row + 2 <= rows.count; row += 2)
        attend_rows<T, 2>(query, query_stride, tile, D, Dv, how, rows, row, raw, raw_stride, after,
                          until, row ? nullptr : ahead, scales);
    for (; row < rows.count; row++)
        attend_rows<T, 1>(query, query_stride, tile, D, Dv, how, rows, row, raw, raw_stride, after,
                          until, row ? nullptr : ahead, scales);
}

// Queries in the form of their products with keys of K: padded with zeros to whole steps. `low`,
// `high`: numbers are clamped to this range.
template <class T, class K = T>
static inline void keep_query(const T* from, int64_t D, typename Product<K>::Query* to,
                              float low = -INFINITY, float high = INFINITY) {
    constexpr int W = Vector::width;
    const int64_t padded = (D + Product<K>::step - 1) / Product<K>::step * Product<K>::step;
    memset(to, 0, padded * sizeof *to);
    for (int64_t d = 0; d < D; d += W) {
        const int n = static_cast<int>(D - d < W ? D - d : W);
        const Vector q = n == W ? load(from + d) : load(from + d, n);
        store(to + d, min(broadcast(high), max(broadcast(low), q)), n);
    }
}

// How attention keeps a row's query, and how many tokens it reads at a time. A processor path may
// have another way for some numbers.
template <class K>
struct QueryForm {
    using Number = typename Product<K>::Query;
    static constexpr int tokens = kTile;
    static constexpr bool reads_scales = false;  // `attend` takes them
    struct Unit {};  // what a thread holds while it calls `attend`
    static int64_t size(int64_t D) { return rounded_up(D, Product<K>::step); }
    template <class T>
    static void keep(const T* from, int64_t D, Number* to) {
        keep_query<T, K>(from, D, to);
    }
    // As `attend_tile`.
    template <class... Arguments>
    static void attend(const Arguments&... all) {
        attend_tile(all...);
    }
};
