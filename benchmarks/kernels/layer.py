"""A case of the kernel benchmark, and the layer whose keys and values all cases read.

Every sequence has as many tokens as the longest context, in pages in random order. A shorter
context has several *variants*: parts of the same cache that do not overlap. Successive calls cycle
through them, so that no call finds its input in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.settings import KernelSettings
from keyhole.bench.settings import PAGE_SIZE, SHAPES
from keyhole.cache import huge_pages
from keyhole.cache.layout import LayerLayout
from keyhole.cache.pages import keys_and_values

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class System:
    """One implementation of a case. run: computes the variant with this number, and is timed.

    check: as `run`, for a result that must first be read back; None: `run` returns it.
    moved_bytes: None: the case's.
    """

    run: Callable[[int], Outputs]
    check: Callable[[int], Outputs] | None = None
    moved_bytes: int | None = None

    def outputs(self, variant: int) -> Outputs:
        """The result to compare."""
        return (self.check or self.run)(variant)


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One operation on one kind of input.

    ours: our operation by label, "" if there is only one; each runs on every path.
    peers: the same in PyTorch; times are reported relative to the first. reader: the one of them
    that only reads, whose bytes per second the others' are divided by.
    tokens: of a sequence. selected: tokens (unit 1) or pages that are read, None for all.
    moved_bytes: bytes that must be read or written once. flops: for compute-bound cases instead.
    """

    op: str
    tokens: int
    selected: int | None = None
    unit: int | None = None
    about: str
    moved_bytes: int
    flops: int | None = None
    variants: int
    ours: Mapping[str, System]
    peers: Mapping[str, System]
    reader: str | None = None


class Layer:
    """Random keys and values [P, Hkv, page_size, D], a page table [B, M] and a query [B, Hq, D].

    On torch's default device.
    """

    def __init__(self, settings: KernelSettings) -> None:
        shape = SHAPES[settings.shape]
        self.num_heads = int(shape["num_attention_heads"])
        self.num_kv_heads = int(shape["num_key_value_heads"])
        self.dim = int(shape["head_dim"])
        self.hidden_size = int(shape["hidden_size"])
        self.intermediate_size = int(shape["intermediate_size"])
        #: Outputs and inputs of the head, which computes logits.
        self.head = int(shape["vocab_size"]), self.hidden_size
        self.scale = self.dim**-0.5
        self.batch = settings.batch
        self.longest = settings.contexts[-1]
        #: Contexts that are read in full; selections are made from the longest.
        self.contexts = settings.contexts[:-1] or settings.contexts
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(0)
        pages = self.batch * self.longest // PAGE_SIZE
        layout = LayerLayout(num_kv_heads=self.num_kv_heads, key_dim=self.dim, value_dim=self.dim)
        stored = self.randn(pages, self.num_kv_heads, PAGE_SIZE * layout.numbers_per_head)
        self.keys, self.values = keys_and_values(stored, layout, PAGE_SIZE)
        order = torch.randperm(pages, generator=self.generator)
        self.table = order.int().view(self.batch, -1)
        self.query = self.randn(self.batch, self.num_heads, self.dim)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of every linear layer, and of the head."""
        hidden, queries = self.hidden_size, self.num_heads * self.dim
        return (
            (queries, hidden),
            (self.num_kv_heads * self.dim, hidden),
            (hidden, queries),
            (self.intermediate_size, hidden),
            (hidden, self.intermediate_size),
            self.head,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token of every sequence."""
        return 2 * self.batch * self.num_kv_heads * self.dim * self.dtype.itemsize

    def randn(self, *size: int) -> Tensor:
        """Normal random numbers in the layer's dtype, in memory that is allocated like a cache."""
        tensor = huge_pages.new_empty(torch.empty(0, dtype=self.dtype), *size)
        return tensor.normal_(generator=self.generator)

    def variants(self, tokens: int) -> int:
        """The number of variants of `tokens` tokens."""
        return self.longest // tokens

    def tables(self, tokens: int) -> list[Tensor]:
        """The page table of each variant, int32 [B, tokens / page_size]."""
        return list(self.table.split(tokens // PAGE_SIZE, 1)[: self.variants(tokens)])

    def lengths(self, tokens: int) -> Tensor:
        """Lengths, int32 [B], all `tokens`."""
        return torch.full((self.batch,), tokens, dtype=torch.int32)

    def side_by_side(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """A contiguous copy of the keys and values of each variant, [B, Hkv, tokens, D]."""
        return [
            (_gathered(self.keys, table), _gathered(self.values, table))
            for table in self.tables(tokens)
        ]

    def draws(self, size: int, count: int, lists: int) -> list[Tensor]:
        """Disjoint selections of `count` of `size` entries, int32 [B, lists, count], ascending.

        As in every selection, the newest entry is in each.
        """
        orders = torch.rand(self.batch, lists, size, generator=self.generator).argsort(-1).int()
        draws = [part.sort(-1).values for part in orders.split(count, -1)[: size // count]]
        for draw in draws:
            draw[..., -1] = size - 1
        return [draw.contiguous() for draw in draws]


def _gathered(stored: Tensor, table: Tensor) -> Tensor:
    return stored[table.long()].transpose(1, 2).flatten(2, 3)
