"""Sinks, window and the blocks whose representatives score best, in a whole model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from keyhole import ConfigError, InfLLM
from keyhole.engine.core import Engine
from tests.oracle import Array, Choice, best, float64, in_order, tokens_of
from tests.policy.models import PROMPTS, prompt, twins
from tests.policy.recording import GREEDY, PAGE, check_against, make_engine, steps
from tests.policy.shapes import shape


def distances(keys: Array) -> list[float]:
    """Squared distance of each key [n, D] of a page from their mean."""
    mean = [math.fsum(column) / len(keys) for column in keys.T]
    return [math.fsum((k - m) ** 2 for k, m in zip(key, mean, strict=True)) for key in keys]


def scores_of_pages(query: Array, keys: Array) -> list[float]:
    """The sum over query heads of their product with the page's representative key."""
    group, scores = len(query) // len(keys), []
    for start in range(0, keys.shape[1], PAGE):
        total = 0.0
        for head in range(len(query)):
            page = keys[head // group, start : start + PAGE]
            far = distances(page)
            total += float(query[head] @ page[far.index(max(far))])
        scores.append(total)
    return scores


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama_group3", {}),
        ("llama_mha", {}),
        ("llama_mqa", {}),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 4}),
    ],
)
@pytest.mark.parametrize(
    ("settings", "block", "ends"),
    [
        ({"token_budget": 16}, 4, (1, 2)),
        ({"token_budget": 23, "sink_size": 5, "window_size": 1}, 4, (2, 1)),
        ({"token_budget": 8, "sink_size": 0, "window_size": 4}, 4, (0, 1)),
        ({"token_budget": 35, "block_size": 8, "window_size": 9}, 8, (1, 2)),
        ({"token_budget": 24, "block_size": 12, "sink_size": 0, "window_size": 2}, 12, (0, 1)),
    ],
)
def test_a_whole_model_reads_ends_and_the_best_blocks_between(
    tmp_path: Path,
    kind: str,
    fields: dict[str, Any],
    settings: dict[str, int],
    block: int,
    ends: tuple[int, int],
) -> None:
    """One list for all heads; a block's score is the mean of its pages'."""

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        by_page, size = scores_of_pages(query, keys), block // PAGE
        parts = [by_page[i : i + size] for i in range(0, len(by_page), size)]
        means = [math.fsum(part) / len(part) for part in parts]
        blocks = best(means, settings["token_budget"] // block, first=ends[0], last=ends[1])
        pages = [i for i in range(len(by_page)) if i // size in blocks]
        return [pages], [tokens_of(pages, PAGE, keys.shape[1])]

    layers = len(fields.get("layer_types", "four"))
    model, network = twins(kind, tmp_path, num_hidden_layers=layers, **fields)
    assert check_against(choose, model, network, InfLLM(**settings), PROMPTS)


def check_representatives(engine: Engine) -> None:
    """The stored key of every page in use is that of a token farthest from the page's mean."""
    for request in engine.scheduler.running:
        length = request.num_computed
        pages = request.pages[: -(-length // PAGE)]
        for layer in engine.geometry.full_attention if length else ():
            found = float64(engine.cache.data[layer]["representative"])
            keys = in_order(engine.cache.keys[layer], pages, length)
            for place, page in enumerate(pages):
                for head, tokens in enumerate(keys[:, place * PAGE : (place + 1) * PAGE]):
                    far = distances(tokens)
                    same = [(found[page, head] == token).all() for token in tokens]
                    assert any(same)
                    assert far[same.index(True)] >= max(far) - 1e-5 * (1 + max(far))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("deepseek_v3", "float32")]
)
def test_representatives_are_those_found_from_scratch_at_every_step(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    """Also of generated tokens, shared pages, pages written in parts, and after pre-emption."""
    model, _ = twins(kind, tmp_path, dtype=dtype, num_hidden_layers=3)
    policy = InfLLM(token_budget=12)
    probe = make_engine(model, policy)
    engine = make_engine(model, policy, memory=30 * probe.cache.page_bytes, prefill_chunk=7)
    params = dataclasses.replace(GREEDY, max_tokens=20)
    start = prompt(16)
    requests = [engine.add(start + prompt(n), params) for n in (9, 3, 13)]
    requests.append(engine.add(start, params))
    preempted = 0
    for _ in steps(engine):
        check_representatives(engine)
        preempted += any(request.generated for request in engine.scheduler.waiting)
    assert preempted
    assert max(request.stats().cached_prompt_tokens for request in requests) >= 15
    assert all(len(request.generated) == 20 for request in requests)


def test_representatives_are_counted(tmp_path: Path) -> None:
    model, _ = twins("llama", tmp_path, num_hidden_layers=5)
    engine = make_engine(model, InfLLM(token_budget=8))
    request = engine.add(prompt(11), dataclasses.replace(GREEDY, max_tokens=4))
    for _ in steps(engine):
        pass
    pages = sum(-(-length // PAGE) for length in (12, 13, 14))
    one_key = 2 * 8 * 4  # KV heads, head size, bytes of a float32
    assert request.stats().other_bytes_read == 5 * pages * one_key


@pytest.mark.parametrize(
    ("budget", "page", "block", "window"),
    [
        (1024, 16, 64, 512),
        (4096, 16, 64, 2048),
        (256, 16, 32, 128),
        (100, 16, 16, 48),
        (1024, 24, 48, 480),
        (1024, 128, 128, 512),
    ],
)
def test_blocks_and_window_follow_the_budget(
    budget: int, page: int, block: int, window: int
) -> None:
    resolved = InfLLM(token_budget=budget).resolve(shape(4, page))
    assert (resolved.block_size, resolved.window_size) == (block, window)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"token_budget": 15}, "token_budget 15 must be at least one page of 16"),
        ({"token_budget": 16}, "token_budget 16 must be at least 32: sink_size 4 and window_size"),
        ({"block_size": 24}, "block_size 24 must be a multiple of the page size 16"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 2048}, "block_size 2048 must be .* up to token_budget 1024"),
        ({"window_size": 0}, "window_size"),
        ({"window_size": 1000}, "token_budget 1024 must be at least 1088"),
        ({"sink_size": -1}, "sink_size"),
        ({"sink_size": 600}, "token_budget 1024 must be at least 1152"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        InfLLM(**settings).resolve(shape(4))
