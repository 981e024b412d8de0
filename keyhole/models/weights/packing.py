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
from keyhole.kernels import BlockWeight, PackedWeight
from keyhole.kernels.cpu import most_tokens
from keyhole.models.weights.weight_format import WeightFormat

#: Tokens up to which the products with codes are faster than unpacking (benchmarks/LOG.md).
_FEW = 32
#: With a matrix unit, and at most.
_MOST = 64
#: Weights that are unpacked at a time: in 16 bits they stay in a processor's cache.
_AT_ONCE = 1 << 20
#: Inputs of a layer must be a multiple of this, and of the group size.
BLOCK = 64
#: Layers whose outputs choose experts or tokens (an indexer's), and those whose weights attention
#: uses itself (MLA).
LEFT = ("gate", "router", "shared_expert_gate", "weights_proj", "kv_b_proj")
#: The stacks of matrices of experts.
EXPERTS = ("gate_up_proj", "down_proj")
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

    @property
    def stored(self) -> PackedWeight | BlockWeight:
        """The weight as kernels read it."""
        return self.packed

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
        if input.numel() <= self.few_tokens(input.dtype) * self.in_features:
            return kernels.packed_linear(input, self.stored, self.bias)
        return _product_of_many(self, input, range(self.out_features), self.bias)

    def few_tokens(self, dtype: torch.dtype) -> int:
        """Up to so many tokens the codes are read; with more, unpacking is faster."""
        return max(_FEW, min(_MOST, most_tokens(dtype)))


class PackedEmbedding(_Packed, nn.Embedding):  # type: ignore[override]
    """An `nn.Embedding` over a packed weight."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Embedding`, without gradients."""
        rows = self.rows(input.flatten())
        return kernels.unpack(rows).view(*input.shape, -1)


class _Blocks(_Packed):
    """The tensors of a weight in llama.cpp's blocks."""

    block_scales: Tensor
    group_scales: Tensor
    #: Of the outputs of an embedding, and of a copy of the weight.
    dtype: torch.dtype

    @property
    def packed(self) -> PackedWeight:
        """The weight with its scales expanded."""
        return self.stored.expand()

    def rows(self, which: slice | Tensor) -> PackedWeight:
        """Some rows of the weight."""
        return self.stored.rows(which).expand()

    @property
    def weight(self) -> Tensor:
        """A copy of the weight as plain numbers, for code that reads it directly."""
        return kernels.unpack(self.packed).to(self.dtype)

    @property
    def stored(self) -> BlockWeight:
        """The weight as kernels read it."""
        return BlockWeight(self.codes, self.block_scales, self.group_scales, self.bits)


class BlockLinear(_Blocks, PackedLinear):  # type: ignore[override]
    """An `nn.Linear` over a weight in llama.cpp's blocks."""

    def few_tokens(self, dtype: torch.dtype) -> int:
        """As for packed weights without a matrix unit."""
        return super().few_tokens(torch.float32)


class BlockEmbedding(_Blocks, PackedEmbedding):  # type: ignore[override]
    """An `nn.Embedding` over a weight in llama.cpp's blocks."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Embedding`, without gradients."""
        return super().forward(input).to(self.dtype)


class BlockMatrices(_Blocks, nn.Module):
    """The matrices [E, O, I] of E experts in llama.cpp's blocks, as rows [E * O, I]."""

    def product(self, x: Tensor, expert: int, num_experts: int) -> Tensor:
        """X W^T of one expert: x [T, I] to [T, O]."""
        count = len(self.codes) // num_experts
        outputs = range(expert * count, (expert + 1) * count)
        if len(x) > _FEW:
            return _product_of_many(self, x, outputs, None)
        return kernels.packed_linear(x, self.stored.rows(slice(outputs.start, outputs.stop)))


class BlockExperts(nn.Module):
    """Experts over matrices in llama.cpp's blocks; above transformers' class of a family."""

    gate_up_proj: BlockMatrices
    down_proj: BlockMatrices
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As transformers' experts: hidden states [T, D], K experts of each and their shares."""
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, places = torch.where(top_k_index == expert)
            both = self.gate_up_proj.product(hidden_states[tokens], expert, self.num_experts)
            inner = self._apply_gate(both)  # type: ignore[operator]  # of the family
            found = self.down_proj.product(inner, expert, self.num_experts)
            share = top_k_weights[tokens, places, None]
            out.index_add_(0, tokens, (found * share).to(out.dtype))
        return out


def _product_of_many(weight: _Packed, x: Tensor, outputs: range, bias: Tensor | None) -> Tensor:
    """X W^T + bias of some outputs of a weight, whose rows are unpacked in parts."""
    tokens = x.numel() // x.shape[-1]
    product = kernels.linear if tokens <= most_tokens(x.dtype) else F.linear
    found = [
        product(
            x,
            kernels.unpack(weight.rows(rows)).to(x.dtype),
            None if bias is None else bias[rows],
        )
        for rows in _parts(outputs, _AT_ONCE // x.shape[-1])
    ]
    return torch.cat(found, -1)


def _parts(outputs: range, count: int) -> list[slice]:
    """Slices of at most `count` outputs, at least one."""
    starts = outputs[:: max(1, count)]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], outputs.stop], strict=True)]


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
            f"weights {wanted.name!r} need linear layers with a multiple of "
            f"{max(BLOCK, wanted.group_size)} inputs; {left / total:.0%} of the weights of "
            f"{name!r} are in others, the largest in {largest} {list(rest[largest].shape)}"
        )


def is_plain_embedding(embedding: Any) -> TypeGuard[nn.Embedding]:
    """Whether a module looks up rows by `nn.Embedding`, itself or with something around it."""
    return isinstance(embedding, nn.Embedding) and embedding.max_norm is None


def has_plain_experts(module: nn.Module) -> bool:
    """Whether a module holds experts as two stacks of matrices that `BlockExperts` multiplies.

    gate_up_proj [E, 2 * inner, width], the gates above, and down_proj [E, width, inner].
    """
    stacks = [getattr(module, name, None) for name in EXPERTS]
    if not all(isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks):
        return False
    # What transformers notes of experts that it can compute in several ways.
    wanted = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}
    notes = wanted | {"has_post_expert_norm": False}
    return all(getattr(module, name, None) is value for name, value in notes.items())


def replace_experts(module: nn.Module, name: str, weight: BlockWeight, dtype: torch.dtype) -> None:
    """Puts a weight in blocks [E * O, I] in place of a stack of matrices of experts."""
    delattr(module, name)
    matrices = BlockMatrices()
    for part, tensor in zip(BlockWeight._fields[:3], weight[:3], strict=True):
        matrices.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
    matrices.bits, matrices.dtype = weight.bits, dtype
    module.add_module(name, matrices)
    if not isinstance(module, BlockExperts):
        cls = type(module)
        module.__class__ = type(f"Block{cls.__name__}", (BlockExperts, cls), {})


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
