"""The parts of our attention backends that vLLM's do not have: a metadata builder and a layer's
attention.

The builder describes each step's decode tokens (`step_rows`). The layer lets the policy select, and
then calls vLLM's own attention with page tables that list only the selected pages. Prompt tokens,
layers with a sliding window, draft models, and engines without a policy use vLLM's own code.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata, max_decode_query_len

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.errors import ConfigError
from keyhole.integrations.vllm.adapter import Adapter, LayerInput, Shared
from keyhole.integrations.vllm.counters import ReadCounters
from keyhole.integrations.vllm.metrics import counters_path
from keyhole.integrations.vllm.page_policy import ByPages, page_policy
from keyhole.integrations.vllm.settings import PluginSettings, read_settings
from keyhole.integrations.vllm.step_rows import Requests, StepRows, Tables, step_rows

logger = init_logger("vllm.keyhole")  # a child of vLLM's logger, which has a handler

#: Key in a step's forward context for the rows of requests that read only some pages.
KEPT_ROWS = "keyhole_kept_rows"

_REDUCE = {"max": ReduceOp.MAX, "sum": ReduceOp.SUM}


def settings_of(config: VllmConfig) -> PluginSettings | None:
    """The plugin's settings of an engine; None without a policy."""
    return read_settings(config.additional_config, os.environ)


class SparseBuilder:
    """Adds `keyhole`, the step's rows, to the metadata that vLLM's builder makes.

    A mixin: put it before a builder of vLLM in the bases of a class.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self._block_size = int(kv_cache_spec.block_size)
        self._asked = settings_of(vllm_config)
        self._threshold = max_decode_query_len(vllm_config)
        if self._asked is not None:
            attach(vllm_config, self._asked, torch.device(device), self._block_size)
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)  # type: ignore[attr-defined]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Adds to vLLM's metadata; `keyhole` is None in a warm-up, and without a policy."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        metadata.keyhole, metadata.keyhole_builder = None, self
        if self._asked is not None and not fast_build:
            requests = requests_of(common_attn_metadata)
            if requests is not None:
                metadata.keyhole = step_rows(requests, self._block_size, self._threshold)
        return metadata

    @property
    def page_size(self) -> int:
        """Tokens per page of the kernels."""
        return self._block_size

    def decode_metadata(self, metadata: Any, rows: StepRows, tables: Tables, heads: int) -> Any:
        """The metadata of only the rows, over `tables`. heads: query heads of each list."""
        count = len(tables.lengths)
        part = copy.copy(metadata)
        part.num_actual_tokens = count
        part.max_query_len = 1
        part.query_start_loc = torch.arange(
            count + 1, dtype=metadata.query_start_loc.dtype, device=tables.lengths.device
        )
        part.seq_lens = tables.lengths
        part.block_table = tables.page_table
        part.max_seq_len = tables.max_length
        self.schedule(part, heads, tables.lists > 1)
        return part

    def prompt_metadata(self, metadata: Any, rows: StepRows) -> Any:
        """The metadata of the requests that are still computing their prompt."""
        part = copy.copy(metadata)
        part.num_actual_tokens = metadata.num_actual_tokens - rows.num_rows
        part.query_start_loc = metadata.query_start_loc[rows.num_requests :] - rows.num_rows
        part.seq_lens = metadata.seq_lens[rows.num_requests :]
        part.block_table = metadata.block_table[rows.num_requests :]
        self.schedule(part, 0, False)
        return part

    def schedule(self, metadata: Any, heads: int, one_head_pages: bool) -> None:
        """Recomputes what depends on lengths and heads. heads 0: the number of the layers."""
        raise AssertionError(f"{type(self).__name__} must define schedule")


def requests_of(common: CommonAttentionMetadata) -> Requests | None:
    """The requests of a step, from vLLM's metadata; None for a warm-up."""
    if common.is_prefilling is None or common.seq_lens_cpu_upper_bound is None:
        return None
    if common.causal is not True:
        return None
    return Requests(
        starts=np.asarray(common.query_start_loc_cpu.numpy(), np.int64),
        most=np.asarray(common.seq_lens_cpu_upper_bound.numpy(), np.int64),
        lengths=common.seq_lens,
        block_table=common.block_table_tensor,
        prefilling=common.is_prefilling.numpy().copy(),
    )


def of_documents(layer: Any, query: Tensor, metadata: Any) -> Any:
    """A layer's metadata without the pages that SamKV dropped; the same if it dropped none.

    Records the queries if a reuse method needs them.
    """
    kept = get_forward_context().additional_kwargs.get(KEPT_ROWS)
    note = getattr(metadata, "keyhole_note", None)
    if kept is None and note is None:
        return metadata
    number = extract_layer_index(layer.layer_name)
    if note is not None:
        note(number, query[: metadata.num_actual_tokens])
    return metadata if kept is None else kept.metadata(metadata, number)


class SparseAttention:
    """A layer's attention: over the policy's selection for decode rows, vLLM's own for the others.

    A mixin: put it before an attention class of vLLM in the bases of a class.
    """

    adapter: Adapter | None = None
    layer_number: int | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Like vLLM's: query [T, Hq, D], kv_cache [P, Hkv, page_size, 2 D]; writes into output."""
        attn_metadata = of_documents(layer, query, attn_metadata)
        rows = getattr(attn_metadata, "keyhole", None)
        adapter, number = self.adapter, self.layer_number
        scales = (output_scale, output_block_scale)
        dense = (query, key, value, kv_cache, attn_metadata, output, *scales)
        if rows is None or adapter is None or number is None:
            return super().forward(layer, *dense)  # type: ignore[misc,no-any-return]
        keys, values = self.pages(layer, kv_cache)
        adapter.written(number, keys, rows)
        if not rows.num_rows:
            return super().forward(layer, *dense)  # type: ignore[misc,no-any-return]
        B = rows.num_rows
        options = {
            "scale": self.scale,  # type: ignore[attr-defined]
            "softcap": self.logits_soft_cap or None,  # type: ignore[attr-defined]
            "sinks": self.sinks,  # type: ignore[attr-defined]
        }
        given = LayerInput(query=query[:B], keys=keys, values=values, options=options)
        shared = get_forward_context().additional_kwargs.setdefault("keyhole", Shared())
        tables = adapter.select(number, rows, shared, given)
        if number == adapter.geometry.full_attention[-1]:
            adapter.counters.end_step(B)
        if tables is None:
            return super().forward(layer, *dense)  # type: ignore[misc,no-any-return]
        self._decode(layer, query, key, value, kv_cache, attn_metadata, output, tables)
        if attn_metadata.num_actual_tokens > B:
            part = attn_metadata.keyhole_builder.prompt_metadata(attn_metadata, rows)
            tail = (query[B:], key[B:], value[B:], kv_cache, part, output[B:])
            super().forward(layer, *tail, *scales)  # type: ignore[misc]
        return output

    def _decode(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        tables: Tables,
    ) -> None:
        """Attention of the rows over their tables, by vLLM's kernel."""
        rows = attn_metadata.keyhole
        B, (Hq, D), lists = rows.num_rows, query.shape[1:], tables.lists
        heads = Hq // lists
        part = attn_metadata.keyhole_builder.decode_metadata(attn_metadata, rows, tables, heads)
        # The heads of a list are adjacent: each list is a sequence of `heads` query heads.
        queries = query[:B].reshape(B * lists, heads, D)
        if lists == 1:
            given = (queries, key[:B], value[:B], kv_cache, part, output[:B].view(queries.shape))
            super().forward(layer, *given)  # type: ignore[misc]
            return
        out = torch.empty_like(queries)
        self.attend_one_head_pages(layer, queries, kv_cache, part, out)
        output[:B] = out.view(output[:B].shape)

    def attend_one_head_pages(
        self, layer: Any, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor
    ) -> None:
        """Attention by vLLM's kernel over pages of one head each: query [B * H, Hq / H, D]."""
        pool = kv_cache.view(kv_cache.shape[0] * kv_cache.shape[1], 1, *kv_cache.shape[2:])
        of_one = copy.copy(self)
        of_one.num_heads, of_one.num_kv_heads = query.shape[1], 1  # type: ignore[attr-defined]
        of_one.num_queries_per_kv = query.shape[1]  # type: ignore[attr-defined]
        of_one.adapter = None
        none = query[:, :1]
        of_one.forward(layer, query, none, none, pool, metadata, output)

    def pages(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the cache, [P, Hkv, page_size, D] each, as views."""
        raise AssertionError(f"{type(self).__name__} must define pages")


def attach(config: VllmConfig, asked: PluginSettings, device: torch.device, page_size: int) -> None:
    """Attaches an adapter to the layers of the model, once per model and rank."""
    layers = model_layers(config)
    if any(layer.impl.adapter is not None for layer in layers.values()):
        return
    geometry = geometry_of(config, layers, page_size)
    policy = page_policy(asked.make_policy(), geometry)
    group = get_tp_group()

    def over_ranks(scores: Tensor, kind: str) -> None:
        all_reduce(scores, _REDUCE[kind], group.device_group)

    several = group.world_size > 1 and asked.tensor_parallel_scores == "all_ranks"
    reduce = over_ranks if several else None
    path = counters_path(config) if group.rank_in_group == 0 else None
    sparse = [i for i in geometry.full_attention if i not in policy.dense_layers(geometry)]
    adapter = Adapter(policy, geometry, ReadCounters(path, device, len(sparse)), reduce)
    for number, layer in layers.items():
        check_layer(layer, adapter, number)
        if geometry.layers[number].window is None:
            layer.impl.adapter, layer.impl.layer_number = adapter, number
    if group.rank_in_group == 0:
        logger.info(
            "Keyhole: policy %s; pages of %d tokens; sparse layers %s; dense layers %s; "
            "layers with a sliding window, left to vLLM: %s; scores over %s",
            policy.inner if isinstance(policy, ByPages) else policy,
            page_size,
            sparse,
            list(policy.dense_layers(geometry)),
            [i for i in range(geometry.num_layers) if i not in geometry.full_attention],
            "the heads of all ranks" if reduce is not None else "the heads of this rank",
        )


def model_layers(config: VllmConfig) -> Mapping[int, Attention]:
    """The attention layers of the target model by number; those of a draft model are left out."""
    count = config.model_config.hf_text_config.num_hidden_layers
    layers: dict[int, Attention] = {}
    for name, layer in get_layers_from_vllm_config(config, Attention).items():
        number = extract_layer_index(name)
        if isinstance(layer.impl, SparseAttention) and number < count:
            layers.setdefault(number, layer)  # the target model is loaded before its draft
    missing = [i for i in range(count) if i not in layers]
    if missing:
        raise ConfigError(
            f"layers {missing} of this model have no attention over cached keys that Keyhole can "
            "run (linear attention, another rank of a pipeline, or a backend that vLLM chose)"
        )
    return layers


def geometry_of(config: VllmConfig, layers: Mapping[int, Attention], page_size: int) -> Geometry:
    """The shape of the model on this rank."""
    return Geometry(
        layers=tuple(
            LayerLayout(
                num_kv_heads=layers[i].num_kv_heads,
                key_dim=layers[i].head_size,
                value_dim=layers[i].head_size_v,
                window=layers[i].sliding_window,
                num_query_heads=layers[i].num_heads,
            )
            for i in range(len(layers))
        ),
        num_query_heads=layers[0].num_heads,
        page_size=page_size,
        itemsize=layers[0].kv_cache_torch_dtype.itemsize,
        calibration=_calibration(config),
    )


def _calibration(config: VllmConfig) -> Path | None:
    """The file of `keyhole calibrate` next to the weights, if there is one."""
    path = Path(config.model_config.model) / "keyhole-delta.json"
    return path if path.is_file() else None


def check_layer(layer: Attention, adapter: Adapter, number: int) -> None:
    """ConfigError for a layer that the policy cannot serve here."""
    impl, policy = layer.impl, adapter.policy
    if number not in adapter.sparse:
        return
    per_head = policy.name == "quest"
    for wrong, reason in (
        (layer.kv_sharing_target_layer_name is not None, "shares its keys with another layer"),
        (impl.alibi_slopes is not None, "has ALiBi, whose distances a selection would change"),
        (per_head and impl.sinks is not None, "has sinks, which need one list for all KV heads"),
        (
            adapter.reads_keys and not impl.knows_layout(layer, adapter.geometry.page_size),
            "has pages whose layout Keyhole does not read (a CPU with AMX in 16 bits)",
        ),
    ):
        if wrong:
            raise ConfigError(f"policy {policy.name!r} cannot run in vLLM: layer {number} {reason}")
