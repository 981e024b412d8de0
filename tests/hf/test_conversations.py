"""`keyhole.sparse`: caches that go on, under policies that keep data of a sequence."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from keyhole import RKV, ClusterKV, RaaS, ShadowKV, SnapKV, sparse
from keyhole.policies.base import Policy
from tests.hf.generating import assert_same, decode, forward, network, past_of, prompts

__all__ = ["network"]


def turn(network: Any, before: Any, new: Tensor, **options: Any) -> Any:
    """The answer to a text that goes on after another answer, by default from its cache."""
    ids = torch.cat([before.sequences, new], 1)
    given = {"past": past_of(before)} | options
    return decode(network, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **given)


NONE = torch.empty(1, 0, dtype=torch.long)


@pytest.mark.parametrize(
    "policy",
    [
        RaaS(token_budget=16),
        RKV(token_budget=16),
        RKV(token_budget=32, prompt_in_budget=True, observation_window=4),
    ],
)
def test_a_prompt_after_evicted_pages_reads_what_is_left(network: Any, policy: Policy) -> None:
    """Under R-KV the next turn ended in an AssertionError as soon as a page was evicted."""
    ids, size, there = prompts(60)["input_ids"], 8, torch.zeros(60, 60, dtype=torch.bool)
    found, past, start = [], None, 0
    with sparse(network, policy, page_size=size):
        for end in (9, *range(10, 44), 54, *range(55, 61)):
            if past is not None:
                gone = [entry for entry, page in enumerate(past.rows[0].pages) if page < 0]
                left = ~torch.isin(torch.arange(end) // size, torch.tensor(gone))
                there[start:end, :end] = left
            there[start:end, start:end] = True
            out = forward(network, {"input_ids": ids[:, start:end]}, past=past)
            found.append(out.logits)
            past, start = past_of(out), end
    assert gone
    mask = torch.zeros(1, 1, 60, 60).masked_fill(~there.tril(), float("-inf"))
    wanted = forward(network, {"input_ids": ids, "attention_mask": mask}).logits
    assert torch.allclose(torch.cat(found, 1), wanted, atol=1e-4)


@pytest.mark.parametrize("count", [2, 5, 20])
def test_the_next_turn_is_chosen_by_its_own_queries(network: Any, count: int) -> None:
    """Queries of the turn before took the places of the answer's, which are not kept."""
    found, length = [], {"max_new_tokens": count, "min_new_tokens": count}
    for window in (4, 12):
        policy = SnapKV(token_budget=16, observation_window=window)
        with sparse(network, policy, page_size=8):
            # Within the budget: the window does not matter.
            first = decode(network, prompts(14), **length)
            # The last token of the answer is not computed yet.
            found.append(turn(network, first, prompts(3, seed=1)["input_ids"]))
    assert_same(found[1], found[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(token_budget=16),
        ClusterKV(token_budget=32),
        ShadowKV(token_budget=24),
        RaaS(token_budget=16),
        RKV(token_budget=16),
    ],
)
@pytest.mark.parametrize("count", [1, 12])
def test_a_copied_cache_goes_on_as_the_cache_does(network: Any, policy: Policy, count: int) -> None:
    """A copy lacked what the policy keeps of a sequence: SnapKV read other tokens of the prompt."""
    with sparse(network, policy, page_size=8):
        first = decode(network, prompts(45), max_new_tokens=count, min_new_tokens=count)
        copied = copy.deepcopy(past_of(first))
        wanted = turn(network, first, NONE, max_new_tokens=24, min_new_tokens=24)
        got = turn(network, first, NONE, past=copied, max_new_tokens=24, min_new_tokens=24)
        straight = decode(
            network, prompts(45), max_new_tokens=count + 24, min_new_tokens=count + 24
        )
    assert_same(got, wanted, 0)
    assert torch.equal(wanted.sequences, straight.sequences)


def test_a_cache_that_is_collected_in_a_forward_is_freed_after_it(network: Any) -> None:
    """Its pages were freed at once, also in the middle of an allocation."""
    inputs, used = prompts(9), []
    with sparse(network, page_size=4):
        cycle: list[Any] = [past_of(forward(network, inputs))]
        cycle.append(cycle)  # so that only the garbage collector finds it
        pages = cycle[0].pages

        def collect(*_: Any) -> None:
            cycle.clear()
            gc.collect()
            used.append(pages.in_use)

        handle = network.model.layers[2].register_forward_pre_hook(collect)
        past = past_of(forward(network, inputs))
        handle.remove()
        past = past_of(forward(network, {"input_ids": inputs["input_ids"][:, :1]}, past=past))
    assert used == [6]  # 9 tokens, twice
    pages.check_integrity(row.pages for row in past.rows)


def test_a_cache_is_copied_between_forwards_of_other_threads(network: Any) -> None:
    """Both allocated at once, and could get the same pages."""
    copies: list[Any] = []
    with sparse(network, ClusterKV(token_budget=32), page_size=4):
        past = past_of(forward(network, prompts(9)))
        thread = threading.Thread(target=lambda: copies.append(copy.deepcopy(past)))

        def start(*_: Any) -> None:
            copies.append(copy.deepcopy(past))  # its own thread need not wait
            thread.start()
            thread.join(0.5)
            assert len(copies) == 1

        handle = network.model.layers[2].register_forward_pre_hook(start)
        forward(network, prompts(9))
        handle.remove()
        thread.join(60)
        assert len(copies) == 2
        # Only here are the pages of the second forward freed.
        copies.append(copy.deepcopy(past))
    holders = (row.pages for cache in (past, *copies) for row in cache.rows)
    past.pages.check_integrity(holders)


def test_a_cache_is_taken_by_its_earlier_name_too(network: Any) -> None:
    """In transformers 5.24 `past_key_values` became `cache`; both are understood there."""
    ids = prompts(12)["input_ids"]
    wanted = forward(network, {"input_ids": ids}).logits[:, 8:]
    with sparse(network, page_size=4):
        past = past_of(forward(network, {"input_ids": ids[:, :8]}))
        found = forward(network, {"input_ids": ids[:, 8:]}, past_key_values=past).logits
    assert torch.allclose(found, wanted, atol=1e-4)
