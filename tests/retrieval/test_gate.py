"""The files of a gate, and its training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import keyhole
from keyhole.errors import ConfigError, ModelError
from keyhole.eval.tiny_language.tasks import HeadTexts
from keyhole.models.loading import load
from keyhole.retrieval.gate import SeerGate
from keyhole.retrieval.training import gate_distill, train
from keyhole.retrieval.training.gate_distill import GateDistiller, GateRecord
from keyhole.retrieval.training.teacher import run_recorded
from keyhole.retrieval.training.training_config import TrainingConfig
from tests.checkpoints import VOCAB_SIZE, make_config, make_network
from tests.policies.models import twins

SIZE = 4
RECIPE = TrainingConfig(
    objective="gate", tokens=1200, length=96, batch_tokens=192, num_queries=16, block_size=SIZE
)


class Texts:
    """A word that returns, in noise: there is something to find."""

    name = "a word"
    digest = "00"

    def text(self, rng: Random, length: int) -> list[int]:
        return [7 if i % 9 == 0 else rng.randrange(3, VOCAB_SIZE) for i in range(length)]


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    found: PreTrainedModel = make_network(make_config("llama_group3"))
    return found


def test_a_gate_is_read_as_it_was_written(tmp_path: Path) -> None:
    geometry = twins("llama_group3")[0].geometry(SIZE)
    gate = SeerGate.random(geometry)
    gate.save_pretrained(tmp_path)
    again = SeerGate.from_pretrained(tmp_path, geometry)
    assert list(again.layers) == [str(layer) for layer in range(8)]
    for one, other in zip(gate.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_what_is_wrong_with_a_gate_is_named(tmp_path: Path) -> None:
    geometry = twins("llama_group3")[0].geometry(SIZE)
    SeerGate.random(geometry).save_pretrained(tmp_path)
    other = twins("llama_mha")[0].geometry(SIZE)
    with pytest.raises(ModelError, match=r"another model: layer 0 needs a tensor layers\.0\.query"):
        SeerGate.from_pretrained(tmp_path, other)
    deeper = dataclasses.replace(geometry, layers=geometry.layers * 2)
    with pytest.raises(ModelError, match=r"layer 8 needs .* but it has none; train one with"):
        SeerGate.from_pretrained(tmp_path, deeper)
    change(tmp_path, block_size=16)
    with pytest.raises(ConfigError, match="on blocks of 16 tokens, but page_size is 4; set page_s"):
        SeerGate.from_pretrained(tmp_path, geometry)
    change(tmp_path, block_size="x")
    with pytest.raises(ModelError, match="block_size 'x'; it must be a number of tokens"):
        SeerGate.from_pretrained(tmp_path, geometry)
    change(tmp_path, model_type="llama")
    with pytest.raises(ModelError, match=r"is not a gate: the model_type of its config.json is"):
        SeerGate.from_pretrained(tmp_path, geometry)
    with pytest.raises(ModelError, match=r"'nowhere' holds no gate: it has no config.json"):
        SeerGate.from_pretrained("nowhere", geometry)
    with pytest.raises(ConfigError, match="the gate cannot be written to"):
        SeerGate.random(geometry).save_pretrained(tmp_path / "config.json")


@pytest.mark.parametrize("kind", ["llama_group3", "gemma3"])
def test_targets_are_the_peaks_of_eager_attention(kind: str) -> None:
    """One block, KV head and layer at a time, from transformers' own weights."""
    network = make_network(make_config(kind))
    text = torch.randint(3, VOCAB_SIZE, (42,), generator=torch.Generator().manual_seed(0))
    record = GateRecord(torch.tensor([9, 23, 41]), SIZE)
    with torch.no_grad():
        run_recorded(network, text, record)
        out = network(text[None], output_attentions=True)
    full = range(4) if kind == "llama_group3" else (1, 3)
    assert list(record.layers) == list(full)
    for layer, targets in record.layers.items():
        weights = out.attentions[layer][0].double().numpy()
        heads = len(targets.peak)
        group = len(weights) // heads
        for head in range(heads):
            own = weights[head * group : (head + 1) * group][:, record.rows]
            for block in range(targets.peak.shape[2]):
                part = own[..., SIZE * block : SIZE * (block + 1)]
                peak, mass = part.max((0, 2)), part.sum(2).mean(0)
                assert np.abs(targets.peak[head, :, block].numpy() - peak).max() < 1e-5
                assert np.abs(targets.mass[head, :, block].numpy() - mass).max() < 1e-5


def test_the_loss_is_the_divergence_over_blocks_before_the_own() -> None:
    generator = torch.Generator().manual_seed(0)
    found, peak = torch.randn(2, 3, 5, generator=generator), torch.rand(2, 3, 5)
    newest = [4, 2, 0]
    before = torch.arange(5) < torch.tensor(newest)[:, None]
    wanted = 0.0
    for head in range(2):
        for row, count in enumerate(newest):
            p = peak[head, row, :count].double().numpy()
            q = np.exp(found[head, row, :count].double().numpy())
            p, q = p / p.sum(), q / q.sum()
            wanted += float((p * np.log(p / q)).sum()) / 6
    assert abs(float(gate_distill.divergence(found, peak, before)) - wanted) < 1e-5


def test_what_is_kept_is_the_mass_of_the_best_blocks_and_the_own() -> None:
    found = torch.tensor([[[3.0, 1.0, 2.0, 9.0, 9.0]]])
    mass = torch.tensor([[[0.1, 0.2, 0.3, 0.0, 0.0]]])
    # The own block is the third; the best one before it is the first. Later ones do not exist.
    kept = gate_distill.kept(found, mass, torch.tensor([2]), 2)
    assert kept == pytest.approx(0.4 / 0.6)


def test_training_starts_from_the_mean_key(network: PreTrainedModel) -> None:
    layer = GateDistiller(network, Texts(), RECIPE).module.layer(0)
    query = torch.randn(6, 8)
    folded = layer(query)
    assert not folded[:, :16].any()
    torch.testing.assert_close(folded[:, 16:], query.view(2, 3, 8).mean(1))


@pytest.mark.slow
def test_a_random_gate_learns_where_attention_peaks(network: PreTrainedModel) -> None:
    config = dataclasses.replace(RECIPE, tokens=6_000, learning_rate=0.03)
    distiller = GateDistiller(network, Texts(), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in distiller.module.parameters():
            weight.copy_(0.7 * torch.randn(weight.shape, generator=generator))
    losses = []
    while not distiller.finished:
        losses.append(distiller.train_step().loss)
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])


def test_a_stopped_run_goes_on_bit_for_bit_and_leaves_a_gate(
    network: PreTrainedModel, tmp_path: Path
) -> None:
    whole = train.train(network, Texts(), RECIPE, tmp_path / "whole")
    asked = iter([False, False, True])
    part = train.train(network, Texts(), RECIPE, tmp_path / "part", stop=lambda: next(asked))
    assert (part.finished, part.steps) == (False, 2)
    rest = train.train(network, Texts(), RECIPE, tmp_path / "part", resume=True)
    assert (rest.finished, rest.steps) == (True, whole.steps)
    geometry = twins("llama_group3", num_hidden_layers=4)[0].geometry(SIZE)
    gates = [SeerGate.from_pretrained(tmp_path / x, geometry) for x in ("whole", "part")]
    for one, other in zip(*(gate.parameters() for gate in gates), strict=True):
        assert torch.equal(one, other)
    assert gates[0].block_size == SIZE


def test_a_model_without_keys_of_its_own_or_full_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be trained for a model with MLA"):
        GateDistiller(make_network(make_config("deepseek_v3")), Texts(), RECIPE)
    with pytest.raises(ConfigError, match="with full attention, but this model has none"):
        GateDistiller(make_network(make_config("mistral_sliding")), Texts(), RECIPE)


def test_a_block_that_leaves_short_texts_without_others_is_refused(
    network: PreTrainedModel,
) -> None:
    wrong = dataclasses.replace(RECIPE, block_size=64)
    with pytest.raises(ConfigError, match="block_size 64 must be at most 48"):
        GateDistiller(network, Texts(), wrong)


def test_the_bundled_gate_finds_more_than_the_mean_key_and_the_newest_blocks() -> None:
    """In every layer, on a text of the bundled model's world that no training has seen."""
    model = load(keyhole.tiny(), "cpu")
    assert model.gate is not None
    gate, size = SeerGate.from_pretrained(model.gate, model.geometry(16)), 16
    text = torch.tensor(HeadTexts().text(Random("not a training's"), 512))
    record = GateRecord(torch.arange(256, len(text), 2), size)
    with torch.no_grad():
        run_recorded(model.network, text, record)
    newest = record.rows // size
    found = {"gate": 0.0, "mean key": 0.0, "newest": 0.0}
    for number, targets in record.layers.items():
        mean = gate_distill.mean_key_layer(targets)
        scores = {
            "gate": gate_distill.scores(gate.layer(number), targets),
            "mean key": gate_distill.scores(mean, targets),
            "newest": torch.arange(targets.mass.shape[-1]).expand_as(targets.mass).float(),
        }
        for name, one in scores.items():
            found[name] += gate_distill.kept(one.detach(), targets.mass, newest, 4)
    assert found["gate"] > 1.02 * found["mean key"] > 1.02 * found["newest"]
