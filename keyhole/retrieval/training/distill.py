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
#: Most of a context that training texts are long by themselves: beyond it a text costs minutes.
_LONG = 8192
_WARM_UP = 0.02
#: Where the learning rate ends, as a share of its peak.
_END = 0.02
_LARGEST_GRADIENT = 1.0
#: Budgets for the figures shown while training: this part of a text, sinks and window as
#: SpeContext has them by default.
_PART, _FIRST, _LAST = 8, 4, 64


@dataclass(frozen=True)
class StepProgress:
    """One step: mean loss of its texts and recall at a budget of an eighth of their length.

    recall is the share of the target's attention on what the head chose, before it learned from the
    text; window the same for the newest tokens.
    """

    length: int
    loss: float
    recall: float
    window: float


class Distiller:
    """The state of a training run between two steps."""

    def __init__(self, network: nn.Module, corpus: Corpus, recipe: TrainingConfig) -> None:
        shape = Target.of(network.requires_grad_(False))  # from here on; the head alone learns
        given = None
        if recipe.start is not None:
            given = RetrievalHead.from_pretrained(recipe.start, network)
        self.recipe = recipe = _settled(recipe, shape, given)
        self.step = self.tokens = 0
        head = _random(network, recipe) if given is None else _copy(given, recipe)
        self.module: RetrievalHead | Draft = head
        if recipe.objective == "eagle":
            self.module = _draft(network, head, recipe.seed)
        self._network, self._corpus = network, corpus
        self._teacher = Teacher(network, head.config.feature_layers)
        self._device = shape.embedding.device
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.learning_rate or 0.0, betas=(0.9, 0.95), weight_decay=0.0
        )

    @property
    def head(self) -> RetrievalHead:
        """The head as it is now."""
        if isinstance(self.module, Draft):
            return self.module.prune(self.recipe.inputs)
        return self.module

    @property
    def finished(self) -> bool:
        """Whether all tokens were seen."""
        return self.tokens >= self.recipe.tokens

    def train_step(self) -> StepProgress:
        """Learns from some texts of one length.

        NumericalError, with the weights as they were before, if the loss or a gradient is NaN.
        """
        recipe = self.recipe
        rng = Random(f"head/{recipe.seed}/{self.step}")
        length = rng.choice(_lengths(recipe.length or _LONG))
        count = max(1, recipe.batch_tokens // length)
        losses, shares, windows, seen = [], [], [], 0
        for _ in range(count):
            lesson = self._lesson(rng, length)
            seen += len(lesson.token_ids)
            loss, found = self._loss(lesson, rng)
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
            group["lr"] = (recipe.learning_rate or 0.0) * rate(self.tokens / recipe.tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.tokens += seen
        mean = [sum(x) / count for x in (losses, shares, windows)]
        return StepProgress(length, *mean)

    def state(self) -> dict[str, Any]:
        """All state that the next step depends on, in plain types and tensors."""
        return {
            "recipe": dataclasses.asdict(self.recipe),
            "weights": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": {"name": self._corpus.name, "digest": self._corpus.digest},
            "step": self.step,
            "tokens": self.tokens,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes from a state of the same recipe, texts and target; ConfigError if of others."""
        for name, value in dataclasses.asdict(self.recipe).items():
            old = state["recipe"].get(name)
            old = tuple(old) if isinstance(old, list) else old
            require(old == value, name, value, f"{old!r}, as in the run that is to be resumed")
        old, corpus = state["data"], self._corpus
        if old["digest"] != corpus.digest:
            raise ConfigError(
                f"the run that is to be resumed was made with {old['name']} (sha256 "
                f"{old['digest'][:12]}), and {corpus.name} (sha256 {corpus.digest[:12]}) has other "
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

    def _lesson(self, rng: Random, length: int) -> TeacherTargets:
        token_ids, recipe = self._corpus.text(rng, length), self.recipe
        selection = recipe.objective == "selection"
        steps = {"attention": 0, "selection": 1, "eagle": recipe.unroll_steps}[recipe.objective]
        if selection:
            rows = list(objectives.stretch(rng, len(token_ids), recipe.num_queries))
            token_ids = token_ids[: rows[-1] + 1]
        else:
            last = len(token_ids) - max(0, steps - 1)
            places = range(min(len(token_ids) // 2, last - 1), last)
            rows = sorted(rng.sample(places, min(len(places), recipe.num_queries)))
        return self._teacher.lesson(
            torch.tensor(token_ids, device=self._device),
            torch.tensor(rows, device=self._device),
            logit_steps=steps,
            keep_cache=selection,
        )

    def _loss(self, lesson: TeacherTargets, rng: Random) -> tuple[Tensor, tuple[float, float]]:
        """The loss, and the recall of head and window."""
        if isinstance(self.module, Draft):
            loss = eagle_loss(self.module, lesson)
            with torch.no_grad():
                logs = objectives.log_weights(self.head, lesson)
        elif self.recipe.objective == "selection":
            budget = objectives.draw_budget(rng, len(lesson.token_ids))
            heat = objectives.temperature(self.tokens / self.recipe.tokens)
            loss, logs = selection_loss(self.module, self._network, lesson, budget, heat)
        else:
            loss, logs = attention_loss(self.module, lesson)
        with torch.no_grad():
            budget = max(SHORTEST // _PART, len(lesson.token_ids) // _PART)
            last = max(1, min(_LAST, budget // 4))
            scores = objectives.best(logs.detach(), len(lesson.mass))
            ours = objectives.chosen(scores, lesson.rows, budget, _FIRST, last)
            plain = objectives.recent(lesson.rows, budget, _FIRST)
            shares = [float(objectives.share(lesson.mass, s).mean()) for s in (ours, plain)]
        return loss, (shares[0], shares[1])


def rate(done: float) -> float:
    """Factor on the learning rate after a share of the training: warm-up, then a cosine."""
    fall = max(0.0, min(1.0, (done - _WARM_UP) / (1 - _WARM_UP)))
    cosine = _END + (1 - _END) * (1 + math.cos(math.pi * fall)) / 2
    return cosine * min(1.0, (done + 1e-3) / _WARM_UP)


def _lengths(longest: int) -> list[int]:
    """256, 512, ... and the longest itself: each as likely as the others."""
    lengths = []
    while longest >= _SHORT:
        lengths.append(longest)
        longest //= 2
    return lengths or [longest]


def _settled(recipe: TrainingConfig, shape: Target, given: RetrievalHead | None) -> TrainingConfig:
    """The recipe with every None replaced for a target; of a given head what it reads."""
    length = recipe.length or min(shape.max_length, _LONG)
    require(length <= shape.max_length, "length", length, f"at most {shape.max_length}")
    layers, inputs, factor = recipe.feature_layers, recipe.inputs, 0.6
    if given is not None:
        inputs, own = given.config.inputs, given.config.feature_layers
        require(layers in (None, own), "feature_layers", layers, f"{own}, as in start")
        layers, factor = own, 0.04
    elif recipe.objective == "attention" and inputs == "tokens":
        layers = ()
    elif layers is None:
        layers = distinct_feature_layers(shape.num_layers)
    good = all(layer < shape.num_layers for layer in layers)
    require(good, "feature_layers", layers, f"layers of 0 to {shape.num_layers - 1}")
    width = int(shape.embedding.shape[-1])
    return dataclasses.replace(
        recipe,
        inputs=inputs,
        length=length,
        feature_layers=layers,
        learning_rate=recipe.learning_rate or factor / width,
    )


def _random(network: nn.Module, recipe: TrainingConfig) -> RetrievalHead:
    """A head of the target's shape with random weights, float32; an eagle's has features."""
    inputs = "tokens" if recipe.feature_layers == () else "tokens+features"
    base = RetrievalHead.random(network, inputs=inputs, seed=recipe.seed)
    assert recipe.feature_layers is not None
    assert recipe.length is not None
    config = dataclasses.replace(
        base.config,
        feature_layers=recipe.feature_layers,
        objective=recipe.objective,
        trained_length=recipe.length,
    )
    head = RetrievalHead(config, base.embedding).float()
    _draw(head, recipe.seed)
    return head


def _copy(given: RetrievalHead, recipe: TrainingConfig) -> RetrievalHead:
    """The given head in float32, which remembers the longest texts that it was trained on."""
    assert recipe.length is not None
    longest = max(given.config.trained_length, recipe.length)
    config = dataclasses.replace(given.config, objective=recipe.objective, trained_length=longest)
    head = RetrievalHead(config, given.embedding)
    head.load_state_dict(given.state_dict())
    head.dropped_share = given.dropped_share
    return head.float()


def _draft(network: nn.Module, head: RetrievalHead, seed: int) -> Draft:
    config: Any = network.config
    output: Any = network.get_output_embeddings()  # type: ignore[operator]
    size = getattr(config, "intermediate_size", None) or 4 * head.config.hidden_size
    draft = Draft(head, output.weight, int(size)).to(output.weight.device)
    _draw(draft, seed)
    for last in (draft.o, draft.down):  # at first the layer hands on what it gets
        nn.init.zeros_(last.weight)
    return draft.float()


@torch.no_grad()
def _draw(module: nn.Module, seed: int) -> None:
    """Draws all matrices for outputs of unit variance; the same on each device."""
    generator = torch.Generator().manual_seed(seed)
    for linear in (part for part in module.modules() if isinstance(part, nn.Linear)):
        spread = linear.in_features**-0.5
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * spread)
