"""Output of commands: colours, tables, JSON, streamed answers, and checked files.

Output files are checked before a command's work begins. A file that Keyhole did not write is never
overwritten.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from keyhole.config import bytes_text
from keyhole.errors import ConfigError, why

if TYPE_CHECKING:
    from keyhole.engine.sequence import Piece, Result, Stats
    from keyhole.engine.sequence import Sequence as Request
    from keyhole.llm import LLM
    from keyhole.policies.base import Policy
    from keyhole.reuse.base import Reuse


#: Colours of result words that fill a cell or begin a line.
MARKS = {
    "met": "green",
    "exact": "green",
    "right": "green",
    "MISSED": "bold red",
    "DIFFERS": "bold red",
    "wrong": "red",
}
HEADING = "bold"
ERROR = "bold red"


def open_streams() -> None:
    """Makes stdin, stdout and stderr usable: a closed one is replaced by an empty one, and what an
    output cannot encode is escaped.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # as after `<&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def drop_unwritable() -> None:
    """Drops what stdout can no longer take: Python would try once more when it exits, print
    "Exception ignored" and change the exit status to 120.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdin_lines() -> Iterator[str]:
    """The lines of stdin, without a byte order mark before the first one."""
    try:
        for number, line in enumerate(sys.stdin):
            yield line.removeprefix("\ufeff") if number == 0 else line
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not text in {error.encoding}: {error}") from error


def styled(text: str, style: str, stream: TextIO) -> str:
    """The text, styled if the stream is a terminal."""
    if not style or not stream.isatty():
        return text
    from rich.console import Console  # here, so that commands without colours do not load it
    from rich.text import Text

    console = Console(file=stream, soft_wrap=True, highlight=False)
    if console.color_system is None or console.no_color:
        return text
    with console.capture() as captured:
        console.print(Text(text, style), end="")
    return captured.get()


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    stream: TextIO | None = None,
) -> str:
    """A table whose columns are as wide as their content; the first `left` are left-aligned, the
    others right-aligned.

    stream: where it will be printed, for colours; None: stdout.
    """
    out = sys.stdout if stream is None else stream
    widths = [max(len(line[i]) for line in [heads, *rows]) for i in range(len(heads))]

    def padded(cells: Sequence[str]) -> list[str]:
        return [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]

    lines = [styled("  ".join(padded(heads)).rstrip(), HEADING, out)]
    for cells in [["-" * width for width in widths], *rows]:
        marked = [
            text.replace(cell, styled(cell, MARKS.get(cell, ""), out))
            for cell, text in zip(cells, padded(cells), strict=True)
        ]
        lines.append("  ".join(marked).rstrip())
    return "\n".join(lines)


def error(text: str) -> None:
    """Prints the line of an error on stderr."""
    print(f"{styled('error:', ERROR, sys.stderr)} {text}", file=sys.stderr)


def status(text: str) -> None:
    """Prints a status line to stderr if it is a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def to_json(value: Any) -> str:
    """One JSON object; dataclasses become objects with their Python names."""
    return json.dumps(value, indent=2, default=dataclasses.asdict)


def describe(method: Policy | Reuse) -> dict[str, Any]:
    """Name and settings of a policy or reuse method, for JSON."""
    return {"name": method.name, **dataclasses.asdict(method)}


def sentence(method: Policy | Reuse) -> str:
    """Name and settings of a policy or reuse method, for people; without those that are off."""
    settings = dataclasses.asdict(method).items()
    return _named(method, {name: value for name, value in settings if value not in (None, ())})


def every_setting(method: Policy | Reuse) -> str:
    """Like `sentence`, including the settings that are off."""
    return _named(method, dataclasses.asdict(method))


def _named(method: Policy | Reuse, settings: Mapping[str, Any]) -> str:
    shown = [f"{name} {setting(value) or 'none'}" for name, value in settings.items()]
    return f"{method.name} ({', '.join(shown)})" if shown else method.name


def closing_line(stats: Stats) -> str:
    """The counters of a request in one line."""
    parts = [count(stats.generated_tokens, "token")]
    if stats.step_ms:
        parts.append(f"{1e3 * (stats.accepted_length or 1) / stats.step_ms:.1f} tokens/s")
    if stats.accepted_length is not None:
        parts.append(f"{stats.accepted_length:.2f} tokens per step")
    if stats.attended_fraction is not None:
        parts.append(f"{100 * stats.attended_fraction:.1f} % of keys read")
        parts.append(f"{bytes_text(bytes_per_step(stats))} read per token")
    if stats.evicted_pages:
        parts.append(f"{count(stats.evicted_pages, 'page')} evicted")
    if stats.ttft_ms is not None:
        parts.append(f"first token after {stats.ttft_ms:.0f} ms")
    return " | ".join(parts)


def bytes_per_step(stats: Stats) -> float:
    """Bytes read per decode step; the first token comes from the prefill."""
    return (stats.kv_bytes_read + stats.other_bytes_read) / max(1, stats.generated_tokens - 1)


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 token, 2,048 tokens."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def setting(value: object) -> str:
    """The value of a setting as it is typed: 0,1 for (0, 1)."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


#: The exit status of a program that Ctrl-C ended, by convention.
INTERRUPTED = 130


#: A second signal within this time repeats the first: a program that runs this one, such as uv or
#: npm, passes on a Ctrl-C that the terminal has sent to both.
_REPEAT_SECONDS = 0.5


class Interrupt:
    """Records the first of these signals in `seen`; a later one raises KeyboardInterrupt."""

    seen = False
    _first = 0.0

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals or (signal.SIGINT,)

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._see) for number in self._signals}
        return self

    def _see(self, number: int, frame: FrameType | None) -> None:
        if not self.seen:
            self.seen, self._first = True, time.monotonic()
        elif time.monotonic() - self._first > _REPEAT_SECONDS:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def answer(llm: LLM, sequence: Request, *, silent: bool = False) -> Result:
    """The result of a submitted request, printed as it is generated unless `silent`.

    Its token ids are printed where the model has no tokenizer, at the end.
    After Ctrl-C its finish_reason is "abort". Raises the error that ended the request, if any.
    """
    result = None
    for piece in _pieces(llm, sequence):
        if not silent:
            print(piece.text, end="", flush=True)
        result = piece.result
    assert result is not None
    if not silent:
        print("" if llm.tokenizer is not None else ",".join(map(str, result.token_ids)))
    return result


def abort(llm: LLM, sequences: Iterable[Request]) -> None:
    """Ends requests; their tokens so far are kept."""
    for sequence in sequences:
        llm.engine.abort(sequence)


def _pieces(llm: LLM, sequence: Request) -> Iterator[Piece]:
    """The pieces of a request, the last one with the result; a progress bar shows the prompt."""
    from tqdm.auto import tqdm

    from keyhole.engine.sequence import piece_of

    given, total = 0, sequence.num_prompt
    bar = tqdm(total=total, desc="prompt", unit="token", leave=False, delay=1, disable=None)
    with Interrupt() as interrupt, bar:
        try:
            while True:
                if interrupt.seen:
                    llm.engine.abort(sequence)
                elif not sequence.is_finished and sequence.num_generated == given:
                    llm.engine.step()  # a step may serve only other requests
                piece = piece_of(sequence, given)
                if piece is None:
                    bar.update(min(sequence.num_computed, total) - bar.n)
                    continue
                bar.close()
                given += len(piece.token_ids)
                yield piece
                if piece.result is not None:
                    return
        finally:
            llm.engine.abort(sequence)


@dataclass(frozen=True)
class OutputKind:
    """A kind of output file.

    name: for error messages. starts: the first bytes of such a file, by file ending; the ending ""
    matches every name.
    """

    name: str
    starts: Mapping[str, bytes]


PICTURE = OutputKind("a picture", {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"})
LINES = OutputKind("lines of `keyhole eval` or `keyhole bench`", {"": b'{"benchmark": "'})
LAYERS = OutputKind("layers of `keyhole calibrate`", {"": b'{\n  "model": "'})
POLICY = OutputKind("a settings file of `keyhole eval`", {".json": b'{\n  "policy": "'})
PAGE = OutputKind(
    "a page of `keyhole eval`",
    {
        "": b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        b'<meta name="generator" content="keyhole">'
    },
)


class Output(NamedTuple):
    """A file that a command will write; flag: the flag that named it. Without a path nothing is
    checked.
    """

    flag: str
    path: str | Path | None
    kind: OutputKind


def check_outputs(*outputs: Output) -> None:
    """ConfigError unless every file can be written; an existing file must be of the same kind, and
    no two flags may name one file.
    """
    flags: dict[Path, str] = {}
    for flag, path, kind in outputs:
        if path is None:
            continue
        _check_output(flag, path, kind)
        other = flags.setdefault(Path(path).resolve(), flag)
        if other != flag:
            raise ConfigError(f"{other} and {flag} name the same file, {str(path)!r}")


def check_output_folder(flag: str, path: str | Path) -> None:
    """ConfigError unless this folder is writable or can be created."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    _require_folder(flag, path, place)


def _check_output(flag: str, path: str | Path, kind: OutputKind) -> None:
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
        raise ConfigError(f"{shown} cannot be written: {why(error)}") from error
    if not start.startswith(found):
        raise ConfigError(f"{shown} exists and is not {kind.name}; it was not changed")
    return None


def _require_folder(flag: str, path: str | Path, folder: Path) -> None:
    if not folder.is_dir():
        shown = f"{flag} {str(path)!r}"
        if folder.exists():
            raise ConfigError(f"{shown}: {str(folder)!r} is a file; it must be a folder")
        raise ConfigError(f"{shown}: there is no folder {str(folder)!r}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {str(path)!r}: the folder {str(folder)!r} is not writable: {error.strerror}"
        ) from error
