"""Questions over several documents in the bundled model's words: one hop, two, or a reference.

Items are those of `keyhole.eval.tiny_language.documents`, which says what each kind asks and where its
facts may stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.config import setting
from keyhole.errors import UnknownNameError
from keyhole.eval.tasks.base import TINY, CountTokens, Sample, Task, require_sample
from keyhole.eval.tasks.common.fitting import Written, fitted, room_for_steps
from keyhole.eval.tasks.common.scores import begins_with
from keyhole.eval.tiny_language.documents import KINDS, MIN_WORDS, WHERE, make


@dataclass(frozen=True, kw_only=True)
class TinyDocuments(Task):
    """Answer a question from one or two of several documents."""

    text: ClassVar[str] = TINY

    kind: str
    num_documents: int = setting(3, "documents of the same length, at least 320 words each")
    where: str = setting("anywhere", f"place of the facts in their documents: {', '.join(WHERE)}")

    def __post_init__(self) -> None:
        if self.where not in WHERE:
            raise UnknownNameError("place", self.where, WHERE)

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the needed sentences are `Sample.depths`."""
        require_sample(length, seed)

        def write(words: int) -> Written:
            item = make(
                self.kind,
                num_documents=self.num_documents,
                words=words,
                seed=seed,
                where=self.where,
            )
            return Written(
                context=" ".join(item.documents),
                question=f" {item.question}",
                answers=(item.answer,),
                needed=tuple(passage.text for passage in item.needed),
                documents=item.documents,
                new_tokens=room_for_steps(item.answer, count),
            )

        return fitted(self.name, length, seed, count, write, least=MIN_WORDS)

    def score(self, sample: Sample, generated: str) -> float:
        """1 if the answer is right to its last word, whatever follows; else 0."""
        return begins_with(sample.answers[0], generated)


TINY_DOCUMENTS = tuple(TinyDocuments(name=f"tiny_documents_{kind}", kind=kind) for kind in KINDS)
