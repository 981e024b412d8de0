"""A cell of an evaluation: samples of a task answered under a press, as one line of results.

Samples, their tokens and the fields of a line are those of `keyhole eval`, so that lines of both
stand in one file. What differs is what a press is: in setup `prompt` it sees the question, in setup
`question` only the context, which is kvpress's own usage; and decode steps are those of the answer
alone, as the question is computed in one forward.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import shlex
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import keyhole
from keyhole.bench import measure
from keyhole.config import is_count, require
from keyhole.engine.fingerprint import fingerprint
from keyhole.errors import ConfigError, ModelError, UnknownNameError
from keyhole.evaluate.tasks import Sample, Task, token_counter
from keyhole.integrations.kvpress.answer import Answer, CompressedModel
from keyhole.integrations.kvpress.presses import Press
from keyhole.models.loading import Model

#: What is pressed: the whole prompt (A), or the context without the question (B).
SETUPS = ("prompt", "question")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is measured; `samples` are those with the numbers from 0 on."""

    task: Task
    length: int
    setup: str
    press: Press
    samples: int

    def __post_init__(self) -> None:
        require(is_count(self.samples), "samples", self.samples, "at least 1")
        if self.setup not in SETUPS:
            raise UnknownNameError("setup", self.setup, SETUPS)


class Evaluation:
    """A loaded model for any number of cells."""

    def __init__(self, model: Model) -> None:
        if model.tokenizer is None:
            raise ModelError(f"{model.name!r} has no tokenizer, and tasks are texts")
        self._model, self._compressed = model, CompressedModel(model)
        self._count = token_counter(model.tokenizer)
        digest = json.dumps(fingerprint(model), sort_keys=True)
        self._fingerprint = hashlib.sha256(digest.encode()).hexdigest()[:16]
        self._sample = functools.cache(self._make)  # the same ones under every press

    def line(self, cell: Cell) -> dict[str, Any]:
        """Runs a cell; ConfigError, before it runs, for one that cannot be."""
        if cell.length > self._model.max_length:
            raise ConfigError(
                f"length {cell.length} is more than the {self._model.max_length} tokens that "
                f"{self._model.name} takes ({self._model.length_reason})"
            )
        samples = [self._sample(cell.task, cell.length, seed) for seed in range(cell.samples)]
        prompts = [self._split(sample, cell.setup) for sample in samples]
        for context, question in prompts:
            cell.press.prefill(len(context), len(question))
        answers = [
            self._compressed.answer(cell.press, *prompt, sample.max_new_tokens)
            for sample, prompt in zip(samples, prompts, strict=True)
        ]
        scores = [
            cell.task.score(sample, self._text(answer.tokens))
            for sample, answer in zip(samples, answers, strict=True)
        ]
        one_each = all(len(sample.depths) == 1 for sample in samples)
        return {
            **self._header(),
            **self._about(cell),
            "score": statistics.fmean(scores),
            "scores": scores,
            "depths": [sample.depths[0] for sample in samples] if one_each else None,
            "tokens_prompt": statistics.fmean(len(a) + len(b) for a, b in prompts),
            **_costs(answers),
            "recall_per_layer": None,
            "selection_maps": None,
        }

    def _make(self, task: Task, length: int, seed: int) -> Sample:
        return task.make(length, seed, self._count)

    def _split(self, sample: Sample, setup: str) -> tuple[list[int], list[int]]:
        """What is pressed and what follows: the same tokens in both setups, as in `keyhole eval`.

        A token that holds letters of both belongs to the question; so does what a tokenizer puts
        behind a whole text.
        """
        tokens, end = self._ids(sample.prompt), 0
        if setup == "prompt":
            return tokens, []
        for a, b in zip(tokens, self._ids(sample.context), strict=False):
            if a != b:
                break
            end += 1
        return tokens[: max(1, end)], tokens[max(1, end) :]

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._model.tokenizer(text, verbose=False).input_ids]

    def _text(self, tokens: list[int]) -> str:
        return str(self._model.tokenizer.decode(tokens, skip_special_tokens=True))

    def _header(self) -> dict[str, Any]:
        header = measure.header("eval", self._model.device, "", keyhole.__version__)
        header["command"] = shlex.join(
            ["python", "-m", "keyhole.integrations.kvpress", *sys.argv[1:]]
        )
        header["versions"]["kvpress"] = importlib.metadata.version("kvpress")
        return header

    def _about(self, cell: Cell) -> dict[str, Any]:
        """What a cell is known by."""
        press, task = cell.press, cell.task
        told = [f.name for f in dataclasses.fields(task) if "help" in f.metadata]
        name = f"kvpress:{press.name}"
        return {
            "model": self._model.name,
            "method": name,
            "samples": cell.samples,
            "fingerprint": self._fingerprint,
            "task": task.name,
            "task_settings": {one: getattr(task, one) for one in told},
            "length": cell.length,
            "setup": cell.setup,
            "policy": name,
            "settings": {**press.settings, "interval": press.interval},
            "budget": press.budget,
            "engine": {"max_batch": 1, "attention": press.attention},
        }


def _costs(answers: list[Answer]) -> dict[str, Any]:
    """Means over all decode steps, the median time of one, and the largest cache."""
    shares = [share for answer in answers for share in answer.read_shares]
    read = [count for answer in answers for count in answer.bytes_read]
    times = [spent for answer in answers for spent in answer.step_ms]
    return {
        "tokens_generated": statistics.fmean(len(answer.tokens) for answer in answers),
        "decode_steps": len(times),
        "read_share": statistics.fmean(shares) if shares else None,
        "bytes_per_step": statistics.fmean(read) if read else None,
        "step_ms": statistics.median(times) if times else None,
        "peak_bytes": max(answer.peak_bytes for answer in answers),
    }
