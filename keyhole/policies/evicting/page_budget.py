"""A budget of generated pages: when it is full, one page of a sequence is evicted from all layers.

A page is one piece of memory for all layers (docs/decisions/0002-one-page-table.md), so that no
layer can be kept dense, and a method that scores tokens per layer and head evicts the page whose
tokens it values least over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, setting
from keyhole.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class PageBudget(Policy):
    """Keeps the prompt and `token_budget` generated tokens; a subclass names the page to evict."""

    token_budget: int = setting(1024, "tokens kept of what is generated, in whole pages")
    prompt_in_budget: bool = setting(False, "count the prompt in token_budget, too")

    def require_page(self, page_size: int) -> None:
        """ConfigError if the budget does not hold a page."""
        right = f"at least one page of {page_size} tokens"
        require(is_count(self.token_budget, page_size), "token_budget", self.token_budget, right)

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """None: eviction removes a page from all layers at once, so that no layer stays dense."""
        return ()

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """None: every layer reads all retained pages."""
        return ()

    def outside_budget(self) -> str:
        """The prompt, unless it is counted."""
        return "" if self.prompt_in_budget else "the prompt"

    def page_limit(self, prompt_pages: np.ndarray, page_size: int) -> np.ndarray:
        """The prompt and the budget; one page more where a counted prompt fills the budget."""
        most: np.ndarray = prompt_pages + self.token_budget // page_size
        if self.prompt_in_budget:
            most = np.maximum(prompt_pages + 1, self.token_budget // page_size)
        return most

    def most_generated(self, page_size: int) -> int:
        """The most generated pages of a sequence."""
        return max(2, self.token_budget // page_size)
