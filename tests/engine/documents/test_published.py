"""CacheBlend's choice as its authors' code makes it, with keys and values of transformers alone.

New ones come from one prefill of the whole prompt, old ones from each document's own prefill at the
positions that it has in the prompt: RoPE looks at distances only, so that values are those of a
document read at position 0, and keys those with RoPE re-applied.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from keyhole import LLM
from keyhole.cache.argument import cache_argument
from tests.engine.documents.asking import KINDS, LENGTHS, TEXTS, ask, llms, tokens

__all__ = ["llms"]

_NAMES = ["c", "a", "short", "b"]
_PREFIX, _QUESTION = [1, 5, 9], tokens(9, 99)


def keys_and_values(model: Any, ids: list[int], first: int, layer: int) -> tuple[Tensor, Tensor]:
    """Of a layer, each [T, Hkv * D], after a prefill from position `first` on."""
    past = DynamicCache(config=model.config)
    places = torch.arange(first, first + len(ids))[None]
    given = {cache_argument(model): past}
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), position_ids=places, **given)
    found = past.layers[layer]
    return tuple(x[0].transpose(0, 1).flatten(1).double() for x in (found.keys, found.values))


def deviations(model: Any, layer: int) -> dict[str, Tensor]:
    """Squared distances of new and old, per token of the documents in a row."""
    prompt = _PREFIX + [token for name in _NAMES for token in TEXTS[name]] + _QUESTION
    whole = keys_and_values(model, prompt, 0, layer)
    distance: list[list[Tensor]] = [[], []]
    first = len(_PREFIX)
    for name in _NAMES:
        alone = keys_and_values(model, TEXTS[name], first, layer)
        rows = slice(first, first + LENGTHS[name])
        for found, new, old in zip(distance, whole, alone, strict=True):
            found.append(((new[rows] - old) ** 2).sum(1))
        first += LENGTHS[name]
    key, value = (torch.cat(found) for found in distance)
    return {"value": value, "key": key, "both": key + value}


@pytest.mark.one_in(18)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deviation", ["value", "key", "both"])
@pytest.mark.parametrize("layer", [None, 2])
def test_cacheblend_goes_on_with_the_tokens_of_its_authors(
    llms: dict[str, tuple[LLM, Any]], kind: str, deviation: str, layer: int | None
) -> None:
    llm, model = llms[kind]
    total = sum(LENGTHS[name] for name in _NAMES)
    number = int(0.15 * total)
    settings = {"deviation": deviation, "check_layer": layer, "recompute_ratio": number / total}
    found = ask(llm, _NAMES, _QUESTION, "cacheblend", settings, prefix=_PREFIX)
    assert found.reused is not None
    wanted = deviations(model, layer or 1)[deviation].topk(number).indices
    for row in found.reused.recomputed:
        assert row.nonzero()[:, 0].tolist() == sorted(wanted.tolist())


def test_the_three_deviations_choose_differently(llms: dict[str, tuple[LLM, Any]]) -> None:
    found = deviations(llms["llama"][1], 1)
    number = int(0.15 * len(found["value"]))
    chosen = {frozenset(x.topk(number).indices.tolist()) for x in found.values()}
    assert len(chosen) == 3
