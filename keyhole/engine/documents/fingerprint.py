"""Says which model encoded a document: keys of one model mean nothing to another."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from keyhole.models.model import Model
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.target import weights_digest


def fingerprint(model: Model, kv_dtype: str = "auto", adapter: str | None = None) -> dict[str, str]:
    """What a stored record depends on, by name; a record with any other value is foreign.

    Other numbers of the config, such as the epsilon of a norm, are left out: versions of
    transformers may store them differently, so that records of the same model would count as
    foreign. kv_dtype: of the engine's keys and values; records in the model's own dtype do not name
    it. adapter: the name of the LoRA adapter that encodes; its numbers count, not its name.
    """
    config = model.network.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    layouts = [vars_of(layout) for layout in model.geometry(1).layers]
    found = {
        "family": str(config.model_type),
        "revision": str(getattr(config, "_commit_hash", None)),
        "weights": weights_digest(model.network),
        "tokenizer": _tokenizer(model.tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "rope": _digest(json.dumps(rope, sort_keys=True, default=str)),
        "layers": _digest(json.dumps(layouts, sort_keys=True)),
    }
    if kv_dtype != "auto":
        found["kv_dtype"] = kv_dtype
    if adapter is not None:
        found["adapter"] = model.adapters.digests[adapter]
    return found


def head_fingerprint(head: RetrievalHead) -> str:
    """A digest of what a retrieval head's stored keys depend on besides the model."""
    config = json.dumps(vars(head.config), sort_keys=True)
    return _digest(f"{config} {weights_digest(head)}")


def vars_of(layout: Any) -> dict[str, Any]:
    """The fields of a layer's layout, without those that concern `kv_dtype`."""
    names = layout.__dataclass_fields__.keys() - {"scale_bytes", "alibi"}
    return {name: getattr(layout, name) for name in names}


def _tokenizer(tokenizer: Any) -> str:
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _digest(backend.to_str())
    return _digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
