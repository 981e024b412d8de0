"""The settings of the training of a head or gate, and the texts that it trains on.

Texts are cut to mixed lengths; each one is determined by a random generator alone.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Protocol

from keyhole.config import (
    EngineConfig,
    is_count,
    is_number,
    require,
    require_counts,
    require_known,
    require_layers,
    setting,
)
from keyhole.errors import ConfigError, why
from keyhole.retrieval.config import INPUTS

OBJECTIVES = ("attention", "selection", "eagle", "gate")
_FOR_HEADS = tuple(name for name in OBJECTIVES if name != "gate")
#: Settings of some objectives, which the others would ignore.
_ONLY_FOR = {
    "unroll_steps": ("eagle",),
    "block_size": ("gate",),
    "inputs": _FOR_HEADS,
    "feature_layers": _FOR_HEADS,
}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The objective, amount and rate of training; ConfigError names an invalid value.

    The learning rate falls with the width, as Adam's steps on matrices should (muP, Yang et al.,
    2022); at a width of 4096 the default is about three times EAGLE's own.
    """

    objective: str = setting(
        "attention",
        "attention: match the target's attention; selection: preserve its predictions under the "
        "head's selection; eagle: draft its next tokens; gate: train the gate of SeerAttention-R "
        "instead of a head",
    )
    start: str | None = setting(
        None,
        "selection: folder of a head to start from, trained on attention or pruned from a draft; "
        "eagle: folder of a draft to train further, with its queries and keys as they are",
    )
    inputs: str = setting("tokens+features", "tokens+features or tokens: the inputs of a new head")
    feature_layers: tuple[int, ...] | None = setting(
        None, "layers whose inputs are the features; default: low, middle, high"
    )
    tokens: int = setting(2_000_000, "tokens of text to train on")
    length: int | None = setting(None, "longest text; default: the model's context, at most 8192")
    batch_tokens: int = setting(4096, "tokens of text per step")
    num_queries: int = setting(128, "sampled query tokens per text")
    learning_rate: float | None = setting(
        None,
        "peak learning rate; default: 0.6 / hidden size, 0.04 / hidden size for selection, 0.001 "
        "for a gate",
    )
    unroll_steps: int = setting(3, "eagle: number of consecutive drafted tokens")
    attention_weight: float = setting(
        0.0,
        "eagle: weight of a second loss, that of the objective attention, so that the head pruned "
        "from the draft also selects; with start, so that it selects for proposed tokens; 0: as in "
        "EAGLE-3",
    )
    block_size: int = setting(
        EngineConfig.page_size, "gate: tokens per block, the page size that it will be used with"
    )
    seed: int = setting(0, "seed of weights and texts")

    def __post_init__(self) -> None:
        for name, known in (("objective", OBJECTIVES), ("inputs", INPUTS)):
            require_known(name, getattr(self, name), known)
        require_counts(self, "tokens", "batch_tokens", "num_queries", "unroll_steps", "block_size")
        right = f"below {SHORTEST}, the tokens of the shortest text"
        require(self.unroll_steps < SHORTEST, "unroll_steps", self.unroll_steps, right)
        require_counts(self, "seed", least=0)
        for name in ("seed", "batch_tokens"):  # torch takes them as 64 bits
            require(getattr(self, name) < 2**63, name, getattr(self, name), "below 2**63")
        if self.objective == "selection" and self.start is None:
            raise ConfigError("--objective selection requires --start, the folder of a head")
        if self.objective not in ("selection", "eagle") and self.start is not None:
            raise ConfigError(
                f"--start {self.start!r} requires --objective selection or eagle, not "
                f"{self.objective!r}"
            )
        for name, objectives in _ONLY_FOR.items():
            value = getattr(self, name)
            usual = value == type(self).__dataclass_fields__[name].default
            right = f"left out, or combined with --objective {' or '.join(objectives)}"
            require(usual or self.objective in objectives, name, value, right)
        weight = self.attention_weight
        require(is_number(weight) and weight >= 0, "attention_weight", weight, "a number >= 0")
        if weight and (self.objective != "eagle" or self.inputs != "tokens+features"):
            raise ConfigError(
                f"--attention-weight {weight:g} requires --objective eagle and --inputs "
                f"tokens+features, not {self.objective!r} and {self.inputs!r}"
            )
        if self.feature_layers is not None:
            require_layers("feature_layers", self.feature_layers)
            object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        ignored = self.objective == "attention" and self.inputs == "tokens" and self.feature_layers
        right = "left out, or combined with --inputs tokens+features"
        require(not ignored, "feature_layers", self.feature_layers, right)
        if self.length is not None:
            require(is_count(self.length, SHORTEST), "length", self.length, f">= {SHORTEST}")
        rate = self.learning_rate
        require(
            rate is None or (is_number(rate) and rate > 0),
            "learning_rate",
            rate,
            "a number above 0",
        )


#: Shorter texts have almost nothing outside of SpeContext's sinks and window, 68 tokens.
SHORTEST = 96
FORMS = "a JSON string or list of token ids per line of a .jsonl file, or the whole of a .txt file"


class Corpus(Protocol):
    """A source of training texts."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of the texts, in hexadecimal digits."""
        ...

    def text(self, rng: Random, length: int) -> list[int]:
        """Token ids of one text, at least SHORTEST and at most `length`; no other state."""
        ...


@dataclass(frozen=True)
class FileCorpus:
    """Texts of a file; long ones are drawn more often, and cut at any position."""

    texts: tuple[list[int], ...]
    name: str = "texts"

    @property
    def digest(self) -> str:
        """SHA-256 of the token ids: the same file read with another tokenizer counts as other
        texts.
        """
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        found = hashlib.sha256()
        for text in self.texts:
            found.update(json.dumps(text).encode())
        return found.hexdigest()

    def text(self, rng: Random, length: int) -> list[int]:
        """A part of a text drawn by length; a shorter text is returned whole."""
        ends = list(accumulate(map(len, self.texts)))
        text = self.texts[bisect(ends, rng.randrange(ends[-1]))]
        start = rng.randint(0, max(0, len(text) - length))
        return text[start : start + length]


def read(path: str | Path, tokenizer: Any, vocab_size: int) -> FileCorpus:
    """Reads --data; ConfigError names an unusable line, or says that no text is long enough.

    tokenizer: of transformers; None for a model without one, whose data must be token ids.
    """
    name = str(path)
    texts = [
        _ids(text, tokenizer, vocab_size, f"--data {name!r}{where}")
        for where, text in texts_in(name)
    ]
    long_enough = tuple(text for text in texts if len(text) >= SHORTEST)
    if not long_enough:
        longest = max(map(len, texts), default=0)
        raise ConfigError(
            f"--data {name!r} has no text of {SHORTEST} tokens or more (the longest of "
            f"{len(texts)} has {longest}); give {FORMS}"
        )
    return FileCorpus(long_enough, f"--data {name!r}")


def texts_in(name: str) -> list[tuple[str, Any]]:
    """Every text of --data, or list of token ids, after its place in the file.

    ConfigError for a file that cannot be read, and for a line that is neither.
    """
    try:
        content = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data {name!r} cannot be read: {why(error)}") from error
    if not name.endswith(".jsonl"):
        return [("", content)]
    found: list[tuple[str, Any]] = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--data {name!r}, line {number} is not JSON: {error}") from error
        if not isinstance(text, str | list):
            raise ConfigError(f"--data {name!r}, line {number} must be {FORMS}")
        found.append((f", line {number}", text))
    return found


def _ids(text: object, tokenizer: Any, vocab_size: int, where: str) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ConfigError(f"{where} is text, and this model has no tokenizer; give token ids")
        # Without the warning about length: long texts are cut.
        text = tokenizer(text, verbose=False)["input_ids"]
    if not isinstance(text, list) or not all(type(token) is int for token in text):
        raise ConfigError(f"{where} must be {FORMS}")
    wrong = [token for token in text if not 0 <= token < vocab_size]
    if wrong:
        raise ConfigError(
            f"{where} has token id {wrong[0]}, but those of the model are 0 to {vocab_size - 1}"
        )
    return text
