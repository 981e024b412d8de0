import torch
from torch import nn

from keyhole.models.linear import FewTokensLinear, speed_up


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
        speed_up(network, torch.device("cpu"))
        assert all(type(layer) is FewTokensLinear for layer in network)
        assert all(a is b for a, b in zip(kept, network.parameters(), strict=True))
        for x, y in zip(inputs, wanted, strict=True):
            # Two roundings to bfloat16, of 2^-9 each, of numbers up to 2.
            torch.testing.assert_close(network(x).double(), y, atol=2e-2, rtol=2e-2)


def test_layers_of_other_classes_and_devices_are_left_alone():
    network = nn.Sequential(Special(4, 4), nn.Linear(4, 4))
    speed_up(network, torch.device("cuda"))
    assert type(network[1]) is nn.Linear
    speed_up(network, torch.device("cpu"))
    assert type(network[0]) is Special
