"""With a draft everything is as without one: tokens, logits, ends, pages, prefixes, statistics."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole import (
    LLM,
    AsyncLLM,
    ConfigError,
    Delta,
    Full,
    Policy,
    Quest,
    SamplingParams,
    SpeContext,
    StreamingLLM,
    UnknownNameError,
    kernels,
)
from keyhole.engine import model_runner
from keyhole.engine.decode_inputs import DecodeInputs
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Result, Sequence
from keyhole.eval.policy_trace import Traced
from keyhole.models.model import Model
from tests.checkpoints import make_model
from tests.engine.pair import SMALL, Pair, model, models, small, zeros
from tests.engine.speculation.drafts import (
    COUNT,
    Erring,
    knowing,
    pages_by_digest,
    rows_of_steps,
    under_draft,
)
from tests.policies.models import VOCAB, prompt, with_head
from tests.policies.recording import PAGE, make_engine, run

__all__ = ["model", "models", "zeros"]

POLICIES = keyhole.available_policies()
EXACT = [name for name, cls in POLICIES.items() if cls.speculative is True]
#: A head of its own reads hidden states, which proposed tokens do not have.
PLAIN = [name for name in EXACT if name != "spe_context"]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
#: When each request comes, its prompt, and how many tokens it wants: prompts of several chunks
#: beside decoding requests, lengths around the budget, one that ends after its first token.
COMING = ((0, prompt(3), 40), (0, prompt(90), 31), (7, prompt(61), 1), (9, prompt(70, 1), 26))


def served(engine: Engine, coming: Any = COMING, **params: Any) -> list[Sequence]:
    """The requests at their end, kept with logits; integrity is checked after every step."""
    found, number = [], 0
    params = GREEDY | params
    while engine.has_work or number <= coming[-1][0]:
        for when, tokens, count in coming:
            if when == number:
                one = SamplingParams(max_tokens=count, **params)
                found.append(engine.add(tokens, one, keep_logits=True))
        engine.step()
        engine.check_integrity()
        for sequence in engine.scheduler.running:
            # No page is left for tokens that were rejected.
            assert len(sequence.pages) <= -(-len(sequence.tokens) // PAGE)
        number += 1
    return found


def drafted(model: Model, policy: Policy, **settings: Any) -> Engine:
    return make_engine(model, policy, draft="ngram", num_draft_tokens=COUNT, **settings)


def assert_same(found: list[Sequence], wanted: list[Sequence]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert one.finish_reason == other.finish_reason
        assert one.num_computed == other.num_computed
        logits = torch.stack(one.logits), torch.stack(other.logits)
        assert logits[0].shape == logits[1].shape
        assert (logits[0] - logits[1]).abs().max() <= 1e-4


def assert_drafted(found: list[Sequence]) -> None:
    """Some proposed tokens were right and some wrong."""
    counters = [sequence.drafts for sequence in found if sequence.drafts is not None]
    accepted = sum(one.accepted for one in counters)
    assert 0 < accepted < sum(one.proposed for one in counters)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gqa", "windows", "latent"])
@pytest.mark.parametrize("name", PLAIN)
def test_tokens_and_logits_are_those_without_a_draft(
    models: dict[str, Model], kind: str, name: str
) -> None:
    settings = {"prefill_chunk": 24, "max_batch": 4}
    policy = small(name)
    wanted = served(make_engine(models[kind], policy, **settings))
    found = served(knowing(drafted(models[kind], policy, **settings), wanted))
    assert_same(found, wanted)
    assert_drafted(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quest", "delta"])
def test_sixteen_bits_do_not_change_what_is_kept(tmp_path: Path, name: str) -> None:
    """Logits of a batch of another size differ by rounding; each token is that of its logits."""
    model = LLM(make_model("llama", tmp_path, vocab_size=VOCAB), dtype="bfloat16").engine.model
    engine = drafted(model, small(name))
    found = served(engine)
    for sequence in found:
        said = [int(logits.argmax()) for logits in sequence.logits]
        assert said == sequence.generated


@pytest.mark.parametrize(("kv_dtype", "unit"), [("int8", 1 / 127), ("fp8", 1 / 8)])
def test_pages_of_eight_bits_keep_nothing_of_rejected_tokens(
    model: Model, kv_dtype: str, unit: float
) -> None:
    """Steps of more rows sum in another order, which may round a stored number to the next one.

    Logits then differ by more than without 8 bits, so that a token may, too.
    """
    policy, settings = Quest(token_budget=512), {"kv_dtype": kv_dtype, "max_batch": 4}
    wanted = served(make_engine(model, policy, **settings))
    engine = knowing(drafted(model, policy, **settings), wanted)
    found = served(engine)
    assert_drafted(found)
    plain = make_engine(model, policy, **settings)
    for one in found:
        given = one.generated[:-1]
        again = plain.add(one.prompt, SamplingParams(max_tokens=1, **GREEDY), given=given)
        run(plain)
        assert again.finish_reason == "length"
    assert engine.prefix is not None
    assert plain.prefix is not None
    mine, theirs = pages_by_digest(engine.prefix), pages_by_digest(plain.prefix)
    assert mine.keys() == theirs.keys()
    pages, others = [*mine.values()], [theirs[digest] for digest in mine]
    for layer, data in enumerate(engine.cache.data):
        for part in ("keys", "values"):
            rows = kernels.dequantised(getattr(engine.cache, part)[layer][pages])
            right = kernels.dequantised(getattr(plain.cache, part)[layer][others])
            assert ((rows - right).abs() <= 1.1 * unit * right.abs().amax(-1, True)).all()
            if part == "keys":
                assert torch.equal(data["low"][pages], rows.amin(2))
                assert torch.equal(data["high"][pages], rows.amax(2))


@pytest.mark.slow
def test_ngram_proposes_what_a_text_repeats() -> None:
    text = "Alma keeps 17 . the old river falls . question : Alma keeps ? answer :"
    params = SamplingParams(max_tokens=40, **GREEDY)
    plain, llm = (LLM("tiny", Quest(token_budget=32), draft=draft) for draft in (None, "ngram"))
    wanted, found = (one.generate([text, f"{text} {text}"], params) for one in (plain, llm))
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert all(one.stats.accepted_length > 2 for one in found)


@pytest.mark.slow
def test_a_head_that_reads_only_tokens_can_select(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 1024}
    model = with_head(make_model("llama_group3", tmp_path, **fields), inputs="tokens")
    policy = SpeContext(**SMALL)
    wanted = served(make_engine(model, policy))
    found = served(knowing(drafted(model, policy), wanted))
    assert_same(found, wanted)
    assert_drafted(found)


SAMPLED = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 4},
    {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "seed": 5, "logprobs": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("params", SAMPLED, ids=str)
def test_a_seed_gives_the_tokens_that_it_gives_without_a_draft(
    model: Model, params: dict[str, Any]
) -> None:
    policy = Quest(**SMALL)
    wanted = served(make_engine(model, policy), **params)
    found = served(knowing(drafted(model, policy), wanted), **params)
    assert_same(found, wanted)
    assert_drafted(found)
    for one, other in zip(found, wanted, strict=True):
        for here, there in zip(one.logprobs, other.logprobs, strict=True):
            # Steps with drafts have other batch sizes, so products round differently in float32.
            assert here == pytest.approx(there, abs=1e-4)


@pytest.mark.slow
def test_running_out_of_pages_changes_nothing(model: Model) -> None:
    policy = Quest(**SMALL)
    coming = tuple((0, prompt(10 + 7 * i, i), 60) for i in range(5))
    wanted = served(make_engine(model, policy, max_batch=5), coming)
    page_bytes = make_engine(model, policy).cache.page_bytes
    tight = knowing(drafted(model, policy, max_batch=5, memory=34 * page_bytes), wanted, error=0.2)
    preempted = []
    schedule = tight.scheduler.schedule

    def counted() -> Any:
        plan = schedule()
        preempted.extend(plan.preempted)
        return plan

    tight.scheduler.schedule = counted  # type: ignore[method-assign]
    found = served(tight, coming)
    assert preempted
    assert_same(found, wanted)
    assert_drafted(found)


def test_a_request_may_fill_the_whole_memory(model: Model) -> None:
    """Proposed tokens take no page that the request itself could not have."""
    page_bytes = make_engine(model, Full()).cache.page_bytes
    coming = ((0, prompt(16), 5 * PAGE),)
    wanted = served(make_engine(model, Full(), prefix_cache=False), coming)
    full = drafted(model, Full(), memory=(4 + 5) * page_bytes, prefix_cache=False)
    found = served(knowing(full, wanted, error=0.0), coming)
    assert_same(found, wanted)
    assert found[0].stats().accepted_length == pytest.approx(19 / 4)  # 5 + 5 + 5 + 4


@pytest.mark.slow
def test_the_prefix_cache_has_accepted_tokens_only(model: Model) -> None:
    """The pages of the same texts, with the same keys, values and bounds, as without a draft."""
    policy = Quest(**SMALL)
    plain = make_engine(model, policy)
    wanted = served(plain)
    engine = knowing(drafted(model, policy), wanted)
    assert_drafted(served(engine))
    assert plain.prefix is not None
    assert engine.prefix is not None
    mine, theirs = (pages_by_digest(one.prefix) for one in (engine, plain))
    assert mine.keys() == theirs.keys()
    assert len(mine) > 40
    pages = [mine[digest] for digest in mine]
    others = [theirs[digest] for digest in mine]
    for one, other in zip(engine.cache._tensors(), plain.cache._tensors(), strict=True):
        assert (one[pages] - other[others]).abs().max() <= 1e-5
    for keys, data in zip(engine.cache.keys, engine.cache.data, strict=True):
        assert torch.equal(data["low"][pages], keys[pages].amin(2))
        assert torch.equal(data["high"][pages], keys[pages].amax(2))
    # A conversation that goes on finds its pages, and says what it says without a draft.
    longer = [(0, [*sequence.tokens, 5], 12) for sequence in wanted]
    again = [served(one, longer) for one in (engine, plain)]
    assert [s.num_cached for s in again[0]] == [s.num_cached for s in again[1]]
    assert max(s.num_cached for s in again[0]) > 80
    assert_same(*again)


@pytest.mark.slow
def test_a_page_of_several_rows_is_listed_with_all_of_its_tokens(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads update the bounds of a page in any order: each must see the same tokens."""
    made: list[DecodeInputs] = []
    real = model_runner.inputs_of

    def kept(*given: Any) -> DecodeInputs:
        made.append(real(*given))
        return made[-1]

    wanted = served(make_engine(model, Full()))
    monkeypatch.setattr(model_runner, "inputs_of", kept)
    served(knowing(drafted(model, Full()), wanted))
    shared = 0
    for inputs in made:
        written = inputs.written
        for page in set(written["touched"].tolist()):
            rows = written["touched"] == page
            places = written["slots"][rows] - page * PAGE
            assert set(written["filled"][rows].tolist()) == {int(places.max()) + 1}
            shared += len(places) > 1
    assert shared > 20


def test_an_aborted_request_frees_the_pages_of_its_draft(model: Model) -> None:
    engine = drafted(model, Full(), prefix_cache=False)
    params = SamplingParams(max_tokens=60, **GREEDY)
    sequence = engine.add([7, 8] * 9, params)
    while len(sequence.generated) < 9:
        engine.step()
    engine.abort(sequence)
    engine.check_integrity()
    assert engine.cache.in_use == 0
    assert sequence.finish_reason == "abort"


@pytest.mark.slow
def test_a_failed_step_leaves_pages_that_the_next_one_uses(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = ((0, prompt(15), 40),)
    wanted = served(make_engine(model, Full()), coming)
    engine = knowing(drafted(model, Full()), wanted, error=0.2)
    forward, calls = engine.model.forward, []

    def failing(*given: Any) -> torch.Tensor:
        calls.append(len(given[0]))
        if len(calls) in (4, 9, 13):
            raise KeyboardInterrupt
        return forward(*given)

    monkeypatch.setattr(engine.model, "forward", failing)
    one = engine.add(coming[0][1], SamplingParams(max_tokens=40, **GREEDY), keep_logits=True)
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            failures += 1
        engine.check_integrity()
    assert failures == 3
    assert_same([one], wanted)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("text"), tokenizer=True)


def texts(llm: LLM, params: SamplingParams) -> list[Result]:
    return llm.generate(["a river", "ab ab ab ab ab", "nothing, but everything else"], params)


#: What ends a request among tokens that were proposed and would have been accepted.
ENDS: list[dict[str, Any]] = [
    *({"max_tokens": count} for count in (1, 2, 3, 6, 7, 11)),
    {"stop": "second"},
    {"stop_token_ids": "third"},
    {"eos": "third"},
    {"bad_words": "fourth"},
    {"stop_token_ids": "third", "min_tokens": 12},
]


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS, ids=str)
def test_a_request_ends_where_it_ends_without_a_draft(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, end: dict[str, Any]
) -> None:
    llms = [
        LLM(checkpoint, page_size=8, draft=draft, num_draft_tokens=COUNT)
        for draft in (None, "ngram")
    ]
    plain = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    whole = texts(llms[0], plain)
    named = {"second": 7, "third": 8, "fourth": 6}
    found = whole[0].token_ids
    given: dict[str, Any] = dict(end)
    if "stop" in end:
        place = named[end["stop"]]
        tokenizer = llms[0].tokenizer
        given = {"stop": tokenizer.decode(found[place : place + 2])}
        assert given["stop"].strip()
    elif "stop_token_ids" in end:
        given |= {"stop_token_ids": (found[named[end["stop_token_ids"]]],)}
    elif "eos" in end:
        given = {"ignore_eos": False}
        for llm in llms:
            eos = {found[named[end["eos"]]]}
            model = dataclasses.replace(llm.engine.model, eos_token_ids=eos)
            monkeypatch.setattr(llm.engine, "model", model)
            monkeypatch.setattr(llm.engine._verifier, "_eos_token_ids", eos)
    elif "bad_words" in end:
        given = {"bad_words": (llms[0].tokenizer.decode([found[named[end["bad_words"]]]]),)}
    params = dataclasses.replace(plain, **given)
    wanted = texts(llms[0], params)
    # The draft goes on after the end.
    known = [one.prompt_token_ids + one.token_ids for one in (*wanted, *whole)]
    under_draft(llms[1].engine, Erring(known, llms[1].engine.model.vocab_size, error=0.0))
    made = texts(llms[1], params)
    for one, other in zip(made, wanted, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (
            other.text,
            other.token_ids,
            other.finish_reason,
        )
    assert llms[1].engine.cache.in_use == len(llms[1].engine.prefix.held())


@pytest.mark.slow
def test_text_comes_in_pieces_of_accepted_tokens(checkpoint: Path) -> None:
    plain, llm = (LLM(checkpoint, page_size=8, draft=draft) for draft in (None, "ngram"))
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2)
    wanted = plain.generate("ab ab ab", params)
    pieces = list(llm.stream("ab ab ab", params))
    assert "".join(piece.text for piece in pieces) == wanted.text
    assert [t for piece in pieces for t in piece.token_ids] == wanted.token_ids
    assert max(len(piece.token_ids) for piece in pieces) > 1
    assert all(len(piece.logprobs or ()) == len(piece.token_ids) for piece in pieces)
    assert len(pieces[-1].result.token_times) == 40


@pytest.mark.slow
def test_coroutines_get_the_text_without_a_draft(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=2, ignore_eos=True)
    prompts = ["ab ab ab", "a river and a river"]
    wanted = LLM(checkpoint, page_size=8).generate(prompts, params)

    async def asked() -> list[Result]:
        llm = AsyncLLM(LLM(checkpoint, page_size=8, draft="ngram"))
        return await asyncio.gather(*(llm.generate(prompt, params) for prompt in prompts))

    for one, other in zip(asyncio.run(asked()), wanted, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert one.stats.accepted_length is not None


@pytest.mark.slow
def test_a_grammar_holds(checkpoint: Path) -> None:
    pytest.importorskip("llguidance", reason="grammars need an extra, keyhole[serve]")
    lark = 'start: "ab" ("ab" | "ba")~8 "c"'
    plain, llm = (LLM(checkpoint, page_size=8, draft=draft) for draft in (None, "ngram"))
    for seed in range(3):
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=seed, grammar=lark)
        wanted, found = (one.generate("abababab", params) for one in (plain, llm))
        assert found.text == wanted.text
        assert found.text.endswith("c")
        assert found.finish_reason == wanted.finish_reason


def test_given_tokens_and_traced_requests_take_one_token_at_a_time(model: Model) -> None:
    engine = drafted(model, Quest(**SMALL))
    rows = rows_of_steps(engine)
    params = SamplingParams(max_tokens=1, **GREEDY)
    engine.add(prompt(40), params, given=[5] * 9)
    run(engine)
    traced = engine.add([7, 8] * 15, SamplingParams(max_tokens=20, trace=True, **GREEDY))
    run(engine)
    assert not any(rows)
    assert traced.reads is not None
    assert len(traced.reads) == 20
    plain = make_engine(model, Quest(**SMALL))
    other = plain.add([7, 8] * 15, SamplingParams(max_tokens=20, trace=True, **GREEDY))
    run(plain)
    assert other.reads is not None
    for one, two in zip(traced.reads, other.reads, strict=True):
        assert one.layers == two.layers


@pytest.mark.slow
def test_documents_of_which_layers_dropped_tokens(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path, vocab_size=VOCAB, max_position_embeddings=1024)
    answers = []
    for draft in (None, "ngram"):
        llm = LLM(path, Quest(**SMALL), page_size=PAGE, draft=draft, documents=tmp_path / "store")
        if draft is None:
            for seed, name in enumerate("ab"):
                llm.documents.add(name, {"prompt_token_ids": prompt(90, seed)}, block_size=8)
        answers.append(
            llm.ask(
                {"prompt_token_ids": prompt(7, 5)},
                ["a", "b"],
                reuse="sam_kv:block_size=8",
                params=SamplingParams(max_tokens=40, **GREEDY),
            )
        )
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].stats.accepted_length > 1
    assert answers[1].stats.sequence_ratio < 1


#: As `Pair` makes its prompts.
RECORDED = ((0, prompt(3, 0), 50), (5, prompt(60, 1), 40))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "quest", "delta"])
def test_recorded_steps_are_repeated_with_drafts(
    monkeypatch: pytest.MonkeyPatch, model: Model, name: str
) -> None:
    """As in tests/engine/test_cuda_graph_runner.py, up to rounding: more rows are padding."""
    pair = Pair(monkeypatch, model, small(name), draft="ngram", num_draft_tokens=COUNT)
    plain = served(make_engine(model, small(name)), RECORDED)
    texts = [one.tokens.tolist() for one in plain]
    for engine in (pair.plain, pair.engine):
        under_draft(engine, Erring(texts, VOCAB))
    pair.run([(when, len(tokens), count) for when, tokens, count in RECORDED], within=1e-5)
    assert pair.recorder.repeated > 20
    counters = [request.drafts for _, request in pair.requests]
    assert sum(one.accepted for one in counters) > 20


REFUSED = [name for name in POLICIES if name not in PLAIN]


@pytest.mark.parametrize("name", REFUSED)
def test_policies_that_cannot_check_proposed_tokens_are_refused(model: Model, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"draft= cannot be used with policy '{name}': it"):
        drafted(model, small(name))
    with pytest.raises(ConfigError, match=rf"policy '{name}'"):
        drafted(model, Full()).under(small(name))


def test_other_refusals(model: Model, tmp_path: Path) -> None:
    assert "raas" in REFUSED
    assert "spe_context" in REFUSED
    folder = tmp_path / "head"
    fields = {"num_hidden_layers": 4, "vocab_size": VOCAB}
    headed = with_head(make_model("llama", folder, **fields), inputs="tokens")
    with pytest.raises(ConfigError, match="'spe_context': with these settings it keeps data"):
        drafted(headed, SpeContext(token_budget=20, refresh_every=4))
    with pytest.raises(ConfigError, match="'quest': its observer"):
        drafted(model, Traced(Quest(**SMALL)))
    with pytest.raises(UnknownNameError, match="unknown draft 'ngrams'; did you mean 'ngram'"):
        LLM(model, draft="ngrams")
    for name in ("", "eagle3:", "ngram:folder"):
        with pytest.raises(UnknownNameError, match=f"unknown draft '{name}'"):
            LLM(model, draft=name)
    with pytest.raises(ConfigError, match="num_draft_tokens 0 must be at least 1"):
        LLM(model, draft="ngram", num_draft_tokens=0)
    with pytest.raises(ConfigError, match="draft 'ngram' cannot be used with offload="):
        LLM(model, Delta(**SMALL), draft="ngram", offload=str(tmp_path), memory="1MiB")


def test_requests_of_several_policies_draft_side_by_side(model: Model) -> None:
    """Each policy of a step has its own part of the drafts."""
    policies = [Quest(**SMALL), StreamingLLM(**SMALL)]
    found = []
    for engine in (make_engine(model, policies[0]), drafted(model, policies[0])):
        unders = [None, engine.under(policies[1])]
        params = SamplingParams(max_tokens=30, **GREEDY)
        made = [
            engine.add([7, 8, 9] * (8 + 3 * i), params, under=under, keep_logits=True)
            for i, under in enumerate(unders)
        ]
        run(engine)
        found.append(made)
    assert_same(found[1], found[0])
    assert_drafted(found[1])


def test_statistics_count_steps_and_proposed_tokens(model: Model) -> None:
    coming = ((0, prompt(20), 21),)
    wanted = served(make_engine(model, Full()), coming)
    assert wanted[0].stats().accepted_length is None
    assert wanted[0].stats().acceptance_rate is None
    text = list(wanted[0].tokens)
    text[20 + 8] = (text[20 + 8] + 1) % VOCAB  # the fourth of the second step's five
    engine = drafted(model, Full())

    class Known(Erring):
        def propose(self, sequence: Sequence, most: int) -> list[int]:
            place = len(sequence.tokens)
            return text[place : place + most]

    found = served(under_draft(engine, Known([], VOCAB)), coming)
    assert_same(found, wanted)
    counters = found[0].drafts
    assert counters is not None
    # After the prompt's token: 5 tokens, 3 (the third one corrected), 5, 5 and the last 2.
    assert (counters.steps, counters.generated) == (5, 20)
    assert (counters.proposed, counters.accepted) == (4 + 4 + 4 + 4 + 1, 4 + 2 + 4 + 4 + 1)
    stats = found[0].stats()
    assert stats.accepted_length == 4.0
    assert stats.acceptance_rate == pytest.approx(15 / 17)
    assert len(found[0].step_ms) == 5
