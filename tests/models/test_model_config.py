"""The language model of a model of images and text, against transformers' whole model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from keyhole import LLM, ModelError, RequestError, SamplingParams
from keyhole.exactness_gate import measure_family
from keyhole.models.checkpoint import read
from keyhole.models.model_config import text_part
from tests.checkpoints import make_tokenizer

_TEXT = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_SIGHT = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

#: Family, and its configs: of the text, of the images, and of the whole.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {"model_type": "llama"},
        _SIGHT | {"model_type": "clip_vision_model"},
        {"image_token_index": 270},
    ),
    "gemma3": (
        {"model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 8},
        _SIGHT | {"model_type": "siglip_vision_model"},
        {"image_token_index": 270, "mm_tokens_per_image": 4},
    ),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": 8},
        _SIGHT | {"model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 270},
    ),
    "qwen2_5_vl": (
        {"rope_parameters": _MROPE},
        _QWEN_SIGHT | {"out_hidden_size": 32},
        {"image_token_id": 270, "video_token_id": 271, "tie_word_embeddings": False},
    ),
    "qwen3_vl": (
        {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
        _QWEN_SIGHT | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
        {"image_token_id": 270, "video_token_id": 271, "tie_word_embeddings": True},
    ),
    "llama4": (
        {
            "model_type": "llama4_text",
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 16,
        },
        _SIGHT | {"model_type": "llama4_vision_model", "vision_output_dim": 32,
                  "projector_input_dim": 32, "projector_output_dim": 32},
        {"image_token_index": 270},
    ),
}  # fmt: skip


def whole(family: str) -> Any:
    text, sight, more = MODELS[family]
    config = CONFIG_MAPPING[family](text_config=_TEXT | text, vision_config=sight, **more)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
                if parameter.dim() == 1:
                    parameter.mul_(0.2).add_(1)
    return network.eval()


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    network = whole(request.param)
    network.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return network, tmp_path


PROMPT = [3 + (7 * i * i + i) % 200 for i in range(21)]


def theirs(network: Any, tokens: list[int], new: int) -> list[int]:
    if network.config.model_type == "llama4":  # in transformers 5.24 it fails without images
        network = network.language_model
    tokens = list(tokens)
    for _ in range(new):
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[-new:]


@pytest.mark.one_in(3)
def test_its_text_is_that_of_the_whole_model(
    saved: tuple[Any, Path], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The weights of the vision model are not reported, and images are refused by name."""
    network, path = saved
    caplog.set_level(logging.INFO, "keyhole")
    llm = LLM(path, device="cpu", dtype="float32", page_size=8)
    family = network.config.model_type
    assert f"({family}) also reads images; only its language model" in caplog.text
    shown = "".join(capfd.readouterr())
    assert "vision" not in shown
    assert "visual" not in shown
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    found = llm.generate({"prompt_token_ids": PROMPT}, params)
    assert found.token_ids == theirs(network, PROMPT, 8)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}
    with pytest.raises(RequestError, match=r"type 'image_url', but only text is supported"):
        llm.chat([message], params)


def test_names_of_weights_as_released(tmp_path: Path) -> None:
    """Older checkpoints have the whole language model, with its head, below one name."""
    network = whole("llava")
    network.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {}
    for name, weight in weights.items():
        bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        if "vision" in name or "projector" in name:
            old[name.removeprefix("model.")] = weight
        else:
            old["language_model." + ("" if "lm_head" in bare else "model.") + bare] = weight
    assert "language_model.model.layers.0.self_attn.q_proj.weight" in old
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    llm = LLM(tmp_path, device="cpu", dtype="float32")
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    assert llm.generate({"prompt_token_ids": PROMPT}, params).token_ids == theirs(
        network, PROMPT, 8
    )


@pytest.mark.parametrize(("family", "is_flat"), [("gemma3", False), ("qwen2_5_vl", True)])
def test_its_plan_counts_the_language_model_only(
    tmp_path: Path, family: str, is_flat: bool
) -> None:
    """In a flat config, as Qwen2.5-VL was released with, the vision model was counted, too."""
    network = whole(family)
    network.save_pretrained(tmp_path)
    if is_flat:
        path = tmp_path / "config.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields.pop("text_config") | fields))
    planned = read(tmp_path)
    assert len(planned.layers) == 3
    parts = (network.model.language_model, network.lm_head)
    own = {p.data_ptr(): p.numel() for part in parts for p in part.parameters()}
    assert planned.num_parameters == sum(own.values())


def test_a_missing_weight_of_the_text_is_named(tmp_path: Path) -> None:
    whole("mistral3").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(key for key in weights if key.endswith("layers.1.mlp.up_proj.weight"))
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing .*layers\.1\.mlp\.up_proj"):
        LLM(tmp_path, device="cpu")


def test_a_model_without_a_class_for_its_text_is_refused(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["mllama"]()
    assert text_part(config) is config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"\(mllama\) consists of several models"):
        LLM(tmp_path, device="cpu")


def test_a_text_whose_config_says_nothing_of_a_tied_head() -> None:
    """Inkling's ended in an AttributeError, where its kind of attention is refused."""
    assert text_part(CONFIG_MAPPING["inkling_mm_model"]()).model_type == "inkling_text"


def test_a_model_that_reads_the_prompt_in_both_directions_is_no_text_model() -> None:
    config = CONFIG_MAPPING["paligemma"]()
    assert text_part(config) is config


@pytest.mark.slow
def test_the_table_measures_the_language_model() -> None:
    assert measure_family("gemma3").exact


def test_modules_that_are_not_quantised_have_the_names_of_the_text() -> None:
    """A checkpoint with a layer in full precision was said to be damaged."""
    text, sight, whole = MODELS["llava"]
    config = CONFIG_MAPPING["llava"](text_config=_TEXT | text, vision_config=sight, **whole)
    names = {
        "model.language_model.layers.0.mlp.down_proj": "model.layers.0.mlp.down_proj",
        "language_model.model.layers.1": "model.layers.1",
        "language_model.lm_head": "lm_head",
        "lm_head": "lm_head",
        "model.vision_tower.layer": "model.vision_tower.layer",
    }
    config.quantization_config = {"quant_method": "compressed-tensors", "ignore": [*names]}
    found = text_part(config).quantization_config
    assert found == {"quant_method": "compressed-tensors", "ignore": [*names.values()]}
    assert config.quantization_config["ignore"] == [*names]
