"""One tiny Llama with a byte tokenizer for all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole import LLM
from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("engine"), tokenizer=True)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Model:
    """Engines do not change a model, and share this one."""
    return load(checkpoint, device="cpu")


@pytest.fixture(scope="session")
def llm(model: Model) -> LLM:
    return LLM(model, page_size=8, prefix_cache=False)
