"""The interface of policies: frozen settings and pure functions that select what a step reads.

A policy holds no sequence state. Its data per page (`page_data`) belongs to the cache; a
selection that one layer shares with later layers of the same step (`Step.shared_selection`) ends
with the step. Prefill is exact under every policy, except under a prefill policy (`prefill/`).
Layers with their own sliding window do not call a policy.

The hooks, in the order in which the engine calls them; only `select` must be defined:

    once           resolve ──> page_data, sequence_state, token_scores: memory is planned
                           └─> dense_layers, offloadable, page_limit, selection_heads

    a new prompt   reusable: how many cached tokens are not computed again (`shares_pages` False)

    prompt chunk   each layer   keys are written ──> on_append ──> on_prompt_queries ──> attention
                                                                                        over all
    decode step    capture_key: may a captured step be replayed?
                   before_step
                   each layer   the new key is written ──> on_append ──> on_queries
                                needs_scores ──> none: select ──> attention over the selection
                                    │
                                    └──> some: attention over all, with scores ──> on_scores
                                               (over the selection that it returns, if any)
                   after_step ──> the pages to evict
                   overhead_bytes, for the statistics

Budgets: tokens that every step reads, and the fewest entries that hold a share of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import (
    MethodSettings,
    is_count,
    is_number,
    require,
    require_layers_of,
    setting,
)
from keyhole.errors import ConfigError
from keyhole.kernels import LowRank, ScoreRequest, Selection

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from keyhole.cache.kept_tokens import KeptTokenRows, RetainedPages
    from keyhole.kernels import Rotation
    from keyhole.retrieval.gate import SeerGate

__all__ = ["BestPages", "LowRank", "Policy", "ScoreRequest", "Selection", "SequenceData", "Step"]

Selects = Literal["per_layer", "by_scores", "positions"]


class SequenceData(NamedTuple):
    """The shape of data that a policy keeps of a sequence; int32, or of the keys' dtype."""

    shape: tuple[int, ...]
    like_keys: bool = False


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """Each decoding sequence's lengths and state.

    host_lengths: int64 [B], `Step.lengths` on the host. fresh: bool [B], sequences in their first
    decode step since they began to run. prompts: int32 [B], tokens before that step; host_prompts:
    int64 [B], the same on the host. slots: int64 [B], the rows of the sequences in `state`, the
    policy's data per sequence; host_slots: the same on the host.
    """

    host_lengths: np.ndarray
    fresh: np.ndarray
    prompts: Tensor
    host_prompts: np.ndarray
    slots: Tensor
    host_slots: np.ndarray
    state: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class CachedLayers:
    """What the cache holds, layer by layer.

    keys: pages of keys [P, Hkv, page_size, D], resident or offloaded. page_data: the side data that
    the policy declared, [P, ...] each. rotation: rotation(layer) shifts keys of a layer from any
    positions to others; in a model without RoPE it returns them unchanged.
    """

    keys: Sequence[Tensor]
    page_data: Sequence[Mapping[str, Tensor]]
    rotation: Callable[[int], Rotation]


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The weights of a retrieval head in this step.

    weights: computes them for all tokens, float32 [B, heads, N], -1 for tokens that no layer has.
    token_bytes: bytes of the head's keys per token.
    """

    weights: Callable[[], Tensor]
    token_bytes: int


@dataclass
class Step:
    """The decoding sequences of one step, as a policy sees them.

    lengths: int32 [B], tokens of each sequence, the newest included.
    pages: int32 [B], pages of each sequence.
    max_length: the largest of `lengths`, known without a device sync.
    page_table: int32 [B, M]; row b lists the physical pages of sequence b, padded with 0.
    shared_selection: the selection that `before_step`, or a layer of this step, sets for later
    layers.
    scores: those that layers collect for `after_step`.
    kept_tokens: the tokens that each layer has, where layers dropped tokens of some prompts (stored
    documents); None: all. Dropped tokens are removed from selections.
    retained: the pages that full-attention layers still read, where the policy evicts; None: all.
    Selections and scores are then indexed by retained pages and tokens.
    head: None without a retrieval head. gate: None unless the policy wants one.
    """

    lengths: Tensor
    pages: Tensor
    max_length: int
    page_table: Tensor
    page_size: int
    sequences: SequenceRows
    cache: CachedLayers
    shared_selection: Selection | None = None
    scores: Tensor | None = None
    kept_tokens: KeptTokenRows | None = None
    retained: RetainedPages | None = None
    head: HeadWeights | None = None
    gate: SeerGate | None = None

    def fits_in_pages(self, token_budget: int) -> bool:
        """Whether the whole pages of a budget hold every sequence."""
        return self.max_length <= token_budget // self.page_size * self.page_size


@dataclass(frozen=True)
class PromptQueries:
    """The queries of prompt tokens of one sequence that one layer computes in one step.

    query: [T, Hq, D], rotated as the keys are; consecutive tokens from `start`.
    keys: the layer's pages of keys [P, Hkv, page_size, D], these tokens included.
    data: the side data that the policy declared, [P, ...] each.
    pages: int64 [M], the pages of the sequence up to the last of these tokens.
    first: tokens from here on are computed for this sequence; earlier ones come from a cached
    prefix.
    slot: the row of the sequence in `state`, the policy's data per sequence.
    """

    query: Tensor
    keys: Tensor
    data: Mapping[str, Tensor]
    pages: Tensor
    start: int
    first: int
    slot: int
    state: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Policy(MethodSettings):
    """Selects what a decode step attends to. Subclass it, set `name`, define `select`."""

    name: ClassVar[str]
    #: True only if every step reads everything; generated tokens are then as exact as prefilled
    #: ones.
    dense: ClassVar[bool] = False
    #: Whether the policy selects by a retrieval head, which the engine then loads and runs.
    wants_head: ClassVar[bool] = False
    #: Whether it selects by the gate of SeerAttention-R, which the engine then loads.
    wants_gate: ClassVar[bool] = False
    #: Whether it shifts keys by their rotation; models with a rotation of another kind are refused.
    shifts_keys: ClassVar[bool] = False
    #: False if a page's data depends on more than its tokens and those before them: sequences then
    #: share no pages, and a cached prefix is copied.
    shares_pages: ClassVar[bool] = True
    #: True if a decode step can be captured in a CUDA graph, else the reason why not. The hooks of
    #: a step then never sync with the device, derive all shapes from the step's tensors and the
    #: settings, and branch on host values only as `capture_key` says.
    capturable: ClassVar[bool | str] = "the policy does not say that its steps can be recorded"

    #: True if consecutive tokens of a sequence can be rows of one step, each of its own length, and
    #: each selects what it would select in a step of its own; else the reason why not. The keys of
    #: all rows are written before the first one selects, and some may be overwritten later.
    speculative: ClassVar[bool | str] = "the policy does not say that it can check proposed tokens"

    #: Settings that change the values of `page_data`, not only its shape. Requests with equal
    #: values of these settings share prefixes; None: all settings.
    page_settings: ClassVar[tuple[str, ...] | None] = None

    #: How selections are made. "per_layer": each layer's depends on that layer alone. "by_scores":
    #: layers share what `on_scores` alone selects (`Step.shared_selection`), from one layer's
    #: scores of its own tokens. "positions": of positions, the same for every layer. Layers may
    #: then store different tokens of documents in one page (`cache/packing.py`): a selection by
    #: scores is translated for the other layers; of positions, each layer reads those that it has.
    #: None: in another way, so that every token of a document stays at its own position.
    selects: ClassVar[Selects | None] = None

    #: Whether its hooks read keys of pages in every step. With layers offloaded from a GPU this
    #: waits for the host; such steps are not captured.
    reads_keys: ClassVar[bool] = False

    #: Whether it has a hook that receives queries (`on_prompt_queries`, `on_queries`). Prompts of
    #: stored documents, whose queries are not stored, are then refused.
    reads_queries: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.reads_queries = (
            cls.on_prompt_queries is not Policy.on_prompt_queries
            or cls.on_queries is not Policy.on_queries
        )

    @classmethod
    def as_published(cls, geometry: Geometry, token_budget: int) -> Self:
        """The policy with its paper's or its authors' settings, at this budget; not resolved.

        Tokens that the authors read outside their budget are included: `outside_budget` names them.
        Layers that a paper gives by number are scaled to the depth. Here: the defaults.
        """
        has_budget = "token_budget" in cls.__dataclass_fields__
        return cls(**{"token_budget": token_budget} if has_budget else {})

    def outside_budget(self) -> str:
        """The tokens that a sparse layer reads outside `token_budget`, in a few words; "" for none.

        Excludes layers that read everything (`dense_layers`) and data besides keys and values
        (`overhead_bytes`).
        """
        return ""

    def resolve(self, geometry: Geometry) -> Self:
        """This policy with every "auto" value resolved for a model; the engine uses the result.

        Raises ConfigError for settings that this model or page size cannot have.
        """
        return self

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """The full-attention layers that read everything in every step, for a resolved policy.

        A control of this policy keeps the same layers dense, so that the two differ only in how the
        tokens of the other layers are selected. Here: those of its setting `full_layers`, if it has
        one.
        """
        if self.dense:
            return geometry.full_attention
        full_layers: tuple[int, ...] = getattr(self, "full_layers", ())
        return tuple(i for i in geometry.full_attention if i in full_layers)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """Layers that are read only through selections, and so can be offloaded.

        Here: all except the dense ones.
        """
        return self._sparse_layers(geometry)

    def _sparse_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """The full-attention layers that are not dense."""
        dense = self.dense_layers(geometry)
        return tuple(i for i in geometry.full_attention if i not in dense)

    def selection_heads(self, geometry: Geometry) -> int | None:
        """The number of lists of a selection, if it may exceed the KV heads (MLA); else None."""
        return None

    def token_scores(self, geometry: Geometry) -> int:
        """How many scores of each cached token exist at once in a decode step, for the plan.

        Here: none; scores of pages take little memory.
        """
        return 0

    def page_limit(self, prompt_pages: np.ndarray, page_size: int) -> np.ndarray | None:
        """The most pages that sequences may keep, prompts included; None: unlimited.

        prompt_pages: int64 [n], at least 1 each; the limit is at least one more. A policy that
        returns a limit names the pages to evict in `after_step`; prompt pages are never evicted.
        """
        return None

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of this policy's data per page and layer."""
        return {}

    def sequence_state(self, geometry: Geometry) -> dict[str, SequenceData]:
        """Name and shape of this policy's data per sequence, kept from step to step.

        The data is not cleared when a sequence begins: `Step.sequences.fresh` marks its first step.
        Do not store numbers of `Step.page_table`, which change when the cache is packed; data of a
        page belongs in `page_data`, which moves with it.
        """
        return {}

    def before_step(self, step: Step) -> None:
        """Called before layer 0 of every decode step; may set `step.shared_selection`."""

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """Brings the side data of `pages` (int64 [n], `filled` tokens each) up to date, in place.

        Called in prefill and decode, for every layer with full attention, after keys were written.
        """

    def reusable(self, known: int, page_size: int) -> int:
        """How many tokens of a cached prefix need not be computed again.

        Whole pages, like `known`. Only for policies that do not share pages; others reuse all of
        it.
        """
        return known

    def on_prompt_queries(
        self, layer: int, queries: PromptQueries, options: Mapping[str, Any]
    ) -> None:
        """Receives queries of a prompt; may change side data.

        Called for every layer with full attention, after keys were written and `on_append`.
        options: scale, softcap and sinks, as in `kernels.attend`.
        """

    def on_queries(self, layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
        """The same for the newest tokens of decoding sequences, [B, Hq, D]."""

    def capture_key(self, step: Step) -> Hashable:
        """A key for the branches that this step's hooks take on host values such as `max_length`.

        Two steps of the same key and shapes run the same operations: one is captured and replayed
        for the other. None: this step is not captured. For `capturable` policies. Here: whether the
        budget covers all sequences.
        """
        return self._reads_all(step)

    def _reads_all(self, step: Step) -> bool:
        """Whether the budget covers every sequence of the step, so that everything is read."""
        budget: int | None = getattr(self, "token_budget", None)
        return budget is not None and step.max_length <= budget

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """Scores that this layer must return; such a layer computes the scores of all its keys."""
        return ()

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> Selection | None:
        """Receives the requested scores, float32 [B, H, n] each; may set `step.shared_selection`.

        Returns what this layer then attends to; None: everything, which is read for the scores
        anyway. `select` is not called. H is the number of KV heads for a request of "group_max", of
        query heads for "none", else 1.
        """
        return None

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Selects what this layer reads in this step; None is everything.

        query [B, Hq, D], rotated as the keys are.
        """
        raise AssertionError(f"{type(self).__name__} must define select")

    def after_step(self, step: Step) -> Tensor | None:
        """Called after the last layer of every decode step.

        A policy that evicts returns the page to evict per sequence, int64 [B], counted after the
        pinned ones; only sequences that are due (`RetainedPages.due`) lose theirs.
        """
        return None

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """Bytes read in this step besides keys and values, per sequence [B]; None is nothing."""
        return None


@dataclass(frozen=True, kw_only=True)
class BestPages(Policy):
    """Reads the `token_budget / page_size` pages of highest `page_scores` in every layer."""

    selects: ClassVar[Selects | None] = "per_layer"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True
    page_settings: ClassVar[tuple[str, ...] | None] = ()
    token_budget: int = setting(1024, "tokens a step reads per KV head, in whole pages")
    full_layers: tuple[int, ...] = setting((), "layers that read everything")
    sink_size: int = setting(0, "first tokens that are always read, in whole pages")
    window_size: int | None = setting(
        None, "newest tokens always read, in whole pages; None: the newest page"
    )

    def page_scores(self, layer: int, query: Tensor, step: Step) -> Tensor:
        """The score of each page, [B, H, P], for a list of pages per KV head or query head."""
        raise AssertionError(f"{type(self).__name__} must define page_scores")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks that the budget holds a page, and the pages that are always read."""
        size = geometry.page_size
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        require_page(self.token_budget, size)
        whole = self.token_budget // size * size
        always_read(self.sink_size, self.window_size, whole, size)
        return self

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The best pages of each list, the newest page among them.

        Pages of documents whose tokens the layer dropped are left out.
        """
        if layer in self.full_layers or self._reads_all(step):
            return None
        scores, size = self.page_scores(layer, query, step), step.page_size
        if step.kept_tokens is not None:
            there = step.kept_tokens.pages(layer, scores.shape[2], size)
            scores = scores.masked_fill(~there[:, None], float("-inf"))
        first = whole_entries(self.sink_size, size)
        last = max(1, whole_entries(self.window_size, size))
        most = self.token_budget // size
        return kernels.top_k(scores, step.pages, most, size, first=first, last=last)

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """The data of all pages in all sparse layers."""
        if self._reads_all(step):
            return None
        layouts = [geometry.layers[i] for i in self._sparse_layers(geometry)]
        shapes = [self.page_data(layout, geometry.page_size) for layout in layouts]
        numbers = sum(math.prod(shape) for data in shapes for shape in data.values())
        return step.pages * (numbers * geometry.itemsize)

    def _reads_all(self, step: Step) -> bool:
        return step.fits_in_pages(self.token_budget)


def always_read(
    sink_size: int, window_size: int | None, token_budget: int, unit: int = 1
) -> tuple[int, int]:
    """How many first and newest entries of `unit` tokens hold `sink_size` and `window_size` tokens.

    Both are rounded up to whole entries; the newest one counts as full. A window of None is the
    newest entry, which every policy reads. ConfigError if a size is wrong, or if both together
    exceed token_budget.
    """
    require(is_count(sink_size, 0), "sink_size", sink_size, "at least 0")
    right = "at least 1, or None for the newest alone"
    require(window_size is None or is_count(window_size), "window_size", window_size, right)
    first, last = whole_entries(sink_size, unit), max(1, whole_entries(window_size, unit))
    whole = "" if unit == 1 else f" in whole pages of {unit}"
    least = (first + last) * unit
    newest = "the newest token" if window_size is None else f"window_size {window_size}"
    right = f"at least {least}: sink_size {sink_size} and {newest}{whole}"
    require(token_budget >= least, "token_budget", token_budget, right)
    return first, last


def require_page(token_budget: int, page_size: int) -> None:
    """ConfigError unless the budget holds a page."""
    right = f"at least one page of {page_size} tokens"
    require(is_count(token_budget, page_size), "token_budget", token_budget, right)


def require_shared_group(policy: str, share_group: bool) -> None:
    """ConfigError if layers are offloaded and each query head has its own selection."""
    if not share_group:
        raise ConfigError(
            f"policy {policy!r} with offload= needs share_group=True, because offloaded layers "
            "load one selection per KV head"
        )


def require_in_budget(policy: Policy, setting: str) -> None:
    """ConfigError if layers are offloaded and the policy reads outside its budget.

    setting: the setting that prevents this.
    """
    if policy.outside_budget():
        raise ConfigError(
            f"policy {policy.name!r} with offload= needs {setting}, because offloaded layers load "
            "at most token_budget tokens"
        )


def whole_entries(size: int | None, unit: int = 1) -> int:
    """Entries of `unit` tokens that hold `size` tokens; None is none."""
    return -(-(size or 0) // unit)


# Adaptive budgets: the fewest entries that hold a share of the scores, up to the budget.
#
# Ours. Attention is sometimes concentrated and sometimes spread out; a fixed budget is too large
# for the one and too small for the other. With `recall` a selection keeps its best entries until
# their scores sum to that share of all scores, between `min_budget` and `token_budget` tokens.
# Shapes stay those of `token_budget`: dropped entries become padding, which is not read.


def resolve_min_budget(
    recall: float | None, min_budget: int | None, token_budget: int, least: int, unit: int = 1
) -> int | None:
    """`min_budget` in tokens, by default a quarter of `token_budget`; None without `recall`.

    least: tokens that every selection has; unit: tokens of an entry. ConfigError names a bad value.
    """
    if recall is None:
        require(min_budget is None, "min_budget", min_budget, "None without recall")
        return None
    right = "a share above 0 and below 1, of the scores' mass"
    require(is_number(recall) and 0 < recall < 1, "recall", recall, right)
    if min_budget is None:
        return max(least, token_budget // 4 // unit * unit)
    right = f"from {least}, which every choice has, to token_budget {token_budget}"
    require(
        is_count(min_budget, least) and min_budget <= token_budget, "min_budget", min_budget, right
    )
    return min_budget // unit * unit
