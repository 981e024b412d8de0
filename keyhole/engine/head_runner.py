"""Runs the retrieval head: keys of every token, and attention weights before each step.

A token's key needs the features of the token before it, which the model computes in that token's
step. So the key of a decoding sequence's newest token is computed before the model runs, from the
features of the last step, and the keys of prompt tokens after it has run. The keys of a page and
the features of its newest token are side data of the page, and are shared, copied and freed with
it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from keyhole import kernels
from keyhole.cache.kept_tokens import KeptTokenRows
from keyhole.cache.layout import Geometry
from keyhole.cache.pages import PageCache
from keyhole.cache.unpaged_keys import UnpagedKeys
from keyhole.engine.documents.fingerprint import head_fingerprint
from keyhole.errors import ConfigError
from keyhole.models.batch import Batch, Chunk, ScatteredChunk
from keyhole.models.model import Model
from keyhole.policies.base import HeadWeights, Policy, Step
from keyhole.retrieval.gate import SeerGate
from keyhole.retrieval.head import HeadConfig, RetrievalHead, group_weights


class HeadRunner:
    """A head over the pages of a cache, which selects `groups` lists per step.

    unpaged: its keys of tokens without a page.
    """

    def __init__(self, head: RetrievalHead, cache: PageCache, groups: int) -> None:
        self.head = head
        self._cache = cache
        self._groups = groups
        self._warned = False
        self.unpaged = UnpagedKeys(cache, head.config.num_kv_heads, head.config.head_dim)
        self.token_bytes = head.config.num_kv_heads * head.config.head_dim * cache.geometry.itemsize

    @functools.cached_property
    def stored_as(self) -> str | None:
        """The name of the head's keys in records of documents.

        None for a head without features: its keys are made from token ids when they are needed.
        """
        return head_fingerprint(self.head) if self.head.config.uses_features else None

    @staticmethod
    def page_data(
        config: HeadConfig, page_size: int, *, drafts: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """The head's data per page: shapes by name. drafts: with a draft model's values."""
        data: dict[str, tuple[int, ...]] = {
            "head_keys": (config.num_kv_heads, page_size, config.head_dim)
        }
        if drafts:
            data["draft_values"] = data["head_keys"]
        if config.feature_layers:
            data["head_features"] = (config.hidden_size,)
        return data

    def check(self, length: int) -> None:
        """Warns once about a sequence longer than those the head was trained on."""
        if length > self.head.config.trained_length and not self._warned:
            self._warned = True
            self.head.check_length(length)

    @torch.no_grad()
    def before(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> None:
        """Computes the head's weights for the token of each row of decoding sequences."""
        step, count = batch.step, batch.num_decode
        assert step is not None
        row = (token_ids[:count], positions[:count])
        query, key = self.head(*row, self._preceding(positions[:count], step))
        self.put(key, batch.slots[:count])
        weights = functools.partial(
            self._weights, query, step.page_table, step.lengths, step.kept_tokens
        )
        step.head = HeadWeights(weights, self.token_bytes)

    def _preceding(self, positions: Tensor, step: Step) -> Tensor | None:
        """The features [B, H] of the position before each row's; None if the head reads none."""
        if not self.head.config.feature_layers:
            return None
        # A padding row is at position 0, which has no token before it.
        before = ((positions - 1) // step.page_size).clamp(min=0)
        pages = step.page_table.gather(1, before[:, None])[:, 0]
        return self._cache.common["head_features"][pages]

    def _weights(
        self, query: Tensor, page_table: Tensor, lengths: Tensor, kept_tokens: KeptTokenRows | None
    ) -> Tensor:
        keys = self._cache.common["head_keys"]
        paged = (query.to(keys.dtype), keys, page_table, lengths)
        if kept_tokens is None:
            return group_weights(*paged, self._groups, self.head.scale)
        unpaged, slots = None, kept_tokens.unpaged
        if slots is not None and self.unpaged.in_use:
            unpaged = self.unpaged.keys, slots
        there = kept_tokens.anywhere()
        return group_weights(*paged, self._groups, self.head.scale, there, unpaged)

    def fuse(self, batch: Batch) -> Tensor | None:
        """Features [T, H] of the tokens of a forward pass; None if the head reads no features."""
        layers = self.head.config.feature_layers
        return self.head.fuse([batch.hidden[layer] for layer in layers]) if layers else None

    def put(self, key: Tensor, slots: Tensor) -> None:
        """Writes the head's keys [T, Hkv, D] to the pages; slots: int64 [T]."""
        keys = self._cache.common["head_keys"]
        kernels.append(keys, None, key.to(keys.dtype), None, slots)

    def put_unpaged(self, key: Tensor, slots: Tensor) -> None:
        """Writes the head's keys [T, Hkv, D] of tokens without a page; slots: int64 [T]."""
        self.unpaged.keys[slots] = key.to(self.unpaged.keys.dtype)

    @torch.no_grad()
    def after(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor | None:
        """Writes the keys of prompt tokens, and stores features for the tokens after them.

        Returns the features of all tokens, as `fuse`.
        """
        fused = self.fuse(batch)
        for chunk in batch.chunks:
            # A token whose key is known is skipped: its page holds its own features, and no longer
            # those of the token before it.
            rows = slice(chunk.rows.start + chunk.known, chunk.rows.stop)
            before = None if fused is None else self._before(fused, chunk)
            self._append(token_ids[rows], positions[rows], batch.slots[rows], before)
        if fused is not None:
            features = self._cache.common["head_features"]
            pages = batch.slots[batch.newest] // self._cache.page_size
            features[pages] = fused[batch.newest].to(features.dtype)
        return fused

    def _before(self, fused: Tensor, chunk: Chunk | ScatteredChunk) -> Tensor:
        """The features of the preceding token, for each token of a chunk that is not cached."""
        own, start = fused[chunk.rows], chunk.start
        if chunk.known:
            return own[:-1]
        if start:
            page = chunk.pages[(start - 1) // self._cache.page_size]
            first = self._cache.common["head_features"][page].to(own.dtype)
        else:
            first = torch.zeros_like(own[0])
        return torch.cat([first[None], own[:-1]])

    def _append(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, before: Tensor | None
    ) -> None:
        """Writes the keys of tokens [T]; before: the features of the token before each, [T, H]."""
        _, key = self.head(token_ids, positions, before)
        self.put(key, slots)


def load_gate(policy: Policy, model: Model, geometry: Geometry) -> SeerGate | None:
    """Loads the gate that the policy names, or else the one next to the model's weights.

    None for a policy that wants none. ConfigError if there is none; ModelError if it is damaged or
    of another model.
    """
    if not policy.wants_gate:
        return None
    place = getattr(policy, "gate", None) or model.gate
    if place is None:
        raise ConfigError(
            f"policy {policy.name!r} needs a gate, but there is none next to {model.name!r}; train "
            "one with `keyhole train-head --objective gate`, or give gate=FOLDER"
        )
    gate = SeerGate.from_pretrained(place, geometry)
    return gate.to(model.device, model.dtype).requires_grad_(False)


def load_head(policy: Policy, model: Model) -> RetrievalHead:
    """Loads the head that the policy names, or else the one next to the model's weights.

    ConfigError if there is none; ModelError if it is damaged or of another model.
    """
    place = getattr(policy, "head", None) or model.head
    if place is None:
        raise ConfigError(
            f"policy {policy.name!r} needs a retrieval head, but {model.name!r} has none; "
            "train one with `keyhole train-head`, or give head=FOLDER"
        )
    head = RetrievalHead.from_pretrained(place, model.network)
    return head.to(model.device, model.dtype).eval()
