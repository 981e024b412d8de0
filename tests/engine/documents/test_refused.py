"""Questions that are refused, and their effect on other requests."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from keyhole import LLM, SamKV, SamplingParams
from keyhole.documents.integrity import RecordError
from keyhole.documents.record import read_header
from keyhole.documents.storage import LocalReader
from keyhole.engine.documents.prompt import assemble
from keyhole.errors import (
    CapacityError,
    ConfigError,
    KeyholeError,
    PromptTooLongError,
    RequestError,
    UnknownNameError,
)
from keyhole.models.model import Model
from keyhole.reuse import make_reuse
from tests.checkpoints import make_model
from tests.documents.test_damage import flip

FEW = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm(model: Model, tmp_path: Path) -> LLM:
    llm = LLM(model, page_size=8, documents=tmp_path / "store")
    llm.documents.add("handbook", "press the green button twice, then wait " * 4)
    llm.documents.add("faq", "the red lamp means that the tank is empty")
    return llm


def test_text_in_text_out(llm: LLM) -> None:
    result = llm.ask(
        "which button?", ["handbook", "faq"], params=FEW, separator="\n", prefix="read"
    )
    tokenizer = llm.tokenizer
    wanted = tokenizer("read").input_ids  # with BOS
    wanted += tokenizer("press the green button twice, then wait " * 4, add_special_tokens=False)[
        "input_ids"
    ]
    wanted += tokenizer("\n", add_special_tokens=False).input_ids
    wanted += tokenizer(
        "the red lamp means that the tank is empty", add_special_tokens=False
    ).input_ids
    wanted += tokenizer("which button?", add_special_tokens=False).input_ids
    assert result.prompt_token_ids == wanted
    assert len(result.token_ids) == 3
    assert result.stats.sequence_ratio == 1.0
    assert result.stats.ttft_ms is not None
    pieces = list(
        llm.stream_ask(
            "which button?", ["handbook", "faq"], params=FEW, separator="\n", prefix="read"
        )
    )
    assert "".join(piece.text for piece in pieces) == result.text


def test_a_stream_that_is_not_read_is_refused_at_once_and_leaves_nothing(llm: LLM) -> None:
    """As `stream`; an unknown name was told when the first piece was asked for."""
    with pytest.raises(UnknownNameError):
        llm.stream_ask("which?", ["fak"])
    stream = llm.stream_ask("which?", ["faq"], params=FEW)
    assert llm.engine.has_work
    del stream
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_a_chat_template_stands_around(llm: LLM) -> None:
    result = llm.ask("which?", ["faq"], params=FEW, chat=True, prefix="read: ")
    message = {"role": "user", "content": "read: the red lamp means that the tank is emptywhich?"}
    text = llm.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert result.prompt_token_ids == llm.tokenizer(text, add_special_tokens=False).input_ids


def test_the_same_text_again_changes_nothing(llm: LLM) -> None:
    before = llm.documents.get("faq")
    after = llm.documents.add("faq", "the red lamp means that the tank is empty")
    assert (after.created, after.tokens) == (before.created, before.tokens)
    with pytest.raises(ConfigError, match="overwrite"):
        llm.documents.add("faq", "another text")
    assert llm.documents.add("faq", "another text", overwrite=True).tokens == 12


def test_wrong_questions_and_documents(llm: LLM) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'handbook'"):
        llm.ask("which?", ["hanbook"], params=FEW)
    with pytest.raises(RequestError, match="question is empty"):
        llm.ask(" ", ["faq"], params=FEW)
    with pytest.raises(RequestError, match="at least one stored name"):
        llm.ask("which?", [], params=FEW)
    with pytest.raises(RequestError, match="'faq' must be a list"):
        llm.ask("which?", "faq", params=FEW)
    with pytest.raises(UnknownNameError, match="sam_kv"):
        llm.ask("which?", ["faq"], reuse="sam_k", params=FEW)
    with pytest.raises(ConfigError, match="at least one character"):
        llm.documents.add("empty", "")
    with pytest.raises(RequestError, match="token id 5000"):
        llm.documents.add("odd", {"prompt_token_ids": [5000]})
    with pytest.raises(RequestError, match="text, a list of token ids"):
        llm.documents.add("odd", 7)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError, match="split it"):
        llm.documents.add("long", "x" * 600)
    assert [info.name for info in llm.documents.list()] == ["faq", "handbook"]


def test_a_document_beyond_the_own_limit_names_it(llm: LLM, tmp_path: Path) -> None:
    short = LLM(llm.engine.model, max_length=5, documents=tmp_path)
    with pytest.raises(PromptTooLongError, match=r"at most 4 \(set by max_length\); split it"):
        short.documents.add("long", "x" * 5)


@pytest.mark.parametrize("pinned", ["yes", [], float("nan")])
def test_a_pin_that_is_none_is_refused(llm: LLM, tmp_path: Path, pinned: Any) -> None:
    """[] was written with the text, and the store could not be opened any more."""
    with pytest.raises(ConfigError, match=r"pinned .* must be True, False or None"):
        llm.documents.add("faq", "the red lamp means that the tank is empty", pinned=pinned)
    with pytest.raises(ConfigError, match=r"pinned .* must be True, False or None"):
        llm.documents.add("new", "a new text", pinned=pinned)
    again = LLM(llm.engine.model, page_size=8, documents=tmp_path / "store")
    assert [info.name for info in again.documents.list()] == ["faq", "handbook"]


@pytest.mark.parametrize("question", [[], {"prompt_token_ids": []}])
def test_a_question_without_token_ids_is_empty(llm: LLM, question: Any) -> None:
    """It ended in an IndexError."""
    with pytest.raises(RequestError, match="question is empty"):
        llm.ask(question, ["faq"], params=FEW)


def test_parameters_of_another_type_are_refused(llm: LLM) -> None:
    """They ended in an AttributeError, only in questions over documents."""
    with pytest.raises(ConfigError, match="params must be a SamplingParams, not dict"):
        llm.ask("which?", ["faq"], params={"max_tokens": 3})  # type: ignore[arg-type]


def test_blocks_must_be_those_of_the_record(llm: LLM) -> None:
    with pytest.raises(
        ConfigError, match=r"block_size 32 .* must be 64, with which document 'faq'"
    ):
        llm.ask("which?", ["faq"], reuse=make_reuse("sam_kv", {"block_size": 32}), params=FEW)


def test_a_record_of_an_older_version_is_named_and_encoded_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {name: f"the {name} lamp is off, the other is on " * 5 for name in ("red", "blue")}
    with monkeypatch.context() as patched:
        patched.setattr("keyhole.documents.record._STATISTICS", "2")
        for name, text in texts.items():
            llm.documents.add(name, text, block_size=8)
    reuse = SamKV(block_size=8, score="extremes", share=0.5)
    for name in ("red", "blue"):
        with pytest.raises(RequestError, match=f"'{name}': its record has an older.*repair"):
            llm.ask("which?", [name], reuse=reuse, params=FEW)
    assert [problem.name for problem in llm.documents.verify()] == ["blue", "red"]

    llm.documents.add("red", texts["red"], block_size=8)
    assert [problem.name for problem in llm.documents.verify(repair=True)] == ["blue"]
    assert llm.documents.verify() == []
    found = llm.ask("which?", ["red", "blue"], reuse=reuse, params=FEW)
    assert found.reused is not None
    assert found.reused.shares == (0.5, 0.5)


def test_positions_are_the_limit_and_so_is_memory(model: Model, tmp_path: Path) -> None:
    """Too many tokens for the model's positions never run; too many for memory do if few stay."""
    place = tmp_path / "store"
    llm = LLM(model, page_size=8, documents=place)
    for name in "abc":
        text = {"prompt_token_ids": [3 + ord(name)] * 200}
        llm.documents.add(name, text, block_size=8)
    with pytest.raises(PromptTooLongError, match="takes at most 511"):
        llm.ask("which?", ["a", "b", "c"], reuse="reuse", params=FEW)

    memory = 300 * llm.engine.geometry.token_bytes
    small = LLM(llm.engine.model, page_size=8, documents=place, memory=memory)
    with pytest.raises(CapacityError, match="raise memory="):
        small.ask("which?", ["a", "b"], reuse="reuse", params=FEW)
    few = make_reuse("sam_kv", {"block_size": 8, "select": False})
    kept = small.ask("which?", ["a", "b"], reuse=few, params=FEW)
    assert kept.token_ids == llm.ask("which?", ["a", "b"], reuse=few, params=FEW).token_ids
    small.engine.check_integrity()


@pytest.mark.slow
def test_many_tiny_documents(llm: LLM) -> None:
    for i in range(200):
        llm.documents.add(f"note {i}", chr(65 + i % 26))
    names = [f"note {i}" for i in range(200)]
    wanted = llm.ask("which?", names, reuse="recompute", params=FEW)
    found = llm.ask("which?", names, params=FEW)
    assert found.token_ids == wanted.token_ids  # all of such documents is computed again
    assert found.stats.recompute_ratio == 1.0


def test_learned_positions_are_refused_by_name(tmp_path: Path) -> None:
    learned = make_model("gpt_bigcode", tmp_path, tokenizer=True)
    with pytest.raises(ConfigError, match="'gpt_bigcode'"):
        LLM(learned, device="cpu", documents=tmp_path / "s").documents  # noqa: B018


def test_a_document_that_is_damaged_stops_its_own_question_only(llm: LLM, tmp_path: Path) -> None:
    wanted = llm.ask("which?", ["faq"], params=FEW)
    with ExitStack() as stack:
        method = make_reuse("reuse").resolve(llm.engine.geometry)
        question = {"prompt_token_ids": [70, 71]}
        asked = assemble(llm.engine, llm.documents, ["handbook"], question, method, stack)
        assert asked.context is not None
        bad = llm.engine.add(asked.tokens, FEW, context=asked.context)

        def broken(*_: object) -> None:
            raise KeyholeError("the record of 'handbook' is damaged")

        asked.context.documents[0].read_rows = broken  # type: ignore[method-assign,assignment]
        good = llm.engine.add([70, 71, 72], FEW)
        while not (bad.is_finished and good.is_finished):
            llm.engine.step()
    assert bad.finish_reason == "error"
    assert "damaged" in str(bad.error)
    assert len(good.generated) == 3
    llm.engine.check_integrity()
    assert llm.ask("which?", ["faq"], params=FEW).token_ids == wanted.token_ids


def record_of(llm: LLM, folder: Path, name: str) -> Path:
    (path,) = (folder / "records").glob(f"{llm.documents.get(name).digest}-*")
    return path


def test_a_record_that_is_cut_while_it_is_read_stops_its_own_question_only(
    llm: LLM, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        method = make_reuse("reuse").resolve(llm.engine.geometry)
        question = {"prompt_token_ids": [70, 71]}
        asked = assemble(llm.engine, llm.documents, ["handbook"], question, method, stack)
        os.truncate(record_of(llm, tmp_path / "store", "handbook"), 5000)
        bad = llm.engine.add(asked.tokens, FEW, context=asked.context)
        good = llm.engine.add([70, 71, 72], FEW)
        while not (bad.is_finished and good.is_finished):
            llm.engine.step()
    assert bad.finish_reason == "error"
    assert "document 'handbook'" in str(bad.error)
    assert "the file ends at byte" in str(bad.error)
    assert len(good.generated) == 3
    llm.engine.check_integrity()


@pytest.mark.parametrize("name", ["layers.0.keys", "layers.1.values"])
def test_a_changed_number_is_not_answered_from_if_reads_are_checked(
    llm: LLM, tmp_path: Path, name: str
) -> None:
    store = tmp_path / "store"
    checking = LLM(llm.engine.model, page_size=8, documents=store, documents_check="read")
    wanted = checking.ask("which?", ["faq"], reuse="reuse", params=FEW)
    path = record_of(llm, store, "handbook")
    with closing(LocalReader(path)) as reader:
        flip(path, read_header(reader).spans[name].start)
    with pytest.raises(RecordError, match=f"'handbook': block 0 of {name} of its record has"):
        checking.ask("which?", ["handbook", "faq"], reuse="reuse", params=FEW)
    again = checking.ask("which?", ["faq"], reuse="reuse", params=FEW)
    assert again.token_ids == wanted.token_ids
    assert llm.ask("which?", ["handbook"], reuse="reuse", params=FEW).token_ids  # does not look
