"""Predicts how many layers' keys and values fit into memory at a length, from a model's config.

No weights are loaded. Layers that do not fit are offloaded (to RAM or disk), the last one first,
and keep a buffer of token_budget tokens in memory. With --policy, the plan is that of LLM(policy,
offload=FOLDER) with the same --memory or --total-memory: it includes the data of the policy and its
retrieval head, and layers that the policy reads in full stay in memory, as all do if it refuses
offload. On a GPU (--device cuda), total memory excludes the CUDA context, and one more request is
counted if CUDA graphs are used.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole import drawing
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import PICTURE, Output, check_outputs
from keyhole.config import (
    KV_DTYPES,
    EngineConfig,
    bytes_text,
    is_count,
    require,
    require_counts,
    require_known,
    setting,
)
from keyhole.errors import ConfigError
from keyhole.policies import make_policy
from keyhole.registry import parse_one

if TYPE_CHECKING:
    from keyhole.cache.layout import Geometry, ModelSize
    from keyhole.models.checkpoint import Checkpoint
    from keyhole.planner import MemoryModel, MemoryPlan, PlanRow
    from keyhole.policies.base import Policy

_PRESETS = ("measured", "paper")
_DEVICES = ("cpu", "cuda")
_FIRST_LENGTH = 1024
_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The case to plan."""

    memory: int | None = setting(None, "bytes for the KV cache, without weights and working memory")
    total_memory: int | None = setting(
        None, "instead of memory: bytes for weights, KV cache and working memory of a step"
    )
    policy: str | None = setting(
        None,
        "policy whose data is counted, as NAME:SETTING=VALUE; None: no policy data, and all layers "
        "may be offloaded",
    )
    requests: int = setting(1, "sequences at once")
    token_budget: int = setting(
        1024, "tokens that an offloaded layer keeps in memory; with --policy, its budget"
    )
    lengths: tuple[int, ...] | None = setting(
        None, "lengths to show; None: powers of two up to the model's longest"
    )
    preset: str = setting(
        "measured", "measured: the constants of this engine; paper: those of SpeContext"
    )
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16")
    kv_dtype: str = setting("auto", "data type of keys and values: int8 or fp8; auto: the model's")
    device: str = setting(
        "cpu", "cpu or cuda, for which a copy of one layer's keys and values is counted"
    )

    def __post_init__(self) -> None:
        if (self.memory is None) == (self.total_memory is None):
            raise ConfigError(
                "give --total-memory, for example --total-memory 8GiB, or --memory, which limits "
                "only the KV cache"
            )
        require_counts(self, "requests", "token_budget")
        good = self.lengths is None or (self.lengths and all(map(is_count, self.lengths)))
        require(bool(good), "lengths", self.lengths, "numbers of tokens such as 1024,4096")
        require_known("preset", self.preset, _PRESETS)
        require_known("kv_dtype", self.kv_dtype, KV_DTYPES)
        require_known("device", self.device, _DEVICES)
        if self.preset == "paper" and self.kv_dtype != "auto":
            raise ConfigError(
                f"preset 'paper' counts 2 bytes per number, not kv_dtype {self.kv_dtype!r}; "
                "use --preset measured"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole plan`."""
    flags.add_model(parser, loads=False)
    parser.add_argument(
        "--plot", metavar="FILE", help="write a picture of the layers in each tier to this file"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_settings(parser, PlanSettings, "what is planned for")


def run(arguments: argparse.Namespace) -> int:
    """Prints thresholds, and a row per length."""
    given = flags.settings_of(arguments, PlanSettings)
    settings = PlanSettings(**_one_budget(given))
    if arguments.plot is not None:
        check_outputs(Output("--plot", arguments.plot, PICTURE))
        drawing.matplotlib()
    from keyhole.models import checkpoint
    from keyhole.planner import MemoryPlan

    shape = checkpoint.read(flags.find_model(arguments), settings.dtype)
    model = memory_model(shape, settings)
    if settings.memory is not None:
        plan = MemoryPlan.for_cache(model, settings.memory)
    else:
        assert settings.total_memory is not None
        plan = MemoryPlan(model=model, memory=settings.total_memory)
    lengths = settings.lengths or _lengths(shape.max_length)
    if arguments.plot:
        from keyhole.eval.report.layer_charts import plan_chart

        plan_chart(plan, lengths, arguments.plot, title=_title(plan, shape))
    if arguments.json:
        about = {
            "model": shape.name,
            "preset": settings.preset,
            "policy": settings.policy,
            "dtype": _dtype(shape, settings),
            "kv_dtype": settings.kv_dtype,
            "num_parameters": shape.num_parameters,
            "counted_from": shape.counted_from,
            "max_length": shape.max_length,
        }
        print(terminal.to_json({**plan.as_dict(lengths), **about}))
    else:
        print(_text(plan, shape, settings, lengths))
        if arguments.plot:
            print(f"written: {arguments.plot}")
    return 0


def _one_budget(given: dict[str, Any]) -> dict[str, Any]:
    """The settings with the budget of the policy; ConfigError for another budget beside it."""
    if "policy" not in given:
        return given
    named = parse_one(given["policy"], "policy").settings
    if "token_budget" in given and any(name == "token_budget" for name, _ in named):
        raise ConfigError(
            f"policy {given['policy']!r} has a token_budget of its own; leave out --token-budget "
            f"{given['token_budget']}"
        )
    policy = make_policy(given["policy"])
    return {"token_budget": getattr(policy, "token_budget", PlanSettings.token_budget), **given}


def memory_model(shape: Checkpoint, settings: PlanSettings) -> MemoryModel:
    """The terms of a preset for a model."""
    if settings.preset == "paper":
        return _paper(shape, settings)
    from keyhole.cache.layout import ModelSize
    from keyhole.cache.layout import memory_model as every_term

    size = ModelSize(
        weight_bytes=shape.weight_bytes,
        vocab_size=shape.vocab_size,
        step_numbers=shape.step_numbers,
    )
    chunk = EngineConfig.prefill_chunk
    geometry = shape.geometry(EngineConfig.page_size).stored_as(settings.kv_dtype)
    if settings.policy is not None:
        return _under_policy(settings.policy, shape, geometry, size, settings)
    return every_term(
        geometry,
        size,
        requests=settings.requests,
        token_budget=settings.token_budget,
        prefill_chunk=chunk,
        gathers=settings.device == "cuda",
    )


def _under_policy(
    name: str, shape: Checkpoint, geometry: Geometry, size: ModelSize, settings: PlanSettings
) -> MemoryModel:
    """The memory model with the data of the policy, and of the retrieval head or gate that it names
    or that is stored with the model; loads torch.
    """
    from keyhole.engine import allocation
    from keyhole.models.model import CALIBRATION_FILE
    from keyhole.retrieval import head_files
    from keyhole.retrieval.head_files import HeadCheckpoint as Folder

    calibration, head = shape.folder / CALIBRATION_FILE, None
    if calibration.is_file():
        geometry = replace(geometry, calibration=calibration)
    has_budget = hasattr(make_policy(name), "token_budget")
    budget = {"token_budget": settings.token_budget} if has_budget else {}
    policy = make_policy(name, budget).resolve(geometry)
    try:
        layers = allocation.movable(geometry, policy)
    except ConfigError as refused:  # an engine under this policy runs without offload
        print(f"no layer is offloaded: {refused}", file=sys.stderr)
        layers = ()
    selecting = _selecting(policy, shape)
    if selecting is not None:
        folder = Folder.open(selecting)
        head = head_files.read_config(folder)[0] if policy.wants_head else None
        numbers = sum(math.prod(tensor) for tensor in folder.shapes.values())
        size = replace(size, head_weight_bytes=numbers * shape.itemsize)
    return allocation.memory_of(
        geometry,
        policy,
        size,
        allocation.page_data(geometry, policy, head),
        layers=layers,
        requests=settings.requests,
        prefill_chunk=EngineConfig.prefill_chunk,
        gathers=settings.device == "cuda",
        total=settings.total_memory is not None,
    )


def _selecting(policy: Policy, shape: Checkpoint) -> Path | str | None:
    """The folder of the head or gate that the policy selects by; None if it needs none, or if there
    is none yet, which is printed.
    """
    from keyhole.models.model import GATE_FOLDER, HEAD_FOLDER

    if not (policy.wants_head or policy.wants_gate):
        return None
    kind, beside = ("head", HEAD_FOLDER) if policy.wants_head else ("gate", GATE_FOLDER)
    named: str | None = getattr(policy, kind, None)
    if named is None and not (shape.folder / beside).is_dir():
        print(
            f"the data of a {kind} is not counted: {shape.name!r} has no folder {beside!r}, and "
            f"{kind}= names no other",
            file=sys.stderr,
        )
        return None
    return named or shape.folder / beside


def _paper(shape: Checkpoint, settings: PlanSettings) -> MemoryModel:
    """Eq. 6 and 7: fp16 throughout, and a draft model of one layer like the model's."""
    from keyhole.cache.layout import ITEMSIZES
    from keyhole.planner import MemoryModel

    layer = shape.layers[0]
    if layer.shared_values:
        raise ConfigError(
            f"preset 'paper' counts keys and values of whole heads, but {shape.name!r} caches "
            "latents; use --preset measured"
        )
    itemsize = ITEMSIZES["float16"]
    if settings.dtype != "auto" and ITEMSIZES[settings.dtype] != itemsize:
        raise ConfigError(
            f"preset 'paper' counts 2 bytes per number, not dtype {settings.dtype!r}; use --preset "
            "measured"
        )
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


def _title(plan: MemoryPlan, shape: Checkpoint) -> str:
    count = plan.model.requests
    many = "request" if count == 1 else "requests"
    # What an offloaded layer keeps in memory.
    budget = f", budget {plan.model.token_budget:,}" if plan.model.order else ""
    return f"{shape.name} in {bytes_text(plan.memory)}: {count} {many}{budget}"


def _as_given(plan: MemoryPlan, settings: PlanSettings) -> str:
    """The arguments of `LLM` for this plan; nothing for another preset's terms."""
    if settings.preset == "paper":
        return ""
    batch = f"max_batch={plan.model.requests}"
    if settings.kv_dtype != "auto":
        batch += f", kv_dtype={settings.kv_dtype!r}"
    given = f"LLM(total_memory={plan.memory}, {batch})"
    return f": {given}, or LLM(memory={plan.cache_memory}, {batch})"


_HEADS = (
    "tokens",
    "resident layers",
    "offloaded",
    "resident bytes",
    "offloaded",
    "largest batch",
    "all resident",
)


def _text(
    plan: MemoryPlan, shape: Checkpoint, settings: PlanSettings, lengths: tuple[int, ...]
) -> str:
    terms = plan.model.terms(0, 0)
    fixed = ", ".join(
        f"{name} {bytes_text(terms[name])}"
        for name in ("weights", "requests", "runtime")
        if terms[name]
    )
    row_bytes = plan.model.token_bytes
    cache = bytes_text(plan.cache_memory)
    count = len(plan.model.order)  # those that may be offloaded
    thresholds = ", ".join(f"{length:,}" for length in plan.thresholds[: count + 1])
    wrapped = textwrap.fill(thresholds, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    under = "" if settings.policy is None else f", {settings.policy}"
    offloaded = f"0 to {count} layers" if count else "no layer"
    stored = "" if settings.kv_dtype == "auto" else f", keys and values in {settings.kv_dtype}"
    return (
        f"{_title(plan, shape)}\n"
        f"preset {settings.preset}{under}, {_dtype(shape, settings)}{stored}; "
        f"{shape.num_parameters:,} weights counted from {shape.counted_from}\n"
        f"{fixed}; a token {bytes_text(row_bytes)}\n"
        f"left for the KV cache {cache}{_as_given(plan, settings)}\n\n"
        f"maximum context with {offloaded} offloaded:\n{wrapped}\n\n"
        f"{terminal.table(_HEADS, [_cells(row, plan) for row in plan.rows(lengths)], left=0)}\n"
    )


def _cells(row: PlanRow, plan: MemoryPlan) -> list[str]:
    batches = [f"{row.largest_batch:,}", f"{row.largest_batch_above:,}"]
    if row.offloaded is None or row.resident_bytes is None or row.offloaded_bytes is None:
        return [f"{row.length:,}", "does not fit", "-", "-", "-", *batches]
    return [
        f"{row.length:,}",
        str(len(plan.model.layers) - row.offloaded),
        str(row.offloaded),
        bytes_text(row.resident_bytes),
        bytes_text(row.offloaded_bytes),
        *batches,
    ]
