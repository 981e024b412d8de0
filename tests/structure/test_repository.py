"""The files beside the package agree with the tree, with each other and with what they promise."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted([*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob(".github/actions/*/*.yml")])
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]*)+|[\w-]+\.\w+)`")
_PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def where_to_change() -> str:
    return (
        (ROOT / "CONTRIBUTING.md")
        .read_text()
        .split("## Where do I change what")[1]
        .split("\n## ")[0]
    )


def test_every_path_that_contributing_sends_you_to_exists() -> None:
    paths = [path for path in _PATH.findall(where_to_change()) if "NAME" not in path]
    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_contributing_answers_at_least_ten_questions() -> None:
    rows = [line for line in where_to_change().splitlines() if line.startswith("| ")]
    assert len(rows) - 1 >= 10
    for row in rows:
        assert row.count(" | ") == 2, row


def test_make_alone_lists_every_target() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    phony = MAKEFILE.replace("\\\n", " ").split("\n.PHONY: ")[1].split("\n")[0].split()
    assert listed == set(phony)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_packages_by_hash(path: Path) -> None:
    text = path.read_text()
    yaml.safe_load(text)
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used
    for name, comment in used:
        pinned = re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", name)
        assert name.startswith("./") or (pinned and re.match(r" # v\d", comment)), name
    for line in text.splitlines():
        if "pip install" in line:
            assert "--require-hashes" in line or "--no-deps" in line, line


def test_every_file_that_a_workflow_names_exists() -> None:
    for path in WORKFLOWS:
        for name in re.findall(r"(?:requirements|tests)/[\w./-]+", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_the_lock_has_the_tested_versions() -> None:
    tested = dict(_PIN.findall((ROOT / "constraints.txt").read_text()))
    locked = dict(_PIN.findall((ROOT / "requirements" / "ci.txt").read_text()))
    named = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    unlocked = (ROOT / "requirements" / "unlocked.in").read_text().split()
    assert set(named) - set(locked) <= set(unlocked), "run `make lock`"
    assert not {name for name in named if locked.get(name, named[name]) != named[name]}


def test_every_locked_package_has_a_hash() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        packages = re.split(r"\n(?=\S)", path.read_text().strip())
        assert len(packages) > 5
        assert not [package for package in packages if "--hash=sha256:" not in package], path.name


def test_every_page_is_in_the_sites_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"[\w/.-]+\.md", text)) == pages


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda page: page.name
)
def test_every_name_in_the_reference_is_there(page: Path) -> None:
    names = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    assert names
    for name in names:
        assert pkgutil.resolve_name(name) is not None


def test_decisions_are_short_and_numbered_without_a_gap() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [int(page.name[:4]) for page in pages] == [*range(1, len(pages) + 1)]
    index = (ROOT / "docs" / "decisions" / "index.md").read_text()
    for page in pages:
        text = page.read_text()
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
            "Context",
            "Decision",
            "Consequences",
        ]
        assert len(text.split()) < 400
        assert f"]({page.name})" in index


FORMS = sorted(path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.stem != "config")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_is_one_that_github_shows(path: Path) -> None:
    """GitHub leaves out a form that has a mistake, and says so only where issues are opened."""
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels"}
    ids = [item["id"] for item in form["body"]]
    assert len(set(ids)) == len(ids)
    for item in form["body"]:
        assert item["type"] in ("textarea", "input", "checkboxes")
        assert set(item) <= {"type", "id", "attributes", "validations"}
        allowed = {"label", "description", "render", "placeholder", "options"}
        assert {"label"} <= set(item["attributes"]) <= allowed
        assert ("options" in item["attributes"]) == (item["type"] == "checkboxes")
        assert set(item.get("validations", {})) <= {"required"}


def test_the_citation_names_the_three_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    papers = {paper["identifiers"][0]["value"] for paper in citation["references"]}
    assert papers == {"arXiv:2510.09883", "arXiv:2512.00722", "arXiv:2508.11661"}
    assert all(paper["authors"] and paper["title"] for paper in citation["references"])


def test_ci_tests_every_python_and_both_ends_of_transformers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == pythons
    oldest, newest = (
        dict(_PIN.findall((ROOT / "requirements" / name).read_text()))["transformers"]
        for name in ("ci-oldest.txt", "ci.txt")
    )
    (bounds,) = [line for line in project["dependencies"] if line.startswith("transformers")]
    claim = f"All tests pass from {oldest.removesuffix('.0')} on"
    assert claim in (ROOT / "pyproject.toml").read_text()
    upper = int(bounds.rsplit("<5.", 1)[1])
    assert newest.startswith(f"5.{upper - 1}."), "the lock does not have the newest allowed one"
