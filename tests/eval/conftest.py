"""Models with random weights, loaded once for all tests of a file."""

from __future__ import annotations

import pytest

from keyhole.models.loading import load
from keyhole.models.model import Model
from tests.checkpoints import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make_model("llama", tmp_path_factory.mktemp("model")), device="cpu")
