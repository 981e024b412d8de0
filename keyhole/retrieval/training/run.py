"""A training run: texts, optimizer and state between two steps, for a head, draft or gate.

Every step is determined by the seed and its number, so that a resumed run uses the same texts and
reaches the same weights.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from keyhole.config import require
from keyhole.errors import ConfigError, NumericalError
from keyhole.retrieval.target import weights_digest
from keyhole.retrieval.training.training_config import Corpus, TrainingConfig

#: Texts are this long and powers of two times that, up to the longest.
_SHORT = 256
#: Longest training text by default: longer ones cost minutes each.
LONG = 8192
_WARM_UP = 0.02
#: Where the learning rate ends, as a share of its peak.
_END = 0.02
_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class StepProgress:
    """One step: mean loss of its texts, and recall at a budget of an eighth of their length.

    recall is the share of the target's attention on the selection, before the text was learned
    from; window is the same for the newest tokens.
    """

    length: int
    loss: float
    recall: float
    window: float


@dataclass(frozen=True)
class TextLoss:
    """Results for one text: the loss, the recall of the selection and of the window, its tokens."""

    loss: Tensor
    recall: float
    window: float
    tokens: int


class TrainingRun(ABC):
    """The module that is trained, and the state of the run between two steps.

    config: with every None resolved. shown: the smoothed figures of the steps so far.
    """

    def __init__(
        self, network: nn.Module, module: nn.Module, corpus: Corpus, config: TrainingConfig
    ) -> None:
        self.module, self.config, self._corpus = module, config, corpus
        self._model = weights_digest(network)
        self.step = self.tokens = 0
        self.shown: dict[str, float] = {}
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._optimizers = _optimizers(self._parameters, config)

    @abstractmethod
    def save_pretrained(self, folder: Path) -> None:
        """Writes what was trained. ConfigError if it cannot be written."""

    @abstractmethod
    def _text_loss(self, rng: Random, length: int) -> TextLoss:
        """One text of at most `length` tokens."""

    @property
    def finished(self) -> bool:
        """Whether all tokens were seen."""
        return self.tokens >= self.config.tokens

    def train_step(self) -> StepProgress:
        """Learns from several texts of one length.

        NumericalError, with the weights unchanged, if the loss or a gradient is NaN.
        """
        config = self.config
        rng = Random(f"head/{config.seed}/{self.step}")
        length = rng.choice(_lengths(config.length or LONG))
        count = max(1, config.batch_tokens // length)
        found = []
        for _ in range(count):
            one = self._text_loss(rng, length)
            (one.loss / count).backward()
            found.append(dataclasses.replace(one, loss=one.loss.detach()))
        losses = [float(one.loss) for one in found]
        norm = nn.utils.clip_grad_norm_(self._parameters, _LARGEST_GRADIENT)
        if not math.isfinite(sum(losses)) or not norm.isfinite():
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            raise NumericalError(
                f"in step {self.step} the loss is {losses[-1]} and the norm of the gradient "
                f"{float(norm)}; try a lower learning_rate"
            )
        factor = rate(self.tokens / config.tokens)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += sum(one.tokens for one in found)
        shares = [(one.recall, one.window) for one in found]
        recall, window = (sum(x) / count for x in zip(*shares, strict=True))
        return StepProgress(length, sum(losses) / count, recall, window)

    def state(self) -> dict[str, Any]:
        """All state that the next step depends on, in plain types and tensors."""
        return {
            "config": dataclasses.asdict(self.config),
            "weights": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "model": self._model,
            "data": {"name": self._corpus.name, "digest": self._corpus.digest},
            "step": self.step,
            "tokens": self.tokens,
            "shown": self.shown,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes from a state with the same config, texts and model; ConfigError if they
        differ, or if another version of Keyhole wrote the state.
        """
        if state.keys() != self.state().keys():
            raise ConfigError(
                "the run to resume was made by another version of Keyhole; start a new one in "
                "another output folder"
            )
        for name, value in dataclasses.asdict(self.config).items():
            old = state["config"].get(name)
            old = tuple(old) if isinstance(old, list) else old
            require(old == value, name, value, f"{old!r}, as in the run to resume")
        old, corpus = state["data"], self._corpus
        if old["digest"] != corpus.digest:
            raise ConfigError(
                f"the run to resume was made with {old['name']} (sha256 {old['digest'][:12]}), but "
                f"{corpus.name} (sha256 {corpus.digest[:12]}) has other texts"
            )
        try:
            self.module.load_state_dict(state["weights"])
        except RuntimeError as error:
            raise ConfigError("the run to resume was made for a model of another shape") from error
        if state["model"] != self._model:
            raise ConfigError(
                "the run to resume was made for a model with other weights, or for this one in "
                "another dtype"
            )
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step, self.tokens, self.shown = state["step"], state["tokens"], state["shown"]


def _optimizers(parameters: list[nn.Parameter], config: TrainingConfig) -> list[Optimizer]:
    """AdamW; for a draft Muon on its matrices, and AdamW on its norms at a fifth of the rate.

    Every group has its own peak rate, as `peak`. Muon (Jordan et al., 2024) orthogonalises the
    update of a matrix, so its rate does not depend on the width.
    """
    peak = config.learning_rate or 0.0

    def adamw(those: list[nn.Parameter], peak: float) -> Optimizer:
        groups = [{"params": those, "peak": peak}]
        return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), weight_decay=0.0)

    if config.objective != "eagle":
        return [adamw(parameters, peak)]
    matrices = [p for p in parameters if p.ndim == 2]
    muon = torch.optim.Muon([{"params": matrices, "peak": peak}], lr=peak, weight_decay=0.0)
    return [muon, adamw([p for p in parameters if p.ndim != 2], peak / 5)]


def rate(done: float) -> float:
    """Factor on the learning rate after a share of the training: warm-up, then a cosine."""
    fall = max(0.0, min(1.0, (done - _WARM_UP) / (1 - _WARM_UP)))
    cosine = _END + (1 - _END) * (1 + math.cos(math.pi * fall)) / 2
    return cosine * min(1.0, (done + 1e-3) / _WARM_UP)


def _lengths(longest: int) -> list[int]:
    """256, 512, ... and the longest itself, each equally likely."""
    lengths = []
    while longest >= _SHORT:
        lengths.append(longest)
        longest //= 2
    return lengths or [longest]
