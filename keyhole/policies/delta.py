"""DELTA: a few layers read everything and select the pages that the layers after them read.

Zarch et al., DELTA: Dynamic Layer-Aware Token Attention for Efficient Long-Context Reasoning
(2025), section 4. Layers are of three kinds: `full_layers` (the first ones) read everything;
`delta_layers` read everything and score it; all others read the pages selected by the nearest delta
layer before them. A token's score is its largest attention weight over all query heads, a page's
score is the sum over its tokens; the newest pages are always read. The selection is recomputed at
every token and nothing is evicted.

Cost per step: full and delta layers read the whole cache, the others `token_budget` tokens.

When to use it: for long derivations, after `keyhole calibrate` on the model; a few layers still
read the whole cache.

Differences (theirs | ours | effect measured):
- layers {0, 1} read everything and {2, 14, 22} of 28 select | scaled to the depth, or measured for
  the model, if a file of `keyhole calibrate` is in its folder or is given as `layers` |
  differs by model: `keyhole calibrate` prints mass kept, error of the output, dense layers and keys
  read of every placement
- layers are placed where attention shifts most | `keyhole calibrate` places them where the layers
  between lose the least, by attention mass or by the error of the output; `--method paper` is
  theirs, and begins with the first layer behind the full ones as their layers do | as above;
  without that first layer, all layers before the one of largest shift would be dense
- 8 of 64 pages are the newest | an eighth of the budget, at least the newest page; `recent_pages` |
  none at their budget
- no sinks | the same by default; `sink_size`, in whole pages within the budget | none by default
- every layer has full attention | layers with their own sliding window are left alone | not
  measured: their models have none
- always the budget | the same by default; `recall` (ours) reads fewer pages where they hold enough
  of the scores | none by default
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_counts, require_layers_of, setting
from keyhole.errors import ConfigError
from keyhole.policies import base, selection_layers
from keyhole.policies.base import Policy, ScoreRequest, Selection, Selects, Step
from keyhole.policies.selection_layers import Calibration

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Delta(Policy):
    """One list of pages for all heads, refreshed at every token by a few selection layers."""

    name: ClassVar[str] = "delta"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True
    selects: ClassVar[Selects | None] = "by_scores"
    token_budget: int = setting(1024, "tokens a sparse layer reads, in whole pages")
    recent_pages: int | None = setting(None, "newest pages always read; None: 1/8 of the budget")
    sink_size: int = setting(0, "first tokens that are always read, in whole pages")
    full_layers: tuple[int, ...] | None = setting(None, "layers that read everything; None: 0,1")
    delta_layers: tuple[int, ...] | None = setting(None, "layers that select pages; None: by depth")
    recall: float | None = setting(
        None, "read fewer pages where they hold this share of the scores; None: always the budget"
    )
    min_budget: int | None = setting(
        None, "tokens a sparse layer reads at least, with recall; None: 1/4 of the budget"
    )
    layers: str | None = setting(None, "file of `keyhole calibrate` with both lists of layers")

    @classmethod
    def as_published(cls, geometry: Geometry, token_budget: int) -> Self:
        """The paper's layers scaled to the depth, not those calibrated for the model."""
        layers = default_delta_layers(geometry)
        return cls(token_budget=token_budget, full_layers=(0, 1), delta_layers=layers)

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves recent pages and layers: as given, else calibrated, else scaled to the depth."""
        size = geometry.page_size
        base.require_page(self.token_budget, size)
        pages = self.token_budget // size
        # An eighth of the budget, as in the authors' code (8 of 64 pages); table 1 of the paper
        # shows that smaller budgets need relatively more.
        recent = max(1, pages // 8) if self.recent_pages is None else self.recent_pages
        right = f"from 1 to {pages}, the pages in token_budget {self.token_budget}"
        require(is_count(recent) and recent <= pages, "recent_pages", recent, right)
        require_counts(self, "sink_size", least=0)
        always = (base.whole_entries(self.sink_size, size) + recent) * size
        right = f"at least {always}: sink_size {self.sink_size} and {recent} recent_pages of {size}"
        require(pages * size >= always, "token_budget", self.token_budget, right)
        least = base.resolve_min_budget(
            self.recall, self.min_budget, self.token_budget, always, size
        )
        full, delta = self._layers(geometry)
        return dataclasses.replace(
            self,
            recent_pages=recent,
            full_layers=full,
            delta_layers=delta,
            min_budget=least,
            layers=None,
        )

    def _layers(self, geometry: Geometry) -> tuple[tuple[int, ...], tuple[int, ...]]:
        given = self.full_layers is not None or self.delta_layers is not None
        if self.layers is not None and given:
            raise ConfigError(
                "give either layers (a file) or full_layers and delta_layers, not both"
            )
        source = Path(self.layers) if self.layers is not None else geometry.calibration
        if source is not None and not given:
            calibration = Calibration.load(source)
            calibration.check_depth(geometry.num_layers)
            full, delta = calibration.full_layers, calibration.delta_layers
        else:
            full = (0, 1) if self.full_layers is None else self.full_layers
            delta = (
                default_delta_layers(geometry) if self.delta_layers is None else self.delta_layers
            )
        require_layers_of("full_layers", full, geometry.num_layers)
        return tuple(sorted(set(full))), selection_layers.settled("delta_layers", delta, geometry)

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """Full layers, delta layers, and those before the first of them."""
        return selection_layers.dense(self.delta_layers, self.full_layers, geometry)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """The sparse layers after the first selection layer."""
        return selection_layers.served(self.delta_layers, self.full_layers, geometry)

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """Delta layers score pages: largest weight over the heads, summed over the page."""
        if layer not in (self.delta_layers or ()) or self._reads_all(step):
            return ()
        return (ScoreRequest("max", step.page_size),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Selects the pages for the layers that follow."""
        size, last = step.page_size, self.recent_pages or 1
        first = base.whole_entries(self.sink_size, size)
        chosen = kernels.top_k(
            scores[0], step.pages, self.token_budget // size, size, first=first, last=last
        )
        if self.recall is not None:
            least = (self.min_budget or 0) // size
            chosen = kernels.top_p(
                chosen, scores[0], step.pages, self.recall, least=least, first=first, last=last
            )
        step.shared_selection = chosen

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The pages of the delta layer before; everything in full layers and before the first."""
        return None if layer in (self.full_layers or ()) else step.shared_selection

    def _reads_all(self, step: Step) -> bool:
        budget = self.token_budget if self.min_budget is None else self.min_budget
        return step.fits_in_pages(budget)


def default_delta_layers(geometry: Geometry) -> tuple[int, ...]:
    """The paper's {2, 14, 22} of 28 layers scaled to this depth, among full-attention layers."""
    depth = geometry.num_layers
    return selection_layers.nearest(
        {min(2, depth - 1), round(depth / 2), round(0.78 * depth)}, geometry
    )
