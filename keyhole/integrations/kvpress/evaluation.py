"""A cell of an evaluation: samples of a task answered under a press, as one line of results.

Samples, their tokens and the fields of a line are those of `keyhole eval`, so that lines of both
stand in one file. What differs is what a press is: in setup `prompt` it sees the question, in setup
`question` only the context, which is kvpress's own usage; and decode steps are those of the answer
alone, as the question is computed in one forward.
"""

from __future__ import annotations

import functools
import importlib.metadata
import shlex
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import keyhole
from keyhole.bench import measure
from keyhole.config import is_count, require
from keyhole.errors import ModelError, UnknownNameError
from keyhole.eval.run import as_stored, model_digest, require_length
from keyhole.eval.settings import SETUPS
from keyhole.eval.tasks import Task
from keyhole.eval.workloads.workload import Answered
from keyhole.integrations.kvpress.answer import CompressedModel, PressAnswer
from keyhole.integrations.kvpress.presses import Press
from keyhole.models.loading import Model


@dataclass(frozen=True, kw_only=True)
class PressCell:
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


class PressEvaluation:
    """A loaded model for any number of cells."""

    def __init__(self, model: Model) -> None:
        if model.tokenizer is None:
            raise ModelError(f"{model.name!r} has no tokenizer, and tasks are texts")
        self._model, self._compressed = model, CompressedModel(model)
        self._fingerprint = model_digest(model)
        self._asked = functools.cache(self._make)  # its samples are the same under every press

    def known_by(self, cell: PressCell) -> dict[str, Any]:
        """What a cell is known by: lines that agree in all of it are the same measurement."""
        press, asked = cell.press, self._asked(cell.task)
        return as_stored(
            {
                "fingerprint": self._fingerprint,
                "task": asked.name,
                "task_settings": asked.settings,
                "length": cell.length,
                "setup": cell.setup,
                "policy": f"kvpress:{press.name}",
                "settings": {**press.settings, "interval": press.interval},
                "budget": press.budget,
                "engine": {"max_batch": 1, "attention": press.attention},
            }
        )

    def line(self, cell: PressCell) -> dict[str, Any]:
        """Runs a cell; ConfigError, before it runs, for one that cannot be."""
        require_length(self._model, cell.length)
        asked = self._asked(cell.task)
        samples = asked.samples(cell.length, cell.samples)
        requests = asked.requests(samples, cell.setup)
        for one in requests:
            cell.press.prefill(len(one.prompt), len(one.given))
        answers = [
            self._compressed.answer(cell.press, one.prompt, one.given, one.max_tokens)
            for one in requests
        ]
        known, texts = self.known_by(cell), [self._text(answer.tokens) for answer in answers]
        about = {
            "model": self._model.name,
            "method": known["policy"],
            "samples": cell.samples,
        }
        fields = asked.fields(samples, requests, texts)
        return self._header() | about | fields | _costs(answers) | known

    def _make(self, task: Task) -> Answered:
        return Answered(task, self._model)

    def _text(self, tokens: list[int]) -> str:
        return str(self._model.tokenizer.decode(tokens, skip_special_tokens=True))

    def _header(self) -> dict[str, Any]:
        header = measure.header("eval", self._model.device, "", keyhole.__version__)
        header["command"] = shlex.join(
            ["python", "-m", "keyhole.integrations.kvpress", *sys.argv[1:]]
        )
        header["versions"]["kvpress"] = importlib.metadata.version("kvpress")
        return header


def _costs(answers: list[PressAnswer]) -> dict[str, Any]:
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
