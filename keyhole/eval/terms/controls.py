"""Controls of a policy: its dense layers, its budget, and no selection of its own elsewhere.

    recent   the sinks and the newest tokens: what the policy would score without selecting
    random   the same number of tokens drawn by chance, the newest among them
    oracle   the tokens of largest true attention weight of each step, per KV head: the best that a
             selection could do

A method that is no better than its recent control owes its score to its dense layers.
"""

from __future__ import annotations

import dataclasses

from keyhole.cache.layout import Geometry
from keyhole.eval.methods import TOKEN_BUDGET
from keyhole.policies.base import Policy
from keyhole.policies.controls import Oracle, RandomTokens
from keyhole.policies.streaming_llm import StreamingLLM

CONTROLS = ("recent", "random", "oracle")
_SINKS = "sink_size"


def controls(policy: Policy, geometry: Geometry, seed: int = 0) -> dict[str, Policy]:
    """The controls of a resolved policy by name; none of one that is dense or has no budget.

    They keep its dense layers, its sinks and its `token_budget`. What a policy reads beside its
    budget they do not have. seed: of the random draw.
    """
    settings = dataclasses.asdict(policy)
    budget = settings.get(TOKEN_BUDGET)
    if policy.dense or budget is None:
        return {}
    layers = policy.dense_layers(geometry)
    sinks = settings.get(_SINKS) or 0
    return {
        "recent": StreamingLLM(token_budget=budget, sink_size=sinks, full_layers=layers),
        "random": RandomTokens(token_budget=budget, sink_size=sinks, full_layers=layers, seed=seed),
        "oracle": Oracle(token_budget=budget, full_layers=layers),
    }
