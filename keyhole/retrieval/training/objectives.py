"""The objectives of a retrieval head's training, and the draft model of one of them.

    attention   the head matches its target's attention
    selection   the target's predictions change little under the head's soft selection
    eagle       a draft model in the manner of EAGLE-3 is trained, and then pruned to a head; or a
                given one is trained further with the head as it is

The draft is one Transformer layer. For each token it reads the token's embedding and the target's
features of the previous token, and predicts the target's next-token distribution. In training it
also continues on its own: step s reads the true next token, with the layer's own output of step s -
1 instead of features ("training-time test"), as it must when it drafts.

Source: EAGLE-3 (Li et al., 2025, arXiv 2503.01840), section 3; `head.RetrievalHead` describes its
queries and keys. Differences: the output matrix is the target's and is not trained; the loss is
taken at sampled rows (with a single layer no other row is needed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from keyhole import kernels
from keyhole.cache.argument import cache_argument
from keyhole.errors import NumericalError
from keyhole.kernels.selection import Selection
from keyhole.retrieval.draft import DraftLayer
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training.teacher import TeacherTargets, attending_by, attention_weights

# Trains a head on its target's attention: the KL divergence between their weights.
#
# For a query token r and a KV head g the target's mass p[g, r, i] over tokens i is the mean of its
# attention weights over full-attention layers and over the query heads of g; the head's own is the
# mean of its query heads that serve g. Tokens that every selection includes (first tokens and a
# recent window) are removed from both, and the rest is renormalised, so that no capacity is spent
# on them. Each row is weighted by its remaining mass.
#
# Ours; SpeContext takes its head from a draft model (see `draft`). No language-model part is
# needed: the loss reads nothing but queries and keys.
#
# Masking is done after the head's softmax over all tokens, not before: the selection compares
# weights of different query heads, and these are normalised over all tokens.


#: Replaces minus infinity where gradients must stay finite.
NOTHING = -1e30


def previous(fused: Tensor) -> Tensor:
    """The features of the previous token for every token, zeros for the first; [n, H]."""
    return torch.cat((torch.zeros_like(fused[:1]), fused[:-1]))


def features(head: RetrievalHead, targets: TeacherTargets) -> Tensor | None:
    """The features paired with each token of a text, [n, H]; None for a head without features."""
    return previous(head.fuse(targets.hidden)) if head.config.uses_features else None


def log_weights(head: RetrievalHead, targets: TeacherTargets) -> Tensor:
    """Log of the weights of each query head of the head: float32 [heads, R, n]."""
    fused, rows = features(head, targets), targets.rows
    places = torch.arange(len(targets.token_ids), device=rows.device)
    _, key = head(targets.token_ids, places, fused)
    own = None if fused is None else fused[rows]
    query, _ = head(targets.token_ids[rows], rows, own)
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
    """The tokens that SpeContext would select by scores [groups, R, n] before each row."""
    valid = (rows + 1).to(torch.int32)
    scores = scores.transpose(0, 1).float().contiguous()
    return kernels.top_k(scores, valid, budget, 1, first=first, last=last)


def recent(rows: Tensor, budget: int, first: int) -> Selection:
    """The first tokens and the newest, for comparison."""
    return kernels.recent_indices((rows + 1).to(torch.int32), budget, first=first)


def share(mass: Tensor, selection: Selection) -> Tensor:
    """The share of the target's attention on the selection, float32 [R].

    mass: [groups, R, n] as in `TeacherTargets`, a mean over layers and heads.
    """
    indices = selection.indices.transpose(0, 1).long()  # [groups or 1, R, budget]
    indices = indices.expand(len(mass), -1, -1)
    found = mass.gather(-1, indices.clamp(0, mass.shape[-1] - 1)).masked_fill(indices < 0, 0)
    return (found.sum(-1) / mass.sum(-1)).mean(0)


#: First and newest tokens that are left out: the sinks and the window of SpeContext. Otherwise most
#: of the loss is about neighbours: of 24 derivations of the bundled model at an eighth of their
#: length, 1 was right with a head trained so, 12 with this one (a quick run of 1.1 M tokens each).
FIRST, LAST = 4, 64


def attention_loss(head: RetrievalHead, targets: TeacherTargets) -> tuple[Tensor, Tensor]:
    """The loss, a scalar in nats, and the log of the head's weights [heads, R, n]."""
    logs = log_weights(head, targets)
    return mass_divergence(logs, targets), logs


def mass_divergence(
    logs: Tensor, targets: TeacherTargets, *, first: int = FIRST, last: int = LAST
) -> Tensor:
    """The loss of log weights [heads, R, n], a scalar in nats.

    The mean KL divergence over rows and KV heads, weighted by the mass outside of the `first` and
    `last` tokens; 0 if there is none.
    """
    mass, rows = targets.mass, targets.rows
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


# The frozen target under a soft selection, which lets gradients reach the head.
#
# A token's gate is `sigmoid((score - threshold) / temperature)`, with the threshold midway between
# the last score that a budget takes and the first that it leaves out; its log is added to the
# logits of attention in every layer with full attention. First and newest tokens have gates of 1,
# as in a selection. As the temperature falls this converges to the hard selection.
#
# The gate is soft in the forward pass too. With the true choice there, and the gradients of the
# soft one ("straight through"), nothing was learned: benchmarks/LOG.md.


#: Name of our function in transformers' table.
NAME = "keyhole_soft_selection"


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
class _SoftSelection:
    """Passed through a forward pass to every layer: [Hkv, R, n], for the query tokens [R]."""

    logs: Tensor
    rows: Tensor


def soft_selection_logits(network: nn.Module, targets: TeacherTargets, logs: Tensor) -> Tensor:
    """Logits of the target under gates, float32 [R, V], with gradients to the log gates.

    targets: with its cache, and with the last rows of its text: as in decoding, everything before
    them was read in full, and each of them also sees what earlier rows computed under their gates.
    logs [Hkv, R, n]: from `log_gates`. NumericalError if the target returns NaN.
    """
    target: Any = network
    assert targets.cache is not None
    start, length = len(targets.token_ids) - len(targets.rows), len(targets.token_ids)
    assert int(targets.rows[0]) == start, "rows are the last of the text"
    before, known = DynamicCache(), cast("Any", targets.cache)
    for number, layer in enumerate(known.layers):
        before.update(layer.keys[:, :, :start], layer.values[:, :, :start], number)
    with attending_by(target, NAME):
        out = target(
            input_ids=targets.token_ids[None, start:],
            use_cache=True,
            **{cache_argument(target): before, NAME: _SoftSelection(logs, targets.rows)},
        )
    if not out.logits.isfinite().all():
        raise NumericalError(f"with gates the model computes NaN for a text of {length} tokens")
    logits: Tensor = out.logits[0].float()
    return logits


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of the last R tokens of one text: query [1, Hq, R, D], key [1, Hkv, n, D].

    options: as transformers passes them. Returns [1, R, Hq, Dv], as transformers expects.
    """
    gates: _SoftSelection = options[NAME]
    rows = gates.rows
    bias = gates.logs if options.get("sliding_window") is None else None
    queries = query[0].unflatten(0, (key.shape[1], -1))
    weights = attention_weights(queries, key[0], rows, options, bias)
    out = (weights.to(value.dtype).flatten(1, 2) @ value[0]).unflatten(1, (-1, len(rows)))
    return out.flatten(0, 1).transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(NAME, attention)


# Trains a head end to end on the target's next-token distribution under its selection.
#
# The target reads a text in full up to some position and continues under the head's selection, made
# soft (see `soft_selection_logits`); the loss is the KL divergence of its predictions from those
# with full attention. A token therefore counts by its effect on the prediction, not by its
# attention: many tokens of little attention may together decide a prediction (such as whether a
# long derivation is over), and a selection by attention omits exactly these. Every query token
# counts by the probability of the one that follows it: only what the target would have written
# itself is like what it will write.
#
# Before they are compared, both distributions are tilted: the token that follows loses TILT nats.
# Where the target is confident, a selection that removes most of its margin hardly changes the
# divergence, until one word in a thousand is wrong. Tilted, margins below TILT nats count.
#
# Ours. It needs a head with meaningful scores: one trained by the objective `attention`, whose loss
# is kept with a small weight, so that the scores stay close to the target's attention.
#
# Source of the idea: the forward KL of distillation (Hinton et al., 2015), with the target at full
# attention as its own teacher. Cost: the target's forward and backward pass over the query tokens,
# with weights in float32 over all tokens in every layer.


#: Budgets are drawn from these parts of a text, so that one head works for small and large ones.
SMALLEST, LARGEST = 1 / 12, 1 / 4
#: The smallest budget: sinks, a window, and tokens to select.
LEAST = 16
#: How much of the attention's divergence stays in the loss.
ATTENTION = 0.02
#: By how many nats the following token is made less likely, in both distributions.
TILT = 5.0
#: Where the temperature of the gates begins, in nats of the head's weights, and where it ends.
WARM, COLD = 0.3, 0.03


def stretch(rng: Random, length: int, most: int) -> range:
    """Query tokens: up to `most` in a row, with the last at a random place of the second half."""
    end = rng.randint(length // 2 + 1, length)
    return range(max(end // 2, end - most), end)


def draw_budget(rng: Random, length: int) -> int:
    """The budget, in tokens, of a selection among `length` tokens."""
    share = float(SMALLEST * (LARGEST / SMALLEST) ** rng.random())
    return max(LEAST, round(length * share))


def window(budget: int) -> int:
    """The newest tokens that SpeContext always takes, by default."""
    return max(1, min(LAST, budget // 4))


def temperature(done: float) -> float:
    """The temperature of the gates after a share of the training."""
    return float(WARM * (COLD / WARM) ** min(1.0, done))


def selection_loss(
    head: RetrievalHead, network: nn.Module, targets: TeacherTargets, budget: int, heat: float
) -> tuple[Tensor, Tensor]:
    """The loss, a scalar in nats, and the log of the head's weights [heads, R, n].

    targets: with its cache and the logits of its rows, the last of its text. heat: the temperature
    of the gates.
    """
    assert targets.logits is not None
    logs, rows = log_weights(head, targets), targets.rows
    gates = log_gates(best(logs, len(targets.mass)), rows, budget, FIRST, window(budget), heat)
    found, wanted = soft_selection_logits(network, targets, gates)[:-1], targets.logits[:-1, 0]
    follows = targets.token_ids[rows[1:], None]
    likelihood = wanted.softmax(-1).gather(-1, follows).squeeze(-1)
    tilt = torch.zeros_like(wanted).scatter_(-1, follows, -TILT)
    found, wanted = ((logits + tilt).log_softmax(-1) for logits in (found, wanted))
    divergence = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
    mean = (likelihood * divergence).sum() / likelihood.sum().clamp_min(1e-9)
    return mean + ATTENTION * mass_divergence(logs, targets), logs


#: A later step counts this much of the one before it: the weighting of EAGLE-3's training code.
DECAY = 0.8


class Draft(DraftLayer):
    """A draft's layer over the target's `output` [V, H], which is not trained."""

    def __init__(self, head: RetrievalHead, output: Tensor, mlp_size: int) -> None:
        super().__init__(head, mlp_size)
        self._output = output.detach()

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [T, V] of the layer's output."""
        return F.linear(self.norm(hidden), self._output.to(hidden.dtype))

    def unroll(self, targets: TeacherTargets, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Logits [R, V] of each step: at row r, step s predicts the token after r + s, s from 0.

        Queries of step s see the keys of step 0 up to row r, and the keys of their own row in the
        later steps: the tokens that the draft would have drafted. Then the log of the weights
        [heads, R, n] that the queries of the steps from 1 to `steps` give to the tokens up to r,
        where targets has their mass; else none.
        """
        rows, token_ids = targets.rows, targets.token_ids
        places = torch.arange(len(token_ids), device=rows.device)
        hidden = previous(self.head.fuse(targets.hidden))
        query, keys, values = self.project(token_ids, places, hidden)
        query, hidden = query[rows], hidden[rows]
        unseen = places > rows[:, None]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        found, selecting = [], []
        for step in range(steps + (targets.later is not None)):
            if step:
                now = rows + step
                query, key, value = self.project(token_ids[now], now, hidden)
                own_keys.append(key)
                own_values.append(value)
            logs = self._log_weights(query, keys, unseen, own_keys)  # [R, Hkv, G, n + step]
            if step and targets.later is not None:
                selecting.append(logs[..., : len(keys)].flatten(1, 2).transpose(0, 1))
            if step < steps:
                hidden = self.finish(hidden, _mixed(logs.exp(), values, own_values))
                found.append(self.logits(hidden))
        return found, selecting

    def prune(self, inputs: str) -> RetrievalHead:
        """The head alone; for inputs "tokens" with the embedding's half of the projections.

        These heads lack the features that training had, as the method prescribes.
        """
        if inputs == self.head.config.inputs:
            return self.head
        config = replace(
            self.head.config, inputs=inputs, feature_size=0, feature_layers=(), feature_norms=False
        )
        pruned = RetrievalHead(config, self.head.embedding).to(self.head.q.weight.dtype)
        with torch.no_grad():
            pruned.embed_norm.weight.copy_(self.head.embed_norm.weight)
            for mine, full in ((pruned.q, self.head.q), (pruned.k, self.head.k)):
                mine.weight.copy_(full.weight[:, : config.input_size])
        return pruned

    def _log_weights(
        self, query: Tensor, keys: Tensor, unseen: Tensor, own_keys: list[Tensor]
    ) -> Tensor:
        """[R, Hkv, G, n + s] over keys [n, Hkv, D] except `unseen` [R, n], and s of each row."""
        groups = query.unflatten(1, (keys.shape[1], -1))  # [R, Hkv, G, D]
        logits = torch.einsum("rhgd,nhd->rhgn", groups, keys)
        logits = logits.masked_fill(unseen[:, None, None], NOTHING)
        extra = [torch.einsum("rhgd,rhd->rhg", groups, key)[..., None] for key in own_keys]
        return (torch.cat((logits, *extra), -1) * self.head.scale).log_softmax(-1)


def _mixed(weights: Tensor, values: Tensor, own_values: list[Tensor]) -> Tensor:
    """[R, heads, Dv] by weights [R, Hkv, G, n + s] of values [n, Hkv, Dv] and s own of each row."""
    mixed = torch.einsum("rhgn,nhd->rhgd", weights[..., : len(values)], values)
    for step, value in enumerate(own_values, len(values)):
        mixed = mixed + weights[..., step, None] * value[:, :, None]
    return mixed.flatten(1, 2)


def eagle_loss(draft: Draft, targets: TeacherTargets) -> tuple[Tensor, Tensor]:
    """KL divergence from the target's distribution, in nats; later steps count less.

    And the mean divergence of the attention of proposed tokens from the target's, with the mass
    `later` of targets; else 0.

    A row counts by the probability that the target gives to the tokens that follow it, up to the
    one after the step: only what the target would have written is like what it will write, and a
    draft need not be right elsewhere. Every row has a token after its last step.
    """
    assert targets.logits is not None
    steps = targets.logits.shape[1]
    logs = targets.logits.log_softmax(-1)
    wanted = logs.exp()
    follow = targets.token_ids[targets.rows[:, None] + torch.arange(1, steps + 1).to(targets.rows)]
    likely = wanted.gather(-1, follow[..., None])[..., 0].cumprod(1)  # [R, steps]
    weights = likely / likely.sum(0).clamp_min(1e-9)
    total = targets.logits.new_zeros(())
    found, selecting = draft.unroll(targets, steps)
    for step, logits in enumerate(found):
        losses = (wanted[:, step] * (logs[:, step] - logits.log_softmax(-1))).sum(-1)
        total = total + DECAY**step * (weights[:, step] * losses).sum()
    drafting = total / sum(DECAY**step for step in range(steps))
    if targets.later is None:
        return drafting, torch.zeros_like(drafting)
    apart = [
        mass_divergence(logs, replace(targets, rows=targets.rows + step, mass=mass))
        for step, (logs, mass) in enumerate(zip(selecting, targets.later, strict=True), 1)
    ]
    return drafting, torch.stack(apart).mean()
