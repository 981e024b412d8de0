"""Runs a sequence whose keys and values exceed a memory limit that Linux itself enforces.

    python -m benchmarks.beyond_memory

The bundled model generates a long derivation. Each case runs in a separate process that loads the
model, answers a short item, and then lowers its RLIMIT_DATA to its current use plus some working
memory plus space for a part of the keys and values. From then on the system refuses it more
private memory (anonymous and writable: mmap and brk). Shared file mappings, such as offloaded
layers, do not count, and memory allocated before is not freed.

    full, memory given      refused before it begins, by an error that names offload=
    full, memory not given  the cache grows until the system refuses; CapacityError
    delta, spe_context      layers are offloaded one by one, and the derivation completes

The working memory includes what growth needs: one layer is held twice while it is copied.
spe_context is included if its head is stored with the bundled model. One line is added to
benchmarks/results/beyond-memory.jsonl. About two minutes on 2 cores. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import benchmarks
import keyhole
from keyhole import LLM, CapacityError, SamplingParams
from keyhole.bench import measure
from keyhole.bench.model import release_memory
from keyhole.engine.engine import Engine
from keyhole.eval.tiny_language.tasks import is_correct, make, share_before_first_error
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import make_policy

_STATUS = Path("/proc/self/status")
_PAGE_SIZE = 16
_CHUNK = 256  # prompt tokens at once: keeps activations small compared with the cache
# Tokens that a step may read. spe_context's head needs many to find the facts of so long a text.
_BUDGETS = {"delta": 256, "spe_context": 2048}
# A thread's stack counts in full, used or not, and loading during computation needs two threads.
_STACK_BYTES = 1 << 20
# Large tensors get memory of their own, which goes back to the system when they do; glibc would
# come to keep it for later (mallopt(3), M_MMAP_THRESHOLD).
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
    "MALLOC_ARENA_MAX": "1",
    "OMP_STACKSIZE": f"{_STACK_BYTES}B",
}


def main() -> int:
    """Runs every case, prints and stores the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=7680, help="of the sequence, answer included")
    parser.add_argument("--seed", type=int, default=0, help="number of the item")
    parser.add_argument("--share", type=float, default=0.6, help="memory=, relative to all KV")
    parser.add_argument("--compute", type=int, default=7, help="working memory, MiB")
    parser.add_argument("--note", default="", help="what a reader should know of this run")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(_limited(arguments)))
        return 0
    cases = ["full, memory given", "full, memory not given", "delta"]
    if (Path(keyhole.tiny()) / "keyhole-head").is_dir():
        cases.append("spe_context")
    line = measure.header("beyond-memory", torch.device("cpu"), arguments.note)
    settings = {name: value for name, value in vars(arguments).items() if name != "case"}
    line |= {
        "command": shlex.join(["python", "-m", "benchmarks.beyond_memory", *sys.argv[1:]]),
        "settings": settings,
        "results": [],
    }
    for case in cases:
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        environment = os.environ | _ENVIRONMENT
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
        line["results"].append(json.loads(done.stdout.splitlines()[-1]))
        print(_told(line["results"][-1]), flush=True)
    output = benchmarks.results() / "beyond-memory.jsonl"
    benchmarks.append(output, line)
    print(f"written: {output}")
    return 0


def _limited(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one case in this process."""
    threading.stack_size(_STACK_BYTES)
    item = make("derive", arguments.words, arguments.seed)
    model = load(keyhole.tiny(), "cpu")
    assert model.tokenizer is not None, "the bundled model has one"
    prompt = model.tokenizer(item.prompt).input_ids
    answer_tokens = len(item.answer.split()) + 1  # and the end
    length, token_bytes = len(prompt) + answer_tokens, model.geometry(_PAGE_SIZE).token_bytes
    dense = -(-length // _PAGE_SIZE) * _PAGE_SIZE * token_bytes
    given = int(arguments.share * dense)
    with tempfile.TemporaryDirectory() as folder:
        _warm_up(model, folder)
        program = _status("VmData")
        limit = program + given + (arguments.compute << 20)
        assert program + dense > limit, "dense keys and values must not fit"
        result: dict[str, Any] = {
            "case": arguments.case,
            "token_budget": _BUDGETS.get(arguments.case),
            "limit_bytes": limit,
            "program_bytes": program,
            "memory_bytes": given,
            "dense_bytes": dense,
            "dense_tokens_in_limit": (limit - program) // token_bytes,
            "prompt_tokens": len(prompt),
            "answer_tokens": answer_tokens,
        }
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        begin = time.perf_counter()
        engine = _engine(model, arguments, given, folder)
        peaks = {"VmData": 0, "RssAnon": 0, "RssFile": 0}
        try:
            params = SamplingParams(max_tokens=answer_tokens, temperature=0.0)
            request = engine.add(prompt, params)
        except CapacityError as error:
            return result | {"error": f"CapacityError: {error}", "tokens_reached": 0}
        try:
            while engine.has_work:
                engine.step()
                peaks = {name: max(peak, _status(name)) for name, peak in peaks.items()}
        except CapacityError as error:
            result["error"] = f"CapacityError: {error}"
        return result | {
            "right": is_correct(item, request.detokenizer.text),
            "right_share": share_before_first_error(item, request.detokenizer.text),
            "tokens_reached": request.num_computed,
            "offloaded_layers": engine.offloader.offloaded if engine.offloader else 0,
            "resident_bytes": engine.cache.resident_bytes,
            "offloaded_bytes": engine.cache.offloaded_bytes,
            "peak_bytes": peaks | {"VmHWM": _status("VmHWM")},
            "seconds": round(time.perf_counter() - begin, 1),
        }


def _engine(model: Model, arguments: argparse.Namespace, given: int, folder: str) -> Engine:
    """An engine for one request, with the case's settings."""
    name, _, how = arguments.case.partition(", ")
    options: dict[str, Any] = {} if how == "memory not given" else {"memory": given}
    settings = {}
    if name != "full":
        options["offload"], settings = folder, {"token_budget": _BUDGETS[name]}
    policy = make_policy(name, settings)
    options |= {"max_batch": 1, "page_size": _PAGE_SIZE, "prefill_chunk": _CHUNK}
    return LLM(model, policy, prefix_cache=False, **options).engine


def _warm_up(model: Model, folder: str) -> None:
    """A short answer with offloaded layers, so that all code is loaded before the measurement."""
    item = make("derive", 512, 0)
    llm = LLM(
        model,
        make_policy("delta", {"token_budget": 64}),
        memory="640KiB",
        offload=folder,
        max_batch=1,
        prefill_chunk=_CHUNK,
    )
    done = llm.generate(item.prompt, SamplingParams(max_tokens=64, temperature=0.0))
    assert done.stats.offloaded_layers, "layers should have moved"
    del llm
    release_memory()


def _status(name: str) -> int:
    """Bytes, from proc(5).

    RLIMIT_DATA limits VmData. RssAnon is private memory, RssFile mapped files including offloaded
    layers, VmHWM the peak of their sum.
    """
    text = _STATUS.read_text()
    return 1024 * int(text[text.index(f"{name}:") :].split()[1])


def _told(result: dict[str, Any]) -> str:
    """Describes a case in a few lines."""

    def mib(name: str) -> str:
        return f"{result[name] / 2**20:.1f} MiB"

    length = result["prompt_tokens"] + result["answer_tokens"]
    lines = [
        f"{result['case']}: limit {mib('limit_bytes')}, {mib('program_bytes')} taken before; "
        f"memory {mib('memory_bytes')}; {length:,} tokens take {mib('dense_bytes')} dense, "
        f"{result['dense_tokens_in_limit']:,} would fit"
    ]
    if "peak_bytes" in result:
        peaks = (f"{name} {size / 2**20:.1f}" for name, size in result["peak_bytes"].items())
        lines += [
            f"  {result['tokens_reached']:,} tokens in {result['seconds']} s, "
            f"{result['right_share']:.1%} right before the first wrong word; "
            f"{result['offloaded_layers']} layers offloaded; resident {mib('resident_bytes')}, "
            f"offloaded {mib('offloaded_bytes')}",
            f"  peaks in MiB: {', '.join(peaks)}",
        ]
    return "\n".join([*lines, *([f"  {result['error']}"] if "error" in result else [])])


if __name__ == "__main__":
    sys.exit(main())
