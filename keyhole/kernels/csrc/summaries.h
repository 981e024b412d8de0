// Scores of the summaries of pages or of parts of pages, read in place.

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
