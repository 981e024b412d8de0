"""What every policy must do, whichever method it is: they enter by the table.

Tokens are given, so that all runs decode the same ones and logits can be compared.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

import keyhole
from keyhole import kernels
from keyhole.engine.sequence import Sequence as Request
from keyhole.errors import ConfigError
from keyhole.models.loading import adopt
from keyhole.models.model import Model
from keyhole.models.shrink import random_model, shrink
from keyhole.policies import available_controls, make_policy
from keyhole.policies.base import Policy, Selection, Step
from keyhole.retrieval.gate import SeerGate
from tests.checkpoints import make_model
from tests.policies.models import with_head
from tests.policies.recording import (
    GREEDY,
    PAGE,
    Call,
    Recording,
    forced,
    forced_logits,
    make_engine,
    run,
    steps,
)

POLICIES = {**keyhole.available_policies(), **available_controls()}
BUDGETED = [name for name, cls in POLICIES.items() if "token_budget" in cls.__dataclass_fields__]
EVICTING = [name for name, cls in POLICIES.items() if cls.page_limit is not Policy.page_limit]
VOCAB = 64
#: The settings under test, for every policy that has a setting of that name.
SMALL: dict[str, Any] = {
    "token_budget": 3 * PAGE,
    "prompt_in_budget": True,
    "generated_in_budget": True,
}
LARGE = {"token_budget": 64}

LAYERS = 6
_DEEP = {"num_hidden_layers": LAYERS, "vocab_size": VOCAB}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama_group3", _DEEP),
    "mha": ("llama_mha", _DEEP),
    "mqa": ("llama_mqa", _DEEP),
    "sliding": (
        "gemma3",
        # Four layers of full attention: three of them are dense under DELTA.
        {
            "num_hidden_layers": 8,
            "vocab_size": VOCAB,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
    ),
    "latent": ("deepseek_v3", _DEEP),
}
FULL_ATTENTION = {name: range(LAYERS) for name in MODELS} | {"sliding": range(1, 8, 2)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder: Path = tmp_path_factory.mktemp("models")
    return {
        name: with_head(make_model(kind, folder, **fields))
        for name, (kind, fields) in MODELS.items()
    }


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(models: dict[str, Model], kind: str) -> Model:
    return models[kind]


@pytest.fixture(scope="module")
def gqa(models: dict[str, Model]) -> Model:
    return models["gqa"]


@pytest.fixture(scope="module", params=POLICIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Runs:
    """Runs under small budgets and dense ones, each computed once and shared by several tests."""

    def __init__(self, models: dict[str, Model]) -> None:
        self.alone = functools.cache(self._alone)
        self.ragged = functools.cache(self._ragged)
        self.dense = functools.cache(self._dense)
        self._models = models

    def _alone(self, name: str, kind: str) -> tuple[list[Call], Request]:
        recording = Recording(inner=make(name, SMALL))
        engine = make_engine(self._models[kind], recording, prefix_cache=False)
        request = forced(engine, PROMPT, GIVEN)
        run(engine)
        return recording.calls, request

    def _dense(self, kind: str) -> Tensor:
        return forced_logits(self._models[kind], make_policy(None), PROMPT, GIVEN)

    def _ragged(self, name: str, kind: str) -> tuple[list[Call], list[Request]]:
        return recorded(self._models[kind], make(name, SMALL))


@pytest.fixture(scope="module")
def runs(models: dict[str, Model]) -> Runs:
    return Runs(models)


@pytest.fixture
def dense(runs: Runs, kind: str) -> Tensor:
    """Dense logits of the given tokens."""
    return runs.dense(kind)


def fields(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(POLICIES[name])}


def make(name: str, settings: dict[str, Any]) -> Policy:
    """The policy with those of the settings that it has."""
    return make_policy(name, {key: settings[key] for key in settings if key in fields(name)})


def tokens(count: int, seed: int) -> list[int]:
    """Token ids, none of them special."""
    return random.Random(seed).choices(range(3, VOCAB), k=count)


PROMPT, GIVEN = tokens(30, 1), tokens(14, 2)
#: Others beside it, shorter and longer, page ends and a single token among them.
OTHERS = [(tokens(n, n), tokens(m, n)) for n, m in ((1, 12), (4, 3), (17, 9), (41, 6))]


def same(one: Tensor, other: Tensor, within: float = 1e-4) -> None:
    assert one.shape == other.shape
    assert (one - other).abs().max() <= within


# A budget that covers everything


@pytest.mark.one_in(40)
def test_a_budget_above_the_length_is_dense_attention(
    name: str, model: Model, dense: Tensor
) -> None:
    assert len(dense) == len(GIVEN) + 1
    same(forced_logits(model, make(name, LARGE), PROMPT, GIVEN), dense, 1e-5)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("adaptive", [n for n in POLICIES if "recall" in fields(n)])
def test_a_least_budget_above_the_length_is_dense_attention(
    adaptive: str, model: Model, dense: Tensor
) -> None:
    settings = {"token_budget": 96, "recall": 0.01, "min_budget": 64}
    same(forced_logits(model, make_policy(adaptive, settings), PROMPT, GIVEN), dense, 1e-5)


@pytest.mark.one_in(8)
def test_a_budget_that_covers_all_is_dense_in_a_batch_with_longer_ones(
    name: str, gqa: Model
) -> None:
    """The long neighbour makes the policy select for the short one too: it must select all."""
    engine = make_engine(gqa, make(name, {"token_budget": 6 * PAGE}))
    long = forced(engine, tokens(40, 3), tokens(12, 4))
    short = forced(engine, PROMPT[:10], GIVEN[:11])
    run(engine)
    dense = forced_logits(gqa, make_policy(None), PROMPT[:10], GIVEN[:11])
    same(torch.stack(short.logits), dense, 1e-5 * dense.abs().max().item())
    assert len(long.logits) == 13


@pytest.mark.one_in(12)
def test_the_prompt_is_always_exact(name: str, model: Model, dense: Tensor) -> None:
    after_prompt = forced_logits(model, make(name, SMALL), PROMPT, [], prefill_chunk=7)
    same(after_prompt, dense[:1], 2e-5)


# A small budget


@pytest.mark.one_in(40)
def test_a_small_budget_changes_the_logits(name: str, kind: str, dense: Tensor, runs: Runs) -> None:
    calls, request = runs.alone(name, kind)
    change = (torch.stack(request.logits) - dense)[1:].abs().amax(1)
    if POLICIES[name].dense:
        assert change.max() <= 1e-5
        return
    # Prompts are never evicted: all is there until what is generated has filled a page.
    evicted = next((call.lengths[0] for call in calls if gone(call)), len(PROMPT) + 1)
    assert bool(any(map(gone, calls))) == (name in EVICTING)
    first = evicted - len(PROMPT) - 1
    assert first <= 2 * PAGE
    assert (change[:first] <= 1e-5).all()
    assert change[first:].min() > 1e-2


def gone(call: Call) -> bool:
    """Whether a page of a sequence is not there any more."""
    pages = zip(call.left or [], call.lengths, strict=call.left is not None)
    return any(len(left) < -(-length // PAGE) for left, length in pages)


def recorded(model: Model, policy: Policy) -> tuple[list[Call], list[Request]]:
    """Ragged requests that come one after the other and run at once."""
    recording = Recording(inner=policy)
    engine = make_engine(model, recording, max_batch=3, prefill_chunk=16)
    requests = [forced(engine, prompt, given) for prompt, given in OTHERS]
    engine.step()
    requests.append(forced(engine, PROMPT, GIVEN))
    run(engine)
    return recording.calls, requests


@pytest.mark.one_in(40)
def test_selections_are_well_formed_and_within_the_budget(
    name: str, model: Model, kind: str, runs: Runs
) -> None:
    calls, _ = runs.ragged(name, kind)
    layout = model.geometry(PAGE).layers[1]
    assert {call.layer for call in calls} == set(FULL_ATTENTION[kind])
    chosen = [call for call in calls if call.selection is not None]
    assert bool(chosen or any(map(gone, calls))) != POLICIES[name].dense
    for call in chosen:
        selection = call.selection
        assert selection is not None
        indices, counts, unit = selection.indices, selection.counts, selection.unit
        assert indices.dtype == counts.dtype == torch.int32
        assert unit in (1, PAGE)
        assert indices.shape[:2] == counts.shape
        assert indices.shape[0] == len(call.lengths)
        # Latents are shared by all heads, and each may choose among them.
        heads = model.geometry(PAGE).num_query_heads if layout.shared_values else 1
        assert indices.shape[1] in (1, layout.num_kv_heads, heads)
        for row, length in enumerate(call.lengths):
            newest = (length - 1) // unit
            for head, entries in enumerate(call.entries(row) or []):
                rest = indices[row, head, len(entries) :]
                assert (rest == -1).all()
                assert entries == sorted(set(entries))
                assert entries[0] >= 0
                assert entries[-1] == newest
                if name in BUDGETED:
                    assert len(entries) * unit <= SMALL["token_budget"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("name", EVICTING)
def test_what_is_evicted_never_comes_back(name: str, counted: bool, gqa: Model) -> None:
    """Prompts stay, and what is generated has the budget, or what they leave of it, or a page."""
    recording = Recording(inner=make(name, SMALL | {"prompt_in_budget": counted}))
    engine = make_engine(gqa, recording, max_batch=3, prefill_chunk=16)
    prompts = [PROMPT[:n] for n in (1, 6, 17, 30)]  # the pages of each say which one it is
    requests = [forced(engine, prompt, tokens(25, len(prompt))) for prompt in prompts]
    run(engine)
    most = SMALL["token_budget"] // PAGE
    before: dict[int, set[int]] = {}
    for call in recording.calls:
        assert call.left is not None
        assert call.pinned is not None
        for left, length, pinned in zip(call.left, call.lengths, call.pinned, strict=True):
            assert left == sorted(set(left))
            assert left[:pinned] == list(range(pinned))
            assert left[-1] == (length - 1) // PAGE
            assert len(left) <= (max(most, pinned + 1) if counted else pinned + most)
            known = before.setdefault(pinned, set(left))
            assert set(left) <= known | {(length - 1) // PAGE}
            before[pinned] = set(left)
    assert len(before) == len(prompts)
    for request, prompt in zip(requests, prompts, strict=True):
        # Of 25 tokens after the prompt; the last page may be full, and nothing follows it.
        pinned = -(-len(prompt) // PAGE)
        made = -(-(len(prompt) + 25) // PAGE) - pinned
        left = max(most - pinned, 1) if counted else most
        assert request.stats().evicted_pages in (made - left, made - left + 1)


@pytest.mark.one_in(4)
def test_the_number_of_entries_is_fixed(name: str, runs: Runs) -> None:
    """Fixed settings give fixed shapes, so that a step can be captured as a CUDA graph."""
    calls, _ = runs.ragged(name, "gqa")
    widths = {(call.layer, call.selection.indices.shape[2]) for call in calls if call.selection}
    assert len(widths) == len({layer for layer, _ in widths})


@pytest.mark.one_in(12)
def test_what_is_read_is_counted(name: str, model: Model, kind: str, runs: Runs) -> None:
    calls, request = runs.alone(name, kind)
    geometry = model.geometry(PAGE)
    shares, read_bytes, place = [], 0.0, 0
    for length in range(len(PROMPT) + 1, len(PROMPT) + len(GIVEN) + 1):
        for layout in geometry.layers:
            read, lists = float(min(length, layout.window or length)), 1
            if layout.window is None:
                call = calls[place]
                place += 1
                assert call.lengths == [length]
                if call.entries(0) is not None:
                    unit = call.unit
                    heads = [
                        sum(min(unit, length - entry * unit) for entry in entries)
                        for entries in call.entries(0) or []
                    ]
                    read, lists = sum(heads) / len(heads), len(heads)
            shares.append(read / length)
            rows = max(lists, layout.num_kv_heads)
            read_bytes += read * rows * layout.numbers_per_head * geometry.itemsize
    stats = request.stats()
    assert place == len(calls)
    assert stats.attended_fraction == pytest.approx(sum(shares) / len(shares))
    assert stats.kv_bytes_read == round(read_bytes)
    assert stats.other_bytes_read >= 0
    assert stats.generated_tokens == len(GIVEN) + 1


# The same whatever happens around it


@pytest.mark.one_in(8)
def test_two_runs_are_bitwise_equal(name: str, gqa: Model, runs: Runs) -> None:
    first, second = runs.ragged(name, "gqa"), recorded(gqa, make(name, SMALL))
    for one, other in zip(first[1], second[1], strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
    assert [call.entries(0) for call in first[0]] == [call.entries(0) for call in second[0]]


@pytest.mark.one_in(40)
def test_other_requests_of_a_batch_change_nothing(
    name: str, model: Model, kind: str, runs: Runs
) -> None:
    policy = make(name, SMALL)
    *others, last = runs.ragged(name, kind)[1]
    same(torch.stack(last.logits), torch.stack(runs.alone(name, kind)[1].logits))
    for request, (prompt, given) in zip(others, OTHERS, strict=True):
        same(torch.stack(request.logits), forced_logits(model, policy, prompt, given))


@pytest.mark.one_in(16)
def test_preemption_and_replay_change_nothing(name: str, gqa: Model) -> None:
    policy = make(name, SMALL)
    probe = make_engine(gqa, policy)
    params = dataclasses.replace(GREEDY, max_tokens=20)
    alone = []
    for prompt in (PROMPT, PROMPT[:9], PROMPT[5:26]):
        engine = make_engine(gqa, policy)
        alone.append(engine.add(prompt, params, keep_logits=True))
        run(engine)
    room = 19 if name in EVICTING else 22
    engine = make_engine(gqa, policy, memory=room * probe.cache.page_bytes)
    together = [engine.add(request.prompt, params, keep_logits=True) for request in alone]
    preempted = 0
    for _ in steps(engine):
        preempted += any(request.generated for request in engine.scheduler.waiting)
    assert preempted
    for one, other in zip(alone, together, strict=True):
        assert one.generated == other.generated
        same(torch.stack(one.logits), torch.stack(other.logits))
    assert engine.prefix is not None
    engine.prefix.clear()
    assert engine.cache.available == engine.max_pages


@pytest.mark.one_in(60)
@pytest.mark.parametrize("length", [30, 32])
def test_a_known_prompt_changes_nothing(name: str, model: Model, length: int) -> None:
    """Also one that ends with a page: its last token is computed again, into a page of its own.

    So are the last ones of what is known, for a policy whose side data there depends on what comes.
    """
    policy = make(name, SMALL).resolve(model.geometry(PAGE))
    known = min(policy.reusable(length // PAGE * PAGE, PAGE), length - 1)
    assert known >= length // 2
    prompt = (PROMPT * 2)[:length]
    engine = make_engine(model, policy, prefix_cache=True)
    requests = []
    for cached in (0, known):
        requests.append(forced(engine, prompt, GIVEN))
        run(engine)
        assert requests[-1].stats().cached_prompt_tokens == cached
    same(*(torch.stack(request.logits) for request in requests))


@pytest.mark.one_in(8)
def test_generated_text_is_not_taken_for_a_prompt_by_a_sparse_policy(name: str, gqa: Model) -> None:
    """What a sparse step wrote is approximate: a plain request with the same tokens is exact."""
    policy = make(name, SMALL)
    engine = make_engine(gqa, policy)
    forced(engine, PROMPT, GIVEN)
    run(engine)
    longer = forced(engine, PROMPT + GIVEN, OTHERS[0][1])
    run(engine)
    cold = forced_logits(gqa, policy, PROMPT + GIVEN, OTHERS[0][1], prefix_cache=False)
    same(torch.stack(longer.logits), cold)


# Settings


def test_settings_are_frozen_and_survive_replacing(name: str) -> None:
    policy = make(name, SMALL)
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, 1)
        assert "help" in field.metadata
    assert dataclasses.replace(policy) == policy
    assert hash(dataclasses.replace(policy)) == hash(policy)
    assert policy.name == name


def test_settling_twice_changes_nothing(name: str, model: Model) -> None:
    geometry = model.geometry(PAGE)
    settled = make(name, SMALL).resolve(geometry)
    assert type(settled) is POLICIES[name]
    assert settled.resolve(geometry) == settled
    for key, value in SMALL.items():
        assert getattr(settled, key, value) == value


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("wrong", [0, -1, "x", 2.5, True, None])
def test_a_wrong_budget_is_refused(name: str, gqa: Model, wrong: object) -> None:
    with pytest.raises(ConfigError, match="token_budget"):
        make_engine(gqa, make(name, {"token_budget": wrong}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Misformed(Policy):
    """A policy of one's own, with as many lists and of the kind that it likes."""

    name: ClassVar[str] = "misformed"
    lists: int = 1
    dtype: torch.dtype = torch.int32

    def select(self, _layer: int, _query: Tensor, step: Step) -> Selection:
        newest = kernels.recent_indices(step.lengths, 5)
        indices, counts = (x[:, :1].to(self.dtype) for x in (newest.indices, newest.counts))
        return Selection(indices.expand(-1, self.lists, -1), counts.expand(-1, self.lists), 1)


@pytest.mark.parametrize("wrong", [{"lists": 3}, {"dtype": torch.int64}])
def test_a_selection_that_kernels_would_misread_is_refused(gqa: Model, wrong: Any) -> None:
    """Its memory was read beyond its end, which could end Python."""
    forced_logits(gqa, Misformed(lists=2), list(range(3, 30)), [7])
    with pytest.raises(ConfigError, match=r"policy 'misformed' selected indices .* int32, for"):
        forced_logits(gqa, Misformed(**wrong), list(range(3, 30)), [7])


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Laguna has a number of query heads for each layer."""
    config = CONFIG_MAPPING["laguna"](
        num_attention_heads_per_layer=[48, 64] * 20, layer_types=["full_attention"] * 40
    )
    model = adopt(random_model(shrink(config)), device="cpu")
    model.gate = tmp_path_factory.mktemp("uneven") / "gate"
    SeerGate.random(model.geometry(PAGE)).save_pretrained(model.gate)
    return model


@pytest.mark.parametrize("name", ["infllm", "r_kv", "snapkv", "seer_attention_r"])
def test_layers_with_other_numbers_of_query_heads(name: str, uneven: Model) -> None:
    """What these keep per query head had one number for all layers."""
    prompt, given = list(range(3, 40)), [7, 50, 9]
    dense = forced_logits(uneven, make_policy("full"), prompt, given)
    found = forced_logits(uneven, make_policy(name, LARGE), prompt, given)
    assert (found - dense).abs().max() < 1e-4 * dense.std()
    if name == "seer_attention_r":  # its gate reads queries where the budget is smaller
        forced_logits(uneven, make_policy(name, {"token_budget": 2 * PAGE}), prompt, given)


def test_a_selection_per_query_head_needs_layers_with_as_many(uneven: Model) -> None:
    """Python crashed: a layer read the lists of more heads than the selection had."""
    make_engine(uneven, make_policy("tidal_decode"))
    with pytest.raises(ConfigError, match=r"layers have \[48, 64\] query heads; use delta or"):
        make_engine(uneven, make_policy("tidal_decode", {"share_group": False}))


def test_an_unknown_setting_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="tokn_budget"):
        make_policy(name, {"tokn_budget": 3})
