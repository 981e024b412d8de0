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
_CHILD = """
import errno, os, sys
from pathlib import Path
from keyhole.documents.store import DocumentStore
from keyhole.errors import StorageFullError
from tests.cache.records import MODEL, make_record, same

folder, case = Path(sys.argv[1]), sys.argv[2]
store = DocumentStore(folder, MODEL)
for number in range(3):
    store.add(str(number), f"text {number}", make_record(number))
store.open("1").close()
free, filler = 1, folder / "filler"
with open(filler, "wb", buffering=0) as file:
    for size in (1 << 16, 1 << 12, 1):
        try:
            while True:
                file.write(bytes(size))
        except OSError as error:
            assert error.errno == errno.ENOSPC
assert os.statvfs(folder).f_bavail == 0
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


def _can_mount(folder: Path) -> bool:
    try:
        command = [*_NAMESPACE, "sh", "-c", _MOUNT, str(folder), "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("case", ["went on", pytest.param("started anew", marks=pytest.mark.slow)])
def test_what_is_stored_is_used_and_removed(tmp_path: Path, case: str) -> None:
    if not _can_mount(tmp_path):
        pytest.skip("a file system cannot be mounted here")
    folder = str(tmp_path)
    root = Path(keyhole.documents.__file__).parents[2]
    run = subprocess.run(
        [*_NAMESPACE, "sh", "-c", _MOUNT, folder, sys.executable, "-c", _CHILD, folder, case],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "all of it\n"
