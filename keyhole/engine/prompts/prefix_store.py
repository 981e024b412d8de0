"""Prefixes of prompts on disk, for engines of later processes.

A prefix is a row of files in a `PrefixStore`, each a chunk of tokens, found by a digest of all
tokens up to its end and by a fingerprint of everything that its numbers depend on. It is a sealed
file like a document's record (`documents/record.py`): a SHA-256 of each tensor, compared when it is
read, and a header that seals these. Files are only added and removed as a whole, so several
processes may use a folder: a file that another process removes stays readable until it is closed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import prefix_digests
from keyhole.config import EngineConfig, is_count, require
from keyhole.documents.integrity import Fingerprint, RecordError, canonical, model_of
from keyhole.documents.record import check_tensor, read_sealed, sealed_file
from keyhole.documents.storage import LocalStorage, locked
from keyhole.engine.documents.fingerprint import fingerprint, head_fingerprint
from keyhole.engine.prompts.shared_prompt_cache import write_pages
from keyhole.errors import ConfigError
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.policies.prefill.base import PrefillPolicy
from keyhole.retrieval.head import RetrievalHead

_FORMAT, _VERSION = "keyhole prefix", "1"
_FOLDER = "prefixes"
_LOG = logging.getLogger("keyhole")


class StoredPrefixes:
    """The prefixes of prompts in a `PrefixStore`, in chunks of whole pages.

    A prompt begins with the chunks that are stored, as far as they follow each other from its first
    token; a chunk is stored once all its tokens are computed, by a thread of its own.
    """

    def __init__(self, store: PrefixStore, cache: PageCache) -> None:
        self._store, self._cache = store, cache
        self._pages = max(1, _CHUNK // cache.page_size)  # of a chunk
        self._chunk = self._pages * cache.page_size  # in tokens
        self._writer = ThreadPoolExecutor(1, "keyhole-prefixes")
        self._pending: deque[Future[None]] = deque()

    def has_more(self, prompt: Sequence[int], known: int) -> bool:
        """Whether the chunk is stored that a prompt of `known` known tokens goes on with."""
        digests = list(prefix_digests(prompt[:-1], self._chunk))
        place = known // self._chunk
        return place < len(digests) and self._store.has(digests[place])

    def load(
        self, prompt: Sequence[int], pages: Sequence[int], known: int, policy: Policy
    ) -> Iterator[int]:
        """Writes stored chunks into the pages of a prompt; yields its known tokens after each.

        known: those that its first pages have already, which may be shared and are not written. At
        least the last token is left to compute, for its logits.
        """
        used, layers = [], range(len(self._cache.keys))
        for i, digest in enumerate(prefix_digests(prompt[:-1], self._chunk)):
            used.append(digest)
            end = (i + 1) * self._chunk
            if end <= known:
                continue
            tensors = self._read(digest, prompt[end - self._chunk : end])
            if tensors is None:
                used.pop()
                break
            first = known // self._cache.page_size - i * self._pages  # unknown page of the chunk
            there = pages[i * self._pages + first : (i + 1) * self._pages]
            content = [tensors[f"layers.{layer}"][first:] for layer in layers]
            common = {name: tensors[f"common.{name}"][first:] for name in self._cache.common}
            write_pages(self._cache, there, content, common, policy)
            known = end
            yield known
        self._store.touch(used)

    def _read(self, digest: bytes, tokens: Sequence[int]) -> Mapping[str, Tensor] | None:
        tensors = self._store.read(digest)
        return None if tensors is None or tensors["token_ids"].tolist() != [*tokens] else tensors

    def save(self, tokens: Sequence[int], pages: Sequence[int], before: int, end: int) -> None:
        """Stores the chunks whose last token is among `before` .. `end` - 1.

        The first `end` tokens belong to a prompt.
        """
        digests = list(prefix_digests(tokens, self._chunk, end=end))
        for i in range(before // self._chunk, len(digests)):
            if self._store.has(digests[i]):
                continue
            there = list(pages[i * self._pages : (i + 1) * self._pages])
            own = list(tokens[i * self._chunk : (i + 1) * self._chunk])
            tensors = {"token_ids": torch.tensor(own)}
            for name, tensor in self._cache.common.items():
                tensors[f"common.{name}"] = tensor[there].cpu()
            for layer, tensor in enumerate(self._cache.content(there)):
                tensors[f"layers.{layer}"] = tensor.cpu()
            written = self._writer.submit(self._store.write, digests[i], tensors, digests[:i])
            self._pending.append(written)
        while self._pending and (len(self._pending) > _MOST_PENDING or self._pending[0].done()):
            self._pending.popleft().result()

    def flush(self) -> None:
        """Waits until everything saved is on disk."""
        while self._pending:
            self._pending.popleft().result()


def stored_prefixes(
    model: Model,
    cache: PageCache,
    config: EngineConfig,
    head: RetrievalHead | None,
    prefill: PrefillPolicy | None,
) -> StoredPrefixes | None:
    """The prefixes of prompts in the folder of an engine's settings; None without one.

    Chunks are found by everything that the numbers in a page depend on.
    """
    if config.prefix_store is None:
        return None
    found = fingerprint(model, config.kv_dtype) | {
        "page_size": str(config.page_size),
        "head": "none" if head is None else head_fingerprint(head),
        "prefill": "exact" if prefill is None else prefill.text,
    }
    store = PrefixStore(config.prefix_store, found, config.prefix_store_bytes)
    return StoredPrefixes(store, cache)


#: Tokens of a chunk: a file of 8 MiB for a model of 1B parameters in 16 bits.
_CHUNK = 256
#: Chunks whose copies wait in memory to be written; more are waited for.
_MOST_PENDING = 8


class PrefixStore:
    """Chunks of prompts in a local folder, which is created if missing; a read-only one is read.

    fingerprint: what the numbers depend on; chunks of any other fingerprint are not found.
    limit_bytes: of all files; the least recently used ones are removed first; None: no limit.
    ConfigError if the folder cannot be used.
    """

    def __init__(
        self, folder: str | Path, fingerprint: Fingerprint, limit_bytes: int | None = None
    ) -> None:
        right = "a number of bytes, at least 1"
        require(limit_bytes is None or is_count(limit_bytes), "limit_bytes", limit_bytes, right)
        self._fingerprint = canonical(dict(fingerprint)).decode()
        self._model, self._limit = model_of(fingerprint), limit_bytes
        try:
            self._place = LocalStorage(Path(folder).expanduser().absolute(), (_FOLDER,))
            if self._place.folder is not None:
                self._place.clean()
                self._remove_oldest()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"prefixes at {str(folder)!r} cannot be stored: {reason}") from error

    def has(self, digest: bytes) -> bool:
        """Whether there is a chunk that can be reached; it may be damaged."""
        try:
            return (Path(self._place.url) / self._path(digest)).exists()
        except OSError:  # for example, the folder may no longer be read
            return False

    def read(self, digest: bytes) -> dict[str, Tensor] | None:
        """The tensors of a chunk, compared with their digests.

        None if there is no such chunk. A damaged one is removed, and a warning names it.
        """
        path = self._path(digest)
        try:
            return self._checked(path, digest)
        except FileNotFoundError:
            return None
        except (RecordError, OSError) as error:
            what = error.what if isinstance(error, RecordError) else str(error)
            _LOG.warning(
                "the stored prefix %s/%s cannot be used: %s; it is computed again",
                self._place.url,
                path,
                what,
            )
            if self._place.folder is not None and isinstance(error, RecordError):
                with suppress(OSError):  # for example, read-only by now
                    self._place.remove(path)
            return None

    def _checked(self, path: str, digest: bytes) -> dict[str, Tensor]:
        reader = self._place.reader(path)
        try:
            text, spans, start = read_sealed(reader, (_FORMAT, _VERSION))
            identity = (text.get("digest"), json.loads(text.get("fingerprint", "null")))
            if identity != (digest.hex(), json.loads(self._fingerprint)):
                raise RecordError("damaged", "it is of other tokens or another model", "its own")
            data = reader.read([(start, reader.size)])[0]
        finally:
            reader.close()
        found = {}
        for key, span in spans.items():
            part = data[span.start - start : span.stop - start]
            check_tensor(key, span, part)
            found[key] = span.tensor(part)
        return found

    def write(
        self, digest: bytes, tensors: Mapping[str, Tensor], before: Sequence[bytes] = ()
    ) -> None:
        """Writes a chunk to disk, unless it is stored already or larger than the limit.

        before: the chunks of the tokens before it, without which it cannot be used; it is removed
        before they are. tensors: on the CPU, contiguous, wide numbers before narrow ones. An error
        becomes a warning; the chunk is then computed again when it is needed.
        """
        if self._place.folder is None or self.has(digest):
            return
        text = {
            "format": _FORMAT,
            "version": _VERSION,
            "digest": digest.hex(),
            "fingerprint": self._fingerprint,
        }
        pieces = sealed_file(tensors, text)
        if self._limit is not None and sum(map(len, pieces)) > self._limit:
            return
        try:
            staged = self._place.stage(self._path(digest), pieces)
            try:
                staged.commit()
            finally:
                staged.discard()
            if self._limit is not None:
                self.touch([*before, digest])
                self._remove_oldest()
        except OSError as error:
            _LOG.warning("a prefix could not be stored at %s: %s", self._place.url, error)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Marks chunks as used now, the first of them as the last."""
        now = time.time_ns()
        for step, digest in enumerate(reversed(digests)):
            # The system's own clock moves on every few milliseconds only.
            used = now + 1000 * step
            try:
                os.utime(Path(self._place.url) / self._path(digest), ns=(used, used))
            except FileNotFoundError:  # removed, perhaps by another process
                continue
            except OSError:  # read-only
                return

    def _remove_oldest(self) -> None:
        """Removes the chunks not used for longest until the others are within the limit."""
        if self._limit is None or self._place.folder is None:
            return
        with locked(self._place.folder / "lock"):
            entries = self._place.files(_FOLDER)
            used = sum(entry.size_bytes for entry in entries.values())
            for name, entry in sorted(entries.items(), key=lambda item: item[1].written or 0.0):
                if used <= self._limit:
                    return
                self._place.remove(f"{_FOLDER}/{name}")
                used -= entry.size_bytes

    def _path(self, digest: bytes) -> str:
        return f"{_FOLDER}/{digest.hex()}-{self._model}"
