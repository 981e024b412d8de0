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

// The same with packed weights of 4 or 8 bits, in whole numbers: codes are the left operand, those of 8
// bits where they lie. Inputs become two digits of a byte, which rounds an input to 2^-16 of the
// largest one of its group, as in codes_avx2.h. A tile has the upper digits of eight tokens and then
// their lower ones; if there are more, sixteen tokens have two tiles.

// Calls f(0), f(1), ..., f(n - 1) with numbers that are constants.
template <int n, class F>
[[gnu::always_inline]] static inline void unrolled(const F& f) {
    if constexpr (n > 0) {
        unrolled<n - 1>(f);
        f(std::integral_constant<int, n - 1>());
    }
}

// Inputs of sets of tokens as right operands, and for each group of them and each column what a product
// is multiplied by, and the sum of the inputs.
struct MatrixInputs {
    int64_t tokens, digit_tiles;  // of a set
    int64_t sets, tile_bytes, groups;
    uint8_t* tiles;                   // [sets][digit_tiles][I / 64]
    float (*steps)[16], (*sums)[16];  // [sets][groups]

    explicit MatrixInputs(const PackedLinear& a) {
        digit_tiles = a.T > 16 / kDigits ? kDigits : 1;
        tokens = 16 * digit_tiles / kDigits;
        sets = (a.T + tokens - 1) / tokens;
        tile_bytes = 16 * a.I;
        groups = a.I / a.weight.group;
        const int64_t row_bytes = kDigits * a.I, all = sets * groups;
        tiles = static_cast<uint8_t*>(workspace(
            1, sets * digit_tiles * tile_bytes + 2 * all * sizeof *sums + tokens * row_bytes));
        steps = reinterpret_cast<float (*)[16]>(tiles + sets * digit_tiles * tile_bytes);
        sums = steps + all;
        memset(steps, 0, 2 * all * sizeof *sums);
        auto* const rows = reinterpret_cast<uint8_t*>(sums + all);
        for (int64_t set = 0; set < sets; set++) {
            const int64_t count = lesser(a.T - set * tokens, tokens);
            for (int64_t t = 0; t < count; t++)
                for (int64_t g = 0; g < groups; g++)
                    keep(static_cast<const bfloat16*>(a.x) + (set * tokens + t) * a.x_stride +
                             g * a.weight.group,
                         a.weight.group, rows + t * row_bytes + g * a.weight.group, a.I,
                         steps[set * groups + g] + t, sums[set * groups + g] + t);
            for (int64_t tile = 0; tile < digit_tiles; tile++)
                pack_rows(
                    [&](int64_t column, int64_t d) {
                        const int64_t t = column % tokens, digit = tile + column / tokens;
                        return t < count
                                   ? _mm512_loadu_si512(rows + t * row_bytes + digit * a.I + 2 * d)
                                   : _mm512_setzero_si512();
                    },
                    16, a.I / 2, tiles + (set * digit_tiles + tile) * tile_bytes);
        }
    }

  private:
    // Of one token and group. A group without an input above 2^-100 counts as zeros.
    void keep(const bfloat16* x, int64_t count, uint8_t* to, int64_t digit_stride, float* step,
              float* sum) const {
        constexpr float limit = 127 * 256 + 127, least = 0x1p-100f;  // limit by least is finite
        Vector all = broadcast(0.0f), high = all;
        for (int64_t i = 0; i < count; i += 16) {
            const Vector v = load(x + i);
            all = all + v;
            high = max(high, max(v, broadcast(0.0f) - v));
        }
        const float top = largest(high), whole_sum = total(all);
        const Vector up = broadcast(top > least ? limit / top : 0.0f);
        for (int64_t i = 0; i < count; i += 16) {
            const __m512i n = _mm512_cvtps_epi32((load(x + i) * up).v);
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(upper));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + digit_stride + i),
                             _mm512_cvtepi32_epi8(n));  // the lower byte
        }
        const bool finite = whole_sum - whole_sum == 0.0f;
        *step = finite ? top / limit : NAN;
        if (digit_tiles == 1) step[tokens] = *step, *step *= 256.0f;
        *sum = finite && top <= least ? 0.0f : whole_sum;
    }
};

// The scales and minimums of sixteen rows as floats, those of a group one after another.
struct MatrixScales {
    int64_t groups;
    float (*scales)[kTile], (*minimums)[kTile];

    MatrixScales(const PackedLinear& a, int64_t first) : groups(a.I / a.weight.group) {
        const int64_t all = rounded_up(groups, 16);
        scales = static_cast<float (*)[kTile]>(
            workspace(3, 2 * all * static_cast<int64_t>(sizeof *scales)));
        minimums = scales + all;
        if (a.blocks.of_blocks) keep(scales_from<float>(a, first, kTile));
        else keep(scales_from<bfloat16>(a, first, kTile));
    }

  private:
    template <class S>
    void keep(GroupScales<S> by) {
        const auto transpose = [&](const S* from, float (*to)[kTile]) {
            const auto sixteen = [&](int64_t row, int64_t d) {  // numbers of four bytes, from d / 2 on
                const int count = static_cast<int>(lesser(groups - d / 2, 16));
                return _mm512_castps_si512(load(from + row * groups + d / 2, count).v);
            };
            pack_rows(sixteen, kTile, 2 * groups, reinterpret_cast<uint8_t*>(to));
        };
        transpose(by.scales, scales);
        transpose(by.minimums, minimums);
    }
};

// 64 codes of 4 bits of sixteen rows, a byte each.
static inline void unpack_codes(const uint8_t* codes, int64_t row_bytes, uint8_t (*to)[64]) {
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
#pragma GCC unroll 4
    for (int r = 0; r < kTile; r++) {
        const __m512i twice = _mm512_broadcast_i64x4(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + r * row_bytes)));
        _mm512_store_si512(to[r], _mm512_and_si512(_mm512_srlv_epi16(twice, shift),
                                                   _mm512_set1_epi8(15)));
    }
}

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

// Outputs of sixteen rows from `first` on and a set of tokens of D tiles. depth: codes of a product.
template <int bits, int depth, int D>
static inline void multiply_codes(const PackedLinear& a, const MatrixInputs& in, int64_t set,
                                  const MatrixScales& by, int64_t first, float (*out)[16]) {
    const int64_t row_bytes = a.I * bits / 8;
    const uint8_t* codes = a.weight.codes + first * row_bytes;
    const uint8_t* inputs = in.tiles + set * D * in.tile_bytes;
    const float(*steps)[16] = in.steps + set * in.groups;
    const float(*input_sums)[16] = in.sums + set * in.groups;
    // A load by the unit waits until what it loads has left the store buffer, so codes are unpacked
    // a step before they are used. Sums stay in registers, as every store delays that.
    alignas(64) uint8_t unpacked[2][kTile][64];
    alignas(64) int32_t sums[2][D][kTile][16];
    Vector totals[kTile];
    unrolled<kTile>([&](auto r) { totals[r] = broadcast(0.0f); });
    const auto finish = [&](int64_t g) __attribute__((always_inline)) {
        const Vector step = load(steps[g]), input_sum = load(input_sums[g]);
        const float *scale = by.scales[g], *minimum = by.minimums[g];
        unrolled<kTile>([&](auto r) __attribute__((always_inline)) {
            const __m512i sum = _mm512_load_si512(sums[g % 2][0][r]);
            const Vector number = D == 1 ? Vector{_mm512_cvtepi32_ps(sum)}
                                         : whole(sum, _mm512_load_si512(sums[g % 2][D - 1][r]));
            totals[r] = fma(broadcast(scale[r]), number * step, totals[r]);
            totals[r] = fma(broadcast(minimum[r]), input_sum, totals[r]);
        });
    };
    const auto unpack = [&](int64_t i) {
        if (bits == 4 && i < a.I) unpack_codes(codes + i / 2, row_bytes, unpacked[i / kBlock % 2]);
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
            if (bits == 4) load_tile<4>(unpacked[i / kBlock % 2][0] + j % kBlock, 64);
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

template <int bits, int depth>
static void matrix_packed_linear(const PackedLinear& a) {
    const MatrixInputs in(a);
    const auto compute = [&](int64_t first) {
        const MatrixScales by(a, first);
        for (int64_t set = 0; set < in.sets; set++) {
            alignas(64) float out[kTile][16], columns[16][kTile];
            if (in.digit_tiles == 1) multiply_codes<bits, depth, 1>(a, in, set, by, first, out);
            else multiply_codes<bits, depth, 2>(a, in, set, by, first, out);
            pack_rows([&](int64_t row, int64_t) { return _mm512_load_si512(out[row]); }, kTile, 32,
                      reinterpret_cast<uint8_t*>(columns));
            const int64_t begin = set * in.tokens, count = lesser(a.T - begin, in.tokens);
            for (int64_t t = 0; t < count; t++) {
                if (in.digit_tiles == 1) store(columns[t], load(columns[t]) + load(columns[8 + t]));
                finish_outputs(columns[t], kTile, static_cast<const bfloat16*>(a.bias), first,
                               static_cast<bfloat16*>(a.out) + (begin + t) * a.O);
            }
        }
    };
    // Blocks in order, so that the first codes of most are prefetched, and enough pieces for all threads.
    const int64_t blocks = (a.O + kTile - 1) / kTile;
    const int64_t piece = blocks >= 16 * omp_get_max_threads() ? 4 : 1;
    for_each((blocks + piece - 1) / piece, a.O * a.I > 1 << 16, [&](int64_t at) {
        const MatrixUnit unit(depth);
        // The last one begins early enough to be whole: some outputs are computed twice.
        for (int64_t i = at * piece; i < lesser(blocks, (at + 1) * piece); i++)
            compute(lesser(i * kTile, a.O - kTile));
    });
}
