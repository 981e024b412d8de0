"""Measures one cell: forces its texts, and sums what is wanted over their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keyhole.config import EngineConfig, require
from keyhole.engine.head_runner import load_head
from keyhole.engine.shared_prompt_cache import SharedPromptCache
from keyhole.eval.attention import overlap
from keyhole.eval.attention.cells import METHOD, AttentionCell
from keyhole.eval.attention.dense_run import LayerStep, Take, run
from keyhole.eval.attention.loss import LossSums
from keyhole.eval.attention.overlap import OverlapSums
from keyhole.eval.results.line_file import Line
from keyhole.eval.workloads.perplexity import forced
from keyhole.models.loading import Model
from keyhole.policies.base import Policy
from keyhole.retrieval.head import RetrievalHead


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """A model, and the windows of text that it is forced through.

    is_twin: its weights are random, and so are those of a retrieval head.
    """

    model: Model
    is_twin: bool
    windows: Sequence[Sequence[int]]
    config: EngineConfig
    copies: SharedPromptCache

    def loss(self, cell: AttentionCell, known: Mapping[str, Any]) -> Line:
        """What the policy of a cell and its controls lose; known: controls measured before."""
        geometry = self.model.geometry(self.config.page_size)
        policies = {name: one for name, one in cell.policies.items() if name not in known}
        sums = LossSums(
            geometry.full_attention, len(self.windows), len(policies), self.model.device
        )
        self._force(list(policies.values()), cell.length, sums.take)
        found = dict(zip(policies, map(dataclasses.asdict, sums.means()), strict=True))
        return {
            "dense_layers": list(cell.policies[METHOD].dense_layers(geometry)),
            "outside_budget": cell.policies[METHOD].outside_budget(),
            "losses": {name: known.get(name) or found[name] for name in cell.policies},
            "repeats": sums.repeats.shares(),
        }

    def overlap(self, cell: AttentionCell) -> Line:
        """The overlap of top lists, for each of their kinds."""
        size = self.config.page_size
        assert cell.budget is not None
        require(cell.budget >= size, "budget", cell.budget, f"at least one page of {size} tokens")
        geometry = self.model.geometry(self.config.page_size)
        sums = {
            kind: OverlapSums(kind, cell.budget, geometry, len(self.windows), self.model.device)
            for kind in overlap.kinds(geometry)
        }

        def take(seen: LayerStep) -> None:
            for one in sums.values():
                one.take(seen)

        self._force([], cell.length, take)
        return {"lists": {kind: dataclasses.asdict(one.result()) for kind, one in sums.items()}}

    def _force(self, policies: Sequence[Policy], length: int, take: Take) -> None:
        requests = [dataclasses.replace(forced(one), keep_logits=False) for one in self.windows]
        head = next((self._head(policy) for policy in policies if policy.wants_head), None)
        self.copies.begin((self.is_twin, length))
        run(self.model, policies, requests, self.config, take, copies=self.copies, head=head)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _head(self, policy: Policy) -> RetrievalHead:
        """The head of a policy; of the twin a random one. ConfigError where the model has none."""
        head = load_head(policy, self.model)
        return RetrievalHead.random(self.model.network) if self.is_twin else head
