"""The settings of a retrieval head: its shape, its inputs and its training length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from keyhole.config import (
    is_count,
    is_number,
    require,
    require_counts,
    require_known,
    require_layers,
    settle_types,
)

#: The inputs that a head computes queries and keys from.
INPUTS = ("tokens", "tokens+features")
#: The origin of a head: pruned from a draft model, trained on the target's attention or on the
#: effect of its selection, or not trained.
OBJECTIVES = ("eagle", "attention", "selection", "random")
#: RoPE of transformers and what `rope_scaling` must say of it. Only types whose frequencies do not
#: depend on the sequence length, which would invalidate the keys of earlier tokens.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
#: RoPE that YaRN can stretch (https://arxiv.org/abs/2309.00071); it is not defined for others.
STRETCHABLE = ("default", "yarn")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The shape of a retrieval head; ConfigError names an invalid value.

    hidden_size: width of its embedding. feature_size, feature_layers: width of the target's hidden
    states, and which of them it reads (0: the embeddings, i: the input of layer i); 0 and ()
    without features. trained_length: the longest text, or distance between two tokens, in its
    training. rope_factor: how far YaRN stretches RoPE beyond that; 1 leaves RoPE unchanged.

    Only some drafts have the following: rope_scaling, a RoPE other than the plain one, in
    transformers' terms (`rope_type`, `factor`, ...); bias of both projections; qk_norm on each
    head's query and key; input_norm over all features, feature_norms over each of them, both before
    `fc`; own_embedding if it does not share the target's.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inputs: str
    feature_size: int
    feature_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    trained_length: int
    rope_factor: float = 1.0
    objective: str = "eagle"
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    bias: bool = False
    qk_norm: bool = False
    input_norm: bool = False
    feature_norms: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        settle_types(self)
        require_counts(self, "vocab_size", "hidden_size", "num_heads", "num_kv_heads")
        require_counts(self, "trained_length", "head_dim")
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even: RoPE rotates pairs")
        whole = self.num_heads % self.num_kv_heads == 0
        require(
            whole, "num_heads", self.num_heads, f"a multiple of num_kv_heads {self.num_kv_heads}"
        )
        require_known("inputs", self.inputs, INPUTS)
        require_known("objective", self.objective, OBJECTIVES)
        require_layers("feature_layers", self.feature_layers)
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        self._check_features()
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, name, value, "a number above 0")
        factor = self.rope_factor
        require(is_number(factor) and factor >= 1, "rope_factor", factor, "a number of at least 1")
        scaling = self.rope_scaling
        require(scaling is None or isinstance(scaling, dict), "rope_scaling", scaling, "an object")
        require_known("rope_type", self.rope_type, ROPE_TYPES)
        for name in ROPE_TYPES[self.rope_type]:
            value = (scaling or {}).get(name)
            require(is_number(value), f"rope_scaling {name}", value, "a number")
        if factor > 1:
            right = f"1 with a RoPE of type {self.rope_type!r}, which YaRN cannot stretch"
            require(self.rope_type in STRETCHABLE, "rope_factor", factor, right)

    @property
    def rope_type(self) -> str:
        """The kind of RoPE that it was trained with, "default" for the plain one."""
        return str((self.rope_scaling or {}).get("rope_type", "default"))

    @property
    def uses_features(self) -> bool:
        """Whether queries and keys are computed from the target's features too."""
        return self.inputs == "tokens+features"

    @property
    def input_size(self) -> int:
        """Input width of the query and key projections."""
        return self.hidden_size * (2 if self.uses_features else 1)

    def _check_features(self) -> None:
        size, layers = self.feature_size, self.feature_layers
        if self.uses_features:
            require(is_count(size), "feature_size", size, "at least 1")
            distinct = len(layers) > 0 and len(set(layers)) == len(layers)
            require(distinct, "feature_layers", layers, "different layers, at least one")
        else:
            require(size == 0 and layers == (), "feature_layers", layers, "() without features")
            norms = self.input_norm or self.feature_norms
            require(not norms, "input_norm", True, "false without features")
