"""Pictures are written, and what keeps them from being written is said in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keyhole import LLM, Delta, SamplingParams
from keyhole.errors import ConfigError
from keyhole.eval.calibrate import measured
from keyhole.eval.policy_trace import Trace, Traced
from keyhole.eval.report.layer_charts import _binned, page_map, recall_chart
from keyhole.models.model import Model

PROMPT: Any = {"prompt_token_ids": [3 + 29 * i % 251 for i in range(50)]}


@pytest.fixture(scope="module")
def trace(model: Model) -> Trace:
    policy = Traced(Delta(token_budget=32, full_layers=(0,), delta_layers=(1,)))
    LLM(model, policy=policy).generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    return policy.trace


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_a_page_map_is_a_picture(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    page_map(trace, path, title="What is read", prompt_tokens=50, delta_layers=(1,))
    assert is_png(path)


def test_many_layers_form_a_grid(tmp_path: Path, trace: Trace) -> None:
    many = Trace()
    many.steps = [
        type(step)(step.lengths, step.page_size, dict.fromkeys(range(7), step.reads[3]))
        for step in trace.steps
    ]
    page_map(many, tmp_path / "map.png", title="What is read", prompt_tokens=50)
    assert is_png(tmp_path / "map.png")


@pytest.mark.slow
def test_a_calibration_is_a_picture(model: Model, tmp_path: Path) -> None:
    found = measured(model, [PROMPT], token_budget=32, max_tokens=5)
    recall_chart(found, found.place("optimal", 2, (0,)), tmp_path / "recall.png")
    assert is_png(tmp_path / "recall.png")


def test_steps_that_share_a_pixel_are_averaged() -> None:
    nan = np.nan
    shares = np.array([[1.0, 0.0, 1.0, 1.0], [nan, nan, nan, 0.5]], np.float32)
    binned = _binned(shares, pixels=4)
    assert binned[0].tolist() == [0.5, 1.0]
    assert np.isnan(binned[1, 0])
    assert binned[1, 1] == 0.5
    assert np.array_equal(_binned(shares, pixels=8), shares, equal_nan=True)


@pytest.mark.slow
def test_an_unwritable_picture_is_an_error(trace: Trace, tmp_path: Path) -> None:
    for name in ("missing/map.png", "map.nothing"):
        with pytest.raises(ConfigError, match="cannot write the picture"):
            page_map(trace, tmp_path / name, title="What is read", prompt_tokens=50)


def test_a_missing_matplotlib_is_named(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "keyhole\[plot\]"'):
        page_map(trace, tmp_path / "map.png", title="What is read", prompt_tokens=50)
