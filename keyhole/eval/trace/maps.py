"""Selection maps of an evaluation: what a policy reads of a cell's first sample, in a few layers.

They are recorded in a run of their own, as a record slows every step, and is not for the times.
"""

from __future__ import annotations

from typing import Any

from keyhole.cache.layout import Geometry
from keyhole.eval.trace.selection_map import Recorded, selection_map
from keyhole.eval.trace.trace import Trace, Traced
from keyhole.eval.workloads.generation import serve
from keyhole.eval.workloads.workload import MakeEngine, Shown
from keyhole.policies.base import Policy

_MOST = 4


def mapped_layers(geometry: Geometry) -> tuple[int, ...]:
    """The layers after each quarter of those with full attention, the last one among them.

    The first layers, which many methods read whole, are left out, and every policy is shown in the
    same ones.
    """
    layers = geometry.full_attention
    ends = (-(-len(layers) * quarter // _MOST) - 1 for quarter in range(1, _MOST + 1))
    return tuple(dict.fromkeys(layers[end] for end in ends)) if layers else ()


def selection_maps(
    make_engine: MakeEngine, policy: Policy, shown: Shown, layers: tuple[int, ...]
) -> list[dict[str, Any]]:
    """What a line stores: a map for each layer, KV heads together; none without a decode step."""
    traced = Traced(policy, Trace(only=frozenset(layers)))
    (sequence,) = serve(make_engine(traced), [shown.request]).sequences
    recorded = Recorded(traced.trace, len(shown.request.prompt), sequence.detokenizer.text)
    return [
        selection_map(recorded, layer=layer, marks=shown.marks).to_json()
        for layer in traced.trace.layers
    ]
