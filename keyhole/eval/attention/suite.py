"""Runs the suite cell by cell; what is stored is not measured again, what is refused is told.

A cell is a policy with its controls at one length and budget, or the overlap of top lists there.
Every cell is measured on the model and then on its random twin, and becomes one line of a file.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from keyhole.engine.shared_prompt_cache import SharedPromptCache
from keyhole.errors import KeyholeError
from keyhole.eval.attention import random_twin
from keyhole.eval.attention.cells import RANDOM, TRAINED, AttentionCell, AttentionGrid
from keyhole.eval.attention.measuring import Measuring
from keyhole.eval.results.line_file import Line, LineFile
from keyhole.eval.run import model_digest, require_length
from keyhole.eval.terms.equal import UnequalTermsError
from keyhole.models.loading import Model


@dataclass(kw_only=True)
class AttentionOutcome:
    """What came of all cells, in their order.

    lines: measured now or before; stored: how many of them before. refused: cells that this model
    cannot have, with the fields that are known of them, and `error`.
    """

    lines: list[Line] = field(default_factory=list)
    stored: int = 0
    refused: list[Line] = field(default_factory=list)


class AttentionSuite:
    """A grid over a model, and the file that its lines go to.

    header: how, where and when, for a line. copies: keep the prompts, with which every cell begins.
    ConfigError, before anything runs, for a length that the model or the texts cannot have.
    """

    def __init__(
        self,
        model: Model,
        grid: AttentionGrid,
        file: LineFile,
        header: Callable[[], dict[str, Any]],
        copies: SharedPromptCache,
    ) -> None:
        for length in grid.lengths:
            require_length(model, length)
            grid.windows.windows(length)
        self._model, self._grid, self._file, self._header = model, grid, file, header
        self._copies = copies
        self._geometry = model.geometry(grid.config.page_size)
        self._digest = model_digest(model)

    def run(self) -> AttentionOutcome:
        """Measures the cells that the file lacks and adds each to it as soon as it is done."""
        outcome, cells = AttentionOutcome(), self._grid.cells(self._geometry)
        gc.freeze()  # what is there now stays, and need not be looked at after each cell
        try:
            with tqdm(total=2 * len(cells), unit="cell", disable=None) as bar:
                for weights in (TRAINED, RANDOM):
                    with self._weights(weights, cells) as model:
                        for cell in cells:
                            bar.set_description(f"{weights} {cell.length} {cell.label}")
                            self._run_cell(model, cell, weights, outcome)
                            bar.update()
        finally:
            gc.unfreeze()
        return outcome

    def _weights(self, weights: str, cells: list[AttentionCell]) -> Any:
        """The model, or its twin; the twin is not made if all of its lines are there."""
        missing = any(cell.error is None and self._stored(cell, weights) is None for cell in cells)
        if weights == RANDOM and missing:
            return random_twin.random_twin(self._model)
        return nullcontext(self._model)

    def _run_cell(
        self, model: Model, cell: AttentionCell, weights: str, outcome: AttentionOutcome
    ) -> None:
        try:
            if cell.error is not None:
                raise cell.error
            line = stored = self._stored(cell, weights)
            if line is None:
                self._file.add(self._header() | self._measured(model, cell, weights))
                line = self._file.lines[-1]
        except KeyholeError as error:
            known = {"weights": weights, "length": cell.length, "budget": cell.budget}
            unequal = isinstance(error, UnequalTermsError)
            told = {"method": cell.label, "error": str(error), "unequal": unequal}
            outcome.refused.append(known | told)
            return
        finally:
            gc.collect()  # engine and scheduler know each other
        outcome.lines.append(line)
        outcome.stored += stored is not None

    def _measured(self, model: Model, cell: AttentionCell, weights: str) -> Line:
        samples = self._grid.samples(cell, weights)
        measuring = Measuring(
            model=model,
            is_twin=weights == RANDOM,
            windows=[self._grid.windows.window(cell.length, i) for i in range(samples)],
            config=self._grid.config,
            copies=self._copies,
        )
        known = self._known(cell, weights)
        about: Line = {
            "model": self._model.name,
            "texts": self._grid.windows.path or self._grid.windows.digest,
            "samples": samples,
            "layers": list(self._geometry.full_attention),
            "method": cell.label,
        }
        if cell.method is None:
            return about | measuring.overlap(cell) | known
        return about | measuring.loss(cell, self._controls(cell, weights, samples)) | known

    def _controls(
        self, cell: AttentionCell, weights: str, samples: int
    ) -> dict[str, dict[str, Any]]:
        """Controls of a cell that another cell has measured, by name: the settings are the same."""
        common = self._common(cell, weights) | {"samples": samples}
        found: dict[str, dict[str, Any]] = {}
        for line in self._file.lines:
            if all(line.get(name) == value for name, value in common.items()):
                for name, settings in cell.controls.items():
                    if line.get("controls", {}).get(name) == settings:
                        found[name] = line["losses"][name]
        return found

    def _stored(self, cell: AttentionCell, weights: str) -> Line | None:
        if cell.error is not None:
            return None
        return self._file.find(self._known(cell, weights), self._grid.samples(cell, weights))

    def _known(self, cell: AttentionCell, weights: str) -> Line:
        """What a cell is known by: lines that agree in all of it are the same measurement."""
        return self._common(cell, weights) | cell.known

    def _common(self, cell: AttentionCell, weights: str) -> Line:
        """What cells have in common that see the same steps."""
        return {
            "suite": "attention",
            "fingerprint": self._digest,
            "weights": weights,
            "seed": random_twin.SEED if weights == RANDOM else None,
            "text": self._grid.windows.digest,
            "length": cell.length,
            "engine": {"page_size": self._grid.config.page_size},
        }
