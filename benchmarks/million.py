"""A million tokens on one machine: decode steps with keys and values in memory and on disk, from 8k
tokens to 1M.

    python -m benchmarks.million                                about 12 minutes on 2 idle cores
    python -m benchmarks.million --shapes bundled --lengths 8192,65536

A prompt of a million tokens takes hours on a CPU, so the cache is filled with random keys and
values of 8 bits instead. Neighbouring keys are not similar, not even those of the retrieval head,
so a refreshed selection has nothing in common with the one before: the worst case for loading.
Layers are offloaded to files as the cache grows, as planned.

Each shape and length runs in a process of its own, which first lowers its RLIMIT_DATA to its
current use plus `total_memory` and 5 % (at least 32 MiB). The system then refuses it more private
memory; mapped files, such as offloaded layers, do not count. The process must finish under this
limit. Its peak of private memory is compared with the largest size that the plan predicts up
to that length: just before a layer is offloaded, memory is full.

The result is the mean over whole periods of `refresh_every`, so that it includes the steps that
select. One line for each shape, length and policy is added to benchmarks/results/million.jsonl;
lines of this commit with the same settings are not measured again. `python -m
benchmarks.speed_pages` shows them. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

import benchmarks
import keyhole
from benchmarks import command
from keyhole.bench import measure
from keyhole.bench.model import make_weights, release_memory
from keyhole.bench.settings import PAGE_SIZE, SHAPES, DecodeSettings, specs
from keyhole.config import EngineConfig, SamplingParams, bytes_text, parse_bytes, require_known
from keyhole.engine.engine import Engine
from keyhole.engine.head_runner import load_head
from keyhole.errors import CapacityError
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.planner import MemoryPlan
from keyhole.policies import make_policy
from keyhole.retrieval.head import RetrievalHead

OUTPUT = benchmarks.results() / "million.jsonl"
BUNDLED = "bundled"
#: Bytes for weights, keys, values and a step: at a million tokens most layers do not fit.
TOTAL_MEMORY = {BUNDLED: 640 << 20, "llama-3.2-1b": 8 << 30}
#: The share by which the limit exceeds the plan, and by which the peak may.
TOLERANCE = 0.05
_LENGTHS = (8192, 65536, 262144, 1048576)
_SYSTEMS = "delta,spe_context:refresh_every=16"
_KV_DTYPE = "int8"
_STATUS = Path("/proc/self/status")
_LEAST_SLACK_BYTES = 32 << 20
#: Pages that are filled at once: few, as the limit counts their random numbers.
_CHUNK_PAGES = 256
_SPARE_POSITIONS = 1024  # after the cache, for the steps
_SAMPLE_S = 0.005
# Standard deviation of the random keys and values, as in `keyhole.bench.model.RandomKV`, and of
# bytes.
_KEY_STD, _VALUE_STD = 3.0, 1.0
_BYTE_STD = 127 / 3**0.5
# RLIMIT_DATA counts the whole stack of a thread.
_STACK_BYTES = 1 << 20
# Large tensors get mappings of their own, which are returned to the system with them (mallopt(3)).
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
    "MALLOC_ARENA_MAX": "1",
    "OMP_STACKSIZE": f"{_STACK_BYTES}B",
}


@dataclass(frozen=True, kw_only=True)
class MillionSettings:
    """The settings of a line. length: tokens in the cache before the first step."""

    shape: str
    length: int
    system: str
    total_memory: int
    repeat: int
    kv_dtype: str = _KV_DTYPE
    page_size: int = PAGE_SIZE

    @property
    def period(self) -> int:
        """Steps after which the selection has been refreshed once."""
        return int(getattr(make_policy(self.system), "refresh_every", 1))

    @property
    def steps(self) -> int:
        """Timed steps: whole periods, at least two of them (one if a period is a single step), and
        at least `repeat` steps.
        """
        least = max(self.repeat, 2 * self.period if self.period > 1 else 1)
        return -(-least // self.period) * self.period


def main() -> int:
    """Measures what is not stored yet, in a process for each shape and length."""
    parser = command.parser(__doc__, OUTPUT)
    parser.add_argument("--shapes", default=",".join(TOTAL_MEMORY), help=f"{BUNDLED}, or a shape")
    parser.add_argument("--lengths", default=",".join(map(str, _LENGTHS)), help="tokens")
    parser.add_argument("--systems", default=_SYSTEMS, help="policies that select")
    parser.add_argument("--memory", help="total_memory of all shapes; default: see TOTAL_MEMORY")
    parser.add_argument("--repeat", type=int, default=16, help="timed steps at least")
    parser.add_argument("--folder", help="folder of offloaded layers; default: the temporary one")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        _child([MillionSettings(**one) for one in json.loads(arguments.case)], arguments.folder)
        return 0
    cases = _missing(_cases(arguments), arguments.output)
    header = command.header("million", "benchmarks.million", arguments.note)
    for case in tqdm(cases, desc="shapes and lengths", disable=None):
        for result in _run(case, arguments.folder):
            benchmarks.append(arguments.output, header | result)
            print(told(result), flush=True)
    print(f"written: {arguments.output}; python -m benchmarks.speed_pages shows it")
    return 0


def _cases(arguments: argparse.Namespace) -> list[list[MillionSettings]]:
    """The settings of each process, short ones first."""
    shapes, lengths = arguments.shapes.split(","), sorted(map(int, arguments.lengths.split(",")))
    for shape in shapes:
        require_known("shape", shape, (BUNDLED, *SHAPES))
    given = None if arguments.memory is None else parse_bytes(arguments.memory, "--memory")
    return [
        [
            MillionSettings(
                shape=shape,
                length=length,
                system=system,
                total_memory=given or TOTAL_MEMORY[shape],
                repeat=arguments.repeat,
            )
            for system in specs(arguments.systems.split(","))
        ]
        for length in lengths
        for shape in shapes
    ]


def _missing(cases: list[list[MillionSettings]], output: Path) -> list[list[MillionSettings]]:
    """The cases without a line of this commit."""
    commit = measure.commit()
    lines = benchmarks.read_lines(output)
    there = [line["settings"] for line in lines if line["commit"] == commit]
    left = [[one for one in case if asdict(one) not in there] for case in cases]
    return [case for case in left if case]


def _run(case: list[MillionSettings], folder: str | None) -> Iterator[dict[str, Any]]:
    """The results of a case, as its process prints them."""
    child = [sys.executable, "-m", "benchmarks.million"]
    child += ["--case", json.dumps([asdict(one) for one in case])]
    if folder is not None:
        child += ["--folder", folder]
    environment = os.environ | _ENVIRONMENT
    with subprocess.Popen(
        child, stdout=subprocess.PIPE, text=True, env=environment, cwd=benchmarks.ROOT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"{shlex.join(child)} ended with {process.returncode}")


def _child(case: list[MillionSettings], folder: str | None) -> None:
    """Measures the policies of one shape and length under a limit, and prints a line for each."""
    threading.stack_size(_STACK_BYTES)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        _warm_up(case, place)
        before = Memory.now()
        memory = case[0].total_memory
        slack = max(int(TOLERANCE * memory), _LEAST_SLACK_BYTES)
        limit = before.data + memory + slack
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        model = make_model(case[0].shape, case[0].length)
        for settings in case:
            result = measure_case(model, settings, place, before.anonymous)
            about = {"settings": asdict(settings), "limit_bytes": limit, "program": asdict(before)}
            print(json.dumps(about | result), flush=True)
            release_memory()


def _warm_up(case: list[MillionSettings], folder: str) -> None:
    """A short case of each policy, so that all code is loaded before memory is measured."""
    model = make_model(BUNDLED, 2048)
    for settings in case:
        short = replace(settings, shape=BUNDLED, length=2048, repeat=1, total_memory=16 << 20)
        measure_case(model, short, folder, 0)
    del model
    release_memory()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of this process (proc(5)).

    data: VmData, which RLIMIT_DATA limits. anonymous: RssAnon, resident private memory.
    """

    data: int
    anonymous: int

    @classmethod
    def now(cls) -> Memory:
        """The current values, as the system reports them."""
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        data, anonymous = (1024 * int(fields[name].split()[0]) for name in ("VmData", "RssAnon"))
        return cls(data=data, anonymous=anonymous)


class _Peak(threading.Thread):
    """Samples the memory of this process until `stop`; `anonymous` and `data` are the largest."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = self.data = 0
        self._end = threading.Event()

    def run(self) -> None:
        """Samples."""
        while True:
            now = Memory.now()
            self.anonymous = max(self.anonymous, now.anonymous)
            self.data = max(self.data, now.data)
            if self._end.wait(_SAMPLE_S):
                return

    def stop(self) -> None:
        """Takes the last sample."""
        self._end.set()
        self.join()


@contextmanager
def peak_memory() -> Iterator[_Peak]:
    """The largest memory use within the block."""
    peak = _Peak()
    peak.start()
    try:
        yield peak
    finally:
        peak.stop()


def make_model(shape: str, length: int) -> Model:
    """The bundled model, for any length, or a shape with random weights in bfloat16."""
    if shape == BUNDLED:
        return replace(load(keyhole.tiny(), "cpu"), max_length=length + _SPARE_POSITIONS)
    return make_weights(DecodeSettings(contexts=(length,), shape=shape, device="cpu")).keyhole


def measure_case(
    model: Model, settings: MillionSettings, folder: str, anonymous: int
) -> dict[str, Any]:
    """Fills a cache, decodes over it, and returns the result.

    anonymous: private bytes of the process before the model. CapacityError if disk or memory are
    too small.
    """
    policy = make_policy(settings.system)
    with peak_memory() as peak:
        engine = Engine(model, policy, _config(settings, folder), head=_head(model, settings))
        offloader = engine.offloader
        assert offloader is not None
        plan = offloader.plan
        planned = plan.offloaded(settings.length + settings.steps + PAGE_SIZE)
        _check_disk(folder, plan.model.offloaded_bytes(settings.length, planned))
        begin = time.perf_counter()
        sequence = _start(engine, settings)
        filled = time.perf_counter()
        step_ms: list[float] = []
        traffic = offloader.prefetcher.total
        for step in range(settings.period + settings.steps):
            if step == settings.period:
                traffic, step_ms = offloader.prefetcher.total, []
            step_ms.append(measure.time_ms(engine.step, model.device))
        assert not sequence.is_finished, "more steps than tokens"
        total = offloader.prefetcher.total
        length, moved = len(sequence.tokens), offloader.offloaded
        used = engine.cache.in_use / engine.cache.capacity
        result = {
            "step_ms": statistics.fmean(step_ms),
            "median_ms": statistics.median(step_ms),
            "all_ms": [round(one, 3) for one in step_ms],
            "stall_ms": (total.stall_ms - traffic.stall_ms) / settings.steps,
            "moved_bytes": (total.moved_bytes - traffic.moved_bytes) / settings.steps,
            "hit_rate": _hit_rate(total.hits - traffic.hits, total.misses - traffic.misses),
            "offloaded_layers": moved,
            "resident_bytes": int(used * engine.cache.resident_bytes),
            "offloaded_bytes": int(used * engine.cache.offloaded_bytes),
            "plan_bytes": largest_planned(plan, length),
            "plan_terms": plan.model.terms(plan.model.pages(length), moved),
            "fill_s": round(filled - begin, 1),
        }
        engine.abort(sequence)
        offloader.prefetcher.close()
    return result | {"peak_bytes": peak.anonymous - anonymous, "peak_data_bytes": peak.data}


def largest_planned(plan: MemoryPlan, length: int) -> int:
    """The most planned bytes of a sequence that grows to `length` tokens."""
    lengths = {min(threshold, length) for threshold in plan.thresholds if threshold} | {length}
    return max(plan.model.bytes(n, plan.offloaded(n)) for n in lengths)


def _config(settings: MillionSettings, folder: str) -> EngineConfig:
    return EngineConfig(
        max_batch=1,
        page_size=settings.page_size,
        prefill_chunk=PAGE_SIZE,
        total_memory=settings.total_memory,
        offload=folder,
        kv_dtype=settings.kv_dtype,
    )


def _head(model: Model, settings: MillionSettings) -> RetrievalHead | None:
    policy = make_policy(settings.system)
    if not policy.wants_head:
        return None
    return load_head(policy, model) if model.head else RetrievalHead.random(model.network)


def _check_disk(folder: str, need: int) -> None:
    """CapacityError if the folder has less space than the offloaded layers need."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < need:
        raise CapacityError(
            f"{bytes_text(need)} of keys and values are to be offloaded, {folder} has "
            f"{bytes_text(free)}; name another --folder, or shorter --lengths"
        )


def _start(engine: Engine, settings: MillionSettings) -> Any:
    """Fills the cache, and runs a request over it up to its first decode step."""
    random = np.random.default_rng(settings.length)
    prompt = array("i", random.integers(256, size=settings.length + 1, dtype=np.int32))
    steps = settings.period + settings.steps + 1
    given = random.integers(engine.model.vocab_size, size=steps).tolist()
    pages = fill(engine, settings.length // PAGE_SIZE)
    assert engine.prefix is not None
    engine.prefix.insert(prompt[:-1], pages, settings.length)
    engine.cache.release(pages)
    del pages
    assert engine.offloader is not None
    # No request holds the pages yet, so layers would become resident again.
    engine.offloader.least = engine.offloader.offloaded
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    sequence = engine.add(prompt, params, given=given)
    del prompt
    while not sequence.is_decoding:
        engine.step()
    return sequence


def fill(engine: Engine, count: int) -> list[int]:
    """Allocates `count` pages and writes random keys, values and side data; returns them."""
    random, pages = np.random.Generator(np.random.SFC64(0)), list[int]()
    with tqdm(total=count, desc="fill", unit="page", leave=False, disable=None) as bar:
        while len(pages) < count:
            fresh = engine.cache.allocate(min(_CHUNK_PAGES, count - len(pages)))
            assert fresh is not None, "the plan has room"
            _write(engine, torch.tensor(fresh), random)
            pages += fresh
            bar.update(len(fresh))
    return pages


def _write(engine: Engine, pages: Tensor, random: np.random.Generator) -> None:
    """Writes some pages, int64 [n], in every layer."""
    cache = engine.cache
    for tensor in cache.common.values():
        drawn = _bytes(random, (len(pages), *tensor.shape[1:]))
        tensor[pages] = drawn.to(tensor) / _BYTE_STD
    whole = torch.full_like(pages, cache.page_size)
    for keys, values, data in zip(cache.keys, cache.values, cache.data, strict=True):
        for rows, std in ((keys, _KEY_STD), (values, _VALUE_STD)):
            rows[pages] = made_rows(random, (len(pages), *rows.shape[1:]), std)
        if data:
            engine.policy.on_append(keys, data, pages, whole)


def made_rows(random: np.random.Generator, shape: tuple[int, ...], std: float) -> Tensor:
    """Random rows of 8 bits [..., D + 4] of this standard deviation, with equal scales."""
    rows = _bytes(random, shape)
    scale = torch.tensor([std / _BYTE_STD], dtype=torch.float32)
    rows[..., -scale.nbytes :] = scale.view(torch.int8)
    return rows


def _bytes(random: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Uniform from -127 to 127, int8: faster than any normal distribution."""
    size = int(np.prod(shape))
    drawn = random.integers(1 << 64, size=-(-size // 8), dtype=np.uint64).view(np.int8)[:size]
    return torch.from_numpy(np.maximum(drawn, -127, out=drawn)).view(shape)


def _hit_rate(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def told(result: dict[str, Any]) -> str:
    """A result in a line."""
    settings = result["settings"]
    hits = result["hit_rate"]
    ratio = result["peak_bytes"] / result["plan_bytes"]
    return (
        f"{settings['shape']}, {settings['length']:,} tokens, {settings['system']}: "
        f"{result['step_ms']:.1f} ms a step; {bytes_text(result['resident_bytes'])} in memory, "
        f"{bytes_text(result['offloaded_bytes'])} on disk ({result['offloaded_layers']} layers), "
        f"{'nothing loaded' if hits is None else f'{hits:.0%} already there'}; peak "
        f"{bytes_text(result['peak_bytes'])}, {ratio:.2f} of the plan; limit "
        f"{bytes_text(result['limit_bytes'])} held"
    )


if __name__ == "__main__":
    sys.exit(main())
