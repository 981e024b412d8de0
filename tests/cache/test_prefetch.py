"""Buffers of offloaded layers hold the layer's data for any selection, in any order of requests."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keyhole import kernels
from keyhole.cache import huge_pages
from keyhole.cache import pages as pages_module
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.cache.pages import PageCache
from keyhole.cache.prefetch import Prefetcher, Traffic
from keyhole.cache.resident_buffer import Resident, ResidentBuffer
from keyhole.cache.tiers import FileTier
from keyhole.errors import CapacityError
from keyhole.kernels import Selection
from keyhole.planner import buffer_tokens
from tests.effort import examples

SIZE, BUDGET, ROWS, GROUP = 4, 10, 3, 2
PLAIN = LayerLayout(num_kv_heads=2, key_dim=8, value_dim=6)
LATENT = LayerLayout(num_kv_heads=1, key_dim=10, value_dim=7, shared_values=True)
LAYERS = (PLAIN, LATENT, PLAIN, LATENT, PLAIN)
#: Relative to the largest number: the same numbers, summed in another order.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass
class Text:
    """A running sequence."""

    pages: list[int]
    length: int


class World:
    """A cache that offloads one layer after another while sequences start, grow and end."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, heads: int | None = None, *layers: LayerLayout
    ) -> None:
        geometry = Geometry(
            layers=layers or LAYERS,
            num_query_heads=4,
            page_size=SIZE,
            itemsize=dtype.itemsize,
        )
        self.cache = PageCache(geometry, 500, dtype=dtype, device=torch.device("cpu"))
        self.loads = Prefetcher(self.cache, num_rows=ROWS, token_budget=BUDGET, num_heads=heads)
        self.texts: dict[int, Text] = {}
        self.random = torch.Generator().manual_seed(0)
        self.tier = FileTier(tempfile.gettempdir())

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.cache.keys[0].dtype)

    def offload_next(self) -> None:
        """The last layer that is above, as SpeContext's algorithm 2 does."""
        above = [i for i in range(len(self.cache.keys)) if i not in self.cache.offloaded_layers]
        if above:
            self.loads.offload(above[-1], self.tier)

    def restore_last(self) -> None:
        """The layer that went down last, after pages have moved to the front."""
        numbers = self.cache.pack()
        for text in self.texts.values():
            text.pages = [numbers.get(page, page) for page in text.pages]
        self.cache.cut(self.cache.in_use)
        if self.cache.offloaded_layers:
            self.loads.restore(self.cache.offloaded_layers[0])

    def come(self, row: int, length: int) -> None:
        self.texts[row] = text = Text([], length)
        self.make_room(text)
        for layer in range(len(self.cache.keys)):
            self.write(layer, [(text, i) for i in range(length)])

    def leave(self, row: int) -> None:
        self.cache.release(self.texts.pop(row).pages)
        self.loads.reset(row)

    def make_room(self, text: Text) -> None:
        more = self.cache.allocate(-(-text.length // SIZE) - len(text.pages))
        assert more is not None
        text.pages += more

    def write(self, layer: int, places: list[tuple[Text, int]]) -> tuple[Tensor, Tensor | None]:
        """Random keys and values of these tokens, in the cache and returned."""
        layout = self.cache.geometry.layers[layer]
        slots = [text.pages[i // SIZE] * SIZE + i % SIZE for text, i in places]
        key = self.numbers(len(places), layout.num_kv_heads, layout.key_dim)
        value = None
        if not layout.shared_values:
            value = self.numbers(len(places), layout.num_kv_heads, layout.value_dim)
        values = None if value is None else self.cache.values[layer]
        kernels.append(self.cache.keys[layer], values, key, value, torch.tensor(slots))
        return key, value

    def begin(self, rows: list[int], *, recorded: bool = False) -> None:
        """Each of these sequences gets a token; nothing of it is written yet."""
        for row in rows:
            self.texts[row].length += 1
            self.make_room(self.texts[row])
        self.rows = rows
        width = max(len(self.texts[row].pages) for row in rows)
        table = [self.texts[row].pages for row in rows]
        self.table = torch.tensor([pages + [0] * (width - len(pages)) for pages in table]).int()
        self.lengths = torch.tensor([self.texts[row].length for row in rows]).int()
        operands = torch.tensor(rows), self.table, self.lengths
        self.loads.begin(*operands, recorded=recorded)

    def end(self) -> list[Traffic]:
        """What the step cost."""
        return self.loads.count(self.loads.end())

    def layer(self, layer: int, selection: Selection) -> None:
        """What attention does in a layer, and the oracle: rows, and the result of attending."""
        new = self.write(layer, [(self.texts[r], self.texts[r].length - 1) for r in self.rows])
        if layer not in self.loads:
            return
        resident = self.loads.wait(layer, selection)
        resident.append(*new)
        self.check_rows(layer, selection, resident)
        heads = resident.keys.shape[1]
        query = self.numbers(len(self.rows), heads * GROUP, resident.keys.shape[3])
        options: dict[str, Any] = {"scale": 0.3}
        found = kernels.attend((query, *resident.paged), selection=resident.selection, **options)
        pages = [x[layer].expand(-1, heads, -1, -1) for x in (self.cache.keys, self.cache.values)]
        paged = (query, *pages, self.table, self.lengths)
        wanted = kernels.attend(paged, selection=selection, **options)
        allowed = TOLERANCE[query.dtype] * max(1.0, float(wanted.abs().max()))
        assert (found.float() - wanted.float()).abs().max() <= allowed

    def check_rows(self, layer: int, selection: Selection, resident: Resident) -> None:
        """Every row in the buffers equals the offloaded layer's, and no selected row is missing."""
        unit = selection.unit
        entries = self.loads._buffers[layer].entries
        for b, row in enumerate(self.rows):
            text = self.texts[row]
            for head in range(resident.keys.shape[1]):
                own = head if selection.indices.shape[1] > 1 else 0
                selected = {e for e in selection.indices[b, own].tolist() if e >= 0}
                count = int(resident.selection.counts[b, head])
                slots = resident.selection.indices[b, head, :count].tolist()
                assert {int(entries[row, head, s]) for s in slots} == selected
                for slot, entry in enumerate(entries[row, head].tolist()):
                    for i in range(unit if entry >= 0 else 0):
                        if entry * unit + i < text.length:
                            self.check_row(layer, head, row, slot * unit + i, entry * unit + i)

    def check_row(self, layer: int, head: int, row: int, place: int, position: int) -> None:
        buffer = self.loads._buffers[layer]
        own = row * (buffer.num_tokens // SIZE) + place // SIZE, head, place % SIZE
        page = self.texts[row].pages[position // SIZE]
        below = page, head % self.cache.keys[layer].shape[1], position % SIZE
        assert torch.equal(buffer.keys[own], self.cache.keys[layer][below])
        assert torch.equal(buffer.values[own], self.cache.values[layer][below])

    def select(self, lists: list[list[list[int]]], unit: int) -> Selection:
        width = BUDGET // unit
        counts = torch.tensor([[len(entries) for entries in row] for row in lists]).int()
        padded = [[entries + [-1] * (width - len(entries)) for entries in row] for row in lists]
        return Selection(torch.tensor(padded).int(), counts, unit)


def draw_selection(data: st.DataObject, world: World, unit: int, heads: int) -> Selection:
    """The newest entry and some others."""
    lists = []
    for row in world.rows:
        newest = (world.texts[row].length - 1) // unit
        others = st.lists(st.integers(0, newest), max_size=BUDGET // unit - 1, unique=True)
        lists.append([sorted({*data.draw(others), newest}) for _ in range(heads)])
    return world.select(lists, unit)


@given(data=st.data(), dtype=st.sampled_from(tuple(TOLERANCE)))
@examples(120)
def test_resident_rows_are_those_of_the_lower_tier(data: st.DataObject, dtype: torch.dtype) -> None:
    """Sequences come and leave, the cache grows and is cut, layers go down and up meanwhile.

    Policies that choose before the step, in the layers, or otherwise than they had announced.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages_module, "_FIRST_PAGES", 2)
        world = World(dtype)
    last = len(LAYERS)
    unit = data.draw(st.sampled_from((1, SIZE)))
    for _ in range(data.draw(st.integers(1, 8))):
        for row in range(ROWS):
            if row not in world.texts and data.draw(st.booleans()):
                world.come(row, data.draw(st.integers(1, 30)))
            elif row in world.texts and data.draw(st.integers(0, 9)) == 0:
                world.leave(row)
        if data.draw(st.booleans()):
            world.offload_next()
        elif data.draw(st.integers(0, 2)) == 0:
            world.restore_last()
        if not world.texts:
            continue
        if data.draw(st.integers(0, 9)) == 0:
            unit = SIZE + 1 - unit
        running = sorted(world.texts)
        world.begin(data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True)))
        early = draw_selection(data, world, unit, 1)
        if data.draw(st.booleans()):
            world.loads.start(early, range(data.draw(st.integers(0, last)), last))
        for layer, layout in enumerate(LAYERS):
            own = data.draw(st.sampled_from(("early", "early", "own")))
            chosen = early
            if own == "own":
                chosen = draw_selection(data, world, unit, layout.num_kv_heads)
                early = chosen if chosen.indices.shape[1] == 1 else early
                # Some say so, to the layers after them.
                if data.draw(st.booleans()) and early is chosen:
                    world.loads.start(early, range(layer, last))
            world.layer(layer, chosen)
        assert len(world.end()) == len(world.rows)
    world.loads.close()


def small_world(*, layers: int = 2) -> World:
    """All layers are offloaded; one sequence of 20 tokens in row 1."""
    world = World(torch.float32, None, *[PLAIN] * layers)
    for _ in range(layers):
        world.offload_next()
    world.come(1, 20)
    return world


def step(world: World, tokens: list[int], unit: int = 1) -> Traffic:
    """A step in which all layers read these entries and the newest one."""
    world.begin([1])
    newest = (world.texts[1].length - 1) // unit
    selection = world.select([[sorted({*tokens, newest})]], unit)
    world.loads.start(selection, range(2))
    for layer in range(2):
        world.layer(layer, selection)
    (traffic,) = world.end()
    return traffic


def test_only_the_difference_moves_and_is_counted() -> None:
    world = small_world()
    heads, layers = 2, 2
    row = (8 + 6) * 4
    first = step(world, [0, 1, 2, 3, 4])
    assert (first.hits, first.misses) == (0, 5 * heads * layers)
    assert first.moved_bytes == first.misses * row
    assert first.hit_rate == 0.0
    # The token that was newest is an ordinary one now.
    second = step(world, [0, 2, 4, 6, 20])
    assert (second.hits, second.misses) == (3 * heads * layers, 2 * heads * layers)
    assert second.hit_rate == 0.6
    total = world.loads.total
    assert total.hits == second.hits
    assert total.misses == first.misses + second.misses
    assert total.stall_ms == pytest.approx(first.stall_ms + second.stall_ms)
    world.loads.close()


def test_whole_pages_are_copied_and_of_the_newest_its_tokens() -> None:
    world = small_world()
    lists = 2 * 2
    first = step(world, [1, 3], SIZE)  # 21 tokens: the newest page has only the new one
    assert (first.hits, first.misses) == (0, 2 * SIZE * lists)
    second = step(world, [1, 2], SIZE)
    assert (second.hits, second.misses) == (SIZE * lists, (SIZE + 1) * lists)
    world.loads.close()


def test_a_layer_that_was_resident_meanwhile_has_empty_buffers() -> None:
    world = small_world()
    step(world, [1, 2, 3])
    before = world.cache.moves + world.loads.moves
    world.loads.restore(1)
    assert world.loads.layers == world.cache.offloaded_layers == (0,)
    assert step(world, [1, 2, 3]).hits == 3 * 2  # of layer 0
    world.loads.offload(1, world.tier)
    again = step(world, [1, 2, 3])
    assert (again.hits, again.misses) == (3 * 2, 3 * 2)
    assert world.cache.moves + world.loads.moves == before + 2
    world.loads.close()


def test_moves_never_fall_when_a_buffer_goes() -> None:
    """Its cuts were forgotten with it, and a recording of before would have been repeated."""
    world = small_world()
    for unit in (1, SIZE, 1):
        step(world, [0], unit)
    assert world.loads.moves == 2 * 2
    world.loads.restore(0)
    assert world.loads.moves == 2 * 2
    world.loads.close()


def test_a_layer_that_cannot_become_resident_stays_offloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = small_world()
    step(world, [1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr("keyhole.cache.pages.huge_pages.new_empty", fails_once())
        with pytest.raises(CapacityError, match="could not be made resident again"):
            world.loads.restore(1)
    assert world.loads.layers == (0, 1)
    assert step(world, [1, 2, 3]).hits == 3 * 2
    world.loads.close()


def test_another_unit_begins_anew() -> None:
    world = small_world()
    step(world, [1, 2, 3])
    assert step(world, [1], SIZE).hits == 0
    assert step(world, [1], SIZE).hits == 2 * 2 * SIZE
    assert step(world, [4, 5]).hits == 0
    world.loads.close()


def test_a_row_that_was_reset_knows_nothing() -> None:
    world = small_world()
    step(world, [1, 2, 3])
    world.leave(1)
    world.come(1, 20)
    assert step(world, [1, 2, 3]).hits == 0
    world.loads.close()


def test_nothing_selected_has_no_hit_rate() -> None:
    assert Traffic().hit_rate is None
    assert Traffic(1, 2, 3, 4.0) + Traffic(1, 1, 1, 0.5) == Traffic(2, 3, 4, 4.5)


def test_each_query_head_may_have_a_list_of_its_own_over_shared_latents() -> None:
    world = World(torch.float32, 4, LATENT, LATENT)
    world.come(0, 25)
    world.offload_next()
    for _ in range(3):
        world.begin([0])
        newest = world.texts[0].length - 1
        selection = world.select([[[head, 5 + head, newest] for head in range(4)]], 1)
        for layer in range(2):
            world.layer(layer, selection)
        world.end()
    assert world.loads.total.hits == 2 * 4 * 2
    world.loads.close()


def test_a_budget_is_rounded_to_pages_with_one_more() -> None:
    assert [buffer_tokens(budget, 16) for budget in (1, 16, 17, 1024)] == [32, 32, 48, 1040]


def fails_once() -> Callable[..., Tensor]:
    """`huge_pages.new_empty`, the first time without memory."""
    real, calls = huge_pages.new_empty, iter(range(1000))

    def new_empty(like: Tensor, *shape: int, most: int = 0) -> Tensor:
        if next(calls) == 0:
            raise MemoryError
        return real(like, *shape, most=most)

    return new_empty


class Gate:
    """Copies that do not begin before they may."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.finished: list[str] = []
        load_missing = ResidentBuffer.load_missing

        def late(buffer: ResidentBuffer, *operands: Any) -> Resident:
            assert self.open.wait(60)
            resident = load_missing(buffer, *operands)
            self.finished.append(threading.current_thread().name)
            return resident

        patch.setattr(ResidentBuffer, "load_missing", late)

    def open_soon(self) -> None:
        threading.Timer(0.05, self.open.set).start()


def test_starting_does_not_wait_and_waiting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    world, gate = small_world(), Gate(monkeypatch)
    world.begin([1])
    selection = world.select([[[1, 2, 20]]], 1)
    world.loads.start(selection, [0, 1])
    assert gate.finished == []  # and yet we are here
    gate.open_soon()
    world.layer(0, selection)  # compares all rows
    world.layer(1, selection)
    assert [name.startswith("keyhole-prefetch") for name in gate.finished] == [True, True]
    assert world.end()[0].stall_ms > 0
    world.loads.close()


def test_what_is_recorded_is_launched_by_who_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture does not see other threads, so everything is loaded at once."""
    world, gate = small_world(), Gate(monkeypatch)
    gate.open.set()
    world.begin([1], recorded=True)
    selection = world.select([[[1, 2, 20]]], 1)
    world.loads.start(selection, [0, 1])
    assert gate.finished == [threading.current_thread().name] * 2
    world.layer(0, selection)  # compares all rows
    (traffic,) = world.end()  # includes the load without a wait
    assert (traffic.misses, traffic.stall_ms) == (2 * 2 * 2, 0.0)
    assert len(gate.finished) == 2
    world.loads.close()


def test_a_recording_that_came_to_no_end_leaves_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = small_world()
    world.begin([1], recorded=True)
    announced = world.select([[[1, 2, 20]]], 1)
    world.loads.start(announced, [0, 1])
    waited: list[int] = []
    monkeypatch.setattr(world.loads, "_finish", waited.append)
    world.begin([1])
    assert waited == []
    assert world.loads._loads == {}
    monkeypatch.undo()
    world.loads.close()


@pytest.mark.parametrize("what", ["begin", "reset", "end", "close"])
def test_a_copy_without_a_wait_ends_before_its_buffer_is_reused(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    world, gate = small_world(), Gate(monkeypatch)
    world.begin([1])
    world.loads.start(world.select([[[1, 2, 20]]], 1), [0, 1])
    gate.open_soon()
    if what == "begin":
        world.begin([1])
    elif what == "reset":
        world.loads.reset(1)
    elif what == "end":
        assert world.end()[0].misses == 2 * 2 * 2
    else:
        world.loads.close()
    assert len(gate.finished) == 2


def test_a_choice_other_than_announced_is_loaded_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world, gate = small_world(), Gate(monkeypatch)
    world.begin([1])
    announced, chosen = (world.select([[[i, 20]]], 1) for i in (3, 4))
    world.loads.start(announced, [0, 1])
    gate.open_soon()
    world.layer(0, chosen)
    world.layer(1, announced)
    assert len(gate.finished) == 3
    world.loads.close()


def test_a_failed_copy_raises_in_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = small_world()
    load_missing = ResidentBuffer.load_missing

    def fails(*_: Any) -> Resident:
        raise MemoryError("no room")

    monkeypatch.setattr(ResidentBuffer, "load_missing", fails)
    world.begin([1])
    selection = world.select([[[1, 2, 20]]], 1)
    world.loads.start(selection, [0, 1])
    with pytest.raises(MemoryError, match="no room"):
        world.loads.wait(0, selection)
    assert isinstance(world.loads._loads[1].result.exception(60), MemoryError)
    # The step is given up; the next one begins as if nothing had been.
    monkeypatch.setattr(ResidentBuffer, "load_missing", load_missing)
    assert step(world, [1, 2]).misses > 0
    world.loads.close()


def test_layers_with_buffers_are_known() -> None:
    world = World()
    assert world.loads.layers == ()
    world.offload_next()
    world.offload_next()
    assert world.loads.layers == world.cache.offloaded_layers == (3, 4)
    assert 4 in world.loads
    assert 2 not in world.loads
    world.loads.close()
