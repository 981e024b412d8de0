"""SpeContext's ablation C3 (figure 11): offloading layers as sequences grow, or all of them from
the start.

    python -m benchmarks.adaptive_layers

Two engines over the bundled model have the same memory for keys and values, the same policy and the
same derivations. *adaptive* offloads a layer when the memory is full, as usual;
*all below* offloads every layer from the start. Their steps are interleaved, so that both run on
the same machine state. Both must generate the same tokens, which is checked. A CPU offloads to a
file. One line, with the numbers of each quarter of the answer, is added to
benchmarks/results/adaptive-layers.jsonl.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


import benchmarks
import keyhole
from benchmarks import command
from keyhole import LLM, SamplingParams, SpeContext
from keyhole.engine.sequence import Sequence
from keyhole.eval.tiny_language.tasks import make
from keyhole.models.loading import load
from keyhole.models.model import Model

NAMES = ("adaptive", "all below")
_PAGE_SIZE = 16
_PARTS = 4


def main() -> None:
    """Runs both engines, prints and stores the results."""
    parser = command.parser(__doc__)
    parser.add_argument("--words", type=int, default=2048, help="of each sequence, answer included")
    parser.add_argument("--texts", type=int, default=4, help="decoded together")
    parser.add_argument("--budget", type=int, default=256, help="tokens that a step may read")
    parser.add_argument("--share", type=float, default=0.5, help="share of all layers' memory")
    arguments = parser.parse_args()
    line = command.header("adaptive-layers", "benchmarks.adaptive_layers", arguments.note)
    found = run(
        load(keyhole.tiny(), "cpu"),
        arguments.words,
        arguments.texts,
        arguments.budget,
        arguments.share,
    )
    settings = {name: value for name, value in vars(arguments).items() if name != "note"}
    output = benchmarks.results() / "adaptive-layers.jsonl"
    benchmarks.append(output, line | settings | {"parts": found})
    for part in found:
        print(part)


def run(model: Model, words: int, texts: int, budget: int, share: float) -> list[dict[str, Any]]:
    """A dict per quarter of the answer, in order; see `summary`."""
    items = [make("derive", words, seed) for seed in range(texts)]
    room = len(items[0].answer.split()) + 8
    params = SamplingParams(max_tokens=room, temperature=0.0)
    page = LLM(model, memory="1MiB", page_size=_PAGE_SIZE).engine.cache.page_bytes
    memory = int(share * texts * page * -(-(words + 2 * _PAGE_SIZE) // _PAGE_SIZE))
    with tempfile.TemporaryDirectory() as folder:
        llms = {
            name: LLM(
                model,
                SpeContext(token_budget=budget),
                memory=memory,
                offload=folder,  # its files have no names
                max_batch=texts,
                page_size=_PAGE_SIZE,
                prefix_cache=False,
            )
            for name in NAMES
        }
        offloader = llms["all below"].engine.offloader
        assert offloader is not None
        offloader.least = len(offloader.plan.model.order)
        offloader.offload_layer(offloader.least)
        requests = {
            name: [llm.submit(item.prompt, params) for item in items] for name, llm in llms.items()
        }
        steps: dict[str, list[StepCost]] = {name: [] for name in NAMES}
        turn = 0
        while any(llm.engine.has_work for llm in llms.values()):
            for name in NAMES if turn % 2 else NAMES[::-1]:
                if (step := timed(llms[name], requests[name])) is not None:
                    steps[name].append(step)
            turn += 1
    tokens = {name: [one.generated for one in requests[name]] for name in NAMES}
    if tokens[NAMES[0]] != tokens[NAMES[1]]:
        raise AssertionError("where layers are has changed what is generated")
    return summary(steps)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """A decode step: ms, bytes moved, offloaded layers, tokens of the longest sequence."""

    ms: float
    moved_bytes: int
    below: int
    length: int


def timed(llm: LLM, requests: list[Sequence]) -> StepCost | None:
    """Runs a step; None if it computed a prompt or if all sequences have ended."""
    engine = llm.engine
    if not engine.has_work:
        return None
    moved = sum(one.counters.moved_bytes for one in requests)
    decoding = all(one.is_decoding for one in engine.scheduler.running)
    decoding = decoding and bool(engine.scheduler.running) and not engine.scheduler.waiting
    begin = time.perf_counter()
    engine.step()
    spent = 1e3 * (time.perf_counter() - begin)
    if not decoding or engine.offloader is None:
        return None
    return StepCost(
        spent,
        sum(one.counters.moved_bytes for one in requests) - moved,
        engine.offloader.offloaded,
        max(len(one.tokens) for one in requests),
    )


def summary(steps: dict[str, list[StepCost]]) -> list[dict[str, Any]]:
    """Per quarter of the steps: lengths, offloaded layers, bytes moved per step, and times.

    ratio: step time of adaptive divided by that of all below, median over pairs of adjacent
    steps; low and high: its quartiles.
    """
    count = min(map(len, steps.values()))
    found = []
    for part in range(_PARTS):
        cut = slice(part * count // _PARTS, (part + 1) * count // _PARTS)
        own, others = (steps[name][cut] for name in NAMES)
        ratios = [a.ms / b.ms for a, b in zip(own, others, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found.append(
            {
                "lengths": [own[0].length, own[-1].length],
                "offloaded_layers": [own[0].below, own[-1].below],
                "moved_bytes": {
                    name: statistics.fmean(step.moved_bytes for step in steps[name][cut])
                    for name in NAMES
                },
                "step_ms": {
                    name: statistics.median(step.ms for step in steps[name][cut]) for name in NAMES
                },
                "ratio": middle,
                "low": low,
                "high": high,
            }
        )
    return found


if __name__ == "__main__":
    main()
