"""Items over documents: the same again, of the sizes asked for, and with one right answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.eval.tiny_language.documents import (
    KINDS,
    WHERE,
    DocumentItem,
    exact_match,
    make,
)
from keyhole.eval.tiny_language.world import BOS, NAMES, WORD_IDS

SIZES = [(2, 320), (4, 512), (3, 1023), (16, 512)]


def sentences(item: DocumentItem) -> list[list[str]]:
    """All sentences of all documents, without headings and periods."""
    texts = [document.partition(" : ")[2] for document in item.documents]
    return [part.split() for text in texts for part in f"{text} ".split(". ") if part]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_documents", "words"), SIZES)
def test_documents_are_as_many_and_as_long_as_asked(
    kind: str, num_documents: int, words: int
) -> None:
    for seed in range(20):
        item = make(kind, num_documents=num_documents, words=words, seed=seed)
        assert [len(document.split()) for document in item.documents] == [words] * num_documents
        assert len(set(item.names)) == num_documents
        assert all(word in WORD_IDS for word in item.prompt.split())
        assert all(len(sentence) <= 7 for sentence in sentences(item)), "whole sentences only"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arguments_give_the_same_item(kind: str) -> None:
    items = [make(kind, num_documents=3, words=400, seed=seed) for seed in (5, 5, 6)]
    assert items[0] == items[1]
    assert items[0].documents != items[2].documents
    assert not {*items[0].names} & {*items[2].names}


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_needed_sentences_stand_where_they_are_said_to(kind: str, where: str) -> None:
    for seed in range(50):
        item = make(kind, num_documents=4, words=512, seed=seed, where=where)
        for needed in item.needed:
            words = item.documents[needed.document].split()[needed.word :]
            assert words[: len(needed.text.split())] == needed.text.split()
            assert sum(f" {needed.text}" in document for document in item.documents) == 1
            size = len(needed.text.split())
            ends = needed.word + size <= 32 or needed.word >= 512 - 64
            middle = 128 <= needed.word < 256
            assert where == "anywhere" or (ends, middle) == (where == "ends", where == "middle")
        documents = [needed.document for needed in item.needed]
        assert len({*documents}) == len(documents), "no document is enough for two sentences"
        if kind == "needs_each_other":
            assert documents == sorted(documents), "what is pointed to has been read before"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_about_a_subject_stands_together(kind: str) -> None:
    """Each name has one run of facts, or two where a needed paragraph stands between them, and a
    needed sentence is one of four about its name.
    """
    for seed in range(20):
        item = make(kind, num_documents=3, words=400, seed=seed, where="middle", subjects=True)
        assert item.documents != make(kind, num_documents=3, words=400, seed=seed).documents
        for number, document in enumerate(item.documents):
            needed = [one.text.split()[:-1] for one in item.needed if one.document == number]
            said = [part.split() for part in f"{document.partition(' : ')[2]} ".split(". ") if part]
            names = [subject(sentence) for sentence in said]
            runs = [name for n, name in enumerate(names) if name and names[n - 1 : n] != [name]]
            assert len(runs) <= len({*runs}) + len(needed) + 1
            for sentence in needed:
                place = said.index(sentence)
                about = subject(sentence)
                around = names[max(0, place - 3) : place + 4]
                assert around.count(about) == 4
                verbs = [words for words, name in zip(said, names, strict=True) if name == about]
                assert len({tuple(words[:-1]) for words in verbs}) == 4, "four different facts"


def subject(sentence: list[str]) -> str | None:
    """The name that a sentence is about; None for filler."""
    if sentence[0] == "both":
        return sentence[1]
    return sentence[0] if sentence[0] in NAMES else None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_follows_from_the_sentences_alone(kind: str) -> None:
    """A reader that knows only what the words mean finds the answer, and no other."""
    for seed in range(100):
        item = make(kind, num_documents=4, words=512, seed=seed, subjects=seed % 2 == 1)
        facts: dict[tuple[str, str], list[str]] = {}
        pointing: dict[tuple[str, str], str] = {}
        for sentence in sentences(item):
            if sentence[0] == "both":
                pointing[sentence[1], sentence[3]] = sentence[2]
            elif len(sentence) == 3 and sentence[1] in ("keeps", "owns", "inhabits", "serves"):
                facts.setdefault((sentence[0], sentence[1]), []).append(sentence[2])
        entity, *verbs = item.question.split()[2:-3]
        answer = []
        for verb in verbs:
            source = pointing.get((entity, verb), entity)
            (value,) = facts[source, verb]
            assert source == entity or (entity, verb) not in facts
            answer += [entity, verb, value, "."]
            entity = value
        assert [*answer, "done"] == item.answer.split()


def test_answers_are_compared_up_to_done() -> None:
    item = make("two_hop", num_documents=2, words=320, seed=0)
    assert exact_match(item, f"{item.answer} <eos> and more")
    assert not exact_match(item, item.answer.removesuffix("done"))
    assert not exact_match(item, "")


def test_what_cannot_be_made_is_named() -> None:
    with pytest.raises(UnknownNameError, match="two_hop"):
        make("twohop", num_documents=2, words=320, seed=0)
    with pytest.raises(UnknownNameError, match="ends"):
        make("one", num_documents=2, words=320, seed=0, where="end")
    with pytest.raises(ConfigError, match="num_documents is 1"):
        make("one", num_documents=1, words=320, seed=0)
    with pytest.raises(ConfigError, match="words is 319"):
        make("one", num_documents=2, words=319, seed=0)


@pytest.fixture(scope="module")
def model() -> Any:
    folder = Path(keyhole.tiny())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bundled_model_answers_when_it_reads_everything(
    kind: str, where: str, model: Any
) -> None:
    for seed in range(2):
        item = make(kind, num_documents=3, words=320, seed=seed, where=where)
        prompt = [WORD_IDS[word] for word in [BOS, *item.prompt.split()]]
        answer = [WORD_IDS[word] for word in item.answer.split()]
        with torch.no_grad():
            out = model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer))
        assert out.logits[0].argmax(-1).tolist() == answer
