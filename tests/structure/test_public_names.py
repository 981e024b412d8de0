"""What `keyhole` exports exists, is described, and costs nothing until it is used."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import keyhole

ROOT = Path(__file__).parents[2]

_REPORT = """
import sys
try:
    {body}
finally:
    print(*sorted({{"torch", "transformers"}} & set(sys.modules)), "end", file=sys.stderr)
"""


def heavy_modules(body: str, path: Path = ROOT) -> set[str]:
    """Which of torch and transformers a fresh interpreter has loaded after the statement `body`."""
    done = subprocess.run(
        [sys.executable, "-c", _REPORT.format(body=body)],
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *names, end = done.stderr.splitlines()[-1].split()
    assert end == "end", done.stderr
    return set(names)


def described(thing: object) -> bool:
    """Whether `thing` has a docstring of its own, not inherited nor made up by `dataclass`."""
    text = vars(thing).get("__doc__") if isinstance(thing, type) else thing.__doc__
    made_up = isinstance(thing, type) and text is not None and text.startswith(f"{thing.__name__}(")
    return bool(text) and not made_up


def test_every_public_name_is_there_and_described() -> None:
    names = [name for name in keyhole.__all__ if not name.startswith("__")]
    assert names
    assert not [name for name in names if not described(getattr(keyhole, name))]


def test_importing_keyhole_loads_no_torch() -> None:
    assert not heavy_modules("import keyhole")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arguments", ["--help", "generate --help", "documents --help"])
def test_asking_for_help_loads_no_torch(arguments: str) -> None:
    argv = ["keyhole", *arguments.split()]
    run = f"import runpy; sys.argv = {argv}; runpy.run_module('keyhole', run_name='__main__')"
    assert not heavy_modules(run)


def test_a_heavy_import_is_seen_even_when_the_program_exits(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import sys\nsys.exit(0)\n")
    assert heavy_modules("import json", tmp_path) == set()
    (tmp_path / "torch.py").write_text("")
    assert heavy_modules("import torch; sys.exit(0)", tmp_path) == {"torch"}


def test_a_missing_docstring_is_seen() -> None:
    class Described:
        """A thing."""

    class Inherits(Described):
        pass

    @dataclasses.dataclass
    class Generated:
        size: int

    def nothing() -> None:
        pass

    assert described(Described)
    assert not any(map(described, [Inherits, Generated, nothing]))
