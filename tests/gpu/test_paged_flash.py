"""Dense decode by a FlashAttention that reads pages, where a process has activated one.

The package is not installed here: a stand-in computes what its documentation specifies.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import varlen

from keyhole.kernels import operations, triton
from keyhole.kernels.triton import flash_attention
from tests.oracle import attention, float64, in_order, visible

PAGE, LENGTHS = 16, (1, 40, 33)
#: Keys of a page and its values lie in one row, as the cache has them.
HEADS, GROUP, DIM = 2, 3, 32


def as_documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """torch 2.13's `varlen_attn` with a block table, for one query a sequence."""
    assert cu_seq_q.tolist() == list(range(len(query) + 1))
    assert (cu_seq_k, max_q, return_aux, num_splits) == (None, 1, None, None)
    assert seqused_k is not None
    assert block_table is not None
    assert seqused_k.dtype == block_table.dtype == torch.int32
    assert max_k >= int(seqused_k.max())
    (_, size, heads, _), group = key.shape, query.shape[1] // key.shape[2]
    assert enable_gqa == (group > 1)
    assert window_size[1] in (-1, 0)
    out = torch.empty_like(query)
    for b, length in enumerate(seqused_k.tolist()):
        pages = block_table[b, : -(-length // size)].long()
        keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (key, value))
        first = 0 if window_size[0] < 0 else max(0, length - 1 - window_size[0])
        for h in range(heads * group):
            scores = keys[first:, h // group] @ query[b, h].double() * (scale or 1.0)
            out[b, h] = (scores.softmax(0) @ values[first:, h // group]).to(query.dtype)
    return out


def case() -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    counts = [-(-length // PAGE) for length in LENGTHS]
    order = torch.randperm(sum(counts) + 2, generator=random)[: sum(counts)].split(counts)
    pages = torch.randn(sum(counts) + 2, HEADS, PAGE, 2 * DIM, generator=random).bfloat16()
    table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
    for row, (numbers, length) in enumerate(zip(order, LENGTHS, strict=True)):
        table[row, : len(numbers)] = numbers
        pages[numbers[-1], :, (length - 1) % PAGE + 1 :] = torch.nan
    keys, values = pages.split(DIM, -1)
    query = torch.randn(len(LENGTHS), HEADS * GROUP, DIM, generator=random).bfloat16()
    return query, keys, values, table, torch.tensor(LENGTHS, dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 1, 20])
def test_it_is_attention_over_all_or_a_window(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", as_documented)
    query, keys, values, table, lengths = case()
    found = flash_attention.attend((query, keys, values, table, lengths), 0.2, window)
    for row, length in enumerate(LENGTHS):
        there = (in_order(x, table[row].tolist(), length) for x in (keys, values))
        seen = [visible(length, window)] * HEADS
        wanted, _ = attention(float64(query[row]), *there, seen, scale=0.2)
        assert np.abs(float64(found[row]) - wanted).max() < 2.0**-7  # of numbers below 4


#: What reports that it can be used, by the name of the function.
USABLE: dict[str, Any] = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.get_device_capability": lambda: (9, 0),
    "torch.nn.attention.current_flash_attention_impl": lambda: "FA3",
    "torch.nn.attention.varlen.varlen_attn": as_documented,
}


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in USABLE.items():
        monkeypatch.setattr(name, value)
    for name in ("KEYHOLE_KERNELS", "KEYHOLE_FLASH"):
        monkeypatch.delenv(name, raising=False)
    # The example runs where the tests do.
    monkeypatch.setattr(Tensor, "to", _here(Tensor.to))
    monkeypatch.setattr(torch, "tensor", _here(torch.tensor))
    return monkeypatch


def _here(function: Any) -> Any:
    def moved(*operands: Any, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if value != "cuda"}
        return function(*(x for x in operands if not isinstance(x, str)), **options)

    return moved


def asked() -> str | None:
    """Anew, and without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return flash_attention.version.__wrapped__()


def test_it_is_used_where_one_is_active_for_this_gpu(usable: pytest.MonkeyPatch) -> None:
    assert asked() == "FA3"
    usable.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    assert asked() is None  # FA3 is for Hopper
    usable.setattr("torch.nn.attention.current_flash_attention_impl", lambda: "FA4")
    assert asked() == "FA4"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch.cuda.is_available", lambda: False),
        ("torch.nn.attention.current_flash_attention_impl", lambda: None),
        ("torch.nn.attention.varlen.varlen_attn", lambda query, key, value: query),
    ],
)
def test_it_is_not_used_where_something_is_missing(
    usable: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    usable.setattr(name, value)
    assert asked() is None


def test_the_environment_activates_one(usable: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    usable.setattr("torch.nn.attention.activate_flash_attention_impl", names.append)
    usable.setenv("KEYHOLE_FLASH", "FA3")
    assert asked() == "FA3"
    assert names == ["FA3"]
    usable.setenv("KEYHOLE_KERNELS", "reference")
    assert asked() is None


def told(why: str) -> None:
    begin = "FlashAttention over pages cannot be used here, Keyhole's own kernels replace it"
    with pytest.warns(RuntimeWarning, match=f"{begin}: {why}"):
        assert flash_attention.version.__wrapped__() is None


def test_an_unusable_version_is_reported_and_not_activated(usable: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    usable.setattr("torch.nn.attention.activate_flash_attention_impl", names.append)
    usable.setattr("torch.nn.attention.current_flash_attention_impl", lambda: None)
    usable.setenv("KEYHOLE_FLASH", "FA4")
    told("KEYHOLE_FLASH=FA4: it does not read pages on a GPU of compute capability 9.0")
    usable.delattr(torch_attention, "current_flash_attention_impl")
    told("KEYHOLE_FLASH=FA4: it needs torch 2.12 or later")
    assert names == []


def test_a_missing_version_is_reported(usable: pytest.MonkeyPatch) -> None:
    usable.setenv("KEYHOLE_FLASH", "FA3")  # and torch looks for it
    told("FA3 cannot be activated: No module")


#: Type, group, head size, page size.
KIND = (torch.float16, 3, 80, 4)


def test_an_example_of_each_kind_must_come_out_right(usable: pytest.MonkeyPatch) -> None:
    for kind in (KIND, (torch.bfloat16, 1, 64, 16), (torch.bfloat16, 8, 256, 1)):
        assert flash_attention._is_right.__wrapped__(*kind)


def wrong(*operands: Any, **options: Any) -> Tensor:
    return as_documented(*operands, **options) * 1.05


def without_window(*operands: Any, **options: Any) -> Tensor:
    return as_documented(*operands, **options | {"window_size": (-1, -1)})


def refused(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("head size 80 is not supported")


@pytest.mark.parametrize(
    ("function", "why"),
    [(wrong, "its results are wrong"), (without_window, "its results are"), (refused, "head size")],
)
def test_one_that_is_wrong_or_refuses_is_not_used(
    usable: pytest.MonkeyPatch, function: Any, why: str
) -> None:
    usable.setattr(varlen, "varlen_attn", function)
    with pytest.warns(RuntimeWarning, match=why):
        assert not flash_attention._is_right.__wrapped__(*KIND)


@pytest.mark.parametrize(
    "other",
    [
        {"softcap": 5.0},
        {"sinks": torch.ones(6)},
        {"value_pages": torch.zeros(2, 2, 16, 16, dtype=torch.bfloat16)},
        {"query": torch.zeros(3, 6, 32)},
        {"query": torch.zeros(3, 8, 32, dtype=torch.bfloat16)},
    ],
    ids=["softcap", "sinks", "smaller values", "float32", "another group"],
)
def test_what_it_does_not_know_our_kernels_compute(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(flash_attention, "version", lambda: "FA3")
    monkeypatch.setattr(flash_attention, "_is_right", lambda _, group, *__: group == GROUP)
    query, keys, values, *_ = case()
    given = {"query": query, "key_pages": keys, "value_pages": values}
    given |= {"softcap": None, "sinks": None}

    def takes(query: Tensor, key_pages: Tensor, value_pages: Tensor, **options: Any) -> bool:
        return flash_attention.takes((query, key_pages, value_pages, None, None), **options)

    assert takes(**given)
    assert not takes(**(given | other))
    monkeypatch.setattr(flash_attention, "version", lambda: None)
    assert not takes(**given)


def test_the_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "usable", lambda: True)
    monkeypatch.setattr(triton, "flash", lambda: True)
    monkeypatch.setattr(flash_attention, "version", lambda: "FA3")
    name = operations.backend(torch.device("cuda"))
    assert name == "Triton, dense steps by FA3, prompts by FlashAttention"
