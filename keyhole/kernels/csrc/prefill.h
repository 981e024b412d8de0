// Causal attention of consecutive tokens over the pages of their sequence or over selected blocks of
// it, or of tokens at any positions over chosen ones. A task is a block of query tokens of one KV
// head, or of one query head where each selects its own blocks; every tile of keys is read once for
// all of its rows.

// A tile of 8-bit numbers as one of T, which holds them exactly; their scales are applied to scores
// and weights.
template <class K, class T, int N>
class WidenedTile {
  public:
    // Floats that a thread needs.
    static int64_t room(int64_t D, int64_t Dv) {
        return Scaled<K>::bytes ? (rounded_up(D, W) + rounded_up(Dv, W)) * N : 0;
    }

    WidenedTile(int64_t D, int64_t Dv, float* room)
        : D_(D), Dv_(Dv), keys_(reinterpret_cast<T*>(room)),
          values_(reinterpret_cast<T*>(room + rounded_up(D, W) * N)) {}

    const Tile<T, N>& of(const Tile<K, N>& tile) {
        read_scales(tile, D_, Dv_, true, scales_);
        tile_.count = tile.count;
        for (int t = 0; t < N; t++) {
            tile_.position[t] = tile.position[t];
            tile_.key[t] = widened(tile.key[t], D_, keys_ + t * rounded_up(D_, W));
            tile_.value[t] = widened(tile.value[t], Dv_, values_ + t * rounded_up(Dv_, W));
        }
        return tile_;
    }
    const Scales& scales() const { return scales_; }

  private:
    static constexpr int W = Vector::width;
    static const T* widened(const K* from, int64_t n, T* to) {
        int64_t d = 0;
        for (; d + W <= n; d += W) store(to + d, load(from + d));
        if (d < n) store(to + d, load(from + d, static_cast<int>(n - d)));
        return to;
    }

    const int64_t D_, Dv_;
    T *keys_, *values_;
    Tile<T, N> tile_;
    Scales scales_;
};

// K: keys and values. T: queries and results.
template <class K, class T = K>
class CausalAttention {
    using Query = typename Product<T>::Query;
    static constexpr int N = PromptTiles<T>::tokens;
    using Wide = WidenedTile<K, T, N>;

  public:
    explicit CausalAttention(const Prefill& a)
        : a_(a), heads_(a.blocks ? a.Hq : a.Hkv), G_(a.Hq / heads_) {
        query_stride_ = rounded_up(a.D, Product<T>::step);
        out_stride_ = rounded_up(a.Dv, Vector::width);
        int64_t most = PromptTiles<T>::rows;  // fewer where threads would have too few tasks
        while (most > kRows && a.T * G_ / most * heads_ < 4 * omp_get_max_threads()) most /= 2;
        block_ = G_ < most ? most / G_ : 1;
        rows_ = rounded_up(block_ * G_, PromptTiles<T>::unit);
        table_size_ = a.M;
        table_ = static_cast<int32_t*>(workspace(0, table_size_ * sizeof(int32_t)));
        query_ = static_cast<Query*>(
            workspace(1, omp_get_max_threads() * rows_ * query_stride_ * sizeof(Query)));
        sums_ = static_cast<float*>(
            workspace(2, omp_get_max_threads() * rows_ * (out_stride_ + Vector::width + 1) * 4));
        packed_room_ = PromptTiles<T>::room(a.D, a.Dv);
        room_ = packed_room_ + Wide::room(a.D, a.Dv);
        packed_ = static_cast<float*>(workspace(4, omp_get_max_threads() * room_ * 4));
        sight_ = static_cast<int64_t*>(
            workspace(3, omp_get_max_threads() * 2 * rows_ * sizeof(int64_t)));
        for (int64_t i = 0; i < table_size_; i++) table_[i] = static_cast<int32_t>(a.pages[i]);
    }

    // The last tokens attend to most keys: they are scheduled first, so that no long task runs last.
    void run() {
        if (a_.blocks) return run_over_blocks();
        const int64_t tasks = (a_.T + block_ - 1) / block_;
        for_each(tasks * heads_, true, [=](int64_t i) {
            const int64_t begin = (tasks - 1 - i / heads_) * block_;
            attend(i % heads_, begin, begin + block_ < a_.T ? begin + block_ : a_.T, 0);
        });
    }

  private:
    static constexpr int64_t kRows = 64;  // of a task at least, which few prompts cut into more

    // Each block of positions is cut into tasks, whose tokens share its lists.
    void run_over_blocks() {
        const int64_t size = a_.block_size, lead = a_.start % size;
        const int64_t cuts = (size + block_ - 1) / block_, tasks = (lead + a_.T + size - 1) / size * cuts;
        for_each(tasks * heads_, true, [=](int64_t i) {
            const int64_t task = tasks - 1 - i / heads_, row = task / cuts;
            int64_t begin = row * size + task % cuts * block_ - lead, end = begin + block_;
            if (end > (row + 1) * size - lead) end = (row + 1) * size - lead;
            if (end > a_.T) end = a_.T;
            if (begin < 0) begin = 0;
            if (begin < end) attend(i % heads_, begin, end, row);
        });
    }

    int64_t first_seen(int64_t position) const {
        return a_.window && position >= a_.window ? position - a_.window + 1 : 0;
    }

    int64_t position(int64_t row) const {
        return a_.positions ? a_.positions[row] : a_.start + row;
    }

    // The index, in reading order, of the first token not before `position`.
    int64_t reading(int64_t position) const {
        if (!a_.chosen) return position;
        int64_t low = 0, high = a_.n;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (a_.chosen[middle] < position)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }

    // Tokens begin .. end - 1; row_of_lists: which of the R.
    void attend(int64_t h, int64_t begin, int64_t end, int64_t row_of_lists) const {
        const int64_t tokens = end - begin, list = row_of_lists * heads_ + h;
        const int64_t first = position(begin), last = position(end - 1);
        const int64_t kv_head = h * G_ / (a_.Hq / a_.Hkv);
        const int thread = omp_get_thread_num();
        Query* query = query_ + thread * rows_ * query_stride_;
        float* sums = sums_ + thread * rows_ * (out_stride_ + Vector::width + 1);
        int64_t *after = sight_ + thread * 2 * rows_, *until = after + rows_;
        float *weight = sums + rows_ * out_stride_, *largest = weight + rows_ * Vector::width;
        const Rows rows{tokens * G_, out_stride_, largest, weight, sums};
        rows.clear();
        for (int64_t row = 0; row < rows.count; row++) {
            const int64_t from = ((begin + row / G_) * a_.Hq + h * G_ + row % G_) * a_.D;
            keep_query(static_cast<const T*>(a_.query) + from, a_.D, query + row * query_stride_);
            until[row] = position(begin + row / G_);
            after[row] = first_seen(until[row]) - 1;
            if (a_.scoring.sinks) {  // a logit that takes weight and has no value
                rows.largest[row] = a_.scoring.sinks[h * G_ + row % G_];
                rows.weight[row * Vector::width] = 1.0f;
            }
        }
        const Source<K> from{static_cast<const K*>(a_.keys.data) + kv_head * a_.keys.head_stride,
                             static_cast<const K*>(a_.values.data) + kv_head * a_.values.head_stride,
                             a_.keys,
                             a_.values,
                             table_,
                             a_.blocks ? a_.blocks + list * a_.listed : a_.chosen,
                             a_.blocks ? a_.block_size : 1,
                             a_.page_size,
                             0,
                             last + 1};
        const int64_t low = a_.blocks ? 0 : reading(first_seen(first));
        const int64_t high = a_.blocks ? a_.counts[list] * a_.block_size : reading(last + 1);
        float* room = packed_ + thread * room_;
        const PromptTiles<T> reader(a_, room);
        Wide wide(a_.D, a_.Dv, room + packed_room_);
        Tiles<K, N> tiles(from, 1, low, high, a_.D + a_.Dv);
        for (; tiles.left(); tiles.advance()) {
            const Tile<K, N>& tile = tiles.tile();
            const bool seen = tile.position[tile.count - 1] <= first &&
                              tile.position[0] >= first_seen(last);
            const int64_t *from = seen ? nullptr : after, *to = seen ? nullptr : until;
            if constexpr (Scaled<K>::bytes != 0)
                reader.attend(query, query_stride_, wide.of(tile), rows, from, to, nullptr,
                              &wide.scales());
            else
                reader.attend(query, query_stride_, tile, rows, from, to, tiles.ahead(), nullptr);
        }
        for (int64_t row = 0; row < rows.count; row++) {
            const int64_t t = begin + row / G_, head = h * G_ + row % G_;
            T* out = static_cast<T*>(a_.out) + (t * a_.Hq + head) * a_.Dv;
            const Vector weight = broadcast(total(load(rows.weight + row * Vector::width)));
            for (int64_t d = 0; d < a_.Dv; d += Vector::width) {
                const int64_t n = a_.Dv - d < Vector::width ? a_.Dv - d : Vector::width;
                store(out + d, load(rows.out + row * out_stride_ + d) / weight,
                      static_cast<int>(n));
            }
        }
    }

    const Prefill& a_;
    const int64_t heads_, G_;
    int64_t query_stride_, out_stride_, block_, rows_, table_size_, packed_room_, room_;
    int32_t* table_;
    Query* query_;
    float *sums_, *packed_;
    int64_t* sight_;
};
