"""Prompts that one engine has computed, for others over the same weights under other policies.

Keys and values do not depend on the policy, as every prompt is computed exactly. What a policy
keeps per page is made from the keys again; keys of a retrieval head come along if an engine with
the same head left them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.pages import PageCache
from keyhole.policies.base import Policy


@dataclass
class _Copy:
    """Full pages of a prompt, on the CPU: per layer, and by head per name of common side data."""

    pages: list[Tensor]
    common: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class SharedPromptCache:
    """Full pages of whole prompts, in the memory of the host, until `limit` bytes are in use.

    What is there stays until something else begins: those who come again and again over the same
    prompts, more than fit, would find nothing if the oldest had to leave. Of one model only.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._copies: dict[bytes, _Copy] = {}
        self._purpose: object = None

    def __len__(self) -> int:
        """How many prompts are there."""
        return len(self._copies)

    def begin(self, purpose: object) -> None:
        """Forgets everything, unless the purpose is the same as the last time."""
        if purpose != self._purpose:
            self._copies.clear()
            self.used = 0
        self._purpose = purpose

    def take(
        self, prompt: Sequence[int], pages: Sequence[int], cache: PageCache, head: str | None
    ) -> None:
        """Copies a prompt out of its pages, unless it is there already or would not fit.

        head: the fingerprint of the retrieval head whose keys lie in `cache.common`, or None.
        """
        count = _full_pages(prompt, cache.page_size)
        if not count:
            return
        key, there = _key(prompt, cache.page_size), list(pages[:count])
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
        """Writes what is known of a prompt into its pages; how many of its tokens are there now.

        At least the last token is left to be computed, for its logits.
        """
        known = self._copies.get(_key(prompt, cache.page_size))
        if known is None or (head is not None and head not in known.common):
            return 0
        count = _full_pages(prompt, cache.page_size)
        there = list(pages[:count])
        cache.write(there, known.pages)
        for name, tensor in known.common.get(head or "", {}).items():
            cache.common[name][there] = tensor.to(cache.common[name].device)
        if any(cache.data):
            index = torch.tensor(there, device=cache.keys[0].device)
            filled = torch.full_like(index, cache.page_size)
            for layer in cache.geometry.full_attention:
                policy.on_append(cache.keys[layer], cache.data[layer], index, filled)
        return count * cache.page_size


def _full_pages(prompt: Sequence[int], page_size: int) -> int:
    return (len(prompt) - 1) // page_size


def _key(prompt: Sequence[int], page_size: int) -> bytes:
    content = np.asarray([page_size, *prompt], np.int64).tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()
