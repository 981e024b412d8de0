// Products of inputs of 16 bits and codes of packed weights, in whole numbers: AVX2 multiplies sixteen
// pairs of 16 bits at once and adds them two by two, and codes become 16 bits in fewer steps than
// floats. An input is rounded to 2^-16 of the largest one of its group.

template <class T>
struct WholeProduct {
    using Query = int16_t;
    using Key = __m256i;
    using Sum = __m256i;
    static constexpr int step = 16;
    static constexpr bool scaled = true;

    static Sum none() { return _mm256_setzero_si256(); }
    static Vector floats(Sum sum) { return {_mm256_cvtepi32_ps(sum)}; }
    template <Part part>
    static Key code(const uint8_t* p) {
        const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        if (part == lower_half) return _mm256_and_si256(x, _mm256_set1_epi16(15));
        return part == upper_half ? _mm256_srli_epi16(x, 4) : x;
    }
    static Sum add(Sum sum, const int16_t* q, Key k) {
        const __m256i query = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(query, k));
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
};
template <>
struct CodeProduct<bfloat16> : WholeProduct<bfloat16> {};
template <>
struct CodeProduct<float16> : WholeProduct<float16> {};
