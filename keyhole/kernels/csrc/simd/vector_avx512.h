// Sixteen floats in a register, and how bfloat16 and float16 become floats: AVX-512 with BF16.

struct Vector {
    static constexpr int width = 16;
    __m512 v;
};

static inline Vector broadcast(float x) { return {_mm512_set1_ps(x)}; }
static inline Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Where one of them is NaN: the second.
static inline Vector max(Vector a, Vector b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Vector min(Vector a, Vector b) { return {_mm512_min_ps(a.v, b.v)}; }
// a, but NaN where `b` is.
static inline Vector or_nan(Vector a, Vector b) {
    return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(b.v, b.v, _CMP_UNORD_Q), b.v)};
}
static inline float largest(Vector a) { return _mm512_reduce_max_ps(a.v); }
static inline float total(Vector a) { return _mm512_reduce_add_ps(a.v); }
// Whether a lane of `a` is above that of `b`; NaN never is.
static inline bool any_above(Vector a, Vector b) {
    return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0;
}
static inline Vector nearest(Vector a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// x * 2^n for whole n; 0 where x2 < limit (false for NaN).
static inline Vector scaled(Vector x, Vector n, Vector x2, float limit) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x2.v, _mm512_set1_ps(limit), _CMP_NLT_UQ);
    return {_mm512_maskz_scalef_ps(keep, x.v, n.v)};
}

static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }

static inline Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Vector load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
static inline Vector widen(__m256i x, const bfloat16*) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
static inline Vector widen(__m256i x, const float16*) { return {_mm512_cvtph_ps(x)}; }
template <class T>
static inline Vector load(const T* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), p);
}
template <class T>
static inline Vector load(const T* p, int n) {
    return widen(_mm256_maskz_loadu_epi16(first(n), p), p);
}

static inline Vector widen(__m128i x, const int8*) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x))};
}
static inline Vector widen(__m128i x, const e4m3*) {
    // As a float16 of the same exponent and mantissa bits.
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);
    return {_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(int16_t(0xbf80))))};
}
#define KEYHOLE_LOAD_8(T)                                                                \
    static inline Vector load(const T* p) {                                              \
        return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), p);           \
    }                                                                                    \
    static inline Vector load(const T* p, int n) {                                       \
        return widen(_mm_maskz_loadu_epi8(first(n), p), p);                              \
    }
KEYHOLE_LOAD_8(int8)
KEYHOLE_LOAD_8(e4m3)
#undef KEYHOLE_LOAD_8

static inline void store(float* p, Vector a) { _mm512_storeu_ps(p, a.v); }
static inline void store(float* p, Vector a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
static inline __m256i narrow(Vector a, const bfloat16*) { return (__m256i)_mm512_cvtneps_pbh(a.v); }
static inline __m256i narrow(Vector a, const float16*) { return _mm512_cvtps_ph(a.v, 0); }
template <class T>
static inline void store(T* p, Vector a, int n = 16) {
    _mm256_mask_storeu_epi16(p, first(n), narrow(a, p));
}

// Codes of packed weights as floats: whole bytes, or their lower or upper four bits.
enum Part { whole_byte, lower_half, upper_half };
template <Part part>
static inline Vector codes(const uint8_t* p) {
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    if (part == lower_half) x = _mm512_and_si512(x, _mm512_set1_epi32(15));
    if (part == upper_half) x = _mm512_srli_epi32(x, 4);
    return {_mm512_cvtepi32_ps(x)};
}

#include "six_bits_x86.h"
// Codes of 6 bits, of a quarter of a block of 64 weights, as floats: see `Packed`.
template <int quarter>
static inline Vector six_bit_codes(const uint8_t* low, const uint8_t* high) {
    const __m128i whole = six_bit_bytes<quarter>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)),
                                            _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(whole))};
}

// Sixteen sums: lane i of the result is the sum over a[i]. Inlined, so that they stay in registers.
[[gnu::always_inline]] static inline Vector sums(const Vector* a) {
    __m512 x[8], y[4];
    for (int i = 0; i < 8; i++)  // lanes of a[2i] and a[2i+1] in turn, halves added
        x[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i].v, a[2 * i + 1].v),
                             _mm512_unpackhi_ps(a[2 * i].v, a[2 * i + 1].v));
    for (int i = 0; i < 4; i++)
        y[i] = _mm512_add_ps(_mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0xee));
    // Each 128-bit part of y[i] holds four partial sums of a[4i .. 4i+3].
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(y[0], y[1], 0x88),
                                     _mm512_shuffle_f32x4(y[0], y[1], 0xdd));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(y[2], y[3], 0x88),
                                      _mm512_shuffle_f32x4(y[2], y[3], 0xdd));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                          _mm512_shuffle_f32x4(low, high, 0xdd))};
}

// So that a product with several others loads it once: GCC would load it with each.
static inline __m512i in_register(__m512i a) {
    asm("" : "+v"(a));
    return a;
}
static inline Vector in_register(Vector a) {
    asm("" : "+v"(a.v));
    return a;
}

// Products of queries and keys. bfloat16 is multiplied directly, 32 numbers at a time; other types
// are converted to floats. `Query` is the stored form of queries, padded with zeros to whole steps.
template <class T>
struct Product {
    using Query = float;
    static constexpr int step = 16;
    using Key = Vector;
    static inline Key key(const T* p) { return load(p); }
    static inline Key key(const T* p, int n) { return load(p, n); }
    static inline Vector numbers(const float* q) { return load(q); }
    static inline Vector add(Vector sum, Vector q, Key k) { return fma(q, k, sum); }
    template <Part part>
    static inline Key code(const uint8_t* p) {
        return codes<part>(p);
    }
};

template <>
struct Product<bfloat16> {
    using Query = bfloat16;
    static constexpr int step = 32;
    using Key = __m512i;
    static inline Key key(const bfloat16* p) { return _mm512_loadu_si512(p); }
    static inline Key key(const bfloat16* p, int n) {
        return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1), p);
    }
    static inline __m512i numbers(const bfloat16* q) { return _mm512_loadu_si512(q); }
    static inline Vector add(Vector sum, __m512i q, Key k) {
        return {_mm512_dpbf16_ps(sum.v, (__m512bh)q, (__m512bh)k)};
    }
};

#include "transpose_avx512.h"
