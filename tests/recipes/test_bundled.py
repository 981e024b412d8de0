"""The model that lies in the package, as it is shipped."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

import keyhole
from keyhole.eval.demo import items
from keyhole.eval.tiny_language.tasks import HOP_TASKS, TASKS, make
from keyhole.eval.tiny_language.world import WORD_IDS
from recipes.tiny_model.examination import exactly_right

FOLDER = Path(keyhole.tiny())


def test_its_tokenizer_has_the_words_of_the_tasks():
    assert AutoTokenizer.from_pretrained(FOLDER).get_vocab() == WORD_IDS


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [t for t in TASKS if t not in ("count", *HOP_TASKS)]
)  # see the card
def test_it_answers_from_its_context(task):
    weights = load_file(FOLDER / "model.safetensors")
    items = [make(task, 256, seed) for seed in range(8)]
    right = exactly_right(weights, AutoConfig.from_pretrained(FOLDER), items, torch.float32)
    assert sum(right) >= 7


def test_full_attention_is_right_on_the_tasks_of_the_demonstration():
    weights, config = load_file(FOLDER / "model.safetensors"), AutoConfig.from_pretrained(FOLDER)
    assert all(exactly_right(weights, config, [item], torch.float32)[0] for item in items())
