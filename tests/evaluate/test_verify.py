"""The gate passes what is exact, finds what is not, and leaves the model as it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from keyhole.evaluate import verify as module
from keyhole.evaluate.verify import verify
from keyhole.models.attention import NAME
from keyhole.models.loading import Model, load
from keyhole.policy import policies
from keyhole.policy.base import Policy, Selection, Step
from keyhole.policy.full import Full
from tests.checkpoints import make_model

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Forgetful(Policy):
    """Skips the second page, whatever the budget."""

    name: ClassVar[str] = "forgetful"

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        if int(step.pages.min()) < 3:
            return None
        pages = step.pages.max()
        row = torch.tensor([0, *range(2, int(pages))], dtype=torch.int32)
        indices = row.repeat(len(step.pages), 1, 1)
        indices = indices.masked_fill(indices >= step.pages[:, None, None], -1)
        return Selection(indices, (indices >= 0).sum(2, dtype=torch.int32), step.page_size)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek_v3"])
def test_every_policy_of_the_table_passes(kind: str, tmp_path: Path) -> None:
    checks = verify(make_model(kind, tmp_path), device="cpu")
    assert all(check.passed for check in checks)
    assert {check.policy for check in checks} == set(policies())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_16_bits_is_allowed_for(dtype: str, tmp_path: Path) -> None:
    checks = verify(make_model("llama", tmp_path), device="cpu", dtype=dtype)
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_that_forgets_a_page_is_found(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "policies", lambda: {"full": Full, "forgetful": Forgetful})
    monkeypatch.setattr(module, "_LENGTHS", (63, 111))
    checks = verify(make_model("llama", tmp_path), device="cpu", dtype=dtype)
    assert {check.policy for check in checks if not check.passed} == {"forgetful"}
    assert checks[-1].same_tokens < 1


def test_the_model_keeps_its_attention(model: Model) -> None:
    eager = module._Eager(model)
    assert eager.logits((5, 6)).shape == (2, model.vocab_size)
    assert model.network.config._attn_implementation == NAME
    with pytest.raises(IndexError):
        eager.logits((10**6,))
    assert model.network.config._attn_implementation == NAME


def test_a_model_without_full_attention_passes(tmp_path: Path) -> None:
    """DELTA looked for its layers among none, and failed with Python's own ValueError."""
    checks = verify(make_model("mistral_sliding", tmp_path), device="cpu")
    assert all(check.passed for check in checks)


def test_a_model_of_few_positions_is_verified_within_them(tmp_path: Path) -> None:
    model = load(make_model("qwen3", tmp_path, max_position_embeddings=40), device="cpu")
    checks = verify(model)
    assert all(check.passed for check in checks)
