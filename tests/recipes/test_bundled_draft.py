"""The draft beside "tiny-hops" drafts: long texts take few steps, and are the same texts."""

from __future__ import annotations

import pytest
import torch

from keyhole import LLM, SamplingParams
from keyhole.eval.tiny_language.tasks import make
from keyhole.models.loading import load
from keyhole.retrieval.head import RetrievalHead

#: No number of an item in an evaluation, all of which count from 0.
SEED = 7_001


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["derive", *(pytest.param(task, marks=pytest.mark.slow) for task in ("walk", "walk2"))]
)
def test_the_bundled_draft_is_accepted(task: str) -> None:
    item = make(task, 512, SEED)
    params = SamplingParams(max_tokens=160)
    plain = LLM("tiny-hops").generate(item.prompt, params)
    llm = LLM("tiny-hops", draft="eagle3", num_draft_tokens=4)
    found = llm.generate(item.prompt, params)
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted_length is not None
    assert found.stats.accepted_length >= 2.5


def test_the_bundled_head_is_the_one_that_is_pruned_from_the_draft() -> None:
    model = load("tiny-hops", "cpu", "float32")
    assert model.head is not None
    assert model.draft is not None
    head = RetrievalHead.from_pretrained(model.head, model.network).state_dict()
    pruned = RetrievalHead.from_eagle3(model.draft, model.network).state_dict()
    assert head.keys() == pruned.keys()
    assert all(torch.equal(x, pruned[name]) for name, x in head.items())
