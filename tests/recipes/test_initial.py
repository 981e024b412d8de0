from random import Random

import pytest
import torch
from transformers import LlamaForCausalLM

from keyhole.eval.tiny_language.world import WORD_IDS
from recipes.tiny_model.curriculum import stream_row
from recipes.tiny_model.initial import MATCH_LAYERS, initial_weights
from recipes.tiny_model.network import llama_config


def read_facts(match_layers):
    """A text of facts, half of them restated, and each layer's attention `[Hq, T, T]` over it."""
    config = llama_config(num_layers=4)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    model.load_state_dict(initial_weights(config, 0, match_layers), strict=False)
    model.tie_weights()
    words, _ = stream_row(Random(0), 256)
    ids = torch.tensor([[WORD_IDS[word] for word in words]])
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    return words, [attention[0] for attention in attentions]


@pytest.fixture(scope="module")
def read():
    return read_facts(MATCH_LAYERS)


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


def test_without_match_layers_no_head_of_any_layer_looks_things_up():
    words, attentions = read_facts(())
    for weights in attentions:
        found = [weights[:, verb, values].sum(-1) for verb, values in looked_up(words).items()]
        assert torch.stack(found).median(0).values.max() < 0.1


@pytest.mark.parametrize("layers", [(0, 1), (1, 4)])
def test_match_layers_outside_the_model_are_refused(layers):
    with pytest.raises(ValueError, match=r"must be from 1 to 3, the last layer"):
        initial_weights(llama_config(num_layers=4), 0, layers)
