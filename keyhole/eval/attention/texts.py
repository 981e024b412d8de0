"""The texts that the suite forces: files, or what lies at hand where none are given.

A model of a natural language reads Python's own standard library, which every installation has:
code and its documentation in English. The bundled model knows no English and reads derivations in
its own words.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from keyhole.errors import ConfigError
from keyhole.eval.workloads.perplexity import WindowedText, Windows
from keyhole.models.loading import Model

#: Modules of the standard library, long and well documented; a window of each before the second
#: window of any.
LIBRARY = tuple(
    "_pydecimal turtle typing inspect argparse tarfile pickletools doctest pydoc pathlib datetime "
    "_pydatetime subprocess zipfile difflib optparse statistics pickle threading ast".split()
)


class Texts:
    """Windows of several files: the first of every file, then the second of each, and so on.

    Files with fewer tokens than a window are left out. ConfigError if that leaves none.
    """

    def __init__(self, paths: Sequence[str | Path], model: Model, name: str | None = None) -> None:
        """name: what stands for the paths where results are stored."""
        self._texts = [WindowedText(path, model) for path in paths]
        self.path: str | None = name or ", ".join(Path(path).name for path in paths)
        joined = " ".join(text.digest for text in self._texts)
        self.digest: str = hashlib.sha256(joined.encode()).hexdigest()[:16]

    def windows(self, length: int) -> int:
        """How many there are of a length."""
        return len(self._order(length))

    def window(self, length: int, number: int) -> list[int]:
        """The token ids of a window."""
        text, own = self._order(length)[number]
        return text.window(length, own)

    def _order(self, length: int) -> list[tuple[WindowedText, int]]:
        counts = {text: self._count(text, length) for text in self._texts}
        found = [
            (text, number)
            for number in range(max(counts.values()))
            for text, count in counts.items()
            if number < count
        ]
        if not found:
            longest = max(text.num_tokens for text in self._texts)
            raise ConfigError(
                f"length {length} is more than the {longest} tokens of the longest text; give a "
                "longer --text or lower --lengths"
            )
        return found

    def _count(self, text: WindowedText, length: int) -> int:
        return text.windows(length) if text.num_tokens >= length else 0


def library(model: Model) -> Windows:
    """The standard library; ConfigError where this Python has no sources."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{name}.py" for name in LIBRARY]
    there = [path for path in paths if path.is_file()]
    if not there:
        raise ConfigError("this Python has no sources of its standard library; give --text FILE")
    return Texts(there, model, name="Python's standard library")
