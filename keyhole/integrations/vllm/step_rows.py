"""The decode tokens of a step as rows of a policy's `Step`, from vLLM's metadata, and a policy's
selection as page tables and lengths for vLLM's attention.

A row is one token that is computed under the policy. A decoding request has one; with speculative
decoding it has 1 + K, which are verified as if they were decoded one after the other: each row ends
at its own token. Prompt tokens are not rows, because prefill is exact.

All shapes follow from values on the host, so nothing here waits for the device.

The pages of a selection are in ascending order, and only the last one may be partly filled, so an
attention kernel needs nothing more than a shorter table and a shorter length. Lists per KV head
read pages of one head each: page p of head h is page `p * Hkv + h` of a pool seen as one-head
pages, and each head is one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from keyhole.kernels import Rotation, Selection
from keyhole.policies.base import CachedLayers, SequenceRows, Step


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests:
    """The requests of a step, those that decode first.

    starts: int [R + 1], where the query tokens of each begin, on the host. most: int [R], upper
    bounds of `lengths`, on the host, which count rejected drafts. lengths: int32 [R], tokens of
    each request including its query tokens. block_table: int32 [R, M]. prefilling: bool [R], on the
    host.
    """

    starts: np.ndarray
    most: np.ndarray
    lengths: Tensor
    block_table: Tensor
    prefilling: np.ndarray


@dataclass(eq=False, kw_only=True)
class StepRows:
    """The rows of a step, and the pages that it writes.

    num_requests: the number of decoding requests. num_rows: their tokens, B. requests: int64 [B],
    the request of each row, or None if each has one row. lengths: int32 [B]. page_table: int32 [B,
    M]. max_length: at least the largest of `lengths`. written: the pages that any request writes,
    and the tokens that each holds now, int64 [n] each.
    """

    num_requests: int
    num_rows: int
    requests: Tensor | None
    lengths: Tensor
    page_table: Tensor
    max_length: int
    host_lengths: np.ndarray
    written: tuple[Tensor, Tensor]
    page_size: int
    step: Step | None = field(default=None)

    def begin(self, keys: Sequence[Tensor], page_data: Sequence[Mapping[str, Tensor]]) -> Step:
        """The step that a policy sees; the same one for all layers of a KV cache group."""
        if self.step is None:
            size, B = self.page_size, self.num_rows
            none = torch.empty(0, dtype=torch.int32)
            rows = SequenceRows(
                host_lengths=self.host_lengths,
                fresh=np.zeros(B, bool),
                prompts=none,
                host_prompts=np.zeros(0, np.int64),
                slots=none,
                host_slots=np.zeros(0, np.int64),
                state={},
            )
            self.step = Step(
                lengths=self.lengths,
                pages=torch.div(self.lengths + (size - 1), size, rounding_mode="floor"),
                max_length=self.max_length,
                page_table=self.page_table,
                page_size=size,
                sequences=rows,
                cache=CachedLayers(keys, page_data, _no_rotation),
            )
        return self.step


def _no_rotation(layer: int) -> Rotation:
    raise AssertionError(f"layer {layer}: policies that rotate keys are refused at start")


def step_rows(requests: Requests, page_size: int, threshold: int) -> StepRows:
    """The rows of the leading requests that decode.

    threshold: the most query tokens of a decoding request: 1 + K with K draft tokens.
    """
    device = requests.lengths.device
    counts = np.diff(requests.starts)
    prompt = requests.prefilling | (counts > threshold) | (counts == 0)
    decoding = int(prompt.argmax()) if prompt.any() else len(counts)
    counts_of, most_of = counts[:decoding], requests.most[:decoding]
    num_rows = int(counts_of.sum())
    lengths, table = requests.lengths[:decoding], requests.block_table[:decoding]
    of_row, host_lengths = None, most_of
    if num_rows > decoding:
        of_host = np.repeat(np.arange(decoding), counts_of)
        # A row's distance to the last row of its request: drafts follow the newest token.
        behind = np.cumsum(counts_of)[of_host] - 1 - np.arange(num_rows)
        of_row, back = _to(of_host, device), _to(behind.astype(np.int32), device)
        lengths = lengths.index_select(0, of_row) - back
        table = table.index_select(0, of_row)
        host_lengths = most_of[of_host] - behind
    max_length = int(host_lengths.max()) if num_rows else 0
    return StepRows(
        num_requests=decoding,
        num_rows=num_rows,
        requests=of_row,
        lengths=lengths,
        page_table=table[:, : max(1, -(-max_length // page_size))],
        max_length=max_length,
        host_lengths=host_lengths,
        written=_written(requests, counts, page_size),
        page_size=page_size,
    )


def _written(requests: Requests, counts: np.ndarray, page_size: int) -> tuple[Tensor, Tensor]:
    """The pages that hold this step's tokens, int64 [n], and the tokens that each holds now.

    A page may be listed twice, with the same number: how many pages a request touches depends on
    its exact length, which only the device may know, so the upper bound is used.
    """
    device = requests.lengths.device
    most = np.where(counts > 0, (counts + page_size - 2) // page_size + 1, 0)
    of_host = np.repeat(np.arange(len(counts)), most)
    nth_host = np.arange(len(of_host)) - (np.cumsum(most) - most)[of_host]
    of, nth, count = (_to(x, device) for x in (of_host, nth_host, counts[of_host]))
    lengths = requests.lengths.long().index_select(0, of)
    last = torch.div(lengths - 1, page_size, rounding_mode="floor")
    first = torch.div(lengths - count, page_size, rounding_mode="floor")
    number = torch.minimum(first + nth, last)
    pages = requests.block_table[of, number].long()
    return pages, (lengths - number * page_size).clamp(max=page_size)


def _to(numbers: np.ndarray, device: torch.device) -> Tensor:
    """The numbers on a device, without waiting for it."""
    host = torch.from_numpy(numbers)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Tables:
    """What a layer reads in a decode step, for vLLM's attention.

    page_table: int32 [B * H, n], padded with page 0, vLLM's null block. lengths: int32 [B * H].
    lists: H, the lists per row: 1, or the number of KV heads or query heads. max_length: an upper
    bound of `lengths`. pages: int64 [], total pages read by all rows and lists.
    """

    page_table: Tensor
    lengths: Tensor
    lists: int
    max_length: int
    pages: Tensor


def tables_of(selection: Selection, step: Step, num_kv_heads: int) -> Tables:
    """The tables of a selection of pages."""
    assert selection.unit == step.page_size, "page_policy lets policies of whole pages through only"
    B, H, n = selection.indices.shape
    chosen = selection.indices.long()
    table = step.page_table.long()[:, None].expand(-1, H, -1)
    physical = table.gather(2, chosen.clamp(min=0))
    if H > 1:
        head = torch.arange(H, device=chosen.device) // (H // num_kv_heads)
        physical = physical * num_kv_heads + head[None, :, None]
    physical = physical.masked_fill(chosen < 0, 0)
    missing = step.pages * step.page_size - step.lengths  # in the newest page
    lengths = selection.counts * step.page_size - missing[:, None]
    return Tables(
        page_table=physical.to(torch.int32).view(B * H, n),
        lengths=lengths.to(torch.int32).expand(B, H).reshape(B * H),
        lists=H,
        max_length=min(n * step.page_size, step.max_length),
        pages=selection.counts.sum(),
    )
