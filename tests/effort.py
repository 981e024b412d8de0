"""How many examples a property is tried with: a fifth in `make test`, all in `make coverage`.

`make test-all`, which runs the slow tests only, tries all examples of these.
"""

from __future__ import annotations

import os

from hypothesis import settings

#: Set by both.
THOROUGH = "KEYHOLE_THOROUGH" in os.environ


def examples(count: int) -> settings:
    """That many where there is time, else a fifth."""
    return settings(max_examples=count if THOROUGH else max(5, count // 5))
