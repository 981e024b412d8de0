"""The bundled model and its one name. Imports nothing that takes time, so that help stays fast."""

from __future__ import annotations

from pathlib import Path

from keyhole.errors import ConfigError

#: The name of the bundled model; a folder of this name is "./tiny".
TINY = "tiny"
TINY_FOLDER = Path(__file__).parents[1] / "tiny" / "keyhole-tiny"


def named(model: object) -> str:
    """A folder or hub id as text, the bundled model's folder for its name.

    ConfigError for what is no name of a model: None, empty text, an object.
    """
    if not isinstance(model, str | Path) or not str(model).strip():
        what = repr(model) if model is None or isinstance(model, str) else type(model).__name__
        raise ConfigError(
            f"model {what} names no model: give a folder, a hub id such as "
            f"'meta-llama/Llama-3.2-1B', or {TINY!r} for the bundled demonstration model"
        )
    return str(TINY_FOLDER if str(model) == TINY else model)


def is_tiny(model: str | Path) -> bool:
    """Whether this is the bundled model, by its name or its folder."""
    return Path(named(model)).resolve() == TINY_FOLDER.resolve()
