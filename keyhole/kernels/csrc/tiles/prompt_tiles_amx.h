// How a block of a prompt's rows reads a tile: by the matrix unit.

template <class T>
class PromptTiles;

template <>
class PromptTiles<bfloat16> {
  public:
    static constexpr int tokens = kMatrixTokens;  // of a tile
    // Floats that a thread needs.
    static int64_t room(int64_t, int64_t) { return 0; }

    PromptTiles(const Prefill& a, float*) : a_(a) {}

    void attend(const bfloat16* query, int64_t query_stride,
                const MatrixTile& tile, const Rows& rows, const int64_t* after, const int64_t* until,
                const MatrixTile* ahead, const Scales* scales) const {
        matrix_tile(query, query_stride, tile, a_.D, a_.Dv, a_.scoring, rows, nullptr, 0, after,
                    until, ahead, scales);
    }

  private:
    const MatrixUnit unit_;
    const Prefill& a_;
};
