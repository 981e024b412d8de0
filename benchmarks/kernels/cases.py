"""What a case of the kernel benchmark is: one operation on one kind of input, ours and others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to compute a case. run: works on the variant of that number, and is timed.

    check: the same, where the result must be made visible first; None: `run` gives it.
    """

    run: Callable[[int], Outputs]
    check: Callable[[int], Outputs] | None = None

    def outputs(self, variant: int) -> Outputs:
        """The result to compare."""
        return (self.check or self.run)(variant)


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One operation on one kind of input.

    ours: our operation by a label, "" where there is one only; each runs on every path.
    peers: the same in PyTorch; the first is what the others' times are divided by.
    tokens: of a sequence. selected: tokens (unit 1) or pages that are read, None for all.
    moved_bytes: what must be read or written once. flops: of what is bound by arithmetic instead.
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
