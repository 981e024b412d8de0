"""What the README shows is what there is; the page of the package shows it too."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import keyhole
from benchmarks import speed_pages
from benchmarks.results_page.text import between
from keyhole.engine.sequence import Result
from tests.docs.markdown import anchors

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    result = names["result"]
    assert isinstance(result, Result)
    first, _, streamed = capsys.readouterr().out.split("\n", 2)
    assert first == result.text
    assert streamed == result.text


def test_the_results_are_the_stored_ones() -> None:
    written = between(
        README,
        speed_pages.BEGIN,
        speed_pages.END,
        speed_pages.render(speed_pages.stored("decode")),
    )
    assert written == README, "run `python -m benchmarks.speed_pages`"


def test_the_quick_start_has_the_stored_times() -> None:
    """Of the last lines of batch 1, at 32,768 tokens."""
    row = next(line for line in README.splitlines() if line.startswith("| a generated token"))
    for device, cell in zip(("cpu", "NVIDIA H100 80GB HBM3"), row.split(" | ")[1:], strict=True):
        line = [
            line
            for line in speed_pages.stored("decode")
            if line["machine"]["device"] == device and line["settings"]["batch"] == 1
        ][-1]
        assert line["settings"]["shape"] == "llama-3.2-1b"
        stored = {r["system"]: r["step_ms"] for r in line["results"] if r["context"] == 32_768}
        shown = [float(x.replace(",", "")) for x in re.findall(r"\d[\d,.]*\d", cell)]
        for name, ms in zip(("full", "delta", "transformers_sdpa"), shown, strict=True):
            # The page rounds to two digits.
            assert ms == pytest.approx(stored[name], rel=0.03), (device, name)


def test_every_policy_is_in_the_table() -> None:
    for name, cls in keyhole.available_policies().items():
        doc = (cls.__doc__ or "").split("\n")[0]
        link = f"{REPOSITORY}/blob/main/docs/methods.md#{name}"
        assert f"| [`{name}`]({link}) | `{cls.__name__}` | {doc} |" in README


def test_what_models_select_themselves_is_in_both_tables() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    (row,) = re.findall(r"\| \[own indexer\]\((#.+?)\)( .+)", page)
    assert f"| [own indexer]({REPOSITORY}/blob/main/docs/methods.md{row[0]}){row[1]}\n" in README
    assert "\n## own indexer\n" in page


def test_no_link_is_relative_as_the_page_of_the_package_has_no_files() -> None:
    links = _LINK.findall(_FENCE.sub("", README))
    assert len(links) > 20
    for link in links:
        assert link.startswith("https://") or link[1:] in anchors(README), link


def test_links_into_the_repository_lead_somewhere() -> None:
    _, owner, name = REPOSITORY.rsplit("/", 2)
    raw = f"https://raw.githubusercontent.com/{owner}/{name}/main/"
    heads = (f"{REPOSITORY}/blob/main/", f"{REPOSITORY}/tree/main/", raw)
    inside = 0
    for link in _LINK.findall(_FENCE.sub("", README)):
        for head in heads:
            if link.startswith(head):
                path, _, anchor = link.removeprefix(head).partition("#")
                assert (ROOT / path).exists(), link
                assert not anchor or anchor in anchors((ROOT / path).read_text()), link
                inside += 1
    assert inside > 20


def test_every_folder_and_module_is_in_the_file_tree() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("```\nkeyhole/\n")[1].split("```")[0]
    shown = {line.split()[0] for line in tree.splitlines()}
    package = {f"{p.name}/" for p in (ROOT / "keyhole").iterdir() if (p / "__init__.py").is_file()}
    package |= {p.name for p in (ROOT / "keyhole").glob("*.py") if not p.name.startswith("__")}
    assert package <= shown
    assert all((ROOT / "keyhole" / name).exists() or (ROOT / name).exists() for name in shown)


def test_the_number_of_families_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert f"{page.count('| exact |')} families" in README
