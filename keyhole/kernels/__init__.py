"""The operations on paged keys and values, computed by the backend of their device.

`operations` are defined by their plain PyTorch twins in `reference/` and computed, with the same
result, by C++ on a CPU (`cpu`, `csrc/`) or Triton and FlashAttention on a GPU (`triton/`);
`composed` ones are written in PyTorch over these. Everything is loaded at the first use of an
operation, so that a policy, its settings and `--help` need no torch.

    append           write new keys and values into pages
    attend           one query token per sequence over all, some pages or some tokens
    attend_per_query_head  the same over pages or tokens selected per query head
    attend_and_score the same over all, and reduced attention weights too
    attend_and_score_chosen  the same over chosen tokens
    prompt_scores    the largest weight of any head, by the softmax over the prompt alone
    head_scores      attention weights alone, the largest of each group of heads
    head_scores_chosen  the same over chosen tokens
    prefill          the query tokens of one sequence, causal, over its pages
    block_sparse_prefill  the query tokens of one sequence over selected blocks of tokens
    sparse_prefill   query tokens at any positions, over chosen tokens not after them
    gather_tokens    keys or values of some tokens of a sequence
    gather_rows      the same, as pages store them
    quantise, dequantised, is_quantised, row_dim  rows of 8-bit numbers with their scale
    page_bounds      elementwise minimum and maximum of the keys of a page
    bound_scores     Quest's upper bound of a query's score on every page
    bound_scores_per_query_head  the same for each query head of a group
    summary_scores   a query's scores on the summaries of pages, or of parts of pages
    spread_scores    the score of a page or cluster, copied to each of its tokens
    add_received     the attention that tokens receive from later queries
    represent_blocks the mean key of the tokens of a block that received most attention
    block_scores     a query's score on blocks of pages, by their representative keys
    pool_keys        the largest, smallest and mean numbers of the keys of a page
    between_ends     the first and last pages, and those of selected blocks between them
    block_pages      the pages of selected blocks
    form_clusters    k-means of some keys of a sequence; centroids and clusters into its pages
    cluster_scores   a query's score on the cluster of every token
    cluster_scores_per_query_head  the same for each query head of a group
    chunk_landmarks  the mean key of each chunk of a page, and how well it fits
    outlier_chunks   the chunks whose means fit worst
    index_scores     the score of every token by a model's own indexer
    antidiagonal_scores  a block of queries' weight on blocks of keys, by every stride-th product
    chunk_scores     a query's weight on the mean of every chunk
    decompose        low-rank keys of a prompt, before RoPE
    attend_low_rank  one query token per sequence over some tokens, with low-rank keys
    top_k            deterministic top-k with positions that are always selected
    top_p            the fewest selected entries that hold a share of the scores
    recent_indices   the first and the last positions
    keep, kept       store a selection; return it with the tokens since
    renew_stamps     record which pages received attention in this step
    drop_oldest      the page that has gone longest without attention
    with_newer       a selection, and the tokens since
    keep_queries     store the queries of new tokens; last_queries returns them
    last_queries     the last queries of a sequence
    observed_attention the attention that tokens of a prompt receive from its last ones
    most_observed    the last tokens, and those of highest score
    redundancy_scores  the importance of tokens less their likeness to others
    read_kept        the kept tokens of a prompt, and generated ones
    shift_rope       shift rotated keys and queries to other positions
    load_missing     copy the selected tokens or pages that a buffer lacks into it
    apply_rope       apply RoPE to queries and keys of new tokens
    apply_rope_and_append  the same, writing keys and values into pages
    linear           a linear layer for the few tokens of a decode step
    rms_norm         an RMS norm
    norm_linears     several linear layers of one input, after its RMS norm
    norm_swiglu      the SwiGLU product of gate and up projections, after an RMS norm
    linear_add       a linear layer and the residual
    pack, unpack     a weight in 4, 6 or 8 bits, and back
    join_codes       the codes of such a weight, from one in a byte
    packed_linear    the same layer with such a weight

Letters in shapes: B sequences, T query tokens, P pages of the cache, M pages of a sequence (its row
of the page table), Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size, n entries.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from keyhole.kernels.selection import (
    LowRank as LowRank,
    PagedQuery as PagedQuery,
    ScoreRequest as ScoreRequest,
    Selection as Selection,
)

if TYPE_CHECKING:
    from keyhole.kernels.composed.blocks import *  # noqa: F403
    from keyhole.kernels.composed.clusters import *  # noqa: F403
    from keyhole.kernels.composed.low_rank import *  # noqa: F403
    from keyhole.kernels.composed.observation import *  # noqa: F403
    from keyhole.kernels.composed.selections import *  # noqa: F403
    from keyhole.kernels.operations import *  # noqa: F403
    from keyhole.kernels.reference import *  # noqa: F403

_COMPOSED = ("blocks", "clusters", "low_rank", "observation", "selections")
#: Where an operation is looked up; `reference` last, as its functions are the twins.
_MODULES = ("operations", *(f"composed.{name}" for name in _COMPOSED), "reference")


def __getattr__(name: str) -> Any:
    is_other = name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}")
    for place in () if is_other else _MODULES:
        operation = getattr(importlib.import_module(f"{__name__}.{place}"), name, None)
        if str(getattr(operation, "__module__", "")).startswith(__name__):  # not what it imports
            globals()[name] = operation
            return operation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
