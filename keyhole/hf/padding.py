"""Padding: which tokens of a batch are there, and where their numbers go."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.errors import RequestError
from keyhole.hf.paged_cache import PagedCache
from keyhole.hf.refused import unsupported


def present(mask: Any, B: int, Q: int, cache: PagedCache) -> np.ndarray:
    """Which of the new tokens are tokens, bool [B, Q]; the others are padding on the left."""
    if mask is None:
        return np.ones((B, Q), bool)
    past = cache.get_seq_length()
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise unsupported("an attention_mask of other than two dimensions")
    if tuple(mask.shape) != (B, past + Q):
        raise RequestError(
            f"the attention_mask has the shape {tuple(mask.shape)}, and must have {(B, past + Q)}: "
            "a number for each token, those in past_key_values included"
        )
    there: np.ndarray = mask.cpu().numpy() != 0
    if (there[:, 1:] < there[:, :-1]).any():
        raise RequestError(
            "the attention_mask has padding after tokens; pad on the left (padding_side='left')"
        )
    known = np.asarray([row.num_computed for row in cache.rows])
    if (there[:, :past].sum(1) != known).any():
        raise RequestError("the attention_mask is not the one that past_key_values were made with")
    return there[:, past:]


def columns(keep: int | Tensor, length: int) -> list[int]:
    """The places of a row whose logits are asked for."""
    if isinstance(keep, Tensor):
        return [int(place) % length for place in keep.tolist()]
    return list(range(length))[-keep:] if keep else list(range(length))


def spread(logits: Tensor, wanted: np.ndarray) -> Tensor:
    """Logits [R, V] of the places that are there as [B, n, V], zeros for padding."""
    if (wanted >= 0).all():
        return logits.view(*wanted.shape, -1)
    rows = torch.from_numpy(np.flatnonzero(wanted >= 0)).to(logits.device)
    out = logits.new_zeros(wanted.size, logits.shape[1])
    return out.index_copy(0, rows, logits).view(*wanted.shape, -1)
