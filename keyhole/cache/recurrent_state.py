"""The recurrent state of hybrid models: what layers keep instead of keys and values.

Short convolutions (LFM2), state-space layers (Mamba, Mamba-2) and linear attention (gated delta
nets, lightning attention) keep a state of fixed size: the last inputs of a convolution, a matrix
per head. It is stored in slots, one per running sequence, under the number that the scheduler gives
to the sequence (`Sequence.slot`). The first chunk of a prompt begins without a state and overwrites
the slot, so nothing has to be cleared when a sequence ends, is aborted or is pre-empted.

Keys and values of a token can be written twice, a state cannot be advanced twice: a step that fails
halfway must not leave some layers ahead of others. Layers therefore work on copies, and
`RecurrentStep.commit` stores them once all layers have run. The states after proposed tokens are
copies, too, until it is known how many of these were right (`RecurrentStep.accept`).

The keys of a cached prefix serve every prompt that begins with it, whereas a recurrent state serves
only one that begins with exactly these tokens. `StateSnapshots` therefore keeps states where a
later prompt is likely to continue: at the last full page, which other completions and the next turn
of a conversation share, and where the prompt departs from what is cached, since later prompts are
likely to depart there, too (branch points: Pan et al., Marconi, arXiv 2411.19379, section 4.1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from keyhole.cache.prefix_cache import prefix_digests

#: A layer's tensors by kind and number, each with the sequences in its first dimension.
States = dict[tuple[str, int], Tensor]


class LayerState:
    """The state of the sequences in one call of a layer, as transformers' cache offers it.

    states: [n, ...] each; empty at the start of a prompt. The layer changes or replaces them.
    """

    def __init__(self, states: States) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, [n, channels, width]; None at the start of a prompt."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a recurrence; None at the start of a prompt."""
        return self.states.get(("recurrent", state_idx))

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """`get_recurrent_state` under the name that MiniMax uses."""
        return self.states.get(("recurrent", 0))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Adds inputs [n, channels, t]; returns the earlier ones, or zeros, with these behind."""
        before = self.states.get(("conv", state_idx))
        width = conv_kernel_size or conv_states.shape[-1]
        if before is None:
            whole = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = before.shape[-1]
            whole = torch.cat([before, conv_states], -1)
        self.states["conv", state_idx] = whole[..., -width:]
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Replaces the state of a recurrence; returns it."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """`update_recurrent_state` under the name that MiniMax uses."""
        self.states["recurrent", 0] = linear_cache

    def is_recording_past(self, layer_idx: int) -> bool:
        """False, because no step is undone."""
        return False


#: A layer's code: outputs [n, t, ...] for hidden states [n, t, width], after a state.
LayerCall = Callable[[Tensor, LayerState], tuple[Tensor, ...]]


class RecurrentState:
    """The state of all recurrent layers, for `num_slots` sequences and `num_snapshots` more.

    examples: per layer the state of one sequence, [1, ...] each, which gives shapes and dtypes.
    snapshot_slots: those that no sequence has.
    """

    def __init__(self, examples: Sequence[States], num_slots: int, num_snapshots: int = 0) -> None:
        count = num_slots + num_snapshots
        self.snapshot_slots = range(num_slots, count)
        self._layers: list[States] = [
            {key: x.new_zeros(count, *x.shape[1:]) for key, x in states.items()}
            for states in examples
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(x.nbytes for states in self._layers for x in states.values())

    def copy(self, slot: int, to: int) -> None:
        """Copies the state of all layers from one slot to another."""
        for states in self._layers:
            for x in states.values():
                x[to].copy_(x[slot])

    def read(self, layer: int, slots: Tensor) -> States:
        """Copies of a layer's states of these slots, int64 [n]."""
        return {key: x.index_select(0, slots) for key, x in self._layers[layer].items()}

    def write(self, layer: int, slots: Tensor, states: States) -> None:
        """Stores a layer's states of these slots, int64 [n]."""
        for key, x in self._layers[layer].items():
            x.index_copy_(0, slots, states[key].to(x.dtype))


@dataclass(frozen=True)
class RecurrentChunk:
    """Prompt tokens of one sequence: their rows in the packed row, and its slot, int64 [1].

    begins: whether they are the first of the prompt, which has no state before them.
    """

    rows: slice
    slot: Tensor
    begins: bool


@dataclass(frozen=True)
class DecodedTokens:
    """The i-th token of each decoding sequence in a step; i > 0 are proposed tokens.

    sequences: int64 [n], which of the decoding sequences, ascending; on the host. rows, slots:
    int64 [n], their rows in the packed row and the slots of the sequences. after: int64 [n], the
    entries of the i-1-th tokens that they follow; None for the first tokens, of all sequences.
    """

    sequences: np.ndarray
    rows: Tensor
    slots: Tensor
    after: Tensor | None


def decoded_tokens(
    slots: np.ndarray, counts: np.ndarray, device: torch.device
) -> list[DecodedTokens]:
    """The tokens of sequences with these slots and numbers of rows, int64 [S] each, in order."""
    begins, before, found = np.cumsum(counts) - counts, None, []
    for place in range(int(counts.max(initial=0))):
        those = np.flatnonzero(counts > place)
        arrays = [begins[those] + place, slots[those]]
        if before is not None:
            arrays.append(np.searchsorted(before, those))
        rows, own, *after = (torch.from_numpy(x).to(device) for x in arrays)
        found.append(DecodedTokens(those, rows, own, after[0] if after else None))
        before = those
    return found


@dataclass
class RecurrentStep:
    """The states of the sequences of one step.

    decoded: the tokens of decoding sequences, which are the first rows of the packed row; chunks:
    those of prompts.
    """

    state: RecurrentState
    decoded: list[DecodedTokens]
    chunks: list[RecurrentChunk]
    _new: list[tuple[int, Tensor, States]] = field(default_factory=list)
    _proposed: list[tuple[int, DecodedTokens, States]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        state: RecurrentState,
        decoding: Sequence[tuple[int, int]],
        prompts: Sequence[tuple[int, int, bool]],
        device: torch.device,
    ) -> RecurrentStep:
        """A step of sequences in the order of the packed row.

        decoding: of each decoding sequence its slot and number of rows. prompts: of each prompt the
        slot, the number of tokens, and whether they are the first of it.
        """
        slots, counts = np.asarray(decoding, np.int64).reshape(-1, 2).T
        sent = torch.tensor([slot for slot, *_ in prompts], dtype=torch.int64, device=device)
        row, chunks = int(counts.sum()), []
        for i, (_, count, begins) in enumerate(prompts):
            chunks.append(RecurrentChunk(slice(row, row + count), sent[i : i + 1], begins))
            row += count
        return cls(state, decoded_tokens(slots, counts, device), chunks)

    def run(
        self, layer: int, hidden: Tensor, call: LayerCall, continues: bool = True
    ) -> tuple[Tensor, ...]:
        """Runs a layer over a packed row [1, T, width]; returns its outputs, [1, T, ...] each.

        call: the layer for n sequences of t tokens each, [n, t, width], and their state. It is
        called once for a token of all decoding sequences, once more for each proposed one, and once
        for each prompt. continues: False where several tokens cannot follow a state; it is then
        called for each token of such prompts.
        """
        parts = [self._decode(layer, hidden[0], call)] if self.decoded else []
        for chunk in self.chunks:
            there = LayerState({} if chunk.begins else self.state.read(layer, chunk.slot))
            tokens = hidden[:, chunk.rows]
            at_once = (tokens,) if continues or chunk.begins else tokens.split(1, 1)
            parts += [[x[0] for x in call(some, there)] for some in at_once]
            self._new.append((layer, chunk.slot, there.states))
        return tuple(torch.cat(outputs)[None] for outputs in zip(*parts, strict=True))

    def commit(self) -> None:
        """Stores the new states of all layers; called once, after the last layer has run.

        For a decoding sequence it stores the state after its first token.
        """
        for layer, slots, states in self._new:
            self.state.write(layer, slots, states)
        self._new.clear()

    def accept(self, counts: np.ndarray) -> None:
        """Stores the states after the accepted proposed tokens; called once, after `commit`.

        counts: int64 [S], how many of them each decoding sequence accepted.
        """
        for place, tokens in enumerate(self.decoded[1:], 1):
            entries = np.flatnonzero(counts[tokens.sequences] == place)
            if not len(entries):
                continue
            those = torch.from_numpy(entries).to(tokens.slots.device)
            for layer, of, states in self._proposed:
                if of is tokens:
                    chosen = {key: x.index_select(0, those) for key, x in states.items()}
                    self.state.write(layer, tokens.slots[those], chosen)
        self._proposed.clear()

    def _decode(self, layer: int, hidden: Tensor, call: LayerCall) -> list[Tensor]:
        """The outputs of the decoding sequences' rows, in their order."""
        found, there = [], LayerState({})
        for tokens in self.decoded:
            if tokens.after is None:
                there = LayerState(self.state.read(layer, tokens.slots))
                self._new.append((layer, tokens.slots, there.states))
            else:
                after = {key: x.index_select(0, tokens.after) for key, x in there.states.items()}
                there = LayerState(after)
                self._proposed.append((layer, tokens, there.states))
            found.append([x[:, 0] for x in call(hidden[tokens.rows][:, None], there)])
        if len(found) == 1:
            return found[0]
        order = torch.cat([tokens.rows for tokens in self.decoded]).argsort()
        return [torch.cat(outputs)[order] for outputs in zip(*found, strict=True)]


class StateSnapshots:
    """Copies of states by the digest of all earlier tokens, the least recently used first."""

    def __init__(self, state: RecurrentState, page_size: int) -> None:
        self._state, self._page_size = state, page_size
        self._free = list(state.snapshot_slots)
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def save(self, tokens: Sequence[int], end: int, group: bytes, slot: int) -> None:
        """Keeps the state after `tokens[:end]`, whole pages, which is in a slot.

        group: as in the prefix cache. The state that was used least recently may be dropped.
        """
        digest = self._digests(tokens, end, group)[-1]
        if digest not in self._places:
            place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            self._state.copy(slot, place)
            self._places[digest] = place
        self._places.move_to_end(digest)

    def load(self, tokens: Sequence[int], end: int, group: bytes, slot: int) -> None:
        """Copies the state after `tokens[:end]` into a slot; `usable` has returned `end`."""
        digest = self._digests(tokens, end, group)[-1]
        self._state.copy(self._places[digest], slot)
        self._places.move_to_end(digest)

    def usable(
        self, tokens: Sequence[int], cached: int, end: int, group: bytes
    ) -> tuple[int, tuple[int, ...]]:
        """The length of the longest prefix with a kept state, and where to keep further states.

        The prefix is at most the first `cached` tokens, in whole pages. A prompt of `end` tokens
        keeps its state after these pages, and after its last full page before its last token.
        """
        size, digests = self._page_size, self._digests(tokens, cached, group)
        found = (i for i in range(len(digests), 0, -1) if digests[i - 1] in self._places)
        known = next(found, 0) * size
        ends = sorted({cached, (end - 1) // size * size})
        return known, tuple(place for place in ends if place > known)

    def _digests(self, tokens: Sequence[int], end: int, group: bytes) -> list[bytes]:
        return list(prefix_digests(tokens, self._page_size, group, end))
