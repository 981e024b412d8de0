"""Who is served when many ask: callers take turns, and a long prompt leaves room for short ones."""

from __future__ import annotations

import pytest

from keyhole import LLM, ConfigError, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model

PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make_model("llama", tmp_path_factory.mktemp("model"), vocab_size=64), "cpu")


def engine(model: Model, **settings: object) -> Engine:
    return LLM(model, memory="8MiB", prefix_cache=False, **settings).engine  # type: ignore[arg-type]


def add(engine: Engine, caller: str, length: int = 4) -> Sequence:
    prompt = [3 + i % 50 for i in range(length)]
    return engine.add(prompt, PARAMS, caller=caller)


def order(engine: Engine, sequences: list[Sequence]) -> list[str]:
    """The callers in the order in which their requests began."""
    begun: list[Sequence] = []
    while engine.has_work:
        engine.step()
        begun += [s for s in sequences if s.token_times and s not in begun]
    return [sequence.caller for sequence in begun]


def test_callers_take_turns(model: Model) -> None:
    one = engine(model, max_batch=1)
    sequences = [add(one, "a") for _ in range(4)] + [add(one, "b"), add(one, "c"), add(one, "b")]
    assert "".join(order(one, sequences)) == "abcabaa"


def test_one_caller_is_served_in_order(model: Model) -> None:
    one = engine(model, max_batch=1)
    sequences = [add(one, "a", 4 + i) for i in range(5)]
    begun: list[Sequence] = []
    while one.has_work:
        one.step()
        begun += [s for s in sequences if s.token_times and s not in begun]
    assert begun == sequences


def test_a_caller_that_always_has_a_request_waiting_does_not_shut_out_another(model: Model) -> None:
    """Without the memory of who was served last, the newest caller would always be first."""
    one = engine(model, max_batch=1)
    patient = [add(one, "patient") for _ in range(3)]
    eager = [add(one, "eager") for _ in range(2)]
    for _ in range(40):
        one.step()
        waiting = sum(not s.is_finished for s in eager)
        eager += [add(one, "eager") for _ in range(2 - waiting)]
        if all(s.is_finished for s in patient):
            break
    assert all(s.is_finished for s in patient)
    for sequence in eager:
        one.abort(sequence)


def test_a_caller_that_comes_back_gains_nothing_from_its_absence(model: Model) -> None:
    one = engine(model, max_batch=1)
    order(one, [add(one, "a") for _ in range(5)])
    sequences = [add(one, "a"), add(one, "b"), add(one, "b"), add(one, "b"), add(one, "a")]
    assert "".join(order(one, sequences)) == "babba"


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_short_prompt_is_not_kept_waiting_by_a_long_one(model: Model, share: float) -> None:
    one = engine(model, prefill_chunk=16, max_prefill_share=share)
    long = add(one, "a", 400)
    one.step()
    assert long.num_computed == 16  # alone it takes everything
    short = add(one, "a", 8)
    one.step()
    assert short.token_times
    assert long.num_computed == 24  # what the short one left is taken, too
    while one.has_work:
        one.step()
        one.check_integrity()


def test_with_a_share_of_one_a_long_prompt_goes_first(model: Model) -> None:
    one = engine(model, prefill_chunk=16, max_prefill_share=1.0)
    long, short = add(one, "a", 64), add(one, "b", 8)
    one.step()
    assert (long.num_computed, short.num_computed) == (16, 0)


@pytest.mark.slow
def test_shares_change_no_result(model: Model) -> None:
    prompts = [[3 + (7 * n + i) % 50 for i in range(5 + 40 * n)] for n in range(4)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = [
        [r.token_ids for r in LLM(model, memory="8MiB", prefill_chunk=16, max_prefill_share=share)
         .generate(prompts, params)]
        for share in (0.1, 0.5, 1.0)
    ]  # fmt: skip
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("share", [0.0, 1.5, -1])
def test_a_share_that_cannot_be_is_refused(model: Model, share: float) -> None:
    with pytest.raises(ConfigError, match="max_prefill_share"):
        LLM(model, max_prefill_share=share)
