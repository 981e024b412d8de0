"""Files of requests on an actor pool, one actor of which is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray has an environment of its own: make test-ray")

from keyhole.batch.run import BatchOutcome
from keyhole.errors import ConfigError
from keyhole.integrations.ray import batch
from tests.checkpoints import make_model
from tests.integrations.ray import cluster


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cluster.start()
    path = make_model("llama", tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)
    actors = {"num_replicas": 2, "num_cpus": 0.2}
    return {"model": path, "memory": "8MiB", "max_batch": 8, **actors}


def request(name: str) -> str:
    body = {"prompt": name, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


def entries(folder: Path) -> list[dict[str, Any]]:
    found = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


def actor_pids() -> set[int]:
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = place.read_bytes()
        except OSError:  # it has ended
            continue
        if title.startswith(b"ray::") and b"PartWorker" in title:
            found.add(int(place.parent.name))
    return found


def test_parts_divide_the_input_at_line_ends(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(batch, "PART_LINES", 2)
    lines = [request("a"), "", request("b"), "no json", request("a"), "", request("c"), ""]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    parts, manifest = batch.plan(str(source))
    texts = [source.read_bytes()[part.start : part.stop] for part in parts]
    assert b"".join(texts).strip() == source.read_bytes().strip()
    assert [part.lines for part in parts] == [2, 2, 1]
    assert [part.first for part in parts] == [1, 4, 6]
    said = "line 5: custom_id 'a' was already used in line 1"
    assert [part.repeated for part in parts] == [{}, {5: ("duplicate_custom_id", said)}, {}]
    source.write_text("\n".join(lines[1:]))
    assert batch.plan(str(source))[1] != manifest


def test_ten_thousand_lines_are_answered_once_though_an_actor_is_killed(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    count = int(os.environ.get("KEYHOLE_RAY_LINES", "10000"))
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("\n".join([*(request(f"{i}") for i in range(count)), "no json"]))
    killed: list[int] = []

    def kill() -> None:
        parts = -(-count // batch.PART_LINES)
        while len([*output.glob("part-*")]) < parts // 2:
            time.sleep(0.05)
        killed.append(actor_pids().pop())
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    done = batch.run(str(source), str(output), settings)
    killer.join(60)
    assert killed
    assert done == BatchOutcome(lines=count + 1, answered=count + 1, kept=0, failed=1)
    names = [one["custom_id"] for one in entries(output)]
    assert sorted(name for name in names if name) == sorted(f"{i}" for i in range(count))
    assert names.count(None) == 1
    again = batch.run(str(source), str(output), settings)
    assert again == BatchOutcome(lines=count + 1, answered=0, kept=count + 1, failed=1)


def test_only_missing_parts_are_computed(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "PART_LINES", 3)
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("\n".join(request(f"{i}") for i in range(8)))
    url = f"local://{output}"  # any filesystem of fsspec's
    assert batch.run(f"local://{source}", url, settings).answered == 8
    before = {path: path.stat().st_ino for path in output.glob("part-*")}
    (output / "part-000001.jsonl").unlink()
    done = batch.run(f"local://{source}", url, settings)
    assert (done.answered, done.kept) == (3, 5)
    changed = [path.name for path, inode in before.items() if path.stat().st_ino != inode]
    assert changed in ([], ["part-000001.jsonl"])
    assert sorted(one["custom_id"] for one in entries(output)) == [*"01234567"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda given: given | {"policy": "detla"}, "unknown policy 'detla'"),
        (lambda given: given | {"model": "no/where"}, "unknown model 'no/where'"),
    ],
)
def test_mistakes_are_found_before_an_actor_starts(
    settings: dict[str, Any], tmp_path: Path, change: Callable[[Any], Any], says: str
) -> None:
    with pytest.raises(Exception, match=says):
        batch.run(str(tmp_path / "none"), str(tmp_path / "out"), change(settings))
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(request("a"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"it has 'thesis\.txt'; name another output"):
        batch.run(str(source), str(tmp_path / "full"), settings)
    with pytest.raises(ConfigError, match="cannot be read"):
        batch.run(str(tmp_path / "none"), str(tmp_path / "out"), settings)
    with pytest.raises(ConfigError, match="cannot be read"):
        batch.run("nosuch://x", str(tmp_path / "out"), settings)
    folder = batch.BatchFolder(str(tmp_path / "out"))
    folder.claim("another", "other.jsonl")
    with pytest.raises(ConfigError, match="has answers to requests that are not in"):
        batch.run(str(source), str(tmp_path / "out"), settings)
