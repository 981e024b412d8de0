"""Files as text. All except text and Markdown need the extra `keyhole[convert]`."""

from __future__ import annotations

import io
import zipfile
from importlib.util import find_spec
from pathlib import PurePath

from keyhole.config import bytes_text
from keyhole.server.errors import ApiError

_TEXT = {".txt", ".md", ".markdown"}
#: File extension -> markitdown's class.
_CONVERTED = {
    ".html": "HtmlConverter",
    ".htm": "HtmlConverter",
    ".pdf": "PdfConverter",
    ".docx": "DocxConverter",
}
#: A DOCX is an archive; one with a larger expansion is refused before it is unpacked.
MOST_GROWTH = 50


def text_of(filename: str, data: bytes) -> str:
    """The text of a file, by its extension; ApiError 415 for an unknown one."""
    ending = PurePath(filename).suffix.lower()
    if ending in _TEXT:
        return decoded(data)
    if ending not in _CONVERTED:
        known = ", ".join(sorted(_TEXT | _CONVERTED.keys()))
        raise ApiError(
            415, f"the file {filename!r} has none of the supported formats: {known}", param="file"
        )
    if find_spec("markitdown") is None:
        raise ApiError(
            415,
            f"a {ending} file needs more packages on the server: pip install 'keyhole[convert]'; "
            "text and Markdown need none",
            param="file",
        )
    if ending == ".docx":
        _check_archive(filename, data)
    return _converted(filename, ending, data)


def decoded(data: bytes) -> str:
    """The text decoded from UTF-8, without a byte-order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the document is not UTF-8 text: {error}") from error


def _check_archive(filename: str, data: bytes) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except zipfile.BadZipFile as error:
        raise ApiError(400, f"{filename!r} is not a DOCX file: {error}", param="file") from error
    most = MOST_GROWTH * len(data)
    if size > most:
        raise ApiError(
            413,
            f"{filename!r} unpacks to {bytes_text(size)}; at most {bytes_text(most)} are allowed",
            param="file",
        )


def _converted(filename: str, ending: str, data: bytes) -> str:
    import markitdown
    from markitdown import converters

    # Only this converter, so that a file with the wrong extension is not read as something else.
    converter = markitdown.MarkItDown(enable_builtins=False, enable_plugins=False)
    converter.register_converter(getattr(converters, _CONVERTED[ending])())
    kind = markitdown.StreamInfo(extension=ending)
    try:
        text = converter.convert_stream(io.BytesIO(data), stream_info=kind).text_content
    except Exception as error:  # parsers raise many types for a broken file
        lines = str(error).strip().splitlines()
        reason = lines[-1] if lines else type(error).__name__
        raise ApiError(400, f"{filename!r} cannot be read: {reason}", param="file") from error
    if not text.strip():
        raise ApiError(400, f"{filename!r} has no text; it may be a scan", param="file")
    return str(text)
