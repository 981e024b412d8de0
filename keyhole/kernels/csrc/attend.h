// Decode attention: one query token per sequence. The tokens of a sequence and KV head are divided
// into splits (as in Flash-Decoding, Dao et al., 2023). One thread computes a split's largest
// score, sum of weights and weighted values; the splits are then combined. The splits of a sequence
// depend on its own length only, so its result does not depend on the batch or on the number of
// threads.

static inline int64_t chunk_size(int64_t tokens) {
    const int64_t size = rounded_up((tokens + 31) / 32, kTile);
    return size < 512 ? 512 : size > 4096 ? 4096 : size;
}

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

// K: keys and values. T: queries and results.
template <class K, class T = K>
class Attention {
    using Query = typename Product<K>::Query;
    static constexpr bool kScaled = Scaled<K>::bytes != 0;

  public:
    explicit Attention(const Attend& a) : a_(a), G_(a.Hq / a.Hkv), N_(a.M * a.page_size) {
        query_stride_ = rounded_up(a.D, Product<K>::step);
        out_stride_ = a.out ? rounded_up(a.Dv, Vector::width) : 0;
        const int64_t lists = a.B * a.Hkv;
        first_task_ = static_cast<int64_t*>(workspace(0, (2 * lists + 1) * sizeof(int64_t)));
        left_ = first_task_ + lists + 1;
        first_task_[0] = 0;
        int64_t tokens = 0;
        for (int64_t i = 0; i < lists; i++) {
            int64_t begin, end;
            range(i, begin, end);
            const int64_t size = chunk_size(end - begin), chunks = (end - begin + size - 1) / size;
            left_[i] = chunks > 1 ? chunks : 1;
            first_task_[i + 1] = first_task_[i] + left_[i];
            tokens += end - begin;
        }
        num_tasks_ = first_task_[lists];
        const bool wants_weights = a.num_requests || a.weights;
        query_ = static_cast<Query*>(workspace(1, a.B * a.Hq * query_stride_ * sizeof(Query)));
        for (int64_t i = 0; i < a.B * a.Hq; i++)
            keep_query<T, K>(static_cast<const T*>(a.query) + i * a.D, a.D,
                             query_ + i * query_stride_);
        part_ = static_cast<float*>(workspace(2, num_tasks_ * G_ * part_size() * 4));
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
            const int64_t list = list_of(task);
            chunk(task, list);
            // The thread that finishes a row's last split combines the splits; no barrier is
            // needed.
            if (__atomic_sub_fetch(&left_[list], 1, __ATOMIC_ACQ_REL) == 0) join(list);
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

    // The reading order of a sequence and KV head: from `begin` to `end`.
    void range(int64_t list, int64_t& begin, int64_t& end) const {
        const int64_t b = list / a_.Hkv, h = list % a_.Hkv;
        if (a_.indices) {
            begin = 0;
            end = a_.counts[b * a_.index_heads + (a_.index_heads == 1 ? 0 : h)] * a_.unit;
        } else {
            begin = a_.window && a_.lengths[b] > a_.window ? a_.lengths[b] - a_.window : 0;
            end = a_.lengths[b];
        }
    }

    Source<K> source(int64_t b, int64_t h, LowRankKeys<K>* low_rank) const {
        const int64_t length = a_.lengths[b], head = a_.index_heads == 1 ? 0 : h;
        return {static_cast<const K*>(a_.keys.data) + h * a_.keys.head_stride,
                static_cast<const K*>(a_.values.data) + h * a_.values.head_stride,
                a_.keys,
                a_.values,
                a_.table + b * a_.table_stride,
                a_.indices ? a_.indices + (b * a_.index_heads + head) * a_.n : nullptr,
                a_.unit,
                a_.page_size,
                a_.window && length > a_.window ? length - a_.window : 0,
                length,
                low_rank};
    }

    // Numbers that a row stores per split.
    int64_t part_size() const { return out_stride_ + Vector::width + 1; }

    Rows part(int64_t task) const {
        float* p = part_ + task * G_ * part_size();
        float *weight = p + G_ * out_stride_, *largest = weight + G_ * Vector::width;
        return {G_, out_stride_, largest, weight, out_stride_ ? p : nullptr};
    }

    // The list with first_task_[list] <= task < first_task_[list + 1].
    int64_t list_of(int64_t task) const {
        int64_t low = 0, high = a_.B * a_.Hkv;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (first_task_[middle] <= task ? low : high) = middle;
        }
        return low;
    }

    void chunk(int64_t task, int64_t list) const {
        const int64_t b = list / a_.Hkv, h = list % a_.Hkv, row = b * a_.Hq + h * G_;
        int64_t begin, end;
        range(list, begin, end);
        const int64_t size = chunk_size(end - begin);
        begin += (task - first_task_[list]) * size;
        if (end > begin + size) end = begin + size;
        const Rows rows = part(task);
        rows.clear();
        if constexpr (kScaled) {
            read(source(b, h, nullptr), begin, end, row, rows);
        } else if (plain_query_) {
            read_columns(b, h, begin, end, row);
        } else if (a_.low_rank) {
            LowRankKeys<K> keys(a_, b, h, room_ + omp_get_thread_num() * room_size_);
            read(source(b, h, &keys), begin, end, row, rows);
        } else {
            read(source(b, h, nullptr), begin, end, row, rows);
        }
        if (!rows.out && raw_) note(rows, raw_ + row * N_, begin, end);
    }

    void read(const Source<K>& source, int64_t begin, int64_t end, int64_t row,
              const Rows& rows) const {
        Tiles<K> tiles(source, begin, end, a_.D + a_.Dv);
        const auto over = [&](const Tile<K>& tile, const Scales* scales) {
            float* raw = raw_ ? raw_ + row * N_ + tile.position[0] : nullptr;
            attend_tile<K>(query_ + row * query_stride_, query_stride_, tile, a_.D, a_.Dv,
                           a_.scoring, rows, raw, N_, nullptr, nullptr, tiles.ahead(), scales);
        };
        for (; tiles.left(); tiles.advance()) {
            if constexpr (kScaled) {
                Scales scales;
                read_scales(tiles.tile(), a_.D, a_.Dv, rows.out, scales);
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

    // Combines the splits of one sequence and KV head.
    void join(int64_t list) const {
        const int64_t b = list / a_.Hkv, h = list % a_.Hkv;
        for (int64_t g = 0; g < G_; g++) {
            const int64_t head = h * G_ + g, row = b * a_.Hq + head;
            const float* sinks = a_.scoring.sinks;
            float top = sinks ? sinks[head] : -INFINITY;
            for (int64_t i = first_task_[list]; i < first_task_[list + 1]; i++) {
                const float other = part(i).largest[g];
                if (other > top) top = other;
            }
            const float origin = top == -INFINITY ? 0.0f : top;
            float weight = sinks ? expf(sinks[head] - origin) : 0.0f;
            for (int64_t i = first_task_[list]; i < first_task_[list + 1]; i++) {
                const Rows rows = part(i);
                rows.largest[g] = expf(rows.largest[g] - origin);  // from here on: its share
                weight += total(load(rows.weight + g * Vector::width)) * rows.largest[g];
            }
            total_[2 * row] = origin;
            total_[2 * row + 1] = logf(weight);
            if (!a_.out) continue;
            T* out = static_cast<T*>(a_.out) + row * a_.Dv;
            for (int64_t d = 0; d < a_.Dv; d += Vector::width) {
                Vector sum = broadcast(0.0f);
                for (int64_t i = first_task_[list]; i < first_task_[list + 1]; i++) {
                    const Rows rows = part(i);
                    sum = fma(broadcast(rows.largest[g]), load(rows.out + g * out_stride_ + d), sum);
                }
                const int64_t n = a_.Dv - d < Vector::width ? a_.Dv - d : Vector::width;
                store(out + d, sum / broadcast(weight), static_cast<int>(n));
            }
        }
    }

    // Weights of a block of tokens from `begin` on, reduced over the heads.
    void reduce(int64_t b, int64_t begin) const {
        const int64_t end = begin + block_ < N_ ? begin + block_ : N_;
        const int64_t known = a_.lengths[b] < end ? a_.lengths[b] : end;
        alignas(64) float token[kBlock];
        for (int64_t r = 0; r < a_.num_requests; r++) {
            const Request& request = a_.requests[r];
            over_heads(b, 0, a_.Hq, request.sum, begin, known, token);
            float* out = request.out + b * (N_ / request.unit);
            for (int64_t t = begin; t < end; t += request.unit) {
                float sum = 0.0f;
                for (int64_t i = t; i < t + request.unit && i < known; i++) sum += token[i - begin];
                out[t / request.unit] = sum;
            }
        }
        for (int64_t h = 0; a_.weights && h < a_.Hkv; h++) {
            over_heads(b, h * G_, G_, false, begin, known, token);
            float* out = a_.weights + (b * a_.Hkv + h) * N_;
            for (int64_t t = begin; t < end; t++) out[t] = t < known ? token[t - begin] : 0.0f;
        }
    }

    void over_heads(int64_t b, int64_t first, int64_t heads, bool sum, int64_t begin, int64_t end,
                    float* token) const {
        for (int64_t t = begin; t < end; t += Vector::width) {
            const int64_t rest = end - t;
            Vector result = broadcast(sum ? 0.0f : -INFINITY);
            for (int64_t h = first; h < first + heads; h++) {
                const int64_t row = b * a_.Hq + h;
                const float* raw = raw_ + row * N_ + t;
                const Vector s = rest >= Vector::width ? load(raw) : load(raw, static_cast<int>(rest));
                const Vector x = s - broadcast(total_[2 * row]) - broadcast(total_[2 * row + 1]);
                result = sum ? result + exponential(x) : max(result, x);
            }
            if (!sum) result = exponential(result);
            store(token + (t - begin), result);
        }
    }

    const Attend& a_;
    const int64_t G_, N_;
    int64_t query_stride_, out_stride_, num_tasks_, block_;
    bool parallel_;
    int64_t *first_task_, *left_;  // of each list: its first split, splits not yet finished
    Query* query_;
    float* plain_query_ = nullptr;  // for keys that are columns
    int64_t room_size_ = 0;
    float* room_ = nullptr;  // for low-rank keys, per thread
    float *part_, *total_, *raw_;  // total_: of each row, largest score and logarithm of the weight
};
