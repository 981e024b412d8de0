"""vLLM's CPU backend under a policy.

Its pages hold, per head, first the keys as `[D, page_size]`, then the values as `[page_size, D]`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
    _get_attn_isa,
)

from keyhole.integrations.vllm.backend import SparseAttention, SparseBuilder

#: Instruction sets whose kernels use the layout above; AMX and others interleave keys and values.
_KNOWN = ("vec", "vec16")


class KeyholeCPUBuilder(SparseBuilder, CPUAttentionMetadataBuilder):
    """vLLM's builder; its schedule depends on lengths and heads."""

    def schedule(self, metadata: Any, heads: int, one_head_pages: bool) -> None:
        """Computes the schedule of this part of the step."""
        metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(metadata.seq_lens),
            num_heads=heads or self.num_heads,
            num_kv_heads=1 if one_head_pages else self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=metadata.seq_lens,
            dtype=self.dtype,
            query_start_loc=metadata.query_start_loc,
            causal=metadata.causal,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=metadata.dynamic_causal,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class KeyholeCPUAttention(SparseAttention, CPUAttentionBackendImpl):
    """vLLM's attention of a layer, over selected pages."""

    def pages(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of both halves of each head's page."""
        P, Hkv, size, width = kv_cache.shape
        halves = kv_cache.view(P, Hkv, 2, width // 2 * size)
        keys = halves[:, :, 0].view(P, Hkv, width // 2, size).transpose(-1, -2)
        return keys, halves[:, :, 1].view(P, Hkv, size, width // 2)

    def knows_layout(self, layer: Any, page_size: int) -> bool:
        """Whether the kernels of this machine store keys as `pages` expects."""
        kind = _get_attn_isa(layer.dtype, page_size, layer.head_size, layer.kv_cache_dtype)
        return kind in _KNOWN


class KeyholeCPUBackend(CPUAttentionBackend):
    """Replaces vLLM's CPU backend; without a policy it behaves like it."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The attention of a layer."""
        return KeyholeCPUAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return KeyholeCPUBuilder
