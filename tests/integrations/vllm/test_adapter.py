"""The adapter calls a policy as Keyhole's engine does, over vLLM's pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.errors import ConfigError
from keyhole.integrations.vllm.adapter import Adapter, LayerInput, Shared
from keyhole.integrations.vllm.counters import ReadCounters
from keyhole.integrations.vllm.page_policy import ByPages, page_policy
from keyhole.policies import available_controls, available_policies, make_policy
from tests.integrations.vllm.steps import make_rows

PAGE, HKV, G, D, LAYERS = 8, 2, 2, 16, 6
LAYOUT = LayerLayout(num_kv_heads=HKV, key_dim=D, value_dim=D, num_query_heads=HKV * G)
GEOMETRY = Geometry(layers=(LAYOUT,) * LAYERS, num_query_heads=HKV * G, page_size=PAGE, itemsize=4)
OPTIONS: dict[str, Any] = {"scale": D**-0.5, "softcap": None, "sinks": None}
RUNNABLE = {
    "full": {},
    "sliding_window": {"token_budget": 2 * PAGE},
    "streaming_llm": {"token_budget": 2 * PAGE, "sink_size": 3},
    "quest": {"token_budget": 2 * PAGE},
    "delta": {"token_budget": 2 * PAGE, "full_layers": (0, 1), "delta_layers": (2,)},
    "omnikv": {"token_budget": 2 * PAGE, "filter_layers": (2,), "dense_after": 0},
}


def run(adapter: Adapter, lengths: list[int], seed: int = 0) -> list[Any]:
    """What each layer of a step reads."""
    generator = torch.Generator().manual_seed(seed)
    rows, shared = make_rows(lengths, PAGE, generator), Shared()
    found = []
    for layer in range(LAYERS):
        pool = torch.randn(40, HKV, PAGE, 2 * D, generator=generator)
        keys, values = pool.split(D, -1)
        query = torch.randn(len(lengths), HKV * G, D, generator=generator)
        adapter.written(layer, keys, rows)
        given = LayerInput(query=query, keys=keys, values=values, options=OPTIONS)
        found.append(adapter.select(layer, rows, shared, given))
    return found


def make_adapter(name: str, reduce: Any = None, **settings: Any) -> Adapter:
    policy = page_policy(make_policy(name, settings), GEOMETRY)
    return Adapter(policy, GEOMETRY, ReadCounters(None, torch.device("cpu"), 0), reduce)


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_layer_reads_its_budget_in_whole_pages(name: str) -> None:
    adapter = make_adapter(name, **RUNNABLE[name])
    reads = run(adapter, [50, 21, 3])
    for layer, tables in enumerate(reads):
        if layer not in adapter.sparse:
            assert tables is None
        else:
            # Two pages, of which the newest holds 2, 5 and 3 tokens; the third request has one.
            per_row = tables.lengths.view(3, tables.lists)
            assert per_row.unique(dim=1).tolist() == [[10], [13], [3]]


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_budget_that_covers_the_length_reads_everything(name: str) -> None:
    settings = RUNNABLE[name] | ({"token_budget": 64} if name != "full" else {})
    assert run(make_adapter(name, **settings), [50, 21]) == [None] * LAYERS


def test_the_others_are_refused_by_name() -> None:
    names = {**available_policies(), **available_controls()}
    for name in set(names) - set(RUNNABLE):
        with pytest.raises(ConfigError, match=f"policy '{name}' cannot run in vLLM: it "):
            page_policy(make_policy(name), GEOMETRY)


@pytest.mark.parametrize("name", ["sliding_window", "streaming_llm", "omnikv", "quest", "delta"])
def test_a_budget_smaller_than_a_page_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"token_budget {PAGE - 1} must be at least"):
        page_policy(make_policy(name, {"token_budget": PAGE - 1}), GEOMETRY)


def test_sinks_and_newest_pages_must_fit_in_the_budget() -> None:
    with pytest.raises(ConfigError, match="token_budget 16 must be at least 24: 2 pages of 8"):
        page_policy(make_policy("streaming_llm:token_budget=16,sink_size=9"), GEOMETRY)


def test_layers_of_one_selection_share_its_tables() -> None:
    reads = run(make_adapter("delta", **RUNNABLE["delta"]), [50, 21])
    delta = [tables for tables in reads if tables is not None]
    assert len({id(tables) for tables in delta}) < len(delta)


def test_groups_with_their_own_block_tables_share_page_numbers() -> None:
    """Gemma-3's layers are in KV cache groups of their own; a selection is of logical pages."""
    adapter = make_adapter("delta", **RUNNABLE["delta"])
    generator = torch.Generator().manual_seed(0)
    groups = [make_rows([50, 21], PAGE, generator) for _ in range(2)]
    shared, found = Shared(), {}
    for layer in range(LAYERS):
        pool = torch.randn(40, HKV, PAGE, 2 * D, generator=generator)
        keys, values = pool.split(D, -1)
        query = torch.randn(2, HKV * G, D, generator=generator)
        rows = groups[layer % 2]
        adapter.written(layer, keys, rows)
        given = LayerInput(query=query, keys=keys, values=values, options=OPTIONS)
        found[layer] = adapter.select(layer, rows, shared, given)
    assert shared.selection is not None
    chosen = shared.selection.indices[:, 0].long()
    for layer in (3, 4, 5):
        table = groups[layer % 2].page_table.long().gather(1, chosen)
        assert torch.equal(found[layer].page_table.long(), table)


def test_scores_are_those_of_the_heads_of_all_ranks() -> None:
    """Two ranks, each with one KV head of two, choose the pages of one with both."""
    generator = torch.Generator().manual_seed(1)
    lengths = [90, 61]
    rows = make_rows(lengths, PAGE, generator)
    pools = [torch.randn(40, HKV, PAGE, 2 * D, generator=generator) for _ in range(LAYERS)]
    query = torch.randn(2, HKV * G, D, generator=generator)
    settings = {**RUNNABLE["delta"], "token_budget": 5 * PAGE, "recent_pages": 1}

    def chosen(adapter: Adapter, heads: slice, of: Any) -> Tensor:
        shared = Shared()
        for layer in range(3):
            keys, values = pools[layer][:, heads].split(D, -1)
            mine = query[:, heads.start * G : heads.stop * G]
            given = LayerInput(query=mine, keys=keys, values=values, options=OPTIONS)
            adapter.select(layer, of, shared, given)
        assert shared.selection is not None
        return shared.selection.indices

    both = chosen(make_adapter("delta", **settings), slice(0, 2), rows)
    seen: list[Tensor] = []

    def keep(scores: Tensor, kind: str) -> None:
        assert kind == "max"
        seen.append(scores.clone())

    for rank in range(2):
        chosen(make_adapter("delta", keep, **settings), slice(rank, rank + 1), again(rows))
    largest = torch.maximum(*seen)

    def reduce(scores: Tensor, kind: str) -> None:
        scores.copy_(largest)

    for rank in range(2):
        mine = chosen(make_adapter("delta", reduce, **settings), slice(rank, rank + 1), again(rows))
        assert torch.equal(mine, both)
    alone = chosen(make_adapter("delta", **settings), slice(0, 1), again(rows))
    assert not torch.equal(alone, both)


def again(rows: Any) -> Any:
    """The same rows in a step of their own."""
    rows.step = None
    return rows


def test_by_pages_keeps_the_policys_name_and_settings() -> None:
    policy = page_policy(make_policy("streaming_llm:token_budget=20,sink_size=3"), GEOMETRY)
    assert isinstance(policy, ByPages)
    assert policy.name == "streaming_llm"
    assert policy.token_budget == 20
