"""Sinks, window and the blocks whose representatives score best, in a whole model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keyhole import LLM, ConfigError, InfLLM, SamplingParams
from keyhole.engine.engine import Engine
from tests.oracle import (
    Array,
    Choice,
    best,
    float64,
    in_order,
    most_received,
    tokens_of,
    window_weights,
)
from tests.policies.models import PROMPTS, prompt, twins
from tests.policies.recording import (
    GREEDY,
    PAGE,
    check_against,
    check_offloaded,
    forced,
    forced_logits,
    make_engine,
    run,
    steps,
)
from tests.policies.shapes import shape


@pytest.mark.one_in(27)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama_group3", {}),
        ("llama_mha", {}),
        ("llama_mqa", {}),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
        ("gemma2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
@pytest.mark.parametrize(
    ("settings", "block", "ends", "window"),
    [
        ({"token_budget": 16}, 4, (1, 2), 8),
        ({"token_budget": 20, "full_layers": (0,), "num_representatives": 2}, 4, (1, 3), 12),
        (
            {"token_budget": 23, "sink_size": 5, "window_size": 1, "num_representatives": 1},
            *(4, (2, 1), 1),
        ),
        ({"token_budget": 8, "sink_size": 0, "window_size": 3}, 4, (0, 1), 3),
        ({"token_budget": 35, "block_size": 8, "window_size": 9, "sink_size": 0}, 8, (0, 4), 9),
        ({"token_budget": 24, "block_size": 12, "sink_size": 1, "window_size": 2}, 12, (1, 2), 2),
    ],
)
def test_a_whole_model_reads_ends_and_the_best_blocks_between(
    kind: str,
    fields: dict[str, Any],
    settings: dict[str, Any],
    block: int,
    ends: tuple[int, int],
    window: int,
) -> None:
    """The rule of the authors' code, with loops: sums of the local window's attention
    probabilities per query head, the most attended tokens of a block, the mean of their keys,
    one list of blocks for all heads.

    A block is there when the window has left it; the tokens between it and the window are read.
    ends: pages of sinks and of the window. Ragged, and prompts in chunks.
    """
    given: dict[int, Array] = {}
    count, size, init = settings.get("num_representatives", 4), block // PAGE, ends[0] * PAGE

    def watch(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> None:
        given[layer] = window_weights(query, keys, window, init, options)

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        pages, most = -(-length // PAGE), settings["token_budget"] // PAGE
        if layer in settings.get("full_layers", ()) or pages <= most:
            return None
        received = given[layer][:, :length, :length].sum(1)
        scores = []
        for start in range(ends[0], pages - ends[1], size):
            tokens = slice(start * PAGE, (start + size) * PAGE)
            if start + size > pages - ends[1]:
                scores.append(math.inf)
                continue
            means = most_received(keys[:, tokens], received[:, tokens], count)
            scores.append(math.fsum(float(q @ k) for q, k in zip(query, means, strict=True)))
        chosen = best(scores, (most - sum(ends)) // size)
        read = {*range(ends[0]), *range(pages - ends[1], pages)}
        for i in chosen:
            start = ends[0] + i * size
            read |= set(range(start, min(start + size, pages - ends[1])))
        return [sorted(read)], [tokens_of(sorted(read), PAGE, length)]

    layers = len(fields.get("layer_types", "two"))
    model, network = twins(kind, num_hidden_layers=layers, **fields)
    policy = InfLLM(**settings)
    assert check_against(choose, model, network, policy, PROMPTS, watch=watch)


POLICY = InfLLM(token_budget=20, sink_size=2, window_size=7, num_representatives=2)


class Checked:
    """What tokens of running requests received, found from scratch from all their queries."""

    def __init__(self, network: Any, window: int, init: int) -> None:
        self._network, self._window, self._init = network, window, init
        self._known: dict[tuple[int, ...], list[tuple[Array, Array]]] = {}

    def of(self, tokens: list[int]) -> list[tuple[Array, Array]]:
        """Per layer [Hq, n], and the keys [Hkv, n, D]."""
        if tuple(tokens) not in self._known:
            found: list[tuple[Array, Array]] = []
            self._found = found
            self._network.set_attn_implementation("oracle")
            with torch.no_grad():
                self._network(input_ids=torch.tensor([tokens]), use_cache=False, oracle=self)
            self._known[tuple(tokens)] = found
        return self._known[tuple(tokens)]

    def attend(
        self,
        layer: int,
        query: Array,
        keys: Array,
        values: Array,
        *,
        window: int | None,
        options: dict[str, Any],
    ) -> Array:
        """Dense attention, as the budget covers everything."""
        weights = window_weights(query, keys, self._window, self._init, options)
        self._found.append((weights.sum(1), keys))
        keys, values = (x.repeat(len(query) // len(x), axis=0) for x in (keys, values))
        logits = options["scale"] * query @ keys.transpose(0, 2, 1)
        place = np.arange(query.shape[1])
        shares = np.where(place <= place[:, None], np.exp(logits), 0.0)
        shares /= shares.sum(2, keepdims=True)
        return (shares @ values).transpose(1, 0, 2)


def check_received(engine: Engine, checked: Checked, *, near: float) -> int:
    """Sums and representatives of all running requests are those found from scratch.

    What known tokens received is complete before their last window is computed again.
    """
    number = 0
    for request in engine.scheduler.running:
        length = request.num_computed
        if not length or (request.first and length < request.first + 7):
            continue
        pages = request.pages[: -(-length // PAGE)]
        for layer, (sums, _) in enumerate(checked.of(request.tokens[:length])):
            data = engine.cache.data[layer]
            found = float64(data["received"][pages]).sum(1)  # [n, Hq, PAGE]
            found = found.transpose(1, 0, 2).reshape(len(sums), -1)[:, :length]
            assert np.abs(found - sums).max() <= near * max(1.0, sums.max())
            keys = in_order(engine.cache.keys[layer], pages, length)
            # Sinks are one page, the window with what is left beside blocks of a page two.
            for block in range(1, len(pages) - 2):
                tokens = slice(block * PAGE, (block + 1) * PAGE)
                mean = most_received(keys[:, tokens], found[:, tokens], 2)
                stored = float64(data["representative"][pages[block]])
                assert np.abs(stored - mean).max() <= near * (1 + np.abs(mean).max())
                number += 1
    return number


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("llama_group3", "float32"), ("llama", "bfloat16")])
def test_what_tokens_received_is_what_is_found_from_scratch_at_every_step(
    kind: str, dtype: str
) -> None:
    """In chunks and step by step, with cached prefixes, and after pre-emption.

    Requests with the same prefix differ in what its last tokens receive.
    """
    model, network = twins(kind, dtype=dtype, num_hidden_layers=2)
    policy = dataclasses.replace(POLICY, full_layers=())
    # Everything is read, so that the queries are those of dense attention.
    policy = dataclasses.replace(policy, token_budget=80, window_size=7, block_size=PAGE)
    resolved = policy.resolve(model.geometry(PAGE))
    assert resolved._ends(PAGE) == (1, 2)
    probe = make_engine(model, policy)
    engine = make_engine(model, policy, memory=30 * probe.cache.page_bytes, prefill_chunk=7)
    params = dataclasses.replace(GREEDY, max_tokens=16)
    start = prompt(16)
    requests = [engine.add(start + prompt(n), params) for n in (9, 3, 13)]
    requests += [engine.add(start, params), engine.add(start + prompt(9), params)]
    checked, number, preempted = Checked(network, 7, PAGE), 0, 0
    near = 1e-5 if dtype == "float32" else 0.05
    for _ in steps(engine):
        number += check_received(engine, checked, near=near)
        preempted += any(request.generated for request in engine.scheduler.waiting)
    assert number > 100
    assert preempted
    assert max(request.stats().cached_prompt_tokens for request in requests) >= 8


@pytest.mark.slow
def test_chunks_of_any_size_give_the_same() -> None:
    model, _ = twins("llama_group3", num_hidden_layers=3)
    job = prompt(150), prompt(9)
    whole = forced_logits(model, POLICY, *job, prefill_chunk=1000)
    for chunk in (1, 5, 64, 149):
        part = forced_logits(model, POLICY, *job, prefill_chunk=chunk)
        assert (part - whole).abs().max() <= 1e-4


@pytest.mark.slow
def test_a_known_beginning_is_computed_again_from_a_window_before_its_end() -> None:
    """Its last tokens received what another continuation gave them."""
    model, _ = twins("llama_group3", num_hidden_layers=3)
    start, policy = prompt(40), POLICY
    engine = make_engine(model, policy)
    for seed, cached in ((1, 0), (2, 32), (3, 32)):  # 7 tokens before the 40th, in whole pages
        job = start + prompt(11, seed), prompt(9, seed)
        request = forced(engine, *job)
        run(engine)
        assert request.stats().cached_prompt_tokens == cached
        alone = forced_logits(model, policy, *job, prefix_cache=False)
        assert (torch.stack(request.logits) - alone).abs().max() <= 1e-4


def test_representatives_and_what_the_window_received_are_counted() -> None:
    model, _ = twins("llama", num_hidden_layers=5)
    policy = InfLLM(token_budget=12, window_size=4, full_layers=(0,))
    engine = make_engine(model, policy)
    request = engine.add(prompt(15), dataclasses.replace(GREEDY, max_tokens=4))
    run(engine)
    heads, layout = model.geometry(PAGE).num_query_heads, model.geometry(PAGE).layers[0]
    # One page of sinks, one of the window, and 4, 5, 5 pages in all.
    blocks = sum(pages - 2 for pages in (4, 5, 5))
    numbers = blocks * heads * layout.key_dim + 3 * 2 * heads * 4
    assert request.stats().other_bytes_read == 4 * 4 * numbers


@pytest.mark.slow
def test_layers_on_a_lower_tier_change_nothing(tmp_path: Path) -> None:
    model, _ = twins("llama", num_hidden_layers=6)
    check_offloaded(model, POLICY, tmp_path)


def test_stored_documents_are_refused(tmp_path: Path) -> None:
    """Their queries are not stored; where they are computed again, nothing is missing."""
    model, _ = twins("llama", num_hidden_layers=2)
    llm = LLM(model, POLICY, page_size=PAGE, documents=tmp_path / "documents")
    llm.documents.add("one", {"prompt_token_ids": prompt(70)}, block_size=64)
    question, params = {"prompt_token_ids": prompt(9)}, SamplingParams(max_tokens=4)
    for reuse in ("sam_kv", "reuse", "epic"):
        with pytest.raises(ConfigError, match="'infllm' needs the queries of a prompt"):
            llm.ask(question, ["one"], reuse=reuse, params=params)
    assert (
        llm.ask(question, ["one"], reuse="recompute", params=params).stats.attended_fraction < 0.6
    )


@pytest.mark.parametrize(
    ("budget", "page", "block", "window", "ends"),
    [
        (1024, 16, 64, 672, (1, 43)),
        (4096, 16, 64, 2720, (1, 171)),
        (256, 16, 32, 160, (1, 11)),
        (100, 16, 16, 64, (1, 4)),
        (1024, 24, 48, 672, (1, 29)),
        (1024, 128, 128, 640, (1, 5)),
        (48, 16, 16, 16, (1, 1)),
    ],
)
def test_blocks_and_window_follow_the_budget(
    budget: int, page: int, block: int, window: int, ends: tuple[int, int]
) -> None:
    """What blocks leave of the budget goes to the window."""
    resolved = InfLLM(token_budget=budget).resolve(shape(4, page))
    assert (resolved.block_size, resolved.window_size) == (block, window)
    assert resolved._ends(page) == ends
    assert (budget // page - sum(ends)) % (block // page) == 0


@pytest.mark.parametrize(("budget", "page"), [(6272, 16), (1024, 16), (64, 16), (6272, 128)])
def test_as_published_has_the_shares_of_the_authors(budget: int, page: int) -> None:
    """128 first tokens, a window of 4096 and 16 blocks of 128; 4 tokens stand for a block."""
    policy = InfLLM.as_published(shape(4, page), budget).resolve(shape(4, page))
    assert policy.num_representatives == 4
    assert policy.outside_budget() == ""
    if budget == 6272:
        assert (policy.sink_size, policy.window_size, policy.block_size) == (128, 4096, 128)
        first, last = policy._ends(page)
        assert (budget // page - first - last) // (128 // page) == 16


def test_a_known_beginning_is_taken_as_far_as_one_sequence_went_on() -> None:
    """Another text's page stood for the last page of the common beginning.

    Two texts with one beginning are computed at once. The shorter ends first, so the index has its
    pages of the beginning, then those of the longer one. Attention that the last tokens of the
    beginning received came from the shorter one, and a third request took it for its own.
    """
    model, network = twins("llama_group3", num_hidden_layers=2)
    policy = dataclasses.replace(
        POLICY, full_layers=(), token_budget=80, window_size=7, block_size=PAGE
    )
    engine = make_engine(model, policy, prefill_chunk=64)
    start = prompt(16)
    long = start + prompt(13)
    engine.add(start + prompt(5), dataclasses.replace(GREEDY, max_tokens=1))
    engine.add(long, dataclasses.replace(GREEDY, max_tokens=4))
    for _ in steps(engine):
        pass
    third = engine.add(long, dataclasses.replace(GREEDY, max_tokens=16))
    checked, number = Checked(network, 7, PAGE), 0
    for _ in steps(engine):
        number += check_received(engine, checked, near=1e-5)
    assert number
    assert third.stats().cached_prompt_tokens == 8  # a window of 7 before the beginning ends
