"""The methods that the tables of stored documents compare, by the names in the tables."""

from __future__ import annotations

from typing import Any

#: The name of a method and its settings.
Variant = tuple[str, dict[str, Any]]

#: SamKV's table 3: everything computed, everything reused, the methods in between; then our own.
METHODS: dict[str, Variant] = {
    "recompute": ("recompute", {}),
    "reuse, not turned": ("reuse", {"rotate": False}),
    "reuse": ("reuse", {}),
    "multi_infllm": ("multi_infllm", {}),
    # By keys and values, as in the paper and in the stored lines.
    "cacheblend": ("cacheblend", {"deviation": "both"}),
    # In this model, missing attention to other documents affects keys only from layer 2 on.
    "cacheblend, layer 2": ("cacheblend", {"deviation": "both", "check_layer": 2}),
    "epic": ("epic", {}),
    "sam_kv overwrite": ("sam_kv", {"update": "overwrite"}),
    "sam_kv fusion": ("sam_kv", {"update": "fusion"}),
    # Ours, without a bias: other documents' queries would blur those of single tokens.
    "sam_kv extremes": ("sam_kv", {"score": "extremes", "share": 0.25, "bias": False}),
}


def _ablation() -> dict[str, Variant]:
    """SamKV's table 4: selection, personal bias and recomputation, each on and off."""
    found: dict[str, Variant] = {}
    for select, bias in ((False, True), (True, False), (True, True)):
        for recompute, update in ((False, "overwrite"), (True, "overwrite"), (True, "fusion")):
            if select and bias and recompute:
                continue  # the unmodified method
            parts = [
                ("select" + (", bias" if bias else "")) if select else "ends only",
                update if recompute else "nothing again",
            ]
            settings = {"select": select, "bias": bias, "recompute": recompute, "update": update}
            found["sam_kv: " + "; ".join(parts)] = ("sam_kv", settings)
    return found


ABLATION = _ablation()

_MEAN, _EXTREMES = "sam_kv overwrite", "sam_kv extremes"
_AT_RANDOM = {"score": "random"}

#: The table at equal budgets: each variant, and the variant whose share of kept or recomputed
#: tokens it gets on the same question (None: its own budget); those that set budgets come first.
EQUAL: dict[str, tuple[Variant, str | None]] = {
    "recompute": (METHODS["recompute"], None),
    "reuse": (METHODS["reuse"], None),
    _MEAN: (METHODS[_MEAN], None),
    "sam_kv fusion": (METHODS["sam_kv fusion"], None),
    "sam_kv at random": (("sam_kv", _AT_RANDOM), _MEAN),
    "multi_infllm, as sam_kv": (("multi_infllm", {}), _MEAN),
    "ends only": (ABLATION["sam_kv: ends only; overwrite"], None),
    _EXTREMES: (METHODS[_EXTREMES], None),
    "extremes at random": (("sam_kv", METHODS[_EXTREMES][1] | _AT_RANDOM), _EXTREMES),
    "multi_infllm, as extremes": (("multi_infllm", {}), _EXTREMES),
    "cacheblend, as sam_kv": (("cacheblend", {}), _MEAN),
    "cacheblend, layer 2, as sam_kv": (("cacheblend", {"check_layer": 2}), _MEAN),
    "epic, as sam_kv": (METHODS["epic"], None),
}

#: Pairs that keep equally many tokens: a selection and its control.
PAIRS = (
    (_MEAN, "sam_kv at random"),
    ("sam_kv fusion", "sam_kv at random"),
    (_EXTREMES, "extremes at random"),
    (_MEAN, "multi_infllm, as sam_kv"),
    (_EXTREMES, "multi_infllm, as extremes"),
)
