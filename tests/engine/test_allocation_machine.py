"""For any sequence of requests, the rule decides which layers are offloaded, and memory suffices.

The rule is computed here from bytes alone. As many layers are offloaded as necessary, or as before
while none can become resident. One becomes resident if the needed pages fit with it, plus either
all growth or an eighth of what fits. Every finished request has the logits that it has alone with
all layers resident.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from keyhole import LLM, StreamingLLM
from keyhole.cache.page_list import NO_PAGE
from keyhole.engine.engine import Engine
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model
from tests.engine.requests_machine import RequestsMachine
from tests.engine.test_allocation import buffer_bytes
from tests.policies.models import prompt
from tests.policies.recording import PAGE

ROWS, BUDGET, LAYERS = 3, 6, 4
#: What it chooses does not depend on scores, so that no rounding can change the choice.
POLICY = StreamingLLM(token_budget=BUDGET, sink_size=2)


@functools.cache
def shared_model() -> Model:
    folder = Path(tempfile.mkdtemp())
    return load(make_model("llama", folder, vocab_size=64, num_hidden_layers=LAYERS), "cpu")


def engine_of(**options: Any) -> Engine:
    options = {"page_size": PAGE, "max_batch": ROWS, "prefill_chunk": 24, **options}
    return LLM(shared_model(), POLICY, **options).engine


def cache_bytes(pages: int, below: int) -> int:
    """Two KV heads of 8 in float32, keys and values; buffers of the budget and one page more."""
    row = 2 * (8 + 8) * 4
    buffers = ROWS * (-(-BUDGET // PAGE) + 1) * PAGE * (row + 2 * 4)
    lists = 104 + PAGE * 24  # beside the tensors, as in `cache.layout`
    return pages * (PAGE * row * (LAYERS - below) + lists) + below * buffers


class Machine(RequestsMachine):
    """Requests that come, are stepped, and are taken out."""

    @initialize(pages=st.integers(20, 45), below=st.integers(1, LAYERS), prefix=st.booleans())
    def start(self, pages: int, below: int, prefix: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.memory = cache_bytes(pages, below)
        self.engine = engine_of(memory=self.memory, offload=self.folder.name, prefix_cache=prefix)
        assert self.engine.offloader is not None
        self.offloader = self.engine.offloader
        self.requests = []
        self.before = 0
        runner = self.engine._runner
        real = runner.run

        def watched(plan: Any) -> Any:
            self.check(bool(plan.preempted))
            return real(plan)

        runner.run = watched  # type: ignore[method-assign]

    def most(self, below: int) -> int:
        """Pages that fit."""
        return next(n for n in range(10**6) if cache_bytes(n + 1, below) > self.memory)

    def check(self, preempted: bool) -> None:
        """Between planning a step and running it."""
        engine, running = self.engine, self.engine.scheduler.running
        found = self.offloader.offloaded
        assert engine.cache.resident_bytes + buffer_bytes(engine) <= self.memory
        assert cache_bytes(engine.cache.capacity, found) <= self.memory
        used = len({page for request in running for page in request.pages if page != NO_PAGE})
        growth = sum(
            max(0, -(-(len(r.prompt) + r.params.max_tokens) // PAGE) - len(r.pages))
            for r in running
        )
        least = next(i for i in range(LAYERS + 1) if used <= self.most(i))
        wanted = max(self.before, least)
        if preempted or (engine.scheduler.waiting and engine.scheduler._slots):
            assert found >= wanted  # somebody waits for pages
        else:
            while wanted and used + min(growth, self.most(wanted - 1) // 8) <= self.most(
                wanted - 1
            ):
                wanted -= 1
            assert found == wanted
        self.before = found

    @rule(length=st.integers(1, 100), start=st.integers(0, 2), more=st.integers(1, 30))
    def come(self, length: int, start: int, more: int) -> None:
        """Few different texts, of which shorter ones are the start of longer ones."""
        text = prompt(100, start)[:length]
        pages = -(-(length + more) // PAGE)
        if pages <= self.engine.max_pages:
            self.add(text, more)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.compare_with(engine_of(memory="16MiB", prefix_cache=False))
        self.offloader.prefetcher.close()
        self.folder.cleanup()


class TestFew(Machine.TestCase):
    settings = settings(max_examples=4, stateful_step_count=20, deadline=None)


@pytest.mark.slow
class TestMachine(Machine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
