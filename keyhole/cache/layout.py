"""The layout of keys and values: the shape of a token's, the size of an engine's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.config import SCALE_BYTES
from keyhole.errors import ConfigError
from keyhole.planner import LayerMemory, MemoryModel, buffer_tokens

#: Bytes of a number, by the names that `--dtype` accepts.
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def of_layer(config: Any, layer: int) -> Any:
    """The sizes of one layer of a model: its config itself, or the part for this layer."""
    return config.per_layer_config[layer] if layers_differ(config) else config


def layers_differ(config: Any) -> bool:
    """Whether sizes differ between layers; transformers before 5.22 has no such configs."""
    return bool(getattr(config, "is_heterogeneous", False))


def kv_heads(config: Any, layer: int = 0) -> int:
    """Hkv, the number of KV heads of a model's layer; with MLA those of the whole keys."""
    heads = int(config.num_attention_heads)
    if config.model_type == "gpt_bigcode":
        return 1 if config.multi_query else heads
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else heads
    if config.model_type == "jetmoe":  # its keys are repeated for the experts of the queries
        return heads
    name = "num_kv_heads" if config.model_type == "falcon" else "num_key_value_heads"
    return int(getattr(of_layer(config, layer), name, None) or heads)


def head_dim(config: Any, layer: int = 0) -> int:
    """D, the size of a head of a model's layer; with MLA the one that the config names."""
    if config.model_type == "jetmoe":
        return int(config.kv_channels)
    given = getattr(of_layer(config, layer), "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """One layer's part of the KV cache.

    With `shared_values` (MLA's latents) a value is the first `value_dim` numbers of its key and is
    not stored a second time. A `chunked` layer reads from the last position that is a multiple of
    `window`, a sliding one the last `window` tokens. With `index_topk` the model's own indexer
    selects that many tokens; its key is the last `index_dim` numbers of a key, which attention does
    not read, or 0 of them in a layer that reads what an earlier one selected.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # the layer's own sliding window in tokens; None is full attention
    shared_values: bool = False
    chunked: bool = False
    num_query_heads: int = 0  # for a policy's data per query head; 0 without any
    scale_bytes: int = 0  # after every key and every value of 8-bit numbers; else 0
    index_topk: int | None = None
    index_dim: int = 0
    alibi: bool = False  # keys end with numbers of their position, which 8 bits would round

    @property
    def key_row(self) -> int:
        """Elements of a stored key: its numbers, and the bytes of their scale."""
        return self.key_dim + self.scale_bytes

    @property
    def reads_all(self) -> bool:
        """Whether the model itself reads all tokens in this layer."""
        return self.window is None and self.index_topk is None

    @property
    def value_row(self) -> int:
        """Elements of a stored value, as of a key."""
        return self.value_dim + self.scale_bytes

    @property
    def numbers_per_token(self) -> int:
        """Elements stored per token: all KV heads, keys and values."""
        return self.num_kv_heads * self.numbers_per_head

    @property
    def numbers_per_head(self) -> int:
        """Elements stored per token and KV head."""
        return self.key_row + (0 if self.shared_values else self.value_row)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The shape of a model and its cache, as methods need it; plain numbers, no tensors.

    `layers` are those with attention. In a hybrid model others are between them: `in_model` has
    the number of each among all layers of the model; None: all have attention.
    """

    layers: tuple[LayerLayout, ...]
    num_query_heads: int  # of the layer with the most
    page_size: int
    itemsize: int  # bytes of a number of the model, and of side data
    kv_dtype: str = "auto"  # of keys and values, as in `EngineConfig`
    calibration: Path | None = None  # file of DELTA's layers measured for this model, if any
    stability: Path | None = None  # file of SamKV's stable layers, if any
    in_model: tuple[int, ...] | None = None

    @property
    def num_layers(self) -> int:
        """The number of layers, L."""
        return len(self.layers)

    def number(self, in_model: int) -> int:
        """The index in `layers` of the model's layer with this number."""
        return in_model if self.in_model is None else self.in_model.index(in_model)

    @property
    def full_attention(self) -> tuple[int, ...]:
        """Layers without a window or an indexer: the only ones that a policy selects for."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.reads_all)

    @property
    def index_topk(self) -> int | None:
        """How many tokens the indexers of the model select; None for a model without any."""
        return next((layer.index_topk for layer in self.layers if layer.index_topk), None)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.kv_itemsize * sum(layer.numbers_per_token for layer in self.layers)

    @property
    def kv_itemsize(self) -> int:
        """Bytes of a stored element of keys and values."""
        return self.itemsize if self.kv_dtype == "auto" else 1

    def stored_as(self, kv_dtype: str) -> Geometry:
        """The same shape with keys and values stored in this dtype.

        ConfigError where they cannot be stored in 8 bits.
        """
        if kv_dtype == "auto":
            return self
        for layer in self.layers:
            if layer.shared_values:
                raise ConfigError(
                    f"kv_dtype {kv_dtype!r} cannot be used with MLA (multi-head latent "
                    "attention), where values are part of the keys; leave kv_dtype out"
                )
            if layer.alibi:
                raise ConfigError(
                    f"kv_dtype {kv_dtype!r} cannot be used with ALiBi, where positions are stored "
                    "in the keys; leave kv_dtype out"
                )
            for dim in (layer.key_dim, layer.value_dim):
                if dim % SCALE_BYTES:
                    raise ConfigError(
                        f"kv_dtype {kv_dtype!r} needs keys and values whose size is a multiple of "
                        f"{SCALE_BYTES}, not {dim} as this model's; leave kv_dtype out"
                    )
        layers = tuple(dataclasses.replace(x, scale_bytes=SCALE_BYTES) for x in self.layers)
        return dataclasses.replace(self, layers=layers, kv_dtype=kv_dtype)


#: What sampling holds of a request for each token of the vocabulary, besides the logits and a copy
#: of some rows: float32 scores, before and after temperature or penalties (8), sorted ones with
#: int64 places (12), and their weights, sums and what filters leave (14).
_LOGIT_BYTES = 34
#: A process holds about twice the live memory of a step, since allocators retain freed memory:
#: measured 1.4 and 2.2 times the estimate (MLPs of 512 and 2816, 1016 tokens, float32).
_KEPT_BY_ALLOCATOR = 2
#: Of a page: its entry in the index of prefixes (55), its counters and place among free pages, in
#: lists that double (32), its number in the list of the sequence (4), in the table of the engine,
#: whose rows double (8), and in that of a step (4).
_PAGE_LIST_BYTES = 104
#: Of a token: its id (4), its text (4), its time and that of its step (8 each). Those of a prompt
#: have only the id.
_TOKEN_LIST_BYTES = 24
_FLOAT_BYTES = 4
#: A buffer slot stores its token, per head, as an int32.
_ENTRY_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model's memory besides its KV cache.

    weight_bytes: every weight once. head_weight_bytes: of its retrieval head, without shared
    weights. vocab_size: logits of a request. step_numbers: peak live activations of a layer, per
    token of a step; an estimate.
    """

    weight_bytes: int
    vocab_size: int
    step_numbers: int
    head_weight_bytes: int = 0


def memory_model(
    geometry: Geometry,
    size: ModelSize,
    *,
    requests: int,
    token_budget: int,
    prefill_chunk: int,
    page_data: Iterable[Mapping[str, tuple[int, ...]]] = (),
    movable: Collection[int] | None = None,
    num_heads: int | None = None,
    scores: int = 0,
    sequence_bytes: int = 0,
    document_bytes: int = 0,
    gathers: bool = False,
) -> MemoryModel:
    """Every memory term of an engine, for the engine and `keyhole plan` alike.

    requests: the most that run at once. prefill_chunk: the most prompt tokens of a step. page_data:
    shapes of side data per page, of all layers and of the head. movable: layers that the policy can
    offload; None: all that can be. num_heads: as for `layer_memory`. scores: `Policy.token_scores`.
    sequence_bytes: what the policy keeps of a sequence. document_bytes: stored documents that stay
    in the cache's memory. gathers: whether prompts read a copy of a layer's keys and values, as on
    a GPU; on a CPU they are read in place.
    """
    layers = layer_memory(geometry, num_heads)
    if movable is not None:
        layers = tuple(
            dataclasses.replace(layer, movable=layer.movable and i in movable)
            for i, layer in enumerate(layers)
        )
    step_bytes = (prefill_chunk + requests) * size.step_numbers * geometry.itemsize
    return MemoryModel(
        layers=layers,
        requests=requests,
        token_budget=token_budget,
        buffer_tokens=buffer_tokens(token_budget, geometry.page_size),
        page_size=geometry.page_size,
        weight_bytes=size.weight_bytes,
        head_weight_bytes=size.head_weight_bytes,
        side_page_bytes=data_bytes(geometry, page_data),
        list_page_bytes=list_bytes(geometry.page_size, scores),
        request_bytes=size.vocab_size * (2 * geometry.itemsize + _LOGIT_BYTES) + sequence_bytes,
        document_bytes=document_bytes,
        gathered_token_bytes=gathered_bytes(geometry) if gathers else 0,
        runtime_bytes=_KEPT_BY_ALLOCATOR * step_bytes,
    )


def list_bytes(page_size: int, scores: int = 0) -> int:
    """Bytes per page of what the engine lists of pages and tokens, on the host.

    scores: float32 numbers of each token that exist at once in a step.
    """
    return _PAGE_LIST_BYTES + page_size * (_TOKEN_LIST_BYTES + scores * _FLOAT_BYTES)


def gathered_bytes(geometry: Geometry) -> int:
    """The most bytes per token of what `kernels.prefill` copies of a layer on a GPU.

    Keys and values in the model's dtype. Those of 8 bits are copied as they are, their scales once
    more, converted to float32, multiplied, and rounded, first the keys and then the values.
    """
    most = 0
    for layer in geometry.layers:
        numbers = (layer.key_dim + layer.value_dim) * geometry.itemsize
        if geometry.kv_dtype != "auto":
            stored = layer.value_row + layer.scale_bytes
            converted = 2 * _FLOAT_BYTES * layer.value_dim
            numbers = layer.key_dim * geometry.itemsize + stored + converted
        most = max(most, layer.num_kv_heads * numbers)
    return most


def layer_memory(geometry: Geometry, num_heads: int | None = None) -> tuple[LayerMemory, ...]:
    """The memory of each layer. Layers with a sliding window or an indexer stay resident.

    num_heads: lists of a selection where there are more than KV heads, as for `ResidentBuffer`.
    """
    return tuple(
        LayerMemory(
            token_bytes=layer.numbers_per_token * geometry.kv_itemsize,
            slot_bytes=(num_heads or layer.num_kv_heads)
            * (layer.numbers_per_head * geometry.kv_itemsize + _ENTRY_BYTES),
            movable=layer.reads_all,
        )
        for layer in geometry.layers
    )


def data_bytes(geometry: Geometry, shapes: Iterable[Mapping[str, tuple[int, ...]]]) -> int:
    """Bytes per page of the side data of these shapes: a policy's, layer by layer, or a head's."""
    numbers = sum(math.prod(shape) for layer in shapes for shape in layer.values())
    return numbers * geometry.itemsize


def bytes_per_page(geometry: Geometry, shapes: Iterable[Mapping[str, tuple[int, ...]]]) -> int:
    """Bytes of one page of all layers, with the side data of these shapes."""
    return geometry.page_size * geometry.token_bytes + data_bytes(geometry, shapes)
