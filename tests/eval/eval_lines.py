"""Lines as `keyhole eval` stores them, with numbers that a test can foretell."""

from __future__ import annotations

from typing import Any


def line(**fields: Any) -> dict[str, Any]:
    """A line of DELTA with a budget of 128 tokens; `fields` replace what stands here."""
    return {
        "benchmark": "eval",
        "date": "2026-11-20T10:00:00+00:00",
        "command": "keyhole eval tiny --tasks tiny_needle",
        "commit": "abcdef012345",
        "note": "",
        "machine": {"cpu": "EPYC", "cores": 2, "threads": 2, "memory_gib": 23.5, "device": "cpu"},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "keyhole": "0.1.0"},
        "model": "tiny",
        "task": "tiny_needle",
        "length": 1024,
        "setup": "prompt",
        "policy": "delta",
        "settings": {"token_budget": 128, "delta_layers": [2]},
        "budget": 128,
        "samples": 4,
        "score": 0.75,
        "scores": [1.0, 0.0, 1.0, 1.0],
        "depths": [0.0, 0.5, 0.5, 1.0],
        "tokens_prompt": 1000.0,
        "tokens_generated": 12.5,
        "read_share": 0.321,
        "bytes_per_step": 3 * 2**19,
        "step_ms": 4.56,
        "peak_bytes": 7 * 2**30,
        "recall_per_layer": [1.0, None, 0.9, 0.43],
        "selection_maps": None,
    } | fields


def full(**fields: Any) -> dict[str, Any]:
    """A line of full attention."""
    return line(
        policy="full",
        budget=None,
        settings={},
        score=1.0,
        scores=[1.0] * 4,
        read_share=1.0,
        bytes_per_step=6 * 2**20,
        step_ms=9.87,
        **fields,
    )
