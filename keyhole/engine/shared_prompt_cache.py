"""Computed prompts, shared by engines over the same weights under different policies.

Keys and values do not depend on the policy, as every prompt is computed exactly. A policy's
data per page is computed again from the keys. The keys of a retrieval head are shared between
engines with the same head.

In memory, `SharedPromptCache` keeps whole prompts for the engines of an evaluation. On disk,
`StoredPrefixes` keeps prefixes for engines of later processes.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.pages import PageCache
from keyhole.cache.prefix_cache import prefix_digests
from keyhole.config import EngineConfig
from keyhole.documents.prefix_store import PrefixStore
from keyhole.engine.documents.fingerprint import fingerprint, head_fingerprint
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.policies.prefill.base import PrefillPolicy
from keyhole.retrieval.head import RetrievalHead


@dataclass
class _Copy:
    """Full pages of a prompt, on the CPU: per layer, and by head per name of common side data."""

    pages: list[Tensor]
    common: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class SharedPromptCache:
    """Full pages of whole prompts, in the memory of the host, until `limit` bytes are in use.

    Entries stay until `begin` is called with another purpose: with least-recently-used eviction, a
    loop over more prompts than fit would never find one. For one model only.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._copies: dict[bytes, _Copy] = {}
        self._purpose: object = None

    def __len__(self) -> int:
        """The number of cached prompts."""
        return len(self._copies)

    def begin(self, purpose: object) -> None:
        """Clears the cache if the purpose differs from the last one."""
        if purpose != self._purpose:
            self._copies.clear()
            self.used = 0
        self._purpose = purpose

    def take(
        self, prompt: Sequence[int], pages: Sequence[int], cache: PageCache, head: str | None
    ) -> None:
        """Copies a prompt from its pages, unless it is cached already or does not fit.

        head: the fingerprint of the retrieval head whose keys are in `cache.common`, or None.
        """
        count = _full_pages(prompt, cache.page_size)
        if not count:
            return
        key, there = _key(prompt, cache), list(pages[:count])
        known = self._copies.get(key)
        missing = list(cache.common.values())
        if head is None or (known is not None and head in known.common):
            missing = []
        size = sum(tensor[:1].nbytes for tensor in missing)
        if known is None:
            size += cache.page_size * cache.geometry.token_bytes
        if self.used + count * size > self.limit:
            return
        self.used += count * size
        if known is None:
            known = self._copies[key] = _Copy([x.cpu() for x in cache.content(there)])
        if missing and head is not None:
            known.common[head] = {name: x[there].cpu() for name, x in cache.common.items()}

    def give(
        self,
        prompt: Sequence[int],
        pages: Sequence[int],
        cache: PageCache,
        policy: Policy,
        head: str | None,
    ) -> int:
        """Writes the cached part of a prompt into its pages; returns its number of tokens.

        At least the last token is left to compute, for its logits.
        """
        known = self._copies.get(_key(prompt, cache))
        if known is None or (head is not None and head not in known.common):
            return 0
        count = _full_pages(prompt, cache.page_size)
        _fill(cache, pages[:count], known.pages, known.common.get(head or "", {}), policy)
        return count * cache.page_size


class StoredPrefixes:
    """The prefixes of prompts in a `PrefixStore`, in chunks of whole pages.

    A prompt begins with the chunks that are stored, as far as they follow each other from its first
    token; a chunk is stored once all its tokens are computed, by a thread of its own.
    """

    def __init__(self, store: PrefixStore, cache: PageCache) -> None:
        self._store, self._cache = store, cache
        self._pages = max(1, _CHUNK // cache.page_size)  # of a chunk
        self._writer = ThreadPoolExecutor(1, "keyhole-prefixes")
        self._pending: deque[Future[None]] = deque()

    def give(self, prompt: Sequence[int], pages: Sequence[int], known: int, policy: Policy) -> int:
        """Writes stored chunks into the pages of a prompt; returns its known tokens.

        known: those that its first pages have already, which may be shared and are not written. At
        least the last token is left to compute, for its logits.
        """
        size, used = self._cache.page_size, []
        chunk = self._pages * size
        for i, digest in enumerate(prefix_digests(prompt[:-1], chunk)):
            end = (i + 1) * chunk
            if end > known:
                tensors = self._read(digest, prompt[end - chunk : end])
                if tensors is None:
                    break
                first = known // size - i * self._pages  # of the chunk, the first unknown page
                there = pages[i * self._pages + first : (i + 1) * self._pages]
                layers = range(len(self._cache.keys))
                content = [tensors[f"layers.{layer}"][first:] for layer in layers]
                common = {name: tensors[f"common.{name}"][first:] for name in self._cache.common}
                _fill(self._cache, there, content, common, policy)
                known = end
            used.append(digest)
        self._store.touch(used)
        return known

    def _read(self, digest: bytes, tokens: Sequence[int]) -> Mapping[str, Tensor] | None:
        tensors = self._store.read(digest)
        return None if tensors is None or tensors["token_ids"].tolist() != [*tokens] else tensors

    def take(self, tokens: Sequence[int], pages: Sequence[int], before: int, end: int) -> None:
        """Stores the chunks whose last token is among `before` .. `end` - 1.

        The first `end` tokens belong to a prompt.
        """
        chunk = self._pages * self._cache.page_size
        digests = list(prefix_digests(tokens, chunk, end=end))
        for i in range(before // chunk, len(digests)):
            if self._store.has(digests[i]):
                continue
            there = list(pages[i * self._pages : (i + 1) * self._pages])
            tensors = {"token_ids": torch.tensor(list(tokens[i * chunk : (i + 1) * chunk]))}
            for name, tensor in self._cache.common.items():
                tensors[f"common.{name}"] = tensor[there].cpu()
            for layer, tensor in enumerate(self._cache.content(there)):
                tensors[f"layers.{layer}"] = tensor.cpu()
            written = self._writer.submit(self._store.write, digests[i], tensors, digests[:i])
            self._pending.append(written)
        while self._pending and (len(self._pending) > _MOST_PENDING or self._pending[0].done()):
            self._pending.popleft().result()

    def flush(self) -> None:
        """Waits until everything taken is on disk."""
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


def _fill(
    cache: PageCache,
    pages: Sequence[int],
    content: Sequence[Tensor],
    common: Mapping[str, Tensor],
    policy: Policy,
) -> None:
    """Writes full pages; the data of a policy per page are computed from their keys."""
    there = list(pages)
    cache.write(there, content)
    for name, tensor in common.items():
        cache.common[name][there] = tensor.to(cache.common[name].device)
    if any(cache.data):
        index = torch.tensor(there, device=cache.keys[0].device)
        filled = torch.full_like(index, cache.page_size)
        for layer in cache.geometry.full_attention:
            policy.on_append(cache.keys[layer], cache.data[layer], index, filled)


def _full_pages(prompt: Sequence[int], page_size: int) -> int:
    return (len(prompt) - 1) // page_size


def _key(prompt: Sequence[int], cache: PageCache) -> bytes:
    content = np.asarray([cache.page_size, *prompt], np.int64).tobytes()
    return hashlib.blake2b(content + cache.geometry.kv_dtype.encode(), digest_size=16).digest()
