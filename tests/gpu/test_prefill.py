"""Prompts as a GPU computes them, by torch's fused attention.

The same code runs on a CPU, where torch has a mask for what FlashAttention knows without one.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from keyhole.kernels import operations, reference
from keyhole.kernels import triton as gpu
from keyhole.kernels.triton import flash_attention as fused
from tests.oracle import attention, float64, in_order, visible

#: KV heads, group, head size, page size.
SHAPES = ((2, 1, 64, 16), (1, 7, 20, 1), (2, 4, 80, 4), (3, 2, 256, 5))
#: The result is rounded, and before it the weights are: a value is seldom larger than 4.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def case(
    shape: tuple[int, ...], dtype: torch.dtype, length: int, count: int, device: str = "cpu"
) -> dict[str, Any]:
    """The last `count` of `length` tokens as queries; NaN where no token is."""
    heads, group, dim, size = shape
    random = torch.Generator().manual_seed(length + count)
    num_pages = -(-length // size)
    pages = torch.randperm(num_pages + 3, generator=random)[: num_pages + 1]
    stored = torch.full((num_pages + 3, 2, heads, size, dim), torch.nan)
    for i in range(length):
        stored[pages[i // size], :, :, i % size] = torch.randn(2, heads, dim, generator=random)
    query = torch.randn(count, heads * group, dim, generator=random)
    stored = stored.to(device, dtype)
    return {
        "query": query.to(device, dtype),
        "key_pages": stored[:, 0],
        "value_pages": stored[:, 1],
        "pages": pages.to(device),
        "start": length - count,
        "scale": dim**-0.5,
        "window": None,
        "softcap": None,
        "sinks": None,
    }


def not_here(*_: object, **__: object) -> NoReturn:
    raise AssertionError("this is computed elsewhere")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("length", "count"), [(1, 1), (33, 33), (33, 1), (47, 15)])
def test_a_chunk_anywhere_in_the_prompt_is_causal_attention(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    length: int,
    count: int,
) -> None:
    monkeypatch.setattr(reference, "prefill", not_here)
    given = case(shape, dtype, length, count, device)
    found = fused.prefill(**given)
    assert found.dtype == dtype
    table = given["pages"].tolist()
    keys, values = (
        in_order(given[name].cpu(), table, length) for name in ("key_pages", "value_pages")
    )
    wanted = [
        attention(
            float64(row),
            keys,
            values,
            [visible(length - count + t + 1, None)] * shape[0],
            scale=given["scale"],
        )[0]
        for t, row in enumerate(given["query"].cpu())
    ]
    difference = np.abs(float64(found.cpu()) - np.stack(wanted))
    assert (difference <= ROUNDING[dtype] * (np.abs(wanted) + 2)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1000, 4096])
def test_no_mask_is_made(count: int) -> None:
    """Keys and values are copied once; a mask, or keys per query head, would be far more."""
    given = case((2, 16, 64, 16), torch.bfloat16, 4096, count, "cuda")
    fused.prefill(**given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fused.prefill(**given)
    used = torch.cuda.max_memory_allocated() - before
    copied = 2 * given["key_pages"].nbytes
    # Beside those the result, and a float32 logarithm per row.
    assert used < 1.5 * (copied + out.nbytes + 4 * out[..., 0].numel())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_on_the_host_give_the_same_bits(shape: tuple[int, ...]) -> None:
    """An offloaded layer: another kernel would round otherwise, and a policy choose so."""
    given = case(shape, torch.bfloat16, 47, 15, "cuda")
    wanted = operations.prefill(**given)
    below = {name: given[name].cpu().pin_memory() for name in ("key_pages", "value_pages")}
    assert torch.equal(operations.prefill(**given | below), wanted)


def test_a_window_that_covers_the_prompt_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "prefill", not_here)
    given = case(SHAPES[0], torch.float16, 40, 20)
    wanted = fused.prefill(**given)
    assert torch.equal(fused.prefill(**given | {"window": 40}), wanted)


@pytest.mark.parametrize(
    "other",
    [
        {"window": 39},
        {"softcap": 5.0},
        {"sinks": torch.ones(2, dtype=torch.float16)},
        {"value_pages": torch.zeros(6, 2, 16, 48, dtype=torch.float16)},
        {name: torch.zeros(6, 2, 16, 576) for name in ("key_pages", "value_pages")}
        | {"query": torch.zeros(20, 2, 576)},
    ],
    ids=["window", "softcap", "sinks", "smaller values", "large heads in float32"],
)
def test_what_it_does_not_know_goes_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(fused, "causal_lower_right", not_here)
    given = case(SHAPES[0], torch.float16, 40, 20) | other
    names = ("query", "key_pages", "value_pages", "pages", "start")
    options = {name: value for name, value in given.items() if name not in names}
    wanted = reference.prefill(*(given[name] for name in names), **options)
    assert torch.equal(fused.prefill(**given), wanted)


#: What torch reports on a machine where FlashAttention can be used, by the name of the function.
USABLE = {
    "torch.cuda.is_available": True,
    "torch.version.cuda": "13.0",
    "torch.cuda.get_device_capability": (8, 0),
    "torch.backends.cuda.is_flash_attention_available": True,
    "torch.backends.cuda.flash_sdp_enabled": True,
}
MISSING = dict.fromkeys(USABLE, False) | {
    "torch.version.cuda": None,
    "torch.cuda.get_device_capability": (7, 5),
}


def machine(patch: pytest.MonkeyPatch, says: dict[str, object]) -> None:
    for name, value in says.items():
        patch.setattr(name, (lambda v=value: v) if name != "torch.version.cuda" else value)
    patch.delenv("KEYHOLE_KERNELS", raising=False)


def test_it_is_used_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, USABLE)
    assert gpu.flash.__wrapped__()
    monkeypatch.setenv("KEYHOLE_KERNELS", "reference")
    assert not gpu.flash.__wrapped__()


@pytest.mark.parametrize("name", USABLE)
def test_it_is_not_used_where_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine(monkeypatch, USABLE | {name: MISSING[name]})
    assert not gpu.flash.__wrapped__()


@pytest.mark.parametrize(
    ("triton", "flash", "name"),
    [
        (True, True, "Triton, prompts by FlashAttention"),
        (True, False, "Triton"),
        (False, True, "reference (PyTorch), prompts by FlashAttention"),
        (False, False, "reference (PyTorch)"),
    ],
)
def test_the_backend_is_named(
    monkeypatch: pytest.MonkeyPatch, triton: bool, flash: bool, name: str
) -> None:
    monkeypatch.setattr(gpu, "usable", lambda: triton)
    monkeypatch.setattr(gpu, "flash", lambda: flash)
    assert operations.backend(torch.device("cuda")) == name
    assert "Flash" not in operations.backend(torch.device("cpu"))


def test_each_choice_asks_for_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention needs no Triton, and Triton no FlashAttention."""
    with FakeTensorMode():
        numbers = torch.empty(2, 3, device="cuda", dtype=torch.bfloat16)
        angles = torch.empty(3, device="cuda", dtype=torch.float64)
        places = torch.empty(2, device="cuda", dtype=torch.int64)
        below = torch.empty(2, 3, dtype=torch.bfloat16)

    def taken(name: str, *operands: Tensor) -> tuple[bool, bool]:
        found = []
        for triton in (True, False):
            monkeypatch.setattr(gpu, "usable", lambda t=triton: t)
            monkeypatch.setattr(gpu, "flash", lambda t=triton: not t)
            found.append(gpu.takes(name, *operands))
        return found[0], found[1]

    assert taken("append", numbers, numbers, places) == (True, False)
    assert taken("prefill", numbers, numbers, places) == (False, True)
    assert taken("prefill", numbers, below, places) == (False, False)
    assert taken("shift_rope", numbers, places, angles) == (True, False)
    assert taken("shift_rope", angles, places, angles) == (False, False)
    assert taken("append", numbers, angles, places) == (False, False)
