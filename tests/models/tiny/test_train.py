import json
import multiprocessing
from dataclasses import replace

import pytest
import torch

from keyhole.models.tiny import snapshot
from keyhole.models.tiny.curriculum import STAGES
from keyhole.models.tiny.export import export
from keyhole.models.tiny.ranks import Ranks
from keyhole.models.tiny.train import run, train
from keyhole.models.tiny.trainer import Settings

STEPS_OF_5 = 5 * 2048


@pytest.fixture
def settings(tmp_path):
    return Settings(
        out=tmp_path, tokens=STEPS_OF_5, layers=3, examine_lengths=(128,), examine_items=1
    )


@pytest.fixture
def never():
    return multiprocessing.get_context("spawn").Event()


def test_an_interrupted_run_ends_in_the_same_weights(settings, never, tmp_path):
    torch.set_num_threads(1)
    whole, parts = (replace(settings, out=tmp_path / name) for name in ("whole", "parts"))
    for folder in (whole.out, parts.out):
        folder.mkdir()
    run(whole, Ranks(), never)
    for resume in (False, True, True):  # out of time after every step
        run(replace(parts, minutes=0.0, resume=resume), Ranks(), never)
    run(replace(parts, resume=True), Ranks(), never)
    expected, found = snapshot.load(whole.out), snapshot.load(parts.out)
    assert expected["tokens"] == found["tokens"] == STEPS_OF_5
    for name, weight in expected["weights"].items():
        assert torch.equal(weight, found["weights"][name]), name


def test_the_log_has_one_line_per_examination(settings, never):
    run(replace(settings, tokens=2048), Ranks(), never)
    (line,) = (settings.out / "log.jsonl").read_text().splitlines()
    assert set(json.loads(line)["exact"]["128"]) >= {"recall", "derive"}
    assert not list(settings.out.glob("*.new"))


def test_a_run_can_begin_with_the_weights_of_a_model_folder(settings, never, tmp_path):
    torch.set_num_threads(1)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    run(replace(settings, out=first, tokens=2048), Ranks(), never)
    export(first, tmp_path / "model")
    begin = int(STAGES[-2].until)
    # The schedule is over at once: one step at rate 0.
    run(replace(settings, out=second, start=tmp_path / "model", tokens=begin), Ranks(), never)
    given, found = snapshot.load(first), snapshot.load(second)
    assert found["tokens"] > begin
    for name, weight in given["weights"].items():
        assert torch.equal(weight, found["weights"][name]), name


def test_a_run_is_not_overwritten_by_accident(settings):
    (settings.out / snapshot.FILE).touch()
    with pytest.raises(ValueError, match="resume it or choose another folder"):
        train(settings)
