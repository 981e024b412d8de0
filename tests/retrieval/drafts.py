"""Small EAGLE-3 drafts with random weights, and the attention of such a draft said plainly.

path = make_draft(tmp_path)                          # the authors' layout, for `make_target()`
path = make_draft(tmp_path, layout="speculators")    # names and config of that library
path = make_draft(tmp_path, rope_theta=500.0)        # any field of the layer's config
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import VOCAB_SIZE, make_config, make_network

#: Of the draft, whose head size is not hidden_size / heads.
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
}
#: Beside the layer's fields in both layouts.
OUTER = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "target_hidden_size")
OUTER += ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size")
PREFIX = {"original": "midlayer.", "speculators": "layers.0."}


def make_target(kind: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A network deep enough that EAGLE-3's feature layers, 2, 4 and 5, do not coincide."""
    return make_network(make_config(kind, **({"num_hidden_layers": 8} | overrides)), seed=seed)


def shapes(fields: dict[str, Any], layout: str = "original") -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft except an embedding."""
    H, D, layer = fields["hidden_size"], fields["head_dim"], PREFIX[layout]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    features, width = fields.get("target_hidden_size") or H, fields["intermediate_size"]
    V, count = fields["vocab_size"], len(fields.get("eagle_aux_hidden_state_layer_ids") or "123")
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, count * features),
        layer + "input_layernorm.weight": (H,),
        layer + "hidden_norm.weight": (H,),
        layer + "post_attention_layernorm.weight": (H,),
        layer + "self_attn.q_proj.weight": (heads * D, 2 * H),
        layer + "self_attn.k_proj.weight": (kv_heads * D, 2 * H),
        layer + "self_attn.v_proj.weight": (kv_heads * D, 2 * H),
        layer + "self_attn.o_proj.weight": (H, heads * D),
        layer + "mlp.gate_proj.weight": (width, H),
        layer + "mlp.up_proj.weight": (width, H),
        layer + "mlp.down_proj.weight": (H, width),
        "norm.weight": (H,),
        "lm_head.weight": (fields.get("draft_vocab_size") or V, H),
        "d2t": (fields.get("draft_vocab_size") or V,),
        "t2d": (V,),
    }
    if fields.get("norm_before_fc"):
        found["input_norm.weight"] = (count * features,)
    if fields.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": (features,) for i in range(count)}
    if fields.get("attention_bias"):
        found[layer + "self_attn.q_proj.bias"] = (heads * D,)
        found[layer + "self_attn.k_proj.bias"] = (kv_heads * D,)
    if fields.get("qk_norm"):
        found |= {f"{layer}self_attn.{name}_norm.weight": (D,) for name in "qk"}
    return found


def make_draft(
    folder: Path,
    *,
    layout: str = "original",
    embedding: Tensor | None = None,
    pickled: bool = False,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Writes a draft into a new folder; a field that is None is left out of its config."""
    path = folder / f"draft-{len(list(folder.glob('draft-*')))}"
    path.mkdir(parents=True)
    fields = FIELDS | {"draft_vocab_size": 40} | changes
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name, shape in shapes(fields, layout).items():
        if name in ("d2t", "t2d"):
            tensors[name] = torch.zeros(shape, dtype=torch.int64 if name == "d2t" else torch.bool)
            continue
        x = torch.randn(shape, generator=generator)
        x = 1 + x / 4 if len(shape) == 1 else x / math.sqrt(shape[1])
        tensors[name] = x.to(dtype)
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding.detach().clone()
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(_config(fields, layout)))
    return path


def _config(fields: dict[str, Any], layout: str) -> dict[str, Any]:
    fields = {name: x for name, x in fields.items() if x is not None and name != "qk_norm"}
    if layout == "original":
        return {"architectures": ["LlamaForCausalLMEagle3"], **fields}
    outer = {name: fields.pop(name) for name in OUTER if name in fields}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **outer,
        "transformer_layer_config": fields,
    }


def edit(path: Path, **changes: Any) -> None:
    """Changes the draft's or head's tensors in place; None takes one away."""
    file = path / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, file)


def reconfigure(path: Path, **changes: Any) -> None:
    """Changes fields of its config; None takes one away."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: x for name, x in config.items() if x is not None}))


def attention_logits(
    path: Path, token_ids: Tensor, states: list[Tensor] | None, table: Tensor
) -> Tensor:
    """What the draft's only layer scores before its softmax: float64 [heads, T, T].

    token_ids [T], and of its step i the input token; states: the target's hidden states at the
    feature layers, each [T, Ht], of step i at position i. None: the first half of the input only.
    Written after the drafter that agreed with vLLM's token by token; positions are the steps.
    """
    config = json.loads((path / "config.json").read_text())
    config |= config.pop("transformer_layer_config", {})
    file = path / "model.safetensors"
    stored = load_file(file) if file.exists() else torch.load(path / "pytorch_model.bin")
    weight = {name.replace("midlayer.", "layers.0."): x.double() for name, x in stored.items()}
    D, heads = config["head_dim"], config["num_attention_heads"]

    def rms(x: Tensor, name: str) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]
        return x / mean.sqrt() * weight[name]

    def rope(x: Tensor) -> Tensor:
        turns = config["rope_theta"] ** (-torch.arange(0, D, 2).double() / D)
        angles = torch.arange(len(x)).double()[:, None] * turns
        cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    x = rms(
        weight.get("embed_tokens.weight", table.double())[token_ids],
        "layers.0.input_layernorm.weight",
    )
    if states is not None:
        parts = [state.double() for state in states]
        if config.get("norm_before_fc"):
            sizes = [part.shape[-1] for part in parts]
            parts = list(rms(torch.cat(parts, -1), "input_norm.weight").split(sizes, -1))
        if config.get("fc_norm"):
            parts = [rms(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
        fused = torch.cat(parts, -1) @ weight["fc.weight"].T
        x = torch.cat([x, rms(fused, "layers.0.hidden_norm.weight")], -1)

    def project(name: str) -> Tensor:
        layer = f"layers.0.self_attn.{name}"
        y = x @ weight[layer + "_proj.weight"][:, : x.shape[-1]].T
        y = (y + weight.get(layer + "_proj.bias", 0)).view(len(x), -1, D)
        return rope(rms(y, layer + "_norm.weight") if layer + "_norm.weight" in weight else y)

    query, key = project("q"), project("k")
    key = key.repeat_interleave(heads // key.shape[1], 1)
    return torch.einsum("qhd,nhd->hqn", query, key) * D**-0.5
