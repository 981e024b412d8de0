"""Answers from stored documents on a GPU are those of a CPU, method by method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keyhole import LLM, SamplingParams
from keyhole.models.loading import load
from keyhole.reuse import available_reuse_methods, make_reuse
from tests.checkpoints import make_model
from tests.gpu import test_device
from tests.gpu.test_device import tokens

pytestmark = pytest.mark.gpu

#: float32 on both sides; a wrong key changes the likeliest tokens' log-probabilities by far more.
TOLERANCE = 1e-3
BLOCK = 8
METHODS = available_reuse_methods()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("policy", ["full", "delta", "quest"])
def test_answers_are_those_of_a_cpu(kind: str, policy: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path, max_position_embeddings=2048, num_hidden_layers=6)
    llms = []
    for device in ("cpu", test_device.DEVICE):
        model = load(path, device, "float32")
        # A place each: keys that a device computed are compared too.
        place = tmp_path / f"store-{len(llms)}"
        llm = LLM(model, policy, page_size=4, prefill_chunk=64, documents=place)
        for name, length in (("a", 91), ("b", 20), ("c", 130)):
            llm.documents.add(name, {"prompt_token_ids": tokens(length, length)}, block_size=BLOCK)
        llms.append(llm)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=5)
    question = {"prompt_token_ids": tokens(9, 1)}
    for method in METHODS:
        reuse = make_reuse(method, {"block_size": BLOCK} if method == "sam_kv" else {})
        wanted, found = (
            llm.ask(question, ["c", "a", "b", "c"], reuse=reuse, params=params) for llm in llms
        )
        assert found.token_ids == wanted.token_ids, method
        assert found.logprobs is not None
        assert wanted.logprobs is not None
        for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
            assert ours.keys() == theirs.keys(), method
            values = torch.tensor([[ours[token], theirs[token]] for token in ours])
            assert (values[:, 0] - values[:, 1]).abs().max() < TOLERANCE, method
        llms[1].engine.check_integrity()
