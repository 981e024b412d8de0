"""A head is stored and read again, made at random, and refused by name where it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, Gemma4TextConfig

from keyhole.errors import ConfigError, ModelError
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.target import Target
from tests.disks import files_at_most
from tests.retrieval.drafts import edit, make_draft, make_target, reconfigure

VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_before_fc": True, "fc_norm": True, "attention_bias": True, "qk_norm": True},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"embedding": torch.randn(272, 32, generator=torch.Generator().manual_seed(3))},
]


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target()


@pytest.mark.parametrize("inputs", ["tokens", "tokens+features"])
@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "norms", "linear", "embedding"])
def test_a_stored_head_is_the_same_to_the_bit(
    variant: dict[str, Any], inputs: str, target: Any, tmp_path: Path
) -> None:
    head = RetrievalHead.from_eagle3(make_draft(tmp_path, **variant), target, inputs=inputs)
    head.save_pretrained(tmp_path / "head")
    again = RetrievalHead.from_pretrained(tmp_path / "head", target)
    assert again.config == head.config
    assert again.dropped_share == head.dropped_share
    stored, read = head.state_dict(), again.state_dict()
    assert stored.keys() == read.keys()
    assert all(torch.equal(stored[name], read[name]) for name in stored)
    assert torch.equal(again.embedding, head.embedding)
    token_ids = torch.arange(3, 10)
    fused = torch.ones(7, 32) if inputs == "tokens+features" else None
    found, expected = (h(token_ids, token_ids, fused) for h in (again, head))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_storing_leaves_two_files_and_no_embedding(target: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "head"
    head = RetrievalHead.random(target)
    for _ in range(2):  # the second replaces the first
        head.save_pretrained(path)
        assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    numbers = sum(p.numel() for p in head.parameters())
    assert (path / "model.safetensors").stat().st_size < 4 * numbers + 2000
    assert head.embedding.numel() > 2000


def test_a_stretched_head_stays_stretched(target: Any, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning):
        head = RetrievalHead.from_eagle3(make_draft(tmp_path), target, max_length=256)
    head.save_pretrained(tmp_path / "head")
    again = RetrievalHead.from_pretrained(tmp_path / "head", target)
    assert again.config.rope_factor == 4.0
    assert again.scale == head.scale


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt_bigcode", "deepseek_v3"])
@pytest.mark.parametrize("inputs", ["tokens", "tokens+features"])
def test_a_random_head_has_the_shape_of_its_target(kind: str, inputs: str, tmp_path: Path) -> None:
    target = make_target(kind, num_hidden_layers=4) if kind != "gpt_bigcode" else make_target(kind)
    head = RetrievalHead.random(target, inputs=inputs)
    assert head.config.objective == "random"
    assert head.config.num_heads == target.config.num_attention_heads
    head.save_pretrained(tmp_path / "head")  # it fits its target when it is read again
    RetrievalHead.from_pretrained(tmp_path / "head", target)
    token_ids = torch.arange(3, 259)
    fused = None
    if inputs == "tokens+features":
        states = [torch.randn(256, 32) for _ in head.config.feature_layers]
        fused = head.fuse(states)
    query, key = head(token_ids, token_ids, fused)
    assert query.shape == (256, head.config.num_heads, head.config.head_dim)
    assert key.shape == (256, head.config.num_kv_heads, head.config.head_dim)
    assert 0.8 < query.std() < 1.25


@pytest.mark.parametrize(
    ("config", "kv_heads", "length"),
    [
        (BloomConfig(n_layer=1, n_head=2, hidden_size=16, vocab_size=32), 2, 65536),
        (Gemma4TextConfig(num_hidden_layers=6), 4, 131072),
        (FalconConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4), 1, 2048),
    ],
)
def test_targets_with_fields_of_their_own(config: Any, kv_heads: int, length: int) -> None:
    """Bloom's and Gemma 4's ended in an AttributeError; Falcon's had a KV head per query head."""
    with torch.device("meta"):
        target = Target.of(AutoModelForCausalLM.from_config(config))
    assert (target.num_kv_heads, target.max_length) == (kv_heads, length)


def test_random_heads_differ_by_their_seed(target: Any) -> None:
    first, same, other = (RetrievalHead.random(target, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.q.weight, same.q.weight)
    assert not torch.equal(first.q.weight, other.q.weight)


OTHER_TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "hidden size": (
        {},
        {"hidden_size": 48},
        "draft .* was made for a target of hidden size 32, but this target has 48",
    ),
    "width of features": (
        {"target_hidden_size": 64},
        {},
        "draft .* was made for a target of hidden size 64, but this target has 32",
    ),
    "width of the embedding": (
        {"hidden_size": 16, "target_hidden_size": 32},
        {},
        "has hidden size 16 and no embed_tokens of its own, but the target's embedding has size 32",
    ),
    "vocabulary": (
        {},
        {"vocab_size": 300},
        "was made for a vocabulary of 272 tokens, but the target has 300",
    ),
    "query heads": (
        {},
        {"num_attention_heads": 6, "hidden_size": 48},
        "has 4 query heads and the target 6 query heads; one number must be a multiple",
    ),
    "KV heads": (
        {"num_attention_heads": 2},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
        "has 2 query heads and the target 3 KV heads; one number must be a multiple",
    ),
    "depth": (
        {"eagle_aux_hidden_state_layer_ids": [2, 9, 16]},
        {},
        r"reads the inputs of layers \(2, 9, 16\), but the target has 8 layers",
    ),
    "few layers": (
        {},
        {"num_hidden_layers": 4},
        r"only 4 layers, so that EAGLE-3's feature layers \(2, 2, 1\) are not distinct",
    ),
}


@pytest.mark.parametrize("case", OTHER_TARGETS)
def test_a_draft_of_another_target_is_refused(case: str, tmp_path: Path) -> None:
    fields, overrides, message = OTHER_TARGETS[case]
    hidden = overrides.get("hidden_size", 32)
    if "heads" in case:  # else the width would be refused first
        fields = fields | {"hidden_size": hidden}
    with pytest.raises(ModelError, match=message):
        RetrievalHead.from_eagle3(make_draft(tmp_path, **fields), make_target(**overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"hidden_size": 48},
            "reads features of hidden size 32, but the target has hidden size 48",
        ),
        ({"vocab_size": 300}, "vocabulary of 272 tokens, but the target has 300"),
        ({"num_hidden_layers": 4}, r"layers \(2, 4, 5\), but the target has 4 layers"),
    ],
)
def test_a_head_of_another_target_is_refused(
    overrides: dict[str, Any], message: str, target: Any, tmp_path: Path
) -> None:
    RetrievalHead.from_eagle3(make_draft(tmp_path), target).save_pretrained(tmp_path / "head")
    with pytest.raises(ModelError, match=message):
        RetrievalHead.from_pretrained(tmp_path / "head", make_target(**overrides))


Q, NORM = "midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q: None}, rf"has no tensor {Q} \[64, 64\]"),
        ({NORM: None}, rf"has no tensor {NORM} \[32\]"),
        ({"fc.weight": None}, r"has no tensor fc\.weight \[32, 96\]"),
        (
            {Q: torch.ones(64, 32)},
            rf"has a tensor {Q} of shape \[64, 32\], but it must be {Q} \[64, 64\]",
        ),
        (
            {Q: torch.ones(64, 64, dtype=torch.int8)},
            rf"has a tensor {Q} of type torch.int8; quantised weights cannot be read",
        ),
    ],
)
def test_a_damaged_draft_is_refused_with_the_tensor(
    changes: dict[str, Any], message: str, target: Any, tmp_path: Path
) -> None:
    path = make_draft(tmp_path)
    edit(path, **changes)
    with pytest.raises(ModelError, match=message):
        RetrievalHead.from_eagle3(path, target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "must have a hidden_size of at least 1, not None"),
        ({"num_key_value_heads": 3}, "num_heads 4 must be a multiple of num_kv_heads 3"),
        ({"head_dim": "16"}, "must have a head_dim of at least 1, not '16'"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0 must be a number above 0"),
        ({"norm_before_fc": True}, r"has no tensor input_norm\.weight \[96\]"),
        ({"fc_norm": True}, r"has no tensor fc_norm\.0\.weight \[32\]"),
        ({"eagle_config": {"norm_before_fc": True}}, r"has no tensor input_norm\.weight \[96\]"),
        ({"use_aux_hidden_state": False}, "use it with inputs='tokens'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "must be different layers"),
        ({"eagle_aux_hidden_state_layer_ids": "1"}, "must have layer numbers .*, not '1'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "unknown rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling factor None must be a number"),
        ({"rope_scaling": "linear"}, "rope_parameters 'linear' must be an object"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 must be 1"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    fields: dict[str, Any], message: str, target: Any, tmp_path: Path
) -> None:
    path = make_draft(tmp_path)
    reconfigure(path, **fields)
    with pytest.raises(ModelError, match=message):
        RetrievalHead.from_eagle3(path, target)


@pytest.mark.parametrize("read", [RetrievalHead.from_eagle3, RetrievalHead.from_pretrained])
def test_what_is_no_checkpoint_is_refused(read: Any, target: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="unknown head or draft 'nobody/nothing': it is not a folder"
    ):
        read("nobody/nothing", target)
    with pytest.raises(ModelError, match=r"it has no config\.json"):
        read(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config of .* cannot be read"):
        read(tmp_path, target)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config of .* must be an object"):
        read(tmp_path, target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"neither \*\.safetensors nor pytorch_model\.bin"):
        read(tmp_path, target)
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(b"no tensors")
        with pytest.raises(ModelError, match=r"the weights of .* cannot be read"):
            read(tmp_path, target)


def test_a_draft_is_no_head(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a retrieval head.* RetrievalHead\.from_eagle3"):
        RetrievalHead.from_pretrained(make_draft(tmp_path), target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": None}, "lacks head_dim; its fields are bias, dropped_share"),
        ({"more": 1}, "has more; its fields are"),
        ({"rope_theta": "far"}, "rope_theta 'far' must be a number"),
        ({"inputs": "token"}, "unknown inputs 'token'; did you mean 'tokens'"),
        ({"objective": "luck"}, "unknown objective 'luck'"),
        ({"bias": 1}, "bias 1 must be true or false"),
    ],
)
def test_a_damaged_head_is_refused(
    fields: dict[str, Any], message: str, target: Any, tmp_path: Path
) -> None:
    RetrievalHead.random(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    if fields.get("head_dim", 1) is None:
        del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        RetrievalHead.from_pretrained(tmp_path, target)


def test_a_head_without_one_of_its_tensors_is_refused(target: Any, tmp_path: Path) -> None:
    RetrievalHead.random(target).save_pretrained(tmp_path)
    edit(tmp_path, **{"k.weight": None})
    with pytest.raises(ModelError, match=r"has no tensor k\.weight \[16, 64\]"):
        RetrievalHead.from_pretrained(tmp_path, target)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_head_of_values_that_are_not_finite_is_refused(
    value: float, target: Any, tmp_path: Path
) -> None:
    """It was loaded, and selected whatever NaN compares to."""
    head = RetrievalHead.random(target)
    with torch.no_grad():
        head.k.weight[3, 5] = value
    head.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"NaN or infinite values in k\.weight"):
        RetrievalHead.from_pretrained(tmp_path, target)


def test_settings_that_cannot_be_are_refused(target: Any, tmp_path: Path) -> None:
    path = make_draft(tmp_path)
    with pytest.raises(ConfigError, match="inputs 'features' must be tokens or tokens"):
        RetrievalHead.from_eagle3(path, target, inputs="features")
    with pytest.raises(ConfigError, match="inputs 'features' must be tokens or tokens"):
        RetrievalHead.random(target, inputs="features")
    with pytest.raises(ConfigError, match="max_length 0 must be at least 1"):
        RetrievalHead.from_eagle3(path, target, max_length=0)
    path = make_draft(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ConfigError, match=r"max_length 128 must be at most 64, .* YaRN cannot"):
        RetrievalHead.from_eagle3(path, target, max_length=128)


def test_a_head_that_cannot_be_written_is_said(target: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the head cannot be written to"):
        RetrievalHead.random(target).save_pretrained(tmp_path / "file")


def test_a_head_stays_where_there_is_no_room_for_another(target: Any, tmp_path: Path) -> None:
    """The old one's config.json was removed first."""
    head = RetrievalHead.random(target)
    head.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with files_at_most(1000), pytest.raises(ConfigError, match="the head cannot be written to"):
        RetrievalHead.random(target, seed=1).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_weights_are_ordinary_parameters(target: Any) -> None:
    head = RetrievalHead.random(target)
    assert isinstance(head.q, nn.Linear)
    assert sorted(name for name, _ in head.named_parameters()) == [
        "embed_norm.weight",
        "fc.weight",
        "feature_norm.weight",
        "k.weight",
        "q.weight",
    ]
