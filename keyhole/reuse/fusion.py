"""Fusion of a token's new keys and values with its stored ones.

SamKV, section 3.3, equation 4. The more similar they are, the more weight the new ones have.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cosine_similarity


def fused(new: Tensor, old: Tensor) -> Tensor:
    """Fused: theta * new + (1 - theta) * old with theta = cos(new, old) per token (equation 4).

    new, old [n, H, D]; cos over all heads flattened, clamped to [0, 1]. Computed in float32,
    returned in new's dtype.
    """
    x, y = new.float(), old.float()
    theta = cosine_similarity(x.flatten(1), y.flatten(1), dim=1).clamp(0, 1)[:, None, None]
    return (theta * x + (1 - theta) * y).to(new.dtype)
