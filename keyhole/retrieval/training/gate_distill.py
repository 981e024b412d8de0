"""Trains the gate of SeerAttention-R: each layer's gate learns where that layer's attention peaks.

For a query token and a KV head, the target of a block is the largest attention weight of any query
head of the group on any of its tokens, normalised over the blocks; the loss is the KL divergence
from the softmax of the gate's scores (Gao et al., 2025, arXiv 2506.08889, section 2). Only queries,
keys and weights of the frozen model are needed, and each layer learns by itself.

Differences from the paper: the block of the query itself is left out of both distributions, since
every step reads it, and tokens after the query would show in its pooled keys; training starts from
the product of the mean query and the mean key, not from random weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keyhole.config import require
from keyhole.errors import ConfigError, NumericalError
from keyhole.retrieval.gate import POOLS, GateLayer, SeerGate
from keyhole.retrieval.target import Target
from keyhole.retrieval.training.run import LONG, TextLoss, TrainingRun
from keyhole.retrieval.training.teacher import AttentionRecord, run_recorded
from keyhole.retrieval.training.training_config import SHORTEST, Corpus, TrainingConfig

#: From 0.001 to 0.01 the bundled model's gate learns about equally fast.
_RATE = 1e-3
#: Budget of the progress figures: this part of a text.
_PART = 8


@dataclass(frozen=True)
class LayerTargets:
    """What a layer's gate learns from on one text, for R rows and M blocks.

    queries [R, Hq, D] and pooled [Hkv, M, 3 D], of keys, both rotated. peak, mass: float32
    [Hkv, R, M], the largest weight in a block of any query head of the group, and the sum of a
    block's weights, mean over the group.
    """

    queries: Tensor
    pooled: Tensor
    peak: Tensor
    mass: Tensor


@dataclass
class GateRecord(AttentionRecord):
    """Collects the targets of every layer, by its number in the model."""

    rows: Tensor
    block_size: int
    layers: dict[int, LayerTargets] = field(default_factory=dict)

    def add(self, layer: int, queries: Tensor, keys: Tensor, parts: Iterator[Tensor]) -> None:
        """See `AttentionRecord`."""
        peaks, masses = [], []
        for part in parts:
            blocks = _in_blocks(part, self.block_size, 0.0, dim=-1)  # [Hkv, G, r, M, size]
            peaks.append(blocks.amax(-1).amax(1))
            masses.append(blocks.sum(-1).mean(1))
        rows = queries[:, :, self.rows].permute(2, 0, 1, 3).flatten(1, 2).float()
        pooled = pooled_keys(keys.float(), self.block_size)
        self.layers[layer] = LayerTargets(rows, pooled, torch.cat(peaks, 1), torch.cat(masses, 1))


def _in_blocks(x: Tensor, size: int, padding: float, dim: int) -> Tensor:
    """Splits the dimension `dim`, -1 or -2, into blocks of `size`, the last one padded."""
    missing = -x.shape[dim] % size
    padded = F.pad(x, (0,) * (2 * (-dim - 1)) + (0, missing), value=padding)
    blocks: Tensor = padded.unflatten(dim, (-1, size))
    return blocks


def pooled_keys(keys: Tensor, size: int) -> Tensor:
    """Largest, smallest and mean numbers of each block of keys [Hkv, n, D]: [Hkv, M, 3 D]."""
    blocks = _in_blocks(keys, size, float("nan"), dim=-2)
    empty = blocks.isnan()
    high = blocks.masked_fill(empty, -torch.inf).amax(-2)
    low = blocks.masked_fill(empty, torch.inf).amin(-2)
    return torch.cat((high, low, blocks.nanmean(-2)), -1)


def scores(layer: GateLayer, targets: LayerTargets) -> Tensor:
    """The scores of all blocks, float32 [Hkv, R, M]."""
    folded: Tensor = layer(targets.queries).transpose(0, 1)  # [Hkv, R, 3 D]
    products: Tensor = folded @ targets.pooled.mT
    return products / math.sqrt(layer.query.shape[-1])


def divergence(found: Tensor, peak: Tensor, before: Tensor) -> Tensor:
    """Mean KL divergence of the softmax of scores from the normalised peaks, in nats.

    found, peak [Hkv, R, M]. before: bool [R, M], the blocks before that of each row; others count
    in neither. A row without any gives 0.
    """
    wanted = peak.masked_fill(~before, 0.0)
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-20)
    logs = found.masked_fill(~before, -1e30).log_softmax(-1)
    loss: Tensor = (torch.xlogy(wanted, wanted) - wanted * logs).sum(-1).mean()
    return loss


def kept(found: Tensor, mass: Tensor, newest: Tensor, count: int) -> float:
    """Share of the attention on the row's own block and the count - 1 best ones before it.

    found, mass [Hkv, R, M]; newest int64 [R], the block of each row.
    """
    block = torch.arange(mass.shape[-1], device=mass.device)
    found = found.masked_fill(block > newest[:, None], -torch.inf)
    found = found.masked_fill(block == newest[:, None], torch.inf)
    best = found.topk(min(count, len(block)), -1).indices
    return float((mass.gather(-1, best).sum(-1) / mass.sum(-1)).mean())


class GateDistiller(TrainingRun):
    """The training of a gate."""

    module: SeerGate

    def __init__(self, network: nn.Module, corpus: Corpus, config: TrainingConfig) -> None:
        shape = Target.of(network.requires_grad_(False))  # from now on; only the gate learns
        length = config.length or min(shape.max_length, LONG)
        require(length <= shape.max_length, "length", length, f"at most {shape.max_length}")
        most = SHORTEST // 2
        require(config.block_size <= most, "block_size", config.block_size, f"at most {most}")
        rate = config.learning_rate or _RATE
        config = dataclasses.replace(config, length=length, learning_rate=rate)
        self._network, self._device = network, shape.embedding.device
        gate = _first_gate(network, config.block_size, self._device)
        super().__init__(network, gate, corpus, config)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the gate. ConfigError if it cannot be written."""
        self.module.save_pretrained(folder)

    def _text_loss(self, rng: Random, length: int) -> TextLoss:
        token_ids, size = self._corpus.text(rng, length), self.config.block_size
        places = range(len(token_ids) // 2, len(token_ids))
        rows = sorted(rng.sample(places, min(len(places), self.config.num_queries)))
        record = GateRecord(torch.tensor(rows, device=self._device), size)
        with torch.no_grad():
            _run(self._network, torch.tensor(token_ids, device=self._device), record)
        newest, losses, shares = record.rows // size, [], []
        blocks = torch.arange(-(-len(token_ids) // size), device=self._device)
        count = max(2, len(token_ids) // _PART // size)
        for number, targets in record.layers.items():
            found = scores(self.module.layer(number), targets)
            losses.append(divergence(found, targets.peak, blocks < newest[:, None]))
            recent = blocks.expand_as(targets.mass).float()
            with torch.no_grad():
                chosen = [kept(x, targets.mass, newest, count) for x in (found, recent)]
            shares.append(chosen)
        recall, window = (sum(x) / len(shares) for x in zip(*shares, strict=True))
        return TextLoss(torch.stack(losses).mean(), recall, window, len(token_ids))


def _run(network: Any, token_ids: Tensor, record: GateRecord) -> None:
    """Fills the record. NumericalError for NaN."""
    run_recorded(network, token_ids, record, use_cache=False, logits_to_keep=record.rows[:1])
    if not all(targets.peak.isfinite().all() for targets in record.layers.values()):
        raise NumericalError(f"the model computes NaN for a text of {len(token_ids)} tokens")


def _first_gate(network: Any, block_size: int, device: torch.device) -> SeerGate:
    """A gate of the network's shape that scores the mean query by the mean key; float32.

    ConfigError for a model without full attention, or with MLA, whose cached keys are latents.
    """
    if getattr(network.config, "kv_lora_rank", None) is not None:
        raise ConfigError(
            "a gate cannot be trained for a model with MLA (multi-head latent attention); use "
            "quest or delta"
        )
    token_ids = torch.zeros(2, dtype=torch.int64, device=device)
    record = GateRecord(token_ids[:1], block_size)
    with torch.no_grad():
        run_recorded(network, token_ids, record, use_cache=False, logits_to_keep=1)
    if not record.layers:
        raise ConfigError("a gate needs layers with full attention, but this model has none")
    layers = {number: mean_key_layer(targets) for number, targets in record.layers.items()}
    return SeerGate(layers, block_size)


def mean_key_layer(targets: LayerTargets) -> GateLayer:
    """A gate for a layer of this shape that scores a block by the mean query and the mean key."""
    heads, dim = len(targets.pooled), targets.queries.shape[-1]
    group = targets.queries.shape[1] // heads
    one = torch.eye(dim, device=targets.queries.device)
    query = (one / group).expand(heads, group, dim, dim)
    key = torch.cat((one.new_zeros((POOLS - 1) * dim, dim), one))
    return GateLayer(query.clone(), key.expand(heads, -1, -1).clone())
