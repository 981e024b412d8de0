"""Cases of the kernel benchmark for linear layers, which read all weights for a few tokens."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.cases import KernelCase, System
from benchmarks.kernels.layer import Layer
from keyhole import kernels

# One sequence, the engine's default batch size, and what a matrix unit takes at once and at most.
_TOKENS = (1, 8, 16, 64)
# Together they exceed the processor's cache.
_VARIANTS = 4


def linear(layer: Layer) -> Iterator[KernelCase]:
    """The widest matrix product of a layer, the first of its MLP."""
    size = layer.intermediate_size, layer.hidden_size
    weights = [layer.randn(*size) for _ in range(_VARIANTS)]
    for tokens in _TOKENS:
        yield _case(weights, layer.randn(tokens, layer.hidden_size))


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
