"""A `keyhole serve` to measure, and load on it."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keyhole.bench.serve import measure_load
from keyhole.bench.settings import ServeSettings


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, int]]:
    """The address and the process id of `keyhole serve` with these arguments, on a free port."""
    command = [sys.executable, "-m", "keyhole", "serve", *flags, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        assert server.stderr is not None
        found = (re.search(r" at (http://\S+)/v1", line) for line in server.stderr)
        address = next((one[1] for one in found if one), None)
        if address is None:
            raise SystemExit("the server did not start")
        # The log is read so that the server never blocks on a full pipe.
        reader = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        try:
            yield address, server.pid
        finally:
            server.terminate()
            server.wait()
            reader.wait()


async def load(
    address: str, count: int, arguments: argparse.Namespace, **more: Any
) -> dict[str, Any]:
    """The result of `count` concurrent streams.

    arguments: `prompt` and `answer`, tokens of each. more: other fields of `ServeSettings`.
    """
    settings: dict[str, Any] = {
        "url": address,
        "requests": count,
        "concurrency": count,
        "prompt_length": str(arguments.prompt),
        "answer_length": str(arguments.answer),
    }
    found = await measure_load(ServeSettings(**settings | more))
    result: dict[str, Any] = found["results"][0]
    return result
