// Attention to int8 in whole numbers, as in int8_tiles_avx512.h and equal to it bit by bit, by the
// matrix unit: one product takes what sixteen tokens and eight query heads have in 64 dimensions, or
// eight query heads and 64 tokens in sixteen dimensions. Keys are multiplied where they lie.

constexpr int kInt8Rows = 16 / kDigits;  // query heads whose digits fill a tile

// Adds the products of bytes to the tile `to`: of signed ones; of unsigned ones on the left.
template <int to, int left, int right>
[[gnu::always_inline]] static inline void multiply_signed() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(to), "i"(left), "i"(right));
}
template <int to, int left, int right>
[[gnu::always_inline]] static inline void multiply_unsigned() {
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(to), "i"(left), "i"(right));
}

// Columns d .. d + 63 of sixteen keys as a left operand: where they lie, or a copy.
struct Int8Left {
    const int8* data;
    int64_t row_bytes;

    Int8Left(const int8* const* rows, int64_t d, int64_t D, uint8_t* room) {
        row_bytes = rows[1] - rows[0];
        bool straight = D - d >= kColumns;
        for (int t = 2; t < kTile; t++) straight &= rows[t] - rows[t - 1] == row_bytes;
        data = rows[0] + d;
        if (straight) return;
        for (int t = 0; t < kTile; t++) _mm512_store_si512(room + 64 * t, span(rows[t], d, D));
        data = reinterpret_cast<const int8*>(room);
        row_bytes = 64;
    }
};

// Scores [rows][128] of a tile.
static inline void int8_matrix_scores(const int8_t* query, int64_t stride, int64_t rows,
                                      const Int8Tile& tile, int64_t D, float* scores,
                                      const Int8Tile* ahead) {
    alignas(64) int32_t products[Int8Tile::size][16];
    alignas(64) uint8_t room[4][kTileBytes], packed[kTileBytes];
    for (int from = 0; from < Int8Tile::size; from += 4 * kTile) {
        clear_tile<0>();
        clear_tile<1>();
        clear_tile<2>();
        clear_tile<3>();
        const int8* const* keys = tile.key + from;
        for (int64_t d = 0; d < D; d += kColumns) {
            if (from == 0 || D > kColumns)
                for (int64_t h = 0; h < rows; h++)
                    for (int i = 0; i < 16; i++)
                        memcpy(packed + 64 * i + 8 * h, query + h * stride + kDigits * d + 8 * i, 8);
            const Int8Left a(keys, d, D, room[0]), b(keys + 16, d, D, room[1]),
                c(keys + 32, d, D, room[2]), e(keys + 48, d, D, room[3]);
            load_tile<6>(packed, 64);
            load_tile<4>(a.data, a.row_bytes);
            multiply_signed<0, 4, 6>();
            load_tile<5>(b.data, b.row_bytes);
            multiply_signed<1, 5, 6>();
            load_tile<4>(c.data, c.row_bytes);
            multiply_signed<2, 4, 6>();
            load_tile<5>(e.data, e.row_bytes);
            multiply_signed<3, 5, 6>();
            for (int t = 0; ahead && t < 4 * kTile; t += kTile)
                Ahead<int8>(ahead->key + from + t, D + Scaled<int8>::bytes).ask_tile(d);
        }
        store_tile<0>(products[from]);
        store_tile<1>(products[from + 16]);
        store_tile<2>(products[from + 32]);
        store_tile<3>(products[from + 48]);
    }
    for (int from = 0; from < tile.count; from += kTile) {
        const Vector scale = scales_of(tile.key + from, D);
        for (int64_t first = 0; first < rows; first += 4) {
            __m512i r[8];
            for (int i = 0; i < 8; i++)
                r[i] = _mm512_inserti64x4(
                    _mm512_castsi256_si512(
                        _mm256_load_si256((const __m256i*)(products[from + i] + 2 * first))),
                    _mm256_load_si256((const __m256i*)(products[from + 8 + i] + 2 * first)), 1);
            transpose_halves(r);
            for (int64_t h = first; h < lesser(rows, first + 4); h++)
                store(scores + h * Int8Tile::size + from,
                      whole(r[2 * (h - first)], r[2 * (h - first) + 1]) * scale *
                          broadcast(Int8Digits::tail_of(query + h * stride, D).step));
        }
    }
}

// Columns d .. d + 63 of the values of a tile as right operands: four for each half of the tokens, whose
// groups of four stand in the order in which `weight_digits` leaves their weights.
using Int8Values = int8_t[Int8Tile::size / 4][4][kColumns];

static inline void interleave_tile(const Int8Tile& tile, int64_t d, int64_t Dv, Int8Values& out,
                                   const Int8Tile* ahead) {
    for (int q = 0; q < Int8Tile::size / 4; q++) {
        if (ahead && q % 4 == 0)
            Ahead<int8>(ahead->value + 4 * q, Dv + Scaled<int8>::bytes).ask_tile(d);
        interleaved(tile.value + 4 * q, d, Dv, out[place_of(q) / 4][0]);
    }
}

// The weights of up to `kMostRows` rows times the scales of the values of a tile.
struct Int8Weights {
    alignas(64) uint8_t digits[kMostRows][kDigits][Int8Tile::size];
    float step[kMostRows];
};

// Adds weighted values of 64 columns, of which there are `left`, to eight rows from `row` on.
static inline void add_products(const Int8Weights& weights, int64_t row, int64_t rows,
                                const Int8Values& values, float* out, int64_t stride,
                                int64_t left) {
    alignas(64) int32_t products[4][kInt8Rows][kDigits][16];
    constexpr int64_t row_bytes = sizeof values[0];
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    for (int half = 0; half < 2; half++) {
        const int8_t(*own)[kColumns] = values[16 * half];
        load_tile<6>(weights.digits[row][0] + 64 * half, Int8Tile::size);
        load_tile<4>(own[0], row_bytes);
        multiply_unsigned<0, 6, 4>();
        load_tile<5>(own[1], row_bytes);
        multiply_unsigned<1, 6, 5>();
        load_tile<4>(own[2], row_bytes);
        multiply_unsigned<2, 6, 4>();
        load_tile<5>(own[3], row_bytes);
        multiply_unsigned<3, 6, 5>();
    }
    store_tile<0>(products[0]);
    store_tile<1>(products[1]);
    store_tile<2>(products[2]);
    store_tile<3>(products[3]);
    for (int64_t h = 0; h < rows; h++) {
        Vector x[4];
        for (int c = 0; c < 4; c++)
            x[c] = whole(_mm512_load_si512(products[c][h][0]),
                         _mm512_load_si512(products[c][h][1]));
        in_order(x);
        for (int c = 0; c < 4 && 16 * c < left; c++) {
            float* to = out + h * stride + 16 * c;
            store(to, fma(x[c], broadcast(weights.step[row + h]), load(to)));
        }
    }
}

// As `attend_tile`.
static inline void int8_matrix_tile(const int8_t* query, int64_t query_stride,
                                    const Int8Tile& tile, int64_t D, int64_t Dv,
                                    const Scoring& how, const Rows& rows, float* raw,
                                    int64_t raw_stride, const Int8Tile* ahead) {
    constexpr int N = Int8Tile::size;
    alignas(64) float scores[kInt8Rows * N];
    alignas(64) Int8Values values[2];
    Int8Weights weights;
    for (int64_t first = 0; first < rows.count; first += kMostRows) {
        const int64_t end = lesser(rows.count, first + kMostRows);
        const Int8Tile* soon = first ? nullptr : ahead;
        // Columns are rearranged before what precedes their products: a load by the unit waits until
        // what it loads has left the store buffer.
        Vector scales[N / kTile];
        if (rows.out) {
            interleave_tile(tile, 0, Dv, values[0], soon);
            for (int i = 0; i < N / kTile; i++) scales[i] = scales_of(tile.value + kTile * i, Dv);
        }
        for (int64_t row = first; row < end; row++) {
            float* const own = scores + (row - first) % kInt8Rows * N;
            if (own == scores)
                int8_matrix_scores(query + row * query_stride, query_stride,
                                   lesser(kInt8Rows, end - row), tile, D, scores,
                                   row == first ? soon : nullptr);
            finish_scores<int8, 1>(own, tile, how, nullptr, nullptr);
            if (raw) memcpy(raw + row * raw_stride, own, tile.count * sizeof(float));
            if (!rows.out) continue;
            weigh<N>(own, rows, row);
            weights.step[row - first] = weight_digits(own, scales, weights.digits[row - first]);
        }
        for (int64_t d = 0; rows.out && d < Dv; d += kColumns) {
            if (d + kColumns < Dv)
                interleave_tile(tile, d + kColumns, Dv, values[(d / kColumns + 1) % 2], soon);
            for (int64_t row = first; row < end; row += kInt8Rows)
                add_products(weights, row - first, lesser(kInt8Rows, end - row),
                             values[d / kColumns % 2], rows.out + row * rows.stride + d,
                             rows.stride, Dv - d);
        }
    }
}

// How decode attention uses it: where rows are few, vectors are faster (benchmarks/LOG.md).
struct Int8MatrixForm : Int8Digits {
    using Unit = MatrixUnit;
    static constexpr int64_t fewest = 5;
    static void attend(const int8_t* query, int64_t query_stride, const Int8Tile& tile, int64_t D,
                       int64_t Dv, const Scoring& how, const Rows& rows, float* raw,
                       int64_t raw_stride, const int64_t* after, const int64_t* until,
                       const Int8Tile* ahead, const Scales* scales) {
        if (rows.count < fewest)
            attend_tile(query, query_stride, tile, D, Dv, how, rows, raw, raw_stride, after, until,
                        ahead, scales);
        else
            int8_matrix_tile(query, query_stride, tile, D, Dv, how, rows, raw, raw_stride, ahead);
    }
};
