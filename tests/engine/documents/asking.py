"""Stored documents, and questions over them: ours, and those of the plain account."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from keyhole import LLM, SamplingParams
from keyhole.engine.documents.prompt import DocumentPrompt, assemble
from keyhole.engine.sequence import Sequence
from keyhole.reuse import make_reuse
from keyhole.reuse.base import Reuse
from tests.checkpoints import make_model

BLOCK = 8
WIDE = {"max_position_embeddings": 2048}
KINDS = ("llama", "llama_mha", "llama_group7")


def tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


# No block of two tokens: of these, only rounding says which is farther from their mean.
LENGTHS = {"a": 91, "b": 20, "c": 131, "tiny": 1, "short": 5}
TEXTS = {name: tokens(length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LLM, Any]]:
    """An engine per kind with the documents stored, and the same model in transformers."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        path = make_model(kind, folder, **WIDE)
        llm = LLM(path, device="cpu", page_size=4, prefill_chunk=37, documents=folder / "store")
        for name, ids in TEXTS.items():
            llm.documents.add(name, {"prompt_token_ids": ids}, block_size=BLOCK)
        found[kind] = llm, AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return found


def assembled(
    llm: LLM,
    stack: ExitStack,
    names: list[str],
    question: list[int],
    method: Reuse,
    prefix: list[int],
    separator: list[int],
) -> DocumentPrompt:
    return assemble(
        llm.engine,
        llm.documents,
        names,
        {"prompt_token_ids": question},
        method,
        stack,
        prefix={"prompt_token_ids": prefix},
        separator={"prompt_token_ids": separator},
    )


def run(
    llm: LLM,
    names: list[str],
    question: list[int],
    method: Reuse,
    *,
    prefix: list[int] | None = None,
    separator: list[int] | None = None,
    max_tokens: int = 4,
) -> Sequence:
    """One answer, with the logits of each of its tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    with ExitStack() as stack:
        asked = assembled(llm, stack, names, question, method, prefix or [], separator or [])
        sequence = llm.engine.add(asked.tokens, params, context=asked.context, keep_logits=True)
        while not sequence.is_finished:
            llm.engine.step()
    if sequence.error is not None:
        raise sequence.error
    llm.engine.check_integrity()
    return sequence


def ask(
    llm: LLM,
    names: list[str],
    question: list[int],
    method: str,
    settings: dict[str, Any],
    **others: Any,
) -> Sequence:
    """One answer of a method by its name."""
    chosen = make_reuse(method, settings).resolve(llm.engine.geometry)
    return run(llm, names, question, chosen, **others)


#: Settings of ours, and how the oracle calls them.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "recompute": ("recompute", {}, {}),
    "reuse": ("reuse", {}, {}),
    "naive": ("reuse", {"rotate": False}, {"rotate": False}),
    "epic": ("epic", {"num_initial": 6, "num_local": 3}, {"initial_tokens": 6, "local_tokens": 3}),
    "cacheblend": ("cacheblend", {"recompute_ratio": 0.3}, {"recompute_ratio": 0.3}),
    "cacheblend by key": (
        "cacheblend",
        {"recompute_ratio": 0.3, "deviation": "key"},
        {"recompute_ratio": 0.3, "deviation": "key"},
    ),
    "cacheblend by both": (
        "cacheblend",
        {"recompute_ratio": 0.3, "deviation": "both"},
        {"recompute_ratio": 0.3, "deviation": "both"},
    ),
    "cacheblend as published": ("cacheblend", {}, {}),
    "epic as published": ("epic", {"num_initial": 6}, {"initial_tokens": 6}),
    "multi_infllm": ("multi_infllm", {"num_blocks": 3}, {"num_blocks": 3}),
    "multi_infllm by tokens": ("multi_infllm", {"sequence_ratio": 0.4}, {"sequence_ratio": 0.4}),
    "sam_kv": ("sam_kv", {}, {}),
    "fusion": ("sam_kv", {"update": "fusion"}, {"update": "fusion"}),
    "no bias": ("sam_kv", {"bias": False}, {"bias": False}),
    "no selection": ("sam_kv", {"select": False}, {"selection": False}),
    "extremes": (
        "sam_kv",
        {"score": "extremes", "share": 0.4, "bias": False},
        {"extremes": True, "share": 0.4, "bias": False},
    ),
    "extremes as much as P": ("sam_kv", {"score": "extremes"}, {"extremes": True}),
    "no recomputation": ("sam_kv", {"recompute": False}, {"recompute": False}),
}


def settings_of(method: str, given: dict[str, Any]) -> dict[str, Any]:
    return given | ({"block_size": BLOCK} if method == "sam_kv" else {})


EVERYTHING = {
    "epic": {"num_initial": 10_000},
    "cacheblend": {"recompute_ratio": 1.0},
    "sam_kv": {"num_initial_blocks": 10_000, "block_size": BLOCK},
}


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    scale = max(1.0, float(wanted.abs().max()))
    assert float((found - wanted.float()).abs().max()) < 1e-4 * scale
