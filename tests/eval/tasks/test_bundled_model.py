"""The bundled model, reading everything, answers the forms that were made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import keyhole
from keyhole.eval.tasks import TINY_FORMS, make_task, token_counter

FOLDER = Path(keyhole.tiny())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*TINY_FORMS.values(), "tiny_reference"}))
def test_it_solves_short_samples(name: str, model: Any, tokenizer: Any) -> None:
    task = make_task(name)
    sample = task.make(1024, 0, token_counter(tokenizer))
    prompt = tokenizer(sample.prompt).input_ids
    answer = tokenizer(sample.answers[0], add_special_tokens=False).input_ids
    with torch.no_grad():
        ids = torch.tensor([prompt + answer[:-1]])
        wrote = model(ids, logits_to_keep=len(answer)).logits[0].argmax(-1)
    assert task.score(sample, tokenizer.decode(wrote)) == 1.0
