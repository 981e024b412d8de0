"""Models that cannot run are refused by name, with what is wrong and what would be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FalconConfig

from keyhole import LLM, ModelError, RequestError, SamplingParams
from keyhole.models.loading import load
from tests.checkpoints import make_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(make_model("llama", tmp_path, tokenizer=True))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_unknown_folder_offers_the_nearest(checkpoint: Path) -> None:
    wrong = checkpoint.with_name(checkpoint.name + "s")
    with pytest.raises(ModelError, match=f"unknown model .*did you mean {checkpoint.name!r}"):
        load(wrong)


def test_an_unknown_hub_id_is_named() -> None:
    with pytest.raises(ModelError, match="unknown model 'nobody/nothing'"):
        load("nobody/nothing")


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_a_damaged_config_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"config of .* cannot be read"):
        load(checkpoint)


def test_cut_off_weights_are_named(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"weights of .* cannot be loaded"):
        load(checkpoint)


def test_a_missing_weight_is_named_and_never_made_up(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.2.self_attn.k_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"damaged: 1 weights .*layers\.2\.self_attn\.k_proj"):
        load(checkpoint)


def test_a_weight_of_another_shape_is_refused(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm"):
        load(checkpoint)


def test_an_unsupported_family_is_refused_by_name(tmp_path: Path) -> None:
    config = FalconConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="family 'falcon', which Keyhole cannot run"):
        LLM(tmp_path, device="cpu")


def test_an_unsupported_kind_of_layer_is_refused(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", layer_types=["linear_attention"] * 4)
    with pytest.raises(ModelError, match="linear_attention"):
        load(checkpoint)


def test_a_tokenizer_may_have_more_ids_than_the_model(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gemma-3-1b-it's has a padding token beyond the vocabulary: the model was refused."""
    small = Path(make_model("llama", tmp_path, vocab_size=100))
    for file in checkpoint.glob("*token*"):
        (small / file.name).write_bytes(file.read_bytes())
    llm = LLM(small, device="cpu")
    assert "has ids up to 258, the model knows 100" in caplog.text
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    assert len(llm.generate("AB", params).token_ids) == 1
    with pytest.raises(RequestError, match=r"token id \d+ is not one of this model's, 0 to 99"):
        llm.generate("é", params)


def test_several_end_tokens_all_end(tmp_path: Path) -> None:
    path = Path(make_model("llama", tmp_path))
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    ids = LLM(path, device="cpu").generate({"prompt_token_ids": [9, 8, 7]}, greedy).token_ids
    edit(path / "generation_config.json", eos_token_id=[2, ids[3]])
    llm = LLM(path, device="cpu")
    result = llm.generate({"prompt_token_ids": [9, 8, 7]}, SamplingParams(temperature=0))
    assert result.token_ids == ids[: ids.index(ids[3]) + 1]
    assert result.finish_reason == "stop"
