"""The decode tokens of a step as rows, and the pages that the step writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keyhole.integrations.vllm.step_rows import Requests, step_rows

PAGE = 4


def requests(*given: tuple[int, int, bool], most: list[int] | None = None) -> Requests:
    """Requests of (tokens with these, query tokens, prompt?); pages of request r from 10 r on."""
    lengths = [length for length, _, _ in given]
    counts = [count for _, count, _ in given]
    return Requests(
        starts=np.cumsum([0, *counts]),
        most=np.array(lengths if most is None else most),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.arange(8, dtype=torch.int32)
        + 10 * torch.arange(1, len(given) + 1, dtype=torch.int32)[:, None],
        prefilling=np.array([prompt for *_, prompt in given]),
    )


def test_a_request_that_decodes_is_a_row() -> None:
    rows = step_rows(requests((9, 1, False), (5, 1, False), (7, 7, True)), PAGE, 1)
    assert (rows.num_requests, rows.num_rows) == (2, 2)
    assert rows.lengths.tolist() == [9, 5]
    assert rows.max_length == 9
    assert rows.page_table.tolist() == [[10, 11, 12], [20, 21, 22]]


def test_the_last_token_of_a_prompt_alone_is_no_row() -> None:
    """A prompt whose last chunk is one token has as many query tokens as a request that decodes."""
    rows = step_rows(requests((9, 1, True)), PAGE, 1)
    assert rows.num_rows == 0


def test_padding_is_no_row() -> None:
    rows = step_rows(requests((9, 1, False), (0, 0, False)), PAGE, 1)
    assert rows.num_rows == 1


def test_drafts_are_rows_that_end_at_their_own_token() -> None:
    rows = step_rows(requests((9, 3, False), (5, 1, False), (6, 2, False), (7, 7, True)), PAGE, 3)
    assert rows.lengths.tolist() == [7, 8, 9, 5, 5, 6]
    assert rows.page_table[:, 0].tolist() == [10, 10, 10, 20, 30, 30]
    assert rows.num_requests == 3


def test_a_length_that_is_known_on_the_device_alone_is_exact() -> None:
    """The host counts drafts that were rejected: only `max_length` may be too large."""
    rows = step_rows(requests((9, 3, False), most=[12]), PAGE, 3)
    assert rows.lengths.tolist() == [7, 8, 9]
    assert rows.max_length == 12


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [
        (1, 1, {10: 1}),
        (4, 1, {10: 4}),
        (5, 1, {11: 1}),
        (9, 9, {10: 4, 11: 4, 12: 1}),
        (9, 2, {11: 4, 12: 1}),
        (8, 4, {11: 4}),
        (8, 5, {10: 4, 11: 4}),
    ],
)
def test_the_pages_that_a_step_writes(length: int, count: int, expected: dict[int, int]) -> None:
    pages, filled = step_rows(requests((length, count, True)), PAGE, 1).written
    assert dict(zip(pages.tolist(), filled.tolist(), strict=True)) == expected


def test_all_requests_write_pages_those_that_decode_too() -> None:
    pages, filled = step_rows(requests((5, 1, False), (3, 3, True)), PAGE, 1).written
    assert dict(zip(pages.tolist(), filled.tolist(), strict=True)) == {11: 1, 20: 3}


def test_a_step_shows_the_policy_its_rows() -> None:
    rows = step_rows(requests((9, 1, False), (5, 1, False)), PAGE, 1)
    step = rows.begin([], [])
    assert step.pages.tolist() == [3, 2]
    assert step.sequences.host_lengths.tolist() == [9, 5]
    assert rows.begin([], []) is step
