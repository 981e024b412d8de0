"""The cost of Ray and the gain of a second replica: `keyhole serve` compared with two replicas.

    make test-ray ARGS=--collect-only  # sets up .venv-ray
    .venv-ray/bin/python -m benchmarks.serving.ray_replicas --output benchmarks/results/ray.jsonl

A server and two replicas, with one thread each, run the same random model and take turns: single
first tokens, then rounds of streams. Client, server, replicas and all of Ray's own processes share
the cores; the result is the median of the rounds' ratios. `cpu` in a result is the CPU time of
each kind of process per second. Ray runs with the settings for high throughput of docs/ray.md,
unless the environment has others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Ray lowers its priority (nice 15); here it is compared with a program that does not.
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

import keyhole
from keyhole.bench import measure
from keyhole.bench.serve import measure_load
from keyhole.bench.settings import ServeSettings
from keyhole.eval.line_file import LineFile
from keyhole.integrations.ray import app

_LATER_MS, _TIMES = 10.0, 1.9
_PORT = 18356
_ENGINE = {"memory": "512MiB", "prefix_cache": False}
#: How the processes of Ray are recognised by their command lines; the first that fits.
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--first-tokens", type=int, default=41)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model, of 12 layers")
    parser.add_argument("--batch", type=int, default=16, help="max_batch; a quarter of the clients")
    parser.add_argument("--stream-interval", type=float, default=0.5, help="seconds")
    parser.add_argument("--note", default="")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    command = ("python", "-m", "benchmarks.serving.ray_replicas")
    line = measure.header("ray", torch.device("cpu"), arguments.note, command)
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
        with serving(folder, engine) as alone, replicas(folder, engine) as both:
            line["results"] = [
                _first_token(alone, both, arguments),
                _throughput(alone, both, arguments),
            ]
    line["bars"] = _bars(line["results"])
    for bar in line["bars"]:
        print("met" if bar["met"] else "MISSED", bar["bar"], f"{bar['value']:.2f}", bar["wanted"])
    if arguments.output:
        LineFile(arguments.output).add(line)


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
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@contextmanager
def serving(model: str, engine: dict[str, Any]) -> Iterator[str]:
    """The address of one `keyhole serve`."""
    command = [sys.executable, "-m", "keyhole", "serve", model, "--port", "0", "--no-prefix-cache"]
    for name in ("memory", "max_batch", "stream_interval"):
        command += [f"--{name.replace('_', '-')}", str(engine[name])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = next(filter(None, (re.search(r" at (http://\S+)/v1", x) for x in server.stderr)))
        # The log is read so that the server never blocks on a full pipe.
        reader = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        try:
            yield found[1]
        finally:
            server.terminate()
            server.wait()
            reader.wait()


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


def _load(address: str, count: int, arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    settings = {
        "url": address,
        "requests": count,
        "concurrency": count,
        "prompt_length": str(arguments.prompt),
        "answer_length": str(arguments.answer),
    }
    found = asyncio.run(measure_load(ServeSettings(**settings | more)))
    result: dict[str, Any] = found["results"][0]
    return result


def _first_token(alone: str, both: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token of a single request."""
    found: dict[str, list[float]] = {alone: [], both: []}
    for seed in range(arguments.first_tokens + 3):
        for address in _turns(alone, both, seed):
            got = _load(address, 1, arguments, answer_length="2", seed=seed)
            found[address].append(got["first_token_ms"]["p50"])
    server, cluster = found[alone][3:], found[both][3:]  # three warm up
    return {
        "kind": "first_token",
        "server_ms": statistics.median(server),
        "ray_ms": statistics.median(cluster),
        "later_ms": statistics.median(b - a for a, b in zip(server, cluster, strict=True)),
    }


def _throughput(alone: str, both: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of concurrent streams, twice as many as two replicas run at once."""
    # As many as run and wait in two replicas: with fewer, a replica whose requests end at the same
    # step computes small batches until the next ones arrive; the server always has some waiting.
    clients = 4 * arguments.batch
    found: dict[str, list[float]] = {alone: [], both: []}
    used: dict[str, list[dict[str, float]]] = {alone: [], both: []}
    for seed in range(arguments.rounds + 1):  # the first one warms up
        for address in _turns(alone, both, seed):
            before, begin = _cpu_seconds(), time.perf_counter()
            got = _load(address, 2 * clients, arguments, concurrency=clients, seed=seed)
            seconds, after = time.perf_counter() - begin, _cpu_seconds()
            found[address].append(got["tokens_per_s"])
            used[address].append({k: (after[k] - before.get(k, 0)) / seconds for k in after})
        print(f"server {found[alone][-1]:.0f} tokens/s, ray {found[both][-1]:.0f}", file=sys.stderr)
    server, cluster = found[alone][1:], found[both][1:]
    shown = {"server": _median(used[alone][1:]), "ray": _median(used[both][1:])}
    print("CPU seconds per second:", shown, file=sys.stderr)
    ratios = [b / a for a, b in zip(server, cluster, strict=True)]
    return {
        "kind": "throughput",
        "clients": clients,
        "server_tokens_per_s": statistics.median(server),
        "ray_tokens_per_s": statistics.median(cluster),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu": shown,
    }


def _turns(alone: str, both: str, seed: int) -> tuple[str, str]:
    """In alternating order, so that drift favours neither."""
    return (both, alone) if seed % 2 else (alone, both)


def _cpu_seconds() -> dict[str, float]:
    """CPU seconds of this process and of each kind of process beside it."""
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


def _bars(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first, throughput = results
    later, ratio = first["later_ms"], throughput["ratio"]
    return [
        {
            "bar": "milliseconds that the first token comes later through Ray",
            "value": later,
            "wanted": f"<= {_LATER_MS}",
            "met": later <= _LATER_MS,
        },
        {
            "bar": "tokens/s of two replicas / of one server",
            "value": ratio,
            "wanted": f">= {_TIMES}",
            "met": ratio >= _TIMES,
        },
    ]


if __name__ == "__main__":
    main()
