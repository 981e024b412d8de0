"""CacheBlend: the first layers tell which tokens missed the other documents most; those are
computed again in all layers.

Yao et al., CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion,
EuroSys 2025 (arXiv 2405.16444), section 4. All tokens are computed up to `check_layer`; those whose
keys and values deviate most from the stored ones there go on, the others keep what is stored.

Cost per prompt: `check_layer + 1` layers of a prefill of all documents, then `recompute_ratio` of
the rest. Everything is kept.

When to use it: where everything is kept and a share of all tokens may be computed again.

Differences (theirs | ours | effect measured):
- the paper compares keys and values, the authors' code values alone | values; `deviation` also
  takes keys, or both | at layer 1: values 2.1 % (0.4 to 10.9), keys 10.4 % (4.5 to 22.2), both 4.2
  % (1.2 to 14.0); at layer 2 all of them 100 % (92.6 to 100)
- the layer that is compared is 1 in the code | `check_layer`, 1 by default, or the first behind one
  that sees everything | at layer 2 it is 100 % (92.6 to 100) where it is 2.1 % at layer 1: this
  model's look-up shows in values from layer 2 on
- the paper's set shrinks from layer to layer, the code's is chosen once | chosen once | at layer 1:
  chosen once 2.1 % (0.4 to 10.9), shrinking 4.2 % (1.2 to 14.0); at layer 2 none
- 16 % in the code, about 15 % in the paper | `recompute_ratio`, 15 % | none
- tokens of the question compete in the code, except the last one | all of the question is computed,
  in addition to the share | none in right answers; median error .040 against .038 at layer 1
- the code's mask is aligned to the lower right corner, as if the tokens computed were the last ones
  | each token sees the tokens before its own position | none in right answers; median error .040
  against .038 at layer 1
- in the checked layer every token attends to new keys in the code | the same | with stored keys for
  those that are not chosen: none in right answers; median error .033 against .038 at layer 1
- documents are encoded after the BOS token | without it, as they are in the middle of a prompt |
  with it 10.4 % (4.5 to 22.2) at layer 1; median error .019 against .038 at layer 1, .009 against
  .036 at layer 2
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from keyhole.cache.layout import Geometry
from keyhole.config import is_count, is_number, require, require_known, setting
from keyhole.reuse.base import PlacedDocument, RecomputePlan, Reuse, rounded_up, starts

if TYPE_CHECKING:
    from torch import Tensor


#: Which rows of [keys, values] count.
DEVIATIONS = {"value": slice(1, 2), "key": slice(0, 1), "both": slice(0, 2)}


@dataclass(frozen=True, kw_only=True)
class CacheBlend(Reuse):
    """The tokens that deviate most are computed again."""

    name: ClassVar[str] = "cacheblend"
    keeps_all: ClassVar[bool] = True
    check_layer: int | None = setting(
        None,
        "layer up to which all tokens are computed, and whose deviations decide; None: the one "
        "after the first with full attention",
    )
    recompute_ratio: float = setting(0.15, "share of the tokens that is recomputed in all layers")
    deviation: str = setting("value", "what is compared with what is stored: value, key or both")

    @property
    def probe_layer(self) -> int | None:
        """See `Reuse`."""
        return self.check_layer

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves the layer; checks that it exists."""
        last, layer = geometry.num_layers - 1, self.check_layer
        if layer is None:
            # In earlier layers, tokens beyond the window deviate by rounding alone.
            layer = min(last, min(geometry.full_attention, default=0) + 1)
        require(
            is_count(layer, 0) and layer <= last, "check_layer", layer, f"a layer from 0 to {last}"
        )
        require_known("deviation", self.deviation, DEVIATIONS)
        ratio = self.recompute_ratio
        require(is_number(ratio) and 0 <= ratio <= 1, "recompute_ratio", ratio, "from 0 to 1")
        return dataclasses.replace(self, check_layer=layer)

    def plan(
        self, documents: Sequence[PlacedDocument], query: Sequence[Tensor] | None
    ) -> RecomputePlan:
        """Everything is kept; up to `check_layer` everything is recomputed."""
        assert self.check_layer is not None, "resolve comes first"
        shape = len(documents[0].layers), starts(documents)[-1]
        every = torch.ones(shape, dtype=torch.bool)
        recomputed = torch.zeros_like(every)
        recomputed[: self.check_layer + 1] = True
        return RecomputePlan(every, recomputed)

    def revise(
        self, documents: Sequence[PlacedDocument], plan: RecomputePlan, deviation: Tensor
    ) -> RecomputePlan:
        """The tokens of largest deviation continue; ties go to the earlier token."""
        total = deviation[DEVIATIONS[self.deviation]].sum(0)
        number = rounded_up(self.recompute_ratio, len(total))
        chosen = total.argsort(descending=True, stable=True)[:number]
        recomputed = torch.zeros_like(plan.recomputed)
        recomputed[:, chosen.to(recomputed.device)] = True
        return dataclasses.replace(plan, recomputed=recomputed)
