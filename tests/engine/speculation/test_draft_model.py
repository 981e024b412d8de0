"""An EAGLE-3 draft of a model: its proposals; outputs do not change."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole import (
    LLM,
    ConfigError,
    Delta,
    Full,
    ModelError,
    Policy,
    Quest,
    SamplingParams,
    SpeContext,
)
from keyhole.engine.speculation import draft_runner
from keyhole.engine.speculation.draft_runner import speed_up_draft
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.models.weights.packing import PackedLinear
from keyhole.retrieval.draft import DraftModel
from tests.checkpoints import make_config, make_model, make_network
from tests.engine.speculation.drafts import replaying
from tests.engine.speculation.plain_draft import (
    COUNT,
    DRAFT,
    FIELDS,
    PlainDraft,
    drafted,
    model,
    network_of,
)
from tests.engine.speculation.test_drafting import assert_drafted, assert_same, served
from tests.policies.models import VOCAB, prompt
from tests.policies.recording import PAGE, make_engine
from tests.retrieval.drafts import edit, make_draft

__all__ = ["model"]


@pytest.mark.slow
@pytest.mark.parametrize("pages", [None, 6])
def test_it_proposes_what_a_plain_drafter_does(
    model: Model, pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the target's features of accepted tokens alone, whatever was rejected before.

    Ragged requests with prompts in chunks, a cached prefix, and steps in which some are right.
    Proposals after the first read a few pages, or everything.
    """
    if pages is not None:
        monkeypatch.setattr(draft_runner, "MAX_READ", pages * PAGE)
    settings = {"prefill_chunk": 24, "max_batch": 4}
    wanted = served(make_engine(model, Full(), **settings))
    engine = drafted(model, **settings)
    replayed = replaying(engine, wanted, error=0.5)
    found = served(engine)
    assert_same(found, wanted)
    assert_drafted(found)
    again = served(engine, ((0, found[1].tokens[:100], 9),))
    assert again[0].num_cached >= 96
    plain = PlainDraft(model.draft, network_of(model), pages)  # type: ignore[arg-type]
    made = list(replayed.made.items())
    assert len(made) > 40
    for tokens, (proposed, own) in [*made[::12], *made[-2:]]:
        assert plain.propose(tokens, proposed[:-1]) == own
        attention = torch.stack(plain.mixed[len(tokens) - 1 :])
        assert (torch.stack(replayed.mixed[tokens]) - attention).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [Full(), Quest(token_budget=5 * PAGE), Delta(token_budget=5 * PAGE)],
    ids=lambda one: one.name,
)
def test_tokens_and_logits_are_those_without_a_draft(model: Model, policy: Policy) -> None:
    wanted = served(make_engine(model, policy))
    found = served(drafted(model, policy))
    assert_same(found, wanted)


@pytest.mark.slow
def test_a_draft_that_is_always_right_saves_steps(model: Model) -> None:
    wanted = served(make_engine(model, Full()))
    engine = drafted(model)
    replaying(engine, wanted, error=0.0)
    found = served(engine)
    assert_same(found, wanted)
    long = [sequence.stats() for sequence in found if len(sequence.generated) > 1]
    assert all(stats.acceptance_rate == 1.0 for stats in long)
    assert all(stats.accepted_length > COUNT for stats in long)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [{"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_k": 9, "seed": 4}]
)
def test_a_seed_gives_the_tokens_that_it_gives_without_a_draft(
    model: Model, params: dict[str, Any]
) -> None:
    wanted = served(make_engine(model, Full()), **params)
    engine = drafted(model)
    replaying(engine, wanted)
    found = served(engine, **params)
    assert_same(found, wanted)
    assert_drafted(found)


def outcomes(network: Any, text: list[int], count: int, top_k: int) -> dict[tuple[int, ...], float]:
    """The probabilities of the next `count` tokens, each among the `top_k` best, in float64."""
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer = {}
        for said, share in shares.items():
            logits = network(torch.tensor([[*text, *said]])).logits[0, -1]
            best = logits.topk(top_k)
            for token, p in zip(
                best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True
            ):
                longer[*said, token] = share * p
        shares = longer
    return shares


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [SpeContext(token_budget=48), Full()], ids=lambda policy: policy.name
)
def test_outcomes_have_the_model_s_probabilities(model: Model, policy: Policy) -> None:
    """Pearson's chi-square test of three tokens, of which two are proposed.

    The budget is enough for all tokens.
    """
    text, count = prompt(12), 3
    with torch.no_grad():
        shares = outcomes(network_of(model).double(), text, count, top_k=2)
    greedy = served(make_engine(model, Full()), ((0, text, 8),))
    draws, engine = 3000, drafted(model, policy, max_batch=16)
    replaying(engine, greedy, error=0.3)
    params = [
        SamplingParams(max_tokens=count, top_k=2, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(1_000_000, 1_000_000 + draws)
    ]
    found = [engine.add(text, one) for one in params]
    while engine.has_work:
        engine.step()
    assert_drafted(found)
    counts = Counter(tuple(sequence.generated) for sequence in found)
    assert set(counts) <= set(shares)
    expected = {said: draws * share for said, share in shares.items()}
    statistic = sum((counts[said] - wanted) ** 2 / wanted for said, wanted in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 3 * (2 * freedom) ** 0.5


# What is refused


def test_without_a_draft_the_folder_is_named(tmp_path: Path) -> None:
    bare = load(make_model("llama", tmp_path, vocab_size=VOCAB), "cpu")
    with pytest.raises(ConfigError, match="has no folder 'keyhole-draft'; name one as draft="):
        drafted(bare)


def test_a_named_folder_is_read(model: Model, tmp_path: Path) -> None:
    bare = load(make_model("llama_group3", tmp_path, **FIELDS), "cpu")
    engine = drafted(bare, draft=f"eagle3:{model.draft}")
    assert served(engine, ((0, prompt(9), 6),))[0].drafts.proposed > 0  # type: ignore[union-attr]


def test_on_a_cpu_weights_that_only_proposals_depend_on_are_packed(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = make_network(make_config("llama_group3", **FIELDS | sizes))
    path = make_draft(tmp_path, draft_vocab_size=30, intermediate_size=128, **DRAFT | sizes)
    draft = speed_up_draft(DraftModel.from_eagle3(path, target), torch.device("cpu"))
    packed = {name for name, layer in draft.named_modules() if isinstance(layer, PackedLinear)}
    assert packed == {"v", "o", "gate", "up", "down", "lm_head"}
    hidden, mixed = torch.randn(3, 64), torch.randn(3, 4, 16)
    features = draft.step(hidden, mixed)[1]
    plain = DraftModel.from_eagle3(path, target).step(hidden, mixed)[1]
    # 15 steps between the least and the largest of 32 normal numbers: wrong by 8 % in the mean.
    assert 0 < (features - plain).norm() < 0.1 * plain.norm()
    assert {layer.bits for layer in draft.modules() if isinstance(layer, PackedLinear)} == {4}


def test_unknown_drafts_are_refused(model: Model) -> None:
    for wrong in ("eagle", "ngram:folder"):
        with pytest.raises(ConfigError, match="draft"):
            LLM(model, draft=wrong)


# Files


@pytest.mark.parametrize("layout", ["original", "speculators"])
@pytest.mark.parametrize("fields", [{}, {"norm_before_residual": True, "norm_output": True}])
def test_both_layouts_load(tmp_path: Path, layout: str, fields: dict[str, Any]) -> None:
    network = make_network(make_config("llama_group3", **FIELDS))
    draft = DraftModel.from_eagle3(
        make_draft(tmp_path, layout=layout, draft_vocab_size=30, **DRAFT, **fields), network
    )
    assert draft.shape.vocab_size == 30
    assert draft.shape.norm_before_residual == bool(fields)
    assert draft.shape.norm_output == bool(fields)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"midlayer.self_attn.v_proj.weight": None}, "no tensor midlayer.self_attn.v_proj.weight"),
        ({"norm.weight": None}, "no tensor norm.weight"),
        ({"lm_head.weight": None, "d2t": None}, None),
        ({"d2t": torch.full((30,), 40)}, "d2t of draft .* names tokens from 40 to 69"),
        ({"d2t": torch.zeros(30)}, "it must have integers"),
        (
            {"lm_head.weight": torch.zeros(())},
            r"lm_head.weight of shape \[\], but it must be a matrix",
        ),
        ({"midlayer.mlp.gate_proj.weight": torch.zeros(())}, "gate_proj.weight of shape"),
    ],
)
def test_damaged_drafts_are_refused(tmp_path: Path, changes: Any, named: str | None) -> None:
    network = make_network(make_config("llama_group3", **FIELDS))
    path = make_draft(tmp_path, draft_vocab_size=30, **DRAFT)
    edit(path, **changes)
    if named is None:  # the target's output serves
        draft = DraftModel.from_eagle3(path, network)
        assert torch.equal(draft.lm_head.weight, network.get_output_embeddings().weight)
        return
    with pytest.raises(ModelError, match=named):
        DraftModel.from_eagle3(path, network)


@pytest.mark.parametrize("layers", [2, None, "two", [], float("inf")])
def test_a_draft_that_is_not_of_one_layer_is_refused(tmp_path: Path, layers: Any) -> None:
    """A number of layers that is no number ended in a traceback of Python's `int`."""
    path = make_draft(tmp_path, **DRAFT)
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": layers}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="only drafts of one layer can propose tokens"):
        DraftModel.from_eagle3(path, make_network(make_config("llama_group3", **FIELDS)))
