"""Policies beside each other: no hook is forgotten, and each sees what is its own."""

from __future__ import annotations

import inspect

from keyhole import Full, InfLLM, Quest, RaaS, SeerAttentionR, ShadowKV, SpeContext
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.eval.attention.dense_run import Candidates
from keyhole.policies.base import Policy

GEOMETRY = Geometry(
    layers=(LayerLayout(num_kv_heads=2, key_dim=8, value_dim=8),) * 4,
    num_query_heads=4,
    page_size=4,
    itemsize=4,
)
#: Called for every policy; with those that the dense run calls in place of the engine.
CALLED = {
    "resolve",
    "page_data",
    "sequence_state",
    "before_step",
    "on_append",
    "on_prompt_queries",
    "on_queries",
    "reusable",
    "needs_scores",
    "on_scores",
    "select",
    "after_step",
    "page_limit",
}
#: What a run that reads everything has no use for: offloading, CUDA graphs, counted bytes, names,
#: a plan.
UNUSED = {
    "as_published",
    "capture_key",
    "dense_layers",
    "offloadable",
    "outside_budget",
    "overhead_bytes",
    "selection_heads",
    "token_scores",
}


def test_every_hook_is_called_or_of_no_use() -> None:
    """A hook that was forgotten would leave a policy without what it goes by."""
    hooks = {name for name, _ in inspect.getmembers(Policy, callable) if not name.startswith("_")}
    assert hooks == CALLED | UNUSED


def test_class_variables_follow_from_the_policies() -> None:
    alone, three = Candidates(), Candidates(policies=(Quest(), InfLLM(), SpeContext()))
    assert (alone.wants_head, alone.reads_keys, alone.shares_pages) == (False, False, True)
    assert (three.wants_head, three.reads_keys, three.shares_pages) == (True, True, False)
    assert (three.wants_gate, Candidates(policies=(SeerAttentionR(),)).wants_gate) == (False, True)
    assert (alone.reads_queries, three.reads_queries) == (False, True)
    assert (alone.shifts_keys, Candidates(policies=(ShadowKV(),)).shifts_keys) == (False, True)


def test_side_data_is_kept_apart() -> None:
    pair = Candidates(policies=(Quest(token_budget=8), Full(), Quest(token_budget=16)))
    shape = (2, 8)
    names = {"0 low": shape, "0 high": shape, "2 low": shape, "2 high": shape}
    assert pair.page_data(GEOMETRY.layers[0], 4) == names


def test_nothing_is_evicted() -> None:
    found = Candidates(policies=(RaaS(token_budget=8),)).resolve(GEOMETRY)
    assert set(found.progress.retained) == {0}
    assert type(found).page_limit is Policy.page_limit
