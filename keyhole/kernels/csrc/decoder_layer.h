// What a decoder layer computes around attention, for few tokens: one call instead of one for each
// operation. Weights are read by the products of a path; what lies between them stays in a cache.
#pragma once

#include "arguments.h"

namespace keyhole {

// A linear layer's weight, plain or in few bits, and its bias.
struct Weight {
    int64_t O;
    const void* plain;  // [O, I], where `packed` has 0 bits
    Packed packed;
    BlockScales blocks;
    const void* bias;  // [O], or null
};

// Tokens in rows, and the dtype of everything but packed weights.
struct Rows {
    DType dtype;
    int64_t T, I;
    const void* x;  // [T, I]
    int64_t stride;
};

inline int64_t itemsize(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

constexpr int kWeights = 4;  // of one input, at most

inline bool alike(const Weight& a, const Weight& b) {
    return a.packed.bits == b.packed.bits && a.packed.group == b.packed.group &&
           !a.blocks.of_blocks == !b.blocks.of_blocks;
}

// The products of `n` weights of one format, in one go.
inline void multiply_alike(const Path& path, const Rows& a, const Weight* weights, int n,
                           void* const* outs) {
    if (!weights->packed.bits) {
        Linear layers[kWeights];
        for (int i = n; i--;)
            layers[i] = {a.dtype, a.T, a.I, weights[i].O, a.x, a.stride, weights[i].plain,
                         weights[i].bias, outs[i], i + 1 < n ? layers + i + 1 : nullptr};
        return path.linear(layers[0]);
    }
    PackedLinear layers[kWeights];
    for (int i = n; i--;)
        layers[i] = {a.dtype, a.T, a.I, weights[i].O, a.x, a.stride, weights[i].packed,
                     weights[i].blocks, weights[i].bias, outs[i],
                     i + 1 < n ? layers + i + 1 : nullptr};
    path.packed_linear(layers[0]);
}

// outs[i] [T, O] = x W_i^T + bias
inline void multiply(const Path& path, const Rows& a, const Weight* weights, int n,
                     void* const* outs) {
    for (int first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && end - first < kWeights && alike(weights[first], weights[end]);)
            end++;
        multiply_alike(path, a, weights + first, end - first, outs + first);
    }
}

// The rows after an RMS norm, in memory that is valid until the next one.
inline Rows normed(const Path& path, const Rows& a, const void* weight, float epsilon) {
    void* const out = workspace(8, a.T * a.I * itemsize(a.dtype));
    path.rms_norm({a.dtype, a.T, a.I, a.x, a.stride, weight, epsilon, out});
    return {a.dtype, a.T, a.I, out, a.I};
}

// out [T, O] = silu(x W_gate^T) * (x W_up^T)
inline void gated(const Path& path, const Rows& a, const Weight (&gate_and_up)[2], void* out) {
    const int64_t n = a.T * gate_and_up[0].O;
    void* const outs[] = {out, workspace(9, n * itemsize(a.dtype))};
    multiply(path, a, gate_and_up, 2, outs);
    path.swiglu({a.dtype, n, out, outs[1], out});
}

// out [T, O] = residual + x W^T + bias
inline void multiply_add(const Path& path, const Rows& a, const Weight& w, const void* residual,
                         void* out) {
    multiply(path, a, &w, 1, &out);
    path.add({a.dtype, a.T * w.O, residual, out, out});
}

}  // namespace keyhole
