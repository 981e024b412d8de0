// Causal attention of consecutive tokens over the pages of their sequence, or of tokens at any
// positions over chosen ones. A task is a block of query tokens of one KV head; every tile of keys
// is read once for all of its rows.

// A tile of 8-bit numbers as one of T, which holds them exactly; their scales are applied to scores
// and weights.
template <class K, class T>
class WidenedTile {
  public:
    // Floats that a thread needs.
    static int64_t room(int64_t D, int64_t Dv) {
        return Scaled<K>::bytes ? (rounded_up(D, W) + rounded_up(Dv, W)) * kTile : 0;
    }

    WidenedTile(int64_t D, int64_t Dv, float* room)
        : D_(D), Dv_(Dv), keys_(reinterpret_cast<T*>(room)),
          values_(reinterpret_cast<T*>(room + rounded_up(D, W) * kTile)) {}

    const Tile<T>& of(const Tile<K>& tile) {
        read_scales(tile, D_, Dv_, true, scales_);
        tile_.count = tile.count;
        for (int t = 0; t < kTile; t++) {
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
    Tile<T> tile_;
    Scales scales_;
};

// K: keys and values. T: queries and results.
template <class K, class T = K>
class CausalAttention {
    using Query = typename Product<T>::Query;

  public:
    explicit CausalAttention(const Prefill& a) : a_(a), G_(a.Hq / a.Hkv) {
        query_stride_ = rounded_up(a.D, Product<T>::step);
        out_stride_ = rounded_up(a.Dv, Vector::width);
        block_ = G_ < kRows ? kRows / G_ : 1;
        rows_ = block_ * G_;
        table_size_ = a.M;
        table_ = static_cast<int32_t*>(workspace(0, table_size_ * sizeof(int32_t)));
        query_ = static_cast<Query*>(
            workspace(1, omp_get_max_threads() * rows_ * query_stride_ * sizeof(Query)));
        sums_ = static_cast<float*>(
            workspace(2, omp_get_max_threads() * rows_ * (out_stride_ + Vector::width + 1) * 4));
        packed_room_ = PromptTiles<T>::room(a.D, a.Dv);
        room_ = packed_room_ + WidenedTile<K, T>::room(a.D, a.Dv);
        packed_ = static_cast<float*>(workspace(4, omp_get_max_threads() * room_ * 4));
        sight_ = static_cast<int64_t*>(
            workspace(3, omp_get_max_threads() * 2 * rows_ * sizeof(int64_t)));
        for (int64_t i = 0; i < table_size_; i++) table_[i] = static_cast<int32_t>(a.pages[i]);
    }

    void run() {
        const int64_t blocks = (a_.T + block_ - 1) / block_;
        // The last tokens attend to most keys: they are scheduled first, so that no long task runs
        // last.
        for_each(blocks * a_.Hkv, true, [=](int64_t i) {
            block(i % a_.Hkv, (blocks - 1 - i / a_.Hkv) * block_);
        });
    }

  private:
    // Rows of a task, if a group has no more: their sums fit in the L1 cache.
    static constexpr int64_t kRows = 64;

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

    void block(int64_t h, int64_t begin) const {
        const int64_t tokens = begin + block_ < a_.T ? block_ : a_.T - begin;
        const int64_t first = position(begin), last = position(begin + tokens - 1);
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
        const Source<K> from{static_cast<const K*>(a_.keys.data) + h * a_.keys.head_stride,
                             static_cast<const K*>(a_.values.data) + h * a_.values.head_stride,
                             a_.keys,
                             a_.values,
                             table_,
                             a_.chosen,
                             1,
                             a_.page_size,
                             0,
                             last + 1};
        const int64_t low = reading(first_seen(first)), high = reading(last + 1);
        float* room = packed_ + thread * room_;
        const PromptTiles<T> reader(a_, room);
        WidenedTile<K, T> wide(a_.D, a_.Dv, room + packed_room_);
        Tiles<K> tiles(from, low, high, a_.D + a_.Dv);
        for (; tiles.left(); tiles.advance()) {
            const Tile<K>& tile = tiles.tile();
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
    const int64_t G_;
    int64_t query_stride_, out_stride_, block_, rows_, table_size_, packed_room_, room_;
    int32_t* table_;
    Query* query_;
    float *sums_, *packed_;
    int64_t* sight_;
};
