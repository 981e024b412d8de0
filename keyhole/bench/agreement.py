"""Nothing is timed that computes something else: results are compared before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from keyhole.errors import KeyholeError

_TINY = 1e-30  # two rows of zeros agree


class DisagreementError(KeyholeError):
    """Two systems give different results: no time of theirs means anything."""


def check(who: str, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """The largest relative error of what `who` gave; DisagreementError if it is too large.

    Compares as many tensors as both gave.
    """
    error = max(relative_error(a, b) for a, b in zip(found, expected, strict=False))
    if not error <= tolerance:  # NaN is no agreement either
        raise DisagreementError(f"{who}: relative error {error:.2g} is above {tolerance}")
    return error


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| (2-norms) of the worst row; whole numbers must be equal."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if bool((found == expected).all()) else float("inf")
    a, b = found.float(), expected.float()
    return float((a - b).norm(dim=-1).div(b.norm(dim=-1).clamp(min=_TINY)).max())
