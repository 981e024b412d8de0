"""Operations that are written in PyTorch over `operations`, which backends compute."""

from keyhole.kernels import cpu, cpu_attention
from keyhole.kernels.composed import low_rank
from keyhole.kernels.composed.blocks import (
    add_received,
    antidiagonal_scores,
    between_ends,
    block_pages,
    block_scores,
    index_scores,
    pool_keys,
    represent_blocks,
)
from keyhole.kernels.composed.clusters import (
    attend_per_query_head,
    bound_scores_per_query_head,
    cluster_scores,
    cluster_scores_per_query_head,
    form_clusters,
)
from keyhole.kernels.composed.low_rank import (
    Rotation,
    chunk_landmarks,
    chunk_scores,
    decompose,
    outlier_chunks,
)
from keyhole.kernels.composed.observation import (
    keep_queries,
    last_queries,
    most_observed,
    observed_attention,
    read_kept,
    redundancy_scores,
)
from keyhole.kernels.composed.selections import (
    attend_and_score_chosen,
    drop_oldest,
    head_scores_chosen,
    keep,
    kept,
    prompt_scores,
    renew_stamps,
    with_newer,
)
from keyhole.kernels.operations import operation

attend_low_rank = operation(
    low_rank.attend_low_rank, cpu_attention.attend_low_rank, cpu.takes_floats
)

__all__ = [
    "Rotation",
    "add_received",
    "antidiagonal_scores",
    "attend_and_score_chosen",
    "attend_low_rank",
    "attend_per_query_head",
    "between_ends",
    "block_pages",
    "block_scores",
    "bound_scores_per_query_head",
    "chunk_landmarks",
    "chunk_scores",
    "cluster_scores",
    "cluster_scores_per_query_head",
    "decompose",
    "drop_oldest",
    "form_clusters",
    "head_scores_chosen",
    "index_scores",
    "keep",
    "keep_queries",
    "kept",
    "last_queries",
    "most_observed",
    "observed_attention",
    "outlier_chunks",
    "pool_keys",
    "prompt_scores",
    "read_kept",
    "redundancy_scores",
    "renew_stamps",
    "represent_blocks",
    "with_newer",
]
