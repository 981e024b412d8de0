"""Code blocks of a Markdown page."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """The code of a page of docs/ in one language, block by block."""
    found = _BLOCK.findall((DOCS / page).read_text())
    return [code for name, code in found if name == language]
