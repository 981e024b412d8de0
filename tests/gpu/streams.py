"""What runs beside what on a GPU, from a Chrome trace as torch writes it."""

from __future__ import annotations

import json
from pathlib import Path


def beside_each_other(path: Path) -> list[tuple[str, str]]:
    """Names of kernels and copies of different streams that ran at the same time."""
    events = [
        event
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("ph") == "X" and "stream" in event.get("args", {})
        # Others, such as waits for an event, are no work.
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    events.sort(key=lambda event: event["ts"])
    found, running = [], []
    for event in events:
        running = [other for other in running if other["ts"] + other["dur"] > event["ts"]]
        found += [
            (other["name"], event["name"])
            for other in running
            if other["args"]["stream"] != event["args"]["stream"]
        ]
        running.append(event)
    return found
