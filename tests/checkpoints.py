"""Tiny checkpoints with random weights, one kind per attention family, for tests of every part.

    path = make_model("qwen3", tmp_path)                       # token ids only
    path = make_model("llama", tmp_path, tokenizer=True)       # text too: one token per byte
    path = make_model("llama", tmp_path, num_hidden_layers=8)  # any field of its config

Weights are drawn wide enough that attention is far from uniform, so that a wrong key is seen in the
logits. The same arguments always give the same weights.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTBigCodeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

#: Special tokens of every checkpoint, with or without a tokenizer; bytes come after them.
PAD, BOS, EOS = 0, 1, 2
#: Three special tokens and 256 bytes, rounded up.
VOCAB_SIZE = 272

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

_SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_COMMON = _SPECIAL | {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
_HEADS = _COMMON | {"head_dim": 8}
_WINDOW = {"sliding_window": 8}
_MIXED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2}


def _llama(heads: int, kv_heads: int) -> tuple[type[PreTrainedConfig], dict[str, Any]]:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    # As wide as in the others relative to the hidden size: wider ones amplify rounding itself.
    spread = {"hidden_size": 8 * heads, "initializer_range": 0.25 * (32 / (8 * heads)) ** 0.5}
    return LlamaConfig, _HEADS | shape | spread


KINDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": _llama(4, 2),
    "llama_mha": _llama(4, 4),
    "llama_group3": _llama(6, 2),
    "llama_group4": _llama(8, 2),
    "llama_group7": _llama(14, 2),
    "llama_mqa": _llama(4, 1),
    "qwen2": (Qwen2Config, _COMMON),
    "qwen2_sliding": (
        Qwen2Config,
        _COMMON | _WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3Config, _HEADS),
    "mistral_sliding": (MistralConfig, _HEADS | _WINDOW),
    "phi3": (Phi3Config, _COMMON),
    "gemma2": (
        Gemma2Config,
        _HEADS | _WINDOW | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": (Gemma3TextConfig, _HEADS | _MIXED | {"query_pre_attn_scalar": 8}),
    "gpt_oss": (
        GptOssConfig,
        _HEADS
        | _MIXED
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        _COMMON
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "gpt_bigcode": (
        GPTBigCodeConfig,
        _SPECIAL
        | {
            "vocab_size": VOCAB_SIZE,
            "n_positions": 512,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "multi_query": True,
            "initializer_range": 0.25,
        },
    ),
}


def make_config(kind: str, **overrides: Any) -> PreTrainedConfig:
    """The config of a kind with some of its fields changed."""
    cls, fields = KINDS[kind]
    return cls(**copy.deepcopy(fields | overrides))


def make_network(config: PreTrainedConfig, *, seed: int = 0) -> Any:
    """A float32 model of transformers with random weights, eager attention, in eval mode.

    Norms, biases and sinks are random too: where they are 1 or 0, forgetting them is not seen.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            for name, weight in network.named_parameters():
                if name.endswith("sinks"):
                    weight.normal_()
                elif weight.dim() == 1:
                    weight.add_(torch.randn_like(weight), alpha=0.1)
    return network.eval()


#: The files of each checkpoint that was made, by what was asked for: writing them again is ten
#: times as quick as making them, and many tests ask for the same.
_MADE: dict[str, dict[str, bytes]] = {}


def make_model(
    kind: str,
    folder: Path,
    *,
    tokenizer: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> str:
    """Writes a checkpoint into a new folder below `folder`; returns its path."""
    number = len(list(folder.glob(f"{kind}-*"))) if folder.is_dir() else 0
    path = folder / f"{kind}-{number}"
    asked = repr((kind, tokenizer, dtype, seed, sorted(overrides.items())))
    if asked not in _MADE:
        network = make_network(make_config(kind, **overrides), seed=seed)
        network.to(dtype).save_pretrained(path)
        if tokenizer:
            make_tokenizer().save_pretrained(path)
        _MADE[asked] = {file.name: file.read_bytes() for file in path.iterdir()}
    path.mkdir(parents=True, exist_ok=True)
    for name, content in _MADE[asked].items():
        (path / name).write_bytes(content)
    return str(path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, a BOS before every text, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    vocab |= {letter: len(vocab) + i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )
