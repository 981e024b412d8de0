"""A model with a random EAGLE-3 draft, and that draft once more: plainly, in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from keyhole import Full, Policy
from keyhole.engine.engine import Engine
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.retrieval.draft import DRAFT_FOLDER
from tests.checkpoints import make_config, make_model, make_network
from tests.policies.models import VOCAB
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
    """The draft in float64, one token after the other, with a list of keys and values.

    weights: of each token of the last call [heads, N], what it gives to the tokens up to itself.
    mixed: the attention [heads, D] of each token of the last call.
    pages: how many pages of PAGE tokens a given token reads, the newest two among them, by the
    weights of the token before all given ones; None: everything.
    """

    def __init__(self, path: Path, network: Any, pages: int | None = None) -> None:
        self.pages = pages
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

    def _read(self, position: int, weights: Tensor | None) -> list[set[int]]:
        """The tokens that each KV head reads; weights [heads, N]: those of the choosing token."""
        kv = self.config["num_key_value_heads"]
        if weights is None or self.pages is None:
            return [set(range(position + 1))] * kv
        newest = position // PAGE
        found = []
        for group in weights.view(kv, -1, weights.shape[1]).amax(1):
            scores = [float(group[at : at + PAGE].sum()) for at in range(0, len(group), PAGE)]
            order = sorted(range(newest - 1), key=lambda page: -scores[page])
            chosen = {*order[: self.pages - 2], newest - 1, newest}
            found.append({t for t in range(position + 1) if t // PAGE in chosen})
        return found

    def _step(
        self, token: int, position: int, hidden: Tensor, by: Tensor | None = None
    ) -> tuple[Tensor, int]:
        w, dim = self.w, self.config["head_dim"]
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        embedded = self._norm(self.embedding[token], "input_layernorm")
        x = torch.cat([embedded, self._norm(hidden, "hidden_norm")])
        query = self._turned((w["self_attn.q_proj.weight"] @ x).view(heads, dim), position)
        self.keys.append(self._turned((w["self_attn.k_proj.weight"] @ x).view(kv, dim), position))
        self.values.append((w["self_attn.v_proj.weight"] @ x).view(kv, dim))
        mixed, weights = [], []
        read = self._read(position, by)
        for head in range(heads):
            own = head * kv // heads
            logits = torch.stack([query[head] @ k[own] for k in self.keys]) * dim**-0.5
            logits[[t for t in range(position + 1) if t not in read[own]]] = -torch.inf
            weights.append(logits.softmax(0))
            mixed.append(sum(a * v[own] for a, v in zip(weights[-1], self.values, strict=True)))
        self.weights.append(torch.stack(weights))
        self.mixed.append(torch.stack(mixed))
        hidden = hidden + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = self._norm(hidden, "post_attention_layernorm")
        gated = F.silu(w["mlp.gate_proj.weight"] @ y) * (w["mlp.up_proj.weight"] @ y)
        hidden = hidden + w["mlp.down_proj.weight"] @ gated
        best = (w["lm_head.weight"] @ self._norm(hidden, "norm")).argmax()
        return hidden, int(self.ids[best])

    @torch.no_grad()
    def propose(
        self, tokens: Sequence[int], given: Sequence[int], states: Sequence[Tensor] | None = None
    ) -> list[int]:
        """Its tokens after these, and after each of the given ones, which it reads as its own.

        The target has computed all tokens but the last. states: the target's hidden states at the
        input of every layer, [T - 1, width]; None: with full attention.
        """
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.mixed: list[Tensor] = []
        if states is None:
            ids = torch.tensor([[*tokens[:-1]]])
            states = [x[0] for x in self.network(ids, output_hidden_states=True).hidden_states]
        features = torch.cat([states[i].double() for i in LAYERS], -1)
        fused = features @ self.w["fc.weight"].T
        fused = torch.cat([torch.zeros_like(fused[:1]), fused])
        for position, token in enumerate(tokens):
            hidden, best = self._step(token, position, fused[position])
        found, by = [best], self.weights[-1]
        for position, token in enumerate(given, len(tokens)):
            hidden, best = self._step(token, position, hidden, by)
            found.append(best)
        return found


def network_of(_: Model) -> Any:
    return make_network(make_config("llama_group3", **FIELDS))
