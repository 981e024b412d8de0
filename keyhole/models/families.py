"""What a model's config says about its cache: kinds and shapes of layers, and the longest sequence.

There is no list of families. `check` refuses what cannot be expressed; whether the rest is exact is
measured by `keyhole.exactness_gate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keyhole.cache import layout
from keyhole.cache.layout import LayerLayout, layers_differ, of_layer
from keyhole.config import is_count
from keyhole.errors import ModelError

#: Kinds of layers, as in `layer_types`, whose keys and values are in pages.
_FULL = {"full_attention", "attention", "global", "hybrid"}
#: The model selects tokens in them by an indexer of its own.
_INDEXED = {"indexed_attention"}
_SLIDING = {"sliding_attention", "local", "hybrid_sliding"}
_CHUNKED = {"chunked_attention"}
_ATTENTION = _FULL | _INDEXED | _SLIDING | _CHUNKED

#: Kinds that keep a recurrent state of a sequence; a hybrid layer has keys and values as well.
_RECURRENT = {"linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"}
#: Kinds that keep nothing of earlier tokens.
_STATELESS = {"mlp", "moe"}

#: Families whose modules read a whole text at once.
_ENCODERS = {
    "bert": "BERT",
    "big_bird": "BigBird",
    "bert-generation": "BERT",
    "camembert": "CamemBERT",
    "data2vec-text": "data2vec",
    "electra": "ELECTRA",
    "ernie": "ERNIE",
    "megatron-bert": "Megatron-BERT",
    "rembert": "RemBERT",
    "roberta": "RoBERTa",
    "roberta-prelayernorm": "RoBERTa",
    "roc_bert": "RoCBert",
    "roformer": "RoFormer",
    "xlm": "XLM",
    "xlm-roberta": "XLM-RoBERTa",
    "xlm-roberta-xl": "XLM-RoBERTa",
    "xmod": "X-MOD",
}

#: Families whose attention Keyhole does not compute, and what it does.
_OTHER_ATTENTION = {
    "doge": "masks tokens by learned scores",
    "hrm_text": "uses bidirectional attention over the prompt",
    "moshi": "has a window under flash attention, and none under transformers' eager attention",
    "reformer": "attends only to tokens with the same hash",
    "xlnet": "uses bidirectional attention",
}

#: Sizes that a config may contain; each is at least 1.
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def check(config: Any, name: str) -> None:
    """ModelError for a model whose kind of layers or sizes cannot be run."""
    family = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"model {name!r} ({family}) is an encoder-decoder model; Keyhole runs "
            "decoder-only models"
        )
    if family in _ENCODERS:
        raise ModelError(
            f"model {name!r} ({family}) is an encoder ({_ENCODERS[family]}) with "
            "bidirectional attention; Keyhole runs decoder-only models"
        )
    _check_attention(config, name)
    kinds = set(_kinds(config) or ()) - _ATTENTION - _RECURRENT - _STATELESS
    if kinds:
        unknown = ", ".join(sorted(kinds))
        raise ModelError(
            f"model {name!r} ({family}) has layer types that Keyhole does not know: {unknown}"
        )
    if set(_kinds(config) or ()) & _INDEXED and getattr(config, "index_topk", None) is None:
        raise ModelError(
            f"model {name!r} ({family}) selects tokens with an indexer other than DeepSeek-V3.2's"
        )
    if layers_differ(config) and getattr(of_layer(config, 0), "kv_lora_rank", None) is not None:
        raise ModelError(
            f"model {name!r} ({family}) has latent attention (MLA) whose shape differs between "
            "layers; the cache has one shape for all of them"
        )
    if getattr(config, "num_hidden_layers", None) is None:
        raise ModelError(
            f"model {name!r} ({family}) consists of several models; Keyhole runs the language "
            "model of a vision-language checkpoint, given its folder or hub id, if transformers "
            "has a class for the language model alone"
        )
    for layer in range(int(config.num_hidden_layers)) if layers_differ(config) else (0,):
        _check_sizes(of_layer(config, layer), name)
    if not attention_layers(config):
        only = ", ".join(sorted(set(_kinds(config) or ())))
        raise ModelError(
            f"model {name!r} ({family}) has no attention layers, only {only}: its recurrent "
            "state has a fixed size, so there are no keys to select"
        )


def _check_attention(config: Any, name: str) -> None:
    """ModelError for attention that Keyhole's kernels do not compute."""
    family = config.model_type
    other = _OTHER_ATTENTION.get(family)
    if family == "falcon" and config.alibi:
        other = "adds ALiBi twice under transformers' eager attention and once under its sdpa"
    if getattr(config, "rel_extent", None) is not None:
        other = "adds a learned bias per relative position to attention scores"
    if getattr(config, "n_recurrent_loops", 1) > 1:  # Dory
        other = "runs some layers several times per token, each time over keys of their own"
    if other is not None:
        raise ModelError(f"model {name!r} ({family}) {other}, which Keyhole does not compute")


def _check_sizes(config: Any, name: str) -> None:
    """ModelError for a size that no model has, such as -1 layers."""
    for size in _SIZES:
        value = getattr(config, size, None)
        each = value if isinstance(value, list) else [value]  # Gemma 3n's MLPs: one per layer
        if value is not None and not all(map(is_count, each)):
            raise ModelError(
                f"the config of {name!r} says {size} {value!r}; it must be a whole number >= 1"
            )


def attention_layers(config: Any) -> tuple[int, ...]:
    """The numbers of the layers that have keys and values."""
    kinds = _kinds(config)
    if kinds is None:
        return tuple(range(int(config.num_hidden_layers)))
    return tuple(layer for layer, kind in enumerate(kinds) if kind in _ATTENTION)


def recurrent_layers(config: Any) -> tuple[int, ...]:
    """The numbers of the layers that keep a recurrent state of a sequence."""
    kinds = _kinds(config) or ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind in _RECURRENT)


def layouts(config: Any) -> tuple[LayerLayout, ...]:
    """Shape of the cache of each of `attention_layers`."""
    heads = int(config.num_attention_heads)
    layers = attention_layers(config)
    if getattr(config, "kv_lora_rank", None) is not None:  # MLA
        return tuple(_latent(config, layer, heads) for layer in layers)
    kinds, windows = _kinds(config), _windows(config)
    per_layer = getattr(config, "num_attention_heads_per_layer", None)  # Laguna
    return tuple(
        _layout(
            config,
            layer,
            heads if per_layer is None else int(per_layer[layer]),
            windows[layer],
            kinds is not None and kinds[layer] in _CHUNKED,
        )
        for layer in layers
    )


def _latent(config: Any, layer: int, heads: int) -> LayerLayout:
    """MLA: the latent, the rotated part and, where the layer has an indexer, its key."""
    rank, rope = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
    indexed = (_kinds(config) or {layer: ""})[layer] in _INDEXED
    sources = getattr(config, "indexer_types", None)  # "shared": what an earlier layer selected
    has_indexer = indexed and (sources is None or sources[layer] != "shared")
    index_dim = int(config.index_head_dim) if has_indexer else 0
    return LayerLayout(
        num_kv_heads=1,
        key_dim=rank + rope + index_dim,
        value_dim=rank,
        shared_values=True,
        num_query_heads=heads,
        index_topk=int(config.index_topk) if indexed else None,
        index_dim=index_dim,
    )


def head_dim(config: Any) -> int:
    """D, the size of a head's keys; of the layer with the largest."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim)
    return max(layout.head_dim(config, layer) for layer in range(int(config.num_hidden_layers)))


def _layout(config: Any, layer: int, heads: int, window: int | None, chunked: bool) -> LayerLayout:
    family = config.model_type
    kv_heads, key_dim = layout.kv_heads(config, layer), layout.head_dim(config, layer)
    value_dim = int(getattr(of_layer(config, layer), "v_head_dim", None) or key_dim)
    if family == "mimo_v2_flash" and window is not None:
        kv_heads *= 2
    elif family in _ALIBI:
        key_dim += ALIBI_DIM
    elif family == "diffllama":
        value_dim *= 2
    return LayerLayout(
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        window=window,
        chunked=chunked,
        num_query_heads=heads,
        alibi=family in _ALIBI,
    )


def _kinds(config: Any) -> list[str] | None:
    """Each layer's kind, or None where all are alike."""
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        found = getattr(config, name, None)
        if found is not None:
            return [str(kind) for kind in found]
    return None


def _windows(config: Any) -> list[int | None]:
    """Each layer's sliding window or chunk, or None."""
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds = _kinds(config)
    if kinds is None:
        return [window] * int(config.num_hidden_layers)
    chunk = getattr(config, "attention_chunk_size", None)
    return [window if kind in _SLIDING else chunk if kind in _CHUNKED else None for kind in kinds]


#: Numbers that a key has more where positions are a bias (ALiBi): see `own_attention`.
ALIBI_DIM = 16
#: The families with it.
_ALIBI = ("bloom", "mpt")
#: ALiBi has no longest sequence; two numbers of a key are exact up to this position.
_ALIBI_LENGTH = 65536


def _longest(config: Any) -> int:
    return max(_stated_length(config), _yarn_length(config))


def _yarn_length(config: Any) -> int:
    """As far as YaRN reaches; model cards have users add it and leave the other length alone."""
    stretched = [
        int(rope["factor"] * rope["original_max_position_embeddings"])
        for rope in ropes(config)
        if rope.get("rope_type") == "yarn"
        and rope.get("factor")
        and rope.get("original_max_position_embeddings")
    ]
    return min(stretched, default=0)


def _stated_length(config: Any) -> int:
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        found = getattr(config, name, None)
        if found is not None:
            return int(found)
    return _ALIBI_LENGTH


@dataclass(frozen=True)
class RopeLengths:
    """The lengths beyond which the frequencies of a model change.

    kind: "longrope" or "dynamic". threshold: up to it, nothing changes. longest: the most tokens
    of a sequence. every: whether each length beyond has frequencies of its own.
    """

    kind: str
    threshold: int
    longest: int
    every: bool

    def effective(self, length: int) -> int:
        """The smallest length with the same frequencies; 0 for those up to the threshold."""
        if length <= self.threshold:
            return 0
        return length if self.every else self.threshold + 1

    @property
    def reason(self) -> str:
        """Why something ends at the threshold, for an error."""
        return (
            f"its {self.kind!r} RoPE rotates the keys of longer sequences by other frequencies "
            f"than those of up to {self.threshold} tokens"
        )


def rope_lengths(config: Any) -> RopeLengths | None:
    """The config's RoPE settings; None if the frequencies do not depend on the length."""
    positions = getattr(config, "max_position_embeddings", None)
    changing = [rope for rope in ropes(config) if _changes(rope)]
    if not changing or positions is None:
        return None
    kinds = {str(rope["rope_type"]) for rope in changing}
    if len(kinds) > 1 or len({rope_threshold(rope, positions) for rope in changing}) > 1:
        kind, every = " and ".join(sorted(kinds)), True
    else:
        (kind,) = kinds
        every = kind == "dynamic"
    longest = int(min(positions * _stretch(rope) for rope in changing))
    threshold = min(rope_threshold(rope, positions) for rope in changing)
    return RopeLengths(kind, min(threshold, longest), longest, every)


def ropes(config: Any) -> list[dict[str, Any]]:
    """The RoPE of the config, or that of each kind of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in ropes:
        return [ropes]
    return [rope for rope in ropes.values() if isinstance(rope, dict)]


def _changes(rope: dict[str, Any]) -> bool:
    # HunYuan's "dynamic" RoPE with a fixed `alpha` has the same frequencies at every length.
    kind = rope.get("rope_type")
    return kind == "longrope" or (kind == "dynamic" and not rope.get("alpha"))


def _stretch(rope: dict[str, Any]) -> float:
    """By how much sequences may be longer than the config says."""
    return float(rope.get("factor") or 1) if rope["rope_type"] == "dynamic" else 1.0


def rope_threshold(rope: dict[str, Any], positions: int) -> int:
    """Where transformers changes the frequencies of a layer."""
    if rope["rope_type"] == "longrope":
        return int(rope.get("original_max_position_embeddings") or positions)
    return positions


def max_length(config: Any, rope: RopeLengths | None) -> tuple[int, str]:
    """The longest sequence, and the reason for the limit.

    rope: where frequencies follow the length of each sequence; None: they are those of up to the
    threshold.
    """
    longest = _longest(config)
    changing = rope_lengths(config)
    if changing is None:
        return longest, "the model's max_position_embeddings"
    if rope is None:
        return min(longest, changing.threshold), changing.reason
    return changing.longest, f"as far as the model's {changing.kind!r} RoPE reaches"
