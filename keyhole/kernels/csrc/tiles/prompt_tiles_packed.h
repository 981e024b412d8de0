// How a block of a prompt's rows reads a tile: packed once for all rows, in float32 and in reading
// order. Keys are stored column by column, so that scores need no sum over lanes and both products
// of attention are the same small loop.

// N vectors of H rows of `out`: a [H][n] times b [n][N vectors], optionally accumulated.
template <int H, int N, bool adds>
static inline void multiply_columns(const float* a, int64_t a_stride, const float* b,
                                    int64_t b_stride, int64_t n, float* out, int64_t out_stride) {
    constexpr int W = Vector::width;
    Vector sum[H][N];
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++)
            sum[h][i] = adds ? load(out + h * out_stride + i * W) : broadcast(0.0f);
#pragma GCC unroll 4
    for (int64_t t = 0; t < n; t++) {
        Vector v[N];
        for (int i = 0; i < N; i++) v[i] = load(b + t * b_stride + i * W);
        for (int h = 0; h < H; h++) {
            const Vector w = broadcast(a[h * a_stride + t]);
            for (int i = 0; i < N; i++) sum[h][i] = fma(w, v[i], sum[h][i]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) store(out + h * out_stride + i * W, sum[h][i]);
}

// All `columns`, whole vectors, as above.
template <int H, bool adds>
static inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                            int64_t n, int64_t columns, float* out, int64_t out_stride) {
    constexpr int W = Vector::width;
    int64_t c = 0;
    for (; c + 2 * W <= columns; c += 2 * W)
        multiply_columns<H, 2, adds>(a, a_stride, b + c, b_stride, n, out + c, out_stride);
    if (c < columns)
        multiply_columns<H, 1, adds>(a, a_stride, b + c, b_stride, n, out + c, out_stride);
}

template <class T>
class PromptTiles {
  public:
    static constexpr int tokens = kTile;  // of a tile
    static constexpr int unit = 1;        // rows come in whole units
    static constexpr int64_t rows = 64;   // of a task at most: their sums fit in the L1 cache
    // Floats that a thread needs.
    static int64_t room(int64_t D, int64_t Dv) {
        return (D + rounded_up(Dv, Vector::width)) * kTile;
    }

    PromptTiles(const Prefill& a, float* room)
        : a_(a), keys_(room), values_(room + a.D * kTile), stride_(rounded_up(a.Dv, Vector::width)) {}

    void attend(const float* query, int64_t query_stride, const Tile<T>& tile, const Rows& rows,
                const int64_t* after, const int64_t* until, const Tile<T>*,
                const Scales* scales) const {
        pack(tile);
        int64_t row = 0;
        for (; row + 4 <= rows.count; row += 4)
            attend_rows<4>(query, query_stride, tile, rows, row, after, until, scales);
        for (; row + 2 <= rows.count; row += 2)
            attend_rows<2>(query, query_stride, tile, rows, row, after, until, scales);
        for (; row < rows.count; row++)
            attend_rows<1>(query, query_stride, tile, rows, row, after, until, scales);
    }

  private:
    static constexpr int W = Vector::width;
    // Keys as [D][kTile]; values as [count][stride], with zeros beyond Dv.
    void pack(const Tile<T>& tile) const {
        for (int t = 0; t < kTile; t += W)
            for (int64_t d = 0; d < a_.D; d += W) {
                const int n = part(a_.D - d);
                Vector columns[W];
                for (int i = 0; i < W; i++) columns[i] = part_of(tile.key[t + i] + d, n);
                transpose(columns);
                for (int i = 0; i < n; i++) store(keys_ + (d + i) * kTile + t, columns[i]);
            }
        for (int t = 0; t < tile.count; t++)
            for (int64_t d = 0; d < a_.Dv; d += W)
                store(values_ + t * stride_ + d, part_of(tile.value[t] + d, part(a_.Dv - d)));
    }
    static int part(int64_t rest) { return static_cast<int>(rest < W ? rest : W); }
    static Vector part_of(const T* p, int n) { return n == W ? load(p) : load(p, n); }

    template <int H>
    void attend_rows(const float* query, int64_t query_stride, const Tile<T>& tile,
                     const Rows& rows, int64_t row, const int64_t* after, const int64_t* until,
                     const Scales* scales) const {
        alignas(64) float scores[H * kTile];
        float* out = rows.out + row * rows.stride;
        multiply<H, false>(query + row * query_stride, query_stride, keys_, kTile, a_.D, kTile,
                           scores, kTile);
        if (scales) scale_rows<H>(scores, scales->key);
        finish_scores<T, H>(scores, tile, a_.scoring, after ? after + row : nullptr,
                            until ? until + row : nullptr);
        for (int h = 0; h < H; h++) weigh(scores + h * kTile, rows, row + h);
        if (scales) scale_rows<H>(scores, scales->value);
        multiply<H, true>(scores, kTile, values_, stride_, tile.count, stride_, out, stride_);
    }

    const Prefill& a_;
    float *keys_, *values_;
    const int64_t stride_;
};
