"""SpeContext: a small head, pruned from the draft model, selects tokens before the step begins.

SpeContext: Enabling Efficient Long-context Reasoning with Speculative Context Sparsity in LLMs
(2025), section 4. The head has its own layer of keys. Before layer 0 it scores all of them
with its query of the newest token; each KV head takes the tokens of highest weight over the query
heads of its group, and every layer reads the same selection.

Cost per step: the head's keys once, then `token_budget` keys and values per layer.

When to use it: with a retrieval head in the model's folder (`keyhole train-head`), above all with
offloaded layers: the selection is known before the step begins.

`per_head=False` is the coarser selection of section 4.2 (figure 5a): one list by the largest weight
over all heads.

With a draft model that proposes tokens (`draft="eagle3"`) that model is the head. The newest token
and each proposed one select for themselves, by the draft's query for it.

Differences from the paper: first tokens and a recent window are part of the budget; a selection may
be reused for several steps (`refresh_every`), with the tokens generated since added to it; a
selection may be smaller where few tokens hold the weight (`recall`, ours).
Over stored documents (as in SamKV) the weights cover the tokens that at least one layer has, and a
layer reads the selected tokens that it has. A token's key is computed from the features of the
token before it: from this prompt if it computed that token (a prefix, a separator, a recomputed
token), else from its document's own encoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_counts, require_layers_of, setting
from keyhole.errors import ConfigError
from keyhole.policies import base
from keyhole.policies.base import HeadWeights, Policy, Selection, Selects, SequenceData, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SpeContext(Policy):
    """The `token_budget` tokens that the retrieval head prefers, per KV head, for all layers."""

    name: ClassVar[str] = "spe_context"
    wants_head: ClassVar[bool] = True
    selects: ClassVar[Selects | None] = "positions"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head, sinks and window included")
    sink_size: int = setting(4, "first tokens that are always read")
    window_size: int | None = setting(
        None, "newest tokens always read; None: 64, or a quarter of a smaller budget"
    )
    refresh_every: int = setting(1, "steps that a selection is used for")
    recall: float | None = setting(
        None, "read fewer tokens where they hold this share of the head's weights; None: the budget"
    )
    min_budget: int | None = setting(
        None, "tokens a step reads at least, with recall; None: 1/4 of the budget"
    )
    full_layers: tuple[int, ...] = setting((), "layers that read everything")
    per_head: bool = setting(True, "a list per KV head; False: one list that all heads share")
    head: str | None = setting(None, "folder of the retrieval head; None: in the model's folder")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks that sinks, window and the tokens between refreshes fit into the budget."""
        require_counts(self, "token_budget")
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        require_counts(self, "sink_size", least=0)
        window = self.window_size
        if window is None:
            window = max(1, min(64, self.token_budget // 4))
        require(is_count(window), "window_size", window, "at least 1")
        require_counts(self, "refresh_every")
        least = self.sink_size + window + self.refresh_every - 1
        right = (
            f"at least {least}: sink_size {self.sink_size}, window_size {window} and the tokens "
            f"between refreshes (refresh_every {self.refresh_every})"
        )
        require(self.token_budget >= least, "token_budget", self.token_budget, right)
        choice_lists(geometry)
        minimum = base.resolve_min_budget(self.recall, self.min_budget, self.token_budget, least)
        return dataclasses.replace(self, window_size=window, min_budget=minimum)

    def selection_heads(self, geometry: Geometry) -> int | None:
        """A selection per query head over latents that all of them share."""
        latent = any(layout.shared_values for layout in geometry.layers)
        return choice_lists(geometry) if latent and self.per_head else None

    def sequence_state(self, geometry: Geometry) -> dict[str, SequenceData]:
        """The stored selection, its number of tokens, and the length at which it was made."""
        if self.refresh_every == 1:
            return {}
        heads = choice_lists(geometry) if self.per_head else 1
        shapes = {"chosen": (heads, self._at_refresh), "counts": (heads,), "length": ()}
        return {name: SequenceData(shape) for name, shape in shapes.items()}

    def before_step(self, step: Step) -> None:
        """Selects for all layers, by the head's weights of the newest token."""
        if step.max_length <= self._exact_up_to:
            return
        if self.refresh_every == 1:
            step.shared_selection = self._choose(step, step.lengths)
            return
        if self._due(step.sequences.host_lengths, step.sequences.host_prompts).any():
            # A sequence within the budget is read in full: its beginning is the stored selection,
            # the rest is "since".
            lengths = step.lengths
            made_at = lengths.where(
                lengths > self._exact_up_to, lengths.clamp(max=self._at_refresh)
            )
            due = self._due(step.lengths, step.sequences.prompts)
            kernels.keep(
                step.sequences.state,
                step.sequences.slots,
                due,
                self._choose(step, made_at),
                made_at,
            )
        step.shared_selection = kernels.kept(
            step.sequences.state, step.sequences.slots, step.lengths, self.refresh_every - 1
        )

    def token_scores(self, geometry: Geometry) -> int:
        """The weights of each list, and a list more: top-k's, or the maximum of all."""
        return choice_lists(geometry) + 1

    def capture_key(self, step: Step) -> Hashable:
        """Whether everything is read, and whether any sequence selects."""
        if step.max_length <= self._exact_up_to:
            return "all"
        return bool(self._due(step.sequences.host_lengths, step.sequences.host_prompts).any())

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The head's selection."""
        return None if layer in self.full_layers else step.shared_selection

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """The head's keys in steps that select; the mean per step where a selection is reused."""
        if step.max_length <= self._exact_up_to:
            return None
        there = (
            step.lengths if step.kept_tokens is None else step.kept_tokens.anywhere().counts[:, 0]
        )
        return there * (_head(step).token_bytes / self.refresh_every)

    @property
    def _exact_up_to(self) -> int:
        """The length up to which a sequence is read in full."""
        return self.token_budget if self.min_budget is None else self.min_budget

    @property
    def _at_refresh(self) -> int:
        """Tokens selected at once; the rest of the budget is for tokens until the refresh."""
        return self.token_budget - (self.refresh_every - 1)

    def _due(self, lengths: Any, prompts: Any) -> Any:
        """Which sequences select in this step, bool [B]. Host arrays or tensors."""
        first = lengths == prompts + 1
        # So far everything was read, and no selection may exist yet.
        first = first | (lengths <= self._exact_up_to + 1)
        return first | (lengths % self.refresh_every == 0)

    def _choose(self, step: Step, lengths: Tensor) -> Selection:
        weights, first, last = _head(step).weights(), self.sink_size, self.window_size or 1
        if not self.per_head:
            weights = weights.amax(1, keepdim=True)
        chosen = kernels.top_k(weights, lengths, self._at_refresh, 1, first=first, last=last)
        if self.recall is None:
            return chosen
        least = self.min_budget or 0
        return kernels.top_p(
            chosen, weights, lengths, self.recall, least=least, first=first, last=last
        )


def choice_lists(geometry: Geometry) -> int:
    """Lists of a selection: one per KV head, or per query head with MLA's shared latents.

    ConfigError if layers differ in this.
    """
    layouts = [geometry.layers[i] for i in geometry.full_attention]
    heads = {
        geometry.num_query_heads if layout.shared_values else layout.num_kv_heads
        for layout in layouts
    }
    if len(heads) > 1:
        raise ConfigError(
            f"spe_context makes one selection for all layers, but this model's layers have {heads} "
            "KV heads; use delta or quest"
        )
    return heads.pop() if heads else 1


def _head(step: Step) -> HeadWeights:
    assert step.head is not None, "the engine runs the head of a policy that wants one"
    return step.head
