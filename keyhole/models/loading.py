"""Finds, checks and loads a transformers model, in the form the engine needs."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from keyhole.config import require
from keyhole.errors import (
    CapacityError,
    ConfigError,
    ModelError,
    UnknownNameError,
    is_out_of_memory,
    one_line,
)
from keyhole.models import checkpoint, families
from keyhole.models.attention import NAME
from keyhole.models.device_map import (
    DeviceMap,
    one_device,
    place_layers,
    require_alone,
    require_attention,
    require_memory,
)
from keyhole.models.fast_layers import speed_up
from keyhole.models.locate import (
    ModelFiles,
    Origin,
    bundled_name,
    locate,
    named,
)
from keyhole.models.model import Model, beside_weights, require_defaults
from keyhole.models.model_config import (
    TEXT_WEIGHTS,
    announce,
    check_ids,
    load_tokenizer,
    read_tokenizer,
    read_whole_config,
    text_part,
)
from keyhole.models.modules import (
    indexed_attention,
    own_attention,
    recurrent_layers,
    sequence_adapters,
    sequence_rope,
)
from keyhole.models.modules.fused_layer import fuse_layers
from keyhole.models.shrink import unknown_rope_type, wrong_padding
from keyhole.models.weights import gguf_file
from keyhole.models.weights.adapters import merged, read_adapters, require_applied
from keyhole.models.weights.packing import pack_weights
from keyhole.models.weights.stored import (
    check_stored,
    damage,
    log_once,
    require_known,
    require_same,
    require_scales_used,
    require_suitable,
    settle_dtype,
    unpack,
)
from keyhole.models.weights.weight_format import WeightFormat, weight_format

#: Called with a config and the model's name; see `keyhole.exactness_gate.require`.
Accept = Callable[[Any, str], object]

#: Attention of a network while it is made: some classes know only transformers' own kinds then.
_FIRST = "eager"

_DTYPES: dict[Any, Any] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load(
    name: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    tokenizer: Any = None,
    accept: Accept | None = None,
    weights: str | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    device_map: DeviceMap = None,
    origin: Origin | None = None,
) -> Model:
    """Loads a checkpoint: "tiny" (the bundled model), a folder, or a hub id.

    tokenizer: an object or its folder or id, instead of the checkpoint's own. accept: raises
    ModelError for a family that must not run, before the weights are loaded. weights: "int4" or
    "int8", with a group size such as "int4:group_size=32", to pack those of linear layers;
    "dequantised": the blocks of a GGUF file as plain numbers; None: as they are stored.
    adapters: folders of LoRA adapters from which each request may choose one, by name. device_map:
    "auto", or a device for each of some modules, instead of `device`. origin: a revision, a
    subfolder, and whether code of the model may run.
    ModelError for a model that cannot be found, is damaged or cannot be run.
    """
    place, number = one_device(device), _dtype(dtype)  # before anything is downloaded
    _require_cpu(weight_format(weights), place)
    require_alone(device_map, device)
    found = locate(name, origin or Origin())
    return load_files(found, place, number, tokenizer, accept, weights, adapters, device_map)


def load_files(
    found: ModelFiles,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    tokenizer: Any = None,
    accept: Accept | None = None,
    weights: str | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    device_map: DeviceMap = None,
) -> Model:
    """`load` of a model that `locate` has found."""
    place, number, wanted = one_device(device), _dtype(dtype), weight_format(weights)
    _require_cpu(wanted, place)
    name, shown = found.name, found.shown
    require_applied(found)
    whole = read_whole_config(found)
    config = text_part(whole)
    families.check(config, shown)
    require_attention(config, device_map, shown)
    require_known(config, shown)
    if found.gguf is None:
        require_defaults(found.config.parent)
    _require_dtype(config.dtype if number == "auto" else number, shown)
    if found.gguf is None:
        require_suitable(config, weights, shown)
    if accept is not None:
        accept(config, shown)
    if config is whole:
        need = checkpoint.weight_bytes(found, config, str(number).removeprefix("torch."))
        require_memory(need, place, device_map, shown)
    else:
        announce(whole, config, shown)
    keeps = weights is None and place.type == "cpu" and gguf_file.keeps_blocks(found, config)
    network = _load_network(found, config, number, is_part=config is not whole, keeps=keeps)
    _require_dtype(network.dtype, shown)
    if found.gguf is not None:
        # Transformers' quantiser has done its work: what runs is a plain model, or ours.
        network.config.__dict__.pop("quantization_config", None)
    elif getattr(config, "quantization_config", None) is not None:
        check_stored(network, name)
        log_once()
        settle_dtype(network)
        unpack(network)
    if found.adapter is not None:
        network = merged(network, found.adapter, name)
    network, place, layers = _moved(network, place, device_map, shown)
    bundled = bundled_name(name)
    if bundled is not None:
        _say_it_is_a_demonstration(bundled)
    words = read_tokenizer(found) if tokenizer is None else tokenizer
    model = _model(name, network, place, words, wanted, adapters)
    model = replace(model, layer_devices=layers)
    if found.adapter is not None:
        return replace(model, name=found.adapter.name)
    if found.gguf is None:
        return model
    return replace(model, name=found.config.stem, weights=weights)


def _load_network(
    found: ModelFiles, config: Any, number: Any, *, is_part: bool, keeps: bool
) -> Any:
    """Transformers' model with its weights; ModelError for a damaged checkpoint.

    is_part: whether the checkpoint has more models than that of this config. keeps: whether the
    blocks of a GGUF file are kept.
    """
    shown = found.shown
    names = {"key_mapping": TEXT_WEIGHTS} if is_part else {}
    try:
        with _without_report() if is_part or keeps else nullcontext():
            loaded: Any
            if found.gguf is not None:
                gguf_file.require_places(found.config, config)
            if keeps:
                loaded = gguf_file.load_blocks(found.config, config, number, _FIRST)
            else:
                loaded = AutoModelForCausalLM.from_pretrained(
                    found.name,
                    config=config,
                    **({"dtype": number} if found.gguf is None else gguf_file.plain(found, number)),
                    attn_implementation=_FIRST,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported below, with their names
                    # Otherwise an adapter at the top of the hub id is taken for one of these files.
                    adapter_kwargs={"subfolder": found.options.get("subfolder", "")},
                    **found.options,
                    **names,
                )
        network, report = loaded
    except ModelError:
        raise
    except Exception as error:  # transformers, safetensors, the file system
        why = found.unreachable or ("" if found.gguf is None else gguf_file.DAMAGED)
        padding = wrong_padding(found, config, error)
        if padding is not None:
            raise padding from error
        unknown = unknown_rope_type(config, error)
        line = damage(found.config.parent) or str(unknown or one_line(error))
        raise ModelError(
            f"the weights of {shown!r} cannot be loaded: {line}{why and '; '}{why}"
        ) from error
    require_same(network, report, shown)
    require_scales_used(config, report["unexpected_keys"], shown)
    _attend_by_pages(network)
    return network


def _attend_by_pages(network: PreTrainedModel) -> None:
    """Makes a network call our attention function, where its classes call a registered one.

    The other classes (`own_attention`) keep their masks; transformers' warnings about them are
    hidden.
    """
    with _without_report():
        network.set_attn_implementation(NAME)


def _moved(
    network: Any, place: torch.device, device_map: DeviceMap, name: str
) -> tuple[Any, torch.device, tuple[torch.device, ...] | None]:
    """Moves the network to its devices for inference; CapacityError if it does not fit.

    Also returns its first device, and the devices of its layers if there are several.
    """
    if device_map is not None:
        return network.eval(), *place_layers(network, device_map, name)
    try:
        return network.to(place).eval(), place, None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        need = sum(p.numel() * p.element_size() for p in network.parameters()) / 2**30
        raise CapacityError(
            f"the weights of {name!r} need {need:.1f} GiB on {place}; use device='cpu' or a "
            "smaller dtype"
        ) from error


def adopt(
    network: PreTrainedModel,
    tokenizer: Any = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    accept: Accept | None = None,
    weights: str | None = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> Model:
    """Wraps a loaded transformers model; weights are shared, and it is not changed.

    weights, adapters: as for `load`; packed weights are copies.

    tokenizer: an object or its folder or id; None: the model accepts token ids only. accept: as for
    `load`.
    ConfigError for a device or dtype that is not its own, ModelError for a model that cannot run.
    """
    name, wanted = str(network.name_or_path) or type(network).__name__, weight_format(weights)
    families.check(network.config, name)
    require_suitable(network.config, weights, name)
    if accept is not None:
        accept(network.config, name)
    places = {parameter.device for parameter in network.parameters()}
    if len(places) != 1 or not places <= {one_device(place) for place in places}:
        where = ", ".join(sorted(map(str, places)))
        raise ConfigError(f"a model must be on one device, cpu or cuda; {name!r} is on {where}")
    place = places.pop()
    require_own(device, dtype, place, network.dtype)
    _require_cpu(wanted, place)
    # Modules are copied, since attention and linear layers are replaced; their weights are not.
    held = [*network.parameters(), *network.buffers()]
    copied = copy.deepcopy(network, {id(tensor): tensor for tensor in held}).eval()
    unpack(copied)
    _attend_by_pages(copied)
    return _model(name, copied, place, tokenizer, wanted, adapters)


def require_own(
    device: str | torch.device, dtype: str | torch.dtype, place: torch.device, number: torch.dtype
) -> None:
    """ConfigError for a device or dtype that is not a loaded model's own, `place` and `number`."""
    wanted = place if device == "auto" else one_device(device)
    # "cuda" is any of them.
    if wanted.type != place.type or wanted.index not in (None, place.index):
        raise ConfigError(
            f"device is {str(device)!r}, but the model is on {str(place)!r}; move it first"
        )
    if dtype != "auto" and _dtype(dtype) != number:
        raise ConfigError(
            f"dtype is {str(dtype)!r}, but the model is in {number}; convert it first"
        )


def _require_cpu(wanted: WeightFormat | None, place: torch.device) -> None:
    """ConfigError for packed weights on another device."""
    if wanted is not None and place.type != "cpu":
        raise ConfigError(
            f"weights {wanted.name!r} run on a CPU only, not on {str(place)!r}: give device='cpu', "
            "or a quantised checkpoint for a GPU"
        )


def _model(
    name: str,
    network: Any,
    place: torch.device,
    tokenizer: Any,
    wanted: WeightFormat | None,
    adapters: Mapping[str, str | Path] | None,
) -> Model:
    """A network with our attention, ready to run, with the facts in its files."""
    if isinstance(tokenizer, str | Path):
        require(bool(str(tokenizer).strip()), "tokenizer", tokenizer, "a folder or a hub id")
        tokenizer = load_tokenizer(named(tokenizer))
    config = network.config
    chosen = read_adapters(network, adapters or {}, name)
    if wanted is not None:
        pack_weights(network, wanted, name)
    check_ids(name, tokenizer, int(config.vocab_size))
    own_attention.adapt(network)
    recurrent_layers.adapt(network, name)
    indexed_attention.adapt(network, name)
    speed_up(network, place)
    sequence_adapters.attach(network, chosen.layers, network.dtype)
    fuse_layers(network, place)
    rope = families.rope_lengths(config) if sequence_rope.adapt(network) else None
    max_length, reason = families.max_length(config, rope)
    folder = Path(name)
    return Model(
        name=folder.name if folder.is_dir() else name,
        network=network,
        tokenizer=tokenizer,
        device=place,
        dtype=network.dtype,
        max_length=max_length,
        length_reason=reason,
        rope=rope,
        eos_token_ids=_eos(network, config),
        defaults=network.generation_config.to_dict(),
        weights=None if wanted is None else wanted.name,
        adapters=replace(chosen, layers={}),  # they are in the network now
        **beside_weights(folder),
    )


@functools.cache  # once
def _say_it_is_a_demonstration(name: str) -> None:
    logging.getLogger("keyhole").warning(
        "%r is a demonstration model; it knows only the small artificial language of its tasks, "
        "not English",
        name,
    )


@contextmanager
def _without_report() -> Iterator[None]:
    """Hides what transformers reports, such as weights of a vision model that it does not load."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _eos(network: Any, config: Any) -> frozenset[int]:
    """The end tokens that the model can generate; some configs say -1 for none."""
    found = network.generation_config.eos_token_id
    found = getattr(config, "eos_token_id", None) if found is None else found
    found = [] if found is None else found
    found = [found] if isinstance(found, int) else found
    return frozenset(end for end in found if 0 <= end < int(config.vocab_size))


def _require_dtype(dtype: torch.dtype | None, name: str) -> None:
    """ModelError for a checkpoint in a dtype that Keyhole does not compute with."""
    if dtype is not None and dtype not in _DTYPES.values():
        right = ", ".join(repr(known) for known in _DTYPES if known != "auto")
        raise ModelError(
            f"the weights of {name!r} are in {str(dtype).removeprefix('torch.')}; set dtype= to "
            f"one of {right}"
        )


def _dtype(dtype: str | torch.dtype) -> Any:
    if dtype in _DTYPES.values():
        return dtype
    if dtype not in _DTYPES:
        raise UnknownNameError("dtype", str(dtype).removeprefix("torch."), _DTYPES)
    return _DTYPES[dtype]
