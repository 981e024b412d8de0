// Products of bfloat16 inputs and codes of 4 bits with AVX-512. In bfloat16, 128 + code is the number
// 128 with the code in its lowest bits: words of four codes become numbers by a shift and a mask. The
// 128 is taken off the minimums. Codes of two blocks are read at once, which gives them an order
// that the inputs take, too.

template <>
struct OwnRows<bfloat16, 4> {
    static constexpr bool exists = true;
    static constexpr int64_t step = 2 * kBlock;

    // Keeps inputs in the order of the codes: of both blocks, the even ones of their first halves,
    // those of their second halves, and then the odd ones.
    static void keep(const bfloat16* x, int64_t I, bfloat16* to) {
        for (int64_t i = 0; i < rounded_up(I, step); i += kBlock) {
            bfloat16* const block = to + i / step * step + i % step / 4;
            for (int half = 0; half < 2; half++) {
                const __m512i v = i < I ? _mm512_loadu_si512(x + i + 32 * half) : _mm512_setzero_si512();
                const auto put = [&](int place, __m512i words) {
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(block + 32 * place),
                                        _mm512_cvtepi32_epi16(words));
                };
                put(half, v);
                put(2 + half, _mm512_srli_epi32(v, 16));
            }
        }
    }

    // R outputs of H tokens: out[h][r], of rows of kTile. ahead: prefetch the rows that come next.
    template <int H, int R, class S>
    static void rows(const PackedLinear& a, const Inputs<bfloat16>& in, GroupScales<S> by,
                     int64_t row, bool ahead, float* out) {
        const auto rows_of = a.weight.group == 32   ? rows_in<32, H, R, S>
                             : a.weight.group == 64 ? rows_in<64, H, R, S>
                                                    : rows_in<128, H, R, S>;
        rows_of(a, in, by, row, ahead, out);
    }

  private:
    template <int group, int H, int R, class S>
    static void rows_in(const PackedLinear& a, const Inputs<bfloat16>& in, GroupScales<S> by,
                        int64_t row, bool ahead, float* out) {
        constexpr int W = Vector::width;
        const int64_t groups = a.I / group, row_bytes = a.I / 2;
        const uint8_t* from = a.weight.codes + row * row_bytes;
        Vector total[R][H];
        for (int r = 0; r < R; r++)
            for (int h = 0; h < H; h++) total[r][h] = broadcast(0.0f);
        for (int64_t g = 0; g < groups; g += W) {
            const int n = static_cast<int>(lesser(groups - g, W));
            for (int r = 0; r < R; r++) {
                const int64_t at = r * groups + g;
                const Vector scale = load(by.scales + at, n);
                const Vector m = fma(broadcast(-128.0f), scale, load(by.minimums + at, n));
                for (int h = 0; h < H; h++)
                    total[r][h] = fma(m, load(in.sums + h * in.groups_stride + g), total[r][h]);
            }
        }
        int64_t i = 0;
        for (; i + step <= a.I; i += step)
            for (int r = 0; r < R; r++) {
                const uint8_t* p = from + r * row_bytes + i / 2;
                if (ahead) ask(p + R * row_bytes);
                add<group, H>(_mm512_loadu_si512(p), by.scales + r * groups + i / group,
                              in.rows + i, in.stride, total[r]);
            }
        if (i < a.I)  // one block, and its scales for the other one, too
            for (int r = 0; r < R; r++) {
                const auto* p = reinterpret_cast<const __m256i*>(from + r * row_bytes + i / 2);
                const S* scales = by.scales + r * groups + i / group;
                const S both[4] = {scales[0], scales[kBlock / group - 1], scales[0],
                                          scales[kBlock / group - 1]};
                add<group, H>(_mm512_zextsi256_si512(_mm256_loadu_si256(p)), both, in.rows + i,
                              in.stride, total[r]);
            }
        for (int r = 0; r < R; r++)
            for (int h = 0; h < H; h++) out[h * kTile + r] = sum_of(total[r][h]);
    }

    // Adds the products of the codes of two blocks of a row.
    template <int group, int H, class S>
    [[gnu::always_inline]] static inline void add(__m512i codes, const S* scales,
                                                  const bfloat16* x, int64_t stride,
                                                  Vector (&total)[H]) {
        const __m512i number[4] = {shifted<0>(codes), shifted<4>(codes), shifted<8>(codes),
                                   shifted<12>(codes)};
        const auto product = [&](Vector sum, int h, int k) {
            return Product<bfloat16>::add(sum, Product<bfloat16>::numbers(x + h * stride + 32 * k),
                                          number[k]);
        };
        if constexpr (group == 32) {
            const Vector scale[2] = {scale_of<32, 0>(scales), scale_of<32, 1>(scales)};
            for (int h = 0; h < H; h++)
                for (int half = 0; half < 2; half++)
                    total[h] = fma(product(product(broadcast(0.0f), h, half), h, 2 + half),
                                   scale[half], total[h]);
        } else {
            const Vector scale = scale_of<group, 0>(scales);
            for (int h = 0; h < H; h++) {
                const Vector even = product(product(broadcast(0.0f), h, 0), h, 1);
                total[h] = fma(product(product(even, h, 2), h, 3), scale, total[h]);
            }
        }
    }

    // 128 + code, of the codes in four bits of each word.
    template <int bit>
    static __m512i shifted(__m512i words) {
        constexpr int first_two_or_third = 0xea;  // (a & b) | c
        return _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, bit), _mm512_set1_epi16(15),
                                         _mm512_set1_epi16(0x4300), first_two_or_third);
    }

    // Eight times the scale of a group of the first block, and of the same group of the second.
    template <int group, int place>
    static Vector scale_of(const bfloat16* scales) {
        constexpr int16_t second = group == 128 ? 0 : place + static_cast<int>(kBlock) / group;
        const __m512i from = _mm512_inserti64x4(_mm512_set1_epi16(place), _mm256_set1_epi16(second), 1);
        __m512i all;
        if constexpr (group == 32) {
            int64_t four;
            memcpy(&four, scales, sizeof four);
            all = _mm512_set1_epi64(four);
        } else if constexpr (group == 64) {
            int32_t two;
            memcpy(&two, scales, sizeof two);
            all = _mm512_set1_epi32(two);
        } else {
            all = _mm512_set1_epi16(static_cast<int16_t>(scales->bits));
        }
        return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, from, all))};
    }
    template <int group, int place>
    static Vector scale_of(const float* scales) {
        constexpr int second = group == 128 ? 0 : place + static_cast<int>(kBlock) / group;
        return {_mm512_insertf32x8(_mm512_set1_ps(scales[place]), _mm256_set1_ps(scales[second]), 1)};
    }
};

// Products in whole numbers, of which more tokens need fewer steps: codes of 4 or 8 bits are bytes, and inputs become two digits
// of a byte each, which rounds an input to 2^-16 of the largest one of its group, as in codes_avx2.h.

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
                for (int64_t g = 0, size = a.weight.group; g < groups; g++)
                    keep(x + g * size, size, digits + kDigits * t * a.I + g * size, a.I,
                         steps[set * groups + g] + t, sums[set * groups + g] + t);
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

  private:
    // Of one token and group. A group without an input above 2^-100 counts as zeros.
    void keep(const bfloat16* x, int64_t count, uint8_t* upper, int64_t stride, float* step,
              float* sum) const {
        constexpr float limit = 127 * 256 + 127, least = 0x1p-100f;  // limit by least is finite
        Vector all = broadcast(0.0f), high = all;
        for (int64_t i = 0; i < count; i += 16) {
            const Vector v = load(x + i);
            all = all + v;
            high = max(high, max(v, broadcast(0.0f) - v));
        }
        const float top = largest(high), plain = total(all);
        const Vector up = broadcast(top > least ? limit / top : 0.0f);
        for (int64_t i = 0; i < count; i += 16) {
            const __m512i n = _mm512_cvtps_epi32((load(x + i) * up).v);
            const __m512i rounded = _mm512_add_epi32(n, _mm512_set1_epi32(128));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(upper + i),
                             _mm512_cvtepi32_epi8(_mm512_srai_epi32(rounded, 8)));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(upper + stride + i),
                             _mm512_cvtepi32_epi8(n));  // the lower byte
        }
        const bool finite = plain - plain == 0.0f;
        *step = finite ? top / limit : NAN;
        if (digit_tiles == 1) step[tokens] = *step, *step *= 256.0f;
        *sum = finite && top <= least ? 0.0f : plain;
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

// 64 codes of a row, a byte each.
template <int bits>
[[gnu::always_inline]] static inline __m512i bytes_of(const uint8_t* codes) {
    if (bits == 8) return _mm512_loadu_si512(codes);
    const __m512i by = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i twice =
        _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i low = _mm512_and_si512(_mm512_srlv_epi16(twice, by), _mm512_set1_epi8(15));
    if (bits == 4) return low;
    // The upper two bits of each quarter, moved to the upper half of their bytes.
    const __m512i by_quarters = _mm512_setr_epi64(
        0, 0, 0x2000200020002, 0x2000200020002, 0x4000400040004, 0x4000400040004, 0x6000600060006,
        0x6000600060006);
    const __m512i four_times = _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + kBlock / 2)));
    const __m512i high =
        _mm512_and_si512(_mm512_srlv_epi16(four_times, by_quarters), _mm512_set1_epi8(3));
    return _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
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

// Outputs of a layer, where `Form` multiplies. depth: codes of which no two groups have a part.
template <class Form, int bits, int depth>
static void multiply_in_digits(const PackedLinear& a) {
    const CodeInputs in(a, a.T > 8 ? Form::most_tokens : 8);
    const auto compute = [&](int64_t first) {
        const CodeScales by(a, first);
        for (int64_t set = 0; set < in.sets; set++) {
            alignas(64) float out[16][kTile];
            const int64_t begin = set * in.tokens, count = lesser(a.T - begin, in.tokens);
            Form::template multiply<bits, depth>(a, in, set, count, by, first, out);
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
        [[maybe_unused]] const typename Form::Unit unit(depth);
        // The last one begins early enough to be whole: some outputs are computed twice.
        for (int64_t i = at * piece; i < lesser(blocks, (at + 1) * piece); i++)
            compute(lesser(i * kTile, a.O - kTile));
    });
}

// Whether layers of one input were computed so; those with fewer than sixteen outputs by `rest`. One
// token has few products for each code of 4 bits, which take time to arrange.
template <class Form, class Rest>
static bool multiply_in_digits(const PackedLinear& a, const Rest& rest) {
    if (a.T < (a.weight.bits == 4 ? 2 : 1)) return false;
    const int64_t bits = a.weight.bits, group = a.weight.group;
    const auto multiply = bits == 8   ? group == 32 ? multiply_in_digits<Form, 8, 32>
                                                    : multiply_in_digits<Form, 8, 64>
                          : bits == 4 ? group == 32 ? multiply_in_digits<Form, 4, 32>
                                                    : multiply_in_digits<Form, 4, 64>
                          : group == 16 ? multiply_in_digits<Form, 6, 16>
                                        : multiply_in_digits<Form, 6, 32>;
    for (const PackedLinear* part = &a; part; part = part->next) {
        PackedLinear one = *part;
        one.next = nullptr;
        one.O < kTile ? rest(one) : multiply(one);
    }
    return true;
}

// By VNNI: four codes of sixteen rows at once meet the digits of each token.
struct VectorCodes {
    struct Unit {
        explicit Unit(int) {}
    };
    static constexpr int64_t most_tokens = 8;  // of a set

    // Outputs [tokens][rows] of sixteen rows from `first` on and `count` tokens of a set.
    template <int bits, int depth>
    static void multiply(const PackedLinear& a, const CodeInputs& in, int64_t set, int64_t count,
                         const CodeScales& by, int64_t first, float (*out)[kTile]) {
        if (count > 4) multiply_tokens<bits, depth, 8>(a, in, set, by, first, out);
        else if (count > 2) multiply_tokens<bits, depth, 4>(a, in, set, by, first, out);
        else multiply_tokens<bits, depth, 2>(a, in, set, by, first, out);
    }

  private:
    template <int bits, int depth, int H>
    static void multiply_tokens(const PackedLinear& a, const CodeInputs& in, int64_t set,
                                const CodeScales& by, int64_t first, float (*out)[kTile]) {
        const int64_t row_bytes = a.I * bits / 8;
        const uint8_t* codes = a.weight.codes + first * row_bytes;
        const uint8_t* x = in.tiles + set * in.tile_bytes;
        Vector totals[H];
        __m512i upper[H], lower[H];
        for (int h = 0; h < H; h++) {
            totals[h] = broadcast(0.0f);
            upper[h] = lower[h] = _mm512_setzero_si512();
        }
        int64_t left = a.weight.group, g = 0;  // codes of the group
        for (int64_t i = 0; i < a.I; i += kBlock) {
            if (i % (bits == 4 ? 128 : 64) == 0)
                ask_codes(codes, row_bytes, i * bits / 8, first + 2 * kTile <= a.O);
            __m512i rows[kTile], columns[kBlock / 4];
            for (int r = 0; r < kTile; r++)
                rows[r] = bytes_of<bits>(codes + r * row_bytes + i * bits / 8);
            transpose(rows, columns);
            for (int k = 0; k < kBlock / 4;) {
                for (const int end = k + depth / 4; k < end; k++, x += 64)
                    for (int h = 0; h < H; h++) {
                        upper[h] = _mm512_dpbusd_epi32(upper[h], columns[k], four(x + 4 * h));
                        lower[h] = _mm512_dpbusd_epi32(lower[h], columns[k], four(x + 4 * (8 + h)));
                    }
                left -= depth;
                if (left) continue;
                const Vector scale = load(by.scales[g]);
                const float* step = in.steps[set * in.groups + g];
                const float* sum = in.sums[set * in.groups + g];
                for (int h = 0; h < H; h++) {
                    const Vector number = fma(whole(upper[h], lower[h]), broadcast(step[8 + h]),
                                              broadcast(by.lowest * sum[h]));
                    totals[h] = fma(scale, number, totals[h]);
                    upper[h] = lower[h] = _mm512_setzero_si512();
                }
                for (int h = 0; h < H && by.minimums; h++)
                    totals[h] = fma(load(by.minimums[g]), broadcast(sum[h]), totals[h]);
                left = a.weight.group;
                g++;
            }
        }
        for (int h = 0; h < H; h++) store(out[h], totals[h]);
    }
};

template <>
bool multiply_otherwise<bfloat16>(const PackedLinear& a) {
    return multiply_in_digits<VectorCodes>(a, packed_linear_as<bfloat16>);
}
