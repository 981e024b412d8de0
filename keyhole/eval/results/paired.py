"""Two methods on the same samples: how much better one of them is, and whether that is chance.

    wilson             the share of right answers and its interval
    gain               the difference of two means over the same samples, with its interval
    p_value            McNemar's exact test: of the samples on which the two differ, as many would
                       favour either one by chance

For scores that are not just right or wrong the test is the sign test, which is the same thing, and
the interval is a bootstrap over the samples. SciPy does the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.errors import ConfigError

__all__ = ["Gain", "gain", "newcombe", "p_value", "require_scipy", "wilson"]

#: Standard normal quantile of a 95 % interval.
_Z = 1.96
_RESAMPLES = 9999
#: Numbers of a batch of resamples: thousands of samples would need gigabytes otherwise.
_BATCH = 2**20


def wilson(right: int, items: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share."""
    share, z2 = right / items, _Z * _Z
    middle = (share + z2 / (2 * items)) / (1 + z2 / items)
    half = _Z * math.sqrt(share * (1 - share) / items + z2 / (4 * items**2)) / (1 + z2 / items)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Mean score minus another one on the same samples: points from -1 to 1, 95 % interval.

    better, worse: samples on which the first scored more, and less. p: two-sided.
    """

    points: float
    low: float
    high: float
    p: float
    better: int
    worse: int
    samples: int


def gain(scores: Sequence[float], other: Sequence[float]) -> Gain:
    """`scores` against `other`, sample by sample; both have as many, at least one."""
    assert len(scores) == len(other) >= 1
    better = sum(a > b for a, b in zip(scores, other, strict=True))
    worse = sum(a < b for a, b in zip(scores, other, strict=True))
    if {*scores, *other} <= {0, 1}:
        both = sum(a == b == 1 for a, b in zip(scores, other, strict=True))
        low, high = newcombe(both, better, worse, len(scores) - both - better - worse)
    else:
        low, high = _bootstrap(np.subtract(scores, other))
    return Gain(
        points=math.fsum(scores) / len(scores) - math.fsum(other) / len(other),
        low=low,
        high=high,
        p=p_value(better, worse),
        better=better,
        worse=worse,
        samples=len(scores),
    )


def p_value(better: int, worse: int) -> float:
    """Two-sided, of the exact binomial test that both numbers are as likely; 1 without any."""
    if better + worse == 0:
        return 1.0
    return float(require_scipy().binomtest(better, better + worse, 0.5).pvalue)


def newcombe(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares of the same samples.

    both, first, second, neither: samples that both have right, only the first, only the second, and
    none. Newcombe, Improved confidence intervals for the difference between binomial proportions
    based on paired data, Statistics in Medicine 17 (1998), method 10: Wilson's intervals, and the
    correlation of the two.
    """
    n = both + first + second + neither
    share, other = (both + first) / n, (both + second) / n
    (low, high), (other_low, other_high) = (wilson(both + k, n) for k in (first, second))
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    cross = both * neither - first * second
    # A small positive correlation is taken as none: the correction for continuity.
    cross_corrected = max(cross - n / 2, 0.0) if cross > 0 else cross
    phi = cross_corrected / math.sqrt(margins) if margins else 0.0

    def spread(own: float, others: float) -> float:
        return math.sqrt(max(0.0, own**2 - 2 * phi * own * others + others**2))

    difference = share - other
    down = spread(share - low, other_high - other)
    up = spread(high - share, other - other_low)
    return max(-1.0, difference - down), min(1.0, difference + up)


def require_scipy() -> Any:
    """scipy.stats; ConfigError that says how to get it if it is not there."""
    try:
        from scipy import stats
    except ImportError as error:
        raise ConfigError("exact tests need SciPy: pip install 'keyhole[eval]'") from error
    return stats


def _bootstrap(differences: np.ndarray) -> tuple[float, float]:
    if len(differences) == 1:
        return -1.0, 1.0
    found = require_scipy().bootstrap(
        (differences,),
        np.mean,
        n_resamples=_RESAMPLES,
        batch=max(1, _BATCH // len(differences)),
        method="percentile",
        rng=0,
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
