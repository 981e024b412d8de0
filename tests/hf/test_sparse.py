"""`keyhole.sparse`: transformers' own `generate` is the oracle, and our engine under a policy."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, TextIteratorStreamer

import keyhole
from keyhole import (
    LLM,
    CapacityError,
    ConfigError,
    Delta,
    Full,
    Quest,
    SamplingParams,
    SpeContext,
    sparse,
)
from keyhole.eval.tiny_language.tasks import make
from keyhole.policies import available_policies, make_policy
from tests.checkpoints import KINDS, make_config, make_model, make_network, make_tokenizer
from tests.hf.generating import assert_same, decode, forward, network, past_of, prompts, state
from tests.policies.models import with_head

__all__ = ["network"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_with_everything_read_a_left_padded_batch_is_as_without_us(kind: str) -> None:
    network, inputs = make_network(make_config(kind)), prompts(33, 1, 17)
    expected, before = decode(network, inputs), state(network)
    for policy in (Full(), Delta(token_budget=64)):
        with sparse(network, policy, page_size=8) as run:
            assert_same(decode(network, inputs), expected)
        assert run.stats.prompt_tokens == 33 + 1 + 17
        assert run.stats.decoded_tokens == 3 * 19
    assert state(network) == before
    assert torch.equal(decode(network, inputs).sequences, expected.sequences)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Deeper models of three attention kinds, each with a retrieval head beside it."""
    folder = tmp_path_factory.mktemp("models")
    fields: dict[str, dict[str, Any]] = {"llama": {}, "gemma3": {}, "deepseek_v3": {}}
    fields["gemma3"]["layer_types"] = ["sliding_attention", "full_attention"] * 3
    paths = {k: make_model(k, folder, num_hidden_layers=6, **v) for k, v in fields.items()}
    for path in paths.values():
        with_head(path)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("name", available_policies())
@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek_v3"])
def test_under_a_policy_logits_are_those_of_the_engine(
    name: str, kind: str, checkpoints: dict[str, str]
) -> None:
    inputs, method = prompts(70, 45), available_policies()[name]
    sparse_one = "token_budget" in method.__dataclass_fields__
    small: dict[str, Any] = {"token_budget": 24, "prompt_in_budget": True}
    fields = method.__dataclass_fields__
    policy = make_policy(name, {key: small[key] for key in small if key in fields})
    llm = LLM(checkpoints[kind], policy, device="cpu", page_size=8, prefix_cache=False)
    network = AutoModelForCausalLM.from_pretrained(checkpoints[kind])
    before = state(network)
    with sparse(network, policy, page_size=8) as run:
        got = decode(network, inputs)
    assert state(network) == before
    assert run.policy == llm.policy
    rows = []
    for row, length in enumerate((70, 45)):
        *given, _ = got.sequences[row, 70:].tolist()
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        prompt = inputs["input_ids"][row, -length:].tolist()
        rows.append(llm.engine.add(prompt, params, given=given, keep_logits=True))
    while llm.engine.has_work:
        llm.engine.step()
    for row, sequence in enumerate(rows):
        ours = torch.stack([logits[row] for logits in got.logits])
        assert torch.allclose(ours, torch.stack(sequence.logits), atol=1e-3)
    stats = [sequence.stats() for sequence in rows]
    shares = [s.attended_fraction or 0 for s in stats]
    assert run.stats.kv_bytes_read == sum(s.kv_bytes_read for s in stats)
    assert run.stats.other_bytes_read == sum(s.other_bytes_read for s in stats)
    assert run.stats.attended_fraction == pytest.approx(sum(shares) / 2)
    assert run.stats.attended_fraction < 1 or not sparse_one


@pytest.mark.one_in(2)
@pytest.mark.parametrize("refresh", [1, 4])
def test_a_retrieval_head_chooses_as_in_the_engine(refresh: int) -> None:
    policy = SpeContext(token_budget=128, refresh_every=refresh)
    network = AutoModelForCausalLM.from_pretrained(keyhole.tiny(), dtype=torch.float32)
    llm = LLM(keyhole.tiny(), policy, device="cpu", dtype="float32")
    prompt = make("recall", 512, seed=1).prompt
    result = llm.generate(prompt, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    ids, before = torch.tensor([result.prompt_token_ids]), state(network)
    options = {"max_new_tokens": 24, "eos_token_id": 10**6, "pad_token_id": 0}
    with sparse(network, policy) as run:
        got = decode(network, {"input_ids": ids}, **options)
        embeds = network.get_input_embeddings()(ids)
        with pytest.raises(ConfigError, match="inputs_embeds with spe_context"):
            network.generate(inputs_embeds=embeds, **options)
    assert state(network) == before
    assert got.sequences[0, ids.shape[1] :].tolist() == result.token_ids
    assert run.stats.other_bytes_read == result.stats.other_bytes_read


def test_a_loaded_model_with_another_attention_gets_it_back(tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(make_model("qwen3", tmp_path))
    expected, before = decode(network, prompts(20)), state(network)
    assert network.config._attn_implementation == "sdpa"
    with sparse(network):
        assert network.config._attn_implementation == "keyhole"
        assert_same(decode(network, prompts(20)), expected)
    assert state(network) == before


def test_an_error_inside_leaves_the_model_as_it_was(network: Any) -> None:
    class Stop(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, *_: Any, **__: Any) -> Any:
            raise KeyError("stop")

    expected = decode(network, prompts(9))
    with pytest.raises(KeyError, match="stop"), sparse(network):
        decode(network, prompts(9), stopping_criteria=[Stop()])
    assert_same(decode(network, prompts(9)), expected, 0)


def test_an_interrupted_forward_does_not_hold_up_the_next_one(network: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    expected = decode(network, prompts(9))
    with sparse(network):
        handle = network.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            decode(network, prompts(9))
        handle.remove()
        assert_same(decode(network, prompts(9)), expected)


def test_a_thread_that_ended_in_a_forward_does_not_hold_up_others(network: Any) -> None:
    """What is no Exception leaves out the second hook; then every other thread waited forever."""

    def end(*_: Any) -> None:
        raise SystemExit

    def ended() -> None:
        with contextlib.suppress(SystemExit):
            decode(network, prompts(9))

    def run(work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    expected, got = decode(network, prompts(9)), []
    with sparse(network):
        handle = network.model.layers[2].register_forward_pre_hook(end)
        run(ended)
        handle.remove()
        run(lambda: got.append(decode(network, prompts(9))))
    assert_same(got[0], expected)


def test_a_failed_forward_leaves_rows_that_go_on(network: Any) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("once")

    inputs = prompts(9)
    first, then = inputs["input_ids"][:, :6], inputs["input_ids"][:, 6:]
    expected = forward(network, inputs).logits[:, 6:]
    with sparse(network, page_size=4):
        past = past_of(forward(network, {"input_ids": first}))
        handle = network.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="once"):
            forward(network, {"input_ids": then}, past=past)
        handle.remove()
        got = forward(network, {"input_ids": then}, past=past)
    assert torch.allclose(got.logits, expected, atol=1e-4)


@pytest.mark.slow
def test_sampling_draws_the_same_tokens(network: Any) -> None:
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "num_return_sequences": 3}
    results = []
    for block in (None, Full()):
        torch.manual_seed(7)
        if block is None:
            results.append(decode(network, prompts(12, 5), **options))
            continue
        with sparse(network, block):
            results.append(decode(network, prompts(12, 5), **options))
    assert len(results[0].sequences) == 6
    assert_same(results[1], results[0])


@pytest.mark.slow
def test_stopping_criteria_end_rows_and_finished_rows_wait(network: Any) -> None:
    inputs = prompts(12, 5)
    free = decode(network, inputs).sequences[0, 12:].tolist()
    options = {"eos_token_id": free[3], "min_new_tokens": 0}
    expected = decode(network, inputs, **options)
    with sparse(network):
        assert_same(decode(network, inputs, **options), expected)


def test_a_streamer_gives_the_text_as_it_comes(network: Any) -> None:
    tokenizer, inputs = make_tokenizer(), prompts(12)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    expected = network.generate(**inputs, max_new_tokens=15, do_sample=False)
    with sparse(network):
        options = inputs | {"max_new_tokens": 15, "do_sample": False, "streamer": streamer}
        thread = threading.Thread(target=network.generate, kwargs=options)
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text == tokenizer.decode(expected[0, 12:])


@pytest.mark.slow
def test_threads_take_turns(network: Any) -> None:
    wanted = [prompts(9 + 7 * i, seed=i) for i in range(3)]
    expected = [decode(network, inputs) for inputs in wanted]
    got: dict[int, Any] = {}

    def work(i: int) -> None:
        got[i] = decode(network, wanted[i])

    with sparse(network, page_size=4):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in range(3):
        assert_same(got[i], expected[i])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chunk", [3, 8, 16])
def test_a_prompt_in_chunks_is_the_same_prompt(network: Any, chunk: int) -> None:
    inputs = prompts(32, 3)
    expected = decode(network, inputs)
    with sparse(network, page_size=4):
        assert_same(decode(network, inputs, prefill_chunk_size=chunk), expected)


@pytest.mark.slow
def test_without_use_cache_every_step_is_a_prompt(network: Any) -> None:
    expected = decode(network, prompts(12, 5), use_cache=False)
    with sparse(network, Quest(token_budget=16)) as run:
        got = decode(network, prompts(12, 5), use_cache=False)
    assert_same(got, expected)
    assert past_of(got) is None
    assert run.stats.decoded_tokens == 0
    assert run.stats.attended_fraction is None


@pytest.mark.slow
def test_its_cache_goes_on_with_the_conversation(network: Any) -> None:
    inputs, more = prompts(12, 5), prompts(6, 6, seed=1)["input_ids"]

    def talk() -> list[Any]:
        first = decode(network, inputs)
        ids = torch.cat([first.sequences, more], 1)
        new = ids.shape[1] - inputs["attention_mask"].shape[1]
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, new, dtype=torch.long)], 1)
        both = {"input_ids": ids, "attention_mask": mask}
        return [first, decode(network, both, past=past_of(first))]

    expected = talk()
    with sparse(network, page_size=4) as run:
        for ours, theirs in zip(talk(), expected, strict=True):
            assert_same(ours, theirs)
    # The last token of the first answer was not computed by then.
    assert run.stats.prompt_tokens == 12 + 5 + 2 * (6 + 1)


def test_a_prompt_is_computed_once_and_continued_several_times(network: Any) -> None:
    start = prompts(13)["input_ids"]
    ends = [prompts(5, seed=i)["input_ids"] for i in (1, 2)]
    texts = [{"input_ids": torch.cat([start, end], 1)} for end in ends]
    expected = [decode(network, text) for text in texts]
    with sparse(network, page_size=4) as run:
        past = past_of(forward(network, {"input_ids": start}))
        for text, theirs in zip(texts, expected, strict=True):
            assert_same(decode(network, text, past=copy.deepcopy(past)), theirs)
        with pytest.raises(ConfigError, match="rows of a cache"):
            past.reset()
    assert run.stats.prompt_tokens == 13 + 5 + 5


def test_pages_are_free_again_after_each_call(network: Any) -> None:
    page = 4 * 8 * 2 * 2 * 8 * 4  # layers, tokens, keys and values, heads, dimension, bytes
    inputs = prompts(20, 3)
    expected = decode(network, inputs)
    with sparse(network, page_size=8, memory=8 * page):
        for _ in range(3):
            assert_same(decode(network, inputs), expected)
        with pytest.raises(CapacityError, match=r"holds 64 tokens in .* raise memory="):
            decode(network, prompts(40, 40))
        assert_same(decode(network, inputs), expected)


@pytest.mark.parametrize("kind", ["llama", "gpt_bigcode"])
def test_a_plain_call_gives_what_the_model_gives(kind: str) -> None:
    network, inputs = make_network(make_config(kind)), prompts(7, 4)
    there = inputs["attention_mask"].bool()
    keeps = [0, 3, torch.tensor([2, 6])]
    expected = [forward(network, inputs, logits_to_keep=keep) for keep in keeps]
    hidden = forward(network, inputs, output_hidden_states=True).hidden_states
    short = {"input_ids": inputs["input_ids"]}
    embeds = {"inputs_embeds": network.get_input_embeddings()(short["input_ids"]).detach()}
    row = forward(network, short).logits
    with sparse(network):
        for keep, theirs in zip(keeps, expected, strict=True):
            ours = forward(network, inputs, logits_to_keep=keep)
            assert type(ours) is type(theirs)
            kept = there[:, -keep:] if isinstance(keep, int) else there[:, keep]
            assert torch.allclose(ours.logits[kept], theirs.logits[kept], atol=1e-4)
            assert not ours.logits[~kept].any()
        for ours, theirs in zip(
            forward(network, inputs, output_hidden_states=True).hidden_states, hidden, strict=True
        ):
            assert torch.allclose(ours[there], theirs[there], atol=1e-4)
        with torch.no_grad():
            positional = network(short["input_ids"])
        logits, past = forward(network, embeds, return_dict=False)
        assert past.get_seq_length() == 7
        assert torch.allclose(positional.logits, row, atol=1e-4)
        assert torch.allclose(logits, row, atol=1e-4)
        assert past_of(forward(network, short, use_cache=False)) is None
