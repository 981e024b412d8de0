"""The one function that every transformers model calls for attention.

Registered as "keyhole" in transformers' own table, so that no model is forked or patched: a model
loaded with `attn_implementation="keyhole"` hands each layer's rotated queries, keys and values to
`attention`, with our `Batch` as the additional keyword argument `keyhole`.

Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

One latent per token, c [rank], and one rotated key part [rope] are cached, shared by all heads. A
head's key is (W_k c, rope) and its value W_v c. With q = (q_nope, q_rope):

    q . k = (W_k^T q_nope) . c + q_rope . rope        and        sum_i a_i v_i = W_v (sum_i a_i c_i)

so attention runs as multi-query attention over (c, rope) with value c, and nothing is expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from keyhole import kernels
from keyhole.errors import ConfigError
from keyhole.kernels import PagedQuery, cpu
from keyhole.models import selective_recompute
from keyhole.models.batch import Batch, Chunk, LastLayer, ScatteredChunk
from keyhole.models.modules import indexed_attention
from keyhole.policies.base import PromptQueries, ScoreRequest, Selection, Step
from keyhole.policies.prefill.base import PromptChunk

NAME = "keyhole"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Any = None,
    keyhole: Batch | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer for a packed row: write, then read what the policy selects.

    query [1, Hq, T, D], key and value [1, Hkv, T, D]. Returns [1, T, Hq, Dv], as transformers
    expects. The arguments are in the order of transformers' own functions, which wrappers rely on.
    indices: what the indexer of a layer returned, an `IndexerRow`.
    """
    if keyhole is None:
        raise ConfigError(
            "Keyhole computes the attention of this model; use it through keyhole.LLM or, inside "
            "keyhole.sparse, call the model or its generate()"
        )
    layer = keyhole.cache.geometry.number(int(module.layer_idx))  # type: ignore[arg-type]
    batch = keyhole.at(layer)
    layout = batch.cache.geometry.layers[layer]
    own_window = None if layout.chunked else layout.window
    # None where a family has the window in its mask alone (PhiMoE).
    assert sliding_window in (None, own_window), (
        f"layer {layer} attends with a window of {sliding_window}, its config says {own_window}"
    )

    rows = query[0].transpose(0, 1)
    if layout.shared_values:
        rows = absorb(module, rows)
        latent = batch.latents.pop(layer)
        index_key = (indices.key[:, None],) if layout.index_dim else ()
        new_key, new_value = torch.cat((*latent, *index_key), -1), None
    else:
        new_key, new_value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    options = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    window = layout.window
    _write(batch, layer, rows, new_key, new_value, window, options)
    if layout.index_topk is not None:
        out = torch.cat(indexed_attention.attend(batch, layer, rows, indices, options))
    else:
        out = _read(batch, layer, rows, new_key, new_value, window, options)
    if layout.shared_values:
        out = expand(module, out)
    return out[None], None


def rotate_and_attend(
    batch: Batch,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Attention of one layer for a packed row that is not rotated yet; returns [T, Hq, D].

    layer: transformers' number of it. query [T, Hq, D], key and value [T, Hkv, D]; rope: cosines
    and sines [T, D]. The layer has no softcap and no sinks; the batch recomputes no stored tokens.
    """
    layer = batch.cache.geometry.number(layer)
    batch = batch.at(layer)
    cache = batch.cache
    layout = cache.geometry.layers[layer]
    pages = cache.keys[layer], cache.values[layer]
    query, key = kernels.apply_rope_and_append(*pages, query, key, value, *rope, batch.slots)
    options, window = {"scale": scale, "softcap": None, "sinks": None}, layout.window
    _show_written(batch, layer, query, window, options)
    return _read(batch, layer, query, key, value, window, options)


def _read(
    batch: Batch,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Reads for query [T, Hq, D] once key and value [T, Hkv, D] are written; [T, Hq, Dv]."""
    cache = batch.cache
    parts = []
    if batch.step is not None:
        rows = slice(batch.num_decode)
        newest = (key[rows], None if value is None else value[rows])
        parts.append(decode(batch, layer, query[rows], newest, window, options))
    for chunk in batch.chunks:
        if isinstance(chunk, ScatteredChunk):
            part = selective_recompute.attend(
                batch, chunk, layer, query[chunk.rows], window, options
            )
        elif cache.geometry.layers[layer].chunked:
            part = _prefill_in_chunks(batch, chunk, layer, query[chunk.rows], options)
        else:
            part = _prefill(batch, chunk, layer, query[chunk.rows], window, options)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _write(
    batch: Batch,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    window: int | None,
    options: dict[str, Any],
) -> None:
    """Writes key and value [T, Hkv, D], and shows them to the policy and the observer.

    Raises LastLayer where the forward pass may end.
    """
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    if batch.rewrite is None:
        kernels.append(keys, None if value is None else values, key, value, batch.slots)
    else:
        selective_recompute.write(batch, batch.rewrite, layer, (key, value))
    _show_written(batch, layer, query, window, options)


def _show_written(
    batch: Batch, layer: int, query: Tensor, window: int | None, options: dict[str, Any]
) -> None:
    """Passes queries and written pages to the policy and the observer; raises as `_write`."""
    cache = batch.cache
    if batch.touched is not None and batch.filled is not None and window is None:
        keeper = batch.policy if batch.keeper is None else batch.keeper
        keeper.on_append(cache.keys[layer], cache.data[layer], batch.touched, batch.filled)
    if batch.observer is not None:
        batch.observer(layer, query, {"window": window, **options})
    if batch.policy.reads_queries and window is None:
        _show(batch, layer, query, options)
    if layer == batch.last_layer:
        raise LastLayer


def _prefill(
    batch: Batch,
    chunk: Chunk,
    layer: int,
    query: Tensor,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Prompt tokens, query [T, Hq, D], over all before them or what the prefill policy selects."""
    keys, policy = batch.cache.keys[layer], None if chunk.dense else batch.prefill
    place = (keys, batch.cache.values[layer], chunk.pages, chunk.start)
    if window is not None or policy is None or policy.is_dense(chunk.start, len(query)):
        return kernels.prefill(query, *place, window=window, **options)
    scoring = options["scale"], options["softcap"]
    blocks = policy.select(layer, PromptChunk(query, keys, chunk.pages, chunk.start, *scoring))
    read, row = blocks.counts.sum(), chunk.rows.start
    batch.blocks_read[row] = batch.blocks_read[row] + read if row in batch.blocks_read else read
    batch.last_reads[row, layer] = blocks.row(-1)
    return kernels.block_sparse_prefill(query, *place, blocks=blocks, **options)


def _show(batch: Batch, layer: int, query: Tensor, options: dict[str, Any]) -> None:
    """Passes the queries [T, Hq, D] of a step to its policy."""
    if batch.step is not None:
        batch.policy.on_queries(layer, query[: batch.num_decode], batch.step, options)
    for chunk in batch.chunks:
        where = (batch.cache.keys[layer], batch.cache.data[layer], chunk.pages)
        shown = PromptQueries(
            query[chunk.rows], *where, chunk.start, chunk.first, chunk.slot, batch.state
        )
        batch.policy.on_prompt_queries(layer, shown, options)


def decode(
    batch: Batch,
    layer: int,
    query: Tensor,
    newest: tuple[Tensor, Tensor | None],
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """The decoding sequences: query [B, Hq, D] over one selection; returns [B, Hq, Dv].

    Every way to read is a case of a selection, where None is everything: the sliding window of a
    layer that has one, all tokens if the policy needs their scores, else what the policy selects.
    newest: the new keys [B, Hkv, D] and values, which are in the cache already.
    """
    step, policy, cache = batch.step, batch.policy, batch.cache
    assert step is not None
    left = step if window is not None else step.retained or step
    paged = PagedQuery(query, cache.keys[layer], cache.values[layer], left.page_table, left.lengths)
    scored: Tensor | None = None
    chosen: Selection | None = None
    if window is not None:
        selection = _in_window(batch, layer, window)
    else:
        requests = policy.needs_scores(layer, step)
        if requests:
            scored, chosen = _attend_and_score(batch, layer, paged, requests, options)
        else:
            chosen = policy.select(layer, query, step)
        selection = _there(step, layer, chosen)
    batch.reads.append(selection)
    if scored is not None and chosen is None:
        batch.prefetch(layer)
        return scored

    if selection is None:
        return kernels.attend(paged, window=window, **options)
    if chosen is not None:
        _check_form(chosen, layer, paged, policy.name)
    operation: Any = kernels.attend
    if selection.low_rank is not None:
        operation = kernels.attend_low_rank
        options = {"low_rank": selection.low_rank, **options}
    # Dense steps read the offloaded pages directly: they do not fit into a buffer.
    elif chosen is not None and batch.prefetcher is not None and layer in batch.prefetcher:
        resident = batch.prefetcher.wait(layer, selection)
        resident.append(*newest)
        paged, selection = PagedQuery(query, *resident.paged), resident.selection
    elif selection.indices.shape[1] > paged.key_pages.shape[1]:
        operation = kernels.attend_per_query_head
    out: Tensor = operation(paged, selection=selection, **options)
    return out


def _check_form(selection: Selection, layer: int, paged: PagedQuery, policy: str) -> None:
    """ConfigError if a policy's selection has a form that kernels, which do not check, misread."""
    indices, counts = selection.indices, selection.counts
    (rows, heads), kv_heads = paged.query.shape[:2], paged.key_pages.shape[1]
    right = indices.dtype == counts.dtype == torch.int32 and indices.shape[:2] == counts.shape
    if right and len(indices) == rows and indices.shape[1] in (1, kv_heads, heads):
        return
    raise ConfigError(
        f"policy {policy!r} selected indices {tuple(indices.shape)} of {indices.dtype} with counts "
        f"{tuple(counts.shape)} of {counts.dtype} in layer {layer}; both must be int32, for {rows} "
        f"sequences and 1, {kv_heads} or {heads} heads"
    )


def _in_window(batch: Batch, layer: int, window: int) -> Selection | None:
    """What a layer with its own sliding window reads; None: the last `window` tokens."""
    step = batch.step
    assert step is not None
    if batch.cache.geometry.layers[layer].chunked:
        assert step.kept_tokens is None, "stored documents have no place in chunks"
        return _newest_in_chunk(step.lengths, window)
    return None if step.kept_tokens is None else step.kept_tokens.selection(layer, window)


def _attend_and_score(
    batch: Batch,
    layer: int,
    paged: PagedQuery,
    requests: tuple[ScoreRequest, ...],
    options: dict[str, Any],
) -> tuple[Tensor, Selection | None]:
    """Attention over everything, and what the policy selects by its scores for this layer."""
    step, policy = batch.step, batch.policy
    assert step is not None
    everything = _there(step, layer, None)
    if everything is None:
        out, scores = kernels.attend_and_score(paged, requests=requests, **options)
    else:
        out, scores = kernels.attend_and_score_chosen(
            paged, selection=everything, requests=requests, **options
        )
    chosen = policy.on_scores(layer, scores, step)
    kept = (step.retained or step).kept_tokens
    if kept is not None and policy.selects == "by_scores" and step.shared_selection is not None:
        step.shared_selection = kept.at_positions(layer, step.shared_selection)
    return out, chosen


def _there(step: Step, layer: int, selection: Selection | None) -> Selection | None:
    """The kept tokens of a selection, where layers dropped tokens of some prompts."""
    kept = (step.retained or step).kept_tokens
    if kept is None:
        return selection
    return kept.selection(layer) if selection is None else kept.within(layer, selection)


# Chunked attention (Llama 4): with chunks of c positions the token at position p reads
# floor(p / c) c .. p. Keys are rotated already, so that a chunk is attended to as a sequence whose
# first page is the chunk's.


def _newest_in_chunk(lengths: Tensor, chunk: int) -> Selection:
    """The tokens that the newest token of each sequence reads; lengths int32 [B]."""
    start = torch.div(lengths - 1, chunk, rounding_mode="floor") * chunk
    indices = start[:, None] + torch.arange(chunk, device=lengths.device, dtype=lengths.dtype)
    indices = indices.masked_fill(indices >= lengths[:, None], -1)
    counts = (lengths - start).to(torch.int32)
    return Selection(indices[:, None].to(torch.int32), counts[:, None], unit=1)


def _prefill_in_chunks(
    batch: Batch, chunk: Chunk, layer: int, query: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention of prompt tokens, query [T, Hq, D]; a call for each chunk of positions."""
    cache = batch.cache
    size = cache.geometry.layers[layer].window
    assert size is not None
    parts = []
    begin, end = chunk.start, chunk.start + len(query)
    while begin < end:
        first = begin // size * size
        stop = min(first + size, end)
        rows = query[begin - chunk.start : stop - chunk.start]
        pages = chunk.pages[first // cache.page_size : -(-stop // cache.page_size)]
        paged = (cache.keys[layer], cache.values[layer], pages, begin - first)
        parts.append(kernels.prefill(rows, *paged, **options))
        begin = stop
    return torch.cat(parts)


AttentionInterface.register(NAME, attention)


def absorb(module: Any, query: Tensor) -> Tensor:
    """Queries [T, Hq, nope + rope] moved into the latent space: [T, Hq, rank + rope]."""
    nope = module.qk_nope_head_dim
    latent = cpu.product(query[..., :nope].transpose(0, 1), _up(module)[:, :nope])
    return torch.cat([latent.transpose(0, 1), query[..., nope:]], -1)


def expand(module: Any, latent: Tensor) -> Tensor:
    """Attended latents [T, Hq, rank] as values of each head, [T, Hq, v_head_dim]."""
    up = _up(module)[:, module.qk_nope_head_dim :]
    return cpu.product(latent.transpose(0, 1), up.mT).transpose(0, 1)


def _up(module: Any) -> Tensor:
    """The up-projection of keys and values, [Hq, nope + v_head_dim, rank]."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(module.num_heads, -1, module.kv_lora_rank)
