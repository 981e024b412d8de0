"""Layers of one model over several devices, for models larger than one (a pipeline of layers).

Embedding, last norm and head are on the first device, where sequences, logits and sampling are. The
decoder layers are placed in order; hidden states go from device to device, and those of the last
layer return to the first. Keys and values of a layer are on its device (`PageCache`), and what
attention needs of a step is sent there once per step (`models/batch.py`).

One device computes at a time for a step; others wait. This makes room, not speed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keyhole.cache.layout import Geometry
from keyhole.config import EngineConfig
from keyhole.errors import CapacityError, ConfigError, is_out_of_memory
from keyhole.models import families
from keyhole.models.batch import PassThrough
from keyhole.models.model import Model, decoder_layers
from keyhole.models.modules import sequence_adapters
from keyhole.policies.base import Policy

#: What `LLM(device_map=)` takes.
DeviceMap = str | Mapping[str, str | torch.device] | None

#: Share of a device's free memory that weights may take; the rest is for the KV cache and a step.
_SHARE = 0.9
_AUTO = "auto"
_MEMINFO = Path("/proc/meminfo")


def one_device(device: str | torch.device) -> torch.device:
    """The device of a name; "auto" is a GPU if there is one. ConfigError for a wrong one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"unknown device {device!r}: write auto, cpu, cuda or cuda:0") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported: write auto, cpu or cuda")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {str(device)!r} is not available; write device='cpu' or 'auto'")
    return place


def wanted_devices(device_map: DeviceMap) -> list[torch.device]:
    """The devices of a map, the first one first; those of all GPUs for "auto".

    ConfigError for what is no map, an unknown device, and "auto" without a GPU.
    """
    if device_map == _AUTO:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ConfigError(
                "device_map='auto' spreads layers over GPUs, but there are none; leave it out"
            )
        return [torch.device("cuda", number) for number in range(count)]
    if not isinstance(device_map, Mapping) or not device_map:
        raise ConfigError(
            f"device_map {device_map!r} must be 'auto', or devices by the names of modules, such "
            "as {'': 'cuda:0', 'model.layers.20': 'cuda:1'}"
        )
    found: list[torch.device] = []
    for name, given in device_map.items():
        try:
            place = torch.device(given)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"device_map: {name!r} has the unknown device {given!r}; write cpu or cuda:0"
            ) from error
        if place.type not in ("cpu", "cuda"):
            raise ConfigError(f"device_map: device {given!r} of {name!r} must be cpu or cuda")
        count = torch.cuda.device_count()
        if place.type == "cuda" and (place.index or 0) >= count:
            raise ConfigError(
                f"device_map: device {given!r} of {name!r} is not available: this machine has "
                f"{count} GPUs"
            )
        if place not in found:
            found.append(place)
    if len({place.type for place in found}) > 1:
        shown = " and ".join(map(str, found))
        raise ConfigError(f"device_map: a model must be on GPUs or on the CPU, not on {shown}")
    return found


def require_alone(device_map: DeviceMap, device: str | torch.device) -> None:
    """ConfigError for a wrong map, and for a device beside it."""
    if device_map is None:
        return
    wanted_devices(device_map)
    if device != _AUTO:
        raise ConfigError(
            f"device {str(device)!r} cannot be combined with device_map, which names the devices; "
            "leave one out"
        )


def require_attention(config: Any, device_map: DeviceMap, name: str) -> None:
    """ConfigError for a map of a model with recurrent layers."""
    if device_map is not None and families.recurrent_layers(config):
        raise ConfigError(
            f"device_map cannot be used with {name!r}, which has recurrent layers: their state is "
            "on one device; leave it out"
        )


def place_layers(
    network: Any, device_map: DeviceMap, name: str
) -> tuple[torch.device, tuple[torch.device, ...] | None]:
    """Moves a network, which is on the CPU, to the devices of a map.

    Returns the first device, that of embedding and head, and those of the layers of attention; None
    if all are on the first.

    ConfigError for a map that names no module or splits what must be together; CapacityError, with
    the bytes that are needed, if the devices have less.
    """
    devices = wanted_devices(device_map)
    prefix, blocks = decoder_layers(network)
    if device_map == _AUTO:
        sizes = [_num_bytes(block) for block in blocks]
        rest = _num_bytes(network) - sum(sizes)
        free = [int(_SHARE * free_bytes(place)) for place in devices]
        chosen = spread(sizes, rest, free)
        if chosen is None:
            raise _too_large(name, rest + sum(sizes), dict(zip(devices, free, strict=True)))
        first, layers = devices[0], [devices[number] for number in chosen]
    else:
        assert isinstance(device_map, Mapping)
        first, layers = _as_given(network, device_map, prefix, len(blocks))
    try:
        for block, place in zip(blocks, layers, strict=True):
            block.to(place)
        inside = {id(module) for block in blocks for module in block.modules()}
        for module in network.modules():
            if id(module) not in inside:
                _move_own(module, first)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        there = dict.fromkeys([first, *layers])
        raise _too_large(name, _num_bytes(network), {p: free_bytes(p) for p in there}) from error
    if {*layers} == {first}:
        return first, None
    _send_between(blocks, layers, first)
    each = len(families.layouts(network.config)) // len(blocks)  # LongCat has two in a block
    return first, tuple(place for place in layers for _ in range(each))


def settings(
    model: Model, policy: Policy, geometry: Geometry, config: EngineConfig
) -> EngineConfig:
    """The settings of an engine, without CUDA graphs if layers are on several devices.

    ConfigError for what does not run then, because its data is on one.
    """
    if model.layer_devices is None:
        return config
    named = {
        "offload": config.offload,
        "total_memory": config.total_memory,
        "prefill_policy": config.prefill_policy,
    }
    for name, value in named.items():
        if value is not None:
            raise ConfigError(f"{name} {value!r} cannot be used with device_map; leave one out")
    if any(layer.index_topk is not None for layer in geometry.layers):
        raise ConfigError(
            "device_map cannot be used with a model whose layers select tokens by an indexer; "
            "leave it out"
        )
    of_sequences = policy.sequence_state(geometry)
    evicts = policy.page_limit(np.ones(1, np.int64), geometry.page_size) is not None
    if policy.wants_head or policy.wants_gate or of_sequences or evicts or policy.shifts_keys:
        raise ConfigError(
            f"policy {policy.name!r} cannot be used with device_map: it keeps data on one "
            "device; use for example full, quest or delta"
        )
    return replace(config, graphs=False)


def spread(sizes: Sequence[int], rest: int, free: Sequence[int]) -> list[int] | None:
    """The device of each layer, by number, in order; None if the layers do not fit.

    sizes: bytes of each layer. rest: bytes of everything else, on the first device. free: bytes of
    each device. The fullest device is as empty as possible.
    """
    total = max(1, sum(free))
    # By bisection over the share of each device that may be filled.
    low, high, best = 0.0, 1.0, _filled(sizes, rest, free)
    while best is not None and (high - low) * total > 1:
        share = (low + high) / 2
        found = _filled(sizes, rest, [int(share * one) for one in free])
        if found is None:
            low = share
        else:
            high, best = share, found
    return best


def _filled(sizes: Sequence[int], rest: int, room: Sequence[int]) -> list[int] | None:
    """Fills the devices one after the other; None if there are too few."""
    if not room or rest > room[0]:
        return None
    chosen, number, left = [], 0, room[0] - rest
    for size in sizes:
        while size > left:
            number += 1
            if number == len(room):
                return None
            left = room[number]
        chosen.append(number)
        left -= size
    return chosen


def free_bytes(place: torch.device) -> int:
    """Free memory of a device."""
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    if _MEMINFO.is_file():
        # MemAvailable includes memory that the kernel can reclaim, such as the page cache.
        text = _MEMINFO.read_text()
        return 1024 * int(text[text.index("MemAvailable:") :].split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def require_memory(need: int, device: torch.device, device_map: DeviceMap, name: str) -> None:
    """Raises CapacityError, with both sizes, if the devices cannot hold `need` bytes of weights.

    Called before anything is loaded, because the system may kill a process that runs out of memory.
    """
    devices = [device] if device_map is None else wanted_devices(device_map)
    if devices[0].type == "cpu":
        devices = devices[:1]  # they share a memory
    free = {place: free_bytes(place) for place in devices}
    if need > sum(free.values()):
        raise _too_large(name, need, free)


def _as_given(
    network: Any, device_map: Mapping[str, str | torch.device], prefix: str, count: int
) -> tuple[torch.device, list[torch.device]]:
    """The first device, and those of the layers, as a map of names has them."""
    names = {name for name, _ in network.named_modules()}
    for key in device_map:
        if key not in names:
            example = f"{prefix}.{count - 1}"
            raise ConfigError(
                f"device_map: the model has no module {key!r}; its layers are {prefix}.0 to "
                f"{example}, and '' is everything else"
            )

    def of(name: str) -> torch.device:
        parts = name.split(".")
        for end in range(len(parts), -1, -1):
            given = device_map.get(".".join(parts[:end]))
            if given is not None:
                return torch.device(given)
        raise ConfigError(f"device_map has no device for {name!r}; give one for '' too")

    layers = [of(f"{prefix}.{number}") for number in range(count)]
    inside = f"{prefix}."
    outside = {
        of(name) for name, parameter in network.named_parameters() if not name.startswith(inside)
    }
    if len(outside) != 1:
        where = ", ".join(sorted(map(str, outside)))
        raise ConfigError(
            f"device_map: embedding, last norm and head must be on one device, not on {where}"
        )
    depth = inside.count(".")
    deeper = [key for key in device_map if key.startswith(inside) and key.count(".") > depth]
    if deeper:
        raise ConfigError(
            f"device_map: a layer must be on one device, but {deeper[0]!r} is part of a layer"
        )
    return outside.pop(), layers


def _move_own(module: nn.Module, place: torch.device) -> None:
    """Moves the tensors of a module itself, not those of modules inside it."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            parameter.data = parameter.data.to(place)
            assert getattr(module, name) is parameter
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(place)


def _num_bytes(module: nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _too_large(name: str, need: int, free: Mapping[torch.device, int]) -> CapacityError:
    there = ", ".join(f"{place} {size:,}" for place, size in free.items())
    return CapacityError(
        f"the weights of {name!r} need {need:,} bytes, but only {sum(free.values()):,} are "
        f"available ({there}); give more devices in device_map, a smaller dtype, or a quantised "
        "checkpoint"
    )


def _send_between(
    blocks: nn.ModuleList, layers: Sequence[torch.device], first: torch.device
) -> None:
    """Makes each layer send its inputs to its device, and the last one its outputs to the first."""
    for block, place in zip(blocks, layers, strict=True):
        block.register_forward_pre_hook(_Send(place).inputs, with_kwargs=True)
    blocks[-1].register_forward_hook(_Send(first).outputs)


class _Send:
    """Sends what goes into a layer, or comes out of it, to a device."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def inputs(
        self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A hook before a layer."""
        sequence_adapters.send(self.place)
        sent = {name: on_device(value, self.place) for name, value in named.items()}
        return on_device(given, self.place), sent

    def outputs(self, _: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
        """A hook after a layer."""
        sequence_adapters.send(self.place)
        return on_device(out, self.place)


def on_device(value: Any, place: torch.device) -> Any:
    """A tensor, a tuple or mapping of such, or positions, on a device; anything else unchanged."""
    if isinstance(value, Tensor):
        return value.to(place)
    if isinstance(value, PassThrough):
        return PassThrough(value.batch, value.positions.to(place))
    if isinstance(value, MutableMapping):  # keys and values that later layers read, which add to it
        value.update({name: on_device(one, place) for name, one in value.items()})
        return value
    if isinstance(value, tuple):
        moved = (on_device(one, place) for one in value)
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value
