"""Runs the tests of what changed: `make check`, or with another start than the last commit

    python -m tests.changed --since main
    python -m tests.changed keyhole/policies/quest.py    # as if this had changed

They are those that import a changed module or a public name of it, those whose path mirrors its
path, and for a policy in the table its cases among the tests that all policies take. Everything
imports everything in the end, so imports count directly, not by way of others; where none is found,
the tests of the folder run. Slow ones are left out, as by `make test`.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import pytest

from keyhole import _PLACES as HOME_OF_PUBLIC_NAMES
from keyhole.policies import available_controls, available_policies
from keyhole.reuse import available_reuse_methods

ROOT = Path(__file__).parents[1]
#: What is no module of the package or of the tests, by how its path begins.
OTHERS = {
    "keyhole/kernels/csrc": "tests/kernels",
    "docs": "tests/docs",
    "README.md": "tests/docs/test_readme.py",
    "examples": "tests/examples",
}
#: The names of methods by the files that have them; tests that every method of a folder takes.
METHODS = {
    cls.__module__.replace(".", "/") + ".py": name
    for table in (available_policies(), available_controls(), available_reuse_methods())
    for name, cls in table.items()
}
COMMON = {
    "policies": {"tests/policies/test_conformance.py", "tests/hf/test_sparse.py"},
    "reuse": {"tests/reuse", "tests/engine/documents/test_documents.py"},
}
#: These are quick and look at every file.
ALWAYS = "tests/structure"


def changed_files(since: str) -> set[str]:
    """Changed since a commit, and new ones that git does not ignore."""
    commands = (
        ["git", "diff", "--name-only", "--diff-filter=d", since],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    done = (subprocess.run(c, cwd=ROOT, capture_output=True, text=True) for c in commands)
    found: set[str] = set()
    for each in done:
        if each.returncode:
            raise SystemExit(f"error: {each.stderr.strip()}")
        found.update(each.stdout.split("\n"))
    return found - {""}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports itself, and the homes of the public names that it takes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                if node.module == "keyhole" and alias.name in HOME_OF_PUBLIC_NAMES:
                    yield HOME_OF_PUBLIC_NAMES[alias.name]


def tests_of(changed: str, importers: dict[str, set[str]]) -> set[str]:
    """Files or folders of tests for one changed file.

    importers: files of tests/ by what they import.
    """
    path = PurePosixPath(changed)
    if path.parts[0] == "tests" and path.suffix == ".py":
        if path.name.startswith("test_"):
            return {changed}
        if path.name == "conftest.py":  # that of all tests has the tests of the tests
            return {str(path.parent)} if len(path.parts) > 2 else {"tests/test_oracle.py"}
    elif path.parts[0] not in ("keyhole", "recipes", "benchmarks") or path.suffix != ".py":
        return {test for start, test in OTHERS.items() if changed.startswith(start)}
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    found = {test for test in importers.get(module, set()) if "/test_" in test}
    parts = list(path.parts[1:] if path.parts[0] == "keyhole" else path.parts)
    mirror = ROOT / "tests" / PurePosixPath(*parts[:-1])
    found |= {str(p.relative_to(ROOT)) for p in mirror.glob(f"test_{path.stem}*.py")}
    if changed in METHODS:  # elsewhere it stands as an example of a method
        found = {test for test in found if test.startswith(f"tests/{parts[0]}/")} | COMMON[parts[0]]
    if not found:
        folders = [ROOT / "tests" / PurePosixPath(*parts[:n]) for n in range(len(parts) - 1, 0, -1)]
        found = {str(folder.relative_to(ROOT)) for folder in folders if folder.is_dir()}
        found = set(sorted(found)[-1:])
    return found


class OnlyOf:
    """A plugin: of some files nothing runs but the cases that have one of some names."""

    def __init__(self, names: set[str], files: set[str]) -> None:
        self._names, self._files = names, files

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left = [item for item in items if not self._chosen(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if self._chosen(item)]

    def _chosen(self, item: pytest.Item) -> bool:
        if item.path.relative_to(ROOT).as_posix() not in self._files:
            return True
        case = getattr(item, "callspec", None)  # of a test with parameters
        return case is not None and any(str(each) in self._names for each in case.params.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of pytest, or 0 where nothing has a test."""
    parser = argparse.ArgumentParser(prog="python -m tests.changed", description="tests of changes")
    parser.add_argument("files", nargs="*", help="instead of what git says has changed")
    parser.add_argument("--since", default="HEAD", help="a commit (default: %(default)s)")
    asked = parser.parse_args(arguments)
    changed = set(asked.files) or changed_files(asked.since)
    importers: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for module in imported(path):
            importers.setdefault(module, set()).add(path.relative_to(ROOT).as_posix())
    of_each = {file: tests_of(file, importers) for file in sorted(changed)}
    for file, tests in of_each.items():
        print(f"{file}: {', '.join(sorted(tests)) or 'no test of its own'}")
    chosen = set.union({ALWAYS}, *of_each.values())
    methods = {METHODS[file] for file in changed if file in METHODS}
    # Files of tests that other changes ask for run as a whole.
    whole = {test for file, tests in of_each.items() if file not in METHODS for test in tests}
    plugin = OnlyOf(methods, COMMON["policies"] - whole)
    return pytest.main(["-m", "not slow", *sorted(chosen)], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main())
