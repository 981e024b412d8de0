"""Layers of transformers that keep a recurrent state: convolutions, state spaces, linear attention.

Such a module reads its state from transformers' cache and takes all sequences of a batch in
parallel, equally many tokens of each. In a packed row it would run from one sequence into the next.
An instance therefore becomes one of a subclass that calls the module's own code once for all
decoding sequences, one token of each, and once for each prompt, with the state of those sequences
(`keyhole.cache.recurrent_state`). transformers and other models of the process are not changed.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.cache.recurrent_state import LayerState, RecurrentState
from keyhole.config import EngineConfig
from keyhole.errors import ConfigError, ModelError
from keyhole.models import families
from keyhole.models.attention import PassThrough

#: Methods of transformers' caches by which a module reads its state.
_READS = {"get_conv_state", "get_recurrent_state", "get_linear_cache"}


class Packed(nn.Module):
    """Marks the subclasses that `adapt` makes. number: of the module among those of its network."""

    number: int


def adapt(network: nn.Module, name: str) -> None:
    """Replaces the classes of all modules with a recurrent state, in place.

    ModelError for a layer whose config says that it has a state, and where no module reads one.
    """
    found = [m for m in network.modules() if _reads_state(type(m))]  # type: ignore[arg-type]
    for number, module in enumerate(found):
        module.__class__ = _packed(type(module))  # type: ignore[arg-type]
        module.number = number  # type: ignore[assignment]
    numbers = {int(module.layer_idx) for module in found}  # type: ignore[arg-type]
    for layer in families.recurrent_layers(network.config):
        if layer not in numbers:
            raise ModelError(
                f"layer {layer} of model {name!r} keeps a recurrent state in a way of its own, "
                "which Keyhole does not know"
            )


def settings(name: str, config: EngineConfig) -> EngineConfig:
    """The settings for a model with recurrent layers, without the prefix cache; logs that.

    ConfigError for what such a model cannot have.
    """
    if config.offload is not None:
        raise ConfigError(
            f"offload={config.offload!r} is not available for model {name!r}: the plan of its "
            "memory does not contain the recurrent state of its layers; leave it out"
        )
    if config.draft is not None:
        raise ConfigError(
            f"draft={config.draft!r} is not available for model {name!r}: a recurrent state cannot "
            "take back a proposed token; leave it out"
        )
    if config.prefix_store is not None:
        raise ConfigError(
            f"prefix_store={config.prefix_store!r} is not available for model {name!r}: it would "
            "need the recurrent states inside a prompt, which are not kept; leave it out"
        )
    if config.prefix_cache:  # it would need the states inside a prompt, which are not kept
        logging.getLogger("keyhole").warning(
            "model %r has layers with a recurrent state: the prefix cache is off, and requests "
            "with the same prompt compute it each",
            name,
        )
    return replace(config, prefix_cache=False)


def new_state(network: Any, num_slots: int) -> RecurrentState | None:
    """The state of `num_slots` sequences; None for a network without recurrent layers.

    Each layer runs on one token, to see the shapes and dtypes of its state.
    """
    found = [module for module in network.modules() if isinstance(module, Packed)]
    if not found:
        return None
    width = int(network.config.hidden_size)
    token = torch.zeros(1, 1, width, dtype=network.dtype, device=network.device)
    examples = []
    for module in found:
        seen = LayerState({})
        named = dict.fromkeys(_required(type(module)))
        with torch.no_grad():
            module(token, **{**named, _keyword(type(module)): seen})
        examples.append(seen.states)
    return RecurrentState(examples, num_slots)


@functools.cache
def _reads_state(cls: type[nn.Module]) -> bool:
    """Whether a class reads a recurrent state from the cache that it is given."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and bool(_READS & set(code.co_names))


@functools.cache
def _packed(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass that runs each sequence of a packed row from its own state."""
    keyword, original = _keyword(cls), cls.forward

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if any(isinstance(given, PassThrough) for given in args):
            raise ModelError(f"{cls.__name__} keeps a recurrent state in a way of its own")
        past = named.get(keyword)
        if not isinstance(past, PassThrough):
            return original(self, *args, **named)
        step = past.batch.recurrent
        if step is None:
            raise ConfigError(
                f"{cls.__name__} keeps a recurrent state per sequence, which only the engine has; "
                "use the model through keyhole.LLM"
            )
        named = {key: value for key, value in named.items() if key != "keyhole"}
        hidden = args[0] if args else named.pop("hidden_states")
        is_pair = False

        def call(part: Tensor, there: LayerState) -> Tensor:
            nonlocal is_pair
            found = original(self, part, **{**named, "attention_mask": None, keyword: there})
            is_pair = isinstance(found, tuple)
            out: Tensor = found[0] if isinstance(found, tuple) else found
            return out

        out = step.run(self.number, hidden, call)
        return (out, None) if is_pair else out

    return type(f"Packed{cls.__name__}", (Packed, cls), {"forward": forward})


def _parameters(cls: type[nn.Module]) -> dict[str, inspect.Parameter]:
    bases: tuple[Any, ...] = cls.__mro__
    forward = next(base for base in bases if _reads_state(base)).forward
    return dict(inspect.signature(inspect.unwrap(forward)).parameters)


def _keyword(cls: type[nn.Module]) -> str:
    """The parameter of a module's forward that gets the cache."""
    return "cache_params" if "cache_params" in _parameters(cls) else "past_key_values"


def _required(cls: type[nn.Module]) -> list[str]:
    """The parameters of a module's forward without a default, after the hidden states."""
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [p for p in _parameters(cls).values() if p.kind is plain]
    return [p.name for p in found[2:] if p.default is inspect.Parameter.empty]
