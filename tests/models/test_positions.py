"""A shifted key or query is what the model's own code rotates at the other position.

The oracle is the network of transformers with its own layouts, layer types and rotations. Attention
is replaced by each token's own value, so that hidden states do not depend on positions at all, and
keys of two runs at different positions differ by their rotation alone, in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface

from keyhole import LLM
from keyhole.cache.argument import cache_argument
from keyhole.errors import ConfigError
from keyhole.kernels.reference import layers
from keyhole.models import attention
from keyhole.models.batch import PassThrough
from keyhole.models.loading import adopt, load
from keyhole.models.model import Model
from keyhole.models.positions import RopeShift
from keyhole.models.shrink import random_model, shrink
from tests.checkpoints import make_model

FAR = 262_144
BASE = {"rope_theta": 10000.0}
YARN = BASE | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = BASE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONGROPE = BASE | {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.5,
    "short_factor": [1.25, 1.5],
    "long_factor": [2.0, 4.0],
    "factor": 4.0,
}
PER_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

#: Kind of checkpoint and what its config says otherwise.
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear": (
        "llama",
        {"rope_parameters": BASE | {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama dynamic": (
        "llama",
        {
            "rope_parameters": BASE | {"rope_type": "dynamic", "factor": 4.0},
            "max_position_embeddings": FAR,
        },
    ),
    "qwen2 sliding": ("qwen2_sliding", {"rope_parameters": {"rope_theta": 1e6}}),
    "qwen3": ("qwen3", {}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "mistral": ("mistral_sliding", {}),
    "phi3": ("phi3", {}),
    "phi3 partial": ("phi3", {"rope_parameters": BASE | {"partial_rotary_factor": 0.75}}),
    "phi3 longrope": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": FAR,
            "max_position_embeddings": 4 * FAR,
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gemma3 linear": ("gemma3", {"rope_parameters": PER_LAYER}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss yarn": ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 halves": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v3 yarn": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
}

#: Where tokens stand, and how far each is shifted.
PLACES = torch.tensor([0, 1, 63, 64, 511, 4096, 99_999, 100_000, 0, 5, 100_000, 73_421])
BY = torch.tensor([0, 1, 7, 448, 100_000, 4096, 1, 100_000, 100_000, 77_777, -100_000, -73_000])


class Recorder(PassThrough):
    """Keeps what a cache would hold: keys as [T, Hkv, D], MLA's as [latent | rope]."""

    def __init__(self, model: Model) -> None:
        self.latent = model.geometry(16).layers[0].shared_values
        self.keys: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        cached = torch.cat([key, value], -1) if self.latent else key
        self.keys[layer_idx] = cached[0].transpose(0, 1)
        return key, value


def own_value(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: object, **named: Any
) -> tuple[Tensor, None]:
    """Attention in which each token sees itself only."""
    recorder: Recorder = named["recorder"]
    rows = query[0].transpose(0, 1)
    recorder.queries[module.layer_idx] = attention.absorb(module, rows) if recorder.latent else rows
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


AttentionInterface.register("own_value", own_value)


@pytest.fixture(scope="module", params=sorted(ROPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kind, overrides = ROPES[request.param]
    model = load(make_model(kind, tmp_path_factory.mktemp("model"), **overrides), "cpu")
    model.network.set_attn_implementation("own_value")
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> RopeShift:
    return RopeShift.of(load(make_model("llama", tmp_path_factory.mktemp("model")), "cpu"))


def run(model: Model, places: Tensor) -> Recorder:
    """The same tokens at these positions."""
    recorder = Recorder(model)
    with torch.no_grad():
        model.network(
            input_ids=torch.arange(10, 10 + len(places))[None],
            position_ids=places[None],
            use_cache=False,
            recorder=recorder,
            **{cache_argument(model.network): recorder},
        )
    return recorder


def exactly(rotary: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The forward of a rotary module with angles in float64, where its own have float32."""

    def forward(
        x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        prefix = f"{layer_type}_" if layer_type else ""
        frequencies = getattr(rotary, f"{prefix}inv_freq").double()
        angle = position_ids[..., None].double() * frequencies
        if "GptOss" not in type(rotary).__name__:  # which repeats them itself
            angle = torch.cat([angle, angle], -1)
        scaling = getattr(rotary, f"{prefix}attention_scaling")
        return (angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype)

    return forward


def deviation(model: Model, places: Tensor, by: Tensor) -> Tensor:
    """Largest error of any key or query per token, relative to the length of what is rotated."""
    rope_shift, here, there = RopeShift.of(model), run(model, places), run(model, places + by)
    errors = []
    for before, after in ((here.keys, there.keys), (here.queries, there.queries)):
        assert sorted(before) == list(range(4))
        for layer, x in before.items():
            shifted = rope_shift.shift(layer, x, by[:, None])
            assert shifted.shape == x.shape
            assert shifted.dtype == x.dtype
            error = (shifted - after[layer]).abs().amax(-1)
            size = 2 * len(rope_shift.frequencies[layer])
            rotated = x[..., -size:] if here.latent else x[..., :size]
            errors.append((error / rotated.norm(dim=-1)).amax(-1))
    return torch.stack(errors).amax(0)


@pytest.mark.one_in(8)
def test_a_turned_vector_is_the_one_of_the_other_position(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotary = model.network.base_model.rotary_emb
    monkeypatch.setattr(rotary, "forward", exactly(rotary))
    assert deviation(model, PLACES, BY).max() < 1e-6


@pytest.mark.one_in(6)
def test_it_differs_from_the_models_own_float32_by_the_rounding_of_its_angles(
    model: Model,
) -> None:
    """A frequency is at most 1: an angle at p is rounded by p * 2^-24 at most, here and there."""
    rounding = (PLACES + (PLACES + BY)) * 2.0**-24
    assert (deviation(model, PLACES, BY) <= rounding + 1e-6).all()


@pytest.mark.slow
def test_a_number_turns_all_alike(model: Model) -> None:
    rope_shift, recorder = RopeShift.of(model), run(model, PLACES)
    for layer, keys in recorder.keys.items():
        for by in (1, -64, 100_000):
            places = torch.full((len(keys), 1), by)
            assert torch.equal(
                rope_shift.shift(layer, keys, by), rope_shift.shift(layer, keys, places)
            )


@pytest.mark.one_in(3)
def test_what_is_not_rotated_stays(model: Model) -> None:
    rope_shift, recorder = RopeShift.of(model), run(model, PLACES)
    for layer, keys in recorder.keys.items():
        rotated = 2 * len(rope_shift.frequencies[layer])
        rest = slice(None, -rotated) if recorder.latent else slice(rotated, None)
        shifted = rope_shift.shift(layer, keys, 1234)
        assert torch.equal(shifted[..., rest], keys[..., rest])
        # Lengths of both halves of a pair stay together: a pure rotation, without YaRN's factor.
        assert torch.allclose(shifted.norm(dim=-1), keys.norm(dim=-1), rtol=1e-6)


def test_frequencies_are_read_in_float32_from_a_model_in_bfloat16(tmp_path: Path) -> None:
    path = make_model("gemma3", tmp_path)
    short, full = (RopeShift.of(load(path, "cpu", dtype)) for dtype in ("bfloat16", "float32"))
    local, world = full.frequencies[0], full.frequencies[1]
    assert local[-1].item() == pytest.approx(10000.0**-0.75)
    assert world[-1].item() == pytest.approx(1e6**-0.75)
    for a, b in zip(short.frequencies, full.frequencies, strict=True):
        assert torch.equal(a, b)


def test_bfloat16_is_rounded_once(llama: RopeShift) -> None:
    x = torch.randn(50, 2, 8).bfloat16()
    by = torch.arange(0, 100_000, 2000)[:, None]
    shifted = llama.shift(0, x, by)
    assert shifted.dtype == torch.bfloat16
    assert torch.equal(shifted, llama.shift(0, x.float(), by).bfloat16())


@pytest.mark.parametrize(("first", "second"), [(64, 448), (100_000, 1), (99_999, -99_999)])
def test_turns_add_up(llama: RopeShift, first: int, second: int) -> None:
    x = torch.randn(20, 2, 8)
    both = llama.shift(1, llama.shift(1, x, first), second)
    assert (both - llama.shift(1, x, first + second)).abs().max() < 2e-6


def test_by_nothing_changes_no_bit(llama: RopeShift) -> None:
    x = torch.randn(20, 2, 8).bfloat16()
    assert torch.equal(llama.shift(0, x, 0), x)
    assert torch.equal(llama.shift(0, x, torch.zeros(20, 1, dtype=torch.int64)), x)
    assert torch.equal(llama.shift(0, -0.0 * x, 0).view(torch.int16), (-0.0 * x).view(torch.int16))


def test_a_turned_mean_is_the_mean_of_what_was_turned(llama: RopeShift) -> None:
    """The block means of a stored document rely on this."""
    x = torch.randn(10, 64, 2, 8)
    by = torch.arange(10)[:, None] * 9973
    means = llama.shift(2, x.mean(1), by)
    assert (means - llama.shift(2, x, by[:, None]).mean(1)).abs().max() < 1e-6


def test_the_input_is_left_alone(llama: RopeShift) -> None:
    x = torch.randn(20, 2, 8)
    before = x.clone()
    llama.shift(0, x, 77)
    llama.shift(0, x.transpose(0, 1), 77)
    assert torch.equal(x, before)


def test_views_and_empty_rows(llama: RopeShift) -> None:
    x = torch.randn(2, 20, 8)
    shifted = llama.shift(0, x.transpose(0, 1), 77)
    assert torch.equal(shifted, llama.shift(0, x.transpose(0, 1).contiguous(), 77))
    assert llama.shift(0, x[:, :0], 77).shape == (2, 0, 8)


@pytest.mark.parametrize("length", [1, 6, 7, 8, 14, 30])
def test_pieces_join_where_they_were_cut(
    llama: RopeShift, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    x, by = torch.randn(length, 2, 8), torch.arange(length) * 997 - 5000
    whole = [llama.shift(0, x, 300), llama.shift(0, x, by[:, None])]
    monkeypatch.setattr(layers, "_PIECE", 7 * 2 * 8)
    assert torch.equal(llama.shift(0, x, 300), whole[0])
    assert torch.equal(llama.shift(0, x, by[:, None]), whole[1])
    one_by_one = [llama.shift(0, row, int(place)) for row, place in zip(x, by, strict=True)]
    assert torch.equal(torch.stack(one_by_one), whole[1])
    # One vector, one place per head, a place for all.
    assert torch.equal(llama.shift(0, x[0, 0], 300), whole[0][0, 0])
    heads = torch.tensor([300, -4000])
    assert torch.equal(llama.shift(0, x, heads)[:, 0], whole[0][:, 0])
    assert torch.equal(llama.shift(0, x, heads)[:, 1], llama.shift(0, x, -4000)[:, 1])
    assert torch.equal(llama.shift(0, x, torch.tensor(300)), whole[0])


def test_it_runs_where_the_vectors_are(llama: RopeShift) -> None:
    x = torch.empty(20, 2, 8, device="meta")
    for by in (77, torch.arange(20)[:, None]):
        assert llama.shift(0, x, by).device.type == "meta"


def test_a_million_positions_keep_float32_exactness(llama: RopeShift) -> None:
    """Against complex numbers in float64."""
    x = torch.randn(5, 8)
    pairs = torch.complex(x[:, :4].double(), x[:, 4:].double())
    angle = 1_000_000 * llama.frequencies[0]
    exact = pairs * torch.polar(torch.ones_like(angle), angle)
    found = llama.shift(0, x, 1_000_000)
    assert (found - torch.cat([exact.real, exact.imag], -1)).abs().max() < 2e-6


def test_learned_positions_are_refused_by_name(tmp_path: Path) -> None:
    model = load(make_model("gpt_bigcode", tmp_path), "cpu")
    with pytest.raises(ConfigError, match=r"stored documents .* 'gpt_bigcode' has no rotary"):
        RopeShift.of(model)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("cohere", "keys are rotated in pairs that Keyhole does not support"),
        ("glm", "keys are rotated in pairs that Keyhole does not support"),
        ("smollm3", "some layers do not rotate their keys"),
        ("beam", "the rotary embedding has no table of frequencies"),
        ("llama4_text", "attention chunks|no rotary embedding for all layers"),
    ],
)
def test_keys_that_cannot_be_turned_are_refused(family: str, reason: str) -> None:
    """Their documents would have been read at wrong positions, and nobody told."""
    model = adopt(random_model(shrink(CONFIG_MAPPING[family]())), device="cpu")
    with pytest.raises(ConfigError, match=reason):
        RopeShift.of(model)


def test_a_policy_that_shifts_keys_is_refused_by_its_name() -> None:
    """The error spoke of stored documents, which nobody had asked for."""
    model = random_model(shrink(CONFIG_MAPPING["glm"]()))
    with pytest.raises(ConfigError, match=r"^policy 'shadowkv' cannot be used with model 'Glm"):
        LLM(model, "shadowkv", device="cpu", memory="16MB")


def test_a_config_with_an_infinite_number_is_measured() -> None:
    """It was written as JSON and read again, which Bamba's time steps without a limit are not."""
    config = CONFIG_MAPPING["bamba"](attn_layer_indices=[1, 3], num_hidden_layers=4)
    assert config.time_step_limit[1] == float("inf")
    model = adopt(random_model(shrink(config)), device="cpu")
    assert len(RopeShift.of(model).frequencies) == 2


@pytest.mark.slow
def test_turns_that_are_kept_are_those_that_are_computed(llama: RopeShift) -> None:
    """Back, forth, further and far beyond what is kept, for all vectors in the same places too."""

    def one_by_one(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """So few rope_shift are computed."""
        return torch.stack([llama.shift(0, *one) for one in zip(x, by, strict=True)])

    x = torch.randn(80, 3, 8)
    for most in (0, 100, 130, 300, 2000, 1_000_000, 50):
        for sign in (1, -1):
            by = sign * torch.randint(0, most + 1, (80, 3))
            assert torch.equal(llama.shift(0, x, by), one_by_one(x, by))
            half = x.bfloat16()
            assert torch.equal(llama.shift(0, half, by[:, :1]), one_by_one(half, by[:, :1]))
