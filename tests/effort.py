"""How many examples a property is tried with: some in `make test`, all in `make test-all`."""

from __future__ import annotations

import os

from hypothesis import settings

#: Set by `make test-all` and `make coverage`.
THOROUGH = "KEYHOLE_THOROUGH" in os.environ
#: Of a property that does not say how many.
MOST_EXAMPLES = 100 if THOROUGH else 20


def examples(count: int) -> settings:
    """That many where there is time, else a tenth."""
    return settings(max_examples=count if THOROUGH else max(5, count // 10))
