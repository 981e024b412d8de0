"""Training data is read whole or refused with the line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from keyhole.errors import ConfigError
from keyhole.eval.tiny_language.tasks import HeadTexts
from keyhole.retrieval.training.training_config import FileCorpus, read
from tests.checkpoints import VOCAB_SIZE, make_tokenizer


def test_texts_are_read_in_every_form(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("x" * 100)
    lines.write_text("\n".join(map(json.dumps, ["y" * 95, "short", list(range(96))])) + "\n\n")
    assert [len(text) for text in read(plain, tokenizer, VOCAB_SIZE).texts] == [101]
    assert [len(text) for text in read(lines, tokenizer, VOCAB_SIZE).texts] == [96, 96]


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    """Other separators of lines may stand in JSON's strings; valid files were refused."""
    path = tmp_path / "a.jsonl"
    path.write_text(f'"{"y" * 80}\u2028{"z" * 80}"\n', encoding="utf-8")
    (text,) = read(path, make_tokenizer(), VOCAB_SIZE).texts
    assert len(text) > 160


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no text of 96 tokens or more (the longest of 0 has 0)"),
        ('"short"', "has no text of 96 tokens or more (the longest of 1 has 6)"),
        ('"fine"\n{', "line 2 is not JSON"),
        ("[" * 10**5, "line 1 is not JSON"),
        ('{"text": 1}', "line 1 must be a JSON string or list of token ids"),
        ("[1, 2.5]", "line 1 must be a JSON string or list of token ids"),
        ("[1, 272]", "line 1 has token id 272, but those of the model are 0 to 271"),
        ("[-1]", "line 1 has token id -1"),
    ],
)
def test_data_that_cannot_be_used_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read(path, make_tokenizer(), VOCAB_SIZE)
    assert message in str(error.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.txt", make_tokenizer(), VOCAB_SIZE)
    (tmp_path / "data.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "data.txt", make_tokenizer(), VOCAB_SIZE)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("x" * 100)
    with pytest.raises(ConfigError, match="this model has no tokenizer; give token ids"):
        read(tmp_path / "data.txt", None, VOCAB_SIZE)


def test_long_texts_are_cut_anywhere_and_short_ones_are_returned_whole() -> None:
    corpus = FileCorpus((list(range(1000)), list(range(5000, 5080))))
    drawn = [corpus.text(Random(seed), 100) for seed in range(200)]
    long = [text for text in drawn if text[0] < 1000]
    assert all(len(text) == 100 and text[-1] - text[0] == 99 for text in long)
    assert len({text[0] for text in long}) > 50
    short = [text for text in drawn if text[0] >= 5000]
    assert 0 < len(short) < 50
    assert all(text == list(range(5000, 5080)) for text in short)
    assert corpus.text(Random(3), 100) == corpus.text(Random(3), 100)


def test_the_digest_is_that_of_the_token_ids(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for file, numbers in zip(files, (range(99), range(99), range(1, 100)), strict=True):
        file.write_text(json.dumps(list(numbers)))
    one, same, other = (read(file, None, VOCAB_SIZE) for file in files)
    assert one.digest == same.digest != other.digest
    assert one.name == f"--data {str(files[0])!r}"
    assert FileCorpus(([1, 2], [3])).digest != FileCorpus(([1], [2, 3])).digest


@pytest.mark.parametrize("length", [256, 2048, 4096])
def test_the_bundled_models_texts_fill_their_length(length: int) -> None:
    texts = [HeadTexts().text(Random(seed), length) for seed in range(6)]
    assert all(0.8 * length < len(text) <= length for text in texts)
    assert len({tuple(text) for text in texts}) == 6
    assert HeadTexts().text(Random(0), length) == texts[0]
