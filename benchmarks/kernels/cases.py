"""A case of the kernel benchmark: one operation on one kind of input, by Keyhole and by peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class System:
    """One implementation of a case. run: computes the variant with this number, and is timed.

    check: as `run`, for a result that must first be read back; None: `run` returns it.
    moved_bytes: None: the case's.
    """

    run: Callable[[int], Outputs]
    check: Callable[[int], Outputs] | None = None
    moved_bytes: int | None = None

    def outputs(self, variant: int) -> Outputs:
        """The result to compare."""
        return (self.check or self.run)(variant)


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One operation on one kind of input.

    ours: our operation by label, "" if there is only one; each runs on every path.
    peers: the same in PyTorch; times are reported relative to the first. reader: the one of them
    that only reads, whose bytes per second the others' are divided by.
    tokens: of a sequence. selected: tokens (unit 1) or pages that are read, None for all.
    moved_bytes: bytes that must be read or written once. flops: for compute-bound cases instead.
    """

    op: str
    tokens: int
    selected: int | None = None
    unit: int | None = None
    about: str
    moved_bytes: int
    flops: int | None = None
    variants: int
    ours: Mapping[str, System]
    peers: Mapping[str, System]
    reader: str | None = None
