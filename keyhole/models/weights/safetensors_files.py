"""Which of a checkpoint's safetensors or tokenizer files cannot be read, and what helps.

Of files of PyTorch only whether they are pointers of Git LFS: their own reader names other damage.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from keyhole.errors import first_line

_INDEX = "model.safetensors.index.json"
_WHOLE, _PARTS = "model.safetensors", "model-*-of-*.safetensors"
_PYTORCH = "pytorch_model*.bin"
_TOKENIZER = ("*token*.json", "vocab*.json")
#: The first bytes of a pointer file: what a clone without Git LFS has in place of the weights.
_POINTER = b"version https://git-lfs"


def damage(folder: Path) -> str | None:
    """The first file that is missing or damaged, with the remedy; None if all can be read.

    The files are those of the index, or all of the folder; without any, those of PyTorch. Only
    their headers are read.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    if index.is_file():
        try:
            listed = json.loads(index.read_text())["weight_map"]
            files = [folder / name for name in sorted(set(listed.values()))]
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{_INDEX} is damaged: download it again"
    elif any(folder.glob(_PARTS)) and not (folder / _WHOLE).is_file():
        return f"{_INDEX} is missing: download it"
    found = map(_of_file, files) if files else map(_of_pytorch, sorted(folder.glob(_PYTORCH)))
    return next((line for line in found if line is not None), None)


def tokenizer_damage(folder: Path) -> str | None:
    """The first file of a tokenizer that is not JSON, with the remedy; None if all can be read."""
    files = {file for pattern in _TOKENIZER for file in folder.glob(pattern)}
    return next((line for line in map(_of_json, sorted(files)) if line is not None), None)


def _of_json(file: Path) -> str | None:
    try:
        pointer = _pointer(file)
        if pointer is not None:
            return pointer
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{file.name} is damaged ({first_line(error)}): download or copy it again"
    return None


def _of_pytorch(file: Path) -> str | None:
    try:
        return _pointer(file)
    except OSError:
        return None


def _of_file(file: Path) -> str | None:
    try:
        pointer = _pointer(file)
        if pointer is not None:
            return pointer
        with safe_open(file, framework="pt"):
            return None
    except FileNotFoundError:
        return f"{file.name} is missing: download it"
    except (OSError, SafetensorError) as error:
        return f"{file.name} is damaged ({first_line(error)}): download it again"


def _pointer(file: Path) -> str | None:
    """What helps if a file is a pointer of Git LFS; None for any other."""
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            return f"{file.name} is a pointer of Git LFS: run `git lfs pull` in its folder"
    return None
