"""Defaults of documents: their folder, and the size of their blocks."""

from __future__ import annotations

import os
from pathlib import Path

#: Tokens of a block, SamKV's unit (section 4.1).
BLOCK_SIZE = 64


def default_place() -> str:
    """Where documents are stored: in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(home) / "keyhole" / "documents")
