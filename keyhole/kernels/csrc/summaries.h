// Summaries of pages: Quest's, which are the elementwise bounds of a page's keys, with the bound of a
// query's score; and scores of summaries of pages or of parts of pages, read in place.

// Of the first `count` keys of a page, whose numbers are columns.
template <class T>
static void column_bounds(const T* keys, int64_t stride, int64_t count, int64_t D, T* low, T* high) {
    constexpr int W = Vector::width;
    for (int64_t d = 0; d < D; d += W) {
        const int n = static_cast<int>(D - d < W ? D - d : W);
        float lows[W], highs[W], some[W];
        for (int i = 0; i < n; i++)
            for (int64_t t = 0; t < count; t += W) {
                const int m = static_cast<int>(count - t < W ? count - t : W);
                store(some, load(keys + (d + i) * stride + t, m));
                for (int j = 0; j < m; j++) {
                    const float key = some[j];
                    const bool first = t + j == 0, nan = key != key;  // NaN must propagate
                    if (first || nan || key < lows[i]) lows[i] = key;
                    if (first || nan || key > highs[i]) highs[i] = key;
                }
            }
        store(low + d, load(lows, n), n);
        store(high + d, load(highs, n), n);
    }
}

// K: keys. T: bounds.
template <class K, class T = K>
static void page_bounds(const PageBounds& a) {
    constexpr int W = Vector::width;
    for_each(a.n * a.Hkv, a.n > 8, [&](int64_t i) {
        const int64_t page = a.pages[i / a.Hkv], h = i % a.Hkv;
        const K* keys = static_cast<const K*>(a.keys.data) + page * a.keys.page_stride +
                        h * a.keys.head_stride;
        const int64_t out = (page * a.Hkv + h) * a.D;
        if constexpr (!Scaled<K>::bytes)
            if (a.keys.dim_stride != 1)
                return column_bounds(keys, a.keys.dim_stride, a.filled[i / a.Hkv], a.D,
                                     static_cast<T*>(a.low) + out, static_cast<T*>(a.high) + out);
        const auto key_at = [&](int64_t t, int64_t d, int n) {
            const K* key = keys + t * a.keys.token_stride;
            if constexpr (Scaled<K>::bytes != 0)
                return load(key + d, n) * broadcast(scale_of(key, a.D));
            else
                return load(key + d, n);
        };
        for (int64_t d = 0; d < a.D; d += W) {
            const int n = static_cast<int>(a.D - d < W ? a.D - d : W);
            Vector low = key_at(0, d, n), high = low;
            for (int64_t t = 1; t < a.filled[i / a.Hkv]; t++) {
                const Vector key = key_at(t, d, n);
                low = or_nan(min(low, key), low);  // NaN must propagate
                high = or_nan(max(high, key), high);
            }
            store(static_cast<T*>(a.low) + out + d, low, n);
            store(static_cast<T*>(a.high) + out + d, high, n);
        }
    });
}

// A positive q_d is bounded by high_d, a negative one by low_d.
template <class T>
static void bound_scores(const BoundScores& a) {
    using Query = typename Product<T>::Query;
    const int64_t G = a.Hq / a.Hkv, stride = rounded_up(a.D, Product<T>::step);
    const int64_t tiles = (a.M + kTile - 1) / kTile;
    auto* query = static_cast<Query*>(workspace(1, 2 * a.B * a.Hq * stride * sizeof(Query)));
    Query* negative = query + a.B * a.Hq * stride;
    for (int64_t i = 0; i < a.B * a.Hq; i++) {
        const T* q = static_cast<const T*>(a.query) + i * a.D;
        keep_query(q, a.D, query + i * stride, 0.0f, INFINITY);
        keep_query(q, a.D, negative + i * stride, -INFINITY, 0.0f);
    }
    for_each(a.B * a.Hkv * tiles, a.B * a.Hkv * a.M * a.D > 1 << 16, [&](int64_t i) {
        const int64_t list = i / tiles, first = i % tiles * kTile;
        const int64_t b = list / a.Hkv, h = list % a.Hkv;
        const int64_t count = a.M - first < kTile ? a.M - first : kTile;
        const T *low[2 * kTile], *high[2 * kTile];  // of this tile, and of the next one
        for (int64_t t = 0; t < 2 * kTile; t++) {
            const int64_t entry = first + t < a.M ? first + t : first;
            const int64_t at = (a.table[b * a.table_stride + entry] * a.Hkv + h) * a.D;
            low[t] = static_cast<const T*>(a.low) + at;
            high[t] = static_cast<const T*>(a.high) + at;
        }
        float best[kTile];
        for (int64_t g = 0; g < G; g += 4) {
            const int64_t row = (b * a.Hq + h * G + g) * stride, H = G - g < 4 ? G - g : 4;
            float up[4 * kTile], down[4 * kTile];
            score_all<T>(query + row, stride, H, high, a.D, up, g ? nullptr : high + kTile);
            score_all<T>(negative + row, stride, H, low, a.D, down, g ? nullptr : low + kTile);
            for (int t = 0; t < H * kTile; t++) {
                const float bound = up[t] + down[t];
                float& so_far = best[t % kTile];
                if ((g == 0 && t < kTile) || bound > so_far || bound != bound) so_far = bound;
            }
        }
        memcpy(a.out + list * a.M + first, best, count * sizeof(float));
    });
}

template <class T>
static void summary_scores(const SummaryScores& a) {
    using Query = typename Product<T>::Query;
    const int64_t G = a.Hq / a.Hkv, stride = rounded_up(a.D, Product<T>::step);
    const int64_t entries = a.M * a.n, tiles = (entries + kTile - 1) / kTile;
    auto* query = static_cast<Query*>(workspace(1, a.B * a.Hq * stride * sizeof(Query)));
    for (int64_t i = 0; i < a.B * a.Hq; i++)
        keep_query(static_cast<const T*>(a.query) + i * a.D, a.D, query + i * stride);
    for_each(a.B * a.Hkv * tiles, a.B * a.Hkv * entries * a.D > 1 << 16, [&](int64_t i) {
        const int64_t list = i / tiles, first = i % tiles * kTile;
        const int64_t b = list / a.Hkv, h = list % a.Hkv;
        const int64_t count = entries - first < kTile ? entries - first : kTile;
        const bool read = first < a.valid[b];
        const T* key[2 * kTile];  // of this tile, and of the next one
        for (int64_t t = 0; read && t < 2 * kTile; t++) {
            const int64_t entry = first + t < a.valid[b] && first + t < entries ? first + t : first;
            const int64_t page = a.table[b * a.table_stride + entry / a.n];
            key[t] = static_cast<const T*>(a.summaries) +
                     ((page * a.n + entry % a.n) * a.Hkv + h) * a.D;
        }
        for (int64_t g = 0; g < G; g += 4) {
            const int64_t row = b * a.Hq + h * G + g, H = G - g < 4 ? G - g : 4;
            float scores[4 * kTile] = {};
            if (read)
                score_all<T>(query + row * stride, stride, H, key, a.D, scores,
                             g ? nullptr : key + kTile);
            for (int64_t r = 0; r < H; r++)
                memcpy(a.out + (row + r) * entries + first, scores + r * kTile,
                       count * sizeof(float));
        }
    });
}
