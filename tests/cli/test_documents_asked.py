"""`keyhole documents ask` and `show`: answers come out, and damage is named."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from keyhole import LLM, Delta, Result, Reused, SamKV, Stats, registry
from keyhole.cli.common import flags
from keyhole.reuse import available_reuse_methods, make_reuse
from tests.cli.conftest import Run
from tests.cli.documented import (
    FAQ,
    FEW,
    PARAMS,
    Documented,
    documents,
    filled,
    llm,
    records,
    stored,
)

__all__ = ["documents", "filled", "llm", "stored"]

# What comes out.

BLOCKS = ("--reuse", "sam_kv:block_size=16")


@pytest.mark.slow
def test_an_answer_streams_and_its_counters_follow(stored: Documented, llm: LLM) -> None:
    options = (*BLOCKS, "--prefix", "Read: ", "--separator", "\n")
    ran = stored("ask", "Which lamp?", "--documents", "handbook", "faq", *options, *FEW)
    assert ran.status == 0
    result = llm.ask(
        "Which lamp?",
        ["handbook", "faq"],
        reuse=SamKV(block_size=16),
        params=PARAMS,
        prefix="Read: ",
        separator="\n",
    )
    assert ran.out == result.text + "\n"
    reused = result.reused
    assert reused is not None
    assert reused.shares is not None
    first, second, third = ran.err.splitlines()
    assert "first token after" in first
    ratio, again = (f"{100 * x:.1f} %" for x in (reused.sequence_ratio, reused.recompute_ratio))
    left = f"{reused.tokens_not_computed} tokens not computed"
    assert second.startswith(f"2 documents | {ratio} kept | {again} recomputed | {left} | ")
    assert second.endswith(" read from the store")
    one, two = reused.shares
    assert third == f"share of middle blocks kept: handbook {one:.2f}, faq {two:.2f}"


def test_an_answer_as_json_is_one_object_with_python_names(stored: Documented, llm: LLM) -> None:
    options = ("--reuse", "sam_kv:update=fusion,bias=false,block_size=16,stable_layers=1,2")
    policy = ("--policy", "delta:token_budget=64,delta_layers=1")
    question = ("Which lamp?", "--documents", "faq", "handbook", "--json")
    ran = stored("ask", *question, *options, *policy, *FEW)
    assert ran.status == 0, ran.err
    assert ran.err == ""
    found = json.loads(ran.out)
    assert set(found) == {f.name for f in dataclasses.fields(Result)} | {"model", "policy", "reuse"}
    assert set(found["stats"]) == {f.name for f in dataclasses.fields(Stats)}
    assert set(found["reused"]) == {f.name for f in dataclasses.fields(Reused)}
    assert found["reuse"]["update"] == "fusion"
    assert found["reuse"]["bias"] is False
    assert found["reuse"]["stable_layers"] == [1, 2]
    assert found["policy"]["name"] == "delta"
    same = LLM(llm.engine.model, Delta(token_budget=64, delta_layers=(1,)), documents=llm._store[0])
    reuse = SamKV(update="fusion", bias=False, block_size=16, stable_layers=(1, 2))
    wanted = same.ask("Which lamp?", ["faq", "handbook"], reuse=reuse, params=PARAMS)
    assert found["token_ids"] == wanted.token_ids
    assert wanted.reused is not None
    for name in ("kept", "recomputed"):
        there = getattr(wanted.reused, name)
        runs = found["reused"][name]
        assert len(runs) == len(there)
        for row, pairs in zip(there, runs, strict=True):
            listed = [token for start, stop in pairs for token in range(start, stop)]
            assert listed == row.nonzero().flatten().tolist()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", available_reuse_methods())
def test_every_method_answers_as_in_python(method: str, stored: Documented, llm: LLM) -> None:
    settings: dict[str, Any] = {"block_size": 16} if method == "sam_kv" else {}
    text = registry.written(method, ((name, str(value)) for name, value in settings.items()))
    question = ("Which lamp?", "--documents", "a", "handbook", "faq")
    ran = stored("ask", *question, "--reuse", text, *FEW)
    assert ran.status == 0, ran.err
    reuse = make_reuse(method, settings)
    wanted = llm.ask("Which lamp?", ["a", "handbook", "faq"], reuse=reuse, params=PARAMS)
    assert ran.out == wanted.text + "\n"
    assert ("computed like any prompt" in ran.err) == reuse.exact
    assert ("share of middle blocks kept" in ran.err) == (method == "sam_kv")


@pytest.mark.slow
def test_a_question_comes_from_a_pipe_and_in_a_chat(stored: Documented, llm: LLM) -> None:
    asked = ("--documents", "faq", "--chat", *BLOCKS, *FEW)
    wanted = llm.ask("Which?", ["faq"], reuse=SamKV(block_size=16), params=PARAMS, chat=True)
    for given in (("-",), ()):
        assert stored("ask", *given, *asked, stdin="Which?").out == wanted.text + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (" --documents faq", "the question is empty"),
        ("Which?", "no documents; give names from `keyhole documents list`"),
        ("Which? --documents", "argument --documents: expected at least one argument"),
        ("Which? --documents faq handbok", "'handbok'; did you mean 'handbook'?"),
        ("Which? --documents faq --reuse samvk", "reuse method 'samvk'; did you mean 'sam_kv'?"),
        ("Which? --documents faq --reuse epic:update=fusion", "of reuse method epic 'update'"),
        (
            "Which? --documents faq --reuse sam_kv:update=fussion",
            "unknown update 'fussion'; did you mean",
        ),
        (
            "Which? --documents faq --reuse sam_kv:num_local_blocks=x",
            "num_local_blocks 'x' must be a",
        ),
        (
            "Which? --documents faq --reuse sam_kv:block_size=8",
            "block_size 8 of reuse method 'sam_kv' must be",
        ),
        (
            "Which? --documents faq --reuse sam_kv:layers=no.json",
            "cannot read stable layers 'no.json'",
        ),
        ("Which? --documents faq --separater x", "of documents ask '--separater'; did you mean"),
        ("Which? --documents handbook handbook handbook --reuse epic", "the prompt has 538 tokens"),
    ],
)
def test_wrong_questions(line: str, message: str, stored: Documented) -> None:
    ran = stored("ask", *line.split(" "), *FEW)
    assert ran.status == 2
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1


def test_nothing_is_loaded_before_the_question_is_checked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flags, "load_model", lambda _: pytest.fail("a model was loaded"))
    for line in ("ask x", "ask x --documents a --reuse no", "ask x --documents a --policy no"):
        assert run("documents", *line.split()).status == 2
    assert run("documents", "ask", "--documents", "a", stdin=" ").status == 2


@pytest.mark.slow
def test_200_documents_of_one_token(documents: Documented, tmp_path: Path, llm: LLM) -> None:
    for number in range(200):
        (tmp_path / f"{number:03}").write_text(chr(33 + number % 90))
    files = [str(tmp_path / f"{number:03}") for number in range(200)]
    assert documents("add", "n", *files).status == 0
    ran = documents("ask", "Which?", "--documents", "n/", *FEW)
    assert ran.status == 0
    assert "200 documents | 100.0 % kept | 100.0 % recomputed" in ran.err
    assert "share of middle blocks kept: 200 with 0" in ran.err
    every = [f"n/{number:03}" for number in range(200)]
    assert ran.out == llm.ask("Which?", every, reuse="recompute", params=PARAMS).text + "\n"


# What is wrong with it.


def test_a_damaged_record_is_named_and_repaired(stored: Documented, tmp_path: Path) -> None:
    assert stored("verify").out == "3 documents checked, no problems\n"
    for record in records(tmp_path)[:2]:
        data = bytearray(record.read_bytes())
        data[-3] ^= 255
        record.write_bytes(data)
    ran = stored("verify")
    assert ran.status == 1
    damaged = sorted(line.partition(":")[0] for line in ran.out.splitlines()[:2])
    assert set(damaged) < {"a", "faq", "handbook"}
    assert ran.out.endswith("3 documents checked, 2 problems; --repair encodes them again\n")
    found = json.loads(stored("verify", damaged[0], "--repair", "--json").out)["problems"]
    assert [(problem["name"], problem["repaired"]) for problem in found] == [(damaged[0], True)]
    ran = stored("verify", "--repair")
    assert ran.status == 0
    assert ran.out.startswith(f"repaired: {damaged[1]}: ")
    assert stored("verify").status == 0
    assert stored("ask", "Which?", "--documents", *damaged, *BLOCKS, *FEW).status == 0


def test_a_damaged_text_cannot_be_repaired_and_keeps_none_from_it(
    stored: Documented, tmp_path: Path, llm: LLM
) -> None:
    texts = sorted((tmp_path / "store" / "documents").iterdir())
    lost = next(path for path in texts if b"red lamp" in path.read_bytes())
    lost.write_bytes(lost.read_bytes().replace(b"red lamp", b"rod lamp"))
    digest = llm.documents.get("handbook").digest
    record = next(path for path in records(tmp_path) if path.name.startswith(digest))
    record.write_bytes(record.read_bytes()[:-100])
    ran = stored("verify", "--repair")
    assert ran.status == 1
    assert "\nrepaired: handbook: " in f"\n{ran.out}"
    assert "\nfaq: its text has changed" in f"\n{ran.out}"
    assert "must be added again with --overwrite, or removed" in ran.out
    assert stored("verify", "handbook", "a").status == 0
    (tmp_path / "faq.md").write_text(FAQ)
    assert stored("add", "faq", str(tmp_path / "faq.md"), "--overwrite").status == 0
    assert stored("verify").status == 0


@pytest.mark.slow
def test_records_of_another_model_are_reported_and_encoded_again(stored: Documented) -> None:
    other = ("--dtype", "bfloat16")
    ran = stored("ask", "Which?", "--documents", "faq", *other, *FEW)
    assert ran.status == 2
    assert "document 'faq': its record was made by another model: dtype 'float32'" in ran.err
    ran = stored("verify", "faq", "a", *other)
    assert ran.status == 1
    assert ran.out.count("expected dtype 'bfloat16'") == 2
    assert stored("verify", "faq", "a", "--repair", *other).status == 0
    found = json.loads(stored("list", "--json", *other).out)["documents"]
    assert [info["encoded"] for info in found] == [True, True, False]
    assert stored("ask", "Which?", "--documents", "faq", *other, *BLOCKS, *FEW).status == 0
    assert stored("ask", "Which?", "--documents", "faq", *BLOCKS, *FEW).status == 0


# Pictures.


def test_a_document_is_shown_and_drawn(stored: Documented, tmp_path: Path) -> None:
    ran = stored("show", "handbook")
    assert ran.status == 0
    assert "blocks   12 of 16 tokens\n" in ran.out
    assert "encoded  by this model\n" in ran.out
    picture = tmp_path / "handbook.png"
    ran = stored("show", "handbook", "--output", str(picture), "--json")
    assert json.loads(ran.out)["output"] == str(picture)
    assert json.loads(ran.out)["tokens"] == 177
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "did you mean 'handbook'?" in stored("show", "handbok").err


def test_what_a_question_keeps_is_drawn(
    stored: Documented, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--question", "Which lamp?", "--documents", "faq", "a", *BLOCKS)
    ran = stored("show", "handbook", *options)
    assert ran.status == 0, ran.err
    counters, shares, written = ran.out.splitlines()
    assert counters.startswith("3 documents | ")
    assert shares.startswith("share of middle blocks kept: handbook ")  # it stands first
    assert written == "written: keyhole-document.png"
    assert Path("keyhole-document.png").read_bytes().startswith(b"\x89PNG")
    ran = stored("show", "a", *options, "--reuse", "cacheblend", "--json", "--output", "x.png")
    assert json.loads(ran.out)["reused"]["documents"] == ["faq", "a"]
    assert Path("x.png").is_file()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--documents", "faq"), "--documents needs --question"),
        (("--question", " "), "the question is empty"),
        (("--question", "x", "--reuse", "recompute"), "computes everything, so there is nothing"),
        (("--question", "x", "--documents", "fak"), "did you mean 'faq'?"),
    ],
)
def test_what_cannot_be_drawn(
    arguments: tuple[str, ...], message: str, stored: Documented, tmp_path: Path
) -> None:
    picture = tmp_path / "x.png"
    ran = stored("show", "handbook", *arguments, "--output", str(picture))
    assert ran.status == 2
    assert message in ran.err
    assert not picture.exists()


def test_only_pictures_need_matplotlib(
    stored: Documented, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert stored("show", "handbook").status == 0
    ran = stored("show", "handbook", "--question", "x", *BLOCKS)
    assert ran.status == 2
    assert 'pip install "keyhole[plot]"' in ran.err
    ran = stored("show", "handbook", "--output", str(tmp_path / "x.png"))
    assert 'pip install "keyhole[plot]"' in ran.err


def test_a_settings_file_for_another_depth_is_refused(stored: Documented, tmp_path: Path) -> None:
    """`documents ask` took it, while `generate` and `LLM` refused it."""
    path = tmp_path / "found.json"
    registry.SettingsFile(policy="delta", settings={}, num_layers=9).save(path)
    ran = stored("ask", "Which lamp?", "--documents", "faq", "--policy", str(path))
    assert ran.status == 2
    assert "is for a model of 9 layers" in ran.err
