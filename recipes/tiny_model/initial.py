"""The initial weights, with half of the look-up built in, and the direction all embeddings share.

The heads that look 1, 2, 3 and 4 tokens back score a token by its component along this direction;
a neighbouring token scores a tenth less. If a word's component shrinks by more than that, its
neighbour takes all of the weight, so sharp a softmax gives no gradient, and the word is never
attended to again: no look-up through it is right. Unconstrained training did that to 6 of 320 names
within two million tokens (benchmarks/LOG.md), so the component is held fixed.

A model this small, trained for an hour on a CPU, does not learn look-ups from random weights. With
all of the following it needs a hundred thousand tokens, and without the match layers, where it has
to find out by itself in which layers to look things up, eight hundred thousand. All else is random.
Afterwards everything is trained freely, except the component along `shared`:

* In layer 0, the four query heads of the first key-value head look exactly 1, 2, 3 and 4 tokens
  back, and write a small code of the token there into four separate subspaces.
* In the match layers, the first key-value head compares: the key encodes "ENTITY was two back, VERB
  was one back", the query "ENTITY is one back, VERB is here". They agree at the token that holds
  the value.
* All other output projections start at zero, so these codes reach the match layers unchanged.

Llama has no biases. A direction that all embeddings share (`shared`) replaces them: a head reads a
constant from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import LlamaConfig

SHARE = 0.5**0.5
"""Part of an embedding's length that lies in the shared direction."""


def basis(config: LlamaConfig, generator: torch.Generator) -> Tensor:
    """Return random orthonormal directions of the residual stream, `[hidden, hidden]`."""
    size = config.hidden_size
    random = torch.randn(size, size, generator=generator) / size**0.5
    directions: Tensor = torch.linalg.qr(random)[0]
    return directions


def shared_direction(config: LlamaConfig, seed: int) -> Tensor:
    """Return the shared direction, `[hidden]`: the first of the seed's basis."""
    return basis(config, torch.Generator().manual_seed(seed))[0]


def hold_share(embedding: Tensor, shared: Tensor) -> None:
    """Scale the component of each row along `shared` to the norm of the rest, in place.

    Rows may otherwise change freely. `SHARE` expresses that both parts are equal.
    """
    with torch.no_grad():
        rest = embedding - (embedding @ shared)[:, None] * shared
        embedding.copy_(rest + rest.norm(dim=1, keepdim=True) * shared)


MATCH_LAYERS = (1, 2)

_WRITTEN = 0.4
"""Length of a code as written into the residual stream, beside embeddings of length 1."""
_COUNTING = (16.0, 16.0, 16.0, 16.0, 16.0)
"""How much each of the fastest rotations adds to the score of the right distance: a neighbour
scores 8 less, any other distance up to 3,000 at least 6 less."""
_MATCH_SCORE = 12.0
"""Score of a full match; half a match (entity or verb only) scores half of it. Enough to find the
place more often than not, and blunt enough that a mistake has a gradient: a match of 80 learns
more slowly (benchmarks/LOG.md)."""
_SLOW = 6
"""First rotation slow enough to compare contents by: it turns once in 6,000 tokens or more."""


def initial_weights(
    config: LlamaConfig, seed: int, match_layers: Sequence[int] = MATCH_LAYERS
) -> dict[str, Tensor]:
    """Return all parameters, float32, under the names of `LlamaForCausalLM`.

    A layer in `match_layers` must come after layer 0, which writes what the match compares; without
    any, no look-up is built in.
    """
    wrong = [layer for layer in match_layers if not 0 < layer < config.num_hidden_layers]
    if wrong:
        last = config.num_hidden_layers - 1
        raise ValueError(f"match layers {wrong} must be from 1 to {last}, the last layer")
    generator = torch.Generator().manual_seed(seed)
    size, hidden = config.head_dim, config.hidden_size

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    directions = basis(config, generator)
    shared, code = directions[0], directions[1 : 1 + size]
    codes_back = directions[1 + size : 1 + 5 * size].view(4, size, hidden)

    # Embeddings are zero in the subspaces that the codes are written to. All codes have the same
    # norm: a name with a smaller one would lose every match against some other name.
    slow = _slow(size)
    code = code * slow[:, None]
    own = directions[1 + 5 * size :]
    num_slow = int(slow.sum())
    share = num_slow / (num_slow + len(own))
    parts = math.sqrt(share) * normalize(random(config.vocab_size, size) @ code, dim=1)
    parts += math.sqrt(1 - share) * normalize(random(config.vocab_size, len(own)) @ own, dim=1)
    weights = {
        "model.embed_tokens.weight": SHARE * shared + math.sqrt(1 - SHARE**2) * parts,
        "model.norm.weight": torch.ones(hidden),
    }
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": random(queries, hidden),
            prefix + "self_attn.k_proj.weight": random(keys, hidden),
            prefix + "self_attn.v_proj.weight": random(keys, hidden),
            prefix + "self_attn.o_proj.weight": torch.zeros(hidden, queries),
            prefix + "mlp.gate_proj.weight": random(config.intermediate_size, hidden),
            prefix + "mlp.up_proj.weight": random(config.intermediate_size, hidden),
            prefix + "mlp.down_proj.weight": torch.zeros(hidden, config.intermediate_size),
        }

    # The norm of the code that a head reads from a normalised embedding.
    read = math.sqrt(hidden) * math.sqrt(1 - SHARE**2) * math.sqrt(share)
    first = "model.layers.0.self_attn."
    _look_back(weights, first, config, shared)
    weights[first + "v_proj.weight"][:size] = code * (_WRITTEN / read)
    for head in range(4):
        columns = slice(head * size, (head + 1) * size)
        weights[first + "o_proj.weight"][:, columns] = codes_back[head].T

    one_back, two_back = codes_back[:2]
    # The token's own code is read from its embedding, where its norm is larger than when written.
    here = code * (_WRITTEN / (read / math.sqrt(hidden)))
    for layer in match_layers:
        turn = torch.zeros(size, size)
        rotation = torch.linalg.qr(random(num_slow, num_slow))[0]
        turn[torch.outer(slow, slow)] = rotation.flatten()
        query, key = one_back + turn @ here, two_back + turn @ one_back
        _match(weights, f"model.layers.{layer}.self_attn.", config, query, key)
    return weights


def with_repeated(weights: dict[str, Tensor], repeated: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights of a deeper model with the same function.

    Behind the last of the layers `repeated` (consecutive) their copies are inserted, whose output
    projections are zero: they add nothing yet, but have their queries and keys already.
    """
    count = sum(name.endswith("input_layernorm.weight") for name in weights)
    if list(repeated) != list(range(count))[min(repeated, default=0) :][: len(repeated)]:
        raise ValueError(f"repeated layers are {list(repeated)}; consecutive ones below {count}")
    end = max(repeated, default=-1) + 1
    order = [*range(end), *repeated, *range(end, count)]
    deeper = {n: weight for n, weight in weights.items() if not n.startswith("model.layers.")}
    for place, layer in enumerate(order):
        copied = end <= place < end + len(repeated)
        for name, weight in weights.items():
            prefix = f"model.layers.{layer}."
            if name.startswith(prefix):
                zero = copied and name.endswith(("o_proj.weight", "down_proj.weight"))
                new = torch.zeros_like(weight) if zero else weight.clone()
                deeper[f"model.layers.{place}.{name.removeprefix(prefix)}"] = new
    return deeper


def _slow(size: int) -> Tensor:
    """Return which dimensions of a head rotate slowly, bool [D]."""
    return torch.arange(size) % (size // 2) >= _SLOW


def _look_back(
    weights: dict[str, Tensor], prefix: str, config: LlamaConfig, shared: Tensor
) -> None:
    """Make the first four query heads and the first key head score tokens by distance alone."""
    size, pairs = config.head_dim, config.head_dim // 2
    constant = shared / (SHARE * math.sqrt(config.hidden_size))  # reads 1 from every token
    query = weights[prefix + "q_proj.weight"].view(-1, size, config.hidden_size)
    key = weights[prefix + "k_proj.weight"].view(-1, size, config.hidden_size)
    query[:4], key[0] = 0, 0
    for pair, score in enumerate(_COUNTING):
        frequency = config.rope_parameters["rope_theta"] ** (-2 * pair / size)
        gain = math.sqrt(score * math.sqrt(size))
        key[0, pair] = gain * constant
        for head in range(4):
            angle = -frequency * (head + 1)
            query[head, pair] = gain * math.cos(angle) * constant
            query[head, pair + pairs] = gain * math.sin(angle) * constant


def _match(
    weights: dict[str, Tensor], prefix: str, config: LlamaConfig, query: Tensor, key: Tensor
) -> None:
    """Let two query heads compare contents, in slow rotations only, one of them more strictly."""
    size = config.head_dim
    slow = _slow(size)
    # The residual stream at a match layer is an embedding of norm 1 plus four written codes.
    scale = config.hidden_size / (1 + 4 * _WRITTEN**2)
    full = 2 * scale * _WRITTEN**2 / math.sqrt(size)
    gain = math.sqrt(_MATCH_SCORE / full)
    heads = weights[prefix + "q_proj.weight"].view(-1, size, config.hidden_size)
    for head, strictness in enumerate((1.0, 0.6)):
        heads[head] = strictness * gain * query * slow[:, None]
    weights[prefix + "k_proj.weight"][:size] = gain * key * slow[:, None]
