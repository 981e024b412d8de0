"""Questions over stored documents, against an independent account of the whole way.

`tests/reuse/oracle.py` writes every method down once more in plain PyTorch, in float64, with no
cache and no pages.
"""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keyhole import LLM, ConfigError, SamplingParams
from keyhole.documents.record import DocumentRecord
from keyhole.documents.store import Problem
from keyhole.engine.sequence import Sequence
from keyhole.models.positions import RopeShift
from keyhole.policies import make_policy
from keyhole.reuse import make_reuse
from keyhole.reuse.base import RecomputePlan, Reuse
from keyhole.tokenization import Detokenizer
from tests.checkpoints import make_model
from tests.engine.documents.asking import (
    BLOCK,
    CASES,
    EVERYTHING,
    KINDS,
    LENGTHS,
    TEXTS,
    WIDE,
    ask,
    assembled,
    assert_near,
    llms,
    run,
    settings_of,
    tokens,
)
from tests.engine.documents.pacing import AtOnce, paced
from tests.reuse import oracle, plain, plain_methods

__all__ = ["llms"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("names", "prefix", "separator"),
    [
        (["a", "b", "c"], [1], []),
        (["c", "tiny", "a", "c", "short"], [], [7, 8]),
        (["b"], tokens(6, 9), [9]),
    ],
)
def test_answers_are_those_of_the_plain_account(
    llms: dict[str, tuple[LLM, Any]],
    kind: str,
    case: str,
    names: list[str],
    prefix: list[int],
    separator: list[int],
) -> None:
    llm, model = llms[kind]
    method, ours, theirs = CASES[case]
    question = tokens(9, 99)
    found = ask(
        llm, names, question, method, settings_of(method, ours), prefix=prefix, separator=separator
    )
    wanted = oracle.ask(
        model,
        [TEXTS[name] for name in names],
        prefix,
        question,
        method,
        separator=separator,
        max_new_tokens=4,
        block_size=BLOCK,
        **theirs,
    )
    assert found.generated == wanted["ids"]
    assert_near(found.logits[0], wanted["logits"])
    if found.reused is not None:
        assert torch.equal(found.reused.kept, wanted["kept"])


class Masks(Reuse):
    """Any masks at all, for what no method happens to ask."""

    name = "masks"

    def __init__(self, kept: torch.Tensor, written: torch.Tensor, *, fuses: bool) -> None:
        self._given = kept, written
        self._fuses = fuses

    @property
    def fuses(self) -> bool:
        return self._fuses

    def plan(self, documents: Any, query: Any) -> RecomputePlan:
        return RecomputePlan(*self._given)

    def fuse(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return plain.fusion(new, old)


def masks(llm: LLM, names: list[str], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (llm.engine.geometry.num_layers, sum(LENGTHS[name] for name in names))
    kept = torch.rand(shape, generator=random) < 0.5
    return kept, kept & (torch.rand(shape, generator=random) < 0.4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fuses", [False, True])
def test_layers_may_keep_and_write_whatever_they_like(
    llms: dict[str, tuple[LLM, Any]], seed: int, fuses: bool
) -> None:
    """A token that a layer computes again and another one drops leaves no trace in that one."""
    llm, model = llms["llama"]
    names, prefix, separator, question = ["a", "c", "short"], [1, 2], [5], tokens(7, seed)
    kept, written = masks(llm, names, seed)
    method = Masks(kept, written, fuses=fuses)
    found = run(llm, names, question, method, prefix=prefix, separator=separator)
    network = plain.Network(model, torch.float64)
    with torch.no_grad():
        records = [plain.encode(network, TEXTS[name], BLOCK) for name in names]
        prompt = plain.Prompt(network, records, prefix, question, separator, 4, True)
        full = [torch.zeros(len(kept), len(prompt.ids), dtype=torch.bool) for _ in range(2)]
        for mask, given in zip(full, (kept, written), strict=True):
            mask[:, prompt.documents] = given
        settings = plain.Settings(update="fusion" if fuses else "overwrite")
        wanted = oracle.answer(prompt, plain_methods.Choice(*full), settings, None)
    assert found.generated == wanted["ids"]
    assert_near(found.logits[0], wanted["logits"])


def test_what_is_not_computed_again_stays_as_it_was_stored(
    llms: dict[str, tuple[LLM, Any]],
) -> None:
    llm, _ = llms["llama"]
    names = ["a", "c"]
    kept, written = masks(llm, names, 1)
    with ExitStack() as stack:
        asked = assembled(llm, stack, names, [9], Masks(kept, written, fuses=False), [], [])
        request = Sequence(array("i", asked.tokens), SamplingParams(), Detokenizer(None, ()))
        request.context = asked.context
        filling = llm.engine.document_prefill(llm.engine.under(None)).begin(request)
        while filling.filled is None:
            filling.run(llm.engine.pace)
        request.pages = filling.take()
        packing = filling.filled.packing
        assert packing is not None
        assert asked.context is not None
        geometry, size = llm.engine.geometry, llm.engine.config.page_size
        turns = RopeShift.of(llm.engine.model)
        stored = kept & ~written
        for layer in range(geometry.num_layers):
            for place in stored[layer].nonzero()[:, 0].tolist():
                number = 0 if place < LENGTHS["a"] else 1
                row = place - number * LENGTHS["a"]
                document = asked.context.documents[number]
                key, value = document.rows(layer, row, row + 1)
                position = int(asked.context.positions[place])
                at = int((packing.positions[layer] == position).nonzero()[0, 0])
                page = request.pages[at // size]
                offset = asked.context.offsets[number]
                key = turns.shift(layer, key, torch.tensor([[offset]]))
                here = llm.engine.cache.keys[layer][page, :, at % size]
                assert torch.equal(here, key[0])
                assert value is not None
                assert torch.equal(llm.engine.cache.values[layer][page, :, at % size], value[0])
        llm.engine.cache.release(page for page in request.pages if page >= 0)
    llm.engine.check_integrity()


OTHER_KINDS = ("qwen2_sliding", "qwen3", "mistral_sliding", "phi3", "gemma2", "gemma3", "gpt_oss")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", [*KINDS, *OTHER_KINDS, "deepseek_v3"])
def test_computing_everything_again_is_a_plain_prompt(
    llms: dict[str, tuple[LLM, Any]], kind: str, tmp_path: Path
) -> None:
    if kind in llms:
        llm = llms[kind][0]
    else:
        path = make_model(kind, tmp_path, **WIDE)
        llm = LLM(path, device="cpu", page_size=4, prefill_chunk=37, documents=tmp_path / "store")
        for name in ("a", "b"):
            ids = {"prompt_token_ids": TEXTS[name]}
            llm.documents.add(name, ids, block_size=BLOCK)
    names, question, prefix = ["b", "a", "b"], tokens(9, 99), [1, 5]
    wanted = ask(llm, names, question, "recompute", {}, prefix=prefix, separator=[4])
    for method, settings in EVERYTHING.items():
        found = ask(llm, names, question, method, settings, prefix=prefix, separator=[4])
        assert found.prompt == wanted.prompt
        assert found.reused is not None
        assert found.reused.tokens_not_computed == 0
        assert found.generated == wanted.generated
        for ours, theirs in zip(found.logits, wanted.logits, strict=True):
            assert_near(ours, theirs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [*OTHER_KINDS, "deepseek_v3"])
def test_one_document_at_its_own_place_needs_nothing_again(kind: str, tmp_path: Path) -> None:
    """Alone at position 0 a stored document is what a prompt would compute."""
    path = make_model(kind, tmp_path, **WIDE)
    llm = LLM(path, device="cpu", page_size=4, prefill_chunk=37, documents=tmp_path / "store")
    llm.documents.add("a", {"prompt_token_ids": TEXTS["a"]})
    question = tokens(9, 99)
    wanted = ask(llm, ["a"], question, "recompute", {})
    found = ask(llm, ["a"], question, "reuse", {})
    for ours, theirs in zip(found.logits, wanted.logits, strict=True):
        assert_near(ours, theirs)


#: Policies in which some layers choose for others, and what these are called.
_CHOOSING = {
    "delta": "delta_layers",
    "tidal_decode": "selection_layers",
    "omnikv": "filter_layers",
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", ["sam_kv", "multi_infllm", "reuse"])
@pytest.mark.parametrize(
    "policy",
    [*_CHOOSING, "quest", "raas", "streaming_llm", "sliding_window"],
)
def test_policies_with_room_for_all_change_nothing(
    llms: dict[str, tuple[LLM, Any]], case: str, policy: str
) -> None:
    llm, _ = llms["llama"]
    method, ours, _ = CASES[case]
    names, question = ["a", "c"], tokens(9, 99)
    settings = settings_of(method, ours)
    wanted = ask(llm, names, question, method, settings, max_tokens=9)
    other = _beside(llm, policy, {"token_budget": 1024})
    found = ask(other, names, question, method, settings, max_tokens=9)
    assert found.generated == wanted.generated
    for ours_, theirs in zip(found.logits, wanted.logits, strict=True):
        assert_near(ours_, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*_CHOOSING, "quest", "raas", "streaming_llm"])
def test_policies_read_no_more_than_is_there(llms: dict[str, tuple[LLM, Any]], policy: str) -> None:
    llm, _ = llms["llama"]
    names, question, settings = ["a", "c"], tokens(9, 99), {"block_size": BLOCK, "select": False}
    dense = ask(llm, names, question, "sam_kv", settings, max_tokens=9)
    layers = {"full_layers": (0,), _CHOOSING[policy]: (1,)} if policy in _CHOOSING else {}
    counted = {"prompt_in_budget": True} if policy == "raas" else {}
    other = _beside(llm, policy, {"token_budget": 32, **layers, **counted})
    sparse = ask(other, names, question, "sam_kv", settings, max_tokens=9)
    kept, read = dense.stats().attended_fraction, sparse.stats().attended_fraction
    assert kept is not None
    assert read is not None
    # All of what is kept: sequence_ratio of the documents, and everything after them.
    assert dense.reused is not None
    length = sum(LENGTHS[name] for name in names)
    steps = [length + len(question) + i for i in range(1, 9)]
    there = [dense.reused.sequence_ratio * length + n - length for n in steps]
    assert kept == pytest.approx(np.mean([a / b for a, b in zip(there, steps, strict=True)]))
    assert 0 < read < kept


@pytest.mark.slow
def test_what_is_generated_after_documents_is_evicted(llms: dict[str, tuple[LLM, Any]]) -> None:
    """The budget leaves two pages besides the kept tokens; alpha 0 evicts the earlier one."""
    llm, model = llms["llama"]
    names, prefix, separator, question = ["a", "c", "short"], [1, 2], [5], tokens(7, 3)
    kept, written = masks(llm, names, 5)
    kept[:, 20:60] = False
    written &= kept
    network = plain.Network(model, torch.float64)
    with torch.no_grad():
        records = [plain.encode(network, TEXTS[name], BLOCK) for name in names]
        prompt = plain.Prompt(network, records, prefix, question, separator, 30, True)
        full = [torch.zeros(len(kept), len(prompt.ids), dtype=torch.bool) for _ in range(2)]
        for mask, given in zip(full, (kept, written), strict=True):
            mask[:, prompt.documents] = given
        choice, start = plain_methods.Choice(*full), len(prompt.ids) - 30
        # Layers keep theirs in one page at the beginning, and in the pages up to the question.
        end = start - len(question)
        most = int((full[0] | prompt.loose)[:, :end].sum(1).max())
        pages = 1 + -(-start // 4) - (end - (most - 4)) // 4
        assert pages < -(-start // 4) - 5
        oracle.answer(prompt, choice, plain.Settings(), None)  # writes what the prompt is
        ids, exists = prompt.ids, choice.kept | prompt.loose | prompt.question
        logits = []
        for place in range(start - 1, len(ids) - 1):
            exists |= plain.among(len(ids), [place])
            new = plain.among(len(ids), [place])
            writes = torch.zeros_like(full[0]) if place < start else prompt.everywhere(new)
            logits.append(prompt.run(new, exists, writes)[0][-1])
            ids[place + 1] = logits[-1].argmax()
            if place + 1 > -(-start // 4) * 4 + 4 and (place + 1) % 4 == 0:
                exists[:, place + 1 - 8 : place + 1 - 4] = False
    settings = {"token_budget": 4 * (pages + 2), "alpha": 0, "prompt_in_budget": True}
    other = _beside(llm, "raas", settings)
    method = Masks(kept, written, fuses=False)
    found = run(other, names, question, method, prefix=prefix, separator=separator, max_tokens=30)
    assert found.generated == ids[start:].tolist()
    for ours, theirs in zip(found.logits, logits, strict=True):
        assert_near(ours, theirs)
    assert found.stats().evicted_pages >= 5


def _beside(llm: LLM, policy: str, settings: dict[str, Any]) -> LLM:
    """Another engine over the same weights and the same stored documents."""
    return LLM(
        llm.engine.model,
        make_policy(policy, settings),
        page_size=4,
        prefill_chunk=37,
        documents=llm.documents.place,
    )


@pytest.mark.slow
def test_many_questions_at_once_are_as_each_alone(llms: dict[str, tuple[LLM, Any]]) -> None:
    llm, _ = llms["llama"]
    jobs: list[tuple[list[str], str]] = [
        (["a", "b"], "sam_kv"),
        (["c"], "reuse"),
        (["c", "a"], "no selection"),
        (["b", "a", "c"], "multi_infllm"),
    ]
    alone = [
        ask(llm, names, tokens(9, i), CASES[case][0], settings_of(*CASES[case][:2]), max_tokens=12)
        for i, (names, case) in enumerate(jobs)
    ]
    plain = llm.generate({"prompt_token_ids": tokens(60, 5)}, SamplingParams(max_tokens=12))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with ExitStack() as stack:
        together = [llm.engine.add(tokens(60, 5), SamplingParams(max_tokens=12))]
        for i, (names, case) in enumerate(jobs):
            method = make_reuse(CASES[case][0], settings_of(*CASES[case][:2]))
            method = method.resolve(llm.engine.geometry)
            asked = assembled(llm, stack, names, tokens(9, i), method, [], [])
            together.append(llm.engine.add(asked.tokens, params, context=asked.context))
            llm.engine.step()
        while not all(sequence.is_finished for sequence in together):
            llm.engine.step()
            llm.engine.check_integrity()
    assert together[0].generated == plain.token_ids
    assert [s.generated for s in together[1:]] == [s.generated for s in alone]


def test_a_question_that_gave_way_goes_on_where_it_was(llms: dict[str, tuple[LLM, Any]]) -> None:
    """Pages for one and a half: the younger is prepared again, and answers the same."""
    llm, _ = llms["llama"]
    question, settings = tokens(9, 99), {"block_size": BLOCK}
    orders = [["a", "b"], ["b", "a"]]  # in the same order they would share pages
    wanted = [ask(llm, names, question, "sam_kv", settings, max_tokens=60) for names in orders]
    tokens_of = llm.engine.geometry.token_bytes
    small = LLM(
        llm.engine.model,
        page_size=4,
        prefix_cache=False,
        documents=llm.documents.place,
        memory=190 * tokens_of,
        max_batch=2,
    )
    paced(small.engine, AtOnce())  # both run from the first step, however busy the machine is
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    method = make_reuse("sam_kv", settings).resolve(small.engine.geometry)
    gave_way = 0
    with ExitStack() as stack:
        both = []
        for names in orders:
            asked = assembled(small, stack, names, question, method, [], [])
            both.append(small.engine.add(asked.tokens, params, context=asked.context))
        while not all(sequence.is_finished for sequence in both):
            small.engine.step()
            small.engine.check_integrity()
            gave_way += any(s.slot < 0 and s.generated and not s.is_finished for s in both)
    assert gave_way, "there was room for both"
    assert [s.generated for s in both] == [one.generated for one in wanted]


def test_names_with_the_same_text_have_blocks_of_one_size(tmp_path: Path) -> None:
    """They share a record: the second name encoded it anew, and questions over the first failed."""
    llm = LLM(make_model("llama", tmp_path), device="cpu", documents=tmp_path / "store")
    text = {"prompt_token_ids": tokens(60, 5)}
    llm.documents.add("a", text, block_size=16)
    with pytest.raises(ConfigError, match="'b' must be 16, because document 'a'"):
        llm.documents.add("b", text, block_size=8)
    assert [(info.name, info.block_size) for info in llm.documents.list()] == [("a", 16)]
    llm.documents.add("b", text, block_size=16)
    with pytest.raises(ConfigError, match="'a' must be 16, because document 'b'"):
        llm.documents.add("a", text, block_size=8)
    llm.documents.remove("b")
    assert llm.documents.add("a", text, block_size=8).block_size == 8


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("how", ["repair", "other blocks"])
def test_what_another_process_stores_while_a_document_is_encoded_again_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, gone: bool
) -> None:
    """The old text was written over the new one, and came back after it had been removed."""
    model = make_model("llama", tmp_path)
    llm, other = (LLM(model, device="cpu", documents=tmp_path / "store") for _ in range(2))
    old, new = ({"prompt_token_ids": tokens(60, seed)} for seed in (5, 6))
    llm.documents.add("a", old, block_size=16)
    encode = llm.documents._encode

    def meanwhile(*arguments: Any) -> DocumentRecord:
        record = encode(*arguments)
        if gone:
            other.documents.remove("a")
        else:
            other.documents.add("a", new, block_size=16, overwrite=True, metadata={"edition": 2})
        return record

    monkeypatch.setattr(llm.documents, "_encode", meanwhile)
    if how == "repair":
        (record,) = (tmp_path / "store" / "records").iterdir()
        record.write_bytes(b"damaged")
        assert len(llm.documents.verify(repair=True)) == 1
        assert len(llm.documents.list()) == (not gone)
    elif gone:
        assert llm.documents.add("a", old, block_size=8).block_size == 8
        return
    else:
        with pytest.raises(ConfigError, match="document 'a' is stored with another text"):
            llm.documents.add("a", old, block_size=8)
    if not gone:
        info = llm.documents.get("a")
        assert (info.metadata, info.block_size) == ({"edition": 2}, 16)
        assert llm.documents.store.source("a") == new["prompt_token_ids"]
    assert llm.documents.verify() == []


def test_a_document_that_is_removed_during_a_repair_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documents after it were not repaired."""
    model = make_model("llama", tmp_path)
    llm, other = (LLM(model, device="cpu", documents=tmp_path / "store") for _ in range(2))
    for seed, name in enumerate("abc"):
        llm.documents.add(name, {"prompt_token_ids": tokens(20, seed)})
    for record in (tmp_path / "store" / "records").iterdir():
        record.write_bytes(b"damaged")
    verify = llm.documents.store.verify

    def meanwhile(names: Any) -> list[Problem]:
        problems = verify(names)
        other.documents.remove("a")
        return problems

    monkeypatch.setattr(llm.documents.store, "verify", meanwhile)
    assert [problem.name for problem in llm.documents.verify(repair=True)] == ["a", "b", "c"]
    monkeypatch.undo()
    assert llm.documents.verify() == []
