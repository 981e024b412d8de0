"""Random prompts with continuations, and the logits that transformers computes for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: The tokens of a prompt, and those that follow it.
Text = tuple[list[int], list[int]]


def random_texts(seed: int, lengths: Sequence[int], new: int) -> list[Text]:
    """A prompt of each length, and `new` tokens that follow it."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 96, (n + new,), generator=generator).tolist() for n in lengths]
    return [(row[:n], row[n:]) for row, n in zip(rows, lengths, strict=True)]


def logits_of(network: Any, texts: Sequence[Text]) -> list[Tensor]:
    """Logits after each prompt and after each token that follows it, one text at a time."""
    with torch.no_grad():
        return [network(torch.tensor([a + b])).logits[0, len(a) - 1 :] for a, b in texts]
