// Linear layers with packed weights. A group's codes are multiplied and summed as they are, its scale is
// applied to the sum. The minimums meet the sums of the inputs of each group, which all rows share.

static inline float sum_of(Vector a) { return total(a); }  // where `total` is a variable

constexpr int64_t kBlock = 64;  // weights whose codes are stored together: see `Packed`

// Weights that `codes_at` reads from one place of a block, from weight `at` on.
template <int bits>
constexpr int64_t kSpan = bits == 6 ? kBlock / 4 : kBlock / 2;

// Codes of weights at + j, at + j + 1, ... of a block, as keys of a product; j < kSpan.
template <class P, int bits, int at>
static inline typename P::Key codes_at(const uint8_t* block, int64_t j) {
    constexpr int half = kBlock / 2;
    if constexpr (bits == 8) return P::template code<whole_byte>(block + at + j);
    else if constexpr (bits == 4)
        return P::template code<at < half ? lower_half : upper_half>(block + at % half + j);
    else return P::template six_bits<at / kSpan<6>>(block + at % half + j, block + half + j);
}

static inline float number(const float* p) { return *p; }
static inline float number(const bfloat16* p) {
    const uint32_t bits = (uint32_t)p->bits << 16;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}
static inline float number(const float16* p) {
#if defined(__F16C__)
    return _cvtsh_ss(p->bits);
#else
    return widened(*p);
#endif
}

// How codes and inputs of T are multiplied: as floats, or in another way of a processor path.
template <class T>
struct CodeProduct : Product<T> {
    using Sum = Vector;
    static constexpr bool scaled = false;  // the inputs of each group have a scale
    template <int quarter>  // as floats, for T = float
    static Vector six_bits(const uint8_t* low, const uint8_t* high) {
        return six_bit_codes<quarter>(low, high);
    }
};

// Inputs of some tokens, and of each group their sum and scale, padded with zeros to whole vectors.
template <class T>
struct Inputs {
    const typename CodeProduct<T>::Query* rows;
    int64_t stride;
    const float *sums, *scales;
    int64_t groups_stride;
};

// Scales and minimums of the groups of rows, one row after another: as they are stored, or floats.
template <class S>
struct GroupScales {
    const S *scales, *minimums;
};

// to[i] = by * from[i] for the scales of n groups. Whole vectors are ours, as GCC converts their bytes
// one by one; `__restrict` lets it use shorter ones.
static inline Vector floats(const uint8_t* p) { return codes<whole_byte>(p); }
static inline Vector floats(const int8_t* p) { return load(reinterpret_cast<const int8*>(p)); }
template <int n, class Byte>
static inline void times(const Byte* __restrict from, float by, float* __restrict to) {
    constexpr int W = Vector::width;
    if constexpr (n < W)
        for (int i = 0; i < n; i++) to[i] = by * from[i];
    else
        for (int i = 0; i < n; i += W) store(to + i, floats(from + i) * broadcast(by));
}

// A block's weights without minimums are codes plus this, times their scale.
static inline float lowest_of(const PackedLinear& a) {
    return -static_cast<float>(1 << (a.weight.bits - 1));
}

// Makes floats of a row's scales of blocks, and of its minimums if it has some.
static inline void expand_scales(const PackedLinear& a, int64_t row, float* scales,
                                 float* minimums) {
    constexpr int W = Vector::width;
    const int64_t groups = a.I / a.weight.group, blocks = a.I / 256;
    const auto* half = static_cast<const float16*>(a.blocks.of_blocks);
    if (!a.blocks.of_groups) {
        half += row * groups;
        for (int64_t g = 0; g < groups; g += W) {
            const int n = static_cast<int>(lesser(groups - g, W));
            store(scales + g, n == W ? load(half + g) : load(half + g, n), n);
        }
    } else if (a.blocks.minimums) {  // eight groups of 32 weights
        const auto* of_groups = static_cast<const uint8_t*>(a.blocks.of_groups) + 2 * row * groups;
        half += 2 * row * blocks;
        for (int64_t i = 0; i < blocks; i++, of_groups += 8) {
            times<8>(of_groups, number(half + 2 * i), scales + 8 * i);
            times<8>(of_groups + groups, -number(half + 2 * i + 1), minimums + 8 * i);
        }
    } else {  // sixteen of 16
        const auto* of_groups = static_cast<const int8_t*>(a.blocks.of_groups) + row * groups;
        half += row * blocks;
        for (int64_t i = 0; i < blocks; i++, of_groups += 16)
            times<16>(of_groups, number(half + i), scales + 16 * i);
    }
}

// Adds the products of a span of weights of R rows to the sums of H tokens. x: their inputs.
template <class P, int bits, int at, int R, int H>
[[gnu::always_inline]] static inline void add_span(const uint8_t* block, int64_t row_bytes,
                                                   const typename P::Query* x, int64_t stride,
                                                   typename P::Sum (&part)[R][H]) {
    for (int64_t j = 0; j < kSpan<bits>; j += P::step)
        for (int r = 0; r < R; r++) {
            const auto key = codes_at<P, bits, at>(block + r * row_bytes, j);
            for (int h = 0; h < H; h++)
                part[r][h] = P::add(part[r][h], P::numbers(x + h * stride + at + j), key);
        }
}

// The scales of `count` rows; those of blocks become floats.
template <class S>
static inline GroupScales<S> scales_from(const PackedLinear& a, int64_t first, int64_t count) {
    const int64_t groups = a.I / a.weight.group;
    if constexpr (sizeof(S) == sizeof(float)) {
        if (a.blocks.of_blocks) {
            auto* const room = static_cast<float*>(
                workspace(2, 2 * kTile * groups * static_cast<int64_t>(sizeof(float))));
            float* const minimums = room + kTile * groups;
            for (int64_t r = 0; r < count; r++)
                expand_scales(a, first + r, room + r * groups, minimums + r * groups);
            for (int64_t i = 0; i < count * groups && !a.blocks.minimums; i++)
                minimums[i] = lowest_of(a) * room[i];
            return {room, minimums};
        }
    }
    return {static_cast<const S*>(a.weight.scales) + first * groups,
            static_cast<const S*>(a.weight.minimums) + first * groups};
}

// R outputs of H tokens: out[h][r], of rows of kTile. ahead: prefetch the rows that come next.
template <class T, class S, int bits, int H, int R>
static inline void packed_rows(const PackedLinear& a, const Inputs<T>& in, GroupScales<S> by,
                               int64_t row, bool ahead, float* out) {
    using P = CodeProduct<T>;
    constexpr int W = Vector::width;
    const int64_t groups = a.I / a.weight.group, row_bytes = a.I * bits / 8;
    const uint8_t* from = a.weight.codes + row * row_bytes;
    Vector total[R][H];
    Vector part[R][H];
    for (int r = 0; r < R; r++)
        for (int h = 0; h < H; h++) total[r][h] = part[r][h] = broadcast(0.0f);
    for (int64_t g = 0; g < groups; g += W) {
        const int n = static_cast<int>(groups - g < W ? groups - g : W);
        for (int r = 0; r < R; r++) {
            const S* p = by.minimums + r * groups + g;
            const Vector m = n == W ? load(p) : load(p, n);
            for (int h = 0; h < H; h++)
                total[r][h] = fma(m, load(in.sums + h * in.groups_stride + g), total[r][h]);
        }
    }
    int64_t g = 0;
    const auto end_group = [&]() {
        for (int r = 0; r < R; r++) {
            const Vector scale = broadcast(number(by.scales + r * groups + g));
            for (int h = 0; h < H; h++) {
                total[r][h] = fma(part[r][h], scale, total[r][h]);
                part[r][h] = broadcast(0.0f);
            }
        }
        g++;
    };
    // Rows are a kilobyte or two, too short for the processor to notice streams: the next rows
    // are prefetched a line at a time.
    constexpr int line_inputs = bits == 4 ? 2 * kBlock : kBlock;
    const int64_t within = a.weight.group - 1;
    for (int64_t i = 0; i < a.I; i += kBlock) {
        const auto* x = in.rows + i;
        const uint8_t* p = from + i * bits / 8;
        if (ahead && i % line_inputs == 0)
            for (int r = 0; r < R; r++) ask(p + (R + r) * row_bytes);
        add_span<P, bits, 0>(p, row_bytes, x, in.stride, part);
        if constexpr (bits == 6) {
            if (a.weight.group == 16) end_group();
            add_span<P, bits, 16>(p, row_bytes, x, in.stride, part);
        }
        if (a.weight.group <= 32) end_group();
        add_span<P, bits, 32>(p, row_bytes, x, in.stride, part);
        if constexpr (bits == 6) {
            if (a.weight.group == 16) end_group();
            add_span<P, bits, 48>(p, row_bytes, x, in.stride, part);
        }
        if (((i + kBlock) & within) == 0) end_group();
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < H; h++) out[h * kTile + r] = sum_of(total[r][h]);
}

// `count` outputs of H tokens; by: the scales of these rows.
template <class T, class S, int bits, int H>
static inline void packed_tile(const PackedLinear& a, const Inputs<T>& in, GroupScales<S> by,
                               int64_t first, int64_t count, bool ahead, float* out) {
    const auto from = [&](int64_t r) {
        const int64_t at = r * (a.I / a.weight.group);
        return GroupScales<S>{by.scales + at, by.minimums + at};
    };
    if constexpr (CodeProduct<T>::scaled) {
        for (int64_t r = 0; r < count; r++)
            CodeProduct<T>::template row<S, bits, H>(a, in, from(r), first + r, ahead, out + r);
    } else {
        // So that sums stay in registers.
        constexpr int fit = Vector::width / 2 / H;
        constexpr int R = fit > 4 ? 4 : fit < 1 ? 1 : fit;
        const auto rows = [&](auto at_once, int64_t r) {
            constexpr int n = decltype(at_once)::value;
            packed_rows<T, S, bits, H, n>(a, in, from(r), first + r, ahead, out + r);
        };
        int64_t r = 0;
        for (; r + R <= count; r += R) rows(std::integral_constant<int, R>(), r);
        for (; r < count; r++) rows(std::integral_constant<int, 1>(), r);
    }
}

// Keeps a token's inputs for products, and the sum and scale of each group.
template <class T, int bits>
static inline void keep_inputs(const T* x, int64_t I, int64_t group,
                               typename CodeProduct<T>::Query* row, float* sums, float* scales) {
    using P = CodeProduct<T>;
    if constexpr (P::scaled) {
        P::template keep<bits>(x, I, group, row, sums, scales);
    } else {
        keep_query(x, I, row);
        for (int64_t g = 0; g < I / group; g++) {
            Vector sum = broadcast(0.0f);
            for (int64_t i = 0; i < group; i += Vector::width) sum = sum + load(x + g * group + i);
            sums[g] = total(sum);
        }
    }
}

// S: of the scales.
template <class T, class S, int bits>
static void packed_linear_in(const PackedLinear& a) {
    using P = CodeProduct<T>;
    using Query = typename P::Query;
    constexpr int W = Vector::width, most = W / 2;
    const int64_t stride = rounded_up(a.I, 2 * kBlock), groups = a.I / a.weight.group;
    const int64_t groups_stride = rounded_up(groups, W);
    auto* sums = static_cast<float*>(
        workspace(1, a.T * (2 * groups_stride * sizeof(float) + stride * sizeof(Query))));
    auto* scales = sums + a.T * groups_stride;
    auto* rows = reinterpret_cast<Query*>(scales + a.T * groups_stride);
    memset(sums, 0, a.T * groups_stride * sizeof(float));
    for (int64_t t = 0; t < a.T; t++)
        keep_inputs<T, bits>(static_cast<const T*>(a.x) + t * a.x_stride, a.I, a.weight.group,
                    rows + t * stride, sums + t * groups_stride, scales + t * groups_stride);
    const auto compute = [&](const PackedLinear& part, int64_t first) {
        const int64_t count = part.O - first < kTile ? part.O - first : kTile;
        const auto by = scales_from<S>(part, first, count);
        for (int64_t t = 0; t < a.T;) {
            const bool ahead = t == 0;
            float out[most * kTile];
            const Inputs<T> in{rows + t * stride, stride, sums + t * groups_stride,
                               scales + t * groups_stride, groups_stride};
            const int64_t left = a.T - t;
            int64_t H = 1;
            if (most == 8 && left >= 8)
                packed_tile<T, S, bits, most>(part, in, by, first, count, ahead, out), H = most;
            else if (left >= 4)
                packed_tile<T, S, bits, 4>(part, in, by, first, count, ahead, out), H = 4;
            else if (left >= 2)
                packed_tile<T, S, bits, 2>(part, in, by, first, count, ahead, out), H = 2;
            else packed_tile<T, S, bits, 1>(part, in, by, first, count, ahead, out);
            for (int64_t h = 0; h < H; h++, t++)
                finish_outputs(out + h * kTile, count, static_cast<const T*>(part.bias), first,
                               static_cast<T*>(part.out) + t * part.O);
        }
    };
    // Rows in order, so that most are prefetched, and enough pieces for all threads.
    const int64_t threads = omp_get_max_threads();
    const auto tiles = [&](const PackedLinear& part) { return (part.O + kTile - 1) / kTile; };
    const auto piece = [&](const PackedLinear& part) { return tiles(part) >= 16 * threads ? 4 : 1; };
    const auto pieces = [&](const PackedLinear& part) {
        return (tiles(part) + piece(part) - 1) / piece(part);
    };
    for_each_piece(a, pieces, [&](const PackedLinear& part, int64_t at) {
        const int64_t n = piece(part), end = tiles(part) < (at + 1) * n ? tiles(part) : (at + 1) * n;
        for (int64_t i = at * n; i < end; i++) compute(part, i * kTile);
    });
}

template <class T, class S>
static void packed_linear_by(const PackedLinear& a) {
    if (a.weight.bits == 4) return packed_linear_in<T, S, 4>(a);
    if (a.weight.bits == 8) return packed_linear_in<T, S, 8>(a);
    if constexpr (sizeof(S) == sizeof(float)) packed_linear_in<T, S, 6>(a);
}

// Six bits and blocks have float scales; without another way to multiply them, float inputs too.
template <class T>
static void packed_linear(const PackedLinear& a) {
    if constexpr (CodeProduct<T>::scaled) {
        if (a.blocks.of_blocks) return packed_linear_by<T, float>(a);
    }
    packed_linear_by<T, T>(a);
}

// Weights of a span of a block as numbers, into `out`, the numbers of the block.
template <class T, int bits, int at>
static inline void unpack_span(const uint8_t* block, float scale, float minimum, T* out) {
    const Vector s = broadcast(scale), m = broadcast(minimum);
    for (int64_t j = 0; j < kSpan<bits>; j += Vector::width)
        store(out + at + j, fma(codes_at<CodeProduct<float>, bits, at>(block, j), s, m));
}

template <class T, int bits>
static void unpack_in(const Unpack& a) {
    const Packed& w = a.weight;
    const int64_t groups = a.I / w.group, blocks = (a.O + kTile - 1) / kTile;
    for_each(blocks, a.O * a.I > 1 << 16, [&](int64_t block) {
        for (int64_t o = block * kTile; o < a.O && o < (block + 1) * kTile; o++) {
            const uint8_t* from = w.codes + o * (a.I * bits / 8);
            const T* scales = static_cast<const T*>(w.scales) + o * groups;
            const T* minimums = static_cast<const T*>(w.minimums) + o * groups;
            T* out = static_cast<T*>(a.out) + o * a.I;
            for (int64_t i = 0; i < a.I; i += kBlock) {
                const auto scale = [&](int at) { return number(scales + (i + at) / w.group); };
                const auto minimum = [&](int at) { return number(minimums + (i + at) / w.group); };
                const uint8_t* p = from + i * bits / 8;
                unpack_span<T, bits, 0>(p, scale(0), minimum(0), out + i);
                if constexpr (bits == 6) unpack_span<T, 6, 16>(p, scale(16), minimum(16), out + i);
                unpack_span<T, bits, 32>(p, scale(32), minimum(32), out + i);
                if constexpr (bits == 6) unpack_span<T, 6, 48>(p, scale(48), minimum(48), out + i);
            }
        }
    });
}

template <class T>
static void unpack(const Unpack& a) {
    if (a.weight.bits == 4) unpack_in<T, 4>(a);
    else if (a.weight.bits == 6) unpack_in<T, 6>(a);
    else unpack_in<T, 8>(a);
}
