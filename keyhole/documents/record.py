"""The record of a document encoded alone: per layer keys, values and block statistics.

A block is `block_size` tokens, the last one may be shorter: N blocks of n tokens. Letters as
everywhere: Hq query heads, Hkv key heads, D numbers in a key, Dv in a value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from keyhole.config import is_count, require
from keyhole.errors import ConfigError, NumericalError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "STATISTICS",
    "DocumentRecord",
    "HeadRecord",
    "LayerRecord",
    "LayerStatistics",
    "validate",
]

#: The small tensors of a layer, by name.
STATISTICS = (
    "block_keys",
    "block_queries",
    "representatives",
    "representative_keys",
    "alpha",
    "received",
)
_MAY_BE_INFINITE = ("alpha", "received")


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """One layer's statistics of a document's blocks, at positions 0 to n - 1.

    block_keys: float32 [N, Hkv, D], mean key of each block.
    block_queries: float32 [N, Hq, D], mean rotated query of each block.
    representatives: int64 [N], the representative token of each block, counted from 0.
    representative_keys: the cache's dtype [N, Hkv, D], its key.
    alpha: float32 [N], how fast the attention that it receives decays.
    received: float32 [N], the mean attention that it receives.
    """

    block_keys: Tensor
    block_queries: Tensor
    representatives: Tensor
    representative_keys: Tensor
    alpha: Tensor
    received: Tensor


@dataclass(eq=False)
class LayerRecord:
    """One layer of a document; `LayerStatistics` documents the inherited fields.

    keys: the cache's dtype [n, Hkv, D], rotated at positions 0 to n - 1; for MLA one head,
    [latent | rope]. values: same dtype [n, Hkv, Dv]; None for MLA, whose keys hold them.
    extreme_keys: same dtype [N, k, Hkv, D], the keys of each block and head that lie farthest from
    their mean; None in records of older versions. Read on demand only.
    """

    keys: Tensor
    values: Tensor | None
    block_keys: Tensor
    block_queries: Tensor
    representatives: Tensor
    representative_keys: Tensor
    alpha: Tensor
    received: Tensor
    extreme_keys: Tensor | None = None


@dataclass(frozen=True, eq=False)
class HeadRecord:
    """A retrieval head's keys of a document, in the dtype of the layers' keys.

    keys: [n, Hkv, D], not rotated. last: [H], features of the last token, from which the key of the
    next token is computed.
    """

    keys: Tensor
    last: Tensor


@dataclass(eq=False)
class DocumentRecord:
    """A document as one model encoded it. token_ids: int64 [n].

    heads: by the fingerprint of the retrieval head.
    """

    token_ids: Tensor
    block_size: int
    layers: list[LayerRecord]
    heads: dict[str, HeadRecord] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """N, the short last one included."""
        return -(-len(self.token_ids) // self.block_size)


def validate(record: DocumentRecord) -> None:
    """Raises ConfigError for shapes or dtypes that disagree, NumericalError for NaN or infinity."""
    ids = record.token_ids
    require(is_count(record.block_size), "block_size", record.block_size, "at least 1")
    require(bool(record.layers), "layers", record.layers, "at least one layer")
    _expect("token_ids", ids, [ids.numel()], torch.int64)
    require(ids.numel() > 0, "token_ids", [], "at least one token")
    dtype = record.layers[0].keys.dtype
    good = dtype in (torch.float32, torch.float16, torch.bfloat16)
    require(good, "dtype of the keys", dtype, "float32, float16 or bfloat16")
    for number, layer in enumerate(record.layers):
        _validate_layer(f"layer {number}: ", layer, record, dtype)
    for name, head in record.heads.items():
        _validate_head(f"head {name}: ", head, len(ids), dtype)


def _validate_head(where: str, head: HeadRecord, n: int, dtype: torch.dtype) -> None:
    require(head.keys.ndim == 3, f"{where}keys", list(head.keys.shape), "of shape [n, Hkv, D]")
    _expect(f"{where}keys", head.keys, [n, *head.keys.shape[1:]], dtype)
    _expect(f"{where}last", head.last, [head.last.numel()], dtype)
    _require_numbers(f"{where}keys", head.keys, may_be_infinite=False)
    _require_numbers(f"{where}last", head.last, may_be_infinite=False)


def _validate_layer(
    where: str, layer: LayerRecord, record: DocumentRecord, dtype: torch.dtype
) -> None:
    n, N = len(record.token_ids), record.num_blocks
    require(layer.keys.ndim == 3, f"{where}keys", list(layer.keys.shape), "of shape [n, Hkv, D]")
    _, heads, dim = layer.keys.shape
    query_heads = layer.block_queries.shape[1] if layer.block_queries.ndim == 3 else heads
    _expect(f"{where}keys", layer.keys, [n, heads, dim], dtype)
    if layer.values is not None:
        _expect(f"{where}values", layer.values, [n, heads, layer.values.shape[-1]], dtype)
    _expect(f"{where}block_keys", layer.block_keys, [N, heads, dim], torch.float32)
    _expect(f"{where}block_queries", layer.block_queries, [N, query_heads, dim], torch.float32)
    _expect(f"{where}representatives", layer.representatives, [N], torch.int64)
    _expect(f"{where}representative_keys", layer.representative_keys, [N, heads, dim], dtype)
    if layer.extreme_keys is not None:
        shape = [N, layer.extreme_keys.shape[1:2].numel(), heads, dim]
        _expect(f"{where}extreme_keys", layer.extreme_keys, shape, dtype)
    for name in ("alpha", "received"):
        _expect(f"{where}{name}", getattr(layer, name), [N], torch.float32)
    tokens = layer.representatives.cpu()
    outside = (tokens // record.block_size != torch.arange(N)) | (tokens >= n)
    if bool(outside.any()):
        block = int(outside.nonzero()[0])
        right = f"a token of its {record.block_size}, below {n}"
        raise ConfigError(
            f"{where}representatives of block {block}: token {tokens[block]} must be {right}"
        )
    for name in ("keys", "values", "extreme_keys", *STATISTICS):
        tensor: Tensor | None = getattr(layer, name)
        if tensor is not None and tensor.is_floating_point():
            _require_numbers(f"{where}{name}", tensor, may_be_infinite=name in _MAY_BE_INFINITE)


def _require_numbers(name: str, tensor: Tensor, *, may_be_infinite: bool) -> None:
    # Checking the minimum and maximum is equivalent to checking every number, and 20 times as fast.
    ends = torch.stack(tensor.aminmax()) if tensor.numel() else tensor
    if bool((ends.isnan() if may_be_infinite else ~ends.isfinite()).any()):
        bad = tensor.isnan() if may_be_infinite else ~tensor.isfinite()
        raise NumericalError(
            f"{name} hold {int(bad.sum())} NaN or infinite numbers, and are not stored; load the "
            "model with dtype='float32'"
        )


def _expect(name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    if list(tensor.shape) != shape or tensor.dtype != dtype:
        raise ConfigError(
            f"{name} {list(tensor.shape)} {tensor.dtype} of a document record must be {shape} "
            f"{dtype}"
        )
