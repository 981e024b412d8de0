"""Writes docs/reference/models.md, the table of `keyhole models`.

Run `python -m benchmarks.models_page`.

A test that is not for every run compares the page with what the gate measures.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from tqdm.auto import tqdm

from keyhole.engine.exactness_gate import families_of_transformers, measure_family

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"

_HEAD = """<!-- Written by `python -m benchmarks.models_page`. -->

# Families of models

What `keyhole models` prints with transformers {version}: every class for causal language models,
and whether a small random model of its default config gives the logits of transformers' eager
attention in the engine ([how](../architecture.md#what-is-refused-and-why)). {exact} of {all} are
exact. A checkpoint is measured by its own config, so it may be refused where the default is
exact; `keyhole verify MODEL` compares its real weights.

| family | verdict |
|---|---|
"""


def render() -> str:
    """The page; a second per family."""
    names = families_of_transformers()
    verdicts = [measure_family(name) for name in tqdm(names, leave=False, disable=None)]
    head = _HEAD.format(
        version=transformers.__version__,
        exact=sum(verdict.exact for verdict in verdicts),
        all=len(names),
    )
    rows = [f"| {v.family} | {_short(v.reason)} |" for v in verdicts]
    return head + "\n".join(rows) + "\n"


def _short(reason: str | None) -> str:
    """A reason without the name of the model, which the first column has."""
    if reason is None:
        return "exact"
    text = reason.split(") ", 1)[-1] if reason.startswith("model '") else reason
    return text.replace("|", "\\|").replace("<", "`<`")


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"written: {PAGE}")
