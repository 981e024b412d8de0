"""`keyhole verify --weights`: perplexity and logits of the packed and of the stored model."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from keyhole.eval import weight_error
from keyhole.models.loading import load
from keyhole.retrieval.training.training_config import FileCorpus
from tests.checkpoints import make_model

FORMATS = ("int8", "int4:group_size=32", "int4")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    return make_model("llama", folder, tokenizer=True, initializer_range=0.1, **SIZES)


def test_perplexity_is_that_of_transformers(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_error, "_TEXTS", 2)
    text = torch.randint(3, 250, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = weight_error.plain_run(load(folder, "cpu"), FileCorpus((text,), "one text"))
    found = weight_error.weight_error(plain, load(folder, "cpu", weights="int4"))
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses = []
    for tokens in plain.texts:
        ids = torch.tensor([tokens])
        losses.append(float(network(ids, labels=ids).loss.detach()))
    # float32 losses of another implementation of attention, in an exponent.
    assert found.plain_perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert found.perplexity != found.plain_perplexity
    assert found.change == pytest.approx(found.perplexity / found.plain_perplexity - 1)
    assert found.tokens == sum(len(tokens) - 1 for tokens in plain.texts)
    assert found.source == "one text"


@pytest.mark.slow
def test_more_bits_are_closer(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On texts that the model as stored sampled, of which it is the best model."""
    monkeypatch.setattr(weight_error, "_LENGTH", 64)
    plain = weight_error.plain_run(load(folder, "cpu"), None)
    assert [len(text) for text in plain.texts] == [64] * 8
    same = weight_error.weight_error(plain, load(folder, "cpu"))
    assert (same.logit_error, same.change, same.same_tokens) == (0.0, 0.0, 1.0)
    found = {w: weight_error.weight_error(plain, load(folder, "cpu", weights=w)) for w in FORMATS}
    errors = [found[w].logit_error for w in FORMATS]
    assert errors == sorted(errors)
    assert errors[0] < 0.05 < errors[-1] < 1
    divergences = [found[w].divergence for w in FORMATS]
    assert 0 < divergences[0] < divergences[-1]
