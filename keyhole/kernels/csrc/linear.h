// A linear layer for a few tokens: out = x W^T + bias. The weights are read once, sixteen rows at a
// time; at this size reading them dominates the time.

// Adds the bias to `count` outputs of a token, from `first` on, and stores them.
template <class T>
static inline void finish_outputs(float* sum, int64_t count, const T* bias, int64_t first, T* out) {
    if (bias) {
        float all[kTile];
        for (int64_t o = 0; o < count; o += Vector::width) {
            const int64_t rest = count - o;
            const T* p = bias + first + o;
            store(all + o, rest >= Vector::width ? load(p) : load(p, static_cast<int>(rest)));
        }
        for (int64_t o = 0; o < count; o++) sum[o] += all[o];
    }
    for (int64_t o = 0; o < count; o += Vector::width) {
        const int64_t n = count - o < Vector::width ? count - o : Vector::width;
        store(out + first + o, load(sum + o), static_cast<int>(n));
    }
}

// Calls work(part, at) for all pieces of a layer and of the next ones; pieces(part): how many it has.
template <class Layer, class Pieces, class Work>
static inline void for_each_piece(const Layer& a, const Pieces& pieces, const Work& work) {
    int64_t total = 0, outputs = 0;
    for (const Layer* part = &a; part; part = part->next)
        total += pieces(*part), outputs += part->O;
    for_each(total, outputs * a.I > 1 << 16, [&](int64_t at) {
        const Layer* part = &a;
        for (int64_t n = pieces(a); at >= n; n = pieces(*part)) at -= n, part = part->next;
        work(*part, at);
    });
}

// Keeps the inputs of H tokens, one step of each after another: a product reads them in order, and
// not from as many rows, which are a power of two apart and fall into the same few cache lines.
template <class T>
static inline void interleave(const T* x, int64_t x_stride, int64_t I, int64_t H,
                              typename Product<T>::Query* to) {
    constexpr int64_t step = Product<T>::step;
    const auto keep = [&](int64_t d, int64_t count) {
        for (int64_t h = 0; h < H; h++, to += step) keep_query(x + h * x_stride + d, count, to);
    };
    int64_t d = 0;
    for (; d + step <= I; d += step) keep(d, step);
    if (d < I) keep(d, I - d);
}

// Products of H tokens and N rows, out[h][n] in rows of kTile. ahead: prefetch the next N rows. Never
// inlined: beside others its sums would not stay in registers.
template <class T, int H, int N>
[[gnu::noinline]] static void multiply_rows(const typename Product<T>::Query* x,
                                            const T* const* rows, int64_t I, bool ahead,
                                            float* out) {
    using P = Product<T>;
    constexpr int W = Vector::width, line = Ahead<T>::line, count = (N * H + W - 1) / W * W;
    Vector sum[count];
    for (auto& s : sum) s = broadcast(0.0f);
    const T* row[N];
    for (int j = 0; j < N; j++) row[j] = rows[j];
    const auto add = [&](const auto& key) {
        typename P::Key k[N];
        for (int j = 0; j < N; j++) k[j] = key(row[j]);
        for (int h = 0; h < H; h++, x += P::step) {
            const auto numbers = in_register(P::numbers(x));
            for (int j = 0; j < N; j++) sum[h * N + j] = P::add(sum[h * N + j], numbers, k[j]);
        }
    };
    const T* soon = rows[0] + N * I;
    int64_t d = 0;
    for (; d + line <= I; d += line) {
        for (int j = 0; ahead && j < N; j++, soon += line) ask(soon);
        for (int i = 0; i < line; i += P::step) add([&](const T* p) { return P::key(p + d + i); });
    }
    for (; d + P::step <= I; d += P::step) add([&](const T* p) { return P::key(p + d); });
    if (d < I) add([&](const T* p) { return P::key(p + d, static_cast<int>(I - d)); });
    float all[count];
    for (int i = 0; i < count; i += W) store(all + i, sums(sum + i));
    for (int h = 0; h < H; h++)
        for (int j = 0; j < N; j++) out[h * kTile + j] = all[h * N + j];
}

constexpr int kAtOnce = 6;  // tokens whose sums stay in registers

// Products of H tokens and a tile of rows, [H][kTile].
template <class T, int H = kAtOnce>
static inline void multiply_tile(int64_t tokens, const typename Product<T>::Query* x,
                                 const T* const* rows, int64_t I, bool ahead, float* out) {
    if constexpr (H > 1)
        if (tokens < H) return multiply_tile<T, H - 1>(tokens, x, rows, I, ahead, out);
    constexpr int N = Vector::width / (H < 3 ? H : 4);
    for (int t = 0; t < kTile; t += N)
        multiply_rows<T, H, N>(x, rows + t, I, ahead, out + t);
}

template <class T>
static void linear(const Linear& a) {
    using Query = typename Product<T>::Query;
    const int64_t stride = rounded_up(a.I, Product<T>::step);
    const int64_t groups = (a.T + kAtOnce - 1) / kAtOnce;
    const auto first_of = [&](int64_t group) { return group * a.T / groups; };
    auto* inputs = static_cast<Query*>(workspace(1, a.T * stride * sizeof(Query)));
    for (int64_t g = 0; g < groups; g++)
        interleave(static_cast<const T*>(a.x) + first_of(g) * a.x_stride, a.x_stride, a.I,
                   first_of(g + 1) - first_of(g), inputs + first_of(g) * stride);
    // For one token the processor notices by itself what comes next (benchmarks/LOG.md). Not measured
    // with AVX-512.
    const bool ahead = a.T > 1 && Vector::width == 8;
    const auto compute = [&](const Linear& part, int64_t first) {
        const int64_t count = lesser(part.O - first, kTile);
        const T* rows[kTile];
        for (int64_t o = 0; o < kTile; o++)
            rows[o] = static_cast<const T*>(part.weight) + (first + (o < count ? o : 0)) * a.I;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t t = first_of(g), tokens = first_of(g + 1) - t;
            float sums[kAtOnce * kTile];
            multiply_tile<T>(tokens, inputs + t * stride, rows, a.I, ahead && g == 0, sums);
            for (int64_t h = 0; h < tokens; h++)
                finish_outputs(sums + h * kTile, count, static_cast<const T*>(part.bias), first,
                               static_cast<T*>(part.out) + (t + h) * part.O);
        }
    };
    const int64_t threads = omp_get_max_threads();
    const auto blocks = [&](const Linear& part) { return (part.O + kTile - 1) / kTile; };
    const auto piece = [&](const Linear& part) -> int64_t {  // enough of them for all threads
        const int64_t some = blocks(part) / (8 * threads);
        return !ahead || some < 1 ? 1 : some < 8 ? some : 8;
    };
    const auto pieces = [&](const Linear& part) {
        return (blocks(part) + piece(part) - 1) / piece(part);
    };
    for_each_piece(a, pieces, [&](const Linear& part, int64_t at) {
        const int64_t n = piece(part), end = lesser(blocks(part), (at + 1) * n);
        for (int64_t i = at * n; i < end; i++) compute(part, i * kTile);
    });
}
