"""`keyhole eval` measures cells, stores them, goes on after an interruption, and shows a table."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyhole.eval.forced_text import Perplexity
from keyhole.eval.policy_trace import SelectionMap
from tests.cli.conftest import Run

FIELDS = (
    "benchmark date command commit machine versions model task length setup policy settings budget "
    "samples score scores depths tokens_prompt tokens_generated answer_lengths read_share "
    "bytes_per_step step_ms "
    "peak_bytes recall_per_layer selection_maps"
).split()
PASSKEY = ("--tasks", "passkey", "--lengths", "448", "--limit", "2", "--device", "cpu")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n * n % 97} apples, {n} pears; " for n in range(40)))
    return str(path)


def forced(text: str, output: Path, *more: str, tasks: str = "perplexity") -> tuple[str, ...]:
    given = ("--tasks", tasks, "--text", text, "--lengths", "32", "--limit", "3")
    return (*given, "--device", "cpu", "--output", str(output), *more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_cells_are_shown_and_stored(path: str, run: Run, tmp_path: Path) -> None:
    output = tmp_path / "eval.jsonl"
    policies = ("--policies", "Quest:full_layers=0,1,full,streaming_llm", "--budgets", "32,1/8")
    setups = ("--setup", "prompt,question", "--output", str(output))
    ran = run("eval", "--model", path, *PASSKEY, *policies, *setups)
    assert ran.status == 0, ran.err
    common, _, heads, _, *rows = ran.out.splitlines()[:14]
    assert common == "llama-0: length 448 tokens, samples 2"
    assert heads.split()[:5] == "task setup policy budget score".split()
    shown = [row.split()[:4] for row in rows]
    methods = [("full", "-"), *[("quest:full_layers=0,1", b) for b in ("32", "48")]]
    methods += [("streaming_llm", b) for b in ("32", "48")]
    assert shown == [
        ["passkey", setup, *method] for setup in ("prompt", "question") for method in methods
    ]
    assert ran.out.endswith(f"10 cells measured, 0 stored before: {output}\n")
    found = lines(output)
    assert len(found) == 10
    for line in found:
        assert set(FIELDS) <= set(line)
        assert line["benchmark"] == "eval"
        assert line["model"] == "llama-0"
        assert len(line["scores"]) == len(line["depths"]) == line["samples"] == 2
        assert line["score"] == sum(line["scores"]) / 2
        assert line["bytes_per_step"] > 0
    assert [line["budget"] for line in found[:5]] == [None, 32, 48, 32, 48]
    settings = {"token_budget": 32, "full_layers": [0, 1]}
    assert found[1]["settings"].items() >= settings.items()
    assert [line["read_share"] for line in found if line["policy"] == "full"] == [1, 1]
    assert all(line["read_share"] < 0.6 for line in found if line["policy"] != "full")


def test_a_killed_run_goes_on_where_it_was(
    path: str, run: Run, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, measure, done = tmp_path / "eval.jsonl", Perplexity.measure, []

    def interrupted(self: Perplexity, *given: Any) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(given[1].name)
        return measure(self, *given)

    command = forced(text, output, "--policies", "quest,streaming_llm,delta", "--budgets", "16")
    monkeypatch.setattr(Perplexity, "measure", interrupted)
    assert run("eval", "--model", path, *command).status == 130
    assert [line["policy"] for line in lines(output)] == ["full", "quest"]
    with output.open("a") as file:
        file.write('{"benchmark": "eval", "task": "perpl')
    monkeypatch.setattr(
        Perplexity, "measure", lambda *given: done.append(given[2].name) or measure(*given)
    )
    ran = run("eval", "--model", path, *command)
    assert ran.status == 0, ran.err
    assert done == ["full", "quest", "streaming_llm", "delta"]
    assert "2 cells measured, 2 stored before" in ran.out
    stored = lines(output)
    assert [line["policy"] for line in stored] == ["full", "quest", "streaming_llm", "delta"]
    # Fewer samples are there as well, more are not; nor is anything of another text.
    assert "0 cells measured, 4" in run("eval", "--model", path, *command, "--limit", "2").out
    assert "4 cells measured, 0" in run("eval", "--model", path, *command, "--limit", "4").out
    Path(text).write_text("another text, " * 40)
    assert "4 cells measured, 0 stored" in run("eval", "--model", path, *command).out


def test_an_unsupported_policy_is_reported_and_the_others_run(
    path: str, run: Run, text: str, tmp_path: Path
) -> None:
    output = tmp_path / "eval.jsonl"
    policies = ("--policies", "spe_context,delta,streaming_llm", "--budgets", "8", "--json")
    ran = run("eval", "--model", path, *forced(text, output, *policies))
    assert ran.status == 1
    found = json.loads(ran.out)
    assert [line["policy"] for line in found["lines"]] == ["full", "streaming_llm"]
    assert found["lines"] == lines(output)
    assert {one["method"] for one in found["refused"]} == {"spe_context", "delta"}
    assert "token_budget 8 must be at least one page of 16" in found["refused"][1]["error"]
    assert found["stored"] == 0
    ran = run("eval", "--model", path, *forced(text, output, *policies[:-1]))
    assert ran.status == 1
    rows = [row.split()[:4] for row in ran.out.splitlines()[4:8]]
    assert [row[1] for row in rows] == ["full", "streaming_llm", "spe_context", "delta"]
    assert rows[3] == ["perplexity", "delta", "8", "refused"]
    assert "\nrefused: delta: token_budget 8 must be at least one page" in ran.out


@pytest.mark.slow
def test_text_is_forced(path: str, run: Run, text: str, tmp_path: Path) -> None:
    output = tmp_path / "eval.jsonl"
    setups = ("--setup", "question,prompt", "--policies", "sliding_window", "--budgets", "12")
    ran = run(
        "eval", "--model", path, *forced(text, output, *setups, tasks="perplexity,attention_recall")
    )
    assert ran.status == 0, ran.err
    assert ran.out.count("ppl ") == 2
    full, window, all_of_it, part = lines(output)  # without a question the setups are one
    assert full["nll"] == pytest.approx(all_of_it["nll"])
    assert window["nll_over_full"] == pytest.approx(window["nll"] - full["nll"])
    assert all_of_it["recall_per_layer"] == [1, 1, 1, 1]
    assert max(part["recall_per_layer"]) < 1
    assert part["score"] == pytest.approx(sum(part["recall_per_layer"]) / 4)
    assert part["step_ms"] is None


def test_the_page_gets_the_lines_of_this_command(
    path: str, run: Run, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    page = SimpleNamespace(write_report=lambda *given: written.extend(given))
    monkeypatch.setitem(sys.modules, "keyhole.eval.report.page", page)
    output, html = tmp_path / "eval.jsonl", tmp_path / "page.html"
    assert run("eval", "--model", path, *forced(text, output, "--policies", "quest")).status == 0
    command = forced(text, output, "--policies", "sliding_window", "--html", str(html))
    assert run("eval", "--model", path, *command).status == 0
    full, _, window = lines(output)
    assert written == [[full, window], html]


@pytest.mark.slow
def test_the_page_has_tables_and_all_pictures(run: Run, tmp_path: Path) -> None:
    output, html = tmp_path / "eval.jsonl", tmp_path / "page.html"
    tasks = "passkey:depth=0,passkey:depth=0.5,attention_recall"
    given = ("--tasks", tasks, "--lengths", "192", "--limit", "1", "--output", str(output))
    policies = ("--policies", "delta", "--budgets", "64,96", "--maps")
    ran = run("eval", *given, *policies, "--html", str(html))
    assert ran.status == 0, ran.err
    found = lines(output)
    assert len(found) == 3 * 3
    text = html.read_text()
    parts = dict(re.findall(r'<section id="(\w+)"(.*?)</section>', text, flags=re.DOTALL))
    assert list(parts) == "scores cost numbers needles recall read columns settings runs".split()
    assert parts["numbers"].count("<table>") == parts["cost"].count("<svg") == 3
    needles = re.findall(r'aria-label="(Score in percent by depth[^"]*)"', parts["needles"])
    assert len(needles) == 3
    assert all("0 %: " in one and "50 %: " in one for one in needles)
    (recall,) = re.findall(r'aria-label="(Attention kept[^"]*)"', parts["recall"])
    assert "delta, 96 tokens: 100, 100, 100, " in recall
    mapped = [line for line in found if line["selection_maps"] is not None]
    assert [line["budget"] for line in mapped] == [64] * 3
    assert parts["read"].count("<svg") == 3 * 4
    for line in mapped:
        maps = [SelectionMap.from_json(one) for one in line["selection_maps"]]
        assert [one.layer for one in maps] == [1, 2, 4, 5]
        assert {len(one.marks) for one in maps} == {0 if line["task"] == "attention_recall" else 1}
        assert maps[0].shares[0, : maps[0].prompt_tokens + 1].min() == 255  # it reads everything
        assert 0 < (maps[-1].shares[0] > 0).sum() <= 64


def test_a_page_without_matplotlib_is_refused_before_anything_runs(
    path: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = tmp_path / "eval.jsonl"
    given = ("--output", str(output), "--html", str(tmp_path / "page.html"))
    ran = run("eval", "--model", path, *PASSKEY, *given)
    assert ran.status == 2
    assert 'a picture needs matplotlib: pip install "keyhole[plot]"' in ran.err
    assert not output.exists()


def test_plain_tasks_stand_for_their_forms_in_the_bundled_model(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "eval.jsonl"
    given = ("--lengths", "128", "--limit", "1", "--policies", "full", "--output", str(output))
    ran = run("eval", "--tasks", "passkey:depth=0.25,niah_single_1:depth=0.25,qa_1", *given)
    assert ran.status == 0, ran.err
    found = lines(output)
    assert [line["task"] for line in found] == ["tiny_passkey", "tiny_docs1"]
    assert found[0]["task_settings"] == {"depth": 0.25}
    assert "tiny_passkey:depth=0.25" in ran.out


def test_the_bundled_model_has_a_text_of_its_own(run: Run, text: str, tmp_path: Path) -> None:
    """It knows what comes next, but only from what it is made of; and no text of others."""
    output = tmp_path / "eval.jsonl"
    given = ("--tasks", "perplexity", "--lengths", "256", "--limit", "2", "--output", str(output))
    ran = run("eval", *given, "--policies", "streaming_llm", "--budgets", "1/8")
    assert ran.status == 0, ran.err
    full, little = lines(output)
    assert full["perplexity"] < 1.1
    assert little["perplexity"] > 2
    ran = run("eval", *given, "--text", text)
    assert ran.status == 2
    assert "% of --text" in ran.err
    assert "is unknown to the tokenizer of keyhole-tiny" in ran.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--suite", "task"), "unknown suite 'task'; did you mean 'tasks'?"),
        (("--tasks", "paskey"), "unknown task 'paskey'; did you mean 'passkey'?"),
        (("--tasks", "rulr"), "did you mean 'ruler'?"),
        (("--tasks", ","), "tasks ',' must be at least one"),
        (("--tasks", "passkey:dept=1"), "unknown setting of task passkey 'dept'; did you mean 'd"),
        (("--tasks", "passkey:depth=deep"), "passkey:depth 'deep' must be a number"),
        (("--tasks", "passkey:depth=2"), "depth 2.0 must be"),
        (("--tasks", "passkey:depth"), "'passkey:depth' must be a name, or a name with"),
        (("--tasks", "perplexity"), "task perplexity needs your own text: --text FILE"),
        (("--policies", "qest"), "unknown policy 'qest'; did you mean 'quest'?"),
        (("--policies", "quest:budget=1"), "unknown setting of policy quest 'budget'"),
        (("--budgets", "0"), "budget '0' must be a number of tokens, at least 1, or a share"),
        (("--budgets", "9/8"), "budget '9/8' must be"),
        (("--limit", "0"), "limit 0 must be at least 1"),
        (("--batch", "0"), "batch 0 must be at least 1"),
        (("--lengths", "0"), "lengths (0,) must be numbers of tokens such as 2048,8192"),
        (("--lengths", "448,4096"), "length 4096 is more than the 512 tokens that llama-0 takes"),
        (("--lengths", "100"), "length 100 is too short for passkey: it needs at least"),
        (("--terms", "equa"), "unknown terms 'equa'; did you mean 'equal'?"),
        (("--sinks", "4"), "sinks 4 must be left out, or combined with --terms equal"),
        (
            ("--trials", "4", "--terms", "equal"),
            "trials 4 must be left out, or combined with --terms",
        ),
        (("--terms", "equal", "--dense-layers", "9"), "dense_layers (9,) must be full-attention"),
        (
            ("--terms", "equal", "--dense-layers", "0,1,2,3"),
            "dense_layers (0, 1, 2, 3) must be fewer layers than (0, 1, 2, 3): every policy would",
        ),
        (("--terms", "equal", "--window", "0"), "window 0 must be at least 1 token"),
        (("--first-seed", "-1"), "first_seed -1 must be at least 0"),
        (("--setup", ","), "setup () must be one of ('prompt', 'question'), or both"),
        (("--setup", "promt"), "unknown setup 'promt'; did you mean 'prompt'?"),
        (("--html", "no/page.html"), "--html 'no/page.html': there is no folder 'no'"),
        (("--output", "/proc"), "--output '/proc' is a folder; name a file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    path: str, run: Run, arguments: tuple[str, ...], error: str
) -> None:
    ran = run("eval", "--model", path, *PASSKEY, *arguments)
    assert ran.status == 2
    assert error in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.slow
def test_controls_and_terms_end_to_end(run: Run, tmp_path: Path) -> None:
    output, html = tmp_path / "eval.jsonl", tmp_path / "page.html"
    asked = (
        "--tasks",
        "passkey,tiny_multikey",
        "--lengths",
        "160",
        "--limit",
        "3",
        "--device",
        "cpu",
    )
    terms = ("--policies", "quest,delta,raas", "--budgets", "48", "--terms", "equal", "--controls")
    given = ("eval", *asked, *terms, "--window", "16", "--output", str(output))
    ran = run(*given, "--html", str(html))
    assert ran.status == 0, ran.err  # what cannot have equal terms is told, and is no failure
    heads, _, *rows = ran.out.splitlines()[2:12]
    assert "right, %" in heads
    assert "gain on recent" in heads
    assert [row.split()[1] for row in rows[:4]] == ["full", "quest", "delta", "raas"]
    assert rows[3].split()[2:7] == "48 not at equal terms".split()
    assert "not at equal terms: raas: raas has no setting full_layers" in ran.out
    assert "12 cells measured, 0 stored before" in ran.out
    assert "What selecting is worth" in html.read_text()
    found = [line for line in lines(output) if line["policy"] == "delta"]
    for line in found:
        assert (line["terms"], line["dense_layers"], line["outside_budget"]) == (
            "equal",
            [0, 1],
            "",
        )
        assert line["settings"]["recent_pages"] == 1
    # Stopped after some cells: those are not measured again.
    kept = output.read_text().splitlines(keepends=True)
    output.write_text("".join(kept[:5]) + kept[5][:40])
    ran = run(*given, "--json")
    told = json.loads(ran.out)
    assert (told["stored"], len(told["lines"])) == (5, 12)
    compared = [one for one in told["comparisons"] if one is not None]
    assert len(compared) == 4
    for one in compared:
        assert one["samples"] == 3
        assert set(one["controls"]) == set(one["gains"]) == {"recent", "random", "oracle"}
        assert 0 <= one["gains"]["recent"]["p"] <= 1


def test_tuned_settings_are_printed_and_trials_are_stored(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "eval.jsonl"
    asked = ("--tasks", "passkey", "--lengths", "160", "--limit", "2", "--device", "cpu")
    terms = ("--terms", "tuned", "--trials", "2", "--tuning-limit", "1", "--budgets", "64")
    given = ("eval", *asked, *terms, "--policies", "delta", "--output", str(output))
    ran = run(*given)
    assert ran.status == 0, ran.err
    assert "\nchosen:\ndelta at 160 tokens: token_budget 64; " in ran.out
    trials = lines(tmp_path / "eval.trials.jsonl")
    assert [line["task_settings"]["first_seed"] for line in trials] == [1_000_000] * 2
    assert [line["policy"] for line in lines(output)] == ["full", "delta"]
    assert "0 cells measured, 2 stored before" in run(*given).out
    assert lines(tmp_path / "eval.trials.jsonl") == trials


@pytest.mark.slow
def test_other_samples_are_other_cells(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "eval.jsonl"
    given = ("--tasks", "passkey", "--lengths", "160", "--limit", "1", "--policies", "full")
    assert run("eval", *given, "--output", str(output)).status == 0
    ran = run("eval", *given, "--output", str(output), "--first-seed", "7")
    assert "1 cell measured, 0 stored before" in ran.out
    assert "tiny_passkey:first_seed=7" in ran.out
    first, other = lines(output)
    assert first["depths"] != other["depths"]


def test_controls_without_scipy_are_refused_before_anything_runs(
    path: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    output = tmp_path / "eval.jsonl"
    ran = run("eval", "--model", path, *PASSKEY, "--controls", "--output", str(output))
    assert ran.status == 2
    assert "exact tests need SciPy: pip install 'keyhole[eval]'" in ran.err
    assert not output.exists()
