"""Questions from a file of the user's: SQuAD and HotpotQA as they are laid out, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole.errors import ConfigError
from keyhole.eval.tasks import make_task, token_counter
from recipes.tiny_model.export import build_tokenizer

WORDS = token_counter(build_tokenizer())


def write(path: Path, data: Any) -> str:
    path.write_text(json.dumps(data))
    return str(path)


@pytest.fixture
def squad(tmp_path: Path) -> str:
    def paragraph(place: str, number: int) -> dict[str, Any]:
        asked = {
            "question": f"Who lives in {place}?",
            "answers": [{"text": f"Person {number}"}] * 2,
        }
        impossible = {"question": "Why?", "answers": [], "is_impossible": True}
        text = f"{place} is a place. Person {number} lives there." + " It is quiet." * 5
        return {"context": text, "qas": [impossible, asked | {"is_impossible": False}]}

    paragraphs = [paragraph(f"Town{n}", n) for n in range(100, 160)]
    articles = [{"title": "a", "paragraphs": paragraphs[:5]}, {"paragraphs": paragraphs[5:]}]
    return write(tmp_path / "squad.json", {"version": "v2.0", "data": articles})


@pytest.fixture
def hotpot(tmp_path: Path) -> str:
    def item(number: int) -> dict[str, Any]:
        near = [[f"Other {number} {n}", ["Nothing. ", "At all."]] for n in range(3)]
        facts = [["Film", [f"Film {number} is by Maker {number}."]]]
        facts += [["Maker", [f"Maker {number} ", f"was born in Place {number}."]]]
        return {
            "question": f"Where was the maker of film {number} born?",
            "answer": f"Place {number}",
            "supporting_facts": [["Film", 0], ["Maker", 1]],
            "context": [near[0], facts[0], *near[1:], facts[1]],
        }

    return write(tmp_path / "hotpot.json", [item(number) for number in range(200, 230)])


def test_a_question_of_squad_is_asked_over_paragraphs(squad: str) -> None:
    task = make_task("qa_1", {"data": squad})
    sample = task.make(512, 3, WORDS)
    assert sample.question.endswith("Question: Who lives in Town103?")
    assert sample.answers == ("Person 103",)
    assert task.score(sample, "It is person 103.") == 1.0
    assert len({*sample.documents}) == len(sample.documents) > 10
    (needed,) = sample.depths
    assert sample.context[round(needed * len(sample.context)) :].startswith("Town103 is")
    # The paragraphs of the same article are the first distractors.
    assert all(f"Town{n} is" in sample.context for n in range(100, 105))
    assert sample.prompt_tokens + sample.max_new_tokens <= 512


def test_numbers_of_questions_go_round_and_documents_do_not(squad: str) -> None:
    task = make_task("qa_1", {"data": squad})
    assert task.make(512, 63, WORDS).answers == ("Person 103",)
    everything = task.make(100_000, 3, WORDS)
    assert len(everything.documents) == len({text[12:] for text in everything.documents}) == 60


def test_a_question_of_hotpot_brings_its_documents(hotpot: str) -> None:
    sample = make_task("qa_2", {"data": hotpot}).make(512, 4, WORDS)
    assert sample.answers == ("Place 204",)
    assert all(f"Other 204 {n}\nNothing. At all." in sample.context for n in range(3))
    assert "Maker\nMaker 204 was born in Place 204." in sample.context
    starts = [sample.context[round(depth * len(sample.context)) :] for depth in sample.depths]
    assert [text.split("\n")[0] for text in starts] == ["Film", "Maker"]


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"data": 3}', "{}", '[{"question": "?"}]'])
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is not a JSON file in the format of SQuAD or HotpotQA"):
        make_task("qa_1", {"data": str(path)}).make(512, 0, WORDS)


def test_a_file_that_is_not_there_or_has_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        make_task("qa_1", {"data": str(tmp_path / "none.json")}).make(512, 0, WORDS)
    empty = write(tmp_path / "empty.json", {"data": []})
    with pytest.raises(ConfigError, match="has no question"):
        make_task("qa_1", {"data": empty}).make(512, 0, WORDS)
