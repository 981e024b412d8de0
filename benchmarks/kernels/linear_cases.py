"""Cases of the kernel benchmark for linear layers, which read all weights for a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.cases import KernelCase, System
from benchmarks.kernels.layer import Layer
from keyhole import kernels
from keyhole.kernels import BlockWeight, PackedWeight
from keyhole.models.weights import blocks

# One sequence, the engine's default batch size, what a matrix unit takes at once and at most, and a
# chunk of a prompt.
_TOKENS = (1, 8, 16, 64, 512)
# Weights in few bits are for decode steps.
_FEW_TOKENS = (1, 8)
# Together they exceed the processor's cache.
_VARIANTS = 4
#: Weights and bytes of llama.cpp's blocks, where the upper bytes of their float16 scales are, and
#: how they are read.
_BLOCKS: dict[str, tuple[int, int, tuple[int, ...], Callable[[Tensor], BlockWeight]]] = {
    "Q4_K": (256, 144, (1, 3), blocks.from_q4_k),
    "Q6_K": (256, 210, (209,), blocks.from_q6_k),
    "Q8_0": (32, 34, (1,), blocks.from_q8_0),
}
#: An upper byte of a float16 between 2^-7 and 2^-6.
_SMALL_SCALE = 0x20


def linear(layer: Layer) -> Iterator[KernelCase]:
    """The widest matrix product of a layer, the first of its MLP."""
    size = layer.intermediate_size, layer.hidden_size
    weights = [layer.randn(*size) for _ in range(_VARIANTS)]
    for tokens in _TOKENS:
        yield _case(weights, layer.randn(tokens, layer.hidden_size))


def packed_linear(layer: Layer) -> Iterator[KernelCase]:
    """The same with weights in few bits, next to `linear`; on a CPU, as nothing else packs them."""
    if torch.get_default_device().type != "cpu":
        return
    size = layer.intermediate_size, layer.hidden_size
    plain = [layer.randn(*size) for _ in range(_VARIANTS)]
    for tokens in _FEW_TOKENS:
        x = layer.randn(tokens, layer.hidden_size)
        for bits in (4, 8):
            weights = [kernels.pack(weight, bits, 64) for weight in plain]
            yield _packed_case(f"int{bits}", weights, plain, x)
        for name in (name for name, (n, *_) in _BLOCKS.items() if layer.hidden_size % n == 0):
            yield _packed_case(name, [_random_blocks(name, *size) for _ in plain], plain, x)


def _random_blocks(name: str, num_outputs: int, num_inputs: int) -> BlockWeight:
    per_block, num_bytes, scales, read = _BLOCKS[name]
    data = torch.randint(256, (num_outputs, num_inputs // per_block, num_bytes), dtype=torch.uint8)
    data[..., list(scales)] = _SMALL_SCALE
    return read(data.flatten(1))


def _packed_case(
    name: str,
    weights: list[PackedWeight] | list[BlockWeight],
    plain: list[Tensor],
    x: Tensor,
) -> KernelCase:
    (tokens, width), outputs = x.shape, len(plain[0])

    def packed(i: int) -> tuple[Tensor]:
        return (kernels.packed_linear(x, weights[i]),)

    def another(product: Callable[[Tensor, Tensor], Tensor]) -> System:
        # Other weights have another result, so only its time is compared.
        return System(
            run=lambda i: (product(x, plain[i]),), check=packed, moved_bytes=plain[0].nbytes
        )

    return KernelCase(
        op="packed_linear",
        tokens=tokens,
        about=f"{tokens} x {width:,} by {width:,} x {outputs:,} in {name}",
        moved_bytes=sum(part.nbytes for part in weights[0][:3]),
        variants=len(weights),
        ours={"": System(run=packed), "linear": another(kernels.linear)},
        peers={"torch linear": another(F.linear)},
    )


def _case(weights: list[Tensor], x: Tensor) -> KernelCase:
    (tokens, width), weight = x.shape, weights[0]
    return KernelCase(
        op="linear",
        tokens=tokens,
        about=f"{tokens} x {width:,} by {width:,} x {len(weight):,}",
        moved_bytes=weight.nbytes,
        variants=len(weights),
        ours={"": System(run=lambda i: (kernels.linear(x, weights[i]),))},
        peers={"torch linear": System(run=lambda i: (F.linear(x, weights[i]),))},
    )
