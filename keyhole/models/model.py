"""`Model`: a transformers model in the form the engine needs."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from keyhole.cache.argument import cache_argument
from keyhole.cache.layout import Geometry
from keyhole.config import SamplingParams
from keyhole.errors import ConfigError, ModelError, one_line
from keyhole.models import families
from keyhole.models.batch import Batch, LastLayer, PassThrough
from keyhole.models.modules import sequence_adapters, sequence_rope
from keyhole.models.weights.adapters import Adapters
from keyhole.retrieval.draft import DRAFT_FOLDER
from keyhole.reuse.sam_kv import STABILITY_FILE

#: DELTA uses a file of `keyhole calibrate` with this name next to the weights automatically.
CALIBRATION_FILE = "keyhole-delta.json"
#: SpeContext uses a folder of `keyhole train-head` with this name there.
HEAD_FOLDER = "keyhole-head"
#: The same for SeerAttention-R.
GATE_FOLDER = "seer-gate"


def beside_weights(folder: Path) -> dict[str, Any]:
    """What methods find next to the weights, as fields of `Model`; absent ones are left out."""
    files = {"calibration": CALIBRATION_FILE, "stability": STABILITY_FILE}
    folders = {"head": HEAD_FOLDER, "gate": GATE_FOLDER, "draft": DRAFT_FOLDER}
    found = {field: folder / name for field, name in files.items() if (folder / name).is_file()}
    return found | {
        field: folder / name for field, name in folders.items() if (folder / name).is_dir()
    }


@dataclass
class Model:
    """A loaded model, its tokenizer (None if it has none) and the facts in its files.

    defaults: the generation_config as a dictionary. max_length: the longest sequence.
    length_reason: the reason for that limit. rope: the lengths beyond which the frequencies of its
    RoPE change; None: they never do. calibration, head, gate, stability: files next to the weights
    for DELTA, SpeContext, SeerAttention-R and SamKV. draft: the folder of an EAGLE-3 draft.
    weights: the format that they were packed in while loading. layer_devices: the device of each
    layer of attention, if they are on several; `device` is then that of everything else. adapters:
    LoRA adapters that single requests may choose.
    """

    name: str
    network: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    max_length: int
    length_reason: str
    eos_token_ids: frozenset[int]
    defaults: dict[str, Any]
    calibration: Path | None = None
    head: Path | None = None
    gate: Path | None = None
    stability: Path | None = None
    draft: Path | None = None
    rope: families.RopeLengths | None = None
    weights: str | None = None
    layer_devices: tuple[torch.device, ...] | None = None
    adapters: Adapters = field(default_factory=Adapters)
    watched: dict[int, Any] = field(default_factory=dict, init=False)

    def geometry(self, page_size: int) -> Geometry:
        """The model's shape for a cache of this page size."""
        config = self.network.config
        layers = families.layouts(config)
        for layer in layers:
            if layer.chunked and layer.window is not None and layer.window % page_size:
                raise ConfigError(
                    f"page_size {page_size} must be a divisor of {layer.window}, the size of this "
                    "model's attention chunks"
                )
        return Geometry(
            layers=layers,
            num_query_heads=max(layer.num_query_heads for layer in layers),
            page_size=page_size,
            itemsize=self.dtype.itemsize,
            calibration=self.calibration,
            stability=self.stability,
            in_model=families.attention_layers(config) if self.is_hybrid else None,
        )

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a recurrent state of a sequence."""
        return bool(families.recurrent_layers(self.network.config))

    @functools.cached_property  # read at every token of a prompt
    def vocab_size(self) -> int:
        """Entries of the logits."""
        return int(self.network.config.vocab_size)

    def watch(self, layers: tuple[int, ...]) -> None:
        """Makes every forward pass store the inputs of these layers in its batch."""
        _, blocks = decoder_layers(self.network)
        for layer in set(layers) - self.watched.keys():
            if not 0 <= layer < len(blocks):
                raise ConfigError(f"feature layer {layer} must be from 0 to {len(blocks) - 1}")
            hook = functools.partial(_keep_input, layer)
            handle = blocks[layer].register_forward_pre_hook(hook, with_kwargs=True)
            self.watched[layer] = handle

    def unwatch(self) -> None:
        """Ends what `watch` began."""
        for handle in self.watched.values():
            handle.remove()
        self.watched.clear()

    @torch.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """Logits [len(rows), vocabulary] of a packed row.

        token_ids, positions: int64 [T]; rows: int64, the rows whose logits are returned. A batch
        that ends at `last_layer` returns none.
        """
        try:
            with sequence_rope.using(batch.rope), sequence_adapters.using(batch.adapters):
                out = self.network(
                    input_ids=token_ids[None],
                    position_ids=positions[None],
                    use_cache=False,
                    logits_to_keep=rows,
                    keyhole=batch,
                    **{cache_argument(self.network): PassThrough(batch, positions)},
                )
        except LastLayer:
            return token_ids.new_zeros(0, self.vocab_size, dtype=self.dtype)
        if batch.step is not None:
            _require_every_layer(batch, str(self.network.config.model_type))
        batch.gather()
        logits: Tensor = out.logits[0]
        return logits


def require_defaults(folder: Path) -> None:
    """ModelError for a damaged file of sampling defaults and end tokens: it would be ignored."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    try:
        stored = json.loads(path.read_text())
        if not isinstance(stored, dict):
            raise ValueError("it must be a JSON object")
        SamplingParams().resolve(stored)
        ends = stored.get("eos_token_id")
        each = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(end) is int for end in each):
            raise ValueError(f"eos_token_id {ends!r} must be a token's number, or a list of them")
        # transformers reads it with the weights, and what it refuses would be said of those.
        GenerationConfig.from_dict(stored)
    except Exception as error:  # transformers raises what its checks happen to
        raise ModelError(
            f"{str(path)!r} is damaged: {one_line(error)}; correct it, or delete it to go without "
            "its defaults"
        ) from error


def decoder_layers(network: Any) -> tuple[str, nn.ModuleList]:
    """The name of the list of decoder layers, which families call differently, and the list."""
    base, depth = network.base_model, int(network.config.num_hidden_layers)
    usual = getattr(base, "layers", getattr(base, "h", None))
    lists = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.ModuleList)]
    found = (one for one in lists if (len(one[1]) == depth if usual is None else one[1] is usual))
    return next(found)


def _require_every_layer(batch: Batch, family: str) -> None:
    """ModelError unless each layer has called our attention function."""
    called, layers = len(batch.reads), len(batch.cache.geometry.layers)
    if called != layers:
        raise ModelError(
            f"{layers - called} of {layers} attention layers of the family {family!r} compute "
            "attention in code of their own, and do not call the function that transformers "
            "has registered for it"
        )


def _keep_input(layer: int, _: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Stores a decoder layer's input in the batch."""
    batch = named.get("keyhole")
    if batch is None:  # some families drop the keyword before their layers
        cache = PassThrough.among(given, named)
        batch = None if cache is None else cache.batch
    if batch is not None:  # the network may also run without Keyhole
        hidden = given[0] if given else named["hidden_states"]
        batch.hidden[layer] = hidden[0]
