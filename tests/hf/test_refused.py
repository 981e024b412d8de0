"""`keyhole.sparse`: what does not work is refused by name, before anything changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DynamicCache,
    GPTNeoXJapaneseConfig,
    StaticCache,
)

from keyhole import ConfigError, Delta, ModelError, PromptTooLongError, RequestError, sparse
from tests.checkpoints import make_config, make_network
from tests.hf.generating import decode, forward, network, past_of, prompts

__all__ = ["network"]


def under_eager(network: Any) -> None:
    """The model's own function got our pages for a cache, and failed on a length."""
    ours = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        decode(network, prompts(5))
    finally:
        network.set_attn_implementation(ours)


def under_autocast(network: Any) -> None:
    """Ended in an error of torch about the dtypes of an "Index put"."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decode(network, prompts(5))


def moved(network: Any) -> None:
    """The same."""
    try:
        decode(network.to(torch.bfloat16), prompts(5))
    finally:
        network.to(torch.float32)


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "beams": ("beam search", lambda net: decode(net, prompts(5), num_beams=2)),
    "lookup": (
        "assisted generation",
        lambda net: decode(
            net, {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}, prompt_lookup_num_tokens=2
        ),
    ),
    "static": (
        "another cache .StaticCache",
        lambda net: decode(net, prompts(5), cache_implementation="static"),
    ),
    "static cache": (
        "another cache .StaticCache",
        lambda net: decode(net, prompts(5), past=StaticCache(config=net.config, max_cache_len=64)),
    ),
    "cache from outside": (
        "a DynamicCache of your own",
        lambda net: decode(net, prompts(5), past=DynamicCache(config=net.config)),
    ),
    "attention weights": (
        "output_attentions .attention weights are never made",
        lambda net: decode(net, prompts(5), output_attentions=True),
    ),
    "another attention": ("set_attn_implementation; call it before the block", under_eager),
    "autocast": ("autocast of a torch.float32 model", under_autocast),
    "a move": ("moving the model inside its block, from torch.float32 on cpu to torch.bf", moved),
    "a copy": ("copying or pickling the model; do so outside", copy.deepcopy),
    "a pickle": ("copying or pickling the model; do so outside", pickle.dumps),
    "labels": ("labels", lambda net: forward(net, prompts(5), labels=prompts(5)["input_ids"])),
    "gradients": ("gradients; call", lambda net: net(**prompts(5))),
    "a mask of its own": (
        "an attention_mask that does not have two dimensions",
        lambda net: forward(
            net, {"input_ids": torch.ones(1, 4).long()}, attention_mask=torch.ones(1, 1, 4, 4)
        ),
    ),
    "base model": (
        "inside keyhole.sparse, call the model or its generate",
        lambda net: forward(net.model, prompts(5)),
    ),
    "a second block": (
        "already inside a keyhole.sparse block",
        lambda net: sparse(net).__enter__(),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_work_is_refused_by_name(case: str) -> None:
    network = make_network(make_config("llama"))  # transformers keeps a static cache on it
    message, run = REFUSED[case]
    with sparse(network):
        with pytest.raises(ConfigError, match=message):
            run(network)
        decode(network, prompts(5))


def test_an_empty_cache_that_comes_again_is_refused(network: Any) -> None:
    """The cache would stay empty, as ours takes its place, and the second call lack its past."""
    past, inputs = DynamicCache(config=network.config), prompts(5)
    with sparse(network):
        forward(network, inputs, past=past)
        with pytest.raises(ConfigError, match="DynamicCache of your own"):
            forward(network, inputs, past=past)


def test_wrong_input_is_refused(network: Any) -> None:
    ids = prompts(5, 5)["input_ids"]
    masks = {
        "padding after tokens": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        "padding only": [[0] * 5, [0] * 5],
        "must have .2, 5.": [[1, 1, 1]] * 2,
    }
    with sparse(network):
        for message, mask in masks.items():
            with pytest.raises(RequestError, match=message):
                forward(network, {"input_ids": ids}, attention_mask=torch.tensor(mask))
        past = past_of(forward(network, {"input_ids": ids}))
        with pytest.raises(RequestError, match="has 2 rows, but the input has 1"):
            forward(network, {"input_ids": ids[:1]}, past=past)
        mask = torch.tensor([[0] + [1] * 9] * 2)
        with pytest.raises(RequestError, match="differs from the one that the cache"):
            forward(network, {"input_ids": ids}, past=past, attention_mask=mask)
        with pytest.raises(RequestError, match="either input_ids or inputs_embeds"):
            forward(network, {})
        with pytest.raises(
            PromptTooLongError, match="the input has 513 tokens, but this model takes at most 512"
        ):
            forward(network, prompts(513))


def test_a_cache_does_not_leave_its_block(network: Any) -> None:
    inputs = prompts(5)
    with sparse(network):
        past = past_of(forward(network, inputs))
    with pytest.raises(ConfigError, match="block that has ended"):
        forward(network, {"input_ids": inputs["input_ids"]}, past=past)
    with sparse(network), pytest.raises(ConfigError, match="block that has ended"):
        forward(network, {"input_ids": inputs["input_ids"]}, past=past)


def test_a_model_in_training_is_refused(network: Any) -> None:
    try:
        with sparse(network.train()), pytest.raises(ConfigError, match="training mode"):
            forward(network, prompts(5))
    finally:
        network.eval()


def test_what_cannot_run_is_refused_before_anything_changes(network: Any) -> None:
    with pytest.raises(ConfigError, match="needs a transformers model, not Linear"):
        sparse(nn.Linear(1, 1)).__enter__()
    other = AutoModelForCausalLM.from_config(
        BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, is_decoder=True)
    )
    with pytest.raises(ModelError, match="is an encoder"):
        sparse(other).__enter__()
    own = GPTNeoXJapaneseConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(
        ConfigError, match="its GPTNeoXJapaneseAttention does not call transformers"
    ):
        sparse(AutoModelForCausalLM.from_config(own)).__enter__()
    with pytest.raises(ConfigError, match="token_budget"):
        sparse(network, Delta(token_budget=8), page_size=16).__enter__()
    with pytest.raises(ConfigError, match="needs a retrieval head"):
        sparse(network, "spe_context").__enter__()
    with pytest.raises(ConfigError, match="unknown policy"):
        sparse(network, "delt").__enter__()
