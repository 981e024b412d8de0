"""The output file of a batch after any kind of interruption."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.batch.files import BatchLine, BatchOutput, as_line
from keyhole.errors import ConfigError, StorageFullError


def entry(number: int, status: int = 200, text: str = "é ☃") -> dict[str, Any]:
    response = {"status_code": status, "request_id": "r", "body": {"text": text}}
    name = BatchLine(number, b"{}").id
    return {"id": name, "custom_id": str(number), "response": response, "error": None}


def write(path: Path, numbers: range) -> None:
    with BatchOutput(path) as file:
        for number in numbers:
            file.add(entry(number))


@given(cut=st.integers(0, 1000), zeros=st.integers(0, 5))
def test_wherever_a_run_was_cut_off_the_next_one_completes_the_file(
    tmp_path_factory: pytest.TempPathFactory, cut: int, zeros: int
) -> None:
    path = tmp_path_factory.mktemp("output") / "out.jsonl"
    whole = b"".join(as_line(entry(number)) for number in range(4))
    kept = whole[: cut % (len(whole) + 1)]
    # Zeros: blocks that a file system had reserved when the machine stopped.
    path.write_bytes(kept + b"\0" * zeros if not kept.endswith(b"}") else kept)
    with BatchOutput(path) as file:
        assert len(file.statuses) in {kept.count(b"\n"), kept.count(b"\n") + kept.endswith(b"}")}
        for number in range(4):
            if entry(number)["id"] not in file.statuses:
                file.add(entry(number))
    assert path.read_bytes() == whole


def test_errors_are_distinguished_from_answers(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    bad = entry(2) | {"response": None, "error": {"code": "invalid_json", "message": "line 2"}}
    with BatchOutput(path) as file:
        for one in (entry(1), bad, entry(3, status=400)):
            file.add(one)
        assert [*file.statuses.values()] == [True, False, False]
    with BatchOutput(path) as file:
        assert [*file.statuses.values()] == [True, False, False]


def test_a_custom_id_with_half_a_character_stays_as_it_is() -> None:
    """JSON can write one. It became a question mark, so that no line had the answer's id."""
    given = {**entry(1), "custom_id": "\ud800"}
    assert json.loads(as_line(given)) == given


@pytest.mark.parametrize(
    "content", [b"my thesis\n", b"my thesis", b'{"id": 7}\n', b"\0x", b"[]\n", b"[" * 10**5]
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="line 1 is not an answer of a batch"):
        BatchOutput(path)
    assert path.read_bytes() == content


def test_a_damaged_line_in_the_midst_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, range(3))
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1][:9] + b"\n" + lines[2]
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match="line 2 is not an answer of a batch; remove it"):
        BatchOutput(path)
    assert path.read_bytes() == damaged


def test_a_second_run_is_refused_while_the_first_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path), pytest.raises(ConfigError, match="being written by another run"):
        BatchOutput(path)
    with BatchOutput(path):
        pass


def test_a_full_disk_leaves_whole_lines_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    write(path, range(2))
    before, real = path.read_bytes(), os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        room = len(before) + 10 - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:room], offset)

    with BatchOutput(path) as file:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StorageFullError, match="No space left on device; 2 answers were kept"):
            file.add(entry(2))
        monkeypatch.undo()
        assert path.read_bytes() == before
        file.add(entry(2))
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == [
        "0",
        "1",
        "2",
    ]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/out\.jsonl' cannot be written: No such file"):
        BatchOutput(tmp_path / "none" / "out.jsonl")


def test_a_device_is_refused() -> None:
    """/dev/full was read, and is zeros without an end: memory ran out. /dev/null has no length."""
    with pytest.raises(ConfigError, match="'/dev/null' must be a regular file"):
        BatchOutput("/dev/null")
