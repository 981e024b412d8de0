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
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.cache.argument import cache_name
from keyhole.cache.recurrent_state import LayerState, RecurrentState, States
from keyhole.config import EngineConfig
from keyhole.errors import ConfigError, ModelError
from keyhole.models import families
from keyhole.models.batch import PassThrough

#: Methods of transformers' caches by which a module reads its state.
_READS = {"get_conv_state", "get_recurrent_state", "get_linear_cache"}
_PAIR = 2


class Packed(nn.Module):
    """Marks the subclasses that `adapt` makes.

    number: of the module among those of its network. continues: whether a call of several tokens
    begins with the state that it is given. transformers' Mamba begins with zeros (Jamba, Zamba), so
    the later chunks of a prompt are computed there token by token.
    """

    number: int
    continues: bool = True


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
                f"layer {layer} of model {name!r} keeps its recurrent state in the module, for one "
                "batch at a time, instead of in transformers' cache, per sequence"
            )


def _check(name: str, config: EngineConfig) -> None:
    """ConfigError for settings that a model with recurrent layers cannot have."""
    if config.offload is not None:
        raise ConfigError(
            f"offload={config.offload!r} cannot be used with model {name!r}, which has recurrent "
            "layers; leave it out"
        )
    if config.prefix_store is not None:
        raise ConfigError(
            f"prefix_store={config.prefix_store!r} cannot be used with model {name!r}, because "
            "recurrent states of prefixes are kept in memory only; leave it out"
        )


def new_state(name: str, network: Any, config: EngineConfig) -> RecurrentState | None:
    """The state of an engine's sequences; None for a network without recurrent layers.

    With a prefix cache it has room for as many states of cached prefixes. ConfigError for settings
    that such a model cannot have.

    Each layer runs on one token, to see the shapes and dtypes of its state, and on two after
    different states, to see whether these matter.
    """
    found = [module for module in network.modules() if isinstance(module, Packed)]
    if not found:
        return None
    _check(name, config)
    width = int(network.config.hidden_size)
    tokens = torch.linspace(-1, 1, 2 * width, dtype=torch.float32).view(1, 2, width)
    tokens = tokens.to(network.device, network.dtype)
    examples = []
    for module in found:
        first = LayerState({})
        _run(module, tokens[:, :1], first)
        examples.append(first.states)
        module.continues = _continues(module, tokens, first.states)
    count = config.max_batch
    return RecurrentState(examples, count, count if config.prefix_cache else 0)


@torch.no_grad()
def _run(module: Packed, tokens: Tensor, there: LayerState) -> Any:
    """Transformers' own code of a module for tokens [1, t, width] after a state."""
    named = dict.fromkeys(_required(type(module)))
    return module(tokens, **{**named, _keyword(type(module)): there})


def _continues(module: Packed, tokens: Tensor, states: States) -> bool:
    """Whether the outputs for two tokens [1, 2, width] depend on the preceding recurrent state.

    states: one state of the module, for its shapes. A dependence that is lost in rounding yields
    False, which costs time but changes no result.
    """
    if not any(kind == "recurrent" for kind, _ in states):
        return True
    results = []
    for fill in (0.0, 64.0):
        filled = {
            key: torch.full_like(x, fill) if key[0] == "recurrent" else x.clone()
            for key, x in states.items()
        }
        there = LayerState(filled)
        out = _run(module, tokens, there)
        results.append([*(out if isinstance(out, tuple) else (out,)), *there.states.values()])
    return any(a is not None and not torch.equal(a, b) for a, b in zip(*results, strict=True))


@functools.cache
def _reads_state(cls: type[nn.Module]) -> bool:
    """Whether a class reads a recurrent state from the cache that it is given."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and bool(_READS & set(code.co_names))


@functools.cache
def _packed(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass that runs each sequence of a packed row from its own state."""
    keyword, original = _keyword(cls), cls.forward
    parameters = list(_parameters(cls))[1:]

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **named}
        past = given.get(keyword)
        if not isinstance(past, PassThrough):
            return original(self, *args, **named)
        step = past.batch.recurrent
        if step is None:
            raise ConfigError(
                f"{cls.__name__} keeps a recurrent state per sequence; use the model through "
                "keyhole.LLM"
            )
        hidden = given.pop(parameters[0])
        rest = {key: None if key.endswith("mask") else value for key, value in given.items()}
        rest.pop("keyhole", None)
        found: Any = None

        def call(part: Tensor, there: LayerState) -> tuple[Tensor, ...]:
            nonlocal found
            found = original(self, part, **{**rest, keyword: there})
            if not isinstance(found, tuple):
                return (found,)
            # Of two results, the second are attention weights, which are not used; of three, all
            # are.
            return found if len(found) > _PAIR else found[:1]

        out = step.run(self.number, hidden, call, self.continues)
        if isinstance(found, tuple):
            return (*out, *[None] * (len(found) - len(out)))
        return out[0]

    return type(f"Packed{cls.__name__}", (Packed, cls), {"forward": forward})


def _parameters(cls: type[nn.Module]) -> dict[str, inspect.Parameter]:
    bases: tuple[Any, ...] = cls.__mro__
    forward = next(base for base in bases if _reads_state(base)).forward
    return dict(inspect.signature(inspect.unwrap(forward)).parameters)


def _keyword(cls: type[nn.Module]) -> str:
    """The parameter of a module's forward that gets the cache."""
    return cache_name(_parameters(cls))


def _required(cls: type[nn.Module]) -> list[str]:
    """The parameters of a module's forward without a default, after the hidden states."""
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [p for p in _parameters(cls).values() if p.kind is plain]
    return [p.name for p in found[2:] if p.default is inspect.Parameter.empty]
