"""Decoder layers whose steps of few tokens take few launches on a GPU, few calls on a CPU.

A step of one token reads every weight once, and reads those of a small model faster than it
launches operations, of which transformers' code has 17 in a Llama layer. On a CPU each is a call
from Python, as long as reading a hundred kilobytes. Here the same weights are read by four products
together with what is computed around them (`kernels.norm_linears` and so on), RoPE and the write
into pages are one operation, and attention is what it always is. Numbers are rounded as by the
operations one by one, except that a GPU does not round the result of a norm.

A subclass computes steps of few tokens so, on a GPU where that was measured to be faster.
Everything else goes through transformers' own code, and so do layers that compute something else:
a small layer of the same class is run and compared when a model is loaded.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keyhole import kernels
from keyhole.kernels import cpu, reference, triton
from keyhole.kernels.graph_capture import without_collection
from keyhole.kernels.triton import overlap
from keyhole.models.attention import rotate_and_attend
from keyhole.models.batch import Batch
from keyhole.models.fast_layers import FastLinear, epsilon
from keyhole.models.weights.packing import BlockLinear, PackedLinear

#: Attention of a layer: from queries [T, Hq, D], keys and values [T, Hkv, D] to [T, Hq, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Tokens of a step, rounded up, for which there are kernels (`kernels.triton.projections`).
_TOKENS = (1, 2, 4)
#: The same on a CPU, where they are always the fastest and nothing is timed.
_ON_CPU = frozenset({1, 2, 4, 8})
#: Layers that are timed: their weights exceed the caches of a GPU, so that they are read from
#: memory as in a step.
_TIMED_LAYERS = 8
_ROUNDS, _REPLAYS = 9, 5
#: Of the members of a module; quantisers have mappings of their own.
_VALUES = operator.methodcaller("values")
#: The share of transformers' time below which fused layers are used, so that noise does not choose.
_CLEARLY = 0.97
#: float32 rounding of a small layer.
_TOLERANCE = 1e-4
#: The sizes of such a layer.
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


class FusedLayer(nn.Module):
    """Marks the subclasses. fused_tokens: numbers of tokens, rounded up, that are computed so."""

    fused_tokens: frozenset[int]
    #: What was read from the modules when they were last seen to be plain.
    operands: Operands | None


class Operands:
    """What a layer with plain linear layers is computed from, read from its modules once.

    attention: the module; norms, weights and biases: as the operations take them.
    """

    def __init__(self, layer: Any) -> None:
        of, mlp = layer.self_attn, layer.mlp
        self.attention = of
        is_normed = getattr(of, "q_norm", None) is not None  # Qwen3
        self.head_norms = (of.q_norm, of.k_norm) if is_normed else None
        self.input_norm = _norm(layer.input_layernorm)
        self.mlp_norm = _norm(layer.post_attention_layernorm)
        inputs = of.q_proj, of.k_proj, of.v_proj
        self.inputs = tuple(_weight(linear) for linear in inputs)
        self.input_biases = tuple(linear.bias for linear in inputs)
        self.output = _weight(of.o_proj), of.o_proj.bias
        self.gates = _weight(mlp.gate_proj), _weight(mlp.up_proj)
        self.down = _weight(mlp.down_proj), mlp.down_proj.bias
        self._modules = tuple(part for child in layer.children() for part in child.modules())
        self._members = (
            layer._modules,
            *(members for part in self._modules for members in (part._modules, part._parameters)),
        )
        self._attributes = tuple(vars(part) for part in self._modules)
        hooks = ((part._forward_pre_hooks, part._forward_hooks) for part in self._modules)
        self._hooks = tuple(itertools.chain.from_iterable(hooks))
        self._seen = self._see()

    def hold(self) -> bool:
        """Whether the layer still has these modules and weights, and no hooks on them."""
        return self._seen == self._see() and not any(self._hooks)

    def _see(self) -> list[Any]:
        """Modules, weights and classes, and how many attributes there are: `forward` may be one."""
        members = itertools.chain.from_iterable(map(_VALUES, self._members))
        return [*map(id, members), *map(type, self._modules), *map(len, self._attributes)]


def operands(layer: Any) -> Operands | None:
    """The operands of a layer as it is now; None unless its parts are plain."""
    found: Operands | None = layer.__dict__.get("operands")
    if found is None or not found.hold():
        found = Operands(layer) if _is_plain(layer) else None
        layer.operands = found
    return found


def fuse_layers(network: nn.Module, device: torch.device) -> None:
    """Fuses the decoder layers of a model: on a GPU for the numbers of tokens where it is faster.

    There, kernels overlap (`kernels.triton.overlap`) if the results are bitwise the same and it is
    faster still.
    """
    if device.type == "cpu" and cpu.current() != cpu.REFERENCE:
        fuse(fusible(network), _ON_CPU)
        return
    if device.type != "cuda" or not triton.usable():
        return
    layers = fusible(network)
    if layers:
        choice = measured(layers[:_TIMED_LAYERS])
        overlap.use(choice.overlap)
        fuse(layers, choice.tokens)


def fusible(network: Any) -> list[Any]:
    """Decoder layers of a network that compute what `decoder_layer` does, with plain weights."""
    known: dict[Any, bool] = {}
    found = []
    layers: Iterable[Any] = getattr(network.base_model, "layers", ())
    for index, layer in enumerate(layers):
        classes = ((name, type(part)) for name, part in layer.named_modules())
        kind = *classes, *_settings(layer)
        if kind not in known:
            known[kind] = is_known(layer, network.config, index)
        if known[kind] and _is_plain(layer):
            found.append(layer)
    return found


def fuse(layers: Sequence[nn.Module], tokens: frozenset[int]) -> None:
    """Makes layers compute steps of these numbers of tokens by `decoder_layer`, in place."""
    for layer in layers if tokens else ():
        if not isinstance(layer, FusedLayer):
            layer.__class__ = _subclass(type(layer))  # type: ignore[arg-type]
        layer.fused_tokens = tokens  # type: ignore[assignment]


def fused_tokens(network: nn.Module) -> list[int]:
    """The numbers of tokens, rounded up, for which layers of a network are fused."""
    found: set[int] = set()
    for module in network.modules():
        if isinstance(module, FusedLayer):
            found |= module.fused_tokens
    return sorted(found)


def decoder_layer(of: Operands, x: Tensor, attend: Attend) -> Tensor:
    """The output [T, width] of a Llama layer for the hidden states x [T, width]."""
    parts = kernels.norm_linears(x, of.input_norm, of.inputs, of.input_biases)
    query, key, value = (part.unflatten(1, (-1, of.attention.head_dim)) for part in parts)
    if of.head_norms is not None:
        query, key = (norm(x) for norm, x in zip(of.head_norms, (query, key), strict=True))
    out = attend(query, key, value).flatten(1)
    x = kernels.linear_add(out, *of.output, x)
    return kernels.linear_add(kernels.norm_swiglu(x, of.mlp_norm, *of.gates), *of.down, x)


def _weight(linear: Any) -> Any:
    return linear.stored if isinstance(linear, PackedLinear) else linear.weight


def _norm(module: Any) -> tuple[Tensor, float]:
    found = epsilon(module)
    assert found is not None, "a layer with another norm is not fused"
    return module.weight, found


@functools.cache
def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    original: Any = cls.forward

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *rest: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **more: Any,
    ) -> Any:
        batch: Batch | None = more.get("keyhole")
        of, rope = None, position_embeddings
        if not rest and _fits(self, hidden_states, rope, batch):
            of = operands(self)
        if of is None or batch is None or rope is None:
            more["position_embeddings"] = position_embeddings
            return original(self, hidden_states, attention_mask, *rest, **more)
        angles, attention = (rope[0][0], rope[1][0]), of.attention

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return rotate_and_attend(
                batch, attention.layer_idx, query, key, value, angles, attention.scaling
            )

        return decoder_layer(of, hidden_states[0], attend)[None]

    return type(f"Fused{cls.__name__}", (FusedLayer, cls), {"forward": forward})


def _fits(
    layer: Any, hidden: Tensor, rope: tuple[Tensor, Tensor] | None, batch: Batch | None
) -> bool:
    """Whether a fused layer computes this packed row by `decoder_layer`."""
    tokens = 1 << (hidden.shape[1] - 1).bit_length()
    return (
        batch is not None
        and batch.rewrite is None
        and rope is not None
        and rope[0].shape == (1, hidden.shape[1], layer.self_attn.head_dim)
        and hidden.shape[0] == 1
        and tokens in layer.fused_tokens
        and not torch.is_grad_enabled()
    )


def _is_plain(layer: Any) -> bool:
    """Whether a layer has plain linear layers, without adapters, and its parts no hooks.

    Quantisers, and offloading, give a plain module another `forward`.
    """
    of, mlp = layer.self_attn, layer.mlp
    linears: tuple[Any, ...] = of.q_proj, of.k_proj, of.v_proj, of.o_proj
    linears += mlp.gate_proj, mlp.up_proj, mlp.down_proj
    plain = all(
        type(linear) in (PackedLinear, BlockLinear)
        or (type(linear) in (nn.Linear, FastLinear) and type(linear.weight) is nn.Parameter)
        for linear in linears
    )
    parts = (part for child in layer.children() for part in child.modules())
    return plain and not any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in parts
    )


def is_known(layer: Any, config: Any, index: int) -> bool:
    """Whether a layer has plain parts and computes what `decoder_layer` does.

    Checked by running a small one.

    config: the model's; layers of the same class may have other biases or activations in another
    model, and lack RoPE at another index.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, _SMALL["hidden_size"], generator=generator)
    angles = torch.randn(3, _SMALL["head_dim"] // 2, generator=generator).repeat(1, 2)
    rope = angles.cos(), angles.sin()
    try:
        if not _is_plain(layer):
            return False
        small = copy.deepcopy(config)
        for name, value in _SMALL.items():
            setattr(small, name, value)
        small._attn_implementation = "eager"
        with torch.random.fork_rng(devices=()), torch.no_grad(), torch.device("cpu"):
            same: Any = _original(type(layer))(small, index).float().eval()
            if [*_parts(same)] != [*_parts(layer)] or same.mlp.gate_proj.bias is not None:
                return False
            for parameter in same.parameters():
                parameter.normal_(std=0.5, generator=generator)
            theirs = same(x[None], position_embeddings=(rope[0][None], rope[1][None]))
            ours = decoder_layer(Operands(same), x, functools.partial(_attend, rope, same))
        return torch.allclose(ours, theirs[0], rtol=_TOLERANCE, atol=_TOLERANCE)
    except Exception:  # noqa: BLE001 - a class with other arguments, modules or results
        return False


def _parts(layer: nn.Module) -> Iterator[tuple[str, type]]:
    """The names and classes of a layer's modules, which may differ between models."""
    return ((name, _original(type(part))) for name, part in layer.named_modules())


def _settings(layer: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The numbers and strings that a layer's modules have as attributes, except its index."""
    for place, part in layer.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, bool | int | float | str) and name != "layer_idx":
                yield place, name, value


def _original(cls: type) -> Any:
    """The class of a module before Keyhole gave it another."""
    return next(x for x in cls.__mro__ if not x.__module__.startswith("keyhole."))


def _attend(
    rope: tuple[Tensor, Tensor], layer: Any, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attention of every token to all of them, which "eager" computes without a mask."""
    rows = (x.transpose(0, 1)[None] for x in (query, key))
    query, key = reference.apply_rope(*rows, *(angles[None] for angles in rope))
    value = value.transpose(0, 1)[None]
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, scale=layer.self_attn.scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)


class Choice(NamedTuple):
    """The numbers of tokens whose layers are fused, and whether their kernels overlap."""

    tokens: frozenset[int]
    overlap: bool


def measured(layers: Sequence[Any]) -> Choice:
    """What is faster for these layers than transformers' own code.

    Attention, which is the same in all, is left out. Nothing where a kernel cannot be compiled.
    """
    try:
        with torch.cuda.device(layers[0].self_attn.q_proj.weight.device):
            return _measured(layers)
    except Exception as error:  # noqa: BLE001 - another Triton: transformers' code computes
        warnings.warn(
            f"decode steps launch more kernels than necessary, because fusing layers failed: "
            f"{error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return Choice(frozenset(), overlap=False)


@torch.no_grad()
def _measured(layers: Sequence[Any]) -> Choice:
    like, width = layers[0].self_attn.q_proj.weight, layers[0].self_attn.q_proj.in_features
    inputs = {tokens: torch.randn(tokens, width).to(like) for tokens in _TOKENS}
    ways: dict[bool, Callable[[Tensor], Tensor]] = {False: functools.partial(_fused, layers, False)}
    overlapped = functools.partial(_fused, layers, True)
    if overlap.is_possible() and all(
        torch.equal(overlapped(x), ways[False](x)) for x in inputs.values()
    ):
        ways[True] = overlapped
    times = {
        tokens: _medians([functools.partial(way, x) for way in (_stock(layers), *ways.values())])
        for tokens, x in inputs.items()
    }
    best = min(range(len(ways)), key=lambda i: sum(spent[1 + i] for spent in times.values()))
    faster = (n for n, (stock, *fused) in times.items() if fused[best] < _CLEARLY * stock)
    return Choice(frozenset(faster), overlap=[*ways][best])


def _stock(layers: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """Everything in these layers except attention and RoPE, by transformers' modules."""

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            of, normed = layer.self_attn, layer.input_layernorm(x)
            query, _, _ = of.q_proj(normed), of.k_proj(normed), of.v_proj(normed)
            x = x + of.o_proj(query)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x

    return run


def _fused(layers: Sequence[Any], overlapped: bool, x: Tensor) -> Tensor:
    """The same by `decoder_layer`."""
    with overlap.using(overlapped):
        for layer in layers:
            of = operands(layer)
            assert of is not None
            x = decoder_layer(of, x, lambda query, key, value: query)
    return x


def _medians(works: Sequence[Callable[[], Tensor]]) -> list[float]:
    """The median time in ms of each, interleaved, as replayed CUDA graphs."""
    graphs = []
    for work in works:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels and allocates the libraries' workspaces
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call what is forbidden during a capture.
        with without_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS):
        for graph, spent in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            spent.append(start.elapsed_time(end))
    return [statistics.median(spent) for spent in times]
