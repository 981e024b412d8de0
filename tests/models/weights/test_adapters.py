"""LoRA adapters with peft installed: they are applied, alone or beside weights; none is ignored.

Skipped without peft (`keyhole[lora]`). Without it adapters are refused (test_locate.py).
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from keyhole import LLM, SamplingParams
from keyhole.errors import ModelError
from keyhole.eval.verify import verify
from keyhole.models.loading import load
from keyhole.models.locate import locate
from tests.checkpoints import CHAT_TEMPLATE, VOCAB_SIZE, make_model, make_tokenizer
from tests.models.verified import failed

peft = pytest.importorskip("peft", reason="real adapters need it: pip install 'keyhole[lora]'")
pytestmark = pytest.mark.filterwarnings("default")  # peft has its own

WEIGHTS = "adapter_model.safetensors"
PROMPT = list(range(3, 40))
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def lora(*modules: str, **settings: Any) -> Any:
    """The config of an adapter; `settings` has the last word."""
    fields = {"r": 4, "target_modules": [*modules], "task_type": "CAUSAL_LM"} | settings
    return peft.LoraConfig(**fields)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A base model, its adapter alone and beside the weights, and both merged by peft."""
    base = Path(make_model("llama", tmp_path))
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapter, beside, merged = (tmp_path / name for name in ("adapter", "beside", "merged"))
    adapted.save_pretrained(adapter)
    shutil.copytree(base, beside)
    shutil.copytree(adapter, beside, dirs_exist_ok=True)
    adapted.merge_and_unload().save_pretrained(merged)
    return {"base": base, "adapter": adapter, "beside": beside, "merged": merged}


@pytest.mark.slow
def test_an_adapter_beside_weights_is_applied(folders: dict[str, Path]) -> None:
    tokens = {
        name: LLM(folders[name], device="cpu").generate(PROMPT, PARAMS).token_ids
        for name in ("base", "beside", "merged")
    }
    assert tokens["beside"] == tokens["merged"] != tokens["base"]
    assert all(check.passed for check in verify(folders["beside"], "cpu"))


@pytest.mark.slow
def test_an_adapter_alone_is_merged_into_its_model(folders: dict[str, Path]) -> None:
    found = load(folders["adapter"], "cpu")
    assert found.name == "adapter"
    merged = load(folders["merged"], "cpu").network.state_dict()
    ours = found.network.state_dict()
    assert ours.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(ours[name], weight, msg=name)
    wanted = LLM(folders["merged"], device="cpu").generate(PROMPT, PARAMS)
    assert LLM(found).generate(PROMPT, PARAMS).token_ids == wanted.token_ids
    assert failed(found) == []


def test_an_adapter_brings_its_tokenizer_or_template(tmp_path: Path) -> None:
    """Those of the base were taken: added tokens were split, chats had another form."""
    base = make_model("llama", tmp_path, tokenizer=True)
    network = AutoModelForCausalLM.from_pretrained(base)
    adapter = tmp_path / "adapter"
    peft.get_peft_model(network, lora("q_proj")).save_pretrained(adapter)
    assert load(adapter, "cpu").tokenizer.chat_template == CHAT_TEMPLATE
    (adapter / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    message = [{"role": "user", "content": "Hello"}]
    found = load(adapter, "cpu").tokenizer
    assert found.apply_chat_template(message, tokenize=False) == "Hello!"
    own = make_tokenizer()
    own.add_tokens(["<call>"])
    own.save_pretrained(adapter)
    found = load(adapter, "cpu").tokenizer
    assert found.convert_tokens_to_ids("<call>") == own.convert_tokens_to_ids("<call>")
    assert found.apply_chat_template(message, tokenize=False) != "Hello!"


def test_a_config_beside_an_adapter_is_not_a_model(folders: dict[str, Path]) -> None:
    """A training leaves it there; the weights of the model were missed."""
    adapter = folders["adapter"]
    shutil.copy(folders["base"] / "config.json", adapter)
    torch.save({}, adapter / "training_args.bin")
    assert locate(adapter).adapter == adapter
    wanted = LLM(folders["merged"], device="cpu").generate(PROMPT, PARAMS)
    assert LLM(adapter, device="cpu").generate(PROMPT, PARAMS).token_ids == wanted.token_ids
    config = adapter / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": str(adapter)}
    config.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="names its own folder as the base model"):
        locate(adapter)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [VOCAB_SIZE, VOCAB_SIZE + 1]},
    ],
    ids=str,
)
def test_added_tokens_have_their_embeddings(
    tmp_path: Path, settings: dict[str, Any], is_tied: bool
) -> None:
    """Embeddings that peft stores whole did not fit the model."""
    base = make_model("llama", tmp_path, tie_word_embeddings=is_tied)
    network = AutoModelForCausalLM.from_pretrained(base)
    network.resize_token_embeddings(VOCAB_SIZE + 2)
    adapted = peft.get_peft_model(network, lora("q_proj", **settings)).eval()
    torch.manual_seed(0)
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    prompt = [5, VOCAB_SIZE, 7, VOCAB_SIZE + 1, 9]
    with torch.no_grad():
        wanted = adapted(torch.tensor([prompt])).logits[0, -1]
    llm = LLM(tmp_path / "adapter", device="cpu")
    request = llm.engine.add(prompt, PARAMS, keep_logits=True)
    while llm.engine.has_work:
        llm.engine.step()
    assert len(request.logits[0]) == VOCAB_SIZE + 2
    assert (request.logits[0] - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("is_tied", [False, True])
def test_added_tokens_without_an_output_layer_are_refused(tmp_path: Path, is_tied: bool) -> None:
    """Where the two layers are tied, one of them is enough."""
    base = make_model("llama", tmp_path, tie_word_embeddings=is_tied)
    network = AutoModelForCausalLM.from_pretrained(base)
    network.resize_token_embeddings(VOCAB_SIZE + 2)
    peft.get_peft_model(network, lora("embed_tokens")).save_pretrained(tmp_path / "adapter")
    if is_tied:
        assert load(tmp_path / "adapter", "cpu").vocab_size == VOCAB_SIZE + 2
        return
    with pytest.raises(ModelError, match="has 2 tokens that its base lacks, but lacks an embed"):
        load(tmp_path / "adapter", "cpu")


def test_an_adapter_of_another_base_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, sizes in (("narrow", {"hidden_size": 24}), ("short", {"num_hidden_layers": 1})):
        base = make_model("llama", tmp_path / name, **sizes)
        config = folders["adapter"] / "adapter_config.json"
        fields = json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}
        config.write_text(json.dumps(fields))
        with pytest.raises(ModelError, match="does not fit the model") as caught:
            load(folders["adapter"], "cpu")
        assert "\n" not in str(caught.value)
        assert str(folders["adapter"]) in str(caught.value)


def test_an_adapter_alone_that_lacks_weights_is_refused(folders: dict[str, Path]) -> None:
    file = folders["adapter"] / WEIGHTS
    tensors = load_file(file)
    del tensors[min(tensors)]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"or is damaged: it lacks base_model.*lora_A.*and 0 more"):
        load(folders["adapter"], "cpu")


@pytest.mark.parametrize("way", ["merged", "chosen by requests"])
def test_an_adapter_that_cannot_be_read_names_its_file(folders: dict[str, Path], way: str) -> None:
    """They all were told to name another base."""

    def said(adapter: Path) -> str:
        place = adapter if way == "merged" else folders["base"]
        chosen = None if way == "merged" else {"a": adapter}
        with pytest.raises(ModelError) as caught:
            load(place, "cpu", adapters=chosen)
        return str(caught.value)

    adapter = folders["adapter"]
    (adapter / WEIGHTS).write_bytes(b"no adapter")
    assert f"{str(adapter)!r} cannot be loaded: {WEIGHTS} is damaged (" in said(adapter)
    (adapter / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert f"{WEIGHTS} is a pointer of Git LFS" in said(adapter)
    (adapter / WEIGHTS).unlink()
    assert said(adapter).endswith(f"cannot be loaded: {WEIGHTS} is missing: download it")
    (adapter / "adapter_model.bin").write_bytes(b"no adapter")
    assert said(adapter).endswith("; download its adapter_config.json and its weights again")
    if way == "chosen by requests":
        (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r')
        assert "cannot be loaded: JSONDecodeError: Unterminated string" in said(adapter)
        assert said(adapter).endswith("; download its adapter_config.json and its weights again")
        assert "is missing: there is no adapter_config.json in that folder" in said(adapter / "x")


def test_an_adapter_that_is_no_lora_is_refused(folders: dict[str, Path]) -> None:
    adapter = folders["adapter"].with_name("prompt")
    tuned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    network = AutoModelForCausalLM.from_pretrained(folders["base"])
    peft.get_peft_model(network, tuned).save_pretrained(adapter)
    with pytest.raises(ModelError, match="of type PROMPT_TUNING, which cannot be merged"):
        load(adapter, "cpu")


def test_an_adapter_without_its_weights_is_refused(folders: dict[str, Path]) -> None:
    (folders["beside"] / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folders["beside"])


def test_an_adapter_that_lacks_weights_is_refused(folders: dict[str, Path]) -> None:
    """peft draws the rest at random and goes on."""
    file = folders["beside"] / WEIGHTS
    tensors = load_file(file)
    for name in sorted(tensors)[::2]:
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match="is damaged"):
        load(folders["beside"])


def test_an_adapter_of_another_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its names are in no layer here."""
    file = folders["beside"] / WEIGHTS
    tensors = {name.replace("layers", "blocks"): one for name, one in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match="is damaged"):
        load(folders["beside"])


def assert_merged_as_in_peft(adapted: Any, folder: Path) -> None:
    """Stores the adapter, and compares the logits of the merged model with peft's own."""
    adapted.save_pretrained(folder)
    with torch.no_grad():
        wanted = adapted(torch.tensor([PROMPT])).logits[0, -1]
    llm = LLM(folder, device="cpu")
    request = llm.engine.add(PROMPT, PARAMS, keep_logits=True)
    while llm.engine.has_work:
        llm.engine.step()
    assert (request.logits[0] - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_of_two_tied_layers_leaves_the_other(module: str, tmp_path: Path) -> None:
    base = make_model("llama", tmp_path, tie_word_embeddings=True)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=[module], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.3)
    assert_merged_as_in_peft(adapted, tmp_path / "adapter")


def test_tied_layers_that_an_adapter_leaves_alone_stay_one(tmp_path: Path) -> None:
    """Their memory was held twice."""
    base = make_model("llama", tmp_path, tie_word_embeddings=True)
    network = AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(network, lora("q_proj", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    found = load(tmp_path / "adapter").network
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert found.config.tie_word_embeddings


def test_repeated_layers_are_merged_apart(folders: dict[str, Path], tmp_path: Path) -> None:
    """They share the weights of the base, to which what is trained of each was added."""
    repeated = lora("q_proj", layer_replication=[[0, 3], [1, 4]], init_lora_weights=False)
    network = AutoModelForCausalLM.from_pretrained(folders["base"])
    adapted = peft.get_peft_model(network, repeated).eval()
    assert_merged_as_in_peft(adapted, tmp_path / "adapter")


def test_experts_in_one_tensor_are_merged(tmp_path: Path) -> None:
    """Loading ended in an AttributeError: the module of such experts has no `weight`."""
    network = AutoModelForCausalLM.from_pretrained(make_model("deepseek_v3", tmp_path))
    config = lora("gate_proj", "up_proj", "down_proj", init_lora_weights=False)
    adapted = peft.get_peft_model(network, config).eval()
    assert_merged_as_in_peft(adapted, tmp_path / "adapter")


def test_an_adapter_that_peft_cannot_merge_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[3, 4])
    network = AutoModelForCausalLM.from_pretrained(folders["base"])
    peft.get_peft_model(network, config).save_pretrained(tmp_path / "a")
    with pytest.raises(ModelError, match=r"cannot be merged into the weights: .*; merge it with"):
        LLM(tmp_path / "a", device="cpu")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("lora_alpha", float("nan"), "lora_alpha nan in its adapter_config.json must be a finite"),
        ("lora_alpha", True, "lora_alpha True in its adapter_config.json must be a finite"),
        ("r", 0, "r 0 in its adapter_config.json must be a whole number >= 1"),
        ("rank_pattern", 5, "rank_pattern 5 in its adapter_config.json must be numbers by module"),
        ("alpha_pattern", {"q_proj": float("inf")}, "alpha_pattern of q_proj inf in its"),
        ("use_rslora", "false", "use_rslora 'false' in its adapter_config.json must be true or"),
    ],
)
def test_a_scale_that_is_none_is_refused(
    folders: dict[str, Path], field: str, value: object, said: str
) -> None:
    """NaN was merged without a word, and "false" counted as true."""
    config = folders["adapter"] / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: value}))
    with pytest.raises(ModelError, match=re.escape(said)):
        load(folders["adapter"], "cpu")
    with pytest.raises(ModelError, match=re.escape(said)):
        LLM(folders["base"], device="cpu", adapters={"broken": folders["adapter"]})


@pytest.mark.parametrize("number", [float("nan"), 1e38])
def test_an_adapter_that_makes_weights_infinite_is_not_merged(
    folders: dict[str, Path], number: float
) -> None:
    """It was merged; the first request said that the checkpoint should be looked at."""
    path = folders["adapter"] / WEIGHTS
    weights = load_file(path)
    broken = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    save_file(weights | {broken: torch.full_like(weights[broken], number) * 9}, path)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj has NaN or infinite numbers in"):
        load(folders["adapter"], "cpu")
