"""Hybrid models give the logits of transformers, eager attention, however work is cut up."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import keyhole
from keyhole import LLM, ConfigError, Delta, ModelError, SamplingParams, exactness_gate
from keyhole.cache.recurrent_state import RecurrentState
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.errors import CapacityError
from keyhole.models import checkpoint, families
from keyhole.models.loading import load
from keyhole.models.modules.recurrent_layers import Packed
from keyhole.models.shrink import random_model, shrink
from keyhole.policies import available_controls, make_policy
from tests.hf.generating import past_of
from tests.models import compared
from tests.models.compared import Text, add, logits_of, random_texts, run
from tests.policies.models import with_head

#: One family of every kind of recurrent layer, and of hybrids with the same kind.
FAMILIES = """
    lfm2 lfm2_moe qwen3_next qwen3_5_text granitemoehybrid bamba falcon_h1 nemotron_h kimi_linear
    minimax olmo_hybrid jamba zamba zamba2 zaya
""".split()
#: A short convolution; a gated delta net; Mamba-2; Mamba-2 beside attention in each layer; linear
#: attention without a convolution; Mamba, which cannot go on with several tokens at once; queries,
#: keys and values that are a convolution's.
KINDS = ["lfm2", "qwen3_next", "nemotron_h", "falcon_h1", "minimax", "jamba", "zaya"]
DELTA = Delta(token_budget=8, recent_pages=1, full_layers=(0,), delta_layers=(1,))
POLICIES = {**keyhole.available_policies(), **available_controls()}
PAGE = 8
LENGTHS = (5, 1, 19, PAGE, 12)
NEW = 4
#: Logits differ by the order of sums only, which recurrences amplify.
TOLERANCE = 2e-4


@functools.cache
def network_of(family: str, **fields: Any) -> Any:
    config = CONFIG_MAPPING[family](**exactness_gate._EXAMPLES.get(family, {}) | fields)
    small = shrink(config)
    small._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        return random_model(small)


@functools.cache
def texts() -> list[Text]:
    return random_texts(7, LENGTHS, NEW)


@functools.cache
def expected(family: str) -> list[Tensor]:
    return logits_of(network_of(family), texts())


def engine_of(family: str, policy: Any = None, **settings: Any) -> Engine:
    settings = {"page_size": PAGE, "memory": "16MB", "prefix_cache": False} | settings
    return LLM(network_of(family), policy, device="cpu", **settings).engine


def assert_exact(family: str, sequences: list[Sequence]) -> None:
    compared.assert_exact(sequences, expected(family), TOLERANCE)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_ragged_batch(family: str) -> None:
    engine = engine_of(family)
    sequences = [add(engine, text) for text in texts()]
    run(engine)
    assert_exact(family, sequences)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, PAGE - 1, PAGE + 1])
@pytest.mark.parametrize("family", KINDS)
def test_in_prompt_chunks_shorter_and_longer_than_the_convolution(family: str, chunk: int) -> None:
    engine = engine_of(family, prefill_chunk=chunk)
    sequences = [add(engine, text) for text in texts()]
    run(engine)
    assert_exact(family, sequences)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", KINDS)
def test_interleaved_with_others_that_come_and_go(family: str) -> None:
    """Slots change hands: what the last sequence left in one must not be seen."""
    engine = engine_of(family, max_batch=2, prefill_chunk=PAGE + 1)
    sequences = []
    for text in texts():
        sequences.append(add(engine, text))
        for _ in range(3):
            engine.step()
    run(engine)
    assert_exact(family, sequences)


def test_generated_tokens_equal_those_of_transformers() -> None:
    prompt = texts()[2][0]
    theirs = network_of("lfm2").generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1
    )
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    llm = LLM(network_of("lfm2"), device="cpu", memory="16MB")
    ours = llm.generate({"prompt_token_ids": prompt}, params)
    assert ours.token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_several_completions_of_a_prompt() -> None:
    """The prompt is computed once, up to its last page, and none sees the state of another."""
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True, n=3)
    llm = LLM(network_of("lfm2"), device="cpu", memory="16MB", prefill_chunk=7, page_size=PAGE)
    alone = [
        LLM(network_of("lfm2"), device="cpu", memory="16MB", prefix_cache=False)
        .generate({"prompt_token_ids": texts()[2][0]}, single)
        .token_ids
        for single in params.each()
    ]
    result = llm.generate({"prompt_token_ids": texts()[2][0]}, params)
    assert [one.token_ids for one in result.completions] == alone
    assert len({tuple(tokens) for tokens in alone}) > 1
    cached = [one.stats.cached_prompt_tokens for one in result.completions]
    assert cached == [0, 2 * PAGE, 2 * PAGE]


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_a_cached_prefix_goes_on_from_its_state(family: str) -> None:
    engine = engine_of(family, prefix_cache=True, prefill_chunk=PAGE + 1)
    for _ in range(2):
        sequences = [add(engine, text) for text in texts()]
        run(engine)
        assert_exact(family, sequences)
    cached = [sequence.num_cached for sequence in sequences]
    assert cached == [(n - 1) // PAGE * PAGE for n in LENGTHS]


def test_the_state_is_kept_where_prompts_part() -> None:
    """The second prompt leaves the first after two pages, and the third one begins there."""
    prompts = [texts()[2][0] + texts()[i][0] * 2 for i in (0, 3, 4)]
    engine = engine_of("lfm2", prefix_cache=True)
    found = []
    for prompt in prompts:
        found.append(add(engine, (prompt, [5, 6])))
        run(engine)
    assert [sequence.num_cached for sequence in found] == [0, 0, 2 * PAGE]
    network = network_of("lfm2")
    for prompt, sequence in zip(prompts, found, strict=True):
        with torch.no_grad():
            theirs = network(torch.tensor([[*prompt, 5, 6]])).logits[0, len(prompt) - 1 :]
        assert (torch.stack(sequence.logits) - theirs).abs().max() < TOLERANCE * theirs.std()


def test_few_states_are_kept_and_the_oldest_goes_first() -> None:
    engine = engine_of("lfm2", prefix_cache=True, max_batch=2)
    cached = []
    for i in (2, 4, 3, 2, 4):  # each has one full page or more before its last token, except 3
        sequence = add(engine, texts()[i])
        run(engine)
        found, theirs = torch.stack(sequence.logits), expected("lfm2")[i]
        assert (found - theirs).abs().max() < TOLERANCE * theirs.std()
        cached.append(sequence.num_cached)
    assert cached == [0, 0, 0, 2 * PAGE, PAGE]
    for seed in range(2):  # two others take the place of all
        add(engine, ([seed + 3] * 20, [5]))
    run(engine)
    sequence = add(engine, texts()[2])
    run(engine)
    assert sequence.num_cached == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta", "quest", "clusterkv", "raas"])
def test_policies_go_on_from_cached_prefixes(name: str, hybrid: Any) -> None:
    """Those that copy pages, those that keep data with them, and those that evict."""
    policy = make_policy(name, {"token_budget": 64})
    engine = LLM(hybrid, policy, page_size=4, memory="16MB").engine
    logits = []
    for _ in range(2):
        sequence = add(engine, (texts()[2][0], texts()[4][0]))
        run(engine)
        logits.append(torch.stack(sequence.logits))
    assert sequence.num_cached > 0
    assert torch.allclose(*logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("policy", [None, DELTA])
def test_preemption_and_replay_change_nothing(policy: Any, prefix_cache: bool) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    alone = []
    for prompt, _ in texts()[2:]:
        one = engine_of("lfm2", policy)
        alone.append(one.add(prompt, params, keep_logits=True))
        run(one)
    state = one.recurrent
    assert state is not None
    # Two sequences of up to five pages each run at once.
    memory = state.nbytes + 8 * one.cache.page_bytes
    if prefix_cache:
        memory += state.nbytes
    engine = engine_of("lfm2", policy, memory=memory, prefix_cache=prefix_cache)
    together = [engine.add(request.prompt, params, keep_logits=True) for request in alone]
    preempted = 0
    while engine.has_work:
        engine.step()
        preempted += any(request.generated for request in engine.scheduler.waiting)
    assert preempted
    for request, other in zip(alone, together, strict=True):
        assert request.generated == other.generated
        assert torch.allclose(torch.stack(request.logits), torch.stack(other.logits), atol=1e-4)


def test_an_aborted_request_leaves_its_slot_to_the_next() -> None:
    engine = engine_of("lfm2", max_batch=1)
    aborted = add(engine, texts()[2])
    engine.step()
    engine.abort(aborted)
    sequences = [add(engine, text) for text in texts()]
    run(engine)
    assert_exact("lfm2", sequences)


@pytest.mark.parametrize("family", ["lfm2", "nemotron_h"])
def test_a_step_that_fails_halfway_advances_no_layer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise repeating the step would advance the states of some layers twice."""
    engine = engine_of(family, prefill_chunk=PAGE + 1)
    sequences = [add(engine, text) for text in texts()]
    last = engine.model.network.get_output_embeddings()
    for _ in range(4):
        with monkeypatch.context() as broken:
            broken.setattr(type(last), "forward", _fails)
            with pytest.raises(KeyError):
                engine.step()
        engine.step()
    run(engine)
    assert_exact(family, sequences)


def _fails(*_: Any) -> Any:
    raise KeyError("interrupted")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """LFM2 with three layers of attention, and a retrieval head."""
    path = tmp_path_factory.mktemp("hybrid")
    config = shrink(CONFIG_MAPPING["lfm2"](layer_types=["conv", "full_attention"] * 16))
    config.num_hidden_layers, config.layer_types = 7, ["conv", *["full_attention", "conv"] * 3]
    random_model(config).save_pretrained(path)
    return with_head(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_above_the_length_is_dense_attention(name: str, hybrid: Any) -> None:
    def logits(policy: Any) -> Tensor:
        engine = LLM(hybrid, policy, page_size=4, memory="16MB", prefix_cache=False).engine
        sequence = add(engine, (texts()[2][0], texts()[4][0]))
        run(engine)
        return torch.stack(sequence.logits)

    known = {field.name for field in POLICIES[name].__dataclass_fields__.values()}
    policy = make_policy(name, {"token_budget": 64} if "token_budget" in known else {})
    assert torch.allclose(logits(policy), logits(None), atol=1e-5)


def test_a_policy_selects_for_the_layers_of_attention(hybrid: Any) -> None:
    llm = LLM(hybrid, DELTA, page_size=4, memory="16MB", prefix_cache=False)
    assert llm.engine.geometry.num_layers == 3
    assert [llm.engine.geometry.number(layer) for layer in (1, 3, 5)] == [0, 1, 2]
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    result = llm.generate({"prompt_token_ids": texts()[2][0]}, params)
    assert result.stats.attended_fraction is not None
    assert result.stats.attended_fraction < 0.9


def test_the_state_takes_part_of_the_memory() -> None:
    engine = engine_of("lfm2", max_batch=4, memory="1MB")
    assert engine.recurrent is not None
    assert engine.max_pages == (10**6 - engine.recurrent.nbytes) // engine.cache.page_bytes
    kept = engine_of("lfm2", max_batch=4, memory="1MB", prefix_cache=True).recurrent
    assert kept is not None
    assert kept.nbytes == 2 * engine.recurrent.nbytes
    with pytest.raises(ConfigError, match="of recurrent state"):
        engine_of("lfm2", max_batch=4, memory=engine.recurrent.nbytes)


@pytest.fixture
def llm() -> LLM:
    return LLM(network_of("lfm2"), device="cpu", memory="16MB", prefix_cache=False)


def test_what_a_recurrent_state_cannot_have_is_refused_by_name(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has recurrent layers; leave it out"):
        LLM(network_of("lfm2"), Delta(), device="cpu", memory="16MB", offload=tmp_path)
    # Offloading is no remedy there: the next error would have refused it.
    few = LLM(network_of("lfm2"), device="cpu", memory="80KB", prefix_cache=False, max_batch=1)
    with pytest.raises(CapacityError, match=r"; raise memory= or lower max_tokens$"):
        few.generate({"prompt_token_ids": [5] * 100}, SamplingParams(max_tokens=100))
    with pytest.raises(ConfigError, match="stored documents cannot be used"):
        _ = llm.documents
    with (
        pytest.raises(ConfigError, match=r"keep a recurrent state.*keyhole.LLM"),
        keyhole.sparse(network_of("lfm2"), Delta(), memory="16MB"),
    ):
        pass
    network_of("lfm2").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="whose memory is not planned"):
        checkpoint.read(tmp_path / "model")
    assert llm.engine.why_not_replayed == "the model has layers with a recurrent state"


def test_a_users_network_keeps_its_classes() -> None:
    network = network_of("lfm2")
    classes = [type(module) for module in network.modules()]
    _ = engine_of("lfm2")
    assert [type(module) for module in network.modules()] == classes


def test_layers_of_attention_and_of_a_state() -> None:
    config = CONFIG_MAPPING["nemotron_h"]()
    assert families.attention_layers(config) == (2,)
    assert families.recurrent_layers(config) == (0,)
    both = CONFIG_MAPPING["falcon_h1"](num_hidden_layers=3)
    assert families.attention_layers(both) == families.recurrent_layers(both) == (0, 1, 2)


def test_a_checkpoint_in_16_bits_keeps_its_state_in_the_dtypes_of_transformers(
    tmp_path: Path,
) -> None:
    network_of("qwen3_next").save_pretrained(tmp_path)
    model = load(tmp_path, "cpu", "bfloat16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cache = past_of(theirs(torch.tensor([texts()[2][0]]), use_cache=True))
    engine = LLM(model, memory="16MB", prefix_cache=False).engine
    state = engine.recurrent
    assert isinstance(state, RecurrentState)
    found = state.read(0, torch.tensor([0]))
    layer = cache.layers[families.recurrent_layers(model.network.config)[0]]
    for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
        assert found[kind, 0].dtype == states[0].dtype
        assert found[kind, 0].shape == states[0].shape


def test_which_layers_continue_from_a_state_is_measured() -> None:
    """transformers' Mamba begins each call of several tokens with zeros: jamba was not exact."""

    def found(family: str) -> set[bool]:
        network = engine_of(family).model.network
        return {m.continues for m in network.modules() if isinstance(m, Packed)}

    assert found("jamba") == found("zamba") == {False}
    for family in ("lfm2", "qwen3_next", "nemotron_h", "minimax", "zaya"):
        assert found(family) == {True}, family


def test_why_other_hybrids_are_refused() -> None:
    for family, reason in {
        "recurrent_gemma": "in the module, for one batch at a time",
        "inkling_text": "a learned bias per relative position",
    }.items():
        assert reason in str(exactness_gate.measure(CONFIG_MAPPING[family]()).reason)
