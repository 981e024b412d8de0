"""Without a GPU the Triton kernels are compared with their twins under Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")
def test_the_kernels_equal_their_twins_under_the_interpreter() -> None:
    # A process of its own: the variable counts from the import of triton on, and for all of it.
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_kernels.py", "-W", "default"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), done.stdout
