"""InfLLM: the first tokens, the newest tokens, and the blocks between them whose representative
tokens score highest.

Xiao et al., InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context
Memory, NeurIPS 2024 (arXiv 2402.04617), section 3. Every block of the past has, for each query
head, a few representative tokens: the ones that received the most attention from the queries of the
next `window_size` tokens. A block's score is the product of the query and the mean of their keys,
summed over all query heads, so that all heads read the same blocks. Every layer selects for itself,
at every token. A block gets representatives when the window has passed it; until then it is read.

Cost per step and layer: a key per query head and block, and the received attention of the window's
tokens; then `token_budget` keys and values. Prefill computes the attention within the window a
second time, to sum what each token receives.

When to use it: for long prompts where whole passages matter: blocks are selected, and no layer
reads everything.

The attention that a token receives depends on later queries. A sequence therefore shares no pages,
reuses a cached prefix only up to one window before its end, and cannot use stored documents, whose
queries are not stored.

Differences (theirs | ours | effect measured):
- four representative tokens of a block, by the attention that they receive from the queries of the
  next window | the same; `num_representatives` | at a budget of 256: four 0 % (0.0 to 7.4) with
  1,226 KiB read per step, one 0 % (0.0 to 7.4), sixteen 0 % (0.0 to 7.4): this task asks for facts
  far away at every step
- 128 first tokens, a window of 4,096 and 16 blocks of 128 are counted separately | first tokens,
  window and blocks share the budget; `as_published` has their shares | not measured: their window
  is longer than the prompts here
- distant tokens share one relative position | true positions | not measured: a policy here reads
  keys as they are
- blocks are selected for each chunk of queries of a prompt | a prompt is read in full, and each
  decoded token selects | not measured: a policy here acts on decode steps
- blocks are kept in host memory | `offload=` does it for any policy | none
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import is_count, require, require_counts, require_layers_of, setting
from keyhole.policies import base
from keyhole.policies.base import Policy, PromptQueries, Selection, Step

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class InfLLM(Policy):
    """First tokens, newest tokens, and the blocks whose representative tokens score highest."""

    name: ClassVar[str] = "infllm"
    shares_pages: ClassVar[bool] = False
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = (
        "it sums the attention that tokens receive, from rejected tokens as well"
    )
    reads_keys: ClassVar[bool] = True
    token_budget: int = setting(1024, "tokens a step reads, sinks and window included, in pages")
    full_layers: tuple[int, ...] = setting((), "layers that read everything")
    sink_size: int = setting(4, "first tokens that are always read, in whole pages")
    window_size: int | None = setting(
        None, "newest tokens always read, in whole pages; None: two thirds of the budget"
    )
    block_size: int | None = setting(
        None, "tokens in a block, whole pages; None: 64, or an eighth of a smaller budget"
    )
    num_representatives: int | None = setting(
        None, "representative tokens of a block, per query head; None: 4, or all of a smaller block"
    )

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves block and window; checks that these and the sinks fit into the budget."""
        page, budget = geometry.page_size, self.token_budget
        base.require_page(budget, page)
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        require_counts(self, "sink_size", least=0)
        block = self.block_size
        if block is None:
            block = max(page, min(64, budget // 8) // page * page)
        right = f"a multiple of the page size {page}, up to token_budget {budget}"
        require(is_count(block) and block % page == 0, "block_size", block, right)
        require(block <= budget, "block_size", block, right)
        window = self.window_size
        if window is None:
            # The authors' share: 4096 of the 6272 tokens that a step reads.
            left = budget - block - -(-self.sink_size // page) * page
            window = max(1, min(2 * budget // 3, left) // page) * page
        require(is_count(window), "window_size", window, "at least 1")
        count = min(4, block) if self.num_representatives is None else self.num_representatives
        right = f"from 1 to block_size {block}"
        require(is_count(count) and count <= block, "num_representatives", count, right)
        settled = dataclasses.replace(
            self, block_size=block, window_size=window, num_representatives=count
        )
        least = (-(-self.sink_size // page) + -(-window // page)) * page + block
        right = (
            f"at least {least}: sink_size {self.sink_size} and window_size {window} in whole pages "
            f"of {page}, and a block of {block}"
        )
        require(budget >= least, "token_budget", budget, right)
        return settled

    @classmethod
    def as_published(cls, geometry: Geometry, token_budget: int) -> Self:
        """The authors' 128 first tokens, 4096 newest and 16 blocks of 128, at this budget."""
        page = geometry.page_size
        share = token_budget / (128 + 4096 + 16 * 128)
        return cls(
            token_budget=token_budget,
            sink_size=int(128 * share),
            window_size=max(1, int(4096 * share) // page) * page,
            block_size=max(1, int(128 * share) // page) * page,
        )

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """The attention each token received, and the representative in a block's first page."""
        heads = layout.num_query_heads
        return {"received": (2, heads, page_size), "representative": (heads, layout.key_dim)}

    def reusable(self, known: int, page_size: int) -> int:
        """All but the last window, whose attention depends on another sequence's queries."""
        return max(0, known - self._window) // page_size * page_size

    def on_prompt_queries(
        self, layer: int, queries: PromptQueries, options: Mapping[str, Any]
    ) -> None:
        """Adds received attention, and represents the blocks that the window has passed."""
        if layer in self.full_layers:
            return
        size, start = queries.keys.shape[2], queries.start
        pages, data = queries.pages[None], queries.data
        starts = pages.new_tensor([start])
        kernels.add_received(
            queries.query[None],
            queries.keys,
            data["received"],
            pages,
            starts,
            pages.new_tensor([queries.first]),
            window=self._window,
            init=self._ends(size)[0] * size,
            **options,
        )
        # The last block before was not complete; in a cached prefix none is.
        done = self._blocks(-(-start // size), size) if start > queries.first else 0
        end = self._blocks(pages.shape[1], size)
        if end > max(0, done - 1):
            first, per_block = self._ends(size)[0], self._block // size
            entries = slice(first + max(0, done - 1) * per_block, first + end * per_block)
            blocks = queries.pages[entries].view(-1, per_block)
            self._represent(queries.keys, data, blocks, blocks[:, 0] >= 0)

    def on_queries(self, layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
        """The same for the newest tokens, for the last block that the window has passed."""
        if layer in self.full_layers:
            return
        size, keys, data = step.page_size, step.cache.keys[layer], step.cache.page_data[layer]
        first, per_block = self._ends(size)[0], self._block // size
        table = step.page_table.long()
        kernels.add_received(
            query[:, None],
            keys,
            data["received"],
            table,
            step.lengths.long() - 1,
            table.new_zeros(len(table)),
            window=self._window,
            init=first * size,
            **options,
        )
        number = self._blocks(step.pages, size)
        block = (number.long() - 1)[:, None] * per_block + first
        entries = block + table.new_ones(per_block).cumsum(0) - 1
        # A sequence without a block names its own first page: no other page may be written.
        entries = entries.masked_fill((number == 0)[:, None], 0)
        self._represent(keys, data, table.gather(1, entries), number > 0)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Sinks, window, and the best blocks between, for all heads."""
        if layer in self.full_layers or self._reads_all(step):
            return None
        size = step.page_size
        (first, last), per_block = self._ends(size), self._block // size
        keys, table = (
            step.cache.page_data[layer]["representative"],
            step.page_table[:, first::per_block],
        )
        number = self._blocks(step.pages, size)
        scores = kernels.block_scores(query, keys, table.contiguous(), number)
        # Pages between the last whole block and the window are read until their block is complete.
        count = ((step.pages - first - last).clamp(min=0) + per_block - 1) // per_block
        waiting = table.new_ones(table.shape[1]).cumsum(0) > number[:, None]
        scores = scores.masked_fill(waiting[:, None], float("inf"))
        most = (self.token_budget // size - first - last) // per_block
        chosen = kernels.top_k(scores, count, most, self._block)
        return kernels.between_ends(chosen, step.pages, size, (first, last))

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """The representatives of all blocks and the attention in the window, in sparse layers."""
        if self._reads_all(step):
            return None
        layouts = [geometry.layers[i] for i in self._sparse_layers(geometry)]
        keys = sum(layout.num_query_heads * layout.key_dim for layout in layouts)
        heads = sum(layout.num_query_heads for layout in layouts)
        window = 2 * heads * step.lengths.clamp(max=self._window)
        blocks = self._blocks(step.pages, geometry.page_size)
        read: Tensor = (blocks * keys + window) * geometry.itemsize
        return read

    def _represent(
        self, keys: Tensor, data: Mapping[str, Tensor], pages: Tensor, real: Tensor
    ) -> None:
        stored = data["received"], data["representative"]
        assert self.num_representatives is not None, "settled by resolve"
        kernels.represent_blocks(keys, *stored, pages, real, self.num_representatives)

    def _blocks(self, pages: Any, page_size: int) -> Any:
        """Blocks that the window has passed, of sequences with this many pages. Ints or tensors."""
        left = pages - sum(self._ends(page_size))
        return left * (left > 0) // (self._block // page_size)

    def _ends(self, page_size: int) -> tuple[int, int]:
        """Pages of the sinks, and of the window with the budget that blocks leave over."""
        first, per_block = -(-self.sink_size // page_size), self._block // page_size
        left = self.token_budget // page_size - first
        most = (left - -(-self._window // page_size)) // per_block
        return first, left - most * per_block

    @property
    def _block(self) -> int:
        assert self.block_size is not None, "settled by resolve"
        return self.block_size

    @property
    def _window(self) -> int:
        assert self.window_size is not None, "settled by resolve"
        return self.window_size

    def _reads_all(self, step: Step) -> bool:
        return step.fits_in_pages(self.token_budget)
