"""One training run between two steps: its state, a step, an examination, a snapshot."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from keyhole.eval.tiny_language.curriculum import TrainingBatch
from keyhole.eval.tiny_language.tasks import TASKS
from recipes.tiny_model import snapshot
from recipes.tiny_model.examination import examine
from recipes.tiny_model.feed import FeedRows
from recipes.tiny_model.initial import initial_weights
from recipes.tiny_model.network import supervised_logits
from recipes.tiny_model.optimizers import Optimizers
from recipes.tiny_model.ranks import Ranks
from recipes.tiny_model.schedule import Schedule, planned
from recipes.tiny_model.shape import llama_config
from recipes.tiny_model.shared import hold_share, shared_direction


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """One run; see `--help`."""

    out: Path
    tokens: int | None = None
    minutes: float | None = None
    cooldown: int | None = None
    resume: bool = False
    ranks: int = 1
    device: str = "cpu"
    batch_scale: int = 1
    workers: int = 0
    layers: int = 6
    seed: int = 0
    examine_every: int = 2_000_000
    examine_lengths: tuple[int, ...] = (512, 2048)
    examine_items: int = 16


class Trainer:
    """The state of a run between two steps, and how to take one."""

    def __init__(self, settings: TrainerSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self.device = torch.device(settings.device)
        if settings.resume:
            state = snapshot.load(settings.out)
            self.seed, self.step, self.tokens = state["seed"], state["step"], state["tokens"]
            start = state["weights"]
            self.config = snapshot.config_of(state)
        else:
            self.seed, self.step, self.tokens = settings.seed, 0, 0
            self.config = llama_config(settings.layers)
            start = initial_weights(self.config, self.seed)
        self.weights = {k: v.to(self.device).requires_grad_() for k, v in start.items()}
        self._shared = shared_direction(self.config, self.seed).to(self.device)
        self.optimizers = Optimizers(self.weights)
        if settings.resume:
            self.optimizers.restore(state["optimizers"])
            self.schedule = self._resumed_schedule(Schedule(**state["schedule"]))
        else:
            self.schedule = planned(settings.tokens or 25_000_000)

    def _resumed_schedule(self, schedule: Schedule) -> Schedule:
        if self.settings.cooldown:
            return schedule.cooled_down(self.tokens, self.settings.cooldown)
        if self.settings.tokens and self.settings.tokens != schedule.total:
            return schedule.stretched(self.tokens, self.settings.tokens)
        return schedule

    def batches(self) -> Iterator[TrainingBatch]:
        """Give the batches from the present step on; workers, if any, prepare them ahead."""
        rows = FeedRows(
            seed=self.seed,
            rank=self.ranks.rank,
            num_ranks=self.ranks.count,
            batch_scale=self.settings.batch_scale,
        )
        return rows.from_step(self.step, self.tokens, self.settings.workers)

    def train_step(self, batch: TrainingBatch, stop: bool) -> tuple[float, bool]:
        """Take one step; give the loss, and whether any process wants to stop."""
        batch = batch.to(self.device)
        logits = supervised_logits(self.weights, batch, self.config, torch.bfloat16)
        loss = F.cross_entropy(logits, batch.targets, reduction="sum")
        loss.backward()
        grads = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        shared = torch.stack(
            [loss.detach(), loss.new_tensor(len(batch.targets)), loss.new_tensor(stop)]
        )
        everything = torch.cat([shared, *(grad.flatten() for grad in grads)])
        self.ranks.add_up(everything)
        total_loss, total_targets, stops = everything[:3].tolist()
        parts = everything[3:].split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad) / total_targets)
        self.optimizers.step(self.schedule.factor(self.tokens))
        hold_share(self.weights["model.embed_tokens.weight"], self._shared)
        self.step += 1
        self.tokens += batch.tokens.numel() * self.ranks.count
        return total_loss / total_targets, stops > 0

    def examine(self) -> dict[str, dict[str, float]]:
        """Give the share of exact answers by length and task, over the items of all processes."""
        scores = {}
        for length in self.settings.examine_lengths:
            counts = examine(
                self.weights,
                self.config,
                length,
                num_items=self.settings.examine_items,
                dtype=torch.bfloat16,
                part=self.ranks.rank,
                parts=self.ranks.count,
            )
            self.ranks.add_up(counts)
            shares = (counts / self.settings.examine_items).tolist()
            scores[str(length)] = dict(zip(TASKS, (round(s, 3) for s in shares), strict=True))
        return scores

    def save(self) -> None:
        """Write the snapshot."""
        if self.ranks.leads:
            snapshot.save(
                self.settings.out,
                self.weights,
                self.optimizers,
                step=self.step,
                tokens=self.tokens,
                seed=self.seed,
                schedule=self.schedule,
                rope_theta=self.config.rope_parameters["rope_theta"],
            )
