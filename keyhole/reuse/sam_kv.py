"""SamKV: documents are pruned by the question and by each other, then partly recomputed.

Cao, Si, Zhang, Liu, Sparse Attention across Multiple-context KV Cache (arXiv 2508.11661), section 3
and appendix A. A document keeps its first and last blocks, and the middle blocks that score highest
for the question, biased by the other documents; a few of the kept tokens are recomputed, with
attention to the other documents.

Cost per prompt: the question once more over the first and last blocks; a product per block, layer
and document; one forward pass of the recomputed tokens over the kept ones.

When to use it: for many documents of which a question needs few passages.

Steps (equations of the paper in brackets):

1. `question_context`: the question is read over the initial and local blocks of all documents.
2. Each document's query is the question's plus a bias from the other documents (1).
3. It offers the share P of its middle blocks that score above its ends, mean over `stable_layers`
(2, 3).
4. In each layer its best blocks by <query, mean key>,
5. of which the best of all documents are kept.
6. Recomputed: tokens of initial and local blocks, and of the kept middle blocks those that
represent an outlier of alpha.
7. `fuse`: new keys and values replace the stored ones, or are fused with them (4).

Differences (theirs | ours | effect measured):
- "total block count divided by the number of contexts" | of the blocks that the documents offer
  (`pooled`): only this yields the paper's 15 % | offered 37.5 % (25.2 to 51.6); all 45.8 % (32.6 to
  59.7), keeping more
- scores are standardised over the blocks that are chosen | over all middle blocks of a document and
  layer | over all 37.5 % (25.2 to 51.6); over the chosen 39.6 % (27.0 to 53.7)
- open: the query of a document's local blocks, and its anchor | the means of their block means |
  not measured: the paper has no other form
- open: where the strongest and weakest blocks are sought | in the middle of the document | not
  measured: as above
- open: P where the anchor is below the weakest block | 0 | not measured: as above
- open: the distances over which alpha and the received attention are measured | 1 to the tokens of
  a block, so that blocks are measured alike (`keyhole.reuse.block_statistics`) | not measured in
  this harness: `docs/samkv.md` has answers before and after
- open: among which blocks alpha must be an outlier | the middle ones of a document and layer | as
  above
- open: a block without an alpha; equal scores | left out of means and deviations, which divide by
  n; the earlier document and block come first | not measured: as above

Beyond the paper, where a mean hides the relevant key: with score="extremes" step 4 compares the
queries of all of the question's tokens with single keys of a block
(`keyhole.reuse.block_scores`), and `share` replaces P in step 3. With score="random" step 4
draws as many blocks at random: a control for the value of the selection. With `max_documents` an
index finds the documents that match the question (the paper names a vector database), and the
others are not opened.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from keyhole.cache.layout import Geometry
from keyhole.config import (
    is_count,
    is_number,
    require,
    require_counts,
    require_known,
    require_layers,
    setting,
)
from keyhole.errors import ConfigError
from keyhole.registry import write_object
from keyhole.reuse.base import PlacedDocument, RecomputePlan, Reuse, starts
from keyhole.reuse.block_scores import (
    Blocks,
    choose,
    extreme_scores,
    gather,
    key_scores,
    moved,
    only_middle,
    outliers,
    personal_queries,
    share,
)
from keyhole.reuse.block_statistics import MOST_LOCAL_BLOCKS


def fused(new: Tensor, old: Tensor) -> Tensor:
    """Fused: theta * new + (1 - theta) * old with theta = cos(new, old) per token (equation 4).

    new, old [n, H, D]; cos over all heads flattened, clamped to [0, 1]. Computed in float32,
    returned in new's dtype.
    """
    x, y = new.float(), old.float()
    theta = cosine_similarity(x.flatten(1), y.flatten(1), dim=1).clamp(0, 1)[:, None, None]
    return (theta * x + (1 - theta) * y).to(new.dtype)


# The first and last blocks of a document that are always kept by default.
_NUM_INITIAL, _NUM_LOCAL = 1, 2

#: The score of each block in a layer for its document's query, float32 [M].
_Score = Callable[[Tensor, Sequence[PlacedDocument], int], Tensor]

UPDATES = ("overwrite", "fusion")
SCORES = ("mean", "extremes", "random")


@dataclass(frozen=True, kw_only=True)
class SamKV(Reuse):
    """The ends of each document, and the middle blocks that the question needs."""

    name: ClassVar[str] = "sam_kv"
    reads_facts: ClassVar[bool] = True
    update: str = setting("overwrite", "overwrite stored keys and values, or fusion with them")
    select: bool = setting(True, "keep middle blocks; False: initial and local ones only")
    score: str = setting(
        "mean",
        "how middle blocks are scored: mean: by their mean key; extremes: by single keys; random: "
        "the same number of blocks at random, the same in all layers, as a control",
    )
    draw: int = setting(0, "seed of score=random; prompts of the same shape keep the same blocks")
    share: float | None = setting(
        None, "share of its middle blocks that a document offers; None: P (eq. 2)"
    )
    bias: bool = setting(True, "bias a document's query by the other documents")
    recompute: bool = setting(True, "recompute some of the kept tokens, over all documents")
    block_size: int = setting(64, "tokens in a block")
    num_initial_blocks: int = setting(_NUM_INITIAL, "first blocks of a document, always kept")
    num_local_blocks: int = setting(_NUM_LOCAL, "last blocks of a document, always kept")
    stable_layers: tuple[int, ...] | None = setting(
        None,
        "layers whose scores decide how many blocks a document offers; None: those calibrated for "
        "the model, else the last 4",
    )
    layers: str | None = setting(
        None, "file of `keyhole calibrate --stable-layers`, instead of stable_layers"
    )
    outlier_sigmas: float = setting(
        3.0, "standard deviations of alpha beyond which a block is an outlier"
    )
    pooled: bool = setting(
        True, "keep the number of offered blocks / documents; False: of all blocks / documents"
    )
    max_documents: int | None = setting(
        None, "open only this many documents, those that match the question best; None: all"
    )

    @property
    def document_limit(self) -> int | None:
        """See `max_documents`."""
        return self.max_documents

    def resolve(self, geometry: Geometry) -> Self:
        """Resolves the stable layers: as given, else calibrated for this model, else the last 4."""
        require_known("update", self.update, UPDATES)
        require_known("score", self.score, SCORES)
        require_counts(self, "draw", "num_initial_blocks", "num_local_blocks", least=0)
        require_counts(self, "block_size")
        good = self.share is None or (is_number(self.share) and 0 < self.share <= 1)
        require(good, "share", self.share, "above 0 and at most 1")
        ends = self.num_initial_blocks + self.num_local_blocks
        right = "at least 1 together with num_local_blocks: middle blocks are measured by them"
        require(ends > 0, "num_initial_blocks", self.num_initial_blocks, right)
        right = "at least 1 with bias, which is made of their queries"
        good = not self.bias or self.num_local_blocks > 0
        require(good, "num_local_blocks", self.num_local_blocks, right)
        right = f"at most {MOST_LOCAL_BLOCKS} with bias: no more queries of a document are stored"
        good = not self.bias or self.num_local_blocks <= MOST_LOCAL_BLOCKS
        require(good, "num_local_blocks", self.num_local_blocks, right)
        most = self.max_documents
        require(most is None or is_count(most), "max_documents", most, "at least 1, or None")
        sigmas = self.outlier_sigmas
        require(is_number(sigmas) and sigmas >= 0, "outlier_sigmas", sigmas, "a number >= 0")
        return dataclasses.replace(self, stable_layers=self._stable(geometry), layers=None)

    def _stable(self, geometry: Geometry) -> tuple[int, ...]:
        if self.layers is not None and self.stable_layers is not None:
            raise ConfigError("give either layers (a file) or stable_layers, not both")
        stable: tuple[int, ...] | None = self.stable_layers
        if stable is None:
            source = geometry.stability if self.layers is None else Path(self.layers)
            if source is None:
                return last_layers(geometry)
            stability = Stability.load(source)
            stability.check_depth(geometry.num_layers)
            stable = stability.stable_layers
        right = f"one or more layers from 0 to {geometry.num_layers - 1}"
        require_layers("stable_layers", stable, right)
        good = len(stable) > 0 and max(stable) < geometry.num_layers
        require(good, "stable_layers", stable, right)
        return tuple(sorted(set(stable)))

    @property
    def fuses(self) -> bool:
        """With fusion."""
        return self.update == "fusion"

    @property
    def extremes(self) -> bool:
        """With score="extremes", if middle blocks are selected."""
        return self.select and self.score == "extremes"

    def question_context(self, documents: Sequence[PlacedDocument]) -> Tensor | None:
        """The initial and local blocks; None if no document has middle blocks."""
        blocks = self._blocks(documents)
        ends = self._ends(blocks)
        return None if not self.select or bool(ends.all()) else blocks.tokens(ends)

    def plan(
        self, documents: Sequence[PlacedDocument], query: Sequence[Tensor] | None
    ) -> RecomputePlan:
        """Initial and local blocks, and selected middle blocks; the module lists the steps."""
        blocks = self._blocks(documents)
        ends = self._ends(blocks)
        shares = (0.0,) * len(documents) if self.select else None
        if ends.all():  # no middle block: nothing depends on statistics, so none are read
            everything = torch.ones(len(documents[0].layers), int(blocks.sizes.sum())).bool()
            again = everything.clone() if self.recompute else torch.zeros_like(everything)
            return RecomputePlan(everything, again, shares)
        alpha = torch.stack(gather(documents, lambda facts: facts.alpha))
        kept = ends.expand_as(alpha).clone()
        if self.select:
            assert query is not None, "the question is read over the question_context first"
            means = self._scores(documents, query, _by_mean)
            scores = means
            if self.score == "extremes":
                scores = self._scores(documents, query, _by_extremes)
            elif self.score == "random":
                generator = torch.Generator().manual_seed(self.draw)
                scores = torch.rand(means.shape[1], generator=generator).expand_as(means)
            shares = self._shares(documents, blocks, means, alpha)
            kept[:, ~ends] = torch.cat(self._chosen(blocks, scores, shares), 1)
        tokens = blocks.tokens(kept)
        if not self.recompute:
            return RecomputePlan(tokens, torch.zeros_like(tokens), shares)
        return RecomputePlan(tokens, self._recomputed(documents, blocks, kept, alpha), shares)

    def fuse(self, new: Tensor, old: Tensor) -> Tensor:
        """The new keys or values, or their fusion with the old."""
        return fused(new, old) if self.fuses else new

    def _blocks(self, documents: Sequence[PlacedDocument]) -> Blocks:
        for document in documents:
            if document.block_size != self.block_size:
                raise ConfigError(
                    f"document {document.name!r} is stored in blocks of {document.block_size} "
                    f"tokens, but block_size is {self.block_size}; set block_size="
                    f"{document.block_size}, or store the document again"
                )
        return Blocks.of(documents)

    def _ends(self, blocks: Blocks) -> Tensor:
        return blocks.ends(self.num_initial_blocks, self.num_local_blocks)

    def _scores(
        self, documents: Sequence[PlacedDocument], query: Sequence[Tensor], score: _Score
    ) -> Tensor:
        """Steps 2 and 4: the score of every block for its document's query, float32 [L, M]."""
        scores = []
        for layer, generic in enumerate(query):
            queries = generic.cpu().expand(len(documents), *generic.shape)
            if self.bias:
                stored = [document.layers[layer].local_queries for document in documents]
                last = [own[-self.num_local_blocks :] for own in stored]
                if len({len(own) for own in last}) == 1:  # one operation for all documents
                    local = torch.stack(last).mean(1)
                else:
                    local = torch.stack([own.mean(0) for own in last])
                local = moved(documents, layer, local, back=False)
                queries = personal_queries(queries[0], local)
            queries = moved(documents, layer, queries, back=True)
            scores.append(score(queries, documents, layer))
        return torch.stack(scores)

    def _shares(
        self,
        documents: Sequence[PlacedDocument],
        blocks: Blocks,
        scores: Tensor,
        alpha: Tensor,
    ) -> tuple[float, ...]:
        """Step 3: the share of its middle that each document offers, or 0; by mean keys."""
        ends = self._ends(blocks)
        if self.share is not None:
            return tuple(0.0 if ends[own].all() else self.share for own in blocks.slices)
        assert self.stable_layers is not None, "resolve() settles the stable layers"
        stable = list(self.stable_layers)
        received = torch.stack(gather(documents, lambda facts: facts.received))
        return tuple(
            share(scores[stable, own], alpha[stable, own], received[stable, own], ends[own])
            .mean()
            .item()
            if not ends[own].all()
            else 0.0
            for own in blocks.slices
        )

    def _chosen(self, blocks: Blocks, scores: Tensor, shares: Sequence[float]) -> list[Tensor]:
        """Steps 4 and 5: per document the middle blocks to keep, bool [L, m]."""
        ends = self._ends(blocks)
        middle = [scores[:, own][:, ~ends[own]] for own in blocks.slices]
        most = None if self.pooled else math.ceil(len(ends) / len(middle))
        return choose(middle, shares, most)

    def _recomputed(
        self,
        documents: Sequence[PlacedDocument],
        blocks: Blocks,
        kept: Tensor,
        alpha: Tensor,
    ) -> Tensor:
        """Step 6: tokens to recompute, bool [L, T]; kept bool [L, M]."""
        ends = self._ends(blocks)
        recomputed = blocks.tokens(ends).expand(len(kept), -1).clone()
        alpha = only_middle(alpha, ends)
        parts = [outliers(alpha[:, own], self.outlier_sigmas) for own in blocks.slices]
        layer, block = (torch.cat(parts, 1) & kept).nonzero(as_tuple=True)
        token = torch.stack(gather(documents, lambda facts: facts.representatives))
        token += torch.tensor(starts(documents)[:-1])[blocks.documents]
        recomputed[layer, token[layer, block]] = True
        return recomputed


def _by_mean(queries: Tensor, documents: Sequence[PlacedDocument], layer: int) -> Tensor:
    """<mean query, mean key> of each block, float32 [M]; queries [n, Hq, D] or [n, t, Hq, D]."""
    mean = queries if queries.ndim == 3 else queries.mean(1)
    return key_scores(mean, [document.layers[layer].block_keys for document in documents])


def _by_extremes(queries: Tensor, documents: Sequence[PlacedDocument], layer: int) -> Tensor:
    """The best score of a block's single keys for any token's query, float32 [M]."""
    pairs = zip(queries, documents, strict=True)
    return torch.cat([extreme_scores(asked, own.extremes[layer].float()) for asked, own in pairs])


#: Name of the file next to a model's weights.
STABILITY_FILE = "keyhole-samkv.json"

#: The paper finds the last 4 layers of Llama 3.1 8B and the last 5 of two other models (A.2).
NUM_STABLE = 4

# Fewer middle blocks have no outliers: see `outliers`.
_LEAST_BLOCKS = 11


@dataclass(frozen=True, kw_only=True)
class Stability:
    """Stable layers measured for one model.

    SamKV, appendix A.2. Ranked by alpha, one block is the most important of a document over all
    layers; a layer in which that block is an outlier has stable attention and scores a point.
    Points are summed over calibration documents, and the layers with the most are the stable ones.

    Difference from the paper: "beta's ranking is an outlier" is read as its alpha being one among
    the blocks of the layer. A rank cannot be: the best of N ranks is 1.7 deviations from their
    mean.

    scores: per layer, the calibration documents whose main block is an outlier there.
    """

    model: str
    num_layers: int
    num_documents: int
    block_size: int
    stable_layers: tuple[int, ...]
    scores: tuple[int, ...]

    def save(self, path: str | Path) -> None:
        """Writes the JSON file that `SamKV(layers=...)` loads, as `write_object`."""
        write_object(path, asdict(self), "the stable layers")

    @classmethod
    def load(cls, path: str | Path) -> Stability:
        """Reads a file of `save`; ConfigError names the fault of an invalid file."""
        try:
            stored = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read stable layers {str(path)!r}: {error}") from error
        names = set(cls.__dataclass_fields__)
        if not isinstance(stored, dict) or set(stored) != names:
            raise ConfigError(
                f"{str(path)!r} has no stable layers: it must be a JSON object with {sorted(names)}"
            )
        for name in ("num_layers", "num_documents", "block_size"):
            _check(path, name, stored[name], is_count(stored[name]), "a whole number >= 1")
        depth = stored["num_layers"]
        layers, scores = stored["stable_layers"], stored["scores"]
        good = isinstance(layers, list) and all(is_count(i, 0) and i < depth for i in layers)
        right = f"one or more layer numbers below {depth}"
        _check(path, "stable_layers", layers, good and bool(layers), right)
        good = isinstance(scores, list) and len(scores) == depth
        good = good and all(is_count(score, 0) for score in scores)
        _check(path, "scores", scores, good, f"{depth} whole numbers >= 0")
        fields: dict[str, Any] = {**stored, "stable_layers": tuple(layers), "scores": tuple(scores)}
        return cls(**fields)

    def check_depth(self, num_layers: int) -> None:
        """ConfigError unless the file was made for a model with this many layers."""
        if self.num_layers != num_layers:
            raise ConfigError(
                f"the stable layers of {self.model!r} are for {self.num_layers} layers, but this "
                f"model has {num_layers}"
            )


def stable_layers(alphas: Sequence[Tensor], num: int = NUM_STABLE) -> tuple[list[int], list[int]]:
    """Scores of all layers, and the `num` layers that score highest, ascending.

    alphas: per calibration document float [L, N], alpha of its blocks, the first one and the last
    two of which do not count. Equal scores: the later layer, as the published ones are the last;
    equal average ranks: the earlier block. ConfigError if no document has the 11 middle blocks that
    an outlier needs.
    """
    depth = len(alphas[0]) if alphas else 0
    require_measurable([alpha.shape[1] for alpha in alphas], depth, num)
    scores = torch.zeros(depth, dtype=torch.int64)
    for every in alphas:
        alpha = every[:, ~default_ends(every.shape[1])]
        if not alpha.shape[1]:
            continue
        ranks = alpha.argsort(dim=1, stable=True).argsort(dim=1)
        main = ranks.sum(0).argmin()
        scores += outliers(alpha)[:, main]
    order = sorted(range(depth), key=lambda layer: (-int(scores[layer]), -layer))
    return scores.tolist(), sorted(order[:num])


def require_measurable(num_blocks: Sequence[int], depth: int, num: int) -> None:
    """ConfigError if documents of these lengths cannot tell `num` layers of `depth`."""
    most = max(num_blocks, default=0)
    least = _LEAST_BLOCKS + _NUM_INITIAL + _NUM_LOCAL
    if most < least:
        raise ConfigError(
            f"stable layers need documents with at least {least} blocks; the longest has {most}; "
            "give longer documents or a smaller block_size"
        )
    require(is_count(num) and num <= depth, "num_stable_layers", num, f"from 1 to {depth}")


def default_ends(num_blocks: int) -> Tensor:
    """Which of a document's blocks SamKV always keeps by default, bool [N]."""
    number = torch.arange(num_blocks)
    return (number < _NUM_INITIAL) | (number >= num_blocks - _NUM_LOCAL)


def last_layers(geometry: Geometry) -> tuple[int, ...]:
    """The default without a calibration: the last layers, with full attention if any have it.

    A layer with a sliding window cannot see across a document.
    """
    return (geometry.full_attention or tuple(range(geometry.num_layers)))[-NUM_STABLE:]


def _check(path: str | Path, name: str, value: object, good: bool, right: str) -> None:
    if not good:
        raise ConfigError(f"{str(path)!r}: {name} {value!r} must be {right}")
