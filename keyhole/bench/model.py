"""A model of a given shape with random weights, the contents of its caches, and what fits in
memory.

On a CPU, memory is the resident set and its peak as reported by the operating system; on a GPU, the
bytes that torch has allocated.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from keyhole.bench import measure
from keyhole.bench.settings import ALL_BASELINES, PAGE_SIZE, SHAPES, DecodeSettings
from keyhole.cache.layout import Geometry, bytes_per_page
from keyhole.config import bytes_text
from keyhole.engine.head_runner import HeadRunner
from keyhole.errors import CapacityError
from keyhole.kernels import cpu
from keyhole.models import device_map, families
from keyhole.models.attention import NAME
from keyhole.models.fast_layers import speed_up
from keyhole.models.model import Model
from keyhole.models.modules.fused_layer import fuse_layers
from keyhole.policies import make_policy
from keyhole.retrieval.head import RetrievalHead

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see clear_refs in proc(5): the peak becomes what is resident now


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now, torch's own unused ones included."""
    free = device_map.free_bytes(device)
    if device.type == "cuda":
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free


def used_bytes(device: torch.device) -> int:
    """Bytes that this process uses now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _field(_STATUS, "VmRSS") if _STATUS.is_file() else peak_bytes(device)


def reset_peak(device: torch.device) -> None:
    """Resets the peak if the system allows it; otherwise it stays that of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int:
    """The largest memory use of this process since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.is_file():
        return _field(_STATUS, "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def release_memory() -> None:
    """Returns free memory of this process to the system, which would count it as used."""
    gc.collect()
    torch.cuda.empty_cache()  # no effect without a GPU
    # Newer than the oldest supported torch.
    pinned = getattr(torch.accelerator, "empty_host_cache", None)
    if pinned is not None and torch.cuda.is_available():
        pinned()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def workspace_bytes() -> int:
    """Bytes of the buffers that the C++ kernels keep for this thread; 0 without them."""
    return 0 if cpu.extension is None else cpu.extension.workspace_bytes()


def _field(file: Path, name: str) -> int:
    """A size in a file of /proc with lines such as "VmRSS:  12 kB"."""
    text = file.read_text()
    return 1024 * int(text[text.index(f"{name}:") :].split()[1])


#: Memory left free for the rest of the machine.
RESERVE_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A system that does not fit in memory; system None: Keyhole's cache itself, so nothing can be
    measured at this context.
    """

    context: int
    batch: int
    system: str | None
    need_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        who = "the caches" if self.system is None else self.system
        where = f"{self.context:,} tokens, batch {self.batch}"
        need, free = bytes_text(self.need_bytes), bytes_text(self.free_bytes)
        return f"skipped at {where}: {who} would need {need}, {free} are free"

    def as_dict(self) -> dict[str, Any]:
        """For a line of results."""
        return asdict(self)


def fitting(
    model: Model,
    policies: Sequence[str],
    peers: Sequence[str],
    *,
    batch: int,
    context: int,
    steps: int,
    outside: tuple[str, Need] | None = None,
) -> tuple[list[str], list[Skipped]]:
    """The baselines that fit in addition to Keyhole's cache, in order, and the skipped systems.

    `outside`: a system in another process, and its needs. It is the first to get memory and to be
    filled. If Keyhole's cache itself does not fit, it is the only entry of the second list.
    """
    free = max(0, free_bytes(model.device) - RESERVE_BYTES)
    geometry = model.geometry(PAGE_SIZE)
    past = batch * (context + steps) * geometry.token_bytes
    layer = past // geometry.num_layers

    def skipped(system: str | None, need: int) -> Skipped:
        sizes = {"need_bytes": need, "free_bytes": free}
        return Skipped(context=context, batch=batch, system=system, **sizes)

    ours = needed_bytes(model, policies, batch, context, steps)
    # While a layer of a sequence is written, its keys exist twice: as drawn and in page order.
    writing = layer // batch
    if ours + writing > free:
        return [], [skipped(None, ours + writing)]
    free -= ours
    kept: list[str] = []
    left_out: list[Skipped] = []
    if outside is not None:
        name, its = outside
        need = its.stays + max(writing, its.passes - ours)
        if need > free:
            left_out.append(skipped(name, need))
        else:
            kept.append(name)
            free -= its.stays
    for name in peers:
        kind = ALL_BASELINES[name][1]
        is_there = any(ALL_BASELINES[other][1] == kind for other in kept if other in ALL_BASELINES)
        need = (0 if is_there else past) + passing_layers(name, geometry) * layer
        if need > free:
            left_out.append(skipped(name, need))
        else:
            kept.append(name)
            free -= 0 if is_there else past
    return kept, left_out


def passing_layers(name: str, geometry: Geometry) -> int:
    """The largest temporary need of a baseline, in layers of its cache."""
    attention, kind = ALL_BASELINES[name]
    group = geometry.num_query_heads // geometry.layers[0].num_kv_heads
    # A dynamic cache copies one layer at a time; eager repeats keys and values for each head.
    # Filling a cache needs a layer and parts of its copy.
    return max(2, (kind == "dynamic") + (group if attention == "eager" else 1))


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that a system needs besides Keyhole's, and the additional bytes while its cache is
    filled.
    """

    stays: int
    passes: int


def needed_bytes(
    model: Model, policies: Sequence[str], batch: int, context: int, steps: int
) -> int:
    """Bytes that `Pages` will have."""
    data = [*page_data(model, policies), head_data(model, policies)]
    page_bytes = bytes_per_page(model.geometry(PAGE_SIZE), data)
    return num_pages(policies, batch, context, steps) * page_bytes


def num_pages(policies: Sequence[str], batch: int, context: int, steps: int) -> int:
    """Pages for the prompts, for the tokens that every engine adds to them, and for copies of the
    prompts.
    """
    more = -(-(steps + 1) // PAGE_SIZE) + 1
    copies = sum(not make_policy(name).shares_pages for name in policies)
    # Plus the page that padding rows use if steps are captured.
    return batch * ((1 + copies) * (context // PAGE_SIZE) + len(policies) * more) + 1


def page_data(model: Model, policies: Sequence[str]) -> list[dict[str, tuple[int, ...]]]:
    """The page data of all policies together, layer by layer."""
    geometry = model.geometry(PAGE_SIZE)
    resolved = [make_policy(name).resolve(geometry) for name in policies]
    data: list[dict[str, tuple[int, ...]]] = [{} for _ in geometry.layers]
    for policy in resolved:
        for names, layout in zip(data, geometry.layers, strict=True):
            own = policy.page_data(layout, PAGE_SIZE)
            assert all(names.get(name, shape) == shape for name, shape in own.items())
            names |= own
    return data


def head_data(model: Model, policies: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The page data of a retrieval head, if a policy needs one."""
    if not any(make_policy(name).wants_head for name in policies):
        return {}
    return HeadRunner.page_data(RetrievalHead.random(model.network).config, PAGE_SIZE)


# Keys this wide make attention peaked, so that a wrong page changes the logits visibly.
_KEY_SCALE = 3.0
# Positions beyond the longest context: for the tokens that the benchmark adds.
_SPARE_POSITIONS = 1024


@dataclass(frozen=True)
class Weights:
    """The same weights in two networks: Keyhole's and transformers'."""

    keyhole: Model
    transformers: Any


def make_weights(settings: DecodeSettings) -> Weights:
    """A model of this shape with random weights, made in place."""
    fields = {"model_type": "llama"} | SHAPES[settings.shape]
    if settings.layers is not None:
        fields["num_hidden_layers"] = settings.layers
    device = measure.device(settings.device)
    dtype = getattr(torch, settings.dtype)
    layers = fields["num_hidden_layers"]
    need, free = _weight_bytes(fields, dtype), device_map.free_bytes(device)
    if need > free:  # the system may kill a process that runs out of memory
        raise CapacityError(
            f"shape {settings.shape!r} with layers {layers} has {bytes_text(need)} of weights, but "
            f"{bytes_text(free)} are free; lower layers, or choose a smaller shape"
        )
    longest = max(settings.contexts) + _SPARE_POSITIONS
    config = AutoConfig.for_model(**fields, max_position_embeddings=longest)
    torch.manual_seed(0)
    # Drawn separately with a progress bar, because it takes a minute for large shapes.
    with device, no_init_weights():
        network = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    network.tie_weights()  # which is part of initialising them
    _draw_weights(network.eval(), config.initializer_range)
    dense = without_copying_weights(network)
    speed_up(network, device)
    fuse_layers(network, device)
    length, reason = families.max_length(config, None)
    model = Model(
        name=settings.shape,
        network=network,
        tokenizer=None,
        device=device,
        dtype=dtype,
        max_length=length,
        length_reason=reason,
        eos_token_ids=frozenset(),
        defaults={},
    )
    return Weights(model, dense)


def _weight_bytes(fields: dict[str, Any], dtype: torch.dtype) -> int:
    """The bytes of a model of this shape, from one of its layers."""
    shape: dict[str, Any] = {**fields, "num_hidden_layers": 1}
    config = AutoConfig.for_model(**shape)
    with torch.device("meta"), no_init_weights():
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layer: int = sum(parameter.nbytes for parameter in network.model.layers.parameters())
    rest: int = sum(parameter.nbytes for parameter in network.parameters()) - layer
    return rest + layer * int(fields["num_hidden_layers"])


@torch.no_grad()
def _draw_weights(network: Any, std: float) -> None:
    """Draws random matrices, and ones for norms, as transformers initialises a Llama."""
    parameters = list(network.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    with tqdm(total=total, desc="weights", unit_scale=True, leave=False, disable=None) as bar:
        for parameter in parameters:
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=std)
            bar.update(parameter.numel())


def without_copying_weights(network: Any) -> Any:
    """Another network that shares the weights."""
    return copy.deepcopy(network, {id(weight): weight for weight in network.parameters()})


class RandomKV:
    """The keys and values that every cache is filled with, generated again at every call.

    A cache with another layout, or in another process, requests them in its own order; no more than
    the requested part is in memory.
    """

    def __init__(self, model: Model, batch: int, context: int) -> None:
        layout, *_ = layers = model.geometry(PAGE_SIZE).layers
        self.batch, self.context = batch, context
        self.num_layers, self.num_kv_heads = len(layers), layout.num_kv_heads
        self.head_dim = layout.key_dim
        self.device = model.device
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)
        self._bar: Any = None
        size = (self.num_layers, batch, 2)
        generator = torch.Generator().manual_seed(context)
        self._seeds = torch.randint(2**31, size, generator=generator).tolist()

    def keys(self, layer: int, sequence: int) -> Tensor:
        """[Hkv, N, D] of one sequence."""
        return self._draw(layer, sequence, 0).mul_(_KEY_SCALE)

    def values(self, layer: int, sequence: int) -> Tensor:
        """[Hkv, N, D] of one sequence."""
        return self._draw(layer, sequence, 1)

    @contextmanager
    def filling(self, caches: int) -> Iterator[None]:
        """Shows the progress while this many caches are filled."""
        total = caches * 2 * self.num_layers * self.batch
        with tqdm(total=total, desc="fill caches", leave=False, disable=None) as self._bar:
            yield
        self._bar = None

    def _draw(self, layer: int, sequence: int, kind: int) -> Tensor:
        generator = torch.Generator(self._like.device).manual_seed(
            self._seeds[layer][sequence][kind]
        )
        size = (self.num_kv_heads, self.context, self.head_dim)
        drawn = self._like.new_empty(size).normal_(generator=generator)
        if self._bar is not None:
            self._bar.update()
        return drawn


def prompts(model: Model, batch: int, context: int, more: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of context + 1 tokens, and `more` tokens to continue each of them with."""
    generator = torch.Generator().manual_seed(context)
    tokens = torch.randint(model.vocab_size, (batch, context + 1), generator=generator)
    given = torch.randint(model.vocab_size, (more,), generator=generator)
    return tokens.tolist(), given.tolist()
