"""Selection layers: layers that select for those after them (DELTA, TidalDecode, OmniKV).

Where they are placed, and the calibration file that stores the placement.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require, require_layers
from keyhole.errors import ConfigError, why
from keyhole.registry import write_object


def settled(name: str, given: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """The selection layers, ascending. ConfigError for one that is not a full-attention layer."""
    require_layers(name, given)
    usable = geometry.full_attention
    for layer in given:
        require(layer in usable, name, given, f"full-attention layers of {usable}")
    return tuple(sorted(set(given)))


def nearest(wanted: Iterable[int], geometry: Geometry) -> tuple[int, ...]:
    """The full-attention layers nearest to those wanted; ties go to the earlier one."""
    usable = geometry.full_attention
    if not usable:
        return ()
    return tuple(sorted({min(usable, key=lambda i: (abs(i - layer), i)) for layer in wanted}))


def served(
    choosing: Sequence[int] | None, full: Sequence[int] | None, geometry: Geometry
) -> tuple[int, ...]:
    """The sparse layers: those after the first selection layer that do not select."""
    reads_all = {*(full or ()), *(choosing or ())}
    first = min(choosing or (geometry.num_layers,))
    return tuple(i for i in geometry.full_attention if i > first and i not in reads_all)


def dense(
    choosing: Sequence[int] | None, full: Sequence[int] | None, geometry: Geometry
) -> tuple[int, ...]:
    """Layers that read everything in every step: full-attention layers except those `served`."""
    sparse = served(choosing, full, geometry)
    return tuple(i for i in geometry.full_attention if i not in sparse)


def following(choosing: Sequence[int], count: int, geometry: Geometry) -> tuple[int, ...]:
    """The next `count` full-attention layers after each selection layer, ascending."""
    usable = geometry.full_attention
    after = ([i for i in usable if i > layer][:count] for layer in choosing)
    return tuple(sorted({i for layers in after for i in layers}))


# Placement of DELTA's selection layers, and the calibration file that stores it.
#
# The paper puts them where the page distribution shifts most from one layer to the next (DELTA,
# section 5, "Layer configuration"): `place_by_shift`. Ours puts them where the layers between lose
# the least: with R[a, b] the mean attention mass that layer b keeps under layer a's selection,
# `place_by_recall` maximises the summed recall of all sparse layers exactly, by dynamic programming
# over (layer, number placed), O(L^2 n). `place_by_error` minimises the summed E[a, b] in the same
# way, the mean relative error of layer b's attention output. Mass ignores the values of tokens, and
# that a match may be made in two layers; the error of the output accounts for the first.


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Layers of DELTA measured for one model.

    recall: per layer, the mean share of its attention mass that its selection keeps (1 for layers
    that read everything). measure: the criterion that placed the layers, "mass", "error" or
    "shift". error: per layer, the mean relative error of its attention output (0 for layers that
    read everything); empty in older files.
    """

    model: str
    method: str
    num_layers: int
    token_budget: int
    full_layers: tuple[int, ...]
    delta_layers: tuple[int, ...]
    recall: tuple[float, ...]
    measure: str = "mass"
    error: tuple[float, ...] = ()

    def save(self, path: str | Path) -> None:
        """Writes the JSON file that `Delta(layers=...)` loads, as `write_object`."""
        write_object(path, asdict(self), "the calibration")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads a file of `save`; ConfigError names the fault of an invalid file."""
        try:
            stored = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the calibration file {str(path)!r} cannot be read: {why(error)}; "
                "`keyhole calibrate --output FILE` writes one"
            ) from error
        known = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if not isinstance(stored, dict) or not needed <= set(stored) <= known:
            raise ConfigError(
                f"{str(path)!r} is not a calibration file: it must be a JSON object with "
                f"{sorted(needed)}"
            )
        lists = ("full_layers", "delta_layers", "recall", "error")
        for name in lists:
            if not isinstance(stored.get(name, []), list):
                raise ConfigError(f"{str(path)!r}: {name} {stored[name]!r} must be a list")
        for name in ("full_layers", "delta_layers"):
            if not all(is_count(layer, 0) for layer in stored[name]):
                raise ConfigError(f"{str(path)!r}: {name} {stored[name]!r} must be layer numbers")
        settings: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in stored.items()}
        return cls(**settings)

    def check_depth(self, num_layers: int) -> None:
        """ConfigError unless the file was made for a model with this many layers."""
        if self.num_layers != num_layers:
            raise ConfigError(
                f"the calibration of {self.model!r} is for {self.num_layers} layers, but this "
                f"model has {num_layers}"
            )


def rank_by_shift(shift: Sequence[float], candidates: Sequence[int], count: int) -> list[int]:
    """The `count` candidate layers of largest shift; equal shifts go to the earlier layer."""
    _check_count(count, candidates)
    return sorted(sorted(candidates, key=lambda layer: (-shift[layer], layer))[:count])


def place_by_shift(shift: Sequence[float], candidates: Sequence[int], count: int) -> list[int]:
    """The first candidate layer, and of the others the `count - 1` of largest shift.

    A layer before the first selection layer reads everything. Shifts tend to be largest in the last
    layers, so that the largest alone would leave few sparse layers; the authors' layers also begin
    right after their full layers ({0, 1} and {2, 14, 22} of 28).
    """
    _check_count(count, candidates)
    first, *others = sorted(candidates)
    return [first, *(rank_by_shift(shift, others, count - 1) if count > 1 else [])]


def place_by_recall(
    recall: Sequence[Sequence[float]], candidates: Sequence[int], count: int
) -> list[int]:
    """The `count` candidate layers that keep the most attention in the others.

    recall[a][b], a < b: share of layer b's attention that is kept under layer a's selection.
    Maximises the sum, over the candidates that are not chosen, of their recall under the nearest
    chosen layer before them, given that exactly `count` candidates read everything. A layer before
    the first chosen one would read everything too, and so count as one of them; choosing it instead
    costs nothing. The first candidate is therefore always chosen. Ties go to the earlier layers.
    """
    _check_count(count, candidates)
    layers = sorted(candidates)
    end = len(layers)
    # kept[a][b - a - 1]: recall under layer a's selection, summed over the layers between a and b.
    kept = [
        list(accumulate((recall[a][b] for b in layers[i + 1 :]), initial=0.0))
        for i, a in enumerate(layers)
    ]
    # best[i]: the most that the layers after i can keep if i and a given number of others are
    # chosen.
    best = [row[-1] for row in kept]
    following: list[list[int]] = []
    for more in range(1, count):

        def value(i: int, j: int, best: list[float] = best) -> float:
            return kept[i][j - i - 1] + best[j]

        starts = range(end - more)
        nexts = [max(range(i + 1, end - more + 1), key=partial(value, i)) for i in starts]
        best = [value(i, j) for i, j in zip(starts, nexts, strict=True)]
        following.append(nexts)
    chosen = [0]
    for nexts in reversed(following):
        chosen.append(nexts[chosen[-1]])
    return [layers[i] for i in chosen]


def place_by_error(
    error: Sequence[Sequence[float]], candidates: Sequence[int], count: int
) -> list[int]:
    """As `place_by_recall`, with the least summed error; error[a][b] is that of layer b's output.

    Every placement has the same number of sparse layers, so that sums are comparable.
    """
    return place_by_recall([[-value for value in row] for row in error], candidates, count)


def _check_count(count: int, candidates: Sequence[int]) -> None:
    right = f"from 1 to {len(candidates)}, the full-attention layers that are not in full_layers"
    require(is_count(count) and count <= len(candidates), "num_delta_layers", count, right)
