"""Computed prompts in memory, shared by engines over the same weights under different policies.

Keys and values do not depend on the policy, as every prompt is computed exactly. A policy's
data per page is computed again from the keys. The keys of a retrieval head are shared between
engines with the same head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.packing import send
from keyhole.cache.pages import PageCache
from keyhole.policies.base import Policy


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

    def has(self, prompt: Sequence[int], cache: PageCache, head: str | None) -> bool:
        """Whether `load` would write anything."""
        known = self._copies.get(_key(prompt, cache))
        return known is not None and (head is None or head in known.common)

    def __len__(self) -> int:
        """The number of cached prompts."""
        return len(self._copies)

    def begin(self, purpose: object) -> None:
        """Clears the cache if the purpose differs from the last one."""
        if purpose != self._purpose:
            self._copies.clear()
            self.used = 0
        self._purpose = purpose

    def save(
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

    def load(
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
        write_pages(cache, pages[:count], known.pages, known.common.get(head or "", {}), policy)
        return count * cache.page_size


def write_pages(
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
    for _ in summarise(cache, policy, np.asarray(there)):
        pass


def summarise(cache: PageCache, policy: Policy, pages: np.ndarray) -> Iterator[None]:
    """Calls the policy's `on_append` for full pages, one layer per iteration."""
    if not any(cache.data):
        return
    written = send(pages, cache.device)
    filled = torch.full_like(written, cache.page_size)
    for layer in cache.geometry.full_attention:
        place = cache.place(layer)
        own = written.to(place), filled.to(place)
        policy.on_append(cache.keys[layer], cache.data[layer], *own)
        yield


def _full_pages(prompt: Sequence[int], page_size: int) -> int:
    return (len(prompt) - 1) // page_size


def _key(prompt: Sequence[int], cache: PageCache) -> bytes:
    content = np.asarray([cache.page_size, *prompt], np.int64).tobytes()
    return hashlib.blake2b(content + cache.geometry.kv_dtype.encode(), digest_size=16).digest()
