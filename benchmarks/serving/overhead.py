"""The cost of HTTP: `keyhole serve` compared with `LLM.generate`, on the bundled model or a shape.

    python -m benchmarks.serving.overhead --output benchmarks/results/serve.jsonl
    python -m benchmarks.serving.overhead --shape llama-3.2-1b --prompt 8 --answer 32 --rounds 3

Engine and server are interleaved: a batch by `LLM.generate`, then as many streams over HTTP, with
the same lengths; then single first tokens by both; finally 512 concurrent streams. Client and
server share the machine's cores. A round is a pair of measurements; the result is the median of
their ratios. If other programs use the cores, the ratio says little, and the CPU time per token of
each process says more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import benchmarks
import keyhole
from benchmarks import command
from benchmarks.serving.server import load, serving
from benchmarks.serving.soak import children
from keyhole import LLM, SamplingParams
from keyhole.bench.settings import SHAPES
from keyhole.cli import bench

_BATCHES = (8, 32)
_HELD = 512
#: Memory of each KV cache: both engines are in memory.
_MEMORY = "1GiB"
_FLAGS = (
    *("--max-batch", str(max(_BATCHES)), "--max-queue", str(2 * _HELD), "--no-prefix-cache"),
    *("--memory", _MEMORY, "--no-page"),
)
#: Targets: share of the engine's tokens per second, and added milliseconds to the first token.
_SHARE, _LATER_MS = 0.95, 5.0


def main() -> None:
    """Measures, prints and adds a line."""
    parser = command.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first-tokens", type=int, default=40)
    shapes = ", ".join(SHAPES)
    parser.add_argument("--shape", help=f"a model with random weights instead: {shapes}")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    line = command.header("serve", "benchmarks.serving.overhead", arguments.note)
    with ExitStack() as stack:
        model = keyhole.tiny()
        if arguments.shape is not None:
            model = stack.enter_context(TemporaryDirectory(prefix="keyhole-"))
            save_random(arguments.shape, Path(model))
        llm = LLM(model, max_batch=max(_BATCHES), prefix_cache=False, memory=_MEMORY)
        address, server = stack.enter_context(serving(model, *_FLAGS))
        line |= {"model": arguments.shape or "tiny", "settings": vars(arguments)}
        line["results"] = [_batch(llm, address, server, n, arguments) for n in _BATCHES]
        line["results"].append(_first_token(llm, address, arguments))
        if arguments.shape is None:  # takes hours with a large model and tests the same server
            line["results"].append(_held(address, arguments))
    line["bars"] = _targets(line["results"])
    bench.print_targets(line["bars"])
    if arguments.output:
        benchmarks.append(Path(arguments.output), line)


def save_random(shape: str, folder: Path) -> None:
    """A checkpoint of a shape: random weights in bfloat16 and the bundled model's tokenizer."""
    fields = {"model_type": "llama"} | SHAPES[shape]
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(keyhole.tiny()).save_pretrained(folder)


def _prompts(llm: LLM, count: int, length: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    size = llm.engine.model.vocab_size
    return [{"prompt_token_ids": draw.choices(range(size), k=length)} for _ in range(count)]


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _batch(
    llm: LLM, address: str, server: int, count: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Tokens per second of `count` at once, by the engine and over HTTP."""
    engine: list[float] = []
    http: list[float] = []
    used: dict[str, list[float]] = {"generate": [], "client": [], "server": [], "server_http": []}
    tokens = count * arguments.answer

    def generated(seed: int) -> None:
        prompts = _prompts(llm, count, arguments.prompt, seed)
        begin, before = time.perf_counter(), time.process_time()
        llm.generate(prompts, _params(arguments.answer))
        engine.append(tokens / (time.perf_counter() - begin))
        used["generate"].append((time.process_time() - before) / tokens)

    def served(seed: int) -> None:
        mine, theirs = time.process_time(), _cpu_seconds(server)
        http.append(asyncio.run(load(address, count, arguments, seed=seed))["tokens_per_s"])
        used["client"].append((time.process_time() - mine) / tokens)
        for name, now, then in zip(
            ("server", "server_http"), _cpu_seconds(server), theirs, strict=False
        ):
            used[name].append((now - then) / tokens)

    for seed in range(arguments.rounds + 1):  # the first one warms up
        turns = [generated, served]
        for turn in turns[:: -1 if seed % 2 else 1]:  # so that drift favours neither
            turn(seed)
        print(f"{count}: engine {engine[-1]:.0f} tokens/s, http {http[-1]:.0f}", file=sys.stderr)
    ratios = [b / a for a, b in zip(engine[1:], http[1:], strict=True)]
    cpu = {f"{name}_us": 1e6 * statistics.median(found[1:]) for name, found in used.items()}
    return {
        "kind": "batch",
        "batch": count,
        "engine_tokens_per_s": statistics.median(engine[1:]),
        "http_tokens_per_s": statistics.median(http[1:]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_per_token": cpu,
    }


def _cpu_seconds(server: int) -> list[float]:
    """CPU seconds used so far by the server's process and by the one that answers HTTP."""
    found = []
    for process in (server, *children(server)):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def _first_token(llm: LLM, address: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token of a single request."""
    engine, http = [], []
    for seed in range(arguments.first_tokens + 1):
        (prompt,) = _prompts(llm, 1, arguments.prompt, seed)
        begin = time.perf_counter()
        for _ in llm.stream(prompt, _params(2)):
            engine.append(1e3 * (time.perf_counter() - begin))
            break  # which frees the request
        found = asyncio.run(load(address, 1, arguments, answer_length="2", seed=seed))
        http.append(found["first_token_ms"]["p50"])
    later = [b - a for a, b in zip(engine[1:], http[1:], strict=True)]
    return {
        "kind": "first_token",
        "engine_ms": statistics.median(engine[1:]),
        "http_ms": statistics.median(http[1:]),
        "later_ms": statistics.median(later),
    }


def _held(address: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs many concurrent streams, of which none may be dropped."""
    found = asyncio.run(load(address, _HELD, arguments, answer_length="16"))
    return {"kind": "held", "connections": _HELD, **found}


def _targets(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    targets = []
    for result in results:
        if result["kind"] == "batch":
            name = f"tokens/s over HTTP / by LLM.generate, {result['batch']} streams"
            targets.append(command.target(name, result["ratio"], _SHARE))
        elif result["kind"] == "first_token":
            name = "milliseconds that the first token comes later"
            targets.append(command.target(name, result["later_ms"], _LATER_MS, "<="))
        else:
            name = "connections held and answered"
            targets.append(command.target(name, result["answered"], _HELD, "="))
    return targets


if __name__ == "__main__":
    main()
