"""SnapKV: keeps of the prompt what its last tokens attend to; the rest is never read again.

Li et al., SnapKV: LLM Knows What You are Looking for Before Generation (NeurIPS 2024, arXiv
2404.14469), section 4. After the prompt, the attention of its last tokens (`observation_window`) is
summed for every earlier token and pooled over `kernel_size` neighbours, so that tokens are kept
with their surroundings. Each KV head keeps the tokens of highest score and the window,
`token_budget` in all; the choice is final. Generated tokens are kept, too.

Cost per step and layer: `token_budget` keys and values, and the generated ones; after the prompt
once the attention of the window over it.

When to use it: for long prompts with short answers, where the question is at the end of the prompt;
what a later question needs may be lost.

Differences (theirs | ours | effect measured):
- evicted tokens are freed | the prompt's pages stay, as heads and layers keep different tokens of a
  page, and as other sequences may share it through the prefix cache: reads are saved, not memory |
  none in answers
- every query head keeps its own tokens | the query heads of a KV head keep the same, by their mean
  attention | not measured
- generated tokens are outside the budget | the same; with `generated_in_budget` they take the
  places of the prompt's tokens of lowest score, and at last of the oldest generated ones | not
  measured
- a window of 32, mean over 5 tokens (the code), or the largest of 7 (most of the paper's results) |
  the code's; a window of at most a quarter of the budget | not measured
- a prompt may come in chunks, over a cached prefix | the window's queries are kept as they come;
  its tokens are computed again if they are cached | none
- open: soft-capped logits | scores are computed without the cap | not measured
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from keyhole import kernels
from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_layers_of, setting
from keyhole.policies import base
from keyhole.policies.base import Policy, PromptQueries, Selection, SequenceData, Step
from keyhole.policies.evicting.base import keep_prompt, prompt_queries, query_state, require_kernel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """The prompt's tokens that its last ones attend to, per KV head, and all generated tokens."""

    name: ClassVar[str] = "snapkv"
    reads_keys: ClassVar[bool] = True
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = "it keeps the choice of a prompt's tokens with the sequence"
    token_budget: int = setting(1024, "tokens kept of a prompt per KV head, the window included")
    observation_window: int | None = setting(
        None, "the prompt's last tokens, which choose; None: 32, or a quarter of a smaller budget"
    )
    kernel_size: int = setting(5, "neighbouring tokens whose attention is pooled, an odd number")
    pooling: str = setting("avg", "how they are pooled: avg or max")
    generated_in_budget: bool = setting(False, "count generated tokens in token_budget, too")
    full_layers: tuple[int, ...] = setting((), "layers that read everything")

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves the window; checks that it leaves room in the budget for a token it chooses."""
        budget, window = self.token_budget, self.observation_window
        require(is_count(budget, 2), "token_budget", budget, "at least 2")
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        window = max(1, min(32, budget // 4)) if window is None else window
        right = f"from 1 to below token_budget {budget}"
        require(is_count(window) and window < budget, "observation_window", window, right)
        require_kernel(self.kernel_size)
        require(self.pooling in ("avg", "max"), "pooling", self.pooling, "avg or max")
        return dataclasses.replace(self, observation_window=window)

    def outside_budget(self) -> str:
        """Generated tokens, unless they are counted."""
        return "" if self.generated_in_budget else "all generated tokens"

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """All layers except the dense ones. ConfigError if generated tokens are not counted."""
        base.require_in_budget(self, "generated_in_budget=True")
        return self._sparse_layers(geometry)

    def sequence_state(self, geometry: Geometry) -> dict[str, SequenceData]:
        """The last queries of every sparse layer and where they are of; the kept tokens, the most
        important first.
        """
        sparse = self._sparse_layers(geometry)
        state = query_state(geometry, sparse, self._window)
        for i in sparse:
            heads = geometry.layers[i].num_kv_heads
            state[f"kept {i}"] = SequenceData((heads, self.token_budget))
            state[f"position {i}"] = SequenceData((self._window,))
        return state

    def reusable(self, known: int, page_size: int) -> int:
        """All but the window, whose queries are not stored with a cached prefix."""
        return max(0, known - self._window) // page_size * page_size

    def on_prompt_queries(
        self, layer: int, queries: PromptQueries, options: Mapping[str, Any]
    ) -> None:
        """Keeps the last queries of the prompt so far."""
        if layer not in self.full_layers:
            keep_prompt(layer, queries, options)

    def capture_key(self, step: Step) -> Hashable:
        """Whether everything is read; None where tokens are chosen or lengths set shapes."""
        covers = self._reads_all(step)
        if step.sequences.fresh.any() or not (covers or self.generated_in_budget):
            return None
        return covers

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The kept tokens of the prompt, and the generated ones."""
        if layer in self.full_layers:
            return None
        for row in np.flatnonzero(step.sequences.fresh).tolist():
            self._choose(layer, step, row)
        if self._reads_all(step):
            return None
        ranked = step.sequences.state[f"kept {layer}"][step.sequences.slots]
        places = ranked, step.sequences.prompts, step.lengths
        if self.generated_in_budget:
            budget = self.token_budget
            return kernels.read_kept(*places, most=budget, width=budget, total=budget)
        most = int((step.sequences.host_lengths - step.sequences.host_prompts).max())
        return kernels.read_kept(*places, most=most, width=self.token_budget + most, total=None)

    def _choose(self, layer: int, step: Step, row: int) -> None:
        """Ranks the tokens of the prompt of a sequence in its first decode step."""
        prompt = int(step.sequences.host_prompts[row])
        query = prompt_queries(layer, step, row, prompt)
        scores = kernels.observed_attention(
            query,
            step.cache.keys[layer],
            step.page_table[row, : -(-prompt // step.page_size)].long(),
            prompt,
            kernel_size=self.kernel_size,
            pooling=self.pooling,
        )
        ranked = kernels.most_observed(scores, len(query), self.token_budget)
        step.sequences.state[f"kept {layer}"][step.sequences.slots[row]] = ranked

    @property
    def _window(self) -> int:
        assert self.observation_window is not None, "settled by resolve"
        return self.observation_window
