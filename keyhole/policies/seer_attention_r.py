"""SeerAttention-R: a small trained gate scores blocks of keys for each KV head, and a step reads
the best ones.

Gao et al., SeerAttention-R: Sparse Attention Adaptation for Long Reasoning, 2025 (arXiv
2506.08889), section 2, equations 1 to 3. In every layer a linear layer pools the queries of a KV
head's group to one gate query, another projects the pooled keys of a block (largest, smallest and
mean numbers), and their product is the block's score. `keyhole train-head --objective gate` trains
the gates by distillation; the model stays as it is.

Cost per step and layer: three summary keys per page and two small matrix products, then
`token_budget` keys and values.

When to use it: with a trained gate in the model's folder, where each layer and step needs another
part of a long text, and Quest's bounds, which need no training, read too much.

Differences (theirs | ours | effect measured):
- queries and keys enter the gate before RoPE, and gate queries and gate keys have a RoPE of their
  own | rotated queries and keys enter, and the gate has no RoPE: pages hold rotated keys, and a
  block's distance is in them; the key's projection is then applied to the query, so that pooled
  keys are stored as they are | not measured: a policy here does not see keys before RoPE
- blocks of 64 tokens | a block is a page: `page_size`, 16 by default; a gate is trained for one
  size | not measured
- gate keys of a block are written when it is complete | pooled keys follow every token | none: the
  newest block is always read
- a budget, or all blocks whose softmax weight is above a threshold | a budget | not measured
- the newest block is read beside the budget where it is not among the best | it is part of the
  budget; `sink_size` and `window_size` read more, within the budget, for comparisons on equal terms
  | none by default
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from keyhole import kernels
from keyhole.cache.layout import LayerLayout
from keyhole.config import setting
from keyhole.policies.base import BestPages, Step

if TYPE_CHECKING:
    from torch import Tensor

#: Pooled keys of a page: largest, smallest, mean.
_POOLS = 3


@dataclass(frozen=True, kw_only=True)
class SeerAttentionR(BestPages):
    """The `token_budget / page_size` pages that a trained gate scores highest, per KV head."""

    name: ClassVar[str] = "seer_attention_r"
    wants_gate: ClassVar[bool] = True
    gate: str | None = setting(None, "folder of the gate; None: in the model's folder")

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """The pooled keys of a page."""
        return {"pooled": (layout.num_kv_heads, _POOLS * layout.key_dim)}

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """Pools the keys of the pages that were written."""
        kernels.pool_keys(key_pages, data["pooled"], pages, filled)

    def page_scores(self, layer: int, query: Tensor, step: Step) -> Tensor:
        """The gate's products, whose order is that of their softmax, whatever the scale."""
        assert step.gate is not None, "the engine loads the gate of a policy that wants one"
        pooled = step.cache.page_data[layer]["pooled"]
        folded = step.gate.fold(layer, query).to(pooled.dtype)
        return kernels.summary_scores(folded, pooled[:, None], step.page_table, step.pages)
