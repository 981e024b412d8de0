"""k-means of the keys, and the clusters that a query reads, in a whole model."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import keyhole
from keyhole import LLM, ClusterKV, ConfigError, SamKV, SamplingParams, kernels
from keyhole.cache.argument import cache_argument
from keyhole.engine.engine import Engine
from keyhole.policies import clusterkv
from tests.checkpoints import make_model
from tests.hf.generating import past_of
from tests.oracle import Array, Choice, float64, in_order
from tests.policies.models import PROMPTS, prompt, twins
from tests.policies.recording import (
    GREEDY,
    PAGE,
    check_against,
    check_offloaded,
    forced,
    make_engine,
    run,
    steps,
)
from tests.policies.shapes import shape

_KNOWN: dict[tuple[bytes, int], tuple[Array, list[int]]] = {}


def k_means(keys: Array, count: int) -> tuple[Array, list[int]]:
    """Means [count, D] and each key's cluster, of keys [n, D]: ten rounds from evenly spaced keys.

    A key joins the mean it has the largest cosine with; a mean without keys stays. The key of the
    padding token is zero in the first layer: its cosine with anything is 0.
    """
    name = keys.tobytes(), count
    if name not in _KNOWN:
        means = np.stack([keys[i * len(keys) // count] for i in range(count)])
        for _ in range(10):
            lengths = np.outer(np.linalg.norm(keys, axis=1), np.linalg.norm(means, axis=1))
            found = (keys @ means.T / np.maximum(lengths, 1e-300)).argmax(1)
            for i in range(count):
                means[i] = keys[found == i].mean(0) if (found == i).any() else means[i]
        _KNOWN[name] = means, found.tolist()
    return _KNOWN[name]


def number(tokens: int, size: int) -> int:
    return max(1, tokens // size) if tokens > 0 else 0


def clusters_of(
    keys: Array,
    start: int,
    length: int,
    *,
    sinks: int,
    size: int,
    every: int,
    of_prompt: int | None = None,
) -> dict[int, tuple[int, Array]]:
    """Token -> its cluster and centroid, of one head's keys [N, D] after a prompt of `start`.

    The newest of `length` tokens is in none yet. of_prompt: clusters of the prompt, if it has so
    many tokens; None: one for each `size` of them. every: 0 where generated tokens are in none.
    """
    pieces = [(sinks, start)]
    pieces += [(i, i + every) for i in range(start, length - every, every)] if every else []
    found: dict[int, tuple[int, Array]] = {}
    base = 0
    for begin, end in pieces:
        count = number(end - begin, size)
        if of_prompt is not None and begin == sinks and end == start:
            count = max(0, min(of_prompt, end - begin))
        if count:
            means, numbers = k_means(keys[begin:end], count)
            for token, cluster in zip(range(begin, end), numbers, strict=True):
                found[token] = base + cluster, means[cluster]
        base += count
    return found


def chosen(
    query: Array, clusters: dict[int, tuple[int, Array]], length: int, budget: int, window: int
) -> list[int]:
    """What one KV head reads of `length` tokens: the window, what is in no cluster, then clusters.

    Earlier tokens first where a cluster is cut, and where clusters score the same (the padding
    token's query is zero in the first layer).
    """
    scores = {i: max(float(head @ mean) for head in query) for i, mean in clusters.values()}
    loose = [i for i in range(length) if i not in clusters or i >= length - window]
    others = set(range(length)) - set(loose)
    by_score = sorted(others, key=lambda token: (-scores[clusters[token][0]], token))
    return sorted(loose + by_score[: budget - len(loose)])


FIRST = {"token_budget": 24, "cluster_size": 5}, 3, 5, 8, (0, 1)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "settings", "sinks", "size", "every", "full"),
    [
        ("llama_mha", *FIRST),
        ("llama_mqa", *FIRST),
        ("gemma3", *FIRST),
        # Not 2: of a token repeated three times the second key is as near to the first as to the
        # third, whatever the model.
        (
            "llama_group3",
            *({"token_budget": 13, "cluster_size": 3, "full_layers": (2,)}, 1, 3, 4, (2,)),
        ),
        (
            "llama_mha",
            {"token_budget": 16, "sink_size": 5, "cluster_every": 1, "full_layers": (0,)},
            *(5, 80, 1, (0,)),
        ),
        (
            "llama_mqa",
            {"token_budget": 20, "window_size": 11, "cluster_size": 3, "full_layers": ()},
            *(2, 3, 6, ()),
        ),
        (
            "llama_group3",
            {"token_budget": 14, "cluster_size": 3, "num_clusters": 7, "full_layers": (0,)},
            *(1, 3, 4, (0,)),
        ),
        (
            "llama_mha",
            {
                "token_budget": 14,
                "cluster_size": 3,
                "cluster_every": 5,
                "generated": "recent_beside",
            },
            *(1, 3, 5, (0, 1)),
        ),
        (
            "llama_group3",
            {
                "token_budget": 9,
                "num_clusters": 5,
                "sink_size": 2,
                "window_size": 3,
                "generated": "all_beside",
                "share_group": False,
                "full_layers": (),
            },
            *(2, 80, 0, ()),
        ),
        (
            "llama_group3",
            {"token_budget": 10, "sink_size": 0, "cluster_every": 10, "cluster_size": 3},
            *(0, 3, 10, (0, 1)),
        ),
    ],
)
def test_a_whole_model_reads_the_clusters_that_score_best(
    kind: str,
    settings: dict[str, Any],
    sinks: int,
    size: int,
    every: int,
    full: tuple[int, ...],
) -> None:
    """Ragged, in chunks; clusters change where enough tokens were generated.

    The authors cut the last cluster where the budget ends, at its latest tokens, and read generated
    tokens beside the budget: all of them ("all_beside", where they measure accuracy), or those that
    wait for a cluster ("recent_beside", where they measure speed).
    """
    budget, lengths = settings["token_budget"], [len(one) for one in PROMPTS]
    beside = settings.get("generated", "counted") != "counted"
    window = settings.get("window_size", 0 if beside else 1)

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        start = max(n for n in lengths if n < length)
        among = length
        if beside:
            among = start + ((length - 1 - start) // every * every if every else 0)
        if layer in full or among <= budget:
            return None
        of_prompt = settings.get("num_clusters")
        rest = {"sinks": sinks, "size": size, "every": every, "of_prompt": of_prompt}
        groups = query.reshape(len(keys), -1, query.shape[1])
        if not settings.get("share_group", True):  # each query head by itself
            keys = keys.repeat(groups.shape[1], axis=0)
            groups = query[:, None]
        lists = [
            chosen(group, clusters_of(head, start, length, **rest), among, budget, window)
            + list(range(among, length))
            for group, head in zip(groups, keys, strict=True)
        ]
        return lists, lists

    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    fields: dict[str, Any] = windows if kind == "gemma3" else {}
    model, network = twins(kind, num_hidden_layers=4, **fields)
    assert check_against(choose, model, network, ClusterKV(**settings), PROMPTS)


POLICY = ClusterKV(token_budget=12, cluster_size=3, full_layers=())


def check_clusters(engine: Engine) -> int:
    """Clusters and centroids of all decoding requests are those found from scratch."""
    checked = 0
    for request in engine.scheduler.running:
        length, start = request.num_computed, len(request.prompt)
        if length <= 12 or length <= start:
            continue
        pages = request.pages[: -(-length // PAGE)]
        for layer in engine.geometry.full_attention:
            data = engine.cache.data[layer]
            stored = data["cluster"].view(
                torch.int16 if data["cluster"].itemsize == 2 else torch.int32
            )
            centroids = float64(data["centroid"][pages]).reshape(-1, *data["centroid"].shape[2:])
            keys = in_order(engine.cache.keys[layer], pages, length)
            for head, own in enumerate(keys):
                wanted = clusters_of(own, start, length, sinks=1, size=3, every=4)
                for token, (cluster, mean) in wanted.items():
                    assert int(stored[pages[token // PAGE], head, token % PAGE]) == cluster
                    near = 2**-7 if data["cluster"].itemsize == 2 else 1e-5
                    assert np.abs(centroids[cluster, head] - mean).max() <= near * (
                        1 + np.abs(mean).max()
                    )
                checked += 1
    return checked


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("deepseek_v3", "float32")]
)
def test_clusters_are_those_found_from_scratch_at_every_step(kind: str, dtype: str) -> None:
    """Requests with one beginning, known from the first of them, differ in their clusters.

    Also after pre-emption, with prompts in chunks, and where the whole prompt is known.
    """
    model, _ = twins(kind, dtype=dtype, num_hidden_layers=2)
    probe = make_engine(model, POLICY)
    engine = make_engine(model, POLICY, memory=30 * probe.cache.page_bytes, prefill_chunk=7)
    params = dataclasses.replace(GREEDY, max_tokens=16)
    start = prompt(16)
    requests = [engine.add(start + prompt(n), params) for n in (9, 3, 13)]
    requests += [engine.add(start, params), engine.add(start + prompt(9), params)]
    preempted = checked = 0
    for _ in steps(engine):
        checked += check_clusters(engine)
        preempted += any(request.generated for request in engine.scheduler.waiting)
    assert checked
    assert preempted
    assert max(request.stats().cached_prompt_tokens for request in requests) >= 15
    assert all(len(request.generated) == 16 for request in requests)


def test_a_cached_prefix_is_computed_again_if_its_copy_does_not_fit() -> None:
    """Pages of a known prompt cannot be given up while they are copied: the request would wait
    for ever."""
    model, _ = twins("llama", num_hidden_layers=2)
    probe = make_engine(model, POLICY)
    engine = make_engine(model, POLICY, memory=14 * probe.cache.page_bytes)
    params = dataclasses.replace(GREEDY, max_tokens=8)
    found = []
    for _ in range(2):
        found.append(engine.add(prompt(40), params, keep_logits=True))
        run(engine)
    assert found[1].stats().cached_prompt_tokens == 0
    assert found[0].generated == found[1].generated
    assert torch.equal(torch.stack(found[0].logits), torch.stack(found[1].logits))


def test_centroids_and_clusters_are_counted() -> None:
    model, _ = twins("llama", num_hidden_layers=5)
    engine = make_engine(model, ClusterKV(token_budget=12, cluster_size=3))
    request = engine.add(prompt(17), dataclasses.replace(GREEDY, max_tokens=7))
    run(engine)
    clusters = [5, 5, 5, 5, 6, 6]  # 16 tokens after the sink; 4 generated ones at length 22
    numbers = sum(8 * count + length for count, length in zip(clusters, range(18, 24), strict=True))
    assert request.stats().other_bytes_read == 3 * 2 * 4 * numbers


def test_copies_of_a_cache_have_clusters_of_their_own(tmp_path: Path) -> None:
    """One prompt, continued in two ways that take turns."""
    network = AutoModelForCausalLM.from_pretrained(make_model("llama", tmp_path))
    policy = dataclasses.replace(POLICY, cluster_every=2)
    ids = torch.tensor([prompt(21)])
    ways = [prompt(9, seed) for seed in (5, 6)]

    def logits(pasts: list[Any]) -> list[torch.Tensor]:
        found = []
        for place in range(9):
            for way, past in zip(ways, pasts, strict=True):
                token = torch.tensor([[way[place]]])
                found.append(network(token, **{cache_argument(network): past}).logits)
        return found

    with torch.no_grad(), keyhole.sparse(network, policy, page_size=PAGE):
        apart = logits([past_of(network(ids)) for _ in ways])
        past = past_of(network(ids))
        copied = logits([past, copy.deepcopy(past)])
    for one, other in zip(apart, copied, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_layers_on_a_lower_tier_change_nothing(tmp_path: Path) -> None:
    model, _ = twins("llama", num_hidden_layers=6)
    check_offloaded(model, dataclasses.replace(POLICY, full_layers=(0,)), tmp_path)


def test_documents_of_which_tokens_may_be_dropped_are_refused(tmp_path: Path) -> None:
    model, _ = twins("llama", num_hidden_layers=2)
    llm = LLM(model, POLICY, page_size=PAGE, documents=tmp_path / "documents")
    llm.documents.add("one", {"prompt_token_ids": prompt(70)}, block_size=8)
    question, params = (
        {"prompt_token_ids": prompt(9)},
        SamplingParams(max_tokens=4, ignore_eos=True),
    )
    with pytest.raises(ConfigError, match=r"'clusterkv' needs every token .* 'sam_kv' may drop"):
        llm.ask(question, ["one"], reuse=SamKV(block_size=8), params=params)
    assert llm.ask(question, ["one"], reuse="epic", params=params).stats.attended_fraction < 0.9


@pytest.mark.parametrize(
    ("budget", "sinks", "every"), [(1024, 16, 320), (960, 16, 320), (256, 16, 85), (12, 1, 4)]
)
def test_sinks_and_interval_follow_the_budget(budget: int, sinks: int, every: int) -> None:
    resolved = ClusterKV(token_budget=budget).resolve(shape(4))
    assert (resolved.sink_size, resolved.cluster_every) == (sinks, every)


def test_as_published_reads_generated_tokens_outside_the_budget() -> None:
    """As the authors' code for accuracy: 16 sinks in the budget, a choice per query head."""
    policy = ClusterKV.as_published(shape(4), 1024).resolve(shape(4))
    assert (policy.sink_size, policy.cluster_size, policy.full_layers) == (16, 80, (0, 1))
    assert (policy.share_group, policy.outside_budget()) == (False, "all generated tokens")
    assert dataclasses.replace(policy, generated="counted").outside_budget() == ""
    assert ClusterKV.as_published(shape(4), 16).sink_size == 15  # one token is left to select
    with pytest.raises(ConfigError, match="offload= needs share_group=True"):
        policy.offloadable(shape(4))


def test_a_cluster_has_eighty_tokens_on_average_and_few_tokens_have_one() -> None:
    tokens = np.array([0, 1, 79, 80, 159, 160, 1000])
    counts = [0, 1, 1, 1, 1, 2, 12]
    assert ClusterKV()._of_prompt(tokens).tolist() == counts


def test_numbers_of_clusters_stay_within_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 16-bit keys, cluster 32,768 was stored as -32,768: a score before the first was read.

    A prompt has no more clusters than half of these numbers, whatever their size.
    """
    keys = torch.randn(2, 1, PAGE, 8, dtype=torch.bfloat16)
    centroids = keys.new_zeros(2, 2**14, 1, 8)
    clusters = keys.new_zeros(2, 1, PAGE)
    numbers = 2**15 - 4, 2**15 + 4
    pages = torch.arange(2).repeat(2)  # of which the sequence has room for all centroids
    kernels.form_clusters(keys, centroids, clusters, pages, (0, 2 * PAGE), numbers)
    stored = clusters.view(torch.int16)
    assert ((stored >= numbers[0]) & (stored <= 2**15 - 1)).all()

    assert 2 * clusterkv._MOST_OF_PROMPT <= 2**15
    monkeypatch.setattr(clusterkv, "_MOST_OF_PROMPT", 3)
    model, _ = twins("llama_group3", num_hidden_layers=2)
    logits = []
    for count in (None, 3):
        policy = ClusterKV(token_budget=8, full_layers=(), cluster_size=2, num_clusters=count)
        engine = make_engine(model, policy)
        request = forced(engine, prompt(30), prompt(1))
        run(engine)
        logits.append(torch.stack(request.logits))
    assert torch.equal(*logits)
