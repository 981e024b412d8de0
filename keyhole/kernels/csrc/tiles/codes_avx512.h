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
