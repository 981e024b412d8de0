"""Stamps, evictions and what is left, in a whole model, against a plain simulation."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keyhole
from keyhole import ConfigError, RaaS, kernels, sparse
from keyhole.cache.argument import cache_argument
from keyhole.models.loading import load
from tests.hf.generating import past_of
from tests.oracle import Array, float64
from tests.policies.models import prompt, twins
from tests.policies.recording import GREEDY, PAGE, Recording, forced, make_engine, run, steps
from tests.policies.shapes import shape

BUNDLED = Path(keyhole.tiny())


@dataclass
class Simulation:
    """RaaS as the paper has it: one whole forward for every token, no cache, no pages in memory.

    counted: whether the budget is for the prompt, too. seen: of each token that does not see
    everything, the pages that full-attention layers let it read. pinned: pages of prompts that are
    left. stamps: of the others that are left.
    """

    network: Any
    budget: int
    alpha: float
    counted: bool = False
    seen: dict[int, list[int]] = field(default_factory=dict)
    pinned: list[int] = field(default_factory=list)
    stamps: dict[int, int] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)
    decodes: bool = False

    def logits(self, tokens: list[int], start: int) -> Array:
        """Logits [n, vocabulary] after the first `start` tokens and after each later one."""
        rows = [self.read(tokens[:start], 0)]
        rows += [self.step(tokens[:length]) for length in range(start + 1, len(tokens) + 1)]
        return np.stack(rows)

    def read(self, tokens: list[int], first: int) -> Array:
        """Logits after a prompt, the tokens from `first` on, that follows what is left."""
        new = range(first // PAGE, -(-len(tokens) // PAGE))
        self.pinned = sorted({*self.pinned, *self.stamps, *new})
        self.stamps = {}
        self.seen |= dict.fromkeys(range(first, len(tokens)), self.pinned)
        return self._forward(tokens)

    def step(self, tokens: list[int]) -> Array:
        """Logits after the last one of the tokens, which is decoded."""
        due = self.begin_step(len(tokens))
        self.decodes = True
        logits = self._forward(tokens)
        self.decodes = False
        if due:
            oldest = min(self.stamps, key=lambda page: (self.stamps[page], page))
            del self.stamps[oldest]
            self.evicted.append(oldest)
        return logits

    def begin_step(self, length: int) -> bool:
        """Adds the page of the last token; whether a page is evicted after this step."""
        newest = (length - 1) // PAGE
        if newest not in self.pinned:
            self.stamps[newest] = length
        self.seen[length - 1] = sorted({*self.pinned, *self.stamps})
        most = len(self.pinned) + self.budget // PAGE
        if self.counted:
            most = max(self.budget // PAGE, len(self.pinned) + 1)
        return length % PAGE == 0 and len(self.seen[length - 1]) >= most and bool(self.stamps)

    @torch.no_grad()
    def _forward(self, tokens: list[int]) -> Array:
        self.network.set_attn_implementation("oracle")
        ids = torch.tensor([tokens])
        return float64(self.network(input_ids=ids, use_cache=False, oracle=self).logits[0, -1])

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
        """query [Hq, T, D], keys [Hkv, T, D], values [Hkv, T, Dv]; returns [T, Hq, Dv].

        Called by the attention function of `tests.oracle`, for any layer alike.
        """
        scale, softcap, sinks = (options[name] for name in ("scale", "softcap", "sinks"))
        count = query.shape[1]
        place = np.arange(count)
        mask = place <= place[:, None]
        if window is not None:
            mask &= place > place[:, None] - window
        for row, pages in self.seen.items():
            if window is None and row < count:
                read = np.zeros(count, bool)
                read[pages] = True
                mask[row] &= read[place // PAGE]
        keys, values = (x.repeat(len(query) // len(x), axis=0) for x in (keys, values))
        logits = scale * query @ keys.transpose(0, 2, 1)  # [Hq, T, T]
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        weights = np.where(mask, np.exp(logits), 0.0)
        extra = 0.0 if sinks is None else np.exp(sinks)[:, None]
        weights /= (weights.sum(2) + extra)[..., None]
        if window is None and self.decodes:
            for page in self.stamps:
                if weights[:, -1, page * PAGE : (page + 1) * PAGE].max() > self.alpha:
                    self.stamps[page] = count
        return (weights @ values).transpose(1, 0, 2)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.one_in(18)
@pytest.mark.parametrize("counted", [False, True], ids=["prompt beside", "prompt counted"])
@pytest.mark.parametrize(
    ("kind", "fields", "alpha"),
    [
        ("llama_group3", {}, 0.2),
        ("llama_group4", {}, 0.5),
        ("llama_group7", {}, 0.4),
        ("llama_mha", {}, 0.25),
        ("llama_mqa", {}, 0.25),
        ("gemma2", SLIDING, 0.25),
        ("gpt_oss", SLIDING, 0.2),
        ("gemma3", SLIDING, 0.15),
        ("deepseek_v3", {}, 0.25),
    ],
)
def test_a_whole_model_evicts_as_the_simulation(
    kind: str, fields: dict[str, Any], alpha: float, counted: bool
) -> None:
    """Ragged prompts at once, one of them as long as the budget; weights above alpha are seldom."""
    model, network = twins(kind, num_hidden_layers=2, **fields)
    budget = (6 if counted else 4) * PAGE
    policy = RaaS(token_budget=budget, alpha=alpha, prompt_in_budget=counted)
    recording = Recording(inner=policy)
    engine = make_engine(model, recording, prefill_chunk=16)
    params = dataclasses.replace(GREEDY, max_tokens=34)
    requests = [engine.add(prompt(n), params, keep_logits=True) for n in (3, 10, 24)]
    for _ in steps(engine):
        pass
    orders = []
    for request in requests:
        start = len(request.prompt)
        simulation = Simulation(network, budget, alpha, counted)
        wanted = simulation.logits(request.tokens[:-1], start)
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
        assert {length for length, _ in rows} == {*range(start + 1, start + 34)}
        assert all(simulation.seen[length - 1] == left for length, left in rows)
        orders.append(simulation.evicted)
    assert min(map(len, orders)) >= 3
    # Where there is a choice, it is not always the first one's turn.
    assert any(order != sorted(order) for order in orders)


def evicted_in_turn(alphas: Sequence[float]) -> list[list[int]]:
    """The pages evicted in one derivation of the bundled model, in order, for each alpha."""
    model = load(BUNDLED, "cpu")
    orders = []
    for alpha in alphas:
        recording = Recording(inner=RaaS(token_budget=6 * PAGE, alpha=alpha))
        engine = make_engine(model, recording)
        text = random.Random(0).choices(range(3, 60), k=130)
        forced(engine, text[:30], text[30:])
        run(engine)
        before: list[int] = []
        order: list[int] = []
        for call in recording.calls:
            assert call.left is not None
            order += [page for page in before if page not in call.left[0]]
            before = call.left[0]
        orders.append(order)
    return orders


@pytest.mark.slow
def test_alpha_decides_which_pages_go_in_the_bundled_model() -> None:
    """Where every page is renewed at every step (alpha 1e-4), or none is, the oldest one goes.

    Between the two it is the one that no head has looked at for longest: 1e-4 and 1e-2 gave the
    same answers, as over a thousand tokens some head of some layer looks at every page.
    """
    low, middle, high = evicted_in_turn([1e-4, 0.3, 0.9999])
    assert len(low) == len(middle) == len(high) > 10
    assert low == sorted(low)
    assert middle != sorted(middle)
    assert middle != high


def test_alpha_decides_between_pages_of_almost_equal_weight() -> None:
    """Pages of 0.3, 0.1 and 0.2, last looked at in this order: what alpha renews stays longer."""
    weights = torch.tensor([[0.0, 0.3, 0.1, 0.2, 0.4]])
    gone = []
    for alpha in (0.05, 0.15, 0.25, 0.35):
        stamps = torch.tensor([[7, 8, 9, 0]], dtype=torch.int32)
        rows, pinned = torch.tensor([0]), torch.tensor([1])
        where = (stamps, rows, pinned, torch.tensor([5], dtype=torch.int32))
        kernels.renew_stamps(*where, torch.tensor([20], dtype=torch.int32), weights, alpha)
        gone.append(int(kernels.drop_oldest(*where, torch.tensor([True]))))
    assert gone == [0, 1, 1, 0]


@pytest.mark.slow
def test_memory_of_a_long_generation_stays_bounded() -> None:
    """Far more tokens than the cache has room for; the pool is as full as it was early on."""
    model, _ = twins("llama_group3", num_hidden_layers=2)
    policy = RaaS(token_budget=6 * PAGE, alpha=0.1, prompt_in_budget=True)
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


@pytest.mark.slow
def test_a_sequence_that_gives_way_evicts_again_what_it_had_evicted() -> None:
    """Its tokens would not fit into the cache all at once: nor need they when it comes back."""
    model, _ = twins("llama_group3", num_hidden_layers=2)
    policy = RaaS(token_budget=6 * PAGE, alpha=0.2, prompt_in_budget=True)
    page_bytes = make_engine(model, policy).cache.page_bytes
    params = dataclasses.replace(GREEDY, max_tokens=80)
    logits, tokens, evicted = [], [], []
    for gives_way in (False, True):
        engine = make_engine(model, policy, memory=10 * page_bytes)
        request, taken = engine.add(prompt(9), params, keep_logits=True), list[int]()
        for step in range(200):
            engine.step()
            if gives_way and 50 <= step < 60:  # another engine on the same cache takes what is left
                taken += engine.cache.allocate(engine.cache.available) or []
            if step == 60:
                assert bool(engine.scheduler.waiting) == gives_way
                engine.cache.release(taken)
        assert request.is_finished
        tokens.append(request.tokens)
        logits.append(torch.stack(request.logits))
        evicted.append(request.stats().evicted_pages)
    assert tokens[0] == tokens[1]
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    assert evicted == [22 - 6] * 2


def test_an_interrupted_step_loses_no_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The books would fall behind the stamps, and the sequence keep a page too many."""
    model, _ = twins("llama_group3", num_hidden_layers=2)
    params = dataclasses.replace(GREEDY, max_tokens=40)
    requests = []
    for interrupted in (False, True):
        engine = make_engine(model, RaaS(token_budget=6 * PAGE, alpha=0.2, prompt_in_budget=True))
        request = engine.add(prompt(9), params)
        while engine.has_work:
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                if interrupted and request.num_computed == 27:
                    patch.setattr(engine, "_count", _interrupt)
                engine.step()
        requests.append(request)
    assert requests[0].tokens == requests[1].tokens
    assert requests[0].stats().evicted_pages == requests[1].stats().evicted_pages == 12 - 6


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_shared_pages_are_only_released_and_gaps_are_never_cached() -> None:
    model, _ = twins("llama_group3", num_hidden_layers=2)
    engine = make_engine(model, RaaS(token_budget=4 * PAGE, prompt_in_budget=True))
    assert engine.prefix is not None
    params = dataclasses.replace(GREEDY, max_tokens=30)
    first, page = engine.add(prompt(6), params), -1
    for _ in steps(engine):
        if first.num_computed == 12:  # somebody else takes its third page, the first to go
            page = first.pages[2]
            engine.prefix.insert(first.tokens[:12], first.pages[:3], 6, by=first.under.policy)
    assert first.stats().evicted_pages == 9 - 4
    assert engine.cache.references(page) == 1
    # The fourth page was evicted later, and those after it are not known either.
    again = engine.add(first.tokens, params, reuse_approximate=True)
    engine.step()
    assert again.stats().cached_prompt_tokens == 12
    assert again.pages[2] == page
    for _ in steps(engine):
        pass
    engine.prefix.clear()
    assert engine.cache.available == engine.max_pages


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "fields"), [("llama_group3", {}), ("gemma3", SLIDING)])
def test_a_conversation_goes_on_with_what_is_left(kind: str, fields: dict[str, Any]) -> None:
    """Under `keyhole.sparse`: what is read next, and a copy, take it for their prompt."""
    _, network = twins(kind, num_hidden_layers=2, **fields)
    # A prompt, its answer, another turn, and at the end of a page a copy that goes on.
    sizes = [9, *[1] * 27, 7, *[1] * 21, *[1] * 19]
    ends, copied = np.cumsum(sizes).tolist(), 1 + 27 + 1 + 21
    tokens = prompt(ends[-1])
    simulation = Simulation(network, 6 * PAGE, 0.3, counted=True)
    wanted = []
    for i, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        if i == copied:
            simulation.pinned = sorted({*simulation.pinned, *simulation.stamps})
            simulation.stamps = {}
        first = end - size
        row = simulation.step(tokens[:end]) if size == 1 else simulation.read(tokens[:end], first)
        wanted.append(row)
    assert len(simulation.evicted) > 8
    network.set_attn_implementation("eager")
    found, past = [], None
    policy = RaaS(token_budget=6 * PAGE, alpha=0.3, prompt_in_budget=True)
    with sparse(network, policy, page_size=PAGE, memory="1MiB"), torch.no_grad():
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            past = copy.deepcopy(past) if i == copied else past
            ids = torch.tensor([tokens[end - size : end]])
            out = network(input_ids=ids, **{cache_argument(network): past})
            past = past_of(out)
            found.append(float64(out.logits[0, -1]))
        cache = past.pages
        used = cache.max_pages - cache.available
        del past, out
        assert cache.available == cache.max_pages
    assert np.abs(np.stack(found) - np.stack(wanted)).max() <= 1e-4
    window = 4 if fields else 0  # pages that only the sliding layers see
    left = len(simulation.pinned) + len(simulation.stamps)
    assert left <= used <= left + window


def test_the_prompt_is_outside_the_budget_unless_it_is_counted() -> None:
    beside, counted = RaaS(token_budget=64), RaaS(token_budget=64, prompt_in_budget=True)
    prompts = np.asarray([1, 9, 2])
    assert beside.page_limit(prompts, 16).tolist() == [5, 13, 6]
    assert counted.page_limit(prompts, 16).tolist() == [4, 10, 4]
    assert (beside.outside_budget(), counted.outside_budget()) == ("the prompt", "")
    assert RaaS.as_published(shape(4), 64) == beside
    assert beside.dense_layers(shape(4)) == ()


def test_offloading_is_refused(tmp_path: Path) -> None:
    model, _ = twins("llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="'raas' reads all keys of every layer"):
        make_engine(model, RaaS(), offload=tmp_path)
