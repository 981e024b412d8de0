"""The sampler against its definition, one row at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from array import array
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from keyhole import LLM, AsyncLLM, ConfigError, Quest, RequestError, SamplingParams
from keyhole.config import EngineConfig
from keyhole.engine import sampler
from keyhole.engine.sampler import _change, sample
from keyhole.engine.sequence import Sequence
from keyhole.models.model import Model
from keyhole.policies import available_policies, make_policy
from keyhole.tokenization import Detokenizer

VOCAB = 23
DRAWS = 4000


def sequence(**settings: object) -> Sequence:
    params = SamplingParams(**settings).resolve({})
    return Sequence(array("i", [1, 2, 3]), params, Detokenizer(None))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 7, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.7},
    ],
)
def test_frequencies_are_those_of_the_filtered_distribution_of_transformers(settings: dict) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    steps = [
        RepetitionPenaltyLogitsProcessor(settings.get("repetition_penalty", 1.0)),
        TemperatureLogitsWarper(float(settings["temperature"])),
        TopKLogitsWarper(settings.get("top_k", VOCAB)),
        TopPLogitsWarper(settings.get("top_p", 1.0)),
        MinPLogitsWarper(settings.get("min_p", 0.0)),
    ]
    wanted = LogitsProcessorList(steps)(torch.tensor([[1, 2, 3]]), logits[None].clone())
    wanted = wanted.softmax(-1)[0]

    one = sequence(seed=5, **settings)
    drawn, _ = sample(logits.expand(DRAWS, -1), [one] * DRAWS)
    found = torch.bincount(drawn, minlength=VOCAB) / DRAWS
    assert (found[wanted == 0] == 0).all()
    # Four standard deviations of a binomial share.
    assert ((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / DRAWS).sqrt() + 1e-9).all()


def test_a_whole_number_is_a_penalty_too() -> None:
    """One above 2^63 ended the step, and with it all requests of the step."""
    logits, penalties = torch.randn(VOCAB), (10**30, 1e30)
    whole, same = (
        sample(logits[None], [sequence(repetition_penalty=x, seed=1)]) for x in penalties
    )
    assert torch.equal(whole[0], same[0])


def plain_scores(logits: torch.Tensor, one: Sequence) -> torch.Tensor:
    """What the settings make of a row of scores, token by token."""
    scores, params = logits.clone(), one.params
    for token in range(len(scores)):
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in one.tokens:
            factor = params.repetition_penalty
            scores[token] *= 1 / factor if scores[token] > 0 else factor
        count = one.tokens[len(one.prompt) :].count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        for *before, last in one.bad_ids:
            if token == last and one.tokens[len(one.tokens) - len(before) :].tolist() == before:
                scores[token] = float("-inf")
    return scores


CHANGES: list[dict] = [
    {},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"logit_bias": {3: 5.0, 7: -100.0}},
    {"repetition_penalty": 1.6, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"bad": [[4], [9, 5], [8, 8, 6]], "logit_bias": {4: 100.0, 5: 50.0}},
    {"bad": [[8, 9, 11]], "frequency_penalty": 1.5, "logit_bias": {8: 1.0}},
]


def test_bias_penalties_and_bad_words_are_those_of_a_plain_computation() -> None:
    logits = torch.randn(len(CHANGES), VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    rows = []
    for change in CHANGES:
        settings = {name: value for name, value in change.items() if name != "bad"}
        rows.append(sequence(temperature=0, **settings))
        rows[-1].bad_ids = change.get("bad", ())
        rows[-1].tokens.extend([8, 9, 8, 8, 9])
    before = logits.clone()
    wanted = torch.stack(list(map(plain_scores, logits, rows)))
    for i, row in enumerate(rows):
        row.changes_scores |= bool(row.bad_ids)
        assert row.changes_scores == (i > 0)
    changing = list(enumerate(rows))
    torch.testing.assert_close(_change(logits, changing), wanted)
    assert sample(logits, rows)[0].tolist() == wanted.argmax(-1).tolist()
    assert torch.equal(logits, before)  # others look at them afterwards


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_ends_before_min_tokens(model: Model, temperature: float) -> None:
    llm = LLM(model)
    eos = min(llm.engine.model.eos_token_ids)
    for ends, given in ((eos, {}), (7, {"stop_token_ids": (7,), "ignore_eos": True})):
        params = SamplingParams(
            max_tokens=9, temperature=temperature, seed=1, logit_bias={ends: 1e3}, **given
        )
        assert len(llm.generate("hello", params).token_ids) == 1
        for least in (2, 9):
            found = llm.generate("hello", dataclasses.replace(params, min_tokens=least))
            assert ends not in found.token_ids[:least]
            assert len(found.token_ids) == min(least + 1, 9)
            assert found.finish_reason == ("length" if least == 9 else "stop")
    # Those of an answer that was begun are not new.
    begun = llm.generate("hello", dataclasses.replace(params, min_tokens=2)).token_ids
    sequence = llm.engine.add(
        llm.tokenizer.encode("hello"), dataclasses.replace(params, min_tokens=2), given=begun[:1]
    )
    while llm.engine.has_work:
        llm.engine.step()
    assert sequence.num_generated == 4
    for wrong, why in (
        ({"min_tokens": -1}, "min_tokens -1 must be at least 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 must be at most max_tokens 4"),
        ({"min_tokens": 1, "grammar": 'start: "a"'}, "cannot be combined with a grammar"),
    ):
        with pytest.raises(ConfigError, match=why):
            SamplingParams(**wrong)


def test_bad_words_are_never_generated(model: Model) -> None:
    llm = LLM(model)
    free = SamplingParams(max_tokens=24, temperature=1.5, seed=3, ignore_eos=True)
    text = llm.generate("hello", free).text
    words = [text[4], text[9:11]]
    kept = llm.generate("hello", dataclasses.replace(free, bad_words=words))
    assert len(kept.token_ids) == 24
    assert all(word not in kept.text for word in words)
    with pytest.raises(RequestError, match="logit_bias: token id 300 is not one"):
        llm.generate("hello", SamplingParams(logit_bias={300: 1.0}))
    with pytest.raises(RequestError, match="stop_token_ids: token id 272 is not one"):
        llm.generate("hello", SamplingParams(stop_token_ids=(5, 272)))
    with pytest.raises(RequestError, match="logprobs 100000 must be at most 272"):
        llm.generate("hello", SamplingParams(logprobs=100000))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_everything_is_forbidden_nothing_is_generated(
    model: Model, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler took the first token, a forbidden one or not."""
    llm = LLM(model)
    forward, some = llm.engine.model.network.lm_head.forward, [0, 4]

    def masked(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(hidden)
        return torch.full_like(logits, float("-inf")).index_copy(
            -1, torch.tensor(some), logits[..., some]
        )

    monkeypatch.setattr(llm.engine.model.network.lm_head, "forward", masked)
    params = SamplingParams(max_tokens=9, temperature=temperature, ignore_eos=True)
    early = dataclasses.replace(params, stop_token_ids=some, min_tokens=2)
    with pytest.raises(RequestError, match="bad_words and min_tokens leave no token"):
        llm.generate("hello", early)
    assert not llm.engine.has_work
    one = dataclasses.replace(early, stop_token_ids=(4,), max_tokens=2)
    assert llm.generate("hello", one).token_ids == [0, 0]


def test_completions_share_their_prompt_and_have_seeds_in_a_row(model: Model) -> None:
    llm = LLM(model, page_size=8, max_batch=3)
    several = SamplingParams(n=4, max_tokens=9, temperature=1.0, seed=11, ignore_eos=True)
    prompt = "a prompt of several pages, which is computed only once"
    first, other = llm.generate([prompt, "another"], several)
    ids = [one.token_ids for one in first.completions]
    assert len(ids) == len(first.others) + 1 == 4
    assert len({tuple(one) for one in ids}) == 4
    full = len(first.prompt_token_ids) // 8 * 8
    assert [one.stats.cached_prompt_tokens for one in first.completions] == [0, full, full, full]
    for i, one in enumerate(first.completions):
        single = dataclasses.replace(several, n=1, seed=11 + i)
        assert llm.generate(prompt, single).token_ids == one.token_ids
    assert len(other.completions) == 4
    found = asyncio.run(AsyncLLM(LLM(model)).generate(prompt, several))
    assert [one.token_ids for one in found.completions] == ids
    chat = llm.chat([{"role": "user", "content": "hello"}], several)
    assert len(chat.completions) == 4
    with pytest.raises(RequestError, match="n 4 must be 1 here"):
        llm.stream(prompt, several)
    llm.engine.check_integrity()


def test_completions_go_on_when_the_first_one_is_gone(model: Model) -> None:
    llm = LLM(model, page_size=8, max_batch=2)
    first = llm.submit("a prompt", SamplingParams(max_tokens=5))
    second = llm.submit("a prompt", SamplingParams(max_tokens=5, ignore_eos=True), after=first)
    other = llm.submit("other", SamplingParams(max_tokens=5, ignore_eos=True))
    llm.engine.step()
    assert second.slot < 0 <= other.slot
    llm.engine.abort(first)
    while llm.engine.has_work:
        llm.engine.step()
    assert len(second.generated) == len(other.generated) == 5


def test_numbers_of_numpy_are_numbers() -> None:
    """`np.float32(0.5)` was refused as "must be at least 0"."""
    params = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.int32(4),
        stop_token_ids=(np.int64(7),),
        logit_bias={np.int64(3): np.float64(1.5)},
    )
    assert params == SamplingParams(
        max_tokens=3, temperature=0.5, top_k=4, stop_token_ids=(7,), logit_bias={3: 1.5}
    )
    assert json.loads(json.dumps(dataclasses.asdict(params))) is not None
    policy = Quest(token_budget=np.int64(64), full_layers=(np.int64(0),))
    assert json.dumps(dataclasses.asdict(policy)) == json.dumps(
        dataclasses.asdict(Quest(token_budget=64, full_layers=(0,)))
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quest(token_budget="64"), "token_budget '64' must be a whole number"),
        (lambda: Quest(token_budget=True), "token_budget True must be a whole number"),
        (lambda: SamplingParams(temperature="hot"), "temperature 'hot' must be a number"),
        (lambda: SamplingParams(ignore_eos="no"), "ignore_eos 'no' must be true or false"),
        (lambda: EngineConfig(prefix_cache="no"), "prefix_cache 'no' must be true or false"),
        (lambda: EngineConfig(max_batch=2.5), r"max_batch 2\.5 must be a whole number"),
    ],
)
def test_a_wrong_type_is_named_as_such(make: Callable[[], object], message: str) -> None:
    """`token_budget '64'` "must be at least 1"; `prefix_cache="no"` was on."""
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({"temperature": 10**400}, "a number"),
        ({"presence_penalty": -(10**400)}, "a number"),
        ({"n": 10**30}, "from 1 to 16,384"),
        ({"n": 0}, "from 1 to 16,384"),
    ],
)
def test_a_number_beyond_measure_is_refused(settings: dict[str, int], right: str) -> None:
    """One that no float holds ended in an OverflowError; `n` took all memory of the machine."""
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"{name} -?\d+ must be {right}"):
        SamplingParams(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [n for n, c in available_policies().items() if hasattr(c, "full_layers")]
)
def test_full_layers_beyond_the_depth_are_refused_at_start(name: str, model: Model) -> None:
    policy = make_policy(name, {"full_layers": (0, 99)})
    with pytest.raises(ConfigError, match=r"full_layers \(0, 99\) must be layers from 0 to 3"):
        LLM(model, policy)


@pytest.mark.parametrize(
    "settings", [{"temperature": 1e-38}, {"temperature": 1e-300}, {"top_p": 1e-50}, {"min_p": 1.0}]
)
def test_the_smallest_settings_leave_the_most_likely_token(settings: dict[str, float]) -> None:
    logits = 5 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    one = sequence(**{"temperature": 1.0} | settings)
    assert all(sample(logits, [one])[0][0] == logits.argmax() for _ in range(20))


@pytest.mark.parametrize("temperature", [1e38, 1e39, 1e300])
def test_the_largest_temperature_takes_no_excluded_token(temperature: float) -> None:
    """It was infinite in float32, and the scores of such tokens NaN, which is the largest."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[0, 5:] = float("-inf")
    one = sequence(temperature=temperature, seed=1)
    assert {int(sample(logits, [one])[0][0]) for _ in range(60)} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("top_k", [1, 5, VOCAB])
def test_the_largest_random_number_is_the_last_token_that_may_follow(top_k: int) -> None:
    """In float32 it is 1, beyond every token: the least likely one of all was taken."""

    class Largest:
        def random(self) -> float:
            return 1 - 2**-53

    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    one = sequence(temperature=1.0, top_k=top_k)
    one.random = Largest()  # type: ignore[assignment]
    ranks = logits[0].sort(descending=True).indices.tolist()
    assert ranks.index(int(sample(logits, [one])[0][0])) == top_k - 1


def test_temperature_zero_is_the_most_likely_token_also_beside_others() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [sequence(temperature=0), sequence(temperature=2.0, seed=1), sequence(temperature=0)]
    chosen, _ = sample(logits, rows)
    assert chosen[0] == logits[0].argmax()
    assert chosen[2] == logits[2].argmax()


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(model: Model) -> None:
    llm = LLM(model)
    params = SamplingParams(max_tokens=15, temperature=1.0, seed=11, ignore_eos=True)
    alone = llm.generate("hello", params)
    first, _, third = llm.generate(["hello", "something else", "hello"], params)
    assert alone.token_ids == first.token_ids == third.token_ids
    other = SamplingParams(max_tokens=15, temperature=1.0, seed=12, ignore_eos=True)
    assert llm.generate("hello", other).token_ids != alone.token_ids


def test_generation_config_is_the_default_and_params_win() -> None:
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    resolved = SamplingParams(top_p=0.5).resolve(defaults)
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.6, 0.5, 20)
    greedy = SamplingParams().resolve({"do_sample": False, "temperature": 0.6})
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"seed": -3},
        {"stop": ("",)},
        {"stop": ("a", "b\ud800")},
        {"stop": None},
        {"stop_token_ids": 5},
        {"stop_token_ids": (-1,)},
        {"logprobs": -1},
        {"n": 0},
        {"n": True},
        {"repetition_penalty": 1e308},
        {"repetition_penalty": 1e-320},
        {"presence_penalty": float("inf")},
        {"presence_penalty": 1e308},
        {"presence_penalty": -2.1},
        {"frequency_penalty": 2.1},
        {"frequency_penalty": None},
        {"logit_bias": [5]},
        {"logit_bias": {-1: 2.0}},
        {"logit_bias": {5: "much"}},
        {"logit_bias": {5: 1e39}},
        {"bad_words": ("",)},
        {"bad_words": ("\ud800",)},
        {"bad_words": 5},
    ],
)
def test_a_bad_sampling_setting_is_refused_by_name(settings: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SamplingParams(**settings)


@pytest.mark.parametrize("parts", [1, 4, 12])
def test_the_largest_score_of_a_row_is_that_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    monkeypatch.setattr(sampler, "_parts", lambda _: parts)
    logits = torch.randn(4, 48, generator=torch.Generator().manual_seed(0)).round()
    logits[2, 30], logits[3] = torch.nan, -torch.inf
    largest, first = sampler.best(logits)
    assert torch.equal(first, logits.argmax(-1))
    torch.testing.assert_close(largest, logits.amax(-1), equal_nan=True)
