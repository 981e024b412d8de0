"""On a GPU the engine gives what it gives without one: transformers' logits, and a policy's choice.

Plain PyTorch only, so that a bare machine with torch, transformers and pytest can run it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import keyhole
from keyhole import LLM, SamplingParams
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from tests.checkpoints import make_model
from tests.engine.speculation.drafts import knowing
from tests.policies.models import with_head
from tests.policies.recording import PAGE, forced, forced_logits, make_engine, run

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
KINDS = ("llama", "gemma2", "deepseek_v3")
POLICIES = keyhole.available_policies()
#: A head of its own reads hidden states, which proposed tokens do not have.
DRAFTED = [n for n, cls in POLICIES.items() if cls.speculative is True and n != "spe_context"]
#: float32 on both sides; a wrong key changes these logits by more than 0.01.
TOLERANCE = 1e-3
#: Prompts, and the tokens that follow each.
LENGTHS = ((5, 12), (37, 7), (2 * PAGE, 9), (61, 11))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(request.param, tmp_path_factory.mktemp("model"))


def checkpoint(kind: str, folder: Path) -> str:
    """Weights, and a retrieval head beside them, which some policies need."""
    path = make_model(kind, folder, max_position_embeddings=2048, num_hidden_layers=6)
    with_head(path)
    return path


@pytest.fixture(scope="module")
def model(path: str) -> Model:
    return load(path, DEVICE, "float32")


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (count,), generator=generator).tolist()


TEXTS = [(tokens(n, n), tokens(more, 100 + n)) for n, more in LENGTHS]


def eager(
    path: str, prompt: list[int], given: list[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits of transformers on the device, after the prompt and after each given token."""
    network = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype)
    network = network.to(DEVICE).eval()
    with torch.no_grad():
        logits = network(torch.tensor([prompt + given], device=DEVICE)).logits
    return logits[0, len(prompt) - 1 :].float().cpu()


def same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < TOLERANCE


def small(name: str) -> Policy:
    """The policy with a budget of three pages, if it has one."""
    cls = POLICIES[name]
    return make_policy(name, {"token_budget": 3 * PAGE} if hasattr(cls, "token_budget") else {})


def test_a_ragged_batch_equals_eager_attention(path: str, model: Model) -> None:
    engine = make_engine(model, make_policy(None), prefill_chunk=PAGE + 1)
    requests = [forced(engine, prompt, given) for prompt, given in TEXTS]
    run(engine)
    assert engine.cache.keys[0].device.type == DEVICE
    for request, (prompt, given) in zip(requests, TEXTS, strict=True):
        same(torch.stack(request.logits), eager(path, prompt, given))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_whose_budget_covers_all_is_dense(model: Model, name: str) -> None:
    prompt, given = TEXTS[3]
    dense = forced_logits(model, make_policy(None), prompt, given)
    same(forced_logits(model, make_policy(name), prompt, given), dense)


@pytest.mark.parametrize("name", POLICIES)
def test_a_small_budget_reads_the_same_as_on_the_cpu(path: str, model: Model, name: str) -> None:
    prompt, given = TEXTS[3]
    plain = forced_logits(load(path, "cpu", "float32"), small(name), prompt, given)
    same(forced_logits(model, small(name), prompt, given), plain)


@pytest.mark.parametrize("name", POLICIES)
def test_requests_of_a_batch_do_not_change_each_other(model: Model, name: str) -> None:
    alone = [forced_logits(model, small(name), *text) for text in TEXTS]
    engine = make_engine(model, small(name), max_batch=3, prefill_chunk=2 * PAGE - 1)
    requests = []
    for text in TEXTS:
        requests.append(forced(engine, *text))
        for _ in range(3):
            engine.step()
    run(engine)
    for request, expected in zip(requests, alone, strict=True):
        same(torch.stack(request.logits), expected)


@pytest.mark.parametrize("name", DRAFTED)
def test_proposed_tokens_change_nothing(model: Model, name: str) -> None:
    """Some of them are right and some wrong."""
    plain = make_engine(model, small(name))
    wanted = [plain.add(prompt, GREEDY, keep_logits=True) for prompt, _ in TEXTS]
    run(plain)
    engine = knowing(make_engine(model, small(name), draft="ngram"), wanted)
    found = [engine.add(prompt, GREEDY, keep_logits=True) for prompt, _ in TEXTS]
    run(engine)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        same(torch.stack(one.logits), torch.stack(other.logits))
    counters = [one.drafts for one in found if one.drafts is not None]
    assert 0 < sum(c.accepted for c in counters) < sum(c.proposed for c in counters)


@pytest.mark.parametrize("name", POLICIES)
def test_pages_move_to_larger_tensors_while_they_are_used(
    path: str, model: Model, name: str
) -> None:
    long, given = tokens(70 * PAGE, 1), tokens(5, 2)
    engine = make_engine(model, small(name), prefill_chunk=16 * PAGE)
    first = forced(engine, *TEXTS[0])
    engine.step()
    before = engine.cache.capacity
    second = forced(engine, long, given)
    run(engine)
    assert before < engine.cache.capacity
    same(torch.stack(first.logits), forced_logits(model, small(name), *TEXTS[0]))
    same(second.logits[0][None], eager(path, long, given)[:1])  # a prompt is always exact


@pytest.mark.parametrize("name", POLICIES)
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(path: str, name: str) -> None:
    prompt, given = TEXTS[1]
    found = forced_logits(load(path, DEVICE, "bfloat16"), make_policy(name), prompt, given)
    exact, rounded = (
        eager(path, prompt, given, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert found.isfinite().all()
    assert (found - exact).norm() < 2 * (rounded - exact).norm()


def test_sampled_tokens_do_not_depend_on_the_batch(model: Model) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in TEXTS]
    llm = LLM(model, page_size=PAGE, prefix_cache=False, memory="16MiB")
    together = llm.generate(list(prompts), params)
    alone = [llm.generate(prompt, params) for prompt in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_memory_defaults_to_less_than_the_device_has_free(model: Model) -> None:
    free, _ = torch.cuda.mem_get_info()
    engine = LLM(model).engine
    assert 0 < engine.max_pages * engine.cache.page_bytes < free
