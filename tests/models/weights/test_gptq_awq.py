"""Checkpoints of GPTQ and AWQ, which transformers loads by gptqmodel (GPTQ by optimum, too).

The codes are packed here as the formats define them, and the logits are compared with those of a
plain model of the numbers that the codes stand for. `make test-weights` has the packages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from keyhole import LLM, ConfigError, SamplingParams
from keyhole.eval.verify import verify
from keyhole.models.loading import load
from tests.checkpoints import make_model

pytest.importorskip("gptqmodel", reason="AWQ and GPTQ need it: pip install gptqmodel")
pytest.importorskip("optimum", reason="GPTQ needs it, too: pip install optimum")
pytestmark = pytest.mark.filterwarnings("default")  # gptqmodel has its own

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
}
GROUP = 32
#: Where AWQ puts eight neighbours in a word, from its lowest bits up.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int64 [I, O], zeros int64 and scales float16 [I / GROUP, O] of a weight [O, I]."""
    groups = weight.float().T.unflatten(0, (-1, GROUP))
    low, high = groups.aminmax(dim=1)
    scales = ((high - low) / 15).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return codes.flatten(0, 1).long(), zeros.long(), scales


def numbers(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """The weight [O, I] that the codes stand for, (code - zero) * scale."""
    groups = codes.unflatten(0, (-1, GROUP)) - zeros[:, None]
    return (groups * scales.double()[:, None]).flatten(0, 1).T.contiguous()


def words(codes: Tensor) -> Tensor:
    """Eight codes of the last dimension in an int32, the first in the lowest bits."""
    shifted = codes.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.int32)


def as_gptq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Eight inputs in a word; zeros are stored minus one."""
    return {
        "qweight": words(codes.T).T.contiguous(),
        "qzeros": words(zeros - 1),
        "scales": scales,
        "g_idx": torch.arange(len(codes), dtype=torch.int32) // GROUP,
    }


def as_awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Eight outputs in a word, in AWQ's order."""

    def ordered(table: Tensor) -> Tensor:
        return words(table.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2))

    return {"qweight": ordered(codes), "qzeros": ordered(zeros), "scales": scales}


KINDS: dict[str, tuple[Callable[..., dict[str, Tensor]], dict[str, Any]]] = {
    "gptq": (as_gptq, {"quant_method": "gptq", "sym": False, "desc_act": False}),
    "awq": (as_awq, {"quant_method": "awq", "zero_point": True, "version": "gemm"}),
}


@pytest.fixture(scope="module", params=list(KINDS))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint in 4 bits, and a plain one of the same numbers."""
    where = tmp_path_factory.mktemp(request.param)
    stored = Path(make_model("llama", where / "stored", tokenizer=True, **SIZES))
    plain = Path(make_model("llama", where / "plain", **SIZES))
    convert, fields = KINDS[request.param]
    packed: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, weight in load_file(stored / "model.safetensors").items():
        if "proj" not in name:
            packed[name] = whole[name] = weight
            continue
        parts = quantised(weight)
        whole[name] = numbers(*parts).float()
        module = name.removesuffix("weight")
        packed |= {module + part: tensor for part, tensor in convert(*parts).items()}
    save_file(packed, stored / "model.safetensors", {"format": "pt"})
    save_file(whole, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = fields | {"bits": 4, "group_size": GROUP}
    (stored / "config.json").write_text(json.dumps(config))
    return str(stored), str(plain)


def test_it_runs_as_the_numbers_that_it_stands_for(folders: tuple[str, str]) -> None:
    stored, plain = folders
    network = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    prompt = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = LLM(stored, device="cpu").engine
    sequence = engine.add(prompt, SamplingParams(max_tokens=3, temperature=0.0), keep_logits=True)
    while engine.has_work:
        engine.step()
    with torch.no_grad():
        tokens = prompt + list(sequence.generated)
        wanted = network(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    found = torch.stack(list(sequence.logits)).float()
    # Layers compute in 16 bits.
    error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error < 0.02
    assert engine.model.network.config.quantization_config is not None


def test_every_check_passes(folders: tuple[str, str]) -> None:
    loaded = load(folders[0], "cpu")
    assert [check for check in verify(loaded) if not check.passed] == []


def test_they_are_not_packed_again(folders: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="leave weights 'int4' out"):
        load(folders[0], "cpu", weights="int4")
