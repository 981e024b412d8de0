"""The share of the target's attention on the tokens that a head selects."""

from __future__ import annotations

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
