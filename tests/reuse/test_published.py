"""Where keyhole's settings are those of the published codes, its answers are theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keyhole import LLM
from tests.engine.documents.asking import LENGTHS, TEXTS, ask, assert_near, llms, tokens
from tests.reuse import oracle, plain, published

__all__ = ["llms"]

_NAMES, _PREFIX, _QUESTION = ["c", "a", "short", "b"], [1, 5, 9], tokens(9, 99)
_TOTAL = sum(LENGTHS[name] for name in _NAMES)
_PARTS = [_PREFIX, *(TEXTS[name] for name in _NAMES), _QUESTION]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["llama", "llama_group7"])
@pytest.mark.parametrize("deviation", ["value", "key", "both"])
@pytest.mark.parametrize("check", [1, 2])
@torch.no_grad()
def test_cacheblend_is_its_authors_with_a_mask_by_position(
    llms: dict[str, tuple[LLM, Any]], kind: str, deviation: str, check: int
) -> None:
    """And with all of the question computed, as both the paper and keyhole have it."""
    llm, model = llms[kind]
    number = int(0.15 * _TOTAL)
    settings = {
        "deviation": deviation,
        "check_layer": check,
        "recompute_ratio": number / _TOTAL,
    }
    found = ask(llm, _NAMES, _QUESTION, "cacheblend", settings, prefix=_PREFIX)
    network = plain.Network(model, torch.float64)
    keys, values, logits, places = published.cacheblend(
        network,
        published.read_alone(network, _PARTS),
        check=check,
        number=number,
        suffix=len(_QUESTION),
        deviation=deviation,
        lower_right=False,
    )
    assert_near(found.logits[0], logits)
    assert found.generated == published.generate(network, keys, values, logits, 4)
    assert found.reused is not None
    written = found.reused.recomputed[-1].nonzero()[:, 0] + len(_PREFIX)
    assert written.tolist() == [p for p in places if p < len(_PREFIX) + _TOTAL]


@pytest.mark.parametrize("kind", ["llama", "llama_group7"])
@pytest.mark.parametrize("local", [0, 7])
@torch.no_grad()
def test_epic_is_its_authors(llms: dict[str, tuple[LLM, Any]], kind: str, local: int) -> None:
    llm, model = llms[kind]
    settings = {"num_initial": 16, "num_local": local}
    found = ask(llm, _NAMES, _QUESTION, "epic", settings, prefix=_PREFIX)
    network = plain.Network(model, torch.float64)
    chunks = published.read_alone(network, _PARTS)
    keys, values, logits, _ = published.epic(network, chunks, 16, local)
    assert_near(found.logits[0], logits)
    assert found.generated == published.generate(network, keys, values, logits, 4)


@torch.no_grad()
def test_what_is_published_makes_a_difference(llms: dict[str, tuple[LLM, Any]]) -> None:
    """Each argument for itself changes the logits, else it would measure nothing."""
    network = plain.Network(llms["llama"][1], torch.float64)
    chunks = published.read_alone(network, _PARTS)
    number = int(0.15 * _TOTAL)
    ours = {"number": number, "suffix": len(_QUESTION), "lower_right": False}
    usual = published.cacheblend(network, chunks, **ours)[2]  # type: ignore[arg-type]
    others: list[dict[str, Any]] = [
        {"lower_right": True},
        {"suffix": 1},
        {"all_new": False},
        {"number": [2 * number, number]},
    ]
    for other in others:
        logits = published.cacheblend(network, chunks, **ours | other)[2]
        assert not torch.allclose(logits, usual, rtol=1e-3, atol=1e-3), other
    after_bos = published.read_alone(network, _PARTS, bos=2)
    logits = published.cacheblend(network, after_bos, **ours)[2]  # type: ignore[arg-type]
    assert not torch.allclose(logits, usual, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("representatives", [1, 4])
@pytest.mark.parametrize("one_distance", [False, True])
@torch.no_grad()
def test_infllm_keeps_as_many_blocks_by_other_representatives(
    llms: dict[str, tuple[LLM, Any]], representatives: int, one_distance: bool
) -> None:
    network = plain.Network(llms["llama"][1], torch.float64)
    records = [plain.encode(network, TEXTS[name], 8) for name in ("c", "a")]
    settings = plain.Settings(block_size=8, num_blocks=4, local_tokens=64)
    prompt = plain.Prompt(network, records, [1], _QUESTION, [], 4, True)
    usual = oracle.METHODS["multi_infllm"](prompt, settings)
    found = published.multi_infllm(
        prompt, settings, representatives=representatives, one_distance=one_distance
    )
    assert torch.equal(found.kept.sum(1), usual.kept.sum(1))
    assert not torch.equal(found.kept, usual.kept)
