"""`keyhole serve`, up to where it listens."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole import LLM, Delta
from keyhole.cli import build_parser
from keyhole.config import EngineConfig
from keyhole.server.settings import ServerConfig
from tests.cli.conftest import Run

Served = list[tuple[LLM, ServerConfig]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """What the command would have served."""
    found: Served = []

    def serve(llm: LLM, config: ServerConfig, ready: Callable[[str], None]) -> None:
        found.append((llm, config))
        ready("http://127.0.0.1:8123")

    monkeypatch.setattr("keyhole.server.run.serve", serve)
    return found


def test_every_setting_of_the_llm_and_of_the_server_is_a_flag() -> None:
    found = set(vars(build_parser().parse_args(["serve"])))
    wanted = set(inspect.signature(LLM.__init__).parameters) - {"self"}
    wanted |= {field.name for field in dataclasses.fields(EngineConfig)}
    wanted |= {field.name for field in dataclasses.fields(ServerConfig)}
    assert wanted <= found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to spread layers over")
def test_a_device_map_without_gpus_is_refused(run: Run, path: str) -> None:
    ran = run("serve", path, "--device-map", "auto")
    assert ran.status == 2
    assert "device_map='auto' spreads layers over GPUs, but there are none" in ran.err


def test_it_says_where_it_listens_what_it_runs_and_what_fits(
    run: Run, path: str, served: Served
) -> None:
    flags = ["--policy", "delta:token_budget=64,delta_layers=1", "--memory", "8MiB"]
    ran = run("serve", path, *flags, "--max-batch", "3", "--max-queue", "7", "--port", "8123")
    assert ran.status == 0, ran.err
    ((llm, config),) = served
    assert (llm.engine.config.max_batch, config.max_queue) == (3, 7)
    *_, address, policy, memory = ran.err.splitlines()
    assert address.endswith(" at http://127.0.0.1:8123/v1")
    assert policy.startswith("policy: delta (")
    for field in dataclasses.fields(Delta):
        assert f"{field.name} " in policy
    assert memory.startswith("memory: weights ")
    tokens = llm.engine.max_pages * llm.engine.config.page_size
    assert f"KV cache: room for {tokens:,} tokens" in memory


def test_a_tokenizer_may_be_another_ones(run: Run, path: str, served: Served) -> None:
    for more in ([], ["--tokenizer", str(keyhole.tiny())]):
        assert run("serve", path, "--memory", "8MiB", *more).status == 0
    (own, _), (other, _) = served
    assert own.tokenizer.get_vocab() != other.tokenizer.get_vocab()
    assert other.tokenizer.get_vocab() == LLM("tiny").tokenizer.get_vocab()


def test_a_file_of_keys_may_begin_with_a_byte_order_mark(
    run: Run, served: Served, tmp_path: Path
) -> None:
    """The first key was another one, without a word."""
    keys = tmp_path / "keys.txt"
    keys.write_text("one\r\ntwo\r\n", encoding="utf-8-sig")
    assert run("serve", "--memory", "8MiB", "--api-key-file", str(keys)).status == 0
    ((_, config),) = served
    assert config.api_key == ("one", "two")


def test_without_a_model_it_serves_the_bundled_one(run: Run, served: Served) -> None:
    assert run("serve", "--memory", "8MiB").status == 0
    ((llm, _),) = served
    assert llm.engine.model.name == "keyhole-tiny"
