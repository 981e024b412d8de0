"""Chunks of prompts on disk: found by digest and fingerprint, checked, and limited in bytes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keyhole.engine.prompts.prefix_store import PrefixStore
from keyhole.errors import ConfigError

ONE, OTHER = b"\x01" * 16, b"\x02" * 16
MODEL = {"weights": "abc", "page_size": "4"}


def chunk(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "token_ids": torch.arange(8),
        "common.head_keys": torch.randn(2, 3, generator=random),
        "layers.0": torch.randn(2, 1, 12, generator=random).bfloat16(),
        "layers.1": torch.randint(-9, 9, (2, 1, 7), generator=random).to(torch.int8),
    }


def same(found: dict[str, Tensor] | None, wanted: dict[str, Tensor]) -> bool:
    assert found is not None
    assert found.keys() == wanted.keys()
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "prefixes").iterdir())


def test_another_process_finds_what_was_written(tmp_path: Path) -> None:
    PrefixStore(tmp_path, MODEL).write(ONE, chunk())
    later = PrefixStore(tmp_path, MODEL)
    assert later.has(ONE)
    assert same(later.read(ONE), chunk())
    assert later.read(OTHER) is None
    assert PrefixStore(tmp_path, MODEL | {"weights": "abd"}).read(ONE) is None


@pytest.mark.parametrize("place", [0.0, 0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_changed_byte_anywhere_is_not_read(
    tmp_path: Path, place: float, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore(tmp_path, MODEL)
    store.write(ONE, chunk())
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 0x10
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "keyhole"):
        assert store.read(ONE) is None
    assert "cannot be used" in caplog.text
    assert not files(tmp_path)  # it would be found again
    store.write(ONE, chunk())
    assert same(store.read(ONE), chunk())


def test_a_short_file_or_one_under_another_name_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore(tmp_path, MODEL)
    store.write(ONE, chunk())
    (file,) = files(tmp_path)
    other = file.with_name(file.name.replace(ONE.hex(), OTHER.hex()))
    other.write_bytes(file.read_bytes())
    os.truncate(file, file.stat().st_size - 1)
    with caplog.at_level(logging.WARNING, "keyhole"):
        assert store.read(ONE) is None
        assert store.read(OTHER) is None
    assert "other tokens or another model" in caplog.text


def test_a_folder_that_may_no_longer_be_used_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the requests of a whole step, again and again."""
    store = PrefixStore(tmp_path, MODEL)
    store.write(ONE, chunk())
    (file,) = files(tmp_path)
    os.truncate(file, file.stat().st_size - 1)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", denied)
    assert store.read(ONE) is None
    monkeypatch.setattr(Path, "exists", denied)
    assert not store.has(ONE)


def test_the_chunks_not_used_for_longest_are_removed(tmp_path: Path) -> None:
    digests = [bytes([i]) * 16 for i in range(4)]
    PrefixStore(tmp_path, MODEL).write(digests[0], chunk())
    (file,) = files(tmp_path)
    size = file.stat().st_size
    store = PrefixStore(tmp_path, MODEL, limit_bytes=3 * size)
    for i, digest in enumerate(digests[1:3], 1):
        store.write(digest, chunk(i))
    for i, digest in enumerate(digests[:3]):
        os.utime(next(f for f in files(tmp_path) if digest.hex() in f.name), (0, 100 + i))
    store.touch(digests[:1])
    store.write(digests[3], chunk(3))
    assert [store.has(digest) for digest in digests] == [True, False, True, True]
    small = PrefixStore(tmp_path, MODEL, limit_bytes=size // 2)
    assert not files(tmp_path)
    small.write(ONE, chunk())  # larger than the limit
    assert not files(tmp_path)


def test_of_a_prefix_the_end_is_removed_before_the_start(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, MODEL)
    for digest in (ONE, OTHER):
        store.write(digest, chunk())
    store.touch([ONE, OTHER])
    PrefixStore(tmp_path, MODEL, limit_bytes=files(tmp_path)[0].stat().st_size)
    assert [store.has(ONE), store.has(OTHER)] == [True, False]


def test_a_prompt_that_does_not_fit_keeps_its_beginning(tmp_path: Path) -> None:
    """Its first chunks are written first, and were the oldest; the others were of no use."""
    digests = [bytes([i]) * 16 for i in range(6)]
    PrefixStore(tmp_path, MODEL).write(digests[0], chunk())
    size = files(tmp_path)[0].stat().st_size
    store = PrefixStore(tmp_path, MODEL, limit_bytes=4 * size)
    for i, digest in enumerate(digests):
        store.write(digest, chunk(i), before=digests[:i])
    assert [store.has(digest) for digest in digests] == [True] * 4 + [False] * 2


def test_what_cannot_be_written_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PrefixStore(tmp_path, MODEL)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING, "keyhole"):
        store.write(ONE, chunk())
    assert "No space left on device" in caplog.text
    assert not files(tmp_path)
    assert not list((tmp_path / "parts").iterdir())


_PROCESS = """
import sys, torch
from keyhole.engine.prompts.prefix_store import PrefixStore

folder, limit, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = PrefixStore(folder, {"weights": "abc"}, limit)
order = torch.randperm(60, generator=torch.Generator().manual_seed(seed)) % 12
for i in order.tolist():
    digest, wanted = bytes([i]) * 16, torch.full((1000,), i)
    found = store.read(digest)
    assert found is None or torch.equal(found["token_ids"], wanted)
    store.write(digest, {"token_ids": wanted})
"""


@pytest.mark.slow
def test_processes_that_write_read_and_remove_at_once(tmp_path: Path) -> None:
    """A limit of five chunks makes each remove what others read."""
    command = [sys.executable, "-c", _PROCESS, str(tmp_path), "50000"]
    running = [
        subprocess.Popen([*command, str(seed)], stderr=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    for process in running:
        _, said = process.communicate()
        assert process.returncode == 0, said
        assert "cannot be used" not in said
    assert 0 < sum(file.stat().st_size for file in files(tmp_path)) <= 50_000
    assert not list((tmp_path / "parts").iterdir())


def test_a_place_that_is_no_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="file' cannot be stored"):
        PrefixStore(file, MODEL)
    with pytest.raises(ConfigError, match="limit_bytes 0"):
        PrefixStore(tmp_path, MODEL, limit_bytes=0)
