"""The model that lies in the package, as it is shipped."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

import keyhole.models.tiny
from keyhole.evaluate.demo import items
from keyhole.models.tiny.examination import exactly_right
from keyhole.models.tiny.tasks import TASKS, make
from keyhole.models.tiny.vocabulary import WORD_IDS

FOLDER = Path(keyhole.models.tiny.__file__).with_name("keyhole-tiny")


def test_its_tokenizer_has_the_words_of_the_tasks():
    assert AutoTokenizer.from_pretrained(FOLDER).get_vocab() == WORD_IDS


@pytest.mark.parametrize("task", [task for task in TASKS if task != "count"])  # see the card
def test_it_answers_from_its_context(task):
    weights = load_file(FOLDER / "model.safetensors")
    items = [make(task, 256, seed) for seed in range(8)]
    right = exactly_right(weights, AutoConfig.from_pretrained(FOLDER), items, torch.float32)
    assert sum(right) >= 7


def test_full_attention_is_right_on_the_tasks_of_the_demonstration():
    weights, config = load_file(FOLDER / "model.safetensors"), AutoConfig.from_pretrained(FOLDER)
    assert all(exactly_right(weights, config, [item], torch.float32)[0] for item in items())
