// Sixteen tokens at a time: scores, online softmax (Milakov and Gimelshein, 2018), weighted values.
// Rows are query heads of one KV head; a block of rows keeps its sums in registers, so that a key or
// value is loaded once for all of them.

constexpr int kTile = 16;

template <class T>
struct Tile {
    int count = 0;
    const T* key[kTile];
    const T* value[kTile];
    int64_t position[kTile];
};

// Asks memory for the line at `d` of a row that is needed soon; once per line. A core waits for a
// few dozen lines at a time, so that this is spread over the work on the rows before
// (benchmarks/LOG.md: twice as fast as asking for all of them at once).
template <class T>
static inline void ask(const T* row, int64_t d) {
    if (d * sizeof(T) % 64 == 0) __builtin_prefetch(row + d);
}

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

// Scores [H][kTile] of H query rows and the keys of a tile; missing keys must point somewhere valid.
// `ahead`: the keys that come next, or null.
template <class T, int H>
static inline void score_rows(const typename Product<T>::Query* query, int64_t stride,
                              const T* const* keys, int64_t D, float* scores,
                              const T* const* ahead) {
    using P = Product<T>;
    constexpr int W = Vector::width, N = W / H;  // N keys at a time fill a vector with sums
    const int64_t whole = D / P::step * P::step;
    const int rest = static_cast<int>(D - whole);
    for (int t = 0; t < kTile; t += N) {
        Vector sum[W];
        for (int i = 0; i < W; i++) sum[i] = broadcast(0.0f);
        for (int64_t d = 0; d < whole; d += P::step) {
            typename P::Key k[N];
            for (int j = 0; ahead && j < N; j++) ask(ahead[t + j], d);
            for (int j = 0; j < N; j++) k[j] = P::key(keys[t + j] + d);
            for (int h = 0; h < H; h++)
                for (int j = 0; j < N; j++)
                    sum[h * N + j] = P::add(sum[h * N + j], query + h * stride + d, k[j]);
        }
        if (rest) {
            typename P::Key k[N];
            for (int j = 0; ahead && j < N; j++) ask(ahead[t + j], whole);
            for (int j = 0; j < N; j++) k[j] = P::key(keys[t + j] + whole, rest);
            for (int h = 0; h < H; h++)
                for (int j = 0; j < N; j++)
                    sum[h * N + j] = P::add(sum[h * N + j], query + h * stride + whole, k[j]);
        }
        float all[W];
        store(all, sums(sum));
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

// Adds the values of `count` tokens, weighted, to H rows of `out` (padded to whole vectors).
template <class T, int H>
static inline void mix_rows(const float* weights, const T* const* values, int count, int64_t Dv,
                            float* out, int64_t stride, const T* const* ahead) {
    constexpr int W = Vector::width, N = W / 4;  // vectors at a time
    int64_t d = 0;
    for (; d + N * W <= Dv; d += N * W) {
        Vector sum[H][N];
        for (int h = 0; h < H; h++)
            for (int i = 0; i < N; i++) sum[h][i] = load(out + h * stride + d + i * W);
        for (int t = 0; t < count; t++) {
            Vector v[N];
            for (int i = 0; ahead && i < N; i++) ask(ahead[t], d + i * W);
            for (int i = 0; i < N; i++) v[i] = load(values[t] + d + i * W);
            for (int h = 0; h < H; h++) {
                const Vector w = broadcast(weights[h * kTile + t]);
                for (int i = 0; i < N; i++) sum[h][i] = fma(w, v[i], sum[h][i]);
            }
        }
        for (int h = 0; h < H; h++)
            for (int i = 0; i < N; i++) store(out + h * stride + d + i * W, sum[h][i]);
    }
    for (; d < Dv; d += W) {
        const int n = static_cast<int>(Dv - d < W ? Dv - d : W);
        Vector sum[H];
        for (int h = 0; h < H; h++) sum[h] = load(out + h * stride + d);
        for (int t = 0; t < count; t++) {
            if (ahead) ask(ahead[t], d);
            const Vector v = n == W ? load(values[t] + d) : load(values[t] + d, n);
            for (int h = 0; h < H; h++)
                sum[h] = fma(broadcast(weights[h * kTile + t]), v, sum[h]);
        }
        for (int h = 0; h < H; h++) store(out + h * stride + d, sum[h]);
    }
}

// What a row has seen so far: largest score, sum of weights relative to it, weighted values.
struct Rows {
    int64_t count, stride;  // stride of `out`: Dv padded to whole vectors
    float *largest, *weight, *out;

    void clear() const {
        for (int64_t h = 0; h < count; h++) largest[h] = -INFINITY, weight[h] = 0.0f;
        for (int64_t i = 0; i < count * stride; i++) out[i] = 0.0f;
    }
};

static inline Vector capped(Vector s, float softcap) {
    // tanh(x) = 1 - 2 / (exp(2x) + 1)
    const Vector e = exponential(s * broadcast(2.0f / softcap));
    const Vector t = broadcast(1.0f) - broadcast(2.0f) / (e + broadcast(1.0f));
    return t * broadcast(softcap);
}

// Turns the scores of one row into weights, in place, and brings the row up to date.
static inline void weigh(float* scores, const Rows& rows, int64_t row) {
    constexpr int W = Vector::width;
    Vector high = load(scores);
    for (int t = W; t < kTile; t += W) high = max(high, load(scores + t));
    const float top = largest(high), before = rows.largest[row];
    if (top > before) {
        rows.largest[row] = top;
        if (rows.weight[row] != 0.0f) {
            const float shrink = expf(before - top);
            rows.weight[row] *= shrink;
            float* out = rows.out + row * rows.stride;
            for (int64_t d = 0; d < rows.stride; d += W)
                store(out + d, load(out + d) * broadcast(shrink));
        }
    }
    const float now = rows.largest[row];
    const Vector origin = broadcast(now == -INFINITY ? 0.0f : now);
    Vector sum = broadcast(0.0f);
    for (int t = 0; t < kTile; t += W) {
        const Vector w = exponential(load(scores + t) - origin);
        store(scores + t, w);
        sum = sum + w;
    }
    rows.weight[row] += total(sum);
}

// Scores of H rows, scaled and capped; tokens that a row must not see score -infinity. A row sees
// positions above `after[row]` and up to `until[row]`; null: all.
template <class T, int H>
static inline void finish_scores(float* scores, const Tile<T>& tile, const Scoring& how,
                                 const int64_t* after, const int64_t* until) {
    constexpr int W = Vector::width;
    for (int i = 0; i < H * kTile; i += W) {
        Vector s = load(scores + i) * broadcast(how.scale);
        if (how.softcap != 0.0f) s = capped(s, how.softcap);
        store(scores + i, s);
    }
    for (int h = 0; h < H; h++) {
        for (int t = tile.count; t < kTile; t++) scores[h * kTile + t] = -INFINITY;
        if (until)
            for (int t = 0; t < tile.count; t++)
                if (tile.position[t] > until[h] || tile.position[t] <= after[h])
                    scores[h * kTile + t] = -INFINITY;
    }
}

// One block of H rows over one tile. `raw`, if any, takes the scores: [H] rows of `raw_stride`.
// `ahead`: the tile that comes next, or null.
template <class T, int H>
static inline void attend_rows(const typename Product<T>::Query* query, int64_t query_stride,
                               const Tile<T>& tile, int64_t D, int64_t Dv, const Scoring& how,
                               const Rows& rows, int64_t row, float* raw, int64_t raw_stride,
                               const int64_t* after, const int64_t* until, const Tile<T>* ahead) {
    alignas(64) float scores[H * kTile];
    score_rows<T, H>(query + row * query_stride, query_stride, tile.key, D, scores,
                     ahead ? ahead->key : nullptr);
    finish_scores<T, H>(scores, tile, how, after ? after + row : nullptr,
                        until ? until + row : nullptr);
    if (raw)
        for (int h = 0; h < H; h++)
            memcpy(raw + (row + h) * raw_stride, scores + h * kTile, tile.count * sizeof(float));
    if (!rows.out) return;
    for (int h = 0; h < H; h++) weigh(scores + h * kTile, rows, row + h);
    mix_rows<T, H>(scores, tile.value, tile.count, Dv, rows.out + row * rows.stride, rows.stride,
                   ahead ? ahead->value : nullptr);
}

template <class T>
static inline void attend_tile(const typename Product<T>::Query* query, int64_t query_stride,
                               const Tile<T>& tile, int64_t D, int64_t Dv, const Scoring& how,
                               const Rows& rows, float* raw, int64_t raw_stride,
                               const int64_t* after, const int64_t* until, const Tile<T>* ahead) {
    int64_t row = 0;
    for (; row + 4 <= rows.count; row += 4)
        attend_rows<T, 4>(query, query_stride, tile, D, Dv, how, rows, row, raw, raw_stride, after,
                          until, row ? nullptr : ahead);
    for (; row + 2 <= rows.count; row += 2)
        attend_rows<T, 2>(query, query_stride, tile, D, Dv, how, rows, row, raw, raw_stride, after,
                          until, row ? nullptr : ahead);
    for (; row < rows.count; row++)
        attend_rows<T, 1>(query, query_stride, tile, D, Dv, how, rows, row, raw, raw_stride, after,
                          until, row ? nullptr : ahead);
}

// Queries as the products want them: padded with zeros to whole steps. `low`, `high`: its numbers are
// kept within.
template <class T>
static inline void keep_query(const T* from, int64_t D, typename Product<T>::Query* to,
                              float low = -INFINITY, float high = INFINITY) {
    constexpr int W = Vector::width;
    const int64_t padded = (D + Product<T>::step - 1) / Product<T>::step * Product<T>::step;
    memset(to, 0, padded * sizeof *to);
    for (int64_t d = 0; d < D; d += W) {
        const int n = static_cast<int>(D - d < W ? D - d : W);
        const Vector q = n == W ? load(from + d) : load(from + d, n);
        store(to + d, min(broadcast(high), max(broadcast(low), q)), n);
    }
}
