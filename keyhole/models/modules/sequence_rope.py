"""RoPE whose frequencies depend on the length of the text, computed separately per sequence.

Two kinds change beyond a threshold. LongRoPE (Ding et al., ICML 2024) has one set of frequencies
up to it and one beyond; dynamic NTK scaling has another set for every length. transformers computes
one set per call, from the longest position in it: a long request would change the results of a
short one in its batch, and keys stored earlier would be rotated differently from later ones.

Here the length of a sequence is fixed when its request arrives: its prompt and all tokens that it
may generate. All its keys are rotated by the frequencies of that length, by transformers' own
formulas. An instance of a rotary module becomes one of a subclass that calls the module's own code
once for each set of frequencies in the step; transformers and other models of the process are not
changed.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from keyhole.models.families import rope_threshold

#: Rows of a step whose sequences have this length, int64 [n]; see `families.RopeLengths.effective`.
RopeRows = tuple[int, Tensor]

#: Of the forward pass that this thread runs; None: not one of Keyhole's.
_ROWS: ContextVar[Sequence[RopeRows] | None] = ContextVar("rope_rows", default=None)

#: Sets of frequencies that a module keeps; there may be one per length.
_MOST_SETS = 256


class PerSequence(nn.Module):
    """Marks the subclasses that `adapt` makes. sets: modules with other frequencies, by length."""

    sets: dict[tuple[str | None, int], Any]


def adapt(network: Any) -> bool:
    """Makes all rotary modules of a network take the length of each sequence, in place.

    Returns whether there are any: a module that does not use transformers' own formulas is
    unchanged.
    """
    found = [module for module in network.modules() if _is_changing(module)]
    for module in found:
        module.__class__ = _subclass(type(module))  # type: ignore[arg-type]
        module.sets = {}
    return bool(found)


@contextmanager
def using(rows: Sequence[RopeRows]) -> Iterator[None]:
    """For a forward pass of a packed row: the rows of the sequences beyond the threshold."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


def rope_rows(lengths: Sequence[tuple[int, int]], device: torch.device) -> list[RopeRows]:
    """The packed rows of each length beyond the threshold.

    lengths: of each sequence in the row its `RopeLengths.effective` length and its tokens.
    """
    of_rows = np.repeat([n for n, _ in lengths], [count for _, count in lengths])
    return [
        (n, torch.from_numpy(np.flatnonzero(of_rows == n)).to(device))
        for n in np.unique(of_rows).tolist()
        if n
    ]


def _is_changing(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    # Listing all names of every module would be a tenth of loading a small model.
    return not {"longrope", "dynamic"}.isdisjoint(kinds) and any(
        name.endswith("original_inv_freq") for name in dir(module)
    )


@functools.cache
def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    original, plain = cls.forward, inspect.unwrap(cls.forward)

    @torch.no_grad()
    def forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        named = {} if layer_type is None else {"layer_type": layer_type}
        rows = _ROWS.get()
        if rows is None:
            return original(self, x, position_ids, **named)
        if len(rows) == 1 and len(rows[0][1]) == position_ids.shape[-1]:  # all of one length
            return plain(_with_length(self, layer_type, rows[0][0]), x, position_ids, **named)
        out = plain(_with_length(self, layer_type, 0), x, position_ids, **named)
        for length, places in rows:
            there = _with_length(self, layer_type, length)
            part = plain(there, x, position_ids[..., places], **named)
            if isinstance(out, Tensor):
                out = out.index_copy(-2, places, part)
            else:
                out = tuple(a.index_copy(-2, places, b) for a, b in zip(out, part, strict=True))
        return out

    return type(f"PerSequence{cls.__name__}", (PerSequence, cls), {"forward": forward})


def _with_length(module: Any, layer_type: str | None, length: int) -> Any:
    """The module with the frequencies of a length; weights and code are shared."""
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if kind not in ("longrope", "dynamic"):
        return module
    found = module.sets.get((layer_type, length))
    if found is None:
        found = _made(module, layer_type, length)
        if len(module.sets) >= _MOST_SETS:
            module.sets = {}
        module.sets[layer_type, length] = found
    return found


def _made(module: Any, layer_type: str | None, length: int) -> Any:
    prefix = "" if layer_type is None else f"{layer_type}_"
    original: Tensor = getattr(module, f"{prefix}original_inv_freq")
    made = copy.copy(module)
    made._buffers = dict(module._buffers)
    rope = module.config.rope_parameters
    rope = rope if layer_type is None else rope[layer_type]
    frequencies = original
    if length > rope_threshold(rope, int(module.config.max_position_embeddings)):
        # As a tensor, as transformers does: its formula is then computed in the same precision.
        wanted: Any = length
        if rope["rope_type"] == "dynamic":
            wanted = torch.tensor(length, device=original.device)
        init = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        named = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, _ = init(module.config, original.device, seq_len=wanted, **named)
    setattr(made, f"{prefix}inv_freq", frequencies)
    return made
