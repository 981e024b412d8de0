"""The models that resolve two facts in one step: the bundled one, and two seeds from scratch."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

import recipes.tiny_model
from keyhole.eval.tiny_language.tasks import make
from keyhole.eval.tiny_language.world import WORD_IDS
from keyhole.models.locate import named
from recipes.tiny_model.examination import CARD, RESULTS, card, exactly_right

RECIPES = Path(recipes.tiny_model.__file__).parent
FOLDERS = (
    Path(named("tiny-hops")),
    RECIPES / "keyhole-scratch",
    RECIPES / "keyhole-scratch-1",
)


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_its_tokenizer_has_the_words_of_the_tasks(folder: Path) -> None:
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == WORD_IDS


@pytest.mark.slow
@pytest.mark.parametrize("task", ["recall", "vartrack", "docs2", "walk", "derive", "walk2"])
def test_it_answers_from_its_context(folder: Path, task: str) -> None:
    weights = load_file(folder / "model.safetensors")
    items = [make(task, 256, seed) for seed in range(8)]
    right = exactly_right(weights, AutoConfig.from_pretrained(folder), items, torch.float32)
    assert sum(right) >= 7


def test_the_name_between_is_not_written() -> None:
    """So a step of `walk2` needs two facts, and the first one names the second."""
    item = make("walk2", 256, 0)
    rules = [words.split() for words in item.context.removeprefix("rules :").split(" .")]
    follows = {rule[0]: rule[2] for rule in rules if rule[1:2] == ["follows"]}
    steps = [words.split() for words in item.answer.split(" .")[:-1]]
    assert len(steps) == len(follows)
    for name, _, reached in steps:
        assert reached == follows[follows[name]]
        assert follows[name] not in (name, reached)


def test_its_card_shows_its_stored_results(folder: Path) -> None:
    text = (folder / CARD).read_text()
    assert card(text, json.loads((folder / RESULTS).read_text())) == text
