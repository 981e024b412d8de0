// Matrices of words of four bytes, transposed in registers.

// Sixteen rows of sixteen words, which it overwrites.
[[gnu::always_inline]] static inline void transpose(__m512i (&a)[16], __m512i* out) {
    __m512i b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // a[i + j]: groups 4 n + j, n the 128-bit part, of 4 rows
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        const __m512i x = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        const __m512i y = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i z = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i w = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        out[j] = _mm512_shuffle_i32x4(x, z, 0x88);
        out[4 + j] = _mm512_shuffle_i32x4(y, w, 0x88);
        out[8 + j] = _mm512_shuffle_i32x4(x, z, 0xdd);
        out[12 + j] = _mm512_shuffle_i32x4(y, w, 0xdd);
    }
}

// Eight registers of two 8 x 8 matrices of words of four bytes, one in either half: transposed.
[[gnu::always_inline]] static inline void transpose_halves(__m512i* r) {
    __m512i a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
        }
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_permutex2var_epi64(b[i], even, b[4 + i]);
        r[4 + i] = _mm512_permutex2var_epi64(b[i], odd, b[4 + i]);
    }
}

constexpr int64_t kTileBytes = 1024;

// For every 64 bytes of `count` rows a tile of sixteen rows of sixteen words: word i of the rows is row i
// of the tile, where rows that do not exist are zero. `words(i, at)`: row i's bytes at .. at + 63.
template <class Words>
static inline void pack_rows(Words words, int64_t count, int64_t bytes, uint8_t* tiles) {
    for (int column = 0; column < 16; column += 8) {
        uint8_t* to = tiles + 4 * column;
        for (int64_t at = 0; at < bytes; at += 64, to += kTileBytes) {
            __m512i r[8];
            for (int i = 0; i < 8; i++)
                r[i] = column + i < count ? words(column + i, at) : _mm512_setzero_si512();
            if (column < count) transpose_halves(r);
            for (int i = 0; i < 8; i++) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 64 * i),
                                    _mm512_castsi512_si256(r[i]));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 64 * (8 + i)),
                                    _mm512_extracti64x4_epi64(r[i], 1));
            }
        }
    }
}
