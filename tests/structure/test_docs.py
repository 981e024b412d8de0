"""The documents are true: links lead somewhere, generated pages are what the program says."""

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import anchors

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(<?([^)\s>]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"")
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def broken_links(page: Path) -> Iterator[str]:
    """Relative links of a Markdown page that lead to no file, or to no heading of it."""
    prose = _CODE.sub("", _FENCE.sub("", page.read_text()))
    for match in _LINK.finditer(prose):
        link = match[1] or match[2]
        if _ABSOLUTE.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield f"{page.name}: {link}"


def stale(rendered: dict[str, str], root: Path) -> list[str]:
    """Paths, relative to `root`, whose file is not there or differs from its rendered text."""
    return [
        name
        for name, text in rendered.items()
        if not (root / name).is_file() or (root / name).read_text() != text
    ]


@functools.cache
def prose(file: Path) -> str:
    """A file in lower case and in one line, without marks of comments at line starts."""
    return " ".join(
        re.sub(r"^\s*(//|#:?)", "", file.read_text(), flags=re.MULTILINE).split()
    ).lower()


def test_every_relative_link_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert not [link for page in pages for link in broken_links(page)]


def test_what_is_folded_away_is_markdown_on_the_site_too() -> None:
    """The site shows tables in a plain `<details>` as lines of text; GitHub does not."""
    pages = [*(ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if re.search("<details(?! markdown>)", page.read_text())]


def test_the_readme_has_fewer_than_200_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


@pytest.mark.parametrize(
    "phrase",
    [
        "one engine under their answers",
        "where it is sparse",
        "choice of tokens:",
        "neutral:",
        "lower tier",
        "prompt start",
        "it is host memory",
        "to their places",
        "P per document",
        "must be the folder of a head",
        "layers that choose",
        "alone right",
        "wanted <=",
        "longest texts with",
        "shorter ones nothing",
    ],
)
def test_no_page_has_an_opaque_phrase(phrase: str) -> None:
    """Fifteen phrases of ours that new users could not read; the field has words for all."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "keyhole").rglob("*.py")]
    files += (ROOT / "tests" / "golden").glob("*.txt")
    found = [file for file in files if phrase in " ".join(file.read_text().split())]
    assert not [str(file.relative_to(ROOT)) for file in found]


PRIVATE_PHRASES = [
    "whoever ends",
    "as everybody calls",
    "for everybody",
    "nobody's rows",
    "harms nobody",
    "stands for pages",
    "stand for pages",
    "to the bit",
    "in any places",
    "at any places",
    "where it lies",
    "come up again",
    "comes up again",
    "the layers below",
    "a layer below",
    "found out once",
    "left as they are",
    "the earlier one of equals",
    "gives up a page",
    "outgrew the budget",
    "a text that is read whole",
    "the choice is made anew",
    "a known start of a prompt",
    "makes room for others",
    "takes away",
    "what a policy is",
    "is meaningless",
    "are meaningless",
    "whoever",
    "is no json",
]


@pytest.mark.parametrize("phrase", PRIVATE_PHRASES)
def test_private_phrases_do_not_come_back(phrase: str) -> None:
    """Phrases that only we understood: prose uses the field's words, in code and documents."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [*(ROOT / "keyhole").rglob("*.py"), *(ROOT / "keyhole").rglob("*.pyi")]
    files += [*(ROOT / "keyhole").rglob("*.h"), *(ROOT / "keyhole").rglob("*.cpp")]
    files += (ROOT / "tests" / "golden").glob("*.txt")
    for folder in ("benchmarks", "examples", "recipes", "tests"):
        files += [file for file in (ROOT / folder).rglob("*.py") if file != Path(__file__)]
    found = [file for file in files if phrase in prose(file)]
    assert not [str(file.relative_to(ROOT)) for file in found]


def test_generated_documents_are_up_to_date() -> None:
    docs = importlib.import_module("benchmarks.reference_pages")
    # The table of combinations is made by running them: tests/test_combinations.py.
    table = docs.combinations_in((ROOT / "docs" / "methods.md").read_text())
    assert table
    rendered = docs.render(table)
    assert rendered
    assert not stale(rendered, ROOT), "run `make reference`"


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One thing: `two`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#one-thing-two) [c](#here) [d](https://x.org/y.md)\n"
        "[e](gone.md) ![f](gone.png 'title') [g](other.md#three) [h](#there) <img src=\"no.svg\">\n"
        "`[i](code.md)`\n```\n[j](code.md)\n```\n"
    )
    links = [fault.removeprefix("page.md: ") for fault in broken_links(page)]
    assert links == ["gone.md", "gone.png", "other.md#three", "#there", "no.svg"]


def test_a_stale_document_is_seen(tmp_path: Path) -> None:
    (tmp_path / "same.md").write_text("text\n")
    (tmp_path / "old.md").write_text("old text\n")
    rendered = dict.fromkeys(("same.md", "old.md", "missing.md"), "text\n")
    assert stale(rendered, tmp_path) == ["old.md", "missing.md"]


_PLACE = re.compile(r"`((?:[\w.-]+/)+(?:[\w.-]*\.(?:py|md|yml|txt|jsonl|toml))?)`")


def missing_paths(text: str) -> set[str]:
    """Files and folders that a page names, from the root or from keyhole/, and are not there."""
    named = {path for path in _PLACE.findall(text) if "NAME" not in path}
    return {p for p in named if not (ROOT / p).exists() and not (ROOT / "keyhole" / p).exists()}


def test_every_file_that_a_page_names_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found = {page.name: missing for page in pages if (missing := missing_paths(page.read_text()))}
    assert not found


def test_a_missing_file_is_seen() -> None:
    assert missing_paths("`engine/engine.py` `gone/` `engine/gone.py`") == {
        "gone/",
        "engine/gone.py",
    }
