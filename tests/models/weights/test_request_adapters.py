"""LoRA adapters of single requests: each is the model with that adapter merged, in any batch."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BioGptConfig,
    Lfm2Config,
    ModernBertDecoderConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import keyhole
from keyhole import LLM, SamplingParams
from keyhole.errors import ConfigError, KeyholeError, ModelError, UnknownNameError
from keyhole.models.modules.sequence_adapters import AdapterMatrices, attach, using
from keyhole.models.shrink import shrink
from keyhole.models.weights.adapters import read_adapters
from tests.checkpoints import make_model
from tests.models.conftest import SPLIT, Places
from tests.models.test_gguf import MIXED, write

peft = pytest.importorskip("peft", reason="real adapters need it: pip install 'keyhole[lora]'")
pytestmark = pytest.mark.filterwarnings("default")  # peft has its own

#: Other ranks, scales and layers, so that their stacked matrices have gaps.
KINDS = {
    "wide": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "narrow": {"r": 2, "target_modules": ["q_proj", "o_proj"], "use_rslora": True},
}
BLOCKS = peft.BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)
PROMPTS = [list(range(3, 60)), list(range(8, 31)), list(range(3, 60)), list(range(20, 100))]


def random_adapter(base: Path, seed: int, settings: dict[str, Any]) -> Any:
    """The base model of peft with a LoRA adapter of random weights."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    network = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for key, weight in network.named_parameters():
        if "lora" in key:
            torch.nn.init.normal_(weight, std=0.3)
    return network


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base model, its adapters, and the model with each merged by peft."""
    place = tmp_path_factory.mktemp("adapters")
    base = Path(make_model("llama", place))
    found = {"base": base}
    for number, (name, settings) in enumerate(KINDS.items()):
        adapted = random_adapter(base, number, settings)
        adapted.save_pretrained(place / name)
        adapted.merge_and_unload().save_pretrained(place / f"merged-{name}")
        found |= {name: place / name, f"merged-{name}": place / f"merged-{name}"}
    return found


def adapted(folders: dict[str, Path], **settings: object) -> LLM:
    return LLM(
        folders["base"],
        device="cpu",
        page_size=4,
        adapters={name: folders[name] for name in KINDS},
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_adapters_over_the_kept_blocks_of_a_gguf_file(tmp_path: Path, kind: str) -> None:
    """One batch of both adapters and none, as with the file's weights unpacked."""
    width = 256 if kind in MIXED else 64
    sizes = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": 4,
        "head_dim": width // 4,
    }
    base = Path(make_model("llama", tmp_path, tokenizer=True, num_key_value_heads=2, **sizes))
    write(base, tmp_path / "base.gguf", kind)
    places = {}
    for number, (name, settings) in enumerate(KINDS.items()):
        random_adapter(base, number, settings).save_pretrained(tmp_path / name)
        places[name] = tmp_path / name
    names = [None, "wide", "narrow", "wide"]
    found, wanted = (
        LLM(
            tmp_path / "base.gguf",
            device="cpu",
            dtype="float32",
            page_size=4,
            adapters=places,
            weights=weights,
        ).generate(PROMPTS, [params(name) for name in names])
        for weights in (None, "dequantised")
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
        for some, same in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert some == pytest.approx(same, abs=1e-4)
    assert len({tuple(one.token_ids) for one in (found[0], found[2])}) == 2


def params(adapter: str | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3, adapter=adapter
    )


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 512])
def test_requests_of_several_adapters_in_one_batch(folders: dict[str, Path], chunk: int) -> None:
    llm = adapted(folders, prefill_chunk=chunk)
    names = [None, "wide", "narrow", "wide"]
    found = llm.generate(PROMPTS, [params(name) for name in names])
    for result, name, prompt in zip(found, names, PROMPTS, strict=True):
        alone = LLM(folders["base" if name is None else f"merged-{name}"], device="cpu")
        wanted = alone.generate(prompt, params(None))
        assert result.token_ids == wanted.token_ids
        for ours, theirs in zip(result.logprobs, wanted.logprobs, strict=True):
            # float32, and W x + B A x is summed in another order than (W + B A) x.
            assert ours == pytest.approx(theirs, abs=1e-4)
    assert (
        len({tuple(one.token_ids) for one in (found[0], found[2])}) == 2
    )  # one prompt, two models


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "delta:token_budget=32"])
def test_layers_on_two_devices_add_what_those_on_one_do(
    folders: dict[str, Path], places: Places, policy: str
) -> None:
    """One batch of both adapters and none, whose matrices are on the devices of their layers."""
    given = {"policy": policy, "prefill_chunk": 16, "page_size": 8}
    given["adapters"] = {name: folders[name] for name in KINDS}
    names = [None, "wide", "narrow", "wide"]

    def logits(llm: LLM) -> list[torch.Tensor]:
        added = [
            llm.engine.add(prompt, params(name), keep_logits=True)
            for prompt, name in zip(PROMPTS, names, strict=True)
        ]
        while llm.engine.has_work:
            llm.engine.step()
        return [torch.stack(list(sequence.logits)) for sequence in added]

    wanted = logits(LLM(folders["base"], device="cpu", **given))
    assert places.sent == 0
    found = logits(LLM(folders["base"], device_map=SPLIT, **given))
    assert places.sent > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not torch.equal(found[0], found[2])  # one prompt, two models


@pytest.mark.slow
def test_cached_prefixes_are_of_one_adapter(folders: dict[str, Path]) -> None:
    llm = adapted(folders)
    prompt = PROMPTS[0]
    alone = {name: llm.generate(prompt, params(name)) for name in (None, "wide", "narrow")}
    assert all(result.stats.cached_prompt_tokens == 0 for result in alone.values())
    for name, before in alone.items():
        again = llm.generate(prompt, params(name))
        assert again.stats.cached_prompt_tokens > 0
        assert again.token_ids == before.token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "reuse", ["reuse", "recompute", "sam_kv", "cacheblend:recompute_ratio=0.5"]
)
def test_documents_are_of_one_adapter(folders: dict[str, Path], tmp_path: Path, reuse: str) -> None:
    llm = adapted(folders, documents=tmp_path / "ours")
    alone = LLM(folders["merged-wide"], device="cpu", page_size=4, documents=tmp_path / "theirs")
    texts = {"one": list(range(5, 69)), "two": list(range(70, 102))}
    with pytest.raises(KeyholeError):
        llm.ask([7, 8, 9], ["one"], reuse=reuse, params=params("wide"))
    for name, tokens in texts.items():
        for library in (llm.documents, llm.documents_with("wide"), alone.documents):
            library.add(name, {"prompt_token_ids": tokens})
    asked = {"question": {"prompt_token_ids": [7, 8, 9]}, "documents": [*texts], "reuse": reuse}
    ours, theirs = llm.ask(**asked, params=params("wide")), alone.ask(**asked, params=params(None))
    assert ours.token_ids == theirs.token_ids
    assert llm.ask(**asked, params=params(None)).token_ids != ours.token_ids


def test_running_questions_share_pages_with_the_same_adapter_only(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Pages of running questions over the same documents are shared, but not across adapters."""
    llm = adapted(folders, documents=tmp_path)
    for adapter in (None, "wide"):
        llm.documents_with(adapter).add("one", {"prompt_token_ids": list(range(5, 69))})
    question = {"prompt_token_ids": [7, 8, 9]}
    alone = {
        name: llm.ask(question, ["one"], reuse="reuse", params=params(name)).token_ids
        for name in (None, "wide")
    }
    assert alone[None] != alone["wide"]
    with ExitStack() as stack:
        running = [
            (name, llm.submit_ask(stack, question, ["one"], reuse="reuse", params=params(name)))
            for name in (None, "wide", "wide", None)
        ]
        while llm.engine.has_work:
            llm.engine.step()
        for name, sequence in running:
            assert sequence.generated == alone[name]


def test_documents_of_another_adapter_are_missing(folders: dict[str, Path], tmp_path: Path) -> None:
    llm = adapted(folders, documents=tmp_path)
    llm.documents.add("one", {"prompt_token_ids": list(range(5, 69))})
    with pytest.raises(KeyholeError, match=r"document 'one'.*see documents_with\(NAME\)"):
        llm.ask([7, 8, 9], ["one"], params=params("narrow"))
    llm.documents_with("narrow").verify(["one"], repair=True)
    llm.ask([7, 8, 9], ["one"], params=params("narrow"))


def test_adapters_beside_packed_weights(tmp_path: Path) -> None:
    """The packed base answers as without adapters, and the adapter changes it."""
    network = AutoModelForCausalLM.from_pretrained(keyhole.tiny())
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    peft.get_peft_model(network, config).save_pretrained(tmp_path)
    packed = {"device": "cpu", "weights": "int8"}
    llm = LLM("tiny", **packed, adapters={"odd": tmp_path})
    base, changed = (llm.generate(PROMPTS[0], params(name)) for name in (None, "odd"))
    assert base.token_ids == LLM("tiny", **packed).generate(PROMPTS[0], params(None)).token_ids
    assert changed.token_ids != base.token_ids


@pytest.mark.parametrize("given", ["a-folder", ["a-folder"], {"sql": None}])
def test_folders_without_names_are_refused(folders: dict[str, Path], given: Any) -> None:
    """They ended in a traceback of Python's."""
    with pytest.raises(ConfigError, match=r"must be folders by name, such as \{'sql': FOLDER\}"):
        LLM(folders["base"], device="cpu", adapters=given)


def test_an_unknown_adapter_is_refused(folders: dict[str, Path]) -> None:
    llm = adapted(folders)
    with pytest.raises(UnknownNameError, match="did you mean 'wide'"):
        llm.generate(PROMPTS[0], params("wid"))
    with pytest.raises(UnknownNameError, match="did you mean 'wide'"):
        llm.generate(PROMPTS[:2], [params(None), params("wid")])
    assert not llm.engine.has_work  # all prompts are checked before the first one is queued
    with pytest.raises(UnknownNameError, match=r"unknown adapter 'wide' \(known: none\)"):
        LLM(folders["base"], device="cpu").generate(PROMPTS[0], params("wide"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "DoRA's magnitudes"),
        ({"target_modules": ["lm_head"]}, "runs for single tokens only"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens, which is of class Embedding"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "whole modules"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, r"biases \(lora_bias\)"),
        ({"target_modules": ["q_proj"], "alora_invocation_tokens": [3, 4]}, "aLoRA"),
        ({"target_modules": ["q_proj"], "kasa_config": peft.KasaConfig()}, r"\(KaSA\)"),
        ({"target_modules": ["q_proj"], "use_bdlora": BLOCKS}, r"\(BD-LoRA\)"),
        ({"target_modules": ["q_proj"], "layer_replication": [[0, 3], [1, 4]]}, "repeated layers"),
        (
            {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
            "also changes the base weights",
        ),
        (
            {"target_modules": ["q_proj"], "init_lora_weights": "olora"},
            "also changes the base weights",
        ),
    ],
)
def test_more_than_low_rank_products_are_refused(
    folders: dict[str, Path], tmp_path: Path, settings: dict[str, object], why: str
) -> None:
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings)
    network = AutoModelForCausalLM.from_pretrained(folders["base"])
    peft.get_peft_model(network, config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=why) as caught:
        LLM(folders["base"], device="cpu", adapters={"more": tmp_path})
    assert str(tmp_path) in str(caught.value)


def beside_an_adapter(config: PreTrainedConfig, module: str, folder: Path) -> PreTrainedModel:
    """A network of this config; an adapter of `module`, of another one, is saved in the folder."""
    adapter = peft.LoraConfig(r=2, target_modules=[module], task_type="CAUSAL_LM")
    network, own = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    peft.get_peft_model(network, adapter).save_pretrained(folder)
    return own


@pytest.mark.parametrize(
    ("cls", "head"), [(BioGptConfig, "output_projection"), (ModernBertDecoderConfig, "dense")]
)
def test_heads_of_other_names_are_refused(
    tmp_path: Path, cls: type[PreTrainedConfig], head: str
) -> None:
    """They were taken, and the first long prompt ended in a traceback."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
    config = cls(vocab_size=99, num_hidden_layers=2, **sizes, **special, sep_token_id=2)
    own = beside_an_adapter(config, head, tmp_path)
    with pytest.raises(ModelError, match=rf"adapts \S*{head}, which runs for single tokens only"):
        read_adapters(own, {"head": tmp_path}, "base")


def test_a_refused_adapter_leaves_a_loaded_network_as_it_was(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """PiSSA's base weights stayed in it, and other requests were answered by these."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    network = AutoModelForCausalLM.from_pretrained(folders["base"])
    peft.get_peft_model(network, config).save_pretrained(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(folders["base"])
    before = {name: weight.clone() for name, weight in own.state_dict().items()}
    with pytest.raises(ModelError, match="pissa"):
        LLM(own, adapters={"more": tmp_path})
    assert all(torch.equal(weight, before[name]) for name, weight in own.state_dict().items())


def test_stored_embeddings_are_refused_and_change_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """They took the place of the model's own, for all requests."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    network = AutoModelForCausalLM.from_pretrained(folders["base"])
    adapter = peft.get_peft_model(network, config)
    with torch.no_grad():
        network.model.embed_tokens.weight.zero_()
    adapter.save_pretrained(tmp_path, save_embedding_layers=True)
    own = AutoModelForCausalLM.from_pretrained(folders["base"])
    with pytest.raises(ModelError, match=r"it has lm_head\.weight besides low-rank matrices"):
        LLM(own, adapters={"more": tmp_path})
    assert own.model.embed_tokens.weight.any()


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", torch.nan), ("float32", torch.inf), ("float16", 1e5)]
)
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_numbers_that_are_not_finite_are_refused(
    folders: dict[str, Path], tmp_path: Path, dtype: str, value: float, part: str
) -> None:
    """They were taken, and requests without the adapter ended with NaN beside one with it."""
    network = random_adapter(folders["base"], 0, KINDS["narrow"])
    name = "model.layers.1.self_attn.o_proj"
    layer = network.get_submodule(f"base_model.model.{name}")
    with torch.no_grad():
        getattr(layer, part)["default"].weight[0] = value
    network.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"{name} has NaN or infinite numbers in {dtype}"):
        LLM(folders["base"], device="cpu", dtype=dtype, adapters={"broken": tmp_path})


def test_what_overflows_in_one_adapter_stays_in_its_rows() -> None:
    """A row's product with the matrix of another adapter was infinite, and times zero NaN."""
    layer: Any = torch.nn.Sequential(torch.nn.Linear(2, 3))
    ones = torch.ones(1, 2), torch.ones(3, 1)
    parts = [AdapterMatrices(1, 1e38 * ones[0], ones[1]), AdapterMatrices(2, *ones)]
    x = torch.full((3, 2), 1e3)
    with torch.no_grad():
        plain = layer(x)
        attach(layer, {"0": parts}, torch.float32)
        with using(torch.tensor([0, 1, 2])):
            found = layer(x)
    assert torch.equal(found[0], plain[0])
    assert found[1].isinf().all()
    assert torch.equal(found[2], plain[2] + x[2].sum())


@pytest.mark.parametrize("family", ["llama4_text", "phimoe"])
def test_routers_that_choose_experts_are_refused(tmp_path: Path, family: str) -> None:
    """They are linear layers whose output is a tuple: the first request ended in a TypeError."""
    config = shrink(CONFIG_MAPPING[family]())
    own = beside_an_adapter(config, "router", tmp_path)
    with pytest.raises(ModelError, match=r"adapts \S*router, which is of class \w+Router"):
        read_adapters(own, {"router": tmp_path}, "base")


def test_a_config_that_peft_refuses_is_to_be_corrected(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The remedy was to name another base, for a share of dropout of 2, too."""
    shutil.copytree(folders["narrow"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 2}))
    network = AutoModelForCausalLM.from_pretrained(folders["base"])
    with pytest.raises(ModelError, match=r"but got 2; correct its adapter_config\.json"):
        read_adapters(network, {"none": tmp_path}, "base")


def test_adapters_of_another_model_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    other = make_model("llama", tmp_path, hidden_size=24)
    with pytest.raises(ModelError, match="does not fit the model"):
        LLM(other, device="cpu", adapters={"wide": folders["wide"]})


@pytest.mark.slow
def test_a_loaded_network_is_not_changed(folders: dict[str, Path]) -> None:
    network = AutoModelForCausalLM.from_pretrained(folders["base"])
    names = [*network.state_dict()]
    found = LLM(network, adapters={"wide": folders["wide"]}).generate(PROMPTS[0], params("wide"))
    assert [*network.state_dict()] == names
    assert type(network.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert found.token_ids == adapted(folders).generate(PROMPTS[0], params("wide")).token_ids


def test_hybrid_models_are_refused(folders: dict[str, Path]) -> None:
    config = Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="recurrent layers"):
        read_adapters(network, {"wide": folders["wide"]}, "hybrid")
