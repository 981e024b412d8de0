"""Right answers of the bundled model under every policy and budget, and their cost.

    python -m benchmarks.evaluation --dry-run
    python -m benchmarks.evaluation [--parts 1 2] [--hours 3]
    python -m benchmarks.evaluation --errors
    python -m benchmarks.evaluation --render

Cells run in the order of PARTS, first those that the discussion needs, with the code of `keyhole
eval`. A finished cell adds a line to benchmarks/results/evaluation.jsonl, so the same command
resumes an interrupted run; after `--hours` it stops between two cells. `--errors` then finds the
first wrong word of answers that full attention gets right, and what the step that wrote it had read
(evaluation-errors.jsonl). `--render` writes the pages of docs/results/ and their figures from the
stored lines. Times are CPU time of one core (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import benchmarks
import keyhole
from benchmarks import command, results_page
from benchmarks.results_page import errors as results_errors
from benchmarks.results_page import first_error
from benchmarks.results_page.cells import ASKED, BUDGETS
from keyhole.config import EngineConfig
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.eval.line_file import Line, LineFile
from keyhole.eval.methods import FULL, Budget, Method
from keyhole.eval.policy_trace import selection_map
from keyhole.eval.run import EvalGrid, Evaluation
from keyhole.eval.tasks import make_task
from keyhole.eval.workload import Answered
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import available_policies

LENGTHS = (1024, 2048, 4096, 8192)
RECALLS = (0.5, 0.7, 0.9, 0.95, 0.99)
#: The methods that the discussion compares, and those with an adaptive budget.
MAIN = ("delta", "quest", "raas", "streaming_llm", "spe_context")
ADAPTIVE = ("delta", "spe_context")
OUTPUT = benchmarks.results() / results_page.LINES
ERRORS = benchmarks.results() / results_page.ERRORS
#: Wrong answers examined per cell (at a budget of an eighth), and the longest texts examined.
_WRONG, _LONGEST = 8, 2048
_PAGE_SIZE = EngineConfig().page_size
#: Samples of a cell.
_SAMPLES = 200
#: Bytes for prompts that all policies share: 200 samples of 8,192 tokens, with a head's keys.
_PROMPT_MEMORY = 7 * 2**30
_DERIVE, *_LOOK_UPS = ASKED
#: Requests per step: decode steps take nearly all the time of a derivation, and batching them saves
#: most of it.
_AT_ONCE = {True: 200, False: 64}
#: Seconds per sample on one core of an EPYC (family 26), by length: derivations, and look-ups
#: whose prompt full attention has read.
_SECONDS = {
    True: {1024: 0.2, 2048: 0.5, 4096: 1.5, 8192: 5.0},
    False: {1024: 0.02, 2048: 0.03, 4096: 0.05, 8192: 0.1},
}


@dataclass(frozen=True, kw_only=True)
class GridPart:
    """Cells that run together: every method at every task and length."""

    about: str
    tasks: Collection[str]
    lengths: Sequence[int]
    policies: Sequence[str] = MAIN
    shares: bool = True
    """Budgets are an eighth and a quarter of the length only."""
    adaptive: bool = False


PARTS = (
    GridPart(about="derivations: the discussion", tasks=[_DERIVE], lengths=LENGTHS[:2]),
    GridPart(about="look-ups: the discussion", tasks=_LOOK_UPS, lengths=LENGTHS[:2]),
    GridPart(about="longer derivations", tasks=[_DERIVE], lengths=LENGTHS[2:]),
    GridPart(
        about="adaptive budgets",
        tasks=[_DERIVE, _LOOK_UPS[0]],
        lengths=LENGTHS[:3],
        policies=ADAPTIVE,
        adaptive=True,
    ),
    GridPart(
        about="all budgets, up to 2,048 tokens",
        tasks=ASKED,
        lengths=LENGTHS[:2],
        policies=tuple(available_policies()),
        shares=False,
    ),
    GridPart(
        about="all budgets, 4,096 tokens",
        tasks=ASKED,
        lengths=LENGTHS[2:3],
        policies=tuple(available_policies()),
        shares=False,
    ),
    GridPart(
        about="look-ups at all budgets, 8,192 tokens",
        tasks=_LOOK_UPS,
        lengths=LENGTHS[3:],
        policies=tuple(available_policies()),
        shares=False,
    ),
    GridPart(
        about="derivations at all budgets, 8,192 tokens",
        tasks=[_DERIVE],
        lengths=LENGTHS[3:],
        policies=tuple(available_policies()),
        shares=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A method with its budget, a task and a length; part: the first part that has it, from 1."""

    part: int
    task: str
    length: int
    method: Method
    samples: int

    @property
    def tokens(self) -> int | None:
        """The budget; None for full attention."""
        return self.method.tokens(self.length, _PAGE_SIZE)

    @property
    def known_by(self) -> tuple[object, ...]:
        """The key that identifies the cell."""
        return self.task, self.length, self.method.label, self.tokens


def grid(parts: Sequence[GridPart] = PARTS) -> list[GridCell]:
    """All cells in order of priority, each once, full attention first."""
    found: dict[tuple[object, ...], GridCell] = {}
    for number, part in enumerate(parts, start=1):
        for task in part.tasks:
            for length in part.lengths:
                for method in (FULL, *_methods(part, length)):
                    cell = GridCell(
                        part=number,
                        task=task,
                        length=length,
                        method=method,
                        samples=_SAMPLES,
                    )
                    found.setdefault(cell.known_by, cell)
    return list(found.values())


def _methods(part: GridPart, length: int) -> Iterator[Method]:
    for name in part.policies:
        if name == FULL.name:
            continue
        if part.adaptive:
            # May read from a sixteenth (slightly more for short texts, as spe_context's window
            # needs it) to a half.
            free = {"token_budget": length // 2, "min_budget": max(80, length // 16)}
            for recall in RECALLS:
                label = f"{name}:recall={recall}"
                yield Method(label=label, name=name, settings={**free, "recall": recall})
            continue
        for tokens in BUDGETS:
            if tokens in (length // 8, length // 4) if part.shares else tokens < length:
                yield Method(label=name, name=name, budget=Budget.parse(str(tokens)))


def main() -> None:
    """Reads the command line, measures and stores."""
    parser = command.parser(__doc__, OUTPUT)
    numbers = range(1, len(PARTS) + 1)
    parser.add_argument("--parts", nargs="+", type=int, default=numbers, choices=numbers)
    parser.add_argument("--tasks", nargs="+", default=ASKED, choices=ASKED)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, choices=LENGTHS)
    parser.add_argument(
        "--policies", nargs="+", default=[*available_policies()], choices=[*available_policies()]
    )
    parser.add_argument("--budgets", nargs="+", type=int, metavar="TOKENS", help="default: all")
    parser.add_argument("--samples", type=int, help=f"in a cell; default: {_SAMPLES}")
    parser.add_argument("--hours", type=float, help="stop after this time, between two cells")
    parser.add_argument("--dry-run", action="store_true", help="only print the plan")
    parser.add_argument("--errors", action="store_true", help="only examine wrong answers")
    parser.add_argument("--render", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    file = LineFile(arguments.output)
    if arguments.dry_run:
        print(plan(chosen(arguments), file))
        return
    if not arguments.render:
        torch.set_num_threads(1)  # times are those of one core
        model = load(keyhole.tiny(), "cpu")
        if arguments.errors:
            errors = LineFile(arguments.output.with_name(ERRORS.name))
            examine_errors(model, file, errors, arguments.note)
        else:
            end = float("inf") if arguments.hours is None else 3600 * arguments.hours
            run(model, chosen(arguments), file, end, arguments.note)
    if arguments.output == OUTPUT:
        results_page.write(benchmarks.results(), benchmarks.ROOT / "docs")


def chosen(arguments: argparse.Namespace) -> list[GridCell]:
    """The requested cells, and full attention at the same tasks and lengths."""
    return [
        dataclasses.replace(cell, samples=arguments.samples or cell.samples)
        for cell in grid()
        if cell.part in arguments.parts
        and cell.task in arguments.tasks
        and cell.length in arguments.lengths
        and cell.method.name in (*arguments.policies, FULL.name)
        and (not arguments.budgets or cell.tokens in (*arguments.budgets, None))
    ]


class RunHeader:
    """The conditions stored with a line; `cpu_seconds`: since the previous line."""

    def __init__(self, note: str) -> None:
        self._note, self._begin = note, time.process_time()

    def __call__(self) -> dict[str, Any]:
        """The fields."""
        line = command.header("evaluation", "benchmarks.evaluation", self._note)
        now = time.process_time()
        line["cpu_seconds"], self._begin = round(now - self._begin, 1), now
        return line


def run(
    model: Model, cells: Sequence[GridCell], file: LineFile, seconds: float, note: str
) -> list[Line]:
    """Measures the cells that the file lacks until the time is over; returns their lines."""
    begin, lines = time.monotonic(), []
    workloads: dict[str, Answered] = {}
    copies = SharedPromptCache(_PROMPT_MEMORY)
    for cell in readers_first(cells, file.lines):
        if time.monotonic() - begin >= seconds:
            print("time limit reached; run the same command to continue", file=sys.stderr)
            break
        if cell.task not in workloads:
            workloads = {cell.task: Answered(make_task(cell.task), model)}
        one = EvalGrid(
            workloads=[workloads[cell.task]],
            lengths=[cell.length],
            setups=[ASKED[cell.task].setup],
            methods=[cell.method],
            samples=cell.samples,
            config=EngineConfig(max_batch=_AT_ONCE[cell.task == _DERIVE], prefix_cache=False),
        )
        outcome = Evaluation(model, one, file, RunHeader(note), copies).run()
        for refused in outcome.refused:
            print(f"{cell.task} {cell.length}: {refused['error']}", file=sys.stderr)
        line = outcome.lines[-1]
        lines.append(line)
        state = "stored" if outcome.stored == len(outcome.lines) else "measured"
        print(
            f"{cell.task} {cell.length} {cell.method.label} {cell.tokens or ''}: "
            f"{line['score']:.1%} of {line['samples']} ({state})",
            flush=True,
        )
    return lines


def readers_first(cells: Sequence[GridCell], lines: Sequence[Line]) -> list[GridCell]:
    """Among consecutive cells of the same task and length, puts one with a retrieval head first.

    Its prompts then serve all of them; prompts without a head's keys would be computed twice.
    """
    found: list[GridCell] = []
    for _, same in itertools.groupby(cells, lambda cell: (cell.task, cell.length)):
        group = list(same)
        lacking = [cell for cell in group if not _stored(cell, lines)]
        reader = next((c for c in lacking if available_policies()[c.method.name].wants_head), None)
        first = [] if reader is None else [reader]
        found += first + [cell for cell in group if cell is not reader]
    return found


def plan(cells: Sequence[GridCell], file: LineFile) -> str:
    """The remaining work of each part, with an estimate of its time."""
    found = [_stored(cell, file.lines) for cell in cells]
    missing = [cell for cell, there in zip(cells, found, strict=True) if not there]
    texts = []
    for number, part in enumerate(PARTS, start=1):
        own = [cell for cell in missing if cell.part == number]
        hours = sum(seconds(cell, file.lines) for cell in own) / 3600
        there = [cell for cell in cells if cell.part == number]
        samples = there[0].samples if there else _SAMPLES
        texts.append(
            f"part {number}, {part.about}: {len(own)} of {len(there)} cells of {samples} "
            f"samples, {hours:.1f} h"
        )
        groups: dict[tuple[str, int], list[str]] = {}
        for cell in own:
            name = cell.method.label + ("" if cell.method.budget is None else f" {cell.tokens}")
            groups.setdefault((cell.task, cell.length), []).append(name)
        for (task, length), names in groups.items():
            texts.append(f"  {task} {length:,}: {', '.join(names)}")
    hours = sum(seconds(cell, file.lines) for cell in missing) / 3600
    return "\n".join([*texts, f"{len(missing)} cells, {hours:.1f} h"])


def seconds(cell: GridCell, lines: Iterable[Line]) -> float:
    """CPU time of a cell, from stored lines of the task and length if there are any.

    Full attention, which may have computed the prompts for all, is estimated separately.
    """
    place = (cell.task, cell.length, cell.method is FULL)
    known = [
        line["cpu_seconds"] / line["samples"]
        for line in lines
        if (line["task"], line["length"], line["method"] == FULL.label) == place
    ]
    if known:
        return cell.samples * statistics.fmean(known)
    return cell.samples * _SECONDS[cell.task == _DERIVE].get(cell.length, 0.0)


def _stored(cell: GridCell, lines: Iterable[Line]) -> bool:
    """Matches by name; `Evaluation` itself checks that weights and settings are the same."""
    return any(
        (line["task"], line["length"], line["method"]) == cell.known_by[:3]
        and line["budget"] == cell.tokens
        and line["samples"] >= cell.samples
        for line in lines
    )


def examine_errors(model: Model, file: LineFile, errors: LineFile, note: str) -> list[Line]:
    """Adds a line for each cell with wrong answers where full attention is right."""
    added = []
    for line, wrong in _wrong(file.lines):
        keys = ("task", "length", "setup", "policy", "budget", "settings", "fingerprint")
        fields = {key: line[key] for key in keys} | {"seeds": wrong[:_WRONG]}
        if errors.find(fields, 0) is not None:
            continue
        policy = Method(label="", name=line["policy"], settings={"token_budget": line["budget"]})
        header = RunHeader(note)
        found: list[dict[str, Any]] = []
        for seed in fields["seeds"]:
            one = first_error.find(
                model,
                policy.policy(line["length"], _PAGE_SIZE),
                make_task(line["task"]),
                length=line["length"],
                seed=seed,
                setup=line["setup"],
            )
            if one is None:  # right this time: another batch rounds differently
                continue
            if "map" not in fields and one.sparse_layers:  # none if prefill wrote the first error
                kept = selection_map(one.recorded, one.sparse_layers[0], one.marks)
                fields["map"], fields["map_step"] = kept.to_json(), one.step
            found.append(one.to_json())
        errors.add(
            header()
            | {"method": line["method"], "wrong": len(wrong)}
            | fields
            | {"samples": line["samples"], "found": found}
        )
        added.append(errors.lines[-1])
        print(results_errors.text(added[-1]), flush=True)
    return added


def _wrong(lines: Iterable[Line]) -> Iterator[tuple[Line, list[int]]]:
    """Cells with a budget of an eighth, and the samples that only full attention gets right."""
    latest = {(at["task"], at["length"], at["method"], at["budget"]): at for at in lines}
    for (task, length, method, budget), line in latest.items():
        full = latest.get((task, length, FULL.label, None))
        if (
            method not in available_policies()
            or budget != length // 8
            or length > _LONGEST
            or full is None
        ):
            continue
        both = zip(line["scores"], full["scores"], strict=False)
        if wrong := [seed for seed, scores in enumerate(both) if scores == (0, 1)]:
            yield line, wrong


if __name__ == "__main__":
    main()
