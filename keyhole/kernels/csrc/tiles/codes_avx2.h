// Products of inputs of 16 bits and codes of packed weights, in whole numbers: AVX2 multiplies sixteen
// pairs of 16 bits at once and adds them two by two, and codes become 16 bits in fewer steps than
// floats. An input is rounded to 2^-16 of the largest one of its group. Rows are read one after
// another: this is fast enough for the stream of codes from memory to be what takes time.

template <class T>
struct WholeProduct {
    using Query = int16_t;
    using Key = __m256i;
    using Sum = __m256i;
    static constexpr int step = 16;
    static constexpr bool scaled = true;

    template <Part part>
    static Key code(const uint8_t* p) {
        const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        if (part == lower_half) return _mm256_and_si256(x, _mm256_set1_epi16(15));
        return part == upper_half ? _mm256_srli_epi16(x, 4) : x;
    }
    template <int quarter>
    static Key six_bits(const uint8_t* low, const uint8_t* high) {
        return _mm256_cvtepu8_epi16(six_bit_bytes<quarter>(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(low)),
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(high))));
    }
    static __m256i numbers(const int16_t* q) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
    }
    static Sum add(Sum sum, __m256i q, Key k) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(q, k));
    }
    template <int bits>
    static void keep(const T* x, int64_t I, int64_t group, int16_t* row, float* sums, float* scales) {
        for (int64_t g = 0; g < I / group; g++)
            keep_group(x + g * group, group, row + g * group, sums[g], scales[g]);
    }
    // The whole numbers of a group of inputs, their sum and their scale: NaN if one is not finite, or
    // if the sum is not. A group without an input above 2^-100 counts as zeros.
    static void keep_group(const T* x, int64_t count, int16_t* out, float& sum, float& scale) {
        constexpr float limit = 32767.0f, least = 0x1p-100f;  // limit by least is finite
        constexpr int W = Vector::width;
        Vector all = broadcast(0.0f), high = all;
        for (int64_t i = 0; i < count; i += W) {
            const Vector v = load(x + i);
            all = all + v;
            high = max(high, max(v, broadcast(0.0f) - v));
        }
        const float top = largest(high);
        const Vector up = broadcast(top > least ? limit / top : 0.0f);
        for (int64_t i = 0; i < count; i += W) {
            const __m256i whole = _mm256_cvtps_epi32((load(x + i) * up).v);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                             _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                             _mm256_extracti128_si256(whole, 1)));
        }
        sum = total(all);
        scale = sum - sum == 0.0f ? top / limit : NAN;
        if (top <= least && scale == scale) sum = 0.0f;
    }

    // An output of H tokens: out[h * kTile]. One or two are faster if the loops know their group.
    template <class S, int bits, int H>
    static void row(const PackedLinear& a, const Inputs<T>& in, GroupScales<S> by, int64_t row,
                    bool ahead, float* out) {
        if constexpr (H <= 2) {
            constexpr int other = bits == 6 ? 16 : 64;
            if (a.weight.group == 32) return row_of<S, bits, H, 32>(a, in, by, row, ahead, out);
            if (a.weight.group == other) return row_of<S, bits, H, other>(a, in, by, row, ahead, out);
        }
        row_of<S, bits, H, 0>(a, in, by, row, ahead, out);
    }
    // known: inputs of a group, or 0: as `a` says.
    template <class S, int bits, int H, int known>
    static void row_of(const PackedLinear& a, const Inputs<T>& in, GroupScales<S> by, int64_t row,
                       bool ahead, float* out) {
        constexpr int W = Vector::width, bytes = kBlock * bits / 8;
        const int64_t group = known ? known : a.weight.group, groups = a.I / group;
        const uint8_t* block = a.weight.codes + row * (a.I * bits / 8);
        const int16_t* x = in.rows;
        Vector total[H];
        Sum part[1][H];
        for (int h = 0; h < H; h++) total[h] = broadcast(0.0f), part[0][h] = _mm256_setzero_si256();
        for (int64_t g = 0; g < groups; g += W) {
            const int n = static_cast<int>(groups - g < W ? groups - g : W);
            const Vector s = n == W ? load(by.scales + g) : load(by.scales + g, n);
            const Vector m = n == W ? load(by.minimums + g) : load(by.minimums + g, n);
            float scale[H][W];
            for (int h = 0; h < H; h++) {
                const int64_t at = h * in.groups_stride + g;
                store(scale[h], s * load(in.scales + at));
                total[h] = fma(m, load(in.sums + at), total[h]);
            }
            int k = 0;
            const auto end_group = [&]() {
                for (int h = 0; h < H; h++) {
                    const Vector sum = {_mm256_cvtepi32_ps(part[0][h])};
                    total[h] = fma(sum, broadcast(scale[h][k]), total[h]);
                    part[0][h] = _mm256_setzero_si256();
                }
                k++;
            };
            while (k < n) {
                for (int64_t i = 0; i < group; i += kBlock, x += kBlock, block += bytes) {
                    if (ahead) ask(block + kAhead);
                    add_span<WholeProduct, bits, 0>(block, 0, x, in.stride, part);
                    if constexpr (bits == 6) {
                        if (group == 16) end_group();
                        add_span<WholeProduct, bits, 16>(block, 0, x, in.stride, part);
                    }
                    if (group <= 32) end_group();
                    add_span<WholeProduct, bits, 32>(block, 0, x, in.stride, part);
                    if constexpr (bits == 6) {
                        if (group == 16) end_group();
                        add_span<WholeProduct, bits, 48>(block, 0, x, in.stride, part);
                    }
                }
                end_group();
            }
        }
        for (int h = 0; h < H; h++) out[h * kTile] = sum_of(total[h]);
    }

  private:
    static constexpr int64_t kAhead = 2048;  // bytes; measured (benchmarks/LOG.md)
};
template <>
struct CodeProduct<bfloat16> : WholeProduct<bfloat16> {};
template <>
struct CodeProduct<float16> : WholeProduct<float16> {};
