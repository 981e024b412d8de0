"""Shifts rotated vectors to other positions, to place stored documents in a prompt.

RoPE (Su et al., RoFormer, arXiv 2104.09864, section 3.2.2, eq. 14-16) rotates each pair of numbers
of a key or query at position p by the angle p * frequency. A further rotation by m * frequency
yields the same key at p + m, whatever p was. Rotations are linear, so a rotated mean is the mean of
the rotated vectors. A constant factor on all keys (YaRN's, LongRoPE's) is unaffected.

transformers' families all hold rotated vectors in halves, the pair (i, i + half): MLA's too, though
its weights may be interleaved. A model with learned positions (gpt_bigcode) adds them to the tokens
before the first layer and cannot be shifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.errors import ConfigError
from keyhole.models import families
from keyhole.models.loading import Model


def rotates(model: Model) -> bool:
    """Whether the model's positions are rotations."""
    return getattr(model.network.base_model, "rotary_emb", None) is not None


@dataclass(frozen=True, eq=False)
class RopeShift:
    """The rotation of every layer of a model.

    frequencies: per layer float64 [pairs], radians per position, slowed or stretched by the model's
    RoPE; layers of a kind share one tensor. Twice `pairs` is less than D where a part of the head
    only is rotated.
    rotated_last: per layer whether that part comes last in D (MLA's [latent | rope]) or first.
    """

    frequencies: tuple[Tensor, ...]
    rotated_last: tuple[bool, ...]

    @classmethod
    def of(cls, model: Model) -> Self:
        """The rotations of this model; ConfigError if its positions are not rotations."""
        config = model.network.config
        if not rotates(model):
            raise ConfigError(
                f"model {model.name!r} is of the family {config.model_type!r}, which learned a "
                "vector per position: stored documents cannot be shifted there; use a model with "
                "RoPE"
            )
        rotary = model.network.base_model.rotary_emb
        layouts = families.layouts(config)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layouts)
        by_kind = {kind: _frequencies(rotary, kind).to(model.device) for kind in set(kinds)}
        return cls(
            frequencies=tuple(by_kind[kind] for kind in kinds),
            rotated_last=tuple(layout.shared_values for layout in layouts),
        )

    def turn(self, layer: int, x: Tensor, by: int | Tensor) -> Tensor:
        """Shifts keys or queries of a layer, rotated at any positions p, to p + by.

        x: [..., D], any float dtype, as attention sees them (MLA: [latent | rope]; the latent is
        copied). by: tokens, possibly negative; a number, or int64 that broadcasts against
        x.shape[:-1]. Returns x's dtype from float32 arithmetic; x itself if `by` is the number 0.
        """
        if isinstance(by, int):
            if by == 0:
                return x
            by = torch.full((), by, device=x.device)
        frequencies = self.frequencies[layer].to(x.device)
        return kernels.shift_rope(x, by.to(x.device), frequencies, self.rotated_last[layer])


def _frequencies(rotary: Any, kind: str) -> Tensor:
    """The frequencies of transformers' module for layers of this kind, float64 [pairs].

    Read from the module, not computed from the config: these are the values in use. The original
    ones, because `inv_freq` may have been changed by a sequence beyond the length to which
    `families` limits length-dependent RoPE.
    """
    shared = getattr(rotary, "original_inv_freq", None)
    found: Tensor = getattr(rotary, f"{kind}_original_inv_freq") if shared is None else shared
    return found.double()
