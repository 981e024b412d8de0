"""The cache of a `sparse` block: rows of tokens in pages, without padding."""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.cache.page_list import NO_PAGE
from keyhole.cache.pages import PageCache
from keyhole.config import SamplingParams, bytes_text
from keyhole.engine.model_runner import Runner
from keyhole.engine.sequence import Sequence
from keyhole.errors import CapacityError, ConfigError, RequestError
from keyhole.tokenization import Detokenizer

#: What a forward may be asked for, and we cannot give.
OPTIONS = {
    "output_attentions": "attention weights are never made",
    "output_router_logits": "padding is taken out before the routers run",
    "labels": "a loss needs gradients or a whole text: compute it from the logits",
}


def unsupported(what: str) -> ConfigError:
    """The error for a feature of transformers that `sparse` does not support."""
    return ConfigError(f"keyhole.sparse does not support {what}")


def present(mask: Any, B: int, Q: int, cache: PagedCache) -> np.ndarray:
    """Which of the new tokens are not left padding, bool [B, Q]."""
    if mask is None:
        return np.ones((B, Q), bool)
    past = cache.get_seq_length()
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise unsupported("an attention_mask that does not have two dimensions")
    if tuple(mask.shape) != (B, past + Q):
        raise RequestError(
            f"attention_mask has shape {tuple(mask.shape)}, but must have {(B, past + Q)}: one "
            "entry per token, including those in the cache"
        )
    there: np.ndarray = mask.cpu().numpy() != 0
    if (there[:, 1:] < there[:, :-1]).any():
        raise RequestError(
            "the attention_mask has padding after tokens; pad on the left (padding_side='left')"
        )
    known = np.asarray([row.num_computed for row in cache.rows])
    if (there[:, :past].sum(1) != known).any():
        raise RequestError("attention_mask differs from the one that the cache was computed with")
    return there[:, past:]


def columns(keep: int | Tensor, length: int) -> list[int]:
    """The positions of a row whose logits are requested."""
    if isinstance(keep, Tensor):
        return [int(place) % length for place in keep.tolist()]
    return list(range(length))[-keep:] if keep else list(range(length))


def spread(logits: Tensor, wanted: np.ndarray) -> Tensor:
    """Scatters logits [R, V] of the tokens to [B, n, V], with zeros for padding."""
    if (wanted >= 0).all():
        return logits.view(*wanted.shape, -1)
    rows = torch.from_numpy(np.flatnonzero(wanted >= 0)).to(logits.device)
    out = logits.new_zeros(wanted.size, logits.shape[1])
    return out.index_copy(0, rows, logits).view(*wanted.shape, -1)


class PagedCache:
    """A transformers cache whose tokens are stored in Keyhole's pages.

    `copy.deepcopy` shares its pages (or copies them, see `Policy.shares_pages`), so that one prompt
    can be continued several times. turn: waits for forward passes of other threads. drop: gets its
    rows when it is gone.
    """

    is_compileable = False
    #: Asked before `crop`, which says by name what is refused.
    is_croppable = True

    def __init__(
        self,
        pages: PageCache,
        make_runner: Callable[[int], Runner],
        num_rows: int,
        shares_pages: bool,
        turn: Callable[[], AbstractContextManager[None]],
        drop: Callable[[list[Sequence]], None],
    ) -> None:
        self.pages = pages
        self._shares_pages = shares_pages
        self._turn, self._drop = turn, drop
        self._make_runner = make_runner
        self._length = 0  # tokens per row as transformers counts them, with padding
        self.runner = make_runner(num_rows)
        self.rows = [
            Sequence(array("i"), SamplingParams(), Detokenizer(None)) for _ in range(num_rows)
        ]
        for slot, row in enumerate(self.rows):
            row.slot = slot
        weakref.finalize(self, drop, self.rows).atexit = False

    def __len__(self) -> int:
        return self.pages.geometry.num_layers

    @property
    def is_linear(self) -> list[bool]:
        """Which layers keep a recurrent state instead of keys: none."""
        return [False] * len(self)

    def __deepcopy__(self, _: dict[int, Any]) -> PagedCache:
        with self._turn():
            copy = PagedCache(
                self.pages,
                self._make_runner,
                len(self.rows),
                self._shares_pages,
                self._turn,
                self._drop,
            )
            copy._length = self._length
            for row, own in zip(self.rows, copy.rows, strict=True):
                own.pages, own.num_computed = self._another(row.pages), row.num_computed
                own.kept, own.leaving = row.kept, list(row.leaving)
            copy.runner.copy_rows(self.runner, zip(self.rows, copy.rows, strict=True))
            return copy

    def _another(self, pages: array[int]) -> array[int]:
        """Shares the pages with a second cache, or copies them if the policy requires it."""
        real = [page for page in pages if page != NO_PAGE]
        if self._shares_pages:
            self.pages.share(real)
            return pages[:]
        fresh = self.pages.allocate(len(real))
        if fresh is None:
            raise full(self.pages)
        self.pages.copy(real, fresh)
        new = iter(fresh)
        return array("i", (page if page == NO_PAGE else next(new) for page in pages))

    def get_seq_length(self, *_: Any) -> int:
        """Tokens so far, with padding."""
        return self._length

    def advance(self, count: int) -> None:
        """Adds the tokens of a forward pass, with padding."""
        self._length += count

    def update(self, *_: Any, **__: Any) -> Any:
        """Called only by a model outside its `sparse` block."""
        raise ConfigError(
            "this cache belongs to a keyhole.sparse block that has ended; continue "
            "inside the block, or start again from the prompt"
        )

    get_query_offset = get_mask_sizes = update

    def reorder_cache(self, *_: Any) -> Any:
        """Refused: beam search."""
        raise unsupported("beam search (num_beams)")

    def crop(self, *_: Any) -> Any:
        """Refused: assisted generation removes tokens that were not accepted."""
        raise unsupported("assisted generation (assistant_model, prompt_lookup_num_tokens)")

    def activate_past_recording(self) -> Any:
        """Refused, as `crop`."""
        self.crop()

    def batch_repeat_interleave(self, *_: Any) -> Any:
        """Refused: changes the rows of the batch."""
        raise unsupported("repeating or selecting rows of a cache")

    batch_select_indices = reset = batch_repeat_interleave


def full(pages: PageCache) -> CapacityError:
    """The error for a cache without a free page."""
    limit, tokens = pages.max_pages * pages.page_bytes, pages.max_pages * pages.page_size
    return CapacityError(
        f"the KV cache is full: it holds {tokens} tokens in {bytes_text(limit)}, for all rows "
        "and all caches that are still referenced; raise memory="
    )


def free(pages: PageCache, dropped: deque[list[Sequence]]) -> None:
    """Frees the pages of caches that are gone. Not while a forward pass runs."""
    while dropped:
        for row in dropped.popleft():
            pages.release(page for page in row.pages if page != NO_PAGE)
