"""Questions and documents from a file of the user's: SQuAD (1.1 or 2.0) or HotpotQA, as JSON.

Read as RULER reads them: every paragraph is a document once; questions that SQuAD 2.0 marks as
impossible are left out. Nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from keyhole.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, every answer that counts as right, and numbers of documents.

    given: the documents that come with it, and among them those that are needed, as far as the file
    tells. near: others of the same article, as distractors.
    """

    question: str
    answers: tuple[str, ...]
    given: tuple[int, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """All questions of a file and all its documents."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


@lru_cache(maxsize=2)
def read_dataset(path: str) -> Dataset:
    """The dataset in a file; ConfigError where it cannot be read or is neither of the two."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = _squad(data["data"]) if isinstance(data, dict) else _hotpot(data)
    except OSError as error:
        raise ConfigError(f"data {path!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"data {path!r} is not a JSON file of SQuAD or HotpotQA") from error
    if not found.questions:
        raise ConfigError(f"data {path!r} has no question that can be answered")
    return found


def _squad(articles: list[dict[str, Any]]) -> Dataset:
    paragraphs = [[one["context"] for one in article["paragraphs"]] for article in articles]
    texts, places = _documents([text for article in paragraphs for text in article])
    questions = []
    for article in articles:
        siblings = {places[one["context"]] for one in article["paragraphs"]}
        for paragraph in article["paragraphs"]:
            here = places[paragraph["context"]]
            questions += [
                Question(
                    question=asked["question"],
                    answers=tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
                    given=(here,),
                    needed=(here,),
                    near=tuple(sorted(siblings - {here})),
                )
                for asked in paragraph["qas"]
                if not asked.get("is_impossible") and asked["answers"]
            ]
    return Dataset(questions=tuple(questions), documents=texts)


def _hotpot(items: list[dict[str, Any]]) -> Dataset:
    texts, places = _documents([_titled(*part) for one in items for part in one["context"]])
    questions = []
    for one in items:
        given = {places[_titled(*part)]: part[0] for part in one["context"]}
        facts = {title for title, _ in one.get("supporting_facts", [])}
        needed = tuple(place for place, title in given.items() if title in facts)
        questions.append(
            Question(
                question=one["question"],
                answers=(one["answer"],),
                given=tuple(given),
                needed=needed or tuple(given),
            )
        )
    return Dataset(questions=tuple(questions), documents=texts)


def _titled(title: str, sentences: list[str]) -> str:
    return f"{title}\n{''.join(sentences)}"


def _documents(texts: list[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Each text once, in sorted order, and its number."""
    once = tuple(sorted({*texts}))
    return once, {text: number for number, text in enumerate(once)}
