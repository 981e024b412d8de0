"""RaaS: evicts pages that no head has attended to for long; keeps the prompt.

Hu et al., RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning (2025,
arXiv 2502.11147), section 3: in a long derivation a step matters until its conclusion is drawn, and
not afterwards. Every page has a stamp, set to the current step when any head's attention to it
exceeds `alpha`; where a new page would exceed `token_budget`, the page with the oldest stamp is
evicted for good (ties: the earlier page). The prompt is kept, outside the budget or, with
`prompt_in_budget`, inside it; a prompt that fills the budget then leaves one page for generated
tokens. Every layer attends to all remaining pages.

Cost per step and layer: the prompt, and `token_budget` keys and values. Memory is bounded in the
same way.

When to use it: for long derivations from short prompts where memory must stay bounded; evicted
tokens are lost.

Differences (theirs | ours | effect measured):
- the prompt stays, outside the budget | the same; `prompt_in_budget` counts it | at a budget of
  256: outside it 6.2 % (2.1 to 16.8) with 1,484 KiB read per step, counted 0 % (0.0 to 7.4) with
  937 KiB, as one page is left for generated tokens
- `alpha` of 1e-4 | the same | 0.01 gives the same answers, 6.2 % (2.1 to 16.8) with 1,484 KiB; 0.1
  gives others, 8.3 % (3.3 to 19.6) with 1,484 KiB, and so does 0.5, 4.2 % (1.2 to 14.0) with 1,483
  KiB: the intervals overlap
- a page's attention is estimated from a representative key | it is the largest weight of any of its
  tokens, as the layer computed it, so that no representative key is stored | not measured: theirs
  is not published as code
- each layer evicts its own pages | one stamp serves all layers, renewed by any of them, and a
  page leaves all layers at once, as it is one piece of memory: no layer can be kept dense | not
  measured: as above
- every layer has full attention | layers with their own sliding window are unchanged: pages in
  their window are freed once they leave it | not measured: their models have none
- open: a page that is being written; a sequence that is pre-empted | it is stamped; it is replayed
  step by step and evicts again what it had evicted | none
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_number, require, setting
from keyhole.policies import base
from keyhole.policies.base import ScoreRequest, Selection, Selects, SequenceData, Step
from keyhole.policies.evicting.base import PageBudget

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RaaS(PageBudget):
    """The prompt, and the generated pages that a head attended to last; others are evicted."""

    name: ClassVar[str] = "raas"
    selects: ClassVar[Selects | None] = "per_layer"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = (
        "it evicts pages by what every token reads, rejected tokens as well"
    )
    alpha: float = setting(1e-4, "attention weight above which a token renews its page")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks that the budget holds a page, and that alpha is a share of attention."""
        base.require_page(self.token_budget, geometry.page_size)
        good = is_number(self.alpha) and 0 <= self.alpha < 1
        require(good, "alpha", self.alpha, "a number from 0 to below 1")
        return self

    def sequence_state(self, geometry: Geometry) -> dict[str, SequenceData]:
        """Stamps of the retained generated pages: the length at which each was renewed."""
        return {"stamp": SequenceData((self.most_generated(geometry.page_size),))}

    def capture_key(self, step: Step) -> Hashable:
        """Whether there is a page to score, and whether any sequence evicts one."""
        assert step.retained is not None
        return step.retained.most_generated < 2, bool(step.retained.due.any())

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """The largest weight of every token, in all layers.

        The page being written is always stamped: if it is the only one, no score is needed.
        """
        assert step.retained is not None
        if step.retained.most_generated < 2:
            return ()
        return (ScoreRequest("max", 1),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Collects the largest weights of all layers."""
        step.scores = scores[0] if step.scores is None else step.scores.maximum(scores[0])

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """All retained pages."""
        return None

    def after_step(self, step: Step) -> Tensor | None:
        """Renews stamps, including the newest page's; evicts the page of the oldest stamp."""
        left, weights = step.retained, step.scores
        assert left is not None
        if weights is not None:
            weights = weights[:, 0].unflatten(1, (-1, step.page_size)).amax(2)
        stamps = (step.sequences.state["stamp"], step.sequences.slots, left.pinned, left.pages)
        kernels.renew_stamps(*stamps, step.lengths, weights, self.alpha)
        return kernels.drop_oldest(*stamps, left.goes) if left.due.any() else None
