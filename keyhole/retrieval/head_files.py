"""Reads and writes the folder of a head or a draft model; errors name the file or tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from keyhole.config import is_number
from keyhole.errors import ConfigError, ModelError
from keyhole.retrieval.config import HeadConfig

#: `model_type` in the config.json of a head.
KIND = "keyhole_retrieval_head"
#: The entries of config.json besides the fields of HeadConfig.
_BESIDE = {"model_type", "dropped_share"}


def write(
    path: str | Path, config: HeadConfig, dropped_share: float | None, tensors: Mapping[str, Tensor]
) -> None:
    """Writes config.json and model.safetensors into the folder, replacing a head that is there.

    A folder that was left half-written has no config.json. ConfigError if it cannot be written.
    """
    folder = Path(path)
    text = {"model_type": KIND, **asdict(config), "dropped_share": dropped_share}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        weights, words = folder / "model.safetensors.part", folder / "config.json.part"
        plain = {name: x.detach().contiguous() for name, x in tensors.items()}
        save_file(plain, weights, metadata={"format": "pt"})
        words.write_text(json.dumps(text, indent=2) + "\n")
        weights.chmod(words.stat().st_mode & 0o777)  # safetensors makes files for the owner alone
        os.replace(weights, folder / "model.safetensors")
        os.replace(words, folder / "config.json")
    except OSError as error:
        raise ConfigError(f"the head cannot be written to {str(path)!r}: {error}") from error


def read_config(stored: HeadCheckpoint) -> tuple[HeadConfig, float | None]:
    """The config of a head and its dropped_share; ModelError if the folder is not a head's."""
    names = _BESIDE | {field.name for field in fields(HeadConfig)}
    if stored.config.get("model_type") != KIND:
        raise ModelError(
            f"{stored.name!r} holds no retrieval head: the model_type of its config.json is not "
            f"{KIND!r}; a draft model is read by RetrievalHead.from_eagle3"
        )
    for kind, wrong in (("lacks", names - set(stored.config)), ("has", set(stored.config) - names)):
        if wrong:
            raise ModelError(
                f"the config of head {stored.name!r} {kind} {', '.join(sorted(wrong))}; its fields "
                f"are {', '.join(sorted(names))}"
            )
    try:
        config = HeadConfig(**{n: x for n, x in stored.config.items() if n not in _BESIDE})
    except ConfigError as error:
        raise ModelError(f"the config of head {stored.name!r} cannot be: {error}") from error
    share = stored.config["dropped_share"]
    return config, float(share) if is_number(share) else None


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
