"""A policy of your own: no registration needed, an object is enough."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from keyhole import LLM, Policy, SamplingParams, kernels
from keyhole.config import setting
from keyhole.eval.tiny_language.tasks import make
from keyhole.policies.base import Selection, Step


@dataclass(frozen=True, kw_only=True)
class OldestAndNewest(Policy):
    """Half of the budget for the first pages, half for the last ones."""

    name: ClassVar[str] = "oldest_and_newest"
    token_budget: int = setting(256, "tokens a step reads per KV head, in whole pages")

    def select(self, layer: int, query: torch.Tensor, step: Step) -> Selection | None:
        """The same pages for all heads and layers."""
        pages = self.token_budget // step.page_size
        scores = step.lengths.new_zeros((len(step.lengths), 1, step.page_table.shape[1])).float()
        return kernels.top_k(
            scores, step.pages, pages, step.page_size, first=pages // 2, last=pages - pages // 2
        )


llm = LLM("tiny", policy=OldestAndNewest(token_budget=256))
item = make("recall", 1024, seed=3)
result = llm.generate(item.prompt, SamplingParams(max_tokens=16))
print("expected:", item.answer)
print("answered:", result.text.strip())
print(f"keys read: {result.stats.attended_fraction:.1%}")
