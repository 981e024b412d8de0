"""A stand-in for the package gguf: stores what it is given, for the `llama_cpp` beside it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np


class GGUFWriter:
    def __init__(self, path: str, architecture: str) -> None:
        self.path = Path(path)
        self.fields: dict[str, Any] = {"general.architecture": architecture}
        self.shapes: dict[str, tuple[list[int], np.dtype[Any], int]] = {}
        self.tensors: dict[str, Any] = {}

    def add_uint32(self, name: str, value: Any) -> None:
        self.fields[name] = value

    add_float32 = add_string = add_uint32

    def add_tensor_info(self, name: str, shape: list[int], dtype: np.dtype[Any], size: int) -> None:
        self.shapes[name] = shape, dtype, size

    def write_header_to_file(self) -> None: ...

    write_kv_data_to_file = write_ti_data_to_file = write_header_to_file

    def write_tensor_data(self, tensor: Any) -> None:
        name = list(self.shapes)[len(self.tensors)]  # in the order of their descriptions
        shape, dtype, size = self.shapes[name]
        assert (tensor.dtype, tensor.nbytes) == (dtype, size)
        self.tensors[name] = tensor.reshape(shape).copy()

    def close(self) -> None:
        assert list(self.tensors) == list(self.shapes)
        self.path.write_bytes(pickle.dumps((self.fields, self.tensors)))
