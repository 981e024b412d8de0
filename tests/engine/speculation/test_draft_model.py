"""An EAGLE-3 draft of a model: its proposals and selections; outputs do not change."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

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
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.engine.speculation.draft_runner import speed_up_draft
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.models.weights.packing import PackedLinear
from keyhole.retrieval.draft import DraftModel
from keyhole.retrieval.draft_files import DRAFT_FOLDER
from tests.checkpoints import make_config, make_model, make_network
from tests.engine.speculation.drafts import replaying
from tests.engine.speculation.test_drafting import assert_drafted, assert_same, served
from tests.policies.models import VOCAB, prompt
from tests.policies.recording import PAGE, make_engine
from tests.retrieval.drafts import edit, make_draft

COUNT, LAYERS = 4, (1, 2, 3)
FIELDS = {"num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 1024}
DRAFT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "max_position_embeddings": 1024,
    "eagle_aux_hidden_state_layer_ids": list(LAYERS),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with a random draft in its folder, whose vocabulary is every other token."""
    folder = tmp_path_factory.mktemp("model")
    path = make_model("llama_group3", folder, **FIELDS)
    draft = make_draft(folder, draft_vocab_size=30, **DRAFT)
    edit(draft, d2t=torch.arange(30))
    draft.rename(Path(path) / DRAFT_FOLDER)
    return load(path, "cpu")


def drafted(model: Model, policy: Policy | None = None, **settings: Any) -> Engine:
    made = {"draft": "eagle3", "num_draft_tokens": COUNT, **settings}
    return make_engine(model, policy or Full(), **made)


class PlainDraft:
    """The draft in float64, one token after the other, with a list of keys and values."""

    def __init__(self, path: Path, network: Any) -> None:
        stored = load_file(path / "model.safetensors")
        self.config = json.loads((path / "config.json").read_text())
        self.ids = torch.arange(len(stored["d2t"])) + stored["d2t"]
        self.w = {n.removeprefix("midlayer."): x.double() for n, x in stored.items()}
        self.network = network
        self.embedding = network.get_input_embeddings().weight.detach().double()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return x / mean.sqrt() * self.w[name + ".weight"]

    def _turned(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angle = position * self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def _step(self, token: int, position: int, hidden: Tensor) -> tuple[Tensor, int]:
        w, dim = self.w, self.config["head_dim"]
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        embedded = self._norm(self.embedding[token], "input_layernorm")
        x = torch.cat([embedded, self._norm(hidden, "hidden_norm")])
        query = self._turned((w["self_attn.q_proj.weight"] @ x).view(heads, dim), position)
        self.keys.append(self._turned((w["self_attn.k_proj.weight"] @ x).view(kv, dim), position))
        self.values.append((w["self_attn.v_proj.weight"] @ x).view(kv, dim))
        mixed = []
        for head in range(heads):
            own = head * kv // heads
            weights = torch.stack([query[head] @ k[own] for k in self.keys]) * dim**-0.5
            shares = weights.softmax(0)
            mixed.append(sum(a * v[own] for a, v in zip(shares, self.values, strict=True)))
        hidden = hidden + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = self._norm(hidden, "post_attention_layernorm")
        gated = F.silu(w["mlp.gate_proj.weight"] @ y) * (w["mlp.up_proj.weight"] @ y)
        hidden = hidden + w["mlp.down_proj.weight"] @ gated
        best = (w["lm_head.weight"] @ self._norm(hidden, "norm")).argmax()
        return hidden, int(self.ids[best])

    @torch.no_grad()
    def propose(self, tokens: list[int], count: int) -> list[int]:
        """The tokens after these, of which the target has computed all but the last."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        ids = torch.tensor([tokens[:-1]])
        states = self.network(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[i][0].double() for i in LAYERS], -1)
        fused = features @ self.w["fc.weight"].T
        fused = torch.cat([torch.zeros_like(fused[:1]), fused])
        for position, token in enumerate(tokens):
            hidden, best = self._step(token, position, fused[position])
        found = [best]
        for position in range(len(tokens), len(tokens) + count - 1):
            hidden, best = self._step(found[-1], position, hidden)
            found.append(best)
        return found


def test_it_proposes_what_a_plain_drafter_does(model: Model) -> None:
    """From the target's features of accepted tokens alone, whatever was rejected before.

    Ragged requests with prompts in chunks, a cached prefix, and steps in which some are right.
    """
    settings = {"prefill_chunk": 24, "max_batch": 4}
    wanted = served(make_engine(model, Full(), **settings))
    engine = drafted(model, **settings)
    replayed = replaying(engine, wanted, error=0.5)
    found = served(engine)
    assert_same(found, wanted)
    assert_drafted(found)
    again = served(engine, ((0, found[1].tokens[:100], 9),))
    assert again[0].num_cached >= 96
    plain = PlainDraft(model.draft, network_of(model))  # type: ignore[arg-type]
    made = list(replayed.made.items())
    assert len(made) > 40
    for tokens, proposed in [*made[::12], *made[-2:]]:
        assert plain.propose([*tokens], len(proposed)) == proposed


def network_of(_: Model) -> Any:
    return make_network(make_config("llama_group3", **FIELDS))


@pytest.mark.parametrize(
    "policy",
    [Full(), Quest(token_budget=5 * PAGE), Delta(token_budget=5 * PAGE)],
    ids=lambda one: one.name,
)
def test_tokens_and_logits_are_those_without_a_draft(model: Model, policy: Policy) -> None:
    wanted = served(make_engine(model, policy))
    found = served(drafted(model, policy))
    assert_same(found, wanted)


def test_a_draft_that_is_always_right_saves_steps(model: Model) -> None:
    wanted = served(make_engine(model, Full()))
    engine = drafted(model)
    replaying(engine, wanted, error=0.0)
    found = served(engine)
    assert_same(found, wanted)
    long = [sequence.stats() for sequence in found if len(sequence.generated) > 1]
    assert all(stats.acceptance_rate == 1.0 for stats in long)
    assert all(stats.accepted_length > COUNT for stats in long)


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


@pytest.mark.parametrize(
    ("policy", "draws"),
    [
        (SpeContext(token_budget=48), 1000),
        pytest.param(SpeContext(token_budget=48), 3000, marks=pytest.mark.slow),
        pytest.param(Full(), 3000, marks=pytest.mark.slow),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_outcomes_have_the_model_s_probabilities(model: Model, policy: Policy, draws: int) -> None:
    """Pearson's chi-square test of three tokens, of which two are proposed.

    The budget is enough for all tokens.
    """
    text, count = prompt(12), 3
    with torch.no_grad():
        shares = outcomes(network_of(model).double(), text, count, top_k=2)
    greedy = served(make_engine(model, Full()), ((0, text, 8),))
    engine = drafted(model, policy, max_batch=16)
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


# The draft chooses, too


@dataclass(frozen=True, kw_only=True)
class At(SpeContext):
    """SpeContext without a draft: chooses at given lengths and keeps each choice until then."""

    lengths: tuple[int, ...] = ()

    def _due(self, lengths: Any, prompts: Any) -> Any:
        if isinstance(lengths, Tensor):
            return torch.isin(lengths, torch.tensor(self.lengths))
        return torch.isin(torch.from_numpy(lengths), torch.tensor(self.lengths)).numpy()


@pytest.mark.parametrize("per_head", [True, False])
def test_greedy_tokens_are_those_without_speculation_under_the_same_choice_rule(
    model: Model, per_head: bool
) -> None:
    """Blocks begin where rejection ended the ones before; each reads what its newest token chose.

    The reference decodes token by token with the same head, chooses where blocks began, and reads
    the tokens since beside that choice.
    """
    budget = 24
    policy = SpeContext(token_budget=budget, sink_size=2, window_size=5, per_head=per_head)
    text, params = prompt(70), {"temperature": 0.0, "ignore_eos": True}
    guess = served(drafted(model, policy), ((0, text, 40),))  # some text, so that some are right
    engine = drafted(model, policy)
    replaying(engine, guess, error=0.1)
    starts: list[int] = []
    propose = engine.drafting._model.propose  # type: ignore[union-attr]

    def noted(decodes: list[Sequence], wanted: Any) -> Any:
        starts.extend(len(sequence.tokens) for sequence in decodes)
        return propose(decodes, wanted)

    engine.drafting._model.propose = noted  # type: ignore[union-attr,method-assign]
    found = served(engine, ((0, text, 40),), **params)
    assert_drafted(found)
    fields = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    same_rule = At(**fields | {"refresh_every": COUNT + 1}, lengths=tuple(starts))
    head = drafted(model).head_runner.head  # type: ignore[union-attr]
    reference = Engine(model, same_rule, make_engine(model, Full()).config, head=head)
    wanted = served(reference, ((0, text, 40),), **params)
    assert found[0].tokens == wanted[0].tokens
    difference = torch.stack(found[0].logits) - torch.stack(wanted[0].logits)
    assert difference.abs().max() <= 1e-4
    assert 1 < found[0].stats().accepted_length < COUNT + 1
    dense = served(make_engine(model, Full()), ((0, text, 40),), **params)
    assert (torch.stack(dense[0].logits) - torch.stack(found[0].logits)).abs().max() > 1e-2


def test_sequences_within_the_budget_are_read_in_full_beside_longer_ones(model: Model) -> None:
    policy = SpeContext(token_budget=44, sink_size=2, window_size=5)
    wanted = served(make_engine(model, Full()), ((0, prompt(20), 24), (0, prompt(80), 30)))
    engine = drafted(model, policy)
    replaying(engine, wanted)
    found = served(engine, ((0, prompt(20), 24), (0, prompt(80), 30)))
    assert_same(found[:1], wanted[:1])
    assert found[1].stats().attended_fraction < 0.6


def test_a_chosen_step_reads_no_more_than_the_budget(model: Model) -> None:
    engine = drafted(model, SpeContext(token_budget=24, sink_size=2, window_size=5))
    request = served(engine, ((0, prompt(90), 10),))[0]
    assert request.stats().attended_fraction <= 24 / 91


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
    assert 0 < (features - plain).norm() < 0.01 * plain.norm()


def test_a_policy_with_another_head_is_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match="the draft model is the retrieval head"):
        drafted(model, SpeContext(head="elsewhere"))


def test_a_budget_must_hold_the_proposed_tokens(model: Model) -> None:
    with pytest.raises(ConfigError, match="token_budget 8 must be at least 11"):
        drafted(model, SpeContext(token_budget=8, sink_size=2, window_size=5))


def test_a_choice_that_is_kept_for_steps_is_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match="keeps data of a sequence from step to step"):
        drafted(model, SpeContext(token_budget=64, refresh_every=4))


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
