"""One engine of vLLM in a process of its own, which times decode steps on command.

    python -m benchmarks.serving.vllm_engine SETTINGS    # JSON: see `start`; used by `vllm_plugin`

Every line of standard input is a command, a JSON object with the arguments of `DecodeTimer.decode`,
and is answered by a line. The prompts are not computed: a KV connector claims that their keys and
values are in the pages, which hold random numbers from the start. Steps read as many bytes as with
real ones.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
import vllm
from transformers import AutoConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

from keyhole.bench.settings import SHAPES
from keyhole.integrations.vllm.adapter import Adapter
from keyhole.integrations.vllm.backend import attach, model_layers
from keyhole.integrations.vllm.counters import ReadCounts
from keyhole.integrations.vllm.settings import read_settings
from keyhole.integrations.vllm.step_rows import Requests, step_rows

#: Tokens per page: vLLM's CPU backend needs a multiple of 32.
PAGE_SIZE = 32
#: Untimed steps: the last token of the prompt, and the first decoded token.
_WARM_UP = 2
_FULL = "full"


class FilledPrompts(KVConnectorBase_V1):
    """Claims all tokens of a prompt except the last one, and loads nothing."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """All tokens except the last one, available at once."""
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Does nothing: the contents of the blocks are used as they are."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Empty metadata."""
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


def start(settings: dict[str, Any]) -> vllm.LLM:
    """settings: shape, a name of SHAPES; pages, the most of all requests; length, the most tokens
    of one; batch, the most requests; plugin, whether to load Keyhole's; eager, without
    torch.compile.
    """
    fields = {"model_type": "llama"} | SHAPES[settings["shape"]]
    config = AutoConfig.for_model(**fields, max_position_embeddings=settings["length"])
    config.architectures = ["LlamaForCausalLM"]
    with tempfile.TemporaryDirectory(prefix="keyhole-") as folder:
        config.save_pretrained(folder)
        llm = vllm.LLM(
            folder,
            load_format="dummy",  # random weights
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=settings["eager"],
            block_size=PAGE_SIZE,
            max_model_len=settings["length"],
            max_num_seqs=settings["batch"],
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=settings["pages"] * _page_bytes(config),
            enable_prefix_caching=False,
            kv_transfer_config={
                "kv_connector": "FilledPrompts",
                "kv_connector_module_path": "benchmarks.serving.vllm_engine",
                "kv_role": "kv_both",
            },
            additional_config={"keyhole": {"policy": _FULL}} if settings["plugin"] else {},
        )
    llm.collective_rpc(_fill)
    return llm


def _page_bytes(config: Any) -> int:
    """Keys and values of a page in all layers, in 16 bits."""
    values: int = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return 2 * values * PAGE_SIZE * 2


def _fill(worker: Any) -> None:
    """Fills all pages with random numbers: a different part of one sample in each."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1 << 24, generator=generator).to(torch.bfloat16)
    for cache in worker.model_runner.kv_caches:
        flat = cache.view(-1)
        for begin in range(0, len(flat), len(sample)):
            part = flat[begin : begin + len(sample)]
            shift = int(torch.randint(len(sample), (1,), generator=generator))
            part.copy_(sample.roll(shift)[: len(part)])


class DecodeTimer:
    """An engine, and the adapters of the policies that it has run."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm, self._plugin = start(settings), settings["plugin"]
        self._adapters: dict[str, list[Any]] = {}
        self._count = 0

    def decode(
        self, batch: int, context: int, steps: int, policy: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Milliseconds of decode steps of `batch` requests after `context` tokens.

        policy: as in `additional_config`; None for an engine without the plugin.
        """
        if policy is not None:
            self._use(policy)
        engine = self._llm.llm_engine
        params = vllm.SamplingParams(
            max_tokens=steps + _WARM_UP, temperature=0.0, ignore_eos=True, detokenize=False
        )
        for _ in range(batch):
            self._count += 1
            draw = random.Random(self._count)
            prompt: Any = {"prompt_token_ids": draw.choices(range(256), k=context)}
            engine.add_request(str(self._count), prompt, params)
        before, times = self._counts(), []
        while engine.has_unfinished_requests():
            begin = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - begin))
        assert len(times) == steps + _WARM_UP, "every request has a token in every step"
        return {"step_ms": times[_WARM_UP:], "attended_fraction": _share(before, self._counts())}

    def _use(self, policy: dict[str, Any]) -> None:
        """Runs the next steps under a policy, whose adapter is created at its first use.

        The engine is started under `full`. With Quest it would be refused, because pages that a
        connector fills have no bounds; here the bounds are computed from the pages.
        """
        key = json.dumps(policy)

        def use(worker: Any) -> None:
            layers = model_layers(worker.vllm_config)
            if key in self._adapters:
                for layer, adapter in zip(layers.values(), self._adapters[key], strict=True):
                    layer.impl.adapter = adapter
                return
            for layer in layers.values():
                layer.impl.adapter = None
            asked = read_settings({"keyhole": policy}, {})
            assert asked is not None
            attach(worker.vllm_config, asked, torch.device("cpu"), PAGE_SIZE)
            for number, layer in layers.items():
                keys, _ = layer.impl.pages(layer, layer.kv_cache)
                layer.impl.adapter.written(number, keys, _all_pages(len(keys)))
            self._adapters[key] = [layer.impl.adapter for layer in layers.values()]

        self._llm.collective_rpc(use)

    def _counts(self) -> ReadCounts | None:
        """The counters of all steps so far; None without the plugin."""
        if not self._plugin:
            return None

        def read(worker: Any) -> ReadCounts:
            adapter: Adapter = model_layers(worker.vllm_config)[0].impl.adapter
            return adapter.counters.values

        counts: list[ReadCounts] = self._llm.collective_rpc(read)
        (found,) = counts
        return found


def _share(before: ReadCounts | None, after: ReadCounts | None) -> float | None:
    """Share of the keys that was read in between; all adapters share the counters."""
    if before is None or after is None:
        return None
    there = after.keys_there - before.keys_there
    return (after.keys_read - before.keys_read) / there


def _all_pages(count: int) -> Any:
    """A step that writes every page."""
    tokens = count * PAGE_SIZE
    requests = Requests(
        starts=np.array([0, tokens]),
        most=np.array([tokens]),
        lengths=torch.tensor([tokens], dtype=torch.int32),
        block_table=torch.arange(count, dtype=torch.int32)[None],
        prefilling=np.ones(1, bool),
    )
    return step_rows(requests, PAGE_SIZE, 1)


def main() -> None:
    """Answers on standard output; what vLLM prints there goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    timer = DecodeTimer(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(timer.decode(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
