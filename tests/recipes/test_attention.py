import pytest
import torch
from torch.nn import functional as F

from recipes.tiny_model.network import causal_attention


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300, 1100])
def test_equals_dense_attention_with_its_gradients(length):
    torch.manual_seed(length)
    shapes = ((2, 8, length, 32), (2, 2, length, 32), (2, 2, length, 32))
    mine = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in mine]
    out = causal_attention(*mine)
    expected = F.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    for mine_one, their_one in zip(mine, theirs, strict=True):
        torch.testing.assert_close(mine_one.grad, their_one.grad, rtol=1e-4, atol=1e-5)
