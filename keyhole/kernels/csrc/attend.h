// Decode attention: one query token per row. The tokens of a block of rows and KV head are divided
// into splits (as in Flash-Decoding, Dao et al., 2023). One thread computes a split's largest
// score, sum of weights and weighted values; the splits are then combined. The splits of a row
// depend on its own length only, so its result does not depend on the batch, on the rows that share
// its tokens, or on the number of threads.

// Scores of H rows of queries and the keys of `count` tokens, at most N vectors, that are columns:
// number d of token t is keys[d * stride + t]. There is no sum over lanes.
template <class T, int H, int N>
static inline void score_columns(const float* query, int64_t D, const T* keys, int64_t stride,
                                 int count, float scale, float* raw, int64_t raw_stride) {
    constexpr int W = Vector::width;
    const int last = count - (N - 1) * W;
    Vector sum[H][N];
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) sum[h][i] = broadcast(0.0f);
    for (int64_t d = 0; d < D; d++) {
        Vector k[N];
        for (int i = 0; i < N; i++) {
            const T* key = keys + d * stride + i * W;
            k[i] = i < N - 1 || last == W ? load(key) : load(key, last);
        }
        for (int h = 0; h < H; h++) {
            const Vector q = broadcast(query[h * D + d]);
            for (int i = 0; i < N; i++) sum[h][i] = fma(q, k[i], sum[h][i]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) {
            float* to = raw + h * raw_stride + i * W;
            const Vector scores = sum[h][i] * broadcast(scale);
            i < N - 1 || last == W ? store(to, scores) : store(to, scores, last);
        }
}

// K: keys and values. T: queries and results. Form: how queries are kept.
template <class K, class T = K, class Form = QueryForm<K>>
class Attention {
    using Query = typename Form::Number;
    static constexpr bool kScaled = Scaled<K>::bytes != 0;
    static_assert(kWhole % Form::tokens == 0);

  public:
    explicit Attention(const Attend& a)
        : a_(a), G_(a.Hq / a.Hkv), N_(a.M * a.page_size), row_blocks_(a) {
        query_stride_ = Form::size(a.D);
        out_stride_ = a.out ? rounded_up(a.Dv, Vector::width) : 0;
        num_lists_ = row_blocks_.count() * a.Hkv;
        first_part_ = static_cast<int64_t*>(workspace(0, (3 * num_lists_ + 2) * sizeof(int64_t)));
        left_ = first_part_ + num_lists_ + 1;
        first_task_ = left_ + num_lists_;
        first_part_[0] = 0;
        int64_t tokens = 0, splits = 0, most = 0;
        for (int64_t i = 0; i < num_lists_; i++) {
            const int64_t rows = row_blocks_.rows(i / a.Hkv), size = chunk_size(length(i));
            const int64_t chunks = (length(i) + size - 1) / size;
            left_[i] = chunks > 1 ? chunks : 1;
            first_part_[i + 1] = first_part_[i] + left_[i] * part_size(rows * G_);
            tokens += length(i) * rows;
            splits += left_[i];
            if (rows > most) most = rows;
        }
        heads_ = heads_together(most * G_, splits);
        groups_ = (a.Hkv + heads_ - 1) / heads_;
        num_groups_ = row_blocks_.count() * groups_;
        first_task_[0] = 0;
        for (int64_t i = 0; i < num_groups_; i++)
            first_task_[i + 1] = first_task_[i] + left_[first_list(i)];
        num_tasks_ = first_task_[num_groups_];
        const bool wants_weights = a.num_requests || a.weights;
        query_ = static_cast<Query*>(workspace(1, a.B * a.Hq * query_stride_ * sizeof(Query)));
        for (int64_t i = 0; i < a.B * a.Hq; i++)
            Form::keep(static_cast<const T*>(a.query) + i * a.D, a.D,
                       query_ + place(i / a.Hq, i % a.Hq) * query_stride_);
        part_ = static_cast<float*>(workspace(2, first_part_[num_lists_] * 4));
        total_ = static_cast<float*>(workspace(3, a.B * a.Hq * 2 * 4));
        raw_ = wants_weights ? static_cast<float*>(workspace(4, a.B * a.Hq * N_ * 4)) : nullptr;
        if (a.low_rank) {
            room_size_ = LowRankKeys<K>::room(a);
            room_ = static_cast<float*>(workspace(6, omp_get_max_threads() * room_size_ * 4));
        }
        if (a.keys.dim_stride != 1) {
            const int64_t n = a.B * a.Hq * a.D;
            plain_query_ = static_cast<float*>(workspace(5, n * 4));
            for (int64_t i = 0; i < n; i += Vector::width) {
                const int count = static_cast<int>(n - i < Vector::width ? n - i : Vector::width);
                store(plain_query_ + i, load(static_cast<const T*>(a.query) + i, count), count);
            }
        }
        block_ = kBlock / a.page_size * a.page_size;  // whole pages
        parallel_ = tokens * (a.D + a.Dv) * static_cast<int64_t>(sizeof(K)) > kAlone;
    }

    void run() {
        for_each(num_tasks_, parallel_, [this](int64_t task) {
            const int64_t group = group_of(task), list = first_list(group), h = list % a_.Hkv;
            const int heads = static_cast<int>(lesser(heads_, a_.Hkv - h));
            chunk(task - first_task_[group], list, heads);
            // The thread that finishes a row's last split combines the splits; no barrier is
            // needed.
            for (int64_t i = list; i < list + heads; i++)
                if (__atomic_sub_fetch(&left_[i], 1, __ATOMIC_ACQ_REL) == 0) join(i);
        });
        if (!raw_) return;
        const int64_t blocks = (N_ + block_ - 1) / block_;
        for_each(a_.B * blocks, parallel_,
                 [=](int64_t i) { reduce(i / blocks, i % blocks * block_); });
    }

  private:
    // Bytes below which waking other threads costs more than it saves.
    static constexpr int64_t kAlone = 1 << 17;
    // Tokens whose weights are reduced together, at most.
    static constexpr int64_t kBlock = 1024;
    // KV heads that one task reads together, at most, and the bytes of their queries and sums: as
    // many as leave room for keys and values in the first cache.
    static constexpr int kHeads = 8;
    static constexpr int64_t kState = 1 << 14;

    // KV heads that a task reads together, where all read the same tokens. rows: of a KV head.
    // splits: tasks of one head each, of which every thread keeps a few.
    int64_t heads_together(int64_t rows, int64_t splits) const {
        if (a_.low_rank || a_.keys.dim_stride != 1 || (a_.indices && a_.index_heads > 1)) return 1;
        const int64_t bytes = rows * (query_stride_ * sizeof(Query) + out_stride_ * sizeof(float));
        const int64_t heads = lesser(kState / bytes, splits / (4 * omp_get_max_threads()));
        return heads < 1 ? 1 : lesser(heads, lesser(kHeads, a_.Hkv));
    }
    // The first list of a group of heads.
    int64_t first_list(int64_t group) const {
        return group / groups_ * a_.Hkv + group % groups_ * heads_;
    }

    // Where a row's query head stands among all: those of a block and KV head one after another.
    int64_t place(int64_t b, int64_t head) const {
        const int64_t block = row_blocks_.of(b), first = row_blocks_.first(block);
        const int64_t heads = row_blocks_.rows(block) * G_;
        return first * a_.Hq + head / G_ * heads + (b - first) * G_ + head % G_;
    }

    // Tokens of a list: those of the last row of its block, which reads most.
    int64_t length(int64_t list) const {
        int64_t begin, end;
        row_blocks_.range(row_blocks_.first(list / a_.Hkv + 1) - 1, list % a_.Hkv, begin, end);
        return end - begin;
    }

    Source<K> source(int64_t b, int64_t h, LowRankKeys<K>* low_rank) const {
        const int64_t length = a_.lengths[b];
        return {static_cast<const K*>(a_.keys.data) + h * a_.keys.head_stride,
                static_cast<const K*>(a_.values.data) + h * a_.values.head_stride,
                a_.keys,
                a_.values,
                a_.table + b * a_.table_stride,
                row_blocks_.indices(b, h),
                a_.unit,
                a_.page_size,
                a_.window && length > a_.window ? length - a_.window : 0,
                length,
                low_rank};
    }

    // Numbers that so many rows store per split: whole cache lines, as another thread writes those of
    // the next split.
    int64_t part_size(int64_t rows) const {
        return rounded_up(rows * (out_stride_ + Vector::width + 1), 16);
    }

    Rows part(int64_t split, int64_t list) const {
        const int64_t rows = row_blocks_.rows(list / a_.Hkv) * G_;
        float* p = part_ + first_part_[list] + split * part_size(rows);
        float *weight = p + rows * out_stride_, *largest = weight + rows * Vector::width;
        return {rows, out_stride_, largest, weight, out_stride_ ? p : nullptr};
    }

    // The group with first_task_[group] <= task < first_task_[group + 1].
    int64_t group_of(int64_t task) const {
        int64_t low = 0, high = num_groups_;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (first_task_[middle] <= task ? low : high) = middle;
        }
        return low;
    }

    // One split of some lists of a block: what all rows of the block read, once; then what each of
    // them reads by itself.
    void chunk(int64_t split, int64_t list, int heads) const {
        const int64_t block = list / a_.Hkv, h = list % a_.Hkv, first = row_blocks_.first(block);
        Rows rows[kHeads], own[kHeads];
        for (int i = 0; i < heads; i++) {
            rows[i] = part(split, list + i);
            rows[i].clear();
        }
        const int64_t size = chunk_size(length(list)), offset = split * size;
        const int64_t shared = row_blocks_.shared(block, h);
        if (offset < shared)
            read(source(first, h, nullptr), heads, offset, lesser(shared, offset + size),
                 place(first, h * G_), rows[0].count, rows);
        for (int64_t b = first; b < first + row_blocks_.rows(block); b++) {
            int64_t begin, end;
            row_blocks_.range(b, h, begin, end);
            begin += offset;
            end = lesser(end, begin + size);
            for (int i = 0; i < heads; i++) own[i] = rows[i].some((b - first) * G_, G_);
            chunk_of_row(b, h, heads, begin < shared ? shared : begin, end, rows[0].count, own);
            for (int i = 0; !a_.out && raw_ && i < heads; i++)
                note(own[i], raw_ + place(b, (h + i) * G_) * N_, begin, end);
        }
    }

    void chunk_of_row(int64_t b, int64_t h, int heads, int64_t begin, int64_t end, int64_t apart,
                      const Rows* rows) const {
        const int64_t row = place(b, h * G_);
        if constexpr (kScaled) {
            read(source(b, h, nullptr), heads, begin, end, row, apart, rows);
        } else if (plain_query_) {
            read_columns(b, h, begin, end, row);
        } else if (a_.low_rank) {
            LowRankKeys<K> keys(a_, b, h, room_ + omp_get_thread_num() * room_size_);
            read(source(b, h, &keys), heads, begin, end, row, apart, rows);
        } else {
            read(source(b, h, nullptr), heads, begin, end, row, apart, rows);
        }
    }

    // `row`: of the first of the heads; those of the next one are `apart` rows further.
    void read(const Source<K>& source, int heads, int64_t begin, int64_t end, int64_t row,
              int64_t apart, const Rows* rows) const {
        constexpr int N = Form::tokens;
        [[maybe_unused]] typename Form::Unit unit{};
        Tiles<K, N> tiles(source, heads, begin, end, a_.D + a_.Dv);
        const auto over = [&](const Tile<K, N>& tile, const Scales* scales) {
            const int64_t at = row + tile.head * apart;
            float* raw = raw_ ? raw_ + at * N_ + tile.position[0] : nullptr;
            Form::attend(query_ + at * query_stride_, query_stride_, tile, a_.D, a_.Dv,
                         a_.scoring, rows[tile.head], raw, N_, nullptr, nullptr, tiles.ahead(),
                         scales);
        };
        for (; tiles.left(); tiles.advance()) {
            if constexpr (Form::reads_scales) {
                over(tiles.tile(), nullptr);
            } else if constexpr (kScaled) {
                Scales scales;
                read_scales(tiles.tile(), a_.D, a_.Dv, rows[0].out, scales);
                over(tiles.tile(), &scales);
            } else {
                source.low_rank ? over(source.low_rank->rebuilt(tiles.tile()), nullptr)
                                : over(tiles.tile(), nullptr);
            }
        }
    }

    // The scores of pages whose keys are columns.
    void read_columns(int64_t b, int64_t h, int64_t begin, int64_t end, int64_t row) const {
        constexpr int W = Vector::width;
        const K* keys = static_cast<const K*>(a_.keys.data) + h * a_.keys.head_stride;
        const int32_t* table = a_.table + b * a_.table_stride;
        for (int64_t at = begin, run; at < end; at += run) {
            const int64_t entry = at / a_.page_size, place = at - entry * a_.page_size;
            run = a_.page_size - place < end - at ? a_.page_size - place : end - at;
            if (run > 2 * W) run = 2 * W;
            const K* key = keys + table[entry] * a_.keys.page_stride + place;
            int64_t g = 0;
            for (; g + 4 <= G_; g += 4) columns<4>(key, run, row + g, at);
            for (; g < G_; g++) columns<1>(key, run, row + g, at);
        }
    }

    template <int H>
    void columns(const K* key, int64_t run, int64_t row, int64_t at) const {
        const auto score = run > Vector::width ? score_columns<K, H, 2> : score_columns<K, H, 1>;
        score(plain_query_ + row * a_.D, a_.D, key, a_.keys.dim_stride, static_cast<int>(run),
              a_.scoring.scale, raw_ + row * N_ + at, N_);
    }

    // Largest score and weight of a split without values; raw: [G][N].
    void note(const Rows& rows, const float* raw, int64_t begin, int64_t end) const {
        constexpr int W = Vector::width;
        const int64_t whole = begin + (end - begin) / W * W;
        for (int64_t g = 0; g < G_; g++) {
            const float* scores = raw + g * N_;
            Vector high = broadcast(-INFINITY);
            for (int64_t t = begin; t < whole; t += W) high = max(high, load(scores + t));
            float top = largest(high);
            for (int64_t t = whole; t < end; t++) top = scores[t] > top ? scores[t] : top;
            rows.largest[g] = top;
            const Vector origin = broadcast(top == -INFINITY ? 0.0f : top);
            Vector sum = broadcast(0.0f);
            for (int64_t t = begin; t < whole; t += W)
                sum = sum + exponential(load(scores + t) - origin);
            store(rows.weight + g * W, sum);
            for (int64_t t = whole; t < end; t++)
                rows.weight[g * W] += expf(scores[t] - (top == -INFINITY ? 0.0f : top));
        }
    }

    // Combines the splits of one block of rows and KV head.
    void join(int64_t list) const {
        const int64_t first = row_blocks_.first(list / a_.Hkv), h = list % a_.Hkv;
        const Rows rows = part(0, list);
        const int64_t splits = (first_part_[list + 1] - first_part_[list]) / part_size(rows.count);
        for (int64_t row = 0; row < rows.count; row++)
            join(rows.some(row, 1), splits, part_size(rows.count), first + row / G_,
                 h * G_ + row % G_);
    }

    // Query head `head` of row b; the same row of the next split is `stride` numbers further.
    void join(const Rows& row, int64_t splits, int64_t stride, int64_t b, int64_t head) const {
        const float* sinks = a_.scoring.sinks;
        float top = sinks ? sinks[head] : -INFINITY;
        for (int64_t i = 0; i < splits; i++)
            if (row.largest[i * stride] > top) top = row.largest[i * stride];
        const float origin = top == -INFINITY ? 0.0f : top;
        float weight = sinks ? expf(sinks[head] - origin) : 0.0f;
        for (int64_t i = 0; i < splits; i++) {
            float& share = row.largest[i * stride];
            share = expf(share - origin);
            weight += total(load(row.weight + i * stride)) * share;
        }
        float* totals = total_ + 2 * place(b, head);
        totals[0] = origin;
        totals[1] = logf(weight);
        if (!a_.out) return;
        T* out = static_cast<T*>(a_.out) + (b * a_.Hq + head) * a_.Dv;
        for (int64_t d = 0; d < a_.Dv; d += Vector::width) {
            Vector sum = broadcast(0.0f);
            for (int64_t i = 0; i < splits; i++)
                sum = fma(broadcast(row.largest[i * stride]), load(row.out + i * stride + d), sum);
            store(out + d, sum / broadcast(weight),
                  static_cast<int>(lesser(a_.Dv - d, Vector::width)));
        }
    }

    // Weights of a block of tokens from `begin` on, reduced over the heads.
    void reduce(int64_t b, int64_t begin) const {
        const int64_t end = begin + block_ < N_ ? begin + block_ : N_;
        const int64_t known = a_.lengths[b] < end ? a_.lengths[b] : end;
        alignas(64) float token[kBlock];
        for (int64_t r = 0; r < a_.num_requests; r++) {
            const Request& request = a_.requests[r];
            over_heads(b, 0, a_.Hkv, request.sum, begin, known, token);
            float* out = request.out + b * (N_ / request.unit);
            for (int64_t t = begin; t < end; t += request.unit) {
                float sum = 0.0f;
                for (int64_t i = t; i < t + request.unit && i < known; i++) sum += token[i - begin];
                out[t / request.unit] = sum;
            }
        }
        for (int64_t h = 0; a_.weights && h < a_.Hkv; h++) {
            over_heads(b, h, 1, false, begin, known, token);
            float* out = a_.weights + (b * a_.Hkv + h) * N_;
            for (int64_t t = begin; t < end; t++) out[t] = t < known ? token[t - begin] : 0.0f;
        }
    }

    // Over the query heads of some KV heads.
    void over_heads(int64_t b, int64_t first, int64_t heads, bool sum, int64_t begin, int64_t end,
                    float* token) const {
        const int64_t lead = place(b, first * G_);
        const int64_t all = row_blocks_.rows(row_blocks_.of(b)) * G_;
        for (int64_t t = begin; t < end; t += Vector::width) {
            const int64_t rest = end - t;
            Vector result = broadcast(sum ? 0.0f : -INFINITY);
            for (int64_t h = 0; h < heads; h++) {
                const int64_t from = lead + h * all;
                for (int64_t row = from; row < from + G_; row++) {
                    const float* raw = raw_ + row * N_ + t;
                    const Vector s =
                        rest >= Vector::width ? load(raw) : load(raw, static_cast<int>(rest));
                    const Vector x =
                        s - broadcast(total_[2 * row]) - broadcast(total_[2 * row + 1]);
                    result = sum ? result + exponential(x) : max(result, x);
                }
            }
            if (!sum) result = exponential(result);
            store(token + (t - begin), result);
        }
    }

    const Attend& a_;
    const int64_t G_, N_;
    const RowBlocks row_blocks_;
    // A list: what a block of rows reads of a KV head.
    int64_t query_stride_, out_stride_, num_lists_, num_tasks_, block_;
    // Groups of KV heads: heads of one, groups of a block, all groups.
    int64_t heads_, groups_, num_groups_;
    bool parallel_;
    // Of each list: where the numbers of its splits begin, splits not yet finished. Of each group:
    // its first task.
    int64_t *first_part_, *left_, *first_task_;
    Query* query_;
    float* plain_query_ = nullptr;  // for keys that are columns
    int64_t room_size_ = 0;
    float* room_ = nullptr;  // for low-rank keys, per thread
    float *part_, *total_, *raw_;  // total_: of each row, largest score and logarithm of the weight
};
