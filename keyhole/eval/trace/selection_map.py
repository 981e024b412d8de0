"""Which tokens of a text a policy read, decode step after decode step: computed, stored, drawn.

    recorded = record(model, Delta(token_budget=256), prompt)
    found = selection_map(recorded, layer=3)
    line["selection_maps"] = [found.to_json()]

A map has a row for each step and a column for each token; long ones put neighbours together, so
that it stays small enough to be stored with a result: at most 64 rows of 512 columns.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.config import EngineConfig, SamplingParams
from keyhole.drawing import FAINT, INK, PALE, STYLE, matplotlib, save
from keyhole.errors import ConfigError
from keyhole.eval.report.plot_style import FILL
from keyhole.eval.trace.trace import Trace, Traced
from keyhole.llm import LLM
from keyhole.models.loading import Model
from keyhole.policies.base import Policy
from keyhole.tokenization import Prompt

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
            draw(axis, one, color=color, colors=colors)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel("position in the text", fontsize=9)
        figure.supylabel("decode step", fontsize=9)
        save(figure, path)
        pyplot.close(figure)


def draw(axis: Any, found: SelectionMap, *, color: str = FILL, colors: Any) -> None:
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
