"""A model's shape, weights and peak activations, read from its files; no weights are loaded.

Weights are counted from the headers of the safetensors files if they are next to the config, else
from the modules that transformers builds of the config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.cache.layout import ITEMSIZES, Geometry, LayerLayout, kv_heads
from keyhole.errors import ModelError, UnknownNameError, one_line
from keyhole.models import families
from keyhole.models.locate import ModelFiles, locate
from keyhole.models.model_config import read_config
from keyhole.models.shrink import count_weights
from keyhole.models.weights.gguf_file import KeptSize, stored_dtype
from keyhole.models.weights.stored import LAYER, require_known

_INDEX = "model.safetensors.index.json"
#: Number formats in the header of a safetensors file.
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LONGEST_HEADER = 100_000_000  # as safetensors itself has it


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's shape.

    dtype: what it would be loaded in. num_parameters: counted from `counted_from`; weight_bytes:
    their bytes in memory. layer_parameters: those of the last layer. step_numbers: peak live
    activations of a layer, per token of a step; an estimate. max_length: the longest sequence.
    folder: of its files; None for a hub id.
    """

    name: str
    dtype: str
    layers: tuple[LayerLayout, ...]
    num_query_heads: int
    num_parameters: int
    weight_bytes: int
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


def _check_planned(config: Any, name: str) -> None:
    """ModelError for a model whose layers cannot be offloaded, or whose memory is not counted."""
    if families.recurrent_layers(config):
        raise ModelError(
            f"model {name!r} ({config.model_type}) has layers with a recurrent state, whose "
            "memory is not planned"
        )
    if any(layout.index_topk is not None for layout in families.layouts(config)):
        raise ModelError(
            f"model {name!r} ({config.model_type}) selects tokens by an indexer of its own, which "
            "reads the keys of every layer in every step: no layer can be offloaded"
        )


def read(model: str | Path | ModelFiles, dtype: str = "auto") -> Checkpoint:
    """The shape of "tiny", of a folder, of a hub id in the local cache or on the hub, or of files.

    dtype: "auto" is the config's. ModelError as `keyhole.models.loading.load` raises it.
    """
    if dtype != "auto" and dtype not in ITEMSIZES:
        raise UnknownNameError("dtype", dtype, ["auto", *ITEMSIZES])
    place = model if isinstance(model, ModelFiles) else locate(model)
    name, path = place.shown, place.config
    try:
        stored = json.loads(path.read_text()) if place.gguf is None else {}
        if not isinstance(stored, dict):
            raise ModelError(f"the config of {name!r} must be a JSON object")
        config = read_config(place)
        families.check(config, name)
        _check_planned(config, name)
        require_known(config, name)
        quantised = stored.get("quantization_config") is not None
        headers = [] if quantised else list(_headers(path.parent))
        # Of a model of images and text, the files have more than is loaded. Some have no
        # `text_config`: the fields of their text stand beside those of the whole.
        is_part = "text_config" in stored or config.model_type != stored.get("model_type")
        counted = 0 if is_part else _count(headers, config)
        number = dtype
        if dtype == "auto":
            number = _dtype(config, headers) if place.gguf is None else stored_dtype(path)
        weights = count_weights(place, config)  # sets the config's dtype
        total, kept = counted or weights.num_parameters, weights.kept
        layers = families.layouts(config)
        return Checkpoint(
            name=_short(place),
            dtype=number,
            layers=layers,
            num_query_heads=max(layer.num_query_heads for layer in layers),
            num_parameters=total,
            weight_bytes=kept.num_bytes + (total - kept.num_weights) * ITEMSIZES[number],
            counted_from=_source(counted, kept),
            layer_parameters=weights.layer_parameters,
            step_numbers=step_numbers(config),
            vocab_size=int(config.vocab_size),
            max_length=families.max_length(config, families.rope_lengths(config))[0],
            folder=Path(place.name),
        )
    except UnknownNameError as error:
        raise ModelError(f"the config of {name!r} has an {error}") from error
    except AttributeError as error:
        raise ModelError(f"the config of {name!r} has no field {error.name!r}") from error
    except ModelError:
        raise
    except Exception as error:  # transformers, torch, the file system
        raise ModelError(f"the files of {name!r} cannot be read: {one_line(error)}") from error


def _headers(folder: Path) -> Iterator[dict[str, Any]]:
    """The header of each safetensors file; empty unless all files of the model are present."""
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
                raise ModelError(f"{path.name!r} is damaged: it is not a safetensors file")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        yield header


def weight_bytes(found: ModelFiles, config: Any, dtype: str) -> int:
    """Bytes of a model's weights in memory, at least; 0 if its files are not beside the config.

    dtype: in which they are loaded, or "auto". Quantised weights count as stored.
    """
    if found.gguf is not None:
        return found.config.stat().st_size
    try:
        headers = list(_headers(found.config.parent))
        if getattr(config, "quantization_config", None) is not None:
            ends = (x["data_offsets"] for header in headers for x in header.values())
            return sum(end - begin for begin, end in ends)
        number = _dtype(config, headers) if dtype == "auto" else dtype
        return _count(headers, config) * ITEMSIZES[number]
    except (OSError, ValueError, KeyError, TypeError):  # damaged: loading says so
        return 0


def _count(headers: list[dict[str, Any]], config: Any) -> int:
    """Numbers in the weights that a model loads; 0 without headers."""
    depth, count = int(config.num_hidden_layers), 0
    for header in headers:
        for name, tensor in header.items():
            layer = LAYER.search(name)
            # Layers beyond the last (DeepSeek's for training) and copies of tied weights stay out.
            beyond = layer is not None and int(layer[1]) >= depth
            tied = name == "lm_head.weight" and config.tie_word_embeddings
            count += 0 if beyond or tied else math.prod(tensor["shape"])
    return count


def _dtype(config: Any, headers: list[dict[str, Any]]) -> str:
    """The dtype that transformers loads: the config's, else that of the first stored weight."""
    # From "half" in the file transformers has made torch.float16.
    stated = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    kinds = [tensor["dtype"] for header in headers for tensor in header.values()]
    found = stated or next((_STORED[kind] for kind in kinds if kind in _STORED), "float32")
    if found not in ITEMSIZES:
        raise ModelError(f"the config says dtype {found!r}; give one of {', '.join(ITEMSIZES)}")
    return str(found)


def _source(counted: int, kept: KeptSize) -> str:
    """Where the weights are counted, in words."""
    if kept.num_weights:
        return f"the file, {kept.num_weights:,} of them in its blocks"
    return "the weights' headers" if counted else "the config"


def _short(place: ModelFiles) -> str:
    if place.gguf is not None:
        return place.config.stem
    return Path(place.name).name if Path(place.name).is_dir() else place.name


#: Peak live activations of a layer, per token: the residual stream and its norm, and in an MLP the
#: outputs of gate and up and their product; in attention the queries and keys before, during and
#: after their rotation.
_STREAMS, _IN_MLP, _IN_ATTENTION = 2, 3, 3


def step_numbers(config: Any) -> int:
    """Peak live activations of a layer, per token of a step; an estimate."""
    hidden = int(config.hidden_size)
    queries = max(layout.num_query_heads for layout in families.layouts(config))
    heads = queries + 2 * kv_heads(config)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    width = getattr(config, "moe_intermediate_size", None) or _intermediate(config)
    mlp = max(experts * int(width), _intermediate(config))
    attention = heads * families.head_dim(config)
    return _STREAMS * hidden + max(_IN_MLP * mlp, _IN_ATTENTION * attention)


def _intermediate(config: Any) -> int:
    """The width of an MLP, under the name that the family has for it."""
    for name in ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"):
        found = getattr(config, name, None)
        if found is not None:
            return max(found) if isinstance(found, list | tuple) else int(found)
    return 4 * int(config.hidden_size)
