"""Encodes and stores files, each alone: one file as NAME, several as NAME/FILENAME.

Files are UTF-8 text; all are read before the first is encoded. A text that is already stored under
its name is not encoded again, so an interrupted command can be repeated. To ask over all of several
files, use `--documents NAME/`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from keyhole.cli.common import terminal
from keyhole.cli.documents.manage import about, add_encoding, open_llm, sentence
from keyhole.documents.source import BLOCK_SIZE, check_block_size, check_name
from keyhole.errors import ConfigError

#: Byte order marks of other encodings, the longer ones first.
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def read_documents(name: str, files: Sequence[str]) -> dict[str, str]:
    """Name -> text of each document: one file gets `name` itself, several get `name`/FILENAME.

    "-" is stdin. ConfigError for a file that cannot be read, is not UTF-8 text or is empty, and for
    two files that would get the same name. All files are read before the first is encoded.
    """
    if len(files) == 1:
        return {name: _text(files[0])}
    if "-" in files:
        raise ConfigError('stdin ("-") is one document; add it alone')
    texts: dict[str, str] = {}
    for file in files:
        document = f"{name.rstrip('/')}/{Path(file).name}"
        if document in texts:
            raise ConfigError(
                f"two files would both become document {document!r}; add {file!r} under another "
                "name"
            )
        texts[document] = _text(file)
    return texts


def _text(file: str) -> str:
    what = "stdin" if file == "-" else f"file {file!r}"
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        hint = "; give its files" if isinstance(error, IsADirectoryError) else ""
        raise ConfigError(f"{what} cannot be read: {error.strerror}{hint}") from error
    text = _decoded(data, what, "FILE" if file == "-" else file)
    if not text.strip():
        raise ConfigError(f"{what} is empty; a document needs at least one word")
    return text


def _decoded(data: bytes, what: str, file: str) -> str:
    """Text of UTF-8 bytes, without a byte order mark."""
    for mark, encoding in _MARKS.items():
        if data.startswith(mark) and _is(data, encoding):
            raise ConfigError(f"{what} is {encoding}, not UTF-8; {_convert(encoding, file)}")
    zero = data.find(0)
    if zero >= 0:
        raise ConfigError(
            f"{what} is not text: it has a zero byte at position {zero}; extract its text first, "
            f"or, if it is UTF-16, {_convert('UTF-16', file)}"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{what} is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}, "
            f"line {line}; if it is text, {_convert('WINDOWS-1252', file)}"
        ) from error


def _is(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _convert(encoding: str, file: str) -> str:
    return f"convert it: iconv -f {encoding} -t UTF-8 {file!r} > NEW"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole documents add`."""
    parser.add_argument("name", metavar="NAME", help="name of the document")
    parser.add_argument("files", nargs="+", metavar="FILE", help='UTF-8 text; "-" is stdin')
    parser.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="never evict the document, or allow eviction again; default: unchanged, and a new one "
        "may be evicted",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the document of this name if its text differs",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=BLOCK_SIZE,
        metavar="N",
        help="tokens per block, the unit that methods select",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_encoding(parser, adapter="encode for questions with this LoRA adapter")


def run(arguments: argparse.Namespace) -> int:
    """Prints one line per stored document."""
    size = arguments.block_size
    check_block_size(size)
    texts = read_documents(arguments.name, arguments.files)
    for name in texts:
        check_name(name)
    documents = open_llm(arguments).documents_with(arguments.adapter)
    # With --json the lines go to stderr, where they show the progress of a long run.
    stream = sys.stderr if arguments.json else sys.stdout
    stored = []
    for number, (name, text) in enumerate(texts.items(), start=1):
        known = documents.store.stored(name, text, overwrite=arguments.overwrite)
        again = known is not None and known.block_size == size
        info = documents.add(
            name,
            text,
            overwrite=arguments.overwrite,
            pinned=arguments.pin,
            block_size=size,
        )
        stored.append(about(info))
        place = f"[{number} of {len(texts)}] " if len(texts) > 1 else ""
        print(f"{place}{'known' if again else 'stored'}: {sentence(info)}", file=stream, flush=True)
    if arguments.json:
        print(terminal.to_json({"documents": stored}))
    return 0
