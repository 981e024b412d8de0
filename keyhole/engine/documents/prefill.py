"""Fills a prompt's pages with stored documents, as its reuse method decides.

The method makes up to three decisions: which tokens the question reads first
(`question_context`), which to keep and recompute (`plan`), and a revision of it (`revise`) after a
probe layer that is computed for all tokens. Everything else of SamKV (arXiv 2508.11661, section 3)
is done here: stored keys are read block by block, RoPE is re-applied, and they are written into
pages; the prefix, the separators and the recomputed tokens are computed at their true positions;
the retrieval head's keys come last.
The engine computes the question itself over the result like any other prompt.

The work is divided into units, which `PageFiller` runs in the remaining time of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.packing import Packing, move_tokens
from keyhole.cache.page_list import PageList
from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import PrefixIndex
from keyhole.cache.unpaged_keys import UnpagedTokens
from keyhole.engine.documents.filled_pages import (
    FilledEntries,
    FilledPages,
    PageKey,
    fill_key,
    page_keys,
)
from keyhole.engine.documents.filling import (
    Context,
    Filled,
    Filling,
    OutOfPages,
    Pace,
    Reused,
    Units,
)
from keyhole.engine.documents.forward_passes import FilledPrompt, ForwardPasses, PassTokens
from keyhole.engine.documents.loader import Loader, PlacedHead
from keyhole.engine.documents.stored_rows import HotBlocks, PinnedRing
from keyhole.engine.head_runner import HeadRunner
from keyhole.engine.prompts.shared_prompt_cache import summarise
from keyhole.engine.sequence import Sequence as Request
from keyhole.errors import CapacityError
from keyhole.models.model import Model
from keyhole.models.positions import RopeShift
from keyhole.policies.base import Policy
from keyhole.reuse.base import PlacedDocument, RecomputePlan

_T = TypeVar("_T")

#: The units of one part of the work, as `Units`, and its result.
_Work = Generator[str, None, _T]


class DocumentPrefill:
    """Prepares prompts of stored documents for one engine.

    chunk: the most tokens of a forward pass; `pace` may allow fewer. prefix: the prefix cache,
    whose pages are evicted when pages are needed. hot_blocks: of documents that were read last.
    """

    def __init__(
        self,
        model: Model,
        cache: PageCache,
        policy: Policy,
        chunk: int,
        pace: Pace,
        head_runner: HeadRunner | None = None,
        prefix: PrefixIndex | None = None,
        hot_blocks: HotBlocks | None = None,
    ) -> None:
        self._model = model
        self.cache = cache
        self._policy = policy
        self._head_runner = head_runner
        self._pace = pace
        self.passes = ForwardPasses(model, cache, policy, chunk, pace)
        self._known = prefix
        self._rope_shift = RopeShift.for_documents(model)
        places = [cache.place(layer) for layer in range(len(cache.keys))]
        rings = {place: PinnedRing(place) for place in places}
        self._rings = [rings[place] for place in places]
        self._hot_blocks = hot_blocks or HotBlocks(0)
        # Data of a page may depend on more than what fills it.
        self.filled = FilledPages(cache) if policy.shares_pages else None

    def begin(self, request: Request) -> Filling:
        """The filling of a request's pages up to its question; no unit has run yet."""
        context = request.context
        assert context is not None, "a prompt without documents has nothing to fill"
        pages = PageList(self.cache, request.num_prompt)
        prompt = _Prompt(self, context, pages, np.asarray(request.prompt, np.int64))
        return Filling(pages, prompt.fill())

    def evict(self, count: int) -> None:
        """Evicts cached prefixes until `count` pages are free, if there are enough."""
        if self._known is not None:
            self._known.evict(count - self.cache.available)

    def summarise(self, pages: np.ndarray) -> Iterator[None]:
        """Computes the policy's data of physical pages, one layer per iteration."""
        return summarise(self.cache, self._policy, pages)

    @property
    def packs(self) -> bool:
        """Whether layers may store different tokens in one page."""
        return self._policy.selects is not None

    @property
    def fills_packed(self) -> bool:
        """Whether they may while documents are filled; not where a layer compares positions."""
        return self.packs and all(layout.window is None for layout in self.cache.geometry.layers)

    def loader(self, context: Context) -> Loader:
        """Reads a context's documents into the cache."""
        own = self._rope_shift, self._rings, self._hot_blocks, self._pace
        return Loader(context, self.cache, *own)

    def head(self, context: Context, tokens: np.ndarray) -> PlacedHead | None:
        """Writes the retrieval head's keys of a prompt; None if the policy selects without it."""
        if self._head_runner is None or not self._policy.wants_head:
            return None
        return PlacedHead(self._head_runner, self.cache, context, tokens, self._model.device)


class _Prompt:
    """The units that fill the pages of one prompt."""

    def __init__(
        self, owner: DocumentPrefill, context: Context, pages: PageList, tokens: np.ndarray
    ) -> None:
        self._owner = owner
        self._page_size = owner.cache.page_size
        self._context, self._reuse = context, context.reuse
        self._pages, self._tokens = pages, tokens
        self._documents = context.positions
        self._apart = context.separators
        self._loose = np.concatenate([np.arange(context.num_prefix), self._apart])
        # The question may begin in the middle of a page.
        self._always = np.append(self._loose, np.arange(max(0, context.end - 1), context.end))
        self._loader = owner.loader(context)
        self._head = owner.head(context, tokens)
        self._unpaged: UnpagedTokens | None = None
        self._filled = FilledPrompt(context, tokens, self._documents, pages)

    def fill(self) -> Units:
        """Everything up to the question. Raises OutOfPages."""
        placed = self._loader.placed()
        yield from self._need(self._always)
        prefix = slice(0, self._context.num_prefix)
        yield from self._owner.passes.dense(self._filled, prefix, self._head)
        plan = yield from self._plan(placed)
        try:
            packing = yield from self._share_or_write(plan)
        except BaseException:  # GeneratorExit, too: the request may be aborted in between
            if self._unpaged is not None:
                self._unpaged.release()
            raise
        kept = self._everywhere(plan.kept) if packing is None else packing.kept
        return Filled(self._context.end, kept, packing, self._unpaged, self._report(plan))

    def _plan(self, placed: list[PlacedDocument]) -> _Work[RecomputePlan]:
        """The decisions of the method."""
        query = None
        question_context = self._reuse.question_context(placed)
        if question_context is not None:
            query = yield from self._first_reading(question_context)
        yield "plan"
        plan = self._checked(self._reuse.plan(placed, query))
        if self._reuse.probe_layer is not None:
            deviation = yield from self._deviation(plan, self._reuse.probe_layer)
            yield "plan"
            plan = self._checked(self._reuse.revise(placed, plan, deviation))
        return plan

    def _share_or_write(self, plan: RecomputePlan) -> _Work[Packing | None]:
        """Takes the pages of a running question if they are the same, else writes them."""
        filled = self._owner.filled
        if filled is None:
            return (yield from self._write(plan))
        key = fill_key(self._context, self._tokens, plan)
        yield "pages"
        found = filled.find(key)  # its pages may be gone after another step
        if found is None:
            packing = yield from self._write(plan)
        else:
            packing = yield from self._adopt(found, plan)
        filled.remember(key, self._pages.listed(self._context.end), self._unpaged)
        return packing

    def _write(self, plan: RecomputePlan) -> _Work[Packing | None]:
        """Loads and computes what the plan names; releases all other pages.

        Returns where it is, if it is not at its positions. Layers have their tokens packed from the
        beginning where they can: then no page is held that they do not need in the end, except for
        tokens that a layer only reads while others are computed again.
        """
        again = plan.recomputed.any(0)
        needed = plan.kept | again
        filling = self._packing(needed) if self._owner.fills_packed else None
        packing = self._packing(plan.kept)
        is_final = _is_same(filling, packing)
        keys = yield from self._page_keys(plan, packing)
        if filling is not None:
            yield from self._pack(None, filling, self._present(needed))
        if is_final:
            self._take_stored(keys)
        if filling is None:
            places = self._documents[needed.any(0).numpy()]
            self._pages.keep(np.concatenate([self._always, places]))
            yield from self._need(places)
        stored = needed if self._reuse.fuses else needed & ~plan.recomputed
        yield from _each("load", self._loader.load(stored, self._pages, filling))
        yield from self._compute(plan, again, filling)
        if packing is None:
            places = self._documents[plan.kept.any(0).numpy()]
            self._pages.keep(np.concatenate([self._always, places]))
        elif not is_final:
            everything = torch.ones(packing.kept.shape, dtype=torch.bool)
            yield from self._pack(filling, packing, everything)
        if self._head is not None:
            yield from self._write_head(self._head, plan)
        yield from _each("summarise", self._owner.summarise(self._pages.present()))
        if self._owner.filled is not None:
            self._owner.filled.share(keys, self._pages)
        return packing

    def _take_stored(self, keys: list[PageKey]) -> None:
        """Takes pages of stored tokens from running questions, so that they are not loaded."""
        if self._owner.filled is not None:
            for key in self._owner.filled.take_stored(keys, self._pages):
                self._loader.mark(key.positions)

    def _page_keys(self, plan: RecomputePlan, packing: Packing | None) -> _Work[list[PageKey]]:
        """Keys of the pages that other questions may hold, too.

        There are none if a page has places that layers do not read, or keys of the retrieval head,
        which belong to other tokens.
        """
        is_partial = packing is None and not plan.kept.all()
        if self._owner.filled is None or self._head is not None or is_partial:
            return []
        size, found = self._page_size, []
        keys = page_keys(self._context, self._tokens, plan, packing, size)
        while some := list(islice(keys, _KEYS)):
            yield "keys"
            found += some
        return found

    def _write_head(self, head: PlacedHead, plan: RecomputePlan) -> _Work[None]:
        """Writes the retrieval head's keys of tokens that any layer keeps."""
        yield "pages"
        rows = np.union1d(self._loose, self._documents[plan.kept.any(0).numpy()])
        pages = len(rows) // self._page_size + 1
        self._unpaged = unpaged = self._taken(lambda: head.hold(rows, self._pages), pages)
        yield from _each("head", head.write(rows, self._pages, unpaged))

    def _adopt(self, found: FilledEntries, plan: RecomputePlan) -> _Work[Packing | None]:
        """Takes the pages of a running question over the same tokens, as `_write` fills them."""
        end = self._context.end
        self._taken(lambda: self._pages.adopt(found.entries, end), 1)
        self._unpaged = None if found.unpaged is None else found.unpaged.share()
        if end % self._page_size:
            last = self._pages.slots(np.array([end - 1])) // self._page_size
            if found.last is not None:
                self._owner.cache.common["head_features"][int(last[0])] = found.last
            yield from _each("summarise", self._owner.summarise(last))
        return self._packing(plan.kept)

    def _packing(self, kept: Tensor) -> Packing | None:
        """Where layers have these tokens, bool [L, T], if not at their positions."""
        everywhere = self._everywhere(kept)
        if everywhere is None or not self._owner.packs:
            return None
        return Packing.of(everywhere, self._owner.cache.geometry)

    def _pack(self, old: Packing | None, new: Packing, there: Tensor) -> _Work[None]:
        """Moves what each layer has to its places, and releases the other pages.

        old, there: as in `move_tokens`.
        """
        yield "pages"
        before = self._owner.passes.send(self._pages.table())
        places = np.append(np.flatnonzero(new.kept.any(0).numpy()), self._context.end - 1)
        self._taken(lambda: self._pages.move(places), len(places) // self._page_size + 1)
        yield from _each("clear", self._pages.clear())
        moved = move_tokens(self._owner.cache, self._pages, before, old, new, there)
        yield from _each("pack", moved)
        self._pages.settle()

    def _present(self, needed: Tensor) -> Tensor:
        """Bool [L, end]: the needed tokens whose keys and values are in the pages already."""
        there = torch.zeros(len(needed), self._context.end, dtype=torch.bool)
        there[:, : self._context.num_prefix] = True
        self._context.spread(needed & self._loader.present, there)
        return there

    def _need(self, positions: np.ndarray) -> _Work[None]:
        """Allocates pages for these positions; evicts cached prefixes if needed."""
        yield "pages"
        self._taken(lambda: self._pages.need(positions), self._pages.num_missing(positions))
        yield from _each("clear", self._pages.clear())

    def _taken(self, take: Callable[[], _T | None], num_pages: int) -> _T:
        """What `take` returns; cached prefixes are evicted for it if it has too few pages at first.

        num_pages: the most that it takes. OutOfPages if they are still too few, with an error as
        its cause if the system has no memory for more.
        """
        cause = None
        try:
            found = take()
            if not found:
                self._owner.evict(num_pages)
                found = take()
        except CapacityError as error:
            cause = error
            with self._owner.cache.without_growth():
                self._owner.evict(num_pages)
                found = take()
        if not found:
            raise OutOfPages from cause
        return found

    def _everywhere(self, kept: Tensor) -> Tensor | None:
        """Bool [L, end]: kept tokens of documents, bool [L, T], and all others; None: all."""
        if kept.all():
            return None
        everywhere = torch.ones(len(kept), self._context.end, dtype=torch.bool)
        self._context.spread(kept, everywhere)
        return everywhere

    def _report(self, plan: RecomputePlan) -> Reused:
        """What was kept, computed and read."""
        # The slots of a layer in the pages before the question, less prefix and separators.
        before = len(self._pages.present()) * self._page_size - -self._context.end % self._page_size
        held, read = before - len(self._loose), self._loader.bytes_read
        return Reused.of(self._context.documents, plan, num_held=held, bytes_read=read)

    def _checked(self, plan: RecomputePlan) -> RecomputePlan:
        kept, again = plan.kept.cpu(), plan.recomputed.cpu()
        assert not (again & ~kept).any(), "a token that is computed again must be kept"
        return RecomputePlan(kept, again, plan.shares)

    def _first_reading(self, question_context: Tensor) -> _Work[list[Tensor]]:
        """The question's queries per layer over what `question_context` names."""
        first = question_context.cpu()
        question = np.arange(self._context.end, len(self._tokens))
        yield from self._need(np.concatenate([self._documents[first.numpy()], question]))
        layers = self._loader.num_layers
        everywhere = first.expand(layers, -1)
        yield from _each("load", self._loader.load(everywhere, self._pages))
        seen = self._seen(everywhere, np.zeros(0, np.int64))
        yield from self._run(PassTokens(positions=self._apart, seen=seen))
        parts: list[list[Tensor]] = [[] for _ in range(layers)]

        def note(layer: int, query: Tensor) -> None:
            parts[layer].append(query.float() if self._reuse.extremes else query.float().sum(0))

        seen = self._seen(everywhere, question)
        yield from self._run(PassTokens(positions=question, seen=seen, queries=note))
        if self._reuse.extremes:
            return _to_cpu([torch.cat(part) for part in parts])
        return _to_cpu([torch.stack(part).sum(0) / len(question) for part in parts])

    def _deviation(self, plan: RecomputePlan, layer: int) -> _Work[Tensor]:
        """Computes the first layers for all tokens that the plan writes there."""
        again = plan.recomputed[: layer + 1].all(0)
        places = self._documents[again.numpy()]
        yield from self._need(places)
        stored = torch.zeros_like(plan.kept)
        stored[layer] = again
        yield from _each("load", self._loader.load(stored, self._pages))
        rows = np.union1d(places, self._apart)
        deviations: dict[int, list[Tensor]] = {layer: []}
        seen = self._seen(again.expand(len(plan.kept), -1), self._apart)
        tokens = PassTokens(positions=rows, seen=seen, deviations=deviations, last_layer=layer)
        yield from self._run(tokens)
        self._loader.present[: layer + 1, again] = True
        found = torch.zeros(2, len(again))
        documents = np.searchsorted(rows, places)
        found[:, again] = torch.cat(deviations[layer], 1).cpu()[:, torch.from_numpy(documents)]
        return found

    def _compute(self, plan: RecomputePlan, again: Tensor, packing: Packing | None) -> _Work[None]:
        """Computes the recomputed tokens and the separators between the documents."""
        if plan.recomputed.all() and not self._reuse.fuses:
            # Nothing is stored that another token reads: these are tokens of an ordinary prompt.
            rest = slice(self._context.num_prefix, self._context.end)
            yield from self._owner.passes.dense(self._filled, rest, self._head)
            return
        places = self._documents[again.numpy()]
        rows = np.union1d(places, self._apart)
        if not len(rows):
            return
        written = torch.ones(len(plan.kept), len(rows), dtype=torch.bool)
        column = torch.from_numpy(np.searchsorted(rows, places))
        written[:, column] = plan.recomputed[:, again]
        tokens = PassTokens(
            positions=rows,
            seen=self._seen(plan.kept | again, self._apart),
            packing=packing,
            written=written,
            update=self._reuse.fuse if self._reuse.fuses else None,
        )
        yield from self._run(tokens, self._head)

    def _run(self, tokens: PassTokens, head: PlacedHead | None = None) -> _Work[None]:
        yield from self._owner.passes.run(self._filled, tokens, head)

    def _seen(self, kept: Tensor, more: np.ndarray) -> list[np.ndarray]:
        """Per layer the positions that can be read: loose tokens, kept ones of documents, more.

        A layer that reads what the layer before it reads has the same array.
        """
        loose = np.union1d(self._loose, more)
        found: list[np.ndarray] = []
        rows = kept.numpy()
        for layer, row in enumerate(rows):
            if layer and np.array_equal(row, rows[layer - 1]):
                found.append(found[-1])
            else:
                found.append(np.union1d(loose, self._documents[row]))
        return found


def _is_same(one: Packing | None, other: Packing | None) -> bool:
    """Whether two packings of one prompt keep the same tokens."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.kept, other.kept)


def _to_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Copies tensors to the CPU; those of one device in one copy, so that the host waits once."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [tensor.cpu() for tensor in tensors]
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _each(kind: str, pieces: Iterator[None]) -> _Work[None]:
    """The steps of an iteration as units of a kind."""
    while True:
        yield kind
        if next(pieces, _DONE) is _DONE:
            return


#: Page keys that one unit computes.
_KEYS = 64
#: Marks the end of an iterator.
_DONE = object()
