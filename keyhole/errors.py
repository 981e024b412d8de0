"""Every error that Keyhole raises for a user.

    KeyholeError
    ├── ConfigError             a setting or combination that cannot work   (a ValueError)
    │   └── UnknownNameError    a name not in a table; offers the nearest   (a LookupError)
    ├── ModelError              cannot be found, read or supported          (a ValueError)
    ├── RequestError            one request that cannot be served           (a ValueError)
    │   ├── PromptTooLongError  more tokens than the model can take
    │   └── RecordError         a stored document that cannot be read (documents/integrity.py)
    ├── CapacityError           memory is out; says what helps              (a MemoryError)
    │   └── StorageFullError    the disk, or the limit of stored documents
    └── NumericalError          the model gave NaN or infinite logits       (an ArithmeticError)

A message says what is wrong, which value was given and what would be right, in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class KeyholeError(Exception):
    """The base class: `except KeyholeError` catches every error that is meant for a user."""

    #: The setting of a request that is wrong, if the error is about a single setting.
    field: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Some classes build their message from several arguments; a copy gets the finished message.
        return _again, (type(self), self.args), self.__dict__ or None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the second where the first ends in a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or ["no message"]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def why(error: Exception) -> str:
    """The reason of an error; for an OSError without its number and path."""
    return (isinstance(error, OSError) and error.strerror) or first_line(error)


def one_line(error: BaseException) -> str:
    """The error of a library for use in a message: its type and its first line."""
    return f"{type(error).__name__}: {first_line(error)}"


def _again(cls: type[KeyholeError], arguments: tuple[Any, ...]) -> KeyholeError:
    return cls.__new__(cls, *arguments)


class ConfigError(KeyholeError, ValueError):
    """A setting, a policy or a combination of them that cannot work."""


class UnknownNameError(ConfigError, LookupError):
    """A name that is not in a table."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        folded = {one.casefold(): one for one in known}
        near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
        hint = f"; did you mean {folded[near[0]]!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}{hint} (known: {', '.join(known) or 'none'})")


class ModelError(KeyholeError, ValueError):
    """A model that cannot be found, read or supported."""


class RequestError(KeyholeError, ValueError):
    """One request that cannot be served; the others go on. field: see `KeyholeError`."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """A prompt (with what it may generate) that the model or the cache cannot hold."""


class CapacityError(KeyholeError, MemoryError):
    """Memory is out: says how much was needed and which setting helps."""


class StorageFullError(CapacityError):
    """The document store is full; stored documents are kept."""


class NumericalError(KeyholeError, ArithmeticError):
    """The model computed NaN or infinite logits."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory has run out.

    torch raises its own class on a GPU and a plain RuntimeError on a CPU; Python and the C++
    kernels raise a MemoryError.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text
