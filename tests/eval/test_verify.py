"""The gate passes what is exact, finds what is not, and leaves the model as it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from transformers import CONFIG_MAPPING

from keyhole.errors import ConfigError
from keyhole.eval import verify as eval_verify
from keyhole.eval.verify import verify
from keyhole.models.attention import NAME
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.models.shrink import random_model, shrink
from keyhole.policies import available_policies
from keyhole.policies.base import Policy, Selection, Step
from keyhole.policies.controls import Full
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek_v3"])
def test_every_policy_of_the_table_passes(kind: str, tmp_path: Path) -> None:
    checks = verify(make_model(kind, tmp_path), device="cpu")
    assert all(check.passed for check in checks)
    assert {check.policy for check in checks} == set(available_policies())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_16_bits_is_allowed_for(dtype: str, tmp_path: Path) -> None:
    checks = verify(make_model("llama", tmp_path), device="cpu", dtype=dtype)
    assert all(check.passed for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_that_forgets_a_page_is_found(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        eval_verify, "available_policies", lambda: {"full": Full, "forgetful": Forgetful}
    )
    monkeypatch.setattr(eval_verify, "_LENGTHS", (63, 111))
    checks = verify(make_model("llama", tmp_path), device="cpu", dtype=dtype)
    assert {check.policy for check in checks if not check.passed} == {"forgetful"}
    assert checks[-1].same_tokens < 1


def test_the_model_keeps_its_attention(model: Model) -> None:
    eager = eval_verify.Eager(model)
    assert eager.logits((5, 6), 2).shape == (2, model.vocab_size)
    assert model.network.config._attn_implementation == NAME
    with pytest.raises(IndexError):
        eager.logits((10**6,), 1)
    assert model.network.config._attn_implementation == NAME


@pytest.mark.slow
def test_a_model_without_full_attention_passes(tmp_path: Path) -> None:
    """DELTA looked for its layers among none, and failed with Python's own ValueError."""
    checks = verify(make_model("mistral_sliding", tmp_path), device="cpu")
    assert all(check.passed for check in checks)


@pytest.mark.slow
def test_a_model_with_an_indexer_is_verified_without_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policies were tried and refused, so that nothing was verified."""
    monkeypatch.setattr(eval_verify, "_LENGTHS", (5, 63))
    random_model(shrink(CONFIG_MAPPING["deepseek_v32"]())).save_pretrained(tmp_path)
    checks = verify(tmp_path, device="cpu")
    assert all(check.passed for check in checks)
    assert {check.policy for check in checks} == {"full"}


def test_a_model_of_few_positions_is_verified_within_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {name: available_policies()[name] for name in ("full", "delta", "infllm")}
    monkeypatch.setattr(eval_verify, "available_policies", lambda: table)
    model = load(make_model("qwen3", tmp_path, max_position_embeddings=40), device="cpu")
    checks = verify(model)
    assert all(check.passed for check in checks)


class Rounded(torch.nn.Linear):
    """A layer that rounds as quantised ones do: its product is in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        rounded = (t.bfloat16() for t in (x, self.weight))
        return torch.nn.functional.linear(*rounded).to(x.dtype)


class RoundedInput(torch.nn.Linear):
    """A layer that rounds what it is given, and gives the same for one token as for many."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.bfloat16().to(x.dtype), self.weight)


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("rounded", [Rounded, RoundedInput])
def test_quantised_weights_are_judged_by_the_models_own_noise(
    rounded: type[torch.nn.Linear],
    forgets: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A right checkpoint of bitsandbytes in 4 bits failed 15 of 15 checks."""
    table = {"full": Full} | ({"forgetful": Forgetful} if forgets else {})
    monkeypatch.setattr(eval_verify, "available_policies", lambda: table)
    monkeypatch.setattr(eval_verify, "_LENGTHS", (63, 111))
    model = load(make_model("llama", tmp_path), device="cpu")
    for layer in model.network.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.__class__ = rounded
    assert not all(check.passed for check in verify(model))
    model.network.config.quantization_config = {"quant_method": "bitsandbytes"}
    failed = {check.policy for check in verify(model) if not check.passed}
    assert failed == ({"forgetful"} if forgets else set())


@pytest.mark.slow
def test_a_length_looks_beyond_the_cruel_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window or a scaled RoPE that is wrong beyond 128 tokens passed."""
    monkeypatch.setattr(eval_verify, "available_policies", lambda: {"full": Full})
    monkeypatch.setattr(eval_verify, "_LENGTHS", (1, 17))
    model = load(make_model("gemma3", tmp_path, sliding_window=150), device="cpu")
    assert all(check.passed for check in verify(model, length=200))
    eager = eval_verify.Eager.logits

    def wrong(self: eval_verify.Eager, tokens: tuple[int, ...], count: int) -> Tensor:
        """Like a model whose tokens do not attend more than 150 tokens back."""
        return eager(self, tokens[-150:] if len(tokens) > 150 else tokens, count)

    monkeypatch.setattr(eval_verify.Eager, "logits", wrong)
    assert all(check.passed for check in verify(model))
    assert not all(check.passed for check in verify(model, length=200))
    with pytest.raises(ConfigError, match="length 600 must be from 1 to 495"):
        verify(model, length=600)
