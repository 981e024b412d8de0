"""Stamps, evictions and what is left, in a whole model, against a plain simulation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from keyhole import ConfigError, RaaS
from tests.oracle import Array, float64
from tests.policy.models import prompt, twins
from tests.policy.recording import GREEDY, PAGE, Recording, make_engine, steps
from tests.policy.shapes import shape


@dataclass
class Simulation:
    """RaaS as the paper has it: one whole forward for every token, no cache, no pages in memory.

    seen: for each token from `start` on, the pages that full-attention layers let it read.
    """

    network: Any
    budget: int
    alpha: float
    start: int
    seen: dict[int, list[int]] = field(default_factory=dict)
    stamps: dict[int, int] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)

    def logits(self, tokens: list[int]) -> Array:
        """Logits [n, vocabulary] after the prompt and after each later token."""
        self.network.set_attn_implementation("raas")
        rows = [self._forward(tokens[: self.start])]
        for length in range(self.start + 1, len(tokens) + 1):
            newest = (length - 1) // PAGE
            if newest >= self._pinned:
                self.stamps[newest] = length
            self.seen[length - 1] = [*range(self._pinned), *sorted(self.stamps)]
            rows.append(self._forward(tokens[:length]))
            if length % PAGE == 0 and self._pinned + len(self.stamps) >= self._most:
                oldest = min(self.stamps, key=lambda page: (self.stamps[page], page))
                del self.stamps[oldest]
                self.evicted.append(oldest)
        return np.stack(rows)

    @property
    def _pinned(self) -> int:
        return -(-self.start // PAGE)

    @property
    def _most(self) -> int:
        return max(self.budget // PAGE, self._pinned + 1)

    @torch.no_grad()
    def _forward(self, tokens: list[int]) -> Array:
        ids = torch.tensor([tokens])
        return float64(self.network(input_ids=ids, use_cache=False, simulation=self).logits[0, -1])

    def attend(
        self,
        query: Array,
        keys: Array,
        values: Array,
        window: int | None,
        scale: float,
        softcap: float | None,
        sinks: Array | None,
    ) -> Array:
        """query [Hq, T, D], keys [Hkv, T, D], values [Hkv, T, Dv]; returns [T, Hq, Dv]."""
        count = query.shape[1]
        place = np.arange(count)
        mask = place <= place[:, None]
        if window is not None:
            mask &= place > place[:, None] - window
        for row, pages in self.seen.items():
            if window is None and row < count:
                mask[row] &= np.isin(place // PAGE, pages)
        out = []
        for head in range(len(query)):
            kv = head * len(keys) // len(query)
            logits = scale * query[head] @ keys[kv].T
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            weights = np.where(mask, np.exp(logits), 0.0)
            total = weights.sum(1) + (0.0 if sinks is None else np.exp(sinks[head]))
            weights /= total[:, None]
            out.append(weights @ values[kv])
            if window is None and count > self.start:
                for page in self.stamps:
                    if weights[-1, page * PAGE : (page + 1) * PAGE].max() > self.alpha:
                        self.stamps[page] = count
        return np.stack(out, 1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    simulation: Simulation,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    sinks = None if s_aux is None else float64(s_aux)
    rows = (float64(x[0]) for x in (query, key, value))
    out = simulation.attend(*rows, sliding_window, scaling, softcap, sinks)
    return torch.from_numpy(out).to(query.dtype)[None], None


AttentionInterface.register("raas", _attention)

SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama_group3", {}),
        ("llama_group4", {}),
        ("llama_group7", {}),
        ("llama_mha", {}),
        ("llama_mqa", {}),
        ("gemma2", SLIDING),
        ("gpt_oss", SLIDING),
        ("gemma3", SLIDING),
        ("deepseek_v3", {}),
    ],
)
def test_a_whole_model_evicts_as_the_simulation(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    """Ragged prompts at once, one of them as long as the budget; a weight of 0.3 is seldom."""
    model, network = twins(kind, tmp_path, num_hidden_layers=4, **fields)
    budget, alpha = 6 * PAGE, 0.3
    recording = Recording(inner=RaaS(token_budget=budget, alpha=alpha))
    engine = make_engine(model, recording, prefill_chunk=16)
    params = dataclasses.replace(GREEDY, max_tokens=40)
    requests = [engine.add(prompt(n), params, keep_logits=True) for n in (3, 10, 24)]
    for _ in steps(engine):
        pass
    orders = []
    for request in requests:
        start = len(request.prompt)
        simulation = Simulation(network, budget, alpha, start)
        wanted = simulation.logits(request.tokens[:-1])
        assert wanted.argmax(1).tolist() == request.generated
        found = torch.stack(request.logits).numpy()
        assert np.abs(found - wanted).max() <= 1e-4 * max(1.0, np.abs(wanted).max())
        pinned = -(-start // PAGE)
        rows = [
            (length, left)
            for call in recording.calls
            for length, left, first in zip(
                call.lengths, call.left or [], call.pinned or [], strict=True
            )
            if first == pinned
        ]
        assert {length - 1 for length, _ in rows} == simulation.seen.keys()
        assert all(simulation.seen[length - 1] == left for length, left in rows)
        orders.append(simulation.evicted)
    assert min(map(len, orders)) >= 5
    # Where there is a choice, it is not always the first one's turn.
    assert any(order != sorted(order) for order in orders)


def test_memory_of_a_long_generation_stays_bounded(tmp_path: Path) -> None:
    """Far more tokens than the cache has room for; the pool is as full as it was early on."""
    model, _ = twins("llama_group3", tmp_path, num_hidden_layers=2)
    policy = RaaS(token_budget=6 * PAGE, alpha=0.1)
    page_bytes = make_engine(model, policy).cache.page_bytes
    engine = make_engine(model, policy, memory=20 * page_bytes, max_length=400)
    params = dataclasses.replace(GREEDY, max_tokens=300)
    requests = [engine.add(prompt(n), params) for n in (9, 41)]
    free = [engine.cache.available for _ in steps(engine) if engine.has_work]
    assert min(free) == 20 - 6 - (11 + 1)
    # Each has a page less between the step that fills one and the next.
    assert {*free[60:]} == {min(free), min(free) + 2}
    for request in requests:
        assert len(request.generated) == 300
        made = -(-(len(request.prompt) + 300) // PAGE)
        kept = max(6, -(-len(request.prompt) // PAGE) + 1)
        assert request.stats().evicted_pages in (made - kept, made - kept - 1)
    assert engine.prefix is not None
    engine.prefix.clear()
    assert engine.cache.available == engine.max_pages == 20


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"token_budget": 15}, "token_budget 15 must be at least one page of 16"),
        ({"alpha": -0.1}, "alpha -0.1 must be a number from 0 to below 1"),
        ({"alpha": 1}, "alpha"),
        ({"alpha": "x"}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RaaS(**settings).resolve(shape(4))
