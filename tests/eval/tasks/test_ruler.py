"""RULER's definitions: what its thirteen tasks contain, and how they are scored."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from keyhole.eval.tasks import RULER, make_task, token_counter
from keyhole.eval.tasks.base import (
    first_number,
    share_before_first_error,
    string_match_all,
    string_match_part,
    token_f1,
)
from keyhole.eval.tiny_language.tasks import begins_with
from recipes.tiny_model.export import build_tokenizer

WORDS = token_counter(build_tokenizer())
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
KEY = r"[a-z]+-[a-z]+"
NUMBER = r"\d{7}"

#: Key, value, needles' keys, values of each key, keys asked for; None: as many as fit.
NEEDLES = {
    "niah_single_1": (KEY, NUMBER, 1, 1, 1),
    "niah_single_2": (KEY, NUMBER, 1, 1, 1),
    "niah_single_3": (KEY, UUID, 1, 1, 1),
    "niah_multikey_1": (KEY, NUMBER, 4, 1, 1),
    "niah_multikey_2": (KEY, NUMBER, None, 1, 1),
    "niah_multikey_3": (UUID, UUID, None, 1, 1),
    "niah_multivalue": (KEY, NUMBER, 1, 4, 1),
    "niah_multiquery": (KEY, NUMBER, 4, 1, 4),
}


def test_there_are_thirteen() -> None:
    assert (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2") == RULER


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_as_many_and_of_the_kinds_defined(name: str) -> None:
    key, value, num_keys, num_values, num_queries = NEEDLES[name]
    sample = make_task(name).make(4096, 0, WORDS)
    found = re.findall(rf"belongs to ({key}) is ({value})\.", sample.context)
    assert len(found) == sample.context.count("belongs to")
    keys = Counter(key for key, _ in found)
    assert num_keys is None or len(keys) == num_keys
    assert num_keys is not None or len(keys) > 200
    assert set(keys.values()) == {num_values}
    assert len({value for _, value in found}) == len(found)
    assert len(sample.answers) == num_values * num_queries == len(sample.depths)
    assert sample.max_new_tokens == 128


def test_noise_is_one_line_again_and_again_and_prose_is_not() -> None:
    noise = make_task("niah_single_1").make(2048, 0, WORDS).context.splitlines()[1:]
    assert len({*noise}) == 2
    prose = re.split(r"(?<=\.) ", make_task("niah_single_2").make(4096, 0, WORDS).context)
    assert len({*prose}) > 0.99 * len(prose) > 200


def test_a_chain_has_five_variables_in_order_after_a_solved_example() -> None:
    sample = make_task("vt").make(4096, 0, WORDS)
    example, text = re.split(r"(?=Keep track)", sample.context)[1:]
    assert WORDS(example) <= 500
    assert re.findall(r"VAR (\w+) =", text) == [*sample.answers]
    assert len(sample.answers) == 5
    assert all(re.fullmatch("[A-Z]{5}", name) for name in sample.answers)
    assert list(sample.depths) == sorted(sample.depths)
    shown = re.findall(r"VAR (\w{3}) =", example)
    assert example.rstrip().endswith(" ".join(shown))
    assert sample.max_new_tokens == 30


@pytest.mark.parametrize(
    ("length", "often", "seldom", "shown", "shown_often", "shown_seldom"),
    [(2048, 6, 1, 20, 3, 1), (4096, 30, 3, 40, 10, 3)],
)
def test_ten_words_are_common(
    length: int, often: int, seldom: int, shown: int, shown_often: int, shown_seldom: int
) -> None:
    sample = make_task("cwe").make(length, 0, WORDS)
    example, text = (
        Counter(re.findall(r"\d+\. (\w+)", part.partition("\nQuestion")[0]))
        for part in re.split(r"(?=Here is a numbered list)", sample.context)[1:]
    )
    assert {word for word, times in text.items() if times == often} == {*sample.answers}
    assert {*text.values()} == {often, seldom}
    assert not [word for word in text for one in sample.answers if one in word and one != word]
    assert Counter(example.values()).keys() == {shown_often, shown_seldom}
    assert shown - 2 <= len(example) <= shown
    assert len(sample.answers) == 10
    assert sample.max_new_tokens == 120


def test_coded_words_follow_the_zeta_distribution() -> None:
    sample = make_task("fwe").make(8192, 0, WORDS)
    words = Counter(sample.context.partition("frequent ones. ")[2].split())
    total, (dots, *others) = words.total(), words.most_common()
    assert dots[0] == "..."
    assert tuple(word for word, _ in others[:3]) == sample.answers
    for rank, (_, times) in enumerate([dots, *others[:3]], start=1):
        assert times / total == pytest.approx(0.6079 / rank**2, rel=0.03)
    assert len(words) <= (8192 - 50) // 50
    assert sample.max_new_tokens == 50


def test_questions_have_many_short_documents() -> None:
    for name, facts in (("qa_1", 1), ("qa_2", 2)):
        sample = make_task(name).make(4096, 0, WORDS)
        assert len(sample.documents) > 80
        assert len(sample.depths) == facts
        assert [int(text.split()[1][:-1]) for text in sample.documents] == [
            *range(1, len(sample.documents) + 1)
        ]
        assert sample.max_new_tokens == 32


def test_golden_scores() -> None:
    """Computed by hand from RULER's definitions."""
    assert string_match_all(("4712", "8210"), "They are 4712 and 8210.") == 1.0
    assert string_match_all(("4712", "8210"), "4712, then 821 0") == 0.5
    assert string_match_all(("Abc",), "xABCx") == 1.0
    assert string_match_all(("a b",), "a\tb") == 0.0, "control characters are line breaks"
    assert string_match_part(("Paris", "the city"), "in PARIS") == 1.0
    assert string_match_part(("Paris", "the city"), "in Rome") == 0.0
    assert first_number(("123",), "It is 123, not 45") == 1.0
    assert first_number(("123",), "1234") == 0.0
    assert first_number(("123",), "no number") == 0.0
    assert token_f1(("the Blue River", "Elbe"), "blue river!") == 1.0
    assert token_f1(("Blue River",), "a river of mud") == pytest.approx(2 * 1 / (2 + 3))
    assert token_f1(("Blue",), "") == 0.0
    assert begins_with("a b . done", "a b . done <eos> c") == 1.0
    assert begins_with("a b . done", "a b .") == 0.0
    assert share_before_first_error(["a", "b", "c", "d"], ["a", "b", "x", "d"]) == 0.5
