"""A revision and a subfolder of a model, and code that it brings."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, GPT2Config

from keyhole import LLM, ConfigError, ModelError, SamplingParams
from keyhole.cli import main
from keyhole.models.loading import load
from keyhole.models.locate import ADAPTER, Origin, locate
from keyhole.models.model_config import read_tokenizer
from tests.checkpoints import make_model, make_network

_COMMITS = {"main": "0" * 40, "v2": "1" * 40}

_CONFIG_CODE = """
from transformers import LlamaConfig

class DoublingConfig(LlamaConfig):
    model_type = "doubling"
"""
_MODEL_CODE = """
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from .configuration_doubling import DoublingConfig

class DoublingMLP(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)

class DoublingForCausalLM(LlamaForCausalLM):
    config_class = DoublingConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = DoublingMLP(config)
        self.post_init()
"""
# Each token depends on those before it by more than attention.
_INEXACT_CODE = _MODEL_CODE.replace("2 * super().forward(x)", "x.cumsum(1) + super().forward(x)")
# Code from before transformers 5.24, where the cache has another name.
_OLD_NAME_CODE = (
    "from inspect import signature"
    + _MODEL_CODE
    + """
    def forward(self, input_ids=None, past_key_values=None, **named):
        name = "cache" if "cache" in signature(super().forward).parameters else "past_key_values"
        return super().forward(input_ids, **named, **{name: past_key_values})
"""
)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two revisions of some/body in the local cache, each with a model at the top and in deep/er.

    The hub is not asked. Returns the folders of the models at the top.
    """
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models--some--body"
    (folder / "refs").mkdir(parents=True)
    found = {}
    for seed, (name, commit) in enumerate(_COMMITS.items()):
        (folder / "refs" / name).write_text(commit)
        found[name] = folder / "snapshots" / commit
        for place, number in ((found[name], seed), (found[name] / "deep" / "er", 10 + seed)):
            made = make_model("llama", tmp_path / "made", tokenizer=True, seed=number)
            shutil.copytree(made, place, dirs_exist_ok=True)
    return found


def _tokens(llm: LLM) -> list[int]:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    return list(llm.generate([[5, 9, 2, 7]], params)[0].token_ids)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("subfolder", [None, "deep/er"])
@pytest.mark.parametrize("revision", [None, "v2"])
def test_a_revision_and_a_subfolder_of_a_hub_id_are_loaded(
    cached: dict[str, Path], revision: str | None, subfolder: str | None
) -> None:
    folder = cached[revision or "main"] / (subfolder or ".")
    wanted = load(folder, "cpu").network.state_dict()
    found = load("some/body", "cpu", origin=Origin(revision, subfolder)).network.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_subfolder_of_a_folder_is_a_model_of_its_own(cached: dict[str, Path]) -> None:
    found = locate(cached["main"], Origin(subfolder="deep/er"))
    assert found.config == cached["main"] / "deep" / "er" / "config.json"
    with pytest.raises(ModelError, match=r"there is no folder .*eq"):
        locate(cached["main"], Origin(subfolder="deep/eq"))


def test_the_subfolder_of_an_adapter_is_not_looked_for_in_its_base(
    cached: dict[str, Path], tmp_path: Path
) -> None:
    """The adapter's base was loaded from its own folder of that name, or was not found."""
    adapter = tmp_path / "trained" / "deep" / "er"
    adapter.mkdir(parents=True)
    settings = {"base_model_name_or_path": "some/body"}
    for revision, commit in ((None, "main"), ("v2", "v2")):
        (adapter / ADAPTER).write_text(json.dumps(settings | {"revision": revision}))
        found = locate(tmp_path / "trained", Origin(subfolder="deep/er"))
        assert (found.adapter, found.config) == (adapter, cached[commit] / "config.json")
        assert found.options["subfolder"] == ""
        assert found.options.get("revision") == revision


def test_an_adapter_at_the_top_of_a_hub_id_is_not_that_of_a_subfolder(
    cached: dict[str, Path],
) -> None:
    """Transformers loaded the base of that adapter, from its folder of that name."""
    pytest.importorskip("peft", reason="without it transformers looks for no adapter")
    settings = {"base_model_name_or_path": "other/body", "peft_type": "LORA"}
    (cached["main"] / ADAPTER).write_text(json.dumps(settings))
    wanted = load(cached["main"] / "deep" / "er", "cpu").network.state_dict()
    found = load("some/body", "cpu", origin=Origin(subfolder="deep/er")).network.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    (cached["main"] / "deep" / "er" / ADAPTER).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="has a LoRA adapter in subfolder 'deep/er': download it"):
        load("some/body", "cpu", origin=Origin(subfolder="deep/er"))


def test_an_unknown_revision_is_not_another_one(cached: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="unknown model 'some/body'"):
        locate("some/body", Origin(revision="v3"))


@pytest.mark.parametrize("subfolder", ["", "/etc", "../other", "a/../../b"])
def test_a_subfolder_is_inside(subfolder: str) -> None:
    with pytest.raises(ConfigError, match="subfolder must be"):
        Origin(subfolder=subfolder)


def test_trust_is_given_as_a_truth_value() -> None:
    with pytest.raises(ConfigError, match="trust_remote_code must be True or False, not 'false'"):
        Origin(trust_remote_code="false")  # type: ignore[arg-type]


def test_a_file_has_no_subfolder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="subfolder 'deep' is for a folder"):
        locate(tmp_path / "small.gguf", Origin(subfolder="deep"))


def test_a_folder_has_no_revision(cached: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="revision 'v2' is for a hub id"):
        LLM(cached["main"], revision="v2")
    loaded = load(cached["main"], "cpu")
    with pytest.raises(ConfigError, match="need the name of a model"):
        LLM(loaded, subfolder="deep")


def test_the_command_line_takes_them(
    cached: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "--model", "some/body", "--memory", "1MiB"]
    assert main([*plan, "--revision", "v2", "--subfolder", "deep/er"]) == 0
    assert main([*plan, "--revision", "v3"]) != 0
    assert "unknown model 'some/body'" in capsys.readouterr().err


def _with_code(folder: Path, code: str) -> Path:
    """A checkpoint of a family that transformers does not have, with its classes."""
    place = Path(make_model("llama", folder)).rename(folder / folder.name)
    return _add_code(place, code)


def _add_code(place: Path, code: str) -> Path:
    (place / "configuration_doubling.py").write_text(_CONFIG_CODE)
    (place / "modeling_doubling.py").write_text(code)
    config = json.loads((place / "config.json").read_text())
    config |= {
        "model_type": "doubling",
        "architectures": ["DoublingForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_doubling.DoublingConfig",
            "AutoModelForCausalLM": "modeling_doubling.DoublingForCausalLM",
        },
    }
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Code is copied to a folder that is thrown away."""
    place = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", place)
        yield


def test_a_hub_id_without_a_tokenizer_takes_token_ids(
    cached: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for file in cached["main"].glob("*token*"):
        file.unlink()
    llm = LLM("some/body", device="cpu")
    assert "'some/body' has no tokenizer in the local cache" in caplog.text
    assert len(_tokens(llm)) == 8
    (cached["main"] / "tokenizer.json").write_text("damaged")
    with pytest.raises(ModelError, match=r"'some/body' cannot be loaded: tokenizer\.json is dam"):
        LLM("some/body", device="cpu")


@pytest.mark.parametrize(
    ("listed", "refused"),
    [
        (["config.json", "deep/er/tokenizer.json"], False),
        (["config.json", "tokenizer.json"], True),  # it exists, so it failed to come
        (ConnectionError("no answer"), True),
    ],
)
def test_a_hub_that_answers_says_whether_there_is_a_tokenizer(
    cached: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    listed: list[str] | Exception,
    refused: bool,
) -> None:
    for file in cached["main"].glob("*token*"):
        file.unlink()
    answer = mock.Mock(side_effect=[listed])
    monkeypatch.setattr("keyhole.models.locate.list_repo_files", answer)
    found = dataclasses.replace(locate("some/body"), unreachable=None)
    if refused:
        with pytest.raises(ModelError, match="cannot be loaded"):
            read_tokenizer(found)
    else:
        assert read_tokenizer(found) is None
    answer.assert_called_once()


def test_a_tokenizer_of_older_files_is_found(tmp_path: Path) -> None:
    """The first tokenizers of GPT-2 are two files whose names say nothing of tokens."""
    place = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    make_network(config).save_pretrained(place)
    (place / "vocab.json").write_text('{"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}')
    (place / "merges.txt").write_text("#version: 0.2\na b\n")
    assert load(place, "cpu").tokenizer.encode("abb") == [3, 2]


@pytest.mark.usefixtures("modules")
def test_code_of_a_model_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    place = _with_code(tmp_path / "doubling", _MODEL_CODE)
    with pytest.raises(ModelError, match="give trust_remote_code=True"):
        LLM(place)
    llm = LLM(place, trust_remote_code=True, device="cpu", dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True).eval()
    tokens = torch.tensor([[5, 9, 2, 7]])
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat([tokens, theirs(tokens).logits[:, -1:].argmax(-1)], 1)
    assert _tokens(llm) == tokens[0, 4:].tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("modules")
def test_a_model_with_code_is_loaded_again(tmp_path: Path) -> None:
    """A TypeError in the gate: transformers knew the class then, and passed on its revision."""
    place = _with_code(tmp_path / "doubling", _MODEL_CODE)
    first, again = (LLM(place, trust_remote_code=True, device="cpu") for _ in range(2))
    adopted = LLM(AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True))
    assert _tokens(first) == _tokens(again) == _tokens(adopted)


@pytest.mark.usefixtures("modules")
def test_documents_of_a_model_with_code_are_placed(tmp_path: Path) -> None:
    """A KeyError: whether keys can be shifted was measured for families of transformers only."""
    place = _with_code(tmp_path / "doubling", _MODEL_CODE)
    settings = {"device": "cpu", "dtype": "float32", "documents": tmp_path / "store"}
    llm = LLM(place, trust_remote_code=True, **settings)
    llm.documents.add("a", {"prompt_token_ids": list(range(3, 40))})
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    asked = llm.ask({"prompt_token_ids": [5, 9]}, documents=["a"], reuse="reuse", params=params)
    assert asked.token_ids == llm.generate([*range(3, 40), 5, 9], params).token_ids


@pytest.mark.usefixtures("modules")
def test_code_from_before_the_cache_had_its_present_name_is_exact(tmp_path: Path) -> None:
    """It got no cache, so that a prompt in chunks had other logits."""
    place = _with_code(tmp_path / "doubling", _OLD_NAME_CODE)
    LLM(place, trust_remote_code=True, device="cpu")


@pytest.mark.usefixtures("modules")
def test_code_that_is_not_exact_is_refused(tmp_path: Path) -> None:
    place = _with_code(tmp_path / "summing", _INEXACT_CODE)
    with pytest.raises(ModelError, match="logits differ"):
        LLM(place, trust_remote_code=True, device="cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("modules")
def test_the_code_of_the_revision_is_what_is_measured(cached: dict[str, Path]) -> None:
    _add_code(cached["main"], _MODEL_CODE)
    _add_code(cached["v2"], _INEXACT_CODE)
    LLM("some/body", trust_remote_code=True, device="cpu")
    with pytest.raises(ModelError, match="logits differ"):
        LLM("some/body", revision="v2", trust_remote_code=True, device="cpu")


@pytest.mark.usefixtures("modules")
def test_a_family_of_transformers_runs_by_its_own_class(tmp_path: Path) -> None:
    """Code beside it would run unmeasured: the gate makes a small model of transformers' class."""
    place = _with_code(tmp_path / "known", _INEXACT_CODE)
    config = json.loads((place / "config.json").read_text())
    config["model_type"] = "llama"
    del config["auto_map"]["AutoConfig"]
    (place / "config.json").write_text(json.dumps(config))
    llm = LLM(place, trust_remote_code=True, device="cpu")
    assert not any("Doubling" in type(m).__name__ for m in llm.engine.model.network.modules())


def test_a_tokenizer_with_code_names_the_flag(tmp_path: Path) -> None:
    place = Path(make_model("llama", tmp_path, tokenizer=True))
    path = place / "tokenizer_config.json"
    own = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer"] * 2},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    with pytest.raises(ModelError, match=r"has a tokenizer .* give trust_remote_code=True"):
        LLM(place)
