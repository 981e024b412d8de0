"""Importance, redundancy and which pages go, in a whole model, against a plain simulation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from keyhole import RKV
from tests.oracle import Array
from tests.policies.models import prompt, twins
from tests.policies.recording import GREEDY, PAGE, Recording, make_engine, run
from tests.policies.shapes import shape
from tests.policies.test_raas import SLIDING, Simulation

WINDOW, KERNEL, THRESHOLD = 3, 7, 0.3


def scores_of(query: Array, keys: Array, scale: float, mix: float) -> Array:
    """Of tokens before the last WINDOW ones: query [Hq, WINDOW, D], keys [Hkv, n, D]; [Hkv, ...].

    One head, one query and one pair of tokens at a time.
    """
    heads, count = len(keys), keys.shape[1]
    group, before = len(query) // heads, count - WINDOW
    result = np.zeros((heads, before))
    for kv in range(heads):
        weights = np.zeros(before)
        for row in range(WINDOW):
            own = query[kv * group : (kv + 1) * group, row]
            logits = scale * (own @ keys[kv, :before].T).max(0)
            powers = np.exp(logits - logits.max())
            weights += powers / powers.sum() / WINDOW
        half = KERNEL // 2
        importance = [weights[max(0, i - half) : i + half + 1].max() for i in range(before)]
        alike = np.zeros((count, count))
        for i in range(count):
            for j in range(count):
                # The key of the padding token is zero in the first layer.
                lengths = np.linalg.norm(keys[kv, i]) * np.linalg.norm(keys[kv, j])
                alike[i, j] = 0.0 if i == j else keys[kv, i] @ keys[kv, j] / max(lengths, 1e-300)
            similar = [j for j in range(count) if alike[i, j] > THRESHOLD]
            alike[i, max(similar, default=0)] = 0.0
        powers = np.exp(alike.mean(0))
        redundancy = (powers / powers.sum())[:before]
        result[kv] = mix * np.asarray(importance) - (1 - mix) * redundancy
    return result


@dataclass
class Compression(Simulation):
    """R-KV by one whole forward per token, with the bookkeeping of `Simulation`."""

    mix: float = 0.1
    totals: dict[int, list[float]] = field(default_factory=dict)

    def step(self, tokens: list[int]) -> Array:
        """Logits after the last token, which is decoded; evicts after it if the budget is full."""
        due = self.begin_step(len(tokens))
        self.decodes, self.totals = due, {page: [] for page in self.stamps}
        logits = self._forward(tokens)
        self.decodes = False
        if due:
            pages = sorted(self.stamps)
            means = {page: np.mean(self.totals[page]) for page in pages[:-1]}
            gone = min(means, key=lambda page: (means[page], page)) if means else pages[0]
            del self.stamps[gone]
            self.evicted.append(gone)
        return logits

    def attend(
        self,
        layer: int,
        query: Array,
        keys: Array,
        values: Array,
        *,
        window: int | None,
        options: dict[str, Any],
    ) -> Array:
        """As in `Simulation`; scores the generated pages that are left."""
        pages = sorted(self.stamps)
        if self.decodes and window is None and len(pages) > 1:
            left = [page * PAGE + i for page in pages for i in range(PAGE)]
            found = scores_of(query[:, -WINDOW:], keys[:, left], options["scale"], self.mix)
            for i, page in enumerate(pages[:-1]):
                self.totals[page] += found[:, i * PAGE : (i + 1) * PAGE].flatten().tolist()
        decodes, self.decodes = self.decodes, False  # no page is renewed
        out = super().attend(layer, query, keys, values, window=window, options=options)
        self.decodes = decodes
        return out


@pytest.mark.one_in(8)
@pytest.mark.parametrize("counted", [False, True], ids=["prompt beside", "prompt counted"])
@pytest.mark.parametrize(
    ("kind", "fields", "mix"),
    [
        ("llama_group3", {}, 0.1),
        ("llama_mha", {}, 1.0),
        ("llama_mqa", {}, 0.0),
        ("gemma3", SLIDING, 1.0),
    ],
)
def test_a_whole_model_evicts_as_the_simulation(
    kind: str, fields: dict[str, Any], mix: float, counted: bool
) -> None:
    """Ragged prompts at once; pages leave in the order of their scores, not of their age."""
    model, network = twins(kind, num_hidden_layers=2, **fields)
    budget = (6 if counted else 4) * PAGE
    settings = {"observation_window": WINDOW, "kernel_size": KERNEL, "threshold": THRESHOLD}
    policy = RKV(token_budget=budget, prompt_in_budget=counted, mix_lambda=mix, **settings)
    recording = Recording(inner=policy)
    engine = make_engine(model, recording, prefill_chunk=16)
    params = dataclasses.replace(GREEDY, max_tokens=34)
    requests = [engine.add(prompt(n), params, keep_logits=True) for n in (3, 10)]
    run(engine)
    orders = []
    for request in requests:
        start = len(request.prompt)
        simulation = Compression(network, budget, 0.0, counted, mix=mix)
        wanted = simulation.logits(request.tokens[:-1], start)
        found = torch.stack(request.logits).numpy()
        assert np.abs(found - wanted).max() <= 1e-4 * max(1.0, np.abs(wanted).max())
        rows = [
            (length, left)
            for call in recording.calls
            for length, left, first in zip(
                call.lengths, call.left or [], call.pinned or [], strict=True
            )
            if first == -(-start // PAGE)
        ]
        assert all(simulation.seen[length - 1] == left for length, left in rows)
        orders.append(simulation.evicted)
    assert min(map(len, orders)) >= 3
    assert any(order != sorted(order) for order in orders)


def test_of_repeated_tokens_the_older_page_goes() -> None:
    """A page with copies of one token is redundant, and is evicted for that alone."""
    model, _ = twins("llama_group3", num_hidden_layers=1)
    policy = RKV(token_budget=4 * PAGE, mix_lambda=0.0, observation_window=1)
    recording = Recording(inner=policy)
    engine = make_engine(model, recording)
    # The first three generated tokens fill the prompt's page; then come four pages.
    given = [5, 9, 13, *[7, 31, 52, 44], *[20] * PAGE, *[60, 8, 33, 12], *[41, 27, 50, 18], 3]
    engine.add([4], GREEDY, given=given)
    run(engine)
    last = recording.calls[-1].left
    assert last == [[0, 1, 3, 4, 5]]


def test_the_window_is_at_most_a_page() -> None:
    assert RKV().resolve(shape(4)).observation_window == 8
    assert RKV.as_published(shape(4), 64) == RKV(token_budget=64)


def test_a_model_whose_layers_all_have_windows_evicts_its_oldest_pages() -> None:
    """It ended with an assertion at the first page to evict, as no layer had a score to add."""
    model, network = twins("mistral_sliding", num_hidden_layers=2)
    engine = make_engine(model, RKV(token_budget=2 * PAGE))
    params = dataclasses.replace(GREEDY, max_tokens=10 * PAGE)
    request = engine.add(prompt(PAGE), params, keep_logits=True)
    run(engine)
    logits = network(torch.tensor([request.tokens[:-1].tolist()])).logits[0, PAGE - 1 :]
    assert (torch.stack(request.logits) - logits).abs().max() <= 1e-4
    # Freed once the window of 8 tokens has passed them.
    assert request.stats().evicted_pages >= 10 - 2 - 8 // PAGE - 1
