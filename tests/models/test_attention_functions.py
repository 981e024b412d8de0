"""Our entries in transformers' table of attention functions can be called like its own."""

from __future__ import annotations

import inspect

import pytest
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from keyhole.models import attention
from keyhole.retrieval.training import objectives, teacher


@pytest.mark.parametrize("module", [attention, objectives, teacher], ids=lambda m: m.NAME)
def test_arguments_by_place_are_those_of_transformers(module: object) -> None:
    """Who wraps all functions, as kvpress does, gives dropout by its place: it became the scale."""
    theirs = list(inspect.signature(sdpa_attention_forward).parameters)[:6]
    ours = inspect.signature(ALL_ATTENTION_FUNCTIONS[module.NAME]).parameters.values()
    by_place = [one.name for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert by_place == theirs
