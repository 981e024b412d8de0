"""What the package says of itself: its page, its wheel, and a build without a compiler."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename
from packaging.version import Version

import keyhole

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]


def test_the_page_of_the_package_has_what_a_page_needs() -> None:
    assert (ROOT / PROJECT["readme"]).is_file()
    assert PROJECT["authors"][0]["name"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= set(
        PROJECT["urls"]
    )
    assert all(url.startswith(PROJECT["urls"]["Repository"]) for url in PROJECT["urls"].values())
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])
    kinds = {classifier.split(" :: ")[0] for classifier in PROJECT["classifiers"]}
    assert {"Development Status", "Intended Audience", "Operating System", "Topic"} <= kinds
    assert "License" not in kinds  # `license` says it; an index refuses both


def test_the_version_is_that_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags say it, so that nothing in the tree has to be kept equal to them."""
    assert "version" in PROJECT["dynamic"]
    Version(PYPROJECT["tool"]["setuptools_scm"]["fallback_version"])

    def installed(name: str) -> str:
        return {"keyhole": "7.8.9"}[name]

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.delitem(vars(keyhole), "__version__", raising=False)
    assert keyhole.__version__ == "7.8.9"
    del vars(keyhole)["__version__"]  # `monkeypatch` would put it back


def test_a_bare_copy_of_the_source_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.delitem(vars(keyhole), "__version__", raising=False)
    assert Version(keyhole.__version__).local == "unknown"
    del vars(keyhole)["__version__"]  # `monkeypatch` would put it back


def test_every_python_that_wheels_are_built_for_is_declared() -> None:
    built = {tag.split("-")[0] for tag in PYPROJECT["tool"]["cibuildwheel"]["build"]}
    declared = {
        f"cp3{classifier.rsplit('.', 1)[1]}"
        for classifier in PROJECT["classifiers"]
        if classifier.startswith("Programming Language :: Python :: 3.")
    }
    assert built == declared


def test_a_wheel_without_the_extension_says_so_in_its_name() -> None:
    """pip shows nothing else of a build that went well; a compiler was missing unnoticed."""
    (failed,) = PYPROJECT["tool"]["scikit-build"]["overrides"]
    assert failed["if"] == {"failed": True}
    assert failed["wheel"]["cmake"] is False
    tag = failed["wheel"]["build-tag"]
    name, _, build, _ = parse_wheel_filename(f"keyhole-0.1.0-{tag}-py3-none-any.whl")
    assert name == "keyhole"
    assert build[0] == 0
    assert "install_a_cpp_compiler" in build[1]
    assert "C++ compiler" in failed["messages"]["after-success"].replace("\n*** ", " ")


#: Files of a folder, beside `__init__.py` and folders: more are hard to take in at a glance.
MOST_FILES = 14


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    folders = [
        folder
        for top in ("keyhole", "benchmarks", "recipes")
        for folder in (ROOT / top, *(ROOT / top).rglob("*"))
        if folder.is_dir() and folder.name not in ("__pycache__", "results")
    ]
    files = {
        str(folder.relative_to(ROOT)): sum(
            path.suffix in (".py", ".cpp", ".h") and path.name != "__init__.py"
            for path in folder.iterdir()
        )
        for folder in folders
    }
    assert len(files) > 30
    assert not {name: number for name, number in files.items() if number > MOST_FILES}


def test_a_class_has_a_name_of_its_own() -> None:
    found: dict[str, list[str]] = {}
    for top in ("keyhole", "benchmarks", "recipes"):
        for path in (ROOT / top).rglob("*.py"):
            for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(found) > 200
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


_WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"gguf", "fastapi", "uvicorn"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from keyhole import LLM, SamplingParams

print(len(LLM("tiny", device="cpu").generate("facts :", SamplingParams(max_tokens=3)).token_ids))
"""


@pytest.mark.slow
def test_a_model_runs_without_the_extras() -> None:
    """A file of blocks was looked for in every model, by a package that only such files need."""
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in {"1", "2", "3"}
