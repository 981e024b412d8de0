"""Reads the folder of a head or of a draft model, with errors that name the file or tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from keyhole.errors import ModelError

_PATTERNS = ["*.json", "*.safetensors", "*.bin"]


@dataclass(frozen=True)
class HeadCheckpoint:
    """A folder with a config and tensors, which are read one by one on demand."""

    name: str
    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    _read: Mapping[str, Callable[[], Tensor]]

    @classmethod
    def open(cls, path: str | Path) -> HeadCheckpoint:
        """From a folder or a hub id; ModelError if it is not there or cannot be read."""
        name = str(path)
        folder = _folder(name)
        config = _config(folder, name)
        files = sorted(folder.glob("*.safetensors"))
        try:
            parts = [_safetensors(file) for file in files] or [_pickled(folder, name)]
        except ModelError:
            raise
        except Exception as error:  # torch, safetensors, the file system
            raise _unreadable(name, error) from error
        shapes = {key: shape for part in parts for key, (shape, _) in part.items()}
        read = {key: reader for part in parts for key, (_, reader) in part.items()}
        return cls(name, config, shapes, read)

    def tensor(self, key: str, *shape: int) -> Tensor:
        """The tensor `key` on the CPU; ModelError unless it is there, of that shape, and floats."""
        right = f"{key} {list(shape)}"
        if key not in self.shapes:
            raise ModelError(f"checkpoint {self.name!r} has no tensor {right}")
        if self.shapes[key] != shape:
            raise ModelError(
                f"checkpoint {self.name!r} has a tensor {key} of shape {list(self.shapes[key])}, "
                f"it must be {right}"
            )
        try:
            found = self._read[key]()
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _unreadable(self.name, error) from error
        if not found.is_floating_point():
            raise ModelError(
                f"checkpoint {self.name!r} has a tensor {key} of type {found.dtype}; quantised "
                "weights cannot be read"
            )
        return found


_Parts = dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # any library involved may raise its own error
        raise ModelError(
            f"unknown head or draft {name!r}: it is no folder and nothing of that name could be "
            "loaded from the hub or its local cache"
        ) from error


def _config(folder: Path, name: str) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"folder {name!r} holds no head and no draft: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"the config of {name!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"the config of {name!r} cannot be read: it must be an object")
    return config


def _safetensors(file: Path) -> _Parts:
    def read(key: str) -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            found: Tensor = tensors.get_tensor(key)
        return found

    with safe_open(file, framework="pt") as tensors:
        keys = tensors.keys()
        return {k: (tuple(tensors.get_slice(k).get_shape()), partial(read, k)) for k in keys}


def _pickled(folder: Path, name: str) -> _Parts:
    file = folder / "pytorch_model.bin"
    if not file.is_file():
        raise ModelError(f"folder {name!r} holds neither *.safetensors nor pytorch_model.bin")
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    return {key: (tuple(x.shape), partial(_same, x)) for key, x in tensors.items()}


def _same(x: Tensor) -> Tensor:
    return x


def _unreadable(name: str, error: Exception) -> ModelError:
    line = (str(error).strip().splitlines() or ["no message"])[0]
    return ModelError(f"the weights of {name!r} cannot be read: {type(error).__name__}: {line}")
