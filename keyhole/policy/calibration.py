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
from pathlib import Path
from typing import Any

from keyhole.config import is_count
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
        for name in ("full_layers", "delta_layers"):
            if not all(is_count(layer, 0) for layer in stored[name]):
                raise ConfigError(f"{str(path)!r}: {name} {stored[name]!r} must be layer numbers")
        lists = ("full_layers", "delta_layers", "recall")
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
    return sorted(sorted(candidates, key=lambda layer: (-shift[layer], layer))[:count])


def place_by_recall(
    recall: Sequence[Sequence[float]], candidates: Sequence[int], count: int
) -> list[int]:
    """The `count` candidate layers that maximise the summed recall of all candidate layers.

    recall[a][b], a < b: share of layer b's attention mass kept under layer a's selection. A chosen
    layer counts 1, and so does a layer before the first chosen one: it reads everything. The first
    candidate is therefore always chosen first: without it, layers before the first chosen one
    would be full for free, and the placement of least work would win nothing.
    """
    layers = sorted(candidates)
    if not 0 < count <= len(layers):
        raise ConfigError(
            f"num_delta_layers {count} must be from 1 to {len(layers)} for this model"
        )

    def kept(a: int, b: int) -> float:
        """Recall summed over chosen layer a and the layers after it, before position b."""
        return 1.0 + sum(recall[layers[a]][layers[i]] for i in range(a + 1, b))

    # best[n][i]: (recall of layers from i on, the layers chosen) if i is chosen, n more to come.
    end = len(layers)
    best: list[dict[int, tuple[float, list[int]]]] = [
        {i: (kept(i, end), [layers[i]]) for i in range(end)}
    ]
    for more in range(1, count):
        row: dict[int, tuple[float, list[int]]] = {}
        for i in range(end - more):
            options = [
                (kept(i, j) + best[more - 1][j][0], [layers[i], *best[more - 1][j][1]])
                for j in range(i + 1, end)
                if j in best[more - 1]
            ]
            row[i] = max(options, key=lambda option: option[0])
        best.append(row)
    return best[count - 1][0][1]
