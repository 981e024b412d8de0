"""Which models share stored documents: those with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keyhole.engine.documents.fingerprint import fingerprint
from keyhole.models.loading import load
from tests.checkpoints import make_model


@pytest.mark.slow
def test_weights_that_are_buffers_count(tmp_path: Path) -> None:
    """The layers of GPTQ and AWQ have no parameters: two quantisations of a model were one."""
    model = load(make_model("llama", tmp_path), "cpu")
    layer, found = model.network.model.layers[0].mlp.down_proj, []
    found.append(fingerprint(model, "auto")["weights"])
    for seed in range(2):
        codes = torch.randint(1 << 30, (8, 4), generator=torch.Generator().manual_seed(seed))
        layer.register_buffer("qweight", codes.int())
        found.append(fingerprint(model, "auto")["weights"])
    layer.register_buffer("table", torch.ones(3), persistent=False)
    found.append(fingerprint(model, "auto")["weights"])
    assert len(set(found)) == 3
    assert found[2] == found[3]
