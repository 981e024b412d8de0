"""Measures SamKV's stable layers: encodes calibration documents and asks which layers agree.

SamKV (arXiv 2508.11661), appendix A.2; what is counted stands in `keyhole.reuse.block_statistics`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from keyhole.config import is_count, require
from keyhole.documents.source import BLOCK_SIZE
from keyhole.engine.documents.encoder import encode
from keyhole.errors import ConfigError
from keyhole.llm import LLM
from keyhole.models.loading import Model
from keyhole.reuse.sam_kv import NUM_STABLE, Stability, stable_layers
from keyhole.tokenization import Prompt, encode_text, given_ids

#: Blocks of a document that a text is cut into: three times what an outlier needs.
DOCUMENT_BLOCKS = 32


def measure(
    model: Model,
    documents: Sequence[Sequence[int]],
    *,
    block_size: int = BLOCK_SIZE,
    num_stable_layers: int = NUM_STABLE,
) -> Stability:
    """Stable layers over these documents, each a list of token ids.

    ConfigError for settings that cannot be, for token ids that the model does not know, and if no
    document has the 11 blocks that an outlier needs.
    """
    require(is_count(block_size), "block_size", block_size, "at least 1")
    if not all(documents):
        raise ConfigError("a calibration document is empty; leave it out")
    every = (token for document in documents for token in document)
    wrong = [token for token in every if not 0 <= token < model.vocab_size]
    if wrong:
        raise ConfigError(
            f"token id {wrong[0]} of a document is not one of this model's, 0 to "
            f"{model.vocab_size - 1}"
        )
    engine = LLM(model, max_batch=1, prefix_cache=False).engine
    alphas: list[Tensor] = []
    for document in tqdm(documents, unit="document", desc="calibrate", disable=None):
        record = encode(
            model,
            engine.cache,
            np.asarray(document, np.int64),
            block_size=block_size,
            chunk=engine.config.prefill_chunk,
        )
        alphas.append(torch.stack([layer.alpha for layer in record.layers]))
    scores, stable = stable_layers(alphas, num_stable_layers)
    return Stability(
        model=model.name,
        num_layers=len(scores),
        num_documents=len(alphas),
        block_size=block_size,
        stable_layers=tuple(stable),
        scores=tuple(scores),
    )


def cut(
    model: Model, texts: Sequence[Prompt], *, block_size: int = BLOCK_SIZE, most: int
) -> list[list[int]]:
    """Texts as documents of at most DOCUMENT_BLOCKS blocks, no more than `most` of them.

    Parts that are too short to say anything are left out; if there are too many, they are taken
    evenly from all.
    """
    size = min(DOCUMENT_BLOCKS * block_size, model.max_length - 1)
    parts: list[list[int]] = []
    for text in texts:
        ids = given_ids("a document", text)
        if ids is None:
            ids = encode_text(model.tokenizer, str(text), special=False)
        parts += [ids[start : start + size] for start in range(0, len(ids), size)]
    longest = max((len(part) for part in parts), default=0)
    # A third of a document still has 11 blocks.
    parts = [part for part in parts if 3 * len(part) >= longest]
    if len(parts) <= most:
        return parts
    return [parts[i * len(parts) // most] for i in range(most)]
