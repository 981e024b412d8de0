"""`keyhole documents` with an own store, and with three documents in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from keyhole import LLM, SamplingParams
from keyhole.cli import main
from tests.cli.conftest import Ran, Run

HANDBOOK = "Press the green button twice, then wait for the blue lamp. " * 3
FAQ = "The red lamp means that the tank is empty; fill it up to the mark."
FEW = ("--max-tokens", "6", "--ignore-eos", "--temperature", "0")
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)

Documented = Callable[..., Ran]


@pytest.fixture
def documents(path: str, run: Run, tmp_path: Path) -> Documented:
    """`documents("ask", "which?", ...)` with the model and a separate store."""

    def call(action: str, *arguments: str, stdin: str | bytes = "") -> Ran:
        place = ("--store", str(tmp_path / "store"))
        model = () if action == "remove" else ("--model", path, "--device", "cpu")
        return run("documents", action, *arguments, *place, *model, stdin=stdin)

    return call


@pytest.fixture(scope="session")
def filled(path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three files, and a store of them in blocks of 16: each loads the model once."""
    folder = tmp_path_factory.mktemp("filled")
    for name, text in (("handbook", HANDBOOK), ("faq", FAQ), ("a", "A")):
        file = folder / f"{name}.md"
        file.write_text(text)
        place = ("--store", str(folder / "store"), "--model", path, "--device", "cpu")
        assert main(["documents", "add", name, str(file), "--block-size", "16", *place]) == 0
    return folder


@pytest.fixture
def stored(documents: Documented, filled: Path, tmp_path: Path) -> Documented:
    """The same, with three documents in it, in blocks of 16."""
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return documents


@pytest.fixture
def llm(path: str, tmp_path: Path) -> LLM:
    """The Python interface to the same store."""
    return LLM(path, device="cpu", documents=tmp_path / "store")


def names(documents: Documented) -> list[str]:
    return [info["name"] for info in json.loads(documents("list", "--json").out)["documents"]]


def records(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store" / "records").glob("*.safetensors"))
