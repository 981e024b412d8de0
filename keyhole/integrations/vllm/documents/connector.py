"""`KeyholeConnector`: stored documents as a KV connector of vLLM (v1).

vLLM lets a connector claim the first tokens of a prompt, and then takes their pages as computed.
The connector claims everything before the question. A thread loads stored keys and values while
other requests run; in the request's first step, before the question, the model computes the tokens
outside of documents and those that the reuse method recomputes (`forward`).
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from keyhole.integrations.vllm.backend import KEPT_ROWS
from keyhole.integrations.vllm.documents.choice import KeptPages, KeptRows, choose
from keyhole.integrations.vllm.documents.forward import compute_runs
from keyhole.integrations.vllm.documents.layout import Layout
from keyhole.integrations.vllm.documents.loader import DocumentLoader
from keyhole.integrations.vllm.documents.requests import DocumentRequest

logger = init_logger("vllm.keyhole")


@dataclass(frozen=True)
class Load:
    """Documents to load into blocks, starting at a position."""

    request_id: str
    request: DocumentRequest
    blocks: list[int]
    begin: int


@dataclass(frozen=True)
class Compute:
    """Tokens to compute for a request before the step's forward pass.

    tokens: its prompt. runs: first and last + 1 of tokens before the question.
    """

    request_id: str
    request: DocumentRequest
    tokens: list[int]
    runs: list[list[int]]
    blocks: list[int]


@dataclass
class StepDocuments(KVConnectorMetadata):
    """What a worker must do for documents in a step."""

    loads: list[Load] = field(default_factory=list)
    computes: list[Compute] = field(default_factory=list)


class KeyholeConnector(KVConnectorBase_V1):
    """Both sides of the connector: the scheduler has an instance, and so has each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._step = StepDocuments()
        # Requests whose load was started, and its first position.
        self._begun: dict[str, int] = {}
        self._runner: Any = None
        self._loader: DocumentLoader | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._loading: dict[str, tuple[Load, Future[None]]] = {}
        self._failed: set[int] = set()
        # Requests whose layers read only some pages.
        self._kept: dict[str, KeptPages] = {}
        self._ended: set[str] = set()
        if role == KVConnectorRole.WORKER:
            _watch_runner(vllm_config)

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The number of tokens before the question; they are loaded between steps."""
        placed = DocumentRequest.of(request)
        count = 0 if placed is None else max(0, placed.end - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Called with the blocks to load into, and again when the request is scheduled after its
        load.
        """
        placed = DocumentRequest.of(request)
        if placed is None:
            return
        own = list(blocks.get_block_ids()[0])
        if num_external_tokens > 0:
            begin = placed.end - num_external_tokens
            self._begun[request.request_id] = begin
            self._step.loads.append(Load(request.request_id, placed, own, begin))
            return
        begin = self._begun.pop(request.request_id, placed.end)
        # After a failed load fewer tokens count as computed, and vLLM computes the prompt itself.
        if begin < placed.end <= request.num_computed_tokens:
            runs = [[max(start, begin), stop] for start, stop in placed.runs if stop > begin]
            tokens = list(request.prompt_token_ids)
            self._step.computes.append(Compute(request.request_id, placed, tokens, runs, own))

    def build_connector_meta(self, scheduler_output: Any) -> StepDocuments:
        """What was collected since the last step."""
        step, self._step = self._step, StepDocuments()
        return step

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is saved or sent."""
        self._begun.pop(request.request_id, None)
        return False, None

    # A worker's side.

    def take_runner(self, runner: Any) -> None:
        """Called once vLLM's model and its pages exist."""
        self._runner = runner
        self._loader = DocumentLoader(self._vllm_config, runner.device)
        self._thread = ThreadPoolExecutor(1, "keyhole-documents")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called on every rank before a step's forward pass: computes the tokens that it depends
        on.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepDocuments)
        for compute in connector_metadata.computes:
            self._compute(compute)
        rows = [
            (row, self._kept[name])
            for row, name in enumerate(self._runner.input_batch.req_ids if self._kept else ())
            if name in self._kept
        ]
        if rows:
            assert self._loader is not None
            found = KeptRows(rows, self._loader.page_size)
            get_forward_context().additional_kwargs[KEPT_ROWS] = found

    def _compute(self, compute: Compute) -> None:
        request, blocks, loader = compute.request, compute.blocks, self._loader
        assert loader is not None, "the model is loaded before the first step"
        if request.method is not None:
            name = compute.request_id
            kept, error = choose(self._runner, loader, name, request, compute.tokens, blocks)
            self._kept[name] = kept
            if error is not None:
                self._fail(name, error, blocks[: request.end // loader.page_size + 1])
        elif compute.runs:
            layout = Layout.whole(request.end, len(blocks), loader.page_size)
            layouts = [layout] * loader.num_layers
            compute_runs(self._runner, compute.tokens, compute.runs, layouts, blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts the step's loads."""
        thread, loader = self._thread, self._loader
        assert thread is not None, "the model is loaded before the first step"
        assert loader is not None
        step = self._get_connector_metadata()
        assert isinstance(step, StepDocuments)
        for load in step.loads:
            work = thread.submit(
                loader.load, load.request_id, load.request, load.blocks, load.begin
            )
            self._loading[load.request_id] = load, work

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose load has ended, successfully or not."""
        for name in finished_req_ids:
            self._kept.pop(name, None)
            if name in self._loading:
                self._ended.add(name)  # aborted: the load goes on
            elif self._loader is not None:
                self._loader.close(name)
        done = {name for name, (_, work) in self._loading.items() if work.done()}
        for name in done:
            load, work = self._loading.pop(name)
            error = work.exception()
            if error is not None:
                size = int(self._vllm_config.cache_config.block_size)
                self._fail(name, error, load.blocks[load.begin // size :])
            if name in self._ended and self._loader is not None:
                self._ended.discard(name)
                self._loader.close(name)
        return None, done or None

    def _fail(self, name: str, error: BaseException, blocks: Sequence[int]) -> None:
        """Reports that these blocks were not filled."""
        logger.error("Keyhole: the documents of request %s: %s", name, error)
        self._failed.update(blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose documents could not be read."""
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        """Ends the thread after its current load."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    # Layers are loaded before the step, and nothing is saved.

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


def _watch_runner(config: Any) -> None:
    """Makes the runner of this process pass itself to the connector once its pages exist.

    vLLM gives a connector the pages, but not the model that computes tokens.
    """
    # Chosen by name, because importing the other runner may need packages that are missing.
    module = "gpu.model_runner" if config.use_v2_model_runner else "gpu_model_runner"
    runners: Any = pkgutil.resolve_name(f"vllm.v1.worker.{module}:GPUModelRunner")
    plain: Callable[..., None] = runners.initialize_kv_cache
    if getattr(plain, "keyhole", False):
        return

    @functools.wraps(plain)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        group = get_kv_transfer_group() if has_kv_transfer_group() else None
        if isinstance(group, KeyholeConnector):
            group.take_runner(self)

    initialize_kv_cache.keyhole = True  # type: ignore[attr-defined]
    runners.initialize_kv_cache = initialize_kv_cache
