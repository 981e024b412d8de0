"""States after cached prefixes: found by their tokens, the least recently used go first."""

from __future__ import annotations

import pytest
import torch

from keyhole.cache.recurrent_state import LayerState, RecurrentState, StateSnapshots

PAGE = 4
TOKENS = list(range(20))


def made(num_slots: int = 2, num_snapshots: int = 2) -> tuple[RecurrentState, StateSnapshots]:
    layers = [{("conv", 0): torch.zeros(1, 3)}, {("recurrent", 0): torch.zeros(1, 2, 2)}]
    state = RecurrentState(layers, num_slots, num_snapshots)
    return state, StateSnapshots(state, PAGE)


def fill(state: RecurrentState, slot: int, value: float) -> None:
    for layer in range(2):
        found = state.read(layer, torch.tensor([slot]))
        state.write(layer, torch.tensor([slot]), {k: x + value for k, x in found.items()})


def values(state: RecurrentState, slot: int) -> set[float]:
    read = [state.read(layer, torch.tensor([slot])) for layer in range(2)]
    return {float(number) for states in read for x in states.values() for number in x.flatten()}


def test_a_kept_state_is_that_of_its_tokens() -> None:
    state, snapshots = made()
    fill(state, 0, 1.0)
    snapshots.save(TOKENS, 2 * PAGE, b"", 0)
    fill(state, 0, 1.0)  # the sequence goes on
    snapshots.save(TOKENS, 3 * PAGE, b"", 0)
    assert snapshots.usable(TOKENS, 4 * PAGE, 18, b"") == (3 * PAGE, (4 * PAGE,))
    assert snapshots.usable(TOKENS, 2 * PAGE, 18, b"") == (2 * PAGE, (4 * PAGE,))
    snapshots.load(TOKENS, 2 * PAGE, b"", 1)
    assert values(state, 1) == {1.0}
    snapshots.load(TOKENS, 3 * PAGE, b"", 1)
    assert values(state, 1) == {2.0}


def test_other_tokens_and_other_groups_have_other_states() -> None:
    _, snapshots = made()
    snapshots.save(TOKENS, PAGE, b"one", 0)
    assert snapshots.usable(TOKENS, PAGE, 6, b"one") == (PAGE, ())
    assert snapshots.usable(TOKENS, PAGE, 6, b"two") == (0, (PAGE,))
    assert snapshots.usable([1, *TOKENS], PAGE, 6, b"one") == (0, (PAGE,))


def test_a_prompt_stops_where_cached_pages_end_and_before_its_last_token() -> None:
    _, snapshots = made()
    assert snapshots.usable(TOKENS, 2 * PAGE, 4 * PAGE, b"") == (0, (2 * PAGE, 3 * PAGE))
    assert snapshots.usable(TOKENS, 0, 1, b"") == (0, ())


def test_the_least_recently_used_goes_first() -> None:
    state, snapshots = made()
    for pages in (1, 2):
        fill(state, 0, 1.0)
        snapshots.save(TOKENS, pages * PAGE, b"", 0)
    snapshots.load(TOKENS, PAGE, b"", 1)  # used again
    fill(state, 0, 1.0)
    snapshots.save(TOKENS, 3 * PAGE, b"", 0)
    assert snapshots.usable(TOKENS, 2 * PAGE, 18, b"")[0] == PAGE
    assert snapshots.usable(TOKENS, 3 * PAGE, 18, b"")[0] == 3 * PAGE
    snapshots.load(TOKENS, 3 * PAGE, b"", 1)
    assert values(state, 1) == {3.0}


def test_a_state_that_is_kept_already_is_not_replaced() -> None:
    state, snapshots = made()
    fill(state, 0, 1.0)
    snapshots.save(TOKENS, PAGE, b"", 0)
    fill(state, 0, 1.0)
    snapshots.save(TOKENS, PAGE, b"", 0)
    snapshots.load(TOKENS, PAGE, b"", 1)
    assert values(state, 1) == {1.0}


@pytest.mark.parametrize("kernel_size", [4, None])
def test_inputs_of_a_convolution_are_padded_up_to_its_width(kernel_size: int | None) -> None:
    """Zeros stand before a prompt that is shorter than the convolution, and before no other."""
    state = LayerState({})
    prompt = torch.arange(1.0, 13).view(1, 2, 6)
    assert torch.equal(state.update_conv_state(prompt, 0, conv_kernel_size=kernel_size), prompt)
    width = kernel_size or 6
    kept = state.get_conv_state(0)
    assert kept is not None
    assert torch.equal(kept, prompt[..., -width:])
    following = state.update_conv_state(prompt[..., :1], 0)
    assert torch.equal(following, torch.cat([prompt[..., -width:], prompt[..., :1]], -1))
    short = LayerState({}).update_conv_state(prompt[..., :1], 0, conv_kernel_size=3)
    assert short[0].tolist() == [[0, 0, 1], [0, 0, 7]]
