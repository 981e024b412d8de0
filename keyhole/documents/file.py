"""A record as a safetensors file, whose header identifies it and has a digest per tensor.

    8 bytes    length of the header
    header     JSON: tensor name -> dtype, shape, place; "__metadata__": texts, see `_FORMAT`
    statistics token ids, checksums and the small tensors of all layers, side by side: one read gets
               them
    rows       keys and values, layer by layer; a row of either is one token, so that any run of
               tokens is one run of bytes
    extremes   extreme keys of all layers, side by side; records of older versions have none
    heads      per retrieval head that ran beside the model: its keys, row by row, and the features
               of the last token; often none

Every program that reads safetensors reads these files. The header is sealed, and holds a SHA-256 of
each tensor. Opening checks the seal, the file's size, and the statistics, which it reads anyway.
Rows are read later and in part: `verify` compares all of them with their SHA-256, and a store with
`check="read"` each block, as it is read, with its CRC-32 among the statistics, which finds every
change of up to 32 successive bits and all but one in 2**32 others. That takes .3 s of a core per
GB (one thread of an EPYC of family 26, beside other work; reading alone .07 s from the page cache).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from keyhole.documents.integrity import Fingerprint, RecordError, canonical, is_sealed, seal, sha256
from keyhole.documents.record import STATISTICS, DocumentRecord
from keyhole.documents.storage import StorageReader

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RecordHeader", "Span", "check", "check_all", "parse", "read_small", "serialise"]

_FORMAT = "keyhole document"
_VERSION = "1"
_DTYPES = {
    "I64": "int64",
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

    @property
    def tokens(self) -> int:
        """How many tokens the document has."""
        return self.spans["token_ids"].shape[0]

    @property
    def is_current(self) -> bool:
        """Whether it has everything that records have today: extreme keys and checksums."""
        return bool(self.extremes) and checksums_name("layers.0.keys") in self.spans

    @property
    def extremes(self) -> list[Span]:
        """Where each layer's extreme keys are, side by side; none in records of older versions."""
        names = [f"layers.{layer}.extreme_keys" for layer in range(self.num_layers)]
        return [self.spans[name] for name in names if name in self.spans]


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
    text = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": name,
        "digest": digest,
        "block_size": str(record.block_size),
        "num_layers": str(len(record.layers)),
        "created": repr(created),
        "fingerprint": canonical(dict(fingerprint)).decode(),
        "digests": canonical({key: sha256(piece) for key, piece in pieces.items()}).decode(),
    }
    # The seal stands among the texts, and covers the tensors' places too.
    text["sha256"] = seal({**header, "__metadata__": text})["sha256"]
    line = canonical({**header, "__metadata__": text})
    line += b" " * (-len(line) % 8)  # tensors are aligned
    return [memoryview(len(line).to_bytes(8, "little") + line), *pieces.values()]


def checksums_name(name: str) -> str:
    """The name of the checksums, int64 [N], of a tensor with a row per token."""
    return f"checksums.{name}"


def checksums_of(rows: Tensor, block_size: int) -> list[int]:
    """CRC-32 of each block of rows, uint8 [n, ...]; the last block may be shorter."""
    return [zlib.crc32(block.contiguous().numpy()) for block in rows.split(block_size)]


def _ordered(record: DocumentRecord) -> Iterator[tuple[str, Tensor]]:
    """Statistics before rows, and wide numbers before narrow ones: so all are aligned."""
    small = [("token_ids", record.token_ids)]
    rows, extremes, heads = [], [], []
    for number, layer in enumerate(record.layers):
        small += [(f"layers.{number}.{name}", getattr(layer, name)) for name in STATISTICS]
        rows += [(f"layers.{number}.keys", layer.keys)]
        rows += [(f"layers.{number}.values", x) for x in [layer.values] if x is not None]
        extremes += [
            (f"layers.{number}.extreme_keys", x) for x in [layer.extreme_keys] if x is not None
        ]
    for name, head in record.heads.items():
        heads += [(f"heads.{name}.keys", head.keys), (f"heads.{name}.last", head.last)]
    yield from sorted(small, key=lambda entry: -entry[1].itemsize)
    yield from rows
    yield from extremes
    yield from heads


def parse(reader: StorageReader) -> RecordHeader:
    """The header of a file; RecordError "damaged" if it is not as it was written.

    The caller checks that the record belongs to the right text and model.
    """
    line = _header_line(reader)
    try:
        header: dict[str, Any] = json.loads(line)
        text: dict[str, str] = header.pop("__metadata__")
        told = (text["format"], text["version"])
        plain = {key: value for key, value in text.items() if key != "sha256"}
        sealed = is_sealed({**header, "__metadata__": plain, "sha256": text.get("sha256")})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged("the header of its record cannot be read") from error
    if told != (_FORMAT, _VERSION):
        raise _damaged(f"its record is a {told[0]} of version {told[1]}", f"version {_VERSION}")
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
    )


def read_small(reader: StorageReader, header: RecordHeader) -> dict[str, Tensor]:
    """Everything before the rows, in one read; RecordError "damaged" if it has changed."""
    begin = header.data_start
    data = reader.read([(begin, header.rows_start)])[0]
    spans = {key: span for key, span in header.spans.items() if span.stop <= header.rows_start}
    parts = {key: data[span.start - begin : span.stop - begin] for key, span in spans.items()}
    for key, part in parts.items():
        check(key, spans[key], part)
    return {key: spans[key].tensor(part) for key, part in parts.items()}


def check_all(reader: StorageReader, header: RecordHeader) -> None:
    """Reads every tensor, one after the other; RecordError "damaged" for one that has changed."""
    for key, span in header.spans.items():
        check(key, span, reader.read([(span.start, span.stop)])[0])


def check(key: str, span: Span, data: Tensor) -> None:
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
