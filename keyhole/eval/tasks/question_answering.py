"""Questions over many short documents (RULER), or over a few long ones (LongBench)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from keyhole.config import is_count, require, setting
from keyhole.eval.tasks.base import (
    CountTokens,
    Sample,
    Task,
    Written,
    fitted,
    room_for,
    string_match_part,
    token_f1,
)
from keyhole.eval.tasks.materials import (
    Article,
    Articles,
    Stream,
    read_dataset,
    sentence,
    with_needles,
)

_NEW_TOKENS = 32
_ORDER = "Answer the question from the documents. Write the answer alone, without any other word."
_INSTRUCTION = f"{_ORDER}\n\nThese are the documents.\n\n"


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A question, its documents, and a source of further ones.

    needed: the parts of its documents whose positions are in `Sample.depths`.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    needed: tuple[str, ...]
    others: Stream[str]
    most: int | None = None


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(Task):
    """Answer a question that one document answers, or two together.

    RULER's questions over many short documents: `qa_1` (one hop) and `qa_2` (two hops).

    The needed documents are at random places among as many others as fit. RULER (COLM 2024),
    section 3.4, takes paragraphs of SQuAD and HotpotQA; nothing may be downloaded here, so articles
    are made up (`materials.py`), unless `data` names the user's own file of one of the two. 32 new
    tokens, scored by string_match_part.

    Differences: templates are reworded. With a file, sample `seed` asks question `seed` modulo
    their number, and no document appears twice.
    """

    hops: int
    data: str | None = setting(
        None, "your JSON file of SQuAD or HotpotQA; None: articles that are made up"
    )

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the needed facts (with a file: documents) are `Sample.depths`."""
        rng = self.random(length, seed)
        asked = self._made_up(rng) if self.data is None else _from_file(self.data, seed, rng)
        question = f"\n\n{_ORDER}\n\nQuestion: {asked.question}"
        new_tokens = max(room_for(answer, count, _NEW_TOKENS) for answer in asked.answers)

        def write(size: int) -> Written:
            texts = [*asked.documents, *asked.others.first(size - len(asked.documents))]
            self.random(length, seed, "order").shuffle(texts)
            documents = tuple(f"Document {n}:\n{text}" for n, text in enumerate(texts, start=1))
            return Written(
                context=_INSTRUCTION + "\n\n".join(documents),
                question=question,
                answer_prefix=" Answer:",
                answers=asked.answers,
                needed=asked.needed,
                documents=documents,
                max_new_tokens=new_tokens,
            )

        least = len(asked.documents)
        return fitted(self.name, length, seed, count, write, least=least, most=asked.most)

    def score(self, sample: Sample, generated: str) -> float:
        """1 if the text contains any of the right answers, else 0."""
        return string_match_part(sample.answers, generated)

    def _made_up(self, rng: Random) -> _Asked:
        articles = Articles(rng)
        asked = articles.ask(self.hops)
        return _Asked(
            question=asked.question,
            answers=(asked.answer,),
            documents=tuple(article.text for article in asked.articles),
            needed=asked.facts,
            others=Stream(lambda: articles.other().text),
        )


def _from_file(path: str, seed: int, rng: Random) -> _Asked:
    data = read_dataset(path)
    asked = data.questions[seed % len(data.questions)]
    known = {*asked.given, *asked.near}
    far = [number for number in range(len(data.documents)) if number not in known]
    # As in RULER: paragraphs of the same article are the nearest distractors, and come first.
    others = [*rng.sample(asked.near, len(asked.near)), *rng.sample(far, len(far))]
    return _Asked(
        question=asked.question,
        answers=asked.answers,
        documents=tuple(data.documents[number] for number in asked.given),
        needed=tuple(data.documents[number] for number in asked.needed),
        others=Stream(iter([data.documents[number] for number in others]).__next__),
        most=len(data.documents),
    )


QA = (QuestionAnswering(name="qa_1", hops=1), QuestionAnswering(name="qa_2", hops=2))


_LONG_BENCH_TOKENS = 32
"""LongBench's limit for its multi-document questions."""
_DOCUMENTS = "Read these documents; a question about them follows.\n\n"


@dataclass(frozen=True, kw_only=True)
class MultiDocument(Task):
    """Answer a question from one or two of several long documents.

    Questions over a few long documents that share the length: one hop or two.

    As in LongBench's multi-document questions (Bai et al., ACL 2024: HotpotQA, 2WikiMultihopQA) and
    in the papers on stored documents: a fact of one document, or two facts of two of them, the
    second found through the first. A document is one made-up article, its facts scattered over
    prose. Scored by token F1, as there.

    Difference: texts are made up, and plainer than real ones.
    """

    hops: int
    num_documents: int = setting(8, "documents, of about the same length")

    def __post_init__(self) -> None:
        least = max(self.hops, 2)
        good = is_count(self.num_documents, least)
        require(good, "num_documents", self.num_documents, f"a whole number, at least {least}")

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the needed facts are `Sample.depths`."""
        rng = self.random(length, seed)
        articles = Articles(rng)
        asked = articles.ask(self.hops)
        others = [articles.other() for _ in range(self.num_documents - len(asked.articles))]
        order = rng.sample([*asked.articles, *others], self.num_documents)
        drafts = [
            _Draft(article, self.random(length, seed, f"document {n}"))
            for n, article in enumerate(order, start=1)
        ]

        def write(size: int) -> Written:
            documents = tuple(
                f"Document {n}:\n{draft.text(size // len(drafts) + (n <= size % len(drafts)))}"
                for n, draft in enumerate(drafts, start=1)
            )
            return Written(
                context=_DOCUMENTS + "\n\n".join(documents),
                question=f"\n\nQuestion: {asked.question} Write the answer alone.",
                answer_prefix="\nAnswer:",
                answers=(asked.answer,),
                needed=asked.facts,
                documents=documents,
                max_new_tokens=room_for(asked.answer, count, _LONG_BENCH_TOKENS),
            )

        return fitted(self.name, length, seed, count, write, least=0)

    def score(self, sample: Sample, generated: str) -> float:
        """Token F1 of the first line that was written."""
        return token_f1(sample.answers, generated.strip().partition("\n")[0])


class _Draft:
    """An article that can be padded with prose; its facts keep their relative positions."""

    def __init__(self, article: Article, rng: Random) -> None:
        self._title = article.title
        self._facts = [(rng.random(), fact) for fact in article.facts]
        self._prose = Stream(lambda: sentence(rng))

    def text(self, sentences: int) -> str:
        prose = self._prose.first(sentences)
        return f"{self._title}\n{' '.join(with_needles(prose, self._facts))}"


MULTI_DOCUMENT = (
    MultiDocument(name="multi_document_1", hops=1),
    MultiDocument(name="multi_document_2", hops=2),
)
