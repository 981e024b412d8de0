"""A terminal for a command that runs in this process: a pseudo-terminal for each of its outputs."""

from __future__ import annotations

import os
import pty
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from keyhole.cli import main
from tests.cli.conftest import Ran

Program = Callable[[Sequence[str]], int]


def run_on_terminal(
    *arguments: str, out: bool = True, err: bool = True, program: Program = main
) -> Ran:
    """What `keyhole` writes where stdout, stderr or both are a terminal; the others are pipes."""
    with _written(out) as (stdout, written), _written(err) as (stderr, said):
        status = _run(program, arguments, stdout, stderr)
    return Ran(status, b"".join(written).decode(), b"".join(said).decode())


def _run(program: Program, arguments: tuple[str, ...], stdout: int, stderr: int) -> int:
    with (
        open(stdout, "w", closefd=False) as out,
        open(stderr, "w", closefd=False) as err,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        return program(arguments)


@contextmanager
def _written(terminal: bool) -> Iterator[tuple[int, list[bytes]]]:
    """A file descriptor to write to, and what came out at its other end, complete at the end."""
    reading, writing = pty.openpty() if terminal else os.pipe()
    if terminal:  # as large as one; a bar has no room in a new one
        termios.tcsetwinsize(writing, (24, 100))
    found: list[bytes] = []

    def read() -> None:
        while True:
            try:
                part = os.read(reading, 1 << 16)
            except OSError:  # a terminal that nobody has open any more
                return
            if not part:
                return
            found.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield writing, found
    finally:
        os.close(writing)
        reader.join()
        os.close(reading)
