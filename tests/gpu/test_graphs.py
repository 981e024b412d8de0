"""CUDA graphs on a GPU: steps that are repeated from a recording, and steps launched one by one.

What stands in fixed inputs, and what a step leaves, is compared bit by bit without a GPU
(tests/engine/test_cuda_graph_runner.py); here are the recordings themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole import LLM, Delta, Full, Policy, SamplingParams, SpeContext
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence as Request
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import make_policy
from tests.gpu.test_device import checkpoint
from tests.policies.recording import PAGE, make_engine

pytestmark = pytest.mark.gpu

POLICIES = [name for name, cls in keyhole.available_policies().items() if cls.capturable is True]
#: When each request comes, the length of its prompt, and how many tokens it wants. There are up to
#: four in rows for four, three among them; the cache grows while they decode, and budgets are
#: passed on the way.
COMING = ((0, 3, 60), (9, 90, 45), (22, 60, 38), (22, 70, 26))
#: Not infllm: three sequences in rows for four are products of other shapes, of two keys in a page
#: both are as far from their mean, and rounding decides.
#: tests/engine/test_cuda_graph_runner.py compares it
#: where no row is nobody's, bit by bit.
COMPARED = [name for name in POLICIES if name != "infllm"]
#: float32 on both sides, but a wider table is cut into other parts, which are added up otherwise.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(checkpoint("llama", tmp_path_factory.mktemp("model")), "cuda", "float32")


def tokens(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, 250, (count,), generator=generator).tolist()


def small(name: str) -> Policy:
    cls = keyhole.available_policies()[name]
    has_budget = "token_budget" in cls.__dataclass_fields__
    more = {"generated_in_budget": True} if name == "snapkv" else {}  # else every step has a shape
    return make_policy(name, {"token_budget": 5 * PAGE, **more} if has_budget else {})


def served(
    model: Model, policy: Policy, *, graphs: bool, **settings: Any
) -> tuple[Engine, list[Request]]:
    """Every request's tokens are given, so that both runs compute the same."""
    settings = {"graphs": graphs, "max_batch": 4, "prefill_chunk": 256, **settings}
    engine = make_engine(model, policy, **settings)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    requests: list[Request] = []
    number = 0
    while engine.has_work or number <= COMING[-1][0]:
        for when, length, count in COMING:
            if when == number:
                given = tokens(count)
                requests.append(engine.add(tokens(length), params, given=given, keep_logits=True))
        engine.step()
        engine.check_integrity()
        number += 1
    return engine, requests


@pytest.mark.parametrize("name", COMPARED)
def test_graphs_give_what_single_launches_give(model: Model, name: str) -> None:
    _, launched = served(model, small(name), graphs=False)
    engine, repeated = served(model, small(name), graphs=True)
    # Of about 60: clusterkv's are launched where it clusters.
    assert engine.replayed_steps > 30, engine.why_not_replayed
    assert engine.cache.capacity > 64  # it has grown, and all was recorded anew
    for one, other in zip(launched, repeated, strict=True):
        assert (torch.stack(one.logits) - torch.stack(other.logits)).abs().max() < TOLERANCE
        # Scores that are nearly equal may be put in another order by other sums.
        assert one.counters.kv_bytes == pytest.approx(other.counters.kv_bytes, rel=0.02)
        assert one.evicted_pages == other.evicted_pages


#: Policies whose steps are of more than one kind, or that choose until enough is read.
MORE = [
    SpeContext(token_budget=20, refresh_every=4),
    SpeContext(token_budget=20, recall=0.8),
    Delta(token_budget=20, recall=0.8, delta_layers=(2,)),
]


@pytest.mark.parametrize("policy", MORE, ids=str)
def test_settings_with_more_ways_to_go(model: Model, policy: Policy) -> None:
    _, launched = served(model, policy, graphs=False)
    engine, repeated = served(model, policy, graphs=True)
    assert engine.replayed_steps > 50, engine.why_not_replayed
    for one, other in zip(launched, repeated, strict=True):
        assert (torch.stack(one.logits) - torch.stack(other.logits)).abs().max() < TOLERANCE


#: Policies that may have offloaded layers and read keys only through attention.
BELOW = [
    n
    for n in POLICIES
    if n not in ("full", "raas") and not keyhole.available_policies()[n].reads_keys
]


def below(model: Model, name: str, folder: Path) -> dict[str, Any]:
    """Settings with less memory than `COMING` needs, so that layers have to go below."""
    page_bytes = make_engine(model, small(name)).cache.page_bytes
    return {"memory": 90 * page_bytes, "offload": str(folder)}


@pytest.mark.parametrize("name", BELOW)
def test_graphs_load_from_the_lower_tier(model: Model, name: str, tmp_path: Path) -> None:
    """Layers go below while texts grow: copies on a stream of their own, inside of the graph.

    A short sequence after them has all layers resident again, and newly captured graphs.
    """
    settings = below(model, name, tmp_path)
    plain, launched = served(model, small(name), graphs=False, **settings)
    engine, repeated = served(model, small(name), graphs=True, **settings)
    # At the end they may have come back.
    assert any(other.stats().offloaded_layers for other in repeated)
    assert engine.replayed_steps > 30, engine.why_not_replayed
    for one, other in zip(launched, repeated, strict=True):
        assert (torch.stack(one.logits) - torch.stack(other.logits)).abs().max() < TOLERANCE
    # When a layer goes below, the first requests may be done.
    assert any(other.counters.hits for other in repeated)
    assert any(other.counters.misses for other in repeated)
    before, params = engine.replayed_steps, SamplingParams(max_tokens=1, ignore_eos=True)
    short = [
        one.add(tokens(30), params, given=tokens(20), keep_logits=True) for one in (plain, engine)
    ]
    for one in (plain, engine):
        while one.has_work:
            one.step()
        assert not one.cache.offloaded_layers
    assert engine.replayed_steps > before
    assert short[1].counters.moved_bytes == 0
    found, wanted = (torch.stack(one.logits) for one in short)
    assert (found - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_never_waits_for_the_device(model: Model, name: str) -> None:
    """torch itself says so of a step that is launched; a recording with one would have failed."""
    engine = make_engine(model, small(name), max_batch=4)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    engine.add(tokens(30), params)
    for _ in range(3):
        engine.step()
    steps = engine._runner._recorded
    assert steps is not None
    work = steps._work
    waits = []

    def watched(*given: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return work(*given)  # type: ignore[arg-type]
        except RuntimeError as error:
            waits.append(str(error))
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    steps._work = watched  # type: ignore[assignment]
    steps._forget()
    engine.step()
    assert not waits
    assert steps.why_not is None


def test_graphs_are_on_unless_they_are_turned_off(model: Model) -> None:
    assert LLM(model, memory="16MiB").engine._runner._recorded is not None
    assert LLM(model, memory="16MiB", graphs=False).engine._runner._recorded is None


def test_an_engine_that_is_gone_does_not_end_a_recording(model: Model) -> None:
    """Its graphs are given back when Python collects garbage, which a recording does not bear."""
    number = torch.zeros(1, device="cuda")
    others = [torch.cuda.CUDAGraph() for _ in range(8)]
    for other in others:
        with torch.cuda.graph(other):
            number + 1
    engine = make_engine(model, Full(), max_batch=4)
    engine.add(tokens(30), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    steps = engine._runner._recorded
    assert steps is not None
    work = steps._work

    def littering(*given: Any) -> Any:
        litter: list[Any] = [others.pop()]
        litter.append(litter)
        del litter
        assert [[] for _ in range(5000)]  # more new objects than garbage is left for
        return work(*given)

    steps._work = littering
    while engine.has_work:
        engine.step()
    assert len(others) < 8
    assert steps.why_not is None


def test_a_long_text_in_many_buckets_stays_right(model: Model) -> None:
    """A prompt of a few tokens that grows over many pages, through several widths."""
    found = []
    for graphs in (False, True):
        engine = make_engine(model, Full(), graphs=graphs, memory="64MiB")
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = engine.add(tokens(5), params, given=tokens(700), keep_logits=True)
        while engine.has_work:
            engine.step()
        found.append(torch.stack(request.logits))
    assert (found[0] - found[1]).abs().max() < TOLERANCE
