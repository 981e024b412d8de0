"""What kvpress keeps is what the methods' formulas say, and answers are given at true positions.

Run by `make test-kvpress`, in a separate environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keyhole
from keyhole.cache.argument import cache_argument
from keyhole.models.loading import load
from tests.checkpoints import BOS, EOS, VOCAB_SIZE, make_model

# After Keyhole, whose attention function it then wraps, and before the oracle's.
pytest.importorskip("kvpress", reason="needs kvpress: run `make test-kvpress`")

from transformers import AutoModelForCausalLM, DynamicCache

from keyhole.config import SamplingParams
from keyhole.integrations.kvpress import CompressedModel
from keyhole.integrations.presses import make_press, presses
from tests.integrations.press_formulas import FORMULAS, Formula
from tests.oracle import Array, SparseModel, attention, best, visible

pytestmark = pytest.mark.filterwarnings("default")  # of kvpress and what it brings along

CONTEXT, QUESTION, NEW = 50, 7, 12
SEED = 2
"""Of a prompt where no two tokens on both sides of a cut have equal scores: either may be kept."""


class Pressed(SparseModel):
    """A whole transformers model in which tokens are dropped by a formula, without any cache.

    After the first `context` tokens all but `left` are dropped; after every `interval` tokens from
    `begin` on, all but `budget`. kept: layer -> for each KV head, the tokens left of the context.
    """

    def __init__(self, network: Any, formula: Formula, **counts: int | None) -> None:
        super().__init__(network, lambda *_: None)
        self.formula, self.counts = formula, counts
        self.kept: dict[int, list[list[int]]] = {}

    def attend(
        self,
        layer: int,
        query: Array,
        keys: Array,
        values: Array,
        window: int | None,
        options: dict[str, Any],
    ) -> Array:
        counts, there, rows = self.counts, [visible(0)] * len(keys), []
        for t in range(query.shape[1]):
            there = [[*tokens, t] for tokens in there]
            rows.append(attention(query[:, t], keys, values, there, **options)[0])
            steps = t + 1 - counts["begin"]
            if t + 1 == counts["context"]:
                there = self._press(query[:, : t + 1], keys, values, there, counts["left"])
                self.kept[layer] = there
            elif counts["interval"] and steps > 0 and steps % counts["interval"] == 0:
                there = self._press(query[:, : t + 1], keys, values, there, counts["budget"])
        return np.stack(rows)

    def _press(
        self, queries: Array, keys: Array, values: Array, there: list[list[int]], left: int
    ) -> list[list[int]]:
        own = [
            np.stack([x[i] for x, i in zip(part, there, strict=True)]) for part in (keys, values)
        ]
        formula = self.formula
        scores = formula.scores(queries, *own)
        chosen = [best(row, left, first=formula.first, last=formula.last) for row in scores]
        return [[tokens[i] for i in some] for tokens, some in zip(there, chosen, strict=True)]


class Watched(CompressedModel):
    """Keeps the logits that answers are chosen by, and the cache."""

    def __init__(self, path: str) -> None:
        super().__init__(load(path))
        self.logits: list[torch.Tensor] = []

    def _forward(self, tokens: Sequence[int], start: int, cache: Any) -> torch.Tensor:
        self.logits.append(super()._forward(tokens, start, cache))
        self.cache = cache
        return self.logits[-1]


def tokens(many: int, seed: int = 0) -> list[int]:
    """None stands twice: in the first layer both would have keys of the same length."""
    generator = torch.Generator().manual_seed(seed)
    return [BOS, *(3 + torch.randperm(VOCAB_SIZE - 3, generator=generator)[: many - 1]).tolist()]


def network(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()


def make(folder: Path, kind: str = "llama", **overrides: Any) -> str:
    """A model that never ends by itself."""
    return make_model(kind, folder, **({"eos_token_id": None} | overrides))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("model"))


def kept_in(cache: Any, full: Any, left: int) -> dict[int, list[list[int]]]:
    """The tokens whose keys and values the first `left` entries of a cache are."""
    found = {}
    for layer, (some, every) in enumerate(zip(cache.layers, full.layers, strict=True)):
        a = torch.cat((some.keys, some.values), -1)[0, :, :left]
        b = torch.cat((every.keys, every.values), -1)[0]
        distance = torch.cdist(a.double(), b.double())
        assert float(distance.amin(-1).max()) < 1e-4
        found[layer] = distance.argmin(-1).sort(-1).values.tolist()
    return found


def assert_pressed(path: str, name: str, setup: str, budget: int, interval: int | None) -> None:
    """Kept tokens, logits and answer are those of the formula."""
    formula, prompt = FORMULAS[name], tokens(CONTEXT + QUESTION, SEED)
    context = CONTEXT + (QUESTION if setup == "prompt" else 0)
    press = make_press(name, budget, formula.settings, interval)
    model = Watched(path)
    answer = model.answer(press, prompt[:context], prompt[context:], NEW)
    left = budget - len(prompt) + context
    oracle = Pressed(
        network(path),
        formula,
        context=context,
        left=left,
        begin=len(prompt),
        interval=interval,
        budget=budget,
    )
    expected = oracle.logits([*prompt, *answer.tokens[:-1]], 0)[len(prompt) - 1 :]
    assert answer.tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(torch.stack(model.logits[-NEW:]), expected, atol=1e-3, rtol=1e-3)
    if interval is None:
        full = DynamicCache()
        with torch.no_grad():
            pressed = network(path)
            given = {cache_argument(pressed): full}
            pressed(torch.tensor([prompt[:context]]), **given)
        assert kept_in(model.cache, full, left) == oracle.kept
        assert {len(one) for heads in oracle.kept.values() for one in heads} == {left}


@pytest.mark.parametrize("setup", ["prompt", "question"])
@pytest.mark.parametrize("name", FORMULAS)
def test_kept_tokens_follow_the_formula(path: str, name: str, setup: str) -> None:
    assert_pressed(path, name, setup, budget=24, interval=None)


@pytest.mark.parametrize("name", ["snapkv", "tova", "expected_attention"])
@pytest.mark.parametrize("kind", ["llama_mqa", "llama_mha", "qwen2", "qwen3", "phi3"])
def test_it_is_so_in_other_models(tmp_path: Path, kind: str, name: str) -> None:
    assert_pressed(make(tmp_path, kind), name, "question", budget=24, interval=None)


@pytest.mark.parametrize("setup", ["prompt", "question"])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("name", ["tova", "knorm", "keydiff"])
def test_it_is_so_while_decoding(path: str, name: str, interval: int, setup: str) -> None:
    assert_pressed(path, name, setup, budget=24, interval=interval)


def test_every_press_has_a_formula_here() -> None:
    assert set(presses()) == set(FORMULAS)


@pytest.mark.parametrize("setup", ["prompt", "question"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_budget_for_all_gives_what_generate_gives(path: str, name: str, setup: str) -> None:
    prompt = tokens(CONTEXT + QUESTION, seed=1)
    context = CONTEXT + (QUESTION if setup == "prompt" else 0)
    press = make_press(name, len(prompt), FORMULAS[name].settings)
    answer = Watched(path).answer(press, prompt[:context], prompt[context:], NEW)
    right = network(path).generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    assert answer.tokens == right[0, len(prompt) :].tolist()
    assert answer.read_shares == [1.0] * (NEW - 1)


def test_an_answer_ends_where_generate_ends(tmp_path: Path) -> None:
    prompt, press = tokens(20), make_press("knorm", 64)
    endless = Watched(make(tmp_path)).answer(press, prompt, [], 20).tokens
    ends = endless[5]
    found = Watched(make(tmp_path, eos_token_id=[EOS, ends])).answer(press, prompt, [], 20)
    assert found.tokens == endless[: endless.index(ends) + 1]


def test_the_budget_sets_the_number_of_kept_tokens() -> None:
    """Of kvpress's ratio a number is made in floating point: none may come out one less."""
    for length in [*range(2, 130), 1023, 1024, 4097, 65536, 131071]:
        for kept in {1, length // 3, length // 2, length - 1} - {0}:
            for question in (0, 5):
                press = make_press("knorm", kept + question)
                ratio = press.prefill(length, question).compression_ratio
                assert 0 < ratio < 1
                assert int(length * (1 - ratio)) == kept
        assert make_press("knorm", length + 5).prefill(length, 5) is None


def test_costs_are_those_of_the_steps(path: str) -> None:
    """4 layers, 2 KV heads of 8 numbers, float32: 512 bytes a token."""
    answer = Watched(path).answer(make_press("knorm", 20), tokens(50), [], 5)
    assert answer.bytes_read == [512 * (20 + step) for step in range(1, 5)]
    assert answer.read_shares == pytest.approx([(20 + step) / (50 + step) for step in range(1, 5)])
    # The last layer is there as a whole before it is pressed, the others are pressed by then.
    assert answer.peak_bytes == 128 * (3 * 20 + 50)
    assert len(answer.step_ms) == 4


@pytest.mark.parametrize("interval", [1, 3])
def test_an_interval_bounds_the_cache(path: str, interval: int) -> None:
    model = Watched(path)
    answer = model.answer(make_press("knorm", 20, interval=interval), tokens(50), [], 9)
    read = [20 + 1 + step % interval for step in range(8)]
    assert answer.bytes_read == [512 * many for many in read]


def test_answers_do_not_depend_on_earlier_ones(path: str) -> None:
    shared, prompt = Watched(path), tokens(40)
    for name in ("tova", "observed_attention", "knorm"):
        press = make_press(name, 16, interval=None if name[0] == "o" else 3)
        shared.answer(press, tokens(50, seed=5), tokens(4), NEW)
        alone = Watched(path).answer(press, prompt, [], NEW)
        assert shared.answer(press, prompt, [], NEW).tokens == alone.tokens


def test_keyhole_runs_after_importing_kvpress(path: str) -> None:
    """kvpress wraps every attention function there is, and gives it dropout by its place."""
    prompt = tokens(40)
    given = keyhole.LLM(path, policy="full").generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=NEW, temperature=0.0)
    )
    right = Watched(path).answer(make_press("knorm", 64), prompt, [], NEW)
    assert list(given.token_ids) == right.tokens
