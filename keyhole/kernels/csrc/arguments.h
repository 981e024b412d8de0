// Arguments of the kernels: raw pointers, sizes, strides. One plain struct per operation, the same
// for every processor path. Shapes and letters are those of keyhole/kernels/__init__.py; strides
// count numbers, not bytes, and the last dimension is contiguous, unless there is a stride for it.
#pragma once

#include <cstdint>

namespace keyhole {

enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2, int8 = 3, e4m3 = 4 };

// Paged keys or values of one layer, [P, Hkv, page_size, D].
struct Pages {
    const void* data;
    int64_t page_stride, head_stride, token_stride;
    int64_t dim_stride = 1;  // else keys are columns, [D, page_size], with a token stride of 1
};

// How scores become weights.
struct Scoring {
    float scale;
    float softcap;       // 0: none
    const float* sinks;  // [Hq], or null
};

// One reduction of the weights over the query heads, written to out [B, M * page_size / unit].
struct Request {
    bool sum;  // else the largest
    int64_t unit;
    float* out;
};

// Low-rank keys: R coefficients per token, a basis per sequence and head.
struct LowRank {
    int64_t R, k, chunk;
    const void* coefficients;  // [P, page_size, R]
    const void* basis;         // [B, R, Hkv, D]
    const int32_t* first;      // [B], full keys from here on
    const int32_t* taken;      // [B, Hkv, k], chunks with full keys
    const float* angles;       // [positions, 3 * pairs]: cosines twice, sines
    int64_t pairs, turned_from;
};

struct Attend {
    DType dtype;   // of keys and values; queries and results are float32 where these have 8 bits
    bool rounded;  // queries and results lose nothing in 16 bits, or are rounded to them
    int64_t B, Hq, Hkv, D, Dv, page_size;
    const void* query;  // [B, Hq, D]
    Pages keys, values;
    const int32_t* table;  // [B, M]
    int64_t table_stride, M;
    const int32_t* lengths;  // [B]
    const int32_t* indices;  // [B, index_heads, n], or null: all tokens
    const int32_t* counts;   // [B, index_heads]
    int64_t index_heads, n, unit;
    int64_t window;  // 0: none
    Scoring scoring;
    const Request* requests;
    int64_t num_requests;
    const LowRank* low_rank;  // or null; with tokens selected per KV head
    float* weights;  // `head_scores`: [B, Hkv, M * page_size], largest weight of a group; or null
    void* out;       // [B, Hq, Dv], or null if only weights are computed
};

struct Prefill {
    DType dtype, stored;  // of queries and results; of keys and values
    int64_t T, Hq, Hkv, D, Dv, page_size;
    const void* query;  // [T, Hq, D]
    Pages keys, values;
    const int64_t* pages;  // [M]
    int64_t M, start, window;
    // Tokens at any positions, over some tokens, both ascending; null: start .., over all.
    const int64_t* positions;  // [T]
    const int32_t* chosen;     // [n]
    int64_t n;
    Scoring scoring;
    void* out;  // [T, Hq, Dv]
    // Blocks of `block_size` positions that each query head reads, one list of at most `listed` for
    // each block of positions with some of the tokens, R of these; null: as above.
    const int32_t* blocks = nullptr;  // [R, Hq, listed]
    const int32_t* counts = nullptr;  // [R, Hq]
    int64_t listed = 0, block_size = 0;
};

struct Append {
    DType dtype, stored;  // of `rows` and of `pages`; the same where numbers are copied
    int64_t itemsize, T, Hkv, D, page_size;
    void* pages;
    int64_t page_stride, head_stride, token_stride;
    const void* rows;  // [T, Hkv, D]
    int64_t row_stride, row_head_stride;
    const int64_t* slots;  // [T]
};

struct PageBounds {
    DType dtype, stored;  // of the bounds; of the keys
    int64_t n, Hkv, D;
    Pages keys;
    void *low, *high;  // [P, Hkv, D]
    const int64_t *pages, *filled;
};

struct BoundScores {
    DType dtype;
    int64_t B, Hq, Hkv, D, M;
    const void* query;
    const void *low, *high;
    const int32_t* table;
    int64_t table_stride;
    float* out;  // [B, Hkv, M]
};

struct SummaryScores {
    DType dtype;
    int64_t B, Hq, Hkv, D, M, n;
    const void* query;
    const void* summaries;  // [P, n, Hkv, D]
    const int32_t* table;
    int64_t table_stride;
    const int32_t* valid;  // [B]
    float* out;            // [B, Hq, M * n]
};

// The score of each token's page or cluster.
struct SpreadScores {
    int64_t itemsize, B, H, n, M, page_size, first;
    const float* scores;  // [B, H, n]
    const void* numbers;  // [P, H, page_size], integers of `itemsize`
    const int32_t* table;
    int64_t table_stride;
    const int32_t* ends;  // [B]
    float* out;           // [B, H, M * page_size]
};

struct TopIndices {
    int64_t B, H, n, k, first, last;
    const float* scores;   // [B, H, n]
    const int32_t* valid;  // [B]
    int32_t* indices;      // [B, H, k]
    int32_t* counts;       // [B, H]
};

// Of `top_k` with the same scores.
struct Trim {
    int64_t B, H, n, k, least, first, last;
    float share;
    const int32_t* indices;  // [B, H, k]
    const float* scores;     // [B, H, n]
    const int32_t* valid;    // [B]
    int32_t* left;           // [B, H, k]
    int32_t* counts;         // [B, H]
};

// `reference.load_missing`: H heads of the buffer, `lists` of n selected entries of `unit` tokens.
struct Exchange {
    int64_t itemsize, B, H, D, Dv, page_size, slots, unit;  // Dv 0: values are part of the keys
    int32_t* entries;    // [R, H, slots]
    Pages keys, values;  // the buffer, written
    Pages from_keys, from_values;
    const int32_t* table;  // [B, M]
    int64_t table_stride, M;
    const int32_t* lengths;  // [B]
    const int64_t* rows;     // [B]
    const int32_t* indices;  // [B, lists, n]
    int64_t lists, n;
    int32_t* used;    // [B, H, n]
    int32_t* counts;  // [B, H]
    int32_t* moved;   // [B, H]
};

struct Linear {
    DType dtype;
    int64_t T, I, O;
    const void* x;  // [T, I]
    int64_t x_stride;
    const void* weight;  // [O, I]
    const void* bias;    // [O], or null
    void* out;           // [T, O]
    const Linear* next = nullptr;  // another layer of the same inputs
};

// Weights in few bits: code * scale + minimum, for groups of inputs. In 4 bits, byte j of a block of
// 64 weights holds weight j below and weight j + 32 above. In 6 bits, so do the lower four bits, in 32
// bytes; in the 16 bytes behind them, byte j holds the upper two bits of weights j, j + 16, j + 32 and
// j + 48, from below.
struct Packed {
    int64_t bits, group;  // 4, 6 or 8; 32, 64 or 128, in 6 bits 16 or more
    const uint8_t* codes;           // [O, I * bits / 8]
    const void *scales, *minimums;  // [O, I / group], in the dtype of the call
};

// The scales of llama.cpp's blocks instead, in float16: of each group; or of 256 weights, whose groups
// have scales in 8 bits, with minimums or without. Weights without minimums are codes less
// 2^(bits - 1), times their scale.
struct BlockScales {
    const void* of_blocks;  // [O, blocks], or [O, blocks, 2] with minimums; or null
    const void* of_groups;  // int8 [O, I / group], or uint8 [O, 2, I / group] with minimums; or null
    bool minimums;
};

struct PackedLinear {
    DType dtype;
    int64_t T, I, O;
    const void* x;  // [T, I]
    int64_t x_stride;
    Packed weight;
    BlockScales blocks;
    const void* bias;  // [O], or null
    void* out;         // [T, O]
    const PackedLinear* next = nullptr;  // another layer of the same inputs, with as many bits, groups
                                         // of the same size, and blocks or none like this one
};

struct Unpack {
    DType dtype;
    int64_t I, O;
    Packed weight;
    void* out;  // [O, I]
};

struct RmsNorm {
    DType dtype;
    int64_t T, D;
    const void* x;  // [T, D]
    int64_t x_stride;
    const void* weight;  // [D]
    float epsilon;
    void* out;  // [T, D]
};

// Strides: of sequences, heads and tokens.
struct Rope {
    DType dtype;
    int64_t B, H, T, D;
    const void* x;  // [B, H, T, D]
    int64_t x_strides[3];
    const void *cos, *sin;  // [B, T, D], or [1, T, D], with equal halves
    bool shared;            // the angles, by all sequences
    void* out;  // [B, H, T, D]
    int64_t out_strides[3];
};

// out = silu(gate) * up, and out = x + y; rounded after each of these operations.
struct Elementwise {
    DType dtype;
    int64_t n;
    const void *x, *y;  // [n]
    void* out;          // [n]; may be one of the others
};

// The operations that use vectors, compiled once per processor path.
struct Path {
    void (*attend)(const Attend&);
    void (*prefill)(const Prefill&);
    void (*quantise)(const Append&);
    void (*page_bounds)(const PageBounds&);
    void (*bound_scores)(const BoundScores&);
    void (*summary_scores)(const SummaryScores&);
    void (*linear)(const Linear&);
    void (*packed_linear)(const PackedLinear&);
    void (*unpack)(const Unpack&);
    void (*rms_norm)(const RmsNorm&);
    void (*apply_rope)(const Rope&);
    void (*swiglu)(const Elementwise&);
    void (*add)(const Elementwise&);
};

extern const Path portable_path, avx2_path, avx512_path;  // the last two on x86 only

// What Intel's matrix unit computes faster than vectors, and hands to `avx512_path` where it does not.
struct MatrixPath {
    void (*attend)(const Attend&);
    void (*prefill)(const Prefill&);
    void (*linear)(const Linear&);
    void (*packed_linear)(const PackedLinear&);
};
extern const MatrixPath amx_path;  // on x86 only

// The other operations move or compare single numbers.
void append(const Append&);
void exchange(const Exchange&);
void spread_scores(const SpreadScores&);
void top_k(const TopIndices&);
void trim(const Trim&);

// Whether this processor's L2 cache supports more outstanding misses than its L1.
extern const bool ask_second_level;

// Memory that the calling thread keeps between calls, 64-byte aligned; it only grows.
// `which` tells buffers apart that are in use at the same time.
void* workspace(int which, int64_t bytes);
int64_t workspace_bytes();

}  // namespace keyhole
