"""Trains a head end to end on the target's next-token distribution under its selection.

The target reads a text in full up to some position and continues under the head's selection, made
soft (see `soft_selection`); the loss is the KL divergence of what it then predicts from what it
predicts with full attention. A token therefore counts by its effect on the prediction, not by its
attention: many tokens of little attention may together decide a prediction (such as whether a long
derivation is over), and a selection by attention omits exactly these. Every query token counts by
the probability of the one that follows it: only what the target would have written itself is like
what it will write.

Before they are compared, both distributions are tilted: the token that follows loses TILT nats.
Where the target is confident, a selection that removes most of its margin hardly changes the
divergence, until one word in a thousand is wrong. Tilted, margins below TILT nats count.

Ours. It needs a head with meaningful scores: one trained by `attention_objective`, whose loss is
kept with a small weight, so that the scores stay close to the target's attention.

Source of the idea: the forward KL of distillation (Hinton et al., 2015), with the target at full
attention as its own teacher. Cost: the target's forward and backward pass over the query tokens,
with weights in float32 over all tokens in every layer.
"""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training.attention_objective import best, log_weights, mass_divergence
from keyhole.retrieval.training.soft_selection import gated_logits, log_gates
from keyhole.retrieval.training.teacher import TeacherTargets

#: First tokens that every selection includes, and the most of the newest: SpeContext's defaults.
FIRST, LAST = 4, 64
#: Budgets are this part of a text, each ratio as likely: one head serves small and large ones.
SMALLEST, LARGEST = 1 / 12, 1 / 4
#: No budget is smaller than this: sinks, and a window, and something to choose.
LEAST = 16
#: How much of the attention's divergence stays in the loss.
ATTENTION = 0.02
#: By how many nats the token that follows is made less likely, in both distributions.
TILT = 5.0
#: Where the temperature of the gates begins, in nats of the head's weights, and where it ends.
WARM, COLD = 0.3, 0.03


def stretch(rng: Random, length: int, most: int) -> range:
    """Query tokens: up to `most` in a row, with the last at a random place of the second half."""
    end = rng.randint(length // 2 + 1, length)
    return range(max(end // 2, end - most), end)


def draw_budget(rng: Random, length: int) -> int:
    """Tokens that a choice among `length` may take."""
    share = float(SMALLEST * (LARGEST / SMALLEST) ** rng.random())
    return max(LEAST, round(length * share))


def window(budget: int) -> int:
    """The newest tokens that SpeContext always takes, by default."""
    return max(1, min(LAST, budget // 4))


def temperature(done: float) -> float:
    """Of the gates, after a share of the training."""
    return float(WARM * (COLD / WARM) ** min(1.0, done))


def selection_loss(
    head: RetrievalHead, network: nn.Module, lesson: TeacherTargets, budget: int, heat: float
) -> tuple[Tensor, Tensor]:
    """The loss, a scalar in nats, and the log of the head's weights [heads, R, n].

    lesson: with its cache and the logits of its rows, the last of its text. heat: the temperature
    of the gates.
    """
    assert lesson.logits is not None
    logs, rows = log_weights(head, lesson), lesson.rows
    gates = log_gates(best(logs, len(lesson.mass)), rows, budget, FIRST, window(budget), heat)
    found, wanted = gated_logits(network, lesson, gates)[:-1], lesson.logits[:-1, 0]
    follows = lesson.token_ids[rows[1:], None]
    said = wanted.softmax(-1).gather(-1, follows).squeeze(-1)
    tilt = torch.zeros_like(wanted).scatter_(-1, follows, -TILT)
    found, wanted = ((logits + tilt).log_softmax(-1) for logits in (found, wanted))
    divergence = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
    mean = (said * divergence).sum() / said.sum().clamp_min(1e-9)
    return mean + ATTENTION * mass_divergence(logs, lesson), logs
