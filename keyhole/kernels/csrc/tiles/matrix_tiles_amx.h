// Decode attention to 64 tokens by the matrix unit, for keys and values of bfloat16. Keys are multiplied
// where they lie, values are rearranged once for all rows, and eight rows are taken at a time: their
// weights are two rows of an operand each, rounded to bfloat16 and what that leaves, so that they keep
// sixteen bits.

constexpr int kMatrixRows = 8, kMatrixTokens = 64;
constexpr int64_t kMostColumns = 1024;  // of keys and of values: tiles of them lie on the stack
constexpr int64_t kMostRows = 64;       // whose weights lie there, too

using MatrixTile = Tile<bfloat16, kMatrixTokens>;

// Numbers d .. d + 31 of a row of D; zeros behind it.
[[gnu::always_inline]] static inline __m512i span(const bfloat16* p, int64_t d, int64_t D) {
    return D - d >= 32 ? Product<bfloat16>::key(p + d)
                       : Product<bfloat16>::key(p + d, static_cast<int>(D - d));
}

// Sixteen rows of numbers as left operands: where they lie, if they lie at equal distances and are
// whole tiles; else a copy, padded with zeros.
struct LeftRows {
    const bfloat16* data;
    int64_t row_bytes;

    LeftRows(const bfloat16* const* rows, int64_t D, bfloat16* room) {
        const int64_t step = rows[1] - rows[0];
        bool straight = D % 32 == 0;
        for (int t = 2; t < kTile; t++) straight &= rows[t] - rows[t - 1] == step;
        data = straight ? rows[0] : room;
        row_bytes = 2 * (straight ? step : rounded_up(D, 32));
        for (int t = 0; t < kTile && !straight; t++)
            for (int64_t d = 0; d < D; d += 32, room += 32)
                _mm512_storeu_si512(room, span(rows[t], d, D));
    }
};

// Products of the keys of a tile and of packed queries: [64][16]. Prefetches `ahead`, if any.
static inline void multiply_keys(const MatrixTile& tile, int64_t D, const uint8_t* packed,
                                 const MatrixTile* ahead, uint8_t* out) {
    alignas(64) bfloat16 room[kMatrixTokens * kMostColumns];
    const int64_t size = kTile * rounded_up(D, 32);
    const LeftRows a(tile.key, D, room), b(tile.key + 16, D, room + size),
        c(tile.key + 32, D, room + 2 * size), e(tile.key + 48, D, room + 3 * size);
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    for (int64_t d = 0; d < D; d += 32, packed += kTileBytes) {
        for (int from = 0; ahead && from < kMatrixTokens; from += kTile) {
            const Ahead<bfloat16> soon(ahead->key + from, D);
            for (int t = 0; t < kTile; t += 4) soon.ask_rows<4>(t, d);
        }
        load_tile<6>(packed, 64);
        load_tile<4>(a.data + d, a.row_bytes);
        multiply_tiles<0, 4, 6>();
        load_tile<5>(b.data + d, b.row_bytes);
        multiply_tiles<1, 5, 6>();
        load_tile<4>(c.data + d, c.row_bytes);
        multiply_tiles<2, 4, 6>();
        load_tile<5>(e.data + d, e.row_bytes);
        multiply_tiles<3, 5, 6>();
    }
    store_tile<0>(out);
    store_tile<1>(out + kTileBytes);
    store_tile<2>(out + 2 * kTileBytes);
    store_tile<3>(out + 3 * kTileBytes);
}

// Scores [8][64] of up to eight rows.
static inline void matrix_scores(const bfloat16* query, int64_t stride, int64_t rows,
                                 const MatrixTile& tile, int64_t D, float* scores,
                                 const MatrixTile* ahead) {
    alignas(64) uint8_t packed[kMostColumns / 32 * kTileBytes], products[4 * kTileBytes];
    pack_rows(query, stride, rows, rounded_up(D, 32), packed);
    multiply_keys(tile, D, packed, ahead, products);
    for (int from = 0; from < kMatrixTokens; from += kTile) {
        const uint8_t* p = products + 64 * from;
        __m512i r[8];
        for (int i = 0; i < 8; i++)
            r[i] = _mm512_inserti64x4(_mm512_load_si512(p + 64 * i),
                                      _mm256_load_si256((const __m256i*)(p + 64 * (8 + i))), 1);
        transpose_halves(r);
        for (int h = 0; h < rows; h++)
            _mm512_store_si512(scores + h * kMatrixTokens + from, r[h]);
    }
}

// The weights of eight rows as left operands of 32 tokens each: rounded, and what that leaves.
struct MatrixWeights {
    alignas(64) bfloat16 part[2][2 * kMatrixRows][32];
    void keep(int64_t row, const float* weights) {
        for (int t = 0; t < kMatrixTokens; t += 16) {
            const Vector w = load(weights + t);
            bfloat16* const to = &part[t / 32][row][t % 32];
            store(to, w);
            store(to + kMatrixRows * 32, w - load(to));
        }
    }
};

// Columns d .. d + 31 of the values as right operands of 32 tokens: tiles 4 and 5 have the columns
// whose number has a remainder by 8 under 4, tiles 6 and 7 the others.
static inline void load_values(const bfloat16* const* values, int64_t d, int64_t Dv) {
    alignas(64) uint8_t tiles[4 * kTileBytes];
    for (int t = 0; t < kMatrixTokens; t += 2) {
        const __m512i a = span(values[t], d, Dv), b = span(values[t + 1], d, Dv);
        _mm512_store_si512(tiles + 32 * t, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(tiles + 32 * t + 2 * kTileBytes, _mm512_unpackhi_epi16(a, b));
    }
    load_tile<4>(tiles, 64);
    load_tile<5>(tiles + kTileBytes, 64);
    load_tile<6>(tiles + 2 * kTileBytes, 64);
    load_tile<7>(tiles + 3 * kTileBytes, 64);
}

// Adds the weighted values of a tile to rows of `out`, whose weights come in eights.
static inline void matrix_mix(const MatrixWeights* weights, int64_t rows, const MatrixTile& tile,
                              int64_t Dv, float* out, int64_t stride, const MatrixTile* ahead) {
    alignas(64) float products[2][2 * kMatrixRows][16];
    for (int64_t d = 0; d < Dv; d += 32) {
        for (int from = 0; ahead && from < kMatrixTokens; from += kTile) {
            Ahead<bfloat16> soon(ahead->value + from, Dv);
            soon.whole = false;
            for (int t = 0; t < kTile; t++) soon.ask_columns<2>(t, d);
        }
        load_values(tile.value, d, Dv);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t at = row % kMatrixRows;
            if (at == 0) {
                const MatrixWeights& own = weights[row / kMatrixRows];
                load_tile<2>(own.part[0], 64);
                load_tile<3>(own.part[1], 64);
                clear_tile<0>();
                clear_tile<1>();
                multiply_tiles<0, 2, 4>();
                multiply_tiles<1, 2, 6>();
                multiply_tiles<0, 3, 5>();
                multiply_tiles<1, 3, 7>();
                store_tile<0>(products[0]);
                store_tile<1>(products[1]);
            }
            const Vector low = load(products[0][at]) + load(products[0][kMatrixRows + at]);
            const Vector high = load(products[1][at]) + load(products[1][kMatrixRows + at]);
            float* const to = out + row * stride + d;
            // Columns in order: four numbers of either in turn.
            const __m512 a = _mm512_shuffle_f32x4(low.v, high.v, 0x44);
            store(to, load(to) + Vector{_mm512_shuffle_f32x4(a, a, 0xd8)});
            if (Dv - d <= 16) continue;
            const __m512 b = _mm512_shuffle_f32x4(low.v, high.v, 0xee);
            store(to + 16, load(to + 16) + Vector{_mm512_shuffle_f32x4(b, b, 0xd8)});
        }
    }
}

// As `attend_tile`, for tokens that every row sees and keys and values without scales.
static inline void matrix_tile(const bfloat16* query, int64_t query_stride, const MatrixTile& tile,
                               int64_t D, int64_t Dv, const Scoring& how, const Rows& rows,
                               float* raw, int64_t raw_stride, const int64_t*, const int64_t*,
                               const MatrixTile* ahead, const Scales*) {
    alignas(64) float scores[kMatrixRows * kMatrixTokens];
    for (int64_t first = 0; first < rows.count; first += kMostRows) {
        const int64_t end = lesser(rows.count, first + kMostRows);
        const MatrixTile* soon = first ? nullptr : ahead;
        MatrixWeights weights[kMostRows / kMatrixRows];
        for (int64_t row = first; row < end; row++) {
            const int64_t at = row % kMatrixRows;
            if (at == 0)
                matrix_scores(query + row * query_stride, query_stride,
                              lesser(kMatrixRows, end - row), tile, D, scores,
                              row == first ? soon : nullptr);
            float* const own = scores + at * kMatrixTokens;
            finish_scores<bfloat16, 1>(own, tile, how, nullptr, nullptr);
            if (raw) memcpy(raw + row * raw_stride, own, tile.count * sizeof(float));
            if (!rows.out) continue;
            weigh<kMatrixTokens>(own, rows, row);
            weights[(row - first) / kMatrixRows].keep(at, own);
        }
        if (rows.out)
            matrix_mix(weights, end - first, tile, Dv, rows.out + first * rows.stride, rows.stride,
                       soon);
    }
}

// How decode attention uses it.
struct MatrixForm : QueryForm<bfloat16> {
    using Unit = MatrixUnit;
    static constexpr int tokens = kMatrixTokens;
    static constexpr bool reads_scales = true;  // decode attention has none
    template <class... Arguments>
    static void attend(const Arguments&... all) {
        matrix_tile(all...);
    }
};
