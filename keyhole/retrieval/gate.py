"""The gate of SeerAttention-R: small linear layers that score blocks of keys for a KV head's group.

In every layer, the queries of a KV head's group become one gate query, and the pooled keys of a
block (their largest, smallest and mean numbers) become one gate key; a block's score is their
product. A gate is trained by `keyhole train-head --objective gate`, and its folder is next to the
weights:

    config.json           block_size, and model_type "keyhole_seer_gate"
    model.safetensors     for each layer i with full attention, numbered as in the model:
                          layers.i.query [Hkv, G, D, E], layers.i.key [Hkv, 3 D, E]

E is the size of gate queries and gate keys. Errors name the file and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from keyhole.cache.layout import Geometry
from keyhole.config import is_count
from keyhole.errors import ConfigError, ModelError
from keyhole.retrieval import head_files
from keyhole.retrieval.head_files import HeadCheckpoint

#: `model_type` in the config.json of a gate.
KIND = "keyhole_seer_gate"
#: Pooled keys of a block: largest, smallest, mean.
POOLS = 3
_REMEDY = "train one with `keyhole train-head --objective gate`"


class GateLayer(nn.Module):
    """One layer's gate: query [Hkv, G, D, E] pools the queries of a group, key [Hkv, 3 D, E]
    projects pooled keys.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.query, self.key = nn.Parameter(query), nn.Parameter(key)

    def forward(self, query: Tensor) -> Tensor:
        """The vectors [..., Hkv, 3 D] whose product with a block's pooled keys is its score.

        query [..., Hq, D], rotated as the keys are. The key's projection is applied to the gate
        query, (W_k^T k) . (W_q^T q) = k . (W_k W_q^T q), so that pooled keys are stored as they
        are.
        """
        grouped = query.unflatten(-2, self.query.shape[:2])
        pooled = torch.einsum("...hgd,hgde->...he", grouped, self.query)
        return torch.einsum("...he,hfe->...hf", pooled, self.key)


class SeerGate(nn.Module):
    """The gates of a model's layers, by their number in the model.

    block_size: tokens per block in training; None: it works with any size. in_model: the number in
    the model of each layer with attention, as in `Geometry`; None: all layers have attention.
    """

    def __init__(
        self,
        layers: Mapping[int, GateLayer],
        block_size: int | None,
        in_model: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})
        self.block_size = block_size
        self._in_model = in_model

    def fold(self, layer: int, query: Tensor) -> Tensor:
        """The vectors [B, Hkv, 3 D] of queries [B, Hq, D] in the layer at this place of
        `Geometry.layers`.
        """
        number = layer if self._in_model is None else self._in_model[layer]
        folded: Tensor = self.layer(number)(query)
        return folded

    def layer(self, number: int) -> GateLayer:
        """The gate of the layer that has this number in the model."""
        found = self.layers[str(number)]
        assert isinstance(found, GateLayer)
        return found

    @classmethod
    def random(cls, geometry: Geometry, seed: int = 0) -> SeerGate:
        """Random weights for a model of this shape, as a baseline; the same on each device."""
        generator = torch.Generator().manual_seed(seed)
        layers = {}
        for number, (heads, group, dim) in _shapes(geometry).items():
            query = torch.randn(heads, group, dim, dim, generator=generator) / (group * dim) ** 0.5
            key = torch.randn(heads, POOLS * dim, dim, generator=generator) / dim**0.5
            layers[number] = GateLayer(query, key)
        return cls(layers, None, geometry.in_model)

    @classmethod
    def from_pretrained(cls, path: str | Path, geometry: Geometry) -> SeerGate:
        """Reads the folder `path` for a model of this shape; float32 or as stored, on the CPU.

        ModelError that names the folder and what is wrong with it; ConfigError if the gate was
        trained on blocks of another size than the pages of `geometry`.
        """
        stored = _open(path)
        size = stored.config.get("block_size")
        if size is not None and not is_count(size):
            raise ModelError(
                f"the config of gate {stored.name!r} has block_size {size!r}; it must be a number "
                "of tokens, or null"
            )
        if size not in (None, geometry.page_size):
            raise ConfigError(
                f"gate {stored.name!r} was trained on blocks of {size} tokens, but page_size is "
                f"{geometry.page_size}; set page_size={size}, or train a gate with `keyhole "
                f"train-head --objective gate --block-size {geometry.page_size}`"
            )
        layers = {n: _layer(stored, n, shape) for n, shape in _shapes(geometry).items()}
        return cls(layers, size, geometry.in_model)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes the folder `path`, replacing an existing gate. ConfigError if it cannot."""
        config = {"model_type": KIND, "block_size": self.block_size}
        head_files.write_folder(path, config, self.state_dict(), what="gate")


def _shapes(geometry: Geometry) -> dict[int, tuple[int, int, int]]:
    """KV heads, query heads of each and key size, of each layer with full attention."""
    numbers = geometry.in_model or range(geometry.num_layers)
    found = {}
    for place in geometry.full_attention:
        layout = geometry.layers[place]
        group = layout.num_query_heads // layout.num_kv_heads
        found[numbers[place]] = (layout.num_kv_heads, group, layout.key_dim)
    return found


def _open(path: str | Path) -> HeadCheckpoint:
    config = Path(path) / "config.json"
    if not config.is_file():
        raise ModelError(f"folder {str(path)!r} holds no gate: it has no config.json; {_REMEDY}")
    stored = HeadCheckpoint.open(path)
    kind = stored.config.get("model_type")
    if kind != KIND:
        raise ModelError(
            f"{stored.name!r} is not a gate: the model_type of its config.json is "
            f"{json.dumps(kind)}, not {KIND!r}; {_REMEDY}"
        )
    return stored


def _layer(stored: HeadCheckpoint, number: int, shape: tuple[int, int, int]) -> GateLayer:
    """The gate of a layer; ModelError if it is missing or of another model."""
    (heads, group, dim), name = shape, f"layers.{number}.query"
    found = stored.shapes.get(name)
    if found is None or found[:-1] != (heads, group, dim):
        has = "none" if found is None else str(list(found))
        raise ModelError(
            f"gate {stored.name!r} was made for another model: layer {number} needs a tensor "
            f"{name} of shape [{heads}, {group}, {dim}, n], but it has "
            f"{has}; {_REMEDY} for this model"
        )
    query = stored.tensor(name, *found)
    return GateLayer(query, stored.tensor(f"layers.{number}.key", heads, POOLS * dim, found[-1]))
