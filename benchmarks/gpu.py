"""Checks and measurements that need a CUDA device: `make gpu`, or one part by `make gpu PART=2`.

    1  tests of kernels: Triton's and torch's equal their twins
    2  the decode benchmark on the device
    3  trains the bundled model on the device, resuming an earlier run, and exports it
    4  to 14: the papers' headline settings and ours, in the order of `benchmarks.paper.settings`
    15 tests of CUDA graphs, of fused layers, and of layers offloaded to the host
    16 tests of the engine: it equals transformers, and itself on the CPU
    17 all other tests marked `gpu`

Without PART, the tests run first and the training last, as far as the time suffices; parts that do
not fit are listed, and get nearly nine minutes when run alone. Each failed test is printed at once
and logged in `tests-1.log` and so on in OUT or `runs/gpu/`. This runs in a bare copy of the tree
with only torch, transformers, safetensors, numpy and pytest installed, and without a network.
Every part is a process with a time limit. Results go to the folder named by the environment
variable OUT, or to `benchmarks/results/` and `runs/tiny-gpu/`; an earlier training state in
`runs/tiny-gpu/` is resumed. Without a CUDA device, this imports, parses and collects everything
that a device would run, and runs each part with tiny shapes on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

# Set before torch is loaded: idle threads must not spin on a core that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.paper.settings import HEADLINES

ROOT = Path(__file__).parents[1]
STATE = ROOT / "runs/tiny-gpu"

# A call takes less than nine minutes.
_BUDGET_S = 530.0
# The longest time that a part with tests or one of the papers' settings may take.
_ALONE_S = 520.0
# Estimated time for compilation and a hundred tests on a new device.
_TESTS_S = 240.0
_DECODE_S = 150.0
# Time of the training process outside training: start, snapshots and export.
_AROUND_TRAINING_S = 75.0
# Larger files are stored in pieces, which are easier to copy between machines.
_PIECE_BYTES = 12 << 20


#: Parts with tests: title and files; the last part has all files that no other part has.
TESTS = {
    1: (
        "tests of kernels",
        [
            f"test_{name}.py"
            for name in ("kernels", "moves", "projections", "paged_flash", "prefill")
        ],
    ),
    15: (
        "tests of graphs, of fused layers and of layers on the host",
        ["test_graphs.py", "test_fused_layer.py", "test_offload.py"],
    ),
    16: ("tests of the engine", ["test_device.py", "test_documents.py"]),
    17: ("all other tests", []),
}
_TRAINING = 3
#: The papers' headline settings, one part each.
SETTINGS = dict(enumerate(HEADLINES, start=4))
#: The order of parts without PART: training is last, as it uses all remaining time.
ORDER = (*TESTS, 2, *SETTINGS, _TRAINING)


@dataclass(frozen=True, kw_only=True)
class GpuPart:
    """A part: number, title, time limit, commands, and functions that run before and after them.

    least_s: the part is skipped if less time is left. small: the commands without a device.
    """

    number: int
    title: str
    limit_s: float
    least_s: float
    commands: list[list[str]]
    small: list[list[str]] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


def parts(out: Path | None, work: Path, limit_s: float) -> list[GpuPart]:
    """All parts; results are written below `out`, the training runs in `work`."""
    results = out or ROOT / "benchmarks/results"
    state = out / "tiny" if out else STATE
    python = [sys.executable, "-m"]
    decode = [*python, "keyhole", "bench", "decode"]
    decode += ["--systems", "transformers_sdpa,full,delta,streaming_llm"]
    small_decode = [*decode, "--device", "cpu", "--shape", "smoke", "--contexts", "64"]
    small_decode += ["--repeat", "1", "--output", str(work / "decode.jsonl")]
    # As many contexts and repetitions as the time limit allows.
    decode += ["--device", "cuda", "--repeat", "21", "--contexts", "2048,8192,32768"]
    decode += ["--output", str(results / "decode.jsonl")]
    train = [*python, "recipes.tiny_model.train", "--out", str(work)]
    small_train = [*train, "--minutes", "0.05"]
    train += ["--device", "cuda"]
    train += ["--batch-scale", "8", "--workers", "8"]
    train += ["--minutes", f"{max(0.1, (limit_s - _AROUND_TRAINING_S) / 60):.2f}"]
    if pieces(STATE / "training.pt"):
        train.append("--resume")
    export = [*python, "recipes.tiny_model.export", "--run", str(work)]
    export += ["--out", str(work / "checkpoint")]
    headlines = [*python, "benchmarks.headlines"]
    small_headlines = [*headlines, "--small", "--device", "cpu"]
    headlines += ["--device", "cuda"]
    headlines += ["--output", str(results / "headlines.jsonl")]
    return [
        *(
            GpuPart(
                number=number,
                title=title,
                limit_s=_ALONE_S,
                least_s=_TESTS_S,
                commands=[_tests(number, (out or ROOT / "runs/gpu") / f"tests-{number}.log")],
                small=_small_tests(number),
            )
            for number, (title, _) in TESTS.items()
        ),
        GpuPart(
            number=2,
            title="decode benchmark",
            limit_s=_DECODE_S,
            least_s=_DECODE_S,
            commands=[decode],
            small=[small_decode],
        ),
        *(
            GpuPart(
                number=number,
                title=name,
                limit_s=_ALONE_S,
                least_s=_ALONE_S,
                commands=[[*headlines, name]],
                small=[[*small_headlines, name]],
            )
            for number, name in SETTINGS.items()
        ),
        GpuPart(
            number=_TRAINING,
            title="training of the bundled model",
            limit_s=_BUDGET_S,
            least_s=2 * _AROUND_TRAINING_S,
            commands=[train, export],
            small=[small_train, export],
            before=lambda: restore(STATE, work),
            after=lambda: keep(work, state),
        ),
    ]


def _tests(number: int, log: Path) -> list[str]:
    """The command of a part with tests."""
    _, files = TESTS[number]
    folder = ["tests/gpu"]
    for _, others in TESTS.values():
        folder += [f"--ignore=tests/gpu/{name}" for name in others]
    # -W default: the device's versions are not the pinned ones and may warn.
    options = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    options += ["-p", "tests.gpu.at_once", "--log", str(log)]
    chosen = [f"tests/gpu/{name}" for name in files] or folder
    return [sys.executable, "-m", "pytest", *chosen, *options]


def _small_tests(number: int) -> list[list[str]]:
    """The commands for the tests of a part, or for their cases, that run without a device."""
    chosen = {
        1: ["tests/gpu/test_interpreted.py"],
        15: ["tests/gpu/test_cases.py", "-k", "recorded"],
        16: ["tests/gpu/test_cases.py", "-k", "decodes"],
        17: ["tests/gpu/test_streams.py"],
    }
    if number == 1 and importlib.util.find_spec("triton") is None:
        return []
    options = ["-W", "default", "-p", "no:cacheprovider"]
    return [[sys.executable, "-m", "pytest", *chosen[number], *options]]


def run_parts(numbers: Iterable[int], out: Path | None, work: Path) -> bool:
    """Runs parts in sequence while time is left; returns whether all that ran succeeded."""
    begin, good = time.monotonic(), True
    for number in numbers:
        left = _BUDGET_S - (time.monotonic() - begin)
        (part,) = (part for part in parts(out, work, left) if part.number == number)
        if left < part.least_s:
            print(f"== part {number}: {part.title}: skipped, no time left; run PART={number}")
        else:
            good = run(part, min(left, part.limit_s)) and good
    return good


def run(part: GpuPart, limit_s: float) -> bool:
    """Runs the commands in sequence within the limit; returns whether all succeeded."""
    print(f"== part {part.number}: {part.title}, at most {limit_s:.0f} s", flush=True)
    begin, good = time.monotonic(), True
    part.before()
    for command in part.commands:
        print("$", *command, flush=True)
        left = limit_s - (time.monotonic() - begin)
        try:
            done = subprocess.run(
                command, check=False, cwd=ROOT, env=environment(), timeout=max(1.0, left)
            )
            good = good and done.returncode == 0
        except subprocess.TimeoutExpired:
            print(f"stopped after {limit_s:.0f} s", flush=True)
            good = False
    part.after()
    spent = time.monotonic() - begin
    print(f"== part {part.number}: {'passed' if good else 'FAILED'} in {spent:.0f} s", flush=True)
    return good


def environment() -> dict[str, str]:
    """This process's environment with this tree on the path, passive threads and no network."""
    ours = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    # Caches of tens of gigabytes are allocated and freed: fragmentation must not make one fail.
    ours["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return os.environ | ours | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def dry_run(chosen: list[GpuPart]) -> bool:
    """Checks what needs no device: imports, arguments, names of tests, runs of tiny shapes."""
    print("no CUDA device: dry run")
    good = True
    for part in chosen:
        print(f"== part {part.number}: {part.title}, at most {part.limit_s:.0f} s")
        for command in part.commands:
            print("$", *command)
            good = _is_understood(*command[2:]) and good
    for part in chosen:
        in_small = replace(part, commands=part.small, before=lambda: None, after=lambda: None)
        if part.small:
            good = run(in_small, _ALONE_S) and good
        else:
            print(f"== part {part.number}: small run skipped: triton cannot be imported")
    print("dry run passed" if good else "dry run FAILED")
    return good


def _is_understood(module: str, *arguments: str) -> bool:
    """Whether `python -m module` accepts these arguments; runs it here up to their parsing."""
    patch, printed, code = unittest.mock.patch.object, io.StringIO(), None
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(ROOT))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(patch(sys, "path", [str(ROOT), *sys.path]))
        if module == "pytest":
            arguments += ("--collect-only",)
        elif module == "keyhole":
            stack.enter_context(unittest.mock.patch("keyhole.cli.bench.run", return_value=0))
        else:
            stack.enter_context(patch(argparse.ArgumentParser, "parse_args", _parse_and_end))
        stack.enter_context(patch(sys, "argv", [module, *arguments]))
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
    if code != 0:
        print(printed.getvalue())
    elif module == "pytest":
        print(printed.getvalue().strip().splitlines()[-1])
    return code == 0


def _parse_and_end(parser: argparse.ArgumentParser) -> NoReturn:
    _, unknown = parser.parse_known_args()
    if unknown:
        parser.error(f"unknown arguments: {unknown}")
    sys.exit(0)


def pieces(path: Path) -> list[Path]:
    """The pieces of a stored file, in order."""
    return sorted(path.parent.glob(f"{path.name}.[0-9][0-9]"))


def restore(state: Path, work: Path) -> None:
    """Reassembles a stored training state in `work`, if there is one."""
    stored = pieces(state / "training.pt")
    if stored:
        (work / "training.pt").write_bytes(b"".join(piece.read_bytes() for piece in stored))
    if (state / "log.jsonl").is_file():
        shutil.copy(state / "log.jsonl", work)


def keep(work: Path, state: Path) -> None:
    """Stores the state, log and exported model of `work`; prints the last examination."""
    state.mkdir(parents=True, exist_ok=True)
    if (work / "training.pt").is_file():
        for piece in pieces(state / "training.pt"):
            piece.unlink()
        content = (work / "training.pt").read_bytes()
        for i, start in enumerate(range(0, len(content), _PIECE_BYTES)):
            piece = state / f"training.pt.{i:02}"
            piece.write_bytes(content[start : start + _PIECE_BYTES])
    if (work / "checkpoint").is_dir():
        with tarfile.open(state / "checkpoint.tar", "w") as archive:
            archive.add(work / "checkpoint", "checkpoint")
    if (work / "log.jsonl").is_file():
        shutil.copy(work / "log.jsonl", state)
        last = json.loads((work / "log.jsonl").read_text().splitlines()[-1])
        print({name: value for name, value in last.items() if name != "exact"})
        for length, scores in last["exact"].items():
            print(f"{length:>6} tokens:", ", ".join(f"{k} {v}" for k, v in scores.items()))


def main() -> None:
    """Runs the requested parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=sorted(ORDER), help="only this one")
    wanted = parser.parse_args().part
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if not torch.cuda.is_available():
            chosen = [p for p in parts(out, work, _BUDGET_S) if wanted in (None, p.number)]
            sys.exit(0 if dry_run(chosen) else 1)
        good = run_parts(ORDER if wanted is None else (wanted,), out, work)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
