"""A retrieval head's choice, in a whole model, against the formula written down once more."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keyhole import LLM, ConfigError, SpeContext
from keyhole.errors import ModelError
from keyhole.models.model import HEAD_FOLDER, Model
from keyhole.retrieval.head import RetrievalHead
from tests.checkpoints import make_config, make_model, make_network
from tests.oracle import Array, Choice, SparseModel, best, enough, float64
from tests.policies.models import VOCAB, prompt, with_head
from tests.policies.recording import GREEDY, Recording, forced_logits, make_engine, run

FIELDS = {"num_hidden_layers": 8, "vocab_size": VOCAB}


def normed(x: Array, weight: Tensor, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * float64(weight)


def rotated(x: Array, position: int, theta: float) -> Array:
    """One token's heads [heads, D], as Llama rotates them."""
    half = x.shape[-1] // 2
    angles = np.array([position / theta ** (i / half) for i in range(half)])
    low, high = x[:, :half], x[:, half:]
    return np.concatenate(
        [
            low * np.cos(angles) - high * np.sin(angles),
            high * np.cos(angles) + low * np.sin(angles),
        ],
        -1,
    )


class Oracle:
    """Weights of a head over the tokens of one sequence, in loops and float64."""

    def __init__(self, head: RetrievalHead) -> None:
        self.head, self.config = head, head.config
        self.queries: list[Array] = []
        self.keys: list[Array] = []

    def take(self, token: int, features: list[Array] | None) -> None:
        """The next token, and the hidden states of the one before it (None: there is none)."""
        head, config = self.head, self.config
        x = normed(float64(head.embedding[token]), head.embed_norm.weight, config.rms_norm_eps)
        if config.inputs == "tokens+features":
            fused = np.zeros(config.hidden_size)
            if features is not None:
                fused = float64(head.fc.weight) @ np.concatenate(features)
            fused = normed(fused, head.feature_norm.weight, config.rms_norm_eps)
            x = np.concatenate([x, fused])
        place, D = len(self.keys), config.head_dim
        for kept, layer in ((self.queries, head.q), (self.keys, head.k)):
            kept.append(
                rotated((float64(layer.weight) @ x).reshape(-1, D), place, config.rope_theta)
            )

    def weights(self, lists: int) -> list[list[float]]:
        """What the newest token gives to all, for each list of the target."""
        heads, group = self.config.num_heads, self.config.num_heads // self.config.num_kv_heads
        rows = []
        for h in range(heads):
            logits = [
                float(self.queries[-1][h] @ key[h // group]) / math.sqrt(self.config.head_dim)
                for key in self.keys
            ]
            top = max(logits)
            total = sum(math.exp(x - top) for x in logits)
            rows.append([math.exp(x - top) / total for x in logits])
        if lists >= heads:
            return [rows[i * heads // lists] for i in range(lists)]
        per = heads // lists
        return [
            [max(column) for column in zip(*rows[i * per : (i + 1) * per], strict=True)]
            for i in range(lists)
        ]


def hidden_states(sparse: SparseModel, tokens: list[int], start: int) -> list[Array]:
    """At the input of every layer [T, width], tokens from `start` on under the choices."""
    sparse.start = start
    sparse.network.set_attn_implementation("oracle")
    with torch.no_grad():
        out = sparse.network(
            input_ids=torch.tensor([tokens]),
            use_cache=False,
            oracle=sparse,
            output_hidden_states=True,
        )
    return [float64(state[0]) for state in out.hidden_states]


def choices(
    head: RetrievalHead, network: Any, tokens: list[int], start: int, policy: SpeContext, lists: int
) -> dict[int, list[list[int]] | None]:
    """What the newest of `length` tokens reads, for each length after a prompt of `start`."""
    chosen: dict[int, list[list[int]] | None] = {}

    def choose(layer: int, query: Array, keys: Array, options: dict[str, Any]) -> Choice:
        read = chosen[keys.shape[1]]
        return None if read is None or layer in policy.full_layers else (read, read)

    sparse, oracle = SparseModel(network, choose), Oracle(head)
    layers, every = head.config.feature_layers, policy.refresh_every
    states = hidden_states(sparse, tokens[:start], start)
    made_at, kept = 0, []
    for place, token in enumerate(tokens):
        if place > start and layers:
            states = hidden_states(sparse, tokens[:place], start)
        oracle.take(token, [states[i][place - 1] for i in layers] if place and layers else None)
        length = place + 1
        if length <= start:
            continue
        chosen[length] = None
        if length > (policy.token_budget if policy.recall is None else policy.min_budget):
            if length % every == 0 or made_at == 0:
                made_at = length
                weights = oracle.weights(lists)
                kept = [best(w, policy.token_budget - every + 1, first=2, last=3) for w in weights]
                if policy.recall is not None:
                    kept = [
                        enough(w, few, policy.recall, policy.min_budget or 0, first=2, last=3)
                        for w, few in zip(weights, kept, strict=True)
                    ]
            chosen[length] = [few + list(range(made_at, length)) for few in kept]
    return chosen


@pytest.mark.one_in(15)
@pytest.mark.parametrize(
    ("kind", "inputs", "every", "recall"),
    [
        ("llama_group3", "tokens+features", 1, None),
        ("llama_group3", "tokens", 1, 0.5),
        ("llama_mha", "tokens+features", 3, None),
        ("llama_mha", "tokens+features", 2, 0.6),
        ("llama_mqa", "tokens", 4, None),
        ("deepseek_v3", "tokens+features", 1, None),
        ("gemma3", "tokens+features", 2, None),
    ],
)
@pytest.mark.parametrize("per_head", [True, False])
def test_a_whole_model_reads_what_the_head_prefers(
    tmp_path: Path, kind: str, inputs: str, every: int, recall: float | None, per_head: bool
) -> None:
    mixed = {"layer_types": ["sliding_attention", "full_attention"] * 4}
    fields = FIELDS | (mixed if kind == "gemma3" else {})
    model = with_head(make_model(kind, tmp_path, **fields), inputs)
    network = make_network(make_config(kind, **fields))
    assert model.head is not None
    head = RetrievalHead.from_pretrained(model.head, network)
    policy = SpeContext(
        token_budget=12,
        sink_size=2,
        window_size=3,
        refresh_every=every,
        recall=recall,
        min_budget=None if recall is None else 8,
        full_layers=(0,) if per_head else (1, 3),
        per_head=per_head,
    )
    recording = Recording(inner=policy)
    engine = make_engine(model, recording, prefill_chunk=16)
    params = dataclasses.replace(GREEDY, max_tokens=14)
    requests = [engine.add(text, params) for text in (prompt(1), prompt(20), prompt(39))]
    run(engine)
    layout = model.geometry(4).layers[1]
    # The oracle's keys of latent attention are expanded, one per head.
    lists = network.config.num_attention_heads if layout.shared_values else layout.num_kv_heads
    lists = lists if per_head else 1
    wanted: dict[int, list[list[int]] | None] = {}
    for request in requests:
        start = len(request.prompt)
        wanted |= choices(head, network, request.tokens[:-1], start, policy, lists)
    seen = set()
    for call in recording.calls:
        for row, length in enumerate(call.lengths):
            seen.add(length)
            found, everything = call.entries(row), [list(range(length))] * lists
            if call.layer in policy.full_layers:
                assert found is None
                continue
            assert (found or everything) == (wanted[length] or everything), (call.layer, length)
    assert seen == wanted.keys()
    assert sum(choice is not None for choice in wanted.values()) > 20
    narrow = any(choice and min(map(len, choice)) < 12 - every for choice in wanted.values())
    assert narrow == (recall is not None)


def test_a_model_without_a_head_is_refused_with_what_helps(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path, **FIELDS)
    with pytest.raises(ConfigError, match="train-head"):
        LLM(path, policy="spe_context")
    with pytest.raises(ModelError, match="elsewhere"):
        LLM(path, policy=SpeContext(head=str(tmp_path / "elsewhere")))


@pytest.mark.slow
def test_a_head_is_found_where_the_policy_says(tmp_path: Path) -> None:
    model = with_head(make_model("llama", tmp_path, **FIELDS))
    assert model.head is not None
    assert model.head.name == HEAD_FOLDER
    small = SpeContext(token_budget=12, window_size=3)
    beside = forced_logits(model, small, prompt(30), prompt(8))
    other = with_head(make_model("llama", tmp_path / "other", **FIELDS), seed=1)
    named = dataclasses.replace(small, head=str(other.head))
    assert not torch.equal(forced_logits(model, named, prompt(30), prompt(8)), beside)
    again = dataclasses.replace(small, head=str(model.head))
    assert torch.equal(forced_logits(model, again, prompt(30), prompt(8)), beside)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"token_budget": 8, "sink_size": 4, "window_size": 5}, "token_budget 8"),
        ({"token_budget": 8, "sink_size": 4, "window_size": 4, "refresh_every": 2}, "budget 8"),
        ({"window_size": 0}, "window_size 0"),
        ({"sink_size": -1}, "sink_size -1"),
        ({"refresh_every": 0}, "refresh_every 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, settings: dict[str, int], named: str
) -> None:
    model = with_head(make_model("llama", tmp_path, num_hidden_layers=2, vocab_size=VOCAB))
    with pytest.raises(ConfigError, match=named):
        make_engine(model, SpeContext(**settings))


def test_the_window_follows_a_small_budget(tmp_path: Path) -> None:
    model: Model = with_head(make_model("llama", tmp_path, num_hidden_layers=2, vocab_size=VOCAB))
    sizes = {
        budget: SpeContext(token_budget=budget).resolve(model.geometry(4)).window_size
        for budget in (16, 64, 1024)
    }
    assert sizes == {16: 4, 64: 16, 1024: 64}


def test_the_head_s_keys_are_counted(tmp_path: Path) -> None:
    model = with_head(make_model("llama", tmp_path, **FIELDS))
    read = {}
    for every in (1, 2):
        engine = make_engine(model, SpeContext(token_budget=16, refresh_every=every))
        request = engine.add(prompt(30), dataclasses.replace(GREEDY, max_tokens=5))
        run(engine)
        read[every] = request.stats().other_bytes_read
    numbers = 2 * 8  # KV heads and head size
    assert read[1] == sum(range(31, 35)) * numbers * 4
    assert read[2] == read[1] // 2
