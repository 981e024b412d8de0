"""The settings of a head's training."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.config import is_count, is_number, require, require_layers, setting
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.retrieval.config import INPUTS
from keyhole.retrieval.training.corpus import SHORTEST

OBJECTIVES = ("attention", "selection", "eagle")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The objective, amount and rate of training; ConfigError names an invalid value.

    The learning rate falls with the width, as Adam's steps on matrices should (muP, Yang et al.,
    2022); at a width of 4096 the default is about three times EAGLE's own.
    """

    objective: str = setting(
        "attention",
        "attention: match where the target looks; selection: keep its predictions under the head's "
        "choice; eagle: draft its next tokens",
    )
    start: str | None = setting(
        None, "selection: folder of a head to begin with, trained on attention or cut from a draft"
    )
    inputs: str = setting("tokens+features", "tokens+features or tokens: what a new head reads")
    feature_layers: tuple[int, ...] | None = setting(
        None, "layers whose inputs are the features; default: low, middle, high"
    )
    tokens: int = setting(2_000_000, "tokens of text to train on")
    length: int | None = setting(None, "longest text; default: the model's context, at most 8192")
    batch_tokens: int = setting(4096, "tokens of text per step")
    num_queries: int = setting(128, "tokens of each text that are asked")
    learning_rate: float | None = setting(
        None, "at its peak; default: 0.6 / hidden size, 0.04 / hidden size for selection"
    )
    unroll_steps: int = setting(3, "eagle: tokens drafted in a row")
    seed: int = setting(0, "of weights and texts")

    def __post_init__(self) -> None:
        for name, known in (("objective", OBJECTIVES), ("inputs", INPUTS)):
            if getattr(self, name) not in known:
                raise UnknownNameError(name, str(getattr(self, name)), known)
        for name in ("tokens", "batch_tokens", "num_queries", "unroll_steps"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "at least 1")
        require(is_count(self.seed, 0), "seed", self.seed, "a whole number >= 0")
        if self.objective == "selection" and self.start is None:
            raise ConfigError("--objective selection requires --start, the folder of a head")
        if self.objective != "selection" and self.start is not None:
            raise ConfigError(
                f"--start {self.start!r} requires --objective selection, not {self.objective!r}"
            )
        if self.feature_layers is not None:
            require_layers("feature_layers", self.feature_layers)
            object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        if self.length is not None:
            require(is_count(self.length, SHORTEST), "length", self.length, f">= {SHORTEST}")
        rate = self.learning_rate
        require(
            rate is None or (is_number(rate) and rate > 0),
            "learning_rate",
            rate,
            "a number above 0",
        )
