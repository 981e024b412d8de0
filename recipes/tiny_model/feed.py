"""The training rows as a data set, so that other processes can write them ahead of time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.utils.data import DataLoader, Dataset

from keyhole.eval.tiny_language.curriculum import (
    Stage,
    TrainingBatch,
    num_rows,
    row_length,
    stage_at,
    training_batch,
)

_Place = tuple[int, int]
"""A step, and the number of tokens seen before it."""


@dataclass(frozen=True, kw_only=True)
class FeedRows(Dataset[TrainingBatch]):
    """What one process sees in every step."""

    seed: int
    rank: int
    num_ranks: int
    batch_scale: int

    def __getitem__(self, place: _Place) -> TrainingBatch:
        """Give the batch of a step."""
        step, tokens = place
        return training_batch(self.seed, step, self.rank, self._stage(tokens))

    def from_step(self, step: int, tokens: int, num_workers: int = 0) -> Iterator[TrainingBatch]:
        """Give the batches from a step on, for ever; the workers, if any, work ahead."""
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
        stage = stage_at(tokens)
        return replace(stage, batch=stage.batch * self.batch_scale)
