"""A model and a prompt with stored documents in it, in plain PyTorch and one row of places.

Nothing here calls keyhole; `oracle.py` says what the stages are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, linear, silu


@dataclass(kw_only=True)
class Settings:
    block_size: int = 64
    num_initial_blocks: int = 1
    num_local_blocks: int = 2
    rotate: bool = True
    # sam_kv
    selection: bool = True
    bias: bool = True
    recompute: bool = True
    update: str = "overwrite"
    stable_layers: Sequence[int] | None = None  # None: the last four
    outlier_sigmas: float = 3.0
    pooled: bool = True
    over_chosen: bool = False  # scores in deviations over the chosen blocks, not over the middle
    extremes: bool = False  # beyond the paper: one key in eight of a block, and a fixed share
    share: float | None = None
    # cacheblend
    check_layer: int = 1
    recompute_ratio: float = 0.15
    deviation: str = "value"
    # epic: tokens
    initial_tokens: int = 32
    local_tokens: int = 0
    # multi_infllm
    num_blocks: int = 8
    sequence_ratio: float | None = None


class Network:
    """The numbers of a Llama of transformers, in one dtype."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        config = model.config
        self.layers = config.num_hidden_layers
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps: float = config.rms_norm_eps
        rope = config.rope_parameters
        assert rope["rope_type"] == "default", "the oracle knows plain rotation only"
        steps = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        self.frequencies: Tensor = rope["rope_theta"] ** -steps
        self.dtype = dtype
        self._weights: dict[str, Tensor] = {
            name: w.detach().to(dtype) for name, w in model.state_dict().items()
        }

    def weight(self, name: str, layer: int | None = None) -> Tensor:
        path = "model." if layer is None else f"model.layers.{layer}."
        return self._weights[f"{path}{name}.weight"]

    def embed(self, ids: Tensor) -> Tensor:
        return self.weight("embed_tokens")[ids]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D], not rotated."""
        x = self.norm(x, self.weight("input_layernorm", layer))
        q, k, v = (linear(x, self.weight(f"self_attn.{n}_proj", layer)) for n in "qkv")
        return tuple(t.unflatten(-1, (-1, self.size)) for t in (q, k, v))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = (positions.to(torch.float64)[:, None] * self.frequencies).repeat(1, 2)[:, None]
        left, right = x.chunk(2, dim=-1)
        turned = torch.cat([-right, left], dim=-1)
        return x * angles.cos().to(self.dtype) + turned * angles.sin().to(self.dtype)

    def weights_of_attention(self, head: int, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        """Softmax weights [T, N] of one query head; q [T, Hq, D], k [N, Hkv, D]."""
        scores = q[:, head] @ k[:, head // (self.heads // self.kv_heads)].T / math.sqrt(self.size)
        return scores.masked_fill(~mask, -math.inf).softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        group = self.heads // self.kv_heads
        read = [
            self.weights_of_attention(h, q, k, mask) @ v[:, h // group] for h in range(self.heads)
        ]
        return torch.stack(read, dim=1)

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        x = x + linear(attended.flatten(1), self.weight("self_attn.o_proj", layer))
        h = self.norm(x, self.weight("post_attention_layernorm", layer))
        up, gate = (linear(h, self.weight(f"mlp.{n}_proj", layer)) for n in ("up", "gate"))
        return x + linear(silu(gate) * up, self.weight("mlp.down_proj", layer))

    def logits(self, x: Tensor) -> Tensor:
        head = self._weights.get("lm_head.weight", self.weight("embed_tokens"))
        return linear(self.norm(x, self.weight("norm")), head)


@dataclass
class Stored:
    """A document read alone; per layer unrotated q, k and v, and what its blocks are like."""

    ids: list[int]
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    representatives: list[list[int]]
    received: list[list[float]]
    alpha: list[list[float]]


def encode(network: Network, ids: list[int], block_size: int) -> Stored:
    """Encodes a document alone, at positions 0, 1, 2, ..."""
    places = torch.arange(len(ids))
    stored = Stored(list(ids), [], [], [], [], [], [])
    x = network.embed(torch.tensor(ids))
    causal = places[None, :] <= places[:, None]
    for layer in range(network.layers):
        q, k, v = network.project(layer, x)
        stored.queries.append(q)
        stored.keys.append(k)
        stored.values.append(v)
        q, k = network.rotate(q, places), network.rotate(k, places)
        weights = [network.weights_of_attention(h, q, k, causal) for h in range(network.heads)]
        facts = statistics(torch.stack(weights), block_size)
        for name, what in zip(("representatives", "received", "alpha"), facts, strict=True):
            getattr(stored, name).append(what)
        x = network.finish(layer, x, network.attend(q, k, v, causal))
    return stored


def statistics(heads: Tensor, block_size: int) -> tuple[list[int], list[float], list[float]]:
    """Representative, mean received attention and alpha of every block (appendix A.1).

    heads [Hq, n, n]: weights of each head; row t is what token t reads. All is over distances 1 to
    block_size, of shares: a head's weights of the block_size tokens before a token, by their sum;
    the mean over heads. A representative has the highest mean over the distances that it has; the
    very last token is read by none: it receives 0. Infinity where a distance is missing, or a token
    that reads it has fewer tokens before it.
    """
    n = heads.shape[1]
    shares: list[list[float]] = [[] for _ in range(n)]
    for t in range(1, n):
        before = heads[:, t, max(0, t - block_size) : t]
        for s, share in enumerate((before / before.sum(1, keepdim=True)).mean(0).tolist()):
            shares[max(0, t - block_size) + s].append(share)
    total = [sum(y) / len(y) if y else 0.0 for y in shares]
    representatives, mean, alpha = [], [], []
    for start in range(0, n, block_size):
        block = range(start, min(start + block_size, n))
        best = max(block, key=lambda t: (total[t], -t))
        representatives.append(best)
        whole = best + 1 >= block_size and best + block_size < n
        mean.append(total[best] if whole else math.inf)
        alpha.append(decay(torch.tensor(shares[best])) if whole else math.inf)
    return representatives, mean, alpha


def decay(y: Tensor) -> float:
    """Alpha of log y = c - alpha log delta; y[i] is at distance i + 1.

    Bin b holds the distances with 2^(b/2) <= delta < 2^((b+1)/2); its point is the mean of y (at
    least float32's smallest) over the mean of delta. Fewer than two points: infinity, the least
    important there is.
    """
    bins: dict[int, list[int]] = {}
    for delta in range(1, len(y) + 1):
        bins.setdefault((delta * delta).bit_length() - 1, []).append(delta)
    points = []
    for deltas in bins.values():
        level = float(y[deltas[0] - 1 : deltas[-1]].mean())
        level = max(level, torch.finfo(torch.float32).tiny)
        points.append((math.log(sum(deltas) / len(deltas)), math.log(level)))
    if len(points) < 2:
        return math.inf
    mx, my = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    slope = sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)
    return -slope


def overwrite(new: Tensor, old: Tensor) -> Tensor:
    return new


def fusion(new: Tensor, old: Tensor) -> Tensor:
    """Equation 4: per token, over heads flattened; new, old [T, Hkv, D]."""
    theta = cosine_similarity(new.flatten(1), old.flatten(1), dim=1).clamp(0, 1)[:, None, None]
    return theta * new + (1 - theta) * old


class Prompt:
    """All places of a prompt with their keys and values, layer by layer."""

    def __init__(
        self,
        network: Network,
        records: Sequence[Stored],
        prefix: Sequence[int],
        question: Sequence[int],
        separator: Sequence[int],
        room: int,
        rotate: bool,
    ) -> None:
        ids, separators = list(prefix), list[int]()
        self.offsets: list[int] = []
        for number, record in enumerate(records):
            if number:
                separators += range(len(ids), len(ids) + len(separator))
                ids += separator
            self.offsets.append(len(ids))
            ids += record.ids
        asked = range(len(ids), len(ids) + len(question))
        self.network = network
        self.records = records
        self.ids = torch.tensor([*ids, *question, *[0] * room])
        size = len(self.ids)
        self.prefix = torch.arange(size) < len(prefix)
        self.separators = among(size, separators)
        self.question = among(size, asked)
        self.documents = ~(self.prefix | self.separators | self.question)
        self.documents[asked.stop :] = False
        shape = (network.layers, size, network.kv_heads, network.size)
        self.keys = torch.full(shape, math.nan, dtype=network.dtype)
        self.values = self.keys.clone()
        for record, offset in zip(records, self.offsets, strict=True):
            place = slice(offset, offset + len(record.ids))
            positions = torch.arange(len(record.ids)) + (offset if rotate else 0)
            for layer in range(network.layers):
                self.keys[layer, place] = network.rotate(record.keys[layer], positions)
                self.values[layer, place] = record.values[layer]
        self.loose = self.prefix | self.separators
        if prefix:
            there = self.everywhere(self.prefix)
            self.run(self.prefix, there, there)

    def everywhere(self, places: Tensor) -> Tensor:
        """The same places [P] in every layer [L, P]."""
        return places.repeat(self.network.layers, 1)

    def block(self, document: int, number: int, size: int) -> range:
        """Places of a block."""
        start, end = number * size, min((number + 1) * size, len(self.records[document].ids))
        return range(self.offsets[document] + start, self.offsets[document] + end)

    def query(self, question_context: Tensor) -> list[Tensor]:
        """Mean query of the question per layer [Hq, D]; see `queries`."""
        return [q.mean(0) for q in self.queries(question_context)]

    def queries(self, question_context: Tensor) -> list[Tensor]:
        """Queries of the question per layer [t, Hq, D], read over `question_context` alone.

        Leaves no trace.
        """
        kept = self.keys.clone(), self.values.clone()
        who = self.separators | self.question
        exists = self.everywhere(question_context | self.loose | self.question)
        _, queries = self.run(who, exists, self.everywhere(who))
        self.keys, self.values = kept
        asked = self.question[who]
        return [q[asked] for q in queries]

    def run(
        self,
        who: Tensor,
        exists: Tensor,
        writes: Tensor,
        fuse: Callable[[Tensor, Tensor], Tensor] = overwrite,
        revise: Callable[[int, Tensor, Tensor, Tensor], Tensor | None] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the places `who` [P] through all layers: logits [T, vocabulary], queries per layer.

        In layer n a place reads the places of `exists[n]` [P] that are not after it; a place of
        `writes[n]` first writes its key and value. `revise` is given the layer, the places and how
        far their new keys and values are from the old; it may leave fewer places to go on.
        """
        places = who.nonzero().flatten()
        x = self.network.embed(self.ids[places])
        queries = []
        for layer in range(self.network.layers):
            q, k, v = self.network.project(layer, x)
            q, k = self.network.rotate(q, places), self.network.rotate(k, places)
            old = self.keys[layer, places], self.values[layer, places]
            change = [((new - was) ** 2).sum((1, 2)) for new, was in zip((k, v), old, strict=True)]
            now = writes[layer, places]
            for cache, new in ((self.keys[layer], k[now]), (self.values[layer], v[now])):
                stored = cache[places[now]]
                # What was never stored (separators, the question) has nothing to be fused with.
                cache[places[now]] = torch.where(stored.isnan(), new, fuse(new, stored))
            keep = revise(layer, places, *change) if revise else None
            if keep is not None:
                places, x, q = places[keep], x[keep], q[keep]
            queries.append(q)
            there = exists[layer].nonzero().flatten()
            mask = there[None, :] <= places[:, None]
            seen = self.keys[layer, there], self.values[layer, there]
            x = self.network.finish(layer, x, self.network.attend(q, *seen, mask))
        return self.network.logits(x), queries


def among(size: int, places: Sequence[int] | range) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(places)] = True
    return mask
