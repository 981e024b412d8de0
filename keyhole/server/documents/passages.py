"""The passages that an answer used of its documents: those kept and those recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keyhole.documents.source import Source
from keyhole.engine.documents.filling import Reused
from keyhole.engine.documents.library import Documents
from keyhole.errors import KeyholeError
from keyhole.tokenization import character_spans

_Spans = Sequence[tuple[int, int]]


def passages_of(documents: Documents, reused: Reused, tokenizer: Any) -> list[dict[str, Any]]:
    """An object for each document of a prompt, in order.

    "kept" and "recomputed" list passages: runs of tokens that equally many layers kept or
    recomputed. Each has "layers", "text", and "start" and "end", counted in characters of
    the document. Passages of a text that was replaced or removed meanwhile, or was given as token
    ids, have no characters.
    """
    found, start = [], 0
    for name, digest, length in zip(reused.documents, reused.digests, reused.lengths, strict=True):
        text, spans = _text(documents, name, digest, length, tokenizer)
        part = slice(start, start + length)
        found.append(
            {
                "name": name,
                "tokens": length,
                "kept": _passages(reused.kept[:, part], text, spans),
                "recomputed": _passages(reused.recomputed[:, part], text, spans),
            }
        )
        start += length
    return found


def _text(
    documents: Documents, name: str, digest: str, length: int, tokenizer: Any
) -> tuple[str, _Spans | None]:
    try:
        text = documents.store.source(name)
    except KeyholeError:  # gone
        return "", None
    if not isinstance(text, str) or Source.of(text).digest != digest:
        return "", None
    spans = character_spans(tokenizer, text)
    return ("", None) if spans is None or len(spans) != length else (text, spans)


def _passages(marks: Tensor, text: str, spans: _Spans | None) -> list[dict[str, Any]]:
    """Runs of a bool [L, n] with equally many layers marked, without those with none."""
    layers, lengths = torch.unique_consecutive(marks.sum(0), return_counts=True)
    found, first = [], 0
    for count, length in zip(layers.tolist(), lengths.tolist(), strict=True):
        end = first + length
        if count:
            passage: dict[str, Any] = {"layers": count, "tokens": [first, end]}
            if spans is not None:
                # Several tokens may make up one character.
                begin, stop = spans[first][0], max(last for _, last in spans[first:end])
                passage |= {"start": begin, "end": stop, "text": text[begin:stop]}
            found.append(passage)
        first = end
    return found
