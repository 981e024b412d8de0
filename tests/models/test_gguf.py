"""GGUF files: config, weights and tokenizer of one file. Kept blocks: weights/test_gguf_file."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from transformers import AutoModelForCausalLM, GgufConfig

from keyhole import LLM, ModelError, SamplingParams
from keyhole.models import checkpoint
from keyhole.models.loading import load
from keyhole.models.locate import ModelFiles, locate
from keyhole.models.weights import gguf_file
from tests.checkpoints import make_model, make_tokenizer
from tests.models.verified import EACH, failed

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
#: By the name of a file's format: that of its matrices, its number, and the dtype it is loaded in.
KINDS: dict[str, tuple[GGMLQuantizationType, LlamaFileType, torch.dtype]] = {
    "F32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32, torch.float32),
    "F16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16, torch.float16),
    "Q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0, torch.bfloat16),
    "Q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0, torch.bfloat16),
}
#: `gguf` cannot write these formats: the bytes of their blocks are drawn.
DRAWN: dict[str, tuple[GGMLQuantizationType, LlamaFileType, torch.dtype]] = {
    "Q4_K": (GGMLQuantizationType.Q4_K, LlamaFileType.MOSTLY_Q4_K_M, torch.bfloat16),
    "Q5_K": (GGMLQuantizationType.Q5_K, LlamaFileType.MOSTLY_Q5_K_M, torch.bfloat16),
    "Q6_K": (GGMLQuantizationType.Q6_K, LlamaFileType.MOSTLY_Q6_K, torch.bfloat16),
}
#: Bytes of a block of 256 weights.
_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
#: Files that mix two formats, as llama.cpp's own recipes do: the other matrices, and `_FINER`.
MIXED = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}
_FINER = ("v_proj", "down_proj", "lm_head")
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_TABLES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the files are made of."""
    folder = tmp_path_factory.mktemp("original")
    return Path(make_model("llama", folder, tokenizer=True, num_key_value_heads=2, **SIZES))


@pytest.fixture(scope="module")
def make(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A GGUF file of a format, made once."""
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("gguf")

    def file(kind: str) -> Path:
        if kind not in made:
            made[kind] = folder / f"small.{kind}.gguf"
            write(original, made[kind], kind)
        return made[kind]

    return file


def write(original: Path, path: Path, kind: str) -> None:
    """Writes a Llama, Qwen2-MoE or Qwen3-MoE as llama.cpp's converter does: names, BPE words.

    And Llama's rotary pairs side by side; experts' gates apart from what they are multiplied with.
    """
    network = AutoModelForCausalLM.from_pretrained(original)
    most, finer = MIXED.get(kind, (kind, kind))
    config, file_type = network.config, (KINDS | DRAWN)[most][1]
    writer = GGUFWriter(path, config.model_type.replace("_", ""))
    writer.add_file_type(file_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocab = sorted(make_tokenizer().get_vocab().items(), key=lambda entry: entry[1])
    words = [word for word, _ in vocab] + ["th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words + [f"<unused{i}>" for i in range(config.vocab_size - len(words))])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if config.model_type != "llama":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if config.model_type == "qwen2_moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for seed, (name, tensor) in enumerate(_tensors(network)):
        value = tensor.float().numpy()
        kind_of = "bias" if name.endswith(".bias") else "weight"
        module = name.removesuffix(f".{kind_of}")
        if module == "lm_head" and config.tie_word_embeddings:
            continue  # a file has the table once
        if module in _TABLES:
            to = _TABLES[module]
        else:
            _, _, layer, part = module.split(".", 3)
            to = f"blk.{layer}.{_NAMES[part]}"
        pairs = heads.get(module.rpartition(".")[2]) if config.model_type == "llama" else None
        if pairs is not None:
            halves = value.reshape(pairs, 2, -1, value.shape[1])
            value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        if module.endswith("shared_expert_gate"):
            value = value[0]
        if value.ndim > 1 and not module.endswith("mlp.gate"):
            one = finer if module.endswith(_FINER) else most
            number = (KINDS | DRAWN)[one][0]
            data = drawn(one, value.shape, seed) if one in DRAWN else gguf.quantize(value, number)
            writer.add_tensor(f"{to}.weight", data, raw_dtype=number)
        else:
            writer.add_tensor(f"{to}.{kind_of}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(network: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model, by name, with experts' gates apart."""
    for name, tensor in network.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", part), half
        else:
            yield name, tensor


def drawn(
    kind: str, shape: tuple[int, ...], seed: int = 0, scale: float = 5e-5
) -> np.ndarray[Any, Any]:
    """The bytes of rows of Q4_K, Q5_K or Q6_K, drawn; scale: that of its scales of groups.

    With larger ones small differences grow from layer to layer, also without blocks.
    """
    random = np.random.default_rng(seed)
    data = random.integers(
        0, 256, (*shape[:-1], shape[-1] // 256, _BLOCK_BYTES[kind]), dtype=np.uint8
    )
    # None is near zero: the norm after an embedding of hardly any size enlarges rounding errors.
    sizes = random.uniform(0.5, 1.5, size=(*data.shape[:-1], 2)) * scale
    scales = (sizes * random.choice([-1, 1], size=sizes.shape)).astype(np.float16)
    if kind == "Q6_K":  # its scales of groups are twice as large, and there are no minimums
        data[..., -2:] = (scales[..., :1] / 4).view(np.uint8)
    else:
        data[..., :4] = scales.view(np.uint8)
    return data.reshape(*shape[:-1], -1)


@pytest.mark.slow
@EACH
def test_a_file_of_whole_numbers_is_its_checkpoint(
    make: Callable[[str], Path], original: Path, every: int
) -> None:
    prompt = list(range(3, 60))
    wanted = LLM(original, device="cpu").generate(prompt, GREEDY)
    found = LLM(make("F32"), device="cpu")
    assert found.generate(prompt, GREEDY).token_ids == wanted.token_ids
    assert found.engine.model.name == "small.F32"
    assert failed(found.engine.model, every) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_blocks_are_those_that_transformers_reads(make: Callable[[str], Path], kind: str) -> None:
    path = make(kind)
    model = load(path, "cpu", "float32", weights="dequantised")
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True)
    )
    ours = model.network.state_dict()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours[name], weight.float()), name
    assert getattr(model.network.config, "quantization_config", None) is None
    prompt = list(range(3, 40))
    [result] = LLM(model).generate(
        [prompt], SamplingParams(max_tokens=1, logprobs=1, temperature=0)
    )
    with torch.no_grad():
        wanted = theirs.float()(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert result.logprobs is not None
    best = int(wanted.argmax())
    assert result.logprobs[0][best] == pytest.approx(float(wanted[best]), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_it_is_loaded_in_the_numbers_that_hold_it(make: Callable[[str], Path], kind: str) -> None:
    model = load(make(kind), "cpu", weights="dequantised")
    assert model.dtype == load(make(kind), "cpu").dtype == KINDS[kind][2]
    shape = checkpoint.read(make(kind))
    assert f"torch.{shape.dtype}" == str(model.dtype)
    assert shape.layers == model.geometry(16).layers
    assert shape.num_parameters == sum(p.numel() for p in model.network.parameters())
    assert shape.weight_bytes == sum(p.nbytes for p in load(make(kind), "cpu").network.parameters())


@pytest.mark.slow
def test_its_words_are_read_too(make: Callable[[str], Path]) -> None:
    llm = LLM(make("F32"), device="cpu")
    ids = llm.tokenizer("the path", add_special_tokens=False).input_ids
    assert len(ids) == len("the path") - 2  # "th" twice is one word
    assert llm.tokenizer.decode(ids) == "the path"
    assert llm.generate("the path", GREEDY).token_ids
    assert llm.engine.model.eos_token_ids == {2}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_ends_of_turns_and_messages_end_an_answer(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Llama 3's files name the end of the text as eos, so that answers of a chat did not end."""

    class Writer(GGUFWriter):
        def write_header_to_file(self, *args: Any, **named: Any) -> None:
            self.add_eot_token_id(7)
            self.add_eom_token_id(9)
            super().write_header_to_file(*args, **named)

    monkeypatch.setitem(write.__globals__, "GGUFWriter", Writer)
    write(original, tmp_path / "ends.gguf", kind)
    assert load(tmp_path / "ends.gguf", "cpu").eos_token_ids == {2, 7, 9}


def test_a_folder_with_one_file_is_that_file(make: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to(make("F32"))
    assert locate(tmp_path) == locate(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").symlink_to(make("F32"))
    with pytest.raises(ModelError, match=r"several GGUF files: name one of a\.gguf, b\.gguf"):
        locate(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "cut in the header"])
def test_a_damaged_file_is_named_with_what_helps(
    make: Callable[[str], Path], tmp_path: Path, damage: str
) -> None:
    data = make("Q8_0").read_bytes()
    path = tmp_path / "bad.gguf"
    damaged: dict[str, bytes] = {
        "cut": data[: len(data) // 2],
        "noise": b"no gguf" * 999,
        "empty": b"",
        "cut in the header": data[:300],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(ModelError, match=re.escape(str(path))) as caught:
        LLM(path, device="cpu")
    assert "the file may be damaged or truncated; download it again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_offers_the_nearest(make: Callable[[str], Path]) -> None:
    path = make("F32")
    with pytest.raises(
        ModelError, match=r"there is no file '.*small\.F31\.gguf'.*small\.F32\.gguf"
    ):
        locate(path.with_name("small.F31.gguf"))


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large-00001-of-00003.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is one part of a model; join the parts first"):
        locate(path)


@pytest.mark.parametrize("absent", ["gguf", "accelerate"])
def test_what_is_to_be_installed_is_said(
    make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    real: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == absent else real(name, *more),
    )
    with pytest.raises(ModelError, match=rf"package '{absent}': pip install 'keyhole\[gguf\]'"):
        load(make("F32"), "cpu")


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3": LLAMA3,
}


def scaled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, worse: float = 1.0
) -> tuple[str, Path]:
    """A checkpoint with scaled RoPE, and its file, which has it as llama.cpp's converter writes it.

    worse: multiplies the first divisor of Llama 3's.
    """
    sizes = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 16384}
    base = make_model("llama", folder, tokenizer=True, rope_parameters=SCALED[kind], **sizes)
    rotary = AutoModelForCausalLM.from_pretrained(base).model.rotary_emb

    class Writer(GGUFWriter):
        def write_header_to_file(self, *args: Any, **named: Any) -> None:
            if kind == "llama3":
                plain = 5e5 ** -(torch.arange(8, dtype=torch.float64) / 8)
                divisors = (plain / rotary.inv_freq.double()).float().numpy()
                divisors[0] *= worse
                self.add_tensor("rope_freqs.weight", divisors)
            else:
                self.add_rope_scaling_type(gguf.RopeScalingType(kind))
                self.add_rope_scaling_factor(4.0)
                if kind == "yarn":
                    self.add_rope_scaling_orig_ctx_len(64)
            super().write_header_to_file(*args, **named)

    monkeypatch.setitem(write.__globals__, "GGUFWriter", Writer)
    write(Path(base), folder / "scaled.gguf", "F32")
    return base, folder / "scaled.gguf"


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rope_is_that_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """transformers reads it for gpt-oss only: Llama 3.1 gave other answers, without a word."""
    base, path = scaled(tmp_path, monkeypatch, kind)
    ids = list(range(3, 200))
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(base)(torch.tensor([ids])).logits[0, -1]
    llm = LLM(path, device="cpu", dtype="float32")
    request = llm.engine.add(ids, GREEDY, keep_logits=True)
    while llm.engine.has_work:
        llm.engine.step()
    assert (request.logits[0] - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_rope_that_is_scaled_in_another_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = scaled(tmp_path, monkeypatch, "llama3", worse=1.5)
    with pytest.raises(ModelError, match=r"scales RoPE by a tensor .* that is not Llama 3's"):
        load(path, "cpu")


#: What a writer of GGUF files calls a field, a wrong value of it, and what is said of it.
WRONG = [
    (
        "add_block_count",
        2**31 - 1,
        r"says block_count 2147483647, but has 21 tensors; the",
    ),
    ("add_feed_forward_length", 2**31 - 1, r"of 824,633,780,160 weights, but its tensors hold \d+"),
    ("add_vocab_size", 2**32 - 1, r"of 549,755,\d+,\d+ weights, but its tensors hold"),
    ("add_rope_scaling_factor", float("inf"), r"scales RoPE by rope\.scaling\.factor inf, which"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_a_damaged_field_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: float, message: str
) -> None:
    """The first three took all memory there is, and the last ended in a traceback."""

    class Writer(GGUFWriter):
        def write_header_to_file(self, *args: Any, **named: Any) -> None:
            if field == "add_rope_scaling_factor":
                self.add_rope_scaling_type(gguf.RopeScalingType.YARN)
                self.add_rope_scaling_orig_ctx_len(64)
            else:
                name = {"add_block_count": "block_count", "add_vocab_size": "vocab_size"}
                name |= {"add_feed_forward_length": "feed_forward_length"}
                del self.kv_data[0][f"llama.{name[field]}"]
            getattr(self, field)(value)
            super().write_header_to_file(*args, **named)

    monkeypatch.setitem(write.__globals__, "GGUFWriter", Writer)
    sizes = SIZES | {"num_key_value_heads": 2, "num_hidden_layers": 2}
    base = make_model("llama", tmp_path, tokenizer=True, **sizes)
    write(Path(base), tmp_path / "wrong.gguf", "Q8_0")
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path / "wrong.gguf", "cpu")
    assert "wrong.gguf" in str(caught.value)


def test_a_matrix_of_another_shape_is_named(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks were kept, and were unpacked beyond the end of their memory."""

    class Writer(GGUFWriter):
        def add_tensor(self, name: str, tensor: Any, *args: Any, **named: Any) -> None:
            turned = tensor.reshape(64, -1) if name == "blk.0.attn_k.weight" else tensor
            super().add_tensor(name, turned, *args, **named)

    monkeypatch.setitem(write.__globals__, "GGUFWriter", Writer)
    write(original, tmp_path / "turned.gguf", "Q8_0")
    with pytest.raises(ModelError, match=r"1 weights are .* the first is model.*k_proj\.weight;"):
        load(tmp_path / "turned.gguf", "cpu")


def test_a_padding_token_beyond_the_vocabulary_is_named(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writer(GGUFWriter):
        def write_header_to_file(self, *args: Any, **named: Any) -> None:
            self.add_pad_token_id(99999)
            super().write_header_to_file(*args, **named)

    path = tmp_path / "padded.gguf"
    monkeypatch.setitem(write.__globals__, "GGUFWriter", Writer)
    write(original, path, "Q8_0")
    for read in (load, checkpoint.read):
        with pytest.raises(ModelError, match=r"padded\.gguf' says pad_token_id 99999, .* the file"):
            read(path)


def test_a_transformers_without_a_config_for_it_is_given_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Version 5.16 has no `GgufConfig`; importing it, Keyhole could not be imported there."""
    monkeypatch.setattr(gguf_file, "transformers", SimpleNamespace())
    found = ModelFiles("a.gguf", Path("a.gguf"), unreachable=None, has_adapter=False)
    assert gguf_file.plain(found, torch.float32) == {"dtype": torch.float32}
