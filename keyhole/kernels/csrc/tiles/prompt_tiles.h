// How a block of a prompt's rows reads a tile: directly from memory.

template <class T>
class PromptTiles {
  public:
    static constexpr int tokens = kTile;  // of a tile
    static constexpr int unit = 1;        // rows come in whole units
    static constexpr int64_t rows = 64;   // of a task at most: their sums fit in the L1 cache
    // Floats that a thread needs.
    static int64_t room(int64_t, int64_t) { return 0; }

    PromptTiles(const Prefill& a, float*) : a_(a) {}

    void attend(const typename Product<T>::Query* query, int64_t query_stride, const Tile<T>& tile,
                const Rows& rows, const int64_t* after, const int64_t* until,
                const Tile<T>* ahead, const Scales* scales) const {
        attend_tile<T>(query, query_stride, tile, a_.D, a_.Dv, a_.scoring, rows, nullptr, 0, after,
                       until, ahead, scales);
    }

  private:
    const Prefill& a_;
};
