"""Decoder layers that take few launches compute what transformers' own code computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from keyhole import SamplingParams
from keyhole.kernels.triton import overlap
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.models.modules import fused_layer
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from tests.checkpoints import KINDS, make_config, make_model, make_network
from tests.policies.models import prompt
from tests.policies.recording import make_engine, run

FUSED = ("llama_group3", "mistral_sliding", "qwen2_sliding", "qwen3")
ALL = frozenset({1, 2, 4})
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "delta": {"token_budget": 12, "full_layers": (0,), "delta_layers": (1,)},
    "quest": {"token_budget": 12},
    "streaming_llm": {},
}


def plain(path: str) -> Model:
    """A model with the layers that it has on a GPU before they are fused."""
    model = load(path, "cpu", "float32")
    for module in model.network.modules():
        if type(module).__name__ == "FastLinear":
            module.__class__ = nn.Linear
        if isinstance(module, fused_layer.FusedLayer):
            module.__class__ = type(module).__mro__[2]
    return model


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every call of a fused layer."""
    calls: list[int] = []
    original = fused_layer.decoder_layer

    def decoder_layer(
        of: fused_layer.Operands, x: torch.Tensor, attend: fused_layer.Attend
    ) -> torch.Tensor:
        calls.append(len(x))
        return original(of, x, attend)

    monkeypatch.setattr(fused_layer, "decoder_layer", decoder_layer)
    return calls


def logits(model: Model, policy: Policy, batch: int, **settings: Any) -> torch.Tensor:
    """After prompts of different lengths and after six more tokens each."""
    engine = make_engine(model, policy, max_batch=8, **settings)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    texts = [prompt(30 + 7 * i) for i in range(batch)]
    given = prompt(6)
    requests = [engine.add(text, params, given=given, keep_logits=True) for text in texts]
    run(engine)
    return torch.stack([torch.stack(request.logits) for request in requests])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_known_arithmetic_are_found_by_running_them(kind: str) -> None:
    network = make_network(make_config(kind))
    found = fused_layer.fusible(network)
    known = kind.split("_")[0] in {name.split("_")[0] for name in FUSED}
    assert len(found) == (network.config.num_hidden_layers if known else 0)


def test_other_activations_biases_and_modules_are_left() -> None:
    for field, value in (("hidden_act", "gelu"), ("mlp_bias", True)):
        assert not fused_layer.fusible(make_network(make_config("llama", **{field: value})))
    assert fused_layer.fusible(make_network(make_config("llama", attention_bias=True)))
    experts = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=8, num_experts=4)
    assert not fused_layer.is_known(Qwen3MoeDecoderLayer(experts, 0), experts, 0)
    assert not fused_layer.is_known(nn.Linear(2, 2), make_config("llama"), 0)

    class Scaled(LlamaDecoderLayer):
        def forward(self, hidden_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
            return super().forward(hidden_states, *rest, **more) * 1.01

    class ScaledMLP(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.01

    config = make_config("llama")
    before = torch.random.get_rng_state()
    layer = LlamaDecoderLayer(config, 0)
    scaled, other = Scaled(config, 0), LlamaDecoderLayer(config, 0)
    other.mlp = ScaledMLP(config)
    torch.random.set_rng_state(before)
    assert fused_layer.is_known(layer, config, 0)
    assert not fused_layer.is_known(scaled, config, 0)
    assert not fused_layer.is_known(other, config, 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert config.hidden_size == make_config("llama").hidden_size


def test_layers_without_rope_are_left() -> None:
    config = AutoConfig.for_model(
        "smollm3",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        no_rope_layers=[1, 0, 1, 0],
        pad_token_id=0,
    )
    network = make_network(config)
    layers = network.base_model.layers
    assert fused_layer.fusible(network) == [layers[0], layers[2]]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("batch", [1, 3])
def test_an_engine_has_the_same_logits(
    tmp_path: Path, counted: list[int], kind: str, batch: int
) -> None:
    model = plain(make_model(kind, tmp_path))
    chosen = POLICIES if kind != "mistral_sliding" else {"full": {}}  # no layer sees everything
    policies = [make_policy(name, settings) for name, settings in chosen.items()]
    wanted = [logits(model, policy, batch) for policy in policies]
    fused_layer.fuse(fused_layer.fusible(model.network), ALL)
    for policy, expected in zip(policies, wanted, strict=True):
        counted.clear()
        found = logits(model, policy, batch)
        # Six tokens after a prompt that takes a step of its own.
        assert counted.count(batch) >= 5 * model.network.config.num_hidden_layers
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_pages_of_8_bits(tmp_path: Path, counted: list[int]) -> None:
    model = plain(make_model("llama", tmp_path))
    policy = make_policy("full", {})
    wanted = logits(model, policy, 2, kv_dtype="int8")
    fused_layer.fuse(fused_layer.fusible(model.network), ALL)
    found = logits(model, policy, 2, kv_dtype="int8")
    assert 2 in counted
    # A number on the edge between two codes may fall to the other one.
    assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()


def test_only_the_measured_numbers_of_tokens_are_fused(tmp_path: Path, counted: list[int]) -> None:
    model = plain(make_model("llama", tmp_path))
    policy = make_policy("full", {})
    wanted = logits(model, policy, 3)
    layers = fused_layer.fusible(model.network)
    fused_layer.fuse(layers, frozenset())
    assert not any(isinstance(layer, fused_layer.FusedLayer) for layer in layers)
    fused_layer.fuse(layers, frozenset({2}))
    counted.clear()
    assert torch.equal(logits(model, policy, 3), wanted)
    assert set(counted) <= {2}
    logits(model, policy, 2)
    assert set(counted) == {2}
    assert fused_layer.fused_tokens(model.network) == [2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hooked", ["self_attn", "mlp", "mlp.down_proj"])
def test_layers_with_hooks_or_other_weights_go_through_transformers(
    tmp_path: Path, counted: list[int], hooked: str
) -> None:
    model = plain(make_model("llama", tmp_path))
    layers = fused_layer.fusible(model.network)
    fused_layer.fuse(layers, ALL)
    seen: list[int] = []
    projection, part = layers[1].mlp.down_proj, layers[1].get_submodule(hooked)
    handle = part.register_forward_hook(lambda *given: seen.append(given[2][0].shape[-2]))
    logits(model, make_policy("full", {}), 1)
    assert 1 in seen
    steps = counted.count(1)
    handle.remove()
    counted.clear()
    logits(model, make_policy("full", {}), 1)
    assert counted.count(1) * 3 == steps * 4

    class Other(nn.Linear):
        pass

    projection.__class__ = Other
    counted.clear()
    logits(model, make_policy("full", {}), 1)
    assert counted.count(1) == steps


def test_gradients_and_calls_without_an_engine_go_through_transformers(
    tmp_path: Path, counted: list[int]
) -> None:
    network = make_network(make_config("llama"))
    tokens = torch.arange(5, 9)[None]
    wanted = network(tokens).logits
    fused_layer.fuse(fused_layer.fusible(network), ALL)
    counted.clear()
    assert torch.equal(network(tokens).logits, wanted)
    network(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert not counted


@pytest.mark.parametrize("weights", [None, "int4", "int8"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_steps_of_a_loaded_cpu_model_are_fused(
    tmp_path: Path, counted: list[int], weights: str | None, batch: int
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    path = make_model("qwen2_sliding", tmp_path, **sizes)
    model = load(path, "cpu", "float32", weights=weights)
    policy = make_policy("full", {})
    found = logits(model, policy, batch)
    assert counted.count(batch) >= 5 * model.network.config.num_hidden_layers
    fused_layer.fuse(fused_layer.fusible(model.network), frozenset({16}))
    counted.clear()
    wanted = logits(model, policy, batch)
    assert not counted
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("times", "same", "wanted"),
    [
        ({1: (9, 5, 4), 2: (9, 8.9, 8), 4: (9, 10, 9)}, True, ({1, 2}, True)),
        ({1: (9, 5, 4), 2: (9, 8.9, 8), 4: (9, 10, 9)}, False, ({1}, False)),
        ({1: (9, 5, 6), 2: (9, 5, 6), 4: (9, 5, 6)}, True, ({1, 2, 4}, False)),
        ({1: (9, 10, 10), 2: (9, 10, 10), 4: (9, 10, 10)}, True, (set(), False)),
    ],
)
def test_the_fastest_way_with_the_same_results_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    times: dict[int, tuple[float, ...]],
    same: bool,
    wanted: tuple[set[int], bool],
) -> None:
    layers = fused_layer.fusible(make_network(make_config("llama")))
    asked: list[list[Tensor]] = []

    def medians(works: Sequence[Callable[[], Tensor]]) -> list[float]:
        asked.append([work() for work in works])
        return list(times[len(asked[-1][0])][: len(works)])

    original = fused_layer.decoder_layer

    def decoder_layer(of: fused_layer.Operands, x: Tensor, attend: fused_layer.Attend) -> Tensor:
        wrong = overlap._wanted and not same
        return original(of, x, attend) + (1e-3 if wrong else 0.0)

    monkeypatch.setattr(fused_layer, "decoder_layer", decoder_layer)
    monkeypatch.setattr(fused_layer, "_medians", medians)
    monkeypatch.setattr(overlap, "is_possible", lambda: True)
    choice = fused_layer._measured(layers)
    assert (set(choice.tokens), choice.overlap) == wanted
    assert not overlap._wanted
    for stock, *fused in asked:  # the same work
        assert len(fused) == 1 + same
        for found in fused:
            torch.testing.assert_close(found, stock, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_fails_leaves_transformers_layers() -> None:
    layers = fused_layer.fusible(make_network(make_config("llama")))
    with pytest.warns(RuntimeWarning, match="fusing layers failed"):
        assert fused_layer.measured(layers) == (frozenset(), False)
