"""A model's shape, weights and peak activations, read from its files without loading torch.

Weights are counted from the headers of the safetensors files if they are next to the config, else
from the fields of the config, as transformers builds the modules. A test compares the counts with
real models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.errors import ModelError, UnknownNameError, one_line
from keyhole.models import families
from keyhole.models.locate import ModelFiles, locate

# The `config.json` of a model, read without torch, which transformers' own configs import.
#
# A file omits its family's defaults, and older ones use other names; a test compares the result
# with transformers.


_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_QWEN = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}

#: Fields that files may omit, with transformers' defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"q_lora_rank": 1536, "num_experts_per_tok": 8},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_bigcode": {"n_inner": None, "multi_query": True, "tie_word_embeddings": True},
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
    },
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}

#: Fields that have another name in a file.
_OTHER_NAMES = {
    "gpt_bigcode": {
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
}

#: One layer in this many has full attention, where the file lists no layers.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}


def normalised(stored: dict[str, Any]) -> Any:
    """The fields of a `config.json` as attributes, as transformers' config of the family has them.

    Only the fields that `families` and `parameters` read; a required field that the file lacks
    stays unset.
    """
    family = stored.get("model_type")
    if family not in DEFAULTS:
        raise ModelError(f"the family {family!r} is not one of {', '.join(DEFAULTS)}")
    names = _OTHER_NAMES.get(family, {})
    given = {names.get(name, name): value for name, value in stored.items()}
    fields = {"tie_word_embeddings": False, **DEFAULTS[family], **given}
    if not fields.get("use_sliding_window", True):
        fields["sliding_window"] = None
    depth = int(fields["num_hidden_layers"]) if "num_hidden_layers" in fields else 0
    if fields.get("layer_types") is None:
        fields["layer_types"] = _layer_types(family, fields, depth)
    fields["rope_parameters"] = _rope(family, fields)
    return SimpleNamespace(**fields)


def _layer_types(family: str, fields: dict[str, Any], depth: int) -> list[str] | None:
    """Kinds of layers as the family derives them; None where all are of one kind."""
    if family in _FULL_EVERY:
        every = _FULL_EVERY[family]
        if family == "gemma3_text":
            every = int(fields.get("sliding_window_pattern", every))
        sliding = [(layer + 1) % every != 0 for layer in range(depth)]
    elif "use_sliding_window" in fields:
        first = int(fields["max_window_layers"])
        has_window = fields["sliding_window"] is not None
        sliding = [has_window and layer >= first for layer in range(depth)]
    else:
        return None
    return ["sliding_attention" if kind else "full_attention" for kind in sliding]


def _rope(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings under the names of today; `rope_scaling` and `type` are older."""
    found = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    if "type" in found:
        found.setdefault("rope_type", found["type"])
    if family == "phi3" and found.get("rope_type") in ("su", "yarn"):
        found["rope_type"] = "longrope"
    if found.get("rope_type") == "longrope":
        original = fields.get("original_max_position_embeddings")
        found.setdefault("original_max_position_embeddings", original)
    return found


#: Bytes of a number, by the names that `--dtype` accepts.
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

_INDEX = "model.safetensors.index.json"
#: Number formats in the header of a safetensors file.
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
#: A GGUF file's number for the format of most of its tensors, where these are not quantised blocks.
_OF_GGUF = {0: "float32", 1: "float16"}
_LONGEST_HEADER = 100_000_000  # as safetensors itself has it
#: The number of a layer in the name of a weight.
LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


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


class KeptSize(NamedTuple):
    """Weights that stay in a file's blocks: how many, and their bytes in memory."""

    num_weights: int = 0
    num_bytes: int = 0


class Built(NamedTuple):
    """A model's config, and its size: all weights, those of the last layer, and those in blocks."""

    config: Any
    num_parameters: int
    layer_parameters: int
    kept: KeptSize = KeptSize()


#: Builds the shape of a model of any family.
Build = Callable[[ModelFiles], Built]


#: What transformers has for the families in `DEFAULTS`.
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def _check_planned(config: Any, name: str) -> None:
    """ModelError for a model whose layers cannot be offloaded, or whose memory is not counted, and
    for a RoPE that loading refuses, where transformers has not read the config.
    """
    for rope in families.ropes(config) if config.model_type in DEFAULTS else ():
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise ModelError(
                f"the config of {name!r} has the rope_type {kind!r}, which transformers does not "
                f"know; it must be one of {', '.join(_ROPE_TYPES)}"
            )
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


def read(
    model: str | Path | ModelFiles, dtype: str = "auto", build: Build | None = None
) -> Checkpoint:
    """The shape of "tiny", of a folder, of a hub id in the local cache or on the hub, or of files.

    dtype: "auto" is the config's. build: for families that are not in `DEFAULTS`, which need
    transformers; without it they are refused. ModelError as `keyhole.models.loading.load`
    raises it.
    """
    if dtype != "auto" and dtype not in ITEMSIZES:
        raise UnknownNameError("dtype", dtype, ["auto", *ITEMSIZES])
    place = model if isinstance(model, ModelFiles) else locate(model)
    name, path = place.shown, place.config
    if place.gguf is not None and build is None:
        raise ModelError(f"the shape of the GGUF file {name!r} is read with transformers only")
    try:
        stored = json.loads(path.read_text()) if place.gguf is None else {}
        if not isinstance(stored, dict):
            raise ModelError(f"the config of {name!r} must be a JSON object")
        if build is None or stored.get("model_type") in DEFAULTS:
            config, built = normalised(stored), None
        else:
            built = build(place)
            config = built.config
        families.check(config, name)
        _check_planned(config, name)
        quantised = "quantization_config" in stored
        headers = [] if quantised else list(_headers(path.parent))
        # Of a model of images and text, the files have more than is loaded. Some have no
        # `text_config`: the fields of their text stand beside those of the whole.
        is_part = "text_config" in stored or config.model_type != stored.get("model_type")
        counted = 0 if is_part else _count(headers, config)
        number = dtype
        if dtype == "auto":
            number = _dtype(stored, headers) if place.gguf is None else gguf_dtype(path)
        layers = families.layouts(config)
        if built is None:
            of_last = num_layer_parameters(config, len(layers) - 1)
            built = Built(config, num_parameters(config), of_last)
        total, kept = counted or built.num_parameters, built.kept
        return Checkpoint(
            name=_short(place),
            dtype=number,
            layers=layers,
            num_query_heads=int(config.num_attention_heads),
            num_parameters=total,
            weight_bytes=kept.num_bytes + (total - kept.num_weights) * ITEMSIZES[number],
            counted_from=_source(counted, kept),
            layer_parameters=built.layer_parameters,
            step_numbers=step_numbers(config),
            vocab_size=int(config.vocab_size),
            max_length=families.max_length(config, families.rope_lengths(config))[0],
            folder=Path(place.name),
        )
    except AttributeError as error:
        raise ModelError(f"the config of {name!r} has no field {error.name!r}") from error
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, ModelError):
            raise
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
        stored = json.loads(found.config.read_text()) if dtype == "auto" else {}
        number = _dtype(stored, headers) if dtype == "auto" else dtype
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


def _dtype(stored: dict[str, Any], headers: list[dict[str, Any]]) -> str:
    """The dtype that transformers loads: the config's, else that of the first stored weight."""
    stated = stored.get("dtype") or stored.get("torch_dtype")
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


def gguf_dtype(path: Path) -> str:
    """The dtype that holds what a GGUF file stores: bfloat16 for quantised blocks."""
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("general.file_type")
    return _OF_GGUF.get(-1 if field is None else int(field.contents()), "bfloat16")


#: Peak live activations of a layer, per token: the residual stream and its norm, and in an MLP the
#: outputs of gate and up and their product; in attention the queries and keys before, during and
#: after their rotation.
_STREAMS, _IN_MLP, _IN_ATTENTION = 2, 3, 3


def num_parameters(config: Any) -> int:
    """Weights and stored buffers of a causal language model; tied ones count once."""
    hidden, vocab = int(config.hidden_size), int(config.vocab_size)
    tables = vocab * hidden * (1 if config.tie_word_embeddings else 2)
    if config.model_type == "gpt_bigcode":
        tables += int(config.max_position_embeddings) * hidden
    layers = range(int(config.num_hidden_layers))
    return tables + _norm(config) + sum(num_layer_parameters(config, layer) for layer in layers)


def num_layer_parameters(config: Any, layer: int) -> int:
    """Weights of one decoder layer."""
    norms = 4 if config.model_type in ("gemma2", "gemma3_text") else 2
    if config.model_type == "deepseek_v3":
        attention = _latent_attention(config)
    else:
        attention = _attention(config)
    return attention + _mlp(config, layer) + norms * _norm(config)


def step_numbers(config: Any) -> int:
    """Peak live activations of a layer, per token of a step; an estimate."""
    hidden = int(config.hidden_size)
    heads = int(config.num_attention_heads) + 2 * kv_heads(config)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    width = getattr(config, "moe_intermediate_size", None) or _intermediate(config)
    mlp = max(experts * int(width), _intermediate(config))
    attention = heads * head_dim(config)
    return _STREAMS * hidden + max(_IN_MLP * mlp, _IN_ATTENTION * attention)


def head_dim(config: Any) -> int:
    """D, the size of a head's keys."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim)
    if getattr(config, "is_heterogeneous", False):
        return max(int(own.head_dim) for own in config.per_layer_config)
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def kv_heads(config: Any) -> int:
    """Hkv, the number of KV heads."""
    if config.model_type == "gpt_bigcode":
        return 1 if config.multi_query else int(config.num_attention_heads)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _norm(config: Any) -> int:
    """A norm over the hidden states; GPT-BigCode's has a bias."""
    return int(config.hidden_size) * (2 if config.model_type == "gpt_bigcode" else 1)


def _attention(config: Any) -> int:
    hidden, dim, family = int(config.hidden_size), head_dim(config), config.model_type
    query, key = int(config.num_attention_heads) * dim, kv_heads(config) * dim
    weights = 2 * hidden * query + 2 * hidden * key
    if family == "gpt_bigcode" or getattr(config, "attention_bias", False):
        weights += query + 2 * key + hidden
    elif family == "qwen2":  # a bias for queries, keys and values only
        weights += query + 2 * key
    if family in ("qwen3", "gemma3_text"):  # norms of queries and keys
        weights += 2 * dim
    if family == "gpt_oss":  # a sink per head
        weights += int(config.num_attention_heads)
    return weights


def _latent_attention(config: Any) -> int:
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    rank, rope = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
    nope, value = int(config.qk_nope_head_dim), int(config.v_head_dim)
    query = heads * (nope + rope)
    weights = hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
    biases = rank + rope + hidden
    if config.q_lora_rank is None:
        weights += hidden * query
    else:
        query_rank = int(config.q_lora_rank)
        weights += hidden * query_rank + query_rank + query_rank * query
        biases += query_rank
    return weights + (biases if config.attention_bias else 0)


def _intermediate(config: Any) -> int:
    """The width of an MLP, under the name that the family has for it."""
    for name in ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"):
        found = getattr(config, name, None)
        if found is not None:
            return max(found) if isinstance(found, list | tuple) else int(found)
    return 4 * int(config.hidden_size)


def _mlp(config: Any, layer: int) -> int:
    hidden, width = int(config.hidden_size), _intermediate(config)
    if config.model_type == "gpt_bigcode":
        return 2 * hidden * width + width + hidden
    gated = 3 * hidden * width
    if config.model_type == "gpt_oss":
        experts = int(config.num_local_experts)
        return experts * (hidden + 1) + experts * (gated + 2 * width + hidden)
    if config.model_type == "deepseek_v3" and layer >= int(config.first_k_dense_replace):
        experts, shared = int(config.n_routed_experts), int(config.n_shared_experts)
        expert = 3 * hidden * int(config.moe_intermediate_size)
        return experts * (hidden + 1) + (experts + shared) * expert
    return gated + (2 * width + hidden if getattr(config, "mlp_bias", False) else 0)
