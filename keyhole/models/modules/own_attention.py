"""Attention modules of transformers that do not call its attention interface as others do.

Most families compute queries, keys and values, give them to the cache and call the registered
attention function with all keyword arguments of the model's forward. The classes here compute
attention in their own code, drop the keyword arguments on the way, or add a bias to the scores. An
instance of such a class becomes one of a subclass that calls `attention`; transformers and other
models of the process are not changed.

A bias that grows linearly with the distance (ALiBi: Press et al., ICLR 2022) is expressed by two
numbers more in each key and query, so that kernels and policies treat it as any score. As a softmax
is unchanged by a constant, slope * (j - i) may be slope * j, and j = 256 a + b is exact in 16 bits
up to position 65,535.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.models.attention import attention
from keyhole.models.batch import PassThrough
from keyhole.models.families import ALIBI_DIM


def adapt(network: nn.Module) -> None:
    """Replaces the classes of the modules listed below, in place; weights stay where they are."""
    for module in network.modules():
        changed = _changed(type(module))  # type: ignore[arg-type]
        if changed is not None:
            module.__class__ = changed


def adapted(network: nn.Module) -> str | None:
    """The name of the first class in a network that `adapt` would replace; None without any."""
    classes: Any = (type(module) for module in network.modules())
    return next((cls.__name__ for cls in classes if _changed(cls) is not None), None)


@functools.cache
def _changed(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The subclass for a class listed below; None for another one.

    From transformers 5.24 on CodeGen and GPT-J have no method `_attn`, and need no change.
    """
    make = _ADAPTED.get(cls.__name__)
    if make is None or (cls.__name__ in _SCORES and not hasattr(cls, "_attn")):
        return None
    return type(f"Keyhole{cls.__name__}", (cls,), make(cls))


def _forwards_keywords(cls: Any) -> dict[str, Any]:
    """The layer drops the keyword arguments, the attention module would pass them on."""

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        past = PassThrough.among(args, named)
        if past is not None:
            named["keyhole"] = past.batch
        return cls.forward(self, *args, **named)

    return {"forward": forward}


def _computes_scores(scaling: Callable[[Any], float]) -> Callable[[Any], dict[str, Any]]:
    """The module computes attention in a method `_attn`."""

    def make(cls: Any) -> dict[str, Any]:
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            self.keyhole = PassThrough.among(args, named)
            return cls.forward(self, *args, **named)

        def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
            if self.keyhole is None:
                return cls._attn(self, query, key, value, mask)
            out, _ = attention(
                self,
                query.to(value.dtype),
                key.to(value.dtype),
                value,
                None,
                scaling=scaling(self),
                sliding_window=_local_window(self),
                keyhole=self.keyhole.batch,
            )
            return out.transpose(1, 2), None

        return {"forward": forward, "_attn": attend, "layer_idx": _layer_idx(cls)}

    return make


def _layer_idx(cls: Any) -> Any:
    """GPT-Neo calls its number `layer_id`; others have `layer_idx` as an attribute."""
    if cls.__name__ != "GPTNeoSelfAttention":
        return None
    return property(lambda self: self.layer_id)


def _local_window(module: Any) -> int | None:
    local = getattr(module, "attention_type", None) == "local"
    return int(module.config.window_size) if local else None


def _is_told_its_layer(cls: Any) -> dict[str, Any]:
    """Several layers share the module's weights, so each call says which layer it is for."""

    def forward(self: Any, hidden_states: Tensor, layer_idx: int, *args: Any, **named: Any) -> Any:
        self.layer_idx = layer_idx
        return cls.forward(self, hidden_states, layer_idx, *args, **named)

    return {"forward": forward}


def _attends_itself(compute: Callable[..., Any]) -> Callable[[Any], dict[str, Any]]:
    """`compute` replaces the module's forward: it gets the same arguments, after the cache's."""

    def make(cls: Any) -> dict[str, Any]:
        def forward(self: Any, *args: Any, **named: Any) -> Any:
            past = PassThrough.among(args, named)
            if past is None:
                return cls.forward(self, *args, **named)
            return compute(self, past, *args, **named)

        return {"forward": forward}

    return make


@_attends_itself
def _xglm(module: Any, past: PassThrough, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    query, key, value = (
        _heads(project(hidden_states), module.head_dim)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    out = attention(module, query, key, value, None, scaling=module.scaling, keyhole=past.batch)[0]
    return module.out_proj(out.flatten(2)), None


@_attends_itself
def _bloom(
    module: Any, past: PassThrough, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any
) -> Any:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    out = _with_alibi(module, past, (query, key, value), module.inv_norm_factor)
    return residual + module.dense(out.flatten(2)), None


@_attends_itself
def _mpt(module: Any, past: PassThrough, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    parts = (_heads(part, module.head_dim) for part in fused.chunk(3, -1))
    out = _with_alibi(module, past, tuple(parts), module.softmax_scale)
    return module.out_proj(out.flatten(2)), None


@_attends_itself
def _falcon(module: Any, past: PassThrough, hidden_states: Tensor, *_: Any, **named: Any) -> Any:
    """Queries, keys and values of a KV head lie side by side; transformers repeats the keys."""
    fused = module.query_key_value(hidden_states)
    heads = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim)).transpose(1, 2)
    query = heads[..., :-2, :].transpose(2, 3).flatten(1, 2)  # [1, H, T, D]
    key, value = heads[..., -2, :], heads[..., -1, :]
    query, key = _rotate(module, query, key, named["position_embeddings"])
    scaling = float(module.inv_norm_factor)
    out = attention(module, query, key, value, None, scaling=scaling, keyhole=past.batch)[0]
    return module.dense(out.flatten(2)), None


@_attends_itself
def _diff_llama(
    module: Any,
    past: PassThrough,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Any:
    """Two softmaxes whose keys are shared read both halves of the values at once."""
    query, key, value = (
        _heads(project(hidden_states), module.head_dim)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    query, key = _rotate(module, query, key, position_embeddings)
    halves = torch.cat(value.chunk(2, 1), -1).repeat(1, 2, 1, 1)  # [1, Hkv, T, 2 D]
    scaling = module.scaling
    out = attention(module, query, key, halves, None, scaling=scaling, keyhole=past.batch)[0]
    first, second = out.chunk(2, 2)
    pairs = (module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2)
    gain = [torch.exp((a * b).sum(dtype=torch.float32)) for a, b in pairs]
    weight = (gain[0] - gain[1]).to(query.dtype) + module.lambda_init
    mixed = (1 - module.lambda_init) * module.groupnorm(first - weight * second)
    return module.o_proj(mixed.flatten(2)), None


def _rotate(
    module: Any, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Query and key rotated by the function that the module's family has for it."""
    family: Any = type(module).__base__
    rotate = inspect.unwrap(family.forward).__globals__["apply_rotary_pos_emb"]
    rotated: tuple[Tensor, Tensor] = rotate(query, key, *position_embeddings)
    return rotated


def _heads(x: Tensor, dim: int) -> Tensor:
    """[1, T, H D] as [1, H, T, D]."""
    split: Tensor = x.unflatten(-1, (-1, dim))
    return split.transpose(1, 2)


def _with_alibi(
    module: Any, past: PassThrough, parts: tuple[Tensor, ...], scaling: float
) -> Tensor:
    """Attention with the bias slope * position: query, key, value [1, H, T, D]; [1, T, H, D]."""
    query, key, value = parts
    heads, tokens = query.shape[1:3]
    assert past.positions is not None
    slopes = alibi_slopes(heads).to(query) / scaling
    more_query = query.new_zeros(1, heads, tokens, ALIBI_DIM)
    more_query[..., 0] = 256 * slopes[:, None]
    more_query[..., 1] = slopes[:, None]
    more_key = query.new_zeros(1, heads, tokens, ALIBI_DIM)
    more_key[..., 0] = (past.positions // 256).to(query.dtype)
    more_key[..., 1] = (past.positions % 256).to(query.dtype)
    out, _ = attention(
        module,
        torch.cat([query, more_query], -1),
        torch.cat([key, more_key], -1),
        value,
        None,
        scaling=float(scaling),
        keyhole=past.batch,
    )
    return out


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slope of each head, float32 [heads] (Press et al., section 3).

    A geometric sequence from 2^(-8/n) for n = 2^k heads; for other numbers of heads those of the
    next lower power of two, then every second one of the next higher.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)


#: Those that compute scores in a method `_attn`.
_SCORES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "CodeGenAttention": _computes_scores(lambda module: 1 / float(module.scale_attn)),
    "GPTJAttention": _computes_scores(lambda module: 1 / float(module.scale_attn)),
    "GPTNeoXJapaneseAttention": _computes_scores(lambda module: 1 / float(module.norm_factor)),
    "GPTNeoSelfAttention": _computes_scores(lambda module: 1.0),
}
_ADAPTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    **_SCORES,
    "BloomAttention": _bloom,
    "DiffLlamaAttention": _diff_llama,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
    "NemotronAttention": _forwards_keywords,
    "StableLmAttention": _forwards_keywords,
    "XGLMAttention": _xglm,
    "Zamba2Attention": _is_told_its_layer,
    "ZambaAttention": _is_told_its_layer,
}
