"""FlashInfer's decode over pages as its documentation describes it, in plain PyTorch, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: The lengths that were planned, in order.
planned: list[list[int]] = []


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: Any,
        sm_scale: float,
    ) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert 1 <= int(last_page_len.min()) <= int(last_page_len.max()) <= page_size
        assert int(indptr[-1]) == len(indices)
        self._rows = [
            (indices[start:end].long(), (end - start - 1) * page_size + last)
            for start, end, last in zip(
                indptr[:-1].tolist(), indptr[1:].tolist(), last_page_len.tolist(), strict=True
            )
        ]
        planned.append([length for _, length in self._rows])
        self._shape = num_qo_heads, num_kv_heads, head_dim
        self._dtype, self._scale = q_data_type, sm_scale

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        num_heads, num_kv_heads, dim = self._shape
        assert q.shape == (len(self._rows), num_heads, dim)
        assert q.dtype == self._dtype
        rows = []
        for query, (pages, length) in zip(q, self._rows, strict=True):
            keys, values = (
                x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in paged_kv_cache
            )
            grouped = query.view(num_kv_heads, -1, dim)
            weights = (self._scale * grouped @ keys.transpose(1, 2)).softmax(-1)
            rows.append((weights @ values).flatten(0, 1))
        return torch.stack(rows)
