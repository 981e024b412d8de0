"""Windows of several files, and of what every Python brings along."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole.errors import ConfigError
from keyhole.eval.forced_text import LIBRARY, Texts, library
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return load(make_model("llama", folder, tokenizer=True), "cpu")


def written(folder: Path, **texts: str) -> list[Path]:
    paths = []
    for name, text in texts.items():
        paths.append(folder / f"{name}.txt")
        paths[-1].write_text(text)
    return paths


def test_every_file_comes_before_the_second_window_of_any(model: Model, tmp_path: Path) -> None:
    paths = written(tmp_path, a="a" * 64, b="b" * 40, short="c" * 10)
    texts = Texts(paths, model)
    assert texts.windows(20) == 5
    firsts = [model.tokenizer.decode(texts.window(20, n)[1:]) for n in range(5)]
    assert [text[0] for text in firsts] == ["a", "b", "a", "b", "a"]
    assert all(len(texts.window(20, n)) == 20 for n in range(5))
    assert texts.path == "a.txt, b.txt, short.txt"
    assert Texts(paths[:2], model).digest != texts.digest


def test_texts_that_are_all_too_short_are_refused(model: Model, tmp_path: Path) -> None:
    paths = written(tmp_path, a="a" * 30, b="b" * 40)
    with pytest.raises(ConfigError, match=r"length 64 is more than the 41 tokens of the longest"):
        Texts(paths, model).windows(64)


@pytest.mark.slow
def test_every_python_has_long_texts(model: Model) -> None:
    texts = library(model)
    assert texts.windows(4096) >= len(LIBRARY) / 2
    assert texts.path == "Python's standard library"
    assert len({tuple(texts.window(4096, n)) for n in range(8)}) == 8
