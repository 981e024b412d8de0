// How a block of a prompt's rows reads a tile: by the matrix unit. Keys and values are packed as right
// operands once for all rows, queries and weights are left operands, and the weighted values are
// added where they are kept.

template <class T>
class PromptTiles;

template <>
class PromptTiles<bfloat16> {
  public:
    static constexpr int tokens = kMatrixTokens;  // of a tile
    static constexpr int unit = 2 * kTile;        // rows come in whole units
    static constexpr int64_t rows = 256;          // of a task at most: a tile is packed for each
    // Floats that a thread needs.
    static int64_t room(int64_t D, int64_t Dv) {
        return (rounded_up(D, 32) + rounded_up(Dv, 32)) * tokens / 2;
    }

    PromptTiles(const Prefill& a, float* room)
        : a_(a), is_product_(a.scoring.softcap == 0 && a.scoring.scale > 0), scoring_(a.scoring),
          D_(rounded_up(a.D, 32)), keys_(reinterpret_cast<uint8_t*>(room)),
          values_(keys_ + 2 * D_ * tokens) {
        if (is_product_) scoring_.scale = 1;
    }

    void attend(const bfloat16* query, int64_t query_stride, const MatrixTile& tile,
                const Rows& rows, const int64_t* after, const int64_t* until,
                const MatrixTile* ahead, const Scales* scales) const {
        pack(tile);
        for (int64_t row = 0; row < rows.count; row += unit) {
            if (ahead && row < tokens)
                for (int t = 0; t < unit; t++) ask(ahead->key[row + t], ahead->value[row + t]);
            attend_rows(query + row * query_stride, query_stride, tile, rows, row, after, until,
                        scales);
        }
    }

  private:
    // Keys: for every sixteen tokens D / 32 operands. Values: for every sixteen columns two operands,
    // of 32 tokens each.
    void pack(const MatrixTile& tile) const {
        for (int t = 0; t < tokens; t += kTile)
            pack_rows([&](int64_t i, int64_t at) { return span(tile.key[t + i], at / 2, a_.D); },
                      kTile, 2 * D_, keys_ + 2 * t * D_);
        alignas(64) static constexpr int16_t kPairs[64] = {  // numbers of two rows in turn
            0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
            11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
            22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
        const __m512i low = _mm512_load_si512(kPairs), high = _mm512_load_si512(kPairs + 32);
        for (int pair = 0; pair < tokens / 2; pair++) {
            uint8_t* to = values_ + 64 * pair;
            // Weights come in the order of two vectors that were narrowed into one.
            const int t = pair / 16 * 32 + pair % 16 / 4 * 4 + pair % 2 * 2 + pair % 4 / 2 * 16;
            for (int64_t d = 0; d < a_.Dv; d += 32, to += 4 * kTileBytes) {
                const __m512i a = span(tile.value[t], d, a_.Dv);
                const __m512i b = span(tile.value[t + 1], d, a_.Dv);
                _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(to + 2 * kTileBytes, _mm512_permutex2var_epi16(a, high, b));
            }
        }
    }
    void ask(const bfloat16* key, const bfloat16* value) const {
        for (int64_t d = 0; d < a_.D; d += 32) __builtin_prefetch(key + d, 0, 2);
        for (int64_t d = 0; d < a_.Dv; d += 32) __builtin_prefetch(value + d, 0, 2);
    }

    // A unit of rows, or what is left of it: the others are computed, too, and are nobody's.
    void attend_rows(const bfloat16* query, int64_t query_stride, const MatrixTile& tile,
                     const Rows& rows, int64_t first, const int64_t* after, const int64_t* until,
                     const Scales* scales) const {
        alignas(64) float scores[unit * tokens];
        multiply_keys(query, query_stride, keys_, scores);
        multiply_keys(query, query_stride, keys_ + 64 * D_, scores + 2 * kTile);
        alignas(64) bfloat16 weights[unit * tokens], rest[unit * tokens];
        const int64_t count = lesser(unit, rows.count - first);
        const bool finished = !until && tile.count == tokens && is_product_;
        for (int64_t i = 0; i < count; i++) {
            const int64_t row = first + i;
            float* const own = scores + i * tokens;
            if (scales) scale_rows<1, tokens>(own, scales->key);
            if (!finished)
                finish_scores<bfloat16, 1>(own, tile, scoring_, after ? after + row : nullptr,
                                           until ? until + row : nullptr);
            weigh_row(own, is_product_ ? a_.scoring.scale : 1.0f, rows, row, scales,
                      weights + i * tokens, rest + i * tokens);
        }
        const uint8_t* value = values_;
        for (int64_t d = 0; d < a_.Dv; d += 2 * kTile, value += 4 * kTileBytes)
            for (int64_t i = 0; i < count; i += kTile) {
                float* const out = rows.out + (first + i) * rows.stride + d;
                if (a_.Dv - d > kTile)
                    add_values<2>(weights + i * tokens, rest + i * tokens, value, out, rows.stride);
                else
                    add_values<1>(weights + i * tokens, rest + i * tokens, value, out, rows.stride);
            }
    }

    // Scores of a unit of rows and of 32 tokens.
    void multiply_keys(const bfloat16* query, int64_t stride, const uint8_t* key,
                       float* scores) const {
        clear_tile<0>();
        clear_tile<1>();
        clear_tile<2>();
        clear_tile<3>();
        for (int64_t d = 0; d < D_; d += 32, key += kTileBytes) {
            load_tile<4>(query + d, 2 * stride);
            load_tile<6>(key, 64);
            multiply_tiles<0, 4, 6>();
            load_tile<7>(key + 32 * D_, 64);
            multiply_tiles<1, 4, 7>();
            load_tile<5>(query + kTile * stride + d, 2 * stride);
            multiply_tiles<2, 5, 6>();
            multiply_tiles<3, 5, 7>();
        }
        store_tile<0>(scores, 4 * tokens);
        store_tile<1>(scores + kTile, 4 * tokens);
        store_tile<2>(scores + kTile * tokens, 4 * tokens);
        store_tile<3>(scores + kTile * tokens + kTile, 4 * tokens);
    }

    // The weights of a row, as `weigh`, of scores that `scale` has not multiplied yet. They are cut to
    // bfloat16, and so is what that leaves: sixteen bits.
    static inline void weigh_row(const float* scores, float scale, const Rows& rows, int64_t row,
                                 const Scales* scales, bfloat16* weights, bfloat16* rest) {
        constexpr float kLog2E = 1.44269504f;
        Vector s[4];
        for (int i = 0; i < 4; i++) s[i] = load(scores + i * kTile);
        const Vector high = max(max(s[0], s[1]), max(s[2], s[3])) * broadcast(scale);
        if (any_above(high, broadcast(rows.largest[row]))) raise(rows, row, largest(high));
        const float now = rows.largest[row];
        const Vector origin = broadcast(now == -INFINITY ? 0.0f : -kLog2E * now);
        Vector sum = load(rows.weight + row * kTile);
        for (int i = 0; i < 4; i++) {
            s[i] = power_of_two(fma(s[i], broadcast(scale * kLog2E), origin));
            sum = sum + s[i];
            if (scales) s[i] = s[i] * load(scales->value + i * kTile);
        }
        store(rows.weight + row * kTile, sum);
        for (int i = 0; i < 4; i += 2) {
            __m512i part[2], left[2];  // the upper halves, and those of the differences
            for (int k = 0; k < 2; k++) {
                const __m512i w = _mm512_castps_si512(s[i + k].v);
                part[k] = _mm512_srli_epi32(w, 16);
                const Vector kept{_mm512_castsi512_ps(_mm512_slli_epi32(part[k], 16))};
                left[k] = _mm512_srli_epi32(_mm512_castps_si512((s[i + k] - kept).v), 16);
            }
            _mm512_store_si512(weights + i * kTile, _mm512_packus_epi32(part[0], part[1]));
            _mm512_store_si512(rest + i * kTile, _mm512_packus_epi32(left[0], left[1]));
        }
    }

    // 2^x for x <= 0 to an error of 1e-7; 0 below -126, NaN for NaN. The polynomial of degree 5 with
    // the least relative error (7.5e-8) from -1/2 to 1/2.
    static inline Vector power_of_two(Vector x) {
        const Vector n = nearest(x), r = x - n;
        constexpr float c[] = {9.67554154e-3f, 5.550713276e-2f, 2.402211972e-1f, 6.931469671e-1f, 1.0f};
        Vector p = broadcast(1.327647174e-3f);
        for (int i = 0; i < 5; i++) p = fma(p, r, broadcast(c[i]));
        return scaled(p, n, x, -126.0f);
    }

    // Adds N times sixteen columns of the weighted values to sixteen rows. Two sums take turns, as
    // each waits for its last product.
    template <int N>
    [[gnu::always_inline]] static inline void add_values(const bfloat16* weights,
                                                         const bfloat16* rest,
                                                         const uint8_t* value, float* out,
                                                         int64_t stride) {
        load_tile<0>(out, 4 * stride);
        if (N == 2) load_tile<1>(out + kTile, 4 * stride);
        for (int t = 0; t < tokens; t += 32, value += kTileBytes) {
            load_tile<2>(weights + t, 2 * tokens);
            load_tile<4>(value, 64);
            multiply_tiles<0, 2, 4>();
            if (N == 2) load_tile<5>(value + 2 * kTileBytes, 64);
            if (N == 2) multiply_tiles<1, 2, 5>();
            load_tile<3>(rest + t, 2 * tokens);
            multiply_tiles<0, 3, 4>();
            if (N == 2) multiply_tiles<1, 3, 5>();
        }
        store_tile<0>(out, 4 * stride);
        if (N == 2) store_tile<1>(out + kTile, 4 * stride);
    }

    const MatrixUnit unit_;
    const Prefill& a_;
    const bool is_product_;  // whether weights are powers of products, which `weigh_row` scales
    Scoring scoring_;        // what is left to do then
    const int64_t D_;
    uint8_t *keys_, *values_;
};
