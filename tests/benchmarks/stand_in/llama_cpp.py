"""A stand-in for llama.cpp in numpy, for small Llamas: what the worker uses of `llama_cpp`.

It has llama.cpp's own conventions: RoPE turns neighbours, the state of a sequence is read as
`llama_kv_cache::state_read` reads it, a missing output matrix is that of the tokens.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

__version__ = "stand-in"
GGML_TYPE_F16 = LLAMA_LOAD_MODE_MMAP = LLAMA_FLASH_ATTN_TYPE_ENABLED = 1
LLAMA_FLASH_ATTN_TYPE_DISABLED = 0
_CELLS = 256


class Model:
    def __init__(self, path: bytes) -> None:
        fields, self.tensors = pickle.loads(Path(path.decode()).read_bytes())
        assert (fields["general.architecture"], fields["tokenizer.ggml.model"]) == (
            "llama",
            "no_vocab",
        )
        self.fields = {name.removeprefix("llama."): value for name, value in fields.items()}
        self.layers = self.fields["block_count"]
        self.heads = self.fields["attention.head_count"]
        self.kv_heads = self.fields["attention.head_count_kv"]
        self.dim = self.fields["attention.key_length"]

    def weight(self, name: str) -> Any:
        return self.tensors[f"{name}.weight"].astype(np.float32)

    def norm(self, x: Any, name: str) -> Any:
        epsilon = self.fields["attention.layer_norm_rms_epsilon"]
        return x / np.sqrt((x * x).mean() + epsilon) * self.weight(name)

    def turn(self, heads: Any, position: int) -> Any:
        """RoPE over neighbours."""
        powers = np.arange(self.dim // 2) * 2 / self.dim
        angle = position / self.fields["rope.freq_base"] ** powers
        even, odd = heads[:, ::2], heads[:, 1::2]
        turned = np.empty_like(heads)
        turned[:, ::2] = even * np.cos(angle) - odd * np.sin(angle)
        turned[:, 1::2] = even * np.sin(angle) + odd * np.cos(angle)
        return turned

    def step(self, token: int, position: int, cache: Any) -> Any:
        """Logits; cache: [2, L, cells, Hkv, D] in float16, written at `position`."""
        x = self.weight("token_embd")[token]
        for layer in range(self.layers):
            own = f"blk.{layer}."
            h = self.norm(x, own + "attn_norm")
            q, k, v = (
                (self.weight(f"{own}attn_{kind}") @ h).reshape(-1, self.dim) for kind in "qkv"
            )
            assert (len(q), len(k)) == (self.heads, self.kv_heads)
            q = self.turn(q, position)
            cache[:, layer, position] = self.turn(k, position), v
            keys, values = cache[:, layer, : position + 1].astype(np.float32)
            keys, values = (
                np.repeat(side, self.heads // self.kv_heads, 1) for side in (keys, values)
            )
            scores = np.einsum("hd,nhd->hn", q, keys) / np.sqrt(self.dim)
            scores = np.exp(scores - scores.max(1, keepdims=True))
            scores /= scores.sum(1, keepdims=True)
            mixed = np.einsum("hn,nhd->hd", scores, values).reshape(-1)
            x = x + self.weight(own + "attn_output") @ mixed
            h = self.norm(x, own + "ffn_norm")
            gate, up = (self.weight(f"{own}ffn_{kind}") @ h for kind in ("gate", "up"))
            x = x + self.weight(own + "ffn_down") @ (gate / (1 + np.exp(-gate)) * up)
        output = "output" if "output.weight" in self.tensors else "token_embd"
        return self.weight(output) @ self.norm(x, "output_norm")


class Context:
    def __init__(self, model: Model, params: Any) -> None:
        assert (params.type_k, params.type_v, params.kv_unified) == (1, 1, False)
        assert params.n_threads == params.n_threads_batch > 0
        self.model, self.transposed = model, not params.flash_attn_type
        self.sequences, self.cells = params.n_seq_max, params.n_ctx // params.n_seq_max
        assert self.cells % _CELLS == 0
        size = (self.sequences, 2, model.layers, self.cells, model.kv_heads, model.dim)
        self.cache = np.full(size, np.nan, np.float16)  # what was not filled must not be read
        self.lengths = [0] * self.sequences
        self.logits: list[Any] = []

    def read(self, state: bytes, sequence: int) -> int:
        """Takes a state; gives the bytes that it has."""
        model, place = self.model, 0

        def unpack(form: str) -> tuple[int, ...]:
            nonlocal place
            place += struct.calcsize(form)
            return struct.unpack(form, state[place - struct.calcsize(form) : place])

        def numbers(*size: int) -> Any:
            nonlocal place
            place += 2 * int(np.prod(size))
            return np.frombuffer(state[:place], "<f2")[-int(np.prod(size)) :].reshape(size)

        assert unpack("<IiI") == (0xAF143CD8, sequence, self.sequences)
        assert unpack(f"<{sequence}I") == (0,) * sequence
        (length,) = unpack("<I")
        for position in range(length):
            assert unpack("<iIi") == (position, 1, sequence)
        assert unpack("<II") == (self.transposed, model.layers)
        width = model.kv_heads * model.dim
        for layer in range(model.layers):
            assert unpack("<iQ") == (1, 2 * width)
            keys = numbers(length, model.kv_heads, model.dim)
            self.cache[sequence, 0, layer, :length] = keys
        for layer in range(model.layers):
            if self.transposed:
                assert unpack("<iII") == (1, 2, width)
                values = numbers(model.kv_heads, model.dim, length).transpose(2, 0, 1)
            else:
                assert unpack("<iQ") == (1, 2 * width)
                values = numbers(length, model.kv_heads, model.dim)
            self.cache[sequence, 1, layer, :length] = values
        after = self.sequences - 1 - sequence
        assert unpack(f"<{after}I") == (0,) * after
        self.lengths[sequence] = length
        return place


def llama_backend_init() -> None: ...


def llama_print_system_info() -> bytes:
    return b"numpy"


def llama_model_default_params() -> Any:
    return SimpleNamespace()


llama_context_default_params = llama_model_default_params


def llama_model_load_from_file(path: bytes, params: Any) -> Model | None:
    return Model(path) if Path(path.decode()).is_file() else None


llama_init_from_model = Context


def llama_model_get_vocab(model: Model) -> Model:
    return model


def llama_vocab_n_tokens(model: Model) -> int:
    return int(model.fields["vocab_size"])


def llama_n_ctx(context: Context) -> int:
    return context.cells * context.sequences


def llama_batch_init(size: int, _: int, owners: int) -> Any:
    batch = SimpleNamespace(n_tokens=0, seq_id=[[0] * owners for _ in range(size)])
    for name in ("token", "pos", "n_seq_id", "logits"):
        setattr(batch, name, [0] * size)
    return batch


def llama_state_seq_set_data(context: Context, source: Any, size: int, sequence: int) -> int:
    return context.read(bytes(source)[:size], sequence)


def llama_decode(context: Context, batch: Any) -> int:
    context.logits = []
    for i in range(batch.n_tokens):
        (sequence,), position = batch.seq_id[i], batch.pos[i]
        assert (batch.n_seq_id[i], batch.logits[i]) == (1, 1)
        assert context.lengths[sequence] == position, "a token must follow the last one"
        logits = context.model.step(batch.token[i], position, context.cache[sequence])
        context.lengths[sequence] += 1
        context.logits.append(logits.astype(np.float32))
    return 0


def llama_get_logits_ith(context: Context, i: int) -> Any:
    return context.logits[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def llama_get_memory(context: Context) -> Context:
    return context


def llama_memory_seq_rm(context: Context, sequence: int, first: int, last: int) -> bool:
    assert last == -1
    context.lengths[sequence] = min(context.lengths[sequence], first)
    return True
