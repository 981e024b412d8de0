"""Prompts under a prefill policy, against a model in float64 that reads what the paper says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keyhole
from keyhole import LLM
from keyhole.config import EngineConfig
from keyhole.engine.engine import Engine
from keyhole.engine.prompts.shared_prompt_cache import SharedPromptCache
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.policies.prefill import (
    available_prefill_controls,
    available_prefill_policies,
    make_prefill_policy,
)
from keyhole.policies.prefill.base import PromptChunk
from tests.checkpoints import KINDS, make_model
from tests.kernels.test_block_sparse import antidiagonal_scores
from tests.oracle import Array, SparseModel, attention
from tests.policies.models import prompt, twins, with_head
from tests.policies.recording import forced, forced_logits, make_engine, run

BLOCK, STRIDE, CHUNK = 8, 4, 24
SMALL = f"block_size={BLOCK},stride={STRIDE},min_length=0"
EVERYTHING = f"xattention:{SMALL},mass=1.0"
HALF = f"xattention:{SMALL},mass=0.5"
PROMPT, GIVEN = prompt(61), prompt(5)
FULL = make_policy(None)
#: Without a layer that a prefill policy applies to.
ALL_SLIDING = {"mistral_sliding"}


@pytest.fixture(scope="module", params=sorted(KINDS.keys() - ALL_SLIDING))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make_model(request.param, tmp_path_factory.mktemp("model")), "cpu", "float32")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return with_head(make_model("llama", tmp_path_factory.mktemp("llama")))


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-4 * max(1.0, wanted.abs().max().item())


@pytest.mark.one_in(15)
@pytest.mark.parametrize("chunk", [CHUNK, 13])
def test_all_of_the_mass_is_exact_in_every_family(model: Model, chunk: int) -> None:
    settings: dict[str, Any] = {"prefill_chunk": chunk, "max_prefill_share": 1.0}
    wanted = forced_logits(model, FULL, PROMPT, GIVEN, **settings)
    close(forced_logits(model, FULL, PROMPT, GIVEN, prefill_policy=EVERYTHING, **settings), wanted)


@pytest.mark.one_in(8)
def test_all_of_the_mass_is_exact_in_a_ragged_batch(model: Model) -> None:
    texts = [(prompt(n), prompt(3)) for n in (61, 9, 40, 1)]
    engine = make_engine(model, FULL, prefill_policy=EVERYTHING, prefill_chunk=17, max_batch=3)
    requests = []
    for text, given in texts:
        requests.append(forced(engine, text, given))
        engine.step()
    run(engine)
    for request, (text, given) in zip(requests, texts, strict=True):
        close(torch.stack(request.logits), forced_logits(model, FULL, text, given))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", {**keyhole.available_policies()})
def test_all_of_the_mass_is_exact_before_every_policy(llama: Model, name: str) -> None:
    """Policies choose by what the prompt left: keys, queries, side data."""
    policy = make_policy(name)
    small = {"token_budget": 24, "prompt_in_budget": True}
    policy = make_policy(name, {k: small[k] for k in small if k in policy.__dataclass_fields__})
    wanted = forced_logits(llama, policy, PROMPT, GIVEN, prefill_chunk=CHUNK)
    settings = {"prefill_chunk": CHUNK, "prefill_policy": EVERYTHING}
    close(forced_logits(llama, policy, PROMPT, GIVEN, **settings), wanted)


def fewest(scores: Array, own: int, mass: float) -> list[int]:
    """Section 2.2: the fewest blocks with this share, the first and the newest two among them."""
    chosen = sorted({0, max(0, own - 1), own})
    left = sorted(set(range(own + 1)) - set(chosen), key=lambda block: -scores[block])
    while left and scores[chosen].sum() < mass * scores.sum():
        chosen.append(left.pop(0))
    return sorted(chosen)


class SparsePrompt(SparseModel):
    """The tokens of a prompt from `begin` to `stop` read blocks by XAttention's rule."""

    begin, stop, mass = 0, 0, 0.5
    read: list[int]  # how many blocks each block of queries and head reads

    def attend(
        self,
        layer: int,
        query: Array,
        keys: Array,
        values: Array,
        window: int | None,
        options: dict[str, Any],
    ) -> Array:
        dense = super().attend(layer, query, keys, values, window, options)
        if window is not None:
            return dense
        rows = query[:, self.begin : self.stop].transpose(1, 0, 2)
        how = (BLOCK, STRIDE, options["scale"], options["softcap"])
        scores = antidiagonal_scores(rows, keys[:, : self.stop], self.begin, *how)
        for t in range(self.begin, self.stop):
            own = t // BLOCK
            of_row = scores[own - self.begin // BLOCK]
            blocks = [fewest(head, own, self.mass) for head in of_row]
            self.read += [len(one) for one in blocks] if t % BLOCK == 0 else []
            read = [
                [i for b in one for i in range(b * BLOCK, min(t, (b + 1) * BLOCK - 1) + 1)]
                for one in blocks
            ]
            dense[t] = attention(query[:, t], keys, values, read, **options)[0]
        return dense


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mass", [0.3, 0.7])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "qwen3"])
def test_a_prompt_reads_the_blocks_of_the_paper(kind: str, mass: float) -> None:
    loaded, network = twins(kind, num_hidden_layers=4)
    oracle = SparsePrompt(network, lambda *_: None)
    # The first chunk ends before min_length and is dense.
    oracle.begin, oracle.stop, oracle.mass, oracle.read = CHUNK, len(PROMPT), mass, []
    wanted = oracle.logits([*PROMPT, *GIVEN], len(PROMPT))[len(PROMPT) - 1 :]
    engine = make_engine(
        loaded,
        FULL,
        prefill_chunk=CHUNK,
        max_prefill_share=1.0,
        prefill_policy=f"xattention:block_size={BLOCK},stride={STRIDE},min_length=30,mass={mass}",
    )
    request = forced(engine, PROMPT, GIVEN)
    run(engine)
    close(torch.stack(request.logits), wanted)
    geometry = engine.geometry
    lists = len(geometry.full_attention) * geometry.num_query_heads
    dense_blocks, all_blocks = lists * (1 + 2 + 3), lists * sum(range(1, 9))
    share = request.stats().prompt_attended_fraction
    assert share == pytest.approx((dense_blocks + sum(oracle.read)) / all_blocks)
    assert share < 1.0


@pytest.mark.slow
def test_a_prompt_beside_decoding_requests_reads_what_it_reads_alone(llama: Model) -> None:
    settings: dict[str, Any] = {"prefill_policy": HALF, "prefill_chunk": CHUNK}
    alone = forced_logits(llama, FULL, PROMPT, GIVEN, **settings)
    engine = make_engine(llama, FULL, **settings)
    forced(engine, prompt(5), prompt(30))
    engine.step()
    request = forced(engine, PROMPT, GIVEN)
    run(engine)
    close(torch.stack(request.logits), alone)


def test_off_is_exact_and_half_of_the_mass_is_not(llama: Model) -> None:
    wanted = forced_logits(llama, FULL, PROMPT, GIVEN, prefill_chunk=CHUNK)
    off = forced_logits(llama, FULL, PROMPT, GIVEN, prefill_chunk=CHUNK, prefill_policy=None)
    assert torch.equal(off, wanted)
    half = forced_logits(llama, FULL, PROMPT, GIVEN, prefill_chunk=CHUNK, prefill_policy=HALF)
    assert (half - wanted).abs().max() > 1e-3


def test_short_prompts_and_the_ends_of_long_ones_are_exact(llama: Model) -> None:
    short = "xattention:block_size=8,stride=4,mass=0.3,min_length=61"
    wanted = forced_logits(llama, FULL, PROMPT, GIVEN, prefill_chunk=CHUNK)
    found = forced_logits(llama, FULL, PROMPT, GIVEN, prefill_chunk=CHUNK, prefill_policy=short)
    assert torch.equal(found, wanted)
    few = "xattention:block_size=32,stride=4,mass=0.3,min_length=0"
    found = forced_logits(llama, FULL, PROMPT, GIVEN, prefill_chunk=CHUNK, prefill_policy=few)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_and_values_of_8_bits(llama: Model, kv_dtype: str) -> None:
    settings: dict[str, Any] = {"prefill_chunk": CHUNK, "kv_dtype": kv_dtype}
    wanted = forced_logits(llama, FULL, PROMPT, GIVEN, **settings)
    found = forced_logits(llama, FULL, PROMPT, GIVEN, prefill_policy=EVERYTHING, **settings)
    assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()


def test_the_block_before_the_own_is_read_whatever_its_weight() -> None:
    """Facts across two blocks were lost: their second half could not see the token before it."""
    rows = 10 * torch.eye(8).repeat_interleave(BLOCK, 0)  # every token attends to its own block
    chunk = PromptChunk(rows[:, None], rows.view(16, 1, 4, 8), torch.arange(16), 0, 1.0)
    found = make_prefill_policy(HALF).select(0, chunk)
    for own in range(8):
        count = int(found.counts[own, 0])
        assert found.indices[own, 0, :count].tolist() == sorted({0, max(0, own - 1), own})


@pytest.mark.parametrize("name", available_prefill_controls())
def test_a_control_reads_as_many_blocks_of_each_head(name: str) -> None:
    """The first block, the newest two, and others than those of the largest weight."""
    random = torch.Generator().manual_seed(0)
    keys, pages = torch.randn(40, 2, 4, 16, generator=random), torch.arange(40)
    chunk = PromptChunk(torch.randn(64, 4, 16, generator=random), keys, pages, 96, 0.25)
    method = make_prefill_policy(HALF).select(0, chunk)
    control = make_prefill_policy(f"{name}:{SMALL},mass=0.5")
    found, other = control.select(0, chunk), control.select(1, chunk)
    assert torch.equal(found.counts, method.counts)
    for row in range(8):
        own = 96 // BLOCK + row
        for head in range(4):
            count = int(found.counts[row, head])
            blocks = found.indices[row, head].tolist()
            assert blocks[count:] == [-1] * (len(blocks) - count)
            assert blocks[:count] == sorted({*blocks[:count], 0, own - 1, own})
            assert blocks[count - 1] == own
            if name == "recent_blocks":
                assert blocks[1:count] == list(range(own - count + 2, own + 1))
    assert torch.equal(found.indices, other.indices) == (name == "recent_blocks")
    assert not torch.equal(found.indices, method.indices[..., : found.indices.shape[2]])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("xattention:mass=0", "mass 0"),
        ("xattention:mass=1.5", "mass 1.5"),
        ("xattention:stride=7", "divisor of block_size 128"),
        ("xattention:block_size=0", "block_size 0"),
        ("xattention:min_length=-1", "min_length -1"),
        ("random_blocks:seed=-1", "seed -1"),
    ],
)
def test_a_wrong_setting_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_prefill_policy(text)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="xattention"):
        make_prefill_policy("xatention")
    assert list(available_prefill_policies()) == ["xattention"]


def test_a_model_of_sliding_layers_alone_is_refused(tmp_path: Path) -> None:
    folder = make_model("mistral_sliding", tmp_path)
    with pytest.raises(ConfigError, match="every layer of this model has a window or an indexer"):
        LLM(load(folder, "cpu", "float32"), prefill_policy="xattention")


def test_prompts_of_engines_with_a_prefill_policy_are_not_shared(llama: Model) -> None:
    """Evaluations compute a prompt once for engines of all policies; only if it is exact."""
    copies = SharedPromptCache(1 << 20)
    for text in (HALF, None):
        config = EngineConfig(page_size=4, memory=1 << 24, prefill_policy=text)
        engine = Engine(llama, FULL, config, copies=copies)
        forced(engine, PROMPT, GIVEN)
        run(engine)
        assert len(copies) == (text is None)
