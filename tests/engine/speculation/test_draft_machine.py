"""Whatever comes and goes under a draft: pages, prefixes and bounds have accepted tokens only.

Every request that ends has the logits that it has alone, without a draft and without a prefix
cache. What the prefix cache holds is compared with pages that another engine computes of the same
tokens.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from keyhole import LLM, Quest, SamplingParams
from keyhole.cache import pages as pages_module
from keyhole.engine.engine import Engine
from keyhole.errors import CapacityError
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.retrieval.draft import DRAFT_FOLDER
from tests.checkpoints import make_model
from tests.engine.requests_machine import GREEDY, RequestsMachine
from tests.engine.speculation.drafts import (
    COUNT,
    Erring,
    pages_by_digest,
    replaying,
    under_draft,
)
from tests.policies.models import VOCAB, prompt
from tests.policies.recording import PAGE, run
from tests.retrieval.drafts import make_draft

#: It reads everything, so that no rounding can change a choice, and keeps bounds of every page.
POLICY = Quest(token_budget=512)


@functools.cache
def shared_model() -> Model:
    """With a random draft model in its folder."""
    folder = Path(tempfile.mkdtemp())
    path = Path(make_model("llama", folder, vocab_size=VOCAB, num_hidden_layers=2))
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1], "max_position_embeddings": 1024}
    make_draft(folder, vocab_size=VOCAB, draft_vocab_size=VOCAB, **layers).rename(
        path / DRAFT_FOLDER
    )
    return load(path, "cpu")


def engine_of(**options: Any) -> Engine:
    options = {"page_size": PAGE, "max_batch": 3, "prefill_chunk": 24, **options}
    return LLM(shared_model(), POLICY, **options).engine


@functools.cache
def continued(length: int, start: int) -> list[int]:
    """A text and what the model says after it, without a draft."""
    engine = engine_of(memory="4MiB")
    params = SamplingParams(max_tokens=40, **GREEDY)
    sequence = engine.add(prompt(60, start)[:length], params)
    run(engine)
    return sequence.tokens.tolist()


class Machine(RequestsMachine):
    """Requests that come, are stepped, are taken out, and are continued.

    What is proposed is known text with errors; a draft model runs beside it where `draft` names it.
    """

    draft: ClassVar[str] = "ngram"

    @initialize(pages=st.integers(26, 60))
    def start(self, pages: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(pages_module, "_FIRST_PAGES", 8)
        page_bytes = engine_of(memory="4MiB", draft=self.draft).cache.page_bytes
        memory = pages * page_bytes
        self.engine = engine_of(draft=self.draft, num_draft_tokens=COUNT, memory=memory)
        self.texts: list[list[int]] = []
        grow = self.engine.cache._grow

        def unless_full() -> None:
            if self.is_full:
                raise CapacityError("no memory")
            grow()

        self.patch.setattr(self.engine.cache, "_grow", unless_full)
        if self.draft == "ngram":
            under_draft(self.engine, Erring(self.texts, VOCAB))
        else:
            replaying(self.engine).draft = Erring(self.texts, VOCAB)
        self.requests = []

    def add(self, text: list[int], more: int) -> None:
        if -(-(len(text) + more) // PAGE) <= self.engine.max_pages:
            super().add(text, more)

    @rule(length=st.integers(1, 60), start=st.integers(0, 1), more=st.integers(1, 30))
    def come(self, length: int, start: int, more: int) -> None:
        """Few different texts, of which shorter ones are the start of longer ones."""
        self.texts.insert(0, continued(length, start))
        self.add(prompt(60, start)[:length], more)

    @rule(is_full=st.booleans())
    def memory(self, is_full: bool) -> None:
        """Memory is taken by others, or is there again."""
        self.is_full = is_full

    @precondition(lambda self: any(r.finish_reason == "length" for r in self.requests))
    @rule(number=st.integers(0, 99), more=st.integers(1, 12))
    def go_on(self, number: int, more: int) -> None:
        """The next turn of a conversation: its answer is now prompt."""
        ended = [request for request in self.requests if request.finish_reason == "length"]
        self.add([*ended[number % len(ended)].tokens, 7], more)

    def after_step(self) -> None:
        for one in self.engine.scheduler.running:
            assert len(one.pages) <= -(-len(one.tokens) // PAGE)
            assert one.num_computed < len(one.tokens)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.patch.undo()
        self.compare_with(engine_of(memory="4MiB", prefix_cache=False))
        other = engine_of(memory="4MiB", draft=self.draft)
        for request in self.requests:
            other.add(request.tokens, SamplingParams(max_tokens=1, **GREEDY))
            run(other)
        self.compare_prefixes(other)

    def compare_prefixes(self, other: Engine) -> None:
        assert self.engine.prefix is not None
        assert other.prefix is not None
        mine, theirs = pages_by_digest(self.engine.prefix), pages_by_digest(other.prefix)
        assert mine.keys() <= theirs.keys()
        pages = [mine[digest] for digest in mine]
        others = [theirs[digest] for digest in mine]
        for keys, data in zip(self.engine.cache.keys, self.engine.cache.data, strict=True):
            assert torch.equal(data["low"][pages], keys[pages].amin(2))
            assert torch.equal(data["high"][pages], keys[pages].amax(2))
        tensors = zip(self.engine.cache._tensors(), other.cache._tensors(), strict=True)
        for one, two in tensors:
            if pages:
                assert (one[pages] - two[others]).abs().max() <= 1e-4


class DraftModelMachine(Machine):
    """The same with a draft model, whose keys, values and features are in the pages, too."""

    draft: ClassVar[str] = "eagle3"


class TestFewWithADraftModel(DraftModelMachine.TestCase):
    settings = settings(max_examples=2, stateful_step_count=20, deadline=None)


@pytest.mark.slow
class TestDraftModelMachine(DraftModelMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestMachine(Machine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
