"""Draft tokens are verified as if they were decoded in turn, each with its own selection.

Run by `make test-vllm`, in a separate environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")

from keyhole.integrations.vllm.step_rows import StepRows
from tests.checkpoints import VOCAB_SIZE
from tests.integrations.vllm.engines import (
    MAX_LENGTH,
    PAGE_SIZE,
    POLICIES,
    answers,
    make_checkpoint,
    own_tokens,
    paged,
    random_prompts,
    start,
)
from tests.retrieval.drafts import edit, make_draft

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and what it brings along

NUM_DRAFTS = 3


def eagle3(folder: Path) -> dict[str, Any]:
    draft = make_draft(
        folder,
        draft_vocab_size=VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )
    edit(draft, d2t=None, t2d=None)  # it drafts from the whole vocabulary
    return {"method": "eagle3", "model": str(draft)}


def same_model(folder: Path) -> dict[str, Any]:
    """Most drafts of the dense model are accepted, hardly one of a random EAGLE-3 head."""
    return {"method": "draft_model", "model": make_checkpoint(folder)}


@pytest.mark.parametrize(("drafts", "name"), [(eagle3, "quest"), (same_model, "delta")])
def test_drafts_do_not_change_the_tokens(
    drafts: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path)
    settings = {"token_budget": 2 * PAGE_SIZE, **POLICIES[name]}
    begun: list[bool] = []
    plain = StepRows.begin

    def begin(rows: StepRows, *args: Any) -> Any:
        begun.append(rows.num_rows > rows.num_requests)
        return plain(rows, *args)

    monkeypatch.setattr(StepRows, "begin", begin)
    engine = start(
        checkpoint,
        additional_config={"keyhole": {"policy": name, **settings}},
        speculative_config={**drafts(tmp_path), "num_speculative_tokens": NUM_DRAFTS},
    )
    prompts = random_prompts(33, 120, 260, seed=6)
    got = [tokens for tokens, _ in answers(engine, prompts, 30)]
    assert any(begun), "no draft was checked"
    assert got == own_tokens(checkpoint, paged(name, **settings), prompts, 30)
