"""Tasks as requests: where the dense prompt ends, and that it makes no difference to dense text."""

from __future__ import annotations

import dataclasses

import pytest

import keyhole
from keyhole import Full, StreamingLLM
from keyhole.config import EngineConfig
from keyhole.engine.engine import Engine
from keyhole.errors import ConfigError
from keyhole.eval.tasks import Sample, make_task, tasks
from keyhole.eval.workload import Answered, request, serve
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from tests.checkpoints import make_tokenizer

LENGTH, SAMPLES = 384, 3


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load(keyhole.tiny(), "cpu")


def engine(model: Model, policy: Policy) -> Engine:
    return Engine(model, policy, EngineConfig(max_batch=2, prefix_cache=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, t in tasks().items() if not n.startswith("tiny_")])
def test_the_context_is_a_prefix_and_the_question_is_the_rest(name: str) -> None:
    tokenizer = make_tokenizer()
    sample = make_task(name).make(16000, 0, lambda text: len(tokenizer(text).input_ids))
    whole = request(tokenizer, sample, "prompt")
    parted = request(tokenizer, sample, "question")
    assert whole.given == []
    assert whole.prompt == parted.prompt + parted.given == tokenizer(sample.prompt).input_ids
    assert parted.prompt == tokenizer(sample.context).input_ids
    assert tokenizer.decode(parted.given) == sample.question + sample.answer_prefix


class _Merging:
    """A tokenizer that joins letters over the boundary and ends every text with a token."""

    def __call__(self, text: str, **_: object) -> object:
        pieces = text.replace("ab", "X")
        return type("Encoding", (), {"input_ids": [1, *map(ord, pieces), 2]})()


def test_a_token_over_the_boundary_belongs_to_the_question() -> None:
    sample = Sample(
        task="t", length=9, seed=0, context="ca", question="bd", answers=("",),
        max_new_tokens=1, prompt_tokens=5,
    )  # fmt: skip
    found = request(_Merging(), sample, "question")
    assert (found.prompt, found.given) == ([1, ord("c")], [ord("X"), ord("d"), 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_recall", "tiny_vartrack"])
def test_both_setups_give_the_same_answers_under_full_attention(tiny: Model, name: str) -> None:
    task, tokenizer = make_task(name), tiny.tokenizer
    samples = [
        task.make(LENGTH, seed, lambda text: len(tokenizer(text).input_ids))
        for seed in range(SAMPLES)
    ]
    answers = {}
    for setup in ("prompt", "question"):
        requests = [request(tokenizer, sample, setup) for sample in samples]
        served = serve(engine(tiny, Full()), requests)
        answers[setup] = served.generated
        steps = sum(
            len(r.given) + len(a) - 1 for r, a in zip(requests, served.generated, strict=True)
        )
        assert served.costs()["decode_steps"] == steps
    assert answers["prompt"] == answers["question"]


@pytest.mark.slow
def test_the_question_goes_through_the_policy(tiny: Model) -> None:
    """With a window that holds no more than the question, only a dense question finds the fact."""
    task = Answered(make_task("tiny_passkey", {"depth": 0.3}), tiny)

    def measure(policy: Policy, setup: str) -> dict[str, object]:
        return task.measure(lambda p: engine(tiny, p), policy, LENGTH, setup, SAMPLES)

    little = StreamingLLM(token_budget=32)
    dense, sparse = (measure(little, setup) for setup in ("prompt", "question"))
    full = measure(Full(), "question")
    assert full["score"] == 1
    assert sparse["score"] == 0
    assert dense["tokens_prompt"] == sparse["tokens_prompt"] == full["tokens_prompt"]
    assert sparse["decode_steps"] > dense["decode_steps"]
    assert sparse["read_share"] < 0.12
    assert full["read_share"] == 1
    assert full["depths"] == pytest.approx([0.3] * SAMPLES, abs=0.05)
    assert full["bytes_per_step"] > 5 * sparse["bytes_per_step"]


@pytest.mark.parametrize("setup", ["prompt", "question"])
def test_marks_stand_where_the_needed_facts_begin(tiny: Model, setup: str) -> None:
    task = Answered(make_task("tiny_vartrack"), tiny)
    (sample,) = task.samples(LENGTH, 1)
    shown = task.shown(LENGTH, setup)
    assert shown.request == request(tiny.tokenizer, sample, setup)
    tokens = shown.request.prompt + shown.request.given
    assert len(shown.marks) == len(sample.depths) > 1
    for mark, depth in zip(shown.marks, sample.depths, strict=True):
        rest = sample.context[round(depth * len(sample.context)) :].split()
        assert tiny.tokenizer.decode(tokens[mark : mark + 6]).split() == rest[:6]


def test_memory_is_that_of_the_samples_that_run_at_once(tiny: Model) -> None:
    task = Answered(make_task("tiny_recall"), tiny)
    used = engine(tiny, Full())
    found = task.measure(lambda _: used, Full(), LENGTH, "prompt", 4)
    token = used.geometry.token_bytes
    assert LENGTH * 1.5 * token < found["peak_bytes"] <= 2 * LENGTH * token
    assert found["tokens_generated"] > 1
    assert found["step_ms"] > 0
    assert 1 <= found["step_batch"] <= 2


def test_answers_that_are_wrong_already_end_and_score_the_same(tiny: Model) -> None:
    task = make_task("tiny_derive")
    policy = StreamingLLM(token_budget=176)

    def measure(*, only_scores: bool) -> dict[str, object]:
        texts = Answered(task, tiny, only_scores=only_scores)
        return texts.measure(lambda p: engine(tiny, p), policy, 256, "prompt", 6)

    whole, stopped = measure(only_scores=False), measure(only_scores=True)
    assert 0 < sum(whole["scores"]) < 6
    assert stopped["scores"] == whole["scores"]
    ends = zip(whole["scores"], whole["answer_lengths"], stopped["answer_lengths"], strict=True)
    for score, length, end in ends:
        assert end == length if score else end <= length
    assert stopped["tokens_generated"] < whole["tokens_generated"]


def test_an_answer_can_be_right_as_long_as_every_word_is() -> None:
    task = make_task("tiny_derive")
    sample = task.make(256, 0, lambda text: len(text.split()))
    answer = sample.answers[0]
    for end in range(len(answer) + 1):
        assert task.can_be_right(sample, answer[:end])
        assert not task.can_be_right(sample, f"{answer[:end]}#")
    assert task.can_be_right(sample, f"{answer} and more")
    assert make_task("passkey").can_be_right(sample, "anything")


def test_a_task_needs_a_tokenizer(tiny: Model) -> None:
    with pytest.raises(ConfigError, match="task passkey is text, and keyhole-tiny has no token"):
        Answered(make_task("passkey"), dataclasses.replace(tiny, tokenizer=None))
