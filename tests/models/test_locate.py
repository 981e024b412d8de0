"""A model by its name: the bundled one, a folder, the hub that does not answer, other formats."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

import keyhole
from keyhole import LLM, ConfigError, ModelError, RequestError, SamplingParams
from keyhole.models import checkpoint, loading
from keyhole.models.fast_layers import FastLinear
from keyhole.models.loading import load
from keyhole.models.locate import is_tiny, locate
from tests.checkpoints import make_model, make_tokenizer

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(make_model("llama", tmp_path, tokenizer=True))


def test_the_bundled_model_has_one_name_and_says_once_what_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loading._say_it_is_a_demonstration.cache_clear()
    with caplog.at_level(logging.WARNING, "keyhole"):
        names = {load(name, "cpu").name for name in ("tiny", keyhole.tiny(), Path(keyhole.tiny()))}
    assert names == {"keyhole-tiny"}
    (line,) = caplog.messages
    assert "a demonstration model; it knows only the small artificial language" in line
    assert checkpoint.read("tiny").folder == Path(keyhole.tiny())
    assert is_tiny("tiny")
    assert is_tiny("tiny-hops")
    assert not is_tiny("nowhere/tiny")


def test_a_path_is_never_the_bundled_model(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path("./tiny") was taken as the name of the bundled model."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match=r"unknown model '\./tiny': it is not a folder"):
        load(Path("./tiny"), "cpu")
    path.rename("tiny")
    assert not is_tiny(Path("tiny"))
    loaded = load(Path("./tiny"), "cpu", tokenizer=Path("./tiny"))
    assert (loaded.name, loaded.network.config.model_type) == ("tiny", "llama")
    assert load("tiny", "cpu").name == "keyhole-tiny"


def test_a_model_of_ones_own_says_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(path, "cpu")
    assert caplog.messages == []


@pytest.mark.parametrize("model", [None, "", " ", 5, object()])
def test_no_name_is_an_error_and_never_the_bundled_model(model: object) -> None:
    """An unset variable ran the bundled model."""
    with pytest.raises(ConfigError, match=r"must be a folder, a hub id .* 'tiny'"):
        LLM(model)  # type: ignore[arg-type]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A hub that takes a connection and never answers, and an empty local cache."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("{endpoint}", address)
        template = template.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield address


def test_a_hub_that_does_not_answer_is_named_soon(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 28 seconds, and the cause was dropped."""
    monkeypatch.setattr("keyhole.models.locate._PATIENCE", 0.2)
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"unknown model 'some/body'.*the hub cannot be reached"):
        locate("some/body")
    assert time.monotonic() - begin < 2


def test_a_hub_that_refuses_is_named_with_the_cause(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(silent, f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    with pytest.raises(ModelError, match=r"cannot be reached \(ConnectError: "):
        locate("some/body")


def test_the_local_cache_serves_while_the_hub_does_not_answer(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyhole.models.locate._PATIENCE", 0.1)
    folder = tmp_path / "cache" / "models--some--body"
    snapshot = folder / "snapshots" / "0123456789012345678901234567890123456789"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_text("{}")
    found = locate("some/body")
    assert found.config.samefile(snapshot / "config.json")
    assert found.unreachable is not None


def test_without_the_hub_the_line_says_so() -> None:
    with pytest.raises(ModelError, match="not in the hub's local cache, and the hub is not asked"):
        locate("some/body")
    with pytest.raises(ModelError, match="it is not a hub id such as"):
        locate("some/deep/path")


def test_a_file_that_is_no_model_is_refused(path: Path) -> None:
    with pytest.raises(ModelError, match="is a file; give the folder"):
        LLM(path / "config.json")


def test_adapters_are_never_ignored(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyhole.models.weights.adapters.is_peft_available", lambda: False)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(path)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is a LoRA adapter, and peft.*keyhole\[lora\]"):
        LLM(adapter)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ModelError, match=r"adapter .*next to its weights.*keyhole\[lora\]"):
        LLM(path)
    with pytest.raises(ModelError, match="is an adapter, too"):
        locate(adapter)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "does not name the base model of the adapter: JSONDecodeError"),
        ("{}", "does not name the base model of the adapter: KeyError"),
        ('{"base_model_name_or_path": null}', "base model None of the adapter .* cannot be found"),
        (
            '{"base_model_name_or_path": "some/body"}',
            "cannot be found: unknown model 'some/body'",
        ),
    ],
)
def test_the_model_of_an_adapter_must_be_there(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=said):
        locate(tmp_path)


@pytest.mark.parametrize(
    ("size", "value"), [("num_hidden_layers", -1), ("num_attention_heads", 0), ("vocab_size", -5)]
)
def test_a_size_that_no_model_has_is_one_line(path: Path, size: str, value: int) -> None:
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {size: value}))
    for read in (lambda: LLM(path), lambda: checkpoint.read(path)):
        with pytest.raises(ModelError) as found:
            read()
        assert "\n" not in str(found.value)
        assert "config of" in str(found.value)


def test_a_loaded_model_of_transformers_shares_its_weights_and_stays_as_it_is(path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = network.config._attn_implementation
    llm = LLM(network, tokenizer=make_tokenizer())
    wanted = LLM(path, device="cpu").generate("hello", GREEDY)
    assert llm.generate("hello", GREEDY).text == wanted.text
    ours = dict(llm.engine.model.network.named_parameters())
    assert all(ours[name] is weight for name, weight in network.named_parameters())
    assert network.config._attn_implementation == before
    assert not any(isinstance(module, FastLinear) for module in network.modules())
    ids = torch.tensor([wanted.prompt_token_ids])
    theirs = network.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)
    assert theirs[0, ids.shape[1] :].tolist() == wanted.token_ids
    with pytest.raises(RequestError, match="no tokenizer"):
        LLM(network).generate("hello")
    for loaded in (network, llm.engine.model):
        with pytest.raises(ConfigError, match="dtype is 'bfloat16', but the model is in"):
            LLM(loaded, dtype="bfloat16")
    with pytest.raises(ModelError, match=r"tokenizer must be a transformers tokenizer, not int"):
        LLM(network, tokenizer=5)


def test_a_tokenizer_comes_from_elsewhere(path: Path, tmp_path: Path) -> None:
    bare = make_model("llama", tmp_path)
    assert LLM(bare, device="cpu", tokenizer=path).generate("hello", GREEDY).text


def test_dtypes_and_devices_of_torch_do_as_names_do(path: Path) -> None:
    model = load(path, torch.device("cpu"), torch.bfloat16)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ConfigError, match="device 'mps' is not supported: write auto, cpu or cuda"):
        load(path, "mps")
    with pytest.raises(ConfigError, match="unknown dtype 'int8'"):
        load(path, dtype=torch.int8)
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        load(path, "gpu")
