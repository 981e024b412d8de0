"""Tasks that feed a text through decode steps (teacher forcing): perplexity and attention recall.

The first part of every window of a text is prefilled densely, and the last `CONTINUATION` tokens go
through decode steps under the policy; nothing is generated. Perplexity measures the likelihood of
each next token after such a step; the prediction after the dense prompt is the same under every
policy and is not counted.

Recall of attention is the share of full attention's weights on the tokens that a policy reads, per
layer. The text runs twice: under the policy, recording what every layer reads, and under full
attention, summing its weights over what the policy read. Both see the same tokens, but the policy
computes its own queries: its earlier losses affect them, as in real use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.layout import Geometry
from keyhole.config import require
from keyhole.engine.sequence import Sequence as Running
from keyhole.errors import ConfigError, NumericalError, why
from keyhole.eval.policy_trace import Trace, Traced
from keyhole.eval.tiny_language.tasks import make
from keyhole.eval.workload import (
    FIRST_SEED,
    MakeEngine,
    Request,
    Served,
    Shown,
    Workload,
    serve,
)
from keyhole.kernels import ScoreRequest, Selection
from keyhole.kernels.reference import members
from keyhole.models.model import Model
from keyhole.policies.base import Policy, Step
from keyhole.policies.controls import Full

CONTINUATION = 128
"""Decode steps of a window; in short windows, a quarter of its tokens."""
_SHORTEST = 16
_MOST_UNKNOWN = 0.1
"""As a share of all tokens; the bundled model knows only its own vocabulary."""
_MOST_NATS = 700
"""Of a token; the exponential of a little more is beyond all floats."""
_TAKEN = torch.empty(0)
"""Replaces logits that have been used, to free their memory."""


class Windows(Protocol):
    """A source of windows of tokens."""

    @property
    def path(self) -> str | None:
        """The file, for display; None for generated text."""
        ...

    @property
    def digest(self) -> str:
        """A digest of the text; different texts have different digests."""
        ...

    def windows(self, length: int) -> int:
        """Number of windows of this length. ConfigError if there is none."""
        ...

    def window(self, length: int, number: int) -> list[int]:
        """The token ids of window `number`."""
        ...


class WindowedText:
    """The tokens of a file in consecutive windows that do not overlap.

    Each window begins with the tokens that the tokenizer puts before a text. ConfigError for a file
    that cannot be read.
    """

    def __init__(self, path: str | Path, model: Model) -> None:
        if model.tokenizer is None:
            raise ConfigError(f"--text cannot be used, because {model.name} has no tokenizer")
        self.path: str = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--text {self.path!r} cannot be read: {why(error)}") from error
        self.digest: str = hashlib.sha256(text.encode()).hexdigest()[:16]
        ids = [int(token) for token in model.tokenizer(text, verbose=False).input_ids]
        unknown = ids.count(model.tokenizer.unk_token_id) / max(1, len(ids))
        if unknown > _MOST_UNKNOWN:
            raise ConfigError(
                f"{unknown:.0%} of --text {self.path!r} is unknown to the tokenizer of "
                f"{model.name}; give a text in its vocabulary"
            )
        begins = ids[:1] == [model.tokenizer.bos_token_id]
        self._begin, self._ids = ids[:begins], ids[begins:]

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest window."""
        return len(self._begin) + len(self._ids)

    def windows(self, length: int) -> int:
        """Number of windows of this length. ConfigError if there is none."""
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
    """The request that feeds a window; its last token is predicted, not fed."""
    steps = min(CONTINUATION, len(window) // 4)
    start = len(window) - 1 - steps
    return Request(
        prompt=list(window[:start]), given=list(window[start:-1]), max_tokens=1, keep_logits=True
    )


class Likelihood:
    """Mean negative log-likelihood of each window's tokens, accumulated as their logits arrive."""

    def __init__(self, windows: Sequence[Sequence[int]]) -> None:
        # The token after the prompt, and after each that is given.
        self._next = [window[-len(forced(window).given) - 1 :] for window in windows]
        self._read, self._total = [0] * len(windows), [0.0] * len(windows)

    def take(self, left: Mapping[Running, int]) -> None:
        """Adds the new logits, then discards them: a whole window of them would be large."""
        for sequence, number in left.items():
            logits = sequence.logits
            for place in range(self._read[number], len(logits)):
                if place > 0:  # the dense prompt's own
                    chances = logits[place].double().log_softmax(-1)
                    self._total[number] -= float(chances[self._next[number][place]])
                logits[place] = _TAKEN
            self._read[number] = len(logits)

    def nlls(self) -> list[float]:
        """Per window, in nats per token."""
        pairs = zip(self._total, self._next, strict=True)
        return [total / (len(tokens) - 1) for total, tokens in pairs]


class Perplexity(Workload):
    """How well the next token is predicted; the score is 1 / perplexity, from 0 to 1.

    first: the number of the first window.
    """

    name = "perplexity"
    has_question = False

    def __init__(self, text: Windows, first: int = 0) -> None:
        self.settings = {"text": text.digest, "continuation": CONTINUATION}
        if first:  # lines without it have the windows from 0 on
            self.settings[FIRST_SEED] = first
        self._text, self._first = text, first

    def available(self, length: int, limit: int) -> int:
        """All windows of the text from the first one on, at most `limit`."""
        number = self._text.windows(length)
        right = f"below {number}, the windows of {length} tokens in the text"
        require(self._first < number, FIRST_SEED, self._first, right)
        return min(limit, number - self._first)

    def measure(
        self, make_engine: MakeEngine, policy: Policy, length: int, setup: str, samples: int
    ) -> dict[str, Any]:
        """Runs every window."""
        windows = self._windows(length, samples)
        likelihood = Likelihood(windows)
        served = serve(make_engine(policy), [forced(w) for w in windows], likelihood.take)
        return {**likelihood_fields(likelihood.nlls()), **self._costs(served)}

    def shown(self, length: int, setup: str) -> Shown:
        """The first window; it has no marks, because any part of it may be needed."""
        (window,) = self._windows(length, 1)
        return Shown(dataclasses.replace(forced(window), keep_logits=False))

    def _windows(self, length: int, number: int) -> list[list[int]]:
        """The first windows."""
        return [self._text.window(length, self._first + i) for i in range(number)]

    def _costs(self, served: Served) -> dict[str, Any]:
        """Fed tokens count as generated ones, because each is a decode step."""
        steps = statistics.fmean(len(sequence.given) for sequence in served.sequences)
        return {
            **served.costs(),
            "tokens_prompt": statistics.fmean(s.num_prompt for s in served.sequences),
            "tokens_generated": steps,
            "text": self._text.path,
            "recall_per_layer": None,
            "selection_maps": None,
        }

    def beside(self, found: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
        """nll_over_full: the increase over full attention, in nats per token."""
        pairs = list(zip(found["nlls"], full["nlls"], strict=False))
        return {"nll_over_full": statistics.fmean(own - other for own, other in pairs)}


def likelihood_fields(nlls: list[float]) -> dict[str, Any]:
    """The fields of a line for the likelihood: nlls per window in nats per token, and their
    mean.

    NumericalError if one of them has no perplexity.
    """
    wrong = [nll for nll in nlls if not nll <= _MOST_NATS]
    if wrong:
        raise NumericalError(
            f"the model gives the text {wrong[0]:g} nats per token, which must be at most "
            f"{_MOST_NATS}: try --dtype float32, or another text"
        )
    scores = [math.exp(-nll) for nll in nlls]
    return {
        "score": statistics.fmean(scores),
        "scores": scores,
        "depths": None,
        "nll": statistics.fmean(nlls),
        "nlls": nlls,
        "perplexity": math.exp(statistics.fmean(nlls)),
    }


#: Long and well documented modules of the standard library. Every module gives its first window
#: before any gives its second.
LIBRARY = tuple(
    "_pydecimal turtle typing inspect argparse tarfile pickletools doctest pydoc pathlib datetime "
    "_pydatetime subprocess zipfile difflib optparse statistics pickle threading ast".split()
)


class Texts:
    """Windows of several files: the first of every file, then the second of each, and so on.

    Files shorter than a window are skipped. ConfigError if none is left.
    """

    def __init__(self, paths: Sequence[str | Path], model: Model, name: str | None = None) -> None:
        """name: stored with results instead of the paths."""
        self._texts = [WindowedText(path, model) for path in paths]
        self.path: str | None = name or ", ".join(Path(path).name for path in paths)
        joined = " ".join(text.digest for text in self._texts)
        self.digest: str = hashlib.sha256(joined.encode()).hexdigest()[:16]

    def windows(self, length: int) -> int:
        """Number of windows of this length."""
        return len(self._order(length))

    def window(self, length: int, number: int) -> list[int]:
        """The token ids of a window."""
        text, own = self._order(length)[number]
        return text.window(length, own)

    def _order(self, length: int) -> list[tuple[WindowedText, int]]:
        counts = {text: self._count(text, length) for text in self._texts}
        found = [
            (text, number)
            for number in range(max(counts.values()))
            for text, count in counts.items()
            if number < count
        ]
        if not found:
            longest = max(text.num_tokens for text in self._texts)
            raise ConfigError(
                f"length {length} is more than the {longest} tokens of the longest text; give a "
                "longer --text or lower --lengths"
            )
        return found

    def _count(self, text: WindowedText, length: int) -> int:
        return text.windows(length) if text.num_tokens >= length else 0


def library(model: Model) -> Windows:
    """The standard library; ConfigError if this Python has no sources."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{name}.py" for name in LIBRARY]
    there = [path for path in paths if path.is_file()]
    if not there:
        raise ConfigError("this Python has no sources of its standard library; give --text FILE")
    return Texts(there, model, name="Python's standard library")


#: First seed: tasks use seeds from 0, examinations from 1,000,000, calibration from 2,000,000.
_FIRST_SEED = 3_000_000
_NUMBER = 10_000
_WORDS = range(96, 7674)
"""The lengths that derivations can have."""


class TinyText:
    """Windows that are derivations of the bundled model; the last ones may be shorter."""

    path = None
    digest = "derivations"

    def __init__(self, model: Model) -> None:
        self._tokenizer = model.tokenizer

    def windows(self, length: int) -> int:
        """Number of windows. ConfigError for a length without room for a derivation."""
        require(length in _WORDS, "length", length, f"from {_WORDS[0]} to {_WORDS[-1]}")
        return _NUMBER

    def window(self, length: int, number: int) -> list[int]:
        """The token ids of window `number`."""
        item = make("derive", length, _FIRST_SEED + number)
        ids = self._tokenizer(f"{item.prompt} {item.answer}").input_ids
        return [int(token) for token in ids][:length]


#: What a layer read of a sequence: indices int [Hkv or 1, n], padded with -1, and their unit.
_Read = tuple[np.ndarray, int]


class SampleRows:
    """Maps rows of a step to samples: a slot belongs to one sample until that one is finished."""

    def __init__(self) -> None:
        self._of_slot: dict[int, int] = {}

    def update(self, left: Mapping[Running, int], first: int = 0) -> None:
        """Must be called after every step; a sequence reads its prompt before it decodes.

        A sequence keeps its slot to the end, because pages for all forced tokens are allocated at
        the start. first: the number of the sample that is 0 in `left`.
        """
        self._of_slot |= {s.slot: first + n for s, n in left.items() if s.slot >= 0}

    def keys(self, step: Step) -> list[tuple[int, int]]:
        """Sample and length of each row."""
        samples = [self._of_slot[slot] for slot in step.sequences.slots.tolist()]
        return list(zip(samples, step.sequences.host_lengths.tolist(), strict=True))


@dataclass(eq=False)
class SampleReads(Trace):
    """What each sample read at each length, by layer; None: everything."""

    rows: SampleRows = field(default_factory=SampleRows)
    found: dict[tuple[int, int, int], _Read | None] = field(default_factory=dict)

    def record(self, layer: int, selection: Selection | None, step: Step) -> None:
        """Stores the read on the host."""
        read = self.read(layer, selection, step)
        for row, key in enumerate(self.rows.keys(step)):
            self.found[*key, layer] = None if read is None else (read.indices[row], read.unit)


@dataclass(frozen=True, kw_only=True)
class Judge(Full):
    """Full attention that sums its weights over what the policy read."""

    reads: SampleReads
    rows: SampleRows = field(default_factory=SampleRows)
    shares: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """Per sample and layer, a share for every step, mean over query heads."""

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """The weights of each query head."""
        return (ScoreRequest("none", 1),)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """Adds the shares of this step."""
        for row, (sample, length) in enumerate(self.rows.keys(step)):
            read = self.reads.found.pop((sample, length, layer))
            share = 1.0 if read is None else recall(scores[0][row, :, :length], *read)
            self.shares.setdefault((sample, layer), []).append(share)


def recall(weights: Tensor, indices: np.ndarray, unit: int) -> float:
    """Share of the weights on the tokens that were read, mean over query heads.

    weights: float32 [Hq, N]. indices: int [H, n] of entries of `unit` tokens, padded with -1; H is
    1, Hkv or Hq.
    """
    heads, length = weights.shape
    seen = members(torch.from_numpy(indices), -(-length // unit))
    tokens = seen.repeat_interleave(unit, 1)[:, :length].to(weights.device)
    tokens = tokens.repeat_interleave(heads // len(tokens), 0)
    return float(((weights * tokens).sum(1) / weights.sum(1)).mean())


class AttentionRecall(Perplexity):
    """Recall of attention, and perplexity; the score is the mean recall."""

    name = "attention_recall"

    def measure(
        self, make_engine: MakeEngine, policy: Policy, length: int, setup: str, samples: int
    ) -> dict[str, Any]:
        """Runs every window under the policy and under full attention."""
        windows = self._windows(length, samples)
        requests, likelihood = [forced(window) for window in windows], Likelihood(windows)
        rows = SampleRows()
        reads = SampleReads(rows=rows)
        judge = Judge(reads=reads, rows=rows)
        under_policy, dense = make_engine(Traced(policy, trace=reads)), make_engine(judge)
        sequences: list[Running] = []
        # In batches of those that run at once, so that the record of reads stays small.
        for first in range(0, samples, dense.config.max_batch):
            some = requests[first : first + dense.config.max_batch]

            def update(left: Mapping[Running, int], first: int = first) -> None:
                rows.update(left, first)

            def take(left: Mapping[Running, int], first: int = first) -> None:
                update(left, first)
                likelihood.take({s: first + number for s, number in left.items()})

            sequences += serve(under_policy, some, take).sequences
            serve(dense, [dataclasses.replace(one, keep_logits=False) for one in some], update)
        cache = under_policy.cache
        # Times are left out, because recording slows every step.
        served = Served(
            sequences=sequences,
            step_ms=None,
            step_batch=None,
            peak_bytes=cache.peak_pages * cache.page_bytes,
        )
        shares = _shares(judge, dense.geometry, samples)
        scores = [statistics.fmean(row) for row in shares]
        return {
            **likelihood_fields(likelihood.nlls()),
            **self._costs(served),
            "score": statistics.fmean(scores),
            "scores": scores,
            "recall_per_layer": [statistics.fmean(column) for column in zip(*shares, strict=True)],
        }


def _shares(judge: Judge, geometry: Geometry, samples: int) -> list[list[float]]:
    """Per sample and layer, the mean over steps; 1 for a layer that reads its own window."""
    return [
        [
            statistics.fmean(judge.shares.get((sample, layer), [1.0]))
            for layer in range(geometry.num_layers)
        ]
        for sample in range(samples)
    ]
