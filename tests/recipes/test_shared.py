import torch

from recipes.tiny_model.initial import hold_share, initial_weights, shared_direction
from recipes.tiny_model.network import llama_config


def test_every_row_has_as_much_in_the_shared_direction_as_outside():
    torch.manual_seed(0)
    shared = torch.nn.functional.normalize(torch.randn(12), dim=0)
    embedding = torch.randn(5, 12)
    outside = embedding - torch.outer(embedding @ shared, shared)
    hold_share(embedding, shared)
    torch.testing.assert_close(embedding @ shared, outside.norm(dim=1))
    torch.testing.assert_close(embedding - torch.outer(embedding @ shared, shared), outside)


def test_the_start_of_training_has_its_share_already():
    config = llama_config(num_layers=3)
    embedding = initial_weights(config, 3)["model.embed_tokens.weight"]
    held = embedding.clone()
    hold_share(held, shared_direction(config, 3))
    torch.testing.assert_close(held, embedding)
