"""Trains a head on its target's attention: the KL divergence between their weights.

For a query token r and a KV head g the target's mass p[g, r, i] over tokens i is the mean of its
attention weights over full-attention layers and over the query heads of g; the head's own is the
mean of its query heads that serve g. Tokens that every selection includes (first tokens and a
recent window) are removed from both, and the rest is renormalised, so that no capacity is spent on
them. Each row is weighted by its remaining mass.

Ours; SpeContext takes its head from a draft model (see `draft`). No language-model part is needed:
the loss reads nothing but queries and keys.

Masking is done after the head's softmax over all tokens, not before: the selection compares weights
of different query heads, and these are normalised over all tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.kernels.selection import Selection
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training.teacher import TeacherTargets

#: Stands for minus infinity where gradients must stay numbers.
NOTHING = -1e30


def previous(fused: Tensor) -> Tensor:
    """Of every token the features of the token before it, zeros for the first; [n, H]."""
    return torch.cat((torch.zeros_like(fused[:1]), fused[:-1]))


def features(head: RetrievalHead, lesson: TeacherTargets) -> Tensor | None:
    """The features paired with each token of a text, [n, H]; None for a head without features."""
    return previous(head.fuse(lesson.hidden)) if head.config.uses_features else None


def log_weights(head: RetrievalHead, lesson: TeacherTargets) -> Tensor:
    """Log of the weights of each query head of the head: float32 [heads, R, n]."""
    fused, rows = features(head, lesson), lesson.rows
    places = torch.arange(len(lesson.token_ids), device=rows.device)
    _, key = head(lesson.token_ids, places, fused)
    own = None if fused is None else fused[rows]
    query, _ = head(lesson.token_ids[rows], rows, own)
    query = query.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3)  # [Hkv, G, R, D]
    logits = query.flatten(1, 2) @ key.permute(1, 2, 0) * head.scale  # [Hkv, G * R, n]
    logits = logits.unflatten(1, (-1, len(rows))).flatten(0, 1)
    logs: Tensor = logits.masked_fill(places > rows[:, None], NOTHING).log_softmax(-1)
    return logs


def best(logs: Tensor, groups: int) -> Tensor:
    """The largest weight of each group, as `scores.group_weights` has it: [groups, R, n]."""
    lists = min(groups, len(logs))
    largest: Tensor = logs.unflatten(0, (lists, -1)).amax(1)
    return largest.repeat_interleave(groups // lists, 0)


def chosen(scores: Tensor, rows: Tensor, budget: int, first: int, last: int) -> Selection:
    """The tokens that SpeContext would read by scores [groups, R, n] before each row."""
    valid = (rows + 1).to(torch.int32)
    scores = scores.transpose(0, 1).float().contiguous()
    return kernels.top_k(scores, valid, budget, 1, first=first, last=last)


def recent(rows: Tensor, budget: int, first: int) -> Selection:
    """The first tokens and the newest, for comparison."""
    return kernels.recent_indices((rows + 1).to(torch.int32), budget, first=first)


def share(mass: Tensor, selection: Selection) -> Tensor:
    """The share of the target's attention on the selection, float32 [R].

    mass [groups, R, n] as a Lesson has it: so it is a mean over layers and heads.
    """
    indices = selection.indices.transpose(0, 1).long()  # [groups or 1, R, budget]
    indices = indices.expand(len(mass), -1, -1)
    found = mass.gather(-1, indices.clamp(0, mass.shape[-1] - 1)).masked_fill(indices < 0, 0)
    return (found.sum(-1) / mass.sum(-1)).mean(0)


#: First and newest tokens that are left out: the sinks and the window of SpeContext. Otherwise most
#: of the loss is about neighbours: of 24 derivations of the bundled model at an eighth of their
#: length, 1 was right with a head trained so, 12 with this one (a quick run of 1.1 M tokens each).
FIRST, LAST = 4, 64


def attention_loss(head: RetrievalHead, lesson: TeacherTargets) -> tuple[Tensor, Tensor]:
    """The loss, a scalar in nats, and the log of the head's weights [heads, R, n]."""
    logs = log_weights(head, lesson)
    return mass_divergence(logs, lesson), logs


def mass_divergence(
    logs: Tensor, lesson: TeacherTargets, *, first: int = FIRST, last: int = LAST
) -> Tensor:
    """The loss of logs of weights [heads, R, n], a scalar in nats.

    The mean KL divergence over rows and KV heads, weighted by the mass outside of the `first` and
    `last` tokens; 0 where there is none.
    """
    mass, rows = lesson.mass, lesson.rows
    groups, length = len(mass), mass.shape[-1]
    lists = min(groups, len(logs))
    predicted = logs.unflatten(0, (lists, -1))
    predicted = predicted.logsumexp(1) - math.log(predicted.shape[1])
    predicted = predicted.repeat_interleave(groups // lists, 0)

    places = torch.arange(length, device=rows.device)
    out = (places < first) | (places > (rows - last)[:, None])
    predicted = predicted.masked_fill(out, NOTHING).log_softmax(-1)
    wanted = mass.masked_fill(out, 0)
    left = wanted.sum(-1, keepdim=True)  # [groups, R, 1]
    # sum_i p_i log(p_i / left / q_i): the KL divergence times `left`, without dividing by zero.
    entropy = torch.xlogy(wanted, wanted).sum() - torch.xlogy(left, left).sum()
    loss: Tensor = entropy - (wanted * predicted).sum()
    return loss / left.sum().clamp_min(1e-9)
