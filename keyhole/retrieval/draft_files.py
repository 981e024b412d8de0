"""Reads of an EAGLE-3 checkpoint what `head_files` leaves: values, MLP and the draft's vocabulary,
and writes whole drafts.

Errors name the tensor or field. Tensors have the names of both layouts (see `head_files`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keyhole.errors import ModelError
from keyhole.retrieval.config import HeadConfig
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


def draft_shape(draft: HeadCheckpoint, config: HeadConfig) -> DraftShape:
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


def draft_weights(
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


def target_ids(draft: HeadCheckpoint, config: HeadConfig, shape: DraftShape) -> Tensor:
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


def write(path: str | Path, config: HeadConfig, parameters: Mapping[str, Tensor]) -> None:
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
