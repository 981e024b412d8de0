"""Questions over a few long documents that share the length: one hop or two.

As in LongBench's multi-document questions (Bai et al., ACL 2024: HotpotQA, 2WikiMultihopQA) and in
the papers on stored documents: a fact of one document, or two facts of two of them, the second
found through the first. A document is one made-up article, its facts scattered over prose. Scored
by token F1, as there.

Difference: texts are made up, and plainer than real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from keyhole.config import is_count, require, setting
from keyhole.eval.tasks.base import CountTokens, Sample, Task
from keyhole.eval.tasks.common.articles import Article, Articles
from keyhole.eval.tasks.common.filler import sentence, with_needles
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for
from keyhole.eval.tasks.common.scores import token_f1
from keyhole.eval.tasks.common.words import Stream

_NEW_TOKENS = 32
"""As LongBench allows for its multi-document questions."""
_INSTRUCTION = "Read these documents; a question about them follows.\n\n"


@dataclass(frozen=True, kw_only=True)
class MultiDocument(Task):
    """Answer a question from one or two of several long documents."""

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
                context=_INSTRUCTION + "\n\n".join(documents),
                question=f"\n\nQuestion: {asked.question} Write the answer alone.",
                answer_prefix="\nAnswer:",
                answers=(asked.answer,),
                needed=asked.facts,
                documents=documents,
                new_tokens=room_for(asked.answer, count, _NEW_TOKENS),
            )

        return fitted(self.name, length, seed, count, write, least=0)

    def score(self, sample: Sample, generated: str) -> float:
        """Token F1 of the first line that was written."""
        return token_f1(sample.answers, generated.strip().partition("\n")[0])


class _Draft:
    """An article that prose can be added to, its facts staying at their places in it."""

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
