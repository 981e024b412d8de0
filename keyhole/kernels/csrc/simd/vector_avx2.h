// Eight floats in a register, and how bfloat16 and float16 become floats: AVX2 with FMA and F16C.

struct Vector {
    static constexpr int width = 8;
    __m256 v;
};

static inline Vector broadcast(float x) { return {_mm256_set1_ps(x)}; }
static inline Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// Where one of them is NaN: the second.
static inline Vector max(Vector a, Vector b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline Vector min(Vector a, Vector b) { return {_mm256_min_ps(a.v, b.v)}; }
// a, but NaN where `b` is.
static inline Vector or_nan(Vector a, Vector b) {
    return {_mm256_blendv_ps(a.v, b.v, _mm256_cmp_ps(b.v, b.v, _CMP_UNORD_Q))};
}
static inline float largest(Vector a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
static inline float total(Vector a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
// Whether a lane of `a` is above that of `b`; NaN never is.
static inline bool any_above(Vector a, Vector b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)) != 0;
}
static inline Vector nearest(Vector a) { return {_mm256_round_ps(a.v, 8)}; }
// x * 2^n for whole n; 0 where x2 < limit (false for NaN).
static inline Vector scaled(Vector x, Vector n, Vector x2, float limit) {
    const __m256i power = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    const __m256 keep = _mm256_cmp_ps(x2.v, _mm256_set1_ps(limit), _CMP_NLT_UQ);
    return {_mm256_and_ps(keep, _mm256_mul_ps(x.v, _mm256_castsi256_ps(power)))};
}

static inline Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
// So that a product with several others loads it once: GCC would load it with each.
static inline Vector in_register(Vector a) {
    asm("" : "+x"(a.v));
    return a;
}
static inline Vector widen(__m128i x, const bfloat16*) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))};
}
static inline Vector widen(__m128i x, const float16*) { return {_mm256_cvtph_ps(x)}; }
template <class T>
static inline Vector load(const T* p) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), p);
}

static inline Vector widen(__m128i x, const int8*) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x))};
}
static inline Vector widen(__m128i x, const e4m3*) {
    // As a float16 of the same exponent and mantissa bits.
    const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(x), 7);
    return {_mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16(int16_t(0xbf80))))};
}
static inline Vector load(const int8* p) {
    return widen(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), p);
}
static inline Vector load(const e4m3* p) {
    return widen(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), p);
}

static inline void store(float* p, Vector a) { _mm256_storeu_ps(p, a.v); }
static inline __m128i narrow(Vector a, const float16*) { return _mm256_cvtps_ph(a.v, 0); }
static inline __m128i narrow(Vector a, const bfloat16*) {
    // To the nearest, ties to even; a NaN stays one.
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
    const __m256i high = _mm256_srli_epi32(kept, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
template <class T>
static inline void store(T* p, Vector a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a, p));
}

// Codes of packed weights as floats: whole bytes, or their lower or upper four bits.
enum Part { whole_byte, lower_half, upper_half };
template <Part part>
static inline Vector codes(const uint8_t* p) {
    __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    if (part == lower_half) x = _mm256_and_si256(x, _mm256_set1_epi32(15));
    if (part == upper_half) x = _mm256_srli_epi32(x, 4);
    return {_mm256_cvtepi32_ps(x)};
}

#include "six_bits_x86.h"
// Codes of 6 bits, of a quarter of a block of 64 weights, as floats: see `Packed`.
template <int quarter>
static inline Vector six_bit_codes(const uint8_t* low, const uint8_t* high) {
    const __m128i whole = six_bit_bytes<quarter>(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(low)),
                                            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high)));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(whole))};
}

// Eight sums: lane i of the result is the sum over a[i]. Inlined, so that they stay in registers.
[[gnu::always_inline]] static inline Vector sums(const Vector* a) {
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(a[0].v, a[1].v), _mm256_hadd_ps(a[2].v, a[3].v));
    const __m256 high =
        _mm256_hadd_ps(_mm256_hadd_ps(a[4].v, a[5].v), _mm256_hadd_ps(a[6].v, a[7].v));
    return {_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                          _mm256_permute2f128_ps(low, high, 0x31))};
}

// Lane i of a[j] becomes lane j of a[i].
[[gnu::always_inline]] static inline void transpose(Vector (&a)[8]) {
    __m256 pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(a[i].v, a[i + 1].v);
        pairs[i + 1] = _mm256_unpackhi_ps(a[i].v, a[i + 1].v);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        a[i].v = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        a[i + 4].v = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}

#include "vector_parts.h"
