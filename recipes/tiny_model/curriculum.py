"""The order of the training data: short rows and the simplest look-up first, long texts later.

The data of a step depends only on its number and the seed, so an interrupted run resumes with
exactly the rows it would have seen; worker processes can generate them ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from keyhole.eval.tiny_language.tasks import LONGEST_WALK, ROWS, Row, append_words
from keyhole.eval.tiny_language.world import BOS, NAMES, NUMBERS, OBJECTS, PAD, PLACES, WORD_IDS

MAX_POSITION = 16384


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the training; `until` counts tokens from the beginning."""

    until: float
    batch: int
    """Tokens per process and step, divided into rows of one length; more if one row is longer."""
    lengths: dict[int, float]
    """Row length -> weight."""
    mix: dict[str, float]
    """Kind of row -> weight."""
    reach: int
    """Positions jump ahead now and then, so that distances up to this are seen in short rows."""


SINGLE = (
    Stage(
        until=0.6e6,
        batch=2048,
        lengths={64: 1, 128: 1},
        mix={"stream": 2, "questions": 1, "walk": 1, "derive": 1},
        reach=512,
    ),
    Stage(
        until=3e6,
        batch=4096,
        lengths={128: 2, 256: 2, 512: 0.5},
        mix={"stream": 0.4, "questions": 3, "walk": 1, "derive": 1.5},
        reach=4096,
    ),
    Stage(
        until=6e6,
        batch=6144,
        lengths={128: 1, 256: 2, 512: 2, 1024: 1},
        mix={"stream": 0.2, "questions": 3, "walk": 1.2, "derive": 2},
        reach=12000,
    ),
    Stage(
        until=float("inf"),
        batch=6144,
        lengths={256: 0.8, 512: 2, 1024: 2.5, 2048: 2, 4096: 0.7, 8192: 0.2},
        mix={"stream": 0.1, "questions": 2.4, "walk": 1.6, "derive": 2},
        reach=15000,
    ),
)
"""One look-up after the other, each written out: from initial weights to the bundled model."""

HOPS = (
    Stage(
        until=3e6,
        batch=4096,
        lengths={64: 2, 96: 1, 128: 1},
        mix={"questions": 0.5, "direct": 0.2, "walk": 0.2, "walk2": 3, "derive": 0.3},
        reach=1024,
    ),
    Stage(
        until=5e6,
        batch=4096,
        lengths={64: 1, 128: 2, 256: 1},
        mix={"questions": 0.8, "direct": 0.4, "walk": 0.2, "walk2": 3, "walk3": 1, "derive": 0.4},
        reach=4096,
    ),
    Stage(
        until=8e6,
        batch=4096,
        lengths={128: 1, 256: 2, 512: 1},
        mix={"questions": 1.4, "direct": 0.6, "walk": 0.3, "walk2": 2, "walk3": 1.5, "derive": 0.7},
        reach=8192,
    ),
    Stage(
        until=float("inf"),
        batch=6144,
        lengths={256: 1.5, 512: 2, 1024: 2, 2048: 1.5, 4096: 0.6, 8192: 0.2},
        mix={"questions": 1.4, "direct": 0.6, "walk": 0.4, "walk2": 1.7, "walk3": 2, "derive": 1.2},
        reach=15000,
    ),
)
"""Several look-ups in one step, which must happen in one layer after another: from the bundled
model to one whose later layers look things up, too."""

LONG = (
    Stage(
        until=float("inf"),
        batch=6144,
        lengths={512: 1, 1024: 1.5, 2048: 2, 4096: 1.5, 8192: 0.6},
        mix={"questions": 1, "direct": 0.3, "walk": 0.3, "walk2": 2, "walk3": 1.5, "derive": 1.6},
        reach=15000,
    ),
)
"""What the end of `HOPS` knows, over longer texts: from a model that `HOPS` has trained."""

SCRATCH = (
    Stage(
        until=1.2e6,
        batch=2048,
        lengths={64: 1, 128: 1},
        mix={"stream": 2, "questions": 0.7, "walk": 1, "walk2": 0.5, "derive": 1},
        reach=512,
    ),
    Stage(
        until=4e6,
        batch=4096,
        lengths={64: 2, 96: 1, 128: 1},
        mix={"stream": 0.3, "questions": 1, "direct": 0.2, "walk": 0.5, "walk2": 2, "derive": 1},
        reach=1024,
    ),
    *(replace(stage, until=stage.until + 1e6) for stage in HOPS[1:-1]),
    replace(HOPS[-1], until=13e6),
    Stage(
        until=float("inf"),
        batch=6144,
        lengths={256: 1, 512: 1.5, 1024: 2, 2048: 2, 4096: 1.5, 8192: 0.3},
        mix={
            "questions": 1.2,
            "direct": 0.5,
            "walk": 0.4,
            "walk2": 1.5,
            "walk3": 1.2,
            "derive": 2,
        },
        reach=15000,
    ),
)
"""From weights without a look-up to a model that does several in one step."""

AGAIN = (
    replace(
        SCRATCH[-1],
        lengths={256: 1, 512: 1.5, 1024: 2, 2048: 2, 4096: 1},
        mix={"questions": 1.2, "direct": 0.3, "walk": 0.4, "walk2": 2, "derive": 2.5},
    ),
)
"""The end of `SCRATCH` once more, for a model that it has trained, and without `walk3`, which none
has learned. In float32, too, its rows need less than 4 GB."""

CURRICULA = {
    "single": SINGLE,
    "hops": HOPS,
    "long": LONG,
    "scratch": SCRATCH,
    "again": AGAIN,
}


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Rows of one length, ready for the network."""

    tokens: Tensor
    """`[B, T]`"""
    positions: Tensor
    """`[B, T]`, increasing, with gaps."""
    supervised: Tensor
    """Flat indices into `[B * T]` of the places after which a supervised token follows."""
    targets: Tensor
    """The token that follows each of them."""

    def to(self, device: torch.device) -> TrainingBatch:
        """Copy the batch to a device."""
        return TrainingBatch(
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            supervised=self.supervised.to(device),
            targets=self.targets.to(device),
        )


def stage_at(stages: Sequence[Stage], tokens: float) -> Stage:
    """Return the stage in which the token number `tokens` is seen."""
    return next(stage for stage in stages if tokens < stage.until)


def _choose(rng: Random, weights: dict[int, float]) -> int:
    return rng.choices(list(weights), list(weights.values()))[0]


def _positions(rng: Random, tokens: list[int], length: int, reach: int) -> list[int]:
    """Count from 0, in most rows with jumps at some sentence starts, `reach` at most in total."""
    gaps = [0] * length
    spare = min(max(reach, length), MAX_POSITION) - length
    if rng.random() < 0.7 and spare > 0:
        period = WORD_IDS["."]
        starts = [place + 1 for place, token in enumerate(tokens[:-1]) if token == period]
        chosen = rng.sample(starts, min(len(starts), rng.randint(1, 16)))
        total = rng.randint(0, spare)
        cuts = sorted(rng.randint(0, total) for _ in chosen)
        for place, low, high in zip(chosen, [0, *cuts], cuts, strict=False):
            gaps[place] = high - low
    positions, at = [], -1
    for gap in gaps:
        at += 1 + gap
        positions.append(at)
    return positions


def batch_of(rows: list[Row], length: int, rng: Random, reach: int) -> TrainingBatch:
    """Pad rows to `length` and turn them into tensors."""
    pad = WORD_IDS[PAD]
    tokens, positions, supervised = [], [], []
    for number, (words, marks) in enumerate(rows):
        ids = [WORD_IDS[word] for word in words]
        positions.append(_positions(rng, ids, length, reach))
        tokens.append(ids + [pad] * (length - len(ids)))
        supervised += [number * length + place - 1 for place, mark in enumerate(marks) if mark]
    table = torch.tensor(tokens)
    places = torch.tensor(supervised)
    return TrainingBatch(
        tokens=table,
        positions=torch.tensor(positions),
        supervised=places,
        targets=table.flatten()[places + 1],
    )


def row_length(seed: int, step: int, stage: Stage) -> int:
    """Return the length of all rows in a step, the same for all processes."""
    return _choose(Random(f"{seed}/{step}"), stage.lengths)


def num_rows(stage: Stage, length: int) -> int:
    """Return the number of rows of one process in one step."""
    return max(1, stage.batch // length)


def stream_row(rng: Random, length: int) -> Row:
    """Write facts; about half restate an earlier one, whose value is to be predicted.

    This is the simplest form of the look-up; the model learns it within a million words.
    """
    row: Row = ([BOS], [False])
    known: list[tuple[str, str, str]] = []
    names = rng.sample(NAMES, min(len(NAMES), max(4, length // 8)))
    values = {"keeps": NUMBERS, "owns": OBJECTS, "inhabits": PLACES, "serves": NAMES}
    repeat = rng.uniform(0.4, 0.7)
    while len(row[0]) + 4 <= length:
        if known and rng.random() < repeat:
            entity, verb, value = rng.choice(known)
            again = True
        else:
            entity, verb = rng.choice(names), rng.choice(list(values))
            old = [fact for fact in known if fact[:2] == (entity, verb)]
            value = old[0][2] if old else rng.choice(values[verb])
            again = bool(old)
        known.append((entity, verb, value))
        append_words(row, [entity, verb], False)
        append_words(row, [value], again)
        append_words(row, ["."], False)
    return row


KINDS: dict[str, Callable[[Random, int], Row]] = {"stream": stream_row, **ROWS}
"""Every kind of training row."""


def training_batch(seed: int, step: int, rank: int, stage: Stage) -> TrainingBatch:
    """Return the rows of one process in one step."""
    length = row_length(seed, step, stage)
    rng = Random(f"{seed}/{step}/{rank}")
    mix = {kind: w for kind, w in stage.mix.items() if kind != "walk" or length <= LONGEST_WALK}
    kinds = rng.choices(list(mix), list(mix.values()), k=num_rows(stage, length))
    rows = [KINDS[kind](rng, length) for kind in kinds]
    return batch_of(rows, length, rng, stage.reach)


_Place = tuple[int, int]
"""A step, and the number of tokens seen before it."""


@dataclass(frozen=True, kw_only=True)
class FeedRows(Dataset[TrainingBatch]):
    """The batches of one process, by step."""

    seed: int
    rank: int
    num_ranks: int
    batch_scale: float
    curriculum: str = "single"
    stretch: float = 1
    """Factor on the tokens of every stage."""

    def __getitem__(self, place: _Place) -> TrainingBatch:
        """Return the batch of a step."""
        step, tokens = place
        return training_batch(self.seed, step, self.rank, self._stage(tokens))

    def from_step(self, step: int, tokens: int, num_workers: int = 0) -> Iterator[TrainingBatch]:
        """Yield the batches from a step on, without end; workers, if any, prepare them ahead."""
        places = self._places(step, tokens)
        return iter(DataLoader(self, sampler=places, batch_size=None, num_workers=num_workers))

    def _places(self, step: int, tokens: int) -> Iterator[_Place]:
        while True:
            yield step, tokens
            stage = self._stage(tokens)
            length = row_length(self.seed, step, stage)
            tokens += num_rows(stage, length) * length * self.num_ranks
            step += 1

    def _stage(self, tokens: int) -> Stage:
        stage = stage_at(CURRICULA[self.curriculum], tokens / self.stretch)
        return replace(stage, batch=round(stage.batch * self.batch_scale))
