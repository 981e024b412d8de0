"""Time of one layer's decode attention over a whole cache: ours, and other ways to do the same.

    python -m benchmarks.attend

An experiment for `LOG.md`: where the time of `kernels.attend` goes on a CPU. Shape of a layer of
Llama-3.2-1B, bfloat16, one sequence. All variants are compared with `kernels.attend` before they
are timed, and take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch starts its threads: waiting ones must not spin on a core that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from keyhole import kernels

_HKV, _G, _D, _PAGE_SIZE = 8, 4, 64, 16
_SCALE = _D**-0.5
_BLOCK = 64  # pages; 32 and 128 were no faster
_WARM_UP = 3
# bfloat16 inputs, outputs of order 0.01 at these lengths.
_TOLERANCE = 2e-3


class Variants:
    """The same attention in several ways; every method gives [1, Hq, D]."""

    def __init__(self, context: int) -> None:
        torch.manual_seed(context)
        count = context // _PAGE_SIZE
        self.keys, self.values = torch.randn(2, count, _HKV, _PAGE_SIZE, _D).bfloat16()
        self.query = torch.randn(1, _HKV * _G, _D).bfloat16()
        self.table = torch.randperm(count).int()[None]
        self.lengths = torch.tensor([context], dtype=torch.int32)
        self.plain = [x.contiguous() for x in (self._whole(self.keys), self._whole(self.values))]

    def attend(self) -> Tensor:
        """The reference: pages gathered head by head, then float32."""
        return kernels.attend(
            self.query, self.keys, self.values, self.table, self.lengths, scale=_SCALE
        )

    def attend_with_copies(self) -> Tensor:
        """As `attend` was first: values and scores copied once more to be masked."""
        key, value = (x.flatten(2, 3).float() for x in self.gather_by_head())
        hidden = torch.zeros(1, 1, key.shape[2], dtype=torch.bool)
        value = value.masked_fill(hidden[..., None], 0.0)
        scores = self._grouped().float() @ key.transpose(-1, -2) * _SCALE
        scores = scores.masked_fill(hidden[:, :, None], float("-inf"))
        return (scores.softmax(-1) @ value).flatten(1, 2).to(self.query.dtype)

    def attend_in_blocks(self) -> Tensor:
        """In float32 as `attend`, but whole pages, `_BLOCK` at a time: buffers stay small."""
        blocks = self.table[0].long().split(_BLOCK)
        query = self._grouped()[0].float()
        scores = [
            query @ self._block(self.keys, block).transpose(1, 2) * _SCALE for block in blocks
        ]
        weights = torch.cat(scores, -1).softmax(-1).split(_BLOCK * _PAGE_SIZE, -1)
        out = torch.zeros(_HKV, _G, _D)
        for weight, block in zip(weights, blocks, strict=True):
            out.baddbmm_(weight, self._block(self.values, block))
        return out.flatten(0, 1)[None].to(self.query.dtype)

    def sdpa_by_head(self) -> Tensor:
        """Pages gathered head by head, then torch's own attention in bfloat16."""
        key, value = (x.flatten(2, 3) for x in self.gather_by_head())
        return self._sdpa(key, value)

    def sdpa_whole_pages(self) -> Tensor:
        """Whole pages gathered, all heads at once, then torch's own attention in bfloat16."""
        return self._sdpa(self._whole(self.keys), self._whole(self.values))

    def sdpa_contiguous(self) -> Tensor:
        """No pages at all: the bound that a dense cache sets."""
        return self._sdpa(*self.plain)

    def gather_by_head(self) -> tuple[Tensor, Tensor]:
        """[1, Hkv, pages, page_size, D] of keys and values: a part of the above, timed too."""
        where = self.table.long()[:, None], torch.arange(_HKV)[None, :, None]
        return self.keys[where], self.values[where]

    def gather_whole_pages(self) -> tuple[Tensor, Tensor]:
        """[pages, Hkv, page_size, D] of keys and values: a part of the above, timed too."""
        pages = self.table[0].long()
        return self.keys.index_select(0, pages), self.values.index_select(0, pages)

    def _block(self, stored: Tensor, pages: Tensor) -> Tensor:
        return stored.index_select(0, pages).transpose(0, 1).flatten(1, 2).float()

    def _whole(self, stored: Tensor) -> Tensor:
        pages = stored.index_select(0, self.table[0].long())
        return pages.transpose(0, 1).flatten(1, 2)[None]

    def _grouped(self) -> Tensor:
        return self.query.unflatten(1, (_HKV, _G))

    def _sdpa(self, key: Tensor, value: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(self._grouped(), key, value, scale=_SCALE)
        return out.flatten(1, 2)


_NAMES = (
    "attend",
    "attend_with_copies",
    "attend_in_blocks",
    "sdpa_by_head",
    "sdpa_whole_pages",
    "sdpa_contiguous",
    "gather_by_head",
    "gather_whole_pages",
)


def run(contexts: list[int], repeat: int) -> list[dict[str, Any]]:
    """A result for every context and variant."""
    results = []
    for context in contexts:
        variants = Variants(context)
        calls: dict[str, Callable[[], Any]] = {name: getattr(variants, name) for name in _NAMES}
        expected = variants.attend()
        for name, call in calls.items():
            if not name.startswith("gather"):
                error = (call() - expected).abs().max()
                assert error <= _TOLERANCE, f"{name} differs by {error}"
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_WARM_UP + repeat):
            for name, call in calls.items():
                times[name].append(measure.time_ms(call, torch.device("cpu")))
        for name, spent in times.items():
            spent = spent[_WARM_UP:]
            result = {"context": context, "variant": name, "ms": statistics.median(spent)}
            results.append(result | {"least_ms": min(spent)})
    return results


def main() -> None:
    """Measures, prints and appends one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--repeat", type=int, default=15, help="timed calls")
    parser.add_argument("--note", default="", help="what a reader should know of this run")
    output = measure.ROOT / "benchmarks/results/attend.jsonl"
    parser.add_argument("--output", type=Path, default=output)
    given = parser.parse_args()
    line = measure.header("attend", torch.device("cpu"), given.note)
    line["settings"] = {"contexts": given.contexts, "repeat": given.repeat}
    line["results"] = run(given.contexts, given.repeat)
    measure.append(given.output, line)
    print(measure.table(line["results"], ("context", "variant", "ms", "least_ms")))


if __name__ == "__main__":
    main()
