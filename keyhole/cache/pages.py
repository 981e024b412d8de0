"""The paged KV cache: pages that sequences share by reference count, with copy-on-write.

A page holds `page_size` tokens in every layer at once, so one page number serves all layers. Per
layer there is one tensor in which a head's page of keys is followed by its page of values: data
read together is adjacent, which speeds up selected tokens most (benchmarks/LOG.md). The policy's
side data has separate tensors. Tensors grow as pages are used, up to `max_pages`, on a CPU
without being copied (`huge_pages`). A page has a number first and memory later, so that a step can
be scheduled before anything is moved for it. Keys and values of a layer can be offloaded (to RAM or
disk), where they are read and grow as before, and become resident again once the tensors have been
shrunk to the pages in use.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from keyhole.cache import huge_pages
from keyhole.cache.layout import Geometry, LayerLayout, bytes_per_page
from keyhole.cache.tiers import BLOCK_BYTES, Store, Tier, discard, move
from keyhole.errors import CapacityError, is_out_of_memory
from keyhole.kernels.reference.quantised import STORED

# Pages of the first allocation; each growth doubles, so a page is moved O(1) times on average.
_FIRST_PAGES = 64


class Room(Protocol):
    """Grants growth of a cache's tensors, and offloads layers for it."""

    @property
    def pages(self) -> int:
        """The most pages with every layer on its current tier."""
        ...

    def allowed(self, least: int, wanted: int) -> int:
        """How many of `wanted` pages are allowed, at least `least`, once `make` was called.

        CapacityError if there can never be so many.
        """
        ...

    def make(self, pages: int) -> None:
        """Frees memory for this many pages."""
        ...


class PageCache:
    """Pages of keys and values of all layers, and their reference counts.

    keys, values: per layer, [capacity, Hkv, page_size, D or Dv], views into one tensor; with shared
        values (MLA) `values` is a view into `keys`. In 8 bits rows have the bytes of their scale
        too (kernels/reference/quantised.py).
    data: per layer, the policy's side data by name, [capacity, ...].
    common: side data that belongs to no layer, in the same form.
    peak_pages: the most pages that were in use at once.
    released: how many references to pages have been released so far.
    reserved: pages of its limit whose memory something else takes.
    provided: how many pages have memory, the first ones by number.
    may_grow: False within `without_growth`.
    moves: how often tensors have been replaced, by a resize or a change of tier.
    empty: a tensor without numbers, of the model's dtype and the resident layers' device.
    empty_rows: the same, of the dtype in which keys and values are stored.
    room: grants growth of the tensors; None: they may grow to `max_pages`.
    device: of `common`, and of all layers unless `layer_devices` has one for each.
    """

    def __init__(
        self,
        geometry: Geometry,
        max_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        page_data: Sequence[Mapping[str, tuple[int, ...]]] | None = None,
        common: Mapping[str, tuple[int, ...]] | None = None,
        layer_devices: Sequence[torch.device] | None = None,
    ) -> None:
        self.geometry, self.page_size = geometry, geometry.page_size
        self.max_pages = max_pages
        self.peak_pages = self.released = self.moves = self.reserved = self.provided = 0
        self.may_grow = True
        self.room: Room | None = None
        self.device, self.layer_devices = device, layer_devices
        self._shapes = page_data or [{} for _ in geometry.layers]
        self._common_shapes = common or {}
        self._refs = array("i")
        # Of each page, the number of its last allocation or move.
        self._stamps = array("q")
        self._changes = itertools.count(1)
        self._free = array("i")
        self._aside: int | None = None
        self._stores: dict[int, Store] = {}  # offloaded layers
        self.empty = empty = torch.empty(0, dtype=dtype, device=device)
        self.empty_rows = empty.to(STORED.get(geometry.kv_dtype, dtype))
        places = [self.place(layer) for layer in range(geometry.num_layers)]
        self._pages = [
            self.empty_rows.new_empty(
                0, layout.num_kv_heads, self.page_size * layout.numbers_per_head, device=place
            )
            for layout, place in zip(geometry.layers, places, strict=True)
        ]
        self.keys, self.values = self._views()
        self.data = [
            {name: empty.new_empty(0, *shape, device=place) for name, shape in shapes.items()}
            for shapes, place in zip(self._shapes, places, strict=True)
        ]
        self.common = {
            name: empty.new_empty(0, *shape) for name, shape in self._common_shapes.items()
        }

    def place(self, layer: int) -> torch.device:
        """The device of a layer."""
        return self.device if self.layer_devices is None else self.layer_devices[layer]

    @property
    def capacity(self) -> int:
        """Pages that have a number: those that the tensors hold, after `provide`."""
        return len(self._refs)

    @property
    def available(self) -> int:
        """Pages that can still be allocated."""
        return len(self._free) + self._most - self.capacity

    @property
    def at_hand(self) -> int:
        """Pages that can be allocated with every layer on its current tier."""
        most = self._most
        if self.room is not None:
            most = min(most, self.room.pages - self.reserved)
        return len(self._free) + max(0, most - self.capacity)

    @property
    def in_use(self) -> int:
        """Pages with a reference, and reserved ones."""
        return self.capacity - len(self._free)

    @property
    def num_aside(self) -> int:
        """Reserved pages."""
        return int(self._aside is not None)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys, values and side data of all layers."""
        return bytes_per_page(self.geometry, [*self._shapes, self._common_shapes])

    @property
    def offloaded_layers(self) -> tuple[int, ...]:
        """Layers whose keys and values are offloaded."""
        return tuple(sorted(self._stores))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the offloaded tensors."""
        return sum(self._pages[layer].nbytes for layer in self._stores)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the resident tensors: keys, values and all side data."""
        return sum(tensor.nbytes for tensor in self._tensors()) - self.offloaded_bytes

    def scattered(self, layer: int) -> tuple[Tensor, Tensor]:
        """As `keys` and `values` of an offloaded layer, for reads of few tokens at a time."""
        pages, layout = self._stores[layer].scattered, self.geometry.layers[layer]
        return keys_and_values(pages, layout, self.page_size)

    def offload_layer(self, layer: int, tier: Tier) -> None:
        """Moves keys and values of a layer to `tier`; side data stays. Not while a step runs.

        CapacityError or ConfigError, with nothing changed, if they cannot be stored there.
        """
        assert layer not in self._stores, f"layer {layer} is there already"
        resident = self._pages[layer]
        store = tier.store(resident)
        offloaded = store.resized(len(resident))
        move(resident, offloaded)
        self.moves += 1
        self._pages[layer], self._stores[layer] = offloaded, store
        self.keys, self.values = self._views()

    def make_resident(self, layer: int) -> None:
        """Makes an offloaded layer resident again. Not while a step runs.

        Frees its offloaded memory. CapacityError, with nothing changed, if there is no memory for
        the current number of pages.
        """
        offloaded = self._pages[layer]
        self._settle()
        with _no_room("an offloaded layer could not be made resident again"):
            shape = self.capacity, *offloaded.shape[1:]
            resident = huge_pages.new_empty(self.empty_rows, *shape, most=self._most)
        used = self._past_last
        resident[:used] = offloaded[:used]
        self.moves += 1
        del self._stores[layer], offloaded
        self._pages[layer] = resident
        self.keys, self.values = self._views()

    def pack(self) -> dict[int, int]:
        """Moves pages until those in use are the first ones. Not while a step runs.

        Returns old number -> new number of the pages that moved; page tables must be renumbered.
        """
        used = [page for page, count in enumerate(self._refs) if count]
        moved = [page for page in used if page >= len(used)]
        holes = [page for page in range(len(used)) if not self._refs[page]]
        numbers = dict(zip(moved, holes, strict=True))
        if not numbers:
            return numbers
        self._settle()
        for tensor in self._tensors():
            _copy_pages(tensor, moved, holes)
        for page, other in numbers.items():
            self._refs[other], self._refs[page] = self._refs[page], 0
            self._stamps[other] = next(self._changes)
        if self._aside is not None:
            self._aside = numbers.get(self._aside, self._aside)
        self._free = self._listed_free()
        self.moves += 1
        return numbers

    def cut(self, count: int) -> None:
        """Frees the resident memory of all except the first `count` pages.

        The other pages must be unused (call `pack` first), and no step may run. Systems that cannot
        free part of a tensor get smaller copies, tensor by tensor. CapacityError if there is no
        memory for a copy; the remaining tensors then keep their size.
        """
        used = self._past_last
        assert used <= count <= self.capacity, f"page {used - 1} is in use"
        self.moves += 1
        self._settle()
        self._forget_after(count)
        with _no_room("the KV cache could not be made smaller"):
            for layer in range(self.geometry.num_layers):
                if layer not in self._stores:
                    self._pages[layer] = _cut(self._pages[layer], count, used)
                    self.keys, self.values = self._views()  # drops the larger tensor
            for data in (*self.data, self.common):
                for name, tensor in data.items():
                    data[name] = _cut(tensor, count, used)

    def allocate(self, count: int, *, leave: int = 0) -> list[int] | None:
        """`count` pages with one reference each; None, with nothing changed, if too few are left.

        CapacityError, with nothing changed, if there is no memory for them. leave: up to this many
        pages stay free for later calls, if there is memory: those whose memory the system has most
        likely provided already, because they were in use, or follow pages in use.
        """
        pages = self.assign(count, leave=leave)
        try:
            self.provide()
        except BaseException as error:
            self.release(pages or ())
            self.retract()
            if not isinstance(error, CapacityError):
                raise
            with self.without_growth():
                pages = self.assign(count)
            if pages is None:
                raise
            self.provide()
        return pages

    def assign(self, count: int, *, leave: int = 0) -> list[int] | None:
        """As `allocate`, but only the numbers of the pages, which have memory after `provide`."""
        if count > self.available:
            return None
        # If layers can be offloaded, growth may offload one, so only what is needed is added.
        wanted = min(count + leave, self.available) if self.room is None else count
        while len(self._free) < wanted:
            self._number(self.capacity + wanted - len(self._free))
        end = len(self._free) - min(leave, len(self._free) - count)
        pages = self._free[end - count : end][::-1].tolist()
        del self._free[end - count : end]
        for page in pages:
            self._refs[page], self._stamps[page] = 1, next(self._changes)
        return pages

    def provide(self) -> None:
        """Memory for all pages that have a number. Not while a step runs.

        May offload layers. CapacityError if there is no memory; call `retract` then.
        """
        if self.capacity > self.provided:
            self._grow()
        used = self.capacity - len(self._free) - (self._aside is not None)
        self.peak_pages = max(self.peak_pages, used)

    def retract(self) -> None:
        """Takes back the numbers of unused pages without memory, which are the last ones."""
        self._forget_after(max(self.provided, self._past_last))

    @contextmanager
    def without_growth(self) -> Iterator[None]:
        """Within it there are no more pages than now."""
        before, self.may_grow = self.may_grow, False
        try:
            yield
        finally:
            self.may_grow = before

    def set_aside(self) -> int | None:
        """A reserved page of zeros, for the padding rows of a step.

        It is reserved once, for good, and `max_pages` no longer counts it. None if no page is left,
        or none would be left after it.
        """
        if self._aside is None and self.max_pages > 1:
            peak = self.peak_pages
            for page in self.allocate(1) or ():
                for tensor in self._tensors():
                    tensor[page] = 0
                self._aside, self.peak_pages = page, peak
                self.max_pages -= 1
        return self._aside

    def reserve(self, count: int) -> bool:
        """Takes `count` pages, instead of those taken before, from the limit.

        For memory that grows beside the pages. Returns False, with nothing changed, if sequences
        need them.
        """
        if count - self.reserved > self.available:
            return False
        self.reserved = count
        return True

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free and cannot be shared"
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops a reference of each page; a page without references is free."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is already free"
            self._refs[page] -= 1
            self.released += 1
            if self._refs[page] == 0:
                self._free.append(page)

    def references(self, page: int) -> int:
        """The number of references to this page."""
        return self._refs[page]

    def stamp(self, page: int) -> int:
        """A number that identifies the page until it is freed or moved; -1: it is free."""
        held = page < len(self._refs) and self._refs[page] > 0
        return self._stamps[page] if held else -1

    def writable(self, page: int) -> int | None:
        """A page with the same contents that only the caller holds: the page itself, or a copy.

        The caller's reference moves to the copy. None (nothing changed) if no page is left.
        """
        if self._refs[page] == 1:
            return page
        fresh = self.allocate(1)
        if fresh is None:
            return None
        self.copy([page], fresh)
        self.release([page])
        return fresh[0]

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies the pages `source` to the pages `target`, side data included."""
        self._settle()
        for tensor in self._tensors():
            tensor[list(target)] = tensor[list(source)]

    def content(self, pages: Sequence[int]) -> list[Tensor]:
        """Keys and values of some pages, a copy per layer, for `write`."""
        self._settle()
        return [tensor[list(pages)] for tensor in self._pages]

    def write(self, pages: Sequence[int], content: Sequence[Tensor]) -> None:
        """Writes into pages what `content` returned, for this or another cache."""
        self._settle()
        for tensor, layer in zip(self._pages, content, strict=True):
            tensor[list(pages)] = layer.to(tensor.device)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Asserts that each page has as many references as `holders` list it; the rest is free."""
        held = Counter(page for pages in holders for page in pages)
        if self._aside is not None:
            held[self._aside] += 1
        for page, count in enumerate(self._refs):
            assert count == held[page], (
                f"page {page} has {count} references, held {held[page]} times"
            )
        free = sorted(self._free)
        assert free == [page for page, count in enumerate(self._refs) if count == 0], "free list"

    def _settle(self) -> None:
        """Syncs before the host accesses offloaded pages that a GPU may still write."""
        if self._stores and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _tensors(self) -> Iterable[Tensor]:
        for pages, data in zip(self._pages, self.data, strict=True):
            yield pages
            yield from data.values()
        yield from self.common.values()

    def _views(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of all layers."""
        views = [
            keys_and_values(pages, layout, self.page_size)
            for pages, layout in zip(self._pages, self.geometry.layers, strict=True)
        ]
        return [keys for keys, _ in views], [values for _, values in views]

    def _forget_after(self, count: int) -> None:
        """Forgets all pages but the first `count`; the others must be unused."""
        del self._refs[count:], self._stamps[count:]
        self._free = self._listed_free()
        self.provided = min(self.provided, count)

    def _listed_free(self) -> array[int]:
        """Pages without a reference, in descending order; allocation pops from the end."""
        return array("i", (page for page in reversed(range(self.capacity)) if not self._refs[page]))

    @property
    def _past_last(self) -> int:
        """One more than the number of the last page in use."""
        return max((page + 1 for page, count in enumerate(self._refs) if count), default=0)

    @property
    def _most(self) -> int:
        """The most pages that the tensors may hold."""
        if not self.may_grow:
            return self.capacity
        return self.max_pages + (self._aside is not None) - self.reserved

    def _number(self, least: int) -> None:
        """Numbers more pages: twice as many as there are, at least `least` if all may be."""
        capacity = min(self._most, max(_FIRST_PAGES, 2 * self.capacity))
        if self.room is not None:
            least, others = min(least, capacity), self.reserved
            capacity = self.room.allowed(least + others, capacity + others) - others
        # New pages come last: the memory of older ones has been provided already, or is provided
        # layer by layer.
        self._free[:0] = array("i", range(capacity - 1, self.capacity - 1, -1))
        more = capacity - self.capacity
        self._refs.extend(array("i", [0]) * more)
        self._stamps.extend(array("q", [0]) * more)

    def _grow(self) -> None:
        """Enlarges one tensor at a time, so that at most one exists twice during its copy."""
        self.moves += 1
        self._settle()
        capacity = self.capacity
        need = capacity * self.page_bytes / 2**20
        with _no_room(
            f"the KV cache could not grow to {need:.0f} MiB ({capacity} pages of "
            f"{self.page_size} tokens); set memory= to less, with offload= to a folder for the "
            "rest (and a policy that selects), or lower max_batch or max_length"
        ):
            if self.room is not None:
                self.room.make(capacity + self.reserved)
            for layer in range(self.geometry.num_layers):
                if layer in self._stores:
                    larger = self._stores[layer].resized(capacity)
                else:
                    larger = huge_pages.enlarged(self._pages[layer], capacity, self._most)
                self._pages[layer] = larger
                self.keys, self.values = self._views()  # let go of the smaller tensor
            for data in (*self.data, self.common):
                for name, tensor in data.items():
                    data[name] = huge_pages.enlarged(tensor, capacity, self._most)
        self.provided = capacity


def keys_and_values(pages: Tensor, layout: LayerLayout, page_size: int) -> tuple[Tensor, Tensor]:
    """Pages [P, Hkv, page_size * numbers_per_head] as keys [P, Hkv, page_size, D] and values.

    Views: every head's keys, then its values, if those are not part of the keys (MLA).
    """
    end = page_size * layout.key_row
    keys = pages[..., :end].unflatten(-1, (page_size, layout.key_row))
    if layout.shared_values:
        return keys, keys[..., : layout.value_dim]
    return keys, pages[..., end:].unflatten(-1, (page_size, layout.value_row))


@contextmanager
def _no_room(message: str) -> Iterator[None]:
    """Turns an out-of-memory error into a CapacityError with this message."""
    try:
        yield
    except CapacityError:  # of the offload tier, whose message is more specific
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(message) from error


def _copy_pages(tensor: Tensor, source: list[int], target: list[int]) -> None:
    """Copies pages within a tensor, a few at a time, to bound the temporary copy."""
    step = max(1, BLOCK_BYTES // max(1, tensor[:1].nbytes))
    for start in range(0, len(source), step):
        end = start + step
        tensor[target[start:end]] = tensor[source[start:end]]


def _cut(tensor: Tensor, count: int, used: int) -> Tensor:
    """The first `count` pages, without the memory of the others; the first `used` keep contents."""
    if tensor.shape[0] <= count:
        return tensor
    if huge_pages.is_lazy(tensor):
        discard(tensor[used:])
        return tensor[:count]
    smaller = huge_pages.new_empty(tensor, count, *tensor.shape[1:])
    discard(tensor[used:])
    move(tensor[:used], smaller[:used])
    return smaller
