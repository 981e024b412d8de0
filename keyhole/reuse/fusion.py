"""New keys and values of a token joined with its stored ones.

SamKV, section 3.3, equation 4. The more alike they are, the more the new ones count: what the other
documents changed comes in, what the document knew by itself stays.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cosine_similarity


def fused(new: Tensor, old: Tensor) -> Tensor:
    """Fused: theta * new + (1 - theta) * old with theta = cos(new, old) per token (equation 4).

    new, old [n, H, D]; cos over all heads flattened, clamped to [0, 1]. In float32, given in new's
    dtype.
    """
    x, y = new.float(), old.float()
    theta = cosine_similarity(x.flatten(1), y.flatten(1), dim=1).clamp(0, 1)[:, None, None]
    return (theta * x + (1 - theta) * y).to(new.dtype)
