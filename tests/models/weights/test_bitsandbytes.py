"""Checkpoints of bitsandbytes, in 4 and 8 bits: they run as transformers runs them.

Skipped without bitsandbytes and accelerate: `pip install bitsandbytes accelerate`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from keyhole import LLM, SamplingParams
from keyhole.cli import main
from keyhole.errors import ModelError
from keyhole.eval.verify import verify
from keyhole.models.loading import load
from tests.checkpoints import make_model

pytest.importorskip(
    "bitsandbytes", reason="real 4- and 8-bit layers need it: pip install bitsandbytes"
)
pytest.importorskip(
    "accelerate", reason="transformers loads bitsandbytes through it: pip install accelerate"
)
pytestmark = pytest.mark.filterwarnings("default")  # bitsandbytes and accelerate have theirs

KINDS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A quantised checkpoint with a tokenizer; layers large enough for blocks of 64 weights."""
    where = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    path = make_model("llama", where, tokenizer=True, initializer_range=0.05, **sizes)
    network = AutoModelForCausalLM.from_pretrained(path, quantization_config=KINDS[request.param])
    network.save_pretrained(path)
    return path


def test_a_right_checkpoint_passes(folder: str) -> None:
    """All 15 checks failed: activations are rounded to bfloat16, and each step carries that on."""
    checks = verify(load(folder, device="cpu"))
    assert [check for check in checks if not check.passed] == []


def test_it_generates_what_transformers_generates(folder: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    llm = LLM(folder, device="cpu")
    prompt = llm.tokenizer("The quick brown fox jumps over the lazy dog.").input_ids
    found = llm.generate(prompt, SamplingParams(max_tokens=1, logprobs=1, temperature=0.0))
    with torch.no_grad():
        expected = network(torch.tensor([prompt])).logits[0, -1].float()
    assert found.logprobs is not None
    best = int(expected.argmax())
    torch.testing.assert_close(
        torch.tensor(found.logprobs[0][best]),
        expected.log_softmax(-1)[best],
        atol=5e-2,
        rtol=0,
    )


def test_the_command_line_runs_it(folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    """bitsandbytes said "inputs will be cast" 19,000 times in 15 checks."""
    command = ["generate", "fox", "--model", folder, "--device", "cpu", "--max-tokens", "8"]
    assert main([*command, "--ignore-eos", "--json"]) == 0
    out, err = capfd.readouterr()
    assert len(json.loads(out)["token_ids"]) == 8
    assert err.count("inputs will be cast") <= 1


def _without_a_weight(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _without_a_scale(tensors: dict[str, torch.Tensor]) -> None:
    scale = next(
        name for name in tensors if name.endswith(("layers.1.mlp.up_proj.weight.absmax", ".SCB"))
    )
    del tensors[scale]


def _of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()


@pytest.mark.parametrize("damage", [_without_a_weight, _without_a_scale, _of_another_shape])
def test_a_damaged_checkpoint_is_refused(
    folder: str, damage: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    damaged = _copy(folder, tmp_path)
    tensors = load_file(damaged / "model.safetensors")
    damage(tensors)
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"damaged|cannot be loaded"):
        load(damaged, device="cpu")


def test_a_file_that_is_cut_off_is_refused(folder: str, tmp_path: Path) -> None:
    damaged = _copy(folder, tmp_path) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    with pytest.raises(ModelError):
        load(damaged.parent, device="cpu")


def test_numbers_that_are_none_fail_the_checks(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = _copy(folder, tmp_path)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"].fill_(float("nan"))
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    assert main(["verify", "--model", str(damaged), "--device", "cpu"]) == 2
    assert "the model computed NaN or infinite logits" in capsys.readouterr().err


def _copy(folder: str, to: Path) -> Path:
    for file in Path(folder).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to
