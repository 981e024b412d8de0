"""Memory planning: memory predicted from shapes, and the lengths at which layers are offloaded.

SpeContext (2025), section 6. Eq. 6 is the memory with every layer's keys and values resident,
Eq. 7 with some layers offloaded (RAM or disk), where each keeps a resident buffer of `token_budget`
tokens; Eq. 8 minimises the number of offloaded layers. `MemoryModel.thresholds` is Algorithm 1,
`MemoryPlan` answers Algorithm 2 while sequences grow, and its reverse when sequences have ended.
All sizes are bytes.

Differences from the paper: every constant is a named term, so that it can be that of our own cache
(`keyhole.cache.layout.memory_model`: weights count once, repeat_kv is never done, and the head
keeps keys only, as side data of a page) or the paper's (`paper`); layers may differ, and those with
a sliding window stay resident; tokens come in pages; the data that selection needs stays resident.

Erratum: Algorithm 1 drops the factor 4 in front of i B R H D. Eq. 7 has it, and so does this
module.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from keyhole.config import require_counts
from keyhole.errors import CapacityError

#: "Runtime memory typically amounts to around 20% to 30% of the model size" (section 6.2).
_PAPER_WEIGHT_FACTOR = Fraction(13, 10)
#: Bytes of a key and its value in fp16, per dimension of the head: the 4 of Eq. 6.
_PAPER_PAIR_BYTES = 4
#: One in this many of the pages that fit stays free when a layer becomes resident again, so that it
#: is not offloaded again after a few steps.
_FREE_PART = 8


def buffer_tokens(token_budget: int, page_size: int) -> int:
    """Tokens of an offloaded layer's buffer: the budget in whole pages, plus one page."""
    return (-(-token_budget // page_size) + 1) * page_size


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """The memory of one layer.

    token_bytes: keys and values of a token, all KV heads. slot_bytes: a token's place in the buffer
    that the layer keeps resident, per request, while offloaded. movable: whether it may be
    offloaded at all.
    """

    token_bytes: int
    slot_bytes: int
    movable: bool = True


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Resident bytes, term by term, for `requests` sequences of one length.

    layers: L entries. requests: R. page_size: tokens that are kept together. token_budget: B;
    buffer_tokens: the resident places of an offloaded layer.
    weight_bytes, head_weight_bytes: the model and its retrieval head, M_O and M_D of Eq. 6, which
    are multiplied by `weight_factor`. head_token_bytes: the head's own keys of a token.
    side_page_bytes: side data of a page, in all layers. list_page_bytes: what a page and its tokens
    take beside the tensors (ids, page numbers, the index of prefixes), and the scores of its tokens
    in a step. request_bytes: per request, independent of its length. staging_bytes: buffers for
    copies between the tiers, allocated while a layer is offloaded. document_bytes: stored documents
    that stay in the cache's memory. gathered_token_bytes: where prompts read a copy of a layer's
    keys and values, as on a GPU, that of a token; one request may have all tokens. runtime_bytes:
    the rest, such as a step's activations or a CUDA context.
    """

    layers: tuple[LayerMemory, ...]
    requests: int
    token_budget: int
    buffer_tokens: int
    weight_bytes: int
    page_size: int = 1
    head_weight_bytes: int = 0
    weight_factor: Fraction = Fraction(1)
    head_token_bytes: int = 0
    side_page_bytes: int = 0
    list_page_bytes: int = 0
    request_bytes: int = 0
    staging_bytes: int = 0
    document_bytes: int = 0
    gathered_token_bytes: int = 0
    runtime_bytes: int = 0

    def __post_init__(self) -> None:
        require_counts(self, "requests", "token_budget")
        # Otherwise an infinite sequence would fit once every layer is offloaded.
        assert self.page_bytes(len(self.order)) > 0, "a page must cost resident bytes"

    @classmethod
    def paper(
        cls,
        *,
        model_bytes: int,
        head_bytes: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        groups: int,
        requests: int,
        token_budget: int,
    ) -> MemoryModel:
        """Eq. 6 and 7 as they stand, in fp16.

        model_bytes, head_bytes, num_layers, num_kv_heads, head_dim, groups, requests, token_budget
        are M_O, M_D, L, H, D, alpha, R, B of table 1. The head's layer counts as keys and values,
        and `groups` times more for its repeat_kv buffer; 0 where there is none.
        """
        row = _PAPER_PAIR_BYTES * num_kv_heads * head_dim
        return cls(
            layers=(LayerMemory(token_bytes=row, slot_bytes=row),) * num_layers,
            requests=requests,
            token_budget=token_budget,
            buffer_tokens=token_budget,
            weight_bytes=model_bytes,
            head_weight_bytes=head_bytes,
            weight_factor=_PAPER_WEIGHT_FACTOR,
            head_token_bytes=(1 + groups) * row,
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Layers in the order in which they are offloaded: the last first (Algorithm 2)."""
        return tuple(i for i in reversed(range(len(self.layers))) if self.layers[i].movable)

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in all layers."""
        return self._token_bytes(0)

    @property
    def beside_bytes(self) -> int:
        """Memory besides the KV cache: weights and a step's activations."""
        terms = self.terms(0, 0)
        return terms["weights"] + terms["requests"] + terms["runtime"]

    def pages(self, length: int) -> int:
        """Pages of all requests at this length."""
        return self.requests * -(-length // self.page_size)

    def terms(self, pages: int, offloaded: int) -> dict[str, int]:
        """Resident bytes, by name, with `pages` pages and the first of `order` offloaded."""
        slots = sum(self.layers[i].slot_bytes for i in self.order[:offloaded])
        tokens = pages * self.page_size
        weights = self.weight_factor * (self.weight_bytes + self.head_weight_bytes)
        return {
            "weights": math.ceil(weights),
            "keys_values": tokens * self._token_bytes(offloaded),
            "head_keys": tokens * self.head_token_bytes,
            "side_data": pages * self.side_page_bytes,
            "lists": pages * self.list_page_bytes,
            "gathered": tokens * self.gathered_token_bytes,
            "buffers": self.requests * self.buffer_tokens * slots,
            "requests": self.requests * self.request_bytes,
            "staging": self.staging_bytes if offloaded else 0,
            "documents": self.document_bytes,
            "runtime": self.runtime_bytes,
        }

    def cache_bytes(self, pages: int, offloaded: int) -> int:
        """The terms of the KV cache: keys and values, what goes with their pages, buffers, staging,
        documents.
        """
        return sum(self.terms(pages, offloaded).values()) - self.beside_bytes

    def bytes(self, length: int, offloaded: int = 0) -> int:
        """Resident bytes for sequences of `length` tokens with `offloaded` layers offloaded.

        Eq. 6 where that is 0, else Eq. 7.
        """
        return sum(self.terms(self.pages(length), offloaded).values())

    def offloaded_bytes(self, length: int, offloaded: int) -> int:
        """Offloaded bytes: all keys and values of the layers that are offloaded."""
        row = self.token_bytes - self._token_bytes(offloaded)
        return self.pages(length) * self.page_size * row

    def capacity(self, memory: int, offloaded: int) -> int:
        """The most pages, of all requests together, that fit into `memory`; 0 if none does."""
        left = memory - sum(self.terms(0, offloaded).values())
        return max(0, left // self.page_bytes(offloaded))

    def thresholds(self, memory: int) -> tuple[int, ...]:
        """S_0 to S_L: the longest sequences that fit with i layers offloaded; 0 where no page does.

        They never fall where a layer of S_0 tokens is larger than its buffer (and staging, if any,
        fits). Where it is smaller, each is less than the one before: offloading does not help, and
        S_0 is the longest length. Where fewer than L layers may be offloaded, the last are equal.
        """
        found = [
            self.capacity(memory, i) // self.requests * self.page_size
            for i in range(len(self.order) + 1)
        ]
        return (*found, *found[-1:] * (len(self.layers) - len(self.order)))

    def offloaded(self, length: int, memory: int) -> int:
        """The fewest layers that must be offloaded for sequences of `length` tokens (Eq. 8).

        CapacityError if they do not fit with any number of offloaded layers.
        """
        return MemoryPlan(model=self, memory=memory).offloaded(length)

    def largest_batch(self, length: int, memory: int, offloaded: int | None = None) -> int:
        """The most requests of `length` tokens that fit with this many offloaded layers; 0: none.

        offloaded: None takes the number of layers that fits most.
        """
        one = dataclasses.replace(self, requests=1)
        places = range(len(self.order) + 1) if offloaded is None else [offloaded]
        return max(one._batch(length, memory, i) for i in places)

    def _batch(self, length: int, memory: int, offloaded: int) -> int:
        shared = self.terms(0, offloaded)
        shared |= {"buffers": 0, "requests": 0}
        fixed = sum(shared.values())
        return max(0, (memory - fixed) // (self.bytes(length, offloaded) - fixed))

    def _token_bytes(self, offloaded: int) -> int:
        """Keys and values of a token in the resident layers."""
        down = sum(self.layers[i].token_bytes for i in self.order[:offloaded])
        return sum(layer.token_bytes for layer in self.layers) - down

    def page_bytes(self, offloaded: int) -> int:
        """Resident bytes of a page more, of any request."""
        tokens = self._token_bytes(offloaded) + self.head_token_bytes + self.gathered_token_bytes
        return self.page_size * tokens + self.side_page_bytes + self.list_page_bytes


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A plan's row for one length.

    offloaded: number of layers; None if the sequences do not fit. resident_bytes, offloaded_bytes:
    resident and offloaded, None with it. largest_batch: requests of this length that fit, and that
    fit with all layers resident.
    """

    length: int
    offloaded: int | None
    resident_bytes: int | None
    offloaded_bytes: int | None
    largest_batch: int
    largest_batch_above: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A memory model with a given memory, queried by Algorithm 2 before each step.

    memory: bytes for all terms of the model, weights included; `for_cache` takes those for the KV
    cache alone. CapacityError if the memory does not hold the weights and a step's activations.
    """

    model: MemoryModel
    memory: int

    def __post_init__(self) -> None:
        terms = self.model.terms(0, 0)
        need = sum(terms.values())
        if need > self.memory:
            raise CapacityError(
                f"the weights need {_mib(terms['weights'])}, and with the memory of a step "
                f"{_mib(need)}, but the limit is {_mib(self.memory)}; raise it, or use a smaller "
                "dtype or model"
            )

    @classmethod
    def for_cache(cls, model: MemoryModel, memory: int) -> MemoryPlan:
        """The plan for this many bytes of KV cache, besides weights and activations."""
        return cls(model=model, memory=memory + model.beside_bytes)

    @property
    def cache_memory(self) -> int:
        """Bytes of `memory` that are left for the KV cache."""
        return self.memory - self.model.beside_bytes

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """Pages of all requests that fit with 0, 1, ... layers offloaded."""
        places = range(len(self.model.order) + 1)
        return tuple(self.model.capacity(self.memory, i) for i in places)

    @cached_property
    def thresholds(self) -> tuple[int, ...]:
        """S_0 to S_L (`MemoryModel.thresholds`)."""
        return self.model.thresholds(self.memory)

    def offloaded(self, length: int) -> int:
        """The fewest layers to offload for requests that all have `length` tokens."""
        found = self.offloaded_for(self.model.pages(length))
        if found is None:
            model = self.model
            count = model.requests
            places = range(len(model.order) + 1)
            need, best = min((model.bytes(length, i), i) for i in places)
            raise CapacityError(
                f"{count} requests of {length} tokens need {_mib(need)} with {best} layers "
                f"offloaded, but memory is {_mib(self.memory)}; lower requests, length or "
                "token_budget"
            )
        return found

    def offloaded_for(self, pages: int) -> int | None:
        """The fewest layers to offload for requests with `pages` pages in all; None: too many.

        Algorithm 2 is: before a step that needs a page more, while fewer layers are offloaded,
        offload the next of `model.order`.
        """
        found = bisect.bisect_left(self._longest, pages)
        # Where offloading does not help, capacities fall, and the largest so far applies.
        return found if found < len(self._longest) else None

    def still_offloaded(self, pages: int, growth: int, offloaded: int, least: int = 0) -> int:
        """How many of the `offloaded` layers stay offloaded once at most `pages` pages are needed.

        growth: pages that may still be needed. Layers become resident one by one, the last
        offloaded first, as long as the pages fit, together with the growth or an eighth of the
        capacity, whichever is less. least: layers that stay offloaded in any case.
        """
        while offloaded > least:
            most = self.capacities[offloaded - 1]
            if pages + min(growth, most // _FREE_PART) > most:
                break
            offloaded -= 1
        return offloaded

    def rows(self, lengths: Iterable[int]) -> tuple[PlanRow, ...]:
        """A row per length."""
        return tuple(self._row(length) for length in lengths)

    def as_dict(self, lengths: Iterable[int]) -> dict[str, Any]:
        """For JSON: thresholds, the order of offloading, every term, and a row per length."""
        model = self.model
        names = [f.name for f in dataclasses.fields(model) if f.name != "layers"]
        return {
            "thresholds": list(self.thresholds),
            "total_memory": self.memory,
            "memory": self.cache_memory,
            "num_layers": len(model.layers),
            "order": list(model.order),
            **{name: getattr(model, name) for name in names},
            "weight_factor": float(model.weight_factor),
            "layers": [dataclasses.asdict(layer) for layer in model.layers],
            "lengths": [dataclasses.asdict(row) for row in self.rows(lengths)],
        }

    @cached_property
    def _longest(self) -> tuple[int, ...]:
        """For each number of offloaded layers, the most pages that fit with it or with fewer."""
        return tuple(max(self.capacities[: i + 1]) for i in range(len(self.capacities)))

    def _row(self, length: int) -> PlanRow:
        model = self.model
        found = self.offloaded_for(model.pages(length))
        return PlanRow(
            length=length,
            offloaded=found,
            resident_bytes=None if found is None else model.bytes(length, found),
            offloaded_bytes=None if found is None else model.offloaded_bytes(length, found),
            largest_batch=model.largest_batch(length, self.memory),
            largest_batch_above=model.largest_batch(length, self.memory, 0),
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
