"""A training lowers its loss, goes on bit for bit, and leaves a head that can be loaded."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from keyhole.errors import ConfigError, NumericalError, UnknownNameError
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training import train
from keyhole.retrieval.training.distill import Distiller
from keyhole.retrieval.training.objectives import selection_loss
from keyhole.retrieval.training.run import rate
from keyhole.retrieval.training.training_config import FileCorpus, TrainingConfig
from tests.checkpoints import VOCAB_SIZE, make_config, make_network
from tests.disks import files_at_most

RECIPE = TrainingConfig(
    tokens=1200, length=96, batch_tokens=192, num_queries=16, feature_layers=(1, 2, 3)
)


class Texts:
    """Two words in turns with noise between: there is something to find."""

    name = "two words"
    digest = "00"

    def text(self, rng: Random, length: int) -> list[int]:
        return [
            rng.choice((7, 8)) if i % 3 else rng.randrange(3, VOCAB_SIZE) for i in range(length)
        ]


@pytest.fixture(scope="module")
def network() -> Any:
    return make_network(make_config("llama"))


@pytest.fixture(scope="module")
def start(network: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head with features of layers (1, 2, 3), and random weights."""
    folder = tmp_path_factory.mktemp("start")
    RetrievalHead.random(network).save_pretrained(folder)
    return str(folder)


def of(objective: str, start: str) -> TrainingConfig:
    begin = start if objective == "selection" else None
    return dataclasses.replace(RECIPE, objective=objective, start=begin)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["attention", "eagle"])
@pytest.mark.parametrize("inputs", ["tokens", "tokens+features"])
def test_a_few_steps_lower_the_loss(network: Any, objective: str, inputs: str) -> None:
    layers = None if inputs == "tokens" else (1, 2, 3)
    config = dataclasses.replace(
        RECIPE, objective=objective, inputs=inputs, feature_layers=layers, tokens=12_000
    )
    distiller = Distiller(network, Texts(), config)
    losses = []
    while not distiller.finished:
        losses.append(distiller.train_step().loss)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert distiller.head.config.inputs == inputs
    assert distiller.head.config.trained_length == 96


@pytest.mark.parametrize("inputs", ["tokens", "tokens+features"])
def test_a_selection_goes_on_from_a_head(network: Any, inputs: str, tmp_path: Path) -> None:
    RetrievalHead.random(network, inputs=inputs).save_pretrained(tmp_path)
    config = dataclasses.replace(of("selection", str(tmp_path)), feature_layers=None)
    config = Distiller(network, Texts(), config).head.config
    assert (config.inputs, config.objective) == (inputs, "selection")
    assert config.trained_length == 512  # of the head that it began with


def test_a_head_to_start_from_keeps_its_inputs(network: Any, tmp_path: Path) -> None:
    """`--inputs tokens` trained a head that reads features, and said nothing."""
    RetrievalHead.random(network, inputs="tokens+features").save_pretrained(tmp_path)
    config = TrainingConfig(objective="selection", start=str(tmp_path), inputs="tokens", length=96)
    with pytest.raises(ConfigError, match=r"inputs 'tokens' must be tokens\+features, as in start"):
        Distiller(network, Texts(), config)


@pytest.mark.slow
def test_a_choice_learns_to_change_less(network: Any, start: str) -> None:
    """The true choice, not the soft one of training, on texts that were not trained on."""
    config = dataclasses.replace(of("selection", start), tokens=12_000)
    distiller = Distiller(network, Texts(), config)
    rng = Random("others")
    targets = [distiller._targets(rng, 96) for _ in range(12)]

    @torch.no_grad()
    def changed() -> float:
        losses = [selection_loss(distiller.head, network, x, 20, 1e-3)[0] for x in targets]
        return float(sum(losses))

    before = changed()
    while not distiller.finished:
        distiller.train_step()
    assert changed() < 0.97 * before


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["attention", "selection", "eagle"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    network: Any, start: str, objective: str, tmp_path: Path
) -> None:
    config = of(objective, start)
    whole = train.train(network, Texts(), config, tmp_path / "whole")
    asked = iter([False, False, True])
    part = train.train(network, Texts(), config, tmp_path / "part", stop=lambda: next(asked))
    assert (part.finished, part.steps) == (False, 2)
    assert train.config_of(tmp_path / "part") is not None
    rest = train.train(network, Texts(), config, tmp_path / "part", resume=True)
    assert (rest.finished, rest.steps) == (True, whole.steps)
    heads = [RetrievalHead.from_pretrained(tmp_path / x, network) for x in ("whole", "part")]
    for one, other in zip(*(head.parameters() for head in heads), strict=True):
        assert torch.equal(one, other)
    assert not (tmp_path / "part" / train.SNAPSHOT).exists()


def test_a_run_goes_on_with_its_own_texts_only(network: Any, tmp_path: Path) -> None:
    """Other texts were taken without a word."""
    one, other = (FileCorpus(([n] * 200,), f"--data '{n}.txt'") for n in (7, 8))
    train.train(network, one, RECIPE, tmp_path, stop=lambda: True)
    with pytest.raises(
        ConfigError, match=r"made with --data '7.txt' .* --data '8.txt' .* has other"
    ):
        train.train(network, other, RECIPE, tmp_path, resume=True)
    same = FileCorpus(one.texts, "--data 'moved.txt'")
    assert train.train(network, same, RECIPE, tmp_path, resume=True).finished


def test_a_run_goes_on_with_its_own_model_only(network: Any, tmp_path: Path) -> None:
    """A model of the same shape was taken without a word."""
    train.train(network, Texts(), RECIPE, tmp_path, stop=lambda: True)
    other = make_network(network.config, seed=1)
    with pytest.raises(ConfigError, match="made for a model with other weights, or for this one"):
        train.train(other, Texts(), RECIPE, tmp_path, resume=True)
    assert train.train(copy.deepcopy(network), Texts(), RECIPE, tmp_path, resume=True).finished


def test_the_figures_go_on_with_the_run(network: Any, tmp_path: Path) -> None:
    """The smoothed loss began anew, and a run stopped before its first step had none at all."""
    whole = train.train(network, Texts(), RECIPE, tmp_path / "whole")
    asked = iter([False, False, True])
    train.train(network, Texts(), RECIPE, tmp_path / "part", stop=lambda: next(asked))
    train.train(network, Texts(), RECIPE, tmp_path / "part", resume=True, stop=lambda: True)
    rest = train.train(network, Texts(), RECIPE, tmp_path / "part", resume=True)
    assert (rest.loss, rest.recall, rest.window) == (whole.loss, whole.recall, whole.window)


def test_a_folder_in_use_is_not_written_over(network: Any, tmp_path: Path) -> None:
    train.train(network, Texts(), RECIPE, tmp_path / "run", stop=lambda: True)
    with pytest.raises(ConfigError, match="has an unfinished run; continue it with --resume"):
        train.train(network, Texts(), RECIPE, tmp_path / "run")
    other = dataclasses.replace(RECIPE, seed=1)
    with pytest.raises(ConfigError, match="seed 1 must be 0, as in the run"):
        train.train(network, Texts(), other, tmp_path / "run", resume=True)
    bigger = make_network(make_config("llama_group4"))
    with pytest.raises(ConfigError, match=r"learning_rate .* must be"):
        train.train(bigger, Texts(), RECIPE, tmp_path / "run", resume=True)
    older = torch.load(tmp_path / "run" / train.SNAPSHOT)
    older["optimizer"] = older.pop("optimizers")[0]
    train.save(tmp_path / "run", older)
    with pytest.raises(ConfigError, match="made by another version of Keyhole"):
        train.train(network, Texts(), RECIPE, tmp_path / "run", resume=True)
    older["config"] = older["config"] | {"of_another_version": 1}
    train.save(tmp_path / "run", older)
    with pytest.raises(ConfigError, match="made by another version of Keyhole"):
        train.config_of(tmp_path / "run")
    train.save(tmp_path / "run", {"weights": {}})
    with pytest.raises(ConfigError, match="is damaged"):
        train.config_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="has no run to resume"):
        train.train(network, Texts(), RECIPE, tmp_path / "nowhere", resume=True)
    RetrievalHead.random(network).save_pretrained(tmp_path / "head")
    with pytest.raises(ConfigError, match="has a finished head or gate; use another"):
        train.train(network, Texts(), RECIPE, tmp_path / "head")


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\3\4 cut off"])
def test_a_damaged_snapshot_is_refused_in_one_line(
    content: bytes, network: Any, tmp_path: Path
) -> None:
    """It was torch's own text: nothing for an empty file, for others eight lines that advised to
    load it without safety checks.
    """
    (tmp_path / train.SNAPSHOT).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        train.train(network, Texts(), RECIPE, tmp_path, resume=True)
    assert "\n" not in str(refused.value)
    assert "weights_only" not in str(refused.value)
    assert "training.pt' is damaged" in str(refused.value)
    assert "start again in another folder" in str(refused.value)


def test_a_full_disk_is_noticed_before_the_first_step(network: Any, tmp_path: Path) -> None:
    with (
        files_at_most(1000),
        pytest.raises(ConfigError, match=r"the snapshot .*; free disk space, or use another"),
    ):
        train.train(network, Texts(), RECIPE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_training_whose_result_finds_no_room_is_not_lost(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RetrievalHead.save_pretrained

    def without_room(self: RetrievalHead, path: Path) -> None:
        with files_at_most(1000):
            write(self, path)

    monkeypatch.setattr(RetrievalHead, "save_pretrained", without_room)
    with pytest.raises(ConfigError, match="the head cannot be written to"):
        train.train(network, Texts(), RECIPE, tmp_path)
    monkeypatch.undo()
    rest = train.train(network, Texts(), RECIPE, tmp_path, resume=True)
    assert rest.finished
    assert RetrievalHead.from_pretrained(tmp_path, network).config.feature_layers == (1, 2, 3)


def test_nan_stops_a_training_and_nothing_is_lost(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Distiller._loss

    def bad(self: Distiller, targets: Any, rng: Random) -> Any:
        loss, found = good(self, targets, rng)
        return (loss * float("nan") if self.step == 3 else loss), found

    monkeypatch.setattr(Distiller, "_loss", bad)
    with pytest.raises(
        NumericalError, match=r"in step 3 the loss is nan .* the previous step is saved"
    ):
        train.train(network, Texts(), RECIPE, tmp_path)
    monkeypatch.setattr(Distiller, "_loss", good)
    rest = train.train(network, Texts(), RECIPE, tmp_path, resume=True)
    whole = train.train(network, Texts(), RECIPE, tmp_path / "whole")
    assert rest.finished
    assert rest.steps == whole.steps
    heads = [RetrievalHead.from_pretrained(x, network) for x in (tmp_path, tmp_path / "whole")]
    assert torch.equal(heads[0].q.weight, heads[1].q.weight)


def test_settings_that_cannot_be_are_named(network: Any, start: str) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'eagle'"):
        TrainingConfig(objective="eagel")
    with pytest.raises(ConfigError, match="learning_rate 0 must be"):
        TrainingConfig(learning_rate=0)
    with pytest.raises(ConfigError, match="length 20 must be >= 96"):
        TrainingConfig(length=20)
    with pytest.raises(ConfigError, match="length 1000 must be at most 512"):
        Distiller(network, Texts(), TrainingConfig(length=1000))
    with pytest.raises(ConfigError, match="--objective selection requires --start"):
        TrainingConfig(objective="selection")
    for objective in ("attention", "gate"):
        with pytest.raises(ConfigError, match=r"--start .* requires --objective sel.* or eagle"):
            TrainingConfig(objective=objective, start=start)
    with pytest.raises(ConfigError, match="attention_weight -1 must be a number >= 0"):
        TrainingConfig(objective="eagle", attention_weight=-1)
    for settings in ({"objective": "attention"}, {"objective": "eagle", "inputs": "tokens"}):
        with pytest.raises(ConfigError, match=r"--attention-weight .* requires --objective eagle"):
            TrainingConfig(**settings, attention_weight=0.5)
    fewer = TrainingConfig(objective="selection", start=start, feature_layers=(1, 2))
    with pytest.raises(ConfigError, match=r"feature_layers \(1, 2\) must be \(1, 2, 3\), as in"):
        Distiller(network, Texts(), fewer)
    with pytest.raises(ConfigError, match=r"feature_layers \(1, 4\) must be layers of 0 to 3"):
        Distiller(network, Texts(), TrainingConfig(feature_layers=(1, 4)))


def test_steps_beyond_the_shortest_text_are_refused(network: Any) -> None:
    """The loss was NaN, as of weights that had run away."""
    with pytest.raises(ConfigError, match="unroll_steps 96 must be below 96, the tokens of"):
        TrainingConfig(objective="eagle", unroll_steps=96)
    longest = TrainingConfig(objective="eagle", unroll_steps=95, length=96, batch_tokens=96)
    assert math.isfinite(Distiller(network, Texts(), longest).train_step().loss)


def test_texts_without_tokens_to_select_are_refused(network: Any) -> None:
    """Texts of 64 tokens lie within sinks and window: the loss was 0, and nothing was learned."""
    with pytest.raises(ConfigError, match="length 64 must be >= 96"):
        TrainingConfig(length=64)
    short = make_network(make_config("llama", max_position_embeddings=64))
    with pytest.raises(ConfigError, match="length 64 must be >= 96"):
        Distiller(short, Texts(), TrainingConfig())
    shortest = Distiller(network, Texts(), TrainingConfig(length=96, batch_tokens=96))
    assert shortest.train_step().loss > 0.01


def test_the_rate_rises_and_falls() -> None:
    rates = [rate(done / 100) for done in range(101)]
    assert rates[0] < rates[1] < rates[2] > rates[50] > rates[100] > 0
    assert max(rates) <= 1
