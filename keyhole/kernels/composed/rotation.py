"""Shifts the keys of a layer to other positions by the layer's RoPE, if it has one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from keyhole.kernels.operations import shift_rope


@dataclass(frozen=True, eq=False)
class Rotation:
    """How keys of a layer shift: frequencies and last as in `shift_rope`; None: they do not."""

    frequencies: Tensor | None
    last: bool = False

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """Keys [..., D], rotated at any positions p, as they are at p + by, int64."""
        if self.frequencies is None:
            return x
        return shift_rope(x, by, self.frequencies, self.last)
