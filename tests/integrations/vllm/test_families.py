"""Gemma-3: layers with sliding windows, and several KV cache groups.

Run by `make test-vllm`, in a separate environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")

from keyhole.cache.layout import Geometry
from keyhole.integrations.vllm.backend import model_layers
from keyhole.integrations.vllm.page_policy import page_policy
from keyhole.models.loading import load
from keyhole.policies import make_policy
from tests.checkpoints import make_model
from tests.integrations.vllm.engines import (
    MAX_LENGTH,
    PAGE_SIZE,
    answers,
    own_tokens,
    random_prompts,
    start,
)

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and what it brings along

SHAPE: dict[str, Any] = {
    "head_dim": 64,
    "num_hidden_layers": 8,
    "max_position_embeddings": MAX_LENGTH,
    "sliding_window": 64,
    "query_pre_attn_scalar": 64,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"] * 2,
}
DELTA = {"token_budget": 2 * PAGE_SIZE, "full_layers": (1,), "delta_layers": (2,)}


def test_windows_are_left_alone_and_groups_share_page_numbers(tmp_path: Path) -> None:
    checkpoint = make_model("gemma3", tmp_path, tokenizer=True, **SHAPE)
    engine = start(
        checkpoint,
        num_gpu_blocks_override=512,
        additional_config={"keyhole": {"policy": "delta", **DELTA}},
    )
    prompts = random_prompts(40, 130, 300, seed=5)
    got = [tokens for tokens, _ in answers(engine, prompts, 20)]

    geometry: Geometry = load(checkpoint, device="cpu", dtype="float32").geometry(PAGE_SIZE)
    assert got == own_tokens(
        checkpoint, page_policy(make_policy("delta", DELTA), geometry), prompts, 20
    )
    assert got != own_tokens(checkpoint, make_policy("full"), prompts, 20), "nothing was skipped"

    def kinds(worker: Any) -> tuple[list[int], int]:
        layers = model_layers(worker.vllm_config)
        sparse = [i for i, layer in layers.items() if layer.impl.adapter is not None]
        return sparse, len(worker.model_runner.kv_cache_config.kv_cache_groups)

    ((under_policy, groups),) = engine.collective_rpc(kinds)
    assert under_policy == [1, 2, 3, 5, 6, 7]
    assert groups > 1
