"""Linear layers of a model on a CPU, read by our kernel where a step has few tokens.

A decode step reads every weight once for a handful of tokens. torch's product for such shapes reads
16-bit weights at half the speed of memory or less; `kernels.linear` at nearly all of it. With more
tokens (prompts) torch is the faster one, and stays.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from keyhole import kernels

# Tokens up to which our kernel was at least as fast as torch (benchmarks/LOG.md).
_FEW = 8


class FewTokensLinear(nn.Linear):
    """An `nn.Linear`, computed by our kernel for at most a few tokens."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`; what needs gradients is left to torch, our kernel has none."""
        if not input.requires_grad and input.numel() <= _FEW * self.in_features:
            return kernels.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


def speed_up(network: nn.Module, device: torch.device) -> None:
    """Lets every plain linear layer of a model on a CPU use the kernel; weights stay in place.

    Layers of other classes (quantised ones, adapters) are left as they are.
    """
    if device.type != "cpu":
        return
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewTokensLinear
