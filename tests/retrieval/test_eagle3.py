"""A head cut out of a draft scores tokens as the draft's own attention does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keyhole.retrieval.head import HeadConfig, RetrievalHead
from keyhole.retrieval.head_files import dropped_share
from tests.retrieval.drafts import FIELDS, attention_logits, make_draft, make_target, shapes

T = 20
LAYOUTS = ("original", "speculators")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "both_norms": {"norm_before_fc": True, "fc_norm": True},
    "other_layers": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]},
    "two_layers": {"eagle_aux_hidden_state_layer_ids": [0, 7]},
    "bias": {"attention_bias": True},
    "qk_norm": {"qk_norm": True},
    "multi_head": {"num_key_value_heads": 4},
    "norm_output": {"norm_output": True, "norm_before_residual": True},
    "half_the_heads": {"num_attention_heads": 2},
}


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target()


def prompt(seed: int = 0) -> Tensor:
    return torch.randint(3, 272, (T,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def states(target: Any, token_ids: Tensor, layers: tuple[int, ...]) -> list[Tensor]:
    out = target(token_ids[None], output_hidden_states=True)
    return [out.hidden_states[layer][0] for layer in layers]


@torch.no_grad()
def logits(head: RetrievalHead, target: Any, token_ids: Tensor) -> Tensor:
    """What the head scores, [heads, T, T], with features as it meets them: those before a token."""
    fused = None
    if head.config.uses_features:
        fused = head.fuse(states(target, token_ids, head.config.feature_layers))
        fused = torch.cat([torch.zeros_like(fused[:1]), fused[:-1]])
    query, key = head(token_ids, torch.arange(len(token_ids)), fused)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.einsum("qhd,nhd->hqn", query, key) * head.scale


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_with_features_scores_like_the_draft(
    variant: str, layout: str, target: Any, tmp_path: Path
) -> None:
    path = make_draft(tmp_path, layout=layout, **VARIANTS[variant])
    head = RetrievalHead.from_eagle3(path, target)
    layers = tuple(VARIANTS[variant].get("eagle_aux_hidden_state_layer_ids", (2, 4, 5)))
    assert head.config.feature_layers == layers
    token_ids, table = prompt(), target.get_input_embeddings().weight
    # The draft's step i reads token i + 1 and the features of position i; it has no step for token
    # 0, and none with the features of the last.
    features = [state[:-1] for state in states(target, token_ids, layers)]
    expected = attention_logits(path, token_ids[1:], features, table)
    found = logits(head, target, token_ids)[:, 1:, 1:]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_tokens_scores_by_the_first_half(
    layout: str, target: Any, tmp_path: Path
) -> None:
    path = make_draft(tmp_path, layout=layout)
    head = RetrievalHead.from_eagle3(path, target, inputs="tokens")
    assert head.config.feature_layers == ()
    token_ids, table = prompt(), target.get_input_embeddings().weight
    expected = attention_logits(path, token_ids, None, table)
    found = logits(head, target, token_ids).double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_head_of_tokens_needs_nothing_that_makes_features(target: Any, tmp_path: Path) -> None:
    path = make_draft(tmp_path, use_aux_hidden_state=False)
    head = RetrievalHead.from_eagle3(path, target, inputs="tokens")
    assert sorted(name for name, _ in head.named_parameters()) == [
        "embed_norm.weight",
        "k.weight",
        "q.weight",
    ]


def test_only_the_places_of_tokens_to_each_other_count(target: Any, tmp_path: Path) -> None:
    head = RetrievalHead.from_eagle3(make_draft(tmp_path), target, inputs="tokens")
    token_ids, here = prompt(), torch.arange(T)
    products = []
    for positions in (here, here + 37):
        query, key = head(token_ids, positions, None)
        products.append(torch.einsum("qhd,nhd->hqn", query[:, :2], key))
    torch.testing.assert_close(*products, atol=1e-4, rtol=1e-4)


def test_a_pickled_draft_is_the_same(target: Any, tmp_path: Path) -> None:
    paths = [make_draft(tmp_path, pickled=pickled) for pickled in (False, True)]
    first, second = (RetrievalHead.from_eagle3(path, target) for path in paths)
    assert torch.equal(logits(first, target, prompt()), logits(second, target, prompt()))


def test_the_embedding_is_the_targets_own_memory(target: Any, tmp_path: Path) -> None:
    table = target.get_input_embeddings().weight
    path = make_draft(tmp_path, embedding=table)  # some drafts bring a copy
    for head in (
        RetrievalHead.from_eagle3(make_draft(tmp_path), target),
        RetrievalHead.from_eagle3(path, target),
    ):
        assert head.embedding.data_ptr() == table.data_ptr()
        assert not head.config.own_embedding
        assert "embedding" not in dict(head.named_parameters())


@pytest.mark.parametrize("width", [32, 16])
def test_a_draft_may_bring_an_embedding_of_its_own(width: int, target: Any, tmp_path: Path) -> None:
    table = torch.randn(272, width, generator=torch.Generator().manual_seed(5))
    path = make_draft(tmp_path, embedding=table, hidden_size=width, target_hidden_size=32)
    head = RetrievalHead.from_eagle3(path, target)
    token_ids = prompt()
    features = [state[:-1] for state in states(target, token_ids, (2, 4, 5))]
    expected = attention_logits(path, token_ids[1:], features, table)
    found = logits(head, target, token_ids)[:, 1:, 1:].double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not head.embedding.requires_grad


def test_gradients_reach_every_weight_of_the_head_and_none_of_the_target(
    target: Any, tmp_path: Path
) -> None:
    path = make_draft(tmp_path, norm_before_fc=True, fc_norm=True, qk_norm=True)
    head = RetrievalHead.from_eagle3(path, target)
    token_ids = prompt()
    fused = head.fuse(states(target, token_ids, (2, 4, 5)))
    query, key = head(token_ids, torch.arange(T), fused)
    torch.einsum("qhd,nhd->", query[:, :2], key).backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_there_may_be_several_texts_at_once(target: Any, tmp_path: Path) -> None:
    head = RetrievalHead.from_eagle3(make_draft(tmp_path), target)
    texts, here = torch.stack([prompt(0), prompt(1)]), torch.arange(T)
    fused = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(2))
    together = head(texts, here.expand(2, -1), fused)
    for i in range(2):
        alone = head(texts[i], here, fused[i])
        torch.testing.assert_close((together[0][i], together[1][i]), alone)


def test_a_head_takes_the_targets_dtype(tmp_path: Path) -> None:
    path = make_draft(tmp_path, dtype=torch.float16)
    exact, rough = make_target(), make_target().bfloat16()
    head = RetrievalHead.from_eagle3(path, rough)
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    query, key = head(prompt(), torch.arange(T), torch.zeros(T, 32, dtype=torch.bfloat16))
    assert query.dtype == key.dtype == torch.bfloat16
    expected = logits(RetrievalHead.from_eagle3(path, exact), exact, prompt())
    found = logits(head, rough, prompt()).float()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


#: EAGLE-3's published draft for Llama 3.1 8B.
LLAMA_8B = {
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("inputs", "brings_embedding", "share"),
    [
        ("tokens", False, 0.951),
        ("tokens", True, 0.978),
        ("tokens+features", False, 0.783),
        ("tokens+features", True, 0.903),
    ],
)
def test_most_of_an_8b_draft_is_dropped(inputs: str, brings_embedding: bool, share: float) -> None:
    """More than 90%, as in the paper, without `fc`: an eighth of a draft without embedding."""
    featured = inputs == "tokens+features"
    config = HeadConfig(
        vocab_size=LLAMA_8B["vocab_size"],
        hidden_size=LLAMA_8B["hidden_size"],
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        inputs=inputs,
        feature_size=4096 if featured else 0,
        feature_layers=(2, 16, 29) if featured else (),
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        trained_length=2048,
    )
    head = RetrievalHead(config, torch.empty(128256, 4096, device="meta"))
    tensors = shapes(FIELDS | LLAMA_8B)
    if brings_embedding:
        tensors["embed_tokens.weight"] = (128256, 4096)
    assert dropped_share(tensors, head) == pytest.approx(share, abs=0.0005)


def test_the_dropped_share_is_reported(target: Any, tmp_path: Path) -> None:
    path = make_draft(tmp_path)
    head = RetrievalHead.from_eagle3(path, target)
    kept = 32 * 96 + 2 * 32 + (64 + 32) * 64
    all_of_it = kept + 32 * 64 + 32 * 64 + 3 * 32 * 48 + 40 * 32 + 2 * 32
    assert head.dropped_share == pytest.approx(1 - kept / all_of_it)
