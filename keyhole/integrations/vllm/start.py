"""Checks an engine's configuration before it starts, and chooses the attention backend.

vLLM has no plugin hook for configuring an engine, so `EngineArgs.create_engine_config` is wrapped,
once: all processes of the engine receive its result. Errors are raised there, before any of these
processes exists.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.metrics import loggers

from keyhole.cache.layout import Geometry, LayerLayout
from keyhole.errors import ConfigError
from keyhole.integrations.vllm.documents.facts import CONNECTOR, is_asked_for
from keyhole.integrations.vllm.documents.facts import prepare as prepare_documents
from keyhole.integrations.vllm.documents.requests import check_requests
from keyhole.integrations.vllm.metrics import KeyholeStatLogger, share_counters
from keyhole.integrations.vllm.page_policy import page_policy
from keyhole.integrations.vllm.settings import read_settings
from keyhole.policies.base import Policy

logger = init_logger("vllm.keyhole")

_PACKAGE = "keyhole.integrations.vllm"
#: vLLM's GPU backends that we extend, and the class that extends each; the first is the default.
_CUDA = {"FLASH_ATTN": "KeyholeFlashBackend", "TRITON_ATTN": "KeyholeTritonBackend"}
_BACKEND = "KEYHOLE_VLLM_BACKEND"
#: KV cache types in the model's own precision.
_KV_DTYPES = ("auto", "float16", "bfloat16", "float32")


def register() -> None:
    """The plugin's entry point, called in every process, possibly more than once.

    Registers the backends, and wraps the configuration of engines.
    """
    if getattr(EngineArgs.create_engine_config, "keyhole", False):
        return
    if current_platform.device_type == "cpu":
        # vLLM's CPU platform always uses this backend, regardless of the configuration.
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{_PACKAGE}.cpu.KeyholeCPUBackend")
    elif os.environ.get(_BACKEND) in _CUDA:  # a worker of an engine that asked for a policy
        _register_cuda(os.environ[_BACKEND])
    KVConnectorFactory.register_connector(CONNECTOR, f"{_PACKAGE}.documents.connector", CONNECTOR)
    plain = EngineArgs.create_engine_config

    @functools.wraps(plain)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        config = plain(self, *args, **kwargs)
        prepare(config)
        return config

    create_engine_config.keyhole = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def prepare(config: VllmConfig) -> None:
    """Refuses what cannot work with a ConfigError; chooses the backend.

    No effect for an engine that asks for neither a policy nor stored documents.
    """
    asked = read_settings(config.additional_config, os.environ)
    stored = is_asked_for(config)
    if stored:
        prepare_documents(config)
        check_requests()
    if asked is not None:
        _check_policy(config, asked.make_policy())
        share_counters()
        _add_stat_logger()
    if (asked is not None or stored) and current_platform.device_type != "cpu":
        _use_cuda(config)


def _check_policy(config: VllmConfig, policy: Policy) -> None:
    for wrong, reason in refusals(config, policy):
        if wrong:
            raise ConfigError(f"policy {policy.name!r} cannot run in vLLM: {reason}")
    if config.cache_config.block_size is not None:
        page_policy(policy, _expected(config))


def refusals(config: VllmConfig, policy: Policy) -> Iterator[tuple[bool, str]]:
    """Everything that the plugin does not support: whether this engine has it, and the reason."""
    model, parallel = config.model_config, config.parallel_config
    kv_dtype = str(config.cache_config.cache_dtype)
    yield model.use_mla, "this model has latent attention (MLA)"
    yield model.runner_type != "generate", "this model does not generate (embedding, encoder)"
    yield model.is_encoder_decoder, "this is an encoder-decoder model"
    yield model.is_mm_prefix_lm, "this model has bidirectional attention within images (prefix LM)"
    yield kv_dtype not in _KV_DTYPES, f"a KV cache of type {kv_dtype!r}; give one of {_KV_DTYPES}"
    yield parallel.pipeline_parallel_size > 1, "pipeline parallelism; layers share selections"
    yield (
        parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "context parallelism: a rank has a part of each sequence's keys",
    )
    yield parallel.use_ubatching, "micro-batches (DBO): layers of two steps would be mixed"
    yield (
        getattr(model.hf_text_config, "attention_chunk_size", None) is not None,
        "this model has chunked attention",
    )
    yield (
        config.kv_transfer_config is not None and type(policy).page_data is not Policy.page_data,
        "pages loaded by a KV connector would lack the data of this policy",
    )
    backend = config.attention_config.backend
    yield not _extends(backend), f"the attention backend {getattr(backend, 'name', backend)}"


def _extends(backend: AttentionBackendEnum | None) -> bool:
    return backend in (None, *(AttentionBackendEnum[name] for name in (*_CUDA, "CPU_ATTN")))


def _register_cuda(name: str) -> None:
    register_backend(AttentionBackendEnum.CUSTOM, f"{_PACKAGE}.cuda.{_CUDA[name]}")


def _use_cuda(config: VllmConfig) -> None:
    """Sets our backend, and piecewise CUDA graphs."""
    wanted = config.attention_config.backend
    if not _extends(wanted):
        raise ConfigError(
            f"stored documents cannot be used with the attention backend {wanted.name}; give one "
            f"of {tuple(_CUDA)}"
        )
    name = "FLASH_ATTN" if wanted is None else wanted.name
    os.environ[_BACKEND] = name  # inherited by the workers
    _register_cuda(name)
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    mode = config.compilation_config.cudagraph_mode
    if mode is not None and mode.has_full_cudagraphs():
        logger.warning(
            "Keyhole: CUDA graphs %s become PIECEWISE: in a full graph no policy is called",
            mode.name,
        )
        config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE


def _expected(config: VllmConfig) -> Geometry:
    """The model's shape according to its configuration, to check settings before any process
    starts.
    """
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None)
    whole = model.get_sliding_window() if not getattr(text, "layer_types", None) else None
    layers = tuple(
        LayerLayout(
            num_kv_heads=model.get_num_kv_heads(parallel),
            key_dim=model.get_head_size(),
            value_dim=model.get_head_size(),
            window=window if kind == "sliding_attention" else whole,
            num_query_heads=model.get_num_attention_heads(parallel),
        )
        for kind in kinds
    )
    return Geometry(
        layers=layers,
        num_query_heads=model.get_num_attention_heads(parallel),
        page_size=config.cache_config.block_size,
        itemsize=model.dtype.itemsize,
    )


def _add_stat_logger() -> None:
    """Makes vLLM's async engines of this process report our counters in addition to their own.

    An entry point in vLLM's group of stat loggers would be loaded for every engine, and would turn
    on statistics even if they were turned off.
    """
    plain = loggers.load_plugins_by_group
    if getattr(plain, "keyhole", False):
        return

    def load_plugins_by_group(group: str) -> dict[str, Any]:
        found: dict[str, Any] = plain(group)
        ours = group == STAT_LOGGER_PLUGINS_GROUP
        return {**found, "keyhole": KeyholeStatLogger} if ours else found

    load_plugins_by_group.keyhole = True  # type: ignore[attr-defined]
    loggers.load_plugins_by_group = load_plugins_by_group
