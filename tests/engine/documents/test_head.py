"""A retrieval head over stored documents: its keys, its choice, and where its records come from.

The oracle has the whole way of a question in float64 (`tests/reuse/oracle.py`), here with the
hidden states that a head's features are made of, and the head's formula in loops
(`tests/policies/test_spe_context.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from keyhole import LLM, SamplingParams, SpeContext
from keyhole.documents.record import DocumentRecord
from keyhole.documents.store import StoredDocument
from keyhole.engine.documents.prompt import assemble
from keyhole.errors import ConfigError
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.retrieval.head import RetrievalHead
from keyhole.reuse import make_reuse
from tests.checkpoints import make_model
from tests.engine.documents.asking import BLOCK, CASES, EVERYTHING, ask, assert_near, tokens
from tests.oracle import Array, best, float64
from tests.policies.models import with_head
from tests.policies.recording import Recording
from tests.policies.test_spe_context import Oracle
from tests.reuse import oracle, plain, plain_methods

LENGTHS = {"a": 61, "b": 20, "c": 90, "tiny": 1}
TEXTS = {name: tokens(length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}
INPUTS = ["tokens", "tokens+features"]
#: With most questions two blocks are so nearly alike that the processor's rounding chooses. With
#: this one all choices of the account stay when every weight changes by 1e-4 of itself, at random.
NAMES, PREFIX, SEPARATOR, QUESTION = ["c", "a", "tiny", "b"], [1, 5], [7], tokens(9, 110)
AROUND = {"prefix": PREFIX, "separator": SEPARATOR}
SMALL = SpeContext(token_budget=14, sink_size=2, window_size=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """The same weights with a head of each kind."""
    found = {}
    for inputs in INPUTS:
        path = make_model("llama", tmp_path_factory.mktemp("model"))
        found[inputs] = with_head(path, inputs)
    return found


@pytest.fixture(scope="module")
def stores(models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Documents that were stored beside each head."""
    places = {}
    for inputs, model in models.items():
        places[inputs] = tmp_path_factory.mktemp("store")
        fill(opened(model, SMALL, places[inputs]))
    return places


def opened(model: Model, policy: Policy | str, place: Path) -> LLM:
    return LLM(model, policy, page_size=4, prefill_chunk=37, documents=place)


def fill(llm: LLM) -> None:
    for name, ids in TEXTS.items():
        llm.documents.add(name, {"prompt_token_ids": ids}, block_size=BLOCK)


def settings_of(case: str) -> tuple[str, dict[str, Any]]:
    method, settings, _ = CASES[case]
    return method, settings | ({"block_size": BLOCK} if method == "sam_kv" else {})


class Watched(plain.Network):
    """Records the input of each layer in the last forward pass."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, torch.float64)
        self.inputs: dict[int, Tensor] = {}

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.inputs[layer] = x
        return super().project(layer, x)


class WatchedPrompt(plain.Prompt):
    """Knows which places were computed, and what entered the layers there: features[layer, place].

    A place that left before the last layer was not.
    """

    network: Watched

    def __init__(self, network: Watched, *others: Any) -> None:
        self.features: dict[int, list[Tensor]] = {}
        super().__init__(network, *others)

    def query(self, question_context: Tensor) -> list[Tensor]:
        before = dict(self.features)
        found = super().query(question_context)
        self.features = before
        return found

    def run(
        self,
        who: Tensor,
        exists: Tensor,
        writes: Tensor,
        fuse: Callable[[Tensor, Tensor], Tensor] = plain.overwrite,
        revise: Callable[[int, Tensor, Tensor, Tensor], Tensor | None] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        left: list[tuple[int, Tensor]] = []

        def watched(layer: int, places: Tensor, *change: Tensor) -> Tensor | None:
            keep = revise(layer, places, *change) if revise else None
            left.extend([] if keep is None else [(layer, keep)])
            return keep

        found = super().run(who, exists, writes, fuse, watched)
        places = who.nonzero().flatten()
        for _, keep in left:
            places = places[keep]
        for i, place in enumerate(places.tolist()):
            self.features[place] = []
            for _, x in sorted(self.network.inputs.items()):
                row = i if len(x) == len(places) else int(left[0][1].nonzero()[i])
                self.features[place].append(x[row])
        return found


def wanted_choice(
    model: Model, case: str, policy: SpeContext, first: int
) -> tuple[list[list[int]], set[int]]:
    """What the head chooses for the first token of an answer, and the places that some layer has.

    first: that token.
    """
    assert model.head is not None
    path = model.head.parent
    network = Watched(AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"))
    head = RetrievalHead.from_pretrained(model.head, model.network)
    method, _, theirs = CASES[case]
    settings = plain.Settings(block_size=BLOCK, **theirs)
    alone, records = [], []
    with torch.no_grad():
        for name in NAMES:
            records.append(plain.encode(network, TEXTS[name], BLOCK))
            alone.append([network.inputs[layer] for layer in range(network.layers)])
        others = (records, PREFIX, QUESTION, SEPARATOR, 1, settings.rotate)
        prompt = WatchedPrompt(network, *others)
        choice = plain_methods.METHODS[method](prompt, settings)
        oracle.answer(prompt, choice, settings, None)
    features: dict[int, list[Tensor]] = {}
    for document, offset in zip(alone, prompt.offsets, strict=True):
        for place in range(len(document[0])):
            features[offset + place] = [x[place] for x in document]
    features |= prompt.features
    account = Oracle(head)
    ids = [*prompt.ids[:-1].tolist(), first]
    for place, token in enumerate(ids):
        before: list[Array] | None = None
        if place and head.config.uses_features:
            before = [float64(features[place - 1][i]) for i in head.config.feature_layers]
        account.take(token, before)
    dropped = prompt.documents[: len(ids)] & ~choice.kept[:, : len(ids)].any(0)
    there = (~dropped).nonzero().flatten().tolist()
    account.keys = [account.keys[place] for place in there]
    chosen = []
    for packed in account.weights(2):
        weights = [-1.0] * len(ids)
        for place, weight in zip(there, packed, strict=True):
            weights[place] = weight
        k, sinks = policy.token_budget, policy.sink_size
        chosen.append(best(weights, k, first=sinks, last=policy.window_size or 1))
    return chosen, set(there)


@pytest.mark.one_in(10)
@pytest.mark.parametrize(
    ("inputs", "case"),
    [("tokens+features", case) for case in CASES if case not in ("recompute", "no bias")]
    + [("tokens", case) for case in ("sam_kv", "multi_infllm", "cacheblend")],
)
def test_the_head_chooses_among_what_is_there(
    models: dict[str, Model], stores: dict[str, Path], inputs: str, case: str
) -> None:
    """Keys at true positions; features of this prompt where it computed a token."""
    recording = Recording(inner=SMALL)
    llm = opened(models[inputs], recording, stores[inputs])
    found = ask(llm, NAMES, QUESTION, *settings_of(case), **AROUND, max_tokens=2)
    wanted, there = wanted_choice(models[inputs], case, SMALL, found.generated[0])
    assert [call.entries(0) for call in recording.calls] == [wanted] * 4
    assert all(set(listed) <= there for listed in wanted)
    numbers = 2 * 8  # KV heads and head size
    assert found.stats().other_bytes_read == len(there) * numbers * 4


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_budget_for_all_changes_nothing(
    models: dict[str, Model], stores: dict[str, Path], case: str
) -> None:
    inputs = "tokens+features"
    method, settings = settings_of(case)
    dense = opened(models[inputs], "full", stores[inputs])
    wanted = ask(dense, NAMES, QUESTION, method, settings, **AROUND, max_tokens=6)
    length = len(wanted.tokens)
    if wanted.reused is not None:  # what no layer has needs no room
        length -= int((~wanted.reused.kept.any(0)).sum())
    policy = SpeContext(token_budget=length, window_size=3)
    found = ask(
        opened(models[inputs], policy, stores[inputs]),
        NAMES,
        QUESTION,
        method,
        settings,
        **AROUND,
        max_tokens=6,
    )
    assert found.generated == wanted.generated
    for ours, theirs in zip(found.logits, wanted.logits, strict=True):
        assert_near(ours, theirs)
    if case == "multi_infllm":
        assert length < len(wanted.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "every"), [("tokens+features", 1), ("tokens+features", 3), ("tokens", 1)]
)
def test_what_was_all_computed_is_a_plain_prompt(
    models: dict[str, Model], stores: dict[str, Path], inputs: str, every: int
) -> None:
    """As `recompute`, which is `generate`: also what few tokens of it are read."""
    policy = SpeContext(token_budget=16, window_size=3, refresh_every=every)
    llm = opened(models[inputs], policy, stores[inputs])
    names, question = ["b", "a", "b"], tokens(45, 98)  # read in two chunks
    wanted = ask(llm, names, question, "recompute", {}, **AROUND, max_tokens=9)
    plain = llm.engine.add(wanted.prompt, wanted.params, keep_logits=True)
    while not plain.is_finished:
        llm.engine.step()
    assert plain.generated == wanted.generated
    alone = ask(llm, ["a"], question, "recompute", {}, max_tokens=9)
    pairs = [(alone, ask(llm, ["a"], question, "reuse", {}, max_tokens=9))]
    for method, settings in EVERYTHING.items():
        found = ask(llm, names, question, method, settings, **AROUND, max_tokens=9)
        pairs.append((wanted, found))
    for one, other in pairs:
        assert one.generated == other.generated
        for ours, theirs in zip(one.logits, other.logits, strict=True):
            assert_near(ours, theirs)


def test_questions_side_by_side_are_as_each_alone(
    models: dict[str, Model], stores: dict[str, Path]
) -> None:
    """One with holes, one without, and a prompt that has no documents."""
    policy = SpeContext(token_budget=16, window_size=3, refresh_every=2)
    llm = opened(models["tokens+features"], policy, stores["tokens+features"])
    jobs: list[tuple[list[str], str]] = [(NAMES, "sam_kv"), (["a", "b"], "reuse"), (["a"], "naive")]
    alone = [ask(llm, names, QUESTION, *settings_of(case), max_tokens=9) for names, case in jobs]
    with ExitStack() as stack:
        together = []
        for (names, case), one in zip(jobs, alone, strict=True):
            method = make_reuse(*settings_of(case)).resolve(llm.engine.geometry)
            question = {"prompt_token_ids": QUESTION}
            asked = assemble(llm.engine, llm.documents, names, question, method, stack)
            together.append(llm.engine.add(asked.tokens, one.params, context=asked.context))
        plain = llm.engine.add(TEXTS["c"], alone[0].params)
        while llm.engine.has_work:
            llm.engine.step()
            llm.engine.check_integrity()
    assert [one.generated for one in together] == [one.generated for one in alone]
    again = llm.engine.add(TEXTS["c"], alone[0].params)
    while llm.engine.has_work:
        llm.engine.step()
    assert again.generated == plain.generated


def test_a_page_that_is_shared_has_the_features_before_the_question(
    models: dict[str, Model], stores: dict[str, Path]
) -> None:
    """The page in which questions begin is copied, when one of them is in it already."""
    llm = opened(models["tokens+features"], SMALL, stores["tokens+features"])
    method = make_reuse(*settings_of("reuse")).resolve(llm.engine.geometry)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    keys = []
    with ExitStack() as stack:
        for _ in range(2):  # the same question, whose first token has the same key
            ids = {"prompt_token_ids": QUESTION}
            made = assemble(llm.engine, llm.documents, ["a", "b"], ids, method, stack)
            end = made.tokens.index(QUESTION[0], len(made.tokens) - len(QUESTION))
            assert end % 4
            asked = llm.engine.add(made.tokens, params, context=made.context)
            while not asked.generated:
                llm.engine.step()
            page = asked.pages[end // 4]
            keys.append(llm.engine.cache.common["head_keys"][page, :, end % 4].clone())
        while llm.engine.has_work:
            llm.engine.step()
    assert torch.equal(*keys)


def heads_of(llm: LLM) -> list[frozenset[str]]:
    """The heads whose keys are stored, for every document."""

    def read(document: StoredDocument) -> frozenset[str]:
        with document:
            return document.heads

    return [read(llm.documents.open(name)) for name in NAMES]


def test_what_was_stored_without_a_head_gets_its_keys(
    models: dict[str, Model], stores: dict[str, Path], tmp_path: Path
) -> None:
    """At the first question; another head's stay, and a model without one reads it as before."""
    model, case = models["tokens+features"], settings_of("sam_kv")
    wanted = ask(opened(model, SMALL, stores["tokens+features"]), NAMES, QUESTION, *case)
    plain = opened(model, "full", tmp_path)
    fill(plain)
    before = ask(plain, NAMES, QUESTION, *case)
    llm = opened(model, SMALL, tmp_path)
    ask(llm, NAMES, QUESTION, "recompute", {})
    assert heads_of(llm) == [frozenset()] * 4
    assert ask(llm, NAMES, QUESTION, *case).generated == wanted.generated
    (ours,) = set(heads_of(llm))
    assert len(ours) == 1
    assert ask(plain, NAMES, QUESTION, *case).generated == before.generated

    second = with_head(make_model("llama", tmp_path), seed=1)
    ask(opened(second, SMALL, tmp_path), NAMES, QUESTION, *case)
    (both,) = set(heads_of(plain))
    assert len(both) == 2
    assert both > ours
    again = ask(llm, NAMES, QUESTION, *case)
    assert again.generated == wanted.generated
    assert set(heads_of(llm)) == {both}
    assert llm.documents.verify() == []


def test_a_place_that_is_only_read_is_told(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, case = models["tokens+features"], settings_of("sam_kv")
    fill(opened(model, "full", tmp_path))
    llm = opened(model, SMALL, tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("the place cannot be written: Read-only file system")

    monkeypatch.setattr(llm.documents.store, "renew", refuse)
    with pytest.raises(ConfigError, match=r"retrieval head.*Read-only.*another policy"):
        ask(llm, NAMES, QUESTION, *case)
    assert heads_of(llm) == [frozenset()] * 4
    llm.engine.check_integrity()


def test_a_text_that_is_replaced_while_head_keys_are_made_is_the_one_that_is_read(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question wrote the old text over the new one."""
    model = models["tokens+features"]
    other, llm = opened(model, "full", tmp_path), opened(model, SMALL, tmp_path)
    new = tokens(70, 9)
    other.documents.add("a", {"prompt_token_ids": TEXTS["a"]})
    encode, times = llm.documents._encode, 0

    def meanwhile(*arguments: Any) -> DocumentRecord:
        nonlocal times
        times += 1
        record = encode(*arguments)
        if times == 1:
            other.documents.add("a", {"prompt_token_ids": new}, overwrite=True)
        return record

    monkeypatch.setattr(llm.documents, "_encode", meanwhile)
    with llm.documents.open("a", with_head=True) as document:
        assert document.token_ids.tolist() == new
        assert document.heads
    assert times == 2
    assert llm.documents.store.source("a") == new


def test_a_head_of_tokens_alone_stores_nothing(
    models: dict[str, Model], stores: dict[str, Path]
) -> None:
    assert heads_of(opened(models["tokens"], SMALL, stores["tokens"])) == [frozenset()] * 4


@pytest.mark.slow
def test_keys_of_a_head_that_are_damaged_are_found_and_made_again(
    models: dict[str, Model], stores: dict[str, Path], tmp_path: Path
) -> None:
    model, case = models["tokens+features"], settings_of("reuse")
    wanted = ask(opened(model, SMALL, stores["tokens+features"]), NAMES, QUESTION, *case)
    llm = opened(model, SMALL, tmp_path)
    fill(llm)
    for file in (tmp_path / "records").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1  # the head's part is the last
        file.write_bytes(data)
    found = llm.documents.verify(repair=True)
    assert {problem.kind for problem in found} == {"damaged"}
    assert all("heads." in problem.what for problem in found)
    assert llm.documents.verify() == []
    assert ask(llm, NAMES, QUESTION, *case).generated == wanted.generated
