"""Every method of reuse, step by step: what it keeps of the documents, what it computes again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tests.reuse.plain import Prompt, Settings, among


@dataclass
class Choice:
    """The tokens that a method keeps and recomputes, bool [L, P]; `revise` for cacheblend."""

    kept: Tensor
    recomputed: Tensor
    shares: list[float] | None = None
    chosen: list[list[tuple[int, int]]] | None = None
    revise: Callable[[int, Tensor, Tensor, Tensor], Tensor | None] | None = None


def everything(prompt: Prompt) -> Tensor:
    return prompt.everywhere(prompt.documents)


def nothing(prompt: Prompt) -> Tensor:
    return prompt.everywhere(torch.zeros_like(prompt.documents))


def recompute(prompt: Prompt, settings: Settings) -> Choice:
    return Choice(everything(prompt), everything(prompt))


def reuse(prompt: Prompt, settings: Settings) -> Choice:
    return Choice(everything(prompt), nothing(prompt))


def epic(prompt: Prompt, settings: Settings) -> Choice:
    """The first and last tokens of every document again, everything kept."""
    edges: list[int] = []
    for offset, record in zip(prompt.offsets, prompt.records, strict=True):
        places = list(range(offset, offset + len(record.ids)))
        edges += places[: settings.initial_tokens]
        edges += places[-settings.local_tokens :] if settings.local_tokens else []
    recomputed = prompt.everywhere(among(len(prompt.ids), edges))
    return Choice(everything(prompt), recomputed)


def cacheblend(prompt: Prompt, settings: Settings) -> Choice:
    """Everything up to the check layer; from there on the tokens that differ most from the old."""
    choice = Choice(everything(prompt), everything(prompt))

    def revise(layer: int, places: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        if layer != settings.check_layer:
            return None
        stored = prompt.documents[places]
        number = math.ceil(settings.recompute_ratio * int(stored.sum()))
        found = {"key": keys, "value": values, "both": keys + values}[settings.deviation]
        change = torch.where(stored, found, -math.inf)
        best = change.sort(descending=True, stable=True).indices[:number]
        go_on = ~stored
        go_on[best] = True
        choice.recomputed[layer + 1 :] &= among(len(prompt.ids), places[best].tolist())
        return go_on

    choice.revise = revise
    return choice


def in_product(q: Tensor, k: Tensor) -> float:
    """q [Hq, D] and k [Hkv, D], each KV head facing its group of query heads."""
    group = len(q) // len(k)
    return sum(float(q[h] @ k[h // group]) for h in range(len(q)))


def multi_infllm(prompt: Prompt, settings: Settings) -> Choice:
    """All documents as one text: its first and last blocks, and per layer the best between."""
    size = settings.block_size
    blocks = [
        (d, b)
        for d, record in enumerate(prompt.records)
        for b in range(-(-len(record.ids) // size))
    ]
    last = max(settings.num_initial_blocks, len(blocks) - settings.num_local_blocks)
    fixed = blocks[: settings.num_initial_blocks] + blocks[last:]
    middle = blocks[settings.num_initial_blocks : last]
    question_context = among(
        len(prompt.ids), [p for d, b in fixed for p in prompt.block(d, b, size)]
    )
    kept = prompt.everywhere(question_context)
    chosen = []
    for layer, query in enumerate(prompt.query(question_context)):
        scores = {}
        for d, b in middle:
            place = prompt.offsets[d] + prompt.records[d].representatives[layer][b]
            scores[d, b] = in_product(query, prompt.keys[layer, place])
        best = sorted(middle, key=lambda at: -scores[at])
        if settings.sequence_ratio is None:
            chosen.append(best[: settings.num_blocks])
        else:
            chosen.append(filling(prompt, best, fixed, size, settings.sequence_ratio))
        for d, b in chosen[-1]:
            kept[layer, list(prompt.block(d, b, size))] = True
    return Choice(kept, nothing(prompt), chosen=chosen)


def filling(
    prompt: Prompt,
    best: list[tuple[int, int]],
    fixed: list[tuple[int, int]],
    size: int,
    share: float,
) -> list[tuple[int, int]]:
    """The first of the best blocks, until with the fixed ones a share of all tokens is reached."""
    room = round(share * int(prompt.documents.sum()))
    room -= sum(len(prompt.block(d, b, size)) for d, b in fixed)
    found = []
    for d, b in best:
        room -= len(prompt.block(d, b, size))
        if room < 0:
            break
        found.append((d, b))
    return found


def sam_kv(prompt: Prompt, settings: Settings) -> Choice:
    """Steps 1 to 6: query, bias, how many, which, across documents, what to compute again."""
    network, size = prompt.network, settings.block_size
    documents = range(len(prompt.records))
    blocks = [-(-len(record.ids) // size) for record in prompt.records]
    first, last = settings.num_initial_blocks, settings.num_local_blocks
    edges = [sorted({*range(n)[:first], *range(n)[max(0, n - last) :]}) for n in blocks]
    middle = [[b for b in range(blocks[d]) if b not in edges[d]] for d in documents]
    question_context = among(
        len(prompt.ids), [p for d in documents for b in edges[d] for p in prompt.block(d, b, size)]
    )
    asked = prompt.queries(question_context)
    generic = [q.mean(0) for q in asked]
    stable = settings.stable_layers
    if stable is None:
        stable = range(max(0, network.layers - 4), network.layers)

    def mean_key(layer: int, d: int, b: int) -> Tensor:
        return prompt.keys[layer, list(prompt.block(d, b, size))].mean(0)

    def mean_query(layer: int, d: int, b: int) -> Tensor:
        places = torch.tensor(prompt.block(d, b, size))
        q = prompt.records[d].queries[layer][places - prompt.offsets[d]]
        return network.rotate(q, places).mean(0)

    personal = []
    for layer, q in enumerate(generic):
        local = [
            torch.stack(
                [mean_query(layer, d, b) for b in range(blocks[d])[max(0, blocks[d] - last) :]]
            ).mean(0)
            for d in documents
        ]
        bias = [
            abs(cosine_similarity(q.flatten(), x.flatten(), dim=0)) * x / max(1, len(local) - 1)
            for x in local
        ]
        others = [[bias[j] for j in documents if j != d] for d in documents]
        personal.append([q + sum(others[d]) if settings.bias else q for d in documents])

    shares = []
    for d, record in enumerate(prompt.records):
        found = []
        for layer in stable if middle[d] else ():
            anchor = torch.stack([mean_key(layer, d, b) for b in edges[d]]).mean(0)
            most = min(middle[d], key=lambda b: record.alpha[layer][b])
            least = min(middle[d], key=lambda b: record.received[layer][b])
            means = anchor, mean_key(layer, d, most), mean_key(layer, d, least)
            anc, top, low = (in_product(personal[layer][d], k) for k in means)
            found.append((top - anc) / (top - low) if low < anc <= top else 0.0)
        share = sum(found) / len(found) if found else 0.0
        shares.append(settings.share if settings.share and middle[d] else share)

    def best_answers(layer: int, d: int) -> list[float]:
        """Per block the best that any extreme key scores; each token and head has its own scale."""
        extremes = []
        for b in range(blocks[d]):
            keys = prompt.keys[layer, list(prompt.block(d, b, size))]
            far = (keys - keys.mean(0)).pow(2).sum(-1)
            order = far.argsort(dim=0, descending=True)[: math.ceil(size / 8)]
            extremes.append([keys[order[:, h], h] for h in range(keys.shape[1])])
        best = [-math.inf] * blocks[d]
        for q in asked[layer] + personal[layer][d] - generic[layer]:
            for h in range(network.heads):
                g = h // (network.heads // network.kv_heads)
                # A short block's farthest key stands there again.
                rows = [(keys[g] @ q[h]).tolist() for keys in extremes]
                rows = [row + [row[0]] * (math.ceil(size / 8) - len(row)) for row in rows]
                mean, deviation = spread([x for row in rows for x in row])
                found = [(max(row) - mean) / (deviation or 1.0) for row in rows]
                best = [max(pair) for pair in zip(best, found, strict=True)]
        return best

    kept, recomputed, chosen = prompt.everywhere(question_context), nothing(prompt), []
    for layer in range(network.layers):
        pool = []
        for d in documents if settings.selection else ():
            scores = [in_product(personal[layer][d], mean_key(layer, d, b)) for b in middle[d]]
            if settings.extremes and scores:
                every = best_answers(layer, d)
                scores = [every[b] for b in middle[d]]
            best = sorted(range(len(scores)), key=lambda i: -scores[i])
            wanted = best[: math.ceil(shares[d] * len(scores))]
            over = [scores[i] for i in wanted] if settings.over_chosen else scores
            mean, deviation = spread(over)
            pool += [((scores[i] - mean) / (deviation or 1.0), d, middle[d][i]) for i in wanted]
        pool.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        offered = len(pool) if settings.pooled else sum(blocks)
        chosen.append([(d, b) for _, d, b in pool[: math.ceil(offered / len(documents))]])
        again = question_context.clone()
        for d, b in chosen[layer]:
            kept[layer, list(prompt.block(d, b, size))] = True
            record = prompt.records[d]
            alphas = [record.alpha[layer][other] for other in middle[d]]
            mean, deviation = spread([a for a in alphas if math.isfinite(a)])
            if record.alpha[layer][b] < mean - settings.outlier_sigmas * deviation:
                again[prompt.offsets[d] + record.representatives[layer][b]] = True
        if settings.recompute:
            recomputed[layer] = again
    return Choice(kept, recomputed, shares if settings.selection else None, chosen)


def spread(numbers: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of the whole, divided by n)."""
    mean = sum(numbers) / len(numbers) if numbers else 0.0
    square = sum((x - mean) ** 2 for x in numbers) / len(numbers) if numbers else 0.0
    return mean, math.sqrt(square)


METHODS = {
    "recompute": recompute,
    "reuse": reuse,
    "epic": epic,
    "cacheblend": cacheblend,
    "multi_infllm": multi_infllm,
    "sam_kv": sam_kv,
}
