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

// The same with packed weights of 4 or 8 bits: their codes become bfloat16, which holds them exactly,
// and the sums of a group are multiplied by its scale.

// The codes of 64 weights of sixteen rows, as two left operands.
template <int bits>
static inline void unpack_codes(const uint8_t* codes, int64_t row_bytes, bool ahead,
                                bfloat16 (*to)[kTile][32]) {
    using P = Product<bfloat16>;
    for (int r = 0; r < kTile; r++, codes += row_bytes) {
        if (ahead) ask(codes + kTile * row_bytes);
        _mm512_store_si512(to[0][r], codes_at<P, bits, 0>(codes, 0));
        _mm512_store_si512(to[1][r], codes_at<P, bits, 32>(codes, 0));
    }
}

// Inputs of tokens as right operands, and the sums of each group of them.
struct MatrixInputs {
    const uint8_t* tiles;
    const float (*sums)[16];  // [tiles of tokens][groups]
    int64_t tile_bytes;
};

// Outputs of sixteen rows from `first` on and 16 N tokens.
template <int bits, int N>
static inline void multiply_codes(const PackedLinear& a, const MatrixInputs& in, int64_t first,
                                  float (*out)[kTile][16]) {
    const int64_t group = a.weight.group, groups = a.I / group, row_bytes = a.I * bits / 8;
    const uint8_t* codes = a.weight.codes + first * row_bytes;
    const auto* scales = static_cast<const bfloat16*>(a.weight.scales) + first * groups;
    const auto* minimums = static_cast<const bfloat16*>(a.weight.minimums) + first * groups;
    const bool ahead = first + 2 * kTile <= a.O;
    alignas(64) bfloat16 unpacked[2][kTile][32];
    alignas(64) float sums[N][kTile][16];
    memset(out, 0, sizeof sums);
    for (int64_t i = 0; i < a.I; i += 32) {
        const int64_t half = i / 32 % 2, g = i / group;
        if (half == 0)
            unpack_codes<bits>(codes + i * bits / 8, row_bytes, ahead && i % (bits == 4 ? 128 : 64) == 0,
                               unpacked);
        if (i % group == 0) {
            clear_tile<0>();
            if (N > 1) clear_tile<1>();
            if (N > 2) clear_tile<2>();
            if (N > 3) clear_tile<3>();
        }
        const uint8_t* x = in.tiles + i / 32 * kTileBytes;
        load_tile<4>(unpacked[half], 64);
        load_tile<5>(x, 64);
        multiply_tiles<0, 4, 5>();
        if (N > 1) load_tile<6>(x + in.tile_bytes, 64), multiply_tiles<1, 4, 6>();
        if (N > 2) load_tile<7>(x + 2 * in.tile_bytes, 64), multiply_tiles<2, 4, 7>();
        if (N > 3) load_tile<5>(x + 3 * in.tile_bytes, 64), multiply_tiles<3, 4, 5>();
        if ((i + 32) % group) continue;
        store_tile<0>(sums[0]);
        if (N > 1) store_tile<1>(sums[1 % N]);
        if (N > 2) store_tile<2>(sums[2 % N]);
        if (N > 3) store_tile<3>(sums[3 % N]);
        for (int r = 0; r < kTile; r++) {
            const Vector scale = broadcast(number(scales + r * groups + g));
            const Vector minimum = broadcast(number(minimums + r * groups + g));
            for (int n = 0; n < N; n++) {
                const Vector before = fma(minimum, load(in.sums[n * groups + g]), load(out[n][r]));
                store(out[n][r], fma(scale, load(sums[n][r]), before));
            }
        }
    }
}

template <int bits>
static void matrix_packed_linear(const PackedLinear& a) {
    const int64_t tiles = (a.T + 15) / 16, tile_bytes = 2 * a.I * 16;
    const int64_t group = a.weight.group, groups = a.I / group, blocks = (a.O + kTile - 1) / kTile;
    auto* const inputs = static_cast<uint8_t*>(
        workspace(1, tiles * (tile_bytes + groups * 16 * static_cast<int64_t>(sizeof(float)))));
    auto* const sums = reinterpret_cast<float (*)[16]>(inputs + tiles * tile_bytes);
    const auto* const x = static_cast<const bfloat16*>(a.x);
    memset(sums, 0, tiles * groups * sizeof *sums);
    for (int64_t t = 0; t < a.T; t++) {
        if (t % 16 == 0)
            pack_rows(x + t * a.x_stride, a.x_stride, a.T - t, a.I, inputs + t / 16 * tile_bytes);
        for (int64_t g = 0; g < groups; g++) {
            Vector sum = broadcast(0.0f);
            for (int64_t i = 0; i < group; i += 16)
                sum = sum + load(x + t * a.x_stride + g * group + i);
            sums[t / 16 * groups + g][t % 16] = total(sum);
        }
    }
    const auto multiply = tiles == 1   ? multiply_codes<bits, 1>
                          : tiles == 2 ? multiply_codes<bits, 2>
                          : tiles == 3 ? multiply_codes<bits, 3>
                                       : multiply_codes<bits, 4>;
    for_each(blocks, a.O * a.I > 1 << 16, [&](int64_t block) {
        const int64_t first = lesser(block * kTile, a.O - kTile);
        alignas(64) float out[4][kTile][16];
        {
            MatrixUnit unit;
            multiply(a, {inputs, sums, tile_bytes}, first, out);
        }
        for (int64_t t = 0; t < a.T; t++) {
            float own[kTile];
            for (int o = 0; o < kTile; o++) own[o] = out[t / 16][o][t % 16];
            finish_outputs(own, kTile, static_cast<const bfloat16*>(a.bias), first,
                           static_cast<bfloat16*>(a.out) + t * a.O);
        }
    });
}
