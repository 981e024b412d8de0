"""Sinks and windows of every policy that has them: read at every step, whole, within the budget."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from keyhole import ConfigError
from keyhole.policies import available_policies, make_policy
from tests.policies.models import PROMPTS, twins
from tests.policies.recording import PAGE, Recording, forced, make_engine, run
from tests.policies.shapes import shape

PAGED = ["quest", "delta"]
TOKENS = ["tidal_decode", "omnikv", "clusterkv"]


def made(name: str, sink: int, window: int, **settings: Any) -> Any:
    """The policy with a window in tokens; DELTA has it in pages."""
    wanted: dict[str, Any] = {"sink_size": sink, "window_size": window}
    if name == "delta":
        wanted = {"sink_size": sink, "recent_pages": -(-window // PAGE)}
    return make_policy(name, {**wanted, **settings})


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", PAGED + TOKENS)
@pytest.mark.parametrize(("sink", "window"), [(0, 1), (1, 5), (5, 4), (8, 8)])
def test_sinks_and_window_are_read_at_every_step(name: str, sink: int, window: int) -> None:
    model, _ = twins("llama_group3")
    recording = Recording(inner=made(name, sink, window, token_budget=16))
    engine = make_engine(model, recording)
    for prompt in PROMPTS:
        forced(engine, prompt, PROMPTS[1])
    run(engine)
    unit = PAGE if name in PAGED else 1
    sparse = 0
    for call in recording.calls:
        for row, length in enumerate(call.lengths):
            entries = call.entries(row)
            for chosen in entries or []:
                sparse += length > 16
                count = -(-length // unit)
                first, last = -(-sink // unit), -(-window // unit)
                wanted = {*range(min(first, count)), *range(max(0, count - last), count)}
                assert wanted <= set(chosen)
                assert len(chosen) == min(16 // unit, count)
    assert sparse


@pytest.mark.parametrize("name", PAGED + TOKENS)
@pytest.mark.parametrize(
    ("sink", "window", "named"),
    [
        (-1, 4, "sink_size -1"),
        ("x", 4, "sink_size 'x'"),
        (9, 8, "token_budget 16 must be at least"),
    ],
)
def test_a_wrong_sink_or_too_large_ones_are_refused(
    name: str, sink: Any, window: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        made(name, sink, window, token_budget=16).resolve(shape(28, PAGE))


@pytest.mark.parametrize("name", ["quest", *TOKENS])
def test_only_pages_are_said_to_be_whole(name: str) -> None:
    right = "at least 17: sink_size 9 and window_size 8"
    if name == "quest":
        right = f"at least 20: sink_size 9 and window_size 8 in whole pages of {PAGE}"
    with pytest.raises(ConfigError, match=f"token_budget 16 must be {right}$"):
        made(name, 9, 8, token_budget=16).resolve(shape(28, PAGE))


@pytest.mark.parametrize("name", ["quest", *TOKENS])
@pytest.mark.parametrize("window", [0, -1, "x", 2.5, True])
def test_a_wrong_window_is_refused(name: str, window: Any) -> None:
    right = "at least 1" if type(window) is int else "a whole number"
    with pytest.raises(ConfigError, match=f"window_size {window!r} must be {right}"):
        make_policy(name, {"window_size": window}).resolve(shape(28))


@pytest.mark.parametrize("name", PAGED + TOKENS)
def test_sinks_and_window_may_fill_the_budget(name: str) -> None:
    made(name, 8, 8, token_budget=16).resolve(shape(28, PAGE))


# Layers that read everything, and settings as published


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("quest", {}, (0, 1)),
        ("quest", {"full_layers": (7, 3)}, (3, 7)),
        ("delta", {"full_layers": (5,), "delta_layers": (2, 4)}, (0, 1, 2, 4, 5)),
        ("delta", {"full_layers": (), "delta_layers": ()}, tuple(range(8))),
        ("tidal_decode", {"full_layers": (), "selection_layers": (1, 3)}, (0, 1, 3)),
        ("omnikv", {"full_layers": (0, 6), "filter_layers": (1,)}, (0, 1, 2, 6)),
        ("omnikv", {"full_layers": (0,), "filter_layers": (1,), "dense_after": 0}, (0, 1)),
    ],
)
def test_dense_layers_are_those_that_read_everything(
    name: str, settings: dict[str, Any], wanted: tuple[int, ...]
) -> None:
    model, _ = twins("llama_group3")
    policy = make_policy(name, {"token_budget": 8, **settings})
    recording = Recording(inner=policy)
    engine = make_engine(model, recording)
    forced(engine, PROMPTS[2], PROMPTS[1])
    run(engine)
    read = {call.layer for call in recording.calls if call.selection is None}
    assert read == set(wanted)
    geometry = model.geometry(PAGE)
    assert policy.resolve(geometry).dense_layers(geometry) == wanted


@pytest.mark.parametrize("name", available_policies())
@pytest.mark.parametrize("num_layers", [6, 32])
def test_as_published_is_a_policy_at_this_budget(name: str, num_layers: int) -> None:
    cls, geometry = (
        available_policies()[name],
        dataclasses.replace(shape(num_layers), num_query_heads=4),
    )
    policy = cls.as_published(geometry, 512).resolve(geometry)
    assert type(policy) is cls
    assert getattr(policy, "token_budget", 512) == 512
    assert isinstance(policy.outside_budget(), str)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tidal_decode", {"share_group": False}),
        ("omnikv", {"keep_generated": True}),
        ("clusterkv", {"cluster_every": 320}),
    ],
)
def test_as_published_has_the_settings_of_the_authors(name: str, settings: dict[str, Any]) -> None:
    policy = available_policies()[name].as_published(shape(6), 512).resolve(shape(6))
    assert {field: getattr(policy, field) for field in settings} == settings


def test_as_published_is_not_what_was_measured_for_the_model(tmp_path: Path) -> None:
    geometry = dataclasses.replace(shape(28), calibration=tmp_path / "there-is-none.json")
    policy = available_policies()["delta"].as_published(geometry, 512)
    assert policy.resolve(geometry).dense_layers(geometry) == (0, 1, 2, 14, 22)


@pytest.mark.parametrize(
    ("name", "within", "beside"),
    [
        ("snapkv", {"generated_in_budget": True}, {"generated_in_budget": False}),
        ("clusterkv", {}, {"generated": "all_beside"}),
        ("clusterkv", {}, {"generated": "recent_beside"}),
        ("shadowkv", {"rank": 0}, {"keep_generated": True}),
        ("shadowkv", {"rank": 0}, {"always_beside": True}),
        ("omnikv", {}, {"keep_generated": True}),
    ],
)
def test_what_is_read_outside_the_budget_does_not_go_with_offloaded_layers(
    name: str, within: dict[str, Any], beside: dict[str, Any], tmp_path: Path
) -> None:
    """Buffers of offloaded layers hold the budget: a longer selection ended in an assertion."""
    model, _ = twins("llama_group3")
    below: dict[str, Any] = {"offload": tmp_path, "memory": "1MiB"}
    with pytest.raises(ConfigError, match="at most token_budget tokens"):
        make_engine(model, make_policy(name, {"token_budget": 16, **within, **beside}), **below)
    engine = make_engine(model, make_policy(name, {"token_budget": 16, **within}), **below)
    with pytest.raises(ConfigError, match="at most token_budget tokens"):
        engine.under(beside)
