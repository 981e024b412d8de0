"""Packs the linear layers of a loaded model in 4 or 8 bits, and computes with them.

A decode step reads every weight once for a handful of tokens, so its time falls with their bytes;
`kernels.packed_linear` reads the codes. With more tokens (prompts) the products take longer than
reading: there, blocks of rows are unpacked and multiplied by torch.

The head that computes logits is packed in 8 bits even where layers have 4, as llama.cpp does: each
of its outputs is a token, and errors there are not averaged by later layers. An embedding that
shares its weights (tied) uses the same codes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keyhole import kernels
from keyhole.errors import ConfigError, ModelError
from keyhole.kernels import PackedWeight
from keyhole.models.weights.blocks import BlockWeight
from keyhole.models.weights.weight_format import WeightFormat

#: Tokens up to which the products with codes are faster than unpacking (benchmarks/LOG.md).
_FEW = 32
#: Weights that are unpacked at a time: in 16 bits they stay in a processor's cache.
_AT_ONCE = 1 << 20
#: Weights of blocks whose scales are expanded at a time: a megabyte, which stays in a cache.
_SCALED_AT_ONCE = 1 << 22
#: Inputs of a layer must be a multiple of this, and of the group size.
BLOCK = 64
#: Layers whose outputs choose experts or tokens (an indexer's), and those whose weights attention
#: uses itself (MLA).
LEFT = ("gate", "router", "shared_expert_gate", "weights_proj", "kv_b_proj")
#: The least share of a model's weights that must be packed, otherwise it is refused.
_LEAST = 0.5
_HEAD_BITS = 8


class _Packed:
    """The tensors of a packed weight, as parameters of a module in place of `weight`."""

    codes: Tensor
    scales: Tensor
    minimums: Tensor
    bits: int

    @property
    def packed(self) -> PackedWeight:
        """The packed weight."""
        return PackedWeight(self.codes, self.scales, self.minimums, self.bits)

    def rows(self, which: slice | Tensor) -> PackedWeight:
        """Some rows of the weight."""
        return self.packed.rows(which)

    @property
    def weight(self) -> Tensor:
        """A copy of the weight as plain numbers, for code that reads it directly."""
        return kernels.unpack(self.packed)


class PackedLinear(_Packed, nn.Linear):  # type: ignore[override]
    """An `nn.Linear` over a packed weight."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`, without gradients."""
        if input.numel() <= _FEW * self.in_features:
            return self.product_of_few(input)
        step = max(1, _AT_ONCE // self.in_features)
        parts = [
            F.linear(
                input,
                kernels.unpack(self.rows(slice(first, first + step))).to(input.dtype),
                None if self.bias is None else self.bias[first : first + step],
            )
            for first in range(0, self.out_features, step)
        ]
        return torch.cat(parts, -1)

    def product_of_few(self, input: Tensor) -> Tensor:
        """The product for few tokens, which reads the codes."""
        return kernels.packed_linear(input, self.packed, self.bias)


class PackedEmbedding(_Packed, nn.Embedding):  # type: ignore[override]
    """An `nn.Embedding` over a packed weight."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Embedding`, without gradients."""
        rows = self.rows(input.flatten())
        return kernels.unpack(rows).view(*input.shape, -1)


class _Blocks(_Packed):
    """The tensors of a weight in llama.cpp's blocks; products are computed in float32."""

    block_scales: Tensor
    group_scales: Tensor
    #: Of the outputs of an embedding, and of a copy of the weight.
    dtype: torch.dtype

    @property
    def packed(self) -> PackedWeight:
        """The weight with its scales expanded."""
        return self._blocks.expand()

    def rows(self, which: slice | Tensor) -> PackedWeight:
        """Some rows of the weight."""
        return self._blocks.rows(which).expand()

    @property
    def weight(self) -> Tensor:
        """A copy of the weight as plain numbers, for code that reads it directly."""
        return kernels.unpack(self.packed).to(self.dtype)

    @property
    def _blocks(self) -> BlockWeight:
        return BlockWeight(self.codes, self.block_scales, self.group_scales, self.bits)


class BlockLinear(_Blocks, PackedLinear):  # type: ignore[override]
    """An `nn.Linear` over a weight in llama.cpp's blocks."""

    def product_of_few(self, input: Tensor) -> Tensor:
        """The product for few tokens, with the weights exactly as stored."""
        x, bias = input.float(), None if self.bias is None else self.bias.float()
        step = max(1, _SCALED_AT_ONCE // self.in_features)
        parts = [
            kernels.packed_linear(
                x,
                self.rows(slice(first, first + step)),
                None if bias is None else bias[first : first + step],
            )
            for first in range(0, self.out_features, step)
        ]
        return torch.cat(parts, -1).to(input.dtype)


class BlockEmbedding(_Blocks, PackedEmbedding):  # type: ignore[override]
    """An `nn.Embedding` over a weight in llama.cpp's blocks."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Embedding`, without gradients."""
        return super().forward(input).to(self.dtype)


def pack_weights(network: Any, wanted: WeightFormat, name: str) -> None:
    """Packs the weights of a network's linear layers, in place; plain numbers are freed.

    ConfigError for a network that is not on a CPU. ModelError, with what is large, if most weights
    are not in linear layers.
    """
    if {parameter.device.type for parameter in network.parameters()} != {"cpu"}:
        raise ConfigError(f"weights {wanted.name!r} are computed on a CPU only; give device='cpu'")
    _require_linear(network, wanted, name)
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    for layer in list(_layers(network, wanted)):
        tied = layer is head and embedding.weight is head.weight and is_plain_embedding(embedding)
        bits = _HEAD_BITS if layer is head else wanted.bits
        packed = kernels.pack(layer.weight.detach(), bits, wanted.group_size)
        replace_weight(layer, PackedLinear, packed)
        if tied:
            replace_weight(embedding, PackedEmbedding, layer.packed)
            embedding.codes, embedding.scales = layer.codes, layer.scales
            embedding.minimums = layer.minimums
    logging.getLogger("keyhole").info("the weights of %r are packed as %s", name, wanted.name)


def pack_layers(layers: Iterable[nn.Linear], wanted: WeightFormat) -> None:
    """Packs the weights of these linear layers where the size of their inputs allows it."""
    for layer in layers:
        if _fits(layer, wanted):
            packed = kernels.pack(layer.weight.detach(), wanted.bits, wanted.group_size)
            replace_weight(layer, PackedLinear, packed)


def _layers(network: Any, wanted: WeightFormat) -> Iterator[Any]:
    """The linear layers that are packed."""
    for name, module in network.named_modules():
        plain = type(module) is nn.Linear and _fits(module, wanted)
        if plain and name.rpartition(".")[2] not in LEFT:
            yield module


def _fits(layer: nn.Linear, wanted: WeightFormat) -> bool:
    return layer.in_features % max(BLOCK, wanted.group_size) == 0


def _require_linear(network: Any, wanted: WeightFormat, name: str) -> None:
    """ModelError unless most weights besides the embedding are packed."""
    tables = {id(x.weight) for x in (network.get_input_embeddings(),)}
    packed = {id(layer.weight) for layer in _layers(network, wanted)}
    rest = {
        key: parameter
        for key, parameter in network.named_parameters()
        if id(parameter) not in tables | packed
    }
    total = sum(x.numel() for x in network.parameters() if id(x) not in tables)
    left = sum(x.numel() for x in rest.values())
    if left > (1 - _LEAST) * total:
        largest = max(rest, key=lambda key: rest[key].numel())
        raise ModelError(
            f"weights {wanted.name!r} pack linear layers whose inputs are a multiple of "
            f"{max(BLOCK, wanted.group_size)}; {left / total:.0%} of the weights of {name!r} are "
            f"in others, the largest is {largest} {list(rest[largest].shape)}"
        )


def is_plain_embedding(embedding: Any) -> TypeGuard[nn.Embedding]:
    """Whether a module looks up rows by `nn.Embedding`, itself or with something around it."""
    return isinstance(embedding, nn.Embedding) and embedding.max_norm is None


def replace_weight(module: Any, kind: type[Any], packed: PackedWeight | BlockWeight) -> None:
    """Gives a module a packed weight and the class `kind`, below its own class if it has one."""
    del module.weight
    for name in packed._fields[:3]:
        tensor = getattr(packed, name)
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    module.bits = packed.bits
    base = nn.Linear if issubclass(kind, nn.Linear) else nn.Embedding
    cls = type(module)
    # A subclass adds to the lookup of its base, such as Gemma's scale: with ours in between.
    module.__class__ = kind if cls is base else type(f"Packed{cls.__name__}", (cls, kind), {})
