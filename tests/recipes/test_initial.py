from random import Random

import pytest
import torch
from transformers import LlamaForCausalLM

from keyhole.eval.tiny_language.world import WORD_IDS
from recipes.tiny_model.curriculum import stream_row
from recipes.tiny_model.initial import MATCH_LAYERS, initial_weights
from recipes.tiny_model.network import llama_config


@pytest.fixture(scope="module")
def read():
    """A text of facts, half of them restated, and each layer's attention `[Hq, T, T]` over it."""
    config = llama_config(num_layers=4)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    model.load_state_dict(initial_weights(config, seed=0), strict=False)
    model.tie_weights()
    words, _ = stream_row(Random(0), 256)
    ids = torch.tensor([[WORD_IDS[word] for word in words]])
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    return words, [attention[0] for attention in attentions]


@pytest.mark.parametrize("back", [1, 2, 3, 4])
def test_first_layer_looks_back_by_exact_distances(read, back):
    _, attentions = read
    weights = attentions[0][back - 1].diagonal(-back)[8:]
    assert weights.min() > 0.85


def looked_up(words):
    """Places of verbs whose fact was stated before, with the places of its earlier values."""
    known, places = {}, {}
    for at in range(1, len(words) - 3, 4):
        fact = (words[at], words[at + 1])
        if fact in known:
            places[at + 1] = list(known[fact])
        known.setdefault(fact, []).append(at + 2)
    return places


@pytest.mark.parametrize("layer", MATCH_LAYERS)
def test_match_layers_look_at_the_value_asked_for(read, layer):
    words, attentions = read
    places = looked_up(words)
    found = [attentions[layer][0, verb, values].sum() for verb, values in places.items()]
    assert len(found) > 20
    assert torch.stack(found).median() > 0.5
    right = [
        attentions[layer][0, verb].argmax().item() in values for verb, values in places.items()
    ]
    assert sum(right) / len(right) > 0.9
