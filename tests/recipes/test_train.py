import json
import multiprocessing
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from recipes.tiny_model import trainer
from recipes.tiny_model.curriculum import SINGLE, training_batch
from recipes.tiny_model.initial import (
    SHARE,
    initial_weights,
    shared_direction,
    with_repeated,
)
from recipes.tiny_model.network import llama_config, supervised_logits
from recipes.tiny_model.optimizers import Optimizers, planned
from recipes.tiny_model.train import main, only_run, run, train
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"steadiness": 3.0, "adamw_rate": 1e-3, "dtype": "float32"}]
)
def test_an_interrupted_run_ends_in_the_same_weights(settings, never, tmp_path, fields):
    torch.set_num_threads(1)
    settings = replace(settings, hidden_size=224, **fields)
    whole, parts = (replace(settings, out=tmp_path / name) for name in ("whole", "parts"))
    for folder in (whole.out, parts.out):
        folder.mkdir()
    run(whole, Ranks(), never)
    for resume in (False, True):  # out of time after every step
        run(replace(parts, minutes=0.0, resume=resume), Ranks(), never)
    run(replace(parts, resume=True, steadiness=0, adamw_rate=None), Ranks(), never)
    expected, found = trainer.load_snapshot(whole.out), trainer.load_snapshot(parts.out)
    assert expected["tokens"] == found["tokens"] == STEPS
    assert trainer.config_of(found).hidden_size == 224
    for name, weight in expected["weights"].items():
        assert torch.equal(weight, found["weights"][name]), name
    embedding = found["weights"]["model.embed_tokens.weight"]
    share = embedding @ shared_direction(trainer.config_of(found), 0) / embedding.norm(dim=1)
    torch.testing.assert_close(share, torch.full_like(share, SHARE))


@pytest.mark.slow
def test_the_log_has_one_line_per_examination(settings, never):
    run(replace(settings, tokens=2048), Ranks(), never)
    (line,) = (settings.out / "log.jsonl").read_text().splitlines()
    assert set(json.loads(line)["exact"]["128"]) >= {"recall", "derive"}
    assert not list(settings.out.glob("*.new"))


def test_a_run_is_not_overwritten_by_accident(settings):
    (settings.out / trainer.SNAPSHOT_FILE).touch()
    with pytest.raises(ValueError, match="resume it or choose another folder"):
        train(settings)


def test_a_folder_takes_one_run_at_a_time(settings):
    with (
        only_run(settings.out),
        pytest.raises(ValueError, match="in use by another run"),
        only_run(settings.out),
    ):
        pass


def test_a_deeper_model_begins_with_the_function_of_its_start(settings):
    config = llama_config(3)
    weights = initial_weights(config, 0)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    deeper = with_repeated(weights, (1, 2))
    batch = training_batch(0, 0, 0, SINGLE[0])
    expected = supervised_logits(weights, batch, config, torch.float32)
    found = supervised_logits(deeper, batch, llama_config(5), torch.float32)
    torch.testing.assert_close(found, expected)
    query = "self_attn.q_proj.weight"
    assert torch.equal(deeper[f"model.layers.4.{query}"], weights[f"model.layers.2.{query}"])
    with pytest.raises(ValueError, match="consecutive ones below 3"):
        with_repeated(weights, (2, 3))


@pytest.mark.slow
def test_two_processes_take_the_step_of_one_that_has_both_batches(settings):
    torch.set_num_threads(1)
    train(replace(settings, tokens=1, ranks=2))
    found = trainer.load_snapshot(settings.out)
    assert found["step"] == 1

    config = llama_config(settings.layers)
    weights = {name: weight.requires_grad_() for name, weight in initial_weights(config, 0).items()}
    batches = [training_batch(0, 0, rank, SINGLE[0]) for rank in range(2)]
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


@pytest.mark.parametrize("flag", ["--steadiness", "--adamw-rate"])
def test_a_weight_or_rate_below_zero_is_refused(flag, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train", f"{flag}=-1"])
    with pytest.raises(SystemExit):
        main()
    assert f"{flag} -1.0: a number" in capsys.readouterr().err


def test_match_layers_are_for_initial_weights_only(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train", "--start", "nowhere", "--match-layers", "1"])
    with pytest.raises(SystemExit):
        main()
    assert "--match-layers sets initial weights, and --start has its own" in capsys.readouterr().err
