"""The layers of a model on a CPU, computed by our C++ extension: same contracts, same results.

Few tokens read every weight once; the operations of a decoder layer around attention are one call
each, because what lies between its products takes a processor less time than a call from Python.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.kernels import cpu
from keyhole.kernels.cpu import DTYPES, PAGE_DTYPES, address, extension
from keyhole.kernels.reference.layers import Norm, Weight
from keyhole.kernels.reference.packed import BlockWeight, PackedWeight

#: Tokens of a linear layer at a time: the extension keeps memory for as many in float32.
_AT_ONCE = 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the reference."""
    if x.numel() > _AT_ONCE * x.shape[-1]:
        parts = x.reshape(-1, x.shape[-1]).split(_AT_ONCE)
        return torch.cat([linear(part, weight, bias) for part in parts]).view(*x.shape[:-1], -1)
    return _product(x, weight, bias)


def packed_linear(
    x: Tensor, packed: PackedWeight | BlockWeight, bias: Tensor | None = None
) -> Tensor:
    """As the reference."""
    if not _in_floats(packed, x.dtype):
        return _product(x, packed, bias)
    if isinstance(packed, PackedWeight):
        scales, minimums = packed.scales.float(), packed.minimums.float()
        packed = PackedWeight(packed.codes, scales, minimums, packed.bits)
    return _product(x.float(), packed, None if bias is None else bias.float()).to(x.dtype)


def _in_floats(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether inputs must be float32 for a product with this weight."""
    if isinstance(weight, Tensor) or dtype == torch.float32:
        return False
    if isinstance(weight, PackedWeight):
        return weight.bits == 6
    return cpu.current() not in ("avx2", "avx512", "amx")


# Contiguous copies are kept in variables: one that is referenced by its address only is freed.


def _product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    rows, weight = x.reshape(-1, x.shape[-1]), _contiguous(weight)
    out = x.new_empty(*x.shape[:-1], _num_outputs(weight))
    extension.linear(_rows(rows), _weight(weight, bias), out.data_ptr())
    return out


def _rows(x: Tensor) -> tuple[int, ...]:
    """Rows [T, I] as the extension takes them: dtype, sizes, address and stride."""
    return DTYPES[x.dtype], *x.shape, x.data_ptr(), x.stride(0)


def _num_outputs(weight: Weight) -> int:
    return (weight if isinstance(weight, Tensor) else weight[0]).shape[0]


def _contiguous(weight: Weight) -> Weight:
    if isinstance(weight, Tensor):
        return weight.contiguous()
    codes, first, second, bits = weight
    return type(weight)(codes.contiguous(), first.contiguous(), second.contiguous(), bits)


def _weight(weight: Weight, bias: Tensor | None) -> tuple[Any, ...]:
    """A contiguous weight as the extension takes it.

    Outputs, bits (0: plain), group size; addresses of numbers or codes, scales and minimums; those
    of blocks and of their groups, and whether these have minimums; that of the bias.
    """
    none = (0, 0, False)
    if isinstance(weight, Tensor):
        return weight.shape[0], 0, 0, weight.data_ptr(), 0, 0, none, address(bias)
    codes, first, second, bits = weight
    at = codes.data_ptr()
    if isinstance(weight, PackedWeight):
        addresses = at, first.data_ptr(), second.data_ptr(), none
        return codes.shape[0], bits, weight.group_size, *addresses, address(bias)
    group_size = codes.shape[1] * 8 // bits // (second.shape[2] or first.shape[1])
    groups_at = second.data_ptr() if second.shape[1] else 0
    blocks = first.data_ptr(), groups_at, first.shape[2] == 4
    return codes.shape[0], bits, group_size, at, 0, 0, blocks, address(bias)


def norm_linears(
    x: Tensor, norm: Norm, weights: tuple[Weight, ...], biases: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """As the reference."""
    if not _together(x, *weights):
        normed = rms_norm(x, *norm)
        return tuple(product(normed, w, b) for w, b in zip(weights, biases, strict=True))
    weights = tuple(map(_contiguous, weights))
    outs = tuple(x.new_empty(x.shape[0], _num_outputs(weight)) for weight in weights)
    extension.norm_linears(
        _rows(x),
        (norm[0].data_ptr(), norm[1]),
        [*map(_weight, weights, biases)],
        [out.data_ptr() for out in outs],
    )
    return outs


def norm_swiglu(x: Tensor, norm: Norm, gate: Weight, up: Weight) -> Tensor:
    """As the reference."""
    if not _together(x, gate, up):
        normed = rms_norm(x, *norm)
        return F.silu(product(normed, gate)) * product(normed, up)
    gate, up = _contiguous(gate), _contiguous(up)
    out = x.new_empty(x.shape[0], _num_outputs(gate))
    extension.norm_swiglu(
        _rows(x),
        (norm[0].data_ptr(), norm[1]),
        _weight(gate, None),
        _weight(up, None),
        out.data_ptr(),
    )
    return out


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """As the reference."""
    if not _together(x, weight):
        return residual + product(x, weight, bias)
    weight, residual = _contiguous(weight), residual.contiguous()
    out = torch.empty_like(residual)
    extension.linear_add(_rows(x), _weight(weight, bias), residual.data_ptr(), out.data_ptr())
    return out


def _together(x: Tensor, *weights: Weight) -> bool:
    """Whether one call of the extension computes products of these rows and what is around them."""
    return x.shape[0] <= _AT_ONCE and not any(_in_floats(weight, x.dtype) for weight in weights)


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """A linear layer with a plain or a packed weight."""
    if isinstance(weight, Tensor):
        return linear(x, weight, bias)
    return packed_linear(x, weight, bias)


def unpack(packed: PackedWeight) -> Tensor:
    """As the reference."""
    codes, scales, minimums = (one.contiguous() for one in packed[:3])
    out = scales.new_empty(len(codes), packed.num_inputs)
    extension.unpack(
        DTYPES[scales.dtype],
        packed.num_inputs,
        len(codes),
        packed.bits,
        packed.group_size,
        codes.data_ptr(),
        scales.data_ptr(),
        minimums.data_ptr(),
        out.data_ptr(),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As the reference."""
    rows, out = x.reshape(-1, x.shape[-1]), x.new_empty(x.shape)
    extension.rms_norm(
        DTYPES[x.dtype],
        *rows.shape,
        rows.data_ptr(),
        rows.stride(0),
        weight.data_ptr(),
        epsilon,
        out.data_ptr(),
    )
    return out


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference."""
    cos, sin = cos.contiguous(), sin.contiguous()

    def turned(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        extension.apply_rope(
            DTYPES[x.dtype],
            x.shape,
            x.data_ptr(),
            x.stride()[:3],
            cos.data_ptr(),
            sin.data_ptr(),
            len(cos) == 1,
            out.data_ptr(),
            out.stride()[:3],
        )
        return out

    return turned(query), turned(key)


def apply_rope_and_append(
    key_pages: Tensor,
    value_pages: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    if value.shape[2] != query.shape[2]:
        turned = apply_rope(
            query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None]
        )
        query, key = (x[0].transpose(0, 1) for x in turned)
        cpu.append(key_pages, value_pages, key, value, slots)
        return query, key
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.to(torch.int64).contiguous()
    (num_tokens, num_heads, dim), (_, num_kv_heads, page_size, _) = query.shape, key_pages.shape
    outs = query.new_empty(query.shape), key.new_empty(key.shape)
    extension.apply_rope_and_append(
        (DTYPES[query.dtype], PAGE_DTYPES[key_pages.dtype], key_pages.itemsize),
        (num_tokens, num_heads, num_kv_heads, dim, page_size),
        [(x.data_ptr(), x.stride(0), x.stride(1)) for x in (query, key, value)],
        [(pages.data_ptr(), pages.stride()[:3]) for pages in (key_pages, value_pages)],
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        *(out.data_ptr() for out in outs),
    )
    return outs
