"""GGUF files of several families: what transformers does not read of them is read, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    NemotronConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from keyhole import LLM, ModelError
from keyhole.models.loading import load
from keyhole.models.locate import locate
from keyhole.models.model_config import read_config
from keyhole.models.weights import gguf_file
from keyhole.models.weights.packing import BlockLinear
from tests.checkpoints import VOCAB_SIZE, make_network, make_tokenizer
from tests.models.compared import add, assert_exact, logits_of, random_texts, run

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEADS = SMALL | {"head_dim": 16}
_GEMMA = _HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 16}
_OLDER = {"vocab_size": VOCAB_SIZE, "n_layer": 2, "n_head": 4, "initializer_range": 0.15}


def rope(base: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base} | more}


#: What is not in all models of a family: another base of RoPE, share of a head, size or scale.
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config(**SMALL, **rope(1e6)),
    "qwen3": Qwen3Config(**_HEADS, **rope(1e6)),
    "gemma2": Gemma2Config(**_GEMMA),
    "gemma3": Gemma3TextConfig(
        **_GEMMA | {"num_hidden_layers": 6},
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "starcoder2": Starcoder2Config(**SMALL, **rope(1e6)),
    "stablelm": StableLmConfig(**SMALL, **rope(1e5, partial_rotary_factor=0.5), use_qkv_bias=True),
    "nemotron": NemotronConfig(**SMALL, **rope(1e4, partial_rotary_factor=0.5)),
    "gpt2": GPT2Config(**_OLDER, n_embd=64, n_positions=256),
    "bloom": BloomConfig(**_OLDER, hidden_size=64),
}


def write(network: Any, path: Path, *, blocks: bool = False) -> None:
    """Writes the file of a model as llama.cpp's converter does; blocks: matrices in Q8_0."""
    config = network.config
    family = config.model_type.removesuffix("_text")
    writer = GGUFWriter(path, family)
    writer.add_context_length(getattr(config, "max_position_embeddings", 512))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1e-5))
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(7 if blocks else 0)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    _write_rope(writer, config)
    writer.add_tokenizer_model("gpt2")
    vocab = sorted(make_tokenizer().get_vocab().items(), key=lambda entry: entry[1])
    words = [word for word, _ in vocab] + ["th"]
    writer.add_token_list(words + [f"<unused{i}>" for i in range(config.vocab_size - len(words))])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    names = get_gguf_hf_weights_map(network, TensorProcessor())
    state = network.state_dict()
    for name, own in names.items():
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        value = _as_stored(state[own].float().numpy(), name, family, config)
        if blocks and value.ndim > 1:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_rope(writer: GGUFWriter, config: Any) -> None:
    ropes = getattr(config, "rope_parameters", None)
    if not ropes:
        return
    own = ropes.get("full_attention", ropes)
    head_dim = getattr(config, "head_dim", None)
    width = head_dim or config.hidden_size // config.num_attention_heads
    writer.add_rope_freq_base(own["rope_theta"])
    writer.add_rope_dimension_count(int(width * own.get("partial_rotary_factor", 1)))
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if own["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(own["factor"])


def _as_stored(value: Any, name: str, family: str, config: Any) -> Any:
    """A weight in the form that llama.cpp has it in."""
    if family in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return value + 1
    if family == "gpt2" and value.ndim == 2 and name.startswith("blk."):
        return np.ascontiguousarray(value.T)
    if family == "bloom" and "attn_qkv" in name:
        heads = value.reshape(config.n_head, 3, -1, *value.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1).reshape(value.shape))
    return value


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_answers_as_its_checkpoint(tmp_path: Path, name: str) -> None:
    """Some loaded with RoPE or a scale that were not theirs, others were called damaged.

    StarCoder2 had the base of another model, Gemma 3 no scaling from 4B on, Gemma's 27B the scale
    of the smaller ones, StableLM the share of a head of one of them.
    """
    network = make_network(CONFIGS[name])
    write(network, tmp_path / "small.gguf")
    texts = random_texts(1, (5, 37, 18), 4)
    llm = LLM(tmp_path / "small.gguf", device="cpu", dtype="float32", page_size=8, prefill_chunk=9)
    found = [add(llm.engine, text) for text in texts]
    run(llm.engine)
    assert_exact(found, logits_of(network, texts), 1e-4)


def test_the_largest_gemmas_have_another_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp recognises them by their number of layers, which is lowered for this test."""
    config = Gemma2Config(**_GEMMA | {"head_dim": 32, "query_pre_attn_scalar": 16})
    write(make_network(config), tmp_path / "small.gguf")
    assert read_config(locate(tmp_path)).query_pre_attn_scalar == 32
    monkeypatch.setitem(gguf_file._DEPTHS, "gemma2", config.num_hidden_layers)
    assert read_config(locate(tmp_path)).query_pre_attn_scalar == 16


@pytest.mark.parametrize("name", CONFIGS)
def test_names_of_tensors_are_those_of_transformers(name: str) -> None:
    """Which asks every module of a model; a model of 46 layers took 40 seconds."""
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(CONFIGS[name])
    processor = TensorProcessor()
    assert gguf_file._names(plain, processor) == get_gguf_hf_weights_map(plain, processor)


def test_blocks_of_bloom_are_read(tmp_path: Path) -> None:
    """Its rows of queries, keys and values could not be put in order: "damaged or cut short"."""
    write(make_network(CONFIGS["bloom"]), tmp_path / "small.gguf", blocks=True)
    kept, plain = (
        load(tmp_path / "small.gguf", "cpu", "float32", weights=way)
        for way in (None, "dequantised")
    )
    assert isinstance(kept.network.transformer.h[0].mlp.dense_h_to_4h, BlockLinear)
    texts = random_texts(1, (5, 37), 4)
    engines = [LLM(model, page_size=8).engine for model in (kept, plain)]
    found, wanted = ([add(engine, text) for text in texts] for engine in engines)
    for engine in engines:
        run(engine)
    assert_exact(found, [torch.stack(list(one.logits)) for one in wanted], 1e-4)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_tensor_without_a_place_is_refused(tmp_path: Path, blocks: bool) -> None:
    """Llama's biases of attention were left out, without a word."""
    network = make_network(LlamaConfig(**_HEADS, attention_bias=True))
    write(network, tmp_path / "small.gguf", blocks=blocks)
    with pytest.raises(ModelError, match=r"has a tensor 'blk\.0\.attn_.*\.bias', which"):
        load(tmp_path / "small.gguf", "cpu")
