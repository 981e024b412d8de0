"""Lines of results with kvpress's methods, and the command that adds them.

Run by `make test-kvpress`, in a separate environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole.errors import ConfigError, KeyholeError, ModelError, UnknownNameError
from keyhole.models.loading import load
from tests.checkpoints import make_model

# After Keyhole, whose attention function it then wraps, and before the oracle's.
pytest.importorskip("kvpress", reason="needs kvpress: run `make test-kvpress`")


from keyhole import Full
from keyhole.config import EngineConfig
from keyhole.engine.engine import Engine
from keyhole.eval.line_file import LineFile
from keyhole.eval.tasks import make_task
from keyhole.eval.workload import Answered
from keyhole.integrations.kvpress import CompressedModel, PressCell, PressEvaluation, main
from keyhole.integrations.presses import Press, make_press

pytestmark = pytest.mark.filterwarnings("default")  # of kvpress and what it brings along


def cell(**changes: Any) -> PressCell:
    press = make_press("snapkv", 96, {"window_size": 16})
    fields = {"task": make_task("tiny_passkey"), "length": 256, "setup": "prompt", "press": press}
    return PressCell(**(fields | {"samples": 2} | changes))


FIELDS = """
benchmark date command commit note machine versions model method samples fingerprint task
task_settings length setup policy settings budget engine score scores depths tokens_prompt
tokens_generated decode_steps read_share bytes_per_step step_ms peak_bytes recall_per_layer
selection_maps
""".split()


def test_a_line_has_the_conditions_of_its_measurement() -> None:
    evaluation = PressEvaluation(load(keyhole.tiny()))
    for setup in ("prompt", "question"):
        line = json.loads(json.dumps(evaluation.line(cell(setup=setup))))
        assert sorted(line) == sorted(FIELDS)
        assert (line["benchmark"], line["task"], line["setup"]) == ("eval", "tiny_passkey", setup)
        assert (line["policy"], line["budget"], line["length"]) == ("kvpress:snapkv", 96, 256)
        assert line["settings"] == {"window_size": 16, "kernel_size": 5, "interval": None}
        assert line["score"] == sum(line["scores"]) / 2
        assert len(line["depths"]) == line["samples"] == 2
        assert {"kvpress", "keyhole", "torch", "transformers"} < set(line["versions"])
        assert 96 / 256 < line["read_share"] < 110 / 230


@pytest.mark.parametrize("setup", ["prompt", "question"])
def test_with_a_budget_for_all_the_line_is_that_of_keyhole(setup: str) -> None:
    """Except for the question, which is one forward pass here and a decode step per token there."""
    task, press = make_task("tiny_majority"), make_press("tova", 256)
    asked = cell(task=task, press=press, samples=4, setup=setup)
    line = PressEvaluation(load(keyhole.tiny())).line(asked)
    model = load(keyhole.tiny())
    full = Answered(task, model)
    wanted = full.measure(
        lambda policy: Engine(model, policy, EngineConfig(prefix_cache=False)),
        Full(),
        256,
        setup,
        4,
    )
    for name in ("score", "scores", "depths", "tokens_prompt", "tokens_generated", "read_share"):
        assert line[name] == wanted[name], name
    given = sum(len(one.given) for one in full.requests(full.samples(256, 4), setup))
    assert (given > 0) == (setup == "question")
    assert line["decode_steps"] == wanted["decode_steps"] - given
    assert line["decode_steps"] == 4 * (line["tokens_generated"] - 1)


CELLS = "--tasks passkey:depth=0.25 --lengths 256 --limit 1 --setup prompt,question".split()


def test_the_command_adds_a_line_for_every_cell(tmp_path: Path) -> None:
    output = tmp_path / "lines.jsonl"
    asked = "--presses snapkv:window_size=16,kernel_size=3,knorm --budgets 64,17".split()
    done = subprocess.run(
        [sys.executable, "-m", "keyhole.integrations.kvpress", *asked, *CELLS, "--output", output],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr  # with the question, 17 are too few
    assert "tiny_passkey 256 question snapkv 17: refused: budget 17 must be at least" in done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["setup"], line["policy"], line["budget"]) for line in lines] == [
        ("prompt", "kvpress:snapkv", 64),
        ("prompt", "kvpress:snapkv", 17),
        ("prompt", "kvpress:knorm", 64),
        ("prompt", "kvpress:knorm", 17),
        ("question", "kvpress:snapkv", 64),
        ("question", "kvpress:knorm", 64),
        ("question", "kvpress:knorm", 17),
    ]
    assert lines[0]["command"].startswith("python -m keyhole.integrations.kvpress --presses")
    assert lines[0]["settings"] == {"window_size": 16, "kernel_size": 3, "interval": None}
    assert lines[0]["task_settings"] == {"depth": 0.25}
    assert len(done.stdout.splitlines()) == len(lines)


def test_what_is_there_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, line, measured = tmp_path / "lines.jsonl", PressEvaluation.line, []

    def counted(self: PressEvaluation, cell: PressCell) -> dict[str, Any]:
        measured.append((cell.press.name, cell.press.budget, cell.setup, cell.samples))
        return line(self, cell)

    monkeypatch.setattr(PressEvaluation, "line", counted)
    asked = [*CELLS, "--presses", "knorm", "--output", str(output)]
    assert main([*asked, "--budgets", "64"]) == 0
    with output.open("a") as file:
        file.write('{"benchmark": "ev')  # of a run that was killed
    assert main([*asked, "--budgets", "64,96"]) == 0
    assert measured == [("knorm", n, s, 1) for n in (64, 96) for s in ("prompt", "question")]
    assert capsys.readouterr().out.count(", stored before\n") == 2
    assert main([*asked, "--budgets", "96", "--limit", "2"]) == 0
    assert main([*asked, "--budgets", "96", "--presses", "knorm,keydiff"]) == 0
    assert measured[4:] == [
        ("knorm", 96, "prompt", 2),
        ("knorm", 96, "question", 2),
        ("keydiff", 96, "prompt", 1),
        ("keydiff", 96, "question", 1),
    ]
    assert len(LineFile(output).lines) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--presses snapvk", "unknown press 'snapvk'; did you mean 'snapkv'?"),
        ("--presses snapkv:window_size", "'snapkv:window_size' must be a name, or a name with"),
        ("--presses snapkv:window_size=x", "'snapkv:window_size=x' must be numbers, true or false"),
        (
            "--presses tova --tasks passkey,perplexity",
            "task perplexity uses teacher forcing, which is not",
        ),
        ("--budgets 65,12", "budget 12 must be a whole number of tokens, at least 65 for snapkv"),
        ("--budgets 1/8", "--budgets '1/8' must be whole numbers"),
        ("--budgets 256 --tasks tiny_paskey", "unknown task 'tiny_paskey'; did you mean"),
        ("--presses tova --interval 0", "interval 0 must be at least 1"),
        ("--presses tova --setup A", "unknown setup 'A' (known: prompt, question)"),
        ("--presses tova --limit 0", "samples 0 must be at least 1"),
        ("no/where --presses tova", "no/where"),
    ],
)
def test_the_command_tells_what_is_wrong(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments.split(), "--output", str(tmp_path / "lines.jsonl")]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: ")
    assert message in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("snapvk", 64), UnknownNameError, "unknown press 'snapvk'; did you mean 'snapkv'"),
        (("knorm", 0), ConfigError, "budget 0 must be a whole number of tokens, at least 1"),
        (("knorm", 1.5), ConfigError, "budget 1.5 must be"),
        (("tova", 1), ConfigError, "budget 1 must be a whole number of tokens, at least 2"),
        (("snapkv", 64), ConfigError, "budget 64 must be a whole number of tokens, at least 65"),
        (("snapkv", 64, {"window": 8}), UnknownNameError, "did you mean 'window_size'"),
        (("snapkv", 64, {"compression_ratio": 0.5}), UnknownNameError, "'compression_ratio'"),
        (("snapkv", 64, {"window_size": 0}), ConfigError, "snapkv:window_size 0 must be"),
        (("snapkv", 99, {"kernel_size": 4}), ConfigError, "snapkv:kernel_size 4 must be odd"),
        (("expected_attention", 64, {"epsilon": -1}), ConfigError, "epsilon -1 must be at least 0"),
        (("expected_attention", 64, {"use_vnorm": 1}), ConfigError, "use_vnorm 1 must be true"),
        (
            ("streaming_llm", 4),
            ConfigError,
            "budget 4 must be a whole number of tokens, at least 5",
        ),
        (("knorm", 64, {}, 0), ConfigError, "interval 0 must be at least 1"),
        (("snapkv", 99, {}, 8), ConfigError, "these can: keydiff, knorm, tova"),
    ],
    ids=str,
)
def test_a_wrong_press_is_named(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        make_press(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["gpt_bigcode", "gemma2", "deepseek_v3", "gpt_oss"])
def test_a_model_that_kvpress_does_not_know_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match=r"kvpress does not support .*supported: LlamaFor"):
        CompressedModel(load(make_model(kind, tmp_path)))


@pytest.mark.parametrize("kind", ["mistral_sliding", "qwen2_sliding"])
def test_a_model_with_windows_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match="layers with a sliding window"):
        CompressedModel(load(make_model(kind, tmp_path)))


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        PressEvaluation(load(make_model("llama", tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"setup": "promt"}, "unknown setup 'promt'; did you mean 'prompt'"),
        ({"length": 20000}, "length 20000 is more than the 16384 tokens"),
        ({"samples": 0}, "samples 0 must be at least 1"),
        (
            {"setup": "question", "press": Press(name="knorm", settings={}, budget=2)},
            "budget 2 must be at least .* knorm keeps 1 tokens or more",
        ),
    ],
    ids=str,
)
def test_a_wrong_cell_is_named(changes: dict[str, Any], message: str) -> None:
    evaluation = PressEvaluation(load(keyhole.tiny()))
    with pytest.raises(KeyholeError, match=message):
        evaluation.line(cell(**changes))
