"""The cost of Ray and the gain of a second replica: `keyhole serve` compared with two replicas,
and with two servers without Ray.

    make test-ray ARGS=--collect-only  # sets up .venv-ray
    .venv-ray/bin/python -m benchmarks.serving.ray_replicas --output benchmarks/results/ray.jsonl

The systems run the same random model with one thread for each engine and take turns: single first
tokens, then rounds of streams. Two servers without Ray, each with half of the clients, show what a
second engine gains on this machine. Client, servers, replicas and all of Ray's own processes share
the cores; the result is the median of the rounds' ratios. `cpu` in a result is the CPU time of each
kind of process per second. Ray runs with the settings for high throughput of docs/ray.md, unless
the environment has others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Ray lowers its priority (nice 15) by default; the program that it is compared with does not.
os.environ |= {"RAY_worker_niceness": "0"}
# For high throughput, as docs/ray.md recommends; unless the environment has other values.
os.environ |= {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
    **os.environ,
}

import ray
import torch
from ray import serve
from transformers import LlamaConfig, LlamaForCausalLM

import benchmarks
import keyhole
from benchmarks import command
from benchmarks.serving.server import load, serving
from keyhole.cli import bench
from keyhole.integrations.ray import app

_LATER_MS, _TIMES = 10.0, 1.9
_PORT = 18356
_ENGINE = {"memory": "512MiB", "prefix_cache": False}
#: Patterns that recognise Ray's processes by their command lines; the first match counts.
_PROCESSES = {
    "replicas": ":Replica",
    "front": ":Front",
    "conversations": ":Conversations",
    "controller": "ServeController",
    "proxy": "ProxyActor",
    "haproxy": "haproxy",
    "server": "keyhole serve",
    "ray": "ray",
}


def main() -> None:
    """Measures, prints and adds a line."""
    parser = command.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-tokens", type=int, default=41)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model, of 12 layers")
    parser.add_argument("--batch", type=int, default=8, help="max_batch; a quarter of the clients")
    parser.add_argument("--repeats", type=int, default=6, help="requests of a client in a round")
    parser.add_argument("--stream-interval", type=float, default=0.5, help="seconds")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    line = command.header("ray", "benchmarks.serving.ray_replicas", arguments.note)
    line["versions"]["ray"] = ray.__version__
    line["settings"] = vars(arguments) | {
        "environment": {k: os.environ[k] for k in sorted(os.environ) if k.startswith("RAY_SERVE")}
    }
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, arguments.hidden)
        engine = {
            **_ENGINE,
            "max_batch": arguments.batch,
            "stream_interval": arguments.stream_interval,
        }
        with (
            serving(folder, *_flags(engine)) as (alone, _),
            serving(folder, *_flags(engine)) as (second, _),
            replicas(folder, engine) as both,
        ):
            line["results"] = [
                _first_token(alone, both, arguments),
                _throughput(
                    {"server": [alone], "ray": [both], "servers": [alone, second]}, arguments
                ),
            ]
    line["bars"] = _targets(line["results"])
    bench.print_targets(line["bars"])
    if arguments.output:
        benchmarks.append(Path(arguments.output), line)


def make_model(folder: str, hidden: int) -> None:
    """Random weights with the tokenizer of the bundled model."""
    for path in Path(keyhole.tiny()).glob("tokenizer*"):
        shutil.copy(path, folder)
    small = LlamaConfig.from_pretrained(keyhole.tiny())
    config = LlamaConfig(
        vocab_size=small.vocab_size,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=12,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def _flags(engine: dict[str, Any]) -> list[str]:
    """The same engine for `keyhole serve`."""
    names = ("memory", "max_batch", "stream_interval")
    each = [(f"--{name.replace('_', '-')}", str(engine[name])) for name in names]
    return ["--no-prefix-cache", *(text for flag in each for text in flag)]


@contextmanager
def replicas(model: str, engine: dict[str, Any]) -> Iterator[str]:
    """The address of two replicas."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": _PORT})
    try:
        serve.run(app({"model": model, "num_replicas": 2, "num_cpus": 1, **engine}))
        yield f"http://127.0.0.1:{_PORT}"
    finally:
        serve.shutdown()
        ray.shutdown()


def _first_token(alone: str, both: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token of a single request."""
    found: dict[str, list[float]] = {alone: [], both: []}
    for seed in range(arguments.first_tokens + 3):
        for address in (both, alone) if seed % 2 else (alone, both):
            got = asyncio.run(load(address, 1, arguments, answer_length="2", seed=seed))
            found[address].append(got["first_token_ms"]["p50"])
    server, cluster = found[alone][3:], found[both][3:]  # three warm up
    return {
        "kind": "first_token",
        "server_ms": statistics.median(server),
        "ray_ms": statistics.median(cluster),
        "later_ms": statistics.median(b - a for a, b in zip(server, cluster, strict=True)),
    }


def _throughput(systems: dict[str, list[str]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of concurrent streams, twice as many as two replicas run at once.

    systems: the addresses of each; the clients are divided among them.
    """
    # As many as run and wait in two replicas: with fewer, a replica whose requests end at the same
    # step computes small batches until the next ones arrive; the server always has some waiting.
    clients = 4 * arguments.batch
    found: dict[str, list[float]] = {name: [] for name in systems}
    used: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for seed in range(arguments.rounds + 1):  # the first one warms up
        # In another order each time, so that drift favours no system.
        for name in list(systems)[:: -1 if seed % 2 else 1]:
            before, begin = _cpu_seconds(), time.perf_counter()
            asyncio.run(_round(systems[name], clients, seed, arguments))
            seconds, after = time.perf_counter() - begin, _cpu_seconds()
            found[name].append(clients * arguments.repeats * arguments.answer / seconds)
            used[name].append({k: (after[k] - before.get(k, 0)) / seconds for k in after})
        print({name: round(rates[-1]) for name, rates in found.items()}, file=sys.stderr)
    rates = {name: values[1:] for name, values in found.items()}
    ratios = {
        name: [b / a for a, b in zip(rates["server"], rates[name], strict=True)]
        for name in ("ray", "servers")
    }
    shown = {name: _median(rows[1:]) for name, rows in used.items()}
    print("CPU seconds per second:", shown, file=sys.stderr)
    return {
        "kind": "throughput",
        "clients": clients,
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(ratios["ray"]),
        "ratio_without_ray": statistics.median(ratios["servers"]),
        "ratios": ratios,
        "cpu": shown,
    }


async def _round(
    addresses: list[str], clients: int, seed: int, arguments: argparse.Namespace
) -> None:
    each = clients // len(addresses)
    await asyncio.gather(
        *(
            load(
                address,
                arguments.repeats * each,
                arguments,
                concurrency=each,
                seed=100 * seed + number,
            )
            for number, address in enumerate(addresses)
        )
    )


def _cpu_seconds() -> dict[str, float]:
    """CPU seconds of this process and of each other kind of process."""
    found = {"client": time.process_time()}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            title = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            user, system = (place / "stat").read_text().rpartition(")")[2].split()[11:13]
        except OSError:  # it has ended
            continue
        kind = next((kind for kind, part in _PROCESSES.items() if part in title), None)
        if kind is not None and int(place.name) != os.getpid():
            seconds = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
            found[kind] = found.get(kind, 0.0) + seconds
    return found


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def _targets(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first, throughput = results
    later = "milliseconds that the first token comes later through Ray"
    return [
        command.target(later, first["later_ms"], _LATER_MS, "<="),
        command.target("tokens/s of two replicas / of one server", throughput["ratio"], _TIMES),
    ]


if __name__ == "__main__":
    main()
