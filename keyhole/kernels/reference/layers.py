"""The layers of a model for few tokens: products, with what transformers computes around them, and
RoPE.

A Llama layer (Touvron et al., LLaMA, arXiv 2302.13971, section 2.2) has four products: queries,
keys and values after an RMS norm (Zhang and Sennrich, arXiv 1910.07467, eq. 4), the output
projection and its residual, the gate and the up projection after a norm (SwiGLU: Shazeer, arXiv
2002.05202, eq. 6), the down projection and its residual. Roundings are those of torch's operations
one by one, except that a kernel need not round the result of a norm.

RoPE (Su et al., RoFormer, arXiv 2104.09864, section 3.2.2, eq. 14-16) rotates each pair of numbers
of a vector at position p by the angle p * frequency. Pairs are held in halves: (i, i + half).
Rotated vectors are shifted from one position to another by a further rotation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from keyhole.kernels.reference.packed import BlockWeight, PackedWeight, packed_linear
from keyhole.kernels.reference.pages import append

#: The weight of an RMS norm over the last dimension, [I], and its epsilon.
Norm = tuple[Tensor, float]
#: The weight [O, I] of a linear layer.
Weight = Tensor | PackedWeight | BlockWeight

#: Numbers rotated at a time on a CPU, 2 MiB in float32: intermediates stay in the cache, and no
#: large block of memory is allocated, which costs more than the arithmetic.
_PIECE = 1 << 19

#: Below this many shifts, computing the angles is as fast as looking them up.
_FEW = 64

#: The tables of `_kept_angles`, kept for the lifetime of the frequencies tensor.
_kept: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + bias; x [..., I], weight [O, I], bias [O]. Fast for a few tokens."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """An RMS norm over the last dimension, rounded once; x [..., I], weight [I]."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def norm_linears(
    x: Tensor, norm: Norm, weights: tuple[Weight, ...], biases: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """Linear layers of one input after its RMS norm, in the order of their weights.

    x [T, I], weights [O, I] each, biases [O] each or None. Returns one [T, O] for each weight.
    """
    normed = rms_norm(x, *norm)
    return tuple(_product(normed, w, b) for w, b in zip(weights, biases, strict=True))


def norm_swiglu(x: Tensor, norm: Norm, gate: Weight, up: Weight) -> Tensor:
    """SiLU(n W_gate^T) * (n W_up^T) with n the RMS norm of x; x [T, I], weights [O, I]: [T, O]."""
    normed = rms_norm(x, *norm)
    return F.silu(_product(normed, gate)) * _product(normed, up)


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Residual + X W^T + bias; x [T, I], weight [O, I], bias [O], residual [T, O]: [T, O]."""
    return residual + _product(x, weight, bias)


def _product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return packed_linear(x, weight, bias)


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
    """Returns queries and keys rotated as by `apply_rope`; writes keys and values as `append`.

    query [T, Hq, D]; key, value [T, Hkv, D]; cos, sin [T, D] in the same dtype; slots int64 [T].
    Changes the pages [P, Hkv, page_size, D] in place.
    """
    turned = apply_rope(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None]
    )
    query, key = (x[0].transpose(0, 1) for x in turned)
    append(key_pages, value_pages, key, value, slots)
    return query, key


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [B, Hq, T, D] and keys [B, Hkv, T, D], each pair (i, i + D / 2) rotated by its angle.

    RoPE (Su et al., RoFormer, arXiv 2104.09864, section 3.2.2, eq. 34) as transformers computes it,
    with its roundings: cos and sin [B or 1, T, D] in the same dtype, with equal halves.
    """
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turned(query), turned(key)


def shift_rope(x: Tensor, by: Tensor, frequencies: Tensor, last: bool) -> Tensor:
    """Shifts vectors rotated at any positions p to p + by.

    x: [..., D], any float dtype. by: int64, broadcasts against x.shape[:-1]; may be negative.
    frequencies: float64 [pairs], radians per position. The first 2 * pairs of the D numbers are
    rotated, or with `last` the last ones; the rest is copied. Float32 arithmetic, rounded once to
    x's dtype. Returns a new tensor.
    """
    by = by[(None,) * (x.dim() - 1 - by.dim())]
    turned = torch.empty_like(x)
    if x.dim() == 1 or x.device.type != "cpu":
        _turn(turned, x, _angles(by, frequencies), last)
        return turned
    kept = _kept_angles(by, frequencies) if by.numel() > _FEW else None
    for out, piece, place in _pieces(turned, x, by):
        if kept is None:
            angles = _angles(place, frequencies)
        else:
            lowest, table = kept
            angles = table.index_select(0, (place - lowest).flatten()).view(*place.shape, -1)
        _turn(out, piece, angles, last)
    return turned


def angles_below(count: int, frequencies: Tensor) -> Tensor:
    """`_angles` of the positions below `count`, on a CPU, float32 [count, 3 * pairs]."""
    places = torch.arange(count)
    kept = _kept_angles(places, frequencies)
    if kept is None:
        return _angles(places, frequencies)
    lowest, table = kept
    return table[-lowest : count - lowest]


def _kept_angles(by: Tensor, frequencies: Tensor) -> tuple[int, Tensor] | None:
    """The lowest shift of a table, and the table [shifts, 3 * pairs]; None: too few to tabulate.

    A CPU keeps the angles of a range of shifts, as computing them costs more than the rotation. The
    range grows on demand, at most to a small multiple of the shifts of one call, which had to be
    computed anyway.
    """
    lowest, table = _kept.get(frequencies, (0, frequencies[:0]))
    first, after = int(by.min()), int(by.max()) + 1
    start, stop = min(lowest, first), max(lowest + len(table), after)
    size = stop - start
    if size == len(table):
        return lowest, table
    if size > 2 * max(by.numel(), len(table)):
        return None
    # Some more, as sequences grow by a token at a time.
    start -= (size // 8 + _FEW) * (start < lowest)
    stop += (size // 8 + _FEW) * (stop > lowest + len(table))
    parts = torch.arange(start, stop).split(8192)  # in blocks, as angles are float64
    table = torch.cat([_angles(part, frequencies) for part in parts])
    # Replaced together, as other threads may still read the old ones.
    _kept[frequencies] = start, table
    return start, table


def _pieces(turned: Tensor, x: Tensor, by: Tensor) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Rows of the output, the input and the shifts; by broadcasts against x.shape[:-1]."""
    rows = max(1, _PIECE // max(1, x[:1].numel()))
    pieces = turned.split(rows)
    places = by.split(rows) if len(by) == len(x) else [by] * len(pieces)
    return zip(pieces, x.split(rows), places, strict=True)


def _angles(by: Tensor, frequencies: Tensor) -> Tensor:
    """Per position the cosines of all pairs, twice, and the sines, float32."""
    # float64 up to the wrap: in float32 the angle at position 100,000 is wrong by 0.004.
    angle = (by[..., None] * frequencies).remainder(2 * math.pi).float()
    cos = angle.cos()
    return torch.cat([cos, cos, angle.sin()], -1)


def _turn(out: Tensor, x: Tensor, angles: Tensor, last: bool) -> None:
    """Writes x [..., D], rotated by `angles`, whose positions broadcast against x.shape[:-1]."""
    pairs = angles.shape[-1] // 3
    start = x.shape[-1] - 2 * pairs if last else 0
    turned = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    if 2 * pairs < x.shape[-1]:
        turned.copy_(x)
    x, part = (one[..., start : start + 2 * pairs] for one in (x.float(), turned))
    sin = angles[..., 2 * pairs :]
    torch.mul(x, angles[..., : 2 * pairs], out=part)
    part[..., :pairs].addcmul_(x[..., pairs:], sin, value=-1)
    part[..., pairs:].addcmul_(x[..., :pairs], sin)
    if turned is not out:
        out.copy_(turned)
