"""InfLLM: the first tokens, the newest, and the blocks between whose representative tokens the
query scores highest.

Xiao et al., InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context
Memory, NeurIPS 2024 (arXiv 2402.04617), section 3. Every block of the past has a few representative
tokens; a block's score is the product of the query and their keys, summed over all query heads, so
that all heads read the same blocks. Every layer chooses for itself, at every token.

Cost per step and layer: one key per page, then `token_budget` keys and values.

Differences from the paper: a token represents its block for the keys beside it, not for the queries
of the local window after it. These are not known where a page comes from a stored document, and
differ between the requests that share a page. Of every page it is the token whose key is farthest
from their mean; a block has as many representatives as pages (the authors' blocks of 128 have
four). Blocks start at the first token, and the window is whole blocks, the newest as far as it is
filled. Prompts are read exactly. Tokens keep their true positions, the paper puts all that is far
away at one distance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import is_count, require, setting
from keyhole.policy.base import Policy, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class InfLLM(Policy):
    """First tokens, newest tokens, and the blocks whose representative tokens score highest."""

    name: ClassVar[str] = "infllm"
    capturable: ClassVar[bool | str] = True
    reads_keys: ClassVar[bool] = True
    token_budget: int = setting(1024, "tokens a step reads, sinks and window included, in blocks")
    sink_size: int = setting(4, "first tokens that are always read, in whole blocks")
    window_size: int | None = setting(
        None, "newest tokens always read, in whole blocks; None: half of the budget"
    )
    block_size: int | None = setting(
        None, "tokens in a block, whole pages; None: 64, or an eighth of a smaller budget"
    )

    def resolve(self, geometry: Geometry) -> Self:
        """Settles block and window; checks that these and the sinks fit into the budget."""
        page, budget = geometry.page_size, self.token_budget
        right = f"at least one page of {page} tokens"
        require(is_count(budget, page), "token_budget", budget, right)
        block = self.block_size
        if block is None:
            block = max(page, min(64, budget // 8) // page * page)
        right = f"a multiple of the page size {page}, up to token_budget {budget}"
        require(is_count(block) and block % page == 0, "block_size", block, right)
        require(block <= budget, "block_size", block, right)
        window = self.window_size
        if window is None:
            # The authors' window is two thirds of what they read.
            window = max(1, budget // 2 // block) * block
        require(is_count(window), "window_size", window, "at least 1")
        require(is_count(self.sink_size, 0), "sink_size", self.sink_size, "at least 0")
        settled = dataclasses.replace(self, block_size=block, window_size=window)
        least = sum(settled._ends) * block
        right = (
            f"at least {least}: sink_size {self.sink_size} and window_size {window} in blocks of "
            f"{block}"
        )
        require(budget >= least, "token_budget", budget, right)
        return settled

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """The key of the page's representative token."""
        return {"representative": (layout.num_kv_heads, layout.key_dim)}

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """Finds the representatives of the pages that were written."""
        kernels.representative_keys(key_pages, data["representative"], pages, filled)

    def branch(self, step: Step) -> Hashable:
        """Whether everything is read."""
        return self._covers(step)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Sinks, window, and the best blocks between, for all heads."""
        if self._covers(step):
            return None
        keys, size = step.page_data[layer]["representative"], self._block // step.page_size
        there = None
        if step.thinned is not None:  # pages of documents that this layer has nothing of
            there = step.thinned.pages(layer, step.page_table.shape[1], step.page_size)
        scores = kernels.block_scores(query, keys, step.page_table, step.pages, size, there)
        first, last = self._ends
        blocks = kernels.top_indices(
            scores,
            (step.pages + size - 1) // size,
            self.token_budget // self._block,
            self._block,
            first=first,
            last=last,
        )
        return kernels.block_pages(blocks, step.pages, step.page_size)

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """The representatives of all pages in all layers."""
        if self._covers(step):
            return None
        layouts = [geometry.layers[i] for i in geometry.full_attention]
        numbers = sum(layout.num_kv_heads * layout.key_dim for layout in layouts)
        return step.pages * (numbers * geometry.itemsize)

    @property
    def _block(self) -> int:
        assert self.block_size is not None, "settled by resolve"
        return self.block_size

    @property
    def _ends(self) -> tuple[int, int]:
        """Blocks of the sinks, and blocks of the window."""
        assert self.window_size is not None, "settled by resolve"
        return -(-self.sink_size // self._block), -(-self.window_size // self._block)

    def _covers(self, step: Step) -> bool:
        return step.max_length <= self.token_budget // self._block * self._block
