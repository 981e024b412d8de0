"""What policies would read of a dense run, and what the outputs of layers would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import keyhole
from keyhole import Full, RaaS, StreamingLLM
from keyhole.config import EngineConfig
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.eval.attention import dense_run
from keyhole.eval.attention.dense_run import LayerStep, run
from keyhole.eval.workload import Request
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import available_controls, make_policy
from keyhole.policies.base import Policy
from tests.checkpoints import make_config, make_model, make_network
from tests.policies import recording
from tests.policies.models import VOCAB, prompt, with_head

PAGE, PROMPT, STEPS = 4, 37, 22
CONFIG = EngineConfig(max_batch=2, page_size=PAGE, prefill_chunk=16, prefix_cache=False)
TEXTS = [prompt(PROMPT + STEPS + 1, seed) for seed in range(3)]
#: Weights and outputs are float32, and sums are made in another order than in the oracle.
TOLERANCE = 2e-5

POLICIES = {**keyhole.available_policies(), **available_controls()}
SMALL: dict[str, Any] = {
    "token_budget": 4 * PAGE,
    "full_layers": (0,),
    "delta_layers": (1,),
    "selection_layers": (1,),
    "filter_layers": (1,),
}


def small(name: str) -> Policy:
    fields = POLICIES[name].__dataclass_fields__
    settings = {key: value for key, value in SMALL.items() if key in fields}
    return make_policy(name, settings)


def requests(texts: list[list[int]]) -> list[Request]:
    return [Request(prompt=t[:PROMPT], given=t[PROMPT:-1], max_tokens=1) for t in texts]


def observed(
    model: Model, policies: list[Policy], copies: SharedPromptCache | None = None
) -> list[LayerStep]:
    seen: list[LayerStep] = []
    run(model, policies, requests(TEXTS), CONFIG, seen.append, copies=copies)
    return seen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    # A head that reads hidden states would see those that the policy itself has changed.
    return with_head(make_model("llama_group3", folder, vocab_size=VOCAB), inputs="tokens")


def dense_twin(kind: str, text: list[int]) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Weights [Hq, T, T], values per query head [Hq, T, Dv] and outputs [T, Hq * Dv] by layer."""
    network = make_network(make_config(kind, vocab_size=VOCAB))
    outputs: list[Tensor] = []
    values: list[Tensor] = []
    latent = kind == "deepseek_v3"
    for layer in network.base_model.layers:
        attention = layer.self_attn
        attention.o_proj.register_forward_pre_hook(lambda _, given: outputs.append(given[0][0]))
        source = attention.kv_b_proj if latent else attention.v_proj
        source.register_forward_hook(lambda *given: values.append(given[2].flatten(0, -2)))
    with torch.no_grad():
        weights = network(torch.tensor([text]), output_attentions=True).attentions
    heads = weights[0].shape[1]
    per_head = []
    for value, output in zip(values, outputs, strict=True):
        size = output.shape[1] // heads
        if latent:
            value = value.unflatten(1, (heads, -1))[..., -size:].flatten(1)
        split = value.unflatten(1, (-1, size)).transpose(0, 1).double()
        per_head.append(split.repeat_interleave(heads // len(split), 0))
    return tuple(w[0].double() for w in weights), per_head, outputs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama_group3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_mass_and_error_are_those_of_plain_transformers(kind: str, tmp_path: Path) -> None:
    """Grouped heads; windows and softcap; sinks, which are no token; latents that heads share."""
    model = load(make_model(kind, tmp_path, vocab_size=VOCAB), "cpu")
    first, budget = 3, 11
    seen = observed(model, [StreamingLLM(token_budget=budget, sink_size=first), Full()])
    assert {one.layer for one in seen} == {*model.geometry(PAGE).full_attention}
    for sample, text in enumerate(TEXTS):
        weights, values, outputs = dense_twin(kind, text)
        checked = 0
        for one in seen:
            for row in (one.samples == sample).nonzero().flatten().tolist():
                length, layer = int(one.step.lengths[row]), one.layer
                all_of = weights[layer][:, length - 1, :length]
                read = [*range(first), *range(length - budget + first, length)]
                kept = all_of[:, read]
                mass = float((kept.sum(1) / all_of.sum(1)).mean())
                # What a sink of the model takes stays with it when tokens are left out.
                share = kept / (kept.sum(1) + 1 - all_of.sum(1))[:, None]
                full = outputs[layer][length - 1].double()
                sparse = torch.einsum("hn,hnd->hd", share, values[layer][:, read]).flatten()
                error = float((sparse - full).norm() / full.norm())
                tokens = one.readings[0].tokens
                assert tokens is not None
                assert tokens[row, 0].nonzero().flatten().tolist() == read
                found = dense_run.mass_kept(one.weights, tokens)[row]
                assert float(found) == pytest.approx(mass, abs=TOLERANCE)
                found = dense_run.output_error(one.output, one.readings[0].output)[row]
                assert float(found) == pytest.approx(error, abs=TOLERANCE)
                assert one.readings[1].tokens is None
                full_error = dense_run.output_error(one.output, one.readings[1].output)[row]
                assert float(full_error) < TOLERANCE
                checked += 1
        assert checked == STEPS * len(model.geometry(PAGE).full_attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_reads_what_it_reads_alone(name: str, model: Model) -> None:
    """Up to its first sparse layer a policy's own run has the queries and keys of the dense one."""
    policy = small(name)
    alone = recording.Recording(inner=policy)
    engine = recording.make_engine(model, alone, prefill_chunk=16, prefix_cache=False)
    for text in TEXTS:
        recording.forced(engine, text[:PROMPT], text[PROMPT:-1])
    recording.run(engine)
    wanted: dict[tuple[int, int], list[list[set[int]] | None]] = {}
    for call in alone.calls:
        for row, length in enumerate(call.lengths):
            entries = call.entries(row)
            tokens = entries and [
                {t for e in own for t in range(e * call.unit, (e + 1) * call.unit) if t < length}
                for own in entries
            ]
            wanted.setdefault((call.layer, length), []).append(tokens)
    sparse = min((layer for (layer, _), reads in wanted.items() if any(reads)), default=0)
    compared = narrow = 0
    for one in observed(model, [policy]):
        if one.layer > sparse:
            continue
        for row, length in enumerate(one.step.lengths.tolist()):
            tokens = one.readings[0].tokens
            found = (
                None
                if tokens is None
                else [{*own.nonzero().flatten().tolist()} for own in tokens[row]]
            )
            assert found in wanted[one.layer, length]
            compared += 1
            narrow += found is not None and any(len(own) < length for own in found)
    assert compared == len(TEXTS) * STEPS * (sparse + 1)
    assert narrow or name == "full"


@pytest.mark.slow
def test_policies_of_one_run_do_not_affect_each_other(model: Model) -> None:
    names = [name for name in POLICIES if name != "full"]
    together = observed(model, [small(name) for name in names])
    for number, name in enumerate(names):
        for one, alone in zip(together, observed(model, [small(name)]), strict=True):
            found, wanted = one.readings[number], alone.readings[0]
            assert (found.tokens is None) == (wanted.tokens is None)
            if found.tokens is not None and wanted.tokens is not None:
                assert torch.equal(found.tokens, wanted.tokens)
            assert torch.equal(found.output, wanted.output)


@pytest.mark.slow
def test_the_model_itself_stays_dense(model: Model) -> None:
    """Whatever stands beside it, weights and outputs of a layer are those of full attention."""
    beside = observed(model, [StreamingLLM(token_budget=2, sink_size=1)])
    for one, alone in zip(beside, observed(model, []), strict=True):
        assert torch.equal(one.weights, alone.weights)
        assert torch.equal(one.output, alone.output)


@pytest.mark.slow
def test_known_prompts_change_nothing(model: Model) -> None:
    copies, policy = SharedPromptCache(2**24), [small("quest"), small("clusterkv")]
    first, again = (observed(model, policy, copies) for _ in range(2))
    assert len(copies) == len(TEXTS)
    # A prompt that is known decodes earlier, beside other rows.
    by_place = {
        (int(sample), int(length), one.layer): one.readings[0].output[row]
        for one in first
        for row, (sample, length) in enumerate(zip(one.samples, one.step.lengths, strict=True))
    }
    for one in again:
        for row, (sample, length) in enumerate(zip(one.samples, one.step.lengths, strict=True)):
            found = by_place[int(sample), int(length), one.layer]
            assert (one.readings[0].output[row] - found).abs().max() < 1e-4


def test_pages_are_given_up_as_in_a_run_that_evicts(model: Model) -> None:
    """RaaS keeps within its budget by giving up pages, the prompt's never."""
    policy = RaaS(token_budget=3 * PAGE, alpha=0.99)
    counts = [
        int(one.readings[0].tokens[0].sum())  # type: ignore[index]
        for one in observed(model, [policy])
        if one.layer == 0 and 0 in one.samples
    ]
    # The prompt's last page has room for generated tokens.
    assert max(counts) <= -(-PROMPT // PAGE) * PAGE + policy.token_budget
    assert len(counts) == STEPS
    assert np.diff(counts).min() < 0
