"""Random prompts with continuations, and their logits by transformers and by an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keyhole import SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence as EngineSequence

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


def add(engine: Engine, text: Text) -> EngineSequence:
    """A request for a prompt whose continuation is given, with the logits after each token."""
    prompt, given = text
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    return engine.add(prompt, params, given=given, keep_logits=True)


def run(engine: Engine) -> None:
    """Steps until nothing is left to do, each checked for damage."""
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def assert_exact(
    found: Sequence[EngineSequence], expected: Sequence[Tensor], tolerance: float
) -> None:
    """The logits differ by at most `tolerance` of their standard deviation."""
    for ours, theirs in zip(found, expected, strict=True):
        logits = torch.stack(ours.logits)
        assert logits.shape == theirs.shape
        assert (logits - theirs).abs().max() < tolerance * theirs.std()
