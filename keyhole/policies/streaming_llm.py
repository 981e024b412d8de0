"""StreamingLLM: the first few tokens ("attention sinks") and a window of the newest.

Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024
(arXiv 2309.17453), section 3.2.

Cost per step and layer: `token_budget` keys and values.

When to use it: for unbounded streams whose distant past does not matter, and as the control that
a selection is compared with.

Differences from the paper: tokens keep their true positions, the paper renumbers them inside the
cache; tokens outside the window are skipped, not deleted. With `full_layers` it is the *recent*
control of other methods: their dense layers, and no selection elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import require_layers_of, setting
from keyhole.policies.base import Policy, Selection, Selects, Step, always_read

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """The first `sink_size` tokens and the newest `token_budget - sink_size`."""

    name: ClassVar[str] = "streaming_llm"
    selects: ClassVar[Selects | None] = "per_layer"
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head, the sinks included")
    sink_size: int = setting(4, "first tokens that are always read")
    full_layers: tuple[int, ...] = setting((), "layers that read everything")

    def resolve(self, geometry: Geometry) -> Self:
        """Checks that the sinks leave space for a window."""
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        always_read(self.sink_size, None, self.token_budget)
        return self

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Sinks and the newest tokens, the same for all heads."""
        if layer in self.full_layers or self._reads_all(step):
            return None
        return kernels.recent_indices(step.lengths, self.token_budget, first=self.sink_size)
