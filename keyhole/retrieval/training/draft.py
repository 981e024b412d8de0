"""A draft model in the manner of EAGLE-3, to be trained and then pruned to a retrieval head.

One Transformer layer reads, for each token, its embedding beside the target's features of the token
before, and predicts the target's next-token distribution. In training it also continues by itself:
step s reads the token that really follows, beside the layer's own output of step s - 1 in the place
of features ("training-time test"), as it will have to when it drafts.

Source: EAGLE-3 (Li et al., 2025, arXiv 2503.01840), section 3; what its queries and keys are made
of is `head.RetrievalHead`. Differences: the output matrix is the target's and is not trained; the
loss is taken at sampled rows (of a single layer no other row is needed).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training.objectives import NOTHING, previous
from keyhole.retrieval.training.teacher import TeacherTargets

#: A later step counts this much of the one before it: the weighting of EAGLE-3's training code.
DECAY = 0.8


class Draft(nn.Module):
    """A head with what makes it a language model; `output` [V, H] is the target's, not trained."""

    def __init__(self, head: RetrievalHead, output: Tensor, mlp_size: int) -> None:
        super().__init__()
        config = head.config
        H, D = config.hidden_size, config.head_dim
        self.head = head
        self._output = output.detach()
        self.v = nn.Linear(config.input_size, config.num_kv_heads * D, bias=False)
        self.o = nn.Linear(config.num_heads * D, H, bias=False)
        self.mlp_norm = nn.RMSNorm(H, eps=config.rms_norm_eps)
        self.gate = nn.Linear(H, mlp_size, bias=False)
        self.up = nn.Linear(H, mlp_size, bias=False)
        self.down = nn.Linear(mlp_size, H, bias=False)
        self.norm = nn.RMSNorm(H, eps=config.rms_norm_eps)

    def project(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, D], keys and values [T, Hkv, D] of tokens beside hidden [T, H]."""
        head = self.head
        query, key = head(token_ids, positions, hidden)
        embedded = head.embed_norm(F.embedding(token_ids, head.embedding).to(hidden.dtype))
        x = torch.cat((embedded, head.feature_norm(hidden)), -1)
        return query, key, self.v(x).unflatten(-1, (-1, head.config.head_dim))

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [T, H] from its input's hidden half and attention [T, heads, D]."""
        hidden = hidden + self.o(mixed.flatten(1))
        x = self.mlp_norm(hidden)
        out: Tensor = hidden + self.down(F.silu(self.gate(x)) * self.up(x))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [T, V] of the layer's output."""
        return F.linear(self.norm(hidden), self._output.to(hidden.dtype))

    def unroll(self, lesson: TeacherTargets, steps: int) -> list[Tensor]:
        """Logits [R, V] of each step: at row r, step s predicts the token after r + s, s from 0.

        Queries of step s see the keys of step 0 up to row r, and the keys of their own row in the
        later steps: the tokens that the draft would have drafted itself.
        """
        rows, token_ids = lesson.rows, lesson.token_ids
        places = torch.arange(len(token_ids), device=rows.device)
        hidden = previous(self.head.fuse(lesson.hidden))
        query, keys, values = self.project(token_ids, places, hidden)
        query, hidden = query[rows], hidden[rows]
        unseen = places > rows[:, None]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        found = []
        for step in range(steps):
            if step:
                now = rows + step
                query, key, value = self.project(token_ids[now], now, hidden)
                own_keys.append(key)
                own_values.append(value)
            mixed = self._attend(query, keys, values, unseen, own_keys, own_values)
            hidden = self.finish(hidden, mixed)
            found.append(self.logits(hidden))
        return found

    def prune(self, inputs: str) -> RetrievalHead:
        """The head alone; for inputs "tokens" with the embedding's half of the projections.

        The features then are missing where training had them; that is what the method says.
        """
        if inputs == self.head.config.inputs:
            return self.head
        config = replace(self.head.config, inputs=inputs, feature_size=0, feature_layers=())
        pruned = RetrievalHead(config, self.head.embedding).to(self.head.q.weight.dtype)
        with torch.no_grad():
            pruned.embed_norm.weight.copy_(self.head.embed_norm.weight)
            for mine, full in ((pruned.q, self.head.q), (pruned.k, self.head.k)):
                mine.weight.copy_(full.weight[:, : config.input_size])
        return pruned

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        unseen: Tensor,
        own_keys: list[Tensor],
        own_values: list[Tensor],
    ) -> Tensor:
        """[R, heads, D] over keys [n, Hkv, D] but the `unseen` [R, n], and each row's own."""
        groups = query.unflatten(1, (keys.shape[1], -1))  # [R, Hkv, G, D]
        logits = torch.einsum("rhgd,nhd->rhgn", groups, keys)
        logits = logits.masked_fill(unseen[:, None, None], NOTHING)
        extra = [torch.einsum("rhgd,rhd->rhg", groups, key)[..., None] for key in own_keys]
        weights = (torch.cat((logits, *extra), -1) * self.head.scale).softmax(-1)
        mixed = torch.einsum("rhgn,nhd->rhgd", weights[..., : len(keys)], values)
        for step, value in enumerate(own_values):
            mixed = mixed + weights[..., len(keys) + step, None] * value[:, :, None]
        return mixed.flatten(1, 2)


def eagle_loss(draft: Draft, lesson: TeacherTargets) -> Tensor:
    """Cross-entropy with the target's distribution, later steps counting less; in nats."""
    assert lesson.logits is not None
    steps = lesson.logits.shape[1]
    wanted = lesson.logits.softmax(-1)
    losses = [
        -(wanted[:, step] * logits.log_softmax(-1)).sum(-1).mean()
        for step, logits in enumerate(draft.unroll(lesson, steps))
    ]
    weights = [DECAY**step for step in range(steps)]
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    assert isinstance(total, Tensor)
    return total / sum(weights)
