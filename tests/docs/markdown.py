"""Code blocks and tables of a Markdown page."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


_ANY_BLOCK = re.compile(
    r"^(?:[ ]*<!-- not run: (?P<reason>[^\n]+?) -->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block in a language; reason: why no test runs it, nothing where one does."""

    language: str
    code: str
    reason: str


def code_blocks(text: str) -> list[Block]:
    """The blocks of a page, in their order; the language is "" where none is named."""
    return [
        Block(found["language"], textwrap.dedent(found["code"]), found["reason"] or "")
        for found in _ANY_BLOCK.finditer(text)
    ]


def blocks(page: str, language: str) -> list[str]:
    """The code of a page of docs/ in one language, block by block."""
    found = _BLOCK.findall((DOCS / page).read_text())
    return [code for name, code in found if name == language]


def table_rows(text: str) -> list[list[str]]:
    """The rows of every table, one list of lines per table; code blocks have none.

    A table is the lines from a row of column marks and the heads above it to the next empty line,
    whatever these lines look like.
    """
    lines = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    found = []
    for i, line in enumerate(lines):
        if re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", line):
            rows = [lines[i - 1], line]
            for row in lines[i + 1 :]:
                if not row.strip() or row.startswith("<!--"):
                    break
                rows.append(row)
            found.append(rows)
    return found


def num_cells(row: str) -> int | None:
    """Cells of a row; None for a line that is none."""
    marks = len(re.findall(r"(?<!\\)\|", row))
    return marks - 1 if row.startswith("|") and row.endswith("|") else None


def anchors(text: str) -> set[str]:
    """The anchors GitHub gives to the headings of a Markdown text."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
