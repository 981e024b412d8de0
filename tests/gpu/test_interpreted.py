"""Without a GPU the Triton kernels are compared with their twins under Triton's interpreter.

And they are compiled for one, as the compiler refuses some of what the interpreter runs.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = tuple(f"tests/gpu/test_{name}.py" for name in ("kernels", "moves", "projections"))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["not slow", "slow"])  # two processes share them
def test_the_kernels_equal_their_twins_under_the_interpreter(part: str) -> None:
    printed = run_tests({"TRITON_INTERPRET": "1"}, "-m", part)
    closing = r"^\d+ passed(, \d+ deselected)?(, \d+ warnings?)? in"
    assert re.search(closing, printed, re.MULTILINE), printed


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["90", "100"])
def test_the_kernels_compile_for_a_gpu(tmp_path: Path, capability: str) -> None:
    chosen = {"KEYHOLE_COMPILE_ONLY": "few", "TRITON_CACHE_DIR": str(tmp_path)}
    chosen["KEYHOLE_COMPUTE_CAPABILITY"] = capability
    printed = run_tests(chosen, "-p", "tests.gpu.compile_only")
    assert "not compiled" not in printed, printed


def test_kernels_assign_to_no_nested_tuple() -> None:
    """Triton 3.6, which torch 2.11 brings, refuses that; 3.9 takes it."""
    seen = 0
    for path in (ROOT / "keyhole/kernels/triton").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and "jit" in ast.dump(
                ast.List(function.decorator_list)
            ):
                seen += 1
                targets = [
                    target
                    for node in ast.walk(function)
                    if isinstance(node, ast.Assign)
                    for target in node.targets
                    if isinstance(target, ast.Tuple)
                ]
                assert not any(isinstance(x, ast.Tuple) for t in targets for x in t.elts), path
    assert seen > 20


def run_tests(settings: dict[str, str], *more: str) -> str:
    """What pytest printed of the kernels' tests; all must have passed."""
    # A process of its own: Triton reads such variables when it is imported, and for all of it.
    command = [sys.executable, "-m", "pytest", *KERNELS, "-W", "default"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | settings
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
