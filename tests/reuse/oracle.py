"""The whole way of a question over stored documents, written down once more as plainly as possible.

Nothing here calls keyhole. A prompt is one row of places: prefix, documents (with separators
between them), question, answer. Every layer has one key and one value per place, and a mask that
says which places exist in it. Every stage is then the same thing: some places run through all
layers, read what exists at or before them, and write their keys and values where they may. Stored
keys are not turned: unrotated ones are kept and rotated once, at the place in the prompt.

The settings' names and defaults are those of papers/samkv.txt and of the compared methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
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
    extremes: bool = False  # beyond the paper: one key in eight of a block, and a fixed share
    share: float | None = None
    # cacheblend
    check_layer: int = 1
    recompute_ratio: float = 0.15
    # epic: tokens
    initial_tokens: int = 32
    local_tokens: int = 0
    # multi_infllm
    num_blocks: int = 8


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
    """Read a document alone, at places 0, 1, 2, ..."""
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
        facts = statistics(torch.stack(weights).mean(0), block_size)
        for name, what in zip(("representatives", "received", "alpha"), facts, strict=True):
            getattr(stored, name).append(what)
        x = network.finish(layer, x, network.attend(q, k, v, causal))
    return stored


def statistics(weights: Tensor, block_size: int) -> tuple[list[int], list[float], list[float]]:
    """Representative, mean received attention and alpha of every block (appendix A.1).

    weights [n, n]: mean over heads; row t is what token t reads. The very last token is read by
    none: it receives 0.
    """
    n = len(weights)
    received = [float(weights[t + 1 :, t].mean()) if t + 1 < n else 0.0 for t in range(n)]
    representatives, mean, alpha = [], [], []
    for start in range(0, n, block_size):
        block = range(start, min(start + block_size, n))
        best = max(block, key=lambda t: (received[t], -t))
        representatives.append(best)
        mean.append(received[best])
        alpha.append(decay(weights[best + 1 :, best]))
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

    def query(self, glance: Tensor) -> list[Tensor]:
        """Mean query of the question per layer [Hq, D]; see `queries`."""
        return [q.mean(0) for q in self.queries(glance)]

    def queries(self, glance: Tensor) -> list[Tensor]:
        """Queries of the question per layer [t, Hq, D] when only `glance` of the documents is read.

        Leaves no trace.
        """
        kept = self.keys.clone(), self.values.clone()
        who = self.separators | self.question
        exists = self.everywhere(glance | self.loose | self.question)
        _, queries = self.run(who, exists, self.everywhere(who))
        self.keys, self.values = kept
        asked = self.question[who]
        return [q[asked] for q in queries]

    def run(
        self,
        who: Tensor,
        exists: Tensor,
        writes: Tensor,
        blend: Callable[[Tensor, Tensor], Tensor] = overwrite,
        revise: Callable[[int, Tensor, Tensor], Tensor | None] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the places `who` [P] through all layers: logits [T, vocabulary], queries per layer.

        In layer n a place reads the places of `exists[n]` [P] that are not after it; a place of
        `writes[n]` first writes its key and value. `revise` may leave fewer places to go on.
        """
        places = who.nonzero().flatten()
        x = self.network.embed(self.ids[places])
        queries = []
        for layer in range(self.network.layers):
            q, k, v = self.network.project(layer, x)
            q, k = self.network.rotate(q, places), self.network.rotate(k, places)
            change = (k - self.keys[layer, places]) ** 2 + (v - self.values[layer, places]) ** 2
            now = writes[layer, places]
            for cache, new in ((self.keys[layer], k[now]), (self.values[layer], v[now])):
                old = cache[places[now]]
                # What was never stored (separators, the question) has nothing to be fused with.
                cache[places[now]] = torch.where(old.isnan(), new, blend(new, old))
            keep = revise(layer, places, change.sum((1, 2))) if revise else None
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


@dataclass
class Choice:
    """What a method keeps and writes, bool [L, P]; `revise` for cacheblend."""

    kept: Tensor
    written: Tensor
    shares: list[float] | None = None
    chosen: list[list[tuple[int, int]]] | None = None
    revise: Callable[[int, Tensor, Tensor], Tensor | None] | None = None


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
    written = prompt.everywhere(among(len(prompt.ids), edges))
    return Choice(everything(prompt), written)


def cacheblend(prompt: Prompt, settings: Settings) -> Choice:
    """Everything up to the check layer; from there on the tokens that differ most from the old."""
    choice = Choice(everything(prompt), everything(prompt))

    def revise(layer: int, places: Tensor, change: Tensor) -> Tensor | None:
        if layer != settings.check_layer:
            return None
        stored = prompt.documents[places]
        number = math.ceil(settings.recompute_ratio * int(stored.sum()))
        change = torch.where(stored, change, -math.inf)
        best = change.sort(descending=True, stable=True).indices[:number]
        go_on = ~stored
        go_on[best] = True
        choice.written[layer + 1 :] &= among(len(prompt.ids), places[best].tolist())
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
    glance = among(len(prompt.ids), [p for d, b in fixed for p in prompt.block(d, b, size)])
    kept = prompt.everywhere(glance)
    chosen = []
    for layer, query in enumerate(prompt.query(glance)):
        scores = {}
        for d, b in middle:
            place = prompt.offsets[d] + prompt.records[d].representatives[layer][b]
            scores[d, b] = in_product(query, prompt.keys[layer, place])
        chosen.append(sorted(middle, key=lambda at: -scores[at])[: settings.num_blocks])
        for d, b in chosen[-1]:
            kept[layer, list(prompt.block(d, b, size))] = True
    return Choice(kept, nothing(prompt), chosen=chosen)


def sam_kv(prompt: Prompt, settings: Settings) -> Choice:
    """Steps 1 to 6: query, bias, how many, which, across documents, what to compute again."""
    network, size = prompt.network, settings.block_size
    documents = range(len(prompt.records))
    blocks = [-(-len(record.ids) // size) for record in prompt.records]
    first, last = settings.num_initial_blocks, settings.num_local_blocks
    edges = [sorted({*range(n)[:first], *range(n)[max(0, n - last) :]}) for n in blocks]
    middle = [[b for b in range(blocks[d]) if b not in edges[d]] for d in documents]
    glance = among(
        len(prompt.ids), [p for d in documents for b in edges[d] for p in prompt.block(d, b, size)]
    )
    asked = prompt.queries(glance)
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

    kept, written, chosen = prompt.everywhere(glance), nothing(prompt), []
    for layer in range(network.layers):
        pool = []
        for d in documents if settings.selection else ():
            scores = [in_product(personal[layer][d], mean_key(layer, d, b)) for b in middle[d]]
            if settings.extremes and scores:
                every = best_answers(layer, d)
                scores = [every[b] for b in middle[d]]
            mean, deviation = spread(scores)
            best = sorted(range(len(scores)), key=lambda i: -scores[i])
            wanted = best[: math.ceil(shares[d] * len(scores))]
            pool += [((scores[i] - mean) / (deviation or 1.0), d, middle[d][i]) for i in wanted]
        pool.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        offered = len(pool) if settings.pooled else sum(blocks)
        chosen.append([(d, b) for _, d, b in pool[: math.ceil(offered / len(documents))]])
        again = glance.clone()
        for d, b in chosen[layer]:
            kept[layer, list(prompt.block(d, b, size))] = True
            record = prompt.records[d]
            mean, deviation = spread([a for a in record.alpha[layer] if math.isfinite(a)])
            if record.alpha[layer][b] < mean - settings.outlier_sigmas * deviation:
                again[prompt.offsets[d] + record.representatives[layer][b]] = True
        if settings.recompute:
            written[layer] = again
    return Choice(kept, written, shares if settings.selection else None, chosen)


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


@torch.no_grad()
def ask(
    model: Any,
    documents: Sequence[list[int]],
    prefix: list[int],
    question: list[int],
    method: str,
    *,
    separator: Sequence[int] = (),
    max_new_tokens: int = 4,
    end: int | None = None,
    dtype: torch.dtype = torch.float64,
    records: Sequence[Stored] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Answer a question over documents that are read alone first.

    Gives `logits` of the first answer token, `ids` generated (greedily, until `end`), `kept` and
    `written` bool [L, T] over the documents' tokens in a row, `shares` (SamKV's P per document or
    None), `keys` and `values` [L][kept, Hkv, D] of what was kept, after all updates, `chosen`
    (SamKV, multi_infllm: per layer the (document, block) pairs). cacheblend's `written` has all
    tokens up to its check layer. `records` are the documents already encoded with the same dtype
    and block size.
    """
    assert set(settings) <= {field.name for field in fields(Settings)}, settings
    chosen_settings = Settings(**settings)
    network = Network(model, dtype)
    if records is None:
        records = [encode(network, ids, chosen_settings.block_size) for ids in documents]
    rotate = method != "reuse" or chosen_settings.rotate
    prompt = Prompt(network, records, prefix, question, separator, max_new_tokens, rotate)
    return answer(prompt, METHODS[method](prompt, chosen_settings), chosen_settings, end)


def answer(prompt: Prompt, choice: Choice, settings: Settings, end: int | None) -> dict[str, Any]:
    """Compute again what is to be computed again, read the question, and go on greedily."""
    again = choice.written.any(0)
    prompt.run(
        again | prompt.separators,
        choice.kept | again | prompt.loose,
        choice.written | prompt.separators,
        fusion if settings.update == "fusion" else overwrite,
        choice.revise,
    )
    exists = choice.kept | prompt.loose | prompt.question
    logits, _ = prompt.run(prompt.question, exists, prompt.everywhere(prompt.question))
    first, ids = logits[-1], [int(logits[-1].argmax())]
    place = int(prompt.question.nonzero()[-1])
    while place + 1 < len(prompt.ids) - 1 and ids[-1] != end:
        place += 1
        prompt.ids[place] = ids[-1]
        new = among(len(prompt.ids), [place])
        exists = exists | new
        logits, _ = prompt.run(new, exists, prompt.everywhere(new))
        ids.append(int(logits[-1].argmax()))
    rows = [layer & prompt.documents for layer in choice.kept]
    return {
        "logits": first,
        "ids": ids,
        "kept": choice.kept[:, prompt.documents],
        "written": choice.written[:, prompt.documents],
        "shares": choice.shares,
        "chosen": choice.chosen,
        "keys": [prompt.keys[n][row] for n, row in enumerate(rows)],
        "values": [prompt.values[n][row] for n, row in enumerate(rows)],
    }
