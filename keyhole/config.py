"""Settings: frozen, keyword-only, validated once. No torch here, so that `--help` stays fast.

A field made with `setting()` carries its help text; command line and reference documents are
generated from these fields, so that every default and explanation is written once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from keyhole.errors import ConfigError, UnknownNameError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def setting(default: Any, help: str) -> Any:
    """A dataclass field with its default and its one-line help."""
    return dataclasses.field(default=default, metadata={"help": help})


def short_repr(self: Any) -> str:
    """A settings object as a user would write it: only values that differ from the defaults."""
    shown = [
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if field.repr and getattr(self, field.name) != field.default
    ]
    return f"{type(self).__name__}({', '.join(shown)})"


def help_of(field: dataclasses.Field[Any]) -> str:
    """The help text of a field made with `setting()`."""
    return str(field.metadata["help"])


def from_settings(cls: type[Any], kind: str, given: dict[str, Any]) -> Any:
    """`cls(**given)`; an unknown field is refused by name, with the nearest suggested."""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in given:
        require_known(f"setting of {kind}", name, names)
    return cls(**given)


def kind_of(field: dataclasses.Field[Any]) -> str:
    """The type of a setting that is not None, by its name: "int", "tuple[int, ...]"."""
    return str(field.type).removesuffix(" | None")


def is_size(field: dataclasses.Field[Any]) -> bool:
    """Whether a setting is a size in bytes."""
    return field.name.endswith(("memory", "_bytes", "max_body"))


def read_setting(field: dataclasses.Field[Any], text: Any, name: str) -> Any:
    """The value of a setting from text, or from a list of texts.

    name: as the user wrote it, for the ConfigError that says what would be right.
    """
    kind = kind_of(field)
    if kind == "Mapping[int, float]":
        return _read_biases([text] if isinstance(text, str) else text, name)
    if not isinstance(text, str):
        return tuple(text)
    if is_size(field):
        return parse_bytes(text, name)
    try:
        return _BY_KIND[kind](text)
    except (KeyError, ValueError) as error:
        right = _RIGHT.get(kind, "numbers such as 0,1")
        raise ConfigError(f"{name} {text!r} must be {right}") from error


def _read_biases(texts: Sequence[str], name: str) -> dict[int, float]:
    """Token ids and numbers from texts such as "15=-100"."""
    found: dict[int, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError as error:
            right = "a token id and a number such as 15=-100"
            raise ConfigError(f"{name} {text!r} must be {right}") from error
    return found


_BY_KIND: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "tuple[int, ...]": lambda text: tuple(int(part) for part in text.split(",") if part.strip()),
    "Names": lambda text: tuple(part.strip() for part in text.split(",") if part.strip()),
    "Budgets": lambda text: tuple(part.strip() for part in text.split(",")),
}
_RIGHT = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def parse_bytes(value: int | str, name: str = "memory") -> int:
    """Bytes from a number or from text like "2GiB" or "500 MB"; `name` as the user wrote it."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        size = int(value)
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(f"{name} {value!r} is not a size; write for example 2GiB or 500MB")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"{name} {value!r} must be more than 0 bytes")
    return size


_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(size: float) -> str:
    """A size for people: 512 B, 1.5 KiB, 3.2 MiB."""
    unit = 0
    # A size that would round to 1024.0 is written in the next unit.
    while unit < len(_SIZES) - 1 and size >= (1023.5 if unit == 0 else 1023.95):
        size /= 1024
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_SIZES[unit]}"


def require(good: bool, name: str, value: object, right: str) -> None:
    """Raises ConfigError "name value must be right" unless `good`."""
    if not good:
        raise ConfigError(f"{name} {value!r} must be {right}")


def require_known(kind: str, name: object, known: Collection[str]) -> None:
    """Raises UnknownNameError, with the nearest name, unless `name` is one of the known ones."""
    if name not in known:
        raise UnknownNameError(kind, str(name), known)


def is_count(value: object, least: int = 1) -> bool:
    """Whether `value` is a whole number of at least `least`, numpy's too (a bool is not)."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def require_counts(settings: object, *names: str, least: int = 1) -> None:
    """Raises ConfigError unless all these settings are whole numbers of at least `least`."""
    for name in names:
        value = getattr(settings, name)
        require(is_count(value, least), name, value, f"at least {least}")


def require_layers(name: str, value: object, right: str = "layer numbers such as (0, 1)") -> None:
    """Raises ConfigError unless `value` is a tuple or list of layer numbers."""
    good = isinstance(value, tuple | list) and all(is_count(layer, 0) for layer in value)
    require(good, name, value, right)


def require_layers_of(name: str, value: Sequence[int], num_layers: int) -> None:
    """Raises ConfigError unless `value` is layers of a model of this depth.

    0 and 1 are valid for any depth: they are defaults of methods, and some models have one layer.
    """
    require_layers(name, value)
    good = all(layer < max(2, num_layers) for layer in value)
    require(good, name, value, f"layers from 0 to {num_layers - 1}, as the model has {num_layers}")


def is_number(value: object) -> bool:
    """Whether `value` is a finite number, numpy's too (a bool is not), that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def is_several(value: object) -> bool:
    """Whether `value` is a collection: iterable, but not text and not an array of one number."""
    one = isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Iterable) and not one


#: By type name in an annotation: a check of the type, its name for users, and its constructor.
SCALARS: dict[str, tuple[Callable[[object], bool], str, Callable[[Any], Any]]] = {
    "int": (lambda value: is_count(value, -(2**63)), "a whole number", int),
    "float": (is_number, "a number", float),
    "bool": (lambda value: isinstance(value, bool), "true or false", bool),
    "str": (lambda value: isinstance(value, str), "a string", str),
}


def settle_types(settings: Any) -> None:
    """Checks the types of a settings object's fields; numpy's numbers become Python's, in place.

    Lists of numbers are converted too, and checked where they are used. ConfigError names the
    field, its value and the type that would be right.
    """
    for field in dataclasses.fields(settings):
        value, kind = getattr(settings, field.name), kind_of(field)
        if kind in SCALARS and not (value is None and str(field.type) != kind):
            good, right, make = SCALARS[kind]
            require(good(value), field.name, value, right)
            if not isinstance(value, int | float) or type(value).__module__ != "builtins":
                object.__setattr__(settings, field.name, make(value))
        elif kind == "tuple[int, ...]" and isinstance(value, tuple | list):
            plain = tuple(int(one) if is_count(one, -(2**63)) else one for one in value)
            object.__setattr__(settings, field.name, plain)


class MethodSettings:
    """A base of frozen settings whose types are checked, and whose repr shows what was changed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # otherwise @dataclass generates a longer one
            cls.__repr__ = short_repr  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        settle_types(self)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    None takes the value of the model's `generation_config`, and without one the default in the
    help; those of `temperature`, `top_p`, `top_k` and `min_p` only if it says `do_sample`.
    `temperature=0` is greedy decoding.
    """

    n: int = setting(1, "completions of each prompt, which is computed once")
    max_tokens: int | None = setting(
        256, "at most this many new tokens; None: as many as model and KV cache have room for"
    )
    min_tokens: int = setting(0, "no end-of-sequence or stop token before this many new tokens")
    temperature: float | None = setting(
        None, "0 is greedy; default: generation_config, else greedy"
    )
    top_p: float | None = setting(
        None,
        "keep the smallest set of tokens with this probability; default: generation_config, else 1",
    )
    top_k: int | None = setting(
        None, "keep the k most likely tokens; 0: all; default: generation_config, else 0"
    )
    min_p: float | None = setting(
        None, "keep tokens above this share of the best; default: generation_config, else 0"
    )
    repetition_penalty: float | None = setting(
        None, "divides scores of seen tokens; default: generation_config, else 1"
    )
    presence_penalty: float = setting(
        0.0, "subtracted from the score of each token generated so far"
    )
    frequency_penalty: float = setting(
        0.0, "subtracted from a token's score for each time it was generated"
    )
    logit_bias: Mapping[int, float] | None = setting(None, "added to scores, by token id")
    bad_words: tuple[str, ...] = setting(
        (), "texts that are never generated, except inside longer words"
    )
    seed: int | None = setting(None, "the same seed gives the same tokens, in any batch")
    stop: tuple[str, ...] = setting((), "end before any of these texts")
    stop_token_ids: tuple[int, ...] = setting((), "end at any of these tokens")
    ignore_eos: bool = setting(False, "continue past the model's end-of-sequence tokens")
    grammar: str | None = setting(
        None, "JSON schema or Lark grammar that the text follows; needs keyhole[serve]"
    )
    skip_special_tokens: bool = setting(True, "remove special tokens from the text")
    logprobs: int | None = setting(
        None, "return log-probabilities of the top k tokens and of the chosen one"
    )
    trace: bool = setting(False, "record which tokens each layer reads for every generated token")
    adapter: str | None = setting(
        None, "name of one of the LLM's LoRA adapters; None: the base model"
    )

    def __post_init__(self) -> None:
        settle_types(self)
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else value
            require(isinstance(value, tuple | list), name, value, "a list or tuple")
            object.__setattr__(self, name, tuple(value))
        # Each completion is a request; more is a mistake, and would take all memory.
        require(1 <= self.n <= 2**14, "n", self.n, "from 1 to 16,384")
        self._require_number("max_tokens", "at least 1", lambda x: x >= 1)
        self._require_number("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1)
        self._require_number("min_p", "from 0 to 1", lambda x: 0 <= x <= 1)
        right = f"from {1 / _MOST_FACTOR:g} to {_MOST_FACTOR:g}"
        self._require_number(
            "repetition_penalty", right, lambda x: 1 / _MOST_FACTOR <= x <= _MOST_FACTOR
        )
        for name in ("presence_penalty", "frequency_penalty"):  # OpenAI's range
            self._require_number(name, "from -2 to 2", lambda x: -2 <= x <= 2)
        for name in ("temperature", "top_k", "logprobs", "seed", "min_tokens"):
            self._require_number(name, "at least 0", lambda x: x >= 0)
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            good = all(isinstance(text, str) and text.strip(" ") for text in texts)
            good |= name == "stop" and all(isinstance(text, str) and text for text in texts)
            require(good, name, texts, "non-empty texts")
            whole = not any("\ud800" <= letter <= "\udfff" for text in texts for letter in text)
            require(whole, name, texts, "valid Unicode, without lone surrogates")
        ids = all(is_count(token, 0) for token in self.stop_token_ids)
        require(ids, "stop_token_ids", self.stop_token_ids, "token ids >= 0")
        good = self.grammar is None or bool(self.grammar.strip())
        require(good, "grammar", self.grammar, "a JSON schema or a Lark grammar")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens {self.min_tokens} must be at most max_tokens {self.max_tokens}"
            )
        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ConfigError(
                f"{name} {getattr(self, name)} cannot be combined with a grammar, which decides "
                "where the text ends; leave one out"
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    __repr__ = short_repr

    @property
    def changes_scores(self) -> bool:
        """Whether scores of tokens depend on which tokens these are, not on the model alone."""
        penalties = self.presence_penalty or self.frequency_penalty
        banned = self.bad_words or self.min_tokens
        return bool(self.repetition_penalty != 1.0 or penalties or self.logit_bias or banned)

    def each(self) -> list[SamplingParams]:
        """The settings of each of `n` completions: seeds in a row, so that they differ."""
        seeds = [None if self.seed is None else self.seed + i for i in range(self.n)]
        return [dataclasses.replace(self, n=1, seed=seed) for seed in seeds]

    def _require_number(self, name: str, right: str, good: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        require(value is None or good(value), name, value, right)

    def resolve(self, defaults: dict[str, Any]) -> SamplingParams:
        """Every None replaced by the model's `generation_config` or the default."""
        given = {name: value for name, value in defaults.items() if value is not None}
        chosen: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        if given.get("do_sample"):
            chosen = {name: given.get(name, value) for name, value in chosen.items()}
        else:
            chosen["temperature"] = 0.0
        chosen["repetition_penalty"] = given.get("repetition_penalty", 1.0)
        missing = {name: value for name, value in chosen.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)


#: Logits are float32. One that is multiplied or divided by the factor remains finite.
_MOST_BIAS = 1e38
_MOST_FACTOR = 1e30


def _bias(given: object) -> dict[int, float]:
    """A logit_bias in plain numbers; JSON has its ids as texts, as OpenAI's interface does."""
    right = f"a dict of token ids and numbers up to {_MOST_BIAS:g}, such as {{50256: -100}}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"logit_bias {given!r} must be {right}")
    found = {}
    for token, value in given.items():
        token = int(token) if isinstance(token, str) and token.isdecimal() else token
        plain = is_count(token, 0) and is_number(value) and abs(float(value)) <= _MOST_BIAS
        require(plain, "logit_bias", given, right)
        found[int(token)] = float(value)
    return found


#: What may propose tokens.
DRAFTS = ("ngram", "eagle3")
#: How keys and values may be stored: in the model's dtype, or in 8 bits with a scale per row.
KV_DTYPES = ("auto", "int8", "fp8")
#: Bytes of the scale of a row of 8-bit numbers.
SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine settings: batch size, memory and offloading."""

    max_batch: int = setting(8, "at most this many requests in one step")
    page_size: int = setting(16, "tokens in a page of the KV cache")
    prefill_chunk: int = setting(1024, "at most this many prompt tokens in one step")
    prefill_policy: str | None = setting(
        None, "what the tokens of long prompts read, such as xattention:mass=0.95; None: everything"
    )
    prefix_cache: bool = setting(
        True, "reuse the keys and values of prefixes that were seen before"
    )
    prefix_store: str | None = setting(
        None, "folder that keeps cached prefixes across restarts; None: not kept"
    )
    prefix_store_bytes: int | None = setting(None, "size limit of that folder; None: no limit")
    hot_document_bytes: int | None = setting(
        None,
        "bytes of memory that keep the most recently read keys and values of stored documents; "
        "None: none",
    )
    host_document_bytes: int | None = setting(
        None,
        "with hot_document_bytes on a GPU, bytes of host memory for what is evicted from it; "
        "None: none",
    )
    memory: int | None = setting(None, "bytes for the KV cache; None: most of what is free")
    total_memory: int | None = setting(
        None, "instead of memory: bytes for weights, KV cache and working memory of a step"
    )
    offload: str | None = setting(
        None, "folder for layers that do not fit; on a GPU any value enables RAM offload"
    )
    max_prefill_share: float = setting(
        0.5, "largest share of a step's prompt tokens that one prompt takes while others wait"
    )
    graphs: bool = setting(True, "replay decode steps as CUDA graphs (GPU only)")
    max_length: int | None = setting(
        None, "longest sequence, in tokens; None: what the model allows"
    )
    draft: str | None = setting(
        None,
        "speculative decoding: ngram proposes copies of earlier text, eagle3 runs the draft model "
        "next to the weights, eagle3:FOLDER another one; None: off",
    )
    num_draft_tokens: int = setting(
        4, "with draft, at most this many proposed tokens per request and step"
    )
    kv_dtype: str = setting(
        "auto", "data type of keys and values: int8 or fp8 halve their size; auto: the model's"
    )

    @property
    def drafts_by_model(self) -> bool:
        """Whether a draft model proposes tokens."""
        return self.draft is not None and self.draft.startswith("eagle3")

    @property
    def draft_folder(self) -> str | None:
        """The draft model's folder or hub id; None: the one next to the weights."""
        return (self.draft or "").partition(":")[2] or None

    def __post_init__(self) -> None:
        settle_types(self)
        require_counts(self, "max_batch", "page_size", "prefill_chunk", "num_draft_tokens")
        # Slots and rows of page tables are made for all of them.
        require(self.max_batch <= 2**20, "max_batch", self.max_batch, "at most 1,048,576")
        require_known("kv_dtype", self.kv_dtype, KV_DTYPES)
        name, colon, _ = (DRAFTS[0] if self.draft is None else self.draft).partition(":")
        has_folder = self.drafts_by_model and self.draft_folder is not None
        if name not in DRAFTS or (colon and not has_folder):
            raise UnknownNameError("draft", str(self.draft), DRAFTS)
        if self.draft is not None and self.offload is not None:
            raise ConfigError(
                f"draft {self.draft!r} cannot be used with offload=: the buffers of offloaded "
                "layers hold one token of a request; leave one of them out"
            )
        if self.prefix_store is not None and not self.prefix_cache:
            raise ConfigError(
                f"prefix_store {self.prefix_store!r} needs the prefix cache, but prefix_cache is "
                "False; leave one of the two settings out"
            )
        if self.prefix_store is not None and self.drafts_by_model:
            raise ConfigError(
                f"prefix_store {self.prefix_store!r} cannot be used with draft {self.draft!r}: the "
                "keys and values of the draft are not stored; leave one of them out"
            )
        for name in ("offload", "prefix_store"):  # the current folder is "."
            require(getattr(self, name) != "", name, "", "a folder; leave it out for none")
        good = self.max_length is None or is_count(self.max_length, 2)
        require(good, "max_length", self.max_length, "at least 2: a prompt and a new token")
        for name in (field.name for field in dataclasses.fields(self) if is_size(field)):
            value = getattr(self, name)
            require(value is None or is_count(value), name, value, "at least 1")
        for name, verb, needed in (
            ("prefix_store_bytes", "limits", "prefix_store"),
            ("host_document_bytes", "holds what is evicted from", "hot_document_bytes"),
        ):
            if (value := getattr(self, name)) is not None and getattr(self, needed) is None:
                raise ConfigError(
                    f"{name} {value} {verb} {needed}, which is not given; give both or neither"
                )
        share = self.max_prefill_share
        require(0 < share <= 1, "max_prefill_share", share, "above 0 and at most 1")
        if self.memory is not None and self.total_memory is not None:
            raise ConfigError(
                f"memory {self.memory} and total_memory {self.total_memory} cannot be combined; "
                "give memory= to limit the KV cache alone, or total_memory= to limit the weights, "
                "the KV cache and the working memory of a step together"
            )
