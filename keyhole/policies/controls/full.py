"""Full attention: every step reads every key and value. The baseline of all others.

Cost per step and layer: the whole cache of a sequence.

When to use it: where memory and speed allow it, and as the reference for every other method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from keyhole.policies.base import Policy, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Dense attention."""

    name: ClassVar[str] = "full"
    dense: ClassVar[bool] = True
    capturable: ClassVar[bool | str] = True

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """Everything."""
        return None
