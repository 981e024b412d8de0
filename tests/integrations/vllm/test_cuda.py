"""The backends for a GPU over metadata as vLLM's builders make it there.

Shapes, dtypes and layouts were read in vLLM 0.32 and 0.33: a cache [P, Hkv, page_size, 2 D] whose
heads are apart (LBHNC), int32 tables and lengths, `query_start_loc` of R + 1.
`recorded_metadata.json` has the fields of both versions' metadata, and the rows of the buffers that
the Triton backend splits long sequences into: 0.32 allocates them for `seq_threshold_3D` requests,
0.33 for at most `max_num_seqs`. The kernels are replaced by attention in float64; Keyhole's Triton
kernels run under the interpreter in `tests/kernels`. Run by `make test-vllm`, in an environment of
its own.
"""

from __future__ import annotations

import json
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")

from vllm import __version__
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.integrations.vllm import backend, cuda
from keyhole.integrations.vllm.adapter import Adapter, Shared
from keyhole.integrations.vllm.counters import ReadCounters
from keyhole.integrations.vllm.page_policy import page_policy
from keyhole.integrations.vllm.step_rows import Requests, step_rows
from keyhole.policies import make_policy
from tests.oracle import attention, float64

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and what it brings along

PAGE, HKV, G, D = 16, 2, 2, 64
LAYOUT = LayerLayout(num_kv_heads=HKV, key_dim=D, value_dim=D, num_query_heads=HKV * G)
GEOMETRY = Geometry(layers=(LAYOUT,) * 4, num_query_heads=HKV * G, page_size=PAGE, itemsize=4)
SETTINGS = {
    "quest": {"token_budget": 3 * PAGE, "full_layers": (0,)},
    "delta": {"token_budget": 3 * PAGE, "full_layers": (0,), "delta_layers": (1,)},
    "streaming_llm": {"token_budget": 3 * PAGE, "full_layers": (0,)},
}
BACKENDS = {
    "flash": (FlashAttentionImpl, cuda.KeyholeFlashAttention, cuda.KeyholeFlashBuilder),
    "triton": (TritonAttentionImpl, cuda.KeyholeTritonAttention, cuda.KeyholeTritonBuilder),
}
RECORDED = json.loads(Path(__file__).with_name("recorded_metadata.json").read_text())
VERSIONS = sorted(RECORDED)
METADATA = {"flash": FlashAttentionMetadata, "triton": TritonAttentionMetadata}
#: Decoding requests of 150 and 40 tokens, and a prompt whose chunk of 20 ends at 50.
LENGTHS, COUNTS = (150, 40, 50), (1, 1, 20)


def recorded(version: str, kind: str, values: dict[str, Any]) -> Any:
    """Metadata with exactly the fields of a version of vLLM; those without a value are None."""
    names = RECORDED[version][kind]
    made = make_dataclass("Recorded", names)(**{name: values.pop(name, None) for name in names})
    assert not values, f"vLLM {version} has no such fields: {sorted(values)}"
    return made


def make_metadata(version: str, kind: str, table: Tensor) -> Any:
    starts = np.cumsum([0, *COUNTS])
    common = {
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(COUNTS),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "max_seq_len": max(LENGTHS),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "block_table": table,
        "slot_mapping": torch.zeros(int(starts[-1]), dtype=torch.int64),
    }
    if kind == "flash":
        more = {"scheduler_metadata": torch.zeros(4), "max_num_splits": 8}
    else:
        rows = RECORDED[version]["triton_buffer_rows"]
        more = {
            "softmax_segm_output": torch.zeros(rows, HKV * G, 16, D),
            "softmax_segm_max": torch.zeros(rows, HKV * G, 16),
            "softmax_segm_expsum": torch.zeros(rows, HKV * G, 16),
            "seq_threshold_3D": 64,
            "num_par_softmax_segments": 16,
        }
    made = recorded(version, kind, {**common, **more, "causal": True})
    made.keyhole = step_rows(
        Requests(
            starts=starts,
            most=np.array(LENGTHS),
            lengths=made.seq_lens,
            block_table=table,
            prefilling=np.array([False, False, True]),
        ),
        PAGE,
        1,
    )
    made.keyhole_builder = object.__new__(BACKENDS[kind][2])
    return made


def dense(calls: list[Any]) -> Any:
    """vLLM's attention as plain numbers; records what it was called with."""

    def forward(
        self: Any,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        md: Any,
        output: Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Tensor:
        calls.append((self, md, kv))
        keys, values = kv.transpose(1, 2).split(D, -1)  # [P, page_size, Hkv, D]
        starts, lengths = md.query_start_loc.tolist(), md.seq_lens.tolist()
        assert len(starts) == len(lengths) + 1 == len(md.block_table) + 1
        assert md.num_actual_tokens == starts[-1] <= len(query)
        assert max(lengths) <= md.max_seq_len
        assert self.num_kv_heads == kv.shape[1]
        for r, length in enumerate(lengths):
            pages = md.block_table[r, : -(-length // PAGE)].long()
            cached = [
                float64(x[pages].flatten(0, 1)[:length].transpose(0, 1)) for x in (keys, values)
            ]
            count = starts[r + 1] - starts[r]
            assert count <= md.max_query_len
            for i in range(count):
                read = [list(range(length - count + 1 + i))] * kv.shape[1]
                row = starts[r] + i
                out, _ = attention(float64(query[row]), *cached, read, scale=self.scale)
                output[row] = torch.from_numpy(out).view(output[row].shape)
        return output

    return forward


@pytest.mark.parametrize("kind", BACKENDS)
def test_the_installed_vllm_has_the_recorded_fields(kind: str) -> None:
    version = __version__.partition("+")[0]
    assert version in RECORDED, "record its metadata"
    assert [field.name for field in fields(METADATA[kind])] == RECORDED[version][kind]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_gpus_metadata_leads_to_the_selected_pages(
    version: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, cls, _ = BACKENDS[kind]
    calls: list[Any] = []
    monkeypatch.setattr(base, "forward", dense(calls))
    context = type("Context", (), {"additional_kwargs": {}})()
    monkeypatch.setattr(backend, "get_forward_context", lambda: context)
    policy = page_policy(make_policy(name, SETTINGS[name]), GEOMETRY)
    adapter = Adapter(policy, GEOMETRY, ReadCounters(None, torch.device("cpu"), 0))
    generator = torch.Generator().manual_seed(0)
    table = (torch.randperm(30, generator=generator) + 1).view(3, 10).to(torch.int32)
    md = make_metadata(version, kind, table)
    T = md.num_actual_tokens
    for number in range(4):
        impl: Any = object.__new__(cls)
        impl.num_heads, impl.num_kv_heads, impl.scale = HKV * G, HKV, D**-0.5
        impl.logits_soft_cap, impl.sinks = 0, None
        impl.adapter, impl.layer_number = adapter, number
        kv = torch.randn(31, HKV, PAGE, 2 * D, generator=generator)
        query = torch.randn(T, HKV * G, D, generator=generator)
        key = value = torch.zeros(T, HKV, D)
        calls.clear()
        output = torch.zeros(T, HKV * G, D)
        impl.forward(None, query, key, value, kv, md, output)
        # Once more as the policy says it, in plain numbers.
        keys, values = kv.split(D, -1)
        step, shared = md.keyhole.step, Shared(selection=md.keyhole.step.shared_selection)
        step.shared_selection = shared.selection
        chosen = None
        if number in adapter.sparse:
            chosen = policy.select(number, query[:2], step)
            assert chosen is not None
        for row in range(2):
            length = LENGTHS[row]
            pages = table[row, : -(-length // PAGE)].long()
            in_order = (x[pages].transpose(0, 1).flatten(1, 2) for x in (keys, values))
            cached = [float64(x[:, :length]) for x in in_order]
            if chosen is None:
                lists = [set(range(10))]
            else:
                lists = [set(pages_of.tolist()) for pages_of in chosen.indices[row]]
            read = [[i for i in range(length) if i // PAGE in pages_of] for pages_of in lists]
            read = read * HKV if len(read) == 1 else read
            expected, _ = attention(float64(query[row]), *cached, read, scale=impl.scale)
            torch.testing.assert_close(
                output[row].double(), torch.from_numpy(expected), atol=1e-5, rtol=0
            )
        assert output[2:].abs().sum() > 0  # the prompt's tokens
        if chosen is None:
            assert [call[1] for call in calls] == [md]
        else:
            decode, prompt = calls[0], calls[1]
            lists = chosen.indices.shape[1]
            assert decode[1].block_table.shape == (2 * lists, 3)
            assert decode[1].block_table.dtype == decode[1].seq_lens.dtype == torch.int32
            assert prompt[1].query_start_loc.tolist() == [0, 20]
            if kind == "flash":
                assert decode[1].scheduler_metadata is None
                assert md.scheduler_metadata is not None
            elif lists > 1:
                rows = RECORDED[version]["triton_buffer_rows"] * HKV
                assert decode[1].softmax_segm_output.shape == (rows, G, 16, D)
                assert rows >= 2 * lists  # else the kernel may not split
            assert decode[2].data_ptr() == kv.data_ptr()


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_full_cuda_graph_is_never_captured(kind: str) -> None:
    builder = BACKENDS[kind][2]
    assert builder._cudagraph_support.name == "NEVER"
    assert not builder.supports_update_block_table


@pytest.mark.parametrize("cls", [cuda.KeyholeFlashBackend, cuda.KeyholeTritonBackend])
def test_heads_are_apart_in_the_cache_that_is_asked_for(cls: Any) -> None:
    assert [layout.name for layout in cls.supported_kv_cache_layouts()] == ["LBHNC"]
    assert cls.get_name() == "CUSTOM"
