"""One training run: state, steps, examinations and snapshots; in one or several processes.

With matrices this small, two processes of one thread each are faster than one process with two
threads, and less affected by a busy machine. A snapshot is written under another name and renamed,
so that there is always a complete one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from keyhole.eval.tiny_language.tasks import TASKS
from recipes.tiny_model.curriculum import FeedRows, TrainingBatch
from recipes.tiny_model.examination import examine
from recipes.tiny_model.initial import (
    MATCH_LAYERS,
    hold_share,
    initial_weights,
    shared_direction,
    with_repeated,
)
from recipes.tiny_model.network import (
    HIDDEN_SIZE,
    ROPE_THETA,
    llama_config,
    supervised_logits,
)
from recipes.tiny_model.optimizers import Optimizers, Schedule, planned
from recipes.tiny_model.steadiness import Steadiness


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among its peers."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def add_up(self, values: Tensor) -> None:
        """Replace `values` with the sum over all processes."""
        if self.count > 1:
            dist.all_reduce(values)


@contextmanager
def joined(rank: int, count: int, meeting_point: Path) -> Iterator[Ranks]:
    """Join the other processes through a new file, and leave together at the end.

    If a process ended while its peers still communicate with it, its own threads would abort it.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=count
    )
    try:
        yield Ranks(rank=rank, count=count)
        dist.barrier()
    finally:
        dist.destroy_process_group()


SNAPSHOT_FILE = "training.pt"


def save_snapshot(
    folder: Path,
    weights: dict[str, Tensor],
    optimizers: Optimizers,
    *,
    step: int,
    tokens: int,
    seed: int,
    schedule: Schedule,
    rope_theta: float,
    curriculum: str,
    stretch: float,
    steadiness: float = 0,
    adamw_rate: float | None = None,
) -> None:
    """Write everything that the next step depends on."""
    new = folder / f"{SNAPSHOT_FILE}.new"
    torch.save(
        {
            "weights": {name: weight.detach() for name, weight in weights.items()},
            "optimizers": optimizers.state(),
            "step": step,
            "tokens": tokens,
            "seed": seed,
            "schedule": asdict(schedule),
            "rope_theta": rope_theta,
            "curriculum": curriculum,
            "stretch": stretch,
            "steadiness": steadiness,
            "adamw_rate": adamw_rate,
        },
        new,
    )
    new.replace(folder / SNAPSHOT_FILE)


def load_snapshot(folder: Path) -> dict[str, Any]:
    """Read what `save` wrote, onto the CPU."""
    state: dict[str, Any] = torch.load(
        folder / SNAPSHOT_FILE, map_location="cpu", weights_only=True
    )
    return state


def config_of(state: dict[str, Any]) -> LlamaConfig:
    """Return the configuration of the model in a snapshot."""
    return _config_of_weights(state["weights"], state["rope_theta"])


def _config_of_weights(weights: dict[str, Tensor], rope_theta: float) -> LlamaConfig:
    hidden_size = weights["model.embed_tokens.weight"].shape[1]
    return llama_config(num_layers(weights), hidden_size, rope_theta)


def num_layers(weights: dict[str, Tensor]) -> int:
    """Count the layers that parameters belong to."""
    return sum(name.endswith("input_layernorm.weight") for name in weights)


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
    batch_scale: float = 1
    workers: int = 0
    start: Path | None = None
    repeat_layers: Sequence[int] = ()
    curriculum: str = "single"
    stretch: float = 1
    steadiness: float = 0
    adamw_rate: float | None = None
    dtype: str = "bfloat16"
    layers: int = 6
    hidden_size: int = HIDDEN_SIZE
    match_layers: Sequence[int] = MATCH_LAYERS
    seed: int = 0
    examine_every: int = 2_000_000
    examine_lengths: Sequence[int] = (512, 2048)
    examine_items: int = 16


class Trainer:
    """The state of a run between two steps."""

    def __init__(self, settings: TrainerSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self.device = torch.device(settings.device)
        if settings.resume:
            state = load_snapshot(settings.out)
            self.seed, self.step, self.tokens = state["seed"], state["step"], state["tokens"]
            self.curriculum, self.stretch = state["curriculum"], state["stretch"]
            # Snapshots of earlier versions have neither.
            self.steadiness, self.adamw_rate = state.get("steadiness", 0), state.get("adamw_rate")
            start = state["weights"]
            self.config = config_of(state)
        else:
            self.seed, self.step, self.tokens = settings.seed, 0, 0
            self.curriculum, self.stretch = settings.curriculum, settings.stretch
            self.steadiness, self.adamw_rate = settings.steadiness, settings.adamw_rate
            if settings.start is None:
                self.config = llama_config(settings.layers, settings.hidden_size)
                start = initial_weights(self.config, self.seed, settings.match_layers)
            else:
                start = load_file(settings.start / "model.safetensors")
                start = with_repeated(start, settings.repeat_layers)
                self.config = _config_of_weights(start, ROPE_THETA)
        self.weights = {k: v.to(self.device).requires_grad_() for k, v in start.items()}
        self._shared = shared_direction(self.config, self.seed).to(self.device)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.optimizers = Optimizers(self.weights, self.adamw_rate)
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
        """Yield the batches from the current step on; workers, if any, prepare them ahead."""
        rows = FeedRows(
            seed=self.seed,
            rank=self.ranks.rank,
            num_ranks=self.ranks.count,
            batch_scale=self.settings.batch_scale,
            curriculum=self.curriculum,
            stretch=self.stretch,
        )
        return rows.from_step(self.step, self.tokens, self.settings.workers)

    def train_step(self, batch: TrainingBatch, stop: bool) -> tuple[float, bool]:
        """Run one step; return the loss, and whether any process wants to stop."""
        batch = batch.to(self.device)
        seen = None
        if self.steadiness:
            seen = Steadiness(batch, Random(f"{self.seed}/{self.step}/{self.ranks.rank}"))
        logits = supervised_logits(self.weights, batch, self.config, self.dtype, seen)
        loss = F.cross_entropy(logits, batch.targets, reduction="sum")
        more = self.steadiness * len(batch.targets) * seen.loss() if seen is not None else 0.0
        (loss + more).backward()
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
        """Return the share of exact answers by length and task, over the items of all processes."""
        scores = {}
        for length in self.settings.examine_lengths:
            counts = examine(
                self.weights,
                self.config,
                length,
                num_items=self.settings.examine_items,
                dtype=self.dtype,
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
            save_snapshot(
                self.settings.out,
                self.weights,
                self.optimizers,
                step=self.step,
                tokens=self.tokens,
                seed=self.seed,
                schedule=self.schedule,
                rope_theta=self.config.rope_parameters["rope_theta"],
                curriculum=self.curriculum,
                stretch=self.stretch,
                steadiness=self.steadiness,
                adamw_rate=self.adamw_rate,
            )
