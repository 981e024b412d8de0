"""Records what a policy reads, step by step, and makes maps that can be stored and drawn.

    traced = Traced(Delta(token_budget=256))
    LLM(model, policy=traced).generate("...")
    traced.trace.pages_read(layer=3)

`Traced` wraps a policy without changing it. The record grows with every step, so it is meant for
pictures and tests: one sequence or a fixed batch at a time. A selection map has a row for each step
and a column for each token; in long maps neighbouring rows and columns are merged, so that at most
64 rows of 512 columns are stored with a result.
"""

from __future__ import annotations

import abc
import base64
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from keyhole.cache.layout import Geometry
from keyhole.engine.read_trace import Read, read_of
from keyhole.errors import ConfigError
from keyhole.eval.workload import MakeEngine, Shown, serve
from keyhole.policies.base import Policy, Selection, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PolicyProxy(Policy):
    """Behaves like `inner`, and has its settings as attributes."""

    capturable: ClassVar[bool | str] = "its observer runs on the host, in every step"
    speculative: ClassVar[bool | str] = "its observer takes every row for a token of the text"

    inner: Policy

    def __post_init__(self) -> None:
        # Other policies have these as class variables; here they are the inner policy's.
        for name in Policy.__annotations__.keys() - PolicyProxy.__annotations__.keys():
            object.__setattr__(self, name, getattr(self.inner, name))

    def __getattr__(self, name: str) -> Any:
        # Settings that the engine reads, such as token_budget. While it is copied, `inner` is
        # missing.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves the inner policy; everything else stays the same objects."""
        return dataclasses.replace(self, inner=self.inner.resolve(geometry))


def _forwarded(name: str) -> Callable[..., Any]:
    """A method that calls the inner policy."""

    @functools.wraps(getattr(Policy, name))
    def hook(self: PolicyProxy, *given: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*given, **named)

    return hook


# Every method of a policy: for one left out, `Policy`'s own would silently run instead.
for _name, _method in vars(Policy).items():
    if callable(_method) and not _name.startswith("_") and _name not in vars(PolicyProxy):
        setattr(PolicyProxy, _name, _forwarded(_name))
abc.update_abstractmethods(PolicyProxy)


@dataclass(eq=False)
class TracedStep:
    """One decode step: lengths int32 [B], and what each layer read (None: everything)."""

    lengths: np.ndarray
    page_size: int
    reads: dict[int, Read | None] = field(default_factory=dict)

    def tokens(self, layer: int, row: int = 0) -> np.ndarray:
        """Which tokens of sequence `row` were read, bool [Hkv or 1, length]."""
        length, read = int(self.lengths[row]), self.reads[layer]
        if read is None:
            return np.ones((1, length), bool)
        return read.tokens(row, length)


@dataclass(eq=False)
class Trace:
    """The decode steps in order; only: the layers to record, None for all."""

    steps: list[TracedStep] = field(default_factory=list)
    only: frozenset[int] | None = None
    _step: Step | None = None
    _shared: tuple[Selection | None, Read | None] | None = None

    def record(self, layer: int, selection: Selection | None, step: Step) -> None:
        """Adds what a layer reads; the first layer of a step begins a new entry."""
        if self.only is not None and layer not in self.only:
            return
        if step is not self._step:
            self.steps.append(TracedStep(step.lengths.cpu().numpy(), step.page_size))
        self.steps[-1].reads[layer] = self.read(layer, selection, step)

    def read(self, layer: int, selection: Selection | None, step: Step) -> Read | None:
        """What a layer reads, as positions in the sequence; None means everything.

        For packed documents (`keyhole.cache.packing`), positions in the pages instead.

        Tokens that the layer dropped or that were evicted are excluded. Layers that share a
        selection share a Read.
        """
        if step is not self._step:  # None may differ from step to step, because pages are evicted
            self._step, self._shared = step, None
        left = step.retained
        kept = (left or step).kept_tokens
        if kept is not None:
            selection = (
                kept.selection(layer) if selection is None else kept.within(layer, selection)
            )
        if self._shared is None or selection is not self._shared[0]:
            self._shared = selection, read_of(selection, left, step.page_size)
        return self._shared[1]

    @property
    def layers(self) -> list[int]:
        """The layers in which the policy selected: those with full attention."""
        return sorted(self.steps[0].reads) if self.steps else []

    def pages_read(self, layer: int) -> np.ndarray:
        """Share of each page that sequence 0 read, mean over KV heads: float32 [pages, steps].

        NaN where a page did not exist yet.
        """
        size = self.steps[0].page_size
        last = max(int(step.lengths[0]) for step in self.steps)
        shares = np.full((-(-last // size), len(self.steps)), np.nan, np.float32)
        for column, step in enumerate(self.steps):
            tokens = step.tokens(layer).mean(0, dtype=np.float32)
            starts = np.arange(0, len(tokens), size)
            filled = np.minimum(size, len(tokens) - starts)
            shares[: len(starts), column] = np.add.reduceat(tokens, starts) / filled
        return shares


@dataclass(frozen=True)
class Traced(PolicyProxy):
    """A policy that behaves like `inner` and records its reads in `trace`."""

    trace: Trace = field(default_factory=Trace)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> Selection | None:
        """As the inner policy, recorded."""
        selection = self.inner.on_scores(layer, scores, step)
        self.trace.record(layer, selection, step)
        return selection

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """As the inner policy, recorded."""
        selection = self.inner.select(layer, query, step)
        self.trace.record(layer, selection, step)
        return selection


MOST_COLUMNS, MOST_ROWS = 512, 64
#: A cell whose tokens were all read; shares are stored as whole numbers from 0 to this.
ALL = 255


@dataclass(frozen=True, eq=False)
class Recorded:
    """What every layer read while one prompt was answered; `trace` has only decode steps."""

    trace: Trace
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectionMap:
    """Share of each cell's tokens that was read, in 255ths: uint8 [rows, columns].

    Row r covers the steps from r * steps_per_row on, column c the tokens from c * tokens_per_column
    on; in step s there are `prompt_tokens + 1 + s` tokens, and cells beyond are 0. marks: positions
    that the answer needs.
    """

    layer: int
    prompt_tokens: int
    steps: int
    tokens_per_column: int = 1
    steps_per_row: int = 1
    marks: tuple[int, ...] = ()
    shares: np.ndarray

    @property
    def tokens(self) -> int:
        """Number of tokens in the last step."""
        return self.prompt_tokens + self.steps

    @property
    def subject(self) -> str:
        """The part of the model: "layer 3"."""
        return f"layer {self.layer}"

    def to_json(self) -> dict[str, Any]:
        """As stored in a line: the fields, with the shares packed (zlib, base64)."""
        packed = base64.b64encode(zlib.compress(self.shares.tobytes(), 9)).decode()
        return vars(self) | {"marks": list(self.marks), "shares": packed}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> SelectionMap:
        """The map that is stored in a line; ConfigError if it is invalid."""
        try:
            per_column, per_row = stored["tokens_per_column"], stored["steps_per_row"]
            prompt_tokens, steps = stored["prompt_tokens"], stored["steps"]
            rows = math.ceil(steps / per_row)
            columns = math.ceil((prompt_tokens + steps) / per_column)
            raw = zlib.decompress(base64.b64decode(stored["shares"], validate=True))
            return cls(
                shares=np.frombuffer(raw, np.uint8).reshape(rows, columns),
                layer=stored["layer"],
                prompt_tokens=prompt_tokens,
                steps=steps,
                tokens_per_column=per_column,
                steps_per_row=per_row,
                marks=tuple(stored.get("marks") or ()),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError, zlib.error) as error:
            # binascii.Error is a ValueError.
            raise ConfigError(f"this is not a stored selection map: {error}") from error


def selection_map(recorded: Recorded, layer: int, marks: Sequence[int] = ()) -> SelectionMap:
    """The map of one layer, the mean over its KV heads. ConfigError for an unrecorded layer."""
    trace = recorded.trace
    if layer not in trace.layers:
        raise ConfigError(f"layer is {layer}; the policy selected in {trace.layers}")
    steps = len(trace.steps)
    tokens = recorded.prompt_tokens + steps
    per_column, per_row = math.ceil(tokens / MOST_COLUMNS), math.ceil(steps / MOST_ROWS)
    read = np.zeros((math.ceil(steps / per_row), math.ceil(tokens / per_column)))
    there = np.zeros_like(read)
    for number, step in enumerate(trace.steps):
        seen = step.tokens(layer).mean(0)
        columns = np.arange(len(seen)) // per_column
        read[number // per_row] += np.bincount(columns, seen, minlength=read.shape[1])
        there[number // per_row] += np.bincount(columns, minlength=read.shape[1])
    shares = np.divide(read, there, out=np.zeros_like(read), where=there > 0)
    return SelectionMap(
        shares=np.rint(shares * ALL).astype(np.uint8),
        layer=layer,
        prompt_tokens=recorded.prompt_tokens,
        steps=steps,
        tokens_per_column=per_column,
        steps_per_row=per_row,
        marks=tuple(marks),
    )


_MOST = 4


def mapped_layers(geometry: Geometry) -> tuple[int, ...]:
    """The last layer of each quarter of those with full attention.

    The first layers, which many methods read in full, are left out, and every policy is shown in
    the same layers.
    """
    layers = geometry.full_attention
    ends = (-(-len(layers) * quarter // _MOST) - 1 for quarter in range(1, _MOST + 1))
    return tuple(dict.fromkeys(layers[end] for end in ends)) if layers else ()


def selection_maps(
    make_engine: MakeEngine, policy: Policy, shown: Shown, layers: tuple[int, ...]
) -> list[dict[str, Any]]:
    """The maps to store in a line: one for each layer, KV heads together; none without a decode
    step.
    """
    traced = Traced(policy, Trace(only=frozenset(layers)))
    serve(make_engine(traced), [shown.request])
    recorded = Recorded(traced.trace, len(shown.request.prompt))
    return [selection_map(recorded, layer, shown.marks).to_json() for layer in traced.trace.layers]
