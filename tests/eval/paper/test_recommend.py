"""The settings file and the page say what the verdicts say."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole import LLM, Quest
from keyhole.config import EngineConfig
from keyhole.eval.line_file import EvalOutcome
from keyhole.eval.methods import FULL, Budget, Method, controls_of, settings_of
from keyhole.eval.paper import report
from keyhole.eval.paper.documents import NO_DOCUMENTS
from keyhole.eval.paper.report import recommended
from keyhole.eval.paper.suite import PaperOutcome
from keyhole.eval.paper.verdicts import policy_verdicts, reuse_results
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.registry import SettingsFile
from keyhole.reuse import make_reuse
from tests.eval import eval_lines

SAMPLES = 240
RIGHT, HALF = [1.0] * SAMPLES, [1.0, 0.0] * (SAMPLES // 2)
ABOUT = {"model": "llama-0", "fingerprint": "f", "date": "2026-11-24", "command": "keyhole eval"}


def line(policy: Policy, scores: list[float], **more: Any) -> dict[str, Any]:
    settings = settings_of(policy)
    budget = settings["settings"].get("token_budget")
    known = {"fingerprint": "f", "task_settings": {}, "length": 256, "samples": SAMPLES}
    about = {"method": policy.name, "budget": budget, "scores": scores}
    return eval_lines.line(**(known | settings | about | more), score=sum(scores) / SAMPLES)


def outcome(model: Model, quest: list[float], epic: float) -> PaperOutcome:
    """Quest beside its controls, and EPIC beside recomputing: full attention is always right."""
    geometry = model.geometry(EngineConfig.page_size)
    policy = Quest(token_budget=32, full_layers=(0,)).resolve(geometry)
    beside = controls_of(policy, geometry)
    named = {name: settings_of(control) for name, control in beside.items()}
    lines = [
        line(keyhole.Full(), RIGHT, method="full"),
        line(policy, quest, controls=named, dense_layers=[0]),
        *(line(one, HALF, method=name, control=name) for name, one in beside.items()),
    ]
    methods = [FULL, Method(label="quest", name="quest", budget=Budget.parse("1/8"))]
    answer = {"exact": 1.0, "sequence_ratio": 1.0, "recompute_ratio": 0.5, "ttft_ms": 5.0}
    made = dataclasses.asdict(make_reuse("epic"))
    questions = [
        {
            "task": "multi_document_1",
            "task_settings": {},
            "length": 256,
            "seed": seed,
            "results": {
                "recompute": answer | {"f1": 1.0, "settings": {}},
                "epic": answer | {"f1": epic, "settings": made},
                NO_DOCUMENTS: answer | {"f1": 0.0, "settings": {}},
            },
        }
        for seed in range(SAMPLES)
    ]
    return PaperOutcome(
        cells=EvalOutcome(lines=lines),
        questions=EvalOutcome(lines=questions),
        policies=policy_verdicts(lines, [], methods, 16),
        reuses=reuse_results(questions, ("recompute", "epic")),
    )


@pytest.fixture
def good(model: Model) -> PaperOutcome:
    return outcome(model, RIGHT, 1.0)


def test_the_file_gives_the_policy_that_was_measured(
    model: Model, good: PaperOutcome, tmp_path: Path
) -> None:
    path = tmp_path / "settings.json"
    settings = recommended(good, ABOUT, 4)
    settings.save(path)
    assert SettingsFile.read(path) == settings
    assert LLM(model, policy=path).policy == Quest(token_budget=32, full_layers=(0,)).resolve(
        model.geometry(16)
    )
    assert make_reuse(path) == make_reuse("epic")
    measured = settings.measured
    assert measured.items() >= ABOUT.items()
    assert (measured["verdict"], measured["length"], measured["samples"]) == ("use it", 256, 240)
    assert measured["verdicts"]["quest"]["token_budget"] == 32
    assert measured["reuse_verdicts"]["epic"]["verdict"] == "use it"


def test_without_a_suitable_method_full_attention_is_recommended(model: Model) -> None:
    settings = recommended(outcome(model, HALF, 0.0), ABOUT, 4)
    assert (settings.policy, settings.settings, settings.reuse) == ("full", {}, None)
    assert settings.measured["verdict"] == "no method to use"
    assert settings.measured["verdicts"]["quest"]["verdict"] == "no better"
    assert settings.measured["reuse_verdicts"]["epic"]["verdict"] == "no better"


def test_the_page_begins_with_the_verdicts_and_holds_the_file(
    good: PaperOutcome, tmp_path: Path
) -> None:
    settings = recommended(good, ABOUT, 4)
    report.write_page(good, settings, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    heads = re.findall(r"<h2[^>]*>([^<]*)</h2>", text)
    first = ["Verdicts", "Every budget", "Stored documents", "Settings to use"]
    assert heads[:5] == [*first, "Scores at a glance"]
    verdicts = text[text.index("Verdicts</h2>") : text.index("Every budget</h2>")]
    row = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", verdicts.split("<tbody>")[1])
    assert [*row[:2], *row[3:6]] == ["quest", "use it", "32", "256", "0"]
    shown = text[text.index("<pre>") + 5 : text.index("</pre>")].replace("&#34;", '"')
    assert json.loads(shown) == dataclasses.asdict(settings)
    assert "Of the methods to use, quest reads the fewest bytes" in text
    assert "Of the reuse methods to use, epic has the earliest first token." in text


def test_what_was_refused_is_on_the_page_once(good: PaperOutcome) -> None:
    error = {"method": "delta", "error": "token_budget 8 <must> be larger"}
    good.cells.refused += [error, error]
    text = report.render_page(good, recommended(good, ABOUT, 4))
    assert text.count("<li>delta: token_budget 8 &lt;must&gt; be larger</li>") == 1
