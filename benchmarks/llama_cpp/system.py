"""llama.cpp as a system of the decode benchmark: in a separate process, with our weights.

Weights are float16, mapped from a file; keys and values are float16, with the same numbers as in
the other caches. The tokens of a step are removed after it, as with transformers. Times and peaks
are measured in its own process.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.llama_cpp import state
from benchmarks.llama_cpp.file import LlamaFile
from benchmarks.llama_cpp.worker import WorkerProcess
from keyhole.bench import measure
from keyhole.bench.model import Need, RandomKV, Weights
from keyhole.models.model import Model

# The cache of a sequence is a multiple of this many tokens.
_CELLS = 256
# Program and buffers: at most 0.15 GiB was measured, with 8 sequences of 32,768 tokens.
_PROGRAM_BYTES = 256 << 20
# OpenMP threads may spin this long after their work; none may spin while another program runs.
_SETTLE_S = 0.02
_ITEM_BYTES = 2


#: System -> whether it uses flash attention.
SYSTEMS = {"llama_cpp": False, "llama_cpp_flash": True}


class LlamaCpp:
    """llama.cpp with and without flash attention (`keyhole.bench.systems.Outside`)."""

    names = tuple(SYSTEMS)

    def __init__(self, file: LlamaFile) -> None:
        self._file = file

    def write(self, weights: Weights) -> None:
        """Writes the file."""
        self._file.write(weights)

    def needed(self, model: Model, batch: int, context: int, steps: int) -> Need:
        """The memory that `Llama` will take."""
        cache = batch * _cells(context + steps) * _token_bytes(model)
        return Need(stays=self._file.num_bytes + cache + _PROGRAM_BYTES, passes=cache // batch)

    def start(self, name: str, model: Model, batch: int, context: int, steps: int) -> Llama:
        """Starts the program with a cache for all sequences."""
        return Llama(name, model, self._file, batch, context, steps)


class Llama:
    """llama.cpp with a cache that can be filled; its name selects flash attention."""

    def __init__(
        self, name: str, model: Model, file: LlamaFile, batch: int, context: int, steps: int
    ) -> None:
        """`steps`: the most tokens that are added to the context."""
        self.name = name
        self.step_ms = 0.0
        self.peak_bytes = 0
        self._flash = SYSTEMS[name]
        self._file_bytes = file.num_bytes
        self._token_bytes = _token_bytes(model)
        self._vocab_size = model.network.config.vocab_size
        self._context = context
        self._next: list[int] = []
        self._worker = WorkerProcess()
        arguments = {
            "path": str(file.path),
            "cells": _cells(context + steps),
            "batch": batch,
            "flash": self._flash,
            "threads": torch.get_num_threads(),
        }
        try:
            loaded = self._worker.call("load", arguments)
        except BaseException:
            self.close()
            raise
        self._program_bytes = loaded["program_bytes"]
        self.cache_bytes = batch * loaded["cells"] * self._token_bytes

    def fill(self, numbers: RandomKV) -> None:
        """Loads the keys and values of all sequences, one after the other."""
        size = state.num_bytes(numbers)
        for sequence in range(numbers.batch):
            pieces = state.pieces(numbers, sequence, transposed=not self._flash)
            self._worker.call("fill", {"sequence": sequence, "size": size}, pieces)

    def logits(self, prompts: list[list[int]], given: list[int]) -> Tensor:
        """As `KeyholeSystem.logits`."""
        rows = []
        columns = [[prompt[-1] for prompt in prompts], *([token] * len(prompts) for token in given)]
        for i, column in enumerate(columns):
            self._forward(column, self._context + i, give_logits=True)
            data = bytearray(self._worker.receive(4 * len(column) * self._vocab_size))
            rows.append(torch.frombuffer(data, dtype=torch.float32).view(len(column), -1))
        self.rest()
        return torch.stack(rows, 1)

    def start(self, prompts: list[list[int]], steps: int) -> None:
        """Sets the first token of the next step."""
        self._next = [prompt[-1] for prompt in prompts]

    def step(self) -> None:
        """Decodes one token per sequence greedily; updates `step_ms` and `peak_bytes`."""
        done = self._forward(self._next, self._context, give_logits=False)
        self._next, self.step_ms, self.peak_bytes = done["tokens"], done["ms"], done["peak_bytes"]

    def settle(self) -> None:
        """Waits until no thread spins after its work."""
        time.sleep(_SETTLE_S)

    def rest(self) -> None:
        """Removes the tokens of the steps."""
        self._worker.call("take_back", {"position": self._context})
        self.settle()

    def cost(self) -> dict[str, Any]:
        """The bytes that a step must read, and the memory that the process should take."""
        stated = self._program_bytes + self._file_bytes + self.cache_bytes
        return {
            "policy": None,
            "kv_bytes": float(len(self._next) * (self._context + 1) * self._token_bytes),
            "other_bytes": 0.0,
            "attended_fraction": 1.0,
            "launches": measure.launches(0, "another process computes on a CPU"),
            "weight_bytes": self._file_bytes,
            "cache_bytes": self.cache_bytes,
            "workspace_bytes": 0,
            "stated_bytes": stated,
        }

    def close(self) -> None:
        """Ends the process."""
        self._worker.close()

    def _forward(self, tokens: list[int], position: int, *, give_logits: bool) -> dict[str, Any]:
        arguments = {"tokens": tokens, "position": position, "give_logits": give_logits}
        return self._worker.call("step", arguments)


def _cells(tokens: int) -> int:
    return -(-tokens // _CELLS) * _CELLS


def _token_bytes(model: Model) -> int:
    config = model.network.config
    width = config.num_key_value_heads * config.head_dim
    return int(2 * config.num_hidden_layers * width * _ITEM_BYTES)
