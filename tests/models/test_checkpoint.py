"""A model's files say what transformers makes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig, OPTConfig

from keyhole.errors import ModelError, UnknownNameError
from keyhole.models import checkpoint, families
from keyhole.models.loading import load
from keyhole.models.locate import locate
from keyhole.models.model_config import read_config
from tests.checkpoints import KINDS, make_config, make_model, make_network


def stored(kind: str, **overrides: Any) -> dict[str, Any]:
    """A config.json, as a dictionary."""
    return json.loads(make_config(kind, **overrides).to_json_string())


def folder(path: Path, fields: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    return path


def test_a_family_with_other_names_of_fields_is_read(tmp_path: Path) -> None:
    config = OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4,
        word_embed_proj_dim=32,
    )  # fmt: skip
    path = folder(tmp_path / "model", json.loads(config.to_json_string()))
    found = checkpoint.read(path)
    network = AutoModelForCausalLM.from_config(config)
    assert found.num_parameters == sum(p.numel() for p in network.parameters())
    last = network.model.decoder.layers[-1]
    assert found.layer_parameters == sum(p.numel() for p in last.parameters())
    assert found.layers == families.layouts(config)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_weights_and_length_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = make_config(kind)
    ours = checkpoint.read(folder(tmp_path / kind, stored(kind)))
    assert ours.layers == families.layouts(theirs)
    assert ours.max_length == families.max_length(theirs, families.rope_lengths(theirs))[0]
    assert ours.num_query_heads == theirs.num_attention_heads
    assert ours.num_parameters == _numel(make_network(theirs))
    assert ours.counted_from == "the config"


def test_layers_with_their_own_number_of_kv_heads_are_read(tmp_path: Path) -> None:
    """The plan for Gemma 4's 31B ended in a traceback."""
    fewer = {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    config = Gemma4TextConfig(num_hidden_layers=6, **fewer)
    found = checkpoint.read(folder(tmp_path / "model", json.loads(config.to_json_string())))
    assert [layer.num_kv_heads for layer in found.layers] == [4] * 5 + [2]


@pytest.mark.parametrize("kind", KINDS)
def test_headers_count_what_a_model_loads(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path)
    ours = checkpoint.read(path)
    assert ours.counted_from == "the weights' headers"
    assert ours.num_parameters == _numel(make_network(make_config(kind)))
    assert (ours.dtype, ours.itemsize) == ("float32", 4)
    assert ours.name == Path(path).name
    assert checkpoint.read(path, "bfloat16").itemsize == 2


def test_shards_count_together_and_only_when_all_are_there(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", stored("llama"))
    weights = {"model.layers.0.a": torch.zeros(2, 3), "model.layers.1.a": torch.zeros(5)}
    # Layers beyond the last are not loaded.
    weights["model.layers.4.a"] = torch.zeros(100)
    files = {name: f"part-{i}.safetensors" for i, name in enumerate(weights)}
    for name, file in files.items():
        save_file({name: weights[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert checkpoint.read(path).num_parameters == 11
    (path / "part-1.safetensors").unlink()
    assert checkpoint.read(path).counted_from == "the config"


def test_tied_and_quantised_weights_are_counted_as_they_are_loaded(tmp_path: Path) -> None:
    fields = stored("llama", tie_word_embeddings=True)
    path = folder(tmp_path / "model", fields)
    weights = {"model.embed_tokens.weight": torch.zeros(7), "lm_head.weight": torch.zeros(7)}
    save_file(weights, path / "model.safetensors")
    assert checkpoint.read(path).num_parameters == 7
    folder(path, fields | {"quantization_config": {"quant_method": "mxfp4"}})
    assert checkpoint.read(path).counted_from == "the config"


def test_a_dtype_is_the_files_unless_it_is_given(tmp_path: Path) -> None:
    fields = stored("llama") | {"dtype": None}
    path = folder(tmp_path / "model", fields)
    assert checkpoint.read(path).dtype == "float32"
    save_file({"a": torch.zeros(1, dtype=torch.float16)}, path / "model.safetensors")
    assert checkpoint.read(path).dtype == "float16"
    folder(path, fields | {"torch_dtype": "bfloat16"})
    assert checkpoint.read(path).dtype == "bfloat16"
    assert checkpoint.read(path, "float32").dtype == "float32"
    with pytest.raises(UnknownNameError, match=r"unknown dtype 'float8'"):
        checkpoint.read(path, "float8")
    for name, same in (("half", "float16"), ("float", "float32")):  # only a plan refused them
        folder(path, fields | {"dtype": name})
        assert checkpoint.read(path).dtype == same
    folder(path, fields | {"dtype": "float8_e4m3fn"})
    with pytest.raises(ModelError, match="dtype 'float8_e4m3fn'; give one of float32"):
        checkpoint.read(path)


def test_older_files_name_rope_otherwise(tmp_path: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    fields = stored("phi3") | {"original_max_position_embeddings": 256, "rope_scaling": scaling}
    del fields["rope_parameters"]
    path = folder(tmp_path / "model", fields)
    rope = families.rope_lengths(read_config(locate(path)))
    assert rope is not None
    assert (rope.kind, rope.threshold) == ("longrope", 256)
    assert checkpoint.read(path).max_length == rope.longest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "has no attention layers, only linear_attention"),
        ({"model_type": "rwkv"}, "has no field 'num_attention_heads'"),
        ({}, "cannot be read: ValueError: Unrecognized model"),
        ([], "must be a JSON object"),
        ({"model_type": "llama", "num_hidden_layers": "two"}, "expected int, got str"),
        (stored("llama") | {"intermediate_size": -5}, "says intermediate_size -5"),
        # Only loading refused it.
        (
            stored("llama") | {"rope_parameters": {"rope_type": "yarm"}},
            r"has an unknown rope_type 'yarm'.* 'yarn'",
        ),
        # A traceback.
        (
            stored("llama")
            | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": math.inf}},
            "cannot be read: OverflowError",
        ),
        # It said "unhashable type".
        (
            stored("llama") | {"rope_parameters": {"rope_type": ["yarn"]}},
            r"has an unknown rope_type \"\['yarn'\]\"",
        ),
    ],
)
def test_what_is_no_model_is_refused(fields: object, message: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", fields)
    with pytest.raises(ModelError, match=message):
        checkpoint.read(path)


def test_attention_that_is_not_installed_does_not_matter(tmp_path: Path) -> None:
    """A plan ended in an ImportError, where the model runs."""
    fields = stored("llama") | {"attn_implementation": "flash_attention_2"}
    assert checkpoint.read(folder(tmp_path / "model", fields)).num_parameters > 0


def test_loading_names_an_unknown_rope_type(tmp_path: Path) -> None:
    """Without the gate it said "KeyError: 'yarm'"."""
    path = Path(make_model("llama", tmp_path))
    folder(path, stored("llama") | {"rope_parameters": {"rope_type": "yarm"}})
    with pytest.raises(ModelError, match=r"cannot be loaded: unknown rope_type 'yarm'.* 'yarn'"):
        load(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", stored("llama"))
    (path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"'model.safetensors' is damaged"):
        checkpoint.read(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read: JSONDecodeError"):
        checkpoint.read(path)


def test_an_unknown_model_is_named_as_by_load(tmp_path: Path) -> None:
    folder(tmp_path / "llama-0", stored("llama"))
    with pytest.raises(ModelError, match=r"unknown model '.*': it is not a folder \(did you mean"):
        checkpoint.read(tmp_path / "llama-1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"holds no model: it has no config\.json"):
        checkpoint.read(tmp_path / "empty")


def _numel(network: Any) -> int:
    """Weights, and the buffers that are stored with them; tied ones once."""
    stored = {id(p): p.numel() for p in network.parameters()}
    names = set(network.state_dict())
    stored |= {id(b): b.numel() for name, b in network.named_buffers() if name in names}
    return sum(stored.values())
