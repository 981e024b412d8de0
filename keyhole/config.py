"""Settings: frozen, keyword-only, validated once. No torch here, so that `--help` stays fast.

A field made with `setting()` carries its help text; command line and reference documents are
derived from these fields, so that a default or an explanation stands in one place only.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from keyhole.errors import ConfigError, UnknownNameError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def setting(default: Any, help: str) -> Any:
    """A dataclass field with its default and its one-line help."""
    return dataclasses.field(default=default, metadata={"help": help})


def help_of(field: dataclasses.Field[Any]) -> str:
    """The help text of a field made with `setting()`."""
    return str(field.metadata["help"])


def from_settings(cls: type[Any], kind: str, given: dict[str, Any]) -> Any:
    """`cls(**given)`, with an unknown field refused by name and the nearest offered."""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in given:
        if name not in names:
            raise UnknownNameError(f"setting of {kind}", name, names)
    return cls(**given)


def kind_of(field: dataclasses.Field[Any]) -> str:
    """The type of a setting that is not None, by its name: "int", "tuple[int, ...]"."""
    return str(field.type).removesuffix(" | None")


def is_size(field: dataclasses.Field[Any]) -> bool:
    """Whether a setting is a size in bytes."""
    return field.name.endswith("memory")


def read_setting(field: dataclasses.Field[Any], text: Any, name: str) -> Any:
    """The value of a setting from text, or from several texts.

    name: as the user wrote it, for the ConfigError that says what would be right.
    """
    kind = kind_of(field)
    if not isinstance(text, str):
        return tuple(text)
    if is_size(field):
        return parse_bytes(text, name)
    try:
        return _BY_KIND[kind](text)
    except ValueError as error:
        right = _RIGHT.get(kind, "numbers such as 0,1")
        raise ConfigError(f"{name} {text!r} must be {right}") from error


_BY_KIND: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: text == "True",
    "tuple[int, ...]": lambda text: tuple(int(part) for part in text.split(",") if part.strip()),
    "Names": lambda text: tuple(part.strip() for part in text.split(",") if part.strip()),
    "Budgets": lambda text: tuple(part.strip() for part in text.split(",")),
}
_RIGHT = {"int": "a whole number", "float": "a number"}


def parse_bytes(value: int | str, name: str = "memory") -> int:
    """Bytes from a number or from text like "2GiB" or "500 MB"; `name` as the user wrote it."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(f"{name} {value!r} is not a size; write for example 2GiB or 500MB")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"{name} {value!r} must be more than 0 bytes")
    return size


def require(good: bool, name: str, value: object, right: str) -> None:
    """Raises ConfigError "name value must be right" unless `good`."""
    if not good:
        raise ConfigError(f"{name} {value!r} must be {right}")


def is_count(value: object, least: int = 1) -> bool:
    """Whether `value` is a whole number of at least `least`, numpy's too (a bool is not)."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def require_layers(name: str, value: object, right: str = "layer numbers such as (0, 1)") -> None:
    """Raises ConfigError unless `value` is a tuple or list of layer numbers."""
    good = isinstance(value, tuple | list) and all(is_count(layer, 0) for layer in value)
    require(good, name, value, right)


def is_number(value: object) -> bool:
    """Whether `value` is a finite number, numpy's too (a bool is not)."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    None means: as the model's `generation_config` says, and if it says nothing, the neutral value
    in the help. `temperature=0` is greedy decoding.
    """

    max_tokens: int = setting(256, "at most this many new tokens")
    temperature: float | None = setting(None, "0 is greedy; neutral: 0 unless the model samples")
    top_p: float | None = setting(None, "keep the smallest set with this probability; neutral: 1")
    top_k: int | None = setting(None, "keep this many most likely tokens; 0 is all; neutral: 0")
    min_p: float | None = setting(None, "keep tokens above this share of the best; neutral: 0")
    repetition_penalty: float | None = setting(None, "divides scores of seen tokens; neutral: 1")
    seed: int | None = setting(None, "the same seed gives the same tokens, in any batch")
    stop: tuple[str, ...] = setting((), "end before any of these texts")
    stop_token_ids: tuple[int, ...] = setting((), "end at any of these tokens")
    ignore_eos: bool = setting(False, "go on after the model's end-of-sequence tokens")
    logprobs: int | None = setting(None, "give log-probabilities of the top k and the chosen token")

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else value
            require(isinstance(value, tuple | list), name, value, "a list or tuple")
            object.__setattr__(self, name, tuple(value))
        require(is_count(self.max_tokens), "max_tokens", self.max_tokens, "a whole number >= 1")
        self._require_number("temperature", "at least 0", lambda x: x >= 0)
        self._require_number("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1)
        self._require_number("min_p", "from 0 to 1", lambda x: 0 <= x <= 1)
        self._require_number("repetition_penalty", "above 0", lambda x: x > 0)
        for name in ("top_k", "logprobs"):
            value = getattr(self, name)
            require(value is None or is_count(value, 0), name, value, "a whole number >= 0")
        require(self.seed is None or is_count(self.seed, 0), "seed", self.seed, "a number >= 0")
        texts = all(isinstance(text, str) and text for text in self.stop)
        require(texts, "stop", self.stop, "non-empty texts")
        ids = all(is_count(token, 0) for token in self.stop_token_ids)
        require(ids, "stop_token_ids", self.stop_token_ids, "token ids >= 0")

    def _require_number(self, name: str, right: str, good: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        require(value is None or (is_number(value) and good(value)), name, value, right)

    def resolve(self, defaults: dict[str, Any]) -> SamplingParams:
        """Every None replaced by the model's `generation_config` or the neutral value."""
        sampled = bool(defaults.get("do_sample"))
        neutral: dict[str, Any] = {
            "temperature": _or(defaults.get("temperature"), 1.0) if sampled else 0.0,
            "top_p": _or(defaults.get("top_p"), 1.0) if sampled else 1.0,
            "top_k": _or(defaults.get("top_k"), 0) if sampled else 0,
            "min_p": _or(defaults.get("min_p"), 0.0) if sampled else 0.0,
            "repetition_penalty": _or(defaults.get("repetition_penalty"), 1.0),
        }
        missing = {name: value for name, value in neutral.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How much runs at once and where it lives."""

    max_batch: int = setting(8, "at most this many requests in one step")
    page_size: int = setting(16, "tokens in a page of the KV cache")
    prefill_chunk: int = setting(1024, "at most this many prompt tokens in one step")
    prefix_cache: bool = setting(True, "do not compute the same prompt start twice")
    memory: int | None = setting(None, "bytes for the KV cache; None: most of what is free")
    total_memory: int | None = setting(
        None, "instead of memory: bytes for weights, KV cache and what a step computes with"
    )
    offload: str | None = setting(
        None, "folder that layers move to when memory is full; on a GPU: any, it is host memory"
    )
    graphs: bool = setting(True, "on a GPU, repeat decode steps as CUDA graphs, where they can be")
    max_length: int | None = setting(None, "tokens of a sequence; None: what the model allows")

    def __post_init__(self) -> None:
        for name in ("max_batch", "page_size", "prefill_chunk"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "at least 1")
        for name in ("memory", "total_memory", "max_length"):
            value = getattr(self, name)
            require(value is None or is_count(value), name, value, "at least 1")
        if self.memory is not None and self.total_memory is not None:
            raise ConfigError(
                "give memory=, for the KV cache alone, or total_memory=, with weights and what a "
                f"step computes with; not both ({self.memory} and {self.total_memory})"
            )
