import json
import multiprocessing
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from recipes.tiny_model import trainer
from recipes.tiny_model.curriculum import STAGES, training_batch
from recipes.tiny_model.initial import SHARE, initial_weights, shared_direction
from recipes.tiny_model.network import llama_config, supervised_logits
from recipes.tiny_model.optimizers import Optimizers, planned
from recipes.tiny_model.train import run, train
from recipes.tiny_model.trainer import Ranks, TrainerSettings

STEPS = 3 * 2048


@pytest.fixture
def settings(tmp_path):
    return TrainerSettings(
        out=tmp_path, tokens=STEPS, layers=3, examine_lengths=(128,), examine_items=1
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
    for resume in (False, True):  # out of time after every step
        run(replace(parts, minutes=0.0, resume=resume), Ranks(), never)
    run(replace(parts, resume=True), Ranks(), never)
    expected, found = trainer.load_snapshot(whole.out), trainer.load_snapshot(parts.out)
    assert expected["tokens"] == found["tokens"] == STEPS
    for name, weight in expected["weights"].items():
        assert torch.equal(weight, found["weights"][name]), name
    embedding = found["weights"]["model.embed_tokens.weight"]
    share = embedding @ shared_direction(trainer.config_of(found), 0) / embedding.norm(dim=1)
    torch.testing.assert_close(share, torch.full_like(share, SHARE))


def test_the_log_has_one_line_per_examination(settings, never):
    run(replace(settings, tokens=2048), Ranks(), never)
    (line,) = (settings.out / "log.jsonl").read_text().splitlines()
    assert set(json.loads(line)["exact"]["128"]) >= {"recall", "derive"}
    assert not list(settings.out.glob("*.new"))


def test_a_run_is_not_overwritten_by_accident(settings):
    (settings.out / trainer.SNAPSHOT_FILE).touch()
    with pytest.raises(ValueError, match="resume it or choose another folder"):
        train(settings)


@pytest.mark.slow
def test_two_processes_take_the_step_of_one_that_has_both_batches(settings):
    torch.set_num_threads(1)
    train(replace(settings, tokens=1, ranks=2))
    found = trainer.load_snapshot(settings.out)
    assert found["step"] == 1

    config = llama_config(settings.layers)
    weights = {name: weight.requires_grad_() for name, weight in initial_weights(config, 0).items()}
    batches = [training_batch(0, 0, rank, STAGES[0]) for rank in range(2)]
    losses = [
        cross_entropy(
            supervised_logits(weights, batch, config, torch.bfloat16),
            batch.targets,
            reduction="sum",
        )
        for batch in batches
    ]
    for loss in losses:
        loss.backward()
    for weight in weights.values():
        weight.grad /= sum(len(batch.targets) for batch in batches)
    optimizers = Optimizers(weights)
    optimizers.step(planned(1).factor(0))
    # The first step is too small to show in the weights, but not in what the optimizers remember.
    compared = 0
    for wanted, given in zip(optimizers.state(), found["optimizers"], strict=True):
        for number, memory in wanted["state"].items():
            for name, value in memory.items():
                # The same gradients, added up by another library: float32, with room for its order.
                difference = (given["state"][number][name] - value).abs().max()
                assert difference <= 1e-3 * value.abs().max()
                compared += bool(value.any())
    assert compared > 20  # the others are zero: behind output projections that start at zero
