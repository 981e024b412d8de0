"""The config and the tokenizer of a model, and the part of a model that reads text alone.

Checkpoints such as Gemma 3, Qwen3-VL, Mistral 3 and LLaVA have a vision model, and a language model
that is one of the families of text. Where transformers has a class for that one, its weights are
loaded from the checkpoint, and those of the vision model are not read. A prompt of text alone gives
the logits of the whole model: nothing else of it takes part.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_url
from huggingface_hub.errors import HFValidationError
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME, extract_commit_hash

from keyhole.errors import ModelError, one_line
from keyhole.models.locate import ModelFiles, lacks_tokenizer
from keyhole.models.weights import gguf_file
from keyhole.models.weights.stored import tokenizer_damage

_TEMPLATE = "chat_template.jinja"

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

#: Models that are not causal: attention over the prompt is bidirectional.
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
    if hasattr(config, "tie_word_embeddings"):
        text.tie_word_embeddings = config.tie_word_embeddings
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


def read_config(found: ModelFiles) -> Any:
    """Transformers' config of a model, or of its language model; ModelError if unreadable."""
    return text_part(read_whole_config(found))


def read_whole_config(found: ModelFiles) -> Any:
    """The config of the whole checkpoint, models for images included."""
    if found.gguf is not None:
        gguf_file.require_packages()
    try:
        config = AutoConfig.from_pretrained(found.name, **found.options)
        if found.gguf is not None:
            gguf_file.complete(config, found.config)
        if is_remote(config):  # the code that the gate measures is that of this commit, too
            config._commit_hash = extract_commit_hash(str(found.config), None)
        else:  # the gate measures transformers' class, so that class runs
            config.__dict__.pop("auto_map", None)
        return config
    except ModelError:
        raise
    except Exception as error:  # any library involved may raise its own error
        _require_trust(found, error, "belongs to a family that transformers does not have")
        why = "" if found.gguf is None else f"; {gguf_file.DAMAGED}"
        raise ModelError(
            f"the config of {found.shown!r} cannot be read: {one_line(error)}{why}"
        ) from error


def is_remote(config: Any) -> bool:
    """Whether its class is code of a checkpoint, which the user has trusted."""
    return bool(type(config).__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}."))


def _require_trust(found: ModelFiles, error: Exception, what: str) -> None:
    """ModelError if the error is that code of the model would have to run, and may not."""
    if "trust_remote_code" in str(error) and not found.origin.trust_remote_code:
        raise ModelError(
            f"{found.shown!r} {what}, and comes with its own code; that code can do anything that "
            "you can: to run it, give trust_remote_code=True or --trust-remote-code"
        ) from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or hub id; None for a folder without one.

    ModelError if it is neither, or damaged.
    """
    try:
        if not Path(name).exists():
            hf_hub_url(name, "tokenizer.json")  # of a valid id
    except HFValidationError as error:
        raise ModelError(
            f"unknown tokenizer {name!r}: it is not a folder, and it is not a hub id such as "
            "'meta-llama/Llama-3.2-1B'"
        ) from error
    return read_tokenizer(ModelFiles(name, Path(name), None, False))


def read_tokenizer(found: ModelFiles) -> Any:
    """The adapter's tokenizer, or else the model's with the adapter's chat template."""
    if found.adapter is not None:
        own = read_tokenizer(found.of_adapter)
        if own is not None:
            return own
        words, template = read_tokenizer(replace(found, adapter=None)), found.adapter / _TEMPLATE
        if words is not None and template.is_file():
            words.chat_template = template.read_text()
        return words
    in_folder = Path(found.name).is_dir()
    if in_folder and found.gguf is None and lacks_tokenizer(found):
        return None
    try:
        return AutoTokenizer.from_pretrained(found.name, **found.options)
    except Exception as error:
        _require_trust(found, error, "has a tokenizer that transformers does not have")
        if not in_folder and found.config.is_file() and lacks_tokenizer(found):
            where = f" in the local cache, and {found.unreachable}" if found.unreachable else ""
            logging.getLogger("keyhole").warning(
                "%r has no tokenizer%s: it takes token ids only", found.shown, where
            )
            return None
        folder = Path(found.name) if in_folder else found.config.parent
        line = found.gguf is None and tokenizer_damage(folder)
        line = line or f"{one_line(error)}; correct its files, or give tokenizer= another folder"
        raise ModelError(f"the tokenizer of {found.shown!r} cannot be loaded: {line}") from error


def check_ids(name: str, tokenizer: Any, vocab_size: int) -> None:
    """ModelError for an object that is not a tokenizer; warns if it has ids that the model lacks.

    Such tokenizers are common: a padding token was added after training.
    """
    if tokenizer is None:
        return
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(
            f"the tokenizer must be a transformers tokenizer, not {type(tokenizer).__name__}"
        )
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        logging.getLogger("keyhole").warning(
            "the tokenizer of %r has ids up to %d, but the model has a vocabulary of %d; prompts "
            "with larger ids are refused",
            name,
            largest,
            vocab_size,
        )
