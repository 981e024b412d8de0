"""SamKV's stable layers, and the file that stores them.

SamKV, appendix A.2. Ranked by alpha, one block is the most important of a document over all layers;
a layer in which that block is an outlier has stable attention and scores a point. Points are summed
over calibration documents, and the layers with the most are the stable ones.

Difference from the paper: "beta's ranking is an outlier" is read as its alpha being one among the
blocks of the layer. A rank cannot be: the best of N ranks is 1.7 deviations from their mean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyhole.cache.layout import Geometry
from keyhole.config import is_count, require
from keyhole.errors import ConfigError
from keyhole.reuse.block_scores import outliers

#: Beside a model's weights.
STABILITY_FILE = "keyhole-samkv.json"

#: The paper finds the last 4 layers of Llama 3.1 8B and the last 5 of two other models (A.2).
NUM_STABLE = 4

# Fewer blocks have no outliers: see `outliers`.
_LEAST_BLOCKS = 11


@dataclass(frozen=True, kw_only=True)
class Stability:
    """Stable layers measured for one model.

    scores: per layer, the calibration documents whose main block is an outlier there.
    """

    model: str
    num_layers: int
    num_documents: int
    block_size: int
    stable_layers: tuple[int, ...]
    scores: tuple[int, ...]

    def save(self, path: str | Path) -> None:
        """Writes the JSON file that `SamKV(layers=...)` loads."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Stability:
        """Reads a file of `save`; ConfigError names the fault of an invalid file."""
        try:
            stored = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read stable layers {str(path)!r}: {error}") from error
        names = set(cls.__dataclass_fields__)
        if not isinstance(stored, dict) or set(stored) != names:
            raise ConfigError(
                f"{str(path)!r} holds no stable layers: it must be an object with {sorted(names)}"
            )
        for name in ("num_layers", "num_documents", "block_size"):
            _check(path, name, stored[name], is_count(stored[name]), "a whole number >= 1")
        depth = stored["num_layers"]
        layers, scores = stored["stable_layers"], stored["scores"]
        good = isinstance(layers, list) and all(is_count(i, 0) and i < depth for i in layers)
        right = f"one or more layer numbers below {depth}"
        _check(path, "stable_layers", layers, good and bool(layers), right)
        good = isinstance(scores, list) and len(scores) == depth
        good = good and all(is_count(score, 0) for score in scores)
        _check(path, "scores", scores, good, f"{depth} whole numbers >= 0")
        fields: dict[str, Any] = {**stored, "stable_layers": tuple(layers), "scores": tuple(scores)}
        return cls(**fields)

    def check_depth(self, num_layers: int) -> None:
        """ConfigError unless the file was made for a model with this many layers."""
        if self.num_layers != num_layers:
            raise ConfigError(
                f"stable layers of {self.model!r} are for {self.num_layers} layers, "
                f"this model has {num_layers}"
            )


def stable_layers(
    alphas: Sequence[Tensor], num: int = NUM_STABLE, sigmas: float = 3.0
) -> tuple[list[int], list[int]]:
    """Scores of all layers, and the `num` layers that score highest, ascending.

    alphas: per calibration document float [L, N], alpha of its blocks. Equal scores: the later
    layer, as the published ones are the last; equal average ranks: the earlier block.
    ConfigError if no document has the 11 blocks that an outlier needs.
    """
    most = max((alpha.shape[1] for alpha in alphas), default=0)
    right = f"documents with at least {_LEAST_BLOCKS} blocks; the longest has {most}"
    require(most >= _LEAST_BLOCKS, "calibration documents", len(alphas), right)
    depth = len(alphas[0])
    require(is_count(num) and num <= depth, "num_stable_layers", num, f"from 1 to {depth}")
    scores = torch.zeros(depth, dtype=torch.int64)
    for alpha in alphas:
        ranks = alpha.argsort(dim=1, stable=True).argsort(dim=1)
        main = ranks.sum(0).argmin()
        scores += outliers(alpha, sigmas)[:, main]
    order = sorted(range(depth), key=lambda layer: (-int(scores[layer]), -layer))
    return scores.tolist(), sorted(order[:num])


def last_layers(geometry: Geometry, num: int = NUM_STABLE) -> tuple[int, ...]:
    """The default without a calibration: the last layers, with full attention if any have it.

    A layer with a sliding window cannot see across a document.
    """
    return (geometry.full_attention or tuple(range(geometry.num_layers)))[-num:]


def _check(path: str | Path, name: str, value: object, good: bool, right: str) -> None:
    if not good:
        raise ConfigError(f"{str(path)!r}: {name} {value!r} must be {right}")
