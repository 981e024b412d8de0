"""Text that follows a grammar: JSON of random weights, and words of the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from keyhole import LLM, ConfigError, RequestError, SamplingParams
from tests.checkpoints import make_model

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Lima"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "size"],
        "additionalProperties": False,
    }
)
CITIES = 'start: "Oslo" " " ("Lima" | "Paris") (" and Rome")?'


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    return LLM(make_model("llama", folder, tokenizer=True, vocab_size=300), memory="8MiB")


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", memory="16MiB")


def params(schema: str, **more: object) -> SamplingParams:
    given = {"max_tokens": 60, "grammar": schema, "temperature": 1.0, **more}
    return SamplingParams(**given)  # type: ignore[arg-type]


def test_random_weights_write_json_of_a_schema(llm: LLM) -> None:
    seeds = [params(SCHEMA, seed=seed) for seed in range(6)]
    results = llm.generate(["x"] * 6, seeds)
    assert len({result.text for result in results}) > 1
    for result in results:
        said = json.loads(result.text)
        assert said["city"] in ("Oslo", "Lima")
        assert 0 <= said["size"] <= 99
        assert result.finish_reason == "stop"


def test_greedy_takes_the_best_token_that_is_allowed(llm: LLM) -> None:
    prompt = [5, 6, 7]
    result = llm.generate(prompt, params('start: "a" | "b" | "c"', temperature=0.0))
    sequence = llm.engine.add(prompt, SamplingParams(max_tokens=1), keep_logits=True)
    while not sequence.is_finished:
        llm.engine.step()
    choices = [llm.tokenizer(text, add_special_tokens=False).input_ids[0] for text in "abc"]
    best = max(choices, key=lambda token: float(sequence.logits[0][token]))
    assert result.token_ids == [best]


@pytest.mark.slow
def test_requests_beside_it_are_what_they_are_alone(llm: LLM) -> None:
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    alone = llm.generate("some text", free).token_ids
    schema = llm.generate("x", params(SCHEMA, seed=3)).token_ids
    found = llm.generate(["x", "some text", "x"], [params(SCHEMA, seed=3), free, params(CITIES)])
    assert found[0].token_ids == schema
    assert found[1].token_ids == alone
    assert found[2].text.startswith("Oslo ")


@pytest.mark.parametrize("seed", range(4))
def test_a_tokenizer_of_words_follows_a_grammar(tiny: LLM, seed: int) -> None:
    """Its tokens stand between spaces, which no token contains."""
    result = tiny.generate("Alma keeps", params(CITIES, seed=seed))
    allowed = {f"Oslo {city}{more}" for city in ("Lima", "Paris") for more in ("", " and Rome")}
    assert result.text in allowed


@pytest.mark.slow
def test_a_pre_empted_request_goes_on_in_its_grammar(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path, tokenizer=True, vocab_size=300)
    digits = "start: /[0-9]{40}/"
    roomy, tight = LLM(path, memory="8MiB", page_size=8), LLM(path, page_size=8, memory=2**16)
    wanted = [params(digits, seed=seed) for seed in range(3)]
    prompts = [[5 + i] * 40 for i in range(3)]
    expected = [result.text for result in roomy.generate(prompts, wanted)]
    pre_empted = 0
    schedule = tight.engine.scheduler.schedule

    def counted() -> object:
        nonlocal pre_empted
        plan = schedule()
        pre_empted += len(plan.preempted)
        return plan

    tight.engine.scheduler.schedule = counted  # type: ignore[method-assign, assignment]
    assert [result.text for result in tight.generate(prompts, wanted)] == expected
    assert pre_empted


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('{"type": "obj"}', "Invalid type: obj"),
        ('{"type": ', "not a JSON object"),
        ("start: missing", 'unknown name: "missing"'),
    ],
)
def test_a_grammar_that_is_none_is_refused(llm: LLM, grammar: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate("x", params(grammar))
    assert not llm.engine.has_work


def test_what_a_tokenizer_cannot_write_is_an_error_not_a_wrong_text(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="no token with which the grammar or JSON schema"):
        tiny.generate("Alma keeps", params(SCHEMA))
    with pytest.raises(RequestError, match="allows no token of this model after 4"):
        tiny.generate("Alma keeps", params('start: "Oslo" " zebra"'))
    assert not tiny.engine.has_work


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_that_leave_a_grammar_no_token_are_named(llm: LLM, temperature: float) -> None:
    """The error said that the grammar allowed no token of this model."""
    given = params('start: "a" ("b" | "c")', bad_words=["b", "c"], temperature=temperature)
    with pytest.raises(RequestError, match="bad_words forbid every token that the grammar allows"):
        llm.generate([5, 6, 7], given)
    # The least likely ones are taken where nothing else is allowed.
    ids = [llm.tokenizer(text, add_special_tokens=False).input_ids[0] for text in "bc"]
    unlikely = params(
        'start: "a" ("b" | "c")', logit_bias=dict.fromkeys(ids, -1e38), temperature=temperature
    )
    assert llm.generate([5, 6, 7], unlikely).text in ("ab", "ac")
    assert not llm.engine.has_work


def test_scores_of_a_model_that_leave_a_grammar_no_token_are_named(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    banned = llm.tokenizer("a", add_special_tokens=False).input_ids
    forward = llm.engine.model.network.lm_head.forward

    def masked(hidden: Tensor) -> Tensor:
        logits: Tensor = forward(hidden)
        logits[..., banned] = float("-inf")
        return logits

    monkeypatch.setattr(llm.engine.model.network.lm_head, "forward", masked)
    with pytest.raises(RequestError, match="the model's scores rule out every token"):
        llm.generate([5, 6, 7], params('start: "a"'))


def test_a_tokenizer_may_have_more_ids_than_the_model(tmp_path: Path) -> None:
    """A ValueError of llguidance: each id of the tokenizer was to be one of the model."""
    llm = LLM(make_model("llama", tmp_path, tokenizer=True, vocab_size=129), memory="8MiB")
    assert llm.tokenizer("aé", add_special_tokens=False).input_ids == [67, 130, 105]
    assert json.loads(llm.generate("x", params(SCHEMA, seed=1)).text)["city"] in ("Oslo", "Lima")
    with pytest.raises(RequestError, match="no token with which the grammar or JSON schema"):
        llm.generate("x", params('start: "é"'))
    with pytest.raises(RequestError, match="allows no token of this model after 3"):
        llm.generate("x", params('start: "aé"'))


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"grammar": " "}])
def test_settings_that_cannot_be_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="grammar"):
        params(SCHEMA, **more)


def test_without_the_package_the_error_names_the_extra(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyhole.grammar.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"keyhole\[serve\]"):
        llm.generate("x", params('start: "never compiled before"'))
