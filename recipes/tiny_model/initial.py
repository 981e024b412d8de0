"""The direction that all embeddings share, and why training must leave it alone.

The heads that look 1, 2, 3 and 4 tokens back score a token by what it has in this direction, the
neighbouring token a tenth less. A word whose share falls by more than that is never looked at
again: its neighbour takes all of the weight, a softmax that sharp gives no gradient, and no walk
through that word is ever right. Free training did that to 6 of 320 names within two million
tokens (benchmarks/LOG.md), so the share is held.

Where the training starts: with half of the look-up built in.

A model this small, trained for an hour on a CPU, does not discover by itself how to look something
up; from here it needs a hundred thousand tokens. Three things are set, all else is random, and
everything is trained freely afterwards, but for what `shared` holds:

* In layer 0, the four query heads of the first key-value head look exactly 1, 2, 3 and 4 tokens
  back, and write a small code of the token they find there into four separate subspaces.
* In the match layers, the first key-value head compares: the key says "two back stood ENTITY, one
  back stood VERB", the query "one back stands ENTITY, here stands VERB". They agree where the
  value stands that is looked for.
* All other output projections start at zero, so these codes reach the match layers unblurred.

Llama has no biases. A direction that all embeddings share takes their place (`shared`): what a head
reads from it is a constant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import LlamaConfig

SHARE = 0.5**0.5
"""Part of an embedding's length that lies in the shared direction."""


def basis(config: LlamaConfig, generator: torch.Generator) -> Tensor:
    """Give random orthonormal directions of the residual stream, `[hidden, hidden]`."""
    size = config.hidden_size
    random = torch.randn(size, size, generator=generator) / size**0.5
    directions: Tensor = torch.linalg.qr(random)[0]
    return directions


def shared_direction(config: LlamaConfig, seed: int) -> Tensor:
    """Give the direction, `[hidden]`: the first one of the seed's basis."""
    return basis(config, torch.Generator().manual_seed(seed))[0]


def hold_share(embedding: Tensor, shared: Tensor) -> None:
    """Make the part of each row along `shared` as long as the rest of the row, in place.

    Rows may turn and grow freely otherwise. That the two parts are equal is `SHARE`.
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


def initial_weights(config: LlamaConfig, seed: int) -> dict[str, Tensor]:
    """Give all parameters, float32, under the names of `LlamaForCausalLM`."""
    generator = torch.Generator().manual_seed(seed)
    size, hidden = config.head_dim, config.hidden_size

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    directions = basis(config, generator)
    shared, code = directions[0], directions[1 : 1 + size]
    codes_back = directions[1 + size : 1 + 5 * size].view(4, size, hidden)

    # Embeddings stay out of the subspaces that the codes will be written to. All codes have the
    # same length: a name with a shorter one would lose every match against some other name.
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

    # How long the code is that a head reads from a normalised embedding.
    read = math.sqrt(hidden) * math.sqrt(1 - SHARE**2) * math.sqrt(share)
    first = "model.layers.0.self_attn."
    _look_back(weights, first, config, shared)
    weights[first + "v_proj.weight"][:size] = code * (_WRITTEN / read)
    for head in range(4):
        columns = slice(head * size, (head + 1) * size)
        weights[first + "o_proj.weight"][:, columns] = codes_back[head].T

    one_back, two_back = codes_back[:2]
    # The token's own code is read from its embedding, where it is longer than as written.
    here = code * (_WRITTEN / (read / math.sqrt(hidden)))
    for layer in MATCH_LAYERS:
        turn = torch.zeros(size, size)
        rotation = torch.linalg.qr(random(num_slow, num_slow))[0]
        turn[torch.outer(slow, slow)] = rotation.flatten()
        query, key = one_back + turn @ here, two_back + turn @ one_back
        _match(weights, f"model.layers.{layer}.self_attn.", config, query, key)
    return weights


def _slow(size: int) -> Tensor:
    """Tell which numbers of a head turn slowly, bool [D]."""
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
    """Let two query heads compare contents, in the slow rotations only; one strictly, one less."""
    size = config.head_dim
    slow = _slow(size)
    # Residual stream at a match layer: an embedding of length 1 and four written codes.
    scale = config.hidden_size / (1 + 4 * _WRITTEN**2)
    full = 2 * scale * _WRITTEN**2 / math.sqrt(size)
    gain = math.sqrt(_MATCH_SCORE / full)
    heads = weights[prefix + "q_proj.weight"].view(-1, size, config.hidden_size)
    for head, strictness in enumerate((1.0, 0.6)):
        heads[head] = strictness * gain * query * slow[:, None]
    weights[prefix + "k_proj.weight"][:size] = gain * key * slow[:, None]
