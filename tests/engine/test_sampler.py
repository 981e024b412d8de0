"""The sampler against its definition, one row at a time."""

from __future__ import annotations

from pathlib import Path

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

from keyhole import LLM, ConfigError, SamplingParams
from keyhole.engine.detokenizer import Detokenizer
from keyhole.engine.sampler import sample
from keyhole.engine.sequence import Sequence

VOCAB = 23
DRAWS = 4000


def sequence(**settings: object) -> Sequence:
    params = SamplingParams(**settings).resolve({})
    return Sequence([1, 2, 3], params, Detokenizer(None))


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
    drawn = sample(logits.expand(DRAWS, -1), [one] * DRAWS)
    found = torch.bincount(drawn, minlength=VOCAB) / DRAWS
    assert (found[wanted == 0] == 0).all()
    # Four standard deviations of a binomial share.
    assert ((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / DRAWS).sqrt() + 1e-9).all()


def test_temperature_zero_is_the_most_likely_token_also_beside_others() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [sequence(temperature=0), sequence(temperature=2.0, seed=1), sequence(temperature=0)]
    chosen = sample(logits, rows)
    assert chosen[0] == logits[0].argmax()
    assert chosen[2] == logits[2].argmax()


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(checkpoint: Path) -> None:
    llm = LLM(checkpoint, device="cpu")
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
        {"stop": None},
        {"stop_token_ids": 5},
        {"stop_token_ids": (-1,)},
        {"logprobs": -1},
    ],
)
def test_a_bad_sampling_setting_is_refused_by_name(settings: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SamplingParams(**settings)
