"""Forced text: the likelihoods are the model's own, and only what was decoded counts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from keyhole import Full, Quest, StreamingLLM
from keyhole.config import EngineConfig
from keyhole.engine.engine import Engine
from keyhole.errors import ConfigError, NumericalError
from keyhole.eval.forced_text import (
    CONTINUATION,
    Perplexity,
    WindowedText,
    forced,
    likelihood_fields,
)
from keyhole.eval.run import model_digest
from keyhole.eval.suite import make_workloads
from keyhole.eval.workload import MakeEngine
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import BOS, make_config, make_model, make_network

CONFIG = EngineConfig(max_batch=3, page_size=4, prefill_chunk=50, prefix_cache=False)
LENGTH, SAMPLES = 96, 4
STEPS = 24
#: float32 logits below 10, over keys and values in pages, beside those of transformers.
TOLERANCE = 1e-5


def engines(model: Model) -> MakeEngine:
    return lambda policy: Engine(model, policy, CONFIG)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return load(make_model("llama", folder, tokenizer=True), device="cpu")


@pytest.fixture(scope="module")
def text(model: Model, tmp_path_factory: pytest.TempPathFactory) -> WindowedText:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n * n % 97} apples, {n} pears; " for n in range(60)))
    return WindowedText(path, model)


def test_windows_follow_each_other_and_begin_as_a_text_does(
    model: Model, text: WindowedText
) -> None:
    ids = model.tokenizer(Path(text.path).read_text()).input_ids
    assert ids[0] == BOS
    assert text.windows(LENGTH) == (len(ids) - 1) // (LENGTH - 1)
    assert text.window(LENGTH, 1) == [BOS, *ids[LENGTH : 2 * LENGTH - 1]]


@pytest.mark.parametrize("length", [16, 63, 512, 4096])
def test_all_but_the_last_token_of_the_continuation_are_forced(length: int) -> None:
    window = list(range(length))
    request = forced(window)
    assert [*request.prompt, *request.given, length - 1] == window
    assert len(request.given) == min(CONTINUATION, length // 4)


@pytest.mark.slow
def test_full_attention_gives_the_models_own_likelihood(model: Model, text: WindowedText) -> None:
    found = Perplexity(text).measure(engines(model), Full(), LENGTH, "prompt", SAMPLES)
    network = make_network(make_config("llama"))
    wanted = []
    for number in range(SAMPLES):
        window = text.window(LENGTH, number)
        with torch.no_grad():
            logits = network(torch.tensor([window])).logits[0].double()
        chances = [logits[i].log_softmax(0)[window[i + 1]] for i in range(LENGTH - 1)]
        wanted.append(-float(sum(chances[-STEPS:])) / STEPS)
    assert found["nlls"] == pytest.approx(wanted, abs=TOLERANCE)
    assert found["nll"] == pytest.approx(sum(wanted) / SAMPLES, abs=TOLERANCE)
    assert found["perplexity"] == pytest.approx(math.exp(sum(wanted) / SAMPLES), rel=TOLERANCE)
    assert found["scores"] == pytest.approx([math.exp(-nll) for nll in wanted], rel=TOLERANCE)
    assert found["tokens_generated"] == STEPS
    assert found["decode_steps"] == STEPS * SAMPLES
    assert found["read_share"] == 1


@pytest.mark.slow
def test_what_is_not_read_costs_likelihood(model: Model, text: WindowedText) -> None:
    task, make_engine = Perplexity(text), engines(model)
    full = task.measure(make_engine, Full(), LENGTH, "prompt", SAMPLES)
    covering = Quest(token_budget=LENGTH, full_layers=())
    same = task.measure(make_engine, covering, LENGTH, "prompt", SAMPLES)
    assert same["nlls"] == pytest.approx(full["nlls"], abs=TOLERANCE)
    little = task.measure(make_engine, StreamingLLM(token_budget=8), LENGTH, "prompt", 2)
    difference = task.beside(little, full)["nll_over_full"]
    assert difference == pytest.approx(little["nll"] - sum(full["nlls"][:2]) / 2)
    assert abs(difference) > 1e-2
    assert little["read_share"] < 0.12


def test_texts_that_are_too_short_are_refused(
    model: Model, text: WindowedText, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"length 5000 is more than the \d+ tokens of --text"):
        text.windows(5000)
    with pytest.raises(ConfigError, match="length 15 must be at least 16"):
        text.windows(15)
    with pytest.raises(ConfigError, match=r"--text '.*gone.txt' cannot be read"):
        WindowedText(tmp_path / "gone.txt", model)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        WindowedText(text.path, dataclasses.replace(model, tokenizer=None))


def test_another_text_is_another_task(model: Model, text: WindowedText, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("another text " * 20)
    assert Perplexity(WindowedText(other, model)).settings != Perplexity(text).settings
    copy = tmp_path / "copy.txt"
    copy.write_text(Path(text.path).read_text())
    assert Perplexity(WindowedText(copy, model)).settings == Perplexity(text).settings
    assert model_digest(model) == model_digest(dataclasses.replace(model, name="renamed"))


def test_a_first_seed_begins_with_a_later_window(model: Model, text: WindowedText) -> None:
    """It was ignored: the second, independent set of samples had the windows of the first."""
    make_engine, last = engines(model), text.windows(LENGTH) - 1
    every = Perplexity(text).measure(make_engine, Full(), LENGTH, "prompt", last + 1)
    later = Perplexity(text, last - 1)
    assert later.settings == Perplexity(text).settings | {"first_seed": last - 1}
    assert later.available(LENGTH, 16) == 2
    found = later.measure(make_engine, Full(), LENGTH, "prompt", 2)
    assert found["nlls"] == pytest.approx(every["nlls"][-2:], abs=TOLERANCE)
    assert (
        later.shown(LENGTH, "prompt").request.prompt == forced(text.window(LENGTH, last - 1)).prompt
    )
    with pytest.raises(ConfigError, match=f"first_seed {last + 1} must be below {last + 1}, the"):
        Perplexity(text, last + 1).available(LENGTH, 16)


@pytest.mark.parametrize("nll", [800.0, math.inf, math.nan])
def test_a_text_without_a_perplexity_refuses_its_cell(nll: float) -> None:
    """It ended the evaluation, by an OverflowError or when the line was stored."""
    with pytest.raises(NumericalError, match=f"{nll:g} nats per token, which must be at most 700"):
        likelihood_fields([1.0, nll])


def test_the_first_seed_of_an_evaluation_reaches_tasks_over_texts(model: Model) -> None:
    for workload in make_workloads(["perplexity", "attention_recall"], None, model, 7):
        assert workload.settings["first_seed"] == 7
