"""`llm.documents`: documents that are encoded once and stored for any number of prompts."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyhole.config import require
from keyhole.documents.record import DocumentRecord
from keyhole.documents.search import BM25, Retriever
from keyhole.documents.source import BLOCK_SIZE, Source, check_block_size, metadata_text, place_of
from keyhole.documents.store import (
    DocumentInfo,
    DocumentStore,
    Problem,
    RecordError,
    StoredDocument,
)
from keyhole.engine.documents.encoder import allocate, encode_in_pieces
from keyhole.engine.documents.fingerprint import fingerprint
from keyhole.engine.engine import Engine
from keyhole.engine.request import adapter_number
from keyhole.errors import (
    ConfigError,
    KeyholeError,
    PromptTooLongError,
    RequestError,
    UnknownNameError,
)
from keyhole.models.positions import RopeShift
from keyhole.tokenization import Prompt, encode_text, given_ids

# Seconds between checks for free pages.
_PAUSE_S = 0.01
#: Called with the tokens that are done, and all.
Progress = Callable[[int, int], None]


def _silent(done: int, tokens: int) -> None:
    """Ignores progress."""


class Documents:
    """The documents of one store, encoded by one model.

    place: a folder, or any URL that fsspec supports. limit_bytes: size limit of the store, above
    which the least recently used records are evicted; None: no limit. check: as for
    `DocumentStore`.
    retriever: finds documents for methods that open only some of them; by default BM25 over their
    texts. Set an `EmbeddingSearch` to compare vectors instead.
    adapter: name of the LoRA adapter that documents are encoded with, so that only requests with
    this adapter can use them; None: the base model.
    ConfigError for a model whose positions cannot be shifted.
    """

    def __init__(
        self,
        engine: Engine,
        place: str | Path | None = None,
        limit_bytes: int | None = None,
        check: str = "open",
        adapter: str | None = None,
    ) -> None:
        RopeShift.for_documents(engine.model)
        self._engine = engine
        #: The number of the adapter, 0 for none.
        self.adapter = adapter_number(adapter, engine.model)
        self.place = place_of(place)
        self.store = DocumentStore(
            self.place,
            fingerprint(engine.model, engine.config.kv_dtype, adapter),
            limit_bytes=limit_bytes,
            check=check,
        )
        self.retriever: Retriever = BM25(self.store.folder / "search.sqlite")

    def add(
        self,
        name: str,
        text: Prompt,
        *,
        overwrite: bool = False,
        pinned: bool | None = None,
        block_size: int = BLOCK_SIZE,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> DocumentInfo:
        """Encodes a document and stores it under `name`.

        text: text, a list of token ids, or {"prompt_token_ids": [...]}. If `name` is stored with
        the same text, nothing is encoded; if it is stored with another one, ConfigError unless
        `overwrite`. block_size: tokens per block, the unit that methods select. pinned: never evict
        it; None: as before. metadata: JSON stored with it; None: as before, for the same text.
        progress: called during encoding with the number of encoded tokens and of all tokens; an
        exception that it raises ends the encoding.

        ConfigError for an invalid name and an empty document, RequestError for text without tokens,
        PromptTooLongError for a document that the model cannot take.
        """
        check_block_size(block_size)
        require(pinned is None or isinstance(pinned, bool), "pinned", pinned, "True, False or None")
        ids = given_ids(f"document {name!r}", text)
        source = str(text) if ids is None else ids
        known = self.store.stored(name, source, overwrite=overwrite)
        if known is not None and known.block_size == block_size:
            if pinned is not None:
                self.store.pin(name, pinned)
            if metadata is not None:
                self.store.describe(name, metadata)
            return self.store.info(name)
        self.store.require_blocks(name, source, block_size)
        if metadata is not None:
            metadata_text(metadata)  # invalid metadata is refused before the work
        record = self._encode(name, source, block_size, progress)
        return self.store.add(
            name, source, record, overwrite=overwrite, pinned=pinned, metadata=metadata
        )

    def get(self, name: str) -> DocumentInfo:
        """The index entry of a document; UnknownNameError with the nearest name."""
        return self.store.info(name)

    def list(self) -> builtins.list[DocumentInfo]:
        """All documents, by name."""
        return self.store.list()

    def text(self, name: str) -> str:
        """The text of a document; for one made from token ids, their decoded text."""
        return self._decoded(self.store.source(name))

    def remove(self, name: str) -> None:
        """Removes a document."""
        self.store.remove(name)

    def verify(
        self, names: Sequence[str] | None = None, *, repair: bool = False
    ) -> builtins.list[Problem]:
        """The documents that are damaged or encoded by another model, among `names` or all.

        Documents whose record was evicted are included only if they are named. repair: encode the
        documents again whose texts are intact; the list includes those that were repaired.
        """
        problems = self.store.verify(names)
        if repair:
            # A document whose text is damaged cannot be encoded again.
            lost = {problem.name for problem in problems if problem.kind == "source"}
            for name in dict.fromkeys(p.name for p in problems if p.name not in lost):
                with suppress(UnknownNameError):  # another process has just removed it
                    source, info = self.store.source(name), self.store.info(name)
                    record = self._encode(name, source, info.block_size)
                    self.store.renew(name, source, record)
        return problems

    def choose(self, question: str, names: Sequence[str], max_documents: int) -> builtins.list[str]:
        """The `max_documents` of `names` that match the question best, in the order of `names`.

        Asks `retriever`, and opens no record. If it finds fewer, other documents are added in
        order. A name that occurs twice counts once, and both occurrences stay. UnknownNameError for
        a name that is not stored, with the nearest one.
        """
        wanted = dict.fromkeys(names)
        known = {info.name: info for info in self.list()}
        for name in wanted:
            if name not in known:
                self.get(name)
        self.update_search(self.retriever)
        found = [one.name for one in self.retriever.search(question, len(known))]
        ranked = dict.fromkeys([*(name for name in found if name in wanted), *wanted])
        chosen = set(builtins.list(ranked)[:max_documents])
        return [name for name in names if name in chosen]

    def update_search(self, retriever: Retriever) -> None:
        """Makes the stored documents those that `retriever` searches."""
        digests: dict[str, str] = {}

        def listed() -> builtins.list[DocumentInfo]:
            found = self.list()
            digests.update((info.name, info.digest) for info in found)
            return found

        def text(name: str) -> str | None:
            try:
                source = self.store.source(name)
            except KeyholeError:  # damaged or just removed; the others are found
                return None
            # Another text may have been stored since then. It would be kept as this one.
            return self._decoded(source) if Source.of(source).digest == digests[name] else None

        retriever.update(listed, text)

    def _decoded(self, source: str | Sequence[int]) -> str:
        if isinstance(source, str):
            return source
        tokenizer = self._engine.model.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(source))

    def open(self, name: str, *, with_head: bool = False) -> StoredDocument:
        """Opens a document; see `open_all`."""
        return self.open_all([name], with_head=with_head)[0]

    def open_all(
        self, names: Sequence[str], *, with_head: bool = False
    ) -> builtins.list[StoredDocument]:
        """Opens documents of different names; they cannot be deleted until they are closed.

        with_head: include the keys of this engine's retrieval head, if it has one that reads
        features. A document that was stored without them is encoded again and stored with them.
        """
        head_runner = self._engine.head_runner if with_head else None
        head = None if head_runner is None else head_runner.stored_as
        with ExitStack() as stack:
            documents = [stack.enter_context(one) for one in self.store.open_all(names)]
            for i, name in enumerate(names):
                while head is not None and head not in documents[i].heads:
                    with documents[i] as document:
                        self._encode_with_head(document)
                    documents[i] = stack.enter_context(self.store.open(name))
            stack.pop_all()
            return documents

    def _encode_with_head(self, document: StoredDocument) -> None:
        """Stores a document again, with this engine's head keys besides those of other heads."""
        name = document.info.name
        source = self.store.source(name)
        record = self._encode(name, source, document.block_size)
        for head in document.heads:
            with suppress(RecordError):  # damaged tensors are dropped
                record.heads.setdefault(head, document.head_record(head))
        try:
            self.store.renew(name, source, record)
        except ConfigError as error:  # for example, a read-only store
            raise ConfigError(
                f"document {name!r} was stored without keys of this retrieval head, and they "
                f"cannot be added: {error}; query it once with write access to the store, or use "
                "another policy"
            ) from error

    def _encode(
        self,
        name: str,
        source: str | Sequence[int],
        block_size: int,
        progress: Progress | None = None,
    ) -> DocumentRecord:
        """Encodes a document in pieces; other threads can run steps between them.

        progress: called between pieces with the tokens that are done, and all; what it raises ends
        the work. With it, a document waits for pages that requests or other documents hold.
        """
        engine = self._engine
        with engine.lock:
            tokens = self._checked(name, source)
        report = _silent if progress is None else progress
        report(0, len(tokens))
        pages = self._pages(len(tokens), None if progress is None else report)
        work = encode_in_pieces(
            engine.model,
            engine.cache,
            np.asarray(tokens, np.int64),
            pages,
            block_size=block_size,
            size=engine.filler.encoding_size,
            head_runner=engine.head_runner,
            adapter=self.adapter,
        )
        done = 0
        try:
            while True:
                with engine.lock, torch.no_grad():
                    begin = time.perf_counter()
                    computed = next(work)
                    engine.pace.encoded(computed, time.perf_counter() - begin)
                if computed:  # otherwise the piece was a layer's summary
                    done += computed
                    report(done, len(tokens))
        except StopIteration as finished:
            record: DocumentRecord = finished.value
            return record
        finally:
            with engine.lock:
                work.close()
                engine.scheduler.take_back(pages)

    def _pages(self, num_tokens: int, wait: Progress | None) -> builtins.list[int]:
        """Allocates pages to encode a document in; evicts cached prefixes if needed.

        wait: called again and again while requests or other documents hold the pages; None: not
        waited for.
        """
        engine = self._engine
        wanted = -(-num_tokens // engine.config.page_size)
        while True:
            with engine.lock:
                if engine.prefix is not None and wanted > engine.cache.available:
                    engine.prefix.evict(wanted - engine.cache.available)
                scheduler = engine.scheduler
                held = bool(scheduler.running or scheduler.lent)
                held |= any(one.filling is not None for one in scheduler.waiting)
                busy = wanted > engine.cache.available and held
                if wait is None or not busy or wanted > engine.cache.max_pages:
                    pages = allocate(engine.cache, num_tokens)
                    engine.scheduler.lend(pages)
                    return pages
            wait(0, num_tokens)
            time.sleep(_PAUSE_S)

    def _checked(self, name: str, source: str | Sequence[int]) -> builtins.list[int]:
        """The tokens of a document, checked against the model's limits."""
        engine = self._engine
        tokens = self._tokens(name, source)
        wrong = [t for t in tokens if not 0 <= t < engine.model.vocab_size]
        if wrong:
            raise RequestError(
                f"document {name!r}: token id {wrong[0]} is not one of this model's, 0 to "
                f"{engine.model.vocab_size - 1}"
            )
        longest, reason = engine.max_length, engine.model.length_reason
        if longest < engine.model.max_length:
            reason = "set by max_length"
        rope = engine.model.rope
        if rope is not None and rope.threshold < longest:
            longest, reason = rope.threshold, rope.reason
        if len(tokens) >= longest:
            raise PromptTooLongError(
                f"document {name!r} has {len(tokens)} tokens, but this model takes at most "
                f"{longest - 1} ({reason}); split it into parts"
            )
        return tokens

    def _tokens(self, name: str, source: str | Sequence[int]) -> builtins.list[int]:
        if isinstance(source, str):
            # Without special tokens, as documents are in the middle of a prompt.
            source = encode_text(self._engine.model.tokenizer, source, special=False)
        tokens = list(source)
        if not tokens:
            raise RequestError(f"document {name!r} is empty; give at least one word")
        return tokens
