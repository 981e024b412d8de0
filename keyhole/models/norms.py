"""RMS norms of a model on a GPU, by torch's own kernel.

transformers computes a norm in eight operations, each a launch over all numbers; torch has one
kernel for it (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019). It rounds to 16 bits
once, at the end; transformers also rounds before multiplying by the weight.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# float32 rounding; a weight stored as an offset from one, as in Gemma, deviates far more.
_TOLERANCE = 1e-5


def speed_up(network: nn.Module, device: torch.device) -> None:
    """Computes every plain RMS norm of a GPU model by torch's kernel; weights stay in place.

    Norms that compute something else are unchanged.
    """
    if device.type != "cuda":
        return
    plain: dict[type[nn.Module], bool] = {}
    for module in network.modules():
        cls = type(module)
        if cls not in plain:
            plain[cls] = is_plain(module)
        if plain[cls]:
            module.__class__ = _fast(cls)  # type: ignore[arg-type]


def is_plain(module: nn.Module) -> bool:
    """Whether a module computes exactly x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Checked by running it with other weights.
    """
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter):
        return False
    if len([*module.parameters()]) != 1 or weight.dim() != 1 or _epsilon(module) is None:
        return False
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, len(weight), generator=generator)
    tried: Any = copy.deepcopy(module).to("cpu", torch.float32)
    tried.weight = nn.Parameter(drawn[0], requires_grad=False)
    wanted = F.rms_norm(drawn[1], drawn[0].shape, drawn[0], _epsilon(module))
    try:
        return torch.allclose(tried(drawn[1]), wanted, rtol=_TOLERANCE, atol=_TOLERANCE)
    except (RuntimeError, TypeError):  # other arguments
        return False


@functools.cache
def _fast(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """By torch's kernel."""
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, _epsilon(self))

    return type(f"Fast{cls.__name__}", (cls,), {"forward": forward})


def _epsilon(module: nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None
