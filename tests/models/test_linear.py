import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from keyhole.models import fast_layers
from keyhole.models.fast_layers import FastLinear, speed_up_linear


class Special(nn.Linear):
    pass


def test_plain_linear_layers_compute_the_same_with_few_and_many_tokens():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8, bias=False)).bfloat16()
    inputs = [torch.randn(1, tokens, 24).bfloat16() for tokens in (1, 8, 9, 50)]
    with torch.no_grad():
        wanted = [network.double()(x.double()) for x in inputs]
        network.bfloat16()
        kept = list(network.parameters())
        speed_up_linear(network, torch.device("cpu"))
        assert all(type(layer) is FastLinear for layer in network)
        assert all(a is b for a, b in zip(kept, network.parameters(), strict=True))
        for x, y in zip(inputs, wanted, strict=True):
            # Two roundings to bfloat16, of 2^-9 each, of numbers up to 2.
            torch.testing.assert_close(network(x).double(), y, atol=2e-2, rtol=2e-2)


def test_layers_of_other_classes_and_devices_are_left_alone():
    network = nn.Sequential(Special(4, 4), nn.Linear(4, 4))
    speed_up_linear(network, torch.device("cuda"))
    assert type(network[1]) is nn.Linear
    speed_up_linear(network, torch.device("cpu"))
    assert type(network[0]) is Special


class Coded(torch.Tensor):
    """As torchao keeps codes: the address of its data is not that of numbers."""


def test_weights_of_another_class_are_left_alone():
    """A process crashed on a checkpoint of torchao."""
    coded, none = nn.Linear(4, 4), nn.Linear(4, 4)
    coded.weight = nn.Parameter(torch.zeros(4, 4).as_subclass(Coded), requires_grad=False)
    del none.weight  # as compressed-tensors, which has codes in its place
    speed_up_linear(nn.Sequential(coded, none), torch.device("cpu"))
    assert type(coded) is nn.Linear
    assert type(none) is nn.Linear


@pytest.fixture
def anybody(monkeypatch, tmp_path):
    """A processor of any maker: writes what the system says of it."""

    def named(text: str) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        monkeypatch.setattr(fast_layers, "_CPUINFO", path)
        fast_layers.in_float32.cache_clear()

    yield named
    fast_layers.in_float32.cache_clear()


def test_many_tokens_in_float32_compute_the_same_on_every_processor(anybody):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8, bias=False))
    x = torch.randn(3, 50, 24)
    wanted = network.double()(x.double()).detach()
    speed_up_linear(network.float(), torch.device("cpu"))
    for maker in ("GenuineIntel", "AuthenticAMD"):
        anybody(f"processor : 0\nvendor_id : {maker}\n")
        with torch.no_grad():
            found = network(x)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_who_computes_goes_by_the_maker(anybody, monkeypatch):
    anybody("vendor_id : GenuineIntel\n")
    assert fast_layers.in_float32() is functional.linear
    anybody("Features : neon\n")
    assert fast_layers.in_float32() is functional.linear
    anybody("vendor_id : AuthenticAMD\n")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert (fast_layers.in_float32() is functional.linear) != torch.backends.mkldnn.is_available()
    monkeypatch.setattr(fast_layers, "_CPUINFO", Path("/nowhere"))
    assert not fast_layers.mkl_is_slow()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_onednn_meets_few_numbers_of_tokens(anybody, monkeypatch, dtype):
    """It keeps a compiled kernel for each, so that a server's memory grew with every new one."""
    met = set()

    def product(x, weight, bias):
        met.add(x.numel() // x.shape[-1])
        return functional.linear(x, weight, bias)

    anybody("vendor_id : AuthenticAMD\n")
    monkeypatch.setattr(fast_layers, "linear", product)
    monkeypatch.setattr(fast_layers, "_by_onednn", lambda _, *given: product(*given))
    layer = nn.Linear(4, 3).to(dtype)
    x = torch.randn(1, 2048, 4, dtype=dtype)
    with torch.no_grad():
        wanted = layer(x)
        speed_up_linear(nn.Sequential(layer), torch.device("cpu"))
        for tokens in range(fast_layers._MANY, 2049):
            found = layer(x[:, :tokens])
            assert found.shape == (1, tokens, 3)
            torch.testing.assert_close(found, wanted[:, :tokens])
    assert len(met) <= 8 * 6 + 1
    assert all(size < 9 / 8 * smaller + 8 for smaller, size in itertools.pairwise(sorted(met)))


def test_gradients_are_torchs():
    layer = nn.Sequential(nn.Linear(6, 5))
    speed_up_linear(layer, torch.device("cpu"))
    for tokens in (2, 40):
        x = torch.randn(tokens, 6, requires_grad=True)
        layer(x).sum().backward()
        torch.testing.assert_close(x.grad, layer[0].weight.detach().sum(0).expand(tokens, -1))
        assert layer[0].weight.grad is not None
