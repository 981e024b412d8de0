"""Rotary embeddings of a GPU model, in one launch for queries and keys.

transformers rotates them by ten operations in every layer. Every family's attention calls one
function of its module for this. Here a subclass runs the same code with our function under that
name: neither transformers nor other models of the process are changed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from keyhole import kernels
from keyhole.kernels import reference

_NAME = "apply_rotary_pos_emb"


def speed_up(network: nn.Module, device: torch.device) -> None:
    """Makes attention of a GPU model rotate queries and keys by our kernel.

    Attention that rotates in another way (part of each head, interleaved pairs) is unchanged.
    """
    if device.type != "cuda":
        return
    for module in network.modules():
        fast = faster(type(module))  # type: ignore[arg-type]
        if fast is not None:
            module.__class__ = fast


@functools.cache
def faster(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The same class with our kernel; None if it does not rotate heads, or in another way."""
    forward = cls.forward
    if not isinstance(forward, types.FunctionType) or forward.__closure__ is not None:
        return None
    theirs = forward.__globals__.get(_NAME)
    if _NAME not in forward.__code__.co_names or theirs is None or not is_plain(theirs):
        return None

    def ours(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        trained = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        if rest or more or trained or cos.dim() != 3 or cos.shape[-1] != query.shape[-1]:
            return theirs(query, key, cos, sin, *rest, **more)
        return kernels.apply_rope(query, key, cos, sin)

    names = {**forward.__globals__, _NAME: ours}
    own = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Fast{cls.__name__}", (cls,), {"forward": own})


def is_plain(theirs: Callable[..., Any]) -> bool:
    """Whether a function rotates heads as `kernels.apply_rope` does; checked by running it."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 3, 4, generator=generator).repeat(1, 1, 1, 2)
    wanted = reference.apply_rope(query, key, cos, sin)
    try:
        found = theirs(query, key, cos, sin)
        return all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))
    except (RuntimeError, TypeError, ValueError):  # other arguments
        return False
