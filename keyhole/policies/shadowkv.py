"""ShadowKV: selects chunks of tokens by the mean of their keys and reconstructs the keys of the
selected chunks from low-rank keys.

Sun et al., ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference, 2024
(arXiv 2410.21465), section 4 and algorithms 1 and 2. After prefill, the prompt's keys, before RoPE
and with all KV heads concatenated, are decomposed: `rank` numbers per token and a basis per
sequence. The landmark of a chunk is the mean of its keys after RoPE. Chunks whose keys differ most
from their landmark (least cosine) are outliers: always read, with full keys, like the first and the
newest chunks. The others are selected by the softmax of the query's products with their landmarks,
at every token by every layer; their prompt keys are reconstructed, and RoPE is re-applied.

Cost per step and layer: one landmark per chunk, then `token_budget` keys and values, and for
reconstructed keys `rank` numbers per token and head and the basis; after the prompt one
decomposition. Bases are allocated outside the KV cache, one per concurrent request (10 MiB each
for 32 layers of 1024 numbers), and are not part of `memory`.

When to use it: where the keys of long prompts take too much memory.

Differences (theirs | ours | effect measured):
- keys that can be reconstructed are dropped, and values are kept in host memory | **nothing is
  saved**: all keys and values stay in the pages, so that reconstructed keys show what the
  approximation costs in accuracy; sequences within the budget are read exactly | none in answers
- keys are reconstructed from `rank` 160 | the same, or half of a smaller key; `rank=0` reads full
  keys, which offloading requires | at a budget of 256: reconstructed 100 % (92.6 to 100) with 1,441
  KiB read per step, full keys 100 % (92.6 to 100) with 1,153 KiB
- first, outlier and newest chunks are read outside the budget | they count in it; `always_beside`
  is theirs | outside it 100 % (92.6 to 100) with 1,740 KiB
- all generated tokens are read | landmarks cover them, and their full keys are read;
  `keep_generated` is theirs, outside the budget | all read 100 % (92.6 to 100) with 1,988 KiB
- the basis comes from a decomposition of K | from the eigenvectors of K^T K, which are the same up
  to rounding | none
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from keyhole import kernels
from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.config import is_count, require, require_counts, require_layers_of, setting
from keyhole.errors import ConfigError
from keyhole.policies import base
from keyhole.policies.base import LowRank, Policy, Selection, SequenceData, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ShadowKV(Policy):
    """Outlier chunks, newest chunks and those of best landmarks, with low-rank keys."""

    name: ClassVar[str] = "shadowkv"
    shares_pages: ClassVar[bool] = False
    capturable: ClassVar[bool | str] = True
    speculative: ClassVar[bool | str] = (
        "it keeps low-rank keys and outliers of a sequence from step to step"
    )
    page_settings: ClassVar[tuple[str, ...] | None] = ("chunk_size",)
    reads_keys: ClassVar[bool] = True
    shifts_keys: ClassVar[bool] = True
    token_budget: int = setting(1024, "tokens a step reads per KV head, in whole chunks")
    chunk_size: int | None = setting(
        None, "tokens in a chunk, a divisor of the page size; None: 8, or a smaller page"
    )
    rank: int | None = setting(
        None, "numbers per key of the prompt; 0: its own keys; None: 160, or half of a smaller key"
    )
    outlier_chunks: int | None = setting(
        None, "chunks of the prompt always read; None: 48, or 3/8 of a smaller budget"
    )
    sink_size: int = setting(0, "first tokens that are always read, in whole chunks")
    window_size: int | None = setting(
        None, "newest tokens always read, in whole chunks; None: 32, or an eighth of the budget"
    )
    full_layers: tuple[int, ...] = setting((), "layers that read everything")
    keep_generated: bool = setting(False, "read all generated tokens, outside the budget")
    always_beside: bool = setting(
        False, "read first, outlier and newest chunks outside the budget, too"
    )

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves sizes; checks that the always-read chunks and one more fit into the budget."""
        page, chunk, rank = geometry.page_size, self.chunk_size, self.rank
        chunk = min(8, page) if chunk is None else chunk
        good = is_count(chunk) and page % chunk == 0
        require(good, "chunk_size", chunk, f"a divisor of the page size {page}")
        budget = self.token_budget
        require(
            is_count(budget, 2 * chunk), "token_budget", budget, f"at least 2 chunks of {chunk}"
        )
        count, outliers, window = budget // chunk, self.outlier_chunks, self.window_size
        outliers = min(48, 3 * count // 8) if outliers is None else outliers
        window = max(1, min(32 // chunk, count // 8)) * chunk if window is None else window
        require(is_count(outliers, 0), "outlier_chunks", outliers, "at least 0")
        require(is_count(window), "window_size", window, "at least 1")
        require_counts(self, "sink_size", least=0)
        require_layers_of("full_layers", self.full_layers, geometry.num_layers)
        settled = dataclasses.replace(
            self, chunk_size=chunk, outlier_chunks=outliers, window_size=window
        )
        parts = f"{settled._sinks} first, {outliers} outlier, {settled._local} newest and one"
        least = (settled._always + 1) * chunk
        right = f"at least {least}: {parts} chunk of {chunk}"
        require(self.always_beside or budget >= least, "token_budget", budget, right)
        sparse = self._sparse_layers(geometry)
        most = min((_width(geometry.layers[i]) for i in sparse), default=0)
        right = f"from 0 to {most}, the numbers of a key of all KV heads"
        require(rank is None or (is_count(rank, 0) and rank <= most), "rank", rank, right)
        return settled

    @classmethod
    def as_published(cls, geometry: Geometry, token_budget: int) -> Self:
        """The authors' 48 outlier chunks and 32 newest tokens, whatever the budget."""
        return cls(
            token_budget=token_budget,
            outlier_chunks=48,
            window_size=32,
            keep_generated=True,
            always_beside=True,
        )

    def outside_budget(self) -> str:
        """Chunks that are always read, and generated tokens, if they are not counted."""
        chunks = (self.sink_size, "first"), (self.outlier_chunks, "outlier"), (1, "newest")
        names = [name for count, name in chunks if count]
        listed = ", ".join(names[:-1]) + " and newest chunks"
        always = [listed] if self.always_beside else []
        return " and ".join([*always, *(["all generated tokens"] if self.keep_generated else [])])

    def offloadable(self, geometry: Geometry) -> tuple[int, ...]:
        """All layers except the dense ones, if full keys are read.

        ConfigError if keys are reconstructed, or tokens are read outside the budget.
        """
        if self.rank != 0:
            raise ConfigError(
                "policy 'shadowkv' with offload= needs rank=0, because low-rank keys cannot be "
                "loaded from offloaded layers"
            )
        base.require_in_budget(self, "keep_generated=False and always_beside=False")
        return self._sparse_layers(geometry)

    def page_data(self, layout: LayerLayout, page_size: int) -> dict[str, tuple[int, ...]]:
        """Landmarks, the least cosine of each chunk, and each token's low-rank coefficients."""
        count, heads = page_size // self._chunk, layout.num_kv_heads
        return {
            "landmark": (count, heads, layout.key_dim),
            "cosine": (count, heads),
            "coefficient": (page_size, self._rank(layout)),
        }

    def sequence_state(self, geometry: Geometry) -> dict[str, SequenceData]:
        """The first and the outlier chunks of every sparse layer, and the basis of its keys."""
        state = {}
        for i in self._sparse_layers(geometry):
            layout = geometry.layers[i]
            heads, rank = layout.num_kv_heads, self._rank(layout)
            state[f"taken {i}"] = SequenceData((heads, self._sinks + self._outliers))
            state[f"basis {i}"] = SequenceData((rank, heads, layout.key_dim), like_keys=True)
        return state

    def on_append(
        self, key_pages: Tensor, data: Mapping[str, Tensor], pages: Tensor, filled: Tensor
    ) -> None:
        """Recomputes the landmarks of the pages that were written."""
        kernels.chunk_landmarks(key_pages, data["landmark"], data["cosine"], pages, filled)

    def before_step(self, step: Step) -> None:
        """Decomposes prompts and finds outliers of sequences that just exceeded the budget."""
        for row in np.flatnonzero(self._due(step)).tolist():
            prompt, slot = int(step.sequences.host_prompts[row]), step.sequences.slots[row]
            pages = step.page_table[row].long()
            chunks = self._sinks, max(self._sinks, prompt // self._chunk - self._local)
            for layer, data in enumerate(step.cache.page_data):
                if "landmark" not in data or layer in self.full_layers:
                    continue
                step.sequences.state[f"taken {layer}"][slot] = kernels.outlier_chunks(
                    data["cosine"], pages, chunks, self._outliers
                )
                coefficients = data["coefficient"]
                if coefficients.shape[2]:
                    step.sequences.state[f"basis {layer}"][slot] = kernels.decompose(
                        step.cache.keys[layer],
                        coefficients,
                        pages,
                        prompt,
                        step.cache.rotation(layer),
                    ).to(coefficients.dtype)

    def capture_key(self, step: Step) -> Hashable:
        """Whether everything is read; None if a prompt is decomposed or lengths set the shapes."""
        reads_all = step.max_length <= self._covered
        if self._due(step).any() or (self.keep_generated and not reads_all):
            return None
        return reads_all

    def select(self, layer: int, query: Tensor, step: Step) -> Selection | None:
        """The tokens of first, outlier and newest chunks, and of the best of the others."""
        if layer in self.full_layers or step.max_length <= self._covered:
            return None
        ends, chunks = self._ends(step)
        landmarks, taken = step.cache.page_data[layer]["landmark"], self._taken(layer, step)
        table, local = step.page_table, self._local
        scores = kernels.chunk_scores(query, landmarks, table, taken, chunks, local)
        chosen = kernels.top_k(scores, chunks, self._count, self._chunk, last=local)
        tokens = kernels.block_pages(chosen, ends, 1)
        if self.keep_generated:
            ends_of_prompts = self._end(step.sequences.host_prompts)
            most = int((step.sequences.host_lengths - ends_of_prompts).max())
            tokens = kernels.with_newer(tokens, ends, step.lengths, most)
        return dataclasses.replace(tokens, low_rank=self._low_rank(layer, step))

    def overhead_bytes(self, geometry: Geometry, step: Step) -> Tensor | None:
        """Landmarks of all chunks, low-rank coefficients of the tokens read, and bases."""
        if step.max_length <= self._covered:
            return None
        layouts = [geometry.layers[i] for i in self._sparse_layers(geometry)]
        keys = sum(_width(layout) for layout in layouts)
        ranks = sum(self._rank(layout) * layout.num_kv_heads for layout in layouts)
        bases = sum(self._rank(layout) * _width(layout) for layout in layouts)
        read = step.lengths.clamp(max=self._covered)
        numbers = self._ends(step)[1] * keys + read * ranks + bases
        return numbers * geometry.itemsize

    def _low_rank(self, layer: int, step: Step) -> LowRank | None:
        """Low-rank keys of the prompt, except always-read chunks and short sequences."""
        if self.rank == 0:
            return None
        # From here on full keys are read: generated tokens, newest chunks, and short sequences.
        newest = (self._ends(step)[1] - self._local) * self._chunk
        rotation = step.cache.rotation(layer)
        return LowRank(
            coefficients=step.cache.page_data[layer]["coefficient"],
            basis=step.sequences.state[f"basis {layer}"].index_select(0, step.sequences.slots),
            first=newest.minimum(step.sequences.prompts).masked_fill(
                step.lengths <= self._covered, 0
            ),
            taken=self._taken(layer, step),
            chunk=self._chunk,
            frequencies=rotation.frequencies,
            last=rotation.last,
        )

    def _due(self, step: Step) -> np.ndarray:
        """Sequences that just exceeded the budget, bool [B]."""
        lengths = step.sequences.host_lengths
        due: np.ndarray = (step.sequences.fresh & (lengths > self._covered)) | (
            lengths == self._covered + 1
        )
        return due

    def _taken(self, layer: int, step: Step) -> Tensor:
        """First and outlier chunks, int32 [B, Hkv, n]; -1 in sequences within the budget."""
        short = (step.lengths <= self._covered)[:, None, None]
        return step.sequences.state[f"taken {layer}"][step.sequences.slots].masked_fill(short, -1)

    def _ends(self, step: Step) -> tuple[Tensor, Tensor]:
        """Candidate tokens, and their chunks, int32 [B] each."""
        ends = self._end(step.sequences.prompts) if self.keep_generated else step.lengths
        return ends, (ends + self._chunk - 1) // self._chunk

    def _end(self, prompts: Any) -> Any:
        """The end of a prompt's last whole chunk, for arrays or tensors."""
        return prompts // self._chunk * self._chunk

    def _rank(self, layout: LayerLayout) -> int:
        """Numbers per key of all KV heads: the authors' 160 of 1024, and never more than half.

        Small models need a larger share: 10 of the bundled model's 64 are too few.
        """
        return min(160, _width(layout) // 2) if self.rank is None else self.rank

    @property
    def _covered(self) -> int:
        """The length up to which everything is read."""
        return self._count * self._chunk

    @property
    def _always(self) -> int:
        """Chunks that are always read."""
        return self._sinks + self._outliers + self._local

    @property
    def _count(self) -> int:
        """Chunks that a step reads, without generated tokens outside the budget."""
        return self.token_budget // self._chunk + (self._always if self.always_beside else 0)

    @property
    def _chunk(self) -> int:
        assert self.chunk_size is not None, "settled by resolve"
        return self.chunk_size

    @property
    def _outliers(self) -> int:
        assert self.outlier_chunks is not None, "settled by resolve"
        return self.outlier_chunks

    @property
    def _sinks(self) -> int:
        """Chunks of the first tokens."""
        return -(-self.sink_size // self._chunk)

    @property
    def _local(self) -> int:
        """Chunks of the newest tokens."""
        assert self.window_size is not None, "settled by resolve"
        return -(-self.window_size // self._chunk)


def _width(layout: LayerLayout) -> int:
    """Numbers of a token's key, all KV heads."""
    return layout.num_kv_heads * layout.key_dim
