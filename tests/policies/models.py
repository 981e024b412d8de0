"""Tiny models with their twins in plain transformers, for comparing whole runs with the oracle."""

from __future__ import annotations

import ast
import functools
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from keyhole.models.loading import load
from keyhole.models.model import GATE_FOLDER, HEAD_FOLDER, Model
from keyhole.retrieval.gate import SeerGate
from keyhole.retrieval.head import RetrievalHead
from tests.checkpoints import make_config, make_model, make_network

VOCAB = 64


def twins(kind: str, *, dtype: str = "float32", **fields: Any) -> tuple[Model, Any]:
    """A model of 8 layers for keyhole and the same weights as transformers has them.

    They are made once for each call; nothing may change them, nor lie beside their files.
    """
    fields = {"num_hidden_layers": 8, "vocab_size": VOCAB} | fields
    return _twins(kind, dtype, repr(sorted(fields.items())))


@functools.cache
def _twins(kind: str, dtype: str, fields: str) -> tuple[Model, Any]:
    given = dict(ast.literal_eval(fields))
    with TemporaryDirectory() as folder:
        model = load(make_model(kind, Path(folder), **given), "cpu", dtype)
    return model, make_network(make_config(kind, **given))


def with_head(checkpoint: str | Path, inputs: str = "tokens+features", seed: int = 0) -> Model:
    """The model of a checkpoint, with a random retrieval head and gate beside its weights."""
    model = load(checkpoint, "cpu")
    model.head = Path(checkpoint) / HEAD_FOLDER
    RetrievalHead.random(model.network, inputs=inputs, seed=seed).save_pretrained(model.head)
    model.gate = Path(checkpoint) / GATE_FOLDER
    SeerGate.random(model.geometry(1), seed=seed).save_pretrained(model.gate)
    return model


def prompt(count: int, seed: int = 0) -> list[int]:
    """Token ids, none of them special."""
    return random.Random(1000 * seed + count).choices(range(3, VOCAB), k=count)


#: One token, one more than a page, prompts of several chunks; 13 or more apart.
PROMPTS = [prompt(1), prompt(17), prompt(32), prompt(51)]
