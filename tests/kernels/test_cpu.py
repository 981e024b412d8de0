"""Which code computes on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from keyhole import kernels
from keyhole.errors import ConfigError
from keyhole.kernels import cpu, cpu_layers


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = cpu.current()
    yield
    cpu.use(before)


def test_a_path_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        ConfigError, match=r"CPU kernels 'avx1024' are not available here; .*reference"
    ):
        cpu.use("avx1024")


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYHOLE_KERNELS", "reference")
    assert cpu.use() == "reference"
    assert kernels.backend(torch.device("cpu")) == "reference (PyTorch)"
    monkeypatch.setenv("KEYHOLE_KERNELS", "")
    assert cpu.use() == cpu.paths()[0]


def test_without_the_extension_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYHOLE_KERNELS", raising=False)
    monkeypatch.setattr(cpu, "extension", None)
    monkeypatch.setattr(cpu, "_path", None)
    scores, valid = torch.tensor([[[1.0, 3.0, 2.0]]]), torch.tensor([3], dtype=torch.int32)
    with pytest.warns(RuntimeWarning, match="CPU extension is not installed") as caught:
        found = kernels.top_k(scores, valid, 2, 1)
    assert found.indices.tolist() == [[[1, 2]]]
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.top_k(scores, valid, 2, 1)
    monkeypatch.undo()


def test_what_the_extension_does_not_take_goes_to_the_reference() -> None:
    x, weight = torch.ones(2, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    assert not cpu.takes(x, weight)
    assert kernels.linear(x, weight).tolist() == [[3.0] * 4] * 2
    assert not cpu.takes(x.float(), weight.bfloat16())
    assert not cpu.takes(torch.ones(3, 2).T)
    assert not cpu.takes(torch.ones(1, 1, 2048, 8))


@pytest.mark.parametrize("slow", [False, True])
def test_products_by_way_of_float32(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "torch_is_slow", lambda dtype: slow)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 4, 4, generator=generator).bfloat16() for _ in range(2))
    found = cpu.product(x, y.mT)
    assert found.dtype == torch.bfloat16
    wanted = x.double() @ y.mT.double()
    torch.testing.assert_close(found.double(), wanted, atol=0.02, rtol=0.01)


def test_a_long_prompt_keeps_no_more_memory_than_a_shorter_one() -> None:
    """What the extension keeps for a linear layer grew with the longest prompt."""
    cpu.use(cpu.paths()[0])
    if cpu.current() == cpu.REFERENCE:
        pytest.skip("torch keeps nothing")
    weight = torch.ones(3, 4096, dtype=torch.bfloat16)
    cpu_layers.linear(torch.ones(300, 4096, dtype=torch.bfloat16), weight)
    before = cpu.extension.workspace_bytes()
    out = cpu_layers.linear(torch.ones(2, 700, 4096, dtype=torch.bfloat16), weight)
    assert out.shape == (2, 700, 3)
    assert (out == 4096).all()
    assert cpu.extension.workspace_bytes() == before
