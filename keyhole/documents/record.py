"""The record of a document that was encoded alone, and its file.

A record has, per layer, keys, values and block statistics. A block is `block_size` tokens; the last
one may be shorter. Shape letters: N blocks, n tokens, Hq query heads, Hkv key heads, D the size of
a key, Dv of a value.

The file is a safetensors file, whose header identifies the record and has a digest per tensor:

    8 bytes    length of the header
    header     JSON: tensor name -> dtype, shape, place; "__metadata__": strings, see `_FORMAT`
    statistics token ids, checksums and the small tensors of all layers, contiguous: one read gets
               them
    rows       keys and values, layer by layer; a row of either is one token, so that any run of
               tokens is one run of bytes
    extremes   extreme keys of all layers, contiguous
    heads      per retrieval head that ran with the model: its keys, row by row, and the features
               of the last token; often none

Every program that reads safetensors can read these files. The header is sealed, and holds a SHA-256
of each tensor. Opening a record checks the seal, the file's size, and the statistics, which it
reads anyway. Rows are read later and in part: `verify` compares all of them with their SHA-256. A
store with `check="read"` compares each block, as it is read, with its CRC-32, which is stored with
the statistics and detects every change of up to 32 consecutive bits and all but one in 2**32 other
changes. That takes .3 s of a core per GB (one thread of an EPYC of family 26; reading alone takes
.07 s from the page cache).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from keyhole.config import SCALE_BYTES, is_count, require
from keyhole.documents.integrity import Fingerprint, RecordError, canonical, is_sealed, seal, sha256
from keyhole.documents.storage import StorageBackend, StorageReader
from keyhole.errors import ConfigError, NumericalError

if TYPE_CHECKING:
    from torch import Tensor


_MAY_BE_INFINITE = ("alpha", "received")


def _quantised() -> tuple[torch.dtype, ...]:
    """The dtypes of rows of 8-bit numbers, each with its scale; torch is imported by need only."""
    return (torch.int8, torch.uint8)


@dataclass(eq=False, kw_only=True)
class LayerStatistics:
    """One layer's statistics of a document's blocks, at positions 0 to n - 1.

    block_keys: float32 [N, Hkv, D], mean key of each block.
    local_queries: float32 [m, Hq, D], mean rotated query of each of the last m blocks.
    representatives: int64 [N], the representative token of each block, counted from 0.
    representative_keys: the model's dtype [N, Hkv, D], its key.
    alpha: float32 [N], how fast the attention that it receives decays with distance.
    received: float32 [N], the mean attention that it receives. Both over the same distances for all
    blocks, +inf where these do not exist (`keyhole.reuse.block_statistics`).
    """

    block_keys: Tensor
    local_queries: Tensor
    representatives: Tensor
    representative_keys: Tensor
    alpha: Tensor
    received: Tensor


#: The small tensors of a layer, by name.
STATISTICS = tuple(field.name for field in fields(LayerStatistics))


@dataclass(eq=False, kw_only=True)
class LayerRecord(LayerStatistics):
    """One layer of a document.

    keys: the model's dtype [n, Hkv, D], rotated at positions 0 to n - 1; for MLA one head, [latent
    | rope]. values: same dtype [n, Hkv, Dv]; None for MLA, whose keys contain them. Keys and values
    of a cache of 8 bits are its rows, int8 or uint8 [n, Hkv, D + 4]. extreme_keys: the model's
    dtype [N, k, Hkv, D], the keys of each block and head that are farthest from their mean. They
    are read only on demand.
    """

    keys: Tensor
    values: Tensor | None
    extreme_keys: Tensor


@dataclass(frozen=True, eq=False)
class HeadRecord:
    """A retrieval head's keys of a document, in the model's dtype.

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
    dtype = record.layers[0].representative_keys.dtype
    good = dtype in (torch.float32, torch.float16, torch.bfloat16)
    require(good, "dtype of the keys", dtype, "float32, float16 or bfloat16")
    stored = record.layers[0].keys.dtype
    good = stored in (dtype, *_quantised())
    require(good, "dtype of the stored keys", stored, f"{dtype}, int8 or uint8")
    for number, layer in enumerate(record.layers):
        _validate_layer(f"layer {number}: ", layer, record, (dtype, stored))
    for name, head in record.heads.items():
        _validate_head(f"head {name}: ", head, len(ids), dtype)


def _validate_head(where: str, head: HeadRecord, n: int, dtype: torch.dtype) -> None:
    require(head.keys.ndim == 3, f"{where}keys", list(head.keys.shape), "of shape [n, Hkv, D]")
    _expect(f"{where}keys", head.keys, [n, *head.keys.shape[1:]], dtype)
    _expect(f"{where}last", head.last, [head.last.numel()], dtype)
    _require_numbers(f"{where}keys", head.keys, may_be_infinite=False)
    _require_numbers(f"{where}last", head.last, may_be_infinite=False)


def _validate_layer(
    where: str, layer: LayerRecord, record: DocumentRecord, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """dtypes: of the model, and of the stored keys and values."""
    n, N = len(record.token_ids), record.num_blocks
    require(layer.keys.ndim == 3, f"{where}keys", list(layer.keys.shape), "of shape [n, Hkv, D]")
    _, heads, row = layer.keys.shape
    dtype, stored = dtypes
    dim = row - (SCALE_BYTES if stored in _quantised() else 0)
    last, query_heads = N, heads
    if layer.local_queries.ndim == 3:
        last, query_heads = min(N, max(1, len(layer.local_queries))), layer.local_queries.shape[1]
    _expect(f"{where}keys", layer.keys, [n, heads, row], stored)
    if layer.values is not None:
        _expect(f"{where}values", layer.values, [n, heads, layer.values.shape[-1]], stored)
    _expect(f"{where}block_keys", layer.block_keys, [N, heads, dim], torch.float32)
    _expect(f"{where}local_queries", layer.local_queries, [last, query_heads, dim], torch.float32)
    _expect(f"{where}representatives", layer.representatives, [N], torch.int64)
    _expect(f"{where}representative_keys", layer.representative_keys, [N, heads, dim], dtype)
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
        elif tensor is not None and tensor.dtype in _quantised():
            scales = tensor[..., -SCALE_BYTES:].contiguous().view(torch.float32)
            _require_numbers(f"scales of {where}{name}", scales, may_be_infinite=False)


def _require_numbers(name: str, tensor: Tensor, *, may_be_infinite: bool) -> None:
    # Checking the minimum and maximum is equivalent to checking every number, and 20 times as fast.
    ends = torch.stack(tensor.aminmax()) if tensor.numel() else tensor
    if bool((ends.isnan() if may_be_infinite else ~ends.isfinite()).any()):
        bad = tensor.isnan() if may_be_infinite else ~tensor.isfinite()
        raise NumericalError(
            f"{name} contain {int(bad.sum())} NaN or infinite numbers, so they are not stored; "
            "load the model with dtype='float32'"
        )


def _expect(name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    if list(tensor.shape) != shape or tensor.dtype != dtype:
        raise ConfigError(
            f"{name} {list(tensor.shape)} {tensor.dtype} of a document record must be {shape} "
            f"{dtype}"
        )


_FORMAT = "keyhole document"
_VERSION = "1"
# 1: alpha over whatever distances a block had. 2: over the same distances for all blocks.
# 3: queries of the last blocks only.
_STATISTICS = "3"
_DTYPES = {
    "I64": "int64",
    "I8": "int8",
    "U8": "uint8",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
_NAMES = {f"torch.{dtype}": name for name, dtype in _DTYPES.items()}
# Tensors with a row per token, which may be read in part.
_ROWS = ("keys", "values")
# What safetensors itself allows.
_MOST_HEADER_BYTES = 100_000_000


class Span(NamedTuple):
    """A tensor in the file: bytes `start` to `stop`, counted from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str

    def tensor(self, data: Tensor) -> Tensor:
        """The tensor in its bytes, uint8 [stop - start]; no copy."""
        return data.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class RecordHeader:
    """The header of a record.

    name: the document's name when it was encoded. digest: of its source. created: seconds
    since 1970, UTC. data_start: where the header ends. rows_start: where the statistics end.
    statistics: how alpha and the received attention were measured; see `_STATISTICS`.
    """

    name: str
    digest: str
    block_size: int
    num_layers: int
    created: float
    fingerprint: dict[str, str | int | float]
    spans: dict[str, Span]
    data_start: int
    rows_start: int
    statistics: str

    @property
    def tokens(self) -> int:
        """How many tokens the document has."""
        return self.spans["token_ids"].shape[0]

    @property
    def is_current(self) -> bool:
        """Whether it has the tensors that records have today."""
        return self.statistics == _STATISTICS

    @property
    def extremes(self) -> list[Span]:
        """Where each layer's extreme keys are, side by side."""
        return [self.spans[f"layers.{layer}.extreme_keys"] for layer in range(self.num_layers)]


def serialise(
    record: DocumentRecord, *, name: str, digest: str, created: float, fingerprint: Fingerprint
) -> list[memoryview]:
    """The file in pieces, to be written one after the other.

    Tensors on the CPU that are contiguous are not copied.
    """
    stored = {key: x.detach().cpu().contiguous() for key, x in _ordered(record)}
    checksums = {
        checksums_name(key): torch.tensor(checksums_of(x.view(torch.uint8), record.block_size))
        for key, x in stored.items()
        if key.rpartition(".")[2] in _ROWS
    }
    tensors = {"token_ids": stored.pop("token_ids")} | checksums | stored
    text = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": name,
        "digest": digest,
        "block_size": str(record.block_size),
        "num_layers": str(len(record.layers)),
        "statistics": _STATISTICS,
        "created": repr(created),
        "fingerprint": canonical(dict(fingerprint)).decode(),
    }
    return sealed_file(tensors, text)


def sealed_file(tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> list[memoryview]:
    """A safetensors file in pieces, whose header has these strings, digests of all, and a seal.

    tensors: on the CPU and contiguous; they are not copied.
    """
    pieces = {key: x.view(-1).view(torch.uint8).numpy().data for key, x in tensors.items()}
    header: dict[str, Any] = {}
    end = 0
    for key, x in tensors.items():
        header[key] = {
            "dtype": _NAMES[str(x.dtype)],
            "shape": list(x.shape),
            "data_offsets": [end, end + x.nbytes],
        }
        end += x.nbytes
    digests = {key: sha256(piece) for key, piece in pieces.items()}
    text = {**text, "digests": canonical(digests).decode()}
    # The seal is one of the metadata strings, and covers the tensors' places, too.
    text["sha256"] = seal({**header, "__metadata__": text})["sha256"]
    line = canonical({**header, "__metadata__": text})
    line += b" " * (-len(line) % 8)  # tensors are aligned
    return [memoryview(len(line).to_bytes(8, "little") + line), *pieces.values()]


def checksums_name(name: str) -> str:
    """The name of the checksums, int64 [N], of a tensor with a row per token."""
    return f"checksums.{name}"


def checksums_of(rows: Tensor, block_size: int) -> list[int]:
    """CRC-32 of each block of rows, uint8 [n, ...]; the last block may be shorter."""
    return [zlib.crc32(block.contiguous().numpy().data) for block in rows.split(block_size)]


def _ordered(record: DocumentRecord) -> Iterator[tuple[str, Tensor]]:
    """Statistics before rows, and wide numbers before narrow ones: so all are aligned."""
    small = [("token_ids", record.token_ids)]
    rows, extremes, heads = [], [], []
    for number, layer in enumerate(record.layers):
        small += [(f"layers.{number}.{name}", getattr(layer, name)) for name in STATISTICS]
        rows += [(f"layers.{number}.keys", layer.keys)]
        rows += [(f"layers.{number}.values", x) for x in [layer.values] if x is not None]
        extremes += [(f"layers.{number}.extreme_keys", layer.extreme_keys)]
    for name, head in record.heads.items():
        heads += [(f"heads.{name}.keys", head.keys), (f"heads.{name}.last", head.last)]
    yield from sorted(small, key=lambda entry: -entry[1].itemsize)
    yield from rows
    yield from extremes
    yield from heads


def read_header(reader: StorageReader) -> RecordHeader:
    """The header of a file; RecordError "damaged" if it is not as it was written.

    The caller checks that the record belongs to the right text and model.
    """
    text, spans, data_start = read_sealed(reader, (_FORMAT, _VERSION))
    return RecordHeader(
        name=text["name"],
        digest=text["digest"],
        block_size=int(text["block_size"]),
        num_layers=int(text["num_layers"]),
        created=float(text["created"]),
        fingerprint=json.loads(text["fingerprint"]),
        spans=spans,
        data_start=data_start,
        rows_start=spans["layers.0.keys"].start,
        statistics=text.get("statistics", "1"),
    )


def find_header(place: StorageBackend, record: str) -> RecordHeader | None:
    """The header of a record in a storage; None if the record is missing or damaged."""
    try:
        with closing(place.reader(f"records/{record}")) as reader:
            return read_header(reader)
    except (OSError, RecordError):
        return None


def read_sealed(
    reader: StorageReader, kind: tuple[str, str]
) -> tuple[dict[str, str], dict[str, Span], int]:
    """What `sealed_file` wrote: the strings, the tensors' places, and where these begin.

    kind: "format" and "version" of the strings. RecordError "damaged" for any other file.
    """
    line = _header_line(reader)
    try:
        header: dict[str, Any] = json.loads(line)
        text: dict[str, str] = header.pop("__metadata__")
        found = (text["format"], text["version"])
        plain = {key: value for key, value in text.items() if key != "sha256"}
        sealed = is_sealed({**header, "__metadata__": plain, "sha256": text.get("sha256")})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged("the header of its record cannot be read") from error
    if found != kind:
        raise _damaged(f"its record is a {found[0]} of version {found[1]}", f"version {kind[1]}")
    if not sealed:
        raise _damaged("the header of its record has changed")
    data_start = 8 + len(line)
    digests = json.loads(text["digests"])
    spans = {
        key: Span(
            _DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            data_start + entry["data_offsets"][0],
            data_start + entry["data_offsets"][1],
            digests[key],
        )
        for key, entry in header.items()
    }
    size = max(span.stop for span in spans.values())
    if reader.size != size:
        raise _damaged(f"its record has {reader.size} bytes", f"{size} bytes")
    return text, spans, data_start


def read_statistics(reader: StorageReader, header: RecordHeader) -> dict[str, Tensor]:
    """Everything before the rows, in one read; RecordError "damaged" if it has changed."""
    begin = header.data_start
    data = reader.read([(begin, header.rows_start)])[0]
    spans = {key: span for key, span in header.spans.items() if span.stop <= header.rows_start}
    parts = {key: data[span.start - begin : span.stop - begin] for key, span in spans.items()}
    for key, part in parts.items():
        check_tensor(key, spans[key], part)
    return {key: spans[key].tensor(part) for key, part in parts.items()}


def check_tensors(reader: StorageReader, header: RecordHeader) -> None:
    """Reads every tensor, one after the other; RecordError "damaged" for one that has changed."""
    for key, span in header.spans.items():
        check_tensor(key, span, reader.read([(span.start, span.stop)])[0])


def check_tensor(key: str, span: Span, data: Tensor) -> None:
    """RecordError "damaged" if a tensor's bytes are not those that were written."""
    found = sha256(data.numpy())
    if found != span.digest:
        raise _damaged(
            f"{key} of its record has changed, its sha256 begins with {found[:12]}",
            f"sha256 {span.digest[:12]}",
        )


def _header_line(reader: StorageReader) -> bytes:
    if reader.size < 8:
        raise _damaged(f"its record has {reader.size} bytes", "a header and tensors")
    length = int.from_bytes(_bytes(reader, 0, 8), "little")
    if length > min(reader.size - 8, _MOST_HEADER_BYTES):
        raise _damaged(f"its record has {reader.size} bytes", f"a header of {length} and tensors")
    return _bytes(reader, 8, 8 + length)


def _bytes(reader: StorageReader, start: int, stop: int) -> bytes:
    return reader.read([(start, stop)])[0].numpy().tobytes()


def _damaged(what: str, right: str = "as it was written") -> RecordError:
    return RecordError("damaged", what, right)
