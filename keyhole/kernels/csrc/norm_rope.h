// What a model computes for each token between its products: RMS norms, rotary embeddings, gates and
// residuals.

// The `n` numbers from `p` on, a vector at most.
template <class T>
static inline Vector part(const T* p, int64_t n) {
    return n >= Vector::width ? load(p) : load(p, static_cast<int>(n));
}
template <class T>
static inline void store_part(T* p, Vector x, int64_t n) {
    n >= Vector::width ? store(p, x) : store(p, x, static_cast<int>(n));
}

template <class T>
static void rms_norm(const RmsNorm& a) {
    constexpr int W = Vector::width, N = 4;  // sums that do not wait for each other
    for_each(a.T, a.T * a.D > 1 << 16, [&](int64_t t) {
        const T* x = static_cast<const T*>(a.x) + t * a.x_stride;
        const T* weight = static_cast<const T*>(a.weight);
        T* out = static_cast<T*>(a.out) + t * a.D;
        Vector sum[N];
        for (Vector& one : sum) one = broadcast(0.0f);
        for (int64_t d = 0; d < a.D; d += N * W)
            for (int i = 0; i < N && d + i * W < a.D; i++) {
                const Vector numbers = part(x + d + i * W, a.D - d - i * W);
                sum[i] = fma(numbers, numbers, sum[i]);
            }
        const float squares = total((sum[0] + sum[1]) + (sum[2] + sum[3]));
        const Vector by = broadcast(1.0f / sqrtf(squares / static_cast<float>(a.D) + a.epsilon));
        for (int64_t d = 0; d < a.D; d += W)
            store_part(out + d, part(x + d, a.D - d) * by * part(weight + d, a.D - d), a.D - d);
    });
}

static inline Vector rounded(Vector x, const float*) { return x; }
template <class T>
static inline Vector rounded(Vector x, const T*) {
    T numbers[Vector::width];
    store(numbers, x);
    return load(numbers);
}

template <class T>
static void apply_rope(const Rope& a) {
    const int64_t half = a.D / 2;
    for_each(a.B * a.T, a.B * a.T * a.H * a.D > 1 << 16, [&](int64_t i) {
        const int64_t b = i / a.T, t = i % a.T, angle = (a.shared ? t : i) * a.D;
        const T *cos = static_cast<const T*>(a.cos) + angle, *sin = static_cast<const T*>(a.sin) + angle;
        const auto at = [&](const int64_t(&strides)[3], int64_t h) {
            return b * strides[0] + h * strides[1] + t * strides[2];
        };
        for (int64_t h = 0; h < a.H; h++) {
            const T* x = static_cast<const T*>(a.x) + at(a.x_strides, h);
            T* out = static_cast<T*>(a.out) + at(a.out_strides, h);
            for (int64_t d = 0; d < half; d += Vector::width) {
                const int64_t n = half - d;
                const Vector first = part(x + d, n), second = part(x + half + d, n);
                const Vector c = part(cos + d, n), s = part(sin + d, n);
                store_part(out + d, rounded(first * c, x) - rounded(second * s, x), n);
                store_part(out + half + d, rounded(second * c, x) + rounded(first * s, x), n);
            }
        }
    });
}

template <class T, class Function>
static inline void elementwise(const Elementwise& a, const Function& function) {
    const T *x = static_cast<const T*>(a.x), *y = static_cast<const T*>(a.y);
    T* out = static_cast<T*>(a.out);
    for (int64_t i = 0; i < a.n; i += Vector::width) {
        const int64_t n = a.n - i;
        store_part(out + i, function(part(x + i, n), part(y + i, n)), n);
    }
}

template <class T>
static void swiglu(const Elementwise& a) {
    const Vector one = broadcast(1.0f);
    elementwise<T>(a, [&](Vector gate, Vector up) {
        const Vector silu = gate / (one + exponential(broadcast(0.0f) - gate));
        return rounded(silu, static_cast<const T*>(nullptr)) * up;
    });
}

template <class T>
static void add(const Elementwise& a) {
    elementwise<T>(a, [](Vector x, Vector y) { return x + y; });
}
