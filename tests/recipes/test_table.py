"""The table of what the bundled model can do."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import keyhole
from keyhole.eval.comparisons import wilson
from keyhole.eval.tiny_language.tasks import HOP_TASKS, TASKS, is_correct, make, shared
from recipes.tiny_model import examination


def test_intervals_are_wilsons() -> None:
    # Wilson's score interval at z = 1.96, to the four digits written here.
    # The published values have four digits.
    assert wilson(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert wilson(0, 100) == pytest.approx((0.0, 0.0370), abs=1e-4)
    assert wilson(100, 100) == pytest.approx((0.9630, 1.0), abs=1e-4)


@pytest.mark.slow
def test_a_reader_agrees_with_greedy_generation() -> None:
    checkpoint = Path(keyhole.tiny())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    reader = examination.ContextReader(checkpoint)
    asked = [shared(256, 3), [make("derive", 128, 1)], [make("walk", 256, 2)]]
    for items in asked:
        generated = []
        for item in items:
            ids = torch.tensor([tokenizer(item.prompt).input_ids])
            room = len(item.answer.split()) + 1
            out = model.generate(ids, max_new_tokens=room, do_sample=False)[0, ids.shape[1] :]
            ended = out[-1] == model.config.eos_token_id
            generated.append(bool(ended) and is_correct(item, tokenizer.decode(out)))
        assert reader.right(items) == generated


def test_the_models_table_has_every_task_and_length_with_100_items() -> None:
    found = json.loads((Path(keyhole.tiny()) / examination.RESULTS).read_text())
    assert {cell["length"] for cell in found} == set(examination.LENGTHS)
    assert {cell["task"] for cell in found} == set(TASKS) - set(HOP_TASKS)
    assert all(cell["items"] >= 100 for cell in found)


def test_a_share_under_nine_tenths_is_marked() -> None:
    text = examination.render(
        [
            {"task": "recall", "length": 512, "items": 100, "right": 95},
            {"task": "derive", "length": 512, "items": 100, "right": 89},
        ]
    )
    assert "| recall | 95% (89%–98%) |" in text
    assert "| derive | **89%** (81%–94%) |" in text


def test_the_card_of_the_model_shows_its_stored_results() -> None:
    folder = Path(keyhole.tiny())
    found = json.loads((folder / examination.RESULTS).read_text())
    text = (folder / examination.CARD).read_text()
    assert examination.card(text, found) == text
