"""Every task: filled but not beyond its length, the same again, answered by reading, and scored."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keyhole.errors import ConfigError, UnknownNameError
from keyhole.eval.tasks import (
    PLAIN,
    RULER,
    TINY,
    TINY_FORMS,
    CountTokens,
    make_task,
    tasks,
    token_counter,
)
from keyhole.eval.tiny_language.world import WORD_IDS
from recipes.tiny_model.export import build_tokenizer
from tests.checkpoints import make_tokenizer
from tests.eval.tasks.readers import read
from tests.recipes.solver import solve

ROOT = Path(__file__).parents[3]

PLAIN_TASKS = [name for name, task in tasks().items() if task.text == PLAIN]
TINY_TASKS = [name for name, task in tasks().items() if task.text == TINY]
WITH_DEPTH = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1")
WITH_DEPTH += ("niah_multikey_2", "niah_multikey_3", "key_value", "passkey")
WITH_DEPTH += ("tiny_passkey", "tiny_needle")

WORDS: CountTokens = token_counter(build_tokenizer())
BYTES: CountTokens = token_counter(make_tokenizer())


def quarters(text: str) -> int:
    """As a tokenizer of a large vocabulary would count: about four letters a token."""
    return sum(1 + len(word) // 5 for word in text.split())


COUNTERS: dict[str, tuple[CountTokens, tuple[int, ...]]] = {
    "words": (WORDS, (1024, 4096)),
    "bytes": (BYTES, (8192, 20000)),
    "quarters": (quarters, (2048,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("name", tasks())
def test_a_sample_fills_its_length_and_does_not_exceed_it(name: str, counter: str) -> None:
    count, lengths = COUNTERS[counter]
    for length in lengths:
        sample = make_task(name).make(length, 3, count)
        total = sample.prompt_tokens + sample.max_new_tokens
        assert sample.prompt_tokens == count(sample.prompt)
        # Setup B encodes the context and the rest apart from each other.
        apart = count(sample.context) + count(sample.question + sample.answer_prefix)
        assert max(total, apart + sample.max_new_tokens) <= length
        # The number of names limits the number of steps, and each step has many tokens.
        assert total >= 0.95 * length or name in ("walk", "tiny_walk", "derive", "tiny_derive")
        assert total >= 0.9 * length or "walk" in name or length == 20000


@pytest.mark.slow
@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("name", tasks())
def test_the_right_answer_may_be_generated_to_its_end(name: str, counter: str) -> None:
    count, (length, *_) = COUNTERS[counter]
    sample = make_task(name).make(length, 0, count)
    text = sample.answers[0] if name.startswith("qa") else ", ".join(sample.answers)
    assert count(text) < sample.max_new_tokens


DIGEST = """
from hashlib import sha256
from keyhole.eval.tasks import tasks
samples = [task.make(2048, 7, lambda text: len(text) // 4) for task in tasks().values()]
digest = sha256(repr(samples).encode()).hexdigest()
"""


@pytest.mark.slow
def test_samples_are_the_same_in_another_process() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"}
    run = [sys.executable, "-c", f"{DIGEST}print(digest)"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    here: dict[str, str] = {}
    exec(DIGEST, here)
    assert done.stdout.strip() == here["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("name", tasks())
def test_another_seed_is_another_sample(name: str) -> None:
    first, again, other = (make_task(name).make(1024, seed, WORDS) for seed in (0, 0, 1))
    assert first == again
    assert first.context != other.context
    assert (first.question, first.answers) != (other.question, other.answers)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PLAIN_TASKS)
def test_a_reader_finds_the_answer_in_the_prompt(name: str) -> None:
    task = make_task(name)
    for length, seed in [(1024, 0), (1024, 1), (4096, 2), (2048, 3)]:
        sample = task.make(length, seed, WORDS)
        assert task.score(sample, read(name, sample.prompt)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_TASKS)
def test_a_reader_finds_the_answer_in_the_words_of_the_bundled_world(name: str) -> None:
    task = make_task(name)
    for length, seed in [(1024, 0), (1024, 1), (4096, 2)]:
        sample = task.make(length, seed, WORDS)
        assert task.score(sample, solve(sample.context, sample.question.strip())) == 1.0
        assert all(word in WORD_IDS for word in f"{sample.prompt} {sample.answers[0]}".split())


@pytest.mark.slow
@pytest.mark.parametrize("name", tasks())
def test_the_right_answer_scores_one_and_a_wrong_one_nothing(name: str) -> None:
    task = make_task(name)
    sample, *others = (task.make(1024, seed, WORDS) for seed in range(6))
    other = next(other for other in others if not {*sample.answers} & {*other.answers})
    assert task.score(sample, f" {', '.join(sample.answers)}") == 1.0
    assert task.score(sample, f" {', '.join(other.answers)}") == 0.0
    assert task.score(sample, "") == 0.0


@pytest.mark.parametrize("name", ["niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"])
def test_some_of_several_answers_score_their_share(name: str) -> None:
    task = make_task(name)
    sample = task.make(1024, 0, WORDS)
    assert task.score(sample, sample.answers[0].upper()) == 1 / len(sample.answers)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", tasks())
def test_nothing_but_the_needed_sentences_has_the_answer(name: str) -> None:
    for seed in range(5):
        sample = make_task(name).make(2048, seed, WORDS)
        if not sample.depths:
            continue
        rest = without_needed(sample.context, sample.depths, name)
        said = sample.answers
        if name in TINY_TASKS:
            said = tuple(f"{part.strip()} ." for part in sample.answers[0].split(" .")[:-1])
        assert not any(one.lower() in rest.lower() for one in said)


def without_needed(context: str, depths: tuple[float, ...], name: str) -> str:
    """The context without the sentences that begin at these depths."""
    ends = "\n" if name == "vt" else '",' if name == "key_value" else "."
    for start in sorted((round(depth * len(context)) for depth in depths), reverse=True):
        end = context.find(ends, start)
        end = len(context) if end < 0 else end
        if name == "passkey":  # two sentences
            end = context.find(".", end + 1)
        context = context[:start] + context[end + len(ends) :]
    return context


@pytest.mark.one_in(4)
@pytest.mark.parametrize("depth", [0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", WITH_DEPTH)
def test_a_needle_has_the_requested_depth(name: str, depth: float) -> None:
    task = make_task(name, {"depth": depth})
    anywhere = make_task(name).make(4096, 5, WORDS)
    sample = task.make(4096, 5, WORDS)
    (found,) = sample.depths
    assert found == pytest.approx(depth, abs=0.03)
    assert task.score(sample, sample.answers[0]) == 1.0
    # The same needle, only elsewhere: rows of a heat-map differ by nothing else.
    assert (sample.question, sample.answers) == (anywhere.question, anywhere.answers)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", tasks())
def test_depths_and_documents_are_those_of_the_context(name: str) -> None:
    sample = make_task(name).make(2048, 1, WORDS)
    assert all(0 <= depth < 1 for depth in sample.depths)
    place = 0
    for document in sample.documents:
        place = sample.context.index(document, place) + len(document)
    assert bool(sample.documents) == any(
        kind in name for kind in ("qa", "docs", "document", "reference")
    )


def test_every_plain_task_has_a_form_in_the_bundled_world() -> None:
    assert list(TINY_FORMS) == PLAIN_TASKS
    assert {*TINY_FORMS.values()} <= {*TINY_TASKS}
    assert [*RULER] == PLAIN_TASKS[:13]
    assert len({TINY_FORMS[name] for name in RULER}) == 9


def test_settings_change_a_task() -> None:
    assert (
        len(make_task("multi_document_2", {"num_documents": 5}).make(1024, 0, WORDS).documents) == 5
    )
    item = make_task("tiny_documents_one", {"num_documents": 2, "where": "ends"})
    assert len(item.make(1024, 0, WORDS).documents) == 2
    default = make_task("passkey")
    assert default == tasks()["passkey"] == make_task("passkey", {})
    assert dataclasses.is_dataclass(default)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: make_task("niah_singel_1"), "did you mean 'niah_single_1'"),
        (lambda: make_task("passkey", {"dept": 0.5}), "did you mean 'depth'"),
        (lambda: make_task("passkey", {"name": "mine"}), "unknown setting of task passkey 'name'"),
        (lambda: make_task("tiny_documents_one", {"where": "end"}), "did you mean 'ends'"),
    ],
)
def test_an_unknown_name_is_refused_and_the_nearest_offered(
    wrong: Callable[[], object], message: str
) -> None:
    with pytest.raises(UnknownNameError, match=message):
        wrong()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: make_task("passkey", {"depth": 1.5}), "depth 1.5 must be a number from 0"),
        (lambda: make_task("passkey", {"depth": "deep"}), "depth 'deep' must be a number from 0"),
        (lambda: make_task("niah_multivalue", {"depth": 0.5}), "several needles are asked"),
        (lambda: make_task("multi_document_1", {"num_documents": 1}), "at least 2"),
        (lambda: make_task("passkey").make(20, 0, WORDS), "length 20 is too short for passkey"),
        (lambda: make_task("cwe").make(4096, 0, BYTES), "length 4096 is too short for cwe"),
        (lambda: make_task("passkey").make(0, 0, WORDS), "length 0 must be a whole number"),
        (lambda: make_task("tiny_recall").make(512, -1, WORDS), "seed -1 must be a whole number"),
    ],
)
def test_impossible_samples_are_errors(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()
