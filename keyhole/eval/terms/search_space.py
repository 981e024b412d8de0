"""What `--terms tuned` tries: values by the name of a setting, the same for all methods with it.

Left out are settings that change what the budget means (whether a prompt counts, a choice per query
head), or that save time at the cost of the score (how often a choice is made anew): the table is
about scores at one budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.eval.terms.equal import NO_MORE_DENSE, SELECTION_LAYERS

_FULL_LAYERS = "full_layers"


@dataclass(frozen=True)
class Share:
    """A share of the budget in whole pages, at least one; counted in tokens or in pages."""

    of_budget: Fraction
    in_pages: bool = False

    def at(self, budget: int, page_size: int) -> int:
        """For a budget in tokens."""
        pages = max(1, int(budget * self.of_budget) // page_size)
        return pages if self.in_pages else pages * page_size


_SHARES = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))

#: None is a method's own default. Values that a method cannot have are passed over.
SPACE: Mapping[str, Sequence[Any]] = {
    "sink_size": (0, 16),
    "window_size": tuple(Share(share) for share in _SHARES),
    "recent_pages": tuple(Share(share, in_pages=True) for share in _SHARES),
    "cluster_size": (8, 16, 32, 80),
    "block_size": (None, 16, 32, 64),
    "outlier_chunks": (None, 0, 1, 2, 4),
    "rank": (None, 0),
    "alpha": (1e-4, 1e-3, 1e-2, 1e-1),
    "per_head": (True, False),
}

#: Where the last dense layer stands, as a share of the full-attention layers.
_DEPTHS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))


def dense_sets(geometry: Geometry, size: int) -> list[tuple[int, ...]]:
    """A few sets of so many dense layers: the first ones; all but one of these and a deeper one;
    the same, evenly spread.

    The first full-attention layer is in all of them, since a method with selection layers reads
    everything before the first of these.
    """
    usable = geometry.full_attention
    size = min(size, len(usable))
    if size == 0:
        return [()]
    first = usable[: size - 1]
    deeper = [usable[min(len(usable) - 1, int(len(usable) * share))] for share in _DEPTHS]
    spread = tuple(usable[len(usable) * i // size] for i in range(size))
    found = [usable[:size], *((*first, layer) for layer in deeper if layer not in first), spread]
    if size > 1:
        found = [one for one in found if one[0] == usable[0]]
    return list(dict.fromkeys(found))


def layer_settings(
    fields: Collection[str], geometry: Geometry, size: int
) -> Iterator[dict[str, Any]]:
    """Settings that give a policy with these fields `size` dense layers; one that has none: {}."""
    selecting = [name for name in SELECTION_LAYERS if name in fields]
    if _FULL_LAYERS not in fields:
        yield {}
        return
    for dense in dense_sets(geometry, size):
        if not selecting:
            yield {_FULL_LAYERS: dense}
        for begin in range(len(dense) if selecting else 0):
            # Everything before the first selection layer is read; it must be in the set anyway.
            if dense[: begin + 1] == geometry.full_attention[: begin + 1]:
                layers = {_FULL_LAYERS: dense[:begin]} | dict.fromkeys(selecting, dense[begin:])
                yield layers | {
                    name: NO_MORE_DENSE[name] for name in NO_MORE_DENSE if name in fields
                }


def combinations(
    fields: Collection[str], geometry: Geometry, size: int, budget: int
) -> Iterator[dict[str, Any]]:
    """Every combination of values for a policy with these fields."""
    names = [name for name in SPACE if name in fields]
    values = [
        [
            value.at(budget, geometry.page_size) if isinstance(value, Share) else value
            for value in SPACE[name]
        ]
        for name in names
    ]
    for layers in layer_settings(fields, geometry, size):
        for chosen in itertools.product(*values):
            yield layers | dict(zip(names, chosen, strict=True))
