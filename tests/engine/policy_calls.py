"""A model, prompts and policies for tests of `policy=` per call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import keyhole
from keyhole import (
    Policy,
    SamplingParams,
)
from keyhole.engine.engine import Engine
from keyhole.engine.request import PolicySpec
from keyhole.engine.sequence import Sequence as Request
from keyhole.models.model import Model
from keyhole.policies import make_policy
from tests.checkpoints import make_model
from tests.policies.models import VOCAB, prompt, with_head
from tests.policies.recording import PAGE, make_engine, run

POLICIES = keyhole.available_policies()
BUDGET = 10 * PAGE
COUNT = 14
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
#: Within the budget and beyond it; longer than a chunk of a prompt; two begin alike.
PROMPTS = [prompt(3), prompt(61), prompt(61) + prompt(9, 1), prompt(90, 2)]
SETTINGS: dict[str, Any] = {"max_batch": 8, "prefill_chunk": 24}

#: What these keep beside the keys of a page, no other engine has; nor a retrieval head.
NEEDS_MORE = {"quest", "infllm", "clusterkv", "shadowkv", "seer_attention_r", "spe_context"}


#: Layers of those that would read everything in so few layers; RaaS and R-KV count generated tokens
#: alone.
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "delta": {"delta_layers": (1,)},
    "tidal_decode": {"selection_layers": (1,)},
    "omnikv": {"filter_layers": (1,)},
    "raas": {"token_budget": 2 * PAGE},
    "r_kv": {"token_budget": PAGE},
}


def small(name: str) -> Policy:
    has_budget = "token_budget" in POLICIES[name].__dataclass_fields__
    settings = {"token_budget": BUDGET} if has_budget else {}
    return make_policy(name, settings | OWN_SETTINGS.get(name, {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    fields = {"num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 512}
    return with_head(make_model("llama_group3", tmp_path_factory.mktemp("model"), **fields))


Answers = Callable[[Policy], list[Tensor]]


@pytest.fixture(scope="module")
def alone(model: Model) -> Answers:
    """Logits of all prompts in an engine of one policy."""

    @functools.cache
    def answers(policy: Policy) -> list[Tensor]:
        engine = make_engine(model, policy, **SETTINGS)
        requests = [add(engine, tokens) for tokens in PROMPTS]
        run(engine)
        return [torch.stack(request.logits) for request in requests]

    return answers


def add(
    engine: Engine, tokens: list[int], policy: PolicySpec | None = None, **more: Any
) -> Request:
    return engine.add(tokens, PARAMS, keep_logits=True, under=engine.under(policy), **more)


def check(requests: Sequence[Request], wanted: Sequence[Tensor]) -> None:
    for request, logits in zip(requests, wanted, strict=True):
        torch.testing.assert_close(torch.stack(request.logits), logits, atol=1e-5, rtol=1e-4)
        assert len(request.generated) == COUNT


def mixed(engine: Engine, specs: Sequence[PolicySpec | None]) -> list[Request]:
    return [add(engine, PROMPTS[i % len(PROMPTS)], spec) for i, spec in enumerate(specs)]


SPECS: list[PolicySpec | None] = [
    None,
    "full",
    {"token_budget": 4 * PAGE},
    "streaming_llm:token_budget=20",
    "raas:token_budget=8",
    None,
    "full",
]
