// A linear layer for up to 64 tokens by the matrix unit: sixteen rows of weights are the left operand
// where they lie, the inputs of sixteen tokens the right one. A token's sums do not depend on how
// many there are.

constexpr int64_t kMostTokens = 64;

// N: tiles of tokens.
template <int N>
static inline void multiply_weights(const bfloat16* weight, int64_t I, const uint8_t* inputs,
                                    int64_t tile_bytes, uint8_t* out) {
    clear_tile<0>();
    if (N > 1) clear_tile<1>();
    if (N > 2) clear_tile<2>();
    if (N > 3) clear_tile<3>();
    for (int64_t i = 0; i < I; i += 32, inputs += kTileBytes) {
        load_tile<4>(weight + i, 2 * I);
        load_tile<5>(inputs, 64);
        multiply_tiles<0, 4, 5>();
        if (N > 1) load_tile<6>(inputs + tile_bytes, 64), multiply_tiles<1, 4, 6>();
        if (N > 2) load_tile<7>(inputs + 2 * tile_bytes, 64), multiply_tiles<2, 4, 7>();
        if (N > 3) load_tile<5>(inputs + 3 * tile_bytes, 64), multiply_tiles<3, 4, 5>();
    }
    store_tile<0>(out);
    if (N > 1) store_tile<1>(out + kTileBytes);
    if (N > 2) store_tile<2>(out + 2 * kTileBytes);
    if (N > 3) store_tile<3>(out + 3 * kTileBytes);
}

static void matrix_linear(const Linear& a) {
    const int64_t tiles = (a.T + 15) / 16, tile_bytes = 2 * a.I * 16;
    const int64_t blocks = (a.O + kTile - 1) / kTile;
    auto* const inputs = static_cast<uint8_t*>(workspace(1, tiles * tile_bytes));
    const auto* const x = static_cast<const bfloat16*>(a.x);
    for (int64_t i = 0; i < tiles; i++)
        pack_rows(x + 16 * i * a.x_stride, a.x_stride, a.T - 16 * i, a.I, inputs + i * tile_bytes);
    const auto multiply = tiles == 1   ? multiply_weights<1>
                          : tiles == 2 ? multiply_weights<2>
                          : tiles == 3 ? multiply_weights<3>
                                       : multiply_weights<4>;
    for_each(blocks, a.O * a.I > 1 << 16, [&](int64_t block) {
        // The last block begins early enough to be whole: some of its outputs are computed twice.
        const int64_t first = lesser(block * kTile, a.O - kTile);
        alignas(64) uint8_t products[4 * kTileBytes];
        {
            MatrixUnit unit;
            multiply(static_cast<const bfloat16*>(a.weight) + first * a.I, a.I, inputs, tile_bytes,
                     products);
        }
        const auto* sums = reinterpret_cast<const float*>(products);
        for (int64_t t = 0; t < a.T; t++) {
            float own[kTile];
            for (int o = 0; o < kTile; o++) own[o] = sums[t / 16 * 256 + 16 * o + t % 16];
            finish_outputs(own, kTile, static_cast<const bfloat16*>(a.bias), first,
                           static_cast<bfloat16*>(a.out) + t * a.O);
        }
    });
}
