// A linear layer for a few tokens: out = x W^T + bias. The weights are read once, sixteen rows at a
// time; at this size reading them dominates the time.

template <class T>
static void linear(const Linear& a) {
    using P = Product<T>;
    using Query = typename P::Query;
    const int64_t stride = rounded_up(a.I, P::step), blocks = (a.O + kTile - 1) / kTile;
    auto* rows = static_cast<Query*>(workspace(1, a.T * stride * sizeof(Query)));
    for (int64_t t = 0; t < a.T; t++)
        keep_query(static_cast<const T*>(a.x) + t * a.x_stride, a.I, rows + t * stride);
    for_each(blocks, a.O * a.I > 1 << 16, [&](int64_t block) {
        const int64_t first = block * kTile, count = a.O - first < kTile ? a.O - first : kTile;
        const T* weights[kTile];
        for (int64_t o = 0; o < kTile; o++)
            weights[o] = static_cast<const T*>(a.weight) + (first + (o < count ? o : 0)) * a.I;
        for (int64_t t = 0; t < a.T;) {
            float sums[4 * kTile];
            const int64_t H = a.T - t < 4 ? a.T - t : 4;
            score_all<T>(rows + t * stride, stride, H, weights, a.I, sums, nullptr);
            for (int64_t h = 0; h < H; h++, t++) {
                float* sum = sums + h * kTile;
                if (a.bias) {
                    float bias[kTile];
                    for (int o = 0; o < kTile; o += Vector::width) {
                        const int64_t rest = count - o;
                        const T* p = static_cast<const T*>(a.bias) + first + o;
                        if (rest >= Vector::width) store(bias + o, load(p));
                        else if (rest > 0) store(bias + o, load(p, static_cast<int>(rest)));
                    }
                    for (int64_t o = 0; o < count; o++) sum[o] += bias[o];
                }
                T* out = static_cast<T*>(a.out) + t * a.O + first;
                for (int64_t o = 0; o < count; o += Vector::width) {
                    const int64_t n = count - o < Vector::width ? count - o : Vector::width;
                    store(out + o, load(sum + o), static_cast<int>(n));
                }
            }
        }
    });
}
