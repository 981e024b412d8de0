"""Linear layers of a model on a CPU, dispatched to the fastest product for each shape.

A decode step reads every weight once for a handful of tokens. torch's product for such shapes reads
16-bit weights at half the memory bandwidth or less; `kernels.linear` at nearly all of it. With more
tokens (prompts, large batches) torch is faster. In float32 torch uses MKL, which leaves half of the
vector width of non-Intel processors unused; there oneDNN, which torch also ships and uses for 16
bits, is about twice as fast (benchmarks/LOG.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from keyhole import kernels

# Tokens up to which our kernel was at least as fast as torch, and from which oneDNN was faster than
# MKL (benchmarks/LOG.md).
_FEW, _MANY = 8, 32

_CPUINFO = Path("/proc/cpuinfo")

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class FastLinear(nn.Linear):
    """An `nn.Linear` that computes products without gradients by the fastest kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        if torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad):
            return linear(input, self.weight, self.bias)
        tokens = input.numel() // self.in_features
        if tokens <= _FEW:
            return kernels.linear(input, self.weight, self.bias)
        if tokens >= _MANY and input.dtype == self.weight.dtype == torch.float32:
            return in_float32()(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


@functools.cache
def in_float32() -> Product:
    """The product of many tokens in float32 on this processor: by oneDNN, or torch's default."""
    if not (mkl_is_slow() and torch.backends.mkldnn.is_available()):
        return linear
    try:
        # The function that torch's compiler calls; it has no public name.
        named = torch.ops.mkldnn._linear_pointwise
        named(torch.zeros(_MANY, 1), torch.zeros(1, 1), None, "none", [], "")
    except (AttributeError, RuntimeError):  # another torch release
        return linear
    return functools.partial(_by_onednn, named)


def _by_onednn(
    named: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    return named(x, weight, bias, "none", [], "")


def mkl_is_slow() -> bool:
    """Whether torch uses MKL on a processor that is not Intel's."""
    if not (torch.backends.mkl.is_available() and _CPUINFO.is_file()):
        return False
    makers = [x for x in _CPUINFO.read_text().splitlines() if x.startswith("vendor_id")]
    return bool(makers) and "GenuineIntel" not in makers[0]


def speed_up(network: nn.Module, device: torch.device) -> None:
    """Turns every plain linear layer of a CPU model into a `FastLinear`; weights stay in place.

    Layers of other classes (quantised ones, adapters) are unchanged.
    """
    if device.type != "cpu":
        return
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear
