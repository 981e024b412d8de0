"""A query that is rotated back to a document scores as if each key were rotated to the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from keyhole.models.positions import RopeShift
from keyhole.reuse import make_reuse
from keyhole.reuse.base import PlacedDocument
from tests.reuse.placed import make_documents, make_queries, make_query

LAYERS, SIZE = 3, 8
FREQUENCIES = torch.tensor([1.0, 0.3, 0.07, 0.01], dtype=torch.float64)
SHIFT = RopeShift(frequencies=(FREQUENCIES,) * LAYERS, rotated_last=(False,) * LAYERS).shift


def rotated(x: Tensor, by: int) -> Tensor:
    """RoPE by its definition (RoFormer, eq. 15), pairs (i, i + 4), in float64."""
    out = x.double().clone()
    for i, frequency in enumerate(FREQUENCIES.tolist()):
        cos, sin = torch.tensor(by * frequency).double().cos(), torch.tensor(by * frequency).sin()
        a, b = x[..., i].double(), x[..., i + SIZE // 2].double()
        out[..., i], out[..., i + SIZE // 2] = a * cos - b * sin, a * sin + b * cos
    return out.float()


def in_the_prompt(document: PlacedDocument) -> PlacedDocument:
    """The document with all that is stored of it rotated to the prompt."""
    by = document.offset
    layers = [
        replace(
            facts,
            block_keys=rotated(facts.block_keys, by),
            local_queries=rotated(facts.local_queries, by),
            representative_keys=rotated(facts.representative_keys, by),
        )
        for facts in document.layers
    ]
    extremes = [rotated(keys, by) for keys in document.extremes]
    return replace(document, layers=layers, extremes=extremes, shift=None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "method",
    [
        "sam_kv:stable_layers=1",
        "sam_kv:stable_layers=1,bias=false",
        "sam_kv:stable_layers=1,score=extremes,share=0.5",
        "multi_infllm:num_blocks=5",
    ],
)
def test_what_is_kept_is_that_of_rotated_keys(method: str) -> None:
    differs = False
    for seed in range(8):
        documents = make_documents([40, 22, 61], seed=seed, first=300)
        queries = make_queries(5, seed=seed) if "extremes" in method else make_query(seed=seed)
        reuse = make_reuse(method)
        if method.startswith("sam_kv"):
            reuse = replace(reuse, block_size=4)  # type: ignore[call-arg]
        found = reuse.plan([replace(own, shift=SHIFT) for own in documents], queries)
        wanted = reuse.plan([in_the_prompt(own) for own in documents], queries)
        assert torch.equal(found.kept, wanted.kept)
        assert torch.equal(found.recomputed, wanted.recomputed)
        differs |= not torch.equal(found.kept, reuse.plan(documents, queries).kept)
    assert differs, "positions matter here"
