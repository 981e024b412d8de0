// Eight floats as an array, which the compiler may vectorize.

struct Vector {
    static constexpr int width = 8;
    float v[8];
};

#define KEYHOLE_EACH(expression)                      \
    Vector r;                                         \
    for (int i = 0; i < 8; i++) r.v[i] = (expression); \
    return r

static inline Vector broadcast(float x) { KEYHOLE_EACH(x); }
static inline Vector operator+(Vector a, Vector b) { KEYHOLE_EACH(a.v[i] + b.v[i]); }
static inline Vector operator-(Vector a, Vector b) { KEYHOLE_EACH(a.v[i] - b.v[i]); }
static inline Vector operator*(Vector a, Vector b) { KEYHOLE_EACH(a.v[i] * b.v[i]); }
static inline Vector operator/(Vector a, Vector b) { KEYHOLE_EACH(a.v[i] / b.v[i]); }
static inline Vector fma(Vector a, Vector b, Vector c) { KEYHOLE_EACH(a.v[i] * b.v[i] + c.v[i]); }
// Where one of them is NaN: the second.
static inline Vector max(Vector a, Vector b) { KEYHOLE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline Vector min(Vector a, Vector b) { KEYHOLE_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
// a, but NaN where `b` is.
static inline Vector or_nan(Vector a, Vector b) { KEYHOLE_EACH(b.v[i] != b.v[i] ? b.v[i] : a.v[i]); }
static inline float largest(Vector a) {
    float r = a.v[0];
    for (int i = 1; i < 8; i++) r = a.v[i] > r ? a.v[i] : r;
    return r;
}
static inline float total(Vector a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
// Whether a lane of `a` is above that of `b`; NaN never is.
static inline bool any_above(Vector a, Vector b) {
    int above = 0;
    for (int i = 0; i < 8; i++) above |= a.v[i] > b.v[i];
    return above;
}
static inline Vector nearest(Vector a) { KEYHOLE_EACH(nearbyintf(a.v[i])); }
// x * 2^n for whole n; 0 where x2 < limit (false for NaN).
static inline Vector scaled(Vector x, Vector n, Vector x2, float limit) {
    Vector r;
    for (int i = 0; i < 8; i++) {
        const float whole = n.v[i] > -126.0f ? n.v[i] : -126.0f;  // NaN too
        const uint32_t bits = (uint32_t)((int)whole + 127) << 23;
        float power;
        memcpy(&power, &bits, 4);
        r.v[i] = x2.v[i] < limit ? 0.0f : x.v[i] * power;
    }
    return r;
}

static inline Vector in_register(Vector a) { return a; }

static inline float widened(float x) { return x; }
static inline float widened(bfloat16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}
static inline float widened(float16 x) {
    const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    float r;
    if (rest >= 0x7c00) {  // infinite or NaN
        const uint32_t bits = sign | 0x7f800000 | ((rest & 0x3ff) << 13);
        memcpy(&r, &bits, 4);
        return r;
    }
    // Read as a float, the exponent is 112 too small; the product is right for subnormals too.
    const uint32_t bits = rest << 13;
    memcpy(&r, &bits, 4);
    r *= 0x1p112f;
    return sign ? -r : r;
}
static inline float widened(int8 x) { return x.bits; }
static inline float widened(e4m3 x) {
    // As a float16 of the same exponent and mantissa bits.
    return widened(float16{(uint16_t)((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}
static inline void narrowed(float x, bfloat16& out) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    // To the nearest, ties to even; a NaN stays one.
    out.bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline void narrowed(float x, float16& out) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) {  // NaN
        out.bits = sign | 0x7e00;
    } else if (bits >= 0x477ff000) {  // rounds to 65536 or more
        out.bits = sign | 0x7c00;
    } else if (bits < 0x38800000) {  // subnormal: adding 0.5 aligns and rounds
        float r;
        memcpy(&r, &bits, 4);
        r += 0.5f;
        memcpy(&bits, &r, 4);
        out.bits = (uint16_t)(sign | (bits - 0x3f000000));
    } else {
        const uint32_t odd = (bits >> 13) & 1;
        out.bits = (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + odd) >> 13));
    }
}

template <class T>
static inline Vector load(const T* p) {
    KEYHOLE_EACH(widened(p[i]));
}
static inline void store(float* p, Vector a) { memcpy(p, a.v, sizeof a.v); }
template <class T>
static inline void store(T* p, Vector a) {
    for (int i = 0; i < 8; i++) narrowed(a.v[i], p[i]);
}

// Codes of packed weights as floats: whole bytes, or their lower or upper four bits.
enum Part { whole_byte, lower_half, upper_half };
template <Part part>
static inline Vector codes(const uint8_t* p) {
    KEYHOLE_EACH((float)(part == lower_half ? p[i] & 15 : part == upper_half ? p[i] >> 4 : p[i]));
}

// Codes of 6 bits, of a quarter of a block of 64 weights, as floats: see `Packed`.
template <int quarter>
static inline Vector six_bit_codes(const uint8_t* low, const uint8_t* high) {
    KEYHOLE_EACH((float)((low[i] >> (quarter < 2 ? 0 : 4) & 15) | (high[i] >> 2 * quarter & 3) << 4));
}

// Eight sums: lane i of the result is the sum over a[i]. Inlined, so that they stay in registers.
[[gnu::always_inline]] static inline Vector sums(const Vector* a) { KEYHOLE_EACH(total(a[i])); }

#undef KEYHOLE_EACH

#include "vector_parts.h"
