"""Where DELTA's selection layers go: two ways to place them, and the file that remembers it.

The paper puts them where the page distribution shifts most from one layer to the next (DELTA,
section 5, "Layer configuration"): `place_by_shift`. Ours puts them where the layers between lose
the least: with R[a, b] the mean attention mass that layer b keeps under layer a's selection,
`place_by_recall` maximises the summed recall of all sparse layers exactly, by dynamic programming
over (layer, number placed), O(L^2 n).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from keyhole.config import is_count, require
from keyhole.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Layers of DELTA measured for one model.

    recall: per layer, the mean share of its attention mass that its selection keeps (1 for layers
    that read everything).
    """

    model: str
    method: str
    num_layers: int
    token_budget: int
    full_layers: tuple[int, ...]
    delta_layers: tuple[int, ...]
    recall: tuple[float, ...]

    def save(self, path: str | Path) -> None:
        """Writes the JSON file that `Delta(layers=...)` loads."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads a file of `save`; ConfigError says what is wrong with a file that is not one."""
        try:
            stored = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read calibration {str(path)!r}: {error}") from error
        names = set(cls.__dataclass_fields__)
        if not isinstance(stored, dict) or set(stored) != names:
            raise ConfigError(
                f"{str(path)!r} is not a calibration: it must be an object with {sorted(names)}"
            )
        lists = ("full_layers", "delta_layers", "recall")
        for name in lists:
            if not isinstance(stored[name], list):
                raise ConfigError(f"{str(path)!r}: {name} {stored[name]!r} must be a list")
        for name in ("full_layers", "delta_layers"):
            if not all(is_count(layer, 0) for layer in stored[name]):
                raise ConfigError(f"{str(path)!r}: {name} {stored[name]!r} must be layer numbers")
        fields: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in stored.items()}
        return cls(**fields)

    def check_depth(self, num_layers: int) -> None:
        """ConfigError unless the file was made for a model with this many layers."""
        if self.num_layers != num_layers:
            raise ConfigError(
                f"calibration of {self.model!r} is for {self.num_layers} layers, "
                f"this model has {num_layers}"
            )


def place_by_shift(shift: Sequence[float], candidates: Sequence[int], count: int) -> list[int]:
    """The `count` candidate layers of largest shift; equal shifts go to the earlier layer."""
    _check_count(count, candidates)
    return sorted(sorted(candidates, key=lambda layer: (-shift[layer], layer))[:count])


def place_by_recall(
    recall: Sequence[Sequence[float]], candidates: Sequence[int], count: int
) -> list[int]:
    """The choice of `count` candidate layers that keeps the most attention in the others.

    recall[a][b], a < b: share of layer b's attention that is kept under layer a's selection.
    Maximised is the sum, over the candidates that were not chosen, of their recall under the
    nearest chosen layer before them, given that exactly `count` candidates read everything. A layer
    before the first chosen one would read everything too, and so count as one of them; choosing it
    costs the same and loses nothing. The first candidate is therefore always chosen. Of equally
    good choices the one with the earlier layers is taken.
    """
    _check_count(count, candidates)
    layers = sorted(candidates)
    end = len(layers)
    # kept[a][b - a - 1]: recall under layer a's selection, summed over the layers between a and b.
    kept = [
        list(accumulate((recall[a][b] for b in layers[i + 1 :]), initial=0.0))
        for i, a in enumerate(layers)
    ]
    # best[i]: the most that the layers after i can keep if i is chosen, and some number more.
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


def _check_count(count: int, candidates: Sequence[int]) -> None:
    right = f"from 1 to {len(candidates)}, the full-attention layers that are not in full_layers"
    require(is_count(count) and count <= len(candidates), "num_delta_layers", count, right)
