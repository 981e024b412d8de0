"""The file of lines: found again, added to, and mended where a run was killed while it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keyhole.errors import ConfigError
from keyhole.eval.line_file import LineFile

FIRST = {"task": "a", "settings": {"layers": [0, 1]}, "samples": 4}


def written(path: Path) -> list[dict[str, object]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_lines_are_found_by_their_values_and_enough_samples(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "new folder" / "lines.jsonl")
    assert file.lines == []
    file.add(FIRST)
    file.add(FIRST | {"samples": 8, "score": 0.5})
    file.add(FIRST | {"samples": 2})
    for found in (file, LineFile(file.path)):
        assert found.find({"task": "a", "settings": {"layers": [0, 1]}}, 3)["score"] == 0.5
        assert found.find({"task": "a"}, 1)["samples"] == 2
        assert found.find({"task": "a"}, 9) is None
        assert found.find({"task": "a", "settings": {"layers": [0]}}, 1) is None
        assert found.find({"task": "a", "new": None}, 1) is None


def test_lines_can_go_to_a_device() -> None:
    """`--output /dev/null`, for no file, cost the results: a device cannot be synced to disk."""
    file = LineFile("/dev/null")
    file.add(FIRST)
    assert file.lines == [FIRST]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_device_without_an_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--output /dev/full`, to try a full disk, read zeros until the memory was full."""

    def read(path: Path) -> bytes:
        raise AssertionError(f"{path} would be read without an end")

    monkeypatch.setattr(Path, "read_bytes", read)
    file = LineFile("/dev/full")
    with pytest.raises(ConfigError, match="'/dev/full' cannot be written: No space left on device"):
        file.add(FIRST)


@pytest.mark.parametrize("kept", [1, 20, -3, -1])
def test_a_line_that_was_cut_off_is_taken_out(tmp_path: Path, kept: int) -> None:
    """A run that was killed while it wrote left half a line, and the next one glued its own to it.

    Cut off within a letter, too: half of a letter is no UTF-8.
    """
    path = tmp_path / "lines.jsonl"
    half = json.dumps({"task": "b", "machine": "é"}, ensure_ascii=False).encode()[:kept]
    path.write_bytes(json.dumps(FIRST).encode() + b"\n" + half)
    file = LineFile(path)
    assert file.lines == [FIRST]
    assert path.read_bytes().endswith(half)  # reading changes nothing
    file.add({"task": "c"})
    file.add({"task": "d"})
    assert written(path) == [FIRST, {"task": "c"}, {"task": "d"}]


def test_two_runs_that_find_the_same_cut_off_line_both_keep_theirs(tmp_path: Path) -> None:
    """The second took out the first one's line where that was as long as the cut-off one."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"task": "t", ')  # 14 bytes
    one, other = LineFile(path), LineFile(path)
    one.add({"task": "a"})  # 14 with the newline
    other.add({"task": "b"})
    assert written(path) == [{"task": "a"}, {"task": "b"}]


def test_a_whole_line_without_an_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(FIRST))
    file = LineFile(path)
    assert file.lines == [FIRST]
    file.add({"task": "c"})
    assert written(path) == [FIRST, {"task": "c"}]


@pytest.mark.parametrize("there", ["", '{"task": ', '{"task": "0"}', '{"task": "0"}\n'])
def test_what_others_added_meanwhile_stays(tmp_path: Path, there: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(there)
    one, other = LineFile(path), LineFile(path)
    one.add({"task": "a"})
    other.add({"task": "b"})
    one.add({"task": "c"})
    found = [line["task"] for line in written(path)]
    assert found == ["0", "a", "b", "c"][found[0] != "0" :]


@pytest.mark.parametrize("wrong", ["[1]", "no", '{"task": ', '{"a":' * 10**5])
def test_any_other_damage_is_said_with_its_line(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(f"{json.dumps(FIRST)}\n\n{wrong}\n{json.dumps(FIRST)}\n")
    with pytest.raises(ConfigError, match="line 3 is not a JSON object"):
        LineFile(path)


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("samples", ['"4"', "null", "[4]"])
def test_samples_that_are_no_number_are_said_with_their_line(
    tmp_path: Path, samples: str, end: str
) -> None:
    """`find` raised a TypeError."""
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{json.dumps(FIRST)}\n{{"task": "a", "samples": {samples}}}{end}')
    with pytest.raises(ConfigError, match=r"lines.jsonl', line 2 has samples .*, not a whole"):
        LineFile(path)


def test_what_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        LineFile(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        LineFile(tmp_path / "file" / "lines.jsonl").add({})
