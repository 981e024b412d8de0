"""How the steps of a system reach a GPU: repeated as CUDA graphs, or launched one by one.

One by one the host may take longer than the device, so that times of both kinds do not compare.
Every result of decode steps says which it was, and none is given of ours that should have been
repeated and were not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keyhole.engine.engine import Engine
from keyhole.errors import KeyholeError

Launches = dict[str, Any]

#: Why the peers' steps are not repeated, except where the benchmark captures them.
THEIRS = "transformers launches its operations one by one"
#: Of a system in another process.
OUTSIDE = "another process computes on a CPU"


class NotRecordedError(KeyholeError):
    """Steps of ours were launched one by one where they could be repeated as CUDA graphs."""


def said(replayed_steps: int, why_not: str | None) -> Launches:
    """For a line of results: steps that were repeated, and why not all of them, if so."""
    return {"replayed_steps": replayed_steps, "why_not": why_not}


def checked(who: str, engine: Engine, before: int, device: torch.device) -> Launches:
    """Of an engine's steps since it had repeated `before`, on `device`.

    NotRecordedError if none was repeated on a GPU, or no more are, and nothing speaks against it.
    """
    replayed, why_not = engine.replayed_steps - before, engine.why_not_replayed
    wanted = engine.config.graphs and engine.policy.capturable is True
    # The engine itself leaves these to single launches (`Policy.reads_keys`).
    wanted = wanted and not (engine.policy.reads_keys and engine.cache.lower_layers)
    if device.type == "cuda" and wanted and (replayed == 0 or why_not is not None):
        raise NotRecordedError(
            f"{who}: {replayed} steps were repeated as CUDA graphs, the others launched one by "
            f"one: {why_not or 'no step was of the kind that is recorded'}"
        )
    return said(replayed, why_not)


def together(parts: Sequence[Launches]) -> Launches:
    """Of several measurements of one system."""
    reasons = [part["why_not"] for part in parts if part["why_not"] is not None]
    steps = sum(part["replayed_steps"] for part in parts)
    return said(steps, reasons[0] if reasons else None)
