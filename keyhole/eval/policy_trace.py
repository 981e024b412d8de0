"""What a policy reads, recorded step by step, and as a map that can be stored and drawn.

    traced = Traced(Delta(token_budget=256))
    LLM(model, policy=traced).generate("...")
    traced.trace.pages_read(layer=3)

`Traced` wraps a policy and changes nothing. The record grows with every step, so it is for pictures
and tests: one sequence or a fixed batch at a time. A selection map has a row for each step and a
column for each token; neighbours of long ones are merged, so that at most 64 rows of 512 columns
are stored with a result.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import EngineConfig, SamplingParams
from keyhole.drawing import FAINT, INK, PALE, STYLE, matplotlib, save
from keyhole.errors import ConfigError
from keyhole.eval.report.plot_style import FILL
from keyhole.eval.workload import MakeEngine, Shown, serve
from keyhole.llm import LLM
from keyhole.models.loading import Model
from keyhole.policies.base import LowRank, Policy, PromptQueries, ScoreRequest, Selection, Step
from keyhole.tokenization import Prompt

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class PolicyProxy(Policy):
    """Behaves as `inner`, and has its settings as attributes."""

    capturable: ClassVar[bool | str] = "who looks on is called by the host, in every step"

    inner: Policy

    def __post_init__(self) -> None:
        # Class variables of a policy; here they are those of the policy inside.
        for name in (
            "name",
            "dense",
            "wants_head",
            "shares_pages",
            "page_settings",
            "reads_keys",
            "reads_queries",
            "selects_by_own_scores",
        ):
            object.__setattr__(self, name, getattr(self.inner, name))

    def __getattr__(self, name: str) -> Any:
        # Settings that the engine looks for, such as token_budget. A copy has no `inner` yet.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def resolve(self, geometry: Geometry) -> Self:
        """Settles the policy inside; everything else stays the same objects."""
        return dataclasses.replace(self, inner=self.inner.resolve(geometry))

    def outside_budget(self) -> str:
        """As the policy inside."""
        return self.inner.outside_budget()

    def dense_layers(self, geometry: Geometry) -> tuple[int, ...]:
        """As the policy inside."""
        return self.inner.dense_layers(geometry)

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """As the policy inside."""
        return self.inner.offloadable(geometry)

    def selection_heads(self, geometry: Geometry) -> int | None:
        """As the policy inside."""
        return self.inner.selection_heads(geometry)

    def page_limit(self, prompt_pages: np.ndarray, page_size: int) -> np.ndarray | None:
        """As the policy inside."""
        return self.inner.page_limit(prompt_pages, page_size)

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """As the policy inside."""
        return self.inner.page_data(layout, page_size)

    def sequence_state(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """As the policy inside."""
        return self.inner.sequence_state(geometry)

    def sequence_numbers(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """As the policy inside."""
        return self.inner.sequence_numbers(geometry)

    def before_step(self, step: Step) -> None:
        """As the policy inside."""
        self.inner.before_step(step)

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """As the policy inside."""
        self.inner.on_append(key_pages, data, pages, filled)

    def reusable(self, known: int, page_size: int) -> int:
        """As the policy inside."""
        return self.inner.reusable(known, page_size)

    def on_prompt_queries(
        self, layer: int, queries: PromptQueries, options: Mapping[str, Any]
    ) -> None:
        """As the policy inside."""
        self.inner.on_prompt_queries(layer, queries, options)

    def on_queries(self, layer: int, query: Tensor, step: Step, options: Mapping[str, Any]) -> None:
        """As the policy inside."""
        self.inner.on_queries(layer, query, step, options)

    def capture_key(self, step: Step) -> Hashable:
        """As the policy inside."""
        return self.inner.capture_key(step)

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """As the policy inside."""
        return self.inner.needs_scores(layer, step)

    def on_scores(self, layer: int, scores: tuple[Tensor, ...], step: Step) -> None:
        """As the policy inside."""
        self.inner.on_scores(layer, scores, step)

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """As the policy inside."""
        return self.inner.select(layer, query, step)

    def low_rank(self, layer: int, step: Step) -> LowRank | None:
        """As the policy inside."""
        return self.inner.low_rank(layer, step)

    def after_step(self, step: Step) -> Tensor | None:
        """As the policy inside."""
        return self.inner.after_step(step)

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """As the policy inside."""
        return self.inner.overhead_bytes(geometry, step)


@dataclass(frozen=True, eq=False)
class Read:
    """A Selection on the host: indices int [B, H, n] of the text, -1 is padding.

    H is 1, the KV heads, or the lists of `Policy.selection_heads`.
    """

    indices: np.ndarray
    unit: int


@dataclass(eq=False)
class TracedStep:
    """One decode step: lengths int32 [B], and per layer what it read (None: everything)."""

    lengths: np.ndarray
    page_size: int
    reads: dict[int, Read | None] = field(default_factory=dict)

    def tokens(self, layer: int, row: int = 0) -> np.ndarray:
        """Which tokens of sequence `row` were read, bool [Hkv or 1, length]."""
        length, read = int(self.lengths[row]), self.reads[layer]
        if read is None:
            return np.ones((1, length), bool)
        indices = read.indices[row]
        seen = np.zeros((len(indices), -(-length // read.unit)), bool)
        for head, chosen in zip(seen, indices, strict=True):
            head[chosen[chosen >= 0]] = True
        return seen.repeat(read.unit, axis=1)[:, :length]


@dataclass(eq=False)
class Trace:
    """The decode steps in their order; only: layers that it keeps, None for all."""

    steps: list[TracedStep] = field(default_factory=list)
    only: frozenset[int] | None = None
    _step: Step | None = None
    _shared: tuple[Selection, Read] | None = None

    def record(self, layer: int, selection: Selection | None, step: Step) -> None:
        """Adds what a layer reads; a step not seen before begins a new row."""
        if self.only is not None and layer not in self.only:
            return
        if step is not self._step:
            self._step, self._shared = step, None
            self.steps.append(TracedStep(step.lengths.cpu().numpy(), step.page_size))
        self.steps[-1].reads[layer] = self.read(layer, selection, step)

    def read(self, layer: int, selection: Selection | None, step: Step) -> Read | None:
        """What a layer reads, as positions in the text; None is everything.

        Without what the layer dropped, or was evicted. Layers that share a selection share a Read.
        """
        left = step.retained
        thinned = (left or step).kept_tokens
        if thinned is not None:
            selection = (
                thinned.selection(layer) if selection is None else thinned.within(layer, selection)
            )
        if selection is None:
            return None if left is None else Read(left.entries[:, None], step.page_size)
        if self._shared is None or selection is not self._shared[0]:
            indices = selection.indices.cpu().numpy()
            if left is not None:
                indices = _placed(indices, left.entries, step.page_size // selection.unit)
            self._shared = selection, Read(indices, selection.unit)
        return self._shared[1]

    @property
    def layers(self) -> list[int]:
        """The layers that the policy was asked about: those with full attention."""
        return sorted(self.steps[0].reads) if self.steps else []

    def pages_read(self, layer: int, row: int = 0) -> np.ndarray:
        """Share of each page that was read, mean over KV heads: float32 [pages, steps].

        NaN where a page did not exist yet.
        """
        size = self.steps[0].page_size
        last = max(int(step.lengths[row]) for step in self.steps)
        shares = np.full((-(-last // size), len(self.steps)), np.nan, np.float32)
        for column, step in enumerate(self.steps):
            tokens = step.tokens(layer, row).mean(0, dtype=np.float32)
            starts = np.arange(0, len(tokens), size)
            filled = np.minimum(size, len(tokens) - starts)
            shares[: len(starts), column] = np.add.reduceat(tokens, starts) / filled
        return shares


def _placed(indices: np.ndarray, entries: np.ndarray, per_page: int) -> np.ndarray:
    """Where in the text the indices [B, H, n] stand that count only the pages that are left.

    entries: int64 [B, W], those pages. per_page: how many indices a page has.
    """
    pages = np.take_along_axis(entries[:, None], np.maximum(indices, 0) // per_page, 2)
    return np.where(indices < 0, -1, pages * per_page + indices % per_page)


@dataclass(frozen=True)
class Traced(PolicyProxy):
    """A policy that behaves as `inner` and leaves a record in `trace`."""

    trace: Trace = field(default_factory=Trace)

    def needs_scores(self, layer: int, step: Step) -> tuple[ScoreRequest, ...]:
        """As the policy inside; a layer that scores reads everything."""
        requests = self.inner.needs_scores(layer, step)
        if requests and not self.inner.selects_by_own_scores:
            self.trace.record(layer, None, step)
        return requests

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """As the policy inside, recorded."""
        selection = self.inner.select(layer, query, step)
        self.trace.record(layer, selection, step)
        return selection


MOST_COLUMNS, MOST_ROWS = 512, 64
#: A cell whose tokens were all read; shares are stored as whole numbers from 0 to this.
_ALL = 255
#: Inches of a panel, and how many stand side by side.
_PANEL, _COLUMNS = (2.6, 1.7), 4


@dataclass(frozen=True, eq=False)
class Recorded:
    """What every layer read while one prompt was answered; `steps` of `trace` are decode steps."""

    trace: Trace
    prompt_tokens: int
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectionMap:
    """Share of each cell's tokens that was read, in 255ths: uint8 [rows, columns].

    Row r stands for the steps from r * steps_per_row, column c for the tokens from
    c * tokens_per_column; in step s there are `prompt_tokens + 1 + s` tokens, the others are 0.
    layer, head: None is the mean over all of them. marks: positions that the answer needs.
    """

    shares: np.ndarray
    prompt_tokens: int
    steps: int
    tokens_per_column: int = 1
    steps_per_row: int = 1
    layer: int | None = None
    head: int | None = None
    marks: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens there are in the last step."""
        return self.prompt_tokens + self.steps

    @property
    def subject(self) -> str:
        """What of the model it shows: "layer 3, KV head 0"."""
        layer = "all layers" if self.layer is None else f"layer {self.layer}"
        return layer if self.head is None else f"{layer}, KV head {self.head}"

    def to_json(self) -> dict[str, Any]:
        """What a line stores: the fields, with the shares packed (zlib, base64)."""
        packed = base64.b64encode(zlib.compress(self.shares.tobytes(), 9)).decode()
        return {
            "layer": self.layer,
            "head": self.head,
            "prompt_tokens": self.prompt_tokens,
            "steps": self.steps,
            "tokens_per_column": self.tokens_per_column,
            "steps_per_row": self.steps_per_row,
            "marks": list(self.marks),
            "shares": packed,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> SelectionMap:
        """The map that a line stores; ConfigError if it is none."""
        try:
            per_column, per_row = stored["tokens_per_column"], stored["steps_per_row"]
            prompt_tokens, steps = stored["prompt_tokens"], stored["steps"]
            rows = math.ceil(steps / per_row)
            columns = math.ceil((prompt_tokens + steps) / per_column)
            raw = zlib.decompress(base64.b64decode(stored["shares"], validate=True))
            return cls(
                shares=np.frombuffer(raw, np.uint8).reshape(rows, columns),
                prompt_tokens=prompt_tokens,
                steps=steps,
                tokens_per_column=per_column,
                steps_per_row=per_row,
                layer=stored.get("layer"),
                head=stored.get("head"),
                marks=tuple(stored.get("marks") or ()),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError, zlib.error) as error:
            # binascii.Error is a ValueError.
            raise ConfigError(f"this is no stored selection map: {error}") from error


def record(
    model: Model,
    policy: Policy,
    prompt: Prompt,
    *,
    max_tokens: int = MOST_ROWS + 1,
    page_size: int = EngineConfig.page_size,
) -> Recorded:
    """Answers a prompt greedily and records what every layer read.

    The first token comes from the prefill, so there is one step less than tokens; ConfigError if
    that leaves none.
    """
    traced = Traced(policy)
    llm = LLM(model, policy=traced, page_size=page_size)
    result = llm.generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    if not traced.trace.steps:
        raise ConfigError("the answer has one token only, which no decode step wrote")
    return Recorded(traced.trace, result.stats.prompt_tokens, result.text)


def selection_map(
    recorded: Recorded,
    *,
    layer: int | None = None,
    head: int | None = None,
    marks: Sequence[int] = (),
) -> SelectionMap:
    """The map of a layer, or of all layers that the policy was asked about, of a KV head or all.

    ConfigError for a layer or a KV head that is not there.
    """
    trace = recorded.trace
    if layer is not None and layer not in trace.layers:
        raise ConfigError(f"layer is {layer}; the policy was asked about {trace.layers}")
    layers = trace.layers if layer is None else [layer]
    steps = len(trace.steps)
    tokens = recorded.prompt_tokens + steps
    per_column, per_row = math.ceil(tokens / MOST_COLUMNS), math.ceil(steps / MOST_ROWS)
    read = np.zeros((math.ceil(steps / per_row), math.ceil(tokens / per_column)))
    there = np.zeros_like(read)
    for number, step in enumerate(trace.steps):
        seen = np.mean([_of_head(step.tokens(at), head) for at in layers], axis=0)
        columns = np.arange(len(seen)) // per_column
        read[number // per_row] += np.bincount(columns, seen, minlength=read.shape[1])
        there[number // per_row] += np.bincount(columns, minlength=read.shape[1])
    shares = np.divide(read, there, out=np.zeros_like(read), where=there > 0)
    return SelectionMap(
        shares=np.rint(shares * _ALL).astype(np.uint8),
        prompt_tokens=recorded.prompt_tokens,
        steps=steps,
        tokens_per_column=per_column,
        steps_per_row=per_row,
        layer=layer,
        head=head,
        marks=tuple(marks),
    )


def _of_head(tokens: np.ndarray, head: int | None) -> np.ndarray:
    """Share of each token's KV heads that were read, or of one of them: [length].

    tokens: bool [Hkv or 1, length]; one list for all heads stands for each of them.
    """
    if head is None:
        return np.asarray(tokens.mean(0))
    if len(tokens) > 1 and not 0 <= head < len(tokens):
        raise ConfigError(f"head is {head}; the layer has {len(tokens)} lists of tokens")
    return np.asarray(tokens[head if len(tokens) > 1 else 0], float)


def selection_chart(
    found: Sequence[SelectionMap], path: str | Path, *, title: str, color: str = FILL
) -> None:
    """Writes a picture, a panel for each map; ConfigError if it cannot be written."""
    pyplot, colors, _ = matplotlib()
    columns = min(_COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            rows,
            columns,
            figsize=(_PANEL[0] * columns, _PANEL[1] * rows + 0.6),
            squeeze=False,
            sharey=True,
            layout="constrained",
        )
        for axis in axes.flat[len(found) :]:
            axis.set_visible(False)
        for axis, one in zip(axes.flat, found, strict=False):
            draw_selection_map(axis, one, color=color, colors=colors)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel("position in the text", fontsize=9)
        figure.supylabel("decode step", fontsize=9)
        save(figure, path)
        pyplot.close(figure)


def draw_selection_map(axis: Any, found: SelectionMap, *, color: str = FILL, colors: Any) -> None:
    """Draws a map into an axis: position to the right, steps downwards; dark was read.

    colors: `matplotlib.colors`. Read cells are opaque `color` on the pale area of what existed.
    """
    rgba = np.empty((*found.shares.shape, 4))
    rgba[..., :3] = colors.to_rgb(color)
    rgba[..., 3] = found.shares / _ALL
    first = found.prompt_tokens + 1
    axis.fill(
        [0, first, found.tokens, found.tokens, 0],
        [0, 0, found.steps - 1, found.steps, found.steps],
        facecolor=PALE,
        linewidth=0,
        zorder=0,
    )
    rows, columns = found.shares.shape
    right, bottom = columns * found.tokens_per_column, rows * found.steps_per_row
    extent = (0, right, bottom, 0)
    axis.imshow(rgba, aspect="auto", interpolation="none", extent=extent, zorder=1)
    axis.axvline(found.prompt_tokens, color=INK, linewidth=0.7, linestyle=(0, (4, 3)))
    for mark in found.marks:
        axis.plot(mark, -0.02 * found.steps, "v", color=INK, markersize=3.5, clip_on=False)
    axis.set_xlim(0, found.tokens)
    axis.set_ylim(found.steps, 0)
    axis.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    axis.yaxis.get_major_locator().set_params(integer=True, nbins=4)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_title(found.subject, pad=7)
    axis.tick_params(length=0, labelcolor=FAINT)
    axis.spines[:].set_visible(False)


_MOST = 4


def mapped_layers(geometry: Geometry) -> tuple[int, ...]:
    """The layers after each quarter of those with full attention, the last one among them.

    The first layers, which many methods read whole, are left out, and every policy is shown in the
    same ones.
    """
    layers = geometry.full_attention
    ends = (-(-len(layers) * quarter // _MOST) - 1 for quarter in range(1, _MOST + 1))
    return tuple(dict.fromkeys(layers[end] for end in ends)) if layers else ()


def selection_maps(
    make_engine: MakeEngine, policy: Policy, shown: Shown, layers: tuple[int, ...]
) -> list[dict[str, Any]]:
    """What a line stores: a map for each layer, KV heads together; none without a decode step."""
    traced = Traced(policy, Trace(only=frozenset(layers)))
    (sequence,) = serve(make_engine(traced), [shown.request]).sequences
    recorded = Recorded(traced.trace, len(shown.request.prompt), sequence.detokenizer.text)
    return [
        selection_map(recorded, layer=layer, marks=shown.marks).to_json()
        for layer in traced.trace.layers
    ]
