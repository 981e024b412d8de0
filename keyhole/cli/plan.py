"""Says which layers' keys and values fit into memory at which length, from a model's config alone.

Neither weights nor torch are loaded. Layers that do not fit go to the lower tier, the last first,
and keep a buffer of token_budget tokens above. A retrieval head counts in the paper's preset only;
on a GPU, memory is what its context leaves.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import keyhole
from keyhole.cli import flags, show
from keyhole.config import EngineConfig, is_count, require, setting
from keyhole.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from keyhole.models.checkpoint import Checkpoint
    from keyhole.planner import MemoryModel, Plan, Row

_PRESETS = ("measured", "paper")
_FIRST_LENGTH = 1024
_WIDTH = 100
#: Of a request's logits: as the model gives them, and in float32 beside a sorted copy.
_LOGIT_BYTES = 8
#: A process holds about twice what lives in a step, since freed memory is not all given back:
#: measured were 1.4 and 2.2 times the estimate (MLPs of 512 and 2816, 1016 tokens, float32).
_KEPT_BY_ALLOCATOR = 2


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What is planned for."""

    memory: int | None = setting(None, "bytes of the upper tier, weights included")
    requests: int = setting(1, "texts at once")
    token_budget: int = setting(1024, "tokens that a layer on the lower tier keeps above")
    lengths: tuple[int, ...] | None = setting(
        None, "lengths to show; None: powers of two up to the model's longest"
    )
    preset: str = setting("measured", "measured: as this engine; paper: SpeContext's constants")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16")

    def __post_init__(self) -> None:
        if self.memory is None:
            raise ConfigError("give --memory, for example --memory 8GiB")
        for name in ("requests", "token_budget"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "at least 1")
        good = self.lengths is None or (self.lengths and all(map(is_count, self.lengths)))
        require(bool(good), "lengths", self.lengths, "numbers of tokens such as 1024,4096")
        if self.preset not in _PRESETS:
            raise UnknownNameError("preset", self.preset, _PRESETS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole plan`."""
    help_text = "folder or hub id; without it the bundled model"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=help_text)
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the layers on each tier")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_settings(parser, PlanSettings, "what is planned for")


def run(arguments: argparse.Namespace) -> int:
    """Prints thresholds, and a row per length."""
    settings = PlanSettings(**flags.settings_of(arguments, PlanSettings))
    from keyhole.models import checkpoint
    from keyhole.planner import Plan

    shape = checkpoint.read(arguments.model or keyhole.tiny(), settings.dtype)
    model = memory_model(shape, settings)
    assert settings.memory is not None
    plan = Plan(model=model, memory=settings.memory)
    lengths = settings.lengths or _lengths(shape.max_length)
    if arguments.plot:
        from keyhole.evaluate.plan_chart import plan_chart

        plan_chart(plan, lengths, arguments.plot, title=_title(shape, settings))
    if arguments.json:
        about = {
            "model": shape.name,
            "preset": settings.preset,
            "dtype": _dtype(shape, settings),
            "num_parameters": shape.num_parameters,
            "counted_from": shape.counted_from,
            "max_length": shape.max_length,
        }
        print(show.to_json({**plan.as_dict(lengths), **about}))
    else:
        print(_text(plan, shape, settings, lengths))
        if arguments.plot:
            print(f"written: {arguments.plot}")
    return 0


def memory_model(shape: Checkpoint, settings: PlanSettings) -> MemoryModel:
    """The terms of a preset for a model."""
    from keyhole.cache.footprint import layer_memory
    from keyhole.planner import MemoryModel

    if settings.preset == "paper":
        return _paper(shape, settings)
    page_size, chunk = EngineConfig.page_size, EngineConfig.prefill_chunk
    geometry = shape.geometry(page_size)
    return MemoryModel.measured(
        layers=layer_memory(geometry),
        requests=settings.requests,
        token_budget=settings.token_budget,
        page_size=page_size,
        weight_bytes=shape.num_parameters * shape.itemsize,
        request_bytes=shape.vocab_size * (shape.itemsize + _LOGIT_BYTES),
        runtime_bytes=_KEPT_BY_ALLOCATOR
        * (chunk + settings.requests)
        * shape.step_numbers
        * shape.itemsize,
    )


def _paper(shape: Checkpoint, settings: PlanSettings) -> MemoryModel:
    """Eq. 6 and 7: fp16 throughout, and a draft model of one layer like the model's."""
    from keyhole.models.checkpoint import ITEMSIZES
    from keyhole.planner import MemoryModel

    layer = shape.layers[0]
    if layer.shared_values:
        raise ConfigError(
            f"preset 'paper' counts keys and values of whole heads, and {shape.name!r} keeps "
            "latents; use --preset measured"
        )
    itemsize = ITEMSIZES["float16"]
    if settings.dtype != "auto" and ITEMSIZES[settings.dtype] != itemsize:
        raise ConfigError(f"preset 'paper' counts 2 bytes per number, not those of {shape.dtype}")
    group = shape.num_query_heads // layer.num_kv_heads
    return MemoryModel.paper(
        model_bytes=shape.num_parameters * itemsize,
        head_bytes=shape.layer_parameters * itemsize,
        num_layers=len(shape.layers),
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.key_dim,
        groups=group if group > 1 else 0,
        requests=settings.requests,
        token_budget=settings.token_budget,
    )


def _lengths(longest: int) -> tuple[int, ...]:
    powers = [_FIRST_LENGTH << n for n in range(longest.bit_length())]
    return (*[length for length in powers if length < longest], longest)


def _dtype(shape: Checkpoint, settings: PlanSettings) -> str:
    return "float16" if settings.preset == "paper" else shape.dtype


def _title(shape: Checkpoint, settings: PlanSettings) -> str:
    assert settings.memory is not None
    many = "request" if settings.requests == 1 else "requests"
    return (
        f"{shape.name} in {show.bytes_text(settings.memory)}: {settings.requests} {many}, "
        f"budget {settings.token_budget:,}"
    )


_HEADS = ("tokens", "layers above", "below", "memory above", "below", "largest batch", "all above")


def _text(plan: Plan, shape: Checkpoint, settings: PlanSettings, lengths: tuple[int, ...]) -> str:
    terms = plan.model.terms(0, 0)
    fixed = ", ".join(
        f"{name} {show.bytes_text(terms[name])}"
        for name in ("weights", "requests", "runtime")
        if terms[name]
    )
    row_bytes = plan.model.token_bytes
    thresholds = ", ".join(f"{length:,}" for length in plan.thresholds)
    wrapped = textwrap.fill(thresholds, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return (
        f"{_title(shape, settings)}\n"
        f"preset {settings.preset}, {_dtype(shape, settings)}; "
        f"{shape.num_parameters:,} weights counted from {shape.counted_from}\n"
        f"{fixed}; a token {show.bytes_text(row_bytes)}\n\n"
        f"longest texts with 0 to {len(plan.model.layers)} layers below:\n{wrapped}\n\n"
        f"{show.table(_HEADS, [_cells(row, plan) for row in plan.rows(lengths)], left=0)}\n"
    )


def _cells(row: Row, plan: Plan) -> list[str]:
    batches = [f"{row.largest_batch:,}", f"{row.largest_batch_above:,}"]
    if row.offloaded is None or row.upper_bytes is None or row.lower_bytes is None:
        return [f"{row.length:,}", "does not fit", "-", "-", "-", *batches]
    return [
        f"{row.length:,}",
        str(len(plan.model.layers) - row.offloaded),
        str(row.offloaded),
        show.bytes_text(row.upper_bytes),
        show.bytes_text(row.lower_bytes),
        *batches,
    ]
