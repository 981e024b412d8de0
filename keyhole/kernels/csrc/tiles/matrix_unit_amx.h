// Intel's matrix unit (AMX): eight registers that hold tiles of sixteen rows of 64 bytes, and one
// instruction for the product of two of them. The left operand has a row for each row of the result; a
// row of the right one has two numbers of bfloat16, or four bytes, of each of its sixteen columns. The
// compilers' own functions take no template parameters, and GCC's do not say that they read memory.

template <int tile>
[[gnu::always_inline]] static inline void load_tile(const void* from, int64_t row_bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile>
[[gnu::always_inline]] static inline void store_tile(void* to, int64_t row_bytes = 64) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile>
[[gnu::always_inline]] static inline void clear_tile() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
}
constexpr int64_t kTileBytes = 1024;

// Configures the unit for the calling thread while it lives. depth: bytes of a row of the left operands,
// tiles 4 and 5, where it is not that of the others; the right ones are tiles 6 and 7 then.
class MatrixUnit {
  public:
    explicit MatrixUnit(int depth = 64) {
        alignas(64) uint8_t config[64] = {1};  // the only palette
        for (int i = 0; i < 8; i++) {
            config[16 + 2 * i] = static_cast<uint8_t>(i == 4 || i == 5 ? depth : 64);  // bytes of a row
            config[48 + i] = static_cast<uint8_t>(i > 5 ? depth / 4 : 16);             // rows
        }
        __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
    }
    ~MatrixUnit() { __asm__ volatile("tilerelease"); }  // else every change of context saves 8 KB
    MatrixUnit(const MatrixUnit&) = delete;
    MatrixUnit& operator=(const MatrixUnit&) = delete;
};

// Adds a product of bfloat16 numbers to the tile `to`.
template <int to, int left, int right>
[[gnu::always_inline]] static inline void multiply_tiles() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(to), "i"(left), "i"(right));
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

// Right operands of `count` rows of I numbers, a multiple of 32: for every 32 of them a tile, in which
// each row is a column; columns without a row are zero. `numbers(i, d)`: row i's d .. d + 31.
template <class Numbers>
static inline void pack_rows(Numbers numbers, int64_t count, int64_t I, uint8_t* tiles) {
    for (int column = 0; column < 16; column += 8) {
        uint8_t* to = tiles + 4 * column;
        for (int64_t d = 0; d < I; d += 32, to += kTileBytes) {
            __m512i r[8];
            for (int i = 0; i < 8; i++)
                r[i] = column + i < count ? numbers(column + i, d) : _mm512_setzero_si512();
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
static inline void pack_rows(const bfloat16* rows, int64_t stride, int64_t count, int64_t I,
                             uint8_t* tiles) {
    pack_rows([=](int64_t i, int64_t d) { return _mm512_loadu_si512(rows + i * stride + d); },
              count, I, tiles);
}
