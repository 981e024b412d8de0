"""The layer of an EAGLE-3 draft around a retrieval head, which proposes tokens.

Li et al., EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test (2025, arXiv 2503.01840), section 3.1. A draft is one Transformer layer over pairs of a
token's embedding and the fused hidden states of the target at the position before. For tokens that
it proposed itself there are no such states: its own output at the position before takes their
place. Queries and keys are those of `RetrievalHead`; values, output projection and MLP are here,
and the map to a vocabulary, of frequent tokens only in most drafts (`d2t`).

Positions are those of `RetrievalHead`: the token at position j is rotated by j.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from keyhole.retrieval import draft_files
from keyhole.retrieval.draft_files import DraftShape
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.head_files import HeadCheckpoint


class DraftLayer(nn.Module):
    """Values, output and MLP of a draft's layer, whose queries and keys are those of `head`."""

    def __init__(self, head: RetrievalHead, mlp_size: int, *, output_bias: bool = False) -> None:
        super().__init__()
        config = head.config
        place: dict[str, Any] = {"device": head.q.weight.device, "dtype": head.q.weight.dtype}
        H, D = config.hidden_size, config.head_dim

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(H, eps=config.rms_norm_eps, **place)

        def linear(width: int, out: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(width, out, bias=bias, **place)

        self.head = head
        self.v = linear(config.input_size, config.num_kv_heads * D, config.bias)
        self.o = linear(config.num_heads * D, H, output_bias)
        self.mlp_norm, self.norm = norm(), norm()
        self.gate, self.up = linear(H, mlp_size), linear(H, mlp_size)
        self.down = linear(mlp_size, H)

    def project(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, D], keys and values [T, Hkv, D] of tokens with hidden [T, H].

        token_ids, positions: int64 [T]. hidden: of the position before each token, fused from the
        target's states, or the draft's own output there.
        """
        head = self.head
        x = head.inputs(token_ids, hidden)
        query, key = head.from_inputs(x)
        value = self.v(x).unflatten(-1, (-1, head.config.head_dim))
        return head.rotated(query, positions), head.rotated(key, positions), value

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [T, H] from its input's hidden half and attention [T, heads, D]."""
        hidden = hidden + self.o(mixed.flatten(1))
        x = self.mlp_norm(hidden)
        out: Tensor = hidden + self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class DraftModel(DraftLayer):
    """A draft that proposes tokens.

    target_ids: int64 [draft vocabulary], the target's token of each of the draft's own.
    """

    target_ids: Tensor

    def __init__(self, head: RetrievalHead, shape: DraftShape, target_ids: Tensor) -> None:
        super().__init__(head, shape.mlp_size, output_bias=shape.output_bias)
        self.shape = shape
        where = head.q.weight
        self.lm_head = nn.Linear(
            head.config.hidden_size,
            shape.vocab_size,
            bias=False,
            device=where.device,
            dtype=where.dtype,
        )
        self.register_buffer("target_ids", target_ids.to(where.device), persistent=False)

    def step(self, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Proposed tokens, int64 [T], and the features of their predecessors for the next step.

        hidden [T, H]: what `project` was given. mixed: attention [T, heads, D].
        """
        hidden = hidden.to(self.norm.weight.dtype)
        if self.shape.norm_before_residual:
            hidden = self.head.feature_norm(hidden)
        out = self.finish(hidden, mixed.to(hidden.dtype))
        normed = self.norm(out)
        tokens = self.target_ids[self.lm_head(normed).argmax(-1)]
        return tokens, normed if self.shape.norm_output else out

    @property
    def proposing_layers(self) -> list[nn.Linear]:
        """The linear layers that affect only proposals, not queries and keys."""
        return [self.v, self.o, self.gate, self.up, self.down, self.lm_head]

    @classmethod
    def from_eagle3(cls, path: str | Path, target: nn.Module) -> DraftModel:
        """Loads an EAGLE-3 draft of either layout, a folder or hub id, for the network `target`.

        On the device of the target's embedding, in its dtype. ModelError for a draft that cannot
        be read or was made for another target.
        """
        head = RetrievalHead.from_eagle3(path, target)
        checkpoint = HeadCheckpoint.open(path)
        shape = draft_files.draft_shape(checkpoint, head.config)
        output: Any = target.get_output_embeddings()  # type: ignore[operator]
        own = None if output is None else output.weight.detach()
        kept = draft_files.draft_weights(checkpoint, head.config, shape, own)
        draft = cls(head, shape, draft_files.target_ids(checkpoint, head.config, shape))
        where = head.q.weight
        state = {name: x.to(where.device, where.dtype) for name, x in kept.items()}
        draft.load_state_dict(state | {f"head.{name}": x for name, x in head.state_dict().items()})
        return draft.eval().requires_grad_(False)
