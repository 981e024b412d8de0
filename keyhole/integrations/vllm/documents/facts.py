"""What stored documents need to know of a model, found once, before any process of an engine
starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig

from keyhole.cache.layout import Geometry
from keyhole.documents.lookup import DocumentLookup
from keyhole.documents.source import place_of
from keyhole.engine.documents.fingerprint import fingerprint
from keyhole.errors import ConfigError
from keyhole.models import families
from keyhole.models.loading import load_files
from keyhole.models.locate import locate
from keyhole.models.model import Model, beside_weights
from keyhole.models.model_config import load_tokenizer
from keyhole.models.positions import RopeShift
from keyhole.models.shrink import mapped

#: The connector's name in vLLM, and the settings in its `kv_connector_extra_config`.
CONNECTOR = "KeyholeConnector"
_SETTINGS = ("documents",)
#: Key in the same mapping under which the facts reach all processes.
_FACTS = "keyhole"


@dataclass(frozen=True)
class DocumentFacts:
    """place: of the store. fingerprint: of the model. frequencies: see `RopeShift`.

    geometry: of the whole model, over all ranks; its page_size is 1, because it is not known yet.
    """

    place: str
    fingerprint: dict[str, str]
    frequencies: tuple[tuple[float, ...], ...]
    geometry: Geometry

    def lookup(self) -> DocumentLookup:
        """The store, for reading."""
        return DocumentLookup(self.place, self.fingerprint)

    def shift(self) -> RopeShift:
        """The rotation of keys."""
        known: dict[tuple[float, ...], torch.Tensor] = {}
        for row in self.frequencies:
            known.setdefault(row, torch.tensor(row, dtype=torch.float64))
        rows = tuple(known[row] for row in self.frequencies)
        return RopeShift(frequencies=rows, rotated_last=(False,) * len(rows))


def is_asked_for(config: VllmConfig) -> bool:
    """Whether the engine uses stored documents."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def facts_of(config: VllmConfig) -> DocumentFacts:
    """The facts that `prepare` left in an engine's configuration."""
    found: DocumentFacts = config.kv_transfer_config.kv_connector_extra_config[_FACTS]
    return found


def prepare(config: VllmConfig) -> None:
    """Finds the facts; ConfigError for an engine that cannot use stored documents.

    ConfigError, too, for a store whose records all belong to other models.
    """
    for wrong, reason in _refusals(config):
        if wrong:
            raise ConfigError(f"stored documents cannot be used in vLLM here: {reason}")
    extra = config.kv_transfer_config.kv_connector_extra_config
    unknown = [name for name in extra if name not in (*_SETTINGS, _FACTS)]
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config {unknown[0]!r} is not a setting of {CONNECTOR}; give "
            '"documents", the folder or URL of the store'
        )
    model = _model(config)
    shift = RopeShift.for_documents(model)
    facts = DocumentFacts(
        place=place_of(extra.get("documents")),
        fingerprint=fingerprint(model),
        frequencies=tuple(tuple(row.tolist()) for row in shift.frequencies),
        geometry=model.geometry(1),
    )
    facts.lookup().check_model()
    extra[_FACTS] = facts


def _refusals(config: VllmConfig) -> Iterator[tuple[bool, str]]:
    model, parallel = config.model_config, config.parallel_config
    yield model.use_mla, "this model has latent attention (MLA)"
    yield model.runner_type != "generate", "this model does not generate (embedding, encoder)"
    yield model.is_encoder_decoder, "this is an encoder-decoder model"
    yield model.is_multimodal_model, "this model reads images or sound besides text"
    yield parallel.pipeline_parallel_size > 1, "pipeline parallelism: no rank has all layers"
    yield (
        parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "context parallelism: a rank has a part of each sequence's keys",
    )
    yield parallel.use_ubatching, "micro-batches (DBO)"
    yield (
        config.speculative_config is not None,
        "speculative decoding: a draft model has no keys of documents",
    )
    yield config.lora_config is not None, "LoRA: documents are encoded by the model without it"
    dtype = str(config.cache_config.cache_dtype)
    yield dtype != "auto", f"a KV cache of type {dtype!r}; leave it in the model's precision"


def _model(config: VllmConfig) -> Model:
    """The model as the store identifies it; its weights are not loaded if they can stay
    memory-mapped.
    """
    asked = config.model_config
    found = locate(asked.model)
    network: Any = mapped(found, asked.dtype) if Path(found.name).is_dir() else None
    words = load_tokenizer(asked.tokenizer or found.name)
    if network is None:
        return load_files(found, "cpu", asked.dtype, words)
    families.check(network.config, found.name)
    length, reason = families.max_length(network.config, None)
    return Model(
        name=Path(found.name).name,
        network=network,
        tokenizer=words,
        device=torch.device("cpu"),
        dtype=asked.dtype,
        max_length=length,
        length_reason=reason,
        eos_token_ids=frozenset(),
        defaults={},
        **beside_weights(Path(found.name)),
    )
