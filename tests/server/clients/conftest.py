"""Servers as processes for the clients that people use; `make test-clients` installs these.

The clients would fetch lists of prices and models: that is switched off, and a connection that
leaves this machine fails the test.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import EOS, make_model, make_tokenizer
from tests.server import templates
from tests.server.test_serve import process

#: What a model says that was taught to: a call to a user, and an answer to what a tool says.
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
ANSWER = "It is warm in Oslo."
#: Each prompt is only the role of the last message, so that every client asks the same.
TEMPLATE = "{#" + templates.HERMES + "#}[{{ messages[-1].role }}]"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "how warm it is", "parameters": SCHEMA},
}
#: What the bundled model answers with SAID.
FACT = {
    "role": "user",
    "content": (
        "the old river falls . Alma keeps 17 . rain over the quiet field . Moper keeps 42 . a "
        "young wolf sings near the hill . Josa keeps 93 . question : Moper keeps ? answer :"
    ),
}
SAID = "Moper keeps 42"
#: Where the clients are installed.
SITE = os.environ.get("PYTHONPATH", "")
_TAUGHT = {"[user]": f"<tool_call>{CALL}</tool_call>", "[tool]": ANSWER}
_ENVIRONMENT = {
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",  # reads no .env
    "LLM_LOAD_PLUGINS": "",
}


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("PYTHONPATH", raising=False)  # the server's environment is its own
        yield


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def local(host: Any, *others: Any, **named: Any) -> Any:
        assert host in ("127.0.0.1", b"127.0.0.1", "localhost"), f"a client asks {host!r}"
        return resolve(host, *others, **named)

    monkeypatch.setattr(socket, "getaddrinfo", local)


@contextmanager
def _served(*arguments: str) -> Iterator[str]:
    with process(*arguments) as (server, address, _):
        yield f"{address}/v1"
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


@pytest.fixture(scope="session")
def bundled(_quiet: None) -> Iterator[str]:
    """The address of the bundled model."""
    with _served("--policy", "delta:token_budget=256") as address:
        yield address


@pytest.fixture(scope="session")
def taught(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a model of bytes that calls a tool by itself."""
    path = _teach(tmp_path_factory.mktemp("taught"))
    with _served(path, "--memory", "8MiB", "--served-model-name", "taught") as address:
        yield address


def _teach(folder: Path) -> str:
    """A checkpoint that says what is in _TAUGHT, learnt by heart; its path."""
    path = make_model("llama", folder, hidden_size=64, initializer_range=0.05)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    network = AutoModelForCausalLM.from_pretrained(path)
    texts = [tokenizer.encode(asked + said)[1:] for asked, said in _TAUGHT.items()]
    rows = [torch.tensor([[*text, EOS]]) for text in texts]
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(150):
        loss = sum(network(input_ids=row, labels=row).loss for row in rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.save_pretrained(path)
    return path
