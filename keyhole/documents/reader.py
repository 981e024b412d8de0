"""Opens stored documents and checks them.

An open document has its small tensors in memory and reads keys and values on demand. The checks
find out whether a stored document is unchanged and belongs to this model.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from keyhole.documents.catalogue import Catalogue
from keyhole.documents.index import DocumentInfo, record_file
from keyhole.documents.integrity import (
    Fingerprint,
    Problem,
    RecordError,
    differences,
    foreign,
    model_of,
)
from keyhole.documents.record import (
    STATISTICS,
    HeadRecord,
    LayerStatistics,
    RecordHeader,
    Span,
    check_tensor,
    check_tensors,
    checksums_name,
    checksums_of,
    find_header,
    read_header,
    read_statistics,
)
from keyhole.documents.source import SourceFile
from keyhole.documents.storage import StorageBackend, StorageReader
from keyhole.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


#: Memory for headers and statistics of documents that were opened before.
MEMORY_BYTES = 256 << 20

#: Memory of a tensor's entry in a header, with its name and digest: measured, 400 to 500.
_SPAN_BYTES = 500


@dataclass(frozen=True, eq=False)
class VerifiedRecord:
    """The header of a record and its small tensors by name, compared with their digests."""

    header: RecordHeader
    small: dict[str, Tensor]

    @property
    def token_ids(self) -> Tensor:
        """Int64 [n]."""
        return self.small["token_ids"]

    @cached_property
    def statistics(self) -> list[LayerStatistics]:
        """The block statistics of each layer."""
        return [
            LayerStatistics(**{name: self.small[f"layers.{layer}.{name}"] for name in STATISTICS})
            for layer in range(self.header.num_layers)
        ]

    @cached_property
    def checksums(self) -> dict[str, list[int]]:
        """The checksums of the blocks of each tensor with a row per token, by its name."""
        names = {name: checksums_name(name) for name in self.header.spans}
        return {x: self.small[own].tolist() for x, own in names.items() if own in self.small}

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, about."""
        tensors = sum(tensor.nbytes for tensor in self.small.values())
        return tensors + len(self.header.spans) * _SPAN_BYTES


class VerifiedRecords:
    """Records that were opened last, so that an unchanged file is read and hashed once.

    fingerprint: of the model. limit_bytes: of memory; the least recently opened ones are dropped.
    Safe from threads.
    """

    def __init__(self, fingerprint: Fingerprint, limit_bytes: int) -> None:
        self._fingerprint, self._limit_bytes = fingerprint, limit_bytes
        self._known: OrderedDict[tuple[str, str], VerifiedRecord] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, reader: StorageReader, digest: str) -> VerifiedRecord:
        """The record in an open file; RecordError if it is damaged or belongs to another source.

        It is read again if the file's identity has changed or is unknown.
        """
        key = (reader.identity or "", digest)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        header = header_of(reader, digest, self._fingerprint)
        record = VerifiedRecord(header, read_statistics(reader, header))
        if reader.identity is not None:
            self._remember(key, record)
        return record

    def _remember(self, key: tuple[str, str], record: VerifiedRecord) -> None:
        with self._lock:
            if key not in self._known:
                self._known[key] = record
                self._bytes += record.num_bytes
            while self._bytes > self._limit_bytes:
                _, dropped = self._known.popitem(last=False)
                self._bytes -= dropped.num_bytes


class StoredDocument:
    """A record that is not deleted until `close`, or the end of a `with` block.

    info: from the index, perhaps already of a text that replaced this one. digest: SHA-256 of this
    record's source. length: tokens. num_layers: L. token_ids: int64 [n].
    checks: whether everything that is read is compared with its checksum.

    All tensors are on the CPU.
    """

    def __init__(
        self,
        info: DocumentInfo,
        record: VerifiedRecord,
        reader: StorageReader,
        held: ExitStack,
        *,
        checks: bool = False,
    ) -> None:
        header = record.header
        self.info = info
        self.digest = header.digest
        self.length = header.tokens
        self.block_size = header.block_size
        self.num_layers = header.num_layers
        self._spans = header.spans
        self._reader = reader
        self._record = record
        self._checks = checks
        self._release = weakref.finalize(self, held.close)
        self.token_ids = record.token_ids

    def __enter__(self) -> StoredDocument:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._release.alive

    @property
    def is_local(self) -> bool:
        """Whether many small reads take about as long as a large one."""
        return self._reader.is_local

    @property
    def identity(self) -> str | None:
        """Of the record: another one has other content; None if that is not known."""
        own = self._reader.identity
        return None if own is None else f"{own}-{self.info.digest}"

    @property
    def bytes_read(self) -> int:
        """Bytes read of the record so far, header and statistics included."""
        return self._reader.bytes_read

    def close(self) -> None:
        """Releases the record. Tensors that were read stay valid."""
        self._release()

    def statistics(self, layer: int) -> LayerStatistics:
        """The block statistics of a layer, which were read and checked when the document was
        opened.
        """
        self._require(0 <= layer < self.num_layers, f"layer {layer}", f"0 to {self.num_layers - 1}")
        return self._record.statistics[layer]

    def rows(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Keys [stop - start, Hkv, D] and values [stop - start, Hkv, Dv] of these tokens.

        Values are None for a layer that stores none (MLA). Only these rows are read, or, to compare
        them with their checksums, the blocks that contain them. Raises ConfigError for rows outside
        of the document, RecordError if they can no longer be read or have changed.
        """
        self._require(0 <= layer < self.num_layers, f"layer {layer}", f"0 to {self.num_layers - 1}")
        good = 0 <= start <= stop <= self.length
        self._require(good, f"rows {start} to {stop}", f"within 0 to {self.length}")
        tensors = self._rows(self._names(layer), start, stop)
        return tensors[0], tensors[1] if len(tensors) > 1 else None

    def row_spans(self, layer: int) -> list[Span]:
        """Where keys and, unless a layer stores none, values of a layer are."""
        return [self._spans[name] for name in self._names(layer)]

    def read_rows(
        self, layer: int, runs: Sequence[tuple[int, int]], out: Sequence[memoryview]
    ) -> None:
        """Reads `rows` of several runs, one after the other, into memory of the caller.

        out: bytes for those of each of `row_spans`. Safe from threads.
        """
        parts, done = [], 0
        for start, stop in runs:
            checked = self._rows(self._names(layer), start, stop) if self._checks else []
            for i, (span, memory) in enumerate(zip(self.row_spans(layer), out, strict=True)):
                part = _part(span, start, stop)
                width = (part.stop - part.start) // (stop - start)
                own = memory[done * width : (done + stop - start) * width]
                if self._checks:
                    own[:] = memoryview(checked[i].reshape(-1).view(torch.uint8).numpy().data)
                else:
                    parts.append((part.start, own))
            done += stop - start
        if parts:
            with self._readable():
                self._reader.read_into(parts)

    def _names(self, layer: int) -> list[str]:
        names = (f"layers.{layer}.keys", f"layers.{layer}.values")
        return [name for name in names if name in self._spans]

    @property
    def heads(self) -> frozenset[str]:
        """Fingerprints of the retrieval heads whose keys are stored."""
        return frozenset(name.split(".")[1] for name in self._spans if name.startswith("heads."))

    def head_keys(self, head: str, start: int, stop: int) -> Tensor:
        """Keys [stop - start, Hkv, D] of a retrieval head of `heads`, without RoPE; see `rows`."""
        good = 0 <= start <= stop <= self.length
        self._require(good, f"rows {start} to {stop}", f"within 0 to {self.length}")
        return self._rows([f"heads.{head}.keys"], start, stop)[0]

    def head_last(self, head: str) -> Tensor:
        """Features [H] of the last token, for a retrieval head of `heads`; as `rows`."""
        name = f"heads.{head}.last"
        last = self._read([self._spans[name]])[0]
        self._check(name, last)
        return last

    def head_record(self, head: str) -> HeadRecord:
        """Everything stored for a retrieval head of `heads`; RecordError if it has changed."""
        names = [f"heads.{head}.keys", f"heads.{head}.last"]
        keys, last = self._read([self._spans[name] for name in names])
        for name, x in zip(names, (keys, last), strict=True):
            check_tensor(name, self._spans[name], x.view(-1).view(torch.uint8))
        return HeadRecord(keys, last)

    def extreme_keys(self) -> list[Tensor]:
        """The extreme keys of all blocks per layer, [N, k, Hkv, D]; one read.

        Raises as `rows`.
        """
        spans = self._record.header.extremes
        begin = spans[0].start
        data = self._bytes([(begin, spans[-1].stop)])[0]
        found = [span.tensor(data[span.start - begin : span.stop - begin]) for span in spans]
        for layer, keys in enumerate(found):
            self._check(f"layers.{layer}.extreme_keys", keys)
        return found

    def _rows(self, names: Sequence[str], start: int, stop: int) -> list[Tensor]:
        """Rows of tensors; of whole blocks, if they are compared with their checksums."""
        if not self._checks or start == stop:
            return self._read([_part(self._spans[name], start, stop) for name in names])
        size = self.block_size
        first, end = start // size, -(-stop // size)
        begin, last = first * size, min(end * size, self.length)
        blocks = self._read([_part(self._spans[name], begin, last) for name in names])
        for name, rows in zip(names, blocks, strict=True):
            found = checksums_of(rows.view(torch.uint8), size)
            for block, checksum in enumerate(found, first):
                if checksum != self._record.checksums[name][block]:
                    raise self._changed(f"block {block} of {name} of its record has changed")
        return [rows[start - begin : stop - begin] for rows in blocks]

    def _check(self, name: str, tensor: Tensor) -> None:
        """Compares a whole tensor with its digest."""
        if self._checks:
            try:
                check_tensor(name, self._spans[name], tensor.reshape(-1).view(torch.uint8))
            except RecordError as error:
                raise error.of(self.info.name) from None

    def _changed(self, what: str) -> RecordError:
        return RecordError("damaged", what, "what was written", self.info.name)

    def _read(self, parts: Sequence[Span]) -> list[Tensor]:
        found = self._bytes([(part.start, part.stop) for part in parts])
        return [part.tensor(data) for part, data in zip(parts, found, strict=True)]

    def _bytes(self, ranges: list[tuple[int, int]]) -> list[Tensor]:
        with self._readable():
            return self._reader.read(ranges)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        self._require(not self.closed, "closed", "open while rows are read")
        try:
            yield
        except OSError as error:
            raise RecordError(
                "damaged", f"its record cannot be read: {error}", "its file", self.info.name
            ) from error

    def _require(self, good: bool, what: str, right: str) -> None:
        if not good:
            raise ConfigError(f"{what} of document {self.info.name!r} must be {right}")


def _part(span: Span, start: int, stop: int) -> Span:
    """The rows `start` to `stop` of a tensor."""
    row = (span.stop - span.start) // span.shape[0]
    begin, end = span.start + start * row, span.start + stop * row
    return Span(span.dtype, (stop - start, *span.shape[1:]), begin, end, "")


def problems(
    catalogue: Catalogue, source: SourceFile, fingerprint: Fingerprint, *, named: bool
) -> list[Problem]:
    """The problems of a document; reads everything that is stored of it for this model.

    A missing record is a problem only if the document is named. A document that another process
    replaces or removes in the meantime has no problems.
    """
    found = list(_faults(catalogue, source, fingerprint, named=named))
    if found:
        with catalogue.locked():
            now = catalogue.refresh(source.name) or catalogue.index.source(source.name)
            found = [*_faults(catalogue, now, fingerprint, named=named)] if now is not None else []
    return [Problem(source.name, fault.what, fault.right, fault.kind) for fault in found]


def _faults(
    catalogue: Catalogue, source: SourceFile, fingerprint: Fingerprint, *, named: bool
) -> Iterator[RecordError]:
    place = catalogue.place
    try:
        data = place.read(f"documents/{source.file}")
        source.source(data)
        SourceFile.parse(data)
    except RecordError as error:
        # If the text is intact, encoding it again repairs the first line.
        whole = error.name is None
        yield RecordError("damaged" if whole else "source", error.what, error.right)
    except OSError as error:
        yield RecordError("source", f"its text cannot be read: {error}", "its file")
    record = record_file(source.digest, model_of(fingerprint))
    try:
        with closing(place.reader(f"records/{record}")) as reader:
            header = header_of(reader, source.digest, fingerprint)
            check_tensors(reader, header)
    except FileNotFoundError:
        fault = absent(place, catalogue.index.records(source.digest), fingerprint)
        if named or fault.kind != "missing":
            yield fault
    except RecordError as error:
        yield error
    except OSError as error:
        yield RecordError("damaged", f"its record cannot be read: {error}", "its file")


def nameless(catalogue: Catalogue) -> list[Problem]:
    """Files of texts whose first line is damaged and that no record identifies."""
    files = catalogue.unreadable()
    what = "the first line of this file has changed, so its document cannot be identified"
    return [Problem(f"documents/{f}", what, "what was written", "source") for f in sorted(files)]


def header_of(reader: StorageReader, digest: str, fingerprint: Fingerprint) -> RecordHeader:
    """The header of a record; RecordError if it is damaged, old, or of another model or text."""
    header = read_header(reader)
    error = foreign(header.fingerprint, fingerprint)
    if error is not None:
        raise error
    if header.digest != digest:
        raise RecordError(
            "damaged", f"its record belongs to another text, {header.digest[:12]}", digest[:12]
        )
    if not header.is_current:
        raise RecordError(
            "missing", "its record has an older format", "a record in the current format"
        )
    return header


def absent(place: StorageBackend, records: Iterable[str], fingerprint: Fingerprint) -> RecordError:
    """Why a document has no record of this model: "foreign" if another model has one.

    records: those of its source. If several models have one, the one that differs in the fewest
    fields is named.
    """
    errors = []
    for record in records:
        header = find_header(place, record)
        error = foreign(header.fingerprint, fingerprint) if header is not None else None
        if header is not None and error is not None:
            errors.append((len(differences(header.fingerprint, fingerprint)), error.what, error))
    if errors:
        return min(errors, key=lambda found: found[:2])[2]
    return RecordError("missing", "it has no record, because it was evicted or removed", "a record")
