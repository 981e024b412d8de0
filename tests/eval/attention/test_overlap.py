"""Overlap between layers and between steps, against sets and loops; what chance gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.eval.attention.dense_run import LayerStep
from keyhole.eval.attention.sums import KINDS, MOST_STEPS, OverlapSums, SelectionPersistence, kinds
from keyhole.policies.base import CachedLayers, SequenceRows, Step

PAGE, LAYERS, HEADS, KV_HEADS = 4, 3, 6, 2
PROMPTS = (41, 70)
CPU = torch.device("cpu")


def geometry(kv_heads: tuple[int, ...] = (KV_HEADS,) * LAYERS) -> Geometry:
    layouts = [LayerLayout(num_kv_heads=heads, key_dim=8, value_dim=8) for heads in kv_heads]
    return Geometry(layers=tuple(layouts), num_query_heads=HEADS, page_size=PAGE, itemsize=4)


def step(number: int, rows: tuple[int, ...] = (0, 1)) -> Step:
    """Decode step `number`, the first being 1, of both texts or of one."""
    prompts = np.asarray([PROMPTS[row] for row in rows])
    lengths = prompts + number
    unused: Any = None
    return Step(
        lengths=torch.tensor(lengths, dtype=torch.int32),
        pages=torch.tensor(-(-lengths // PAGE), dtype=torch.int32),
        max_length=int(lengths.max()),
        page_table=unused,
        page_size=PAGE,
        sequences=SequenceRows(
            host_lengths=lengths,
            fresh=np.asarray([number == 1] * len(rows)),
            prompts=torch.tensor(prompts, dtype=torch.int32),
            host_prompts=prompts,
            slots=torch.tensor(rows),
            host_slots=np.asarray(rows),
            state={},
        ),
        cache=CachedLayers(keys=[], page_data=[], rotation=unused),
    )


def seen(layer: int, at: Step, weights: torch.Tensor) -> LayerStep:
    """weights [B, Hq, N]; past the sequence they become 0."""
    there = torch.arange(weights.shape[2]) < at.lengths[:, None]
    return LayerStep(
        layer=layer,
        samples=at.sequences.slots,
        num_kv_heads=KV_HEADS,
        weights=weights * there[:, None],
        output=weights[..., :1],
        readings=(),
        step=at,
    )


def drawn(at: Step, generator: torch.Generator) -> torch.Tensor:
    count = -(-at.max_length // PAGE) * PAGE
    return torch.rand(len(at.sequences.slots), HEADS, count, generator=generator)


def top(weights: np.ndarray, length: int, kind: str, budget: int) -> list[set[int]]:
    """The lists of one sequence, weights [Hq, N], by sorting numbers."""
    group = HEADS if kind == "pages" else HEADS // KV_HEADS
    lists = []
    for first in range(0, HEADS, group):
        scores = [
            max(float(weights[h, t]) for h in range(first, first + group)) for t in range(length)
        ]
        if kind != "head_tokens":
            scores = [sum(scores[i : i + PAGE]) for i in range(0, length, PAGE)]
        count = budget if kind == "head_tokens" else budget // PAGE
        lists.append({*sorted(range(len(scores)), key=lambda i: -scores[i])[:count]})
    return lists


@pytest.mark.parametrize("kind", KINDS)
def test_layers_overlap_as_sets_do(kind: str) -> None:
    budget, steps = 12, 5
    generator = torch.Generator().manual_seed(1)
    sums = OverlapSums(kind, budget, geometry(), len(PROMPTS), CPU)
    wanted = np.zeros((2, LAYERS, LAYERS))
    newest, chance = np.zeros(2), 0.0
    for number in range(1, steps + 1):
        at = step(number)
        lists: list[list[list[set[int]]]] = []
        for layer in range(LAYERS):
            one = seen(layer, at, drawn(at, generator))
            sums.take(one)
            lists.append(
                [top(one.weights[r].numpy(), int(at.lengths[r]), kind, budget) for r in range(2)]
            )
        for row in range(2):
            length = int(at.lengths[row])
            size = budget if kind == "head_tokens" else budget // PAGE
            there = length if kind == "head_tokens" else -(-length // PAGE)
            first = 4 if kind == "head_tokens" else 1
            recent = {*range(first), *range(there - size + first, there)}
            chance += size / there / steps / 2
            for a in range(LAYERS):
                pairs = [len(own & recent) / size for own in lists[a][row]]
                newest[row] += sum(pairs) / len(pairs) / steps / LAYERS
                for b in range(LAYERS):
                    both = zip(lists[a][row], lists[b][row], strict=True)
                    shares = [len(x & y) / size for x, y in both]
                    wanted[row, a, b] += sum(shares) / len(shares) / steps
    found = sums.result()
    # Results are rounded to four digits.
    assert np.asarray(found.between_layers) == pytest.approx(wanted.mean(0), abs=1e-4)
    assert found.newest == pytest.approx(newest.tolist(), abs=1e-4)
    assert found.chance == pytest.approx(chance, abs=1e-4)
    near = [(wanted[row, 0, 1] + wanted[row, 1, 2]) / 2 for row in range(2)]
    far = [wanted[row, 0, 2] for row in range(2)]
    assert np.asarray(found.by_distance) == pytest.approx(np.asarray([near, far]).T, abs=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_without_sense_overlap_by_chance(kind: str) -> None:
    """Layers and steps that have nothing to do with each other: about k / n, nowhere more."""
    generator = torch.Generator().manual_seed(2)
    sums = OverlapSums(kind, 16, geometry(), len(PROMPTS), CPU)
    for number in range(1, 81):
        at = step(number)
        for layer in range(LAYERS):
            sums.take(seen(layer, at, drawn(at, generator)))
    found = sums.result()
    # A fixed draw of 80 steps, whose means scatter by about a hundredth; of the steps that lie far
    # apart there are few, and their mean scatters more.
    assert np.mean(found.by_distance) == pytest.approx(found.chance, abs=0.04)
    later = [share for row in found.by_steps for share in row if share is not None]
    assert len(later) == 2 * MOST_STEPS
    assert np.mean(later) == pytest.approx(found.chance, abs=0.08)


def test_the_same_weights_overlap_in_everything() -> None:
    sums = OverlapSums("head_tokens", 8, geometry(), len(PROMPTS), CPU)
    weights = torch.rand(2, HEADS, 160, generator=torch.Generator().manual_seed(3))
    weights[..., min(PROMPTS) :] *= 1e-3  # what is new is not looked at
    for number in range(1, 71):
        at = step(number)
        for layer in range(LAYERS):
            sums.take(seen(layer, at, weights))
    found = sums.result()
    assert np.asarray(found.between_layers) == pytest.approx(1)
    assert found.by_steps == [[1.0] * MOST_STEPS] * 2


def test_a_selection_is_compared_with_those_of_later_steps() -> None:
    """Every sixteenth selection is kept for 64 steps; rows come and go, lengths differ."""
    generator = np.random.default_rng(4)
    chosen: dict[tuple[int, int], list[set[int]]] = {}
    repeats = SelectionPersistence(2, CPU)
    for number in range(1, 91):
        rows = (0, 1) if number <= 50 else (1,)
        at = step(number, rows)
        tokens = torch.zeros(len(rows), KV_HEADS, at.max_length, dtype=torch.bool)
        for place, row in enumerate(rows):
            own = [
                {*generator.choice(int(at.lengths[place]), 9, False).tolist()}
                for _ in range(KV_HEADS)
            ]
            chosen[row, number] = own
            for head, entries in enumerate(own):
                tokens[place, head, sorted(entries)] = True
        repeats.take(seen(0, at, torch.ones(len(rows), HEADS, at.max_length)), tokens)
    found = repeats.shares()
    for row, last in ((0, 50), (1, 90)):
        for later in range(1, MOST_STEPS + 1):
            shares = [
                len(a & b) / 9
                for made in range(1, last + 1, 16)
                if made + later <= last
                for a, b in zip(chosen[row, made], chosen[row, made + later], strict=True)
            ]
            if shares:
                assert found[row][later - 1] == pytest.approx(np.mean(shares), abs=1e-4)
            else:
                assert found[row][later - 1] is None


def test_lists_per_head_need_as_many_heads_in_all_layers() -> None:
    assert tuple(kinds(geometry())) == KINDS
    assert tuple(kinds(geometry((2, 6, 2)))) == ("pages",)
