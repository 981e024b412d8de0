"""A pytest plugin: `-p tests.gpu.compile_only` compiles Triton kernels for a GPU that is not there.

Triton's interpreter runs what its compiler may refuse: types that do not agree, shapes that are no
powers of two, what is no constant. Here a launch compiles, down to the machine code of compute
capability 9.0 (or of 10.0 with KEYHOLE_COMPUTE_CAPABILITY=100), and computes nothing, so that of a
test nothing counts but that. At the end every kernel of the files that were imported must have been
compiled.

    KEYHOLE_COMPILE_ONLY=all python -m pytest -W default -p tests.gpu.compile_only \\
        tests/gpu/test_kernels.py tests/gpu/test_moves.py tests/gpu/test_projections.py

With `few` instead of `all` each in one shape, in half a minute.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_OURS = "keyhole.kernels.triton."


class Absent:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(os.environ.get("KEYHOLE_COMPUTE_CAPABILITY", "90")), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class CompileOnly:
    def __init__(self) -> None:
        self._compiled: set[str] = set()
        self._refused: list[tuple[str, Exception]] = []
        self._run = JITFunction.run

    def compiled(self, function: JITFunction[Any], *operands: Any, **more: Any) -> None:
        """Takes the place of a launch."""
        try:
            self._run(function, *operands, **more | {"warmup": True})
        except Exception as error:  # noqa: BLE001 - reported with the kernel's name
            self._refused.append((function.fn.__name__, error))
        else:
            self._compiled.add(function.fn.__name__)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._refused.clear()
        with contextlib.suppress(Exception):  # of results that nobody computed
            yield
        for name, error in self._refused:
            raise AssertionError(f"Triton {triton.__version__} refuses {name}") from error

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        left = launched_from_host() - self._compiled
        if not self._compiled or left:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\nnot compiled: {', '.join(sorted(left)) or 'anything'}")


def launched_from_host() -> set[str]:
    """Names of the kernels in the imported modules that no other kernel calls."""
    found = {
        name: kernel.src
        for module in [m for where, m in sys.modules.items() if where.startswith(_OURS)]
        for name, kernel in vars(module).items()
        if isinstance(kernel, JITFunction)
    }
    sources = found.items()
    return {
        name
        for name in found
        if not any(f"{name}(" in source for other, source in sources if other != name)
    }


def pytest_configure(config: pytest.Config) -> None:
    plugin = CompileOnly()
    driver.set_active(Absent())
    # A method: what is launched comes first.
    JITFunction.run = lambda *operands, **more: plugin.compiled(*operands, **more)  # noqa: PLW0108
    config.pluginmanager.register(plugin)
