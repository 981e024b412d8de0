// Keys and values in 8 bits: a row of numbers and its scale, as keyhole/kernels/reference/quantised.py
// defines them.

static inline void narrowed(float x, int8& out) { out.bits = static_cast<int8_t>(x); }
static inline void narrowed(float x, e4m3& out) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size < 0x3c800000) {  // below 2^-6: subnormal, in steps of 2^-9
        float steps;
        memcpy(&steps, &size, 4);
        steps = steps * 512.0f + 8388608.0f;  // rounds to whole numbers, ties to even
        memcpy(&bits, &steps, 4);
        out.bits = static_cast<uint8_t>(sign | (bits & 0x7f));
    } else {
        const uint32_t rounded = size + 0x7ffff + (size >> 20 & 1);
        out.bits = static_cast<uint8_t>(sign | ((rounded >> 20) - (120 << 3)));
    }
}

template <class T, class K>
static void quantise_row(const T* from, int64_t D, K* to) {
    constexpr int W = Vector::width;
    constexpr bool whole = Scaled<K>::step == 1.0f;  // numbers are whole
    Vector most = broadcast(0.0f);
    const auto part = [&](int64_t d, int n) { return n == W ? load(from + d) : load(from + d, n); };
    for (int64_t d = 0; d < D; d += W) {
        const Vector x = part(d, static_cast<int>(D - d < W ? D - d : W));
        most = or_nan(max(most, max(x, broadcast(0.0f) - x)), most);
        most = or_nan(most, x);
    }
    float all[W], top = 0.0f;
    store(all, most);
    for (int i = 0; i < W; i++) top = all[i] > top || all[i] != all[i] ? all[i] : top;
    const float limit = Scaled<K>::largest, scale = top / limit;
    const Vector by = broadcast(scale > 0.0f ? scale : 1.0f);
    for (int64_t d = 0; d < D; d += W) {
        const int n = static_cast<int>(D - d < W ? D - d : W);
        // In this order NaN stays NaN.
        Vector x = min(broadcast(limit), max(broadcast(-limit), part(d, n) / by));
        if (whole) x = nearest(x);
        float numbers[W];
        store(numbers, x);
        for (int i = 0; i < n; i++) narrowed(numbers[i] == numbers[i] ? numbers[i] : 0.0f, to[d + i]);
    }
    memcpy(to + D, &scale, sizeof scale);
}

template <class T, class K>
static void quantise_as(const Append& a) {
    for_each(a.T * a.Hkv, a.T * a.Hkv * a.D > 1 << 16, [&](int64_t i) {
        const int64_t t = i / a.Hkv, h = i % a.Hkv, slot = a.slots[t];
        const int64_t page = slot / a.page_size, place = slot % a.page_size;
        quantise_row(static_cast<const T*>(a.rows) + t * a.row_stride + h * a.row_head_stride, a.D,
                     static_cast<K*>(a.pages) + page * a.page_stride + h * a.head_stride +
                         place * a.token_stride);
    });
}
