"""What the README shows is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import keyhole
from keyhole.bench import report
from keyhole.engine.result import Result
from keyhole.models import families

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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
    written = report.inserted(README, report.render(report.stored("decode")))
    assert written == README, "run `python -m keyhole.bench.report`"


def test_every_policy_is_in_the_table() -> None:
    for name, cls in keyhole.policies().items():
        doc = (cls.__doc__ or "").split("\n")[0]
        assert f"| [`{name}`](docs/methods.md#{name}) | `{cls.__name__}` | {doc} |" in README


def test_every_folder_and_module_is_in_the_file_tree() -> None:
    tree = README.split("```\nkeyhole/\n")[1].split("```")[0]
    shown = {line.split()[0] for line in tree.splitlines()}
    package = {f"{p.name}/" for p in (ROOT / "keyhole").iterdir() if (p / "__init__.py").is_file()}
    package |= {p.name for p in (ROOT / "keyhole").glob("*.py") if not p.name.startswith("__")}
    assert package <= shown
    assert all((ROOT / "keyhole" / name).exists() or (ROOT / name).exists() for name in shown)


def test_every_family_is_named() -> None:
    names = re.sub(r"[^a-z0-9]", "", README.split("## Methods")[1].split("## How")[0].lower())
    for family in families.SUPPORTED:
        if family not in ("gemma2", "gemma3_text", "deepseek_v3", "gpt_oss", "gpt_bigcode"):
            assert family in names
    for name in ("gemma2and3text", "deepseekv3", "gptoss", "gptbigcode"):
        assert name in names
