"""The table of reuse methods: one line per method. CLI, documents and conformance tests read it.

Other packages add methods by an entry point in the group `keyhole.reuses`: name =
"package.module:Class".

The docstring of a method's module lists its differences from the paper with their measured effects:
right answers to 48 questions over two documents of the bundled model's world, with 95 % Wilson
intervals, and the median relative error of the first answer token's logits compared with a prompt
that is computed whole. They say what a difference does on this model, not which method is better.
benchmarks/results/reuse-differences.jsonl has the lines (`python -m benchmarks.reuse_differences`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyhole.registry import Registry
from keyhole.reuse.base import Reuse

_REUSES = Registry(
    "reuse method",
    Reuse,
    "keyhole.reuses",
    {
        "recompute": "keyhole.reuse.baselines:Recompute",
        "reuse": "keyhole.reuse.baselines:FullReuse",
        "sam_kv": "keyhole.reuse.sam_kv:SamKV",
        "cacheblend": "keyhole.reuse.cacheblend:CacheBlend",
        "epic": "keyhole.reuse.epic:Epic",
        "multi_infllm": "keyhole.reuse.multi_infllm:MultiInfLLM",
    },
    default="sam_kv",
    field="reuse",
)


def available_reuse_methods() -> dict[str, type[Reuse]]:
    """Every reuse method by name: ours in the order of the table, then those of entry points."""
    return _REUSES.classes()


def reuse_names() -> list[str]:
    """Every reuse method's name; none is imported, as most import torch."""
    return _REUSES.names()


def reuse_name(name: str) -> str:
    """The table's name for spellings such as SamKV or Multi-InfLLM; unknown names stay."""
    return _REUSES.canonical(name)


def make_reuse(
    reuse: Reuse | str | Path | None, settings: Mapping[str, Any] | None = None
) -> Reuse:
    """A reuse method from a method, a name such as "sam_kv:share=0.2" or a settings file.

    None is SamKV.
    """
    return _REUSES.make(reuse, settings)
