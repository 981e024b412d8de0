"""The retrieval head: the part of a draft model that computes its attention weights.

A draft model imitates its target, so its attention predicts which tokens the target will need, one
step before the target runs. The head keeps the draft's embedding (shared with the target), the
norms of its inputs, its query and key projections with RoPE and, with features, the layer that
fuses them; it has no values, output projection, MLP or logits.

Source: SpeContext (section 4.1, "Implementation Details"), on EAGLE-3's draft (Li et al., 2025).
Cost per step: one token through two projections, and one layer of keys to score.

Positions. At its step i the draft reads token i + 1 together with the target's features of position
i, and rotates by i. The head's token j is therefore the draft's step j - 1: query and key of token
j come from its embedding and from the features of position j - 1, which are known before the target
runs token j. The head rotates by the token's own position j: every pair has the same distance as in
the draft, and RoPE depends only on distances. Token 0, which the draft never reads, has no previous
features; they are zeros.

Differences from the paper: the paper does not say what replaces the target's features. Here either
the features are used ("tokens+features"), or only the embedding's half of the projections is kept
("tokens").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from keyhole import kernels
from keyhole.config import is_count, require
from keyhole.kernels import Selection
from keyhole.retrieval import head_files
from keyhole.retrieval.config import INPUTS, HeadConfig
from keyhole.retrieval.head_files import HeadCheckpoint
from keyhole.retrieval.target import Target, distinct_feature_layers

__all__ = ["INPUTS", "HeadConfig", "RetrievalHead"]


# RoPE of a retrieval head: plain, as its draft was trained, or stretched by YaRN.
#
# YaRN (Peng et al., ICLR 2024, section 3.4): slow frequencies are divided by the factor, fast ones
# are kept, and logits are scaled by (0.1 ln(factor) + 1)^2. The formulas are transformers' own.


def frequencies(config: HeadConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair of dimensions, float32 [D / 2], and an attention factor.

    The attention factor, 1 without YaRN, is a factor of queries and keys in transformers; here its
    square is in `RetrievalHead.scale`.
    """
    D, theta = config.head_dim, config.rope_theta
    scaling = dict(config.rope_scaling or {})
    if config.rope_factor > 1:  # of "default" or "yarn": a HeadConfig has no other
        scaling["factor"] = scaling.get("factor", 1.0) * config.rope_factor
        scaling.setdefault("original_max_position_embeddings", config.trained_length)
        scaling["rope_type"] = "yarn"
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return theta ** (-torch.arange(0, D, 2, dtype=torch.float32) / D), 1.0
    # One head as wide as the model: the formulas need only the head size.
    one_head = LlamaConfig(
        hidden_size=D,
        num_attention_heads=1,
        head_dim=D,
        max_position_embeddings=scaling.get(
            "original_max_position_embeddings", config.trained_length
        ),
        rope_parameters=scaling | {"rope_theta": theta},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](one_head, torch.device("cpu"))
    return inv_freq.float(), float(attention_factor)


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotates every head of x [..., heads, D] to its position, int64 [...]; in x's dtype.

    inv_freq: from `frequencies`. Halves are paired, (0, D / 2), (1, D / 2 + 1), ..., as in Llama.
    """
    angles = positions[..., None, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def group_weights(
    query: Tensor,
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    groups: int,
    scale: float,
    there: Selection | None = None,
    unpaged: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Softmax weights, the largest of each group: float32 [B, groups, N].

    query [B, heads, D], key_pages [P, Hkv, page_size, D] of the head; page_table int32 [B, M],
    lengths int32 [B]; N = M * page_size. The head's query heads are mapped to `groups` lists of the
    target by ratio (SpeContext, section 4.2): if several heads map to one list, their largest
    weight is taken; if one maps to several, it is copied. there: the existing tokens, if some were
    dropped (stored documents); the softmax covers only these, and the others score -1. unpaged: as
    in `kernels.head_scores_chosen`, only with `there`.
    """
    batch, heads, dim = query.shape
    kv_heads = key_pages.shape[1]
    lists = min(groups, heads)
    if lists <= kv_heads:
        weights = _scores(query, key_pages, page_table, lengths, scale, there, unpaged)
        weights = weights.unflatten(1, (lists, -1)).amax(2)
    else:
        # Query heads that share keys but not a list: each part of them is treated as a sequence.
        parts = lists // kv_heads
        query = query.view(batch, kv_heads, parts, -1, dim).transpose(1, 2).flatten(2, 3)
        if there is not None:
            indices, counts = (x.repeat_interleave(parts, 0) for x in (there.indices, there.counts))
            there = Selection(indices, counts, there.unit)
        if unpaged is not None:
            unpaged = unpaged[0], unpaged[1].repeat_interleave(parts, 0)
        weights = _scores(
            query.flatten(0, 1).contiguous(),
            key_pages,
            page_table.repeat_interleave(parts, 0),
            lengths.repeat_interleave(parts),
            scale,
            there,
            unpaged,
        )
        weights = weights.unflatten(0, (batch, parts)).transpose(1, 2).flatten(1, 2)
    spread: Tensor = weights.repeat_interleave(groups // lists, 1)
    return spread


def _scores(
    query: Tensor,
    key_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    there: Selection | None,
    unpaged: tuple[Tensor, Tensor] | None,
) -> Tensor:
    paged = (query, key_pages, page_table, lengths)
    if there is None:
        return kernels.head_scores(*paged, scale=scale)
    return kernels.head_scores_chosen(*paged, selection=there, scale=scale, unpaged=unpaged)


class RetrievalHead(nn.Module):
    """Queries and keys of tokens, scored against each other as in attention.

    embedding: [vocab_size or more, hidden_size]. It is shared, without gradients and not among the
    head's parameters, unless the config says that the head has its own; the head computes on its
    device and, until it is cast, in its dtype.

    dropped_share: the share of the draft's parameters that the head does not have; None if there
    was no draft.
    """

    def __init__(self, config: HeadConfig, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        self.dropped_share: float | None = None
        table = embedding.detach()
        own = config.own_embedding
        self.embedding: Tensor = nn.Parameter(table, requires_grad=False) if own else table
        place: dict[str, Any] = {"device": embedding.device, "dtype": embedding.dtype}
        H, D, Ht = config.hidden_size, config.head_dim, config.feature_size

        def norm(size: int) -> nn.RMSNorm:
            return nn.RMSNorm(size, eps=config.rms_norm_eps, **place)

        def linear(width: int, out: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(width, out, bias=bias, **place)

        self.embed_norm = norm(H)
        self.q = linear(config.input_size, config.num_heads * D, config.bias)
        self.k = linear(config.input_size, config.num_kv_heads * D, config.bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = norm(D), norm(D)
        if config.uses_features:
            count = len(config.feature_layers)
            self.feature_norm = norm(H)
            self.fc = linear(count * Ht, H)
            if config.input_norm:
                self.input_norm = norm(count * Ht)
            if config.feature_norms:
                self.feature_norms = nn.ModuleList(norm(Ht) for _ in range(count))
        self._set_frequencies()

    @property
    def scale(self) -> float:
        """The factor of query-key products, including YaRN's, if any."""
        return float(self.config.head_dim**-0.5 * self._attention_factor**2)

    def fuse(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """The target's states of `config.feature_layers`, each [..., Ht], as features [..., H]."""
        config = self.config
        assert len(hidden_states) == len(config.feature_layers) > 0
        x = torch.cat([state.to(self.fc.weight.dtype) for state in hidden_states], -1)
        if config.input_norm:
            x = self.input_norm(x)
        if config.feature_norms:
            chunks = x.chunk(len(hidden_states), -1)
            x = torch.cat([n(c) for n, c in zip(self.feature_norms, chunks, strict=True)], -1)
        fused: Tensor = self.fc(x)
        return fused

    def forward(
        self, token_ids: Tensor, positions: Tensor, fused: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Query [T, num_heads, D] and key [T, num_kv_heads, D] of tokens, rotated to positions.

        token_ids, positions: int64 [T]. fused: [T, H], of a token at position j the features (see
        `fuse`) of position j - 1, and zeros for j = 0; None without features. There may be more
        dimensions before T.
        """
        query, key = self.project(token_ids, fused)
        return self.rotated(query, positions), self.rotated(key, positions)

    def project(self, token_ids: Tensor, fused: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result of `forward` before rotation, independent of positions."""
        return self.from_inputs(self.inputs(token_ids, fused))

    def inputs(self, token_ids: Tensor, fused: Tensor | None) -> Tensor:
        """What the projections read, [T, input_size]: the normed embedding and features."""
        assert (fused is not None) == self.config.uses_features
        dtype = self.q.weight.dtype
        x: Tensor = self.embed_norm(F.embedding(token_ids, self.embedding).to(dtype))
        if fused is not None:
            x = torch.cat((x, self.feature_norm(fused.to(dtype))), -1)
        return x

    def from_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key of `inputs`, before rotation."""
        D = self.config.head_dim
        query, key = self.q(x).unflatten(-1, (-1, D)), self.k(x).unflatten(-1, (-1, D))
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys from `project` [T, heads, D], rotated to their positions, int64 [T]."""
        return rotate(x, positions, self._frequencies)

    def check_length(self, length: int) -> None:
        """Warns (RuntimeWarning) if a sequence is longer than the head's trained length."""
        trained, factor = self.config.trained_length, self.config.rope_factor
        if length > trained:
            stretched = (
                f"stretched by YaRN to {factor:g} times that"
                if factor > 1
                else ("not stretched; give from_eagle3 a max_length")
            )
            warnings.warn(
                f"the retrieval head was trained on up to {trained} tokens, but the context may "
                f"have {length}: it selects worse beyond its trained length (RoPE {stretched})",
                RuntimeWarning,
                stacklevel=2,
            )

    @classmethod
    def from_eagle3(
        cls,
        path: str | Path,
        target: nn.Module,
        *,
        inputs: str = "tokens+features",
        max_length: int | None = None,
    ) -> RetrievalHead:
        """Prunes an EAGLE-3 draft, a folder or hub id, to a head for the network `target`.

        The head is on the device of the target's embedding, in its dtype. max_length: the longest
        sequence that it selects from; beyond the trained length, YaRN stretches its RoPE, with a
        warning. ModelError for a draft that cannot be read or was made for another target,
        ConfigError for an invalid setting.
        """
        require(max_length is None or is_count(max_length), "max_length", max_length, "at least 1")
        require(inputs in INPUTS, "inputs", inputs, " or ".join(INPUTS))
        draft, shape = HeadCheckpoint.open(path), Target.of(target)
        config = head_files.head_config(draft, shape, inputs, max_length)
        shape.check_fits(config, draft.name)
        kept = head_files.weights(draft, config)
        if config.own_embedding and shape.embeds_as(kept["embedding"]):
            config = replace(config, own_embedding=False)  # a copy of the target's is not needed
            del kept["embedding"]
        head = _build(config, shape, kept)
        head.dropped_share = head_files.dropped_share(draft.shapes, head)
        if max_length is not None:
            head.check_length(max_length)
        return head

    @classmethod
    def from_pretrained(cls, path: str | Path, target: nn.Module) -> RetrievalHead:
        """Loads a folder of `save_pretrained` for the network `target`, as `from_eagle3` does."""
        checkpoint, shape = HeadCheckpoint.open(path), Target.of(target)
        config, dropped_share = head_files.read_config(checkpoint)
        shape.check_fits(config, checkpoint.name)
        # A head on the meta device lists the required tensors.
        table = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        outline = cls(config, table).named_parameters()
        kept = {name: checkpoint.tensor(name, *x.shape) for name, x in outline}
        head = _build(config, shape, kept)
        head.dropped_share = dropped_share
        return head

    def save_pretrained(self, path: str | Path) -> None:
        """Writes the folder `path`, config.json and model.safetensors, without shared tensors.

        Replaces an existing head. ConfigError if it cannot be written.
        """
        head_files.write(path, self.config, self.dropped_share, dict(self.named_parameters()))

    @classmethod
    def random(
        cls, target: nn.Module, *, inputs: str = "tokens+features", seed: int = 0
    ) -> RetrievalHead:
        """A head with random weights for `target`, as a baseline.

        Queries and keys have unit variance, so that its selections are spread out; they are the
        same on each device.
        """
        require(inputs in INPUTS, "inputs", inputs, " or ".join(INPUTS))
        shape = Target.of(target)
        featured = inputs == "tokens+features"
        config = HeadConfig(
            vocab_size=shape.vocab_size,
            hidden_size=int(shape.embedding.shape[-1]),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            inputs=inputs,
            feature_size=shape.hidden_size if featured else 0,
            feature_layers=distinct_feature_layers(shape.num_layers) if featured else (),
            rms_norm_eps=1e-6,
            rope_theta=shape.rope_theta,
            trained_length=shape.max_length,
            objective="random",
        )
        head = cls(config, shape.embedding)
        draw_weights(head, seed)
        return head

    def _set_frequencies(self) -> None:
        inv_freq, self._attention_factor = frequencies(self.config)
        self._frequencies = inv_freq.to(self.q.weight.device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        nn.Module._apply(self, fn, recurse)
        self._set_frequencies()  # float32 whatever the head is cast to: positions need it
        return self


@torch.no_grad()
def draw_weights(module: nn.Module, seed: int) -> None:
    """Draws all matrices for outputs of unit variance; the same on each device."""
    generator = torch.Generator().manual_seed(seed)
    for linear in (part for part in module.modules() if isinstance(part, nn.Linear)):
        spread = linear.in_features**-0.5
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * spread)


def _build(config: HeadConfig, target: Target, kept: dict[str, Tensor]) -> RetrievalHead:
    kept = {name: x.to(target.embedding) for name, x in kept.items()}  # its device and dtype
    head = RetrievalHead(config, kept.get("embedding", target.embedding))
    head.load_state_dict(kept)
    return head
