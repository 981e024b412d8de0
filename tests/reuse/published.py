"""What the authors' own codes do with stored documents, in plain PyTorch, difference by difference.

`plain_methods.py` has the rules that keyhole follows; here are those of the published codes, with
an argument for each thing in which the two differ. With these arguments as keyhole has them both
must answer alike (`test_published.py`); `benchmarks/reuse_differences.py` tells what each one is
worth. Nothing here calls keyhole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reuse.plain import Network, Prompt, Settings
from tests.reuse.plain_methods import Choice, nothing


@dataclass
class Chunks:
    """A prompt in parts that were each read alone: prefix, documents, question.

    keys, values: per layer [N, Hkv, D] of all parts in a row, keys not rotated. starts: the first
    place of each part.
    """

    ids: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    starts: list[int]

    @property
    def question(self) -> int:
        """Tokens of the last part."""
        return len(self.ids) - self.starts[-1]


def read_alone(network: Network, parts: Sequence[list[int]], bos: int | None = None) -> Chunks:
    """bos: stands before each part while it is read, and is dropped afterwards."""
    keys: list[list[Tensor]] = [[] for _ in range(network.layers)]
    values: list[list[Tensor]] = [[] for _ in range(network.layers)]
    starts, length = [], 0
    for part in parts:
        starts.append(length)
        length += len(part)
        first = [] if bos is None else [bos]
        places = torch.arange(len(first) + len(part))
        causal = places[None] <= places[:, None]
        x = network.embed(torch.tensor([*first, *part]))
        for layer in range(network.layers):
            q, k, v = network.project(layer, x)
            keys[layer].append(k[len(first) :])
            values[layer].append(v[len(first) :])
            q, k = network.rotate(q, places), network.rotate(k, places)
            x = network.finish(layer, x, network.attend(q, k, v, causal))
    return Chunks(
        torch.tensor([token for part in parts for token in part]),
        [torch.cat(layer) for layer in keys],
        [torch.cat(layer) for layer in values],
        starts,
    )


def cacheblend(
    network: Network,
    chunks: Chunks,
    *,
    check: int = 1,
    number: int | Sequence[int],
    suffix: int = 1,
    deviation: str = "value",
    lower_right: bool = True,
    all_new: bool = True,
) -> tuple[list[Tensor], list[Tensor], Tensor, list[int]]:
    """Keys, values, logits after the last token, and the places that went on to the last layer.

    number: of the tokens that go on from the check layer, beside the last `suffix` ones, which
    always do; several numbers: of those that go on from each layer since (the paper's shrinking
    set). lower_right: the mask of the authors' code, in which the last row that is computed sees
    everything, and each row before it one key less, wherever these rows stand; else rows see what
    is not after them. all_new: in the check layer the new keys and values of all tokens are read;
    else only of those that go on (LMCache).
    """
    everywhere = places = torch.arange(len(chunks.ids))
    numbers = [number] if isinstance(number, int) else list(number)
    keys = [network.rotate(k, everywhere) for k in chunks.keys]
    values = [v.clone() for v in chunks.values]
    x = network.embed(chunks.ids)
    for layer in range(network.layers):
        q, k, v = network.project(layer, x)
        q, k = network.rotate(q, places), network.rotate(k, places)
        if check <= layer < check + len(numbers):
            own = {
                "key": ((k - keys[layer][places]) ** 2).sum((1, 2)),
                "value": ((v - values[layer][places]) ** 2).sum((1, 2)),
            }
            change = own["key"] + own["value"] if deviation == "both" else own[deviation]
            best = change[:-suffix].sort(descending=True, stable=True).indices
            rows = torch.cat([best[: numbers[layer - check]].sort().values, everywhere[-suffix:]])
            rows[-suffix:] += len(places) - len(everywhere)
        else:
            rows = torch.arange(len(places))
        written = slice(None) if layer == check and all_new else rows
        keys[layer][places[written]] = k[written]
        values[layer][places[written]] = v[written]
        q, x, places = q[rows], x[rows], places[rows]
        mask = everywhere[None] <= places[:, None]
        if lower_right and layer >= check:
            last = everywhere[-len(places) :]
            mask = everywhere[None] <= last[:, None]
        x = network.finish(layer, x, network.attend(q, keys[layer], values[layer], mask))
    return keys, values, network.logits(x[-1:])[0], places.tolist()


def epic(
    network: Network, chunks: Chunks, initial: int, local: int = 0
) -> tuple[list[Tensor], list[Tensor], Tensor, list[int]]:
    """LegoLink: the first tokens of every part but the first again, and all of the question.

    local: the last ones too, as in the form that SamKV compares with.
    """
    everywhere = torch.arange(len(chunks.ids))
    again = everywhere >= chunks.starts[-1]
    for start, end in zip(chunks.starts[1:], chunks.starts[2:], strict=False):
        again[start : min(end, start + initial)] = True
        again[max(start, end - local) : end] = True
    places = again.nonzero().flatten()
    keys = [network.rotate(k, everywhere) for k in chunks.keys]
    values = [v.clone() for v in chunks.values]
    x = network.embed(chunks.ids[places])
    mask = everywhere[None] <= places[:, None]
    for layer in range(network.layers):
        q, k, v = network.project(layer, x)
        keys[layer][places] = network.rotate(k, places)
        values[layer][places] = v
        q = network.rotate(q, places)
        x = network.finish(layer, x, network.attend(q, keys[layer], values[layer], mask))
    return keys, values, network.logits(x[-1:])[0], places.tolist()


def generate(
    network: Network,
    keys: list[Tensor],
    values: list[Tensor],
    logits: Tensor,
    most: int,
    end: int | None = None,
) -> list[int]:
    """What is written after a prompt whose keys and values are there, greedily."""
    found = [int(logits.argmax())]
    while len(found) < most and found[-1] != end:
        place = torch.tensor([len(keys[0])])
        x = network.embed(torch.tensor(found[-1:]))
        for layer in range(network.layers):
            q, k, v = network.project(layer, x)
            keys[layer] = torch.cat([keys[layer], network.rotate(k, place)])
            values[layer] = torch.cat([values[layer], v])
            mask = torch.ones(1, len(keys[layer]), dtype=torch.bool)
            attended = network.attend(network.rotate(q, place), keys[layer], values[layer], mask)
            x = network.finish(layer, x, attended)
        found.append(int(network.logits(x)[0].argmax()))
    return found


def multi_infllm(
    prompt: Prompt, settings: Settings, *, representatives: int = 4, one_distance: bool = True
) -> Choice:
    """InfLLM's selector over all documents: per query head the mean key of a block's most read.

    Attention that a token receives is summed over the later tokens of its document. one_distance:
    keys are not rotated, and queries by one angle, that of `local_tokens`, as InfLLM looks at what
    is far away; else both stand at their places.
    """
    size, network = settings.block_size, prompt.network
    blocks = [
        (d, b)
        for d, record in enumerate(prompt.records)
        for b in range(-(-len(record.ids) // size))
    ]
    last = max(settings.num_initial_blocks, len(blocks) - settings.num_local_blocks)
    fixed = blocks[: settings.num_initial_blocks] + blocks[last:]
    places = [p for d, b in fixed for p in prompt.block(d, b, size)]
    question_context = torch.zeros_like(prompt.documents)
    question_context[places] = True
    kept = prompt.everywhere(question_context)
    group = network.heads // network.kv_heads
    asked = prompt.question.nonzero().flatten()
    chosen = []
    for layer, queries in enumerate(prompt.queries(question_context)):
        if one_distance:
            queries = network.rotate(queries, settings.local_tokens - asked)
        query = queries.mean(0)
        scores: dict[tuple[int, int], float] = {}
        for d, record in enumerate(prompt.records):
            own = torch.arange(len(record.ids))
            q, k = (network.rotate(x[layer], own) for x in (record.queries, record.keys))
            causal = own[None] <= own[:, None]
            looked_at = record.keys[layer]
            if not one_distance:
                looked_at = network.rotate(looked_at, own + prompt.offsets[d])
            for h in range(network.heads):
                received = network.weights_of_attention(h, q, k, causal).tril(-1).sum(0)
                for b in range(-(-len(own) // size)):
                    rows = slice(b * size, (b + 1) * size)
                    most = received[rows].topk(min(representatives, len(received[rows]))).indices
                    mean = looked_at[rows][most, h // group].mean(0)
                    scores[d, b] = scores.get((d, b), 0.0) + float(query[h] @ mean)
        best = sorted(blocks[settings.num_initial_blocks : last], key=lambda at: -scores[at])
        chosen.append(best[: settings.num_blocks])
        for d, b in chosen[-1]:
            kept[layer, list(prompt.block(d, b, size))] = True
    return Choice(kept, nothing(prompt), chosen=chosen)
