"""How many examples a property is tried with: a fifth in `make test`, all in `make test-all`."""

from __future__ import annotations

import os

from hypothesis import settings

#: Set by `make test-all`.
THOROUGH = "KEYHOLE_THOROUGH" in os.environ


def examples(count: int) -> settings:
    """That many where there is time, else a fifth."""
    return settings(max_examples=count if THOROUGH else max(5, count // 5))
