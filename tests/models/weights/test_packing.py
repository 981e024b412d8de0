"""`weights="int4"` and "int8": packed at load, and exact for what is packed."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from keyhole import LLM, ConfigError, ModelError, SamplingParams, kernels
from keyhole.cli import main
from keyhole.models.loading import adopt, load
from keyhole.models.weights.packing import PackedEmbedding, PackedLinear, pack_weights
from keyhole.models.weights.weight_format import WeightFormat, weight_format
from tests.checkpoints import make_model
from tests.models.verified import failed

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
PROMPT = list(range(3, 60))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model("llama", tmp_path_factory.mktemp("plain"), tokenizer=True, **SIZES)


@pytest.fixture(scope="module")
def packed(folder: str) -> Any:
    return load(folder, "cpu", weights="int4").network


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8", "int4:group_size=32"])
def test_every_policy_gives_the_logits_of_the_packed_model(folder: str, weights: str) -> None:
    """Against transformers' eager attention over the same packed layers: ragged, in chunks."""
    loaded = load(folder, "cpu", weights=weights)
    assert loaded.weights == weights
    assert failed(loaded) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen3", "phi3", "deepseek_v3"])
def test_other_families_are_packed(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    if kind == "deepseek_v3":  # no experts
        sizes |= {"first_k_dense_replace": 9}
    folder = make_model(kind, tmp_path, **sizes)
    loaded = load(folder, "cpu", weights="int8")
    packed = [m for m in loaded.network.modules() if isinstance(m, PackedLinear)]
    assert len(packed) > 4
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = plain(torch.tensor([PROMPT])).logits[0, -1]
    result = LLM(loaded).engine
    sequence = result.add(PROMPT, GREEDY, keep_logits=True)
    while result.has_work:
        result.step()
    found = sequence.logits[0]
    error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert 0 < error < 0.05


def test_a_weight_is_what_was_packed(folder: str, packed: Any) -> None:
    plain = load(folder, "cpu").network
    layer, was = packed.model.layers[0].mlp.up_proj, plain.model.layers[0].mlp.up_proj.weight
    assert isinstance(layer, PackedLinear)
    assert layer.bits == 4
    assert torch.equal(layer.weight, kernels.unpack(kernels.pack(was.detach(), 4, 64)))
    assert packed.lm_head.bits == 8
    assert packed.dtype == plain.dtype


@pytest.mark.parametrize("tokens", [1, 32, 33, 70])
def test_few_and_many_tokens_use_the_same_weight(packed: Any, tokens: int) -> None:
    layer = packed.model.layers[0].self_attn.q_proj
    x = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(0))
    wanted = x.double() @ layer.weight.double().T
    torch.testing.assert_close(layer(x).double(), wanted, atol=1e-5, rtol=1e-5)


def test_tied_tables_share_codes(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, tie_word_embeddings=True, **SIZES)
    bytes_of = {}
    for weights in (None, "int8", "int4"):
        network = load(folder, "cpu", "bfloat16", weights=weights).network
        stored = {x.data_ptr(): x.nbytes for x in network.state_dict().values()}
        bytes_of[weights] = sum(stored.values())
    embedding, head = network.get_input_embeddings(), network.lm_head
    assert isinstance(embedding, PackedEmbedding)
    assert embedding.codes is head.codes
    ids = torch.tensor([[3, 250, 3]])
    assert torch.equal(embedding(ids), head.weight[ids])
    assert bytes_of["int8"] < 0.56 * bytes_of[None]
    # The tables, in 8 bits, are a third of this model.
    assert bytes_of["int4"] < 0.42 * bytes_of[None]


def test_plain_weights_are_freed_layer_by_layer(folder: str) -> None:
    """By counting references: a collection of garbage would come after the peak of memory."""
    network = AutoModelForCausalLM.from_pretrained(folder)
    plain = [weakref.ref(m.weight) for m in network.modules() if type(m) is nn.Linear]
    gc.disable()
    try:
        pack_weights(network, WeightFormat(bits=4), folder)
        assert plain
        assert not [weight for weight in plain if weight() is not None]
    finally:
        gc.enable()


def test_a_scaled_embedding_keeps_its_scale(tmp_path: Path) -> None:
    folder = make_model("gemma3", tmp_path, tie_word_embeddings=True, hidden_size=64)
    plain, packed = load(folder, "cpu").network, load(folder, "cpu", weights="int8").network
    ids = torch.arange(5, 25)[None]
    found, wanted = (x.get_input_embeddings()(ids).detach() for x in (packed, plain))
    assert isinstance(packed.get_input_embeddings(), PackedEmbedding)
    torch.testing.assert_close(found, wanted, atol=0.01 * float(wanted.abs().max()), rtol=0)


def test_a_loaded_network_is_copied_and_stays_as_it_is(folder: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    ours = adopt(network, device="cpu", weights="int4").network
    assert isinstance(ours.lm_head, PackedLinear)
    assert type(network.lm_head) is nn.Linear
    after = network.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_packed_weights_give_other_document_records(folder: str, tmp_path: Path) -> None:
    """Keys of a document belong to the weights that computed them."""
    plain = LLM(folder, device="cpu", documents=tmp_path / "store")
    plain.documents.add("one", "The quick brown fox jumps over the lazy dog.")
    packed = LLM(folder, device="cpu", weights="int4", documents=tmp_path / "store")
    with pytest.raises(Exception, match="another model"):
        packed.ask("Who?", ["one"], params=GREEDY)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("int5", r"unknown format of weights 'int5'.*known: dequantised, int4, int8"),
        ("int4:group_size=48", "group_size 48 of weights must be one of 32, 64, 128"),
        ("int4:groups=32", "unknown setting of weights int4 'groups'"),
        ("int4:group_size=x", "must be a whole number"),
    ],
)
def test_an_unknown_format_is_refused(weights: str, message: str, folder: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(folder, weights=weights)


def test_the_command_line_refuses_it_before_loading(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello", "--model", folder, "--weights", "int3"]) == 2
    error = capsys.readouterr().err
    assert "unknown format of weights 'int3'" in error
    assert "loading" not in error


def test_formats_have_names() -> None:
    assert weight_format(None) is None
    assert weight_format("int8") == WeightFormat(bits=8)
    found = weight_format("int4:group-size=128")
    assert found == WeightFormat(bits=4, group_size=128)
    assert found is not None
    assert found.name == "int4:group_size=128"


def test_a_gpu_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="weights 'int4' run on a CPU only, not on 'cuda'"):
        load(folder, "cuda", weights="int4")


def test_weights_in_no_linear_layer_are_refused(tmp_path: Path) -> None:
    """Experts are one parameter for all of them: packing the rest would gain little."""
    folder = make_model("gpt_oss", tmp_path, hidden_size=64, intermediate_size=256)
    with pytest.raises(ModelError, match=r"of the weights of .* are in others, .*experts"):
        load(folder, "cpu", weights="int4")


def test_narrow_layers_are_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    with pytest.raises(ModelError, match="linear layers with a multiple of 64 inputs"):
        load(folder, "cpu", weights="int4")


def test_stored_formats_are_refused(tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(make_model("llama", tmp_path, **SIZES))
    network.config.quantization_config = {"quant_method": "awq", "bits": 4}
    with pytest.raises(ConfigError, match="already stored as awq; leave weights 'int4' out"):
        adopt(network, device="cpu", weights="int4")


def test_a_loaded_model_takes_no_weights(folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"weights 'int4' must be given to keyhole\.models\.loading"
    ):
        LLM(load(folder, "cpu"), weights="int4")


def test_the_log_says_so(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "keyhole"):
        load(folder, "cpu", weights="int4")
    assert any("packed as int4" in record.message for record in caplog.records)
