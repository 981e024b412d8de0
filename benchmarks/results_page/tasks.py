"""The tasks of docs/results/ on the first bundled model."""

from __future__ import annotations

from dataclasses import dataclass

FULL = "full"


@dataclass(frozen=True, kw_only=True)
class PageTask:
    """A task of the page. setup: what is read densely; see `keyhole.eval.report.cells.SETUPS`."""

    title: str
    setup: str
    about: str


_READ = "The text is read densely, the question and the answer go through the policy."
ASKED = {
    "tiny_derive": PageTask(
        title="Long derivations",
        setup="prompt",
        about="A program of sums in random order is carried out step by step: two thirds of the "
        "text are the model's own, and every step needs rules of the prompt and an earlier result.",
    ),
    "tiny_recall": PageTask(
        title="One fact in filler",
        setup="question",
        about=f"One of the facts in a text that is mostly filler. {_READ}",
    ),
    "tiny_documents_two_hop": PageTask(
        title="Two hops over documents",
        setup="question",
        about=f"The first half of the answer is in one of three documents, the second in "
        f"another. {_READ}",
    ),
    "tiny_multikey": PageTask(
        title="Key and value",
        setup="question",
        about=f"One fact from a text that consists only of similar facts. {_READ}",
    ),
}
"""The tasks in the order of the page."""
