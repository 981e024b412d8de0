"""What transformers calls the cache, as an argument of a model and as a field of its output.

From transformers 5.24 on it is `cache`; the earlier names are deprecated. Before, it was
`past_key_values` in models and `cache_params` in some layers with a recurrent state, and models
that bring code of their own still take it by these names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection
from typing import Any

#: The newest first.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_argument(module: Any) -> str:
    """The argument by which a module takes its cache."""
    return _argument(type(module).forward)


def cache_field(output: Any) -> str:
    """The field of a model's output, a dataclass, that has the cache."""
    return cache_name([field.name for field in dataclasses.fields(output)])


@functools.cache
def _argument(forward: Any) -> str:
    return cache_name(inspect.signature(inspect.unwrap(forward)).parameters)


def cache_name(names: Collection[str]) -> str:
    """The name of the cache among these; "past_key_values", which all versions take, if none is."""
    return next((name for name in CACHE_NAMES if name in names), "past_key_values")
