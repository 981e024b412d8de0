"""The draft beside "tiny-hops" drafts: long texts take few steps, and are the same texts."""

from __future__ import annotations

import pytest

from keyhole import LLM, SamplingParams
from keyhole.eval.tiny_language.tasks import make

#: No number of an item in an evaluation, all of which count from 0.
SEED = 7_001


@pytest.mark.parametrize("task", ["derive", "walk2", pytest.param("walk", marks=pytest.mark.slow)])
def test_the_bundled_draft_is_accepted(task: str) -> None:
    item = make(task, 512, SEED)
    params = SamplingParams(max_tokens=160)
    plain = LLM("tiny-hops").generate(item.prompt, params)
    llm = LLM("tiny-hops", draft="eagle3", num_draft_tokens=4)
    found = llm.generate(item.prompt, params)
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted_length is not None
    assert found.stats.accepted_length >= 2.5
