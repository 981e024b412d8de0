"""A disk without a free byte: what is stored is listed, read, verified and removed.

The disk is a small file system in memory, mounted in a namespace that a child process has alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import keyhole.documents

_NAMESPACE = ["unshare", "--mount", "--map-root-user"]
_MOUNT = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'
_STORE = """
import errno, os, sys
from pathlib import Path
from keyhole.documents.store import DocumentStore
from keyhole.errors import StorageFullError
from tests.documents.records import MODEL, make_record, same

folder, case = Path(sys.argv[1]), sys.argv[2]
store = DocumentStore(folder, MODEL)
for number in range(3):
    store.add(str(number), f"text {number}", make_record(number))
store.open("1").close()
"""
_FILL = """
filler = folder / "filler"
with open(filler, "wb", buffering=0) as file:
    for size in (1 << 16, 1 << 12, 1):
        try:
            while True:
                file.write(bytes(size))
        except OSError as error:
            assert error.errno == errno.ENOSPC
assert os.statvfs(folder).f_bavail == 0
"""
_USE = """
if case == "started anew":
    inode = (folder / "index.sqlite").stat().st_ino
    store = DocumentStore(folder, MODEL)
    assert (folder / "index.sqlite").stat().st_ino == inode, "a sound index was deleted"
names = [info.name for info in store.list()]
assert names == ["0", "1", "2"], names
assert store.info("1").hits == 1
with store.open("2") as document:
    assert same(document, make_record(2))
assert store.verify() == []
assert store.source("0") == "text 0"
try:
    store.add("3", "text 3", make_record(3))
except StorageFullError as error:
    assert "free disk space" in str(error)
else:
    raise AssertionError("there was room")
assert [info.name for info in store.list()] == ["0", "1", "2"]
store.remove("0")
assert [info.name for info in store.list()] == ["1", "2"]
assert [info.name for info in DocumentStore(folder, MODEL).list()] == ["1", "2"]
filler.unlink()
store.open("1").close()
assert store.info("1").hits == 2
print("all of it")
"""
#: The same by `LLM` and the command line.
_ASK = """
import errno, os, sys
from pathlib import Path
import keyhole
from keyhole import LLM, SamplingParams
from keyhole.cli import main

folder = Path(sys.argv[1])

def answer():
    llm = LLM(keyhole.tiny(), device="cpu", documents=folder)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    return llm.ask("question : Alma keeps ? answer :", ["a", "b"], reuse="sam_kv", params=params)

documents = LLM(keyhole.tiny(), device="cpu", documents=folder).documents
for name, thing in (("a", "the key"), ("b", "a lamp")):
    documents.add(name, f"Alma keeps {thing} . " * 20)
wanted = answer().text
"""
_ASK_FULL = """
def run(*arguments):
    return main(["documents", *arguments, "--store", str(folder)])

assert answer().text == wanted
assert run("list") == run("verify") == 0
question = ["question : Alma keeps ? answer :", "--documents", "a", "b", "--max-tokens", "4"]
assert run("ask", *question) == 0
assert run("remove", "a") == run("list") == 0
left = LLM(keyhole.tiny(), device="cpu", documents=folder).documents.list()
assert [info.name for info in left] == ["b"]
print("all of it")
"""


def _can_mount(folder: Path) -> bool:
    try:
        command = [*_NAMESPACE, "sh", "-c", _MOUNT, str(folder), "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(folder: Path, program: str, *more: str) -> str:
    """What a program prints that has the folder as its disk."""
    if not _can_mount(folder):
        pytest.skip("a file system cannot be mounted here")
    root = Path(keyhole.documents.__file__).parents[2]
    mounted = [*_NAMESPACE, "sh", "-c", _MOUNT, str(folder)]
    run = subprocess.run(
        [*mounted, sys.executable, "-c", program, str(folder), *more],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", ["went on", "started anew"])
def test_what_is_stored_is_used_and_removed(tmp_path: Path, case: str) -> None:
    assert _run(tmp_path, _STORE + _FILL + _USE, case) == "all of it\n"


@pytest.mark.slow
def test_questions_are_answered_and_commands_work(tmp_path: Path) -> None:
    assert _run(tmp_path, _ASK + _FILL + _ASK_FULL).endswith("all of it\n")
