"""Questions that run at once over the same documents hold their pages once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole import LLM, SamplingParams
from keyhole.cache.page_list import NO_PAGE
from keyhole.engine.documents.filled_pages import FilledPages
from keyhole.engine.sequence import Sequence
from keyhole.policies import make_policy
from keyhole.reuse import make_reuse
from tests.checkpoints import make_model
from tests.engine.documents.asking import BLOCK, WIDE, assembled, assert_near, tokens
from tests.engine.documents.pacing import AtOnce, paced

NAMES = ["a", "b", "c"]
LENGTH, SIZE = 90, 4
TEXTS = {name: tokens(LENGTH, seed) for seed, name in enumerate(NAMES)}
PREFIX, SEPARATOR = [1, 2], [5]
#: Methods that choose without the question, and one that reads it but keeps the same of each.
METHODS = {
    "reuse": make_reuse("reuse", {}),
    "epic": make_reuse("epic", {"num_initial": 4}),
    "sam_kv": make_reuse("sam_kv", {"block_size": BLOCK, "select": False, "stable_layers": [0]}),
    "cacheblend": make_reuse("cacheblend", {}),
}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "quest": {"token_budget": 64, "full_layers": (0,)},
    "delta": {"token_budget": 64, "full_layers": (0,), "delta_layers": (1,)},
    "raas": {"token_budget": 400},
    "omnikv": {"token_budget": 64, "full_layers": (0,), "filter_layers": (1,), "dense_after": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    make_model("llama", path / "model", **WIDE)
    llm = opened(path)
    for name, ids in TEXTS.items():
        llm.documents.add(name, {"prompt_token_ids": ids}, block_size=BLOCK)
    return path


def opened(folder: Path, policy: str = "full", **more: Any) -> LLM:
    given = make_policy(policy, POLICIES[policy])
    path = next((folder / "model").rglob("config.json")).parent
    store = folder / "store"
    llm = LLM(path, device="cpu", page_size=SIZE, policy=given, documents=store, **more)
    paced(llm.engine, AtOnce())
    return llm


def add(
    llm: LLM, stack: ExitStack, method: Any, seed: int, most: int = 40, names: Any = NAMES
) -> Sequence:
    """A question of its own, over all documents unless said otherwise."""
    resolved = method.resolve(llm.engine.geometry)
    asked = assembled(llm, stack, names, tokens(9, seed), resolved, PREFIX, SEPARATOR)
    params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    return llm.engine.add(asked.tokens, params, context=asked.context, keep_logits=True)


def run(llm: LLM, sequence: Sequence, generated: int | None = None) -> Sequence:
    """Runs steps until it has this many tokens; None: until it ends."""
    while not sequence.is_finished and len(sequence.generated) != generated:
        llm.engine.step()
        llm.engine.check_integrity()
    assert sequence.error is None
    return sequence


def before(sequence: Sequence) -> list[int]:
    """The full pages before the question."""
    end = len(sequence.prompt) - 9
    return [page for page in sequence.pages[: end // SIZE] if page != NO_PAGE]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", METHODS)
def test_pages_are_held_once_and_answers_are_as_alone(
    policy: str, method: str, folder: Path
) -> None:
    alone = opened(folder, policy, prefix_cache=False)
    llm = opened(folder, policy, prefix_cache=False)
    with ExitStack() as stack:
        lengths = {90: 12, 91: 60, 92: 5}
        wanted = [run(alone, add(alone, stack, METHODS[method], *job)) for job in lengths.items()]
        first = run(llm, add(llm, stack, METHODS[method], 90, 12), 2)
        second = run(llm, add(llm, stack, METHODS[method], 91, 60), 2)
        assert before(first) == before(second)
        # Its question, its first tokens, and the page in which the question begins.
        assert len({*second.pages} - {*first.pages}) <= 1 + -(-(9 + 2) // SIZE)
        run(llm, first)
        third = run(llm, add(llm, stack, METHODS[method], 92, 5), 1)
        assert before(third) == before(second)  # the first one has ended
        for sequence, other in zip((first, second, third), wanted, strict=True):
            run(llm, sequence)
            assert sequence.generated == other.generated
            assert_near(torch.stack(sequence.logits), torch.stack(other.logits))
        assert llm.engine.cache.in_use == llm.engine.cache.num_aside


def test_another_choice_or_order_is_filled_anew(folder: Path) -> None:
    """SamKV keeps other blocks for another question."""
    method = make_reuse("sam_kv", {"block_size": BLOCK, "share": 0.3, "stable_layers": [0]})
    llm = opened(folder, prefix_cache=False)
    with ExitStack() as stack:
        first = run(llm, add(llm, stack, method, 90, 200), 2)
        second = run(llm, add(llm, stack, method, 90, 200), 2)
        assert before(first) == before(second)
        assert first.reused is not None
        for seed in range(91, 99):
            other = run(llm, add(llm, stack, method, seed, 2), 1)
            assert other.reused is not None
            same = torch.equal(other.reused.kept, first.reused.kept)
            assert same == (before(other) == before(first))
            run(llm, other)


#: Methods whose plan is the same for a document, whatever comes after it, and how much of 90
#: tokens is the same page by page.
PARTS = {"reuse": METHODS["reuse"], "epic": METHODS["epic"]}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", ["full", "quest", "delta"])
@pytest.mark.parametrize("method", PARTS)
def test_a_document_is_held_once_beside_other_documents(
    policy: str, method: str, folder: Path
) -> None:
    """Its pages are the same at the same position, whatever else a question is about."""
    alone = opened(folder, policy, prefix_cache=False)
    llm = opened(folder, policy, prefix_cache=False)
    jobs = {90: ["a", "b"], 91: ["a", "c"], 92: ["c", "b"], 93: ["a"]}
    with ExitStack() as stack:
        wanted = [
            run(alone, add(alone, stack, PARTS[method], seed, 20, names))
            for seed, names in jobs.items()
        ]
        found = [
            run(llm, add(llm, stack, PARTS[method], seed, 20, names), 1)
            for seed, names in jobs.items()
        ]
        pages, end = [before(one) for one in found], len(PREFIX) + LENGTH
        full = end // SIZE
        assert pages[0][:full] == pages[1][:full] == pages[3][:full]
        assert not {*pages[0][full:]} & {*pages[1][full:]}
        assert found[1].reused is not None
        assert wanted[1].reused is not None
        assert found[1].reused.bytes_read < 0.7 * wanted[1].reused.bytes_read
        # The second document is at the same position, too. After EPIC its beginning saw another.
        same = [one == other for one, other in zip(pages[0], pages[2], strict=True)]
        first = full + 1 if method == "reuse" else -(-(end + 1 + 4) // SIZE)
        assert same == [False] * first + [True] * (len(same) - first)
        for sequence, other in zip(found, wanted, strict=True):
            run(llm, sequence)
            assert_near(torch.stack(sequence.logits), torch.stack(other.logits))
        assert llm.engine.cache.in_use == llm.engine.cache.num_aside


@pytest.mark.slow
def test_packed_pages_that_are_the_same_are_held_once(folder: Path) -> None:
    """For documents with dropped tokens, if all layers have the same tokens in a page."""
    settings = {"block_size": BLOCK, "share": 0.3, "stable_layers": [0], "recompute": False}
    method = make_reuse("sam_kv", settings)
    llm, alone = (opened(folder, "quest", prefix_cache=False) for _ in range(2))
    with ExitStack() as stack:
        seeds = range(90, 98)
        wanted = [run(alone, add(alone, stack, method, seed, 60)) for seed in seeds]
        found = [run(llm, add(llm, stack, method, seed, 60), 1) for seed in seeds]
        shared = 0
        for one in found[1:]:
            assert one.reused is not None
            assert found[0].reused is not None
            if not torch.equal(one.reused.kept, found[0].reused.kept):
                both = {*before(one)} & {*before(found[0])}
                assert both
                shared += len(both)
                assert one.packing is not None
                assert found[0].packing is not None
                for page in both:  # each layer has the same tokens in it
                    entries = [s.pages.index(page) for s in (one, found[0])]
                    ours, theirs = (
                        s.packing.positions[:, entry * SIZE : (entry + 1) * SIZE]
                        for s, entry in zip((one, found[0]), entries, strict=True)
                    )
                    assert torch.equal(ours, theirs)
        assert shared
        for sequence, other in zip(found, wanted, strict=True):
            run(llm, sequence)
            assert_near(torch.stack(sequence.logits), torch.stack(other.logits))
        assert llm.engine.cache.in_use == llm.engine.cache.num_aside


def test_pages_of_another_offset_or_prefix_are_not_taken(folder: Path) -> None:
    llm = opened(folder, prefix_cache=False)
    with ExitStack() as stack:
        first = run(llm, add(llm, stack, METHODS["reuse"], 90, 40, ["a", "b"]), 1)
        second = run(llm, add(llm, stack, METHODS["reuse"], 90, 40, ["b", "a"]), 1)
        assert not {*before(first)[1:]} & {*before(second)[1:]}


@pytest.mark.slow
def test_pages_of_questions_that_ended_are_not_taken(folder: Path) -> None:
    llm = opened(folder, prefix_cache=False)
    with ExitStack() as stack:
        wanted = run(llm, add(llm, stack, METHODS["reuse"], 90))
        again = run(llm, add(llm, stack, METHODS["reuse"], 90))
        assert torch.equal(torch.stack(again.logits), torch.stack(wanted.logits))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["quest", "delta"])
def test_offloaded_layers_are_shared_too(policy: str, folder: Path, tmp_path: Path) -> None:
    plain = opened(folder, policy, prefix_cache=False)
    llm = opened(folder, policy, prefix_cache=False, memory="64MiB", offload=tmp_path)
    offloader = llm.engine.offloader
    assert offloader is not None
    offloader.least = len(offloader.plan.model.order)
    offloader.offload_layer(offloader.least)
    with ExitStack() as stack:
        wanted = [run(plain, add(plain, stack, METHODS["reuse"], seed)) for seed in (90, 91)]
        first = run(llm, add(llm, stack, METHODS["reuse"], 90), 2)
        second = run(llm, add(llm, stack, METHODS["reuse"], 91), 2)
        assert before(first) == before(second)
        for sequence, other in zip((first, second), wanted, strict=True):
            run(llm, sequence)
            assert_near(torch.stack(sequence.logits), torch.stack(other.logits))
            assert sequence.stats().moved_bytes


def test_a_page_that_was_freed_or_moved_is_not_found(folder: Path) -> None:
    cache = opened(folder).engine.cache
    filled = FilledPages(cache)
    gap, pages = cache.allocate(3), cache.allocate(4)
    assert gap is not None
    assert pages is not None
    entries = [pages[0], NO_PAGE, *pages[1:]]
    filled.remember(b"a", entries)
    found = filled.find(b"a")
    assert found is not None
    assert (found.entries, found.unpaged, found.last) == (entries, None, None)
    assert filled.find(b"b") is None
    cache.share(pages)
    cache.release(pages)
    assert filled.find(b"a") is found  # one reference is left
    cache.release(pages[3:])
    assert filled.find(b"a") is None
    assert cache.allocate(1) == pages[3:]  # the same page for another owner
    assert filled.find(b"a") is None
    filled.remember(b"c", pages)
    cache.release(gap)
    assert cache.pack()
    assert filled.find(b"c") is None
