"""One tiny Llama with a byte tokenizer for all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole import LLM
from tests.checkpoints import make_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("engine"), tokenizer=True)


@pytest.fixture(scope="session")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, device="cpu", page_size=8, prefix_cache=False)
