"""Models that cannot run are refused by name, with what is wrong and what would be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, OpenAIGPTConfig

from keyhole import LLM, ModelError, RequestError, SamplingParams
from keyhole.models.checkpoint import read as read_shape
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


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode"])
def test_layers_beyond_those_of_the_config_are_refused(family: str, tmp_path: Path) -> None:
    """The model ran without its last layers, without a word."""
    folder = Path(make_model(family, tmp_path))
    edit(folder / "config.json", num_hidden_layers=2, n_layer=2, layer_types=None)
    said = r"has 4 layers, but its config says num_hidden_layers 2: set it to 4 in config\.json"
    with pytest.raises(ModelError, match=rf"checkpoint '.*{folder.name}' {said}"):
        load(folder)


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path: Path) -> None:
    """DeepSeek-V3 has one as its layer 61, which its class lists, smaller models say so."""
    folder = Path(make_model("deepseek_v3", tmp_path))
    weights = load_file(folder / "model.safetensors")
    last = {k: v for k, v in weights.items() if k.startswith("model.layers.3.")}
    assert last

    def with_layer(number: int) -> None:
        more = {k.replace(".3.", f".{number}.", 1): v.clone() for k, v in last.items()}
        save_file(weights | more, folder / "model.safetensors", {"format": "pt"})

    config = folder / "config.json"
    edit(config, num_nextn_predict_layers=0)
    with_layer(61)
    load(folder, device="cpu")
    with_layer(4)
    with pytest.raises(ModelError, match="has 5 layers, but its config says num_hidden_layers 4"):
        load(folder, device="cpu")
    edit(config, num_nextn_predict_layers=1)
    load(folder, device="cpu")


def test_an_unsupported_family_is_refused_by_name(tmp_path: Path) -> None:
    config = OpenAIGPTConfig(vocab_size=64, n_embd=16, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="family 'openai-gpt', which Keyhole cannot run"):
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
    assert "has ids up to 258, but the model has a vocabulary of 100" in caplog.text
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    assert len(llm.generate("AB", params).token_ids) == 1
    with pytest.raises(RequestError, match=r"token id \d+ is not one of this model's, 0 to 99"):
        llm.generate("é", params)
    padding = SamplingParams(max_tokens=1, stop_token_ids=(258,))  # never generated
    assert len(llm.generate("AB", padding).token_ids) <= 1
    with pytest.raises(RequestError, match="stop_token_ids: token id 259 is not one"):
        llm.generate("AB", SamplingParams(stop_token_ids=(258, 259)))
    # Also never generated; an IndexError in the step of all requests.
    unknown = SamplingParams(max_tokens=4, bad_words=("é", "A"), ignore_eos=True)
    assert "A" not in llm.generate("AB", unknown).text


def test_several_end_tokens_all_end(tmp_path: Path) -> None:
    path = Path(make_model("llama", tmp_path))
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    ids = LLM(path, device="cpu").generate({"prompt_token_ids": [9, 8, 7]}, greedy).token_ids
    edit(path / "generation_config.json", eos_token_id=[2, ids[3]])
    llm = LLM(path, device="cpu")
    result = llm.generate({"prompt_token_ids": [9, 8, 7]}, SamplingParams(temperature=0))
    assert result.token_ids == ids[: ids.index(ids[3]) + 1]
    assert result.finish_reason == "stop"


def test_end_tokens_that_the_model_lacks_are_none(checkpoint: Path) -> None:
    """-1 means none in some configs; a request with a grammar ended in a ValueError."""
    edit(checkpoint / "generation_config.json", eos_token_id=[-1, 2, 5000])
    assert load(checkpoint).eos_token_ids == {2}


def in_shards(checkpoint: Path) -> list[Path]:
    """The checkpoint's weights in several files."""
    network = AutoModelForCausalLM.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    network.save_pretrained(checkpoint, max_shard_size="40KB")
    shards = sorted(checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def test_a_damaged_file_is_named_with_the_remedy(checkpoint: Path) -> None:
    """The message named the folder alone: of thirty files, which one should be downloaded again?"""
    shard = in_shards(checkpoint)[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9])
    with pytest.raises(ModelError, match=rf"{shard.name} is damaged \(.*\): download it again"):
        load(checkpoint)
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=rf"{shard.name} is a pointer of Git LFS: run `git lfs"):
        load(checkpoint)
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name} is missing: download it"):
        load(checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    for damaged in ("[]", json.dumps({"weight_map": {}})):
        index.write_text(damaged)
        with pytest.raises(ModelError, match=r"index\.json is damaged: download it again"):
            load(checkpoint)
    index.unlink()
    with pytest.raises(ModelError, match=r"index\.json is missing: download it"):
        load(checkpoint)


def test_a_pointer_to_weights_of_pytorch_is_named(checkpoint: Path) -> None:
    """The advice was to load it without `weights_only`."""
    (checkpoint / "model.safetensors").unlink()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (checkpoint / "pytorch_model.bin").write_text(pointer)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pointer of Git LFS: run `git l"):
        load(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"noise")
    with pytest.raises(ModelError, match=r"cannot be loaded: (?!pytorch_model)"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_of_a_tokenizer_is_named_with_the_remedy(
    name: str, checkpoint: Path
) -> None:
    """The message named the folder alone, and told nothing that helps."""
    file = checkpoint / name
    file.write_bytes(file.read_bytes()[:-9])
    said = rf"tokenizer of .*: {name} is damaged \(.*\): download or copy it again"
    with pytest.raises(ModelError, match=said):
        load(checkpoint)
    with pytest.raises(ModelError, match=said):
        load("tiny", tokenizer=checkpoint)
    with pytest.raises(ModelError, match=r"unknown tokenizer '.*/no': it is not a folder"):
        load("tiny", tokenizer=checkpoint / "no")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=rf"{name} is a pointer of Git LFS: run `git lfs pull`"):
        load(checkpoint)


def test_scales_that_no_config_explains_are_refused(checkpoint: Path) -> None:
    """Weights in FP8 were taken for plain numbers, without their scales: texts were nonsense."""
    weights = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    scale = weights[name].abs().max() / 448
    weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
    weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"first scale is model\.layers\.1.*no quanti"):
        load(checkpoint, dtype="float32")


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn"])
def test_a_stored_dtype_that_is_not_computed_with_is_named(checkpoint: Path, dtype: str) -> None:
    """float64 ran, although dtype="float64" is refused; float8 failed with a TypeError of torch."""
    edit(checkpoint / "config.json", dtype=dtype)
    with pytest.raises(ModelError, match=rf"are in {dtype}; set dtype= to one of 'float32'"):
        load(checkpoint)
    assert load(checkpoint, dtype="float32").dtype == torch.float32


def test_weights_of_a_dtype_that_no_config_states_are_named(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    save_file({k: v.double() for k, v in weights.items()}, checkpoint / "model.safetensors")
    edit(checkpoint / "config.json", dtype=None)
    with pytest.raises(ModelError, match="are in float64; set dtype="):
        load(checkpoint)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "must be a JSON object"),
        ('{"do_sample": true, "temperature": -1.0}', "temperature -1.0 must be at least 0"),
        ('{"eos_token_id": "2"}', "eos_token_id '2' must be a token's number"),
        ('{"eos_token_id": [2, "9"]}', "or a list of them"),
        ('{"eos_token_id": [2, null]}', r"eos_token_id \[2, None\] must be"),  # a TypeError
        # transformers' own checks were reported as an error of the weights.
        ('{"max_new_tokens": -3}', "max_new_tokens` must be greater than 0, but is -3"),
        ('{"max_new_tokens": "20"}', "TypeError"),
        ('{"cache_implementation": "none"}', "Invalid `cache_implementation`"),
    ],
)
def test_damaged_defaults_are_named(checkpoint: Path, text: str, reason: str) -> None:
    """End tokens and sampling were the library's, without a word, or failed with each request."""
    (checkpoint / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"generation_config\.json' is damaged: .*{reason}"):
        load(checkpoint)


def test_a_quantisation_without_a_method_is_named(checkpoint: Path) -> None:
    """It ended in transformers' ValueError; a plan counted the weights as plain ones."""
    edit(checkpoint / "config.json", quantization_config={"bits": 4})
    for read in (load, read_shape):
        with pytest.raises(ModelError, match=r"quantization_config \{'bits': 4\}.* delete it if"):
            read(checkpoint)


def test_a_padding_token_beyond_the_vocabulary_is_named(checkpoint: Path) -> None:
    """Loading named neither it nor the file, and a plan ended in an AssertionError."""
    edit(checkpoint / "config.json", pad_token_id=272)
    for read in (load, read_shape):
        with pytest.raises(ModelError, match=r"pad_token_id 272, .* vocab_size 272; set it to nul"):
            read(checkpoint)


def test_files_of_a_tokenizer_that_fail_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    """Some only fail when a text is encoded, which ended in a TypeError."""
    path = Path(make_model("llama", tmp_path, tokenizer=True))
    edit(path / "tokenizer_config.json", model_max_length="512")
    with pytest.raises(RequestError, match=r"tokenizer fails on the text: TypeError: .*; corr"):
        LLM(path, device="cpu").generate("a text")
    edit(path / "tokenizer_config.json", pad_token=5)
    with pytest.raises(ModelError, match=r"cannot be loaded: .* pad_token has to be .*; corr"):
        load(path)


def test_a_reason_in_the_second_line_is_told(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", num_attention_heads="four")
    with pytest.raises(ModelError, match=r"'num_attention_heads': TypeError: .*expected int"):
        load(checkpoint)
