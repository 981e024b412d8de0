"""Where an answer begins to be wrong is what a plain reading of the texts says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole
from benchmarks.results_page import first_error
from keyhole import LLM, Full, SamplingParams, StreamingLLM
from keyhole.eval.policy_trace import Read, Trace, TracedStep
from keyhole.eval.tasks import make_task, token_counter
from keyhole.models.loading import load
from keyhole.models.model import Model

LENGTH, SINKS, BUDGET = 256, 4, 64


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load(keyhole.tiny(), "cpu")


@pytest.mark.parametrize(
    ("right", "written", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 2, 3, 4], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1], [], 0),
    ],
)
def test_what_follows_a_whole_answer_is_not_wrong(
    right: list[int], written: list[int], at: int | None
) -> None:
    assert first_error.first_difference(right, written) == at


def test_a_sentence_is_found_where_it_stood_last() -> None:
    #         0  1  2  3  4  5  6  7  8 | 9 10 11 12 13 14 15
    tokens = [5, 6, 0, 7, 6, 0, 5, 6, 0, 5, 6, 0, 8, 0, 8, 0]
    found = first_error.sources(tokens, 9, 0)
    assert found == [(6, 9)] * 3 + [None] * 2 + [(12, 14)] * 2


def test_a_sum_is_of_the_two_sentences_before_it() -> None:
    tokens = [5, 0, 6, 6, 0, 7, 0, 8, 8, 0]
    found = [first_error.two_before(tokens, at, 0) for at in range(10)]
    assert found == [None] * 7 + [(2, 7)] * 3


def test_layers_that_read_everything_do_not_count() -> None:
    step = TracedStep(np.array([8]), 4)
    step.reads = {0: None, 1: Read(np.array([[[0, 1, 2, 3], [4, 5, 6, 7]]]), 1), 2: None}
    step.reads[3] = Read(np.array([[[0, -1]]]), 4)
    trace: Any = Trace([step])
    assert first_error.sparse_layers(trace, 0) == (1, 3)
    # Of tokens 3 and 4 each head of layer 1 has read one, layer 3 the first.
    assert first_error.share_read(trace, 0, (3, 5)) == 0.5
    assert first_error.share_read(trace, 0, (0, 2)) == 0.75


@pytest.mark.slow
def test_a_right_answer_has_no_wrong_word(tiny: Model) -> None:
    task = make_task("tiny_derive")
    found = first_error.find(tiny, Full(), task, length=LENGTH, seed=0, setup="prompt")
    assert found is None


@pytest.mark.parametrize(
    ("task", "setup"),
    [
        pytest.param("tiny_derive", "prompt", marks=pytest.mark.slow),
        ("tiny_multikey", "question"),
    ],
)
def test_a_window_is_seen_to_hide_what_a_word_needs(tiny: Model, task: str, setup: str) -> None:
    policy = StreamingLLM(token_budget=BUDGET, sink_size=SINKS)
    found = first_error.find(tiny, policy, make_task(task), length=LENGTH, seed=1, setup=setup)
    assert found is not None
    sample = make_task(task).make(LENGTH, 1, token_counter(tiny.tokenizer))
    if setup == "prompt":
        params = SamplingParams(max_tokens=sample.max_new_tokens, temperature=0.0)
        text = LLM(tiny, policy=policy).generate(sample.prompt, params).text
        pairs = zip(sample.answers[0].split(), text.split(), strict=False)
        assert found.word == next(n for n, (a, b) in enumerate(pairs) if a != b)
    answer = sample.answers[0].split()[: found.word + 1]
    assert found.right.split() == answer[-len(found.right.split()) :]
    assert found.written.split()[:-1] == found.right.split()[:-1]
    assert found.written != found.right

    # By the words alone; the model has one token before them.
    whole = [*sample.prompt.split(), *sample.answers[0].split()]
    begin = len(sample.prompt.split())
    start = begin + found.word - (len(found.right.split()) - 1)
    size = whole[start:].index(".") + 1
    at = max(n for n in range(start) if whole[n : n + size] == whole[start : start + size]) + 1
    assert found.needed == (at, at + size)
    assert found.kind == first_error.COPIED
    assert found.tokens_back == 1 + begin + found.word - at
    # The word was written by the step whose newest token is the one before it.
    length = 1 + begin + found.word
    read = [n < SINKS or n >= length - (BUDGET - SINKS) for n in range(at, at + size)]
    assert found.read == pytest.approx(sum(read) / size)
    assert found.recorded.trace.steps[found.step or 0].lengths[0] == length
