"""Outliers, newest chunks, chunks of best landmarks and rebuilt keys, in a whole model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keyhole import LLM, ConfigError, SamKV, SamplingParams, ShadowKV
from keyhole.engine.engine import Engine
from keyhole.kernels import cpu
from tests.checkpoints import make_model
from tests.oracle import Array, Choice, best, float64, in_order
from tests.policies.models import PROMPTS, prompt, twins
from tests.policies.recording import (
    GREEDY,
    PAGE,
    check_against,
    check_under_pressure,
    forced,
    forced_logits,
    make_engine,
    run,
)
from tests.policies.shapes import shape

LENGTHS = [len(one) for one in PROMPTS]


def landmark(keys: Array) -> tuple[Array, float]:
    """The mean of a chunk's keys [n, D], and the smallest cosine of one of them with it."""
    mean = keys.mean(0)
    norms = [max(1e-8, float(np.linalg.norm(k))) for k in (mean, *keys)]
    return mean, min(float(k @ mean) / norms[0] / n for k, n in zip(keys, norms[1:], strict=True))


def outliers(
    keys: Array, start: int, chunk: int, count: int, local: int, first: int = 0
) -> list[int]:
    """The first chunks of one head's prompt keys [start, D], and those that fit worst.

    The last `local` ones are not looked at.
    """
    chunks = range(first, max(first, start // chunk - local))
    fits = [landmark(keys[i * chunk : (i + 1) * chunk])[1] for i in chunks]
    return [*range(first), *(first + i for i in best([-fit for fit in fits], count))]


def chosen(query: Array, keys: Array, taken: list[int], local: int, count: int) -> list[int]:
    """The chunks that one KV head reads, for queries [G, D] and landmarks [C, D]."""
    others = [i for i in range(len(keys) - local) if i not in taken]
    scores = [0.0] * len(keys)
    for head in query:
        logits = [float(head @ keys[i]) / math.sqrt(len(head)) for i in others]
        total = math.fsum(math.exp(x - max(logits)) for x in logits)
        for i, logit in zip(others, logits, strict=True):
            scores[i] = max(scores[i], math.exp(logit - max(logits)) / total)
    always = [math.inf if i in taken else score for i, score in enumerate(scores)]
    return best(always, count, last=local)


def turned(keys: Array, by: Array, theta: float) -> Array:
    """Keys [..., D] rotated by this many positions, pairs (i, i + D / 2)."""
    half = keys.shape[-1] // 2
    angle = by[..., None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = keys[..., :half], keys[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def of_low_rank(keys: Array, rank: int, theta: float) -> Array:
    """Prompt keys [Hkv, P, D] with the rank of their form before RoPE, all heads side by side."""
    heads, length, dim = keys.shape
    places = np.arange(length)
    flat = turned(keys, -places, theta).transpose(1, 0, 2).reshape(length, heads * dim)
    u, s, v = np.linalg.svd(flat, full_matrices=False)
    low = (u[:, :rank] * s[:rank]) @ v[:rank]
    return turned(low.reshape(length, heads, dim).transpose(1, 0, 2), places, theta)


GENERATED = {"token_budget": 16, "rank": 0, "keep_generated": True}
#: Published: what is chosen is the budget, and all else stands beside it.
PUBLISHED = {"keep_generated": True, "always_beside": True, "chunk_size": 2}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "settings", "chunk", "numbers", "rank"),
    [  # numbers: outlier chunks, newest chunks
        ("llama_mha", {"token_budget": 16}, 4, (1, 1), 16),
        ("llama_mqa", {"token_budget": 19, "chunk_size": 2}, 2, (3, 1), 4),
        ("llama_group3", {"token_budget": 23, "outlier_chunks": 2, "rank": 7}, 4, (2, 1), 7),
        ("llama_group3", {"token_budget": 12, "outlier_chunks": 0, "rank": 16}, 4, (0, 1), 16),
        (
            "llama_group3",
            {"token_budget": 16, "chunk_size": 2, "window_size": 5, "rank": 0},
            *(2, (3, 3), 0),
        ),
        (
            "llama_group3",
            {"token_budget": 24, "chunk_size": 2, "sink_size": 3, "full_layers": (1, 2), "rank": 9},
            *(2, (4, 1), 9),
        ),
        ("gemma3", {"token_budget": 16, "rank": 0}, 4, (1, 1), 0),
        ("llama_mha", GENERATED, 4, (1, 1), 0),
        ("llama_group3", GENERATED | {"rank": 3, "chunk_size": 2}, 2, (3, 1), 3),
        (
            "llama_group3",
            {"token_budget": 6, "outlier_chunks": 2, "window_size": 4, "rank": 7} | PUBLISHED,
            *(2, (2, 2), 7),
        ),
        (
            "llama_mqa",
            {"token_budget": 4, "outlier_chunks": 3, "sink_size": 1, "rank": 0, "window_size": 1}
            | PUBLISHED,
            *(2, (3, 1), 0),
        ),
        ("llama_mha", {"token_budget": 4, "chunk_size": 2, "always_beside": True}, 2, (0, 1), 16),
    ],
)
def test_a_whole_model_reads_the_chunks_of_best_landmarks(
    kind: str,
    settings: dict[str, Any],
    chunk: int,
    numbers: tuple[int, int],
    rank: int,
) -> None:
    """Ragged, in chunks; keys that are rebuilt, too, where the rank is not 0.

    The authors choose among whole chunks of the prompt, its last 4 and what follows them apart, and
    read outliers, these and all generated tokens beside what they choose.
    """
    count, local = settings["token_budget"] // chunk, numbers[1]
    first = -(-settings.get("sink_size", 0) // chunk)
    count += first + sum(numbers) if settings.get("always_beside") else 0
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    fields: dict[str, Any] = windows if kind == "gemma3" else {}
    model, network = twins(kind, num_hidden_layers=4, **fields)
    rebuilt: dict[tuple[int, int], Array] = {}
    own: dict[tuple[int, int], list[set[int]]] = {}

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        start = max(n for n in LENGTHS if n < length)
        if length <= count * chunk or layer in settings.get("full_layers", ()):
            return None
        end = start // chunk * chunk if settings.get("keep_generated") else length
        parts = [range(i, min(end, i + chunk)) for i in range(0, end, chunk)]
        lists, apart = [], []
        for head, group in zip(keys, query.reshape(len(keys), -1, query.shape[1]), strict=True):
            taken = outliers(head, start, chunk, numbers[0], local, first)
            means = np.stack([landmark(head[list(part)])[0] for part in parts] or [head[0]])
            read = chosen(group, means, taken, local, count) if parts else []
            tokens = [i for c in read for i in parts[c]]
            lists.append(tokens + list(range(end, length)))
            apart.append(
                {i for c in (*taken, *range(len(parts) - local, len(parts))) for i in parts[c]}
                | set(range(min(start, end), length))
            )
        own[layer, length] = apart
        return lists, lists

    def keys_of(layer: int, keys: Array, choice: Choice) -> Array:
        length = keys.shape[1]
        if choice is None or not rank:
            return keys
        start = max(n for n in LENGTHS if n < length)
        if (layer, start) not in rebuilt:
            theta = network.config.rope_parameters["rope_theta"]
            rebuilt[layer, start] = of_low_rank(keys[:, :start], rank, theta)
        found = keys.copy()
        for head, apart in enumerate(own[layer, length]):
            low = [i for i in range(start) if i not in apart]
            found[head, low] = rebuilt[layer, start][head, low]
        return found

    policy = ShadowKV(**settings)
    assert check_against(choose, model, network, policy, PROMPTS, keys_of=keys_of)


def check_landmarks(engine: Engine) -> None:
    """The stored means and cosines of all chunks in use are those found from scratch."""
    for request in engine.scheduler.running:
        length = request.num_computed
        pages = request.pages[: -(-length // PAGE)]
        for layer in engine.geometry.full_attention if length else ():
            data = engine.cache.data[layer]
            near = 2**-7 if data["landmark"].itemsize == 2 else 1e-5
            means, cosines = (float64(data[name]) for name in ("landmark", "cosine"))
            keys = in_order(engine.cache.keys[layer], pages, length)
            for start in range(0, length, 2):
                page, place = pages[start // PAGE], start % PAGE // 2
                for head, own in enumerate(keys):
                    mean, cosine = landmark(own[start : start + 2])
                    difference = np.abs(means[page, place, head] - mean).max()
                    assert difference <= near * (1 + np.abs(mean).max())
                    assert abs(cosines[page, place, head] - cosine) <= near


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_landmarks_are_those_found_from_scratch_at_every_step(dtype: str) -> None:
    """Also of generated tokens, copied pages, pages written in parts, and after pre-emption."""
    model, _ = twins("llama", dtype=dtype, num_hidden_layers=2)
    policy = ShadowKV(token_budget=12, chunk_size=2)
    check_under_pressure(model, policy, check_landmarks, tokens=16)


@pytest.mark.slow
def test_prompts_with_one_beginning_have_keys_of_low_rank_of_their_own() -> None:
    """The later ones take its pages from the first, while that one reads."""
    model, _ = twins("llama", num_hidden_layers=4)
    policy, start = ShadowKV(token_budget=12, rank=3), prompt(24)
    engine = make_engine(model, policy, prefill_chunk=16)
    jobs = [(start + prompt(n), prompt(9, n)) for n in (9, 3, 13)]
    requests = [forced(engine, *jobs[0])]
    while not requests[0].is_decoding or not requests[0].num_computed:
        engine.step()
    requests += [forced(engine, *job) for job in jobs[1:]]
    run(engine)
    assert requests[1].stats().cached_prompt_tokens == 24
    for job, request in zip(jobs, requests, strict=True):
        alone = forced_logits(model, policy, *job)
        assert (torch.stack(request.logits) - alone).abs().max() <= 1e-4


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "rank"), [("llama", 16), ("deepseek_v3", 20), ("gpt_bigcode", 8), ("gemma3", 16)]
)
def test_keys_of_full_rank_are_the_keys(kind: str, rank: int) -> None:
    """Turned back, decomposed, rebuilt and turned again; with latents, learned positions and
    layers of another RoPE too."""
    fields = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    more: dict[str, Any] = fields if kind == "gemma3" else {}
    model, _ = twins(kind, num_hidden_layers=4, **more)
    job, layout = (prompt(60), prompt(9)), model.geometry(PAGE).layers[1]
    rank = layout.num_kv_heads * layout.key_dim
    logits = {
        r: forced_logits(model, ShadowKV(token_budget=12, rank=r), *job) for r in (0, 1, rank)
    }
    assert (logits[0] - logits[rank]).abs().max() <= 2e-4
    assert (logits[0] - logits[1]).abs().max() > 1e-2


@pytest.fixture
def float_kernels() -> Iterator[None]:
    """Kernels that multiply keys of 8 bits as floats.

    With AVX-512 they are multiplied as whole numbers, but gathered ones as floats. Results differ
    by 2^-16, which a model in bfloat16 enlarges to what rounding twice would do.
    """
    before = cpu.current()
    cpu.use(next(path for path in cpu.paths() if path not in ("amx", "avx512")))
    yield
    cpu.use(before)


@pytest.mark.usefixtures("float_kernels")
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_sequence_within_the_budget_is_exact_beside_longer_ones(
    kv_dtype: str, tmp_path: Path
) -> None:
    """Keys and values of 8 bits were rounded again, to the model's 16 bits."""
    path = make_model("llama", tmp_path, num_hidden_layers=4)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    found = []
    for policy in ("full", ShadowKV(token_budget=48)):
        engine = LLM(
            path, policy, device="cpu", dtype="bfloat16", kv_dtype=kv_dtype, prefix_cache=False
        ).engine
        sequences = [engine.add(prompt(n), params, keep_logits=True) for n in (90, 18, 41)]
        while engine.has_work:
            engine.step()
        # The third one has exactly as many tokens as the budget at the last step.
        found.append(torch.stack([*sequences[1].logits, *sequences[2].logits]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


def test_reads_besides_keys_are_counted() -> None:
    model, _ = twins("llama", num_hidden_layers=3)
    engine = make_engine(model, ShadowKV(token_budget=12, rank=5))
    request = engine.add(prompt(17), dataclasses.replace(GREEDY, max_tokens=5))
    run(engine)
    chunks = sum(-(-length // 4) for length in range(18, 22))
    numbers = chunks * 2 * 8 + 4 * (12 * 2 * 5 + 5 * 2 * 8)
    assert request.stats().other_bytes_read == 3 * 4 * numbers


@pytest.mark.slow
def test_layers_on_a_lower_tier_need_keys_as_they_are(tmp_path: Path) -> None:
    model, _ = twins("llama", num_hidden_layers=6)
    params, policy = dataclasses.replace(GREEDY, max_tokens=40), ShadowKV(token_budget=12, rank=0)
    plain = make_engine(model, policy)
    below: dict[str, Any] = {"memory": 20 * plain.cache.page_bytes, "offload": tmp_path}
    with pytest.raises(ConfigError, match="'shadowkv' with offload= needs rank=0"):
        make_engine(model, ShadowKV(token_budget=12), max_batch=1, **below)
    engine = make_engine(model, policy, max_batch=1, **below)
    requests = [one.add(prompt(70), params, keep_logits=True) for one in (plain, engine)]
    run(plain)
    run(engine)
    assert requests[1].stats().offloaded_layers
    assert (torch.stack(requests[0].logits) - torch.stack(requests[1].logits)).abs().max() <= 1e-5


def test_documents_of_which_tokens_may_be_dropped_are_refused(tmp_path: Path) -> None:
    model, _ = twins("llama", num_hidden_layers=2)
    llm = LLM(model, ShadowKV(token_budget=12), page_size=PAGE, documents=tmp_path / "documents")
    llm.documents.add("one", {"prompt_token_ids": prompt(70)}, block_size=8)
    question, params = {"prompt_token_ids": prompt(9)}, SamplingParams(max_tokens=4)
    with pytest.raises(ConfigError, match=r"'shadowkv' needs every token .* 'sam_kv' may drop"):
        llm.ask(question, ["one"], reuse=SamKV(block_size=8), params=params)
    assert llm.ask(question, ["one"], reuse="reuse", params=params).stats.attended_fraction < 0.5


@pytest.mark.parametrize(
    ("budget", "page", "chunk", "outlying", "window"),
    [(1024, 16, 8, 48, 32), (256, 16, 8, 12, 32), (4096, 4, 4, 48, 32), (16, 16, 8, 0, 8)],
)
def test_sizes_follow_the_budget(
    budget: int, page: int, chunk: int, outlying: int, window: int
) -> None:
    resolved = ShadowKV(token_budget=budget).resolve(shape(4, page))
    found = resolved.chunk_size, resolved.outlier_chunks, resolved.window_size
    assert found == (chunk, outlying, window)


def test_as_published_selects_the_budget_and_reads_the_rest_outside_it() -> None:
    """48 outlier chunks of 8, the last 4 chunks of the prompt, and all generated tokens."""
    policy = ShadowKV.as_published(shape(4), 256).resolve(shape(4))
    assert (policy.outlier_chunks, policy.window_size, policy.chunk_size) == (48, 32, 8)
    assert policy._covered == 256 + 384 + 32
    named = "outlier and newest chunks and all generated tokens"
    assert policy.outside_budget() == named
    assert dataclasses.replace(policy, sink_size=4, keep_generated=False).outside_budget() == (
        "first, outlier and newest chunks"
    )
    assert ShadowKV(token_budget=256).resolve(shape(4)).outside_budget() == ""
