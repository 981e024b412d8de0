import pytest
import torch
from transformers import LlamaForCausalLM

from recipes.tiny_model.curriculum import SINGLE, training_batch
from recipes.tiny_model.network import llama_config, supervised_logits


@pytest.mark.slow
def test_equals_the_library_at_jumping_positions():
    torch.manual_seed(0)
    config = llama_config(num_layers=2)
    model = LlamaForCausalLM(config).float()
    for parameter in model.parameters():  # far from the tame initial values
        torch.nn.init.normal_(parameter, std=0.2)
    batch = training_batch(0, 0, 0, SINGLE[1])
    with torch.no_grad():
        mine = supervised_logits(dict(model.named_parameters()), batch, config, torch.float32)
        theirs = model(input_ids=batch.tokens, position_ids=batch.positions).logits
    theirs = theirs.flatten(0, 1)[batch.supervised]
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
