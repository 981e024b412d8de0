"""Runs the suite `attention` cell by cell; stored cells are not measured again.

A cell is a policy with its controls, or the overlap of lists of top entries, at one length and
budget. Every cell is measured on the model and then on its random twin: the same architecture with
newly initialised weights. The twin has learnt nothing, so any structure in its attention comes from
shapes, positions and chance. Each measurement becomes one line of a file.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from keyhole.cache.layout import Geometry
from keyhole.config import EngineConfig, require
from keyhole.engine.head_runner import load_gate, load_head
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.errors import KeyholeError
from keyhole.eval.attention.dense_run import LayerStep, Take, run
from keyhole.eval.attention.sums import LossSums, OverlapSums, kinds
from keyhole.eval.forced_text import Windows, forced
from keyhole.eval.line_file import EvalOutcome, Line, LineFile
from keyhole.eval.methods import (
    GIVEN,
    Budget,
    Method,
    Terms,
    UnequalTermsError,
    controls_of,
    settings_of,
)
from keyhole.eval.run import model_digest, require_length
from keyhole.eval.settings import TWIN_TEXTS
from keyhole.models.attention import NAME
from keyhole.models.fast_layers import speed_up
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.retrieval.gate import SeerGate
from keyhole.retrieval.head import RetrievalHead

#: `measured` of a line, and its `weights`.
LOSS, OVERLAP = "loss", "overlap"
TRAINED, RANDOM = "trained", "random"
#: The policy itself, among its controls.
METHOD = "method"


@dataclass(frozen=True, kw_only=True)
class AttentionCell:
    """A policy with its controls, or (method None) the overlap of top lists.

    policies: the policy, under the key `METHOD`, and its controls, all resolved. error: why there
    are none.
    """

    length: int
    budget: int | None
    method: Method | None = None
    policies: Mapping[str, Policy] = field(default_factory=dict)
    terms: str = GIVEN.name
    error: KeyholeError | None = None

    @property
    def label(self) -> str:
        """The name of the measurement."""
        return self.method.label if self.method else OVERLAP

    @property
    def controls(self) -> dict[str, Line]:
        """Policies and settings of the controls, as stored in a line."""
        return {name: settings_of(one) for name, one in self.policies.items() if name != METHOD}

    @property
    def known(self) -> Line:
        """The fields that identify a line of this cell, besides those of `_common`."""
        if self.method is None:
            return {"measured": OVERLAP, "budget": self.budget}
        return {
            "measured": LOSS,
            "budget": self.budget,
            **settings_of(self.policies[METHOD]),
            "controls": self.controls,
            "terms": self.terms,
        }


@dataclass(frozen=True, kw_only=True)
class AttentionGrid:
    """Every method under every budget at every length, on at most `texts` windows.

    terms: how methods become policies.
    """

    windows: Windows
    lengths: Sequence[int]
    methods: Sequence[Method]
    budgets: Sequence[Budget]
    texts: int
    config: EngineConfig
    terms: Terms = GIVEN

    def samples(self, cell: AttentionCell, weights: str) -> int:
        """Number of texts of a cell; the random twin reads fewer."""
        texts = min(self.texts, self.windows.windows(cell.length))
        return texts if weights == TRAINED else min(texts, TWIN_TEXTS)

    def cells(self, geometry: Geometry) -> list[AttentionCell]:
        """By length: the overlap under every budget, then every method; each once."""
        found: dict[Any, AttentionCell] = {}
        for length in self.lengths:
            for budget in self.budgets:
                tokens = budget.at(length, self.config.page_size)
                found.setdefault((length, tokens), AttentionCell(length=length, budget=tokens))
            for method in self.methods:
                cell = self._cell(method, length, geometry)
                found.setdefault((length, cell.budget, cell.label), cell)
        return list(found.values())

    def _cell(self, method: Method, length: int, geometry: Geometry) -> AttentionCell:
        budget = method.tokens(length, self.config.page_size)
        try:
            policy = self.terms.policy(method, length, geometry).resolve(geometry)
            controls = controls_of(policy, geometry)
            resolved = {name: one.resolve(geometry) for name, one in controls.items()}
        except KeyholeError as error:
            return AttentionCell(length=length, budget=budget, method=method, error=error)
        return AttentionCell(
            length=length,
            budget=budget,
            method=method,
            policies={METHOD: policy} | resolved,
            terms=self.terms.name,
        )


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """A model, and the windows of text that are forced through it.

    is_twin: its weights are random, and so are those of a retrieval head and of a gate.
    """

    model: Model
    is_twin: bool
    windows: Sequence[Sequence[int]]
    config: EngineConfig
    copies: SharedPromptCache

    def loss(self, cell: AttentionCell, known: Mapping[str, Any]) -> Line:
        """The losses of a cell's policy and of its controls; known: controls that were measured
        before.
        """
        geometry = self.model.geometry(self.config.page_size)
        policies = {name: one for name, one in cell.policies.items() if name not in known}
        sums = LossSums(
            geometry.full_attention, len(self.windows), len(policies), self.model.device
        )
        self._force(list(policies.values()), cell.length, sums.take)
        found = dict(zip(policies, map(dataclasses.asdict, sums.means()), strict=True))
        return {
            "dense_layers": list(cell.policies[METHOD].dense_layers(geometry)),
            "outside_budget": cell.policies[METHOD].outside_budget(),
            "losses": {name: known.get(name) or found[name] for name in cell.policies},
            "repeats": sums.repeats.shares(),
        }

    def overlap(self, cell: AttentionCell) -> Line:
        """The overlap of top lists of each kind."""
        size = self.config.page_size
        assert cell.budget is not None
        require(cell.budget >= size, "budget", cell.budget, f"at least one page of {size} tokens")
        geometry = self.model.geometry(self.config.page_size)
        sums = {
            kind: OverlapSums(kind, cell.budget, geometry, len(self.windows), self.model.device)
            for kind in kinds(geometry)
        }

        def take(seen: LayerStep) -> None:
            for one in sums.values():
                one.take(seen)

        self._force([], cell.length, take)
        return {"lists": {kind: dataclasses.asdict(one.result()) for kind, one in sums.items()}}

    def _force(self, policies: Sequence[Policy], length: int, take: Take) -> None:
        requests = [dataclasses.replace(forced(one), keep_logits=False) for one in self.windows]
        head = next((self._head(policy) for policy in policies if policy.wants_head), None)
        self.copies.begin((self.is_twin, length))
        gate = next((self._gate(policy) for policy in policies if policy.wants_gate), None)
        given = (self.model, policies, requests, self.config, take)
        run(*given, copies=self.copies, head=head, gate=gate)
        torch.cuda.empty_cache()  # no effect without a GPU

    def _head(self, policy: Policy) -> RetrievalHead:
        """The head of a policy; for the twin, a random one. ConfigError if the model has none."""
        head = load_head(policy, self.model)
        return RetrievalHead.random(self.model.network) if self.is_twin else head

    def _gate(self, policy: Policy) -> SeerGate | None:
        """The same for the gate."""
        geometry = self.model.geometry(self.config.page_size)
        gate = load_gate(policy, self.model, geometry)
        like = self.model.device, self.model.dtype
        return SeerGate.random(geometry).to(*like) if self.is_twin else gate


SEED = 0


@contextmanager
def random_twin(model: Model) -> Iterator[Model]:
    """A model of the same config on the same device, initialised as transformers does.

    It has the model's tokenizer and calibrations, but no retrieval head or gate, which were made
    for the trained weights. On a GPU the model itself is moved to the host's memory in the
    meantime, since the two need not fit together.
    """
    moved = model.device.type == "cuda"
    if moved:
        model.network.to("cpu")
        torch.cuda.empty_cache()
    try:
        yield _make(model)
    finally:
        if moved:
            torch.cuda.empty_cache()
            model.network.to(model.device)


def _make(model: Model) -> Model:
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(model.device):
        torch.manual_seed(SEED)
        network = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.network.config), attn_implementation=NAME, dtype=model.dtype
        )
    network = network.to(model.device).eval()
    speed_up(network, model.device)
    return dataclasses.replace(model, network=network)


class AttentionSuite:
    """A grid over a model, and the file of its lines.

    header: makes the fields of a line for how, where and when. copies: keeps the prompts, with
    which every cell begins. ConfigError, before anything runs, for a length that the model or the
    texts do not allow.
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

    def run(self) -> EvalOutcome:
        """Measures the cells that the file lacks and adds each as soon as it is done."""
        outcome, cells = EvalOutcome(), self._grid.cells(self._geometry)
        gc.freeze()  # objects made before need not be visited after each cell
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
        """The model or its twin; the twin is not created if all of its lines are stored."""
        missing = any(cell.error is None and self._stored(cell, weights) is None for cell in cells)
        if weights == RANDOM and missing:
            return random_twin(self._model)
        return nullcontext(self._model)

    def _run_cell(
        self, model: Model, cell: AttentionCell, weights: str, outcome: EvalOutcome
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
            refusal = {"method": cell.label, "error": str(error), "unequal": unequal}
            outcome.refused.append(known | refusal)
            return
        finally:
            gc.collect()  # engine and scheduler refer to each other
        outcome.lines.append(line)
        outcome.stored += stored is not None

    def _measured(self, model: Model, cell: AttentionCell, weights: str) -> Line:
        samples = self._grid.samples(cell, weights)
        measuring = CellRun(
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
        """Controls with the same settings that were measured for another cell, by name."""
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
        """The fields that identify a cell: lines that agree in all of them are the same
        measurement.
        """
        return self._common(cell, weights) | cell.known

    def _common(self, cell: AttentionCell, weights: str) -> Line:
        """The fields that cells measured over the same steps share."""
        return {
            "suite": "attention",
            "fingerprint": self._digest,
            "weights": weights,
            "seed": SEED if weights == RANDOM else None,
            "text": self._grid.windows.digest,
            "length": cell.length,
            "engine": {"page_size": self._grid.config.page_size},
        }
