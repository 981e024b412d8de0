"""Indexers of transformers: modules that select the tokens to which a layer attends.

Such a module appends its keys to transformers' cache, scores all tokens of each sequence of a batch
in parallel and returns the numbers of the best. In a packed row sequences have different tokens,
and keys are in pages. An instance therefore becomes one of a subclass that computes its queries,
its key and its weights, and leaves scores and selection to `indexed_attention`. The attention
module passes on what it returns, and gets a mask, which it would slice, of one entry.
transformers and other models of the process are not changed.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.errors import ModelError
from keyhole.models.attention import PassThrough
from keyhole.models.modules.indexed_attention import IndexerRow

#: The method of transformers' caches to which a module passes its keys.
_WRITES = "update_indexer"
#: The parts of an indexer as DeepSeek-V3.2 has it.
_PARTS = ("wq_b", "wk", "k_norm", "weights_proj", "softmax_scale")
#: The functions by which one rotates, of which its code names one.
_ROTATIONS = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
#: Those that rotate the last numbers of a head, not the first.
_ROTATE_LAST = {"HYV4Indexer"}


def adapt(network: nn.Module, name: str) -> None:
    """Replaces the classes of all indexers and of the modules around them, in place.

    ModelError for an indexer of another kind.
    """
    for module in list(network.modules()):
        child = getattr(module, "indexer", None)
        if not isinstance(child, nn.Module) or _WRITES not in _code(type(child)).co_names:
            continue
        if not all(hasattr(child, part) for part in _PARTS):
            raise ModelError(
                f"model {name!r} selects tokens by {type(child).__name__}, an indexer that is "
                "different from DeepSeek-V3.2's"
            )
        child.__class__ = _indexer(type(child))  # type: ignore[arg-type]
        module.__class__ = _attention(type(module))  # type: ignore[arg-type]


def _code(cls: Any) -> Any:
    return inspect.unwrap(cls.forward).__code__


@functools.cache
def _attention(cls: Any) -> Any:
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if isinstance(named.get("past_key_values"), PassThrough):
            named["attention_mask"] = torch.zeros(1, 1, 1, 1)
        return cls.forward(self, *args, **named)

    return type(f"Keyhole{cls.__name__}", (cls,), {"forward": forward})


@functools.cache
def _indexer(cls: Any) -> Any:
    function = next(name for name in _ROTATIONS if name in _code(cls).co_names)
    rotate = inspect.unwrap(cls.forward).__globals__[function]
    rotates_last = cls.__name__ in _ROTATE_LAST

    def rotated(
        query: Tensor, key: Tensor, dim: int, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Query [1, T, H, D] and key [1, T, 1, D], `dim` numbers of each head rotated."""
        sizes = [query.shape[-1] - dim, dim] if rotates_last else [dim, query.shape[-1] - dim]
        parts = [list(x.split(sizes, -1)) for x in (query, key)]
        turned = rotate(*(x[-1 if rotates_last else 0] for x in parts), *angles, unsqueeze_dim=2)
        for part, new in zip(parts, turned, strict=True):
            part[-1 if rotates_last else 0] = new
        return torch.cat(parts[0], -1), torch.cat(parts[1], -1)

    def forward(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        past_key_values: Any = None,
        **named: Any,
    ) -> Any:
        if not isinstance(past_key_values, PassThrough):
            given = (hidden_states, q_resid, position_embeddings, *args)
            return cls.forward(self, *given, past_key_values=past_key_values, **named)
        query = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        key = self.k_norm(self.wk(hidden_states).to(self.k_norm.weight.dtype)).to(query.dtype)
        query, key = rotated(query, key[:, :, None], self.qk_rope_head_dim, position_embeddings)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
        weights = weights * (self.n_heads**-0.5 * self.softmax_scale)
        return IndexerRow(query[0], key[0, :, 0], weights[0], self.index_topk)

    return type(f"Keyhole{cls.__name__}", (cls,), {"forward": forward})
