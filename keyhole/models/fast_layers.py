"""Faster linear layers, norms and rotary embeddings, where a kernel computes the same."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.integrations import moe
from transformers.utils import deprecation

from keyhole import kernels
from keyhole.kernels import cpu, reference

# Linear layers of a model on a CPU, dispatched to the fastest product for each shape.
#
# A decode step reads every weight once for a handful of tokens. torch's product for such shapes
# reads 16-bit weights at half the memory bandwidth or less; `kernels.linear` at nearly all of it.
# With more tokens (prompts, large batches) torch is faster, if the processor has AVX-512 or the
# weights have 32 bits. In float32 torch uses MKL, which leaves
# half of the vector width of non-Intel processors unused; there oneDNN, which torch also ships and
# uses for 16 bits, is about twice as fast (benchmarks/LOG.md).
#
# oneDNN compiles a kernel for each shape that it meets and keeps it: a server that met a new number
# of tokens with every batch of prompts grew by a megabyte each time. So it gets few numbers.


# Tokens from which oneDNN was faster than MKL (benchmarks/LOG.md).
_MANY = 32

_CPUINFO = Path("/proc/cpuinfo")

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class FastLinear(nn.Linear):
    """An `nn.Linear` that computes products without gradients by the fastest kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        if torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad):
            return linear(input, self.weight, self.bias)
        tokens = input.numel() // self.in_features
        if tokens <= cpu.most_tokens(self.weight.dtype):
            return kernels.linear(input, self.weight, self.bias)
        if input.dtype != torch.float32:
            return _by_few_shapes(linear, input, self.weight, self.bias)
        if tokens >= _MANY and self.weight.dtype == torch.float32:
            return in_float32()(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


def _by_few_shapes(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product for a number of tokens of which there are eight between n and 2 n."""
    rows = x.flatten(0, -2)
    missing = -len(rows) % max(8, 1 << len(rows).bit_length() >> 4)
    if missing == 0:
        return product(x, weight, bias)
    found = product(F.pad(rows, (0, 0, 0, missing)), weight, bias)
    return found[: len(rows)].view(*x.shape[:-1], -1)


@functools.cache
def in_float32() -> Product:
    """The product of many tokens in float32 on this processor: by oneDNN, or torch's default."""
    if not (mkl_is_slow() and torch.backends.mkldnn.is_available()):
        return linear
    try:
        # The function that torch's compiler calls; it has no public name.
        named = torch.ops.mkldnn._linear_pointwise
        named(torch.zeros(_MANY, 1), torch.zeros(1, 1), None, "none", [], "")
    except (AttributeError, RuntimeError):  # another torch release
        return linear
    return functools.partial(_by_few_shapes, functools.partial(_by_onednn, named))


def _by_onednn(
    named: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    return named(x, weight, bias, "none", [], "")


def mkl_is_slow() -> bool:
    """Whether torch uses MKL on a processor that is not Intel's."""
    if not (torch.backends.mkl.is_available() and _CPUINFO.is_file()):
        return False
    makers = [x for x in _CPUINFO.read_text().splitlines() if x.startswith("vendor_id")]
    return bool(makers) and "GenuineIntel" not in makers[0]


def speed_up(network: nn.Module, device: torch.device) -> None:
    """Replaces layers of a network by the fastest kernels of a device, in place."""
    speed_up_linear(network, device)
    speed_up_experts(network, device)
    speed_up_norms(network)
    speed_up_rotary(network)


def speed_up_linear(network: nn.Module, device: torch.device) -> None:
    """Turns every plain linear layer of a CPU model into a `FastLinear`; weights stay in place.

    Layers of other classes (quantised ones, adapters) are unchanged, and so are those whose weight
    is a tensor of another class: torchao keeps its codes in one, and its address is not that of
    numbers.
    """
    if device.type != "cpu":
        return
    for module in network.modules():
        if type(module) is nn.Linear and type(getattr(module, "weight", None)) is nn.Parameter:
            module.__class__ = FastLinear


# Experts of a model on a CPU without AVX-512, one after another.
#
# transformers multiplies by the matrices of all experts in one call of torch's, which has no
# vectors for 16 bits there. Here its function runs with another product under the same name. Where
# most experts have a single row, as in decode steps, torch reads the matrices as fast.


def speed_up_experts(network: nn.Module, device: torch.device) -> None:
    """Multiplies by experts of 16 bits as by linear layers, where torch is slow."""
    if device.type != "cpu" or not hasattr(moe, "_grouped_linear"):  # another transformers
        return
    for module in network.modules():
        weight = getattr(module, "down_proj", None)
        if (
            hasattr(module, "_is_expert_parallel")
            and type(weight) is nn.Parameter
            and cpu.torch_is_slow(weight.dtype)
            and getattr(module.config, "_experts_implementation", None) == "grouped_mm"
        ):
            module.__class__ = _one_by_one(type(module))  # type: ignore[arg-type]


@functools.cache
def _one_by_one(cls: type[nn.Module]) -> type[nn.Module]:
    theirs = moe.grouped_mm_experts_forward
    names = {**theirs.__globals__, "_grouped_linear": grouped_linear}
    ours = types.FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__)
    original: Any = cls.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """By our products."""
        return (original if torch.is_grad_enabled() else ours)(self, *args, **kwargs)

    return type(f"Fast{cls.__name__}", (cls,), {"forward": forward})


def grouped_linear(
    input: Tensor,
    weight: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    is_transposed: bool = False,
) -> Tensor:
    """As transformers' function of the same name; rows past the last expert's have no meaning.

    input [S, I], sorted by expert; weight [E, O, I], or [E, I, O] if transposed; offs [E], the end
    of each expert's rows; bias [S, O].
    """
    ends = offs.tolist()
    if len(input) < 2 * len({*ends} - {0}):
        theirs: Callable[..., Tensor] = moe._grouped_linear
        return theirs(input, weight, offs, bias, is_transposed)
    out = input.new_zeros(len(input), weight.shape[2 if is_transposed else 1])
    start = 0
    for expert, end in enumerate(ends):
        rows = input[start:end]
        if end > start and is_transposed:
            out[start:end] = cpu.product(rows, weight[expert])
        elif end > start:
            out[start:end] = kernels.linear(rows, weight[expert])
        start = end
    return out if bias is None else out.add_(bias)


# RMS norms of a model, by one kernel: torch's on a GPU.
#
# transformers computes a norm in eight operations, each a launch over all numbers; here it is one
# (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019). It rounds to 16 bits once, at
# the end; transformers also rounds before multiplying by the weight.


# float32 rounding; a weight stored as an offset from one, as in Gemma, deviates far more.
_TOLERANCE = 1e-5


def speed_up_norms(network: nn.Module) -> None:
    """Computes every plain RMS norm of a model by our kernel; weights stay in place.

    Norms that compute something else are unchanged.
    """
    plain: dict[type[nn.Module], bool] = {}
    for module in network.modules():
        cls = type(module)
        weight = getattr(module, "weight", None)
        if weight is None or weight.is_meta:  # some norms of Gemma's have none
            continue
        if cls not in plain:
            plain[cls] = is_plain_norm(module)
        if plain[cls]:
            module.__class__ = _fast(cls)  # type: ignore[arg-type]


def is_plain_norm(module: nn.Module) -> bool:
    """Whether a module computes exactly x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Checked by running it with other weights.
    """
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter):
        return False
    if len([*module.parameters()]) != 1 or weight.dim() != 1 or epsilon(module) is None:
        return False
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, len(weight), generator=generator)
    tried: Any = copy.deepcopy(module).to("cpu", torch.float32)
    tried.weight = nn.Parameter(drawn[0], requires_grad=False)
    wanted = F.rms_norm(drawn[1], drawn[0].shape, drawn[0], epsilon(module))
    try:
        return torch.allclose(tried(drawn[1]), wanted, rtol=_TOLERANCE, atol=_TOLERANCE)
    except (RuntimeError, TypeError):  # other arguments
        return False


@functools.cache
def _fast(cls: type[nn.Module]) -> type[nn.Module]:
    original: Any = cls.forward

    def forward(self: Any, hidden_states: Tensor) -> Any:
        """By our kernel."""
        weight, eps = self.weight, epsilon(self)
        trained = torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
        if trained or eps is None or hidden_states.dtype != weight.dtype:
            return original(self, hidden_states)
        return kernels.rms_norm(hidden_states, weight, eps)

    return type(f"Fast{cls.__name__}", (cls,), {"forward": forward})


def epsilon(module: nn.Module) -> float | None:
    """The epsilon of an RMS norm of transformers; None if it has none under a known name."""
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


# Rotary embeddings of a model, in one launch for queries and keys.
#
# transformers rotates them by ten operations in every layer. Every family's attention calls one
# function of its module for this. Here a subclass runs the same code with our function under that
# name: neither transformers nor other models of the process are changed.


_NAME = "apply_rotary_pos_emb"


def speed_up_rotary(network: nn.Module) -> None:
    """Makes attention of a model rotate queries and keys by our kernel.

    Attention that rotates in another way (part of each head, interleaved pairs) is unchanged.
    """
    for module in network.modules():
        fast = faster(type(module))  # type: ignore[arg-type]
        if fast is not None:
            module.__class__ = fast


@functools.cache
def faster(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The same class with our kernel; None if it does not rotate heads, or in another way."""
    # Without wrappers that translate deprecated names of arguments; nothing here uses these.
    forward: Any = inspect.unwrap(
        cls.forward, stop=lambda wrapper: wrapper.__globals__ is not vars(deprecation)
    )
    if not isinstance(forward, types.FunctionType) or forward.__closure__ is not None:
        return None
    theirs = forward.__globals__.get(_NAME)
    if _NAME not in forward.__code__.co_names or theirs is None or not is_plain_rotary(theirs):
        return None

    def ours(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        trained = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        if rest or more or trained or cos.dim() != 3 or cos.shape[-1] != query.shape[-1]:
            return theirs(query, key, cos, sin, *rest, **more)
        return kernels.apply_rope(query, key, cos, sin)

    names = {**forward.__globals__, _NAME: ours}
    own = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Fast{cls.__name__}", (cls,), {"forward": own})


def is_plain_rotary(theirs: Callable[..., Any]) -> bool:
    """Whether a function rotates heads as `kernels.apply_rope` does; checked by running it."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 3, 4, generator=generator).repeat(1, 1, 1, 2)
    wanted = reference.apply_rope(query, key, cos, sin)
    try:
        found = theirs(query, key, cos, sin)
        return all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))
    except (RuntimeError, TypeError, ValueError):  # other arguments
        return False
