"""What a policy is: frozen settings and a few pure functions that say what a decode step reads.

A policy never remembers a sequence. What it keeps per page (`page_data`) belongs to the cache; what
one layer leaves for later layers of the same step (`Step.shared_selection`) ends with the step.
Prefill is exact whatever the policy, and layers with a sliding window of their own never ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import settle_types, short_repr
from keyhole.kernels import LowRank, ScoreRequest, Selection

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from keyhole.cache.kept_tokens import KeptTokenRows
    from keyhole.cache.retained_pages import RetainedPages
    from keyhole.kernels.composite.rope import Rotation

__all__ = ["LowRank", "Policy", "ScoreRequest", "Selection", "Step"]


@dataclass
class Step:
    """The decoding sequences of one step, as a policy sees them.

    lengths: int32 [B], tokens of each sequence, the newest included.
    pages: int32 [B], pages of each sequence.
    max_length: the largest of `lengths`, known without asking the device.
    page_table: int32 [B, M]; row b lists the physical pages of sequence b, the rest is 0.
    page_data: per layer, the side data that the policy declared, [P, ...] each.
    shared_selection: what `before_step`, or a layer of this step, left for the layers after it.
    weights: what layers left for `after_step`, scores as they came.
    host_lengths: int64 [B], `lengths` without asking the device. fresh: bool [B], sequences in
        their first decode step since they began to run.
    prompts: int32 [B], tokens that were there before that step; host_prompts: int64 [B], the same
        without asking the device.
    keys: per layer, its pages of keys [P, Hkv, page_size, D], wherever they are.
    rotation: rotation(layer) turns keys of a layer from any positions to others; in a model without
        RoPE it leaves them as they are.
    slots: int64 [B], the rows of the sequences in `state`, what the policy keeps per sequence.
    kept_tokens: what each layer has of the sequences, where layers dropped tokens of some prompts
        (stored documents); None: everything. What is not there is taken out of a selection.
    retained: what full-attention layers still read of the sequences, where the policy evicts;
        None: everything. What is chosen of it, and its scores, count its pages and tokens.
    head_weights: the retrieval head's weights of all tokens, float32 [B, heads, N], -1 for tokens
        that no layer has; computed when it is called. None without a head. head_token_bytes: the
        head's keys of a token.
    """

    lengths: Tensor
    pages: Tensor
    max_length: int
    page_table: Tensor
    page_size: int
    page_data: Sequence[Mapping[str, Tensor]]
    host_lengths: np.ndarray
    fresh: np.ndarray
    prompts: Tensor
    host_prompts: np.ndarray
    keys: Sequence[Tensor]
    rotation: Callable[[int], Rotation]
    slots: Tensor
    state: Mapping[str, Tensor]
    shared_selection: Selection | None = None
    weights: Tensor | None = None
    kept_tokens: KeptTokenRows | None = None
    retained: RetainedPages | None = None
    head_weights: Callable[[], Tensor] | None = None
    head_token_bytes: int = 0


@dataclass(frozen=True)
class PromptQueries:
    """The queries of prompt tokens of one sequence that one layer computes in one step.

    query: [T, Hq, D], rotated as the keys are; of tokens in a row, from `start` on.
    keys: the layer's pages of keys [P, Hkv, page_size, D], those of these tokens among them.
    data: the side data that the policy declared, [P, ...] each.
    pages: int64 [M], the pages of the sequence up to the last of these tokens.
    first: tokens from here on are computed for this sequence, those before it were known.
    """

    query: Tensor
    keys: Tensor
    data: Mapping[str, Tensor]
    pages: Tensor
    start: int
    first: int


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a decode step attends to. Subclass it, set `name`, write `select`."""

    name: ClassVar[str]
    #: True only if every step reads everything; generated tokens are then as good as a prefill.
    dense: ClassVar[bool] = False
    #: Whether the policy chooses by a retrieval head, which the engine then loads and runs.
    wants_head: ClassVar[bool] = False
    #: False if what is kept of a page depends on more than its tokens and those before them: every
    #: sequence then has pages of its own, copies where a prefix is known.
    shares_pages: ClassVar[bool] = True
    #: Whether it sees the queries of all tokens (`on_prompt_queries`, `on_queries`). Prompts whose
    #: keys were computed elsewhere (stored documents) are then refused.
    reads_queries: ClassVar[bool] = False
    #: True if a decode step can be recorded and repeated (a CUDA graph), else the reason why not.
    #: The hooks of a step then wait for nothing, make tensors of shapes that follow from the step's
    #: tensors and the settings alone, and go by what the host knows only as `capture_key` says.
    capturable: ClassVar[bool | str] = "the policy does not say that its steps can be recorded"

    #: Settings that what is kept of a page (`page_data`) depends on beside its shape. Requests that
    #: differ in none of them share prefixes; None: it may be any.
    page_settings: ClassVar[tuple[str, ...] | None] = None

    #: Whether its hooks read keys of pages in every step. That waits for the host where a layer
    #: is offloaded from a GPU; such steps are not recorded.
    reads_keys: ClassVar[bool] = False
    #: Whether a layer that scores reads only what `select` then returns for it. Otherwise a layer
    #: that scores attends to everything and is not asked to select.
    selects_by_own_scores: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # else @dataclass makes a longer one
            cls.__repr__ = short_repr  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        settle_types(self)

    @classmethod
    def as_published(cls, geometry: Geometry, token_budget: int) -> Self:
        """The policy as its paper or its authors' code has it, at this budget; not resolved.

        What the authors read beside their budget is included: `outside_budget` names it. Layers
        that a paper gives by number are scaled to the depth. Here: the defaults.
        """
        has_budget = "token_budget" in cls.__dataclass_fields__
        return cls(**{"token_budget": token_budget} if has_budget else {})

    def outside_budget(self) -> str:
        """What a sparse layer reads beside `token_budget`, in a few words; "" for nothing.

        Layers that read everything are not meant (`dense_layers`), nor what a policy keeps beside
        keys and values (`overhead_bytes`).
        """
        return ""

    def resolve(self, geometry: Geometry) -> Self:
        """This policy with every "auto" value settled for a model; the engine uses the result.

        Raises ConfigError for settings that this model or page size cannot have.
        """
        return self

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """The full-attention layers that read everything in every step, once settings are resolved.

        A control of this policy keeps the same layers dense, so that the two differ in nothing but
        how the tokens of the other layers are selected.
        """
        return geometry.full_attention if self.dense else ()

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """Layers that are read only through selections, so that they may be offloaded."""
        return () if self.dense else geometry.full_attention

    def selection_heads(self, geometry: Geometry) -> int | None:
        """Lists of a selection, where they may be more than KV heads (MLA); None: they are not."""
        return None

    def page_limit(self, prompt_pages: np.ndarray, page_size: int) -> np.ndarray | None:
        """Most pages that sequences may keep, those of their prompts too; None: all, for good.

        prompt_pages: int64 [n], at least 1 each; at least one more must be allowed. Whoever bounds
        them evicts, and says which pages go (`after_step`); prompts never do.
        """
        return None

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """Name and shape, per page, of what this policy keeps beside the keys of a layer."""
        return {}

    def sequence_state(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """Name and shape of what this policy keeps per sequence from step to step, int32.

        Old numbers stand there when a sequence begins: `Step.fresh` says when to write first. No
        numbers of `Step.page_table`: pages get new ones when the cache is packed, and what belongs
        to a page belongs in `page_data`, which moves with it.
        """
        return {}

    def sequence_numbers(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """The same for numbers of the keys' dtype; the names are others."""
        return {}

    def before_step(self, step: Step) -> None:
        """Called before layer 0 of every decode step; may leave `step.shared_selection`."""

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """Brings the side data of `pages` (int64 [n], `filled` tokens each) up to date, in place.

        Called in prefill and decode, for every layer with full attention, after keys were written.
        """

    def reusable(self, known: int, page_size: int) -> int:
        """How many of the known tokens at the start of a prompt need not be computed again.

        Whole pages, like `known`. For policies that do not share pages: of the others all are.
        """
        return known

    def on_prompt_queries(
        self, layer: int, queries: PromptQueries, options: Mapping[str, Any]
    ) -> None:
        """Sees queries of a prompt, where the policy `reads_queries`; may change side data.

        Called for every layer with full attention, after keys were written and `on_append`.
        options: scale, softcap and sinks, as `kernels.attend` takes them.
        """

    def on_queries(self, layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
        """The same for the newest tokens of decoding sequences, [B, Hq, D]."""

    def capture_key(self, step: Step) -> Hashable:
        """Which way the hooks of this step go by what the host knows of it, such as `max_length`.

        Two steps of the same key and shapes run the same operations: one is recorded, and
        repeated for the other. None: this step is not recorded, as its work is the host's choice.
        For policies that are `capturable`.
        """
        return ()

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """Scores that this layer must give; such a layer computes the scores of all its keys."""
        return ()

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Takes the scores asked for, float32 [B, H, n] each; may leave `step.shared_selection`.

        H is the number of KV heads for a request of "group_max", of query heads for "none", else 1.
        """

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """What this layer reads in this step; None is everything.

        query [B, Hq, D], rotated as the keys are.
        """
        raise AssertionError(f"{type(self).__name__} must define select")

    def after_step(self, step: Step) -> Tensor | None:
        """Called after the last layer of every decode step.

        Where sequences are due to give up a page before their next token (`RetainedPages.due`), a
        policy that evicts returns which one goes, int64 [B], counted after the pinned ones; only
        those of sequences that are due do.
        """
        return None

    def low_rank(self, layer: int, step: Step) -> LowRank | None:
        """What stands for some of the selected keys; None: all are read as they are.

        Asked after `select` if that chose tokens, not pages.
        """
        return None

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """Bytes read in this step besides keys and values, per sequence [B]; None is nothing."""
        return None
