"""Trains a retrieval head for a frozen target, by one of three objectives.

attention   the head's weights match the target's attention
selection   the selection changes the target's predictions little
eagle       a draft model learns the target's next tokens and is pruned to its head;
            with an attention_weight its attention learns to match the target's, too

A draft that is trained further keeps its query and key projections. For a proposed token a draft
reads its own output for the token before. With an attention_weight, that output learns to give
these queries the same attention as the target's hidden states would.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.config import require
from keyhole.errors import ConfigError
from keyhole.retrieval.draft import DRAFT_FOLDER, DraftModel, write_draft
from keyhole.retrieval.head import RetrievalHead, draw_weights
from keyhole.retrieval.target import Target, distinct_feature_layers
from keyhole.retrieval.training import objectives
from keyhole.retrieval.training.objectives import Draft, attention_loss, eagle_loss, selection_loss
from keyhole.retrieval.training.run import LONG, TextLoss, TrainingRun
from keyhole.retrieval.training.teacher import Teacher, TeacherTargets
from keyhole.retrieval.training.training_config import SHORTEST, Corpus, TrainingConfig

#: Budget of the progress figures: this part of a text, with sinks and window as
#: SpeContext has them by default.
_PART, _FIRST, _LAST = 8, 4, 64
#: Peak learning rate of a draft's matrices.
_MUON = 0.01


class Distiller(TrainingRun):
    """The training of a retrieval head."""

    module: RetrievalHead | Draft

    def __init__(self, network: nn.Module, corpus: Corpus, config: TrainingConfig) -> None:
        shape = Target.of(network.requires_grad_(False))  # from now on; only the head learns
        given = before = None
        eagle = config.objective == "eagle"
        if config.start is not None and eagle:
            before = _readable(DraftModel.from_eagle3(config.start, network), network, config.start)
            given = before.head
        elif config.start is not None:
            given = RetrievalHead.from_pretrained(config.start, network)
        config = _settled(config, shape, given)
        head = _random(network, config) if given is None else _copy(given, config)
        module = _draft(network, head, config.seed, before) if eagle else head
        super().__init__(network, module, corpus, config)
        self._network = network
        self._teacher = Teacher(network, head.config.feature_layers)
        self._device = shape.embedding.device

    @property
    def head(self) -> RetrievalHead:
        """The current head."""
        if isinstance(self.module, Draft):
            return self.module.prune(self.config.inputs)
        return self.module

    def save_pretrained(self, folder: Path) -> None:
        """Writes the current head, and the draft that it was pruned from into a folder in it.

        ConfigError if they cannot be written.
        """
        self.head.save_pretrained(folder)
        if isinstance(self.module, Draft) and self.config.inputs == "tokens+features":
            write_draft(
                folder / DRAFT_FOLDER, self.head.config, dict(self.module.named_parameters())
            )

    def _text_loss(self, rng: Random, length: int) -> TextLoss:
        targets = self._targets(rng, length)
        loss, (recall, window) = self._loss(targets, rng)
        return TextLoss(loss, recall, window, len(targets.token_ids))

    def _targets(self, rng: Random, length: int) -> TeacherTargets:
        token_ids, config = self._corpus.text(rng, length), self.config
        selection, later = config.objective == "selection", 0
        steps = {"attention": 0, "selection": 1, "eagle": config.unroll_steps}[config.objective]
        if selection:
            rows = list(objectives.stretch(rng, len(token_ids), config.num_queries))
            token_ids = token_ids[: rows[-1] + 1]
        else:
            last = len(token_ids) - steps
            later = steps if config.start is not None and config.attention_weight else 0
            places = range(min(len(token_ids) // 2, last - 1), last)
            rows = sorted(rng.sample(places, min(len(places), config.num_queries)))
        return self._teacher.targets(
            torch.tensor(token_ids, device=self._device),
            torch.tensor(rows, device=self._device),
            logit_steps=steps,
            later_steps=later,
            keep_cache=selection,
        )

    def _loss(self, targets: TeacherTargets, rng: Random) -> tuple[Tensor, tuple[float, float]]:
        """The loss, and the recall of the head and of the window."""
        if isinstance(self.module, Draft):
            (loss, apart), weight = eagle_loss(self.module, targets), self.config.attention_weight
            learns = weight > 0 and self.config.start is None
            with torch.set_grad_enabled(learns):
                logs = objectives.log_weights(self.head, targets)
            loss = loss + weight * (objectives.mass_divergence(logs, targets) if learns else apart)
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


def _settled(config: TrainingConfig, shape: Target, given: RetrievalHead | None) -> TrainingConfig:
    """The config with every None resolved for a target, or from a given head."""
    length = config.length or min(shape.max_length, LONG)
    require(length <= shape.max_length, "length", length, f"at most {shape.max_length}")
    layers, inputs, factor = config.feature_layers, config.inputs, 0.6
    if given is not None:
        read, own = given.config.inputs, given.config.feature_layers
        good = inputs in (TrainingConfig.inputs, read)  # the default may not have been given
        require(good, "inputs", inputs, f"{read}, as in start")
        require(layers in (None, own), "feature_layers", layers, f"{own}, as in start")
        inputs = read
        layers, factor = own, 0.04
    elif config.objective == "attention" and inputs == "tokens":
        layers = ()
    elif layers is None:
        layers = distinct_feature_layers(shape.num_layers)
    good = all(layer < shape.num_layers for layer in layers)
    require(good, "feature_layers", layers, f"layers of 0 to {shape.num_layers - 1}")
    width, eagle = int(shape.embedding.shape[-1]), config.objective == "eagle"
    return dataclasses.replace(
        config,
        inputs=inputs,
        length=length,
        feature_layers=layers,
        learning_rate=config.learning_rate or (_MUON if eagle else factor / width),
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
        feature_norms=config.objective == "eagle" and bool(config.feature_layers),
        objective=config.objective,
        trained_length=config.length,
    )
    head = RetrievalHead(own, base.embedding).float()
    draw_weights(head, config.seed)
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


def _draft(network: nn.Module, head: RetrievalHead, seed: int, before: DraftModel | None) -> Draft:
    """A draft around a head: a new one, or a given one, whose head is not trained."""
    config: Any = network.config
    output: Any = network.get_output_embeddings()  # type: ignore[operator]
    if before is not None:
        draft = Draft(head.requires_grad_(False), output.weight, before.shape.mlp_size)
        state = before.state_dict()
        draft.load_state_dict({name: state[name] for name in draft.state_dict()})
        return draft.to(output.weight.device).float()
    size = getattr(config, "intermediate_size", None) or 4 * head.config.hidden_size
    draft = Draft(head, output.weight, int(size)).to(output.weight.device)
    draw_weights(draft, seed)
    for last in (draft.o, draft.down):  # at first the layer passes its input through
        nn.init.zeros_(last.weight)
    _pass_states(head)
    return draft.float()


def _readable(draft: DraftModel, network: Any, place: str) -> DraftModel:
    """The draft; ConfigError for one that training does not compute as it is."""
    output, shape, head = network.get_output_embeddings().weight, draft.shape, draft.head.config
    layer = shape.norm_before_residual or shape.norm_output or shape.output_bias or head.bias
    if layer or head.own_embedding or head.qk_norm or head.input_norm or head.rope_scaling:
        raise ConfigError(f"--start {place!r} is not a draft written by `keyhole train-head`")
    if draft.lm_head.weight.shape != output.shape or not torch.equal(draft.lm_head.weight, output):
        raise ConfigError(
            f"--start {place!r} is a draft with an output matrix of its own; only drafts that use "
            "the model's can be trained further"
        )
    return draft


@torch.no_grad()
def _pass_states(head: RetrievalHead) -> None:
    """Lets the features of a draft begin as the sum of the lowest and the highest state read.

    What the layer adds to is then in the coordinates that the output matrix reads. Where the
    widths of draft and target differ, the features begin as random mixtures.
    """
    config, count = head.config, len(head.config.feature_layers)
    if count and config.feature_size == config.hidden_size:
        head.fc.weight.mul_(0.3)
        parts = head.fc.weight.view(config.hidden_size, count, config.feature_size)
        for part in {0, count - 1}:
            parts[:, part].diagonal().add_(1)
