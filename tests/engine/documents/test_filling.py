"""Documents are filled unit by unit beside other requests' steps, as if it were done at once."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole import LLM, CapacityError, SamplingParams
from keyhole.documents.store import RecordError
from keyhole.engine.documents.filling import Pace
from keyhole.engine.documents.library import Documents
from keyhole.engine.sequence import Sequence
from keyhole.reuse import make_reuse
from keyhole.reuse.base import Reuse
from tests.engine.documents.asking import (
    BLOCK,
    CASES,
    assembled,
    assert_near,
    llms,
    settings_of,
    tokens,
)
from tests.engine.documents.pacing import AtOnce, Units, paced

__all__ = ["llms"]

NAMES, QUESTION, PREFIX, SEPARATOR = ["c", "a", "b"], tokens(19, 99), tokens(11, 4), [4]
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
#: More tokens than a question takes steps to be filled.
LONG = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)


def opened(llm: LLM, pace: Pace, **settings: Any) -> LLM:
    """Another engine over the same weights and documents, at this pace."""
    given = {"page_size": 4, "prefill_chunk": 1024, "prefix_cache": False, **settings}
    other = LLM(llm.engine.model, documents=llm.documents.place, **given)
    paced(other.engine, pace)
    return other


def method_of(llm: LLM, case: str = "sam_kv") -> Reuse:
    name, settings = CASES[case][0], settings_of(*CASES[case][:2])
    return make_reuse(name, settings).resolve(llm.engine.geometry)


def submitted(
    llm: LLM,
    stack: ExitStack,
    case: str = "sam_kv",
    names: list[str] = NAMES,
    params: SamplingParams = PARAMS,
    question: list[int] = QUESTION,
) -> Sequence:
    method = method_of(llm, case)
    asked = assembled(llm, stack, names, question, method, PREFIX, SEPARATOR)
    return llm.engine.add(asked.tokens, params, context=asked.context, keep_logits=True)


def content(llm: LLM, sequence: Sequence) -> list[torch.Tensor]:
    """Keys and values of every layer, of all tokens that it has before the question."""
    assert sequence.filling is not None
    filled, pages = sequence.filling.filled, torch.tensor(sequence.filling.take())
    assert filled is not None
    cache, found = llm.engine.cache, []
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        places = torch.arange(filled.end)
        if filled.kept is not None:
            places = places[filled.kept[layer]]
        page, place = pages[places // cache.page_size], places % cache.page_size
        assert (page >= 0).all()
        found += [keys[page, :, place], values[page, :, place]]
    return found


def to_its_end(llm: LLM, sequence: Sequence) -> None:
    while not sequence.is_finished:
        llm.engine.step()
        llm.engine.check_integrity()


def filled(llm: LLM, case: str) -> tuple[Sequence, list[torch.Tensor], int]:
    """An answer, what was filled for it, and the steps that this took."""
    found: list[torch.Tensor] = []
    steps = 0
    with ExitStack() as stack:
        sequence = submitted(llm, stack, case)
        while not sequence.is_finished:
            llm.engine.step()
            llm.engine.check_integrity()
            steps += sequence.slot < 0 and not found
            if sequence.filling is not None and sequence.filling.filled is not None:
                found = content(llm, sequence)
    assert sequence.error is None
    return sequence, found, steps


EVERY_CASE = [case for case in CASES if case != "recompute"]


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY_CASE)
@pytest.mark.parametrize("size", [8, 40])
def test_steps_between_units_change_nothing(
    llms: dict[str, tuple[LLM, Any]], case: str, size: int
) -> None:
    """Bitwise: keys, values, what was kept and computed again, and the answer."""
    llm, _ = llms["llama"]
    wanted, pages, steps = filled(opened(llm, Units(10_000, size)), case)
    assert steps == 1
    for units in (1, 3):
        pace = Units(units, size)
        found, others, steps = filled(opened(llm, pace), case)
        assert steps == -(-(len(pace.kinds) + 1) // units) > 1
        for ours, theirs in zip(others, pages, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(torch.stack(found.logits), torch.stack(wanted.logits))
        assert found.reused is not None
        assert wanted.reused is not None
        assert torch.equal(found.reused.kept, wanted.reused.kept)
        assert torch.equal(found.reused.recomputed, wanted.reused.recomputed)
        assert found.stats().store_bytes_read == wanted.stats().store_bytes_read


@pytest.mark.one_in(24)
@pytest.mark.parametrize("case", EVERY_CASE)
@pytest.mark.parametrize("size", [8, 24, 64])
def test_short_forwards_compute_what_long_ones_compute(
    llms: dict[str, tuple[LLM, Any]], case: str, size: int
) -> None:
    """Up to rounding: a kernel may add a few rows in another order than many."""
    llm, _ = llms["llama"]
    wanted, pages, _ = filled(opened(llm, AtOnce()), case)
    found, others, _ = filled(opened(llm, Units(1, size)), case)
    for ours, theirs in zip(others, pages, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found.logits, wanted.logits, strict=True):
        assert_near(ours, theirs)
    assert found.generated == wanted.generated
    assert found.reused is not None
    assert wanted.reused is not None
    assert torch.equal(found.reused.kept, wanted.reused.kept)


@pytest.fixture(scope="module")
def alone(llms: dict[str, tuple[LLM, Any]]) -> list[tuple[int, ...]]:
    """What two requests generate when nothing else runs."""
    llm, _ = llms["llama"]
    return [llm.generate({"prompt_token_ids": tokens(30, i)}, LONG).token_ids for i in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["sam_kv", "fusion", "cacheblend", "epic", "reuse", "multi_infllm"]
)
def test_others_go_on_at_every_step(
    llms: dict[str, tuple[LLM, Any]], case: str, alone: list[tuple[int, ...]]
) -> None:
    """They get a token in each, and the same tokens as alone."""
    llm, _ = llms["llama"]
    other = opened(llm, Units(1, 8))
    with ExitStack() as stack:
        running = [other.engine.add(tokens(30, i), LONG) for i in range(2)]
        other.engine.step()
        asked = submitted(other, stack, case)
        steps = 0
        while asked.slot < 0:
            before = [len(one.generated) for one in running]
            other.engine.step()
            other.engine.check_integrity()
            assert [len(one.generated) for one in running] == [count + 1 for count in before]
            steps += 1
        assert steps >= 15
        while other.engine.has_work:
            other.engine.step()
    assert [one.generated for one in running] == alone
    assert asked.generated == filled(opened(llm, AtOnce()), case)[0].generated


def test_prompts_pass_a_question_that_is_being_filled(llms: dict[str, tuple[LLM, Any]]) -> None:
    llm, _ = llms["llama"]
    other = opened(llm, Units(1, 8), max_batch=2)
    with ExitStack() as stack:
        asked = submitted(other, stack)
        other.engine.step()
        later = [other.engine.add(tokens(9, i), PARAMS) for i in range(2)]
        other.engine.step()
        assert [one.slot >= 0 for one in (asked, *later)] == [
            False,
            True,
            False,
        ]  # one slot is kept
        while other.engine.has_work:
            other.engine.step()
            other.engine.check_integrity()
    assert [len(one.generated) for one in (asked, *later)] == [5, 5, 5]


@pytest.mark.slow
def test_questions_are_filled_one_after_the_other(llms: dict[str, tuple[LLM, Any]]) -> None:
    llm, _ = llms["llama"]
    wanted = [filled(opened(llm, AtOnce()), case)[0].generated for case in ("sam_kv", "epic")]
    other = opened(llm, Units(2, 8))
    with ExitStack() as stack:
        both = [submitted(other, stack, case) for case in ("sam_kv", "epic")]
        while other.engine.has_work:
            other.engine.step()
            other.engine.check_integrity()
            assert not all(one.filling for one in both)
            assert both[1].filling is None or both[0].slot >= 0 or both[0].is_finished
    assert [one.generated for one in both] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 5, 10, 20])
def test_leaving_in_the_middle_frees_everything(
    llms: dict[str, tuple[LLM, Any]], steps: int
) -> None:
    llm, _ = llms["llama"]
    other = opened(llm, Units(1, 8))
    with ExitStack() as stack:
        asked, next_one = submitted(other, stack), submitted(other, stack, "epic")
        for _ in range(steps):
            other.engine.step()
        assert asked.slot < 0
        assert (asked.filling is not None) == (steps > 0)
        other.engine.abort(asked)
        other.engine.check_integrity()
        assert other.engine.cache.in_use == 0
        while other.engine.has_work:
            other.engine.step()
    assert next_one.generated == filled(opened(llm, AtOnce()), "epic")[0].generated
    assert asked.finish_reason == "abort"


def test_filling_gives_way_to_those_that_run(llms: dict[str, tuple[LLM, Any]]) -> None:
    """Before any of them gives way itself; the question comes later, and answers the same."""
    llm, _ = llms["llama"]
    wanted = filled(opened(llm, AtOnce()), "reuse")[0].generated
    # Both fit to begin with, and the one that decodes needs what the question holds.
    pages = 8 + -(-(11 + 131 + 1 + 91 + 1 + 20) // 4) + 2
    other = opened(llm, Units(1, 8), memory=4 * pages * llm.engine.geometry.token_bytes)
    gave_way = preempted = 0
    with ExitStack() as stack:
        running = other.engine.add(tokens(30, 1), replace(LONG, max_tokens=250))
        other.engine.step()
        asked = submitted(other, stack, "reuse")
        while other.engine.has_work:
            before = asked.filling
            other.engine.step()
            other.engine.check_integrity()
            gave_way += before is not None and asked.filling is None and asked.slot < 0
            preempted += running.slot < 0 and not running.is_finished
    assert gave_way >= 1
    assert preempted == 0
    assert len(running.generated) == 250
    assert asked.generated == wanted


def test_nobody_passes_a_question_that_waits_for_pages(llms: dict[str, tuple[LLM, Any]]) -> None:
    llm, _ = llms["llama"]
    pages = -(-(11 + 131 + 1 + 91 + 1 + 20 + 19 + 5) // 4) + 2
    other = opened(llm, Units(1, 8), memory=4 * pages * llm.engine.geometry.token_bytes)
    with ExitStack() as stack:
        running = other.engine.add(tokens(30, 1), SamplingParams(max_tokens=60, ignore_eos=True))
        other.engine.step()
        asked = submitted(other, stack, "reuse")
        for _ in range(30):
            other.engine.step()
        late = other.engine.add(tokens(4, 2), PARAMS)
        while not running.is_finished:
            other.engine.step()
            other.engine.check_integrity()
            assert late.slot < 0
            assert asked.filling is None or not running.is_finished
        while other.engine.has_work:
            other.engine.step()
    assert asked.error is None
    assert asked.generated == filled(opened(llm, AtOnce()), "reuse")[0].generated
    assert len(late.generated) == 5


def without_memory(llm: LLM, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on there is memory for so many pages."""
    cache = llm.engine.cache
    monkeypatch.setattr("keyhole.cache.pages._FIRST_PAGES", pages)
    cache.release(cache.allocate(pages) or [])

    def fails() -> None:
        raise CapacityError("no memory")

    monkeypatch.setattr(cache, "_grow", fails)


@pytest.mark.parametrize("is_limit", [True, False])
def test_a_prompt_takes_the_pages_of_a_question_after_it(
    llms: dict[str, tuple[LLM, Any]], monkeypatch: pytest.MonkeyPatch, is_limit: bool
) -> None:
    """Nobody runs, and the filled question is admitted only after the prompt."""
    llm, _ = llms["llama"]
    limit = {"memory": 4 * 80 * llm.engine.geometry.token_bytes} if is_limit else {}
    other = opened(llm, Units(1, 8), **limit)
    if not is_limit:
        without_memory(other, 80, monkeypatch)
    with ExitStack() as stack:
        other.engine.add(tokens(4, 2), PARAMS)
        asked = submitted(other, stack, "reuse")
        while asked.filling is None or asked.filling.filled is None:
            other.engine.step()
        prompt = other.engine.add(tokens(100, 3), PARAMS, caller="another")
        for _ in range(400):
            other.engine.step()
            other.engine.check_integrity()
    assert prompt.finish_reason == asked.finish_reason == "length"
    assert prompt.token_times[-1] < asked.token_times[0]
    assert asked.generated == filled(opened(llm, AtOnce()), "reuse")[0].generated


@pytest.mark.parametrize("pages", [75, 90])
def test_a_question_waits_for_pages_that_have_memory(
    llms: dict[str, tuple[LLM, Any]], monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """Without memory for more: either it fits at once, without spare pages, or after the other."""
    llm, _ = llms["llama"]
    other = opened(llm, Units(1, 8))
    without_memory(other, pages, monkeypatch)
    with ExitStack() as stack:
        running = other.engine.add(tokens(30, 1), LONG)
        other.engine.step()
        asked = submitted(other, stack, "reuse")
        while other.engine.has_work:
            other.engine.step()
            other.engine.check_integrity()
    assert running.finish_reason == asked.finish_reason == "length"
    assert (running.token_times[-1] < asked.token_times[0]) == (pages == 75)
    assert asked.generated == filled(opened(llm, AtOnce()), "reuse")[0].generated


@pytest.mark.parametrize("pages", [30, 90])
def test_a_question_is_refused_with_what_had_no_memory(
    llms: dict[str, tuple[LLM, Any]], monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """Either its documents, or only the question after them."""
    llm, _ = llms["llama"]
    other = opened(llm, Units(1, 8))
    without_memory(other, pages, monkeypatch)
    with ExitStack() as stack:
        asked = submitted(other, stack, "reuse", question=tokens(200, 9))
        to_its_end(other, asked)
    assert str(asked.error) == "no memory"
    assert asked.filling is None
    assert other.engine.cache.in_use == 0


def test_what_never_fits_is_refused_alone(llms: dict[str, tuple[LLM, Any]]) -> None:
    llm, _ = llms["llama"]
    other = opened(llm, Units(1, 8), memory=4 * 30 * llm.engine.geometry.token_bytes)
    with ExitStack() as stack:
        running = other.engine.add(tokens(30, 1), PARAMS)
        asked = submitted(other, stack, "reuse")
        ended: list[Sequence] = []
        while other.engine.has_work:
            ended += other.engine.step()
            other.engine.check_integrity()
    assert len(running.generated) == 5
    assert isinstance(asked.error, CapacityError)
    assert "raise memory=" in str(asked.error)
    assert asked.finish_reason == "error"
    assert asked in ended
    assert other.engine.cache.in_use == 0


@pytest.mark.slow
def test_a_record_that_goes_bad_on_the_way_ends_its_request_only(
    llms: dict[str, tuple[LLM, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = llms["llama"]
    other = opened(llm, Units(1, 8))
    with ExitStack() as stack:
        running = other.engine.add(tokens(30, 1), LONG)
        asked = submitted(other, stack, "reuse")
        for _ in range(16):
            other.engine.step()
        assert other.engine.cache.in_use > 20

        def broken(*_: object) -> None:
            raise RecordError("damaged", "cut off", "whole", "a")

        monkeypatch.setattr("keyhole.documents.reader.StoredDocument.read_rows", broken)
        while not asked.is_finished:
            other.engine.step()
            other.engine.check_integrity()
        assert isinstance(asked.error, RecordError)
        assert not running.is_finished
        while other.engine.has_work:
            other.engine.step()
    assert len(running.generated) == LONG.max_tokens
    assert other.engine.cache.in_use == 0


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: out"), ValueError("odd")])
def test_what_breaks_a_unit_leaves_no_page_behind(
    llms: dict[str, tuple[LLM, Any]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Memory that runs out is the request's own end; of any other error the caller is told."""
    llm, _ = llms["llama"]
    other = opened(llm, Units(1, 8))
    with ExitStack() as stack:
        asked = submitted(other, stack, "epic")
        for _ in range(8):
            other.engine.step()

        def broken(*_: object) -> None:
            raise error

        monkeypatch.setattr(other.engine.model, "forward", broken)
        if isinstance(error, ValueError):
            with pytest.raises(ValueError, match="odd"):
                to_its_end(other, asked)
            other.engine.abort(asked)
        else:
            to_its_end(other, asked)
            assert isinstance(asked.error, CapacityError)
    other.engine.check_integrity()
    assert other.engine.cache.in_use == 0
    assert not other.engine.has_work


def test_threads_ask_and_generate_together(llms: dict[str, tuple[LLM, Any]]) -> None:
    llm, _ = llms["llama"]
    other = opened(llm, Pace())
    settings = {"reuse": method_of(llm), "params": PARAMS}
    questions = [{"prompt_token_ids": tokens(9, seed)} for seed in range(3)]
    wanted: list[Any] = [llm.ask(question, NAMES, **settings).token_ids for question in questions]
    plain = {"prompt_token_ids": tokens(30, 1)}
    wanted.append(llm.generate(plain, LONG).token_ids)
    found: list[Any] = [None] * 4

    def ask(n: int) -> None:
        found[n] = other.ask(questions[n], NAMES, **settings).token_ids

    def generate() -> None:
        found[3] = other.generate(plain, LONG).token_ids

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
    threads.append(threading.Thread(target=generate))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted
    other.engine.check_integrity()


# Encoding


def test_others_go_on_while_a_document_is_encoded(
    llms: dict[str, tuple[LLM, Any]], tmp_path: Path, alone: list[tuple[int, ...]]
) -> None:
    """A thread encodes, another one decodes, in turns; both have what each has alone."""
    llm, _ = llms["llama"]
    ids, prompt = {"prompt_token_ids": tokens(300, 5)}, {"prompt_token_ids": tokens(30, 1)}
    other = opened(llm, Units(1, 16), prefill_chunk=64)
    whole = LLM(llm.engine.model, documents=tmp_path / "whole", prefill_chunk=16)
    whole.documents.add("long", ids, block_size=BLOCK)
    library = Documents(other.engine, tmp_path / "store")
    stream = other.stream(prompt, LONG)
    found = list(next(stream).token_ids)
    lent = []
    thread = threading.Thread(target=lambda: library.add("long", ids, block_size=BLOCK))
    thread.start()
    for piece in stream:
        found += piece.token_ids
        with other.engine.lock:
            other.engine.check_integrity()
            lent.append(len(other.engine.scheduler.lent))
    thread.join()
    assert tuple(found) == tuple(alone[1])
    assert sum(count == 75 for count in lent) > 5  # steps between its pieces
    assert other.engine.scheduler.lent == []
    assert other.engine.cache.in_use == 0
    with library.open("long") as ours, whole.documents.open("long") as theirs:
        for layer in range(ours.num_layers):
            for one, two in zip(ours.rows(layer, 0, 300), theirs.rows(layer, 0, 300), strict=True):
                assert one is not None
                assert two is not None
                torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_encoding_that_fails_gives_its_pages_back(
    llms: dict[str, tuple[LLM, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = llms["llama"]
    other = opened(llm, AtOnce(), prefill_chunk=64)
    library, calls = Documents(other.engine, tmp_path / "store"), []
    forward = other.engine.model.forward

    def broken(*given: Any) -> torch.Tensor:
        calls.append(len(given[0]))
        if len(calls) == 3:
            raise ValueError("odd")
        return forward(*given)

    monkeypatch.setattr(other.engine.model, "forward", broken)
    with pytest.raises(ValueError, match="odd"):
        library.add("long", {"prompt_token_ids": tokens(700, 5)})
    assert calls == [64, 64, 64]
    other.engine.check_integrity()
    assert other.engine.cache.in_use == 0
