"""What the compared methods keep and compute again, each told in its own words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.errors import ConfigError
from keyhole.reuse.base import PlacedDocument, RecomputePlan, Reuse, rounded_up
from keyhole.reuse.baselines import FullReuse, Recompute
from keyhole.reuse.cacheblend import CacheBlend
from keyhole.reuse.epic import Epic
from keyhole.reuse.multi_infllm import MultiInfLLM
from tests.reuse.placed import make_documents, make_query

LENGTHS = (22, 1, 9, 40)
TOTAL = sum(LENGTHS)
GEOMETRY = Geometry(
    layers=(LayerLayout(num_kv_heads=2, key_dim=8, value_dim=8),) * 3,
    num_query_heads=4,
    page_size=16,
    itemsize=4,
)


def plan_of(
    method: Reuse, documents: Sequence[PlacedDocument], query: Sequence[torch.Tensor] | None = None
) -> RecomputePlan:
    plan = method.plan(documents, query)
    assert plan.kept.shape == plan.recomputed.shape == (3, sum(d.length for d in documents))
    assert plan.kept.dtype == plan.recomputed.dtype == torch.bool
    assert not (plan.recomputed & ~plan.kept).any()
    assert plan.shares is None
    return plan


def test_recompute_computes_everything_like_any_prompt() -> None:
    assert Recompute().exact
    plan = plan_of(Recompute(), make_documents(LENGTHS))
    assert plan.recomputed.all()


@pytest.mark.parametrize("rotate", [True, False])
def test_reuse_keeps_everything_and_computes_nothing(rotate: bool) -> None:
    method = FullReuse(rotate=rotate).resolve(GEOMETRY)
    assert not method.exact
    assert method.shifts_rope == rotate
    plan = plan_of(method, make_documents(LENGTHS))
    assert plan.kept.all()
    assert not plan.recomputed.any()


def test_only_the_naive_form_leaves_keys_where_they_were() -> None:
    others = (Recompute(), CacheBlend(), Epic(), MultiInfLLM())
    assert all(method.shifts_rope for method in others)


@pytest.mark.parametrize(("first", "last"), [(32, 0), (2, 3), (0, 0), (0, 5), (100, 100)])
def test_epic_computes_the_ends_of_every_document(first: int, last: int) -> None:
    plan = plan_of(Epic(num_initial=first, num_local=last), make_documents(LENGTHS))
    assert plan.kept.all()
    wanted = [t < first or t >= length - last for length in LENGTHS for t in range(length)]
    assert plan.recomputed.tolist() == [wanted] * 3


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(("deviation", "counted"), [("value", [1]), ("key", [0]), ("both", [0, 1])])
def test_cacheblend_computes_all_at_first_then_what_deviates_most(
    layer: int, deviation: str, counted: list[int]
) -> None:
    method = CacheBlend(check_layer=layer, deviation=deviation).resolve(GEOMETRY)
    documents = make_documents(LENGTHS)
    plan = plan_of(method, documents)
    assert method.check_layer == layer
    assert plan.kept.all()
    assert plan.recomputed[: layer + 1].all()
    assert not plan.recomputed[layer + 1 :].any()
    found = torch.rand(2, TOTAL, generator=torch.Generator().manual_seed(layer))
    revised = method.revise(documents, plan, found)
    number = math.ceil(0.15 * TOTAL)
    chosen = sorted(range(TOTAL), key=lambda t: -sum(float(found[i, t]) for i in counted))[:number]
    assert torch.equal(revised.kept, plan.kept)
    for row in revised.recomputed:
        assert row.nonzero().flatten().tolist() == sorted(chosen)


@pytest.mark.parametrize(
    ("share", "of", "number"), [(0.07, 100, 7), (0.001, 72, 1), (1 / 3, 3, 1), (0.5, 5, 3)]
)
def test_a_share_is_rounded_up_unless_floats_alone_are_above(
    share: float, of: int, number: int
) -> None:
    assert rounded_up(share, of) == number


@pytest.mark.parametrize(("ratio", "number"), [(0.0, 0), (1.0, 72), (0.001, 1), (0.5, 36)])
def test_cacheblend_rounds_up_and_of_equals_takes_the_earlier(ratio: float, number: int) -> None:
    method = CacheBlend(recompute_ratio=ratio).resolve(GEOMETRY)
    documents = make_documents(LENGTHS)
    revised = method.revise(documents, method.plan(documents, None), torch.ones(2, TOTAL))
    assert revised.recomputed.tolist() == [[t < number for t in range(TOTAL)]] * 3


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("last", [0, 2])
@pytest.mark.parametrize("number", [1, 4, 11])
def test_multi_infllm_keeps_the_best_blocks_of_one_context(
    first: int, last: int, number: int
) -> None:
    method = MultiInfLLM(num_initial_blocks=first, num_local_blocks=last, num_blocks=number)
    documents, query = make_documents(LENGTHS), make_query()
    blocks = [(d, b) for d in range(4) for b in range(documents[d].num_blocks)]
    ends = blocks[:first] + (blocks[-last:] if last else [])

    def tokens(chosen: set[tuple[int, int]]) -> list[bool]:
        return [(d, t // 4) in chosen for d in range(4) for t in range(LENGTHS[d])]

    question_context = method.question_context(documents)
    assert question_context is not None
    assert question_context.tolist() == tokens(set(ends))
    plan = plan_of(method, documents, query)
    assert not plan.recomputed.any()
    for layer in range(3):
        scores = {}
        for d, b in blocks:
            key = documents[d].layers[layer].representative_keys[b].double()
            scores[d, b] = sum(float(query[layer][h].double() @ key[h // 2]) for h in range(4))
        middle = [block for block in blocks if block not in ends]
        best = sorted(middle, key=lambda block: -scores[block])[:number]
        assert plan.kept[layer].tolist() == tokens({*ends, *best})


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.97, 1.0])
def test_multi_infllm_keeps_the_given_share_of_tokens(share: float) -> None:
    """Never more than the share, and less than a block below it, not counting the ends."""
    method = MultiInfLLM(sequence_ratio=share).resolve(GEOMETRY)
    documents, query = make_documents(LENGTHS), make_query()
    plan = plan_of(method, documents, query)
    ends = 3 * 4
    room = max(round(share * TOTAL), ends)
    for row in plan.kept:
        assert room - 4 < int(row.sum()) <= room
    assert (method.question_context(documents) is None) == (share == 1)
    everything = MultiInfLLM(num_blocks=1000).plan(documents, query)
    assert (share == 1) == torch.equal(plan.kept, everything.kept)


def test_multi_infllm_keeps_the_same_blocks_by_number_and_by_tokens() -> None:
    documents, query = make_documents((40, 24)), make_query()
    by_number = plan_of(MultiInfLLM(num_blocks=5), documents, query)
    by_tokens = plan_of(MultiInfLLM(sequence_ratio=8 * 4 / 64), documents, query)
    assert torch.equal(by_number.kept, by_tokens.kept)


def test_multi_infllm_reads_nothing_first_where_everything_is_kept() -> None:
    documents = make_documents((22, 9))  # 9 blocks
    assert MultiInfLLM(num_blocks=6).question_context(documents) is None
    assert plan_of(MultiInfLLM(num_blocks=6), documents).kept.all()
    assert MultiInfLLM(num_blocks=5).question_context(documents) is not None


def test_multi_infllm_takes_the_earlier_of_equal_blocks() -> None:
    documents = make_documents((40,))
    plan = MultiInfLLM(num_blocks=3).plan(documents, [torch.zeros(4, 8)] * 3)
    assert plan.kept[0].nonzero().flatten().tolist() == [*range(16), *range(32, 40)]


@pytest.mark.parametrize("method", [Recompute(), FullReuse(), Epic(), CacheBlend()])
def test_methods_without_a_query_read_nothing_first(method: Reuse) -> None:
    documents, method = make_documents(LENGTHS), method.resolve(GEOMETRY)
    assert method.question_context(documents) is None
    plan = method.plan(documents, None)
    if method.name != "cacheblend":
        assert method.probe_layer is None
        assert method.revise(documents, plan, torch.zeros(2, TOTAL)) is plan


@pytest.mark.parametrize("method", [Recompute(), FullReuse(), Epic(), CacheBlend(), MultiInfLLM()])
def test_new_keys_replace_stored_ones(method: Reuse) -> None:
    new = torch.randn(3, 2, 8)
    assert method.fuse(new, torch.randn(3, 2, 8)) is new
    assert not method.fuses


@pytest.mark.parametrize(
    ("cls", "settings", "words"),
    [
        (FullReuse, {"rotate": "no"}, "rotate 'no' must be true or false"),
        (Epic, {"num_initial": -1}, "num_initial -1 must be at least 0"),
        (Epic, {"num_local": 1.5}, "num_local 1.5"),
        (CacheBlend, {"check_layer": 3}, "check_layer 3 must be a layer from 0 to 2"),
        (CacheBlend, {"check_layer": -1}, "check_layer -1"),
        (CacheBlend, {"recompute_ratio": 1.1}, "recompute_ratio 1.1 must be from 0 to 1"),
        (CacheBlend, {"recompute_ratio": math.nan}, "recompute_ratio nan"),
        (CacheBlend, {"deviation": "values"}, "deviation 'values'; did you mean 'value'"),
        (MultiInfLLM, {"sequence_ratio": 0}, "sequence_ratio 0 must be above 0 and at most 1"),
        (MultiInfLLM, {"sequence_ratio": 1.5}, "sequence_ratio 1.5"),
        (MultiInfLLM, {"num_blocks": -1}, "num_blocks -1"),
        (MultiInfLLM, {"num_initial_blocks": "1"}, "num_initial_blocks '1'"),
        (
            MultiInfLLM,
            {"num_initial_blocks": 0, "num_local_blocks": 0, "num_blocks": 0},
            "num_blocks 0 must be at least 1",
        ),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_named(
    cls: type[Reuse], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        cls(**settings).resolve(GEOMETRY)


def test_the_defaults_suit_every_model() -> None:
    for method in (Recompute(), FullReuse(), Epic(), MultiInfLLM()):
        assert method.resolve(GEOMETRY) == method


@pytest.mark.parametrize(
    ("windows", "layer"),
    [((None,) * 3, 1), ((9, None, 9, None), 2), ((9, 9, None), 2), ((9, 9), 1), ((None,), 0)],
)
def test_cacheblend_looks_behind_the_first_layer_that_sees_everything(
    windows: tuple[int | None, ...], layer: int
) -> None:
    """In a layer behind windows alone, tokens far from a seam deviate by rounding."""
    layers = tuple(replace(GEOMETRY.layers[0], window=window) for window in windows)
    assert CacheBlend().resolve(replace(GEOMETRY, layers=layers)).check_layer == layer
