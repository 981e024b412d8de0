"""The cost of Ray and the gain of a second replica: `keyhole serve` compared with two replicas.

    make test-ray ARGS=--collect-only  # sets up .venv-ray
    .venv-ray/bin/python -m benchmarks.serving.ray_replicas --output benchmarks/results/ray.jsonl

A server and two replicas, with one thread each, run the same random model and are interleaved:
single first tokens, then rounds of streams. Client, server and replicas share the cores; the
result is the median of the rounds' ratios.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Ray lowers its priority (nice 15); here it is compared with a program that does not.
os.environ |= {"RAY_worker_niceness": "0"}

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

_BATCH = 8
#: Clients: as many as two replicas run at once.
_CLIENTS = 2 * _BATCH
_LATER_MS, _TIMES = 10.0, 1.9
_PORT = 18356
_ENGINE = {"memory": "512MiB", "max_batch": _BATCH, "prefix_cache": False}


def main() -> None:
    """Measures, prints and adds a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-tokens", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model, of 12 layers")
    parser.add_argument("--note", default="")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    command = ("python", "-m", "benchmarks.serving.ray_replicas")
    line = measure.header("ray", torch.device("cpu"), arguments.note, command)
    line["versions"]["ray"] = ray.__version__
    line["settings"] = vars(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, arguments.hidden)
        with serving(folder) as alone, replicas(folder) as both:
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
def serving(model: str) -> Iterator[str]:
    """The address of one `keyhole serve`."""
    command = [sys.executable, "-m", "keyhole", "serve", model, "--port", "0", "--no-prefix-cache"]
    command += ["--max-batch", str(_BATCH), "--memory", str(_ENGINE["memory"])]
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
def replicas(model: str) -> Iterator[str]:
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
        serve.run(app({"model": model, "num_replicas": 2, "num_cpus": 1, **_ENGINE}))
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
    server, cluster = [], []
    for seed in range(arguments.first_tokens + 3):
        for address, found in ((alone, server), (both, cluster)):
            got = _load(address, 1, arguments, answer_length="2", seed=seed)
            found.append(got["first_token_ms"]["p50"])
    later = [b - a for a, b in zip(server[3:], cluster[3:], strict=True)]  # three warm up
    return {
        "kind": "first_token",
        "server_ms": statistics.median(server[3:]),
        "ray_ms": statistics.median(cluster[3:]),
        "later_ms": statistics.median(later),
    }


def _throughput(alone: str, both: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of as many concurrent streams as two replicas run."""
    server, cluster = [], []
    for seed in range(arguments.rounds + 1):  # the first one warms up
        for address, found in ((alone, server), (both, cluster)):
            more = {"requests": 3 * _CLIENTS, "concurrency": _CLIENTS, "seed": seed}
            found.append(_load(address, _CLIENTS, arguments, **more)["tokens_per_s"])
        print(f"server {server[-1]:.0f} tokens/s, ray {cluster[-1]:.0f}", file=sys.stderr)
    ratios = [b / a for a, b in zip(server[1:], cluster[1:], strict=True)]
    return {
        "kind": "throughput",
        "clients": _CLIENTS,
        "server_tokens_per_s": statistics.median(server[1:]),
        "ray_tokens_per_s": statistics.median(cluster[1:]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


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
