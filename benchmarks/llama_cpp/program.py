"""llama.cpp as a program that executes commands; run by the Python of the peers' environment.

Each command and each answer is a line of JSON; tensors follow it as raw bytes. Nothing of Keyhole
is imported, because that environment does not have it. See `benchmarks.llama_cpp.worker`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import llama_cpp
import numpy as np

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see clear_refs in proc(5): sets the peak to the current resident size

Reply = dict[str, Any]


class LlamaWorker:
    """A model and its cache. A command is a method; its arguments are the fields of the line."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target
        self._context: Any = None
        self._batch: Any = None
        self._num_tokens = 0
        self._extra = b""

    def about(self) -> Reply:
        """Versions of the libraries."""
        features = llama_cpp.llama_print_system_info().decode().strip()
        return {"version": llama_cpp.__version__, "features": features}

    def write(self, path: str, fields: dict[str, Any], tensors: list[dict[str, Any]]) -> Reply:
        """Writes a GGUF file of fields and tensors {name, shape, dtype}; their bytes follow."""
        writer = gguf.GGUFWriter(path, fields.pop("general.architecture"))
        add: dict[type, Callable[[str, Any], None]] = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        for name, value in fields.items():
            add[type(value)](name, value)
        sizes = []
        for tensor in tensors:
            dtype = np.dtype(tensor["dtype"])
            sizes.append(int(np.prod(tensor["shape"])) * dtype.itemsize)
            writer.add_tensor_info(tensor["name"], tensor["shape"], dtype, sizes[-1])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, size in zip(tensors, sizes, strict=True):
            writer.write_tensor_data(np.frombuffer(self._read(size), np.dtype(tensor["dtype"])))
        writer.close()
        return {}

    def quantise(self, path: str, target: str) -> Reply:
        """Packs the weights of a GGUF file as Q4_0, with the defaults of llama.cpp."""
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        status = llama_cpp.llama_model_quantize(
            path.encode(), target.encode(), ctypes.byref(params)
        )
        if status:
            raise RuntimeError(f"llama_model_quantize gave {status}")
        return {}

    def load(self, path: str, cells: int, batch: int, flash: bool, threads: int) -> Reply:
        """Opens a GGUF file; each of `batch` sequences gets a cache of `cells` tokens in float16.

        Returns the bytes of this process before that, and the cells that each sequence has.
        """
        program_bytes = _bytes("VmRSS")
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = batch * cells, batch, False
        params.n_batch = params.n_ubatch = batch
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.offload_kqv = params.op_offload = False
        self._context = model and llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not load the model")
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(batch, 0, 1)
        cells = llama_cpp.llama_n_ctx(self._context) // batch
        return {"program_bytes": program_bytes, "cells": cells}

    def fill(self, sequence: int, size: int) -> Reply:
        """Loads the state of one sequence from the `size` bytes that follow."""
        state = self._read(size)
        source = (ctypes.c_uint8 * size).from_buffer(state)
        taken = llama_cpp.llama_state_seq_set_data(self._context, source, size, sequence)
        if taken != size:
            raise RuntimeError(f"llama.cpp took {taken} of {size} bytes of a sequence's state")
        return {}

    def step(self, tokens: list[int], position: int, give_logits: bool) -> Reply:
        """Decodes a token per sequence; returns milliseconds, the peak and the next greedy tokens.

        The logits [B, vocabulary] follow in float32 on request.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, i, 1
        if _CLEAR.exists():
            _CLEAR.write_text(_RESET_PEAK)
        begin = time.perf_counter()
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")
        rows = [self._logits(i) for i in range(len(tokens))]
        chosen = [int(row.argmax()) for row in rows]
        ms = 1e3 * (time.perf_counter() - begin)
        if give_logits:
            self._extra = np.stack(rows).astype(np.float32).tobytes()
        return {"ms": ms, "peak_bytes": _bytes("VmHWM"), "tokens": chosen}

    def take_back(self, position: int) -> Reply:
        """Removes all tokens from `position` on."""
        memory = llama_cpp.llama_get_memory(self._context)
        for i in range(self._batch.n_tokens):
            if not llama_cpp.llama_memory_seq_rm(memory, i, position, -1):
                raise RuntimeError("llama.cpp could not take tokens back")
        return {}

    def serve(self) -> None:
        """Executes commands until the end of the input."""
        commands: dict[str, Callable[..., Reply]] = {
            command.__name__: command
            for command in (
                self.about,
                self.write,
                self.quantise,
                self.load,
                self.fill,
                self.step,
                self.take_back,
            )
        }
        for line in iter(self._source.readline, b""):
            asked = json.loads(line)
            self._extra = b""
            try:
                reply = commands[asked["command"]](**asked["arguments"])
            except Exception as error:
                self._answer({"error": f"{type(error).__name__}: {error}"})
                raise
            self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        self._target.write(json.dumps(reply).encode() + b"\n" + self._extra)
        self._target.flush()

    def _logits(self, i: int) -> Any:
        pointer = llama_cpp.llama_get_logits_ith(self._context, i)
        return np.ctypeslib.as_array(pointer, (self._num_tokens,))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            count = self._source.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise EOFError("the numbers end early")
            done += count
        return data


def _bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    if not _STATUS.is_file():
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = _STATUS.read_text()
    return 1024 * int(text[text.index(f"{name}:") :].split()[1])


if __name__ == "__main__":
    # Output of libraries must not be mixed with the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    LlamaWorker(sys.stdin.buffer, answers).serve()
