"""Reads and writes the files of a head, and prunes EAGLE-3 draft models to heads.

Errors name the file or tensor.

EAGLE-3 (Li et al., 2025, section 3.1) drafts with one Transformer layer over the pairs (embedding
of a token, fused hidden states of the target at the previous position). A head keeps the weights of
its queries and keys. Tensors are called `midlayer.*` in the authors' layout and `layers.0.*` in
that of the speculators library, whose config holds the layer's in `transformer_layer_config`.

Values, the MLP, `d2t` and `t2d` (the draft's smaller output vocabulary), `norm_before_residual` and
`norm_output` do not affect the layer's queries and keys; `draft` reads them. Of a draft with
several layers, the first is kept: the only one that sees embeddings.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from keyhole.config import is_count, is_number, require
from keyhole.errors import ConfigError, ModelError, one_line, why
from keyhole.retrieval.config import HeadConfig
from keyhole.retrieval.target import Target, feature_layers

#: `model_type` in the config.json of a head.
KIND = "keyhole_retrieval_head"
#: The entries of config.json besides the fields of HeadConfig.
_BESIDE = {"model_type", "dropped_share"}


def write(
    path: str | Path, config: HeadConfig, dropped_share: float | None, tensors: Mapping[str, Tensor]
) -> None:
    """Writes config.json and model.safetensors into the folder, replacing an existing head.

    Without room on the disk the existing one stays; a partially replaced one has no config.json.
    ConfigError if it cannot be written.
    """
    text = {"model_type": KIND, **asdict(config), "dropped_share": dropped_share}
    write_folder(path, text, tensors, what="head")


def write_folder(
    path: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, what: str
) -> None:
    """The same for any config; what: the word for its content in errors."""
    folder = Path(path)
    weights, words = folder / "model.safetensors.part", folder / "config.json.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plain = {name: x.detach().contiguous() for name, x in tensors.items()}
        save_file(plain, weights, metadata={"format": "pt"})
        words.write_text(json.dumps(config, indent=2) + "\n")
        weights.chmod(words.stat().st_mode & 0o777)  # safetensors makes files for the owner alone
        (folder / "config.json").unlink(missing_ok=True)
        os.replace(weights, folder / "model.safetensors")
        os.replace(words, folder / "config.json")
    except (OSError, SafetensorError) as error:  # safetensors raises the latter on a full disk
        if folder.is_dir():
            weights.unlink(missing_ok=True)
            words.unlink(missing_ok=True)
        raise ConfigError(f"the {what} cannot be written to {str(path)!r}: {why(error)}") from error


def read_config(stored: HeadCheckpoint) -> tuple[HeadConfig, float | None]:
    """The config of a head and its dropped_share; ModelError if the folder is not a head's."""
    names = _BESIDE | {field.name for field in fields(HeadConfig)}
    if stored.config.get("model_type") != KIND:
        raise ModelError(
            f"{stored.name!r} is not a retrieval head: the model_type of its config.json is not "
            f"{KIND!r}; load a draft model with RetrievalHead.from_eagle3"
        )
    for kind, wrong in (("lacks", names - set(stored.config)), ("has", set(stored.config) - names)):
        if wrong:
            raise ModelError(
                f"the config of head {stored.name!r} {kind} {', '.join(sorted(wrong))}; its fields "
                f"are {', '.join(sorted(names))}"
            )
    try:
        config = HeadConfig(**{n: x for n, x in stored.config.items() if n not in _BESIDE})
    except ConfigError as error:
        raise ModelError(f"the config of head {stored.name!r} is invalid: {error}") from error
    share = stored.config["dropped_share"]
    return config, float(share) if is_number(share) else None


_PATTERNS = ["*.json", "*.safetensors", "*.bin"]


@dataclass(frozen=True)
class HeadCheckpoint:
    """A folder with a config and tensors, which are read one by one on demand."""

    name: str
    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    _read: Mapping[str, Callable[[], Tensor]]

    @classmethod
    def open(cls, path: str | Path) -> HeadCheckpoint:
        """Opens a folder or a hub id; ModelError if it is missing or cannot be read."""
        name = str(path)
        folder = _folder(name)
        config = _config(folder, name)
        files = sorted(folder.glob("*.safetensors"))
        try:
            parts = [_safetensors(file) for file in files] or [_pickled(folder, name)]
        except ModelError:
            raise
        except Exception as error:  # torch, safetensors, the file system
            raise _unreadable(name, error) from error
        shapes = {key: shape for part in parts for key, (shape, _) in part.items()}
        read = {key: reader for part in parts for key, (_, reader) in part.items()}
        return cls(name, config, shapes, read)

    def tensor(self, key: str, *shape: int) -> Tensor:
        """The tensor `key` on the CPU; ModelError unless it exists, with this shape, a float dtype
        and finite values.
        """
        found = self._found(key, shape)
        if not found.is_floating_point():
            raise ModelError(
                f"checkpoint {self.name!r} has a tensor {key} of type {found.dtype}; quantised "
                "weights cannot be read"
            )
        if not torch.isfinite(found).all():
            raise ModelError(
                f"checkpoint {self.name!r} has NaN or infinite values in {key}; its file is damaged"
            )
        return found

    def integers(self, key: str, *shape: int) -> Tensor:
        """The same for a tensor of integers, as int64."""
        found = self._found(key, shape)
        if found.is_floating_point() or found.dtype == torch.bool:
            raise ModelError(
                f"checkpoint {self.name!r} has a tensor {key} of type {found.dtype}, but it must "
                "have integers"
            )
        return found.long()

    def _found(self, key: str, shape: tuple[int, ...]) -> Tensor:
        right = f"{key} {list(shape)}"
        if key not in self.shapes:
            raise ModelError(f"checkpoint {self.name!r} has no tensor {right}")
        if self.shapes[key] != shape:
            raise ModelError(
                f"checkpoint {self.name!r} has a tensor {key} of shape {list(self.shapes[key])}, "
                f"but it must be {right}"
            )
        try:
            return self._read[key]()
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _unreadable(self.name, error) from error


_Parts = dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # any library involved may raise its own error
        raise ModelError(
            f"unknown head or draft {name!r}: it is not a folder, and nothing of that name could "
            "be loaded from the hub or its local cache"
        ) from error


def _config(folder: Path, name: str) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"folder {name!r} has neither a head nor a draft: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"the config of {name!r} cannot be read: {why(error)}") from error
    if not isinstance(config, dict):
        raise ModelError(f"the config of {name!r} cannot be read: it must be an object")
    return config


def _safetensors(file: Path) -> _Parts:
    def read(key: str) -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            found: Tensor = tensors.get_tensor(key)
        return found

    with safe_open(file, framework="pt") as tensors:
        keys = tensors.keys()
        return {k: (tuple(tensors.get_slice(k).get_shape()), partial(read, k)) for k in keys}


def _pickled(folder: Path, name: str) -> _Parts:
    file = folder / "pytorch_model.bin"
    if not file.is_file():
        raise ModelError(f"folder {name!r} has neither *.safetensors nor pytorch_model.bin")
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    return {key: (tuple(x.shape), x.detach) for key, x in tensors.items()}


def _unreadable(name: str, error: Exception) -> ModelError:
    return ModelError(f"the weights of {name!r} cannot be read: {one_line(error)}")


#: Maps between vocabularies: integers and flags, no parameters.
_MAPS = ("d2t", "t2d")
_EMBEDDING = "embed_tokens.weight"


def head_config(
    draft: HeadCheckpoint, target: Target, inputs: str, max_length: int | None
) -> HeadConfig:
    """The config of the head that `draft` holds; ModelError names a missing or mismatched field.

    A draft does not state its training length: `max_position_embeddings` of its config is used, or
    its sliding window where it has one. Layers are numbered as vLLM and speculators do: i is the
    input of layer i.
    """
    fields = flat(draft.config)
    hidden, heads = (
        _count(draft, fields, "hidden_size"),
        _count(draft, fields, "num_attention_heads"),
    )
    features = _count(draft, fields, "target_hidden_size", hidden)
    if features != target.hidden_size:
        raise ModelError(
            f"draft {draft.name!r} was made for a target of hidden size {features}, but this "
            f"target has {target.hidden_size}"
        )
    trained = _trained_length(draft, fields)
    layers = _feature_layers(draft, fields, target) if inputs == "tokens+features" else ()
    try:
        return HeadConfig(
            vocab_size=_count(draft, fields, "vocab_size"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_count(draft, fields, "num_key_value_heads", heads),
            head_dim=_count(draft, fields, "head_dim", hidden // heads),
            inputs=inputs,
            feature_size=features if layers else 0,
            feature_layers=layers,
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),  # transformers' default for Llama
            trained_length=trained,
            rope_factor=max(1.0, (max_length or 0) / trained),
            bias=_has(
                draft, fields, "attention_bias", layer_prefix(draft) + "self_attn.q_proj.bias"
            ),
            qk_norm=layer_prefix(draft) + "self_attn.q_norm.weight" in draft.shapes,
            input_norm=bool(layers) and _has(draft, fields, "norm_before_fc", "input_norm.weight"),
            feature_norms=bool(layers) and _has(draft, fields, "fc_norm", "fc_norm.0.weight"),
            own_embedding=_EMBEDDING in draft.shapes,
            **_rope(fields),
        )
    except ConfigError as error:
        if max_length is not None and str(error).startswith("rope_factor"):
            raise ConfigError(
                f"max_length {max_length} must be at most {trained}, the length at which draft "
                f"{draft.name!r} was trained: {error}"
            ) from error
        raise ModelError(f"the config of draft {draft.name!r} is invalid: {error}") from error


def weights(draft: HeadCheckpoint, config: HeadConfig) -> dict[str, Tensor]:
    """The tensors of the head under its own parameter names; ModelError names a missing one."""
    H, D, layer = config.hidden_size, config.head_dim, layer_prefix(draft)
    kept = {"embed_norm.weight": draft.tensor(layer + "input_layernorm.weight", H)}
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        projection = f"{layer}self_attn.{name}_proj."
        # The embedding comes first: without features its half of the columns is the projection.
        full = draft.tensor(projection + "weight", heads * D, 2 * H)
        kept[f"{name}.weight"] = full[:, : config.input_size]
        if config.bias:
            kept[f"{name}.bias"] = draft.tensor(projection + "bias", heads * D)
        if config.qk_norm:
            norm = draft.tensor(f"{layer}self_attn.{name}_norm.weight", D)
            kept[f"{name}_norm.weight"] = norm
    if config.own_embedding:
        kept["embedding"] = draft.tensor(_EMBEDDING, config.vocab_size, H)
    if config.uses_features:
        size, count = config.feature_size, len(config.feature_layers)
        kept["feature_norm.weight"] = draft.tensor(layer + "hidden_norm.weight", H)
        kept["fc.weight"] = draft.tensor("fc.weight", H, count * size)
        if config.input_norm:
            kept["input_norm.weight"] = draft.tensor("input_norm.weight", count * size)
        if config.feature_norms:
            for i in range(count):
                norm = draft.tensor(f"fc_norm.{i}.weight", size)
                kept[f"feature_norms.{i}.weight"] = norm
    return kept


def dropped_share(shapes: Mapping[str, tuple[int, ...]], head: nn.Module) -> float:
    """The share of a draft's parameters that the head does not hold.

    Counts the tensors of the checkpoint, except the maps between vocabularies: an embedding
    only where the checkpoint has one, and then as dropped if the target's serves instead.
    """
    total = sum(math.prod(shape) for name, shape in shapes.items() if name not in _MAPS)
    return 1 - sum(p.numel() for p in head.parameters()) / total


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The config flattened: fields of the layer and of `eagle_config` on the top level."""
    inner = config.get("transformer_layer_config"), config.get("eagle_config")
    for part in inner:
        config = config | part if isinstance(part, dict) else config
    return config


def layer_prefix(draft: HeadCheckpoint) -> str:
    """What the names of the layer's tensors begin with, in the layout of this draft."""
    original = any(name.startswith("midlayer.") for name in draft.shapes)
    return "midlayer." if original else "layers.0."


def _count(
    draft: HeadCheckpoint, fields: dict[str, Any], name: str, default: int | None = None
) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if value is None or not is_count(value):
        raise ModelError(
            f"the config of draft {draft.name!r} must have a {name} of at least 1, not {value!r}"
        )
    return int(value)


def _has(draft: HeadCheckpoint, fields: dict[str, Any], name: str, tensor: str) -> bool:
    """Whether the draft has a variant: by its config or, if that does not say, by its tensors."""
    stated = fields.get(name)
    return tensor in draft.shapes if stated is None else bool(stated)


def _trained_length(draft: HeadCheckpoint, fields: dict[str, Any]) -> int:
    length = _count(draft, fields, "max_position_embeddings")
    kinds = fields.get("layer_types") or ()
    slides = "sliding_attention" in kinds[:1] if kinds else bool(fields.get("use_sliding_window"))
    window = fields.get("sliding_window")
    return min(length, int(window)) if slides and window and is_count(window) else length


def _feature_layers(
    draft: HeadCheckpoint, fields: dict[str, Any], target: Target
) -> tuple[int, ...]:
    if fields.get("use_aux_hidden_state") is False:
        raise ModelError(
            f"draft {draft.name!r} reads no hidden states of single layers (use_aux_hidden_state "
            "is false); use it with inputs='tokens'"
        )
    named = fields.get("eagle_aux_hidden_state_layer_ids")
    named = named or fields.get("aux_hidden_state_layer_ids")
    if named:
        if not isinstance(named, list) or not all(is_count(layer, 0) for layer in named):
            raise ModelError(
                f"the config of draft {draft.name!r} must have layer numbers as "
                f"eagle_aux_hidden_state_layer_ids, not {named!r}"
            )
        return tuple(named)
    layers = feature_layers(target.num_layers)
    if len(set(layers)) < len(layers) or min(layers) < 0:
        raise ModelError(
            f"the target has only {target.num_layers} layers, so that EAGLE-3's feature layers "
            f"{layers} are not distinct; the config of draft {draft.name!r} must name other ones "
            "as eagle_aux_hidden_state_layer_ids"
        )
    return layers


def _rope(fields: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from the fields of transformers before and after version 5."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    require(isinstance(given, dict), "rope_parameters", given, "an object")
    rope = dict(given)
    theta = rope.pop("rope_theta", None) or fields.get("rope_theta") or 10000.0  # Llama's default
    rope.setdefault("rope_type", rope.pop("type", "default"))
    partial = rope.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise ConfigError(f"partial_rotary_factor {partial!r} must be 1")
    return {"rope_theta": theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}
