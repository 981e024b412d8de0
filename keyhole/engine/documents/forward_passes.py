"""Forward passes over prompts whose pages are being filled, in parts that the pace allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.packing import Packing, send
from keyhole.cache.page_list import PageList
from keyhole.cache.pages import PageCache
from keyhole.engine.documents.filling import Context, Pace
from keyhole.engine.documents.loader import PlacedHead
from keyhole.models.batch import Batch, Chunk, ScatteredChunk
from keyhole.models.model import Model
from keyhole.models.modules.sequence_adapters import adapter_rows
from keyhole.policies.base import Policy


@dataclass(frozen=True, eq=False)
class FilledPrompt:
    """A prompt whose pages are being filled.

    tokens: int64 [N], all of its tokens. documents: int64 [T], positions of those of documents.
    """

    context: Context
    tokens: np.ndarray
    documents: np.ndarray
    pages: PageList


@dataclass(frozen=True, kw_only=True, eq=False)
class PassTokens:
    """The tokens of a pass, and what each layer reads.

    positions: int64 [T], ascending. seen: per layer int64 [n], positions, ascending; layers that
    read the same may have one array. packing: where layers have them, all that they have; None: at
    their positions. written: bool [L, T], on the CPU, where new keys and values are stored, those
    of documents by `update`; None: everywhere. update, queries, deviations: as in
    `ScatteredChunk`. last_layer: where the pass ends.
    """

    positions: np.ndarray
    seen: Sequence[np.ndarray]
    packing: Packing | None = None
    written: Tensor | None = None
    update: Callable[[Tensor, Tensor], Tensor] | None = None
    queries: Callable[[int, Tensor], None] | None = None
    deviations: dict[int, list[Tensor]] | None = None
    last_layer: int | None = None


class ForwardPasses:
    """Runs the model to write keys and values into a prompt's pages.

    chunk: the most tokens of a forward pass; `pace` may allow fewer.
    """

    def __init__(
        self, model: Model, cache: PageCache, policy: Policy, chunk: int, pace: Pace
    ) -> None:
        self._model = model
        self._cache = cache
        self._policy = policy
        self._chunk = chunk
        self._pace = pace

    def send(self, array: np.ndarray) -> Tensor:
        """Copies an array to the model's device."""
        return send(array, self._model.device)

    def dense(
        self, prompt: FilledPrompt, tokens: slice, head: PlacedHead | None
    ) -> Generator[str, None, None]:
        """Computes tokens, of which all earlier ones are in their pages, like those of any prompt.

        head: takes the features of the tokens.
        """
        table, end = self.send(prompt.pages.table()), tokens.start
        while end < tokens.stop:
            yield "forward"
            part = np.arange(end, end + self._size(tokens.stop - end))
            end += len(part)
            chunk = Chunk(slice(0, len(part)), int(part[0]), table[: self._num_pages(end)])
            self._forward(prompt, part, prompt.pages.slots(part), chunk, head)

    def run(
        self, prompt: FilledPrompt, tokens: PassTokens, head: PlacedHead | None = None
    ) -> Generator[str, None, None]:
        """Runs tokens in ascending parts; each part reads what earlier ones wrote."""
        layers, positions = _Layers(self, prompt, tokens), tokens.positions
        written = None if tokens.written is None else tokens.written.numpy()
        stored = None if tokens.update is None else np.isin(positions, prompt.documents)
        done = 0
        while done < len(positions):
            yield "forward"
            rows = slice(done, done + self._size(len(positions) - done))
            part = positions[rows]
            fresh, fused = self._written(written, stored, rows)
            seen, places = layers.part(part)
            chunk = ScatteredChunk(
                rows=slice(0, len(part)),
                positions=self.send(part),
                pages=layers.table,
                seen=seen,
                written=fresh,
                fused=fused,
                update=tokens.update,
                queries=tokens.queries,
                deviations=tokens.deviations,
                unbroken=int(part[-1] - part[0]) + 1 == len(part),
                start=int(part[0]),
                places=places,
            )
            # With places of their own, layers have no common slots.
            slots = prompt.pages.slots(part) if places is None else np.zeros(len(part), np.int64)
            self._forward(prompt, part, slots, chunk, head, tokens.last_layer)
            done += len(part)

    def _forward(
        self,
        prompt: FilledPrompt,
        part: np.ndarray,
        slots: np.ndarray,
        chunk: Chunk | ScatteredChunk,
        head: PlacedHead | None,
        last_layer: int | None = None,
    ) -> None:
        """Runs the model to write keys and values; its logits are not used."""
        begin = time.perf_counter()
        batch = Batch(
            cache=self._cache,
            policy=self._policy,
            slots=self.send(slots),
            newest=self.send(np.zeros(0, np.int64)),
            num_decode=0,
            step=None,
            chunks=[chunk],
            rewrite=chunk if isinstance(chunk, ScatteredChunk) else None,
            adapters=adapter_rows([(prompt.context.adapter, len(part))], self._model.device),
            last_layer=last_layer,
        )
        last = self.send(np.array([len(part) - 1]))
        ids = self.send(prompt.tokens[part])
        self._model.forward(ids, self.send(part), batch, last)
        if self._model.device.type == "cuda" and not self._pace.is_alone:
            # Other requests wait for what the device does, not for the launches.
            torch.cuda.current_stream(self._model.device).synchronize()
        self._pace.forward(len(part), time.perf_counter() - begin)
        if head is not None:
            head.take(part, batch)

    def _written(
        self, written: np.ndarray | None, stored: np.ndarray | None, part: slice
    ) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """`written` and `fused` of a chunk of these rows; stored: bool [T], rows to update.

        As row numbers, found here: a layer that looked for them would wait for the device.
        """
        if written is None:
            return None, None
        own = written[:, part]
        if stored is None:
            return (None if own.all() else self._by_layer(own)), None
        return self._by_layer(own & ~stored[part]), self._by_layer(own & stored[part])

    def _by_layer(self, marks: np.ndarray) -> list[Tensor]:
        """The marked rows of each layer, from bool [L, T]; sent at once."""
        return list(self.send(marks.nonzero()[1]).split(marks.sum(1).tolist()))

    def _size(self, left: int) -> int:
        """The tokens of the next forward pass: at most `chunk`, and as the pace allows."""
        return self._pace.size(left, self._chunk)

    def _num_pages(self, length: int) -> int:
        return -(-length // self._cache.page_size)


class _Layers:
    """What each layer reads for parts of a pass, on the device; once for layers that are alike.

    table: int64 [M], the pages of the prompt.
    """

    def __init__(self, passes: ForwardPasses, prompt: FilledPrompt, tokens: PassTokens) -> None:
        self.table = passes.send(prompt.pages.table())
        self._send = passes.send
        self._seen = tokens.seen
        self._places: dict[int, np.ndarray] = {}
        for layer, row in enumerate(tokens.seen):
            if id(row) not in self._places:
                packing = tokens.packing
                self._places[id(row)] = row if packing is None else packing.moves(layer)[1]
                assert len(self._places[id(row)]) == len(row), "a layer has what it sees"
        self._sent = {key: passes.send(places) for key, places in self._places.items()}
        self._packed = tokens.packing is not None

    def part(self, part: np.ndarray) -> tuple[list[Tensor], list[Tensor] | None]:
        """`seen` and `places` of a chunk of these positions.

        Later tokens are not written yet: their slots may hold anything.
        """
        rows = {id(row): row for row in self._seen}
        ends = {key: int(row.searchsorted(part[-1] + 1)) for key, row in rows.items()}
        seen = {key: self._sent[key][:end] for key, end in ends.items()}
        found = [seen[id(row)] for row in self._seen]
        if not self._packed:
            return found, None
        own = {
            key: self._send(self._places[key][row.searchsorted(part)]) for key, row in rows.items()
        }
        return found, [own[id(row)] for row in self._seen]
