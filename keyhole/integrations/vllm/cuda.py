"""vLLM's FlashAttention and Triton backends under a policy.

Their pages hold keys and values of a token side by side, `[page_size, 2 D]` per head. Lists per KV
head need pages in which each head is contiguous, which is one of vLLM's layouts (LBHNC). A full
CUDA graph would replay one step's selection in all later ones, so the builders report that they do
not support full graphs; vLLM then captures the pieces between attention layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from keyhole.integrations.vllm.backend import SparseAttention, SparseBuilder


class _TokenRows(SparseAttention):
    """Pages whose rows are keys and values of one token."""

    def pages(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of both halves of each row."""
        keys, values = kv_cache.split(kv_cache.shape[-1] // 2, dim=-1)
        return keys, values

    def knows_layout(self, layer: Any, page_size: int) -> bool:
        """True: the layout is the same on every GPU; quantised caches are refused at start."""
        return True


class KeyholeFlashBuilder(SparseBuilder, FlashAttentionMetadataBuilder):
    """vLLM's builder without full CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    # Each KV cache group needs its own step, because its block table differs.
    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """None."""
        return cls._cudagraph_support

    def schedule(self, metadata: Any, heads: int, one_head_pages: bool) -> None:
        """Removes the schedule, which was made for other lengths; the kernel makes its own."""
        metadata.scheduler_metadata = None
        metadata.max_num_splits = 0


class KeyholeFlashAttention(_TokenRows, FlashAttentionImpl):
    """FlashAttention of a layer, over selected pages."""


class KeyholeTritonBuilder(SparseBuilder, TritonAttentionMetadataBuilder):
    """vLLM's builder without full CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def schedule(self, metadata: Any, heads: int, one_head_pages: bool) -> None:
        """Shapes the buffers of the split kernel for the heads of a list."""
        if not one_head_pages:
            return
        for name in ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"):
            buffer = getattr(metadata, name)
            setattr(metadata, name, buffer.view(-1, heads, *buffer.shape[2:]))


class KeyholeTritonAttention(_TokenRows, TritonAttentionImpl):
    """vLLM's Triton attention of a layer, over selected pages."""


class _HeadMajor:
    """A mixin for a backend of vLLM: the name under which it is registered, and its layout."""

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's registry."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The layout in which a head's page is contiguous."""
        return (KVCacheLayout.LBHNC,)


class KeyholeFlashBackend(_HeadMajor, FlashAttentionBackend):
    """Registered as CUSTOM if a policy is configured."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """The attention of a layer."""
        return KeyholeFlashAttention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return KeyholeFlashBuilder


class KeyholeTritonBackend(_HeadMajor, TritonAttentionBackend):
    """The same over vLLM's Triton kernels, if these are configured."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """The attention of a layer."""
        return KeyholeTritonAttention

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return KeyholeTritonBuilder
