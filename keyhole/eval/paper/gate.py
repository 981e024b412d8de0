"""The gate: nothing is measured on a model whose logits are not the model's own.

`keyhole verify` in full, once for a model on a machine and a version of Keyhole: the line of a
model that passed is stored with the others and found again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from keyhole.eval.results.line_file import GATE, Line, LineFile
from keyhole.eval.run import model_digest
from keyhole.eval.verify import verify
from keyhole.models.loading import Model


def gate(model: Model, file: LineFile, header: Callable[[], dict[str, Any]]) -> Line:
    """The line of the checks, from the file or run now and added to it; see `reason`."""
    about = header()
    known_by = {
        "benchmark": GATE,
        "fingerprint": model_digest(model),
        "commit": about["commit"],
        "versions": about["versions"],
        "device": about["machine"]["device"],
    }
    stored = file.find(known_by, 0)
    if stored is not None and reason(stored) is None:
        return stored
    checks = [asdict(check) | {"passed": check.passed} for check in verify(model)]
    file.add(about | known_by | {"model": model.name, "checks": checks})
    return file.lines[-1]


def reason(line: Line) -> str | None:
    """Why the model is not evaluated; None if every check passed."""
    failed = [check for check in line["checks"] if not check["passed"]]
    if not failed:
        return None
    worst = max(failed, key=lambda check: float(check["error"]))
    return (
        f"{line['model']} does not give the logits of transformers: {len(failed)} of "
        f"{len(line['checks'])} checks differ, the worst under {worst['policy']} "
        f"({worst['run']}): error {worst['error']:.1e}, allowed {worst['tolerance']:.1e}; "
        "see `keyhole verify`"
    )
