"""Perplexity through the decode path: a text is forced token by token, and nothing is generated.

Of every window of the text the first part is read densely and the last `CONTINUATION` tokens go
through decode steps under the policy. What counts is how likely each next token is after such a
step; the dense prompt's own prediction, the same under every policy, does not count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from keyhole.config import require
from keyhole.engine.sequence import Sequence as Running
from keyhole.errors import ConfigError
from keyhole.eval.workloads.generation import Request, Served, serve
from keyhole.eval.workloads.workload import MakeEngine, Shown, Workload
from keyhole.models.loading import Model
from keyhole.policies.base import Policy

CONTINUATION = 128
"""Decode steps of a window; in short ones a quarter of its tokens."""
_SHORTEST = 16
_MOST_UNKNOWN = 0.1
"""Share of tokens; the bundled model has words of its own, and knows nothing of others."""
_TAKEN = torch.empty(0)
"""In place of logits that have been read."""


class Windows(Protocol):
    """Where the tokens come from."""

    @property
    def path(self) -> str | None:
        """The file, for people; None for what is made."""
        ...

    @property
    def digest(self) -> str:
        """One word for the text: another one for another text."""
        ...

    def windows(self, length: int) -> int:
        """How many of so many tokens there are. ConfigError if there is none."""
        ...

    def window(self, length: int, number: int) -> list[int]:
        """The token ids of window `number`."""
        ...


class WindowedText:
    """The tokens of a file; windows follow each other and do not overlap.

    Each begins as the tokenizer begins a text. ConfigError for a file that cannot be read.
    """

    def __init__(self, path: str | Path, model: Model) -> None:
        if model.tokenizer is None:
            raise ConfigError(f"--text is text, and {model.name} has no tokenizer")
        self.path: str = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--text {self.path!r} cannot be read: {error}") from error
        self.digest: str = hashlib.sha256(text.encode()).hexdigest()[:16]
        ids = [int(token) for token in model.tokenizer(text, verbose=False).input_ids]
        unknown = ids.count(model.tokenizer.unk_token_id) / max(1, len(ids))
        if unknown > _MOST_UNKNOWN:
            raise ConfigError(
                f"{unknown:.0%} of --text {self.path!r} is unknown to the tokenizer of "
                f"{model.name}; give a text in its words"
            )
        begins = ids[:1] == [model.tokenizer.bos_token_id]
        self._begin, self._ids = ids[:begins], ids[begins:]

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest window."""
        return len(self._begin) + len(self._ids)

    def windows(self, length: int) -> int:
        """How many of so many tokens there are. ConfigError if there is none."""
        right = f"at least {_SHORTEST}, of which a quarter is decoded"
        require(length >= _SHORTEST, "length", length, right)
        number = len(self._ids) // (length - len(self._begin))
        if number == 0:
            raise ConfigError(
                f"length {length} is more than the {self.num_tokens} tokens of "
                f"--text {self.path!r}; give a longer text or lower --lengths"
            )
        return number

    def window(self, length: int, number: int) -> list[int]:
        """The token ids of window `number`."""
        size = length - len(self._begin)
        return [*self._begin, *self._ids[number * size : (number + 1) * size]]


def forced(window: Sequence[int]) -> Request:
    """The request that forces a window: its last token is only predicted."""
    steps = min(CONTINUATION, len(window) // 4)
    start = len(window) - 1 - steps
    return Request(
        prompt=list(window[:start]), given=list(window[start:-1]), max_tokens=1, keep_logits=True
    )


class Likelihood:
    """Mean negative log-likelihood of each window's tokens, taken as their logits come."""

    def __init__(self, windows: Sequence[Sequence[int]]) -> None:
        # The token after the prompt, and after each that is given.
        self._next = [window[-len(forced(window).given) - 1 :] for window in windows]
        self._read, self._total = [0] * len(windows), [0.0] * len(windows)

    def take(self, left: Mapping[Running, int]) -> None:
        """Adds what is new, and keeps no logits: a vocabulary for every token would be large."""
        for sequence, number in left.items():
            logits = sequence.logits
            for place in range(self._read[number], len(logits)):
                if place > 0:  # the dense prompt's own
                    chances = logits[place].double().log_softmax(-1)
                    self._total[number] -= float(chances[self._next[number][place]])
                logits[place] = _TAKEN
            self._read[number] = len(logits)

    def nlls(self) -> list[float]:
        """Per window, in nats a token."""
        pairs = zip(self._total, self._next, strict=True)
        return [total / (len(tokens) - 1) for total, tokens in pairs]


class Perplexity(Workload):
    """How well the next token is predicted; the score is 1 / perplexity, from 0 to 1."""

    name = "perplexity"
    has_question = False

    def __init__(self, text: Windows) -> None:
        self.settings = {"text": text.digest, "continuation": CONTINUATION}
        self._text = text

    def available(self, length: int, limit: int) -> int:
        """As many windows as the text has."""
        return min(limit, self._text.windows(length))

    def measure(
        self, make_engine: MakeEngine, policy: Policy, length: int, setup: str, samples: int
    ) -> dict[str, Any]:
        """Forces every window."""
        windows = [self._text.window(length, number) for number in range(samples)]
        likelihood = Likelihood(windows)
        served = serve(make_engine(policy), [forced(w) for w in windows], likelihood.take)
        return {**fields(likelihood.nlls()), **self._costs(served)}

    def shown(self, length: int, setup: str) -> Shown:
        """The first window, without marks: any of it may be needed."""
        return Shown(dataclasses.replace(forced(self._text.window(length, 0)), keep_logits=False))

    def _costs(self, served: Served) -> dict[str, Any]:
        """Forced tokens count as generated ones: each is a decode step."""
        steps = statistics.fmean(len(sequence.given) for sequence in served.sequences)
        return {
            **served.costs(),
            "tokens_prompt": statistics.fmean(len(s.prompt) for s in served.sequences),
            "tokens_generated": steps,
            "text": self._text.path,
            "recall_per_layer": None,
            "selection_maps": None,
        }

    def beside(self, found: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
        """nll_over_full: what the policy costs, in nats a token."""
        pairs = list(zip(found["nlls"], full["nlls"], strict=False))
        return {"nll_over_full": statistics.fmean(own - other for own, other in pairs)}


def fields(nlls: list[float]) -> dict[str, Any]:
    """What a line says of the likelihood: nlls per window in nats a token, and their mean."""
    scores = [math.exp(-nll) for nll in nlls]
    return {
        "score": statistics.fmean(scores),
        "scores": scores,
        "depths": None,
        "nll": statistics.fmean(nlls),
        "nlls": nlls,
        "perplexity": math.exp(statistics.fmean(nlls)),
    }
