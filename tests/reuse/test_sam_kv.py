"""SamKV's plan is the one written out step by step, and its switches do what they say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.reuse.base import PlacedDocument, RecomputePlan
from keyhole.reuse.sam_kv import SamKV, Stability, fused
from tests.reuse.placed import make_documents, make_queries, make_query, with_fact

LENGTHS = (75, 9, 61, 58, 1)
"""19, 3, 16, 15 and 1 blocks of 4 tokens: the second and last have no middle."""

SEEDS = (8, 13, 17, 33, 44)
"""With these some middle blocks are kept, and outliers among them."""


def method(**settings: Any) -> SamKV:
    return SamKV(**{"block_size": 4, "stable_layers": (1, 2)} | settings)


def dot(query: Tensor, keys: Tensor) -> float:
    group = len(query) // len(keys)
    return sum(float(query[h].double() @ keys[h // group].double()) for h in range(len(query)))


def flat_cosine(x: Tensor, y: Tensor) -> float:
    x, y = x.double().flatten(), y.double().flatten()
    return float(x @ y / x.norm() / y.norm())


def best_answers(queries: Tensor, extremes: Tensor) -> list[float]:
    """Of each block the best over tokens and heads, in deviations of the token's and head's."""
    group = queries.shape[1] // extremes.shape[2]
    best = [-math.inf] * len(extremes)
    for token in queries:
        for head in range(len(token)):
            rows = [[float(token[head] @ key[head // group]) for key in b] for b in extremes]
            every = [score for row in rows for score in row]
            mean = sum(every) / len(every)
            spread = math.sqrt(sum((x - mean) ** 2 for x in every) / len(every))
            best = [max(x, (max(row) - mean) / spread) for x, row in zip(best, rows, strict=True)]
    return best


def plain_plan(
    documents: Sequence[PlacedDocument],
    query: Sequence[Tensor],
    *,
    stable: Sequence[int] = (1, 2),
    bias: bool = True,
    pooled: bool = True,
    first: int = 1,
    last: int = 2,
    share: float | None = None,
) -> RecomputePlan:
    """Steps 2 to 6 one by one, token by token; algorithms of SamKV, sections 3.1 to 3.3.

    Queries [t, Hq, D]: blocks are scored by their extreme keys and the queries of all tokens.
    """
    count, depth = len(documents), len(query)
    generic = [q.double() if q.ndim == 2 else q.double().mean(0) for q in query]
    ends, middle = [], []
    for document in documents:
        n = document.num_blocks
        ends.append([b for b in range(n) if b < first or b >= n - last])
        middle.append([b for b in range(n) if b not in ends[-1]])

    personal = []
    for layer in range(depth):
        local = [d.layers[layer].local_queries[-last:].double().mean(0) for d in documents]
        row = []
        for i in range(count):
            own = generic[layer].clone()
            for j in range(count):
                if bias and j != i:
                    own += abs(flat_cosine(generic[layer], local[j])) * local[j] / (count - 1)
            row.append(own)
        personal.append(row)

    shares = []
    for i, document in enumerate(documents):
        found = []
        for layer in stable if middle[i] else ():
            facts, asked = document.layers[layer], personal[layer][i]
            anchor = dot(asked, facts.block_keys[ends[i]].double().mean(0))
            most = min(middle[i], key=lambda b: float(facts.alpha[b]))
            least = min(middle[i], key=lambda b: float(facts.received[b]))
            high, low = dot(asked, facts.block_keys[most]), dot(asked, facts.block_keys[least])
            found.append((high - anchor) / (high - low) if low < anchor <= high else 0.0)
        shares.append(sum(found) / len(found) if found else 0.0)
        if share is not None and middle[i]:
            shares[i] = share

    total = sum(document.length for document in documents)
    kept = torch.zeros(depth, total, dtype=torch.bool)
    written = kept.clone()
    for layer in range(depth):
        offered = []
        for i, document in enumerate(documents):
            facts = document.layers[layer]
            scores = {b: dot(personal[layer][i], facts.block_keys[b]) for b in middle[i]}
            if query[layer].ndim == 3:
                asked = query[layer].double() + personal[layer][i] - generic[layer]
                by_extremes = best_answers(asked, document.extremes[layer].double())
                scores = {b: by_extremes[b] for b in middle[i]}
            mean = sum(scores.values()) / max(1, len(scores))
            spread = math.sqrt(sum((s - mean) ** 2 for s in scores.values()) / max(1, len(scores)))
            wanted = math.ceil(shares[i] * len(scores))
            best = sorted(scores, key=lambda b: -scores[b])[:wanted]
            offered += [(-(scores[b] - mean) / (spread or 1), i, b) for b in best]
        everything = len(offered) if pooled else sum(d.num_blocks for d in documents)
        chosen = {(i, b) for _, i, b in sorted(offered)[: math.ceil(everything / count)]}
        start = 0
        for i, document in enumerate(documents):
            facts = document.layers[layer]
            finite = [float(facts.alpha[b]) for b in middle[i]]
            finite = [a for a in finite if math.isfinite(a)]
            mean = sum(finite) / max(1, len(finite))
            spread = math.sqrt(sum((a - mean) ** 2 for a in finite) / max(1, len(finite)))
            for b in range(document.num_blocks):
                tokens = [t for t in range(b * 4, b * 4 + 4) if t < document.length]
                for t in tokens:
                    kept[layer, start + t] = b in ends[i] or (i, b) in chosen
                    written[layer, start + t] = b in ends[i]
                if (i, b) in chosen and float(facts.alpha[b]) < mean - 3 * spread:
                    written[layer, start + int(facts.representatives[b])] = True
            start += document.length
    return RecomputePlan(kept, written, tuple(shares))


def check(found: RecomputePlan, wanted: RecomputePlan) -> None:
    assert torch.equal(found.kept, wanted.kept)
    assert torch.equal(found.recomputed, wanted.recomputed)
    assert not (found.recomputed & ~found.kept).any()
    assert found.shares == pytest.approx(wanted.shares, abs=1e-5)


def with_outliers(documents: list[PlacedDocument]) -> list[PlacedDocument]:
    """One middle block in a dozen of each layer is far more important than the rest."""
    for layer in range(3):
        for i, document in enumerate(documents):
            alpha = document.layers[layer].alpha * 0.1 + 1
            if document.num_blocks > 11:
                alpha[2 + 3 * layer] = -9
                alpha[0] = alpha[-2] = -100  # the ends are not compared with
                alpha[-1] = math.inf
            documents[i] = document = with_fact(document, layer, alpha=alpha)
    return documents


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_is_that_of_the_steps(kv_heads: int, seed: int) -> None:
    documents = with_outliers(make_documents(LENGTHS, kv_heads=kv_heads, seed=seed))
    query = make_query(seed=seed + 50)
    plan = method().plan(documents, query)
    check(plan, plain_plan(documents, query))
    assert plan.kept.shape == (3, sum(LENGTHS))


def test_the_seeds_reach_every_step() -> None:
    """Some middle block is kept, some outlier is computed again, some share is above 0."""
    kept, again, shares = 0, 0, []
    for seed in SEEDS:
        documents = with_outliers(make_documents(LENGTHS, seed=seed))
        plan = method().plan(documents, make_query(seed=seed + 50))
        ends = method().question_context(documents)
        assert ends is not None
        kept += int((plan.kept & ~ends).sum())
        again += int((plan.recomputed & ~ends).sum())
        assert plan.shares is not None
        shares += plan.shares
    assert kept > 0
    assert again > 3
    assert 0 < max(shares) <= 1


@pytest.mark.parametrize(
    "settings",
    [
        {"bias": False},
        {"pooled": False},
        {"stable_layers": (0,)},
        {"num_initial_blocks": 3, "num_local_blocks": 1},
        {"num_initial_blocks": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_settings_change_the_step_that_they_name(settings: dict[str, Any], seed: int) -> None:
    documents, query = make_documents(LENGTHS, seed=seed), make_query(seed=seed)
    wanted = plain_plan(
        documents,
        query,
        stable=settings.get("stable_layers", (1, 2)),
        bias=settings.get("bias", True),
        pooled=settings.get("pooled", True),
        first=settings.get("num_initial_blocks", 1),
        last=settings.get("num_local_blocks", 2),
    )
    check(method(**settings).plan(documents, query), wanted)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("share", [None, 0.3, 1.0])
def test_blocks_scored_by_extreme_keys(share: float | None, bias: bool, kv_heads: int) -> None:
    documents = with_outliers(make_documents(LENGTHS, kv_heads=kv_heads, seed=8))
    queries = make_queries(5, seed=9)
    found = method(score="extremes", share=share, bias=bias).plan(documents, queries)
    check(found, plain_plan(documents, queries, share=share, bias=bias))
    by_mean = method(share=share, bias=bias).plan(documents, [q.mean(0) for q in queries])
    assert found.shares == pytest.approx(by_mean.shares)
    assert torch.equal(found.kept, by_mean.kept) == (found.shares == (0.0,) * 5)


def test_a_given_share_replaces_the_papers() -> None:
    documents, query = make_documents(LENGTHS), make_query()
    found = method(share=0.5).plan(documents, query)
    assert found.shares == (0.5, 0.0, 0.5, 0.5, 0.0)
    check(found, plain_plan(documents, query, share=0.5))


def test_extremes_are_asked_for_only_where_blocks_are_chosen_by_them() -> None:
    assert SamKV(score="extremes").extremes
    assert not SamKV(score="extremes", select=False).extremes
    assert not SamKV().extremes


@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_at_random_as_many_tokens_are_kept_and_the_same_in_every_layer(
    seed: int, share: float | None
) -> None:
    documents, query = make_documents(LENGTHS, seed=seed), make_query(seed=seed)
    chosen = method(share=share).plan(documents, query)
    plans = [
        method(share=share, score="random", draw=draw).plan(documents, query) for draw in range(9)
    ]
    for plan in plans:
        assert plan.shares == chosen.shares
        assert torch.equal(plan.kept.sum(1), chosen.kept.sum(1))
        assert torch.equal(plan.kept, plan.kept[:1].expand_as(plan.kept))
    again = method(share=share, score="random", draw=3).plan(documents, query)
    assert torch.equal(again.kept, plans[3].kept)
    if share is not None:
        assert len({tuple(plan.kept[0].tolist()) for plan in plans}) > 1


def test_at_random_every_middle_block_is_as_likely() -> None:
    documents, query = make_documents((75, 75)), make_query()
    settings = {"score": "random", "share": 0.5, "bias": False, "recompute": False}
    kept = [method(**settings, draw=draw).plan(documents, query).kept[0] for draw in range(400)]
    often = torch.stack(kept).float().mean(0)[4:64]  # the first document's middle blocks
    # 4 of 15 blocks, in the mean; 0.11 is five standard deviations of 400 draws.
    assert ((often - 4 / 15).abs() < 0.11).all()


def test_the_glance_is_the_ends_of_every_document() -> None:
    documents = make_documents((22, 5, 12, 13))
    question_context = method().question_context(documents)
    assert question_context is not None
    first, second, third, fourth = question_context.split([22, 5, 12, 13])
    # 6 blocks, the last of 2 tokens: tokens 0 .. 3 and 16 .. 21.
    assert first.tolist() == [True] * 4 + [False] * 12 + [True] * 6
    assert second.all()
    assert third.all()
    assert fourth.tolist() == [True] * 4 + [False] * 4 + [True] * 5


@pytest.mark.parametrize("lengths", [(1,), (12,), (4, 9, 3)])
def test_documents_without_middle_blocks_are_kept_and_recomputed_completely(
    lengths: tuple[int, ...],
) -> None:
    documents = make_documents(lengths)
    assert method().question_context(documents) is None
    plan = method().plan(documents, None)
    assert plan.kept.all()
    assert plan.recomputed.all()
    assert plan.shares == (0.0,) * len(lengths)


def test_without_selection_only_the_ends_are_kept_and_nothing_is_read_first() -> None:
    documents = make_documents(LENGTHS)
    assert method(select=False).question_context(documents) is None
    plan = method(select=False).plan(documents, None)
    question_context = method().question_context(documents)
    assert question_context is not None
    assert torch.equal(plan.kept, question_context.repeat(3, 1))
    assert torch.equal(plan.recomputed, plan.kept)
    assert plan.shares is None


def test_without_recomputation_the_same_is_kept_and_nothing_is_written() -> None:
    documents, query = make_documents(LENGTHS), make_query()
    with_it, without = (method(recompute=on).plan(documents, query) for on in (True, False))
    assert torch.equal(without.kept, with_it.kept)
    assert without.shares == with_it.shares
    assert not without.recomputed.any()


def test_one_document_means_no_bias() -> None:
    for seed in range(5):
        documents, query = make_documents((90,), seed=seed), make_query(seed=seed)
        check(method().plan(documents, query), method(bias=False).plan(documents, query))
        check(method().plan(documents, query), plain_plan(documents, query))


def test_what_other_documents_look_for_changes_what_is_kept() -> None:
    plans = []
    for bias in (True, False):
        for seed in range(5):
            documents, query = make_documents(LENGTHS, seed=seed), make_query(seed=seed)
            plans.append(method(bias=bias).plan(documents, query).kept)
    assert not all(torch.equal(*pair) for pair in zip(plans[:5], plans[5:], strict=True))


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (1, 2, 0, 4, 3)])
def test_documents_permuted_give_the_plan_permuted(order: tuple[int, ...]) -> None:
    documents, query = with_outliers(make_documents(LENGTHS, seed=17)), make_query(seed=67)
    plan = method().plan(documents, query)
    again = method().plan([documents[i] for i in order], query)
    for name in ("kept", "recomputed"):
        parts = getattr(plan, name).split(list(LENGTHS), 1)
        assert torch.equal(getattr(again, name), torch.cat([parts[i] for i in order], 1))
    assert plan.shares is not None
    assert again.shares == pytest.approx([plan.shares[i] for i in order])


def test_a_document_may_stand_twice() -> None:
    (document,) = make_documents((61,))
    twice = [document, dataclasses.replace(document, offset=document.offset + 61)]
    check(method().plan(twice, make_query()), plain_plan(twice, make_query()))


def test_an_outlier_that_is_not_kept_is_not_computed_again() -> None:
    documents = with_outliers(make_documents((75,)))
    # Nothing is wanted where the anchor is above every middle block.
    for layer in range(3):
        keys = documents[0].layers[layer].block_keys.clone()
        keys[:] = 0
        keys[0] = make_query()[layer][::2]  # of the group's two heads, the first
        documents[0] = with_fact(documents[0], layer, block_keys=keys)
    plan = method(bias=False).plan(documents, make_query())
    assert plan.shares == (0.0,)
    assert torch.equal(plan.recomputed, plan.kept)
    assert int(plan.kept[0].sum()) == 4 + 4 + 3


def test_two_hundred_documents() -> None:
    documents = make_documents([40] * 200, layers=4)
    plan = method().plan(documents, make_query(layers=4))
    assert plan.kept.shape == (4, 8000)
    assert 0.3 <= float(plan.kept.float().mean()) < 0.4


def test_overwrite_takes_the_new_ones_and_fusion_both() -> None:
    new, old = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    assert method().fuse(new, old) is new
    assert not method().fuses
    assert torch.equal(method(update="fusion").fuse(new, old), fused(new, old))
    assert method(update="fusion").fuses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fusion_weighs_by_likeness(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    new = torch.randn(40, 2, 8, generator=rng).to(dtype)
    old = (0.5 * new + torch.randn(40, 2, 8, generator=rng)).to(dtype)
    found = fused(new, old)
    assert found.dtype == dtype
    likeness = set()
    for t in range(40):
        cosine = flat_cosine(new[t], old[t])
        theta = min(1.0, max(0.0, cosine))
        likeness.add(theta > 0)
        wanted = theta * new[t].double() + (1 - theta) * old[t].double()
        torch.testing.assert_close(found[t], wanted.to(dtype))
    assert likeness == {True, False}


def test_fusion_of_the_same_changes_nothing_and_of_opposites_keeps_the_old() -> None:
    x = torch.randn(6, 2, 8)
    torch.testing.assert_close(fused(x, x), x)
    torch.testing.assert_close(fused(-x, x), x)
    zero = torch.zeros(6, 2, 8)
    assert torch.equal(fused(zero, zero), zero)
    assert torch.equal(fused(zero, x), x)


def geometry(windows: Sequence[int | None] = (None,) * 6) -> Geometry:
    layers = tuple(
        LayerLayout(num_kv_heads=2, key_dim=8, value_dim=8, window=window) for window in windows
    )
    return Geometry(layers=layers, num_query_heads=4, page_size=16, itemsize=4)


def test_stable_layers_are_the_last_four_with_full_attention_unless_said() -> None:
    assert SamKV().resolve(geometry()).stable_layers == (2, 3, 4, 5)
    assert SamKV().resolve(geometry([None] * 2)).stable_layers == (0, 1)
    assert SamKV().resolve(geometry([None, 9, None, 9, 9])).stable_layers == (0, 2)
    assert SamKV().resolve(geometry([9] * 6)).stable_layers == (2, 3, 4, 5)
    assert SamKV(stable_layers=(5, 1)).resolve(geometry()).stable_layers == (1, 5)


def test_stable_layers_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    stability = Stability(
        model="some-model",
        num_layers=6,
        num_documents=3,
        block_size=64,
        stable_layers=(1, 4),
        scores=(0, 3, 0, 1, 2, 0),
    )
    stability.save(path)
    found = SamKV(layers=str(path)).resolve(geometry())
    assert found.stable_layers == (1, 4)
    assert found.resolve(geometry()) == found
    with pytest.raises(ConfigError, match="6 layers, but this model has 3"):
        SamKV(layers=str(path)).resolve(geometry([None] * 3))
    with pytest.raises(ConfigError, match="either"):
        SamKV(layers=str(path), stable_layers=(1,)).resolve(geometry())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"update": "fusoin"}, r"'fusoin'.*did you mean 'fusion'"),
        ({"update": None}, "update None must be a string"),
        ({"score": "extreme"}, r"'extreme'.*did you mean 'extremes'"),
        ({"share": 0.0}, "share 0.0 must be above 0 and at most 1"),
        ({"share": 1.5}, "share 1.5"),
        ({"share": "P"}, "share 'P'"),
        ({"share": math.nan}, "share nan"),
        ({"select": "yes"}, "select 'yes' must be true or false"),
        ({"bias": 1}, "bias 1 must be true or false"),
        ({"recompute": None}, "recompute None"),
        ({"pooled": 0}, "pooled 0"),
        ({"block_size": 0}, "block_size 0 must be at least 1"),
        ({"block_size": 6.4}, "block_size 6.4"),
        ({"num_initial_blocks": -1}, "num_initial_blocks -1 must be at least 0"),
        ({"num_local_blocks": True}, "num_local_blocks True"),
        ({"num_local_blocks": 0}, "num_local_blocks 0 must be at least 1 with bias"),
        ({"num_local_blocks": 5}, "num_local_blocks 5 must be at most 4 with bias"),
        (
            {"num_initial_blocks": 0, "num_local_blocks": 0, "bias": False},
            "num_initial_blocks 0 must be at least 1 together",
        ),
        ({"stable_layers": ()}, "stable_layers .* one or more layers from 0 to 5"),
        ({"stable_layers": (6,)}, r"stable_layers \(6,\) must be .* from 0 to 5"),
        ({"stable_layers": (-1,)}, "stable_layers"),
        ({"stable_layers": 3}, "stable_layers 3"),
        ({"outlier_sigmas": math.nan}, "outlier_sigmas nan must be a number"),
        ({"outlier_sigmas": -1.0}, "outlier_sigmas -1.0"),
        ({"layers": "/no/such/file"}, "/no/such/file"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SamKV(**settings).resolve(geometry())


def test_an_unknown_update_is_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError):
        SamKV(update="blend").resolve(geometry())


def test_a_document_in_blocks_of_another_size_is_named() -> None:
    documents = make_documents((40, 40))
    for act in (
        method(block_size=8).question_context,
        lambda d: method(block_size=8).plan(d, None),
    ):
        with pytest.raises(ConfigError, match=r"'0' is stored in blocks of 4 .* block_size is 8"):
            act(documents)
