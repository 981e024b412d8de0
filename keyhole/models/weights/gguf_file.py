"""Weights of GGUF files: blocks are kept as stored where our products read them, or dequantised.

transformers knows the names and the order of rows of each family's file, and reads the other
tensors. Its own loader unpacks every block, which needs several times the memory of the file.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
    read_field,
)

from keyhole.errors import ModelError, one_line
from keyhole.kernels import BlockWeight
from keyhole.models import families
from keyhole.models.locate import ModelFiles
from keyhole.models.weights import blocks, gguf_rope
from keyhole.models.weights.packing import (
    BLOCK,
    EXPERTS,
    LEFT,
    BlockEmbedding,
    BlockLinear,
    has_plain_experts,
    is_plain_embedding,
    replace_experts,
    replace_weight,
)

#: What helps where a GGUF file cannot be read.
DAMAGED = "the file may be damaged or truncated; download it again, or use the original checkpoint"

_WEIGHT = ".weight"
#: The `general.file_type` of files whose tensors are mostly unquantised.
_DTYPES = {0: "float32", 1: "float16"}
#: Architectures that transformers lists under another name, but whose tensors it reads by this one.
_OTHER_ARCHITECTURES = ("qwen2moe", "qwen3moe")
#: Fields of a file, and transformers' names.
_EXPERT_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
#: The same for families of which transformers reads all other fields.
_SIZES = {
    "gpt2": {"context_length": "n_positions"},
    "qwen3": {"attention.key_length": "head_dim"},
}
#: The number of layers of Gemma's 27B models, whose queries have a different scale.
_DEPTHS = {"gemma2": 46, "gemma3_text": 62}
#: Tokens that end an answer besides the end of the text, as in llama.cpp: end of turn, of message.
_END_TOKENS = ("eot_token_id", "eom_token_id")
#: A model may have so many times the weights of its file, as with tensors that a file has once.
_MOST_MISSING = 2
#: The parameters of a kept weight.
_PARTS = BlockWeight._fields[:3]


def require_packages() -> None:
    """ModelError, with what to install, without the packages that read a GGUF file."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"a GGUF file needs the package {package!r}: pip install 'keyhole[gguf]'"
            )


def plain(found: ModelFiles, dtype: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` that load the blocks of a GGUF file as plain numbers."""
    options: dict[str, Any] = {"dtype": _number(found.config, dtype)}
    if hasattr(transformers, "GgufConfig"):  # transformers 5.16 unpacks every file
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return options


def complete(config: Any, path: Path) -> None:
    """Sets what transformers does not read of a file, in place: sizes, RoPE, end tokens.

    It takes the family's defaults, those of one model: another would not load, or answer wrongly.
    """
    reader = open_file(path)
    sizes = _EXPERT_SIZES if hasattr(config, "moe_intermediate_size") else {}
    for field, name in (sizes | _SIZES.get(config.model_type, {})).items():
        found = read_field(reader, f"{_architecture(reader)}.{field}")
        if found:
            setattr(config, name, int(found[0]))
    depth, count = int(getattr(config, "num_hidden_layers", 0)), len(reader.tensors)
    if depth > count:  # a damaged number of layers would take all memory
        raise ModelError(
            f"the file {str(path)!r} says block_count {depth}, but has {count} tensors; {DAMAGED}"
        )
    gguf_rope.complete(config, reader, _architecture(reader), str(path))
    _scale_attention(config)
    _add_end_tokens(config, reader)


def _scale_attention(config: Any) -> None:
    """Sets the scale of Gemma's attention, which no field has: llama.cpp knows it by the depth."""
    if config.model_type in _DEPTHS:
        is_27b = config.num_hidden_layers == _DEPTHS[config.model_type]
        of_27b = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = of_27b if is_27b else config.head_dim


def _add_end_tokens(config: Any, reader: Any) -> None:
    """Adds the end tokens of a file that transformers does not read to those of the config."""
    fields = (read_field(reader, f"tokenizer.ggml.{name}") for name in _END_TOKENS)
    more = [int(found[0]) for found in fields if found]
    known = getattr(config, "eos_token_id", None)
    known = known if isinstance(known, list) else [known]
    if more:
        config.eos_token_id = [one for one in dict.fromkeys([*known, *more]) if one is not None]


def keeps_blocks(found: ModelFiles, config: Any) -> bool:
    """Whether blocks of these files can be kept.

    An adapter is merged into plain numbers, and recurrent layers read their matrices themselves.
    """
    if found.gguf is None or found.adapter is not None or families.recurrent_layers(config):
        return False
    reader = open_file(found.config)
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    known = _architecture(reader) in (*GGUF_SUPPORTED_ARCHITECTURES, *_OTHER_ARCHITECTURES)
    return known and bool(kinds & blocks.FORMATS.keys())


def open_file(path: Path) -> Any:
    """The reader of a GGUF file.

    ModelError for a damaged one. That tensors follow each other without a gap, as the format says,
    the package does not check; a tensor with the wrong format is noticed by it.
    """
    from gguf import GGUFReader  # an extra, which other models do not need

    try:
        reader = GGUFReader(path)
        end = int(reader.data_offset)
        for tensor in reader.tensors:
            if tensor.data_offset != end:
                raise ValueError(
                    f"tensor {tensor.name!r} begins at byte {tensor.data_offset:,}, the one before "
                    f"it ends at {end:,}"
                )
            end = -(-(end + int(tensor.n_bytes)) // int(reader.alignment)) * int(reader.alignment)
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(
            f"the file {str(path)!r} cannot be read: {one_line(error)}; {DAMAGED}"
        ) from error
    return reader


def require_places(path: Path, config: Any) -> None:
    """ModelError for a tensor of a file that the model has no place for, such as a bias.

    transformers would leave it out, and the model would give other answers. And for a model of many
    more weights than the file has: memory would be taken for all of them.
    """
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
        file = _File.open(path, plain)
    need = plain.num_parameters()
    have = sum(int(tensor.n_elements) for tensor in file.reader.tensors)
    if need > _MOST_MISSING * have:
        raise ModelError(
            f"the fields of {str(path)!r} describe a model of {need:,} weights, but its tensors "
            f"hold {have:,}; {DAMAGED}"
        )
    for tensor in file.reader.tensors:
        name = str(tensor.name)
        is_known = name in file.names or name.removesuffix(_WEIGHT) in file.names
        if not is_known and not name.startswith(gguf_rope.TENSORS):
            raise ModelError(
                f"the file {str(path)!r} has a tensor {name!r}, which transformers ignores when it "
                f"reads a GGUF file of the family {config.model_type}; give the model's folder or "
                "hub id instead"
            )


def load_blocks(path: Path, config: Any, dtype: Any, attention: str) -> tuple[Any, dict[str, Any]]:
    """Transformers' model of a GGUF file with its blocks kept, and the report of loading.

    dtype: of all other numbers and of activations; "auto": as the file suggests. attention: the
    name of the attention function.
    """
    dtype = _number(path, dtype)
    with torch.device("meta"):
        plain: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    kept, state = _read(path, plain, dtype)
    state |= {
        f"{name}.{part}": tensor
        for name, weight in kept.items()
        for part, tensor in zip(_PARTS, weight[:3], strict=True)
    }
    family = type(plain)
    network, report = _with_room(family, kept, dtype).from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the caller reports them
    )
    network.__class__ = family
    network.config.name_or_path = str(path.parent)
    logging.getLogger("keyhole").info("%d matrices of %s stay quantised", len(kept), path)
    return network, report


def _with_room(family: type[Any], kept: dict[str, BlockWeight], dtype: torch.dtype) -> Any:
    """The class of the model, but made with modules that take the kept weights."""

    def make(self: Any, config: Any, *given: Any, **named: Any) -> None:
        family.__init__(self, config, *given, **named)
        tied = self.all_tied_weights_keys
        same = {_module(copy): _module(of) for copy, of in tied.items() if _module(of) in kept}
        for name in kept.keys() | same.keys():
            _make_room(self, name, kept[same.get(name, name)], dtype)
        self.all_tied_weights_keys = {
            copy: of for copy, of in tied.items() if _module(copy) not in same
        } | {f"{copy}.{part}": f"{of}.{part}" for copy, of in same.items() for part in _PARTS}

    # transformers reads the source of the module of a class to learn what it supports.
    members = {"__init__": make, "__module__": family.__module__}
    return type(family.__name__, (family,), members)


class _File(NamedTuple):
    """A GGUF file beside the model that takes its weights.

    names: the model's name of each tensor. tables: modules whose matrices can be kept, and their
    shapes. stacks: of each stack of experts' matrices that is kept, the tensors, the gates
    before what they are multiplied with.
    """

    reader: Any
    processor: Any
    names: dict[str, str]
    tables: dict[str, tuple[int, ...]]
    stacks: dict[str, list[Any]]

    @classmethod
    def open(cls, path: Path, plain: Any) -> _File:
        """The file of a model that is given without memory."""
        reader = open_file(path)
        config = load_gguf_checkpoint(str(path))["config"]
        kind = TENSOR_PROCESSORS.get(_architecture(reader), TensorProcessor)
        processor = kind(config=config)
        names = _names(plain, processor)
        stacks = _stacks(plain, reader, names)
        return cls(reader, processor, names, dict(_tables(plain)), stacks)

    def module(self, tensor: Any) -> str:
        """The module of the model whose weight a tensor is."""
        return self.names.get(tensor.name, "").removesuffix(_WEIGHT)

    @property
    def in_stacks(self) -> set[str]:
        """The tensors of `stacks`, by name."""
        return {tensor.name for stack in self.stacks.values() for tensor in stack}

    def kept_rows(self, tensor: Any) -> np.ndarray[Any, Any] | None:
        """The row of the file that is each row of the model; None if blocks cannot be kept."""
        shape = self.tables.get(self.module(tensor))
        # One of another shape is reported after loading; kernels would read beyond its codes.
        if shape is None or shape != tuple(map(int, reversed(tensor.shape))) or shape[1] % BLOCK:
            return None
        if tensor.tensor_type.name not in blocks.FORMATS:
            return None
        return self._order_of_rows(tensor.name, len(tensor.data))

    def process(self, name: str, numbers: Any, state: dict[str, Tensor]) -> Any:
        """A tensor's numbers as the model has them; some go into `state` instead."""
        return self.processor.process(
            weights=numbers,
            name=name,
            tensor_key_mapping=self.names,
            parsed_parameters={"tensors": state},
        )

    def _order_of_rows(self, name: str, count: int) -> np.ndarray[Any, Any] | None:
        """The order of `kept_rows`; None if the model changes more than the order of rows.

        Found by a table of numbers in place of the weights.
        """
        numbers = np.arange(2 * count).reshape(count, 2)
        try:
            found = self.process(name, numbers.copy(), {})
        except ValueError:  # Bloom's needs whole rows
            return None
        if found.name != name or np.shape(found.weights) != numbers.shape:
            return None
        rows: np.ndarray[Any, Any] = found.weights[:, 0] // 2
        return rows if np.array_equal(found.weights, numbers[rows]) else None


def _names(plain: Any, processor: Any) -> dict[str, str]:
    """The model's name of each tensor.

    Only the module directly below the head is searched besides the model itself, because Bloom's
    files use its names. transformers searches every module and builds a table of all layers for
    each, which takes 40 seconds for 46 layers.
    """

    def asked(module: Any, *inside: tuple[str, Any]) -> Any:
        return SimpleNamespace(
            config=plain.config, state_dict=module.state_dict, named_children=lambda: inside
        )

    base = plain.base_model_prefix, asked(plain.base_model)
    found: dict[str, str] = get_gguf_hf_weights_map(asked(plain, base), processor)
    return found


class KeptSize(NamedTuple):
    """Weights that stay in a file's blocks: how many, and their bytes in memory."""

    num_weights: int = 0
    num_bytes: int = 0


def kept_size(found: ModelFiles, plain: Any) -> KeptSize:
    """What stays in blocks of a model on a CPU, which is given without memory."""
    if not keeps_blocks(found, plain.config):
        return KeptSize()
    file = _File.open(found.config, plain)
    num_bytes = num_weights = 0
    stacked = file.in_stacks
    for tensor in file.reader.tensors:
        if tensor.name in stacked or file.kept_rows(tensor) is not None:
            row = torch.zeros(1, tensor.data.shape[-1], dtype=torch.uint8)
            parts = blocks.FORMATS[tensor.tensor_type.name](row)[:3]
            num_bytes += tensor.data.size // row.numel() * sum(part.nbytes for part in parts)
            num_weights += int(tensor.n_elements)
    return KeptSize(num_weights, num_bytes)


def _read(
    path: Path, plain: Any, dtype: torch.dtype
) -> tuple[dict[str, BlockWeight], dict[str, Tensor]]:
    """The weights that are kept, by module or stack of experts, and the other tensors, by name."""
    from gguf import dequantize

    file = _File.open(path, plain)
    kept = {name: _stacked(tensors) for name, tensors in file.stacks.items()}
    state: dict[str, Tensor] = {}
    stacked = file.in_stacks
    for tensor in file.reader.tensors:
        if tensor.name in stacked:
            continue
        rows = file.kept_rows(tensor)
        if rows is not None:
            data = torch.from_numpy(np.ascontiguousarray(tensor.data[rows]))
            kept[file.module(tensor)] = blocks.FORMATS[tensor.tensor_type.name](data)
            continue
        found = file.process(tensor.name, dequantize(tensor.data, tensor.tensor_type), state)
        if found.name in file.names:
            numbers = torch.from_numpy(np.copy(found.weights))
            state[file.names[found.name]] = numbers.to(dtype)
    return kept, {name: tensor.to(dtype) for name, tensor in state.items()}


def _tables(network: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Modules whose matrices can be kept, and their shapes."""
    for name, module in network.named_modules():
        is_linear = type(module) is nn.Linear and name.rpartition(".")[2] not in LEFT
        if is_linear or is_plain_embedding(module):
            yield name, tuple(module.weight.shape)


def _stacks(plain: Any, reader: Any, names: dict[str, str]) -> dict[str, list[Any]]:
    """`_File.stacks`: those of modules whose tensors are all in blocks."""
    found: dict[str, list[Any]] = {}
    for tensor in reader.tensors:
        found.setdefault(names.get(tensor.name.removesuffix(_WEIGHT), ""), []).append(tensor)
    kept: dict[str, list[Any]] = {}
    for name, module in plain.named_modules():
        if has_plain_experts(module):
            stacks = {f"{name}.{part}": getattr(module, part) for part in EXPERTS}
            of_file = {key: sorted(found.get(key, []), key=_gates_first) for key in stacks}
            if all(_fit(stack, of_file[key]) for key, stack in stacks.items()):
                kept |= of_file
    return kept


def _fit(stack: Tensor, tensors: list[Any]) -> bool:
    """Whether tensors of one format, each with a part of the rows, are a stack of matrices."""
    kinds = {tensor.tensor_type.name for tensor in tensors}
    shapes = [[int(size) for size in reversed(tensor.shape)] for tensor in tensors]
    if len(kinds) != 1 or not kinds <= blocks.FORMATS.keys() or {*map(len, shapes)} != {3}:
        return False
    count, rows, width = stack.shape
    whole = all((shape[0], shape[2]) == (count, width) for shape in shapes)
    return whole and sum(shape[1] for shape in shapes) == rows and width % BLOCK == 0


def _gates_first(tensor: Any) -> bool:
    return "_gate_" not in tensor.name


def _stacked(tensors: list[Any]) -> BlockWeight:
    """The rows [E * O, I] of a stack of experts' matrices."""
    kind = blocks.FORMATS[tensors[0].tensor_type.name]
    parts = [torch.from_numpy(np.array(x.data)).flatten(0, 1) for x in tensors]
    return BlockWeight.beside([kind(part) for part in parts], len(tensors[0].data))


def _make_room(network: Any, name: str, weight: BlockWeight, dtype: torch.dtype) -> None:
    """Gives a module, or a stack of experts, without numbers the parameters of a kept weight."""
    codes, *scales = (torch.empty_like(part, device="meta") for part in weight[:3])
    empty = BlockWeight(codes, scales[0], scales[1], weight.bits)
    parent, _, own = name.rpartition(".")
    if isinstance(getattr(network.get_submodule(parent), own), nn.Parameter):
        replace_experts(network.get_submodule(parent), own, empty, dtype)
        return
    module: Any = network.get_submodule(name)
    replace_weight(module, _block_class(module), empty)
    module.dtype = dtype


def _block_class(module: Any) -> type[BlockLinear] | type[BlockEmbedding]:
    return BlockLinear if isinstance(module, nn.Linear) else BlockEmbedding


def stored_dtype(path: Path) -> str:
    """The dtype that holds what a GGUF file stores: bfloat16 for quantised blocks."""
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("general.file_type")
    return _DTYPES.get(-1 if field is None else int(field.contents()), "bfloat16")


def _number(path: Path, dtype: Any) -> torch.dtype:
    """The requested dtype, or the one that represents the file's own."""
    found: torch.dtype = getattr(torch, stored_dtype(path)) if dtype == "auto" else dtype
    return found


def _architecture(reader: Any) -> str:
    return str(read_field(reader, "general.architecture")[0])


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
