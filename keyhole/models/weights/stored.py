"""Checks of a checkpoint's files and weights that no library performs while loading.

Which of its safetensors or tokenizer files cannot be read, and what helps; of files of PyTorch only
whether they are pointers of Git LFS: their own reader names other damage. Quantised checkpoints are
loaded by transformers' own quantisers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.quantizers.auto import AutoHfQuantizer

from keyhole.errors import ConfigError, ModelError, first_line
from keyhole.models.weights.weight_format import DEQUANTISED

_INDEX = "model.safetensors.index.json"
_WHOLE, _PARTS = "model.safetensors", "model-*-of-*.safetensors"
_PYTORCH = "pytorch_model*.bin"
_TOKENIZER = ("*token*.json", "vocab*.json")
#: The first bytes of a pointer file: what a clone without Git LFS has in place of the weights.
_POINTER = b"version https://git-lfs"
#: The number of a layer in the name of a weight.
LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


def require_known(config: Any, name: str) -> None:
    """ModelError for a format that transformers does not know; it would ignore the scales."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return
    try:
        known = AutoHfQuantizer.supports_quant_method(_fields(stored))
    except ValueError as error:
        raise ModelError(
            f"the config of {name!r} says quantization_config {_fields(stored)!r}, which does not "
            "name a quant_method; correct it, or delete it if the weights are not quantised"
        ) from error
    if not known:
        method = _fields(stored).get("quant_method")
        raise ModelError(
            f"the weights of {name!r} are stored as {method!r}, which this version of transformers "
            "does not support; use another checkpoint of the model, or a newer transformers"
        )


def require_suitable(config: Any, weights: str | None, name: str) -> None:
    """ConfigError for weights that should be packed but are already quantised.

    And for blocks that are to be dequantised, which only GGUF files have.
    """
    if weights == DEQUANTISED:
        raise ConfigError(
            f"weights {weights!r} is for GGUF files, and {name!r} is not one; leave it out"
        )
    stored = getattr(config, "quantization_config", None)
    if weights is not None and stored is not None:
        method = _fields(stored).get("quant_method")
        raise ConfigError(
            f"the weights of {name!r} are already stored as {method}; leave weights {weights!r} "
            "out, or give the checkpoint that they were made from"
        )


#: What a quantised format stores beside a weight, by the end of its name.
_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".SCB", ".weight.absmax")


def require_scales_used(config: Any, unused: Iterable[str], name: str) -> None:
    """ModelError for scales of quantised weights that a checkpoint has and nothing multiplies with.

    unused: names in the checkpoint that no module of the model has.
    """
    scales = sorted(key for key in unused if key.endswith(_SCALES))
    if scales and getattr(config, "quantization_config", None) is None:
        raise ModelError(
            f"the weights of {name!r} are quantised (the first scale is {scales[0]}), but its "
            "config has no quantization_config that says how; give the config that belongs to them"
        )


def require_same(network: Any, report: Mapping[str, Any], name: str) -> None:
    """ModelError for weights that a network needs and a checkpoint lacks, or has in another shape.

    And for layers of the checkpoint that the network does not have. Unless its config counts them
    as predictors of further tokens, for which there is no place here. report: of transformers,
    which leaves out what the model's class expects in a checkpoint and does not use.
    """
    missing = sorted(report["missing_keys"]) + sorted(key[0] for key in report["mismatched_keys"])
    if missing:
        raise ModelError(
            f"the checkpoint {name!r} is damaged: {len(missing)} weights are missing or of "
            f"another shape, the first is {missing[0]}; download it again, or give the config that "
            "belongs to these weights"
        )
    config = network.config
    predictors = int(getattr(config, "num_nextn_predict_layers", None) or 0)
    depths: dict[str, int] = {}
    for prefix, layer in _layers(key for key, _ in network.named_parameters()):
        depths[prefix] = max(depths.get(prefix, 0), layer + 1)
    for prefix, layer in sorted(_layers(report["unexpected_keys"]), reverse=True):
        if prefix in depths and layer >= depths[prefix] + predictors:
            raise ModelError(
                f"the checkpoint {name!r} has {layer + 1} layers, but its config says "
                f"num_hidden_layers {config.num_hidden_layers}: set it to {layer + 1} in "
                "config.json, or give the config that belongs to these weights"
            )


def _layers(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """The number of the layer of each weight that is in one, after the names before it."""
    for name in names:
        if found := LAYER.search(name):
            yield name[: found.start(1)], int(found[1])


def _fields(stored: Any) -> dict[str, Any]:
    fields: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    return fields


def settle_dtype(network: Any) -> None:
    """Gives the weights of a dequantised network the one dtype that was asked for.

    transformers dequantises FP8 to it, and leaves the weights that were not quantised as they are
    stored: their products with the others fail. Those that it keeps in float32 stay.
    """
    if getattr(network.config, "quantization_config", None) is None:
        for parameter in network.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.to(network.config.dtype)


def unpack(network: Any) -> None:
    """Unpacks the weights of compressed-tensors, which would do so in the first forward pass.

    By then memory has been counted and adapters are in place. And stored documents name the weights
    that encoded them: they have to be the same before and after the first request.
    """
    if hasattr(network, "ct_decompress_hook"):
        network.hf_quantizer.compressor.decompress_model(network)


#: bitsandbytes' logger, which reports each cast to float16 at every 8-bit product.
_TALKATIVE = "bitsandbytes.autograd._functions"


def check_stored(network: Any, name: str) -> None:
    """ModelError for packed weights and scales whose sizes do not match their layers.

    transformers does not check shapes of packed weights, and kernels would read out of bounds.
    """
    for key, layer in network.named_modules():
        weight = getattr(layer, "weight", None)
        if weight is not None and not _fits(layer, weight):
            raise ModelError(
                f"the checkpoint {name!r} is damaged: the packed weights of {key} are not those "
                f"of a layer of {layer.out_features} x {layer.in_features}"
            )


def log_once() -> None:
    """Makes bitsandbytes log each message once."""
    logger = logging.getLogger(_TALKATIVE)
    if not any(isinstance(one, _Once) for one in logger.filters):
        logger.addFilter(_Once())


def _fits(layer: Any, weight: Any) -> bool:
    """Whether weights and scales match the layer's size; True for unpacked ones."""
    state, scales = getattr(weight, "quant_state", None), getattr(weight, "SCB", None)
    if state is not None:  # 4 bits, two in a byte, and a scale for each block
        size = layer.out_features * layer.in_features
        shape = (layer.out_features, layer.in_features)
        blocks = -(-size // state.blocksize)
        packed = weight.nbytes == -(-size // 2) and state.absmax.numel() == blocks
        return bool(packed and tuple(state.shape) == shape)
    if scales is not None:  # 8 bits, and a scale for each row
        shape = (layer.out_features, layer.in_features)
        return bool(tuple(weight.shape) == shape and scales.numel() == layer.out_features)
    return True


class _Once(logging.Filter):
    """Passes a message the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is new."""
        new = record.getMessage() not in self._seen
        self._seen.add(record.getMessage())
        return new


def damage(folder: Path) -> str | None:
    """The first file that is missing or damaged, with the remedy; None if all can be read.

    The files are those of the index, or all of the folder; without any, those of PyTorch. Only
    their headers are read.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    if index.is_file():
        try:
            listed = json.loads(index.read_text())
            files = [folder / name for name in sorted(set(listed["weight_map"].values()))]
            listed["metadata"]  # transformers reads it, too
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
