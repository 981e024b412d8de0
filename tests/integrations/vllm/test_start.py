"""What is refused when an engine is configured, and what happens without a policy: nothing.

Run by `make test-vllm`, in a separate environment.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")

# First, as it sets the environment that vLLM reads.
from tests.integrations.vllm.engines import MAX_LENGTH, PAGE_SIZE, make_checkpoint  # isort: skip

from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs

from keyhole.errors import ConfigError, UnknownNameError
from keyhole.integrations.vllm import start
from tests.checkpoints import make_model

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and what it brings along

QUEST = {"policy": "quest", "token_budget": 4 * PAGE_SIZE}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def configure(checkpoint: str, asked: dict[str, Any] | None = QUEST, **settings: Any) -> Any:
    config = {} if asked is None else {"keyhole": asked}
    given = {"block_size": PAGE_SIZE, "max_model_len": MAX_LENGTH, "enforce_eager": True}
    args = EngineArgs(model=checkpoint, additional_config=config, **(given | settings))
    return args.create_engine_config()


def test_a_policy_that_can_run_is_accepted(checkpoint: str) -> None:
    assert configure(checkpoint).additional_config == {"keyhole": QUEST}


@pytest.mark.parametrize(
    ("asked", "settings", "said"),
    [
        (QUEST | {"token_budget": PAGE_SIZE - 1}, {}, "token_budget 31 must be at least one page"),
        (QUEST | {"budget": 64}, {}, "unknown setting of quest 'budget'|budget"),
        ({"policy": "raas"}, {}, "'raas' cannot run in vLLM: it keeps data per sequence"),
        ({"policy": "spe_context"}, {}, "selects by a retrieval head, which vLLM does not run"),
        ({"policy": "seer_attention_r"}, {}, "by a trained gate, which is not loaded into vLLM"),
        (
            {"policy": "delta", "delta_layers": [9], "full_layers": [0]},
            {},
            r"delta_layers \[9\] must be full-attention layers|delta_layers \(9,\) must be",
        ),
        (QUEST, {"kv_cache_dtype": "fp8"}, "a KV cache of type 'fp8'"),
        (
            QUEST,
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "pages loaded by a KV connector would lack the data of this policy",
        ),
        (QUEST, {"pipeline_parallel_size": 2}, "pipeline parallelism; layers share selections"),
    ],
)
def test_what_cannot_work_is_refused(
    asked: dict[str, Any], settings: dict[str, Any], said: str, checkpoint: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(checkpoint, asked, **settings)


def test_an_unknown_policy_is_refused_with_the_nearest_name(checkpoint: str) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'quest'"):
        configure(checkpoint, {"policy": "qest"})


DOCUMENTS = {"kv_connector": "KeyholeConnector", "kv_role": "kv_consumer"}


@pytest.mark.parametrize(
    ("extra", "settings", "said"),
    [
        ({"place": "/tmp"}, {}, "kv_connector_extra_config 'place' is not a setting"),
        ({"documents": "ftq://host/kv"}, {}, "protocol of a document place 'ftq'"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline parallelism: no rank has all layers"),
        ({}, {"kv_cache_dtype": "fp8"}, "a KV cache of type 'fp8'"),
        ({}, {"enable_lora": True}, "LoRA: documents are encoded by the model without it"),
    ],
)
def test_an_engine_that_cannot_have_stored_documents_is_refused(
    extra: dict[str, Any], settings: dict[str, Any], said: str, checkpoint: str, tmp_path: Path
) -> None:
    transfer = {**DOCUMENTS, "kv_connector_extra_config": {"documents": str(tmp_path), **extra}}
    with pytest.raises(ConfigError, match=said) as error:
        configure(checkpoint, None, kv_transfer_config=transfer, **settings)
    assert "\n" not in str(error.value)


def test_stored_documents_need_keys_that_can_be_rotated(tmp_path: Path) -> None:
    checkpoint = make_model("gpt_bigcode", tmp_path, tokenizer=True)
    with pytest.raises(ConfigError, match="stored documents cannot be used with"):
        configure(checkpoint, None, kv_transfer_config=DOCUMENTS, max_model_len=256)


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    checkpoint = make_model("deepseek_v3", tmp_path, tokenizer=True)
    with pytest.raises(ConfigError, match=r"this model has latent attention \(MLA\)"):
        configure(checkpoint, max_model_len=256)


def test_an_embedding_model_is_refused(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"does not generate \(embedding, encoder\)"):
        configure(checkpoint, runner="pooling")


def test_without_a_policy_nothing_changes_and_nothing_is_said(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    start.register()
    with caplog.at_level(logging.DEBUG):
        config = configure(checkpoint, None, kv_cache_dtype="fp8")
    assert config.attention_config.backend is None
    assert not [record for record in caplog.records if "keyhole" in record.name.lower()]


def test_registering_again_has_no_effect() -> None:
    before = EngineArgs.create_engine_config
    start.register()
    assert EngineArgs.create_engine_config is before


def test_on_a_gpu_full_graphs_become_piecewise_and_our_backend_is_chosen(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU build has no graphs, so the step that a GPU takes is called by itself."""
    config = configure(checkpoint)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    said: list[str] = []
    monkeypatch.setattr(start.logger, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setenv("KEYHOLE_VLLM_BACKEND", "")
    start._use_cuda(config)
    assert config.attention_config.backend.name == "CUSTOM"
    assert config.attention_config.backend.get_class().__name__ == "KeyholeFlashBackend"
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.PIECEWISE
    assert said == [
        "Keyhole: CUDA graphs FULL_AND_PIECEWISE become PIECEWISE: in a full graph no policy is "
        "called"
    ]
