"""The direction that all embeddings share, and why training must leave it alone.

The heads that look 1, 2, 3 and 4 tokens back score a token by what it has in this direction, the
neighbouring token a tenth less. A word whose share falls by more than that is never looked at
again: its neighbour takes all of the weight, a softmax that sharp gives no gradient, and no walk
through that word is ever right. Free training did that to 6 of 320 names within two million
tokens (benchmarks/LOG.md), so the share is held.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig

SHARE = 0.5**0.5
"""Part of an embedding's length that lies in the shared direction."""


def basis(config: LlamaConfig, generator: torch.Generator) -> Tensor:
    """Give random orthonormal directions of the residual stream, `[hidden, hidden]`."""
    size = config.hidden_size
    random = torch.randn(size, size, generator=generator) / size**0.5
    directions: Tensor = torch.linalg.qr(random)[0]
    return directions


def shared_direction(config: LlamaConfig, seed: int) -> Tensor:
    """Give the direction, `[hidden]`: the first one of the seed's basis."""
    return basis(config, torch.Generator().manual_seed(seed))[0]


def hold_share(embedding: Tensor, shared: Tensor) -> None:
    """Make the part of each row along `shared` as long as the rest of the row, in place.

    Rows may turn and grow freely otherwise. That the two parts are equal is `SHARE`.
    """
    with torch.no_grad():
        rest = embedding - (embedding @ shared)[:, None] * shared
        embedding.copy_(rest + rest.norm(dim=1, keepdim=True) * shared)
