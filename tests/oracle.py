"""What the operations and methods must give, written down once more as plainly as possible.

Nothing here calls keyhole: one token and one head at a time in float64, positions as Python
numbers, a cache as nothing but "the key of token i". `SparseModel` runs a whole transformers model
under a method: it needs no cache at all, as a token that is forced to read a subset of its past is
one row of a mask, and all rows can be computed in one forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

Array = np.ndarray[Any, np.dtype[np.float64]]


def float64(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().to(torch.float64).numpy())


def in_order(pages: Tensor, table: Sequence[int], length: int) -> Array:
    """The keys or values of one sequence, token after token: [Hkv, length, D]."""
    size = pages.shape[2]
    tokens = [float64(pages[table[i // size], :, i % size]) for i in range(length)]
    return np.stack(tokens, axis=1)


def visible(length: int, window: int | None = None) -> list[int]:
    """Positions that the newest of `length` tokens may read."""
    return [i for i in range(length) if window is None or i > length - 1 - window]


def attention(
    query: Array,
    keys: Array,
    values: Array,
    read: Sequence[Sequence[int]],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """One token's attention: query [Hq, D] over keys [Hkv, N, D], values [Hkv, N, Dv].

    read: for each KV head, or for each query head, the positions that count. Returns [Hq, Dv] and
    all weights [Hq, N].
    """
    group = len(query) // len(keys)
    out = np.zeros((len(query), values.shape[2]))
    weights = np.zeros((len(query), keys.shape[1]))
    for head in range(len(query)):
        kv = head // group
        own = list(read[head if len(read) == len(query) else kv])
        logits = scale * (keys[kv, own] @ query[head])
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        rest = [] if sinks is None else [sinks[head]]
        powers = np.append(logits, rest)
        powers = np.exp(powers - powers.max())
        shares = powers[: len(own)] / powers.sum()
        weights[head, own] = shares
        out[head] = shares @ values[kv, own]
    return out, weights


def rms_normed(x: Array, weight: Array, epsilon: float) -> Array:
    """Rows x [T, I] divided by the root of their mean square, times the weight [I]."""
    return np.stack([row / math.sqrt(float(row @ row) / len(row) + epsilon) * weight for row in x])


def swiglu(gate: Array, up: Array) -> Array:
    """The SiLU of the gate times up, elementwise."""
    return gate / (1.0 + np.exp(-gate)) * up


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Vectors x [T, H, D], each pair (i, i + D / 2) turned by an angle; cos, sin [T, D]."""
    half = x.shape[2] // 2
    out = np.empty_like(x)
    for i in range(half):
        a, b = x[:, :, i], x[:, :, i + half]
        out[:, :, i] = a * cos[:, None, i] - b * sin[:, None, i]
        out[:, :, i + half] = b * cos[:, None, i + half] + a * sin[:, None, i + half]
    return out


def token_scores(weights: Array, reduce: str) -> list[float]:
    """Weights [Hq, N] reduced over the heads."""
    pick = np.max if reduce == "max" else np.sum
    return [float(pick(column)) for column in weights.T]


def per_page(scores: Sequence[float], page_size: int) -> list[float]:
    """Token scores summed over each page."""
    pages = range(0, len(scores), page_size)
    return [math.fsum(scores[i : i + page_size]) for i in pages]


def bounds(keys: Array, page_size: int) -> tuple[Array, Array]:
    """Smallest and largest number of each key dimension per page: [Hkv, pages, D] each."""
    pages = range(0, keys.shape[1], page_size)
    low = [keys[:, i : i + page_size].min(axis=1) for i in pages]
    high = [keys[:, i : i + page_size].max(axis=1) for i in pages]
    return np.stack(low, axis=1), np.stack(high, axis=1)


def bound(query: Array, low: Array, high: Array, *, share: bool = True) -> list[list[float]]:
    """Quest's bound of a page, the largest of each group of query heads; per KV head and page.

    share: False for each query head's own bound, per query head and page.
    """
    if not share:
        low, high = (np.repeat(x, len(query) // len(x), axis=0) for x in (low, high))
    group = len(query) // len(low)
    result = []
    for kv in range(len(low)):
        heads = query[kv * group : (kv + 1) * group, None]
        bounds = np.maximum(heads * low[kv], heads * high[kv]).sum(2)  # [group, pages]
        result.append(bounds.max(0).tolist())
    return result


def best(scores: Sequence[float], k: int, *, first: int = 0, last: int = 0) -> list[int]:
    """The k best entries, ascending: first and last ones always, equal scores to the earlier."""
    n = len(scores)
    always = [i for i in range(n) if i < first or i >= n - last]
    others = sorted((i for i in range(n) if i not in always), key=lambda i: (-scores[i], i))
    return sorted((always + others)[:k])


def enough(
    scores: Sequence[float],
    chosen: Sequence[int],
    share: float,
    least: int,
    *,
    first: int = 0,
    last: int = 0,
) -> list[int]:
    """Of a choice what holds a share of all scores: first and last ones, then one by one."""
    n, wanted = len(scores), share * sum(scores)
    taken = [i for i in chosen if i < first or i >= n - last]
    for i in sorted(set(chosen) - set(taken), key=lambda i: (-scores[i], i)):
        if sum(scores[j] for j in taken) >= wanted and len(taken) >= least:
            break
        taken.append(i)
    return sorted(taken)


def tokens_of(pages: Sequence[int], page_size: int, length: int) -> list[int]:
    """The tokens of some pages of a sequence with `length` tokens."""
    return [
        i for page in pages for i in range(page * page_size, (page + 1) * page_size) if i < length
    ]


def window_weights(
    query: Array, keys: Array, window: int, init: int, options: dict[str, Any]
) -> Array:
    """What the query of token i gives to token j of its window: [Hq, T, T], else 0.

    The softmax of query [Hq, T, D] over the window and the first `init` tokens.
    """
    heads, count, _ = query.shape
    found = np.zeros((heads, count, count))
    for head in range(heads):
        own = keys[head * len(keys) // heads]
        for i in range(count):
            near = [j for j in range(i + 1) if j > i - window]
            read = sorted({*near, *(j for j in range(init) if j <= i)})
            logits = options["scale"] * (own[read] @ query[head, i])
            if options["softcap"] is not None:
                logits = options["softcap"] * np.tanh(logits / options["softcap"])
            rest = [] if options["sinks"] is None else [options["sinks"][head]]
            powers = np.exp(np.append(logits, rest))
            for j, power in zip(read, powers, strict=False):
                found[head, i, j] = power / powers.sum() if j in near else 0.0
    return found


def most_received(keys: Array, received: Array, count: int) -> Array:
    """The mean key of the tokens of a block that received most, per query head: [Hq, D].

    keys [Hkv, n, D]; received [Hq, n].
    """
    means = []
    for head, sums in enumerate(received):
        own = keys[head * len(keys) // len(received)]
        means.append(own[best(sums.tolist(), count)].mean(0))
    return np.stack(means)


#: What one token reads in one layer: for each KV head or query head, or once for all of them, the
#: entries that a method chose (pages or tokens) and the tokens that they mean. None is everything.
Choice = tuple[list[list[int]], list[list[int]]] | None
#: keys_of(layer, keys [Hkv, N, D], choice): the keys that the newest of N tokens reads
KeysOf = Callable[[int, Array, Choice], Array]
#: watch(layer, query [Hq, T, D], keys [Hkv, T, D], options of `attention`) for all tokens
Watch = Callable[[int, Array, Array, dict[str, Any]], None]
#: choose(layer, query [Hq, D], keys [Hkv, N, D], options of `attention`) for the newest of N tokens
Choose = Callable[[int, Array, Array, dict[str, Any]], Choice]


@dataclass
class SparseModel:
    """A transformers model whose tokens from `start` on read what `choose` says.

    keys_of: what they find there in place of the keys; None: the keys.
    watch: sees the queries and keys of all tokens, before anything is chosen in their layer.
    choices: (layer, length) -> what the newest of `length` tokens chose there.
    """

    network: Any
    choose: Choose
    start: int = 0
    keys_of: KeysOf | None = None
    watch: Watch | None = None
    choices: dict[tuple[int, int], Choice] = field(default_factory=dict)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], start: int) -> Tensor:
        """Logits [len(tokens), vocabulary], the first `start` tokens exact and dense."""
        self.start = start
        self.choices.clear()
        self.network.set_attn_implementation("oracle")
        out = self.network(input_ids=torch.tensor([list(tokens)]), use_cache=False, oracle=self)
        logits: Tensor = out.logits[0]
        return logits

    def attend(
        self,
        layer: int,
        query: Array,
        keys: Array,
        values: Array,
        window: int | None,
        options: dict[str, Any],
    ) -> Array:
        """query [Hq, T, D], keys [Hkv, T, D], values [Hkv, T, Dv]; returns [T, Hq, Dv]."""
        rows = []
        if self.watch is not None and window is None:
            self.watch(layer, query, keys, options)
        for t in range(query.shape[1]):
            read = [visible(t + 1, window)] * len(keys)
            found = keys[:, : t + 1]
            if t >= self.start and window is None:
                choice = self.choose(layer, query[:, t], keys[:, : t + 1], options)
                self.choices[layer, t + 1] = choice
                if choice is not None:
                    read = choice[1] * len(keys) if len(choice[1]) == 1 else choice[1]
                if self.keys_of is not None:
                    found = self.keys_of(layer, found, choice)
            rows.append(attention(query[:, t], found, values[:, : t + 1], read, **options)[0])
        return np.stack(rows)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    oracle: SparseModel,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    sinks = None if s_aux is None else float64(s_aux)
    options = {"scale": scaling, "softcap": softcap, "sinks": sinks}
    layer: Any = module.layer_idx
    rows = (float64(x[0]) for x in (query, key, value))
    out = oracle.attend(layer, *rows, window=sliding_window, options=options)
    return torch.from_numpy(out).to(query.dtype)[None], None


AttentionInterface.register("oracle", _attention)
