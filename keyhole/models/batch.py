"""One step's tokens, packed in a row, as the attention function sees them; the cache stand-in.

Row layout: first one token of each decoding sequence, then the prompt chunks one after the other.

`PassThrough` takes the role of transformers' cache: it returns the new keys and values unchanged
(and keeps MLA's latents), because the pages are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from keyhole.cache.pages import PageCache
from keyhole.cache.prefetch import Prefetcher
from keyhole.cache.recurrent_state import RecurrentStep
from keyhole.models.modules.sequence_rope import RopeRows
from keyhole.policies.base import Policy, Selection, Step
from keyhole.policies.prefill.base import PrefillPolicy


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens `start` .. of one sequence, at rows `rows` of the packed row.

    known: how many of the first ones already have all their side data (0 or 1). first: tokens from
    here on are computed for this sequence; earlier ones come from a cached prefix. slot: the row of
    the sequence in the policy's data per sequence (`Batch.state`). dense: reads everything under a
    prefill policy, too.
    """

    rows: slice
    start: int
    pages: Tensor  # int64 [M], all pages of the sequence up to the chunk's end
    known: int = 0
    first: int = 0
    slot: int = 0
    dense: bool = False

    def on(self, place: torch.device) -> Chunk:
        """The same for layers on another device."""
        return replace(self, pages=self.pages.to(place))


@dataclass
class ScatteredChunk:
    """Tokens of one sequence at any positions, over the tokens that each layer has.

    positions: int64 [T], ascending. seen: per layer int64 [n], the tokens to read, ascending and
    with `positions` among them; later tokens are not seen. written: per layer int64, the rows whose
    new keys and values are stored; fused: those where they are combined with the old ones by
    `update(new, old)` before; elsewhere the old ones stay and are read. None: written everywhere.
    queries: called by every layer with its number and its rotated queries [T, Hq, D].
    start, known, first, slot: as in `Chunk`, for consecutive tokens, as the runner's are.
    deviations: for the layers that are its keys, gets |new - old|^2 of keys and of values, summed
        over heads and numbers, float32 [2, T].
    unbroken: whether `positions` are start, start + 1, ...; a layer that also sees every token
    before them is then computed like any prompt.
    places: per layer int64 [T], where it has these tokens, if not at their positions; `seen` has
    places then. A layer's places ascend with the positions.
    """

    rows: slice
    positions: Tensor
    pages: Tensor  # int64 [M], all pages of the sequence
    seen: Sequence[Tensor]
    written: Sequence[Tensor] | None = None
    fused: Sequence[Tensor] | None = None
    update: Callable[[Tensor, Tensor], Tensor] | None = None
    queries: Callable[[int, Tensor], None] | None = None
    deviations: dict[int, list[Tensor]] | None = None
    unbroken: bool = False
    start: int = 0
    known: int = 0
    first: int = 0
    slot: int = 0
    places: Sequence[Tensor] | None = None

    @classmethod
    def after(
        cls, kept: Tensor, rows: slice, start: int, pages: Tensor, first: int, slot: int
    ) -> ScatteredChunk:
        """Prompt tokens from `start` on, after documents of which layers dropped some, or after
        evicted pages.

        kept: bool [L, N] on the CPU, which of the first N tokens each layer has. The others as in
        `Chunk`.
        """
        end, device = start + rows.stop - rows.start, pages.device
        later = torch.arange(kept.shape[1], end)
        return cls(
            rows=rows,
            positions=torch.arange(start, end, device=device),
            pages=pages,
            seen=[torch.cat([layer.nonzero()[:, 0], later]).to(device) for layer in kept],
            start=start,
            first=first,
            slot=slot,
        )

    def on(self, place: torch.device) -> ScatteredChunk:
        """The same for layers on another device; layers that share a tensor share its copy."""
        rows = [*self.seen, *(self.places or ())]
        sent = {id(row): row.to(place) for row in {id(row): row for row in rows}.values()}
        return replace(
            self,
            positions=self.positions.to(place),
            pages=self.pages.to(place),
            seen=[sent[id(row)] for row in self.seen],
            written=None if self.written is None else [own.to(place) for own in self.written],
            fused=None if self.fused is None else [own.to(place) for own in self.fused],
            places=None if self.places is None else [sent[id(row)] for row in self.places],
        )

    def places_in(self, layer: int) -> Tensor:
        """Where a layer has these tokens, int64 [T]."""
        return self.positions if self.places is None else self.places[layer]


class LastLayer(Exception):  # noqa: N818 - a signal, like StopIteration
    """Ends a forward pass after the attention of the last layer that is needed."""


#: Called by every layer with its number, its rotated queries [T, Hq, D] and attention's options.
Observer = Callable[[int, Tensor, dict[str, object]], None]


@dataclass
class Batch:
    """Everything that attention needs in one step. Travels through `model.forward` as a keyword.

    slots: int64 [T], where each token's key and value are written: page * page_size + offset.
    newest: int64 [n], of each page written in this step the row of its newest token.
    touched, filled: int64 [n], pages written in this step and tokens in them afterwards; None
    without side data per page.
    keeper: the policy whose `on_append` is called; None: `policy`.
    reads: what each layer read for the decoding sequences, appended as layers run.
    latents: MLA's new latents on their way from the cache hook to the attention function.
    prefetcher: where offloaded layers are read from; None if there are none.
    rewrite: the chunk of a step that recomputes stored tokens; such a step has no other chunk.
    observer: receives the queries of every layer. last_layer: where the forward pass may end.
    hidden: hidden states [T, width] at the input of the layers that `Model.watch` was asked for.
    recurrent: the states of the step's sequences; None for a model without recurrent layers.
    state: the policy's data per sequence, by name; empty where nothing of it is used.
    prefill: what the tokens of `chunks` read; None: everything. blocks_read: with it, by the
    first row of a chunk, the blocks of keys read, summed over layers, blocks of queries and heads.
    last_reads: by the first row of a chunk and the layer, what its last token read, if not all.
    rope: the rows of sequences beyond the length at which the model's RoPE changes.
    adapters: int64 [T], the number of each row's LoRA adapter, 0 for none; None: no row has one.
    views: with layers on several devices, the step as each sees it, the one in use last.
    """

    cache: PageCache
    policy: Policy
    slots: Tensor
    newest: Tensor
    num_decode: int
    step: Step | None
    chunks: list[Chunk | ScatteredChunk]
    touched: Tensor | None = None
    filled: Tensor | None = None
    reads: list[Selection | None] = field(default_factory=list)
    latents: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    prefetcher: Prefetcher | None = None
    rewrite: ScatteredChunk | None = None
    keeper: Policy | None = None
    observer: Observer | None = None
    last_layer: int | None = None
    recurrent: RecurrentStep | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    rope: Sequence[RopeRows] = ()
    adapters: Tensor | None = None
    prefill: PrefillPolicy | None = None
    blocks_read: dict[int, Tensor] = field(default_factory=dict)
    last_reads: dict[tuple[int, int], Selection] = field(default_factory=dict)
    views: list[tuple[torch.device, Batch]] = field(default_factory=list)

    def at(self, layer: int) -> Batch:
        """The step as a layer sees it: this object, or its copy on the layer's device.

        Copies what earlier layers stored for later ones. Called on the model's own batch.
        """
        devices = self.cache.layer_devices
        return self if devices is None else self._handed_to(devices[layer])

    def gather(self) -> None:
        """Moves what the layers stored back to the model's device; called after the last layer."""
        if self.cache.layer_devices is not None:
            home = self.cache.device
            self._handed_to(home)
            self.hidden.update({layer: x.to(home) for layer, x in self.hidden.items()})
            self.reads[:] = [_selection(one, home) for one in self.reads]

    def _handed_to(self, place: torch.device) -> Batch:
        """The batch of a device, which becomes the last of `views`, the one in use."""
        if not self.views:
            self.views.append((self.cache.device, self))
        before = self.views[-1][1]
        if self.views[-1][0] == place:
            return before
        known = next((pair for pair in self.views if pair[0] == place), None)
        if known is None:
            known = place, self._copied(place)
        else:
            self.views.remove(known)
        self.views.append(known)
        left, step = before.step, known[1].step
        if left is not None and step is not None:
            step.shared_selection = _selection(left.shared_selection, place)
            step.scores = None if left.scores is None else left.scores.to(place)
        return known[1]

    def _copied(self, place: torch.device) -> Batch:
        """A copy with its tensors on a device; the lists that layers append to are shared."""
        step, chunks = self.step, [chunk.on(place) for chunk in self.chunks]
        scattered = [chunk for chunk in chunks if isinstance(chunk, ScatteredChunk)]
        if step is not None:
            rows, kept = step.sequences, step.kept_tokens
            step = replace(
                step,
                lengths=step.lengths.to(place),
                pages=step.pages.to(place),
                page_table=step.page_table.to(place),
                sequences=replace(rows, prompts=rows.prompts.to(place), slots=rows.slots.to(place)),
                kept_tokens=None if kept is None else kept.on(place),
            )
        return replace(
            self,
            slots=self.slots.to(place),
            newest=self.newest.to(place),
            touched=None if self.touched is None else self.touched.to(place),
            filled=None if self.filled is None else self.filled.to(place),
            chunks=chunks,
            rewrite=None if self.rewrite is None else scattered[0],
            step=step,
        )

    def prefetch(self, after: int) -> None:
        """Starts loading the selection for layers after `after`, up to the next selection layer."""
        step = self.step
        assert step is not None
        if self.prefetcher is None or step.shared_selection is None:
            return
        layers = range(after + 1, len(self.cache.keys))
        end = next((layer for layer in layers if self._chooses(layer, step)), layers.stop)
        later = [layer for layer in self.prefetcher.layers if after < layer < end]
        if step.kept_tokens is None:
            self.prefetcher.start(step.shared_selection, later)
            return
        for layer in later:  # layers kept different tokens; dropped ones are not loaded
            self.prefetcher.start(step.kept_tokens.within(layer, step.shared_selection), [layer])

    def _chooses(self, layer: int, step: Step) -> bool:
        return layer in self.cache.geometry.full_attention and bool(
            self.policy.needs_scores(layer, step)
        )


class PassThrough:
    """Passed to transformers as its cache: returns its input.

    positions: int64 [T], of the tokens of the packed row.
    """

    is_compileable = False
    #: What transformers holds of each layer: nothing (Dory looks).
    layers: tuple[Any, ...] = ()

    def __init__(self, batch: Batch, positions: Tensor) -> None:
        self.batch = batch
        self.positions = positions

    @classmethod
    def among(cls, args: Iterable[Any], named: Mapping[str, Any]) -> Self | None:
        """The one among the arguments of a module, whatever its name there; None without any."""
        given = (*args, *named.values())
        return next((one for one in given if isinstance(one, cls)), None)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns key and value unchanged; for MLA they are the latents, kept for `attention`.

        key [1, 1, T, kv_lora_rank] and value [1, 1, T, qk_rope_head_dim] in that case.
        """
        geometry = self.batch.cache.geometry
        layer = geometry.number(layer_idx)
        if geometry.layers[layer].shared_values:
            latent, rope = key[0].transpose(0, 1), value[0].transpose(0, 1)
            self.batch.latents[layer] = latent, rope
        return key, value

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Zero: positions are passed with each step.

        A layer that asks for itself adds 0 .. T - 1 to the answer to get the positions: int64 [T].
        """
        if layer_idx is None:
            return 0
        return self.positions - torch.arange(len(self.positions), device=self.positions.device)

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Sizes for a mask that is never created, as none is registered under our name."""
        return int(query_length), 0

    def get_query_offset(self, *_: Any) -> int:
        """As `get_seq_length` of the model."""
        return 0


def _selection(given: Selection | None, place: torch.device) -> Selection | None:
    """A selection on a device."""
    if given is None:
        return None
    return replace(given, indices=given.indices.to(place), counts=given.counts.to(place))
