"""The draft model is EAGLE-3's layer, its unrolled training what a plain drafter would do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole import ConfigError
from keyhole.retrieval.draft import DRAFT_FOLDER, DraftModel
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training.distill import Distiller
from keyhole.retrieval.training.objectives import DECAY, Draft, eagle_loss, previous
from keyhole.retrieval.training.teacher import Teacher, TeacherTargets
from keyhole.retrieval.training.training_config import TrainingConfig
from tests.checkpoints import VOCAB_SIZE, make_config, make_network
from tests.retrieval.drafts import make_draft
from tests.retrieval.test_distill import Texts

LAYERS = (1, 2, 3)


def made(kind: str = "llama") -> tuple[Any, Draft, TeacherTargets]:
    network = make_network(make_config(kind))
    config = TrainingConfig(objective="eagle", length=96, feature_layers=LAYERS, learning_rate=1e-3)
    draft = Distiller(network, Texts(), config).module
    assert isinstance(draft, Draft)
    for weight in (draft.o.weight, draft.down.weight):  # zero at first
        torch.nn.init.normal_(weight, std=0.2)
    text = torch.randint(3, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))
    targets = Teacher(network, LAYERS).targets(text, torch.tensor([4, 11, 26]), logit_steps=3)
    return network, draft, targets


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """[heads, D] rotated as Llama does."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half).double() / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class PlainDrafter:
    """One token after the other, in float64, with a list of keys and values."""

    def __init__(self, network: Any, draft: Draft) -> None:
        self.w = {name: x.detach().double() for name, x in draft.named_parameters()}
        self.embedding = network.get_input_embeddings().weight.detach().double()
        self.output = network.get_output_embeddings().weight.detach().double()
        self.config = draft.head.config
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def step(self, token: int, position: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        w, config = self.w, self.config
        heads, kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        embedded = norm(self.embedding[token], w["head.embed_norm.weight"])
        x = torch.cat([embedded, norm(hidden, w["head.feature_norm.weight"])])
        query = turned((w["head.q.weight"] @ x).view(heads, dim), position, config.rope_theta)
        key = turned((w["head.k.weight"] @ x).view(kv, dim), position, config.rope_theta)
        self.keys.append(key)
        self.values.append((w["v.weight"] @ x).view(kv, dim))
        mixed, self.weights = [], []
        for head in range(heads):
            own = head * kv // heads
            logits = torch.stack([query[head] @ k[own] for k in self.keys]) * dim**-0.5
            weights = logits.softmax(0)
            self.weights.append(weights)
            mixed.append(sum(a * v[own] for a, v in zip(weights, self.values, strict=True)))
        hidden = hidden + w["o.weight"] @ torch.cat(mixed)
        y = norm(hidden, w["mlp_norm.weight"])
        gated = F.silu(w["gate.weight"] @ y) * (w["up.weight"] @ y)
        hidden = hidden + w["down.weight"] @ gated
        return hidden, self.output @ norm(hidden, w["norm.weight"])


def test_unrolled_steps_are_those_of_a_plain_drafter() -> None:
    network, draft, targets = made()
    found, _ = draft.unroll(targets, 3)
    norms = [part.weight.detach().double() for part in draft.head.feature_norms]
    states = [norm(h.double(), w) for h, w in zip(targets.hidden, norms, strict=True)]
    states = torch.cat(states, -1)
    fused = states @ draft.head.fc.weight.detach().double().T
    for number, row in enumerate(targets.rows.tolist()):
        plain = PlainDrafter(network, draft)
        for j in range(row + 1):
            before = fused[j - 1] if j else torch.zeros_like(fused[0])
            hidden, logits = plain.step(int(targets.token_ids[j]), j, before)
        for step in range(3):
            if step:
                at = row + step
                hidden, logits = plain.step(int(targets.token_ids[at]), at, hidden)
            difference = (found[step][number].detach().double() - logits).abs().max()
            assert float(difference) < 1e-4 * float(logits.abs().max())


def test_the_loss_is_the_weighted_divergence_of_the_steps() -> None:
    _, draft, targets = made()
    assert targets.logits is not None
    total = weight = 0.0
    for step, logits in enumerate(draft.unroll(targets, 3)[0]):
        wanted, found = (
            targets.logits[:, step].double().softmax(-1),
            logits.double().log_softmax(-1),
        )
        total += DECAY**step * _weighted(targets, step, (wanted * (wanted.log() - found)).sum(-1))
        weight += DECAY**step
    # The loss is computed in float32, the sum here in float64.
    assert eagle_loss(draft, targets)[0].item() == pytest.approx(total / weight, rel=1e-5)


def test_an_attention_weight_adds_the_divergence_of_its_attention() -> None:
    """Beside EAGLE's loss: the KL divergence of the layer's own weights from the target's mass."""
    network = make_network(make_config("llama"))
    settings = {"objective": "eagle", "length": 96, "feature_layers": LAYERS, "num_queries": 8}
    plain, joint = (
        Distiller(network, Texts(), TrainingConfig(**settings, attention_weight=weight))
        for weight in (0.0, 0.5)
    )
    targets = plain._targets(Random(0), 96)
    without, _ = plain._loss(targets, Random(0))
    loss, _ = joint._loss(targets, Random(0))
    draft = joint.module
    assert isinstance(draft, Draft)
    places = torch.arange(len(targets.token_ids))
    query, keys, _ = draft.project(
        targets.token_ids, places, previous(draft.head.fuse(targets.hidden))
    )
    total = mass = 0.0
    for number, row in enumerate(targets.rows.tolist()):
        free = slice(4, max(4, row - 63))  # neither sinks nor window
        for group in range(keys.shape[1]):
            own = query[row].double().unflatten(0, (keys.shape[1], -1))[group]
            logits = own @ keys[: row + 1, group].double().T * draft.head.scale
            found = logits.softmax(-1).mean(0)[free]
            wanted = targets.mass[group, number, : row + 1].double()[free]
            p, q = wanted / wanted.sum(), found / found.sum()
            total += (wanted.sum() * (p * (p / q).log()).sum()).item()
            mass += wanted.sum().item()
    assert (loss - without).item() == pytest.approx(0.5 * total / mass, rel=1e-4)
    loss.backward()
    with_attention = draft.head.q.weight.grad
    without.backward()
    alone = plain.module.get_parameter("head.q.weight").grad
    assert not torch.allclose(with_attention, alone)


def continued(tmp_path: Path, **settings: Any) -> tuple[Distiller, Distiller]:
    """The training of a draft, and a second one that goes on from it."""
    network = make_network(make_config("llama"))
    config = TrainingConfig(
        objective="eagle", length=96, feature_layers=LAYERS, num_queries=4, batch_tokens=512
    )
    first = Distiller(network, Texts(), config)
    for _ in range(2):
        first.train_step()
    first.save_pretrained(tmp_path)
    again = replace(config, start=str(tmp_path / DRAFT_FOLDER), **settings)
    return first, Distiller(network, Texts(), again)


def test_a_draft_that_is_trained_further_keeps_its_head(tmp_path: Path) -> None:
    first, second = continued(tmp_path, attention_weight=1.0)
    before = {name: x.clone() for name, x in second.module.state_dict().items()}
    assert all(torch.equal(x, before[name]) for name, x in first.module.state_dict().items())
    for _ in range(2):
        second.train_step()
    for name, x in second.module.state_dict().items():
        assert torch.equal(x, before[name]) == name.startswith("head."), name
    second.save_pretrained(tmp_path / "second")
    heads = (
        RetrievalHead.from_pretrained(p, first._network) for p in (tmp_path, tmp_path / "second")
    )
    one, other = (head.state_dict() for head in heads)
    assert all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.slow
def test_its_attention_for_proposed_tokens_is_compared_with_the_target_s(tmp_path: Path) -> None:
    """The KL divergence of the weights of each later step, but for sinks and window."""
    _, second = continued(tmp_path, attention_weight=0.5)
    targets, draft = second._targets(Random(3), 96), second.module
    assert isinstance(draft, Draft)
    assert targets.later is not None
    hidden = previous(draft.head.fuse(targets.hidden)).detach().double()
    divergences = []
    for step in range(1, 4):
        total = mass = 0.0
        for number, row in enumerate(targets.rows.tolist()):
            plain = PlainDrafter(second._network, draft)
            for at in range(row + 1):
                own, _ = plain.step(int(targets.token_ids[at]), at, hidden[at])
            for at in range(row + 1, row + step + 1):
                own, _ = plain.step(int(targets.token_ids[at]), at, own)
            free = slice(4, max(4, row + step - 63))
            for group, its in enumerate(torch.stack(plain.weights).chunk(len(targets.mass))):
                wanted = targets.later[step - 1, group, number].double()[free]
                p, q = wanted / wanted.sum(), its.mean(0)[free] / its.mean(0)[free].sum()
                total += (wanted.sum() * (p * (p / q).log()).sum()).item()
                mass += wanted.sum().item()
        divergences.append(total / mass)
    drafting, apart = eagle_loss(draft, targets)
    # The draft runs in float32 for up to three steps, each on the output of the one before.
    assert apart.item() == pytest.approx(sum(divergences) / 3, rel=1e-4)
    loss, _ = second._loss(targets, Random(0))
    # The same two numbers, added in float32.
    assert loss.item() == pytest.approx(drafting.item() + 0.5 * apart.item(), rel=1e-6)


def test_the_target_s_attention_of_later_tokens_is_that_of_their_rows() -> None:
    network = make_network(make_config("llama"))
    text = torch.randint(3, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))
    teacher, rows = Teacher(network, LAYERS), torch.tensor([4, 6, 26])
    found = teacher.targets(text, rows, later_steps=2)
    assert found.later is not None
    for ahead, mass in enumerate([found.mass, *found.later]):
        assert torch.equal(mass, teacher.targets(text, rows + ahead).mass)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_vocab_size": VOCAB_SIZE}, "an output matrix of its own"),
        ({"norm_before_residual": True}, "not a draft written by `keyhole train-head`"),
    ],
)
def test_drafts_of_another_form_are_not_trained_further(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    network = make_network(make_config("llama"))
    sizes = {"vocab_size": VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    start = str(make_draft(tmp_path, **sizes, **fields))
    with pytest.raises(ConfigError, match=named):
        Distiller(network, Texts(), TrainingConfig(objective="eagle", start=start))


def _weighted(targets: TeacherTargets, step: int, losses: Tensor) -> float:
    """The mean of losses [R], weighted by how likely the tokens up to that step are."""
    assert targets.logits is not None
    weights = []
    for number, row in enumerate(targets.rows.tolist()):
        likely = 1.0
        for ahead in range(step + 1):
            chances = targets.logits[number, ahead].double().softmax(-1)
            likely *= float(chances[targets.token_ids[row + ahead + 1]])
        weights.append(likely)
    return sum(w * x for w, x in zip(weights, losses.detach().tolist(), strict=True)) / sum(weights)


@pytest.mark.slow
def test_a_trained_draft_is_written_so_that_it_drafts(tmp_path: Path) -> None:
    """Its layer, read as an EAGLE-3 checkpoint, proposes what the layer in training predicts."""
    network = make_network(make_config("llama"))
    config = TrainingConfig(
        objective="eagle", length=96, feature_layers=LAYERS, tokens=1000, batch_tokens=512
    )
    distiller = Distiller(network, Texts(), config)
    for _ in range(3):
        distiller.train_step()
    distiller.save_pretrained(tmp_path)
    draft = distiller.module
    assert isinstance(draft, Draft)
    text = torch.randint(3, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))
    targets = Teacher(network, LAYERS).targets(text, torch.tensor([29]), logit_steps=1)
    (wanted,), _ = draft.unroll(targets, 1)

    stored = DraftModel.from_eagle3(tmp_path / DRAFT_FOLDER, network)
    assert stored.head.config.feature_layers == LAYERS
    hidden = previous(stored.head.fuse(targets.hidden))
    query, keys, values = stored.project(text, torch.arange(30), hidden)
    weights = torch.einsum("hgd,nhd->hgn", query[29].unflatten(0, (keys.shape[1], -1)), keys)
    weights = (weights * stored.head.scale).softmax(-1)
    mixed = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)[None]
    tokens, features = stored.step(hidden[29:], mixed)
    assert tokens.tolist() == wanted.argmax(-1).tolist()
    logits = stored.lm_head(stored.norm(features))
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs", ["tokens", "tokens+features"])
def test_the_pruned_head_gives_the_layers_products(inputs: str) -> None:
    _, draft, targets = made("llama_group3")
    head = draft.prune(inputs)
    ids, places = targets.token_ids, torch.arange(len(targets.token_ids))
    fused = draft.head.fuse(targets.hidden)
    query, key, _ = draft.project(ids, places, fused)
    if inputs == "tokens":  # what the layer gives where the features' half adds nothing
        with torch.no_grad():
            draft.head.feature_norm.weight.zero_()
        query, key, _ = draft.project(ids, places, fused)
    pruned = head(ids, places, None if inputs == "tokens" else fused)
    torch.testing.assert_close(pruned, (query, key))
    assert head.config.objective == "eagle"
