"""A long prompt under a prefill policy: the time of a whole prefill, and the attention mass that is
kept.

    python -m benchmarks.kernels.prefill
    python -m benchmarks.kernels.prefill --context 131072 --layers 1 --repeat 1
    python -m benchmarks.kernels.prefill --policies xattention:mass=0.9,xattention:mass=0.95

Engines with the same weights compute the same prompt, densely and under each prefill policy, and
take turns. A few layers of a shape are enough, because every layer costs the same. Adds a line to
benchmarks/results/prefill.jsonl.

Random weights attend to everything equally, and then no method can keep 95 % of the mass in few
blocks. So keys are scaled up (`--key-scale`), and the prompt consists of runs of one token
(`--run-length`): because the products of queries and keys are random, a run attends to some of the
others. The number of blocks needed is a property of these weights, not of real ones, so every time
is reported with the share of blocks that was read. The mass kept is measured with dense attention
weights, for queries spread over the last chunk, in each head and layer.

The first chunk, which has hardly any attention, times the number of chunks is what the linear
layers take: no selection makes a prompt faster than that.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import benchmarks
from benchmarks import command
from keyhole import LLM, SamplingParams, kernels, registry
from keyhole.bench.measure import Turn, median_ratio, take_turns
from keyhole.bench.model import make_weights
from keyhole.bench.settings import PAGE_SIZE, DecodeSettings
from keyhole.engine.sequence import Sequence
from keyhole.kernels import Selection
from keyhole.models.model import Model
from keyhole.policies.prefill.base import PromptChunk
from keyhole.policies.prefill.xattention import XAttention

LINES = benchmarks.results() / "prefill.jsonl"
DENSE = "dense"
#: The row of the first chunk, for all chunks.
FIRST = "first chunk, times chunks"
#: Number of queries of the last chunk whose attention weights are computed, in each layer and head.
_SAMPLED = 16


def main() -> None:
    """Measures and prints a row for each prefill policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="prompts of each")
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--policies", default="xattention:mass=0.95,xattention:mass=0.97")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prompt in a step")
    parser.add_argument("--key-scale", type=float, default=6.0)
    parser.add_argument("--run-length", type=int, default=256)
    given = parser.parse_args()
    settings = DecodeSettings(
        contexts=(given.context,), layers=given.layers, shape=given.shape, systems=("full",)
    )
    model = make_weights(settings).keyhole
    for layer in model.network.model.layers:
        layer.self_attn.k_proj.weight.mul_(given.key_scale)
    prompt = runs_of_tokens(model, given.context, given.run_length)
    policies = [spec.text for spec in registry.parse(given.policies)]
    line = command.header("prefill", "benchmarks.kernels.prefill", "", model.device)
    line["settings"] = vars(given)
    line["results"] = measured(model, prompt, policies, given.repeat, given.chunk)
    benchmarks.append(LINES, line)
    for row in line["results"]:
        print(
            f"{row['policy']:<24} {row['seconds']:8.2f} s  {row['speedup']:5.2f}x dense  "
            f"blocks read {row['blocks_read']:6.1%}  mass kept {row['mass_kept']:.2%} "
            f"(least {row['least_mass_kept']:.1%})  {row['kv_bytes'] / 2**30:.2f} GiB read"
        )


def runs_of_tokens(model: Model, context: int, run_length: int) -> list[int]:
    """A prompt of runs of one random token each."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (-(-context // run_length),), generator=random)
    found: list[int] = tokens.repeat_interleave(run_length)[:context].tolist()
    return found


def measured(
    model: Model, prompt: list[int], policies: list[str], repeat: int, chunk: int
) -> list[dict[str, Any]]:
    """A row for the dense prefill and each policy; speedups are medians of the rounds' ratios."""
    systems = {name: Prefill(model, prompt, name, chunk) for name in (DENSE, *policies)}
    masses = {name: system.mass_kept() for name, system in systems.items()}  # warms up, too
    systems[FIRST] = Prefill(model, prompt[:chunk], DENSE, chunk)
    turns = {name: Turn(call=system.run) for name, system in systems.items()}
    times = take_turns(turns, repeat, model.device)
    times[FIRST] = [ms * len(prompt) / chunk for ms in times[FIRST]]
    rows = []
    for name, system in systems.items():
        mass = masses.get(name)
        rows.append(
            {
                "policy": name,
                "seconds": round(statistics.median(times[name]) / 1e3, 3),
                "all_seconds": [round(ms / 1e3, 3) for ms in times[name]],
                "speedup": round(median_ratio(times[DENSE], times[name]), 3),
                "mass_kept": 1.0 if mass is None else float(mass.mean()),
                "least_mass_kept": 1.0 if mass is None else float(mass.min()),
                "blocks_read": system.blocks_read,
                "kv_bytes": system.kv_bytes,
            }
        )
    return rows


class Prefill:
    """The prefill of one prompt in an engine of its own; `blocks_read`: of the last run."""

    def __init__(self, model: Model, prompt: list[int], name: str, chunk: int) -> None:
        policy = None if name == DENSE else name
        self._llm = LLM(
            model,
            page_size=PAGE_SIZE,
            prefill_policy=policy,
            prefill_chunk=chunk,
            prefix_cache=False,
            max_batch=1,
            memory=(len(prompt) + 2 * PAGE_SIZE) * model.geometry(PAGE_SIZE).token_bytes,
        )
        self._prompt, self._last = prompt, len(prompt) - chunk
        self._sequence: Sequence | None = None

    def run(self) -> None:
        """Computes the prompt and its first token."""
        engine = self._llm.engine
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self._sequence = engine.add(self._prompt, params)
        while engine.has_work:
            engine.step()

    def mass_kept(self) -> Tensor | None:
        """The share of dense attention weights on the blocks read; None for a dense prefill.

        float32, one for each sampled query of the last chunk, head and layer.
        """
        runner, policy = self._llm.engine._runner, self._llm.engine.prefill_policy
        if policy is None:
            self.run()
            return None
        assert isinstance(policy, XAttention)
        watched = Watched(inner=policy, start=self._last)
        runner._prefill = watched
        self.run()
        runner._prefill = policy
        return torch.stack(watched.kept)

    @property
    def blocks_read(self) -> float:
        """The share of blocks that the last run read."""
        assert self._sequence is not None
        share = self._sequence.stats().prompt_attended_fraction
        return 1.0 if share is None else share

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in all blocks that the last run read.

        A block is counted for each block of queries, and for each head that selects for itself.
        """
        geometry, policy = self._llm.engine.geometry, self._llm.engine.prefill_policy
        layout = geometry.layers[0]
        per_head = layout.numbers_per_head * geometry.kv_itemsize
        if policy is None or self._sequence is None:
            blocks = -(-len(self._prompt) // 128)
            pairs = len(geometry.layers) * layout.num_kv_heads * blocks * (blocks + 1) // 2
            return pairs * 128 * per_head
        return int(self._sequence.blocks_read) * policy.block_size * per_head


@dataclass(frozen=True, kw_only=True)
class Watched(XAttention):
    """Behaves like `inner`; for the chunk at `start` it records the mass that is kept."""

    inner: XAttention
    start: int
    kept: list[Tensor] = field(default_factory=list)

    def is_dense(self, start: int, count: int) -> bool:
        """As `inner`."""
        return self.inner.is_dense(start, count)

    def causal_blocks(self, start: int, count: int) -> int:
        """As `inner`."""
        return self.inner.causal_blocks(start, count)

    def select(self, layer: int, chunk: PromptChunk) -> Selection:
        """As `inner`."""
        blocks = self.inner.select(layer, chunk)
        if chunk.start >= self.start:
            self.kept.append(_mass(chunk, blocks))
        return blocks


def _mass(chunk: PromptChunk, blocks: Selection) -> Tensor:
    """The share of the weights that is on the blocks, float32 [samples, Hq]."""
    count, num_heads, _ = chunk.query.shape
    rows = torch.linspace(0, count - 1, _SAMPLED, device=chunk.query.device).long()
    positions, end = chunk.start + rows, chunk.start + count
    tokens = torch.arange(end, device=rows.device)
    keys = kernels.gather_tokens(chunk.key_pages, chunk.pages, tokens).float()
    keys = keys.repeat_interleave(num_heads // keys.shape[1], 1)
    logits = torch.einsum("thd,nhd->thn", chunk.query[rows].float(), keys) * chunk.scale
    logits.masked_fill_((tokens > positions[:, None])[:, None], float("-inf"))
    weights = logits.softmax(-1)
    lists = blocks.indices[positions // blocks.unit - chunk.start // blocks.unit].long()
    number = -(-end // blocks.unit)
    read = torch.zeros(*lists.shape[:2], number + 1, dtype=torch.bool, device=rows.device)
    read.scatter_(2, lists.masked_fill(lists < 0, number), True)
    of_token = read[..., :number].repeat_interleave(blocks.unit, 2)[..., :end]
    return (weights * of_token).sum(-1)


if __name__ == "__main__":
    with torch.no_grad():
        main()
