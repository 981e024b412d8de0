import importlib.util
from pathlib import Path

import pytest

from keyhole.eval.tasks.base import share_before_first_error
from keyhole.eval.tiny_language.tasks import TASKS, is_correct, make, shared
from keyhole.eval.tiny_language.world import WORD_IDS

# Test modules are not a package, so the solver beside this file is loaded by its path.
_spec = importlib.util.spec_from_file_location("solver", Path(__file__).with_name("solver.py"))
solver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(solver)

LENGTHS = (96, 255, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_text(task, length):
    for seed in range(20):
        item = make(task, length, seed)
        assert solver.solve(item.context, item.question) == item.answer


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_prompt_and_answer_fit_and_have_known_words(task, length):
    for seed in range(20):
        item = make(task, length, seed)
        words = f"{item.prompt} {item.answer}".split()
        assert 0.4 * length < len(words) <= length
        assert all(word in WORD_IDS for word in words)
        assert item.question.endswith("answer :")
        assert item.answer.endswith(". done")


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_item_other_seed_other_item(task):
    assert make(task, 200, 1) == make(task, 200, 1)
    assert make(task, 200, 1) != make(task, 200, 2)


@pytest.mark.parametrize("length", [256, 2048])
def test_shared_items_have_one_context_and_right_answers(length):
    items = shared(length, 3)
    assert len({item.context for item in items}) == 1
    assert len({item.task for item in items}) == len(items) >= 8
    for item in items:
        assert solver.solve(item.context, item.question) == item.answer
        assert len(f"{item.prompt} {item.answer}".split()) <= length


@pytest.mark.parametrize("task", ["docs1", "docs2", "reference"])
def test_documents_join_to_the_context(task):
    item = make(task, 600, 0)
    assert len(item.documents) == 4
    assert " ".join(item.documents) == item.context


def test_a_reference_points_to_an_earlier_document():
    for seed in range(20):
        item = make("reference", 400, seed)
        entity, verb = item.question.split()[2:4]
        (here,) = (n for n, text in enumerate(item.documents) if f"both {entity} " in text)
        source = item.documents[here].split(f"both {entity} ")[1].split()[0]
        (there,) = (
            n
            for n, text in enumerate(item.documents)
            if f". {source} {verb} " in text or f": {source} {verb} " in text
        )
        assert there < here


def test_only_a_whole_answer_is_correct():
    item = make("recall", 128, 0)
    words = item.answer.split()
    assert is_correct(item, item.answer)
    assert is_correct(item, f"{item.answer} <eos> question")
    assert not is_correct(item, " ".join(words[:-1]))
    mistaken = [*words[:2], "lamp", *words[3:]]
    assert not is_correct(item, " ".join(mistaken))
    assert share_before_first_error(words, mistaken) == 2 / len(words)
    assert share_before_first_error(words, []) == 0.0


def test_mistakes_are_reported():
    with pytest.raises(ValueError, match="unknown task 'recal'; one of recall"):
        make("recal", 512, 0)
    with pytest.raises(ValueError, match="at least 96"):
        make("recall", 20, 0)
