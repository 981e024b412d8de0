"""Two engines of the same pages, one of which repeats its steps, fed with the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole import Policy, SamplingParams
from keyhole.engine import engine as core
from keyhole.engine.cuda_graph_runner import CudaGraphRunner
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence as Request
from keyhole.models.model import Model
from keyhole.policies import make_policy
from tests.checkpoints import make_model
from tests.engine.run_again import RunAgain
from tests.policies.models import VOCAB, prompt, with_head
from tests.policies.recording import PAGE, make_engine

POLICIES = keyhole.available_policies()
CAPTURABLE = [name for name, cls in POLICIES.items() if cls.capturable is True]
_FIELDS = {"num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 1024}
MODELS = {
    "gqa": ("llama_group3", _FIELDS),
    "windows": ("gemma3", _FIELDS | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "latent": ("deepseek_v3", _FIELDS),
}
#: When each request comes, the length of its prompt, and how many tokens it wants. There are one,
#: two and four of them, so that no row is nobody's; the budget of `SMALL` is passed on the way, and
#: the tensors of the cache grow while they decode.
COMING = ((0, 3, 60), (9, 90, 51), (22, 60, 26), (22, 70, 26))
#: The same once more when they have ended: layers that went down come up, and go down again.
AGAIN = (*COMING, *((when + 75, length, count) for when, length, count in COMING))
SMALL = {"token_budget": 5 * PAGE}


@pytest.fixture(autouse=True)
def zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages begin with zeros, so that what is not written can be compared too."""

    def new_zeros(like: torch.Tensor, *shape: int, most: int = 0) -> torch.Tensor:
        return like.new_zeros(*shape)

    monkeypatch.setattr("keyhole.cache.huge_pages.new_empty", new_zeros)
    # Tensors are copied when they shrink, as on a GPU.
    monkeypatch.setattr("keyhole.cache.huge_pages.is_lazy", lambda _: False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder: Path = tmp_path_factory.mktemp("models")
    return {
        name: with_head(make_model(kind, folder, **fields))
        for name, (kind, fields) in MODELS.items()
    }


@pytest.fixture(scope="module")
def model(models: dict[str, Model]) -> Model:
    return models["gqa"]


def small(name: str) -> Policy:
    cls = POLICIES[name]
    more = {"generated_in_budget": True} if name == "snapkv" else {}  # else every step has a shape
    return make_policy(name, SMALL | more if "token_budget" in cls.__dataclass_fields__ else {})


def recorded_engine(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Engine]
) -> tuple[Engine, RunAgain]:
    """An engine on a CPU that records its steps."""
    recorder = RunAgain()
    with monkeypatch.context() as patch:
        patch.setattr(core, "make_recorder", lambda _: recorder)
        engine = make()
    recorder.cache = engine.cache
    return engine, recorder


def steps_of(engine: Engine) -> CudaGraphRunner:
    recorded = engine._runner._recorded
    assert recorded is not None
    return recorded


class Pair:
    """Two engines of the same pages, one of which repeats its steps, fed with the same requests."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, model: Model, policy: Policy, **settings: Any
    ) -> None:
        settings = {"max_batch": 4, "prefill_chunk": 256, **settings}

        def make() -> Engine:
            return make_engine(model, policy, **settings)

        # Made for recordings too, as these need room: a page, a row of state and of buffers.
        self.plain, _ = recorded_engine(monkeypatch, make)
        self.plain._runner._recorded = None
        self.engine, self.recorder = recorded_engine(monkeypatch, make)
        self.requests: list[tuple[Request, Request]] = []
        self.repeated_below = 0  # with offloaded layers
        self.came_up = 0  # steps before which layers came up

    def add(self, length: int, count: int) -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        tokens = prompt(length, len(self.requests))
        one, other = (e.add(tokens, params, keep_logits=True) for e in (self.plain, self.engine))
        self.requests.append((one, other))

    def run(self, coming: Sequence[tuple[int, int, int]] = COMING, within: float = 0.0) -> None:
        """Step by step; after each of them both have left the same."""
        number = 0
        while self.plain.has_work or number <= coming[-1][0]:
            for when, length, count in coming:
                if when == number:
                    self.add(length, count)
            self.plain.step()
            before, below = self.recorder.repeated, self.below
            self.engine.step()
            self.came_up += self.below < below
            if self.below:
                self.repeated_below += self.recorder.repeated - before
            self.engine.check_integrity()
            self.compare(within)
            number += 1
        assert not self.engine.has_work
        for one, other in self.requests:
            same([torch.stack(one.logits)], [torch.stack(other.logits)], within)

    @property
    def below(self) -> int:
        """Offloaded layers."""
        return 0 if self.engine.offloader is None else self.engine.offloader.offloaded

    def compare(self, within: float) -> None:
        for one, other in self.requests:
            assert one.tokens == other.tokens
            assert one.counters == other.counters
            assert (one.pages, one.leaving, one.slot) == (other.pages, other.leaving, other.slot)
            assert one.num_computed == other.num_computed
            assert one.offloaded == other.offloaded
            assert one.stats().evicted_pages == other.stats().evicted_pages
            if one.slot >= 0:
                same(left(self.plain, one), left(self.engine, other), within)


def same(one: list[torch.Tensor], other: list[torch.Tensor], within: float) -> None:
    for x, y in zip(one, other, strict=True):
        assert x.shape == y.shape
        if within and x.dtype.is_floating_point:
            assert (x - y).abs().max() <= within
        else:
            assert torch.equal(x, y)


def left(engine: Engine, request: Request) -> list[torch.Tensor]:
    """Everything that the engine keeps of a running request on the device, except future pages."""
    cache, count = engine.cache, request.num_computed
    pages = [page for page in request.pages[: -(-count // PAGE)] if page >= 0]
    last = (count - 1) % PAGE + 1
    found = []
    token_data = [*cache.keys, *cache.values]
    token_data += [x for name, x in cache.common.items() if name == "head_keys"]
    for tensor in token_data:
        rows = tensor[pages].transpose(1, 2).flatten(0, 1)
        found.append(rows[: len(rows) - PAGE + last])
    page_data = [x for data in cache.data for x in data.values()]
    page_data += [x for name, x in cache.common.items() if name != "head_keys"]
    found += [tensor[pages] for tensor in page_data]
    if engine.offloader is not None:
        buffers = engine.offloader.prefetcher._buffers
        found += [buffers[layer].entries[request.slot] for layer in sorted(buffers)]
    return found + [x[request.slot] for x in engine._runner._state.tensors.values()]
