"""Checks a request for stored documents in the frontend, before it reaches the engine.

A request names documents, and its prompt contains their tokens in that order, with anything before
and between them and a question after them. This module finds their positions, and the tokens that
the reuse method recomputes. A bad request is refused with a one-line error; the engine is not
affected.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.utils import random_uuid
from vllm.v1.engine.input_processor import InputProcessor

from keyhole.documents.lookup import DocumentLookup
from keyhole.errors import ConfigError, KeyholeError, RequestError
from keyhole.integrations.vllm.documents.facts import facts_of, is_asked_for
from keyhole.integrations.vllm.settings import read_settings
from keyhole.reuse import make_reuse
from keyhole.reuse.base import PlacedDocument, Reuse
from keyhole.reuse.sam_kv import SamKV

#: The fields that a request may have in its `kv_transfer_params`.
_FIELDS = ("documents", "reuse")
#: Key of the checked request in the same mapping.
_PLACED = "keyhole"
_DEFAULT_REUSE = "reuse"


@dataclass(frozen=True, kw_only=True)
class DocumentRequest:
    """Where the documents of a prompt are, and which tokens before its question are computed.

    names, digests, offsets, lengths: of each document. end: position of the question's first
    token. runs: first and last + 1 of the tokens that are computed in the prompt, ascending.
    shifted: whether keys are rotated to their positions. method: the reuse method if it chooses, by
    the question, what layers keep; None if they keep everything.
    """

    names: list[str]
    digests: list[str]
    offsets: list[int]
    lengths: list[int]
    end: int
    runs: list[list[int]]
    shifted: bool
    method: str | None = None

    @classmethod
    def of(cls, request: Any) -> Self | None:
        """The checked documents of a vLLM request; None if it has none."""
        placed = (request.kv_transfer_params or {}).get(_PLACED)
        return None if placed is None else cls(**placed)


class DocumentFinder:
    """The documents that requests of one engine may name."""

    def __init__(self, config: VllmConfig) -> None:
        self._facts = facts = facts_of(config)
        self._page_size: int | None = config.cache_config.block_size
        asked = read_settings(config.additional_config, os.environ)
        self._names_rows = not config.use_v2_model_runner
        self._policy = "full" if asked is None else asked.make_policy().name
        self._lookup: DocumentLookup = facts.lookup()
        self._tokens = functools.lru_cache(maxsize=1024)(self._read_tokens)

    def place(
        self, asked: Mapping[str, Any], prompt: Sequence[int], answers: int
    ) -> DocumentRequest | None:
        """Finds the documents in the prompt; None for a method that computes it like any other.

        answers: number of answers to this prompt (vLLM's `n`). Raises ConfigError or RequestError.
        """
        unknown = [name for name in asked if name not in _FIELDS]
        if unknown:
            raise RequestError(f"kv_transfer_params {unknown[0]!r} must be one of {_FIELDS}")
        names = asked.get("documents")
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            raise RequestError(f"documents {names!r} must be a list of at least one stored name")
        method = asked.get("reuse") or _DEFAULT_REUSE
        reuse = make_reuse(method).resolve(self._facts.geometry)
        check_method(reuse)
        digests = [self._lookup.digest(name) for name in names]
        found = [self._tokens(*pair) for pair in zip(names, digests, strict=True)]
        if reuse.exact:
            return None
        offsets = find(names, [tokens for tokens, _ in found], prompt)
        layers: Any = (None,) * self._facts.geometry.num_layers
        placed = [
            PlacedDocument(
                name=name, length=len(tokens), offset=offset, block_size=size, layers=layers
            )
            for name, offset, (tokens, size) in zip(names, offsets, found, strict=True)
        ]
        end = offsets[-1] + placed[-1].length
        if end >= len(prompt):
            raise RequestError(
                f"the prompt ends with document {names[-1]!r}; a question must follow it"
            )
        if isinstance(reuse, SamKV):
            self._check_choice(reuse, placed, end, len(prompt) - end, answers)
        return DocumentRequest(
            names=names,
            digests=digests,
            offsets=offsets,
            lengths=[document.length for document in placed],
            end=end,
            runs=_runs(reuse, placed, end),
            shifted=reuse.shifts_rope,
            method=str(method) if isinstance(reuse, SamKV) else None,
        )

    def _read_tokens(self, name: str, digest: str) -> tuple[np.ndarray, int]:
        with self._lookup.open(name, digest) as document:
            return document.token_ids.numpy().astype(np.int64), document.block_size

    def _check_choice(
        self,
        reuse: SamKV,
        placed: Sequence[PlacedDocument],
        end: int,
        question: int,
        answers: int,
    ) -> None:
        """ConfigError unless SamKV can keep or drop whole pages in this engine and prompt."""
        size = self._page_size
        for wrong, reason in (
            (self._policy != "full", f"a prompt with gaps cannot have policy {self._policy!r}"),
            (
                not self._names_rows,
                "vLLM's model runner V2 does not say which request a row is of; set "
                "VLLM_USE_V2_MODEL_RUNNER=0",
            ),
            (answers > 1, f"n {answers} must be 1: each answer would make its own selection"),
            (
                size is None or reuse.block_size % size != 0,
                f"block_size {reuse.block_size} must be a multiple of vLLM's --block-size, {size}",
            ),
            (reuse.num_local_blocks < 1, "num_local_blocks must be at least 1"),
        ):
            if wrong:
                raise ConfigError(f"reuse method {reuse.name!r} cannot run in vLLM: {reason}")
        context = reuse.question_context(placed)
        if context is None or size is None:
            return
        kept = end - int((~context).sum())
        room = (end // size - kept // size + 1) * size - end % size
        if question > room:
            raise RequestError(
                f"the question has {question} tokens, but reuse method {reuse.name!r} has room for "
                f"{room}, those of the documents' middle blocks; use 'reuse' or 'epic'"
            )


def _runs(reuse: Reuse, placed: Sequence[PlacedDocument], end: int) -> list[list[int]]:
    """The runs to compute: all tokens outside documents, and those that the method recomputes."""
    lengths = [document.length for document in placed]
    again = torch.zeros(sum(lengths), dtype=torch.bool)
    if not isinstance(reuse, SamKV):
        again = reuse.plan(placed, None).recomputed[0]
    computed = torch.ones(end, dtype=torch.bool)
    for document, part in zip(placed, again.split(lengths), strict=True):
        computed[document.offset : document.offset + document.length] = part
    edges = np.flatnonzero(np.diff(computed.numpy(), prepend=False, append=False))
    return edges.reshape(-1, 2).tolist()


def check_method(reuse: Reuse) -> None:
    """ConfigError for a method that vLLM cannot express."""
    for wrong, reason in (
        (
            reuse.probe_layer is not None,
            "decides between layers what to recompute, but vLLM runs all layers at once",
        ),
        (reuse.fuses, "fuses new keys with stored ones, but vLLM's layers overwrite them"),
        (
            isinstance(reuse, SamKV) and reuse.recompute,
            "recomputes tokens between dropped ones, which differ from layer to layer; give "
            "'sam_kv:recompute=False'",
        ),
        (
            not isinstance(reuse, SamKV) and (reuse.reads_facts or not reuse.keeps_all),
            "may drop parts of documents that are not whole pages of vLLM",
        ),
    ):
        if wrong:
            raise ConfigError(
                f"reuse method {reuse.name!r} cannot run in vLLM: it {reason}; others are 'reuse', "
                "'epic' and 'recompute'"
            )


def find(names: Sequence[str], tokens: Sequence[np.ndarray], prompt: Sequence[int]) -> list[int]:
    """The position of each document's first token, each after the end of the one before.

    RequestError names the first document whose tokens the rest of the prompt does not have.
    """
    whole = np.asarray(prompt, np.int64).tobytes()
    offsets, begin = [], 0
    for name, part in zip(names, tokens, strict=True):
        wanted = part.tobytes()
        place = whole.find(wanted, begin * 8)
        while place % 8 and place >= 0:  # a match across the bytes of two token ids
            place = whole.find(wanted, place + 1)
        if place < 0:
            raise RequestError(
                f"the {len(part)} tokens of document {name!r} are not in the prompt"
                f"{f' from token {begin} on' if begin else ''}; give the prompt as token ids: "
                "those of the documents, in the order of their names, and a question"
            )
        offsets.append(place // 8)
        begin = place // 8 + len(part)
    return offsets


def check_requests() -> None:
    """Makes every engine of this process that has a store check its requests. Idempotent."""
    plain: Callable[..., Any] = InputProcessor.process_inputs
    if getattr(plain, "keyhole", False):
        return

    @functools.wraps(plain)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = plain(self, *args, **kwargs)
        if is_asked_for(self.vllm_config):
            _check(self, request, self.vllm_config)
        return request

    process_inputs.keyhole = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def _check(processor: Any, request: Any, config: VllmConfig) -> None:
    """Replaces the user's parameters by the checked ones; gives the request a cache salt of its
    own.
    """
    params = request.sampling_params
    asked = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
    if not asked:
        return
    try:
        if request.prompt_token_ids is None:
            raise RequestError(
                "a prompt of embeddings cannot be used with documents; give token ids"
            )
        if not hasattr(processor, "keyhole_documents"):
            processor.keyhole_documents = DocumentFinder(config)
        placed = processor.keyhole_documents.place(asked, request.prompt_token_ids, params.n)
    except KeyholeError as error:
        raise VLLMValidationError(str(error), parameter="kv_transfer_params") from error
    rest = {name: x for name, x in params.extra_args.items() if name != "kv_transfer_params"}
    if placed is None:
        params.extra_args = rest
        return
    params.extra_args = {**rest, "kv_transfer_params": {_PLACED: asdict(placed)}}
    # Keys of stored documents differ from those of a whole prompt, so no other request may reuse
    # them.
    request.cache_salt = f"{request.cache_salt or ''}keyhole:{random_uuid()}"
