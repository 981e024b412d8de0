"""The frozen target under a soft selection, which lets gradients reach the head.

A token's gate is `sigmoid((score - threshold) / temperature)`, with the threshold midway between
the last score that a budget takes and the first that it leaves out; its log is added to the logits
of attention in every layer with full attention. First and newest tokens have gates of 1, as in a
choice. As the temperature falls this converges to the hard selection.

The gate is soft in the forward pass too. With the true choice there, and the gradients of the soft
one ("straight through"), nothing was learned: benchmarks/LOG.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from keyhole.errors import NumericalError
from keyhole.retrieval.training.attention_objective import NOTHING
from keyhole.retrieval.training.teacher import TeacherTargets, attention_weights

#: Name of our function in transformers' table.
NAME = "keyhole_gated"


def log_gates(
    scores: Tensor, rows: Tensor, budget: int, first: int, last: int, temperature: float
) -> Tensor:
    """Logs of the gates, with gradients to the scores: [groups, R, n], NOTHING in the future.

    scores [groups, R, n] of the query tokens rows, int64 [R]; budget counts the `first` and `last`
    tokens. A row with no more tokens than the budget has gates of 1.
    """
    places = torch.arange(scores.shape[-1], device=rows.device)
    future = places > rows[:, None]
    always = (places < first) | (places > (rows - last)[:, None])
    free = scores.masked_fill(always | future, NOTHING)
    count = min(budget - first - last, len(places) - 1)
    edge = free.topk(count + 1, -1).values[..., -2:]  # the last one taken, the first one left
    gates = F.logsigmoid((free - edge.mean(-1, keepdim=True)) / temperature)
    return gates.masked_fill(always, 0).masked_fill(future, NOTHING)


@dataclass(frozen=True)
class _Gates:
    """Travels with a forward to every layer: [Hkv, R, n], for the query tokens [R]."""

    logs: Tensor
    rows: Tensor


def gated_logits(network: nn.Module, lesson: TeacherTargets, logs: Tensor) -> Tensor:
    """Logits of the target under gates, float32 [R, V], with gradients to the gates' logs.

    lesson: with its cache, and rows that are the last of its text: as in decoding, what stands
    before them was read in full, and each of them also sees what gates made of those before it.
    logs [Hkv, R, n] as `log_gates` has them. NumericalError if the target gives NaN.
    """
    target: Any = network
    assert lesson.cache is not None
    start, length = len(lesson.token_ids) - len(lesson.rows), len(lesson.token_ids)
    assert int(lesson.rows[0]) == start, "rows are the last of the text"
    before, known = DynamicCache(), cast("Any", lesson.cache)
    for number, layer in enumerate(known.layers):
        before.update(layer.keys[:, :, :start], layer.values[:, :, :start], number)
    implementation = target.config._attn_implementation
    target.set_attn_implementation(NAME)
    try:
        out = target(
            input_ids=lesson.token_ids[None, start:],
            past_key_values=before,
            use_cache=True,
            **{NAME: _Gates(logs, lesson.rows)},
        )
    finally:
        target.set_attn_implementation(implementation)
    if not out.logits.isfinite().all():
        raise NumericalError(f"the target gives NaN under gates on a text of {length} tokens")
    logits: Tensor = out.logits[0].float()
    return logits


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    keyhole_gated: _Gates | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the last R tokens of one text: query [1, Hq, R, D], key [1, Hkv, n, D].

    Returns [1, R, Hq, Dv], as transformers wants it.
    """
    assert keyhole_gated is not None, "only gated_logits uses this function"
    rows = keyhole_gated.rows
    weights = attention_weights(
        query[0].unflatten(0, (key.shape[1], -1)),
        key[0],
        rows,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        window=sliding_window,
        bias=keyhole_gated.logs if sliding_window is None else None,
    )
    out = (weights.to(value.dtype).flatten(1, 2) @ value[0]).unflatten(1, (-1, len(rows)))
    return out.flatten(0, 1).transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(NAME, attention)
