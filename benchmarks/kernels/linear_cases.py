"""Cases of the kernel benchmark for linear layers, which read all weights for a few tokens.

Torch's products of packed weights take the same weights, in torch's own order: in 4 bits with the
scales of groups, in 8 bits with one scale for each output. Weights have a scale and no minimum of
their own, so that both compute the same numbers, which are compared before timing. A sum by torch
takes part in the turns: it reads memory and computes next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.layer import KernelCase, Layer, Outputs, System
from keyhole import kernels
from keyhole.bench import measure
from keyhole.kernels import BlockWeight, PackedWeight
from keyhole.models.weights import blocks

# One sequence, the engine's default batch size, what a matrix unit takes at once and at most, and a
# chunk of a prompt.
_TOKENS = (1, 8, 16, 64, 512)
# Weights in few bits are for decode steps.
_FEW_TOKENS = (1, 8)
#: Weights that share a scale, the default of `weights="int4"`.
_GROUP = 64
# The same weights in several places, which together exceed a processor's cache: a decode step finds
# none of its weights there. Small ones at most so often.
_BEYOND_CACHES, _MOST_COPIES = 1 << 29, 1024
# Bytes that a call of the sum reads.
_SUMMED = 1 << 26
#: Torch's product of packed weights, and the sum that the others' bandwidth is divided by.
TORCH_PACKED, SUM = "torch packed", "torch sum"
#: Weights and bytes of llama.cpp's blocks, where the upper bytes of their float16 scales are, and
#: how they are read.
_BLOCKS: dict[str, tuple[int, int, tuple[int, ...], Callable[[Tensor], BlockWeight]]] = {
    "Q4_K": (256, 144, (1, 3), blocks.from_q4_k),
    "Q6_K": (256, 210, (209,), blocks.from_q6_k),
    "Q8_0": (32, 34, (1,), blocks.from_q8_0),
}
#: An upper byte of a float16 between 2^-7 and 2^-6.
_SMALL_SCALE = 0x20

Weight = TypeVar("Weight", PackedWeight, BlockWeight)


def linear(layer: Layer) -> Iterator[KernelCase]:
    """The widest matrix product of a layer, the first of its MLP."""
    weights = _copies(layer.randn(layer.intermediate_size, layer.hidden_size))
    reading = _sum()
    for tokens in _TOKENS:
        yield _case(weights, layer.randn(tokens, layer.hidden_size), reading)


def packed_linear(layer: Layer) -> Iterator[KernelCase]:
    """Products with weights in few bits, next to `linear`; on a CPU, as nothing else packs them.

    All matrices of a layer and the head, which has 8 bits only; llama.cpp's blocks for the widest.
    """
    if torch.get_default_device().type != "cpu":
        return
    reading = _sum()
    widest = layer.intermediate_size, layer.hidden_size
    for size in dict.fromkeys((widest, *layer.matrices)):
        plain = _copies(layer.randn(*size))
        for tokens in _FEW_TOKENS:
            x = layer.randn(tokens, size[1])
            for bits in (8,) if size == layer.head else (4, 8):
                yield _packed_case(layer, bits, plain, x, reading)
            for name, (per_block, *_) in _BLOCKS.items():
                if size == widest and size[1] % per_block == 0:
                    weights = _several(_random_blocks(name, *size))
                    yield _case_of(name, weights, plain, x, {}, reading)
        del plain


def _copies(weight: Tensor) -> Sequence[Tensor]:
    count = min(_MOST_COPIES, -(-_BEYOND_CACHES // weight.nbytes))
    return list(weight.repeat(count, *[1] * (weight.dim() - 1)).split(len(weight)))


def _several(weight: Weight) -> list[Weight]:
    """As many copies of a packed weight as its codes, the largest part, have."""
    codes = _copies(weight.codes)
    others = [
        part.repeat(len(codes), *[1] * (part.dim() - 1)).split(len(part)) for part in weight[1:3]
    ]
    made = cast(Callable[..., Weight], type(weight))
    return [made(*parts, weight.bits) for parts in zip(codes, *others, strict=True)]


def _sum() -> System:
    """Reads other memory in each call."""
    parts = measure.large_tensor(torch.get_default_device()).split(_SUMMED // 4)
    return System(run=lambda i: (parts[i % len(parts)].sum(),), moved_bytes=parts[0].nbytes)


def _timed(system: System, ours: Callable[[int], Outputs]) -> System:
    """A system of which only the time is compared, as it computes something else."""
    return System(run=system.run, check=ours, moved_bytes=system.moved_bytes)


def _random_blocks(name: str, num_outputs: int, num_inputs: int) -> BlockWeight:
    per_block, num_bytes, scales, read = _BLOCKS[name]
    data = torch.randint(256, (num_outputs, num_inputs // per_block, num_bytes), dtype=torch.uint8)
    data[..., list(scales)] = _SMALL_SCALE
    return read(data.flatten(1))


def _packed_case(
    layer: Layer, bits: int, plain: Sequence[Tensor], x: Tensor, reading: System
) -> KernelCase:
    """Of codes that are drawn; code - 2^(bits - 1), times the scale, is a weight."""
    (num_outputs, num_inputs), half = plain[0].shape, 1 << bits - 1
    size = num_outputs, num_inputs
    codes = torch.randint(1 << bits, size, dtype=torch.uint8, generator=layer.generator)
    scales = layer.randn(num_outputs, num_inputs // _GROUP if bits == 4 else 1).abs()
    of_groups = scales.expand(-1, num_inputs // _GROUP).contiguous()
    weight = PackedWeight(kernels.join_codes(codes, bits), of_groups, of_groups * -half, bits)
    peer = _torch_int4(x, codes, scales) if bits == 4 else _torch_int8(x, codes, scales)
    return _case_of(f"int{bits}", _several(weight), plain, x, {TORCH_PACKED: peer}, reading)


def _torch_int4(x: Tensor, codes: Tensor, scales: Tensor) -> System:
    one = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    # Torch's codes have zero in the middle already; scale and zero of each group and output.
    scale_and_zero = torch.stack([scales.mT, torch.zeros_like(scales.mT)], -1)
    weights = _copies(one)
    pairs = scale_and_zero.repeat(len(weights), 1, 1).split(len(scale_and_zero))

    def run(i: int) -> Outputs:
        k = i % len(weights)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        return (product(x, weights[k], _GROUP, pairs[k]),)

    return System(run=run, moved_bytes=one.nbytes + scale_and_zero.nbytes)


def _torch_int8(x: Tensor, codes: Tensor, scales: Tensor) -> System:
    weights = _copies((codes.short() - 128).to(torch.int8))
    of_outputs = scales[:, 0].repeat(len(weights)).split(len(scales))

    def run(i: int) -> Outputs:
        k = i % len(weights)
        return (torch.ops.aten._weight_int8pack_mm(x, weights[k], of_outputs[k]),)

    return System(run=run, moved_bytes=weights[0].nbytes + scales.nbytes)


def _case_of(
    name: str,
    weights: Sequence[PackedWeight] | Sequence[BlockWeight],
    plain: Sequence[Tensor],
    x: Tensor,
    peers: dict[str, System],
    reading: System,
) -> KernelCase:
    (tokens, width), outputs = x.shape, len(plain[0])

    def packed(i: int) -> Outputs:
        return (kernels.packed_linear(x, weights[i]),)

    def another(product: Callable[[Tensor, Tensor], Tensor]) -> System:
        # Other weights have another result.
        system = System(
            run=lambda i: (product(x, plain[i % len(plain)]),), moved_bytes=plain[0].nbytes
        )
        return _timed(system, packed)

    return KernelCase(
        op="packed_linear",
        tokens=tokens,
        about=f"{tokens} x {width:,} by {width:,} x {outputs:,} in {name}",
        moved_bytes=sum(part.nbytes for part in weights[0][:3]),
        variants=len(weights),
        ours={"": System(run=packed), "linear": another(kernels.linear)},
        peers=peers | {"torch linear": another(F.linear), SUM: _timed(reading, packed)},
        reader=SUM,
    )


def _case(weights: Sequence[Tensor], x: Tensor, reading: System) -> KernelCase:
    (tokens, width), weight = x.shape, weights[0]

    def ours(i: int) -> Outputs:
        return (kernels.linear(x, weights[i]),)

    return KernelCase(
        op="linear",
        tokens=tokens,
        about=f"{tokens} x {width:,} by {width:,} x {len(weight):,}",
        moved_bytes=weight.nbytes,
        variants=len(weights),
        ours={"": System(run=ours)},
        peers={
            "torch linear": System(run=lambda i: (F.linear(x, weights[i]),)),
            SUM: _timed(reading, ours),
        },
        reader=SUM,
    )
