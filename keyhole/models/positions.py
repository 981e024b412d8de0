"""Shifts rotated vectors to other positions, to place stored documents in a prompt.

RoPE (Su et al., RoFormer, arXiv 2104.09864, section 3.2.2, eq. 14-16) rotates each pair of numbers
of a key or query at position p by the angle p * frequency. A further rotation by m * frequency
yields the same key at p + m, whatever p was. Rotations are linear, so a rotated mean is the mean of
the rotated vectors. A constant factor on all keys (YaRN's, LongRoPE's) is unaffected.

Most of transformers' families hold rotated vectors in halves, the pair (i, i + half): MLA's too,
though its weights may be interleaved. Others pair neighbours, or leave some layers unrotated; a
small model shows it, and they are refused. A model with learned positions (gpt_bigcode) adds them
to the tokens before the first layer and cannot be shifted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.argument import cache_argument
from keyhole.cache.recurrent_state import LayerState
from keyhole.errors import ConfigError
from keyhole.models import families
from keyhole.models.model import Model
from keyhole.models.shrink import random_model, shrink

# Tokens by which the keys of a small model are shifted to see whether that works.
_SHIFT = 5


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
    def for_documents(cls, model: Model) -> Self:
        """The rotations by which stored documents are placed; ConfigError if they cannot be."""
        if model.is_hybrid:
            raise ConfigError(
                f"stored documents cannot be used with model {model.name!r}: some of its layers "
                "have a recurrent state, which depends on every earlier token"
            )
        return cls.of(model)

    @classmethod
    def of(cls, model: Model, needed_by: str = "stored documents") -> Self:
        """The rotations of this model; ConfigError if its positions are not rotations.

        needed_by: what shifts the keys, as the error names it.
        """
        config = model.network.config
        if not rotates(model):
            raise ConfigError(
                f"{needed_by} cannot be used with model {model.name!r}: the family "
                f"{config.model_type!r} has no rotary embedding for all layers; use a model with "
                "RoPE"
            )
        layouts = families.layouts(config)
        if any(layout.index_topk is not None for layout in layouts):
            raise ConfigError(
                f"{needed_by} cannot be used with model {model.name!r}: the keys of its own "
                "indexer cannot be moved to other positions"
            )
        if any(layout.chunked for layout in layouts):
            raise ConfigError(
                f"{needed_by} cannot be used with model {model.name!r}: it has layers of "
                "chunked attention, and tokens that move would change chunks"
            )
        problem = _problem(config)
        if problem is not None:
            raise ConfigError(
                f"{needed_by} cannot be used with model {model.name!r}: in the family "
                f"{config.model_type!r}, {problem}"
            )
        return cls._of(model.network, model.device)

    @classmethod
    def _of(cls, network: Any, device: torch.device) -> Self:
        layouts = families.layouts(network.config)
        rotary = network.base_model.rotary_emb
        kinds = getattr(network.config, "layer_types", None)
        if kinds is None:
            kinds = ["full_attention"] * len(layouts)
        else:
            kinds = [kinds[layer] for layer in families.attention_layers(network.config)]
        by_kind = {kind: _frequencies(rotary, kind).to(device) for kind in set(kinds)}
        return cls(
            frequencies=tuple(by_kind[kind] for kind in kinds),
            rotated_last=tuple(layout.shared_values for layout in layouts),
        )

    def on(self, device: torch.device) -> Self:
        """The same for vectors on another device, whose frequencies are copied once."""
        sent = {id(own): own.to(device) for own in {id(x): x for x in self.frequencies}.values()}
        return replace(self, frequencies=tuple(sent[id(own)] for own in self.frequencies))

    def shift(self, layer: int, x: Tensor, by: int | Tensor) -> Tensor:
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


class _KeyRecorder(LayerState):
    """Passed to transformers as its cache: keeps what that would hold as keys."""

    is_compileable = False

    def __init__(self) -> None:
        super().__init__({})
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns its input. MLA's key is its latent, the rotated part is its value."""
        self.keys[layer_idx] = key, value
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        """Zero."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Of the new tokens alone."""
        return int(query_length), 0

    def get_query_offset(self, *_: Any) -> int:
        """Zero."""
        return 0


#: What `_problem` has measured, by the fields of a config.
_MEASURED: dict[str, str | None] = {}


def _problem(config: Any) -> str | None:
    """Why keys of this config's family cannot be shifted by `RopeShift.shift`; None if they can."""
    fields = config.to_json_string(use_diff=False)
    if fields not in _MEASURED:
        _MEASURED[fields] = _measured_problem(config)
    return _MEASURED[fields]


def _measured_problem(config: Any) -> str | None:
    """Shifts the keys of a small random model by 5 and compares them with those at p + 5.

    Families differ in which part of a head they rotate, in how its numbers are paired, and in which
    layers they rotate at all.
    """
    small = shrink(config)
    small._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        network = random_model(small)
    tokens = torch.arange(1, 9)[None]
    found = []
    for start in (0, _SHIFT):
        recorder = _KeyRecorder()
        with torch.no_grad():
            network(
                input_ids=tokens,
                position_ids=torch.arange(start, start + tokens.shape[1])[None],
                use_cache=False,
                **{cache_argument(network): recorder},
            )
        found.append(recorder.keys)
    try:
        shift = RopeShift._of(network, torch.device("cpu"))
    except AttributeError:
        return "the rotary embedding has no table of frequencies"
    layers = families.attention_layers(small)
    for layer, layout in enumerate(families.layouts(small)):
        if layers[layer] not in found[0]:  # it reads the keys of an earlier one
            continue
        before, after = (
            torch.cat(keys[layers[layer]], -1) if layout.shared_values else keys[layers[layer]][0]
            for keys in found
        )
        if torch.allclose(shift.shift(layer, before, _SHIFT), after, atol=1e-3, rtol=1e-3):
            continue
        if torch.allclose(before, after, atol=1e-3, rtol=1e-3):
            return "some layers do not rotate their keys"
        return "keys are rotated in pairs that Keyhole does not support"
    return None
