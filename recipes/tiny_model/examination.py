"""How well the model in training does: the share of items answered exactly right, by task.

The right answer is put in front of the model and every word of it must be the model's first
choice. That is the same as greedy generation giving the right answer, in one forward pass.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig

from keyhole.eval.tiny_language.curriculum import TrainingBatch
from keyhole.eval.tiny_language.tasks import TASKS, Item, make
from keyhole.eval.tiny_language.vocabulary import BOS, EOS, PAD, WORD_IDS
from recipes.tiny_model.network import supervised_logits

_FIRST_SEED = 1_000_000
"""Items of the examination; evaluations count from 0."""
_TOKENS = 8192
"""Tokens per forward pass."""


def batch_of_items(items: list[Item]) -> TrainingBatch:
    """Give items with their answers as rows, padded at the end to the longest one."""
    rows, marks = [], []
    for item in items:
        prompt = [WORD_IDS[word] for word in [BOS, *item.prompt.split()]]
        answer = [WORD_IDS[word] for word in [*item.answer.split(), EOS]]
        rows.append(prompt + answer)
        marks.append(range(len(prompt) - 1, len(prompt) + len(answer) - 1))
    length = max(map(len, rows))
    tokens = torch.tensor([row + [WORD_IDS[PAD]] * (length - len(row)) for row in rows])
    places = torch.tensor([n * length + at for n, mark in enumerate(marks) for at in mark])
    return TrainingBatch(
        tokens=tokens,
        positions=torch.arange(length).expand(len(rows), length),
        supervised=places,
        targets=tokens.flatten()[places + 1],
    )


def exactly_right(
    weights: dict[str, Tensor], config: LlamaConfig, items: list[Item], dtype: torch.dtype
) -> list[bool]:
    """Tell for each item whether greedy generation would give its whole answer."""
    device = weights["model.norm.weight"].device
    batch = batch_of_items(items).to(device)
    with torch.no_grad():
        logits = supervised_logits(weights, batch, config, dtype)
    wrong = batch.supervised[logits.argmax(-1) != batch.targets] // batch.tokens.shape[1]
    failed = set(wrong.tolist())
    return [row not in failed for row in range(len(items))]


def examine(
    weights: dict[str, Tensor],
    config: LlamaConfig,
    length: int,
    *,
    num_items: int,
    dtype: torch.dtype,
    part: int = 0,
    parts: int = 1,
) -> Tensor:
    """Count the right answers per task, `[tasks]`, among this part's share of the items."""
    counts = torch.zeros(len(TASKS))
    at_once = max(1, _TOKENS // length)
    for row, task in enumerate(TASKS):
        items = [make(task, length, _FIRST_SEED + n) for n in range(part, num_items, parts)]
        for start in range(0, len(items), at_once):
            some = items[start : start + at_once]
            counts[row] += sum(exactly_right(weights, config, some, dtype))
    return counts
