"""Runs a program in another Python and sends it commands as lines of JSON; see `program.py`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import benchmarks
from keyhole.bench import measure
from keyhole.errors import ConfigError, KeyholeError

#: The peers' environment, in the checkout or the current directory.
ENVIRONMENT = ".venv-peers"
_PROGRAM = Path(__file__).with_name("program.py")
_END_S = 20.0
# llama.cpp waits at a barrier after every operation, which is slow if its threads sleep.
_NOT_FOR_IT = "OMP_WAIT_POLICY"


class WorkerError(KeyholeError):
    """The program in the other Python failed."""


def interpreter() -> Path:
    """The peers' Python; ConfigError if that environment is missing."""
    folder = benchmarks.ROOT if measure.in_checkout() else Path.cwd()
    python = folder / ENVIRONMENT / "bin/python"
    if not python.exists():
        raise ConfigError(
            f"llama.cpp is measured in an environment of its own, and {ENVIRONMENT} is not there; "
            "`make bench-peers` in a checkout of Keyhole makes it"
        )
    return python


class WorkerProcess:
    """The running program; a context manager that ends it."""

    def __init__(self) -> None:
        python = interpreter()
        environment = {name: value for name, value in os.environ.items() if name != _NOT_FOR_IT}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the program)
        self._process = subprocess.Popen(
            [python, _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self, command: str, arguments: dict[str, Any], data: Iterable[bytes | memoryview] = ()
    ) -> dict[str, Any]:
        """Sends a command with its bytes and returns the answer.

        WorkerError with the program's message if it fails or ends.
        """
        line = json.dumps({"command": command, "arguments": arguments})
        with contextlib.suppress(BrokenPipeError):  # its answer or its log has the reason
            self._commands.write(line.encode() + b"\n")
            for piece in data:
                self._commands.write(piece)
            self._commands.flush()
        answer = self._answers.readline()
        if not answer:
            raise WorkerError(f"llama.cpp: `{command}` ended the program: {self._last_words()}")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise WorkerError(f"llama.cpp: `{command}` failed: {reply['error']}")
        return reply

    def receive(self, size: int) -> bytes:
        """The bytes that follow an answer."""
        data = self._answers.read(size)
        if len(data) != size:
            raise WorkerError(f"llama.cpp ended the program: {self._last_words()}")
        return data

    def close(self) -> None:
        """Ends the program and waits until its memory is free."""
        with contextlib.suppress(BrokenPipeError):  # it may have ended already
            self._commands.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()

    def _last_words(self) -> str:
        status = self._process.wait(_END_S)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"status {status}" + (f", {lines[-1]}" if lines else "")
