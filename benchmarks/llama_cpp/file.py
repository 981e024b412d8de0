"""Writes the benchmark's weights as a GGUF file for llama.cpp: float16, norms in float32."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.llama_cpp.state import interleaved
from benchmarks.llama_cpp.worker import WorkerProcess
from keyhole.bench.model import Weights

#: Names of a layer's tensors in transformers' Llama and in llama.cpp.
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MOSTLY_F16 = 1  # llama.cpp's code for such a file


class LlamaFile:
    """A folder for the file; a context manager that removes it. ConfigError without llama.cpp."""

    def __init__(self) -> None:
        with WorkerProcess() as worker:
            self.about = worker.call("about", {})
        self._folder = tempfile.TemporaryDirectory(prefix="keyhole-bench-")
        self.path = Path(self._folder.name) / "weights.gguf"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def write(self, weights: Weights) -> None:
        """Writes the weights, one copy at a time."""
        named = dict(tensors(weights.transformers))
        about = [
            {"name": name, "shape": list(tensor.shape), "dtype": _dtype(tensor)}
            for name, tensor in named.items()
        ]
        config = weights.transformers.config
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        with WorkerProcess() as worker:
            worker.call(
                "write",
                {"path": str(self.path), "fields": fields(config), "tensors": about},
                (_bytes(name, tensor, heads) for name, tensor in named.items()),
            )

    def quantise(self) -> None:
        """Packs the weights as Q4_0, as llama.cpp's own program does; the first file is removed."""
        target = self.path.with_name("few-bits.gguf")
        with WorkerProcess() as worker:
            worker.call("quantise", {"path": str(self.path), "target": str(target)})
        self.path.unlink()
        self.path = target

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self.path.stat().st_size


def fields(config: Any) -> dict[str, Any]:
    """The metadata of a GGUF file for a LlamaConfig."""
    said = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    return {
        "general.architecture": "llama",
        "general.file_type": _MOSTLY_F16,
        "tokenizer.ggml.model": "no_vocab",
    } | {f"llama.{name}": value for name, value in said.items()}


def tensors(network: Any) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp's name and transformers' tensor of every weight."""
    yield "token_embd.weight", network.model.embed_tokens.weight
    for number, layer in enumerate(network.model.layers):
        for theirs, name in _LAYER.items():
            yield f"blk.{number}.{name}.weight", layer.get_parameter(f"{theirs}.weight")
    yield "output_norm.weight", network.model.norm.weight
    if not network.config.tie_word_embeddings:
        yield "output.weight", network.lm_head.weight


def _dtype(tensor: Tensor) -> str:
    return "float32" if tensor.dim() == 1 else "float16"


def _bytes(name: str, tensor: Tensor, heads: dict[str, int]) -> memoryview:
    kind = name.rpartition("attn_")[2].removesuffix(".weight")
    if kind in heads:  # rows reordered for llama.cpp's RoPE
        tensor = interleaved(tensor.unflatten(0, (heads[kind], -1)), 1).flatten(0, 1)
    dtype = getattr(torch, _dtype(tensor))
    return tensor.detach().to("cpu", dtype).contiguous().numpy().data.cast("B")
