"""Trains a retrieval head for a frozen target, by one of three objectives.

    attention   the head's weights match the target's attention (`attention_objective`)
    selection   the selection changes the target's predictions little (`selection_objective`)
    eagle       a draft model learns the target's next tokens and is pruned to its head (`draft`)

Every step is given by the seed and its number, so that a resumed run uses the same texts and
reaches the same weights.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.config import require
from keyhole.errors import ConfigError, NumericalError
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.target import Target, distinct_feature_layers
from keyhole.retrieval.training import objectives
from keyhole.retrieval.training.objectives import Draft, attention_loss, eagle_loss, selection_loss
from keyhole.retrieval.training.teacher import Teacher, TeacherTargets
from keyhole.retrieval.training.training_config import SHORTEST, Corpus, TrainingConfig

#: Texts are this long and powers of two times that, up to the longest.
_SHORT = 256
#: Longest training text by default: longer ones cost minutes each.
_LONG = 8192
_WARM_UP = 0.02
#: Where the learning rate ends, as a share of its peak.
_END = 0.02
_LARGEST_GRADIENT = 1.0
#: Budget of the progress figures: this part of a text, with sinks and window as
#: SpeContext has them by default.
_PART, _FIRST, _LAST = 8, 4, 64


@dataclass(frozen=True)
class StepProgress:
    """One step: mean loss of its texts, and recall at a budget of an eighth of their length.

    recall is the share of the target's attention on the head's selection, before it learned from
    the text; window is the same for the newest tokens.
    """

    length: int
    loss: float
    recall: float
    window: float


class Distiller:
    """The state of a training run between two steps."""

    def __init__(self, network: nn.Module, corpus: Corpus, config: TrainingConfig) -> None:
        shape = Target.of(network.requires_grad_(False))  # from now on; only the head learns
        given = None
        if config.start is not None:
            given = RetrievalHead.from_pretrained(config.start, network)
        self.config = config = _settled(config, shape, given)
        self.step = self.tokens = 0
        head = _random(network, config) if given is None else _copy(given, config)
        self.module: RetrievalHead | Draft = head
        if config.objective == "eagle":
            self.module = _draft(network, head, config.seed)
        self._network, self._corpus = network, corpus
        self._teacher = Teacher(network, head.config.feature_layers)
        self._device = shape.embedding.device
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=config.learning_rate or 0.0, betas=(0.9, 0.95), weight_decay=0.0
        )

    @property
    def head(self) -> RetrievalHead:
        """The current head."""
        if isinstance(self.module, Draft):
            return self.module.prune(self.config.inputs)
        return self.module

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
        length = rng.choice(_lengths(config.length or _LONG))
        count = max(1, config.batch_tokens // length)
        losses, shares, windows, seen = [], [], [], 0
        for _ in range(count):
            targets = self._targets(rng, length)
            seen += len(targets.token_ids)
            loss, found = self._loss(targets, rng)
            (loss / count).backward()
            losses.append(float(loss.detach()))
            shares.append(found[0])
            windows.append(found[1])
        norm = nn.utils.clip_grad_norm_(self._parameters, _LARGEST_GRADIENT)
        if not math.isfinite(sum(losses)) or not norm.isfinite():
            self.optimizer.zero_grad()
            raise NumericalError(
                f"the loss of step {self.step} is {losses[-1]} and its gradient {float(norm)}; a "
                "lower learning_rate may help"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = (config.learning_rate or 0.0) * rate(self.tokens / config.tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.tokens += seen
        mean = [sum(x) / count for x in (losses, shares, windows)]
        return StepProgress(length, *mean)

    def state(self) -> dict[str, Any]:
        """All state that the next step depends on, in plain types and tensors."""
        return {
            "config": dataclasses.asdict(self.config),
            "weights": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": {"name": self._corpus.name, "digest": self._corpus.digest},
            "step": self.step,
            "tokens": self.tokens,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes from a state with the same config, texts and target; ConfigError if they
        differ.
        """
        for name, value in dataclasses.asdict(self.config).items():
            old = state["config"].get(name)
            old = tuple(old) if isinstance(old, list) else old
            require(old == value, name, value, f"{old!r}, as in the run that is to be resumed")
        old, corpus = state["data"], self._corpus
        if old["digest"] != corpus.digest:
            raise ConfigError(
                f"the run that is to be resumed was made with {old['name']} (sha256 "
                f"{old['digest'][:12]}), and {corpus.name} (sha256 {corpus.digest[:12]}) has "
                "different "
                "texts"
            )
        try:
            self.module.load_state_dict(state["weights"])
        except RuntimeError as error:
            raise ConfigError(
                "the run that is to be resumed was made for a model of another shape"
            ) from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["step"], state["tokens"]

    def _targets(self, rng: Random, length: int) -> TeacherTargets:
        token_ids, config = self._corpus.text(rng, length), self.config
        selection = config.objective == "selection"
        steps = {"attention": 0, "selection": 1, "eagle": config.unroll_steps}[config.objective]
        if selection:
            rows = list(objectives.stretch(rng, len(token_ids), config.num_queries))
            token_ids = token_ids[: rows[-1] + 1]
        else:
            last = len(token_ids) - max(0, steps - 1)
            places = range(min(len(token_ids) // 2, last - 1), last)
            rows = sorted(rng.sample(places, min(len(places), config.num_queries)))
        return self._teacher.targets(
            torch.tensor(token_ids, device=self._device),
            torch.tensor(rows, device=self._device),
            logit_steps=steps,
            keep_cache=selection,
        )

    def _loss(self, targets: TeacherTargets, rng: Random) -> tuple[Tensor, tuple[float, float]]:
        """The loss, and the recall of the head and of the window."""
        if isinstance(self.module, Draft):
            loss = eagle_loss(self.module, targets)
            with torch.no_grad():
                logs = objectives.log_weights(self.head, targets)
        elif self.config.objective == "selection":
            budget = objectives.draw_budget(rng, len(targets.token_ids))
            heat = objectives.temperature(self.tokens / self.config.tokens)
            loss, logs = selection_loss(self.module, self._network, targets, budget, heat)
        else:
            loss, logs = attention_loss(self.module, targets)
        with torch.no_grad():
            budget = max(SHORTEST // _PART, len(targets.token_ids) // _PART)
            last = max(1, min(_LAST, budget // 4))
            scores = objectives.best(logs.detach(), len(targets.mass))
            ours = objectives.chosen(scores, targets.rows, budget, _FIRST, last)
            plain = objectives.recent(targets.rows, budget, _FIRST)
            shares = [float(objectives.share(targets.mass, s).mean()) for s in (ours, plain)]
        return loss, (shares[0], shares[1])


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


def _settled(config: TrainingConfig, shape: Target, given: RetrievalHead | None) -> TrainingConfig:
    """The config with every None resolved for a target, or from a given head."""
    length = config.length or min(shape.max_length, _LONG)
    require(length <= shape.max_length, "length", length, f"at most {shape.max_length}")
    layers, inputs, factor = config.feature_layers, config.inputs, 0.6
    if given is not None:
        inputs, own = given.config.inputs, given.config.feature_layers
        require(layers in (None, own), "feature_layers", layers, f"{own}, as in start")
        layers, factor = own, 0.04
    elif config.objective == "attention" and inputs == "tokens":
        layers = ()
    elif layers is None:
        layers = distinct_feature_layers(shape.num_layers)
    good = all(layer < shape.num_layers for layer in layers)
    require(good, "feature_layers", layers, f"layers of 0 to {shape.num_layers - 1}")
    width = int(shape.embedding.shape[-1])
    return dataclasses.replace(
        config,
        inputs=inputs,
        length=length,
        feature_layers=layers,
        learning_rate=config.learning_rate or factor / width,
    )


def _random(network: nn.Module, config: TrainingConfig) -> RetrievalHead:
    """A head of the target's shape with random weights, float32; an eagle's has features."""
    inputs = "tokens" if config.feature_layers == () else "tokens+features"
    base = RetrievalHead.random(network, inputs=inputs, seed=config.seed)
    assert config.feature_layers is not None
    assert config.length is not None
    own = dataclasses.replace(
        base.config,
        feature_layers=config.feature_layers,
        objective=config.objective,
        trained_length=config.length,
    )
    head = RetrievalHead(own, base.embedding).float()
    _draw(head, config.seed)
    return head


def _copy(given: RetrievalHead, config: TrainingConfig) -> RetrievalHead:
    """The given head in float32, which remembers the longest texts that it was trained on."""
    assert config.length is not None
    longest = max(given.config.trained_length, config.length)
    own = dataclasses.replace(given.config, objective=config.objective, trained_length=longest)
    head = RetrievalHead(own, given.embedding)
    head.load_state_dict(given.state_dict())
    head.dropped_share = given.dropped_share
    return head.float()


def _draft(network: nn.Module, head: RetrievalHead, seed: int) -> Draft:
    config: Any = network.config
    output: Any = network.get_output_embeddings()  # type: ignore[operator]
    size = getattr(config, "intermediate_size", None) or 4 * head.config.hidden_size
    draft = Draft(head, output.weight, int(size)).to(output.weight.device)
    _draw(draft, seed)
    for last in (draft.o, draft.down):  # at first the layer passes its input through
        nn.init.zeros_(last.weight)
    return draft.float()


@torch.no_grad()
def _draw(module: nn.Module, seed: int) -> None:
    """Draws all matrices for outputs of unit variance; the same on each device."""
    generator = torch.Generator().manual_seed(seed)
    for linear in (part for part in module.modules() if isinstance(part, nn.Linear)):
        spread = linear.in_features**-0.5
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * spread)
