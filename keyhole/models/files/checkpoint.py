"""What the files of a model say of its shape: neither torch nor weights are loaded.

Weights are counted from the headers of the safetensors files if they lie beside the config, else
from the config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.errors import ModelError, UnknownNameError
from keyhole.models import families
from keyhole.models.files import config_file, parameters
from keyhole.models.files.locate import locate

#: Bytes of a number, by the names that `--dtype` takes.
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

_INDEX = "model.safetensors.index.json"
#: Number formats in the header of a safetensors file.
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LONGEST_HEADER = 100_000_000  # as safetensors itself has it
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's shape.

    dtype: what it would be loaded in. num_parameters: counted from `counted_from`.
    layer_parameters: those of the last layer. step_numbers: numbers that live at once in a layer,
    per token of a step; an estimate. max_length: tokens that a sequence may have. folder: of its
    files; there is none where it came by its hub id.
    """

    name: str
    dtype: str
    layers: tuple[LayerLayout, ...]
    num_query_heads: int
    num_parameters: int
    counted_from: str
    layer_parameters: int
    step_numbers: int
    vocab_size: int
    max_length: int
    folder: Path

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return ITEMSIZES[self.dtype]

    def geometry(self, page_size: int) -> Geometry:
        """The model's shape for a cache of this page size."""
        return Geometry(
            layers=self.layers,
            num_query_heads=self.num_query_heads,
            page_size=page_size,
            itemsize=self.itemsize,
        )


def read(name: str | Path, dtype: str = "auto") -> Checkpoint:
    """What "tiny", a folder, or a hub id in the cache or on the hub, says of its model.

    dtype: "auto" is what the config says. ModelError as `keyhole.models.loading.load` raises it.
    """
    if dtype != "auto" and dtype not in ITEMSIZES:
        raise UnknownNameError("dtype", dtype, ["auto", *ITEMSIZES])
    place = locate(name)
    name, path = place.name, place.config
    try:
        stored = json.loads(path.read_text())
        if not isinstance(stored, dict):
            raise ModelError(f"the config of {name!r} must be a JSON object")
        config = config_file.normalised(stored)
        families.check(config, name)
        quantised = "quantization_config" in stored
        headers = [] if quantised else list(_headers(path.parent))
        counted = _count(headers, config)
        number = dtype if dtype != "auto" else _dtype(stored, headers)
        layers = families.layouts(config)
        return Checkpoint(
            name=Path(name).name if Path(name).is_dir() else name,
            dtype=number,
            layers=layers,
            num_query_heads=int(config.num_attention_heads),
            num_parameters=counted or parameters.num_parameters(config),
            counted_from="the weights' headers" if counted else "the config",
            layer_parameters=parameters.num_layer_parameters(config, len(layers) - 1),
            step_numbers=parameters.step_numbers(config),
            vocab_size=int(config.vocab_size),
            max_length=families.max_length(config)[0],
            folder=Path(name),
        )
    except AttributeError as error:
        raise ModelError(f"the config of {name!r} has no field {error.name!r}") from error
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"the files of {name!r} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _headers(folder: Path) -> Iterator[dict[str, Any]]:
    """The header of each safetensors file; nothing unless all files of the model are there."""
    files = [folder / "model.safetensors"]
    if (folder / _INDEX).is_file():
        listed = json.loads((folder / _INDEX).read_text())["weight_map"]
        files = [folder / file for file in sorted(set(listed.values()))]
    if not all(file.is_file() for file in files):
        return
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _LONGEST_HEADER:
                raise ModelError(f"{path.name!r} is damaged: it is no safetensors file")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        yield header


def _count(headers: list[dict[str, Any]], config: Any) -> int:
    """Numbers in the weights that a model loads; 0 without headers."""
    depth, count = int(config.num_hidden_layers), 0
    for header in headers:
        for name, tensor in header.items():
            layer = _LAYER.search(name)
            # Layers beyond the last (DeepSeek's for training) and copies of tied weights stay out.
            beyond = layer is not None and int(layer[1]) >= depth
            tied = name == "lm_head.weight" and config.tie_word_embeddings
            count += 0 if beyond or tied else math.prod(tensor["shape"])
    return count


def _dtype(stored: dict[str, Any], headers: list[dict[str, Any]]) -> str:
    """What transformers loads: as the config says, else as the first weight is stored."""
    said = stored.get("dtype") or stored.get("torch_dtype")
    kinds = [tensor["dtype"] for header in headers for tensor in header.values()]
    found = said or next((_STORED[kind] for kind in kinds if kind in _STORED), "float32")
    if found not in ITEMSIZES:
        raise ModelError(f"the config says dtype {found!r}; give one of {', '.join(ITEMSIZES)}")
    return str(found)
