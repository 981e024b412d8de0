"""Several processes on one store, and processes that are killed in the middle of a word."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from keyhole.documents.storage import LocalStorage
from keyhole.documents.store import DocumentStore
from keyhole.errors import CapacityError, UnknownNameError
from tests.documents.records import MODEL, make_record, same, user_cache

__all__ = ["user_cache"]

ROOT = Path(__file__).parents[2]


class Process:
    """Another Python process that executes commands, one line at a time (see `serve`)."""

    def __init__(self) -> None:
        self.running = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, *words: object) -> None:
        assert self.running.stdin is not None
        print(*words, sep="\t", file=self.running.stdin, flush=True)

    def answer(self) -> str:
        assert self.running.stdout is not None
        return self.running.stdout.readline().rstrip("\n")

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.answer()

    def end(self) -> None:
        self.running.kill()
        self.running.communicate()


@pytest.fixture(scope="module")
def other() -> Iterator[Process]:
    """It takes seconds to start; most tests need no second one."""
    process = Process()
    yield process
    process.end()


@pytest.fixture
def others(other: Process) -> Iterator[list[Process]]:
    second = Process()
    yield [other, second]
    second.end()


def text_of(seed: int) -> str:
    return f"seed {seed}"


def is_right(store: DocumentStore, name: str) -> bool:
    """Whether the document is some record as a whole, whichever was written last."""
    with store.open(name) as stored:
        seeds = [*range(4), *range(50, 54)]
        return sum(same(stored, make_record(seed)) for seed in seeds) == 1


# What the other process can do.


def serve() -> None:
    torch.set_num_threads(1)  # it forks
    kept: list[object] = []
    for line in sys.stdin:
        command, place, *words = line.rstrip("\n").split("\t")
        match command:
            case "add and read":
                print(add_and_read(DocumentStore(place, MODEL), words[0], int(words[1])))
            case "hold":
                kept.append(DocumentStore(place, MODEL).open(words[0]))
                print("held")
            case "begin":
                child = os.fork()
                if child == 0:
                    begin_a_part(place)
            case "end":
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                print("ended")
            case "die":
                be_killed(place, Path(words[0]), int(words[1]))
                print("survived")
        sys.stdout.flush()


def add_and_read(store: DocumentStore, me: str, first: int) -> str:
    for seed in range(first, first + 4):
        store.add(f"{me} {seed}", text_of(seed), make_record(seed))
        store.add(f"both {seed % 50}", text_of(seed % 50), make_record(seed % 50))
        store.add("fought over", text_of(seed), make_record(seed), overwrite=True)
        store.add("gone", text_of(seed), make_record(seed), overwrite=True)
        with suppress(UnknownNameError):  # the other one was faster
            store.remove("gone")
        if problems := store.verify():
            return str(problems)
        for name in [f"both {seed % 50}", "fought over"]:
            if not is_right(store, name):
                return f"{name} is wrong"
    return "well"


def begin_a_part(place: str) -> None:
    """Never ends what it begins, and waits to be killed."""
    _staged = DocumentStore(place, MODEL)._catalogue.place.stage("records/x", [b"x"])
    print("begun", flush=True)
    signal.pause()


def be_killed(place: str, log: Path, rounds: int) -> None:
    """Children that add and overwrite, each killed at some moment.

    They log "name seed" before and "name seed done" after each call.
    """
    for number in range(rounds):
        before = log.stat().st_size if log.exists() else 0
        child = os.fork()
        if child == 0:
            add_until_killed(place, log, number)
        # Some while they start, most at any moment after they began to add.
        while number % 5 and (not log.exists() or log.stat().st_size == before):
            time.sleep(0.001)
        time.sleep(random.Random(number).uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def add_until_killed(place: str, log: Path, number: int) -> None:
    store = DocumentStore(place, MODEL)
    with open(log, "ab", buffering=0) as written:
        for step in range(1000):
            seed = (number * 37 + step) % 150
            new = f"{number} {step}"
            for name in (new, "overwritten") if step % 2 else (new,):
                written.write(f"{name}\t{seed}\tbegun\n".encode())
                store.add(name, text_of(seed), make_record(seed), overwrite=name != new)
                written.write(f"{name}\t{seed}\tdone\n".encode())


# Tests.


@pytest.mark.slow
def test_two_processes_add_and_read_at_once(others: list[Process], tmp_path: Path) -> None:
    for process, me, first in zip(others, "ab", (0, 50), strict=True):
        process.tell("add and read", tmp_path, me, first)
    assert [process.answer() for process in others] == ["well", "well"]
    store = DocumentStore(tmp_path, MODEL)
    names = [*(f"a {s}" for s in range(4)), *(f"b {s}" for s in range(50, 54))]
    names += [*(f"both {s}" for s in range(4)), "fought over"]
    assert [info.name for info in store.list()] == sorted(names)
    assert store.verify() == []
    assert all(is_right(store, name) for name in names)
    assert list((tmp_path / "parts").iterdir()) == []
    # Each seed was encoded once, however many names it has.
    assert len(list((tmp_path / "records").iterdir())) == 8


@pytest.mark.slow
def test_a_record_in_use_by_another_process_stays(other: Process, tmp_path: Path) -> None:
    store = DocumentStore(tmp_path, MODEL)
    size = store.add("held", text_of(0), make_record(0)).size_bytes
    store.add("free", text_of(1), make_record(1))
    assert other.ask("hold", tmp_path, "held") == "held"
    small = DocumentStore(tmp_path, MODEL, limit_bytes=2 * size + size // 2)
    small.add("new", text_of(2), make_record(2))
    assert [info.name for info in small.list() if info.encoded] == ["held", "new"]
    with small.open("new"), pytest.raises(CapacityError):
        small.add("newer", text_of(3), make_record(3))
    small.remove("held")
    assert len(list((tmp_path / "records").iterdir())) == 2
    with pytest.raises(UnknownNameError):
        small.open("held")


def test_a_part_stays_as_long_as_its_writer_lives(other: Process, tmp_path: Path) -> None:
    assert other.ask("begin", tmp_path) == "begun"
    DocumentStore(tmp_path, MODEL)
    assert len(list((tmp_path / "parts").iterdir())) == 1
    assert other.ask("end", tmp_path) == "ended"
    DocumentStore(tmp_path, MODEL)
    assert len(list((tmp_path / "parts").iterdir())) == 0


def test_a_file_that_goes_while_it_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes it between its name and its size: FileNotFoundError."""
    place, scan = LocalStorage(tmp_path), os.scandir
    for name in ("a", "b"):
        (tmp_path / "records" / name).write_bytes(b"x")

    @contextmanager
    def one_goes(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scan(folder) as entries:
            found = list(entries)
        (folder / "a").unlink()
        yield found

    with monkeypatch.context() as patched:  # before pytest removes the folder by the same function
        patched.setattr(os, "scandir", one_goes)
        assert list(place.files("records")) == ["b"]


def test_being_killed_loses_nothing(other: Process, tmp_path: Path) -> None:
    place, log = tmp_path / "place", tmp_path / "log"
    assert other.ask("die", place, log, 15) == "survived"
    # What was done last, and all that was begun since: it may be there without having said so.
    possible: dict[str, set[int]] = {}
    done = set()
    for line in log.read_text().splitlines():
        name, seed, state = line.split("\t")
        if state == "done":
            possible[name] = set()
            done.add(name)
        possible.setdefault(name, set()).add(int(seed))
    assert done
    store = DocumentStore(place, MODEL)
    assert store.verify() == []
    stored = {info.name: info for info in store.list()}
    assert done <= set(stored) <= set(possible)
    for name in stored:
        [seed] = [seed for seed in possible[name] if store.source(name) == text_of(seed)]
        with store.open(name) as found:
            assert same(found, make_record(seed))
    assert list((place / "parts").iterdir()) == []
    # Nothing is left that belongs to nothing.
    digests = {info.digest for info in stored.values()}
    assert {file.name.partition("-")[0] for file in (place / "records").iterdir()} == digests
    assert len(list((place / "documents").iterdir())) == len(stored)


if __name__ == "__main__":
    serve()
