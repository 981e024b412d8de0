"""Methods compared with their controls on the same samples: gains, exact tests, and tables.

    wilson      the share of right answers and its interval
    gain        the difference of two means over the same samples, with its interval
    p_value     McNemar's exact test: the probability that equally good methods split the samples
                on which they differ at least this unevenly

For scores that may lie between 0 and 1, the test is the sign test, which is the same computation,
and the interval is a bootstrap over the samples. SciPy computes the tests.

The gain over the recent control measures the benefit of a method's selection; the distance to the
oracle is what a better selection could still gain. Where the recent control is within 5 points of
full attention, there is nothing to gain and methods cannot be told apart, so such a setting is not
ranked.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keyhole.errors import ConfigError
from keyhole.eval.line_file import EvalTable, Line
from keyhole.eval.methods import CONTROL, CONTROLS, FULL
from keyhole.eval.settings import FORCED
from keyhole.eval.tasks import changed_settings
from keyhole.registry import written

#: Standard normal quantile of a 95 % interval.
_Z = 1.96
_RESAMPLES = 9999
#: Numbers per batch of resamples; without batches, thousands of samples would need gigabytes.
_BATCH = 2**20


def wilson(right: int, items: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share."""
    share, z2 = right / items, _Z * _Z
    middle = (share + z2 / (2 * items)) / (1 + z2 / items)
    half = _Z * math.sqrt(share * (1 - share) / items + z2 / (4 * items**2)) / (1 + z2 / items)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Difference of two mean scores on the same samples, from -1 to 1, with its 95 % interval.

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
    """Compares `scores` with `other`, sample by sample; both have the same length, at least one."""
    assert len(scores) == len(other) >= 1
    better = sum(a > b for a, b in zip(scores, other, strict=True))
    worse = sum(a < b for a, b in zip(scores, other, strict=True))
    if {*scores, *other} <= {0, 1}:
        both = sum(a == b == 1 for a, b in zip(scores, other, strict=True))
        low, high = newcombe(both, better, worse, len(scores) - both - better - worse)
    else:
        low, high = _bootstrap(np.subtract(scores, other))
    return Gain(
        points=statistics.fmean(scores) - statistics.fmean(other),
        low=low,
        high=high,
        p=p_value(better, worse),
        better=better,
        worse=worse,
        samples=len(scores),
    )


def p_value(better: int, worse: int) -> float:
    """Two-sided p value of the exact binomial test that both numbers are equally likely; 1 if both
    are 0.
    """
    if better + worse == 0:
        return 1.0
    return float(require_scipy().binomtest(better, better + worse, 0.5).pvalue)


def newcombe(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares of the same samples.

    both, first, second, neither: numbers of samples that both have right, only the first, only the
    second, and none. Newcombe, Improved confidence intervals for the difference between binomial
    proportions based on paired data, Statistics in Medicine 17 (1998), method 10: Wilson's
    intervals and the correlation of the two.
    """
    n = both + first + second + neither
    share, other = (both + first) / n, (both + second) / n
    (low, high), (other_low, other_high) = (wilson(both + k, n) for k in (first, second))
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    cross = both * neither - first * second
    # The continuity correction makes a small positive correlation zero.
    cross_corrected = max(cross - n / 2, 0.0) if cross > 0 else cross
    phi = cross_corrected / math.sqrt(margins) if margins else 0.0

    def spread(own: float, others: float) -> float:
        return math.sqrt(max(0.0, own**2 - 2 * phi * own * others + others**2))

    difference = share - other
    down = spread(share - low, other_high - other)
    up = spread(high - share, other - other_low)
    return max(-1.0, difference - down), min(1.0, difference + up)


def require_scipy() -> Any:
    """scipy.stats; ConfigError with the command to install it if it is missing."""
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


TELLING = 0.05
"""Methods are compared only where full attention beats the recent control by more than this."""
RECENT, RANDOM, ORACLE = "recent", "random", "oracle"
#: Fields that are equal in lines measured on the same samples.
_SAME = ("model", "fingerprint", "task", "task_settings", "length", "setup")
#: Tolerance for rounding, so that a difference of 5 points counts as 5 points.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A method's line compared with others; shares and points from 0 to 1.

    samples: the first ones that every line has. interval: Wilson's, None unless each sample is
    right or wrong. full: mean score of full attention. controls, lines, gains: mean score and line
    of each control that was measured, and the gain over it; not of a control that is the method
    itself.
    """

    samples: int
    score: float
    interval: tuple[float, float] | None
    full: float | None
    controls: Mapping[str, float]
    gains: Mapping[str, Gain]
    lines: Mapping[str, Line] = field(default_factory=dict, repr=False)

    @property
    def gain(self) -> Gain | None:
        """The gain over the recent control."""
        return self.gains.get(RECENT)

    @property
    def distance(self) -> float | None:
        """How far below the oracle the score is."""
        oracle = self.controls.get(ORACLE)
        return None if oracle is None else oracle - self.score

    @property
    def can_tell(self) -> bool | None:
        """Whether methods can be told apart in this setting; None if that was not measured."""
        recent = self.controls.get(RECENT)
        if self.full is None or recent is None:
            return None
        return self.full - recent > TELLING + ROUNDING

    def to_json(self) -> Line:
        """As JSON, with gains by the name of the control."""
        own = {name: value for name, value in vars(self).items() if name != "lines"}
        gains = {name: vars(gain) for name, gain in self.gains.items()}
        return own | {"gains": gains, "distance": self.distance, "can_tell": self.can_tell}


def compared(lines: Sequence[Line]) -> list[Comparison | None]:
    """For each line its comparison; None for one that names no controls, or has no scores."""
    return [None if group is None else _compared(group) for group in paired(lines)]


#: The method itself, among its controls and full attention.
METHOD = "method"


def paired(lines: Sequence[Line]) -> list[dict[str, Line] | None]:
    """For each line, by name: the line itself (METHOD), its controls, and full attention.

    Their scores are cut to the first samples, which all of them have. None for a line that names no
    controls, or has no scores. A control is looked up among the lines by its policy, its settings
    and its samples; of several, the one with the most samples counts, and the last of these.
    """
    known: dict[str, Line] = {}
    full: dict[str, Line] = {}
    for line in sorted(lines, key=lambda line: len(_scores(line))):
        known[_key(line)] = line
        if line.get("policy") == FULL.name:
            full[_place(line)] = line
    return [_paired(line, known, full) for line in lines]


def _paired(
    line: Line, known: Mapping[str, Line], full: Mapping[str, Line]
) -> dict[str, Line] | None:
    named = line.get(CONTROLS)
    if not isinstance(named, dict) or not _scores(line):
        return None
    found = {
        name: known.get(_key(line | one))
        for name, one in named.items()
        if isinstance(one, dict) and _key(line | one) != _key(line)  # a method may be a control
    }
    group = {METHOD: line, **found, FULL.name: full.get(_place(line))}
    group = {name: one for name, one in group.items() if one and _scores(one)}
    number = min(len(one["scores"]) for one in group.values() if one)
    return {name: one | {"scores": one["scores"][:number]} for name, one in group.items() if one}


def wilson_of(scores: object) -> tuple[float, float] | None:
    """Wilson's 95 % interval of the share of right answers; None unless each score is 0 or 1."""
    if not isinstance(scores, list | tuple) or not scores:
        return None
    if any(score not in (0, 1) for score in scores):
        return None
    return wilson(sum(score == 1 for score in scores), len(scores))


def _compared(group: Mapping[str, Line]) -> Comparison:
    own = group[METHOD]["scores"]
    controls = {n: line for n, line in group.items() if n not in (METHOD, FULL.name)}
    return Comparison(
        samples=len(own),
        score=statistics.fmean(own),
        interval=wilson_of(own),
        full=statistics.fmean(group[FULL.name]["scores"]) if FULL.name in group else None,
        controls={name: statistics.fmean(line["scores"]) for name, line in controls.items()},
        gains={name: gain(own, line["scores"]) for name, line in controls.items()},
        lines=controls,
    )


def _scores(line: Line) -> list[float]:
    """The score of each sample; [] if one of them is not a number."""
    scores = line.get("scores")
    if not isinstance(scores, list) or not all(
        isinstance(one, int | float) and math.isfinite(one) for one in scores
    ):
        return []
    return scores


def kv_dtype(line: Line) -> str:
    """How keys and values were stored while a line was measured."""
    engine = line.get("engine")
    return str((isinstance(engine, dict) and engine.get("kv_dtype")) or "auto")


def _place(line: Line) -> str:
    return json.dumps([kv_dtype(line), *map(line.get, _SAME)], sort_keys=True)


def _key(line: Line) -> str:
    return json.dumps([_place(line), line.get("policy"), line.get("settings")], sort_keys=True)


Text = Callable[[Line], str]
NOT_EQUAL = "not at equal terms"


def results_table(
    measured: Sequence[Line], refused: Sequence[Line], bytes_text: Callable[[float], str]
) -> EvalTable:
    """A row for each line, the refused ones last in their group of task, length and setup.

    A missing value is shown as "-".
    """
    return laid_out(
        grouped((*measured, *refused)),
        {
            "budget": field_text("budget", "{:,}".format),
            "score": _score,
            "written": field_text("tokens_generated", "{:.1f}".format),
            "keys read": field_text("read_share", "{:.1%}".format),
            **_of_prompts(measured),
            "read per step": field_text("bytes_per_step", bytes_text),
            "step": field_text("step_ms", "{:.1f} ms".format),
            "peak cache": field_text("peak_bytes", bytes_text),
        },
    )


def _of_prompts(measured: Sequence[Line]) -> dict[str, Text]:
    """The column of what prompts read, where a prefill policy was measured."""
    if all(line.get("prompt_read_share") is None for line in measured):
        return {}
    return {"prompt read": field_text("prompt_read_share", "{:.1%}".format)}


def grouped(lines: Iterable[Line]) -> list[Line]:
    """The lines grouped by task, length and setup, in order of first appearance."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        name = f"{line['task']} {line['task_settings']} {line['length']} {line['setup']}"
        groups.setdefault(name, []).append(line)
    return [line for group in groups.values() for line in group]


def laid_out(lines: Sequence[Line], columns: Mapping[str, Text]) -> EvalTable:
    """A row for each line: its identity, and these columns; values that all rows share are in the
    title.
    """
    cells: dict[str, Text] = {
        "task": _task,
        "length": field_text("length", "{:,} tokens".format),
        "setup": field_text("setup", str),
        "samples": field_text("samples", str),
        "policy": field_text("method", str),
    }
    shared = []
    for name in ("length", "setup", "samples"):
        found = {cells[name](line) for line in lines}
        if len(found) == 1:
            shared.append(f"{name} {found.pop()}")
            del cells[name]
    left = len(cells)
    return EvalTable.of(", ".join(shared), left, lines, {**cells, **columns})


def field_text(name: str, text: Callable[[Any], str]) -> Text:
    """Shows a field; "-" where a line lacks it."""

    def cell(line: Line) -> str:
        value = line.get(name)
        return "-" if value is None else text(value)

    return cell


def _task(line: Line) -> str:
    """The name with the changed settings: passkey:depth=0.5."""
    task = line["task"]
    return written(task, () if task in FORCED else changed_settings(task, line["task_settings"]))


def _score(line: Line) -> str:
    """The score in percent, or a perplexity as it is."""
    if "error" in line:
        return NOT_EQUAL if line.get("unequal") else "refused"
    if line["task"] == "perplexity":
        return f"ppl {line['perplexity']:.3f}"
    return f"{line['score']:.1%}"


#: Smaller p values are shown as "<0.001".
_LEAST_P = 0.001


def controls_table(measured: Sequence[Line], refused: Sequence[Line]) -> EvalTable:
    """A row for each method; `refused` come last in their group of task, length and setup.

    Shares and gains are in percentage points. A missing value is shown as "-".
    """
    beside = dict(zip(map(id, measured), compared(measured), strict=True))
    lines = grouped([line for line in (*measured, *refused) if line.get(CONTROL) is None])

    def seen(text: Callable[[Comparison], str]) -> Text:
        def cell(line: Line) -> str:
            found = beside.get(id(line))
            return "-" if found is None else text(found)

        return cell

    def right(line: Line) -> str:
        if "error" in line:
            return NOT_EQUAL if line.get("unequal") else "refused"
        found = beside.get(id(line))
        share = line["score"] if found is None else found.score
        interval = wilson_of(line.get("scores")) if found is None else found.interval
        text = (
            "" if interval is None else " ({:.0f} to {:.0f})".format(*(100 * x for x in interval))
        )
        return f"{100 * share:.1f}{text}"

    return laid_out(
        lines,
        {
            "budget": field_text("budget", "{:,}".format),
            "right, %": right,
            RECENT: seen(lambda found: _share(found.controls.get(RECENT))),
            RANDOM: seen(lambda found: _share(found.controls.get(RANDOM))),
            ORACLE: seen(lambda found: _share(found.controls.get(ORACLE))),
            "gain on recent": seen(lambda found: gain_text(found.gain)),
            "p": seen(lambda found: p_text(found.gain)),
            "to oracle": seen(lambda found: _share(found.distance)),
            "keys read": field_text("read_share", "{:.1%}".format),
            **_of_prompts(measured),
            "KiB/step": field_text("bytes_per_step", lambda size: f"{size / 1024:,.1f}"),
            "ms": field_text("step_ms", "{:.1f}".format),
            "note": lambda line: note(line, beside.get(id(line))),
        },
    )


def note(line: Line, found: Comparison | None) -> str:
    """Remarks on a row: whether methods can be told apart, and what is read beyond the budget."""
    parts = []
    if found is not None and found.can_tell is False:
        parts.append("cannot tell")
    if line.get("outside_budget"):
        parts.append(f"outside the budget: {line['outside_budget']}")
    if line.get("terms_note"):
        parts.append(line["terms_note"])
    return "; ".join(parts)


def gain_text(gain: Gain | None) -> str:
    """Points and their interval: +12.0 (4.1 to 20.3)."""
    if gain is None:
        return "-"
    return f"{100 * gain.points:+.1f} ({100 * gain.low:.1f} to {100 * gain.high:.1f})"


def p_text(gain: Gain | None) -> str:
    """Three decimals."""
    if gain is None:
        return "-"
    return f"<{_LEAST_P}" if gain.p < _LEAST_P else f"{gain.p:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
