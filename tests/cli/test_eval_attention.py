"""`keyhole eval --suite attention`: from the command line to lines, tables and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

SMALL = ("--suite", "attention", "--lengths", "96", "--limit", "2", "--budgets", "32")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_bundled_model_reads_derivations(run: Run, tmp_path: Path) -> None:
    output, html = tmp_path / "lines.jsonl", tmp_path / "page.html"
    command = ("eval", *SMALL, "--device", "cpu", "--output", str(output))
    methods = ("--policies", "quest,delta", "--terms", "equal", "--dense-layers", "0")
    ran = run(*command, *methods, "--html", str(html))
    assert ran.status == 0, ran.err
    assert "Relative error of the attention output" in ran.out
    assert "Overlap of the entries of largest attention" in ran.out
    assert ran.out.endswith(f"6 cells measured, 0 stored before: {output}\n")
    found = lines(output)
    assert [(line["weights"], line["method"]) for line in found] == [
        (weights, name)
        for weights in ("trained", "random")
        for name in ("overlap", "quest", "delta")
    ]
    for line in found:
        assert {"date", "command", "commit", "machine", "versions"} <= set(line)
        assert (line["suite"], line["benchmark"]) == ("attention", "attention")
        assert (line["length"], line["budget"], line["samples"]) == (96, 32, 2)
        if line["measured"] == "loss":
            assert (line["dense_layers"], line["terms"]) == ([0], "equal")
            assert set(line["losses"]) == {"method", "recent", "random", "oracle"}
    assert html.read_text().count("<svg") == 2
    again = run(*command, *methods, "--json")
    told = json.loads(again.out)
    assert (told["stored"], told["refused"], len(told["lines"])) == (6, [], 6)


@pytest.mark.slow
def test_files_are_read_and_every_policy_is_measured(path: str, run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        text = "".join(f"{n * n % 97} {name}, {n} pears; " for n in range(40))
        (tmp_path / name).write_text(text)
    files = f"{tmp_path / 'one'},{tmp_path / 'two'}"
    output = tmp_path / "lines.jsonl"
    command = ("eval", "--model", path, *SMALL, "--device", "cpu", "--output", str(output))
    # InfLLM needs a page of first tokens, one of the newest and a block of one.
    ran = run(*command, "--text", files, "--budgets", "48")
    assert ran.status == 1  # this model has no retrieval head
    assert "refused: spe_context: policy 'spe_context' needs a retrieval head" in ran.out
    found = lines(output)
    assert {line["texts"] for line in found} == {"one, two"}
    methods = {line["method"] for line in found}
    assert "spe_context" not in methods
    assert {"quest", "delta", "raas", "infllm", "shadowkv", "clusterkv", "overlap"} <= methods


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--tasks", "passkey"), "--tasks cannot be used with --suite attention"),
        (("--policies", "qest"), "quest"),
        # It measured nothing, with exit status 0.
        (("--policies", "full"), "policies 'full' must be at least one that selects"),
        (("--terms", "tuned"), "'tuned' must be given, equal or published"),
        (("--text", "nowhere.txt"), "cannot be read"),
        (("--html", "nowhere/page.html"), "there is no folder"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    path: str, run: Run, tmp_path: Path, wrong: tuple[str, str], said: str
) -> None:
    ran = run("eval", "--model", path, *SMALL, "--output", str(tmp_path / "lines"), *wrong)
    assert ran.status == 2
    assert said in ran.err
