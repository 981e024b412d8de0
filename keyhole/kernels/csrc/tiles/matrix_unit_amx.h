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

// Right operands of `count` rows of I numbers, a multiple of 32, each of which is a column.
static inline void pack_rows(const bfloat16* rows, int64_t stride, int64_t count, int64_t I,
                             uint8_t* tiles) {
    pack_rows([=](int64_t i, int64_t at) { return _mm512_loadu_si512(rows + i * stride + at / 2); },
              count, 2 * I, tiles);
}
