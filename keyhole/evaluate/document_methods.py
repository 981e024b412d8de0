"""The methods that the tables over stored documents compare, by the names that stand there."""

from __future__ import annotations

from typing import Any

#: A method's name and its settings.
Variant = tuple[str, dict[str, Any]]

#: SamKV's table 3: everything computed, everything reused, and the methods between; then ours.
METHODS: dict[str, Variant] = {
    "recompute": ("recompute", {}),
    "reuse, not turned": ("reuse", {"rotate": False}),
    "reuse": ("reuse", {}),
    "multi_infllm": ("multi_infllm", {}),
    "cacheblend": ("cacheblend", {}),
    # What documents lack of each other shows in this model's keys only from layer 2 on.
    "cacheblend, layer 2": ("cacheblend", {"check_layer": 2}),
    "epic": ("epic", {}),
    "sam_kv overwrite": ("sam_kv", {"update": "overwrite"}),
    "sam_kv fusion": ("sam_kv", {"update": "fusion"}),
    # Ours. What other documents look for would blur single tokens' queries: no bias.
    "sam_kv extremes": ("sam_kv", {"score": "extremes", "share": 0.25, "bias": False}),
}


def _ablation() -> dict[str, Variant]:
    """SamKV's table 4: selection, personal bias and recomputation, each on and off."""
    found: dict[str, Variant] = {}
    for select, bias in ((False, True), (True, False), (True, True)):
        for recompute, update in ((False, "overwrite"), (True, "overwrite"), (True, "fusion")):
            if select and bias and recompute:
                continue  # the method itself
            parts = [
                ("select" + (", bias" if bias else "")) if select else "ends only",
                update if recompute else "nothing again",
            ]
            settings = {"select": select, "bias": bias, "recompute": recompute, "update": update}
            found["sam_kv: " + "; ".join(parts)] = ("sam_kv", settings)
    return found


ABLATION = _ablation()
