"""The layer of an EAGLE-3 draft around a retrieval head, which proposes tokens.

Li et al., EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test (2025, arXiv 2503.01840), section 3.1. A draft is one Transformer layer over pairs of a
token's embedding and the fused hidden states of the target at the position before. For tokens that
it proposed itself there are no such states: its own output at the position before takes their
place. Queries and keys are those of `RetrievalHead`; values, output projection and MLP are here,
and the map to a vocabulary, of frequent tokens only in most drafts (`d2t`).

Positions are those of `RetrievalHead`: the token at position j is rotated by j.

Of a checkpoint, this reads what `head_files` leaves: values, MLP and the draft's vocabulary; and it
writes whole drafts. Errors name the tensor or field. Tensors have the names of both layouts (see
`head_files`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keyhole.errors import ModelError
from keyhole.retrieval.config import HeadConfig
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.head_files import HeadCheckpoint, flat, layer_prefix, write_folder

#: The folder of a draft next to the weights of its model.
DRAFT_FOLDER = "keyhole-draft"
#: Tensors of a draft in the authors' layout, and the parameters of a `DraftLayer` that hold them.
_NAMES = {
    "fc.weight": "head.fc.weight",
    "norm.weight": "norm.weight",
    "midlayer.input_layernorm.weight": "head.embed_norm.weight",
    "midlayer.hidden_norm.weight": "head.feature_norm.weight",
    "midlayer.post_attention_layernorm.weight": "mlp_norm.weight",
    "midlayer.self_attn.q_proj.weight": "head.q.weight",
    "midlayer.self_attn.k_proj.weight": "head.k.weight",
    "midlayer.self_attn.v_proj.weight": "v.weight",
    "midlayer.self_attn.o_proj.weight": "o.weight",
    "midlayer.mlp.gate_proj.weight": "gate.weight",
    "midlayer.mlp.up_proj.weight": "up.weight",
    "midlayer.mlp.down_proj.weight": "down.weight",
}


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The shape of the parts of a draft that its head does not have.

    mlp_size: width of its MLP. vocab_size: tokens that it can propose. output_bias: of the output
    projection of attention. norm_before_residual: the layer adds to the normed features, not to
    the features. norm_output: the features of the next step are the normed output.
    """

    mlp_size: int
    vocab_size: int
    output_bias: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


class DraftLayer(nn.Module):
    """Values, output and MLP of a draft's layer, whose queries and keys are those of `head`."""

    def __init__(self, head: RetrievalHead, mlp_size: int, *, output_bias: bool = False) -> None:
        super().__init__()
        config = head.config
        place: dict[str, Any] = {"device": head.q.weight.device, "dtype": head.q.weight.dtype}
        H, D = config.hidden_size, config.head_dim

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(H, eps=config.rms_norm_eps, **place)

        def linear(width: int, out: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(width, out, bias=bias, **place)

        self.head = head
        self.v = linear(config.input_size, config.num_kv_heads * D, config.bias)
        self.o = linear(config.num_heads * D, H, output_bias)
        self.mlp_norm, self.norm = norm(), norm()
        self.gate, self.up = linear(H, mlp_size), linear(H, mlp_size)
        self.down = linear(mlp_size, H)

    def project(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, D], keys and values [T, Hkv, D] of tokens with hidden [T, H].

        token_ids, positions: int64 [T]. hidden: of the position before each token, fused from the
        target's states, or the draft's own output there.
        """
        head = self.head
        x = head.inputs(token_ids, hidden)
        query, key = head.from_inputs(x)
        value = self.v(x).unflatten(-1, (-1, head.config.head_dim))
        return head.rotated(query, positions), head.rotated(key, positions), value

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [T, H] from its input's hidden half and attention [T, heads, D]."""
        hidden = hidden + self.o(mixed.flatten(1))
        x = self.mlp_norm(hidden)
        out: Tensor = hidden + self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class DraftModel(DraftLayer):
    """A draft that proposes tokens.

    target_ids: int64 [draft vocabulary], the target's token of each of the draft's own.
    """

    target_ids: Tensor

    def __init__(self, head: RetrievalHead, shape: DraftShape, target_ids: Tensor) -> None:
        super().__init__(head, shape.mlp_size, output_bias=shape.output_bias)
        self.shape = shape
        where = head.q.weight
        self.lm_head = nn.Linear(
            head.config.hidden_size,
            shape.vocab_size,
            bias=False,
            device=where.device,
            dtype=where.dtype,
        )
        self.register_buffer("target_ids", target_ids.to(where.device), persistent=False)

    def step(self, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Proposed tokens, int64 [T], and the features of their predecessors for the next step.

        hidden [T, H]: what `project` was given. mixed: attention [T, heads, D].
        """
        hidden = hidden.to(self.norm.weight.dtype)
        if self.shape.norm_before_residual:
            hidden = self.head.feature_norm(hidden)
        out = self.finish(hidden, mixed.to(hidden.dtype))
        normed = self.norm(out)
        tokens = self.target_ids[self.lm_head(normed).argmax(-1)]
        return tokens, normed if self.shape.norm_output else out

    @property
    def proposing_layers(self) -> list[nn.Linear]:
        """The linear layers that affect only proposals, not queries and keys."""
        return [self.v, self.o, self.gate, self.up, self.down, self.lm_head]

    @classmethod
    def from_eagle3(cls, path: str | Path, target: nn.Module) -> DraftModel:
        """Loads an EAGLE-3 draft of either layout, a folder or hub id, for the network `target`.

        On the device of the target's embedding, in its dtype. ModelError for a draft that cannot
        be read or was made for another target.
        """
        head = RetrievalHead.from_eagle3(path, target)
        checkpoint = HeadCheckpoint.open(path)
        shape = _shape_of(checkpoint, head.config)
        output: Any = target.get_output_embeddings()  # type: ignore[operator]
        own = None if output is None else output.weight.detach()
        kept = _weights_of(checkpoint, head.config, shape, own)
        draft = cls(head, shape, _target_ids(checkpoint, head.config, shape))
        where = head.q.weight
        state = {name: x.to(where.device, where.dtype) for name, x in kept.items()}
        draft.load_state_dict(state | {f"head.{name}": x for name, x in head.state_dict().items()})
        return draft.eval().requires_grad_(False)


def _shape_of(draft: HeadCheckpoint, config: HeadConfig) -> DraftShape:
    """The shape of a draft with this head; ModelError for a layer that is computed otherwise."""
    fields, layer = flat(draft.config), layer_prefix(draft)
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            f"draft {draft.name!r} has the activation {activation!r} in its MLP; only 'silu' is "
            "supported"
        )
    layers = fields.get("num_hidden_layers", 1)
    if layers != 1:
        raise ModelError(
            f"draft {draft.name!r} has num_hidden_layers {layers!r}; only drafts of one layer can "
            "propose tokens"
        )
    gate = layer + "mlp.gate_proj.weight"
    if gate not in draft.shapes:
        raise ModelError(f"checkpoint {draft.name!r} has no tensor {gate}")
    own_output = "lm_head.weight" in draft.shapes
    return DraftShape(
        mlp_size=_rows(draft, gate),
        vocab_size=_rows(draft, "lm_head.weight") if own_output else config.vocab_size,
        output_bias=layer + "self_attn.o_proj.bias" in draft.shapes,
        norm_before_residual=bool(fields.get("norm_before_residual")),
        norm_output=bool(fields.get("norm_output")),
    )


def _rows(draft: HeadCheckpoint, key: str) -> int:
    shape = draft.shapes[key]
    if len(shape) != 2:
        raise ModelError(
            f"checkpoint {draft.name!r} has a tensor {key} of shape {list(shape)}, but it must be "
            "a matrix"
        )
    return shape[0]


def _weights_of(
    draft: HeadCheckpoint, config: HeadConfig, shape: DraftShape, output: Tensor | None
) -> dict[str, Tensor]:
    """The tensors of a draft without those of its head, under its own parameter names.

    output: the target's output embedding, for a draft without its own. ModelError names a missing
    tensor.
    """
    H, D, M, layer = config.hidden_size, config.head_dim, shape.mlp_size, layer_prefix(draft)
    rows = config.num_kv_heads * D
    kept = {
        "v.weight": draft.tensor(layer + "self_attn.v_proj.weight", rows, 2 * H),
        "o.weight": draft.tensor(layer + "self_attn.o_proj.weight", H, config.num_heads * D),
        "mlp_norm.weight": draft.tensor(layer + "post_attention_layernorm.weight", H),
        "gate.weight": draft.tensor(layer + "mlp.gate_proj.weight", M, H),
        "up.weight": draft.tensor(layer + "mlp.up_proj.weight", M, H),
        "down.weight": draft.tensor(layer + "mlp.down_proj.weight", H, M),
        "norm.weight": draft.tensor("norm.weight", H),
    }
    if config.bias:
        kept["v.bias"] = draft.tensor(layer + "self_attn.v_proj.bias", rows)
    if shape.output_bias:
        kept["o.bias"] = draft.tensor(layer + "self_attn.o_proj.bias", H)
    if "lm_head.weight" in draft.shapes:
        kept["lm_head.weight"] = draft.tensor("lm_head.weight", shape.vocab_size, H)
    elif output is not None and output.shape[1] == H and len(output) >= shape.vocab_size:
        kept["lm_head.weight"] = output[: shape.vocab_size]
    else:
        raise ModelError(
            f"checkpoint {draft.name!r} has no tensor lm_head.weight, and the target's cannot be "
            "used, because its shape differs"
        )
    return kept


def _target_ids(draft: HeadCheckpoint, config: HeadConfig, shape: DraftShape) -> Tensor:
    """The target's token of each of the draft's, int64 [draft vocabulary].

    `d2t` of a checkpoint holds differences. ModelError if it names tokens that the target lacks.
    """
    own = torch.arange(shape.vocab_size)
    if "d2t" in draft.shapes:
        own = own + draft.integers("d2t", shape.vocab_size)
    elif shape.vocab_size > config.vocab_size:
        raise ModelError(
            f"draft {draft.name!r} has a vocabulary of {shape.vocab_size} tokens and no d2t, but "
            f"the target has {config.vocab_size}"
        )
    if not (own.min() >= 0 and own.max() < config.vocab_size):
        raise ModelError(
            f"d2t of draft {draft.name!r} names tokens from {int(own.min())} to {int(own.max())}, "
            f"but the target has {config.vocab_size}"
        )
    return own


def write_draft(path: str | Path, config: HeadConfig, parameters: Mapping[str, Tensor]) -> None:
    """Writes a draft in the authors' layout, over the target's embedding and output embedding.

    config: of its head, which has features and, of a `HeadConfig`'s variants, at most
    feature_norms. parameters: of its `DraftLayer`. ConfigError if it cannot be written.
    """
    tensors = {name: parameters[own] for name, own in _NAMES.items()}
    if config.feature_norms:
        for i in range(len(config.feature_layers)):
            tensors[f"fc_norm.{i}.weight"] = parameters[f"head.feature_norms.{i}.weight"]
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.feature_size,
        "intermediate_size": len(parameters["gate.weight"]),
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.trained_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "norm_before_fc": False,
        "fc_norm": config.feature_norms,
        "attention_bias": False,
    }
    write_folder(path, fields, tensors, what="draft")
