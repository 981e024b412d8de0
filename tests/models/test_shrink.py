"""A model whose weights stay in its files until they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from keyhole.models.loading import load
from keyhole.models.locate import locate
from keyhole.models.positions import _frequencies
from keyhole.models.shrink import mapped, random_model, shrink
from keyhole.retrieval.target import weights_digest
from tests.checkpoints import make_model


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # Gemma's output weights are tied
def test_mapped_weights_and_frequencies_are_those_of_the_loaded_model(
    family: str, tmp_path: Path
) -> None:
    checkpoint = make_model(family, tmp_path)
    network, model = mapped(locate(checkpoint), torch.float32), load(checkpoint, "cpu")
    assert network is not None
    assert weights_digest(network) == weights_digest(model.network)
    for kind in set(getattr(network.config, "layer_types", None) or ["full_attention"]):
        own, other = (
            _frequencies(one.base_model.rotary_emb, kind) for one in (network, model.network)
        )
        assert own.device.type == "cpu"
        assert torch.equal(own, other)


def test_weights_in_another_dtype_are_not_mapped(tmp_path: Path) -> None:
    """Loading rounds them, so that numbers of the files are not the model's."""
    assert mapped(locate(make_model("llama", tmp_path)), torch.bfloat16) is None


def test_encoders_that_text_does_not_run_through_are_small() -> None:
    """Those of Phi-4 multimodal were of full size, and the comparison took 36 seconds."""
    network = random_model(shrink(CONFIG_MAPPING["phi4_multimodal"]()))
    assert sum(parameter.numel() for parameter in network.parameters()) < 2_000_000
