"""EAGLE-3: a draft model that proposes tokens, and whose attention can choose what a step reads.

Li et al., EAGLE-3 (2025, arXiv 2503.01840): see `retrieval/draft.py`. The draft's keys and values
are side data of the pages, as the retrieval head's keys are: they are shared, copied and freed with
them.

Before a step, every decoding sequence catches up: the draft runs over the tokens accepted since it
last ran, with the target's features of the positions before them, and overwrites what it had stored
for proposed tokens. From the newest token on it proposes greedily, each token from its own output
for the one before. The features of a step's rows are kept until it is known which rows were right,
so that nothing of a rejected token is ever read.

With a policy that selects by a retrieval head, the draft is the head. Each row then selects by the
draft's query for its token. Its input is what the draft read for that token: the target's features
for the newest one, its own outputs for proposed ones. All rows are projected together when the step
begins: the draft did not run over the last proposed token, and the weights are read once either
way.

In texts of more than `MAX_READ` tokens only the first proposal of a step reads everything. The ones
after it read the pages to which it gave the most attention, and the newest: tokens next to each
other look at much the same places. A proposal that this makes worse costs an accepted token.

Cost per step: the draft's layer for the accepted tokens and for each proposed one but the last,
attention to all keys for the first; for a policy that selects, queries, keys and scores of all
rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.pages import PageCache
from keyhole.config import EngineConfig
from keyhole.engine.decode_inputs import PageTable
from keyhole.engine.head_runner import HeadRunner
from keyhole.engine.sequence import Sequence
from keyhole.errors import ConfigError
from keyhole.kernels import PagedQuery, ScoreRequest
from keyhole.models.batch import Batch, Chunk
from keyhole.models.fast_layers import speed_up
from keyhole.models.model import Model
from keyhole.models.weights.packing import pack_layers
from keyhole.models.weights.weight_format import WeightFormat
from keyhole.policies.base import Step
from keyhole.policies.spe_context import choice_lists
from keyhole.retrieval.draft import DRAFT_FOLDER, DraftModel
from keyhole.retrieval.head import RetrievalHead

#: The most tokens that a proposal after the first of its step reads, in whole pages. What this does
#: to the acceptance was measured on "tiny-hops" (benchmarks/LOG.md).
MAX_READ = 4096


class DraftRunner(HeadRunner):
    """A draft over the pages of a cache; `groups` lists per step, as in `HeadRunner`.

    config: how many sequences run at once, and how many tokens are proposed for each in a step.
    """

    def __init__(
        self, draft: DraftModel, cache: PageCache, groups: int, config: EngineConfig
    ) -> None:
        super().__init__(draft.head, cache, groups)
        num_slots = config.max_batch
        self._draft = draft
        self._table = PageTable(num_slots)
        head, like = draft.head.config, draft.head.q.weight
        # Of each slot: the features of the rows of its last step, and what precedes those of the
        # next one: features of the target, and the draft's own outputs.
        self._features = like.new_zeros(num_slots, 1 + config.num_draft_tokens, head.hidden_size)
        self._inputs = torch.zeros_like(self._features)
        # Pages that can hold the proposed tokens and the one before, and pages read in all.
        self._newest = 1 + -(-config.num_draft_tokens // cache.page_size)
        self._most_pages = max(MAX_READ // cache.page_size, self._newest)
        # The position of the first of these features, on the host.
        self._first = np.zeros(num_slots, np.int64)

    def cut(self, sequence: Sequence) -> None:
        """The last pages of a sequence's list were removed. Between steps."""
        self._table.cut(sequence)

    @torch.no_grad()
    def propose(
        self, decodes: list[Sequence], wanted: Mapping[Sequence, int]
    ) -> dict[Sequence, list[int]]:
        """Proposed next tokens, as many for each sequence as wanted, which it has pages for.

        decodes: all sequences that decode in the coming step; every one of them catches up.
        """
        first = self._first[[s.slot for s in decodes]]
        newest = np.asarray([s.num_computed for s in decodes])
        counts = newest - first
        rows = [s for s, count in zip(decodes, counts.tolist(), strict=True) for _ in range(count)]
        ends = np.cumsum(counts)
        offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions = np.repeat(first, counts) + 1 + offsets
        tokens = [s.tokens[at] for s, at in zip(rows, positions.tolist(), strict=True)]
        slots = [s.slot for s in rows]
        hidden = self._features[self._send(np.asarray(slots)), self._send(offsets)]
        query = self._project(self._send(np.asarray(tokens)), rows, positions, hidden)
        last = self._send(ends - 1)
        query, hidden = query[last], hidden[last]
        self._inputs[self._send(np.asarray([s.slot for s in decodes])), 0] = hidden
        for sequence in decodes:
            sequence.num_settled = sequence.num_computed + 1
        drafting = [i for i, s in enumerate(decodes) if wanted.get(s)]
        if not drafting:
            return {}
        some = self._send(np.asarray(drafting))
        chosen = [decodes[i] for i in drafting]
        return self._continue(chosen, wanted, query[some], hidden[some])

    def _continue(
        self,
        sequences: list[Sequence],
        wanted: Mapping[Sequence, int],
        query: Tensor,
        hidden: Tensor,
    ) -> dict[Sequence, list[int]]:
        """Proposes tokens after the newest ones, of which query and input are given."""
        found: dict[Sequence, list[int]] = {s: [] for s in sequences}
        last = max(s.num_computed + wanted[s] for s in sequences) - 1
        table = self._send(self._table.rows(sequences, last // self._cache.page_size + 1))
        scores = None
        for ahead in range(max(wanted.values())):
            positions = np.asarray([s.num_computed for s in sequences]) + ahead
            mixed, scores = self._attend(query, table, positions, scores)
            tokens, features = self._draft.step(hidden, mixed)
            slots = self._send(np.asarray([s.slot for s in sequences]))
            self._inputs[slots, ahead + 1] = features
            for sequence, token in zip(sequences, tokens.tolist(), strict=True):
                found[sequence].append(token)
            more = [i for i, s in enumerate(sequences) if wanted[s] > ahead + 1]
            if not more:
                break
            some = self._send(np.asarray(more))
            sequences, hidden, table = [sequences[i] for i in more], features[some], table[some]
            scores = None if scores is None else scores[some]
            query = self._project(tokens[some], sequences, positions[more] + 1, hidden)
        return found

    def _attend(
        self, query: Tensor, table: Tensor, positions: np.ndarray, scores: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention [B, heads, D] of the newest tokens, at these positions, and scores of pages.

        scores: the first proposals', float32 [B, Hkv, M], by which the later ones choose the pages
        that each KV head reads; None for the first, which read everything, and in short texts.
        """
        keys, values = (self._cache.common[name] for name in ("head_keys", "draft_values"))
        size, scale = self._cache.page_size, self.head.scale
        lengths = self._send((positions + 1).astype(np.int32))
        paged = PagedQuery(query.to(keys.dtype), keys, values, table, lengths)
        if table.shape[1] <= self._most_pages:
            return kernels.attend(paged, scale=scale), None
        if scores is None:
            by_page = (ScoreRequest("group_max", size),)
            mixed, (scores,) = kernels.attend_and_score(paged, requests=by_page, scale=scale)
            return mixed, scores
        pages = self._send((positions // size + 1).astype(np.int32))
        chosen = kernels.top_k(scores, pages, self._most_pages, size, last=self._newest)
        return kernels.attend(paged, scale=scale, selection=chosen), scores

    def _project(
        self, token_ids: Tensor, rows: list[Sequence], positions: np.ndarray, hidden: Tensor
    ) -> Tensor:
        """Queries [T, heads, D] of tokens of these sequences; stores their keys and values."""
        size = self._cache.page_size
        entries = positions // size
        table = self._table.rows(rows, int(entries.max()) + 1)
        pages = table[np.arange(len(rows)), entries].astype(np.int64)
        query, key, value = self._draft.project(token_ids, self._send(positions), hidden)
        self._store(key, value, self._send(pages * size + positions % size))
        return query

    def _store(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        keys, values = (self._cache.common[name] for name in ("head_keys", "draft_values"))
        kernels.append(keys, values, key.to(keys.dtype), value.to(values.dtype), slots)

    def before(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> None:
        """The weights of each row; `propose` has run the draft over the tokens but the last."""
        if batch.policy.wants_head:
            super().before(token_ids, positions, batch)

    def _preceding(self, positions: Tensor, step: Step) -> Tensor:
        return self._inputs[step.sequences.slots, self._send(_offsets(step.sequences.host_slots))]

    @torch.no_grad()
    def after(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Stores prompt tokens, and keeps the features of the rows of decoding sequences."""
        fused = super().after(token_ids, positions, batch)
        assert fused is not None, "a draft reads features"
        if batch.step is not None:
            sequences = batch.step.sequences
            slots = sequences.host_slots
            offsets = _offsets(slots)
            self._features[sequences.slots, self._send(offsets)] = fused[: len(slots)]
            leads = offsets == 0
            self._first[slots[leads]] = sequences.host_lengths[leads] - 1
        for chunk in batch.chunks:
            assert isinstance(chunk, Chunk), "stored documents are refused with a draft model"
            self._features[chunk.slot, 0] = fused[chunk.rows.stop - 1]
            self._first[chunk.slot] = chunk.start + chunk.rows.stop - chunk.rows.start - 1
        return fused

    def _append(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, before: Tensor | None
    ) -> None:
        assert before is not None, "a draft reads features"
        if len(before):
            _, key, value = self._draft.project(token_ids, positions, before)
            self._store(key, value, slots)

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.head.q.weight.device)


def _offsets(slots: np.ndarray) -> np.ndarray:
    """Of rows [T] whose sequences have these slots: which row of its sequence each is."""
    begins = np.flatnonzero(np.diff(slots, prepend=-1))
    return np.arange(len(slots)) - np.repeat(begins, np.diff(begins, append=len(slots)))


def load_draft(folder: str | None, model: Model) -> DraftModel:
    """Loads a draft, a folder or hub id; None: the one next to the model's weights.

    ConfigError if there is none; ModelError if it is damaged or of another model.
    """
    place = folder or model.draft
    if place is None:
        raise ConfigError(
            f"draft='eagle3' needs a draft model, but {model.name!r} has no folder "
            f"{DRAFT_FOLDER!r}; name one as draft='eagle3:FOLDER'"
        )
    return speed_up_draft(DraftModel.from_eagle3(place, model.network), model.device)


def speed_up_draft(draft: DraftModel, device: torch.device) -> DraftModel:
    """The draft with the layers that are fast on its device.

    On a CPU, weights that only proposals depend on are packed in 4 bits: a proposal takes the time
    of reading them, and an error in them can cost an accepted token but never change one.
    """
    if device.type == "cpu":
        pack_layers(draft.proposing_layers, WeightFormat(bits=4, group_size=32))
    speed_up(draft, device)
    return draft


def make_head_runner(
    model: Model,
    cache: PageCache,
    head: RetrievalHead | None,
    draft: DraftModel | None,
    config: EngineConfig,
) -> HeadRunner | None:
    """Runs the retrieval head, and the draft model whose head it is; None without a head."""
    if head is None:
        return None
    model.watch(head.config.feature_layers)
    place = (cache, choice_lists(cache.geometry))
    return HeadRunner(head, *place) if draft is None else DraftRunner(draft, *place, config)
