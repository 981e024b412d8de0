"""Of many documents, only those that match the question are opened."""

from __future__ import annotations

import pytest
import torch

import keyhole
from keyhole import LLM, SamKV, SamplingParams
from keyhole.documents.search import BM25, Found, Listing
from keyhole.documents.store import StoredDocument
from keyhole.engine.documents.forward_passes import ForwardPasses
from keyhole.errors import ConfigError, UnknownNameError
from keyhole.eval.tiny_language.world import FILLERS, NAMES, NUMBERS
from keyhole.reuse import make_reuse
from keyhole.reuse.baselines import FullReuse
from tests.engine.documents import asking

NUMBER = 41
#: The one that has the answer.
WITH_ANSWER = 40
SHORT = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A store of small documents; only one has the answer."""
    llm = LLM(keyhole.tiny(), device="cpu", documents=tmp_path_factory.mktemp("many"))
    for number in range(NUMBER):
        words = [FILLERS[(number + i) % len(FILLERS)] for i in range(9)]
        if number == WITH_ANSWER:
            words[4:4] = [NAMES[0], "keeps", NUMBERS[3], "."]
        llm.documents.add(name_of(number), " ".join(words), block_size=8)
    return llm


def name_of(number: int) -> str:
    return f"document {number:03}"


def opened(llm: LLM) -> dict[str, int]:
    """How often each document's record was opened."""
    return {info.name: info.hits for info in llm.documents.list()}


def ask(llm: LLM, names: list[str], max_documents: int | None) -> tuple[list[str], list[str]]:
    """The documents of the answer's prompt, and those whose records were opened for it."""
    before = opened(llm)
    method = SamKV(block_size=8, max_documents=max_documents)
    answer = llm.ask(f"{NAMES[0]} keeps ?", names, reuse=method, params=SHORT)
    assert answer.reused is not None
    new = [name for name, hits in opened(llm).items() if hits > before[name]]
    assert all(hits - before[name] in (0, 1) for name, hits in opened(llm).items())
    return list(answer.reused.documents), new


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3, 8])
def test_only_the_wanted_number_of_records_is_opened(llm: LLM, most: int) -> None:
    names = [name_of(number) for number in range(NUMBER)]
    used, new = ask(llm, names, most)
    assert new == used
    assert len(used) == most
    assert name_of(WITH_ANSWER) in used
    assert used == sorted(used)  # in the order that was given


def test_a_document_that_was_not_named_is_not_found(llm: LLM) -> None:
    names = [name_of(number) for number in range(10, 40)]
    used, new = ask(llm, names, 5)
    assert new == used == names[:5]  # none of them matches


def test_all_are_opened_where_there_are_no_more(llm: LLM) -> None:
    names = [name_of(number) for number in (WITH_ANSWER, 3, WITH_ANSWER, 9)]
    for most in (None, 3, 8):
        used, new = ask(llm, names, most)
        assert used == names
        assert new == sorted(set(names))
    used, new = ask(llm, names, 1)  # a document that is named twice stands twice
    assert used == [name_of(WITH_ANSWER)] * 2
    assert new == [name_of(WITH_ANSWER)]


def test_another_retriever_is_asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Last:
        """The documents whose names come last."""

        def update(self, documents: Listing, text: object) -> None:
            assert len(documents()) == NUMBER

        def search(self, query: str, top_k: int) -> list[Found]:
            assert query == f"{NAMES[0]} keeps ?"
            assert top_k == NUMBER
            names = (name_of(number) for number in reversed(range(NUMBER)))
            return [Found(name=name, score=0.0, snippet="") for name in names]

    monkeypatch.setattr(llm.documents, "retriever", Last())
    used, _ = ask(llm, [name_of(number) for number in range(NUMBER)], 2)
    assert used == [name_of(NUMBER - 2), name_of(NUMBER - 1)]


def test_a_text_that_was_stored_only_for_a_moment_is_not_found(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read after the list of documents was, and stayed in the table as the listed one."""
    store = llm.documents.store
    table = BM25(store.folder / "another.sqlite")
    monkeypatch.setattr(type(store), "source", lambda self, name: "zebra")
    llm.documents.update_search(table)
    monkeypatch.undo()
    assert table.search("zebra", 5) == []
    llm.documents.update_search(table)
    assert [one.name for one in table.search("keeps", NUMBER)] == [name_of(WITH_ANSWER)]


def test_token_ids_are_compared_by_their_text(llm: LLM) -> None:
    tokenizer = llm.engine.model.tokenizer
    ids = tokenizer.encode(f"{NAMES[0]} keeps ?", add_special_tokens=False)
    names = [name_of(number) for number in range(NUMBER)]
    method = SamKV(block_size=8, max_documents=1)
    answer = llm.ask({"prompt_token_ids": ids}, names, reuse=method, params=SHORT)
    assert answer.reused is not None
    assert list(answer.reused.documents) == [name_of(WITH_ANSWER)]


def test_a_name_that_is_not_stored_is_refused(llm: LLM) -> None:
    names = [name_of(1), f"{name_of(WITH_ANSWER)}0", name_of(3)]
    with pytest.raises(UnknownNameError, match=f"mean '{name_of(WITH_ANSWER)}'"):
        llm.ask("who ?", names, reuse=SamKV(block_size=8, max_documents=1), params=SHORT)


def test_the_number_is_at_least_one(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="max_documents 0 must be at least 1"):
        llm.ask("who ?", [name_of(1)], reuse=SamKV(max_documents=0), params=SHORT)
    assert FullReuse().document_limit is None


@pytest.mark.slow
def test_documents_without_middle_blocks_are_computed_like_any_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of short documents are initial or local ones, which SamKV computes again. Their
    statistics were read all the same, and the tokens ran as a pass with places of its own, so that
    an answer came later than by `recompute`.
    """
    names = [name_of(number) for number in range(40)]
    wanted = asking.run(llm, names, [5, 6, 7], make_reuse("recompute"))

    def refused(*_: object) -> None:
        raise AssertionError("nothing needs this")

    monkeypatch.setattr(StoredDocument, "statistics", refused)
    monkeypatch.setattr(ForwardPasses, "run", refused)
    found = asking.run(llm, names, [5, 6, 7], SamKV(block_size=8).resolve(llm.engine.geometry))
    for logits, others in zip(found.logits, wanted.logits, strict=True):
        # The same passes in chunks of other sizes: they differ by the rounding of float32 sums.
        torch.testing.assert_close(logits, others, rtol=1e-5, atol=1e-5)
    stats = found.stats()
    assert (stats.sequence_ratio, stats.recompute_ratio) == (1.0, 1.0)
    assert stats.tokens_not_computed == 0


@pytest.mark.parametrize("select", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_plan_without_middle_blocks_keeps_everything(
    llm: LLM, select: bool, recompute: bool
) -> None:
    names = [name_of(0), name_of(1)]
    method = SamKV(block_size=8, select=select, recompute=recompute)
    found = asking.run(llm, names, [5], method.resolve(llm.engine.geometry)).reused
    assert found is not None
    assert found.kept.all()
    assert found.recomputed.all() if recompute else not found.recomputed.any()
    assert found.shares == ((0.0, 0.0) if select else None)
