"""LoRA adapters with peft installed: one beside weights is applied, and none is ignored.

Skipped without peft: `pip install peft`. Without it adapters are refused (test_locate.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from keyhole import LLM, SamplingParams
from keyhole.errors import ModelError
from keyhole.eval.verify import verify
from keyhole.models.loading import load
from tests.checkpoints import make_model

peft = pytest.importorskip(
    "peft", reason="real adapters need it, and no extra has it: pip install peft"
)
pytestmark = pytest.mark.filterwarnings("default")  # peft has its own

WEIGHTS = "adapter_model.safetensors"
PROMPT = list(range(3, 40))
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A base model, its adapter alone and beside the weights, and both merged by peft."""
    base = Path(make_model("llama", tmp_path))
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapter, beside, merged = (tmp_path / name for name in ("adapter", "beside", "merged"))
    adapted.save_pretrained(adapter)
    shutil.copytree(base, beside)
    shutil.copytree(adapter, beside, dirs_exist_ok=True)
    adapted.merge_and_unload().save_pretrained(merged)
    return {"base": base, "adapter": adapter, "beside": beside, "merged": merged}


def test_an_adapter_beside_weights_is_applied(folders: dict[str, Path]) -> None:
    tokens = {
        name: LLM(folders[name], device="cpu").generate(PROMPT, PARAMS).token_ids
        for name in ("base", "beside", "merged")
    }
    assert tokens["beside"] == tokens["merged"] != tokens["base"]
    assert all(check.passed for check in verify(folders["beside"], "cpu"))


def test_an_adapter_alone_is_refused_with_what_to_do(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"it is a LoRA adapter .*merge_and_unload\(\)"):
        load(folders["adapter"])


def test_an_adapter_without_its_weights_is_refused(folders: dict[str, Path]) -> None:
    (folders["beside"] / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folders["beside"])


def test_an_adapter_that_lacks_weights_is_refused(folders: dict[str, Path]) -> None:
    """peft draws the rest at random and goes on."""
    file = folders["beside"] / WEIGHTS
    tensors = load_file(file)
    for name in sorted(tensors)[::2]:
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match="is damaged"):
        load(folders["beside"])


def test_an_adapter_of_another_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its names are in no layer here."""
    file = folders["beside"] / WEIGHTS
    tensors = {name.replace("layers", "blocks"): one for name, one in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match="is damaged"):
        load(folders["beside"])
