"""The cost and the gain of the plugin: decode steps of vLLM with it, and of vLLM alone.

    make test-vllm ARGS=--collect-only  # sets up .venv-vllm
    .venv-vllm/bin/python -m benchmarks.serving.vllm_plugin --output benchmarks/results/vllm.jsonl

Two engines, each in a process of its own, take turns: vLLM without the plugin, and vLLM with it,
which runs one policy after another. The result is the median of the rounds' ratios. Weights, and
the keys and values of the prompts, are random (`vllm_engine`): no prompt is computed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import benchmarks
from benchmarks import command
from keyhole.bench.settings import SHAPES
from keyhole.cli import bench

#: Target: share of vLLM's tokens per second if the budget covers the length.
_SHARE = 0.95
_POLICIES = ("delta", "quest")
_PAGE_SIZE = 32
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "OMP_WAIT_POLICY": "PASSIVE",  # the engine that waits leaves the cores to the other
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    """Measures, prints and adds a line."""
    parser = command.parser(__doc__)
    parser.add_argument("--shape", default="llama-3.2-1b", help=", ".join(SHAPES))
    parser.add_argument("--context", type=int, default=32768, help="tokens of a prompt")
    parser.add_argument("--budget", type=int, default=1024, help="tokens that a policy reads")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--covered", type=int, default=2048, help="tokens of a prompt, all read")
    parser.add_argument("--steps", type=int, default=16, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="without enforce_eager")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    line = command.header("vllm", "benchmarks.serving.vllm_plugin", arguments.note)
    line["versions"]["vllm"] = importlib.metadata.version("vllm-cpu")
    line["settings"] = vars(arguments)
    largest = max(arguments.batches)
    with engine(arguments, plugin=False) as alone, engine(arguments, plugin=True) as with_plugin:
        covering = {"full": {"policy": "full"}} | asked(2 * arguments.covered)
        cases: list[tuple[str, int, int, dict[str, Any]]]
        cases = [("covered", largest, arguments.covered, covering)]
        budgeted = asked(arguments.budget)
        cases += [("budget", n, arguments.context, budgeted) for n in arguments.batches]
        line["results"] = [compare(alone, with_plugin, *case, arguments) for case in cases]
    line["bars"] = _targets(line["results"])
    bench.print_targets(line["bars"])
    if arguments.output:
        benchmarks.append(Path(arguments.output), line)


def asked(token_budget: int) -> dict[str, dict[str, Any]]:
    """The policies, and the values of `additional_config` for them."""
    return {name: {"policy": name, "token_budget": token_budget} for name in _POLICIES}


class Remote:
    """An engine in another process; several can start at the same time."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process, self._log, self._ready = process, log, False

    def decode(self, **given: Any) -> dict[str, Any]:
        """The answer of `vllm_engine.DecodeTimer.decode`."""
        if not self._ready:
            self._ready = bool(self._answer())
        assert self._process.stdin is not None
        print(json.dumps(given), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"an engine has ended:\n{self._log.read()[-3000:]}")
        return dict(json.loads(line))


@contextmanager
def engine(arguments: argparse.Namespace, *, plugin: bool) -> Iterator[Remote]:
    """An engine of vLLM, with Keyhole's plugin or without any plugin."""
    longest = max(arguments.context, arguments.covered) + arguments.steps + _PAGE_SIZE
    batch = max(arguments.batches)
    pages = batch * -(-longest // _PAGE_SIZE) + 2  # vLLM keeps one
    settings = {
        "shape": arguments.shape,
        "length": longest,
        "batch": batch,
        "pages": pages,
        "plugin": plugin,
        "eager": not arguments.compile,
    }
    worker = [sys.executable, "-m", "benchmarks.serving.vllm_engine", json.dumps(settings)]
    environment = os.environ | _ENVIRONMENT | {"VLLM_PLUGINS": "keyhole" if plugin else ""}
    with (
        TemporaryFile("w+") as log,
        subprocess.Popen(
            worker,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        ) as process,
    ):
        try:
            yield Remote(process, log)
        finally:
            process.terminate()


def compare(
    alone: Remote,
    with_plugin: Remote,
    kind: str,
    batch: int,
    context: int,
    policies: dict[str, dict[str, Any]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Milliseconds of a decode step by system, and the time of vLLM's step divided by each."""
    given = {"batch": batch, "context": context, "steps": arguments.steps}
    times: dict[str, list[float]] = {}
    shares: dict[str, float] = {}
    systems: list[tuple[str, dict[str, Any] | None]] = [("vllm", None), *policies.items()]
    for number in range(arguments.rounds + 1):  # the first one warms up
        first = number % len(systems)
        for name, policy in systems[first:] + systems[:first]:
            remote = alone if policy is None else with_plugin
            found = remote.decode(**given, policy=policy)
            times.setdefault(name, []).append(statistics.median(found["step_ms"]))
            if policy is not None:
                shares[name] = found["attended_fraction"]
        told = ", ".join(f"{name} {spent[-1]:.0f}" for name, spent in times.items())
        print(f"{kind}, batch {batch}, {context} tokens, ms: {told}", file=sys.stderr)
    results = []
    for name in policies:
        ratios = [a / b for a, b in zip(times["vllm"][1:], times[name][1:], strict=True)]
        results.append(
            {
                "policy": name,
                "settings": policies[name],
                "step_ms": statistics.median(times[name][1:]),
                "attended_fraction": shares[name],
                "ratio": statistics.median(ratios),
                "ratios": ratios,
            }
        )
    return {
        "kind": kind,
        "batch": batch,
        "context": context,
        "vllm_step_ms": statistics.median(times["vllm"][1:]),
        "policies": results,
    }


def _targets(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    targets = []
    for result in results:
        covered = result["kind"] == "covered"
        for one in result["policies"]:
            where = f"{one['policy']}, batch {result['batch']}, {result['context']} tokens"
            how = (
                "covered by the budget" if covered else f"budget {one['settings']['token_budget']}"
            )
            name = f"tokens/s with the plugin / of vLLM alone: {where}, {how}"
            wanted, sign = (_SHARE, ">=") if covered else (1, ">")
            targets.append(command.target(name, one["ratio"], wanted, sign))
    return targets


if __name__ == "__main__":
    main()
