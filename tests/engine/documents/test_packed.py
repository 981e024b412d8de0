"""What a question holds of stored documents is what its layers keep."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keyhole import LLM, SamplingParams
from keyhole.cache.page_list import NO_PAGE
from keyhole.engine.documents.prefill import DocumentPrefill
from keyhole.engine.scheduling.scheduler_output import SchedulerOutput
from keyhole.engine.sequence import Sequence
from keyhole.errors import ConfigError
from keyhole.policies import available_controls, available_policies, make_policy
from keyhole.reuse import make_reuse
from tests.checkpoints import make_model
from tests.engine.documents.asking import BLOCK, WIDE, assembled, assert_near, tokens
from tests.engine.documents.pacing import AtOnce, paced
from tests.engine.documents.test_documents import Masks
from tests.policies.models import with_head

NAMES = ["a", "b", "c", "d"]
LENGTH = 160
TEXTS = {name: tokens(LENGTH, seed) for seed, name in enumerate(NAMES)}
PREFIX, SEPARATOR, QUESTION = [1], [5], tokens(9, 99)
SAM_KV = make_reuse("sam_kv", {"block_size": BLOCK, "share": 0.5, "stable_layers": [0]})
#: Policies under which each layer selects by itself, with a budget above the prompt.
PER_LAYER = {
    "full": {},
    "sliding_window": {"token_budget": 4096},
    "streaming_llm": {"token_budget": 4096},
    "random": {"token_budget": 4096},
    "oracle": {"token_budget": 4096},
    "quest": {"token_budget": 4096},
    "raas": {"token_budget": 4096},
}
#: Policies under which some layers select for others, with a budget below what layers keep.
ACROSS_LAYERS = {
    "delta": {"token_budget": 64, "full_layers": (0,), "delta_layers": (1, 3)},
    "omnikv": {"token_budget": 64, "full_layers": (0,), "filter_layers": (1,), "dense_after": 0},
    "tidal_decode": {"token_budget": 64, "full_layers": (0,), "selection_layers": (1, 3)},
    "spe_context": {"token_budget": 64, "window_size": 8},
}


def opened(folder: Path, policy: Any = None, page_size: int = 4, **more: Any) -> LLM:
    path = next(folder.rglob("config.json")).parent
    model, store = with_head(path), folder / "store"
    return LLM(model, device="cpu", page_size=page_size, policy=policy, documents=store, **more)


def started(folder: Path, layers: int, policy: Any = None, **more: Any) -> LLM:
    make_model("llama", folder, num_hidden_layers=layers, **WIDE)
    llm = opened(folder, policy, **more)
    for name, ids in TEXTS.items():
        llm.documents.add(name, {"prompt_token_ids": ids}, block_size=BLOCK)
    return llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


def begin(llm: LLM, stack: ExitStack, reuse: Any = SAM_KV, **params: Any) -> Sequence:
    """A question after its second token, before its end."""
    method = reuse.resolve(llm.engine.geometry)
    asked = assembled(llm, stack, NAMES, QUESTION, method, PREFIX, SEPARATOR)
    chosen = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, **params)
    sequence = llm.engine.add(asked.tokens, chosen, context=asked.context, keep_logits=True)
    while len(sequence.generated) < 2:
        llm.engine.step()
    llm.engine.check_integrity()
    return sequence


def finish(llm: LLM, sequence: Sequence) -> torch.Tensor:
    """All logits of an answer, [6, vocabulary]."""
    while not sequence.is_finished:
        llm.engine.step()
    assert sequence.error is None
    llm.engine.check_integrity()
    assert llm.engine.cache.in_use == llm.engine.cache.num_aside
    assert llm.engine.cache.reserved == 0
    return torch.stack(sequence.logits)


def held_and_kept(llm: LLM, sequence: Sequence) -> tuple[int, int]:
    """Bytes of the tensors of its pages before the question, and of what layers keep there.

    With a retrieval head, also those of its keys, of the tokens that any layer keeps.
    """
    cache, end = llm.engine.cache, len(sequence.prompt) - len(QUESTION)
    entries = sequence.pages[: -(-end // cache.page_size)]
    pages = [page for page in entries if page != NO_PAGE]
    held = kept = 0
    assert sequence.reused is not None
    others = end - len(NAMES) * LENGTH  # prefix and separators
    for layer, row in enumerate(sequence.reused.kept):
        one = cache.keys[layer][:1].nbytes + cache.values[layer][:1].nbytes
        held += len(pages) * one
        kept += (int(row.sum()) + others) * one // cache.page_size
    head = llm.engine.head_runner
    if head is not None:
        one = cache.common["head_keys"][:1].nbytes
        held += len(pages) * one
        if head.unpaged.in_use:
            held += head.unpaged.keys.nbytes
        union = int(sequence.reused.kept.any(0).sum()) + others
        kept += union * one // cache.page_size
    return held, kept


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "delta", "omnikv", "tidal_decode", "spe_context"])
@pytest.mark.parametrize("layers", [6, 16, 32])
def test_a_question_holds_what_its_layers_keep(
    layers: int, policy: str | None, folder: Path
) -> None:
    llm = started(folder / f"{layers} {policy}", layers, policy)
    with ExitStack() as stack:
        sequence = begin(llm, stack)
        held, kept = held_and_kept(llm, sequence)
        assert kept <= held <= 1.1 * kept
        reused = sequence.reused
        assert reused is not None
        union = float(reused.kept.any(0).float().mean())
        assert reused.sequence_ratio < union / 1.1  # so that there was something to pack
        assert reused.sequence_ratio <= reused.held_ratio <= 1.1 * reused.sequence_ratio
        assert sequence.stats().held_ratio == reused.held_ratio
        finish(llm, sequence)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "quest", "delta", "spe_context"])
@pytest.mark.parametrize("layers", [6, 32])
def test_filling_holds_little_more_than_what_is_kept(
    layers: int, policy: str | None, folder: Path
) -> None:
    """It held the pages of which any layer keeps a token, until each layer's tokens were packed."""
    llm = started(folder / f"peak {layers} {policy}", layers, policy, prefix_cache=False)
    cache = llm.engine.cache
    with ExitStack() as stack:
        cache.peak_pages = cache.in_use
        sequence = begin(llm, stack)
        reused = sequence.reused
        assert reused is not None
        final = len([page for page in sequence.pages if page != NO_PAGE])
        # A token that one layer computes again is read in all of them: a few more in some layers.
        needed = (reused.kept | reused.recomputed.any(0)).sum(1) - reused.kept.sum(1)
        more = 2 + -(-int(needed.max()) // cache.page_size)
        assert cache.peak_pages <= final + more
        union = int(reused.kept.any(0).sum()) // cache.page_size
        assert final + more < union
        finish(llm, sequence)


#: Policies that need more of a prompt than its kept keys and values: they are refused by name.
REFUSED = {"infllm", "r_kv", "snapkv", "clusterkv", "shadowkv"}
EVERY = {**available_policies(), **available_controls()}


@pytest.fixture(scope="module")
def dense(folder: Path) -> torch.Tensor:
    """The logits of an answer under full attention, over tokens at their positions."""
    llm = started(folder / "every", 4)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(DocumentPrefill, "packs", False)
        return finish(llm, begin(llm, stack))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", EVERY)
def test_every_policy_reads_packed_tokens(name: str, folder: Path, dense: torch.Tensor) -> None:
    """With a budget above the length the answer is the dense one; with a small one it runs."""
    has_budget = "token_budget" in EVERY[name].__dataclass_fields__
    for budget in (4096, 48) if has_budget else (None,):
        policy = make_policy(name, {} if budget is None else {"token_budget": budget})
        llm = opened(folder / "every", policy)
        with ExitStack() as stack:
            if name in REFUSED:
                with pytest.raises(ConfigError, match=f"policy '{name}' needs"):
                    begin(llm, stack)
                return
            sequence = begin(llm, stack)
            assert sequence.packing is not None
            found = finish(llm, sequence)
            if budget == 4096:
                assert_near(found, dense)
            assert found.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", PER_LAYER)
def test_answers_are_those_over_tokens_at_their_positions(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(name, PER_LAYER[name])
    llm = started(folder / name, 3, policy)
    with ExitStack() as stack:
        packed = finish(llm, begin(llm, stack))
        monkeypatch.setattr(DocumentPrefill, "packs", False)
        sequence = begin(llm, stack)
        held, kept = held_and_kept(llm, sequence)
        assert held > 1.1 * kept
        assert_near(packed, finish(llm, sequence))


@pytest.mark.slow
@pytest.mark.parametrize("name", ACROSS_LAYERS)
@pytest.mark.parametrize("kind", ["sam_kv", "masks"])
def test_layers_that_share_a_selection_read_the_same_tokens_packed(
    name: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of one token is the same choice at positions and packed, also where pages are chosen.

    In larger pages a selection of pages means other tokens when they are packed.
    """
    policy = make_policy(name, ACROSS_LAYERS[name])
    llm = started(folder / f"{name} {kind}", 6, policy, page_size=1 if name == "delta" else 4)
    method = SAM_KV if kind == "sam_kv" else _masks(6, seed=3)
    with ExitStack() as stack:
        sequence = begin(llm, stack, method, trace=True)
        packed = finish(llm, sequence)
        monkeypatch.setattr(DocumentPrefill, "packs", False)
        other = begin(llm, stack, method, trace=True)
        assert_near(packed, finish(llm, other))
    assert sequence.reads is not None
    assert other.reads is not None
    for ours, theirs in zip(sequence.reads, other.reads, strict=True):
        for layer in range(6):
            np.testing.assert_array_equal(ours.shares(layer), theirs.shares(layer))
    assert sequence.reads[-1].shares(2).sum() < 64 + 1  # it did select


@pytest.mark.slow
@pytest.mark.parametrize("name", ACROSS_LAYERS)
def test_offloaded_layers_read_the_same_tokens_packed(name: str, folder: Path) -> None:
    policy = make_policy(name, ACROSS_LAYERS[name])
    place = folder / f"below {name}"
    with ExitStack() as stack:
        above = started(place, 6, policy)
        wanted = finish(above, begin(above, stack))
        below = started(place, 6, policy, memory="64MiB", offload=str(folder))
        offloader = below.engine.offloader
        assert offloader is not None
        offloader.least = len(offloader.plan.model.order)
        offloader.offload_layer(offloader.least)
        sequence = begin(below, stack)
        assert torch.equal(finish(below, sequence), wanted)
        assert sequence.stats().offloaded_layers
        assert sequence.stats().moved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ACROSS_LAYERS, "quest"])
def test_questions_that_wait_for_memory_answer_as_alone(name: str, folder: Path) -> None:
    """A question that is filled holds every page that any layer needs, then only what it keeps."""
    policy = make_policy(name, ACROSS_LAYERS.get(name, {"token_budget": 64}))
    place = folder / f"pressed {name}"
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

    def add(llm: LLM, stack: ExitStack, names: list[str]) -> Sequence:
        method = SAM_KV.resolve(llm.engine.geometry)
        asked = assembled(llm, stack, names, QUESTION, method, PREFIX, SEPARATOR)
        return llm.engine.add(asked.tokens, params, context=asked.context, keep_logits=True)

    orders = [NAMES[i:] + NAMES[:i] for i in range(4)]  # so that nothing is shared

    with ExitStack() as stack:
        llm = started(place, 4, policy, prefix_cache=False)
        alone = []
        for names in orders:
            alone.append(add(llm, stack, names))
            while not alone[-1].is_finished:
                llm.engine.step()
        assert alone[0].reused is not None
        kept = int(alone[0].reused.held_ratio * len(NAMES) * LENGTH) // 4 + 20
        filling = llm.engine.cache.peak_pages
        memory = (kept + filling) * llm.engine.cache.page_bytes
        pressed = started(place, 4, policy, memory=memory, prefix_cache=False)
        sequences, most = [add(pressed, stack, names) for names in orders], 0
        while pressed.engine.has_work:
            pressed.engine.step()
            pressed.engine.check_integrity()
            most = max(most, len(pressed.engine.scheduler.running))
        assert most <= 2
        for sequence, wanted in zip(sequences, alone, strict=True):
            assert_near(torch.stack(sequence.logits), torch.stack(wanted.logits))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["full", "quest", "delta", "spe_context"])
def test_questions_that_grow_and_are_preempted_answer_as_alone(
    name: str, shared: bool, folder: Path
) -> None:
    """The cache grows under them, and the younger one is filled and computed again.

    One that was pre-empted late was refused then: its generated tokens were counted twice.
    """
    settings = ACROSS_LAYERS.get(name, {"token_budget": 64} if name == "quest" else {})
    policy, place = make_policy(name, settings), folder / f"grown {name} {shared}"
    params = SamplingParams(max_tokens=110, temperature=0.0, ignore_eos=True)
    orders = [NAMES, NAMES if shared else NAMES[1:] + NAMES[:1]]
    preempted: list[Sequence] = []

    def add(llm: LLM, stack: ExitStack, names: list[str]) -> Sequence:
        method = SAM_KV.resolve(llm.engine.geometry)
        asked = assembled(llm, stack, names, QUESTION, method, PREFIX, SEPARATOR)
        return llm.engine.add(asked.tokens, params, context=asked.context, keep_logits=True)

    with ExitStack() as stack:
        llm = started(place, 4, policy, prefix_cache=False)
        cache, alone, held = llm.engine.cache, [], []
        for names in orders:
            alone.append(add(llm, stack, names))
            while not alone[-1].is_finished:
                held.append(set(alone[-1].pages) - {NO_PAGE})
                llm.engine.step()
        assert cache.capacity > 64  # it has grown
        each = max(map(len, held))
        pages = each + 20 if shared else 2 * each - 10
        tight = opened(place, policy, memory=pages * cache.page_bytes, prefix_cache=False)
        paced(tight.engine, AtOnce())
        schedule = tight.engine.scheduler.schedule

        def watched() -> SchedulerOutput:
            plan = schedule()
            preempted.extend(plan.preempted)
            return plan

        tight.engine.scheduler.schedule = watched  # type: ignore[method-assign]
        sequences = [add(tight, stack, names) for names in orders]
        while tight.engine.has_work:
            tight.engine.step()
            tight.engine.check_integrity()
        assert preempted
        for sequence, wanted in zip(sequences, alone, strict=True):
            assert sequence.error is None
            assert_near(torch.stack(sequence.logits), torch.stack(wanted.logits))
        assert tight.engine.cache.in_use == tight.engine.cache.num_aside
        assert tight.engine.cache.reserved == 0


@pytest.mark.one_in(6)
@pytest.mark.parametrize("policy", [None, "delta", "quest"])
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen2_sliding", "mistral_sliding"])
def test_sliding_windows_see_the_same_tokens_packed(
    kind: str, policy: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is shorter than what layers with full attention keep, so these alone need pages."""
    if policy == "delta":
        settings = {"token_budget": 4096}
    else:
        settings = {"token_budget": 64} if policy == "quest" else {}
    if policy and kind == "mistral_sliding":
        pytest.skip("no layer has full attention, so a policy has nothing to select")
    path = make_model(kind, folder / f"{kind} {policy}", **WIDE)
    made = None if policy is None else make_policy(policy, settings)
    store = folder / f"{kind} {policy}" / "store"
    llm = LLM(path, device="cpu", page_size=4, policy=made, documents=store)
    for name, ids in TEXTS.items():
        llm.documents.add(name, {"prompt_token_ids": ids}, block_size=BLOCK)
    layers = llm.engine.geometry.num_layers
    with ExitStack() as stack:
        sequence = begin(llm, stack, _masks(layers, seed=1), trace=True)
        assert sequence.reused is not None
        full = sequence.reused.kept[list(llm.engine.geometry.full_attention)]
        most = max([8, *full.sum(1).tolist()]) + 8 * 4
        assert sequence.reused.held_ratio <= most / (len(NAMES) * LENGTH)
        packed = finish(llm, sequence)
        monkeypatch.setattr(DocumentPrefill, "packs", False)
        other = begin(llm, stack, _masks(layers, seed=1), trace=True)
        if policy == "quest":  # its pages have other tokens
            finish(llm, other)
            return
        assert_near(packed, finish(llm, other))
    assert sequence.reads is not None
    assert other.reads is not None
    for ours, theirs in zip(sequence.reads, other.reads, strict=True):
        for layer in range(layers):
            np.testing.assert_array_equal(ours.shares(layer), theirs.shares(layer))


def _masks(layers: int, seed: int) -> Masks:
    """Layers keep different numbers of tokens, and compute some of them again."""
    random = torch.Generator().manual_seed(seed)
    share = torch.linspace(0.2, 0.8, layers)[:, None]
    kept = torch.rand(layers, len(NAMES) * LENGTH, generator=random) < share
    return Masks(kept, kept & (torch.rand(kept.shape, generator=random) < 0.2), fuses=False)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(3))
def test_layers_that_keep_different_numbers_answer_alike(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = started(folder / f"masks{seed}", 3)
    random = torch.Generator().manual_seed(seed)
    kept = torch.rand(3, len(NAMES) * LENGTH, generator=random) < torch.tensor(
        [[0.1], [0.4], [0.9]]
    )
    written = kept & (torch.rand(kept.shape, generator=random) < 0.2)
    method = Masks(kept, written, fuses=bool(seed % 2))
    with ExitStack() as stack:
        packed = finish(llm, begin(llm, stack, method))
        monkeypatch.setattr(DocumentPrefill, "packs", False)
        assert_near(packed, finish(llm, begin(llm, stack, method)))


@pytest.mark.slow
def test_several_questions_run_at_once(folder: Path) -> None:
    llm = started(folder / "several", 3)
    with ExitStack() as stack:
        alone = finish(llm, begin(llm, stack))
        sequences = [begin(llm, stack) for _ in range(3)]
        while not all(sequence.is_finished for sequence in sequences):
            llm.engine.step()
        for sequence in sequences:
            assert_near(torch.stack(sequence.logits), alone)


def test_a_trace_has_positions(folder: Path) -> None:
    """A place in a page is another token in another layer, and a trace says which."""
    llm = started(folder / "trace", 3)
    with ExitStack() as stack:
        sequence = begin(llm, stack, trace=True)
        reused = sequence.reused
        assert reused is not None
        finish(llm, sequence)
    assert sequence.reads is not None
    documents = np.concatenate(
        [len(PREFIX) + i * (LENGTH + len(SEPARATOR)) + np.arange(LENGTH) for i in range(len(NAMES))]
    )
    for reads in sequence.reads:
        for layer, kept in enumerate(reused.kept.numpy()):
            wanted = np.ones(reads.length)
            wanted[documents] = kept
            np.testing.assert_array_equal(reads.shares(layer), wanted)


@pytest.mark.slow
def test_a_window_counts_kept_tokens(folder: Path) -> None:
    """Sinks and recent tokens are the first and last ones that a layer keeps."""
    policy = make_policy("streaming_llm", {"token_budget": 40, "sink_size": 3})
    llm = started(folder / "window", 3, policy)
    with ExitStack() as stack:
        sequence = begin(llm, stack, trace=True)
        assert sequence.reused is not None
        finish(llm, sequence)
    assert sequence.reads is not None
    end = len(sequence.prompt) - len(QUESTION)
    for reads in sequence.reads[1:]:
        for layer, kept in enumerate(sequence.reused.kept.numpy()):
            there = np.ones(end, bool)
            for i in range(len(NAMES)):
                start = len(PREFIX) + i * (LENGTH + len(SEPARATOR))
                there[start : start + LENGTH] = kept[i * LENGTH : (i + 1) * LENGTH]
            every = [*there.nonzero()[0].tolist(), *range(end, reads.length)]
            assert reads.shares(layer).nonzero()[0].tolist() == every[:3] + every[-37:]
