"""RoPE that changes with the length: each sequence as transformers computes it alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import keyhole
from keyhole import LLM, PromptTooLongError, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.models import families
from keyhole.models.loading import adopt
from tests.checkpoints import make_config, make_model, make_network

THRESHOLD = 32
#: Kind of checkpoint, and its RoPE.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0, 1.5, 2.0, 1.0],
                "long_factor": [4.0, 2.0, 3.0, 5.0],
            },
            "original_max_position_embeddings": THRESHOLD,
            "max_position_embeddings": 128,
        },
    ),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
            "max_position_embeddings": THRESHOLD,
        },
    ),
}
LONGEST = 128
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = MODELS[request.param]
    return Path(make_model(kind, tmp_path_factory.mktemp("rope"), tokenizer=True, **changes))


def alone(path: Path, tokens: list[int], length: int) -> Tensor:
    """Logits of transformers' eager model in one forward, whose frequencies are of `length`.

    Tokens up to that length follow, which earlier ones do not see.
    """
    network = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        filled = torch.tensor([[*tokens, *[7] * (length - len(tokens))]])
        return network.eval()(filled).logits[0, : len(tokens)]


def check(path: Path, sequences: Iterable[Sequence]) -> None:
    """Logits after the prompt and after each token, against those of the sequence alone."""
    for sequence in sequences:
        assert sequence.finish_reason == "length"
        length = min(sequence.token_limit, LONGEST)
        wanted = alone(path, sequence.tokens, length)[len(sequence.prompt) - 1 :]
        found = torch.stack(sequence.logits)
        # As a share of the largest logit, as `keyhole verify` judges.
        scale = float(wanted.abs().max().clamp(min=1))
        torch.testing.assert_close(found, wanted[: len(found)], atol=1e-5 * scale, rtol=0)


def run(engine: Engine) -> int:
    """Steps until nothing is left; returns how many sequences were pre-empted."""
    preempted, schedule = 0, engine.scheduler.schedule
    while engine.has_work:
        plan = schedule()
        preempted += len(plan.preempted)
        engine.scheduler.schedule = lambda plan=plan: plan  # type: ignore[method-assign, misc]
        engine.step()
        engine.check_integrity()
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    return preempted


def prompt(length: int) -> list[int]:
    return [3 + (5 * i * i + i) % 200 for i in range(length)]


def llm(path: Path, **settings: Any) -> LLM:
    fixed = {"device": "cpu", "dtype": "float32", "page_size": 8, "prefill_chunk": 13}
    return LLM(path, **(fixed | {"memory": "8MiB"} | settings))


@pytest.mark.slow
def test_short_and_long_requests_of_a_batch_are_as_each_alone(path: Path) -> None:
    """In chunks; one crosses the threshold while it generates, two have other lengths beyond."""
    engine = llm(path).engine
    sequences = [
        engine.add(prompt(length), replace(GREEDY, max_tokens=most), keep_logits=True)
        for length, most in ((9, 6), (50, 8), (28, 12), (70, 58), (26, 6))
    ]
    run(engine)
    check(path, sequences)


@pytest.mark.slow
def test_the_length_that_counts_has_room_for_all_tokens(path: Path) -> None:
    """A request without max_tokens may become as long as the model allows."""
    engine = llm(path).engine
    sequence = engine.add(prompt(5), GREEDY, keep_logits=True)
    run(engine)
    assert len(sequence.tokens) == LONGEST
    check(path, [sequence])


@pytest.mark.slow
def test_a_pre_empted_sequence_keeps_its_frequencies(path: Path) -> None:
    engine = llm(path, memory="28KiB", prefix_cache=False, max_batch=3).engine
    sequences = [
        engine.add(prompt(length), replace(GREEDY, max_tokens=most), keep_logits=True)
        for length, most in ((25, 30), (12, 14), (26, 30))
    ]
    assert run(engine) > 0
    check(path, sequences)


@pytest.mark.slow
def test_cached_prefixes_are_shared_by_equal_frequencies_only(path: Path) -> None:
    engine = llm(path).engine
    cached = []
    for most in (4, 40, 40, 4):  # up to the threshold, beyond it twice, up to it
        sequence = engine.add(prompt(25), replace(GREEDY, max_tokens=most), keep_logits=True)
        run(engine)
        check(path, [sequence])
        cached.append(sequence.num_cached)
    assert cached == [0, 0, 24, 24]


@pytest.mark.slow
def test_the_completions_of_a_prompt_share_it(path: Path) -> None:
    model = llm(path)
    params = SamplingParams(n=3, max_tokens=9, temperature=1.0, seed=3, ignore_eos=True)
    results = model.generate({"prompt_token_ids": prompt(30)}, params).completions
    assert max(result.stats.cached_prompt_tokens for result in results) >= 24
    for result in results:
        given = model.engine.add(
            prompt(30), replace(GREEDY, max_tokens=1), given=result.token_ids[:8], keep_logits=True
        )
        run(model.engine)
        check(path, [given])


@pytest.mark.slow
def test_proposed_tokens_have_the_frequencies_of_their_sequence(path: Path) -> None:
    engine = llm(path, draft="ngram").engine
    sequences = [
        engine.add([9, 8, 7, 6] * n, replace(GREEDY, max_tokens=most), keep_logits=True)
        for n, most in ((3, 12), (12, 60))  # long enough that the random model repeats itself
    ]
    run(engine)
    assert any(s.drafts is not None and s.drafts.accepted for s in sequences)
    check(path, sequences)


@pytest.mark.slow
def test_a_policy_that_shifts_keys_ends_at_the_threshold(path: Path) -> None:
    model = llm(path, policy="shadowkv")
    with pytest.raises(PromptTooLongError, match=r"'shadowkv' .* at most 31 .* RoPE rotates"):
        model.generate({"prompt_token_ids": prompt(THRESHOLD)}, GREEDY)
    ends = model.generate({"prompt_token_ids": prompt(20)}, replace(GREEDY, max_tokens=90))
    assert len(ends.token_ids) == THRESHOLD - 20
    # A request under another policy does not.
    longer = {"prompt_token_ids": prompt(THRESHOLD)}
    assert len(model.generate(longer, replace(GREEDY, max_tokens=3), policy="full").token_ids) == 3


def test_stored_documents_end_at_the_threshold(path: Path, tmp_path: Path) -> None:
    model = llm(path, documents=tmp_path)
    with pytest.raises(PromptTooLongError, match=r"'a' has 32 tokens.* at most 31 .*RoPE rotates"):
        model.documents.add("a", "x" * THRESHOLD)
    model.documents.add("a", "x" * 20)
    one = replace(GREEDY, max_tokens=1)
    with pytest.raises(PromptTooLongError, match=r"stored documents .* at most 31 .*RoPE rotates"):
        model.ask("y" * 15, ["a"], reuse="reuse", params=one)
    # Nothing is shifted where all is computed again.
    assert len(model.ask("y" * 15, ["a"], reuse="recompute", params=one).token_ids) == 1
    ends = model.ask("y" * 4, ["a"], reuse="reuse", params=replace(GREEDY, max_tokens=50))
    assert len(ends.prompt_token_ids) + len(ends.token_ids) == THRESHOLD


def test_the_network_itself_computes_as_transformers(path: Path) -> None:
    """Training and `verify` call it without the engine; another model is not changed."""
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ours = adopt(network, device="cpu").network
    ours.set_attn_implementation("eager")
    network.set_attn_implementation("eager")
    assert type(network.model.rotary_emb) is not type(ours.model.rotary_emb)
    with torch.no_grad():
        for length in (60, 9):
            ids = torch.tensor([prompt(length)])
            # Our norms and rotations round in another order; they differed by 2e-5.
            torch.testing.assert_close(ours(ids).logits, network(ids).logits, rtol=1e-4, atol=1e-4)


def test_inside_transformers_own_generate_the_limit_is_the_threshold(path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with keyhole.sparse(network), pytest.raises(PromptTooLongError, match="RoPE rotates"):
        network.generate(torch.tensor([prompt(THRESHOLD + 1)]), max_new_tokens=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", MODELS)
def test_frequencies_by_kinds_of_layers(kind: str, tmp_path: Path) -> None:
    """Gemma 3 has a RoPE for layers with a window, and another for the others."""
    changing = MODELS[kind][1]
    ropes = {
        "full_attention": changing["rope_parameters"] | {"original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = make_config(
        "gemma3", rope_parameters=ropes, max_position_embeddings=changing["max_position_embeddings"]
    )
    folder = tmp_path / "gemma3"
    make_network(config).save_pretrained(folder)
    engine = llm(folder).engine
    sequences = [
        engine.add(prompt(length), replace(GREEDY, max_tokens=5), keep_logits=True)
        for length in (9, 50, 61)
    ]
    run(engine)
    check(folder, sequences)


@pytest.mark.parametrize(
    ("rope", "longest", "lengths"),
    [
        ({"rope_type": "default"}, 100, None),
        ({"rope_type": "dynamic", "alpha": 1000.0}, 100, None),
        ({"rope_type": "dynamic", "factor": 2.5}, 250, {100: 0, 101: 101, 240: 240}),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 40},
            100,
            {40: 0, 41: 41, 99: 41},
        ),
    ],
    ids=["default", "alpha", "dynamic", "longrope"],
)
def test_what_a_config_says(
    rope: dict[str, Any], longest: int, lengths: dict[int, int] | None
) -> None:
    config = make_config("llama", max_position_embeddings=100)
    config.rope_parameters = rope | {"rope_theta": 1e4}
    found = families.rope_lengths(config)
    assert families.max_length(config, found)[0] == longest
    if lengths is None:
        assert found is None
    else:
        assert found is not None
        assert {length: found.effective(length) for length in lengths} == lengths
        assert families.max_length(config, None)[0] == found.threshold
