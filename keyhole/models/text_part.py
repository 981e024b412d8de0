"""The part of a model of images and text that reads text alone.

Checkpoints such as Gemma 3, Qwen3-VL, Mistral 3 and LLaVA have a vision model, and a language model
that is one of the families of text. Where transformers has a class for that one, its weights are
loaded from the checkpoint, and those of the vision model are not read. A prompt of text alone gives
the logits of the whole model: nothing else of it takes part.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

#: Names of weights, as patterns, and what the class of the text calls them. Released checkpoints
#: have the first form, those that transformers saves today have "model." before it.
TEXT_WEIGHTS = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}

#: Language models without a class of their own for text alone, and the family that computes the
#: same: a token of text has one position in all three dimensions of multimodal RoPE.
_SAME_FAMILY = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}

#: Fields of a quantisation that list modules which are not quantised.
_EXCEPTIONS = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules")

#: Models that are not causal language models for text alone: the prompt is read in both directions.
_NOT_CAUSAL = {"paligemma", "pi0"}

#: Fields that the language model has from the whole one, where it has none of its own.
_INHERITED = ("dtype", "eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")


def text_part(config: Any) -> Any:
    """The config of the language model in a model of images and text; any other one unchanged."""
    family = config.model_type
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(family, "")
    if not str(known).endswith("ForConditionalGeneration") or family in _NOT_CAUSAL:
        return config
    if getattr(config, "is_encoder_decoder", False):
        return config
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # several language models
        return config
    if text is config:
        return config
    text = _in_known_family(text)
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return config
    for name in _INHERITED:
        value = getattr(config, name, None)
        if value is not None and getattr(text, name, None) is None:
            setattr(text, name, value)
    if isinstance(getattr(text, "quantization_config", None), dict):
        text.quantization_config = _renamed(text.quantization_config)
    # The whole model's class decides whether its head is tied.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    return text


def announce(whole: Any, text: Any, name: str) -> None:
    """Logs that a model runs without its other parts."""
    logging.getLogger("keyhole").info(
        "model %r (%s) also reads images; only its language model (%s) is run, with text",
        name,
        whole.model_type,
        text.model_type,
    )


def _renamed(quantization: dict[str, Any]) -> dict[str, Any]:
    """A quantisation whose exceptions have the names that the class of the text gives them."""
    return quantization | {
        key: [_text_name(name) for name in quantization[key]]
        for key in _EXCEPTIONS
        if isinstance(quantization.get(key), list)
    }


def _text_name(name: str) -> str:
    for pattern, own in TEXT_WEIGHTS.items():
        found, count = re.subn(pattern, own, f"{name}.")
        if count:
            return found.removesuffix(".")
    return name


def _in_known_family(text: Any) -> Any:
    family = _SAME_FAMILY.get(text.model_type)
    if family is None:
        return text
    fields = text.to_dict()
    del fields["model_type"]
    ropes = fields.get("rope_parameters") or {}
    fields["rope_parameters"] = {k: v for k, v in ropes.items() if not k.startswith("mrope")}
    return CONFIG_MAPPING[family].from_dict(fields)
