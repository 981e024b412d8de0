"""The dense engine gives the logits of transformers, eager attention, however work is cut up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from keyhole import LLM, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import KINDS, make_model
from tests.models.compared import add

TOLERANCE = 1e-4
PAGE = 8
LENGTHS = (5, 37, 18, PAGE, 2 * PAGE)
NEW = 8


@pytest.fixture(scope="module", params=sorted(KINDS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Model:
    return load(checkpoint, "cpu", "float32")


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], list[int]]]:
    """Prompts, and the tokens that follow them."""
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(3, 250, (n + NEW,), generator=generator).tolist() for n in LENGTHS]
    return [(row[:n], row[n:]) for row, n in zip(rows, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, texts: list[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Logits after the prompt and after each token that follows, one text at a time."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        rows = [model(torch.tensor([a + b])).logits[0, len(a) - 1 :] for a, b in texts]
    return [row.float() for row in rows]


def engine(model: Model, **settings: int) -> Engine:
    return LLM(model, page_size=PAGE, **settings).engine


def run(engine: Engine, sequences: list[Sequence]) -> list[Tensor]:
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    return [torch.stack(sequence.logits) for sequence in sequences]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.one_in(8)
def test_alone(loaded: Model, texts: list, expected: list[Tensor]) -> None:
    one = engine(loaded, max_batch=1)
    assert_equal([run(one, [add(one, text)])[0] for text in texts], expected)


@pytest.mark.one_in(8)
def test_in_a_ragged_batch(loaded: Model, texts: list, expected: list[Tensor]) -> None:
    many = engine(loaded)
    assert_equal(run(many, [add(many, text) for text in texts]), expected)


@pytest.mark.one_in(32)
@pytest.mark.parametrize("chunk", [1, PAGE - 1, PAGE, PAGE + 1])
def test_in_prompt_chunks(loaded: Model, texts: list, expected: list[Tensor], chunk: int) -> None:
    chunked = engine(loaded, prefill_chunk=chunk)
    assert_equal(run(chunked, [add(chunked, text) for text in texts]), expected)


@pytest.mark.one_in(8)
def test_interleaved_with_others_that_come_and_go(
    loaded: Model, texts: list, expected: list[Tensor]
) -> None:
    busy = engine(loaded, max_batch=3, prefill_chunk=PAGE + 1)
    sequences = []
    for text in texts:
        sequences.append(add(busy, text))
        for _ in range(4):
            busy.step()
    assert_equal(run(busy, sequences), expected)


@pytest.mark.one_in(6)
def test_the_same_prompt_again_comes_from_the_prefix_cache(
    loaded: Model, texts: list, expected: list[Tensor]
) -> None:
    warm = engine(loaded)
    run(warm, [add(warm, text) for text in texts])
    again = [add(warm, text) for text in texts]
    assert_equal(run(warm, again), expected)
    cached = [sequence.num_cached for sequence in again]
    assert cached == [0, 32, 16, PAGE - 1, 2 * PAGE - 1]  # the last token is always computed


@pytest.mark.one_in(8)
def test_generated_tokens_equal_those_of_transformers(checkpoint: Path, texts: list) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompt = texts[1][0]
    theirs = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=-1
    )
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    ours = LLM(checkpoint, dtype="float32", device="cpu").generate(
        {"prompt_token_ids": prompt}, params
    )
    assert ours.token_ids == theirs[0, len(prompt) :].tolist()
