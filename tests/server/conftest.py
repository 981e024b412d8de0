"""A server on this machine, in a thread of this process, and OpenAI's own client."""

from __future__ import annotations

import os
import pkgutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from keyhole import LLM, AsyncLLM
from keyhole.server import run
from keyhole.server.app import create_app
from keyhole.server.settings import ServerConfig
from tests.checkpoints import make_model

#: Serves in place of `serving`, such as on a Ray cluster, where these tests run again.
_OTHER = os.environ.get("KEYHOLE_TEST_SERVING")


@contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[str]:
    """The address of a server that lives as long as the block."""
    other = in_this_process if _OTHER is None else pkgutil.resolve_name(_OTHER)
    with other(llm, **settings) as address:
        yield address


@contextmanager
def in_this_process(llm: LLM, **settings: Any) -> Iterator[str]:
    """`serving`, by a thread."""
    config = ServerConfig(port=0, **settings)
    app = create_app(AsyncLLM(llm), config)
    listens = threading.Event()
    server = run.Server(uvicorn.Config(app, log_config=None, access_log=False), listens.set)
    with run.listening(config) as place:
        thread = threading.Thread(target=lambda: server.run(sockets=[place]))
        thread.start()
        try:
            assert listens.wait(30)
            yield f"http://127.0.0.1:{place.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def own_engine() -> None:
    """For tests that look into the one engine that serves, or at the HTTP server around it."""
    if _OTHER is not None:
        pytest.skip("other processes serve, behind another HTTP server")


def make_llm(folder: Path) -> LLM:
    path = make_model("llama", folder, tokenizer=True, vocab_size=300)
    return LLM(path, memory="8MiB", max_batch=4, documents=folder / "documents")


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def address(llm: LLM) -> Iterator[str]:
    with serving(llm, served_model_name="small") as address:
        yield address


@pytest.fixture(scope="module")  # each reads all of the system's certificates
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client
