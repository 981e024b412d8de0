"""Where a command writes: checked before its work begins, and no file of others is written over."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keyhole.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """What a file holds.

    name: as errors say it. starts: the first bytes of such a file by the ending of its name; the
    ending "" stands for every name.
    """

    name: str
    starts: Mapping[str, bytes]


PICTURE = Kind("a picture", {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"})
LINES = Kind("lines of `keyhole eval` or `keyhole bench`", {"": b'{"benchmark": "'})
LAYERS = Kind("layers of `keyhole calibrate`", {"": b'{\n  "model": "'})
POLICY = Kind("a settings file of `keyhole eval`", {".json": b'{\n  "policy": "'})
TRACE = Kind("a Chrome trace", {"": b'{\n  "schemaVersion"'})
PAGE = Kind(
    "a page of `keyhole eval`",
    {
        "": b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        b'<meta name="generator" content="keyhole">'
    },
)


class Output(NamedTuple):
    """A file that a command will write; flag: what named it. Nothing is checked without a path."""

    flag: str
    path: str | Path | None
    kind: Kind


def check(*outputs: Output) -> None:
    """ConfigError unless every file can be written, is of its kind if it is there, and no other."""
    flags: dict[Path, str] = {}
    for flag, path, kind in outputs:
        if path is None:
            continue
        _check(flag, path, kind)
        other = flags.setdefault(Path(path).resolve(), flag)
        if other != flag:
            raise ConfigError(f"{other} and {flag} name one file, {str(path)!r}")


def check_folder(flag: str, path: str | Path) -> None:
    """ConfigError unless this is a folder that can be written to, or one can be made there."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    _require_folder(flag, path, place)


def _check(flag: str, path: str | Path, kind: Kind) -> None:
    place, shown = Path(path), f"{flag} {str(path)!r}"
    endings = [ending for ending in kind.starts if ending]
    if str(path) == "":
        raise ConfigError(f"{flag} is empty; name a file")
    if place.is_dir():
        raise ConfigError(f"{shown} is a folder; name a file")
    if endings and place.suffix.lower() not in endings:
        raise ConfigError(f"{shown}: {kind.name} must end in {', '.join(endings)}")
    if not place.exists():
        return _require_folder(flag, path, place.parent)
    start = kind.starts.get(place.suffix.lower()) or kind.starts[""]
    try:
        with place.open("r+b") as file:
            found = file.read(len(start)) if place.is_file() else b""
    except OSError as error:
        raise ConfigError(f"{shown} cannot be written: {error.strerror}") from error
    if not start.startswith(found):
        raise ConfigError(f"{shown} is there and not {kind.name}; it stays as it is")
    return None


def _require_folder(flag: str, path: str | Path, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{flag} {str(path)!r}: there is no folder {str(folder)!r}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {str(path)!r}: nothing can be written to {str(folder)!r}: {error.strerror}"
        ) from error
