"""Recall is the share of true attention on the selection; stored results are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.results_page import head_table
from keyhole.eval.verify import BEST, WINDOW, RecallCell, RecallText, measure_recall
from keyhole.models.loading import load
from keyhole.retrieval.head import RetrievalHead
from tests.checkpoints import make_config, make_model, make_network
from tests.oracle import best

ROWS = [40, 55, 70]
IDS = torch.randint(3, 270, (80,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[RecallCell]:
    model = load(make_model("llama", tmp_path_factory.mktemp("model")), "cpu", "float32")
    heads = {
        x: RetrievalHead.random(model.network, inputs=x) for x in ("tokens", "tokens+features")
    }
    return measure_recall(model, heads, {80: [RecallText(token_ids=IDS, rows=ROWS)]}, (16, 32, 80))


def test_window_and_best_are_those_of_plain_loops(cells: list[RecallCell]) -> None:
    with torch.no_grad():
        out = make_network(make_config("llama"))(torch.tensor([IDS]), output_attentions=True)
    weights = torch.stack(out.attentions)[:, 0].double().mean(0)  # [Hq, n, n]
    found = {(c.chooser, c.budget): c.recall for c in cells}
    for budget in (16, 32):
        window, most = [], []
        for row in ROWS:
            mean = [weights[2 * g : 2 * g + 2, row].mean(0).tolist() for g in range(2)]
            for own in mean:
                near = [i for i in range(row + 1) if i < 4 or i > row - (budget - 4)]
                window.append(sum(own[i] for i in near))
                chosen = best(own[: row + 1], budget, first=4, last=budget // 4)
                most.append(sum(own[i] for i in chosen))
        assert found[WINDOW, budget] == pytest.approx(sum(window) / len(window), abs=1e-4)
        assert found[BEST, budget] == pytest.approx(sum(most) / len(most), abs=1e-4)


def test_nothing_exceeds_the_best_and_a_budget_of_the_length_is_left_out(
    cells: list[RecallCell],
) -> None:
    assert {c.budget for c in cells} == {16, 32}
    best_of = {c.budget: c.recall for c in cells if c.chooser == BEST}
    heads = [c for c in cells if c.chooser.startswith("tokens")]
    assert len(heads) == 4
    assert all(0 < c.recall <= best_of[c.budget] for c in heads)


def line(**recalls: list[float]) -> dict[str, Any]:
    results = [
        {"chooser": name, "length": length, "budget": 64, "recalls": values}
        for name, values in recalls.items()
        for length in (512, 1024)
    ]
    return {"date": "2026-01-01", "settings": {"model": "tiny"}, "results": results}


def test_a_head_has_the_interval_of_its_gain_over_the_window_text_by_text() -> None:
    window = [0.3, 0.5, 0.7]
    text = head_table.tables(
        line(
            good=[0.4, 0.6, 0.8],  # ten points more in every text, though texts differ by more
            even=[0.2, 0.5, 0.8],
            window=window,
            best=[0.5, 0.7, 0.9],
        )
    )
    assert text.splitlines() == [
        "| budget 64 | 512 | 1,024 |",
        "| --- | --- | --- |",
        "| good | 60.0 (+10.0 to +10.0) | 60.0 (+10.0 to +10.0) |",
        "| even | 50.0 (-10.0 to +10.0) | 50.0 (-10.0 to +10.0) |",
        "| window | 50.0 | 50.0 |",
        "| best | 70.0 | 70.0 |",
    ]


def test_right_answers_stand_in_a_row_per_policy_and_share() -> None:
    counts = {("full", 1): (8, 7), ("spe_context", 8): (6, 5), ("spe_context", 4): (8, 6)}
    cases = (("recall", 512), ("derive", 1024))
    results = [
        {"task": task, "words": words, "policy": name, "share": share, "right": right, "of": 8}
        for number, (task, words) in enumerate(cases)
        for (name, share), found in counts.items()
        for right in found[number : number + 1]
    ]
    assert head_table.tasks({"results": results}).splitlines() == [
        "| right of 8 | reads | recall, 512 words | derive, 1,024 words |",
        "| --- | --- | --- | --- |",
        "| full | everything | 8 | 7 |",
        "| spe_context | 1/4 | 8 | 6 |",
        "| spe_context | 1/8 | 6 | 5 |",
    ]


def test_the_picture_is_written(tmp_path: Path) -> None:
    head_table.picture(line(good=[0.6], window=[0.5], best=[0.7]), tmp_path / "recall.png")
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
