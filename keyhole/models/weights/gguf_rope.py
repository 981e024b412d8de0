"""RoPE in a GGUF file: its scaling, which transformers reads for gpt-oss only, base and width.

llama.cpp has Llama 3's scaling as a tensor of divisors, `rope_freqs.weight`, one per pair of
numbers of a head, and linear and YaRN scaling as fields. transformers reads the base of some
families, and of none the share of a head that is rotated. Without them a model loads without an
error and gives other answers.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import read_field
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from keyhole.errors import ModelError
from keyhole.models import families

#: Of Llama 3.1, 3.2 and 3.3, whose scaling llama.cpp stores as a tensor.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DIVISORS = "rope_freqs.weight"
_LONG = "rope_factors_long.weight"
#: How the names of tensors begin that are read here.
TENSORS = ("rope_freqs.", "rope_factors_")
#: Fields of YaRN beside factor and original length, as llama.cpp and transformers call them.
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def complete(config: Any, reader: Any, architecture: str, name: str) -> None:
    """Sets base, width and scaling of a file's RoPE in its config, in place.

    ModelError for scaling that transformers does not compute.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    # Where kinds of layers differ (Gemma 3), llama.cpp's fields are those of full attention.
    own = ropes.get("full_attention")
    rope = ropes if own is None else own
    if not rope or rope.get("rope_type", "default") != "default":
        return
    found = _scaled(
        config, _unscaled(config, rope, reader, architecture), reader, architecture, name
    )
    config.rope_parameters = found if own is None else ropes | {"full_attention": found}


def _unscaled(config: Any, rope: dict[str, Any], reader: Any, architecture: str) -> dict[str, Any]:
    """The parameters with the base of the file, and the share of a head that is rotated."""
    base = _field(reader, f"{architecture}.rope.freq_base")
    width = _field(reader, f"{architecture}.rope.dimension_count")
    found = rope | ({"rope_theta": float(base)} if base else {})
    if width and "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = int(width) / families.head_dim(config)
    return found


def _scaled(
    config: Any, rope: dict[str, Any], reader: Any, architecture: str, name: str
) -> dict[str, Any]:
    """The parameters with the scaling of the file."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if _LONG in tensors:
        raise _unknown(name, f"the tensor {_LONG!r} (LongRoPE)")
    if _DIVISORS in tensors:
        return _llama3(config, rope, np.array(tensors[_DIVISORS].data), name)
    prefix = f"{architecture}.rope.scaling"
    kind, factor = _field(reader, f"{prefix}.type"), _field(reader, f"{prefix}.factor")
    if kind in (None, "none") or not factor:
        return rope
    if kind not in ("linear", "yarn"):
        raise _unknown(name, f"rope.scaling.type {kind!r}")
    if not 0 < float(factor) < math.inf:
        raise _unknown(name, f"rope.scaling.factor {factor}")
    scaled = rope | {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        length = _field(reader, f"{prefix}.original_context_length")
        if not length:
            raise _unknown(name, "YaRN without rope.scaling.original_context_length")
        scaled["original_max_position_embeddings"] = int(length)
        for theirs, ours in _YARN.items():
            found = _field(reader, f"{prefix}.{theirs}")
            if found is not None:
                scaled[ours] = float(found)
    return scaled


def _llama3(config: Any, plain: dict[str, Any], divisors: np.ndarray, name: str) -> dict[str, Any]:
    """Llama 3's parameters that have these divisors of the frequencies."""
    factor = float(divisors.max())
    scaled: dict[str, Any] = plain | _LLAMA3 | {"rope_type": "llama3", "factor": factor}
    trial = copy.deepcopy(config)
    trial.rope_parameters = scaled
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](trial, torch.device("cpu"))
    pairs = torch.arange(len(divisors), dtype=torch.float64) / len(divisors)
    unscaled = 1 / plain["rope_theta"] ** pairs
    wanted = unscaled / torch.from_numpy(divisors).double()
    if frequencies.shape != wanted.shape or not torch.allclose(
        frequencies.double(), wanted, rtol=1e-3
    ):
        raise _unknown(name, f"a tensor {_DIVISORS!r} that is not Llama 3's")
    return scaled


def _field(reader: Any, name: str) -> Any:
    found = read_field(reader, name)
    return found[0] if found else None


def _unknown(name: str, what: str) -> ModelError:
    return ModelError(
        f"the file {name!r} scales RoPE by {what}, which Keyhole does not read in a GGUF file; "
        "give the model's folder or hub id instead"
    )
