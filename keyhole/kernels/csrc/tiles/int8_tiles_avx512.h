// Attention of queries of 16 bits to keys and values of int8, in whole numbers by VNNI, which adds
// four products of bytes to a lane of 32 bits. Queries and weights become two digits of a byte each:
// a number of a query is rounded to 2^-16 of its row's largest one, a weight to 2^-17 of its tile's
// largest one, which is far below what the results lose when they are rounded to 16 bits. That takes
// 16 products for a token and four heads of 64 numbers, where floats take 32 and bfloat16 24. Tiles
// have 128 tokens, so that what is done once for each is rare beside the products, and keys and
// values of the next tile are prefetched early enough (benchmarks/LOG.md).

constexpr int kDigits = 2;
constexpr int64_t kColumns = 64;  // numbers of a row that are rearranged together

struct Int8Digits {
    // Of a row: for every four numbers their digits, the higher ones first; then this.
    struct Tail {
        int32_t offset[kDigits];  // what the sums of a digit begin with: keys are read as key + 128
        float step;               // of the whole numbers; NaN if a number is not finite
    };
    using Number = int8_t;
    static constexpr int tokens = 128;
    static constexpr bool reads_scales = true;
    struct Unit {};
    static int64_t size(int64_t D) { return kDigits * rounded_up(D, kColumns) + kColumns; }

    template <class T>
    static void keep(const T* from, int64_t D, int8_t* to) {
        memset(to, 0, size(D));
        float most = 0.0f, sum = 0.0f;  // of absolute numbers
        for (int64_t d = 0; d < D; d += 16) {
            const Vector q = part(from, d, D), absolute = max(q, broadcast(0.0f) - q);
            most = largest(absolute) > most ? largest(absolute) : most;
            sum += total(absolute);
        }
        const bool finite = sum - sum == 0.0f;
        Tail tail{{0, 0}, finite ? most / kMost : NAN};
        const Vector up = broadcast(most > kLeast && finite ? kMost / most : 0.0f);
        for (int64_t d = 0; d < D; d += 16) {
            const __m512i x = _mm512_cvtps_epi32((part(from, d, D) * up).v);
            // The lower digit is the nearest to zero, -128 .. 127.
            const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24);
            const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(x, low), 8);
            put(high, to + kDigits * d, tail.offset[0]);
            put(low, to + kDigits * d + 4, tail.offset[1]);
        }
        memcpy(to + kDigits * rounded_up(D, kColumns), &tail, sizeof tail);
    }
    template <class... Arguments>
    static void attend(const Arguments&... all) {
        attend_tile(all...);
    }
    static Tail tail_of(const int8_t* query, int64_t D) {
        Tail tail;
        memcpy(&tail, query + kDigits * rounded_up(D, kColumns), sizeof tail);
        return tail;
    }

  private:
    static constexpr float kMost = 127 * 256 + 127;
    static constexpr float kLeast = 0x1p-100f;  // kMost by this is finite

    template <class T>
    static Vector part(const T* p, int64_t d, int64_t D) {
        return D - d < 16 ? load(p + d, static_cast<int>(D - d)) : load(p + d);
    }
    // A digit of 16 numbers, four at a time.
    static void put(__m512i digit, int8_t* to, int32_t& offset) {
        offset -= 128 * _mm512_reduce_add_epi32(digit);
        alignas(16) int8_t bytes[16];
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(digit));
        for (int i = 0; i < 4; i++) memcpy(to + 4 * kDigits * i, bytes + 4 * i, 4);
    }
};

using Int8Tile = Tile<int8, Int8Digits::tokens>;

// Four bytes in all lanes.
template <class T>
[[gnu::always_inline]] static inline __m512i four(const T* bytes) {
    int32_t x;
    memcpy(&x, bytes, 4);
    return _mm512_set1_epi32(x);
}
// The numbers with these digits, as floats.
[[gnu::always_inline]] static inline Vector whole(const __m512i& high, const __m512i& low) {
    return fma({_mm512_cvtepi32_ps(high)}, broadcast(256.0f), {_mm512_cvtepi32_ps(low)});
}
// Numbers d .. d + 63 of a row of D; zeros behind it.
[[gnu::always_inline]] static inline __m512i span(const int8* p, int64_t d, int64_t D) {
    if (D - d >= kColumns) return _mm512_loadu_si512(p + d);
    return _mm512_maskz_loadu_epi8((1ull << (D - d)) - 1, p + d);
}

// The scales behind 16 rows of D numbers: with the rows, so that their cache lines are there.
[[gnu::always_inline]] static inline Vector scales_of(const int8* const* rows, int64_t D) {
    __m128 part[4];
    for (int i = 0; i < 4; i++)
        part[i] = _mm_setr_ps(scale_of(rows[4 * i], D), scale_of(rows[4 * i + 1], D),
                              scale_of(rows[4 * i + 2], D), scale_of(rows[4 * i + 3], D));
    const __m256 low = _mm256_set_m128(part[1], part[0]), high = _mm256_set_m128(part[3], part[2]);
    return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
}

// Sixteen rows of 16 groups of four numbers, transposed, plus 128.
[[gnu::always_inline]] static inline void transposed(const int8* const* rows, int64_t d, int64_t D,
                                                     __m512i* out) {
    __m512i words[16];
    for (int i = 0; i < 16; i++) words[i] = span(rows[i], d, D);
    transpose(words, out);
    for (int i = 0; i < 16; i++) out[i] = _mm512_xor_si512(_mm512_set1_epi8(-128), out[i]);
}

// Scores [H][128] of a tile.
template <int H>
static inline void int8_scores(const int8_t* query, int64_t stride, const Int8Tile& tile, int64_t D,
                               float* scores, const Int8Tile* ahead) {
    Int8Digits::Tail tail[H];
    for (int h = 0; h < H; h++) tail[h] = Int8Digits::tail_of(query + h * stride, D);
    for (int from = 0; from < tile.count; from += kTile) {
        const Ahead<int8> soon(ahead ? ahead->key + from : nullptr, D + Scaled<int8>::bytes);
        __m512i sum[H][kDigits];
        for (int h = 0; h < H; h++)
            for (int j = 0; j < kDigits; j++) sum[h][j] = _mm512_set1_epi32(tail[h].offset[j]);
        for (int64_t d = 0; d < D; d += kColumns) {
            soon.ask_tile(d);
            __m512i columns[16];  // four dimensions each of 16 keys
            transposed(tile.key + from, d, D, columns);
            const int8_t* digits = query + kDigits * d;
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                for (int h = 0; h < H; h++)
                    for (int j = 0; j < kDigits; j++)
                        sum[h][j] = _mm512_dpbusd_epi32(
                            sum[h][j], columns[i],
                            four(digits + h * stride + 4 * (kDigits * i + j)));
        }
        const Vector scale = scales_of(tile.key + from, D);
        for (int h = 0; h < H; h++)
            store(scores + h * tile.size + from,
                  whole(sum[h][0], sum[h][1]) * scale * broadcast(tail[h].step));
    }
}

// Four rows of 64 numbers: each lane of out[c] has one number of all four, those of dimensions
// 16 n + 4 c .. in its 128-bit part n.
[[gnu::always_inline]] static inline void interleaved(const int8* const* rows, int64_t d, int64_t D,
                                                      int8_t* out) {
    __m512i r[4];
    for (int i = 0; i < 4; i++) r[i] = span(rows[i], d, D);
    const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), e = _mm512_unpackhi_epi8(r[2], r[3]);
    _mm512_store_si512(out, _mm512_unpacklo_epi16(a, c));
    _mm512_store_si512(out + 64, _mm512_unpackhi_epi16(a, c));
    _mm512_store_si512(out + 128, _mm512_unpacklo_epi16(b, e));
    _mm512_store_si512(out + 192, _mm512_unpackhi_epi16(b, e));
}
// The same 64 dimensions in order.
[[gnu::always_inline]] static inline void in_order(Vector* x) {
    const __m512 a = _mm512_shuffle_f32x4(x[0].v, x[1].v, 0x44);
    const __m512 b = _mm512_shuffle_f32x4(x[2].v, x[3].v, 0x44);
    const __m512 c = _mm512_shuffle_f32x4(x[0].v, x[1].v, 0xee);
    const __m512 e = _mm512_shuffle_f32x4(x[2].v, x[3].v, 0xee);
    x[0].v = _mm512_shuffle_f32x4(a, b, 0x88);
    x[1].v = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[2].v = _mm512_shuffle_f32x4(c, e, 0x88);
    x[3].v = _mm512_shuffle_f32x4(c, e, 0xdd);
}

// The weights of a tile times its scales, one row's, in digits, the higher ones first; returns their
// step, NaN if one is not finite.
static inline float weight_digits(const float* weights, const Vector* scales,
                                  uint8_t (*digits)[Int8Tile::size]) {
    constexpr int N = Int8Tile::size / 16;
    constexpr float most = 65535.0f, least = 0x1p-100f;
    Vector w[N], high = broadcast(0.0f), sum = high;
    for (int i = 0; i < N; i++) {
        w[i] = load(weights + 16 * i) * scales[i];
        high = max(high, w[i]);
        sum = sum + w[i];
    }
    const float top = largest(high);
    const bool finite = !_mm512_cmp_ps_mask((sum - sum).v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const Vector up = broadcast(top > least ? most / top : 0.0f);
    const __m512i byte = _mm512_set1_epi16(255);
    for (int i = 0; i < N; i += 4) {
        __m512i x[4];
        for (int j = 0; j < 4; j++) x[j] = _mm512_cvtps_epi32((w[i + j] * up).v);
        const __m512i a = _mm512_packus_epi32(x[0], x[1]), b = _mm512_packus_epi32(x[2], x[3]);
        _mm512_store_si512(digits[0] + 16 * i, _mm512_packus_epi16(_mm512_srli_epi16(a, 8),
                                                                  _mm512_srli_epi16(b, 8)));
        _mm512_store_si512(digits[1] + 16 * i, _mm512_packus_epi16(_mm512_and_si512(a, byte),
                                                                  _mm512_and_si512(b, byte)));
    }
    return finite ? top / most : NAN;
}
// Where the digits of the weights of tokens 4 q .. 4 q + 3 are.
static inline int place_of(int q) { return q / 16 * 64 + q % 4 * 16 + q % 16 / 4 * 4; }

// Adds columns d .. d + 63 of the values of a tile, `interleaved`, to R rows of `out`. The products
// leave the memory idle, so the values of the next tile are prefetched here: this call prefetches
// every `parts`-th block of 16 tokens, from block `part` on.
template <int R>
static inline void add_columns(const uint8_t (*digits)[kDigits][Int8Tile::size], const float* step,
                               const int8_t (*values)[4][kColumns], int groups, float* out,
                               int64_t stride, int64_t d, int64_t Dv, const Int8Tile* ahead,
                               int part, int parts) {
    __m512i sum[R][kDigits][4] = {};
    for (int q = 0; q < groups; q++) {
        if (q % (4 * parts) == 4 * part)
            Ahead<int8>(ahead ? ahead->value + 4 * q : nullptr, Dv + Scaled<int8>::bytes)
                .ask_tile(d);
        const int place = place_of(q);
        __m512i v[4];
        for (int c = 0; c < 4; c++) v[c] = _mm512_load_si512(values[q][c]);
        for (int r = 0; r < R; r++)
            for (int j = 0; j < kDigits; j++) {
                const __m512i w = four(digits[r][j] + place);
                for (int c = 0; c < 4; c++)
                    sum[r][j][c] = _mm512_dpbusd_epi32(sum[r][j][c], w, v[c]);
            }
    }
    for (int r = 0; r < R; r++) {
        Vector x[4];
        for (int c = 0; c < 4; c++) x[c] = whole(sum[r][0][c], sum[r][1][c]);
        in_order(x);
        for (int c = 0; c < 4 && d + 16 * c < Dv; c++) {
            float* to = out + r * stride + d + 16 * c;
            store(to, fma(x[c], broadcast(step[r]), load(to)));
        }
    }
}

// Adds the values of a tile, by the weights [H][128], to H rows of `out`.
template <int H>
static inline void int8_mix(const float* weights, const Int8Tile& tile, int64_t Dv, float* out,
                            int64_t stride, const Int8Tile* ahead) {
    constexpr int R = H < 2 ? 1 : 2;  // rows whose sums fit into registers
    alignas(64) uint8_t digits[H][kDigits][Int8Tile::size];
    alignas(64) int8_t values[Int8Tile::size / 4][4][kColumns];
    float step[H];
    const int groups = (tile.count + 3) / 4;
    for (int64_t d = 0; d < Dv; d += kColumns) {
        for (int q = 0; q < groups; q++) interleaved(tile.value + 4 * q, d, Dv, values[q][0]);
        if (d == 0) {
            Vector scales[Int8Tile::size / kTile];
            for (int i = 0; i < Int8Tile::size / kTile; i++)
                scales[i] = scales_of(tile.value + kTile * i, Dv);
            for (int h = 0; h < H; h++)
                step[h] = weight_digits(weights + h * tile.size, scales, digits[h]);
        }
        for (int h = 0; h < H; h += R)
            add_columns<R>(digits + h, step + h, values, groups, out + h * stride, stride, d, Dv,
                           ahead, h / R, H / R);
    }
}

template <int H>
static inline void attend_rows(const int8_t* query, int64_t query_stride, const Int8Tile& tile,
                               int64_t D, int64_t Dv, const Scoring& how, const Rows& rows,
                               int64_t row, float* raw, int64_t raw_stride,
                               const Int8Tile* ahead) {
    constexpr int N = Int8Tile::size;
    alignas(64) float scores[H * N];
    int8_scores<H>(query + row * query_stride, query_stride, tile, D, scores, ahead);
    finish_scores<int8, H>(scores, tile, how, nullptr, nullptr);
    if (raw)
        for (int h = 0; h < H; h++)
            memcpy(raw + (row + h) * raw_stride, scores + h * N, tile.count * sizeof(float));
    if (!rows.out) return;
    for (int h = 0; h < H; h++) weigh<N>(scores + h * N, rows, row + h);
    int8_mix<H>(scores, tile, Dv, rows.out + row * rows.stride, rows.stride, ahead);
}

// As for tiles of other numbers.
static inline void attend_tile(const int8_t* query, int64_t query_stride, const Int8Tile& tile,
                               int64_t D, int64_t Dv, const Scoring& how, const Rows& rows,
                               float* raw, int64_t raw_stride, const int64_t*, const int64_t*,
                               const Int8Tile* ahead, const Scales*) {
    int64_t row = 0;
    for (; row + 4 <= rows.count; row += 4)
        attend_rows<4>(query, query_stride, tile, D, Dv, how, rows, row, raw, raw_stride,
                       row ? nullptr : ahead);
    for (; row + 2 <= rows.count; row += 2)
        attend_rows<2>(query, query_stride, tile, D, Dv, how, rows, row, raw, raw_stride,
                       row ? nullptr : ahead);
    for (; row < rows.count; row++)
        attend_rows<1>(query, query_stride, tile, D, Dv, how, rows, row, raw, raw_stride,
                       row ? nullptr : ahead);
}
