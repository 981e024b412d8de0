// Products of inputs of 16 bits and codes of packed weights with AVX-512, in whole numbers: codes are
// bytes, of which VNNI multiplies 64 by a digit of their inputs at once. An input is rounded to 2^-16
// of the largest one of its group, which leaves two digits of a byte. Rows are read one after another,
// as in codes_avx2.h.

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

// The two digits of inputs of a group, and what their number is multiplied by: NaN if an input or the
// sum is not finite. A group without an input above 2^-100 counts as zeros.
struct Digits {
    float scale, sum;
    Vector up;

    template <class T>
    Digits(const T* x, int64_t count) {
        constexpr float limit = 127 * 256 + 127, least = 0x1p-100f;  // limit by least is finite
        Vector all = broadcast(0.0f), high = all;
        for (int64_t i = 0; i < count; i += 16) {
            const Vector v = load(x + i);
            all = all + v;
            high = max(high, max(v, broadcast(0.0f) - v));
        }
        const float top = largest(high), plain = total(all);
        const bool finite = plain - plain == 0.0f;
        up = broadcast(top > least ? limit / top : 0.0f);
        scale = finite ? top / limit : NAN;
        sum = finite && top <= least ? 0.0f : plain;
    }
    // Of sixteen inputs.
    template <class T>
    void store(const T* x, uint8_t* upper, uint8_t* lower) const {
        const __m512i n = _mm512_cvtps_epi32((load(x) * up).v);
        const __m512i rounded = _mm512_add_epi32(n, _mm512_set1_epi32(128));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(upper),
                         _mm512_cvtepi32_epi8(_mm512_srai_epi32(rounded, 8)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(lower), _mm512_cvtepi32_epi8(n));
    }
};

// What one addition takes: the codes of 128 weights, or a digit of their inputs.
struct Pair {
    static constexpr int64_t inputs = 2 * kBlock;
    __m512i a, b;

    // The codes of two blocks; not `whole`: of one, and zeros. Those of 4 bits come as the first
    // halves of both blocks, then the second halves.
    template <int bits>
    [[gnu::always_inline]] static inline Pair of(const uint8_t* codes, bool whole) {
        constexpr int64_t block = kBlock * bits / 8;
        if constexpr (bits != 4)
            return {bytes_of<bits>(codes),
                    whole ? bytes_of<bits>(codes + block) : _mm512_setzero_si512()};
        const auto* first = reinterpret_cast<const __m256i*>(codes);
        const __m512i both = whole ? _mm512_loadu_si512(codes)
                                   : _mm512_zextsi256_si512(_mm256_loadu_si256(first));
        const __m512i low = _mm512_set1_epi8(15);
        return {_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16(both, 4), low)};
    }
    // What belongs to 128 weights in their order, in the order in which `of` has codes.
    template <int bits>
    [[gnu::always_inline]] inline Pair as_codes() const {
        return bits == 4 ? halves() : *this;
    }
    // Moves what belongs to a group into the same lanes of both vectors. fine: the smaller groups of
    // these codes, which have 16 weights with 6 bits, and 32 with 4 or 8 bits.
    template <int bits, bool fine>
    [[gnu::always_inline]] inline Pair by_group() const {
        if constexpr (bits == 4) return fine ? quarters() : *this;
        if constexpr (bits == 8) return fine ? quarters() : halves();
        return fine ? Pair{_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)} : quarters();
    }

  private:
    [[gnu::always_inline]] inline Pair halves() const {
        return {_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee)};
    }
    [[gnu::always_inline]] inline Pair quarters() const {
        return {_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd)};
    }
};

template <class T>
struct WholeProduct {
    using Query = int16_t;  // of each pair of vectors, the upper digits and then the lower ones
    static constexpr bool scaled = true;

    // Keeps a token's inputs, and the sum and scale of each group.
    template <int bits>
    static void keep(const T* x, int64_t I, int64_t group, int16_t* row, float* sums, float* scales) {
        auto* const to = reinterpret_cast<uint8_t*>(row);
        if (I % Pair::inputs) memset(to + 2 * (I - kBlock), 0, 2 * Pair::inputs);
        for (int64_t g = 0; g < I / group; g++) {
            const Digits digits(x + g * group, group);
            sums[g] = digits.sum, scales[g] = digits.scale;
            for (int64_t i = g * group; i < (g + 1) * group; i += 16) {
                uint8_t* const upper = to + 2 * i - i % Pair::inputs;
                digits.store(x + i, upper, upper + Pair::inputs);
            }
        }
        const uint8_t* const end = to + 2 * rounded_up(I, Pair::inputs);
        for (uint8_t* digit = to; digit < end; digit += Pair::inputs) {
            const Pair natural = {_mm512_loadu_si512(digit), _mm512_loadu_si512(digit + 64)};
            const Pair as_read = natural.template as_codes<bits>();
            const Pair own = is_fine<bits>(group) ? as_read.template by_group<bits, true>()
                                                  : as_read.template by_group<bits, false>();
            _mm512_storeu_si512(digit, own.a);
            _mm512_storeu_si512(digit + 64, own.b);
        }
    }

    // An output of H tokens: out[h * kTile].
    template <class S, int bits, int H>
    static void row(const PackedLinear& a, const Inputs<T>& in, GroupScales<S> by, int64_t row,
                    bool ahead, float* out) {
        if (is_fine<bits>(a.weight.group)) row_of<S, bits, H, true>(a, in, by, row, ahead, out);
        else row_of<S, bits, H, false>(a, in, by, row, ahead, out);
    }

  private:
    static constexpr int64_t kAhead = 4096;  // bytes; measured (benchmarks/LOG.md)
    template <int bits>
    static bool is_fine(int64_t group) {
        return group == (bits == 6 ? 16 : 32);
    }

    template <class S, int bits, int H, bool fine>
    static void row_of(const PackedLinear& a, const Inputs<T>& in, GroupScales<S> by, int64_t row,
                       bool ahead, float* out) {
        constexpr int W = Vector::width;
        constexpr int64_t bytes = Pair::inputs * bits / 8;
        const int64_t group = a.weight.group, groups = a.I / group;
        const uint8_t* codes = a.weight.codes + row * (a.I * bits / 8);
        const auto* x = reinterpret_cast<const uint8_t*>(in.rows);
        Vector total[H], scale[H];
        for (int h = 0; h < H; h++) total[h] = broadcast(0.0f);
        // Which scale each lane takes, from the places of its codes.
        const __m512i place = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52,
                                                56, 60);
        const Pair places = {place, _mm512_add_epi32(place, _mm512_set1_epi32(kBlock))};
        const __m512i lanes = places.template as_codes<bits>().template by_group<bits, fine>().a;
        const __m512i first = _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(__builtin_ctzll(group)));
        const __m512i more = _mm512_set1_epi32(static_cast<int>(Pair::inputs / group));
        const auto add = [&](const Pair& key, __m512i from) __attribute__((always_inline)) {
            for (int h = 0; h < H; h++) {
                const uint8_t* digit = x + 2 * h * in.stride;
                __m512i sum = _mm512_setzero_si512();
                for (int d = 0; d < kDigits; d++, digit += Pair::inputs) {
                    sum = _mm512_slli_epi32(sum, 8);
                    sum = _mm512_dpbusd_epi32(sum, key.a, _mm512_loadu_si512(digit));
                    sum = _mm512_dpbusd_epi32(sum, key.b, _mm512_loadu_si512(digit + 64));
                }
                const Vector by_lane = {_mm512_permutexvar_ps(from, scale[h].v)};
                total[h] = fma({_mm512_cvtepi32_ps(sum)}, by_lane, total[h]);
            }
        };
        int64_t i = 0;
        for (int64_t g = 0; g < groups; g += W) {
            const int n = static_cast<int>(lesser(groups - g, W));
            const Vector s = load(by.scales + g, n), m = load(by.minimums + g, n);
            for (int h = 0; h < H; h++) {
                const int64_t at = h * in.groups_stride + g;
                scale[h] = s * load(in.scales + at, n);
                total[h] = fma(m, load(in.sums + at), total[h]);
            }
            __m512i from = first;
            const int64_t end = lesser(a.I, (g + W) * group);
            for (; i + Pair::inputs <= end; i += Pair::inputs, x += 2 * Pair::inputs, codes += bytes) {
                for (int64_t line = 0; line < bytes && ahead; line += 64) ask(codes + kAhead + line);
                add(Pair::of<bits>(codes, true).template by_group<bits, fine>(), from);
                from = _mm512_add_epi32(from, more);
            }
            if (i < end) add(Pair::of<bits>(codes, false).template by_group<bits, fine>(), from);
        }
        for (int h = 0; h < H; h++) out[h * kTile] = sum_of(total[h]);
    }
};
template <>
struct CodeProduct<bfloat16> : WholeProduct<bfloat16> {};
template <>
struct CodeProduct<float16> : WholeProduct<float16> {};
