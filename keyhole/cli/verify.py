"""Compares the engine with transformers' eager attention on a model, before you rely on it.

Exit status 1 if any check fails.
"""

from __future__ import annotations

import argparse

from keyhole.cli import flags, show

_HEADS = ("policy", "run", "result", "error", "allowed", "largest difference", "same token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole verify`."""
    flags.add_model(parser, positional=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per check."""
    model = flags.load_model(arguments)
    from keyhole import kernels
    from keyhole.evaluate.verify import verify

    checks = verify(model)
    passed = all(check.passed for check in checks)
    about = {
        "model": model.name,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": kernels.backend(model.device),
    }
    if arguments.json:
        found = [vars(check) | {"passed": check.passed} for check in checks]
        print(show.to_json({**about, "passed": passed, "checks": found}))
        return 0 if passed else 1
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    rows = [
        [
            check.policy,
            check.run,
            "exact" if check.passed else "DIFFERS",
            f"{check.error:.1e}",
            f"{check.tolerance:.1e}",
            f"{check.difference:.1e}",
            f"{check.same_tokens:.1%}",
        ]
        for check in checks
    ]
    print(show.table(_HEADS, rows, left=3))
    failed = sum(not check.passed for check in checks)
    print(f"{failed} of {len(checks)} checks failed" if failed else "all checks passed")
    return 0 if passed else 1
