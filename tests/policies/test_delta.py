"""A few layers choose pages for those after them, in a whole model; which layers these are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole import LLM, ConfigError, Delta
from keyhole.models.model import CALIBRATION_FILE
from keyhole.policies.delta import default_delta_layers
from keyhole.policies.selection_layers import Calibration
from tests.checkpoints import make_model
from tests.oracle import (
    Array,
    Choice,
    Choose,
    attention,
    best,
    enough,
    per_page,
    token_scores,
    tokens_of,
    visible,
)
from tests.policies.models import PROMPTS, twins
from tests.policies.recording import PAGE, Recording, check_against, forced, make_engine, run
from tests.policies.shapes import shape


def formula(
    full: set[int],
    delta: set[int],
    budget: int,
    recent: int,
    recall: float | None = None,
    least: int = 0,
    sinks: int = 0,
) -> Choose:
    """DELTA as the paper has it, a new choice at every token; with `recall` no more than needed.

    sinks: first pages that are always read.
    """
    chosen: dict[int, tuple[int, list[int]]] = {}  # length -> delta layer, its pages

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        length = keys.shape[1]
        if layer in delta:
            everything = [visible(length)] * len(keys)
            _, weights = attention(query, keys, keys, everything, **options)
            scores = per_page(token_scores(weights, "max"), PAGE)
            pages = best(scores, budget // PAGE, first=sinks, last=recent)
            if recall is not None:
                pages = enough(scores, pages, recall, least // PAGE, first=sinks, last=recent)
            chosen[length] = layer, pages
        before = [i for i in delta if i < layer]
        if layer in full | delta or not before:
            return None
        source, pages = chosen[length]
        assert source == max(before)
        return [pages], [tokens_of(pages, PAGE, length)]

    return choose


EIGHT = {"full": {0, 1}, "delta": {2, 4, 6}}


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("kind", "fields", "layers"),
    [
        ("llama_group3", {}, EIGHT),
        ("llama_mha", {}, EIGHT),
        ("llama_mqa", {}, EIGHT),
        ("gemma2", {"layer_types": ["full_attention"] * 8}, EIGHT),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 6},
            EIGHT,
        ),
        (
            "gemma3",
            {"layer_types": ["sliding_attention", "full_attention"] * 4},
            {"full": {0, 1}, "delta": {1, 3, 5}},
        ),
        ("deepseek_v3", {}, EIGHT),
    ],
)
def test_a_whole_model_reads_the_pages_of_the_delta_layer_before(
    kind: str, fields: dict[str, Any], layers: dict[str, set[int]]
) -> None:
    """With default layers; weights pass through softcaps (gemma2) and sinks (gpt_oss)."""
    model, network = twins(kind, **fields)
    policy = Delta(token_budget=20)
    choose = formula(**layers, budget=20, recent=1)
    assert check_against(choose, model, network, policy, PROMPTS)
    resolved = policy.resolve(model.geometry(PAGE))
    assert resolved.full_layers == tuple(sorted(layers["full"]))
    assert resolved.delta_layers == tuple(sorted(layers["delta"]))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("full", "delta", "budget", "recent"),
    [
        ((0, 1), (2,), 8, 2),
        ((), (0, 3), 12, 2),
        ((5,), (3, 4), 15, 1),
        ((0, 1, 2, 4, 6), (2, 4, 6), 24, 3),
        ((0, 5), (7,), 12, 1),
        ((), (4,), 4, 1),
    ],
)
def test_any_layers_and_any_recent_window(
    full: tuple[int, ...],
    delta: tuple[int, ...],
    budget: int,
    recent: int,
) -> None:
    """Layers before the first delta layer are full; a delta layer as the last one changes nothing.

    The authors' flat list of full layers that select pages means the same as two lists.
    """
    model, network = twins("llama_group3")
    policy = Delta(token_budget=budget, recent_pages=recent, full_layers=full, delta_layers=delta)
    choose = formula(set(full), set(delta), budget, recent)
    narrow = check_against(choose, model, network, policy, PROMPTS)
    assert bool(narrow) == (delta != (7,))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["llama_group3", "deepseek_v3"])
@pytest.mark.parametrize(("recall", "least"), [(0.6, 8), (0.9, 12)])
def test_with_recall_only_as_many_pages_as_hold_it(kind: str, recall: float, least: int) -> None:
    """Texts in a batch differ in what they need, and one of them is within the least."""
    model, network = twins(kind)
    policy = Delta(token_budget=24, recall=recall, min_budget=least)
    choose = formula({0, 1}, {2, 4, 6}, 24, 1, recall, least)
    assert check_against(choose, model, network, policy, PROMPTS)
    sizes = set()
    recording = Recording(inner=policy)
    engine = make_engine(model, recording)
    for text in PROMPTS:
        forced(engine, text, PROMPTS[1])
    run(engine)
    for call in recording.calls:
        for row, length in enumerate(call.lengths):
            found = call.entries(row)
            if call.layer == 7 and length > least and found is not None:
                sizes.add(len(found[0]))
    assert min(sizes) * PAGE >= least
    assert max(sizes) * PAGE <= 24
    assert policy.resolve(model.geometry(PAGE)).resolve(model.geometry(PAGE)).min_budget == least
    assert len(sizes) > 1


@pytest.mark.slow
@pytest.mark.parametrize("recall", [None, 0.7])
@pytest.mark.parametrize(("sink", "pages", "recent"), [(3, 1, 1), (5, 2, 2), (8, 2, 3)])
def test_first_pages_are_always_read_within_the_budget(
    sink: int, pages: int, recent: int, recall: float | None
) -> None:
    model, network = twins("llama_group3")
    least = None if recall is None else 20
    policy = Delta(
        token_budget=24, sink_size=sink, recent_pages=recent, recall=recall, min_budget=least
    )
    choose = formula({0, 1}, {2, 4, 6}, 24, recent, recall, 20, pages)
    assert check_against(choose, model, network, policy, PROMPTS)


def test_the_choice_is_made_anew_at_every_token() -> None:
    model, _ = twins("llama_group3")
    recording = Recording(inner=Delta(token_budget=12))
    engine = make_engine(model, recording)
    forced(engine, PROMPTS[2], PROMPTS[1])
    run(engine)
    scored = [(call.lengths[0], call.layer) for call in recording.calls if call.scored]
    lengths = range(len(PROMPTS[2]) + 1, len(PROMPTS[2]) + len(PROMPTS[1]) + 1)
    assert scored == [(length, layer) for length in lengths for layer in (2, 4, 6)]
    choices = [str(call.entries(0)) for call in recording.calls if call.layer == 7]
    assert len(set(choices)) > len(choices) // 2


def test_defaults_are_the_paper_s_for_28_layers() -> None:
    resolved = Delta().resolve(shape(28))
    assert resolved.token_budget == 1024
    assert resolved.recent_pages == 8
    assert resolved.full_layers == (0, 1)
    assert resolved.delta_layers == (2, 14, 22)


@pytest.mark.parametrize(
    ("num_layers", "wanted"),
    [(1, {0}), (2, {1, 2}), (4, {2, 3}), (8, {2, 4, 6}), (32, {2, 16, 25}), (36, {2, 18, 28})],
)
def test_delta_layers_scale_with_the_depth(num_layers: int, wanted: set[int]) -> None:
    assert set(default_delta_layers(shape(num_layers))) == wanted & set(range(num_layers))


def test_delta_layers_are_full_attention_layers() -> None:
    full = (5, 11, 17, 23)
    assert default_delta_layers(shape(26, full=full)) == (5, 11, 17)


@pytest.mark.parametrize(
    ("budget", "page", "recent"), [(1024, 16, 8), (256, 16, 2), (64, 16, 1), (16, 16, 1)]
)
def test_recent_pages_are_an_eighth_of_the_budget(budget: int, page: int, recent: int) -> None:
    assert Delta(token_budget=budget).resolve(shape(28, page)).recent_pages == recent


# Layers from a file


def calibration(num_layers: int, delta: tuple[int, ...]) -> Calibration:
    return Calibration(
        model="a model",
        method="optimal",
        num_layers=num_layers,
        token_budget=1024,
        full_layers=(0, 3),
        delta_layers=delta,
        recall=(1.0,) * num_layers,
    )


def test_layers_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    calibration(8, (1, 5)).save(path)
    resolved = Delta(layers=str(path)).resolve(shape(8))
    assert (resolved.full_layers, resolved.delta_layers) == ((0, 3), (1, 5))
    assert resolved.resolve(shape(8)) == resolved


def test_a_file_for_another_depth_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    calibration(8, (1, 5)).save(path)
    with pytest.raises(ConfigError, match=r"8 layers.*has 28"):
        Delta(layers=str(path)).resolve(shape(28))


def _without(field: str) -> str:
    stored = dict(vars(calibration(8, (1, 5))))
    del stored[field]
    return json.dumps(stored)


def _with(field: str, value: object) -> str:
    return json.dumps(vars(calibration(8, (1, 5))) | {field: value})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"full_layers": [0',
        "[]",
        "3",
        "{}",
        _without("delta_layers"),
        _with("more", 1),
        _with("delta_layers", [-1]),
        _with("delta_layers", [1.5]),
        _with("delta_layers", 3),
        _with("full_layers", None),
        _with("delta_layers", [8]),
        _with("recall", 1.0),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """A number or null where a list belongs raised TypeError."""
    path = tmp_path / "damaged.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"damaged\.json|delta_layers"):
        Delta(layers=str(path)).resolve(shape(8))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match=r"damaged\.json"):
        Delta(layers=str(path)).resolve(shape(8))


def test_a_file_in_the_model_folder_is_used_unless_layers_are_given(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, num_hidden_layers=8)
    plain = LLM(folder, Delta(token_budget=64), memory="1MiB").policy
    calibration(8, (1, 5)).save(Path(folder) / CALIBRATION_FILE)
    measured = LLM(folder, Delta(token_budget=64), memory="1MiB").policy
    given = LLM(folder, Delta(token_budget=64, delta_layers=(4,)), memory="1MiB").policy
    layers = [
        (policy.full_layers, policy.delta_layers)
        for policy in (plain, measured, given)
        if isinstance(policy, Delta)
    ]
    assert layers == [((0, 1), (2, 4, 6)), ((0, 3), (1, 5)), ((0, 1), (4,))]
