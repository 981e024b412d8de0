"""Where tokens lie in a request's pages, with and without gaps. Needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from keyhole.integrations.vllm.documents.layout import Layout

SIZE = 4
#: Pages of vLLM in any order.
BLOCKS = torch.tensor([7, 3, 9, 1, 8, 2])


def test_without_gaps_a_token_lies_where_vllm_puts_it() -> None:
    layout = Layout.whole(10, len(BLOCKS), SIZE)
    positions = torch.arange(20)
    expected = BLOCKS[positions // SIZE] * SIZE + positions % SIZE
    assert torch.equal(layout.slots(positions, BLOCKS), expected)


@pytest.mark.parametrize("dropped", [[(0, 4)], [(1, 5), (6, 10)], [(2, 14)], []])
def test_kept_tokens_fill_the_pages_of_a_list_in_order(dropped: list[tuple[int, int]]) -> None:
    kept = torch.ones(14, dtype=torch.bool)
    for start, stop in dropped:
        kept[start:stop] = False
    layout = Layout.of(kept, len(BLOCKS), SIZE)
    there = kept.nonzero().flatten()
    everything = torch.cat([there, torch.arange(14, 20)])
    # In reading order the slots are those of the listed pages, without a gap.
    listed = BLOCKS[layout.order][:, None] * SIZE + torch.arange(SIZE)
    found = layout.slots(everything, BLOCKS)
    assert torch.equal(found, listed.flatten()[: len(found)])
    # What follows the documents lies where vLLM writes it.
    after = torch.arange(14, 20)
    assert torch.equal(found[-6:], BLOCKS[after // SIZE] * SIZE + after % SIZE)


def test_a_question_is_read_in_pages_between() -> None:
    kept = torch.ones(14, dtype=torch.bool)
    kept[2:10] = False
    layout = Layout.of(kept, len(BLOCKS), SIZE, scratch=True)
    assert layout.order.tolist() == [0, 3, 1, 2]
    slots = layout.slots(torch.arange(14, 24), BLOCKS).tolist()
    assert slots[:2] == [1 * SIZE + 2, 1 * SIZE + 3]
    assert slots[2:] == [*range(3 * SIZE, 4 * SIZE), *range(9 * SIZE, 10 * SIZE)]


def test_a_gap_of_no_whole_pages_is_a_mistake_of_ours() -> None:
    kept = torch.ones(14, dtype=torch.bool)
    kept[2:5] = False
    with pytest.raises(AssertionError, match="whole pages"):
        Layout.of(kept, len(BLOCKS), SIZE)
