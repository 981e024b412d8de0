"""Models made from a config alone.

A small random one of the same class, with the same kinds of layers, or one without memory, whose
weights stay in their files.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from keyhole.cache.layout import layers_differ, of_layer
from keyhole.errors import ModelError, UnknownNameError, one_line
from keyhole.models.families import rope_lengths, ropes
from keyhole.models.locate import ModelFiles
from keyhole.models.model_config import is_remote, read_config
from keyhole.models.weights import gguf_file

# Sizes of the small model. Heads of 16 numbers leave room for partial rotation; six layers show
# three kinds of attention twice.
_HEAD_DIM = 16
_MAX_KV_HEADS = 2
_MAX_GROUP = 4
_MAX_LAYERS = 6
_VOCAB = 96
_WINDOW = 8
#: Tokens from which RoPE changes, and how much longer a sequence may be at least.
_ROPE_THRESHOLD = 24
_ROPE_FACTOR = 4.0

#: Fields that get this value, if they have one: widths of MLPs and experts, ranks of MLA.
_SIZES = {
    **dict.fromkeys(
        ["intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "n_inner"], 96
    ),
    **dict.fromkeys(["ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"], 96),
    **dict.fromkeys(["moe_intermediate_size", "shared_intermediate_size"], 48),
    **dict.fromkeys(["shared_expert_intermediate_size", "expert_ffn_hidden_size"], 48),
    "vocab_size": _VOCAB,
    "vocab_size_per_layer_input": _VOCAB,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "kv_channels": _HEAD_DIM,
    "rotary_dim": _HEAD_DIM // 2,
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 0),
    # Recurrent layers: states, and heads of linear attention.
    **dict.fromkeys(["mamba_d_state", "ssm_state_size", "mamba_dt_rank"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], _HEAD_DIM),
    "moe_shared_expert_intermediate_size": 48,
    "adapter_rank": 8,
    # Indexers: with few heads, whose products may all be negative, scores of tokens are equal.
    "index_head_dim": _HEAD_DIM,
    "index_n_heads": 16,
}
#: Fields that stay below this: numbers of experts, windows (below the lengths of the gate's texts).
_AT_MOST = {
    **dict.fromkeys(["mamba_n_groups", "n_groups", "linear_num_key_heads", "linear_num_heads"], 2),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    "moe_num_experts": 4,
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["top_k_experts", "zero_expert_num", "n_group"], 2),
    **dict.fromkeys(["topk_group", "num_shared_experts", "n_shared_experts"], 1),
    **dict.fromkeys(["first_k_dense_replace", "moe_num_shared_experts", "num_dense_layers"], 1),
    **dict.fromkeys(["sliding_window", "window_size", "attention_chunk_size"], _WINDOW),
    "index_topk": _WINDOW,
    "floor_scale": _WINDOW,
    # Blocks in which a recurrence is computed: prompts have several.
    **dict.fromkeys(["mamba_chunk_size", "chunk_size", "block_size"], _WINDOW),
    "max_position_embeddings": 256,
}

#: Scales of Dory, which it divides by `initializer_range`.
_DIVIDED = ("sqk", "s_gate", "lambda_1", "lambda_2", "logit_scale")

#: Of encoders.
_ENCODER_SIZES = {
    **dict.fromkeys(["num_hidden_layers", "num_blocks"], 2),
    **dict.fromkeys(["intermediate_size", "nemo_conv_channels"], 64),
    **dict.fromkeys(["ext_pw_out_channel", "depthwise_separable_out_channel"], 64),
}

#: Configs that say by other fields than a list which layers have attention, or experts: those of a
#: small model that has all combinations.
_ALTERNATING: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "jamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 1,
    },
}


def shrink(config: Any) -> Any:
    """A copy of a config with small sizes, whose layers are of all kinds that the original has.

    What changes the computation stays: query heads per KV head (up to 4), partial rotation, RoPE's
    type and scaling, norms, biases, soft caps, sinks. Windows become shorter than the texts of the
    gate.
    """
    small = copy.deepcopy(config)
    for name, value in _ALTERNATING.get(small.model_type, {}).items():
        _set(small, name, value)
    depth = int(small.num_hidden_layers)
    kept = _kept_layers(small, depth)
    for name, value in list(vars(small).items()):
        if isinstance(value, list) and len(value) == depth and name != "architectures":
            setattr(small, name, [value[i] for i in kept])
    _set(small, "num_hidden_layers", len(kept))
    _shrink_sharing(config, small, kept)
    _shrink_sections(small)
    ratio = _value_heads(small)
    _shrink_heads(small)
    own = _own_sizes(config, small, kept)
    for name, size in _SIZES.items():
        value = getattr(small, name, None)
        if value is not None:
            _set(small, name, [size] * len(value) if isinstance(value, list) else size)
    for name, most in _AT_MOST.items():
        value = getattr(small, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            _set(small, name, min(value, most))
    _shrink_recurrence(small, ratio)
    _shrink_shared_attention(small)
    _shrink_dbrx(small)
    _shrink_encoders(small)
    _shrink_rope_lengths(config, small)
    if getattr(small, "word_embed_proj_dim", None) is not None:  # OPT
        small.word_embed_proj_dim = small.hidden_size
    if own:
        small.per_layer_config = own
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    return small


def _kept_layers(config: Any, depth: int) -> list[int]:
    """The first two layers of every kind, in order, at most `_MAX_LAYERS`.

    Of those that read the keys of an earlier layer the first one of every type, besides.
    """
    lists = [v for v in vars(config).values() if isinstance(v, list) and len(v) == depth]
    kinds = [tuple(map(str, layer)) for layer in zip(*lists, strict=True)] or [()] * depth
    first_sharing = depth - _num_sharing(config)
    seen: dict[Any, int] = {}
    kept = []
    for layer, kind in enumerate(kinds[:first_sharing]):
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2:
            kept.append(layer)
    kept = kept[:_MAX_LAYERS] if len(kept) > 2 else list(range(min(first_sharing, 4)))
    if first_sharing < depth:
        types = config.layer_types[first_sharing:]
        kept += [first_sharing + types.index(each) for each in dict.fromkeys(types)]
    return kept


def _num_sharing(config: Any) -> int:
    """How many of the last layers read the keys and values of an earlier one."""
    return int(getattr(config, "num_kv_shared_layers", None) or 0)


def _shrink_sharing(config: Any, small: Any, kept: list[int]) -> None:
    """As many of the last layers read the keys of an earlier one as are kept of those."""
    if _num_sharing(config):
        first = int(config.num_hidden_layers) - _num_sharing(config)
        small.num_kv_shared_layers = sum(layer >= first for layer in kept)


def _shrink_sections(small: Any) -> None:
    """Dory: layers before and after those that may run several times."""
    if hasattr(small, "n_recurrent_layers"):
        outer = int(small.num_hidden_layers > 2)
        _set(small, "n_input_layers", outer)
        _set(small, "n_output_layers", outer)
        _set(small, "n_recurrent_layers", small.num_hidden_layers - 2 * outer)


def _value_heads(config: Any) -> int:
    """Value heads per key head of linear attention."""
    keys = getattr(config, "linear_num_key_heads", None)
    return int(config.linear_num_value_heads) // int(keys) if keys else 1


def _shrink_recurrence(config: Any, ratio: int) -> None:
    """Numbers and sizes of the heads of recurrent layers; `ratio` as `_value_heads` had it."""
    if getattr(config, "linear_num_key_heads", None):
        _set(config, "linear_num_value_heads", config.linear_num_key_heads * ratio)
    if getattr(config, "mamba_num_heads", None):  # Nemotron-H
        _set(config, "mamba_num_heads", 4)
        _set(config, "mamba_head_dim", _HEAD_DIM)
    if getattr(config, "mamba_n_heads", None):
        if getattr(config, "mamba_d_ssm", None):  # Falcon-H1
            _set(config, "mamba_d_ssm", 4 * _HEAD_DIM)
        inner = getattr(config, "mamba_d_ssm", None) or config.mamba_expand * config.hidden_size
        _set(config, "mamba_n_heads", 4)
        _set(config, "mamba_d_head", inner // 4)


def _shrink_shared_attention(config: Any) -> None:
    """Zamba: attention over the token's embedding joined to its hidden state, twice as wide."""
    if getattr(config, "attention_hidden_size", None) is None:
        return
    width = 2 * config.hidden_size
    config.attention_hidden_size = width
    _set(config, "attention_head_dim", width // config.num_attention_heads)
    if hasattr(config, "hybrid_layer_ids"):  # Zamba 2
        kinds = config.layers_block_type
        config.hybrid_layer_ids = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
        inner = config.mamba_expand * config.hidden_size
        _set(config, "mamba_headdim", inner // config.n_mamba_heads)


def _shrink_encoders(config: Any) -> None:
    """Those of images and sound (Phi-4 multimodal), which text does not run through."""
    for name in ("vision_config", "audio_config"):
        encoder: Any = getattr(config, name, None)
        if encoder is None:
            continue
        for field, most in _ENCODER_SIZES.items():
            if hasattr(encoder, field):
                setattr(encoder, field, min(most, getattr(encoder, field)))
        if hasattr(encoder, "num_attention_heads"):
            encoder.hidden_size = min(4 * encoder.num_attention_heads, encoder.hidden_size)


def _shrink_dbrx(config: Any) -> None:
    """Its sizes of attention and experts are in configs of their own."""
    if config.model_type == "dbrx":
        _set(config.attn_config, "kv_n_heads", config.num_key_value_heads)
        experts = config.ffn_config
        _set(experts, "hidden_size", config.hidden_size)
        _set(experts, "ffn_hidden_size", _SIZES["ffn_hidden_size"])
        _set(experts, "moe_num_experts", min(experts.moe_num_experts, 4))
        _set(experts, "moe_top_k", min(experts.moe_top_k, 2))


def _own_sizes(config: Any, small: Any, kept: list[int]) -> dict[int, dict[str, Any]]:
    """Sizes and numbers of heads that single layers have for themselves, in about their ratio."""
    if not layers_differ(config):
        return {}
    found: dict[int, dict[str, Any]] = {}
    for name, least in (("head_dim", 8), ("num_key_value_heads", 1)):
        usual, scaled = vars(config)[name], vars(small)[name]
        for i, layer in enumerate(kept):
            value = getattr(of_layer(config, layer), name)
            if value != usual:
                found.setdefault(i, {})[name] = max(scaled * value // usual, least)
    return found


def _shrink_heads(config: Any) -> None:
    """Numbers and sizes of heads; the ratio of query to KV heads stays, up to 4."""
    if not hasattr(config, "num_attention_heads"):  # RWKV, xLSTM
        raise ModelError(
            "it has no attention heads: its recurrent state has a fixed size, so there are no keys "
            "to select"
        )
    heads = int(config.num_attention_heads)
    kv_name = "num_kv_heads" if config.model_type == "falcon" else "num_key_value_heads"
    # Where layers differ, the config refuses to name one number of all.
    kv_heads = int(vars(config).get(kv_name) or getattr(config, kv_name, None) or heads)
    own_dim = vars(config).get("head_dim")
    square = own_dim is None or own_dim * heads == config.hidden_size
    small_kv = min(kv_heads, _MAX_KV_HEADS) if kv_heads < heads else min(heads, 4)
    small_heads = small_kv * min(heads // kv_heads, _MAX_GROUP)
    rope_dim = getattr(config, "qk_rope_head_dim", None)
    rotated = own_dim is not None and own_dim == rope_dim  # MLA: the dimension of RoPE
    small_dim = _SIZES["qk_rope_head_dim"] if rotated else _HEAD_DIM
    _shrink_rope(config, own_dim or config.hidden_size // heads, small_dim)
    _set(config, "num_attention_heads", small_heads)
    _set(config, "hidden_size", small_heads * _HEAD_DIM if square else 48)
    if kv_name in vars(config):
        _set(config, kv_name, small_kv)
    if "head_dim" in vars(config):
        _set(config, "head_dim", small_dim)
    if rope_dim is not None and hasattr(config, "qk_head_dim"):
        _set(config, "qk_head_dim", _SIZES["qk_nope_head_dim"] + _SIZES["qk_rope_head_dim"])


def _shrink_rope(config: Any, old_dim: int, small_dim: int) -> None:
    """Factors per pair of numbers (LongRoPE's): as many as the small head has pairs.

    The rotated part of a head keeps about its share, in whole pairs.
    """
    for rope in ropes(config):
        share = rope.get("partial_rotary_factor")
        if share is not None and share < 1:
            rope["partial_rotary_factor"] = _in_pairs(share)
            if getattr(config, "partial_rotary_factor", None) is not None:
                config.partial_rotary_factor = rope["partial_rotary_factor"]
        for name in ("short_factor", "long_factor"):
            if rope.get(name) is not None:
                pairs = max(len(rope[name]) * small_dim // old_dim, 1)
                rope[name] = (rope[name] * _HEAD_DIM)[:pairs]


def _in_pairs(share: float) -> float:
    """The share of a small head, below 1, that is nearest to this one and made of whole pairs."""
    pairs = _HEAD_DIM // 2
    return min(max(round(share * pairs), 1), pairs - 1) / pairs


def _shrink_rope_lengths(config: Any, small: Any) -> None:
    """Thresholds of RoPE that changes with the length: between the lengths of the gate's texts."""
    lengths = rope_lengths(config)
    if lengths is None or lengths.threshold >= lengths.longest:
        return
    for rope in ropes(small):
        if rope.get("rope_type") == "longrope":
            rope["original_max_position_embeddings"] = _ROPE_THRESHOLD
            if getattr(small, "original_max_position_embeddings", None) is not None:
                small.original_max_position_embeddings = _ROPE_THRESHOLD
        elif rope.get("rope_type") == "dynamic":
            rope["factor"] = max(float(rope["factor"]), _ROPE_FACTOR)
            small.max_position_embeddings = _ROPE_THRESHOLD


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except AttributeError:  # a property that follows from other fields
        return


def network_of(config: Any, **options: Any) -> Any:
    """A network with new weights, of transformers' class or that of trusted code."""
    trusted = is_remote(config)
    if trusted and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # else its class is there
        options["code_revision"] = _code_revision(config)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trusted, **options)


def _code_revision(config: Any) -> str | None:
    """The commit of the model's code that runs; None: the main branch, or a folder.

    Code of another hub id is taken from its main branch, as `from_pretrained` takes it.
    """
    named: str = config.auto_map[AutoModelForCausalLM.__name__]
    repository, dashes, _ = named.partition("--")
    own = not dashes or repository == config.name_or_path
    commit: str | None = getattr(config, "_commit_hash", None) if own else None
    return commit


def random_model(config: Any) -> PreTrainedModel:
    """A model of this config in float32, with weights at which every part matters.

    transformers' own initialisation makes attention almost uniform and its share of the output
    small, so that errors in it would not show.
    """
    torch.manual_seed(0)
    try:
        network: Any = _network(config)
    except UnknownNameError:
        raise
    except Exception as error:
        raise ModelError(f"no small model can be made: {one_line(error)}") from error
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                # An adapter adds a little to another layer; more, and scores exceed float32.
                gain = 0.5 if "_adapter_" in name else 1.5
                parameter.copy_(drawn * gain / parameter.shape[-1] ** 0.5)
            elif config.model_type == "dory" and name.endswith(_DIVIDED):
                parameter.copy_(config.initializer_range * (1 + 0.2 * drawn))
            elif name.endswith("weight"):
                parameter.copy_(1 + 0.2 * drawn)
            else:
                parameter.copy_(0.2 * drawn)
    return network.eval()


def _network(config: Any) -> PreTrainedModel:
    """A network in float32; UnknownNameError for a `rope_type` that transformers does not know."""
    try:
        # What a config asks for may not be installed, and is not what runs.
        return network_of(config, dtype=torch.float32, attn_implementation="eager")
    except (KeyError, TypeError) as error:
        unknown = unknown_rope_type(config, error)
        if unknown is not None:
            raise unknown from error
        raise


def wrong_padding(place: ModelFiles, config: Any, error: Exception) -> ModelError | None:
    """The error for a padding token beyond the vocabulary, if `error` is due to one: torch names
    neither.
    """
    if not isinstance(error, AssertionError) or "Padding_idx" not in str(error):
        return None
    remedy = "set it to null in config.json" if place.gguf is None else gguf_file.DAMAGED
    return ModelError(
        f"the config of {place.shown!r} says pad_token_id {config.pad_token_id}, which is not "
        f"below vocab_size {config.vocab_size}; {remedy}"
    )


def unknown_rope_type(config: Any, error: Exception) -> UnknownNameError | None:
    """The error for a `rope_type` that transformers does not know, if `error` is due to one:
    transformers gives the value alone, and of a list or an object only the type.
    """
    known = ["default", *ROPE_INIT_FUNCTIONS]
    for rope in ropes(config):
        kind = rope.get("rope_type")
        if kind not in known and (error.args == (kind,) or isinstance(kind, list | dict)):
            return UnknownNameError("rope_type", str(kind), known)
    return None


class WeightCount(NamedTuple):
    """The numbers of weights: all, those of the last layer, and those kept in a file's blocks."""

    num_parameters: int
    layer_parameters: int
    kept: gguf_file.KeptSize


def count_weights(place: ModelFiles, config: Any) -> WeightCount:
    """Counts the weights of a model; no memory is taken."""
    try:
        with torch.device("meta"):
            network = _network(config)  # whatever the weights are stored in
    except AssertionError as error:
        raise wrong_padding(place, config, error) or error from error
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    layers = [layers for layers in lists if len(layers) == int(config.num_hidden_layers)]
    last = layers[0][-1] if layers else network
    kept = gguf_file.kept_size(place, network)
    return WeightCount(_num_stored(network), _num_stored(last), kept)


def _num_stored(module: nn.Module) -> int:
    """Numbers in weights and stored buffers; tied ones count once."""
    stored = {id(x): x.numel() for x in module.state_dict(keep_vars=True).values()}
    return sum(stored.values())


def mapped(place: ModelFiles, dtype: torch.dtype) -> PreTrainedModel | None:
    """A model in a folder whose weights are read from its files when they are used.

    For what needs a few numbers of them. None where the files do not hold exactly its weights in
    this dtype: they are converted while loading, or not in safetensors.
    """
    config = read_config(place)
    with torch.device("meta"):
        network = network_of(config, dtype=dtype)
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(Path(place.name).glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            stored |= {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    own = dict(network.named_parameters())
    for name, parameter in own.items():
        found = stored.get(name)
        if found is None or found.shape != parameter.shape or found.dtype != parameter.dtype:
            return None
    network.load_state_dict({name: stored[name] for name in own}, strict=False, assign=True)
    network.tie_weights()
    rotary = getattr(network.base_model, "rotary_emb", None)
    if rotary is not None:  # its table is computed, not stored
        network.base_model.rotary_emb = type(rotary)(network.config)
    return network.eval()
