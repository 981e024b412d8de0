"""Evaluates a model: the share of items answered exactly right, by task.

    python -m recipes.tiny_model.examination [--checkpoint DIR] [--items 100]

The right answer is appended to the prompt, and each of its words must be the model's first choice.
One forward pass then gives the same verdict as greedy generation. Training uses this as its
examination. The command fills the table of the bundled model's card, task by length. The model runs
in transformers alone, so the table is independent of our engine. Questions of eight tasks share
one context, which is read once. Every finished cell is saved, and the command resumes where it
stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from keyhole.cache.argument import cache_argument
from keyhole.eval.comparisons import wilson
from keyhole.eval.tiny_language.tasks import HOP_TASKS, TASKS, Item, make, shared
from keyhole.eval.tiny_language.world import BOS, EOS, PAD, WORD_IDS
from keyhole.models.locate import TINY_FOLDER
from recipes.tiny_model.curriculum import TrainingBatch
from recipes.tiny_model.network import supervised_logits

_FIRST_SEED = 1_000_000
"""Items of the examination; evaluations count from 0."""
_TOKENS = 8192
"""Tokens per forward pass."""


def batch_of_items(items: list[Item]) -> TrainingBatch:
    """Return items with their answers as rows, padded at the end to the longest one."""
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
    """Return for each item whether greedy generation would give its whole answer."""
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
    """Count the right answers per task, `[tasks]`, among this process's share of the items."""
    counts = torch.zeros(len(TASKS))
    at_once = max(1, _TOKENS // length)
    for row, task in enumerate(TASKS):
        items = [make(task, length, _FIRST_SEED + n) for n in range(part, num_items, parts)]
        for start in range(0, len(items), at_once):
            some = items[start : start + at_once]
            counts[row] += sum(exactly_right(weights, config, some, dtype))
    return counts


LENGTHS = (512, 1024, 2048, 4096, 8192)
RESULTS = "results.json"
CARD = "README.md"
_BEGIN, _END = "<!-- table -->", "<!-- end of table -->"
_DEFAULT = TINY_FOLDER
_ALONE = ("recall", "multikey", "walk", "derive", *HOP_TASKS)
"""Tasks with a context of their own."""
_LAST_SHARED = "majority"
"""The task of the shared context that is written down last."""
_LONGEST_WALK = 2048
"""Words of a walk through all names there are; longer texts would be the same."""


class ContextReader:
    """The model and the context that it has read."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def right(self, items: Iterable[Item]) -> list[bool]:
        """Return for each item whether its whole answer is right; all must share one context."""
        items = list(items)
        context = _ids(f"{BOS} {items[0].context}")
        past = DynamicCache(config=self._model.config)
        self._read(context, past, 1)
        return [self._answers(item, past) for item in items]

    def _answers(self, item: Item, past: Any) -> bool:
        question, answer = _ids(item.question), _ids(f"{item.answer} {EOS}")
        tokens = question + answer[:-1]
        logits = self._read(tokens, past, len(answer))
        past.crop(-len(tokens))
        return bool(logits.argmax(-1).tolist() == answer)

    def _read(self, tokens: list[int], past: Any, last: int) -> Tensor:
        """Adds tokens to the context; logits [last, vocabulary] of the last ones."""
        given = {cache_argument(self._model): past}
        logits: Tensor = self._model(torch.tensor([tokens]), **given, logits_to_keep=last).logits[0]
        return logits


def table_cells(
    reader: ContextReader, length: int, items: int, known: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the cells of one length as they finish, except for the known tasks."""
    together: dict[str, list[bool]] = {}
    for seed in _bar(0 if _LAST_SHARED in known else items, f"shared {length}"):
        asked = shared(length, seed)
        for item, correct in zip(asked, reader.right(asked), strict=True):
            # For the task docs1 the shared context is cut into documents.
            task = "docs1" if item.task == "recall" else item.task
            together.setdefault(task, []).append(correct)
    for task, right in together.items():
        yield _cell(task, length, right)
    for task in _ALONE:
        if task in known or (task == "walk" and length > _LONGEST_WALK):
            continue
        found = [reader.right([make(task, length, n)])[0] for n in _bar(items, f"{task} {length}")]
        yield _cell(task, length, found)


def _cell(task: str, length: int, right: list[bool]) -> dict[str, Any]:
    return {"task": task, "length": length, "items": len(right), "right": sum(right)}


def _bar(items: int, what: str) -> Iterator[int]:
    yield from tqdm(range(items), desc=what, unit="item", disable=None, leave=False)


def _ids(text: str) -> list[int]:
    return [WORD_IDS[word] for word in text.split()]


def render(found: list[dict[str, Any]]) -> str:
    """Return the table as Markdown: percent right and its 95 % interval; bold below 90 %."""
    known = {(cell["task"], cell["length"]): cell for cell in found}
    lengths = sorted({cell["length"] for cell in found})
    lines = ["| task | " + " | ".join(map(str, lengths)) + " |", "|---" * (len(lengths) + 1) + "|"]
    for task in TASKS:
        row = [_entry(known[task, n]) if (task, n) in known else "" for n in lengths]
        if any(row):
            lines.append(f"| {task} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def card(text: str, found: list[dict[str, Any]]) -> str:
    """Return a model card with the table between its two marks replaced."""
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{render(found)}{_END}{rest.partition(_END)[2]}"


def _entry(cell: dict[str, Any]) -> str:
    share = cell["right"] / cell["items"]
    low, high = wilson(cell["right"], cell["items"])
    text = f"{share:.0%}" if share >= 0.9 else f"**{share:.0%}**"
    return f"{text} ({low:.0%}–{high:.0%})"


def main() -> None:
    """Measure the missing cells and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=_DEFAULT)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    arguments = parser.parse_args()
    path = arguments.checkpoint / RESULTS
    found = json.loads(path.read_text()) if path.is_file() else []
    reader = ContextReader(arguments.checkpoint)
    for length in arguments.lengths:
        known = {cell["task"] for cell in found if cell["length"] == length}
        for cell in table_cells(reader, length, arguments.items, known):
            found.append(cell)
            found.sort(key=lambda cell: (cell["length"], TASKS.index(cell["task"])))
            path.write_text(json.dumps(found, indent=1) + "\n")
    readme = arguments.checkpoint / CARD
    if readme.is_file():
        readme.write_text(card(readme.read_text(), found))
    print(render(found))


if __name__ == "__main__":
    main()
