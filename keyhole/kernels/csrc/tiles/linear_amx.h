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

// Packed weights: codes are bytes, and inputs two digits of a byte each.

// Inputs of sets of tokens, as tiles of sixteen columns: the upper digits of eight tokens and then their
// lower ones, or one tile of either of sixteen tokens. Row k of a tile has weights 4k .. 4k + 3.
struct CodeInputs {
    int64_t tokens, digit_tiles;  // of a set
    int64_t sets, tile_bytes, groups;
    uint8_t* tiles;                   // [sets][digit_tiles][I / 64]
    float (*steps)[16], (*sums)[16];  // [sets][groups]: what products are multiplied by; of inputs

    CodeInputs(const PackedLinear& a, int64_t tokens)
        : tokens(tokens), digit_tiles(kDigits * tokens / 16), sets((a.T + tokens - 1) / tokens),
          tile_bytes(16 * a.I), groups(a.I / a.weight.group) {
        const int64_t all = sets * groups;
        tiles = static_cast<uint8_t*>(
            workspace(1, sets * digit_tiles * tile_bytes + 2 * all * sizeof *sums +
                             tokens * kDigits * a.I));
        steps = reinterpret_cast<float (*)[16]>(tiles + sets * digit_tiles * tile_bytes);
        sums = steps + all;
        memset(steps, 0, 2 * all * sizeof *sums);
        auto* const digits = reinterpret_cast<uint8_t*>(sums + all);  // [tokens][kDigits][I]
        for (int64_t set = 0; set < sets; set++) {
            const int64_t count = lesser(a.T - set * tokens, tokens);
            for (int64_t t = 0; t < count; t++) {
                const auto* x = static_cast<const bfloat16*>(a.x) + (set * tokens + t) * a.x_stride;
                for (int64_t g = 0, size = a.weight.group; g < groups; g++) {
                    const Digits of(x + g * size, size);
                    uint8_t* const upper = digits + kDigits * t * a.I;
                    for (int64_t i = g * size; i < (g + 1) * size; i += 16)
                        of.store(x + i, upper + i, upper + a.I + i);
                    sums[set * groups + g][t] = of.sum;
                    float* const step = steps[set * groups + g] + t;
                    *step = digit_tiles == 1 ? 256.0f * of.scale : of.scale;
                    if (digit_tiles == 1) step[tokens] = of.scale;
                }
            }
            for (int64_t tile = 0; tile < digit_tiles; tile++) {
                const auto bytes = [&](int64_t column, int64_t at) {
                    const int64_t t = column % tokens, digit = tile + column / tokens;
                    return t < count ? _mm512_loadu_si512(digits + (kDigits * t + digit) * a.I + at)
                                     : _mm512_setzero_si512();
                };
                pack_rows(bytes, 16, a.I, tiles + (set * digit_tiles + tile) * tile_bytes);
            }
        }
    }
};

// The scales and minimums of sixteen rows as floats, those of a group one after another. Where all
// minimums are the scale times `lowest`, they are not there.
struct CodeScales {
    int64_t groups;
    float lowest;
    float (*scales)[kTile], (*minimums)[kTile];

    CodeScales(const PackedLinear& a, int64_t first)
        : groups(a.I / a.weight.group), lowest(0.0f), minimums(nullptr) {
        const int64_t all = rounded_up(groups, 16), bytes = all * sizeof *scales;
        scales = static_cast<float (*)[kTile]>(workspace(3, 2 * bytes));
        const auto keep = [&](const auto* numbers, float (*to)[kTile]) {
            const auto floats = [&](int64_t row, int64_t at) {
                const int count = static_cast<int>(lesser(groups - at / 4, 16));
                return _mm512_castps_si512(load(numbers + row * groups + at / 4, count).v);
            };
            pack_rows(floats, kTile, 4 * groups, reinterpret_cast<uint8_t*>(to));
        };
        const bool own_minimums = !a.blocks.of_blocks || a.blocks.minimums;
        if (own_minimums) minimums = scales + all;
        else lowest = lowest_of(a);
        if (a.blocks.of_blocks) {
            const auto by = rows_of_blocks(a, first);
            keep(by.scales, scales);
            if (own_minimums) keep(by.minimums, minimums);
        } else {
            const auto by = scales_from<bfloat16>(a, first, kTile);
            keep(by.scales, scales);
            keep(by.minimums, minimums);
        }
    }

  private:
    GroupScales<float> rows_of_blocks(const PackedLinear& a, int64_t first) const {
        const int64_t all = kTile * groups;
        auto* const room = static_cast<float*>(workspace(2, 2 * all * sizeof(float)));
        for (int64_t r = 0; r < kTile; r++)
            expand_scales(a, first + r, room + r * groups, room + all + r * groups);
        return {room, room + all};
    }
};

// Prefetches a line of the codes of each of sixteen rows, of which `at` bytes have been read. At the
// ends of the rows those that come next begin, if there are some.
static inline void ask_codes(const uint8_t* codes, int64_t row_bytes, int64_t at, bool next) {
    at += 256;  // measured (benchmarks/LOG.md)
    if (at >= row_bytes) {
        if (!next) return;
        at += (kTile - 1) * row_bytes;
    }
#pragma GCC unroll 1
    for (int r = 0; r < kTile; r++) ask(codes + r * row_bytes + at);
}

// Products of packed weights: codes are the left operand, those of 8 bits where they lie.
struct MatrixCodes {
    // Outputs [tokens][rows] of sixteen rows from `first` on and `count` tokens of a set.
    template <int bits, int depth>
    static void multiply(const PackedLinear& a, const CodeInputs& in, int64_t set, int64_t count,
                         const CodeScales& by, int64_t first, float (*out)[kTile]) {
        alignas(64) float rows[kTile][16];
        if (in.digit_tiles == 1) multiply_tiles_of<bits, depth, 1>(a, in, set, by, first, rows);
        else multiply_tiles_of<bits, depth, 2>(a, in, set, by, first, rows);
        pack_rows([&](int64_t row, int64_t) { return _mm512_load_si512(rows[row]); }, kTile, 64,
                  reinterpret_cast<uint8_t*>(out));
        if (in.digit_tiles == 1)
            for (int64_t t = 0; t < count; t++) store(out[t], load(out[t]) + load(out[8 + t]));
    }

  private:
    // Calls f(0), f(1), ..., f(n - 1) with numbers that are constants.
    template <int n, class F>
    [[gnu::always_inline]] static inline void unrolled(const F& f) {
        if constexpr (n > 0) {
            unrolled<n - 1>(f);
            f(std::integral_constant<int, n - 1>());
        }
    }

    // By columns of D tiles.
    template <int bits, int depth, int D>
    static void multiply_tiles_of(const PackedLinear& a, const CodeInputs& in, int64_t set,
                                  const CodeScales& by, int64_t first, float (*out)[16]) {
        const int64_t row_bytes = a.I * bits / 8;
        const uint8_t* codes = a.weight.codes + first * row_bytes;
        const uint8_t* inputs = in.tiles + set * D * in.tile_bytes;
        const float(*steps)[16] = in.steps + set * in.groups;
        const float(*input_sums)[16] = in.sums + set * in.groups;
        // A load by the unit waits until what it loads has left the store buffer, so codes are
        // unpacked a step before they are used. Totals stay in registers, as every store delays
        // that.
        alignas(64) uint8_t unpacked[2][kTile][64];
        alignas(64) int32_t sums[2][D][kTile][16];
        Vector totals[kTile];
        unrolled<kTile>([&](auto r) { totals[r] = broadcast(0.0f); });
        const auto finish = [&](int64_t g) __attribute__((always_inline)) {
            const Vector step = load(steps[g]), input_sum = load(input_sums[g]);
            const Vector lowest = broadcast(by.lowest) * input_sum;
            const float* scale = by.scales[g];
            unrolled<kTile>([&](auto r) __attribute__((always_inline)) {
                const __m512i sum = _mm512_load_si512(sums[g % 2][0][r]);
                const Vector number = D == 1 ? Vector{_mm512_cvtepi32_ps(sum)}
                                             : whole(sum, _mm512_load_si512(sums[g % 2][D - 1][r]));
                totals[r] = fma(broadcast(scale[r]), fma(number, step, lowest), totals[r]);
            });
            if (!by.minimums) return;
            const float* minimum = by.minimums[g];
            unrolled<kTile>([&](auto r) __attribute__((always_inline)) {
                totals[r] = fma(broadcast(minimum[r]), input_sum, totals[r]);
            });
        };
        const auto unpack = [&](int64_t i) {
            if (bits == 8 || i >= a.I) return;
#pragma GCC unroll 4
            for (int r = 0; r < kTile; r++)
                _mm512_store_si512(unpacked[i / kBlock % 2][r],
                                   bytes_of<bits>(codes + r * row_bytes + i * bits / 8));
        };
        unpack(0);
        int64_t left = 0, g = 0;  // codes of the group
        for (int64_t i = 0; i < a.I; i += kBlock) {
            if (i % (bits == 4 ? 128 : 64) == 0)
                ask_codes(codes, row_bytes, i * bits / 8, first + 2 * kTile <= a.O);
            unpack(i + kBlock);
            for (int64_t j = i; j < i + kBlock; j += depth) {
                if (left == 0) {
                    left = a.weight.group;
                    unrolled<D>([](auto d) { clear_tile<d>(); });
                }
                if (bits < 8) load_tile<4>(unpacked[i / kBlock % 2][0] + j % kBlock, 64);
                else load_tile<4>(codes + j, row_bytes);
                unrolled<D>([&](auto d) {
                    load_tile<6 + d>(inputs + d * in.tile_bytes + 16 * j, 64);
                    multiply_unsigned<d, 4, 6 + d>();
                });
                left -= depth;
                if (left) continue;
                if (g) finish(g - 1);
                unrolled<D>([&](auto d) { store_tile<d>(sums[g % 2][d]); });
                g++;
            }
        }
        finish(in.groups - 1);
        unrolled<kTile>([&](auto r) { store(out[r], totals[r]); });
    }
};

// Outputs of a layer. depth: codes of which no two groups have a part.
template <int bits, int depth>
static void multiply_in_digits(const PackedLinear& a) {
    const CodeInputs in(a, a.T > 8 ? 16 : 8);
    const auto compute = [&](int64_t first) {
        const CodeScales by(a, first);
        for (int64_t set = 0; set < in.sets; set++) {
            alignas(64) float out[16][kTile];
            const int64_t begin = set * in.tokens, count = lesser(a.T - begin, in.tokens);
            MatrixCodes::multiply<bits, depth>(a, in, set, count, by, first, out);
            for (int64_t t = 0; t < count; t++)
                finish_outputs(out[t], kTile, static_cast<const bfloat16*>(a.bias), first,
                               static_cast<bfloat16*>(a.out) + (begin + t) * a.O);
        }
    };
    // Blocks in order, as the first codes of the next one are prefetched, and enough pieces for all
    // threads.
    const int64_t blocks = (a.O + kTile - 1) / kTile;
    const int64_t piece = blocks >= 16 * omp_get_max_threads() ? 4 : 1;
    for_each((blocks + piece - 1) / piece, a.O * a.I > 1 << 16, [&](int64_t at) {
        MatrixUnit unit(depth);
        // The last one begins early enough to be whole: some outputs are computed twice.
        for (int64_t i = at * piece; i < lesser(blocks, (at + 1) * piece); i++)
            compute(lesser(i * kTile, a.O - kTile));
    });
}

static void multiply_in_digits(const PackedLinear& a) {
    const int64_t bits = a.weight.bits;
    const auto multiply = a.weight.group == 32
                              ? bits == 8   ? multiply_in_digits<8, 32>
                                : bits == 4 ? multiply_in_digits<4, 32>
                                            : multiply_in_digits<6, 32>
                          : bits == 8 ? multiply_in_digits<8, 64>
                                      : multiply_in_digits<4, 64>;
    multiply(a);
}
