"""What a user of `LLM` sees: results, streams, chats, statistics, errors."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keyhole import (
    LLM,
    CapacityError,
    ConfigError,
    Delta,
    PromptTooLongError,
    Quest,
    RequestError,
    SamKV,
    SamplingParams,
    UnknownNameError,
)
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.models.model import Model
from tests.checkpoints import make_model

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def test_one_prompt_gives_one_result_and_a_list_gives_a_list(llm: LLM) -> None:
    alone = llm.generate("hello", GREEDY)
    several = llm.generate(["hello", "a longer prompt than that"], GREEDY)
    assert several[0].token_ids == alone.token_ids
    assert [len(result.token_ids) for result in several] == [20, 20]
    assert llm.generate([], GREEDY) == []


def test_token_ids_stand_for_text(llm: LLM) -> None:
    ids = llm.generate("hello", GREEDY).prompt_token_ids
    assert (
        llm.generate({"prompt_token_ids": ids}, GREEDY).text == llm.generate("hello", GREEDY).text
    )


def test_prompts_come_in_every_form_and_mixed(llm: LLM) -> None:
    ids = llm.generate("hello", GREEDY).prompt_token_ids
    wanted = llm.generate("hello", GREEDY).token_ids
    assert llm.generate(ids, GREEDY).token_ids == wanted
    assert llm.generate(np.array(ids).tolist(), GREEDY).token_ids == wanted
    assert llm.generate([np.int64(token) for token in ids], GREEDY).token_ids == wanted
    mixed = ["hello", ids, tuple(ids), {"prompt_token_ids": ids}]
    assert [result.token_ids for result in llm.generate(mixed, GREEDY)] == [wanted] * 4
    assert [result.token_ids for result in llm.generate(iter([ids, ids]), GREEDY)] == [wanted] * 2
    assert [*llm.stream(ids, GREEDY)][-1].result.token_ids == wanted  # type: ignore[union-attr]


def test_settings_are_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (2, 5)]
    assert [len(one.token_ids) for one in llm.generate(["a", "b"], each)] == [2, 5]
    with pytest.raises(ConfigError, match="params has 2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], each)
    with pytest.raises(ConfigError, match="SamplingParams, not str"):
        llm.generate(["a", "b"], [each[0], "greedy"])  # type: ignore[list-item]


def test_more_prompts_than_places_all_run(model: Model) -> None:
    small = LLM(model, max_batch=2)
    prompts = [f"prompt number {i} " * (i + 1) for i in range(7)]
    wanted = [small.generate(prompt, GREEDY).token_ids for prompt in prompts]
    assert [result.token_ids for result in small.generate(prompts, GREEDY)] == wanted
    small.engine.check_integrity()


def test_streamed_pieces_make_the_result(llm: LLM) -> None:
    pieces = list(llm.stream("hello", GREEDY))
    result = pieces[-1].result
    assert result is not None
    assert "".join(piece.text for piece in pieces) == result.text
    assert list(itertools.chain(*(piece.token_ids for piece in pieces))) == result.token_ids
    assert result.token_ids == llm.generate("hello", GREEDY).token_ids


def test_leaving_a_stream_early_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_a_stream_that_nobody_reads_leaves_nothing(llm: LLM) -> None:
    """Its request stayed in the queue, and was computed to its end beside the next one."""
    stream = llm.stream("hello", GREEDY)
    assert llm.engine.has_work
    del stream
    assert not llm.engine.has_work
    llm.engine.check_integrity()


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_is_collected_during_a_step_ends_after_it(llm: LLM, *, begun: bool) -> None:
    """Its pages were freed in the middle of the step."""
    stream = llm.stream("hello", GREEDY)
    if begun:
        next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)  # so that only the garbage collector finds it
    del stream
    with llm.engine.lock:  # as in a step
        del cycle
        gc.collect()
        assert llm.engine.has_work
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_two_streams_run_side_by_side(llm: LLM) -> None:
    wanted = [llm.generate(prompt, GREEDY).text for prompt in ("hello", "goodbye then")]
    streams = [llm.stream("hello", GREEDY), llm.stream("goodbye then", GREEDY)]
    texts = ["", ""]
    for pieces in itertools.zip_longest(*streams):
        for i, piece in enumerate(pieces):
            texts[i] += piece.text if piece else ""
    assert texts == wanted


def test_an_interrupt_frees_every_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.engine.step, itertools.count()

    def interrupted() -> object:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "goodbye"], GREEDY)
    monkeypatch.undo()
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_a_stop_text_ends_before_itself_and_is_never_streamed(llm: LLM) -> None:
    text = llm.generate("hello", GREEDY).text
    stop = text[6:9]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop=(stop, "never"))
    pieces = list(llm.stream("hello", params))
    result = pieces[-1].result
    assert result is not None
    assert result.finish_reason == "stop"
    assert result.text == text[: text.index(stop)]
    assert "".join(piece.text for piece in pieces) == result.text


def test_stop_ids_and_eos_end_a_request(llm: LLM) -> None:
    ids = llm.generate("hello", GREEDY).token_ids
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=(ids[4],))
    result = llm.generate("hello", params)
    assert result.token_ids == ids[: ids.index(ids[4]) + 1]
    assert result.finish_reason == "stop"


def test_the_length_of_the_model_ends_a_request(model: Model) -> None:
    short = LLM(model, max_length=30)
    result = short.generate({"prompt_token_ids": [5] * 20}, SamplingParams(ignore_eos=True))
    assert (result.finish_reason, len(result.token_ids)) == ("length", 10)


def test_logprobs_hold_the_best_and_the_chosen_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.5, seed=3, logprobs=2, ignore_eos=True)
    result = llm.generate("hello", params)
    assert result.logprobs is not None
    for token, table in zip(result.token_ids, result.logprobs, strict=True):
        assert token in table
        assert len(table) in (2, 3)
        assert table[token] <= max(table.values()) <= 0
    assert llm.generate("hello", GREEDY).logprobs is None


def test_a_chat_uses_the_template_of_the_model(llm: LLM) -> None:
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "this"}]
    result = llm.chat([*messages, {"role": "user", "content": "more"}], GREEDY)
    text = llm.tokenizer.decode(result.prompt_token_ids)
    assert text == "[user]what?\n[assistant]this\n[user]more\n[assistant]"
    pieces = list(llm.stream_chat([*messages, {"role": "user", "content": "more"}], GREEDY))
    assert "".join(piece.text for piece in pieces) == result.text


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], ["hello"]])
def test_a_bad_conversation_is_refused(llm: LLM, messages: list) -> None:
    with pytest.raises(RequestError, match=r"conversation is empty|a message must"):
        llm.chat(messages)


@pytest.mark.parametrize(
    "messages",
    [5, True, None, torch.tensor(5), np.array([1, 2]), torch.empty(0), "hello", iter([])],
)
def test_what_is_no_conversation_is_one_line(llm: LLM, messages: Any) -> None:
    """`chat(5)` ended in a TypeError, and so did an array of one number."""
    with pytest.raises(RequestError, match=r"the conversation is \w+|a message must have"):
        llm.chat(messages)


@pytest.mark.parametrize("settings", [5, "enable_thinking", {5: True}])
def test_settings_of_a_template_are_a_dict(llm: LLM, settings: Any) -> None:
    """A number ended in an AttributeError."""
    with pytest.raises(RequestError, match=r"chat_template_kwargs .* must be a dict of what"):
        llm.chat([{"role": "user", "content": "what?"}], chat_template_kwargs=settings)


def test_what_a_sparse_policy_generated_is_kept_for_those_who_ask_only(model: Model) -> None:
    def engine() -> Engine:
        return LLM(model, Quest(token_budget=16), page_size=8).engine

    def run(engine: Engine, prompt: list[int], reuse: bool) -> Sequence:
        sequence = engine.add(prompt, GREEDY, reuse_approximate=reuse)
        while engine.has_work:
            engine.step()
        engine.check_integrity()
        return sequence

    used = engine()
    first = run(used, [7, 9] * 15, False)
    longer = [*first.tokens, 8, 8, 8]
    kept = run(used, longer, True)
    plain = run(used, longer, False)
    assert kept.num_cached == 48  # 30 of the prompt, then generated ones
    assert plain.num_cached == 24
    assert plain.generated == run(engine(), longer, False).generated
    # What was computed on top of approximate pages is approximate too.
    even_longer = [*kept.tokens, 8]
    assert run(used, even_longer, False).num_cached <= len(longer)
    assert run(engine(), even_longer, False).generated == run(used, even_longer, False).generated


def test_stats_of_a_dense_run(model: Model) -> None:
    llm = LLM(model, page_size=8)
    stats = llm.generate({"prompt_token_ids": [5] * 20}, GREEDY).stats
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (20, 0, 20)
    # The first token comes from the prompt; 19 decode steps read 21 .. 39 tokens, each of them
    # 4 layers x 2 heads x (8 + 8) numbers of 4 bytes.
    assert stats.kv_bytes_read == sum(range(21, 40)) * 4 * 2 * 16 * 4
    assert stats.attended_fraction == pytest.approx(1.0)
    assert stats.other_bytes_read == 0
    assert stats.moved_bytes is None
    again = llm.generate({"prompt_token_ids": [5] * 20}, GREEDY).stats
    assert again.cached_prompt_tokens == 16


def test_stats_of_a_sparse_run(model: Model) -> None:
    policy = Quest(token_budget=16, full_layers=(0, 1))
    llm = LLM(model, policy, page_size=8)
    stats = llm.generate({"prompt_token_ids": [5] * 33}, GREEDY).stats
    lengths = range(34, 53)
    # Two pages, of which the newest is partly filled.
    sparse = [8 + (n - 1) % 8 + 1 for n in lengths]
    token_bytes = 2 * 16 * 4
    assert stats.kv_bytes_read == 2 * token_bytes * (sum(lengths) + sum(sparse))
    fractions = [(1 + s / n) / 2 for s, n in zip(sparse, lengths, strict=True)]
    assert stats.attended_fraction == pytest.approx(sum(fractions) / len(fractions))
    # Two bounds of 2 heads x 8 numbers per page in two sparse layers.
    assert stats.other_bytes_read == sum(-(-n // 8) * 2 * 2 * 2 * 8 * 4 for n in lengths)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [5, 9999]}, "9999"),
        ({"prompt_token_ids": [-1]}, "-1"),
        ({"token_ids": [1]}, "prompt_token_ids"),
        (7, "a prompt must be text, a list of token ids, .* not int"),
        (None, "a prompt must be text, .* not None"),
        (b"text", "not bytes"),
        ([], "empty"),
        ([5, "six"], "token id 'six' of a prompt must be a whole number"),
        ({"prompt_token_ids": [2.5]}, "token id 2.5"),
        ({"prompt_token_ids": "text"}, "token id 't'"),
        ({"prompt_token_ids": None}, "not None"),
        ("half \ud83d", r"a lone surrogate, '\\ud83d', at position 5"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(["fine", prompt])  # type: ignore[list-item]
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "prompts", [None, 7, b"text", "half \ud83d", [[5], None], torch.tensor(5), np.array(5)]
)
def test_what_is_no_prompt_is_one_line(llm: LLM, prompts: object) -> None:
    """`generate(None)` and half a character ended in tracebacks of other libraries."""
    with pytest.raises(RequestError) as found:
        llm.generate(prompts)  # type: ignore[call-overload]
    assert "\n" not in str(found.value)


def test_a_prompt_longer_than_the_model_is_refused_with_the_numbers(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"512 tokens.* at most 511"):
        llm.generate({"prompt_token_ids": [5] * 512})


def test_a_request_beyond_the_memory_limit_is_refused_with_what_helps(model: Model) -> None:
    """A limit of some KiB was shown as 0.0 MiB."""
    llm = LLM(model, memory="64KiB")
    right = r"the limit is \d+\.\d KiB; raise memory=.* or lower max_tokens"
    with pytest.raises(CapacityError, match=right):
        llm.generate({"prompt_token_ids": [5] * 100}, SamplingParams(max_tokens=100))
    assert llm.generate("hello", GREEDY).finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": "2 gigs"}, "2 gigs"),
        ({"memory": 10}, "has no room for a page"),
        ({"max_batch": 0}, "max_batch 0"),
        ({"page_size": 0}, "page_size 0"),
        ({"prefill_chunk": -1}, "prefill_chunk -1"),
        ({"max_length": 10**6}, "max_length 1000000"),
        ({"max_length": 1}, "max_length 1 must be at least 2"),
        ({"offload": ""}, "offload '' must be a folder"),
        ({"prefix_store": ""}, "prefix_store '' must be a folder"),
        ({"prefix_cache": ""}, "prefix_cache '' must be True, False or a folder"),
        ({"prefix_cache": 0}, "prefix_cache 0 must be True, False or a folder"),  # folder "0"
        ({"prefix_store": 3}, "prefix_store 3 must be a folder"),
        ({"documents": ""}, "documents '' must be a folder or a URL"),
        ({"documents": 3}, "documents 3 must be a folder or a URL"),
        ({"policy": "delt"}, "did you mean 'delta'"),
        ({"policy": Delta(token_budget=4)}, "token_budget 4"),
        ({"policy": Delta(token_budget=32, recent_pages=9)}, "recent_pages 9"),
        ({"policy": Delta(token_budget=32, delta_layers=(9,))}, "delta_layers"),
        ({"policy": Delta(token_budget=32, delta_layers=3)}, "delta_layers 3"),
        ({"policy": Quest(token_budget=32, full_layers=3)}, "full_layers 3"),
        ({"policy": Quest(token_budget=32, full_layers=(-1,))}, "full_layers"),
    ],
)
def test_a_bad_setting_is_refused_by_name(model: Model, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "cpuu"}, "cpuu"),
        ({"dtype": "float31"}, "did you mean 'float32'"),
        ({"tokenizer": ""}, "tokenizer '' must be a folder"),
        ({"adapters": {"one": ""}}, "adapters {'one': ''} must be folders by name"),
    ],
)
def test_a_bad_setting_of_loading_is_refused_by_name(
    checkpoint: Path, settings: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoint, **settings)


def test_params_of_another_type_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="SamplingParams, not dict"):
        llm.generate("hello", {"max_tokens": 5})  # type: ignore[call-overload]


def test_unknown_names_are_both_config_errors_and_lookup_errors(model: Model) -> None:
    with pytest.raises(UnknownNameError) as caught:
        LLM(model, policy="quests")
    assert isinstance(caught.value, LookupError)


def test_a_model_without_tokenizer_takes_ids_only(tmp_path: Path) -> None:
    llm = LLM(make_model("qwen3", tmp_path), device="cpu")
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate("hello")
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(stop=("x",)))
    assert len(llm.generate({"prompt_token_ids": [5]}, GREEDY).token_ids) == 20


def test_a_notebook_shows_one_line(model: Model) -> None:
    """A policy showed every setting, a result its hundreds of ids."""
    llm = LLM(model, Quest(token_budget=64), memory="1MiB", page_size=8)
    tokens = llm.engine.cache.max_pages * 8
    assert repr(llm) == (
        f"LLM('llama-0', Quest(token_budget=64): float32 on cpu, KV cache for {tokens:,} tokens)"
    )
    assert repr(Quest()) == "Quest()"
    assert eval(repr(Delta(token_budget=64, full_layers=(0,)))) == Delta(
        token_budget=64, full_layers=(0,)
    )
    assert repr(SamKV(update="fusion")) == "SamKV(update='fusion')"
    assert repr(GREEDY) == "SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)"
    result = llm.generate("hello", SamplingParams(n=3, max_tokens=5, temperature=0))
    assert repr(result) == f"Result({result.text!r}: 5 tokens after 6, 'length', 2 others)"
    assert len(repr(dataclasses.replace(result, text="a" * 10**4))) < 260


def test_a_stream_has_the_arguments_of_the_whole_answer(llm: LLM) -> None:
    """For `help`, and for callers: a wrong name is refused at the call, before any step."""
    for name, of in (("stream_chat", LLM.chat), ("stream_ask", LLM.ask)):
        shown = inspect.signature(getattr(LLM, name))
        assert shown.parameters == inspect.signature(of).parameters
        assert "Iterator[Piece]" in str(shown.return_annotation)
    with pytest.raises(TypeError, match="unexpected keyword argument 'reus'"):
        llm.stream_ask("question", ["a"], reus="epic")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing a required argument: 'documents'"):
        llm.stream_ask("question")  # type: ignore[call-arg]
