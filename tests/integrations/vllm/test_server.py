"""vLLM's API server with two tensor-parallel workers, under DELTA: four processes and a client.

Run by `make test-vllm`, in a separate environment.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")

from openai import BadRequestError, OpenAI

from keyhole.config import SamplingParams
from keyhole.llm import LLM
from tests.checkpoints import make_model
from tests.integrations.vllm.engines import (
    ENVIRONMENT,
    MAX_LENGTH,
    PAGE_SIZE,
    POLICIES,
    make_checkpoint,
    own_tokens,
    paged,
    random_prompts,
)

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and what it brings along

BUDGET = 2 * PAGE_SIZE
ASKED = '{"keyhole": {"policy": "%s", "token_budget": %d, "full_layers": [0, 1], %s}}'
#: Each worker has a core; vLLM's CPU backend wants this said.
SEVERAL = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def command(checkpoint: str, asked: str, *more: str) -> list[str]:
    return [
        sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint),
        *("--served-model-name", "model", "--dtype", "float32", "--enforce-eager"),
        *("--block-size", str(PAGE_SIZE), "--max-model-len", str(MAX_LENGTH)),
        *("--max-num-seqs", "4", "--additional-config", asked, *more),
    ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ended(checkpoint: str, asked: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A server that must not start, and what it said: it neither hangs nor ends with code 0."""
    found = subprocess.run(
        command(checkpoint, asked, *more, "--port", str(free_port())),
        env=os.environ | SEVERAL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode not in (0, None)
    return found


def last_line(checkpoint: str, asked: str, *more: str) -> str:
    """What a server says last that must not start."""
    return ended(checkpoint, asked, *more).stderr.strip().splitlines()[-1]


def connector(place: Path) -> tuple[str, str]:
    config = {
        "kv_connector": "KeyholeConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"documents": str(place)},
    }
    return "--kv-transfer-config", json.dumps(config)


class Server:
    def __init__(self, checkpoint: str, log: Path, documents: Path) -> None:
        self.port = free_port()
        asked = ASKED % ("delta", BUDGET, '"delta_layers": [2, 4]')
        more = ("--tensor-parallel-size", "2", "--port", str(self.port), "--host", "127.0.0.1")
        more += connector(documents)
        self.checkpoint, self.log = checkpoint, log
        self.process = subprocess.Popen(
            command(checkpoint, asked, *more),
            env=os.environ | SEVERAL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def wait(self) -> None:
        for _ in range(900):  # a busy machine takes minutes
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1)
            except OSError:
                time.sleep(1)
            else:
                return
        raise AssertionError(self.log.read_text()[-3000:])

    def metrics(self) -> dict[str, float]:
        url = f"http://127.0.0.1:{self.port}/metrics"
        text = urllib.request.urlopen(url, timeout=30).read().decode()
        found = re.findall(r"^keyhole:(\w+)\{.*\} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}


DOCUMENTS = dict(zip(("one", "two"), random_prompts(75, 40, seed=13), strict=True))
QUESTION = random_prompts(20, seed=14)[0]


def encode(checkpoint: str, place: Path) -> LLM:
    """Keyhole's engine under the server's policy, with the documents in its store."""
    policy = paged("delta", token_budget=BUDGET, **POLICIES["delta"])
    own = LLM(
        checkpoint,
        policy,
        dtype="float32",
        device="cpu",
        memory="64MB",
        page_size=PAGE_SIZE,
        documents=str(place),
    )
    for name, tokens in DOCUMENTS.items():
        own.documents.add(name, {"prompt_token_ids": tokens})
    return own


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    place = tmp_path_factory.mktemp("documents")
    checkpoint = make_checkpoint(folder)
    encode(checkpoint, place)
    running = Server(checkpoint, folder / "log", place)
    try:
        running.wait()
        yield running
    finally:
        running.process.terminate()
        running.process.wait(timeout=300)


def test_a_streaming_client_gets_the_tokens_of_keyholes_engine(server: Server) -> None:
    """The largest weight over all heads selects: of both ranks, each of which has half of them."""
    prompts = random_prompts(200, 90, seed=4)
    expected = own_tokens(
        server.checkpoint, paged("delta", token_budget=BUDGET, **POLICIES["delta"]), prompts, 24
    )
    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    for prompt, tokens in zip(prompts, expected, strict=True):
        stream = client.completions.create(
            model="model",
            prompt=prompt,
            max_tokens=24,
            temperature=0.0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        pieces = [piece.choices[0] for piece in stream]
        got = [token for piece in pieces for token in getattr(piece, "token_ids", None) or []]
        assert got == tokens
        assert len(pieces) > 10


def test_the_metrics_say_what_was_read(server: Server) -> None:
    got = server.metrics()
    assert got["sparse_layers"] == 2
    assert got["rows"] == 2 * 23  # the first token is the prompt's
    assert 0 < got["attended_fraction"] < 1
    assert got["attended_fraction"] == pytest.approx(got["keys_read"] / got["keys_there"])


def test_the_start_says_which_layers_are_sparse_once(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "Keyhole: policy" in line]
    assert len(lines) == 1
    assert "Delta(token_budget=64" in lines[0]
    assert "sparse layers [3, 5]; dense layers [0, 1, 2, 4]" in lines[0]
    assert "the heads of all ranks" in lines[0]


def test_stored_documents_over_http_with_tensor_parallelism(server: Server, tmp_path: Path) -> None:
    """Each rank has the keys of its heads, and computes EPIC's tokens in the same step."""
    names = ["two", "one"]
    answer = encode(server.checkpoint, tmp_path).ask(
        {"prompt_token_ids": QUESTION},
        documents=names,
        reuse="epic:num_initial=8",
        params=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    )
    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)

    def complete(documents: list[str]) -> list[int]:
        transfer = {"documents": documents, "reuse": "epic:num_initial=8"}
        completion = client.completions.create(
            model="model",
            prompt=list(answer.prompt_token_ids),
            max_tokens=24,
            temperature=0.0,
            extra_body={
                "ignore_eos": True,
                "return_token_ids": True,
                "kv_transfer_params": transfer,
            },
        )
        return list(completion.choices[0].token_ids)

    assert complete(names) == list(answer.token_ids)
    with pytest.raises(BadRequestError, match="unknown document 'tow'; did you mean 'two'"):
        complete(["tow", "one"])


@pytest.mark.parametrize(
    ("asked", "more", "said"),
    [
        (ASKED % ("dleta", BUDGET, '"delta_layers": [2]'), (), "did you mean 'delta'?"),
        (ASKED % ("delta", BUDGET, '"delta_layer": [2]'), (), "'delta_layer'"),
        (ASKED % ("delta", PAGE_SIZE - 1, '"delta_layers": [2]'), (), "token_budget 31 must be"),
    ],
)
def test_bad_input_ends_the_server_with_one_line(
    asked: str, more: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    assert said in last_line(make_checkpoint(tmp_path), asked, *more)


def test_a_model_that_a_policy_cannot_serve_ends_the_server_with_one_line(tmp_path: Path) -> None:
    checkpoint = make_model("deepseek_v3", tmp_path, tokenizer=True)
    asked = '{"keyhole": {"policy": "delta", "token_budget": 64}}'
    more = ("--tensor-parallel-size", "2", "--max-model-len", "256")
    assert "latent attention (MLA)" in last_line(checkpoint, asked, *more)


def test_what_only_the_layers_tell_is_said_by_every_rank(tmp_path: Path) -> None:
    """ALiBi is known when the layers are there, in each worker; the server ends, and says why."""
    fields = {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": 128,
        "n_head": 4,
        "n_layer": 2,
        "vocab_size": 272,
        "seq_length": MAX_LENGTH,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    asked = '{"keyhole": {"policy": "streaming_llm", "token_budget": 64}}'
    more = ("--load-format", "dummy", "--skip-tokenizer-init", "--tensor-parallel-size", "2")
    found = ended(str(tmp_path), asked, *more)
    why = "layer 0 has ALiBi, whose distances a selection would change"
    line = f"ConfigError: policy 'streaming_llm' cannot run in vLLM: {why}"
    said = [text for text in found.stdout.splitlines() if text.endswith(line)]
    for rank in ("Worker_TP0", "Worker_TP1"):
        assert any(rank in text for text in said), found.stdout[-3000:]
    assert f"Worker failed with error 'policy 'streaming_llm' cannot run in vLLM: {why}'" in (
        found.stderr
    )


def test_a_store_of_another_model_ends_the_server_with_one_line(tmp_path: Path) -> None:
    other = make_model("llama", tmp_path / "other", tokenizer=True)
    store = LLM(other, dtype="float32", device="cpu", memory="16MB", documents=str(tmp_path / "kv"))
    store.documents.add("one", {"prompt_token_ids": DOCUMENTS["one"]})
    more = ("--tensor-parallel-size", "2", *connector(tmp_path / "kv"))
    said = last_line(make_checkpoint(tmp_path), "{}", *more)
    assert "were encoded by another model: it has" in said
