"""Quantised checkpoints: transformers' quantisers load them, and their layers are not changed.

Those that run on a CPU are compared with transformers; the others are refused with a reason.
torchao's are skipped without it: `pip install torchao`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from keyhole import LLM, ConfigError, ModelError, SamplingParams
from keyhole.engine.documents.fingerprint import fingerprint
from keyhole.eval.verify import verify
from keyhole.models.fast_layers import FastLinear
from keyhole.models.loading import adopt, load
from tests.checkpoints import make_model

pytestmark = pytest.mark.filterwarnings("default")  # torchao and compressed-tensors have their own

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
}


def of_torchao(folder: Path, name: str) -> str:
    """A checkpoint that torchao stored."""
    quantization = pytest.importorskip(
        "torchao.quantization",
        reason="an extra of its own: it logs its own warnings into every import of transformers",
    )
    config = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "int4": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        ),
    }[name]()
    return _through_transformers(folder, TorchAoConfig(config))


def _through_transformers(folder: Path, config: Any) -> str:
    path = make_model("llama", folder, dtype=torch.bfloat16, **SIZES)
    network = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.bfloat16
    )
    stored = f"{path}-stored"
    network.save_pretrained(stored)
    return stored


def of_compressed_tensors(folder: Path, scheme: str) -> str:
    """A checkpoint that compressed-tensors stored, as llm-compressor and vLLM's users have them."""
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    form = {"W4A16": "pack-quantized", "W8A8": "int-quantized"}.get(scheme, "float-quantized")
    path = make_model("llama", folder, dtype=torch.bfloat16, **SIZES)
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    config = QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], format=form, quantization_status="frozen"
    )
    apply_quantization_config(network, config)
    for layer in network.modules():
        if hasattr(layer, "weight_scale"):  # which calibration would set
            kind = layer.quantization_scheme.weights
            largest = 448 if kind.type == "float" else 2 ** (kind.num_bits - 1) - 1
            count = layer.weight_scale.shape[1]
            most = layer.weight.detach().float().unflatten(1, (count, -1)).abs().amax(2)
            layer.weight_scale.data = (most / largest).to(layer.weight_scale.dtype)
    compressor: Any = ModelCompressor.from_pretrained_model(network, quantization_format=form)
    compressor.compress_model(network)
    stored = f"{path}-stored"
    network.save_pretrained(stored)
    compressor.update_config(stored)
    return stored


def of_fp8(folder: Path, _: str) -> str:
    """Blocks of 128 x 128 weights in FP8 with a scale each, as DeepSeek and Qwen publish them."""
    path = Path(make_model("llama", folder, dtype=torch.bfloat16, **SIZES))
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if "proj" not in name:
            stored[name] = weight
            continue
        rows, columns = (max(1, size // 128) for size in weight.shape)
        blocks = weight.float().view(rows, -1, columns, weight.shape[1] // columns)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        stored[name] = (blocks / scale).view(weight.shape).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    announce(path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    return str(path)


def announce(path: Path, fields: dict[str, Any]) -> None:
    """Writes into a config that its weights are stored so."""
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": fields}
    (path / "config.json").write_text(json.dumps(config))


MADE: dict[str, Callable[[Path, str], str]] = {
    "torchao int8": of_torchao,
    "torchao int8-dynamic": of_torchao,
    "torchao int4": of_torchao,
    "compressed-tensors W4A16": of_compressed_tensors,
    "compressed-tensors W8A8": of_compressed_tensors,
    "compressed-tensors FP8_DYNAMIC": of_compressed_tensors,
    "fp8 blocks": of_fp8,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", MADE)
def test_it_runs_as_transformers_runs_it(kind: str, tmp_path: Path) -> None:
    folder = MADE[kind](tmp_path, kind.split()[1])
    network = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    prompt = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        wanted = network(torch.tensor([prompt])).logits[0, -1].float()
    engine = LLM(folder, device="cpu").engine
    sequence = engine.add(prompt, SamplingParams(max_tokens=2, temperature=0.0), keep_logits=True)
    while engine.has_work:
        engine.step()
    found = sequence.logits[0].float()
    # bfloat16, and sums in another order. Inputs that every layer rounds to three bits again make
    # more of that: transformers' eager attention and its sdpa differ by 0.04 to 0.06 there.
    error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error < (0.1 if kind.endswith("FP8_DYNAMIC") else 0.05)
    if kind != "fp8 blocks":  # which are dequantised without a GPU
        assert engine.model.network.config.quantization_config is not None
    with pytest.raises(ConfigError, match="leave weights 'int4' out"):
        load(folder, "cpu", weights="int4")


def test_blocks_of_fp8_have_one_dtype(tmp_path: Path) -> None:
    """transformers leaves the weights beside them in 16 bits: the first request failed."""
    folder = of_fp8(tmp_path, "")
    half, whole = (load(folder, "cpu", dtype) for dtype in ("bfloat16", "float32"))
    pairs = zip(half.network.parameters(), whole.network.parameters(), strict=True)
    assert all(b.dtype == torch.float32 and torch.equal(a, b.to(a.dtype)) for a, b in pairs)
    assert LLM(whole).generate([3, 4, 5], SamplingParams(max_tokens=1)).token_ids


def test_compressed_weights_are_unpacked_while_loading(tmp_path: Path) -> None:
    """They were in the first request: documents that were stored before it were foreign after it.

    And adapters found no weight in a layer.
    """
    peft = pytest.importorskip("peft", reason="real adapters need it: pip install 'keyhole[lora]'")
    folder = of_compressed_tensors(tmp_path, "W4A16")
    network = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for model in (load(folder, "cpu"), adopt(network)):
        before = fingerprint(model)
        LLM(model).generate([3, 4, 5], SamplingParams(max_tokens=1))
        assert fingerprint(model) == before
    assert not hasattr(network.model.layers[0].self_attn.q_proj, "weight")  # it is not changed
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    plain = AutoModelForCausalLM.from_pretrained(make_model("llama", tmp_path, **SIZES))
    peft.get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")
    load(folder, "cpu", adapters={"one": tmp_path / "adapter"})


def test_every_check_passes_on_layers_of_torchao(tmp_path: Path) -> None:
    """A process crashed: our kernel took the address of torchao's codes for that of numbers."""
    loaded = load(of_torchao(tmp_path, "int8"), "cpu")
    layers = [m for m in loaded.network.modules() if isinstance(m, nn.Linear)]
    kinds = {type(layer.weight).__name__: type(layer) for layer in layers}
    assert kinds == {"Int8Tensor": nn.Linear, "Parameter": FastLinear}  # the last is the head
    assert [check for check in verify(loaded) if not check.passed] == []


@pytest.mark.parametrize(
    ("fields", "package"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, "gptqmodel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "optimum"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "unheard"}, "unheard"),
    ],
)
def test_a_missing_package_is_named(
    fields: dict[str, Any], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.quantizers.quantizer_awq.is_gptqmodel_available", bool)
    monkeypatch.setattr("transformers.quantizers.quantizer_gptq.is_optimum_available", bool)
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available",
        bool,
        raising=False,
    )
    path = Path(make_model("llama", tmp_path))
    announce(path, fields)
    with pytest.raises(ModelError) as caught:
        load(path, "cpu")
    message = str(caught.value)
    assert package in message
    assert str(path) in message
    assert "\n" not in message
