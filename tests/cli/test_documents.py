"""`keyhole documents`: files are stored, questions answered, and errors are one line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from keyhole import LLM
from keyhole.cli.common import flags
from keyhole.documents.store import DocumentInfo, DocumentStore
from keyhole.engine.documents.library import Documents
from tests.cli.conftest import Run
from tests.cli.documented import (
    FAQ,
    FEW,
    HANDBOOK,
    Documented,
    documents,
    filled,
    llm,
    names,
    records,
    stored,
)
from tests.documents.records import MODEL, make_record

__all__ = ["documents", "filled", "llm", "stored"]

# What goes in.


@pytest.mark.slow
def test_a_file_is_a_document(documents: Documented, tmp_path: Path, llm: LLM) -> None:
    file = tmp_path / "faq.md"
    file.write_bytes(b"\xef\xbb\xbf" + FAQ.encode())  # with a byte order mark
    ran = documents("add", "faq", str(file), "--block-size", "16")
    assert ran.status == 0
    assert ran.out.startswith(f"stored: faq: {len(FAQ)} tokens, 5 blocks of 16, ")
    assert llm.documents.store.source("faq") == FAQ
    assert documents("add", "faq", str(file), "--block-size", "16").out.startswith("known: faq")
    assert documents("add", "faq", str(file)).out.startswith("stored: faq: 66 tokens, 2 blocks")


def test_several_files_are_documents_with_the_name_as_prefix(
    documents: Documented, tmp_path: Path
) -> None:
    for name in ("b.md", "a.md"):
        (tmp_path / name).write_text(FAQ + name)
    files = [str(tmp_path / name) for name in ("b.md", "a.md")]
    ran = documents("add", "all", *files)
    assert [line.split(":")[1].strip() for line in ran.out.splitlines()] == ["all/b.md", "all/a.md"]
    assert ran.out.startswith("[1 of 2] stored: ")
    assert names(documents) == ["all/a.md", "all/b.md"]
    again = documents("add", "all", *files, "--json")
    assert [info["name"] for info in json.loads(again.out)["documents"]] == ["all/b.md", "all/a.md"]
    assert "[2 of 2] known: all/a.md" in again.err


def test_a_document_comes_from_a_pipe(documents: Documented, llm: LLM) -> None:
    assert documents("add", "faq", "-", stdin=FAQ).status == 0
    assert llm.documents.store.source("faq") == FAQ


BAD: dict[str, tuple[bytes, str]] = {
    "utf-16": (FAQ.encode("utf-16"), "is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8"),
    "utf-32": (FAQ.encode("utf-32"), "is UTF-32, not UTF-8"),
    "utf-16 without a mark": (FAQ.encode("utf-16-le"), "a zero byte at position 1; extract"),
    "latin-1": ("eins\nzwei für drei".encode("latin-1"), "byte 0xfc at position 11, line 2; if"),
    "garbage": (bytes(range(255, 0, -1)), "byte 0xff at position 0, line 1"),
    "a picture": (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        "is not text: it has a zero byte at position 8",
    ),
    "nothing": (b"", "is empty; a document needs at least one word"),
    "blanks": (b"\xef\xbb\xbf \n\t", "is empty"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_text_is_refused_and_nothing_is_stored(
    kind: str, documents: Documented, tmp_path: Path
) -> None:
    """The file beside it is good, and comes first."""
    content, message = BAD[kind]
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text(FAQ)
    bad.write_bytes(content)
    for files in ([str(bad)], [str(good), str(bad)]):
        ran = documents("add", "x", *files)
        assert ran.status == 2
        assert ran.err.startswith(f"error: file {str(bad)!r} ")
        assert message in ran.err
        assert ran.err.count("\n") == 1
    ran = documents("add", "x", "-", stdin=content)
    assert ran.err.startswith("error: stdin ")
    assert message in ran.err
    assert names(documents) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "missing.md"), "file 'missing.md' cannot be read: No such file or directory"),
        (("x", "."), "file '.' cannot be read: Is a directory; give its files"),
        (("x",), "the following arguments are required: FILE; see `keyhole documents add --help`"),
        (("x", "-", "faq.md"), 'stdin ("-") is one document; add it alone'),
        (("x", "one/faq.md", "two/faq.md"), "two files would both become document 'x/faq.md'"),
        (("x\ny", "one/faq.md"), "document name 'x\\ny' must be printable text in one line"),
        (("x", "one/faq.md", "--block-size", "0"), "block_size 0 must be at least 1"),
        (("x", "one/faq.md", "--limit", "much"), "--limit 'much' is not a size"),
    ],
)
def test_wrong_files_and_names(
    arguments: tuple[str, ...],
    message: str,
    documents: Documented,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two"):
        Path(folder).mkdir()
        Path(folder, "faq.md").write_text(FAQ)
    ran = documents("add", *arguments)
    assert ran.status == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_another_text_needs_overwrite(stored: Documented, tmp_path: Path, llm: LLM) -> None:
    (tmp_path / "faq.md").write_text("Another text.")
    ran = stored("add", "faq", str(tmp_path / "faq.md"))
    assert ran.status == 2
    assert "document 'faq' is stored with another text" in ran.err
    assert llm.documents.store.source("faq") == FAQ
    assert stored("add", "faq", str(tmp_path / "faq.md"), "--overwrite").status == 0
    assert llm.documents.store.source("faq") == "Another text."


def test_a_document_that_is_too_long_does_not_take_others_with_it(
    documents: Documented, tmp_path: Path
) -> None:
    for name, text in (("a", FAQ), ("b", "x" * 600), ("c", FAQ)):
        (tmp_path / name).write_text(text)
    ran = documents("add", "all", *(str(tmp_path / name) for name in "abc"))
    assert ran.status == 2
    assert "document 'all/b' has 600 tokens, but this model takes at most 511" in ran.err
    assert names(documents) == ["all/a"]


@pytest.mark.slow
def test_an_interruption_keeps_what_was_stored(
    documents: Documented, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_text(FAQ + name)
    files = [str(tmp_path / name) for name in "abc"]
    encode, seen = Documents._encode, []

    def interrupted(self: Documents, name: str, *given: Any) -> Any:
        seen.append(name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return encode(self, name, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Documents, "_encode", interrupted)
        assert documents("add", "all", *files).status == 130
    assert names(documents) == ["all/a", "all/b"]
    ran = documents("add", "all", *files)
    assert [line.split()[3] for line in ran.out.splitlines()] == ["known:", "known:", "stored:"]


@pytest.mark.slow
def test_a_limit_evicts_documents_except_pinned_ones(documents: Documented, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(HANDBOOK + name)
    assert documents("add", "a", str(tmp_path / "a"), "--pin").status == 0
    assert documents("add", "b", str(tmp_path / "b")).status == 0
    size = records(tmp_path)[0].stat().st_size
    ran = documents("add", "c", str(tmp_path / "c"), "--limit", str(int(2.5 * size)))
    assert ran.status == 0, ran.err
    found = json.loads(documents("list", "--json").out)["documents"]
    assert [(info["pinned"], info["encoded"]) for info in found] == [
        (True, True),
        (False, False),
        (False, True),
    ]
    ran = documents("ask", "which?", "--documents", "b", *FEW)
    assert ran.status == 2
    assert "document 'b': it has no record, because it was evicted or removed" in ran.err
    # What the error says: it named `verify --repair`, which did nothing.
    assert "`keyhole documents verify b --repair`" in ran.err
    assert documents("verify").out == "3 documents checked, no problems\n"
    ran = documents("verify", "b")
    assert (ran.status, ran.out.splitlines()[-1]) == (
        1,
        "1 document checked, 1 problem; --repair encodes them again",
    )
    assert documents("verify", "b", "--repair").status == 0
    assert documents("ask", "which?", "--documents", "b", *FEW).status == 0


# What is there.


def test_the_list_has_a_row_per_document(stored: Documented) -> None:
    ran = stored("list")
    head, _, *rows, total = ran.out.splitlines()
    assert head.split() == [
        *("name", "tokens", "blocks", "size", "added", "used"),
        *("hits", "models", "pinned", "encoded"),
    ]
    assert [row.split()[:3] for row in rows] == [
        ["a", "1", "1"],
        ["faq", "66", "5"],
        ["handbook", "177", "12"],
    ]
    assert rows[0].split()[-5:] == ["never", "0", "1", "no", "yes"]
    assert total.startswith("3 documents, 244 tokens, ")


def test_the_list_as_json_has_python_names(stored: Documented, tmp_path: Path) -> None:
    found = json.loads(stored("list", "--json").out)
    assert found["place"] == str(tmp_path / "store")
    fields = {field.name for field in dataclasses.fields(DocumentInfo)}
    assert all(set(info) == fields | {"blocks"} for info in found["documents"])


def test_listing_and_removing_load_no_model(
    stored: Documented, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(flags, "load_model", loaded)
    place = ("--store", str(tmp_path / "store"))
    ran = run("documents", "list", *place)
    assert "encoded" not in ran.out
    assert "handbook     177      12" in ran.out
    found = json.loads(run("documents", "list", *place, "--json").out)["documents"]
    assert {info["encoded"] for info in found} == {None}
    assert run("documents", "remove", "faq", *place).out == "removed: faq\n"
    assert "faq" not in run("documents", "list", *place).out


def test_a_file_is_no_store(run: Run, tmp_path: Path) -> None:
    """It was listed as a store without documents."""
    file = tmp_path / "plain.txt"
    file.write_text("text")
    ran = run("documents", "list", "--store", str(file))
    assert (ran.status, ran.out) == (2, "")
    assert f"--store {str(file)!r} is a file; it must be a folder or a URL" in ran.err


def test_an_empty_store_prints_how_to_begin(run: Run, tmp_path: Path) -> None:
    ran = run("documents", "list", "--store", str(tmp_path / "new"))
    assert ran.status == 0
    assert ran.out.startswith("no documents at ")
    assert "keyhole documents add NAME FILE" in ran.out
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("action", ["show a", "remove a", "verify", "ask q --documents a"])
def test_only_adding_creates_a_store(action: str, run: Run, tmp_path: Path) -> None:
    """A folder that was mistyped stood empty afterwards."""
    place = str(tmp_path / "new")
    ran = run("documents", *action.split(), "--store", place)
    assert ran.status == 2
    assert (
        ran.err
        == f"error: --store {place!r} is not a folder; `keyhole documents add` creates one\n"
    )
    assert not [*tmp_path.iterdir()]


def test_a_file_url_is_a_folder_too(run: Run, tmp_path: Path) -> None:
    """A URL that was mistyped left an empty store."""
    ran = run("documents", "remove", "a", "--store", f"file://{tmp_path}/new")
    assert (ran.status, ran.err.split(";")[0]) == (
        2,
        f"error: --store 'file://{tmp_path}/new' is not a folder",
    )
    assert not [*tmp_path.iterdir()]


def test_a_tilde_in_a_store_is_the_home_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves it in `--store=~/library`: adding expanded it, all other actions did not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    DocumentStore(tmp_path / "library", MODEL).add("a", "text", make_record())
    assert run("documents", "list", "--store=~/library").out.splitlines()[2].startswith("a ")
    assert run("documents", "remove", "a", "--store=~/library").out == "removed: a\n"


def test_removing_is_all_or_nothing(stored: Documented) -> None:
    ran = stored("remove", "a", "hand")
    assert ran.status == 2
    assert "unknown document 'hand'; did you mean 'handbook'?" in ran.err
    assert names(stored) == ["a", "faq", "handbook"]
    assert json.loads(stored("remove", "a", "faq", "a", "--json").out) == {"removed": ["a", "faq"]}
    assert names(stored) == ["handbook"]


def test_a_name_with_a_slash_is_a_prefix(documents: Documented, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(FAQ + name)
        (tmp_path / f"deep-{name}").write_text(f"deep {name}")
        documents("add", f"all/{name}", str(tmp_path / name))
    documents("add", "all/deep", *(str(tmp_path / f"deep-{name}") for name in "ba"))
    documents("add", "other", str(tmp_path / "a"))
    ran = documents("ask", "which?", "--documents", "other", "all/", "--json", *FEW)
    below = ["all/a", "all/b", "all/deep/deep-a", "all/deep/deep-b"]
    assert json.loads(ran.out)["reused"]["documents"] == ["other", *below]
    for given in ("all", "al/", "all/deep"):
        ran = documents("ask", "which?", "--documents", given, *FEW)
        assert ran.status == 2
        right = f"{given.rstrip('/')}/".replace("al/", "all/")
        assert f"did you mean '{right}'?" in ran.err
    assert documents("remove", "all/deep/").status == 0
    assert names(documents) == ["all/a", "all/b", "other"]


@pytest.mark.slow
def test_looking_at_documents_loads_no_torch(stored: Documented, tmp_path: Path) -> None:
    """`list` and `remove` took 5 s to import what they did not use."""
    place = str(tmp_path / "store")
    code = (
        "import sys\n"
        "from keyhole.cli import main\n"
        f"assert main(['documents', 'list', '--store', {place!r}]) == 0\n"
        f"assert main(['documents', 'remove', 'faq', '--store', {place!r}]) == 0\n"
        "assert not {'torch._C', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "removed: faq"
    assert names(stored) == ["a", "handbook"]


@pytest.mark.filterwarnings("default")  # peft has its own
def test_records_of_an_adapter_are_repaired(stored: Documented, path: str, tmp_path: Path) -> None:
    """The error of `ask` named `verify --repair`, which encoded them for the base model."""
    peft = pytest.importorskip("peft", reason="pip install 'keyhole[lora]'")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    network = AutoModelForCausalLM.from_pretrained(path)
    peft.get_peft_model(network, config).save_pretrained(tmp_path / "tone")
    adapter = ("--adapters", f"tone={tmp_path / 'tone'}", "--adapter", "tone")
    ask = ("ask", "Which lamp?", "--documents", "faq", "--reuse", "sam_kv:block_size=16", *FEW)
    ran = stored(*ask, *adapter)
    assert ran.status == 2
    assert "`keyhole documents verify faq --repair`" in ran.err
    ran = stored("verify", "faq", "--repair", *adapter)
    assert ran.out.startswith("repaired: faq: its record was made by another model: no adapter; ")
    assert stored("verify", "faq", *adapter).out == "1 document checked, no problems\n"
    assert stored(*ask, *adapter).status == stored(*ask).status == 0


def test_documents_of_eight_bits(documents: Documented, tmp_path: Path) -> None:
    """`ask` took --kv-dtype, but no command could encode a document for it."""
    (tmp_path / "a").write_text(FAQ)
    eight = ("--kv-dtype", "int8")
    ask = ("ask", "Which lamp?", "--documents", "a", *FEW, *eight)
    assert documents("add", "a", str(tmp_path / "a")).status == 0
    assert "expected kv_dtype 'int8'" in documents(*ask).err
    assert documents("verify", "a", "--repair", *eight).status == 0
    assert documents(*ask).status == 0
    assert documents("add", "b", str(tmp_path / "a"), *eight).status == 0
    assert documents("verify", *eight).out == "2 documents checked, no problems\n"
