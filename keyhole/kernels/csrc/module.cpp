// The Python side of the kernels: addresses and sizes in, nothing out. keyhole/kernels/cpu.py checks
// tensors and calls these; this file does not depend on torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#if defined(KEYHOLE_X86)
#include <cpuid.h>
#endif
#if defined(KEYHOLE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "arguments.h"
#include "decoder_layer.h"

namespace nb = nanobind;
using namespace keyhole;

namespace {

using Address = uintptr_t;
using Strides = std::tuple<int64_t, int64_t, int64_t>;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

Pages pages(Address data, const Strides& strides) {
    return {at<void>(data), std::get<0>(strides), std::get<1>(strides), std::get<2>(strides)};
}

// Of keys: a fourth one, of the last dimension, where they are columns.
using KeyStrides = std::vector<int64_t>;
Pages pages(Address data, const KeyStrides& strides) {
    return {at<void>(data), strides.at(0), strides.at(1), strides.at(2),
            strides.size() > 3 ? strides[3] : 1};
}

#if defined(KEYHOLE_X86)
// clang 14 does not take "f16c" in __builtin_cpu_supports.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#if defined(KEYHOLE_AMX)
// Whether the processor has the matrix unit and the system lets this process use it.
bool has_amx() {
    constexpr unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, int8
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & wanted) != wanted) return false;
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}
#endif

// The paths that this processor can run, best first.
std::vector<std::string> paths() {
    std::vector<std::string> found;
#if defined(KEYHOLE_X86)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
#if defined(KEYHOLE_AMX)
        if (has_amx()) found.push_back("amx");
#endif
        found.push_back("avx512");
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        found.push_back("avx2");
#endif
    found.push_back("portable");
    return found;
}

Path path = portable_path;

void use(const std::string& name) {
    for (const std::string& known : paths())
        if (known == name) {
#if defined(KEYHOLE_X86)
            path = name == "amx" || name == "avx512" ? avx512_path
                   : name == "avx2"                  ? avx2_path
                                                     : portable_path;
#endif
#if defined(KEYHOLE_AMX)
            if (name == "amx") {
                path.attend = amx_path.attend;
                path.prefill = amx_path.prefill;
                path.linear = amx_path.linear;
                path.packed_linear = amx_path.packed_linear;
            }
#endif
            return;
        }
    throw std::invalid_argument("this processor has no path " + name);
}

void attend(int dtype, bool rounded, std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
            Address query, Address keys, const KeyStrides& key_strides, Address values,
            Strides value_strides, Address table, int64_t table_stride, int64_t M, Address lengths, Address indices,
            Address counts, std::tuple<int64_t, int64_t, int64_t> selection, int64_t window,
            float scale, float softcap, Address sinks,
            const std::vector<std::tuple<bool, int64_t, Address>>& requests,
            const std::tuple<int64_t, int64_t, int64_t>& low_rank_sizes,
            const std::tuple<Address, Address, Address, Address>& low_rank_data,
            const std::tuple<Address, int64_t, int64_t>& angles, Address weights, Address out) {
    std::vector<Request> wanted;
    for (const auto& [sum, unit, scores] : requests)
        wanted.push_back({sum, unit, at<float>(scores)});
    const auto [B, Hq, Hkv, D, Dv, page_size] = sizes;
    const auto [index_heads, n, unit] = selection;
    const auto [R, k, chunk] = low_rank_sizes;
    const auto [coefficients, basis, first, taken] = low_rank_data;
    const auto [turns, pairs, turned_from] = angles;
    const LowRank low_rank{R, k, chunk, at<void>(coefficients), at<void>(basis), at<int32_t>(first),
                           at<int32_t>(taken), at<float>(turns), pairs, turned_from};
    path.attend({static_cast<DType>(dtype),
                  rounded,
                  B,
                  Hq,
                  Hkv,
                  D,
                  Dv,
                  page_size,
                  at<void>(query),
                  pages(keys, key_strides),
                  pages(values, value_strides),
                  at<int32_t>(table),
                  table_stride,
                  M,
                  at<int32_t>(lengths),
                  at<int32_t>(indices),
                  at<int32_t>(counts),
                  index_heads,
                  n,
                  unit,
                  window,
                  {scale, softcap, at<float>(sinks)},
                  wanted.data(),
                  static_cast<int64_t>(wanted.size()),
                  R ? &low_rank : nullptr,
                  at<float>(weights),
                  at<void>(out)});
}

// dtypes: of queries and results, and of keys and values.
void prefill(std::tuple<int, int> dtypes, std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
             Address query, Address keys, Strides key_strides, Address values,
             Strides value_strides, std::tuple<Address, int64_t> table, int64_t start,
             int64_t window, std::tuple<Address, Address, int64_t> chosen, float scale,
             float softcap, Address sinks, Address out) {
    const auto [T, Hq, Hkv, D, Dv, page_size] = sizes;
    const auto [dtype, stored] = dtypes;
    const auto [positions, tokens, n] = chosen;
    const auto [page_list, M] = table;
    path.prefill({static_cast<DType>(dtype), static_cast<DType>(stored), T, Hq, Hkv, D, Dv, page_size, at<void>(query),
                   pages(keys, key_strides), pages(values, value_strides), at<int64_t>(page_list),
                   M, start, window, at<int64_t>(positions), at<int32_t>(tokens), n,
                   {scale, softcap, at<float>(sinks)}, at<void>(out)});
}

// dtypes: as in `prefill`. blocks: indices and counts, how many are listed, tokens of a block.
void block_sparse_prefill(std::tuple<int, int> dtypes,
                          std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
                          Address query, Address keys, Strides key_strides, Address values,
                          Strides value_strides, std::tuple<Address, int64_t> table, int64_t start,
                          std::tuple<Address, Address, int64_t, int64_t> blocks, float scale,
                          float softcap, Address sinks, Address out) {
    const auto [T, Hq, Hkv, D, Dv, page_size] = sizes;
    const auto [dtype, stored] = dtypes;
    const auto [indices, counts, listed, block_size] = blocks;
    const auto [page_list, M] = table;
    path.prefill({static_cast<DType>(dtype), static_cast<DType>(stored), T, Hq, Hkv, D, Dv, page_size, at<void>(query),
                   pages(keys, key_strides), pages(values, value_strides), at<int64_t>(page_list),
                   M, start, 0, nullptr, nullptr, 0, {scale, softcap, at<float>(sinks)},
                   at<void>(out), at<int32_t>(indices), at<int32_t>(counts), listed, block_size});
}

// dtypes: of the rows and of the pages. Floats are quantised for pages of 8 bits.
void append_rows(std::tuple<int, int> dtypes, int64_t itemsize, int64_t T, int64_t Hkv, int64_t D,
                 int64_t page_size, Address to, Strides strides, Address rows, int64_t row_stride,
                 int64_t row_head_stride, Address slots) {
    const auto [dtype, stored] = dtypes;
    const auto write = dtype == stored ? append : path.quantise;
    write({static_cast<DType>(dtype), static_cast<DType>(stored), itemsize, T, Hkv, D, page_size, at<void>(to), std::get<0>(strides),
            std::get<1>(strides), std::get<2>(strides), at<void>(rows), row_stride, row_head_stride,
            at<int64_t>(slots)});
}

// dtypes: of the bounds and of the keys.
void page_bounds(std::tuple<int, int> dtypes, int64_t n, int64_t Hkv, int64_t D, Address keys,
                 const KeyStrides& strides, Address low, Address high, Address which, Address filled) {
    const auto [dtype, stored] = dtypes;
    path.page_bounds({static_cast<DType>(dtype), static_cast<DType>(stored), n, Hkv, D, pages(keys, strides), at<void>(low),
                       at<void>(high), at<int64_t>(which), at<int64_t>(filled)});
}

void bound_scores(int dtype, std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
                  Address query, Address low, Address high, Address table, int64_t table_stride,
                  Address out) {
    const auto [B, Hq, Hkv, D, M] = sizes;
    path.bound_scores({static_cast<DType>(dtype), B, Hq, Hkv, D, M, at<void>(query), at<void>(low),
                        at<void>(high), at<int32_t>(table), table_stride, at<float>(out)});
}

void summary_scores(int dtype,
                    std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
                    Address query, Address summaries, Address table, int64_t table_stride,
                    Address valid, Address out) {
    const auto [B, Hq, Hkv, D, M, n] = sizes;
    path.summary_scores({static_cast<DType>(dtype), B, Hq, Hkv, D, M, n, at<void>(query),
                          at<void>(summaries), at<int32_t>(table), table_stride,
                          at<int32_t>(valid), at<float>(out)});
}

void spread(int64_t itemsize, std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
            int64_t first, Address scores, Address numbers, Address table, int64_t table_stride,
            Address ends, Address out) {
    const auto [B, H, n, M, page_size] = sizes;
    spread_scores({itemsize, B, H, n, M, page_size, first, at<float>(scores), at<void>(numbers),
                   at<int32_t>(table), table_stride, at<int32_t>(ends), at<float>(out)});
}

Packed packed(int64_t bits, int64_t group, Address codes, Address scales, Address minimums) {
    return {bits, group, at<uint8_t>(codes), at<void>(scales), at<void>(minimums)};
}

void unpack(int dtype, int64_t I, int64_t O, int64_t bits, int64_t group, Address codes,
            Address scales, Address minimums, Address out) {
    path.unpack({static_cast<DType>(dtype), I, O, packed(bits, group, codes, scales, minimums),
                  at<void>(out)});
}

void rms_norm(int dtype, int64_t T, int64_t D, Address x, int64_t x_stride, Address weight,
              float epsilon, Address out) {
    path.rms_norm({static_cast<DType>(dtype), T, D, at<void>(x), x_stride, at<void>(weight),
                   epsilon, at<void>(out)});
}

void apply_rope(int dtype, std::tuple<int64_t, int64_t, int64_t, int64_t> sizes, Address x,
                Strides x_strides, Address cos, Address sin, bool shared, Address out,
                Strides out_strides) {
    const auto [B, H, T, D] = sizes;
    const auto [x_sequence, x_head, x_token] = x_strides;
    const auto [out_sequence, out_head, out_token] = out_strides;
    path.apply_rope({static_cast<DType>(dtype), B, H, T, D, at<void>(x),
                     {x_sequence, x_head, x_token}, at<void>(cos), at<void>(sin), shared,
                     at<void>(out), {out_sequence, out_head, out_token}});
}

// Outputs, bits (0: plain), group; numbers or codes, scales, minimums; scales of blocks; bias.
using WeightData = std::tuple<int64_t, int64_t, int64_t, Address, Address, Address,
                              std::tuple<Address, Address, bool>, Address>;
Weight weight(const WeightData& data) {
    const auto [O, bits, group, numbers, scales, minimums, blocks, bias] = data;
    const auto [of_blocks, of_groups, minimums_of_groups] = blocks;
    return {O, at<void>(numbers), packed(bits, group, numbers, scales, minimums),
            {at<void>(of_blocks), at<void>(of_groups), minimums_of_groups}, at<void>(bias)};
}

// dtype, T, I, x and its stride.
using RowData = std::tuple<int, int64_t, int64_t, Address, int64_t>;
Rows rows(const RowData& data) {
    const auto [dtype, T, I, x, stride] = data;
    return {static_cast<DType>(dtype), T, I, at<void>(x), stride};
}

void linear(const RowData& x, const WeightData& data, Address out) {
    const Weight one = weight(data);
    void* const to = at<void>(out);
    multiply(path, rows(x), &one, 1, &to);
}

void norm_linears(const RowData& x, std::tuple<Address, float> norm,
                  const std::vector<WeightData>& weights, const std::vector<Address>& outs) {
    const Rows in = normed(path, rows(x), at<void>(std::get<0>(norm)), std::get<1>(norm));
    std::vector<Weight> all;
    std::vector<void*> to;
    for (const WeightData& data : weights) all.push_back(weight(data));
    for (const Address out : outs) to.push_back(at<void>(out));
    multiply(path, in, all.data(), static_cast<int>(all.size()), to.data());
}

void norm_swiglu(const RowData& x, std::tuple<Address, float> norm, const WeightData& gate,
                 const WeightData& up, Address out) {
    const Rows in = normed(path, rows(x), at<void>(std::get<0>(norm)), std::get<1>(norm));
    gated(path, in, {weight(gate), weight(up)}, at<void>(out));
}

void linear_add(const RowData& x, const WeightData& data, Address residual, Address out) {
    multiply_add(path, rows(x), weight(data), at<void>(residual), at<void>(out));
}

// Queries and keys [T, H, D] are turned into contiguous ones; keys and values are written into pages.
void apply_rope_and_append(std::tuple<int, int, int64_t> dtypes,
                           std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
                           const std::vector<std::tuple<Address, int64_t, int64_t>>& inputs,
                           const std::vector<std::tuple<Address, Strides>>& paged, Address cos,
                           Address sin, Address slots, Address query_out, Address key_out) {
    const auto [dtype, stored, itemsize] = dtypes;
    const auto [T, Hq, Hkv, D, page_size] = sizes;
    const DType as = static_cast<DType>(dtype);
    const int64_t heads[] = {Hq, Hkv};
    const Address outs[] = {query_out, key_out};
    for (int i = 0; i < 2; i++) {
        const auto [x, token, head] = inputs.at(i);
        path.apply_rope({as, 1, heads[i], T, D, at<void>(x), {0, head, token}, at<void>(cos),
                         at<void>(sin), true, at<void>(outs[i]), {0, D, heads[i] * D}});
    }
    const auto write = dtype == stored ? append : path.quantise;
    for (int i = 0; i < 2; i++) {
        const auto [pages, strides] = paged.at(i);
        const auto [value, value_token, value_head] = inputs.at(2);
        const Address x = i ? value : key_out;
        const int64_t token = i ? value_token : Hkv * D, head = i ? value_head : D;
        write({as, static_cast<DType>(stored), itemsize, T, Hkv, D, page_size, at<void>(pages),
               std::get<0>(strides), std::get<1>(strides), std::get<2>(strides), at<void>(x), token,
               head, at<int64_t>(slots)});
    }
}

void best_indices(std::tuple<int64_t, int64_t, int64_t> sizes, int64_t k, int64_t first,
                  int64_t last, Address scores, Address valid, Address indices, Address counts) {
    const auto [B, H, n] = sizes;
    top_k({B, H, n, k, first, last, at<float>(scores), at<int32_t>(valid),
                 at<int32_t>(indices), at<int32_t>(counts)});
}

void trim_choice(std::tuple<int64_t, int64_t, int64_t, int64_t> sizes, float share, int64_t least,
                 int64_t first, int64_t last, Address indices, Address scores, Address valid,
                 Address left, Address counts) {
    const auto [B, H, n, k] = sizes;
    trim({B, H, n, k, least, first, last, share, at<int32_t>(indices), at<float>(scores),
          at<int32_t>(valid), at<int32_t>(left), at<int32_t>(counts)});
}

void exchange_rows(int64_t itemsize,
                   std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> sizes,
                   Address entries, Address keys, Strides key_strides, Address values,
                   Strides value_strides, Address from_keys, Strides from_key_strides,
                   Address from_values, Strides from_value_strides, Address table,
                   int64_t table_stride, int64_t M, Address lengths, Address rows, Address indices,
                   std::tuple<int64_t, int64_t> selection, Address used, Address counts,
                   Address moved) {
    const auto [B, H, D, Dv, page_size, slots, unit] = sizes;
    const auto [lists, n] = selection;
    exchange({itemsize, B, H, D, Dv, page_size, slots, unit, at<int32_t>(entries),
              pages(keys, key_strides), pages(values, value_strides),
              pages(from_keys, from_key_strides), pages(from_values, from_value_strides),
              at<int32_t>(table), table_stride, M, at<int32_t>(lengths), at<int64_t>(rows),
              at<int32_t>(indices), lists, n, at<int32_t>(used), at<int32_t>(counts),
              at<int32_t>(moved)});
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.def("paths", &paths);
    m.def("use", &use);
    m.def("workspace_bytes", &workspace_bytes);
    // Releases the GIL while a kernel runs.
    const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    m.def("attend", &attend, unlocked);
    m.def("prefill", &prefill, unlocked);
    m.def("block_sparse_prefill", &block_sparse_prefill, unlocked);
    m.def("append", &append_rows, unlocked);
    m.def("load_missing", &exchange_rows, unlocked);
    m.def("page_bounds", &page_bounds, unlocked);
    m.def("bound_scores", &bound_scores, unlocked);
    m.def("summary_scores", &summary_scores, unlocked);
    m.def("spread_scores", &spread, unlocked);
    m.def("unpack", &unpack, unlocked);
    m.def("rms_norm", &rms_norm, unlocked);
    m.def("apply_rope", &apply_rope, unlocked);
    m.def("linear", &linear, unlocked);
    m.def("norm_linears", &norm_linears, unlocked);
    m.def("norm_swiglu", &norm_swiglu, unlocked);
    m.def("linear_add", &linear_add, unlocked);
    m.def("apply_rope_and_append", &apply_rope_and_append, unlocked);
    m.def("top_k", &best_indices, unlocked);
    m.def("trim", &trim_choice, unlocked);
}
