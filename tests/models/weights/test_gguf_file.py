"""GGUF files whose blocks are kept, beside the same files dequantised by transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from torch import nn

from keyhole import LLM, ConfigError, ModelError, SamplingParams
from keyhole.cli import main
from keyhole.engine.allocation import model_size
from keyhole.models.loading import adopt, load
from keyhole.models.weights.packing import BlockEmbedding, BlockLinear
from tests.checkpoints import make_model
from tests.models.test_gguf import DRAWN, MIXED, write
from tests.models.verified import failed

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = list(range(3, 60))
KINDS = ["Q8_0", "Q4_0", *DRAWN, *MIXED]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A file of a format, whose rows are whole blocks; made once."""
    folder, made = tmp_path_factory.mktemp("blocks"), dict[Any, Path]()

    def file(kind: str, *, tied: bool = False, intermediate_size: int = 256) -> Path:
        key = (kind, tied, intermediate_size)
        if key not in made:
            width = 256 if kind in DRAWN | MIXED else 64
            original = make_model(
                "llama",
                folder / f"original-{len(made)}",
                tokenizer=True,
                hidden_size=width,
                head_dim=width // 4,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=intermediate_size,
                tie_word_embeddings=tied,
            )
            made[key] = folder / f"{len(made)}.{kind}.gguf"
            write(Path(original), made[key], kind)
        return made[key]

    return file


def held_bytes(model: Any) -> int:
    """Of all weights, shared ones once."""
    return sum({x.data_ptr(): x.nbytes for x in model.network.state_dict().values()}.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_dequantised_file(
    make: Callable[..., Path], kind: str, tied: bool
) -> None:
    path = make(kind, tied=tied)
    kept = load(path, "cpu", "float32")
    plain = load(path, "cpu", "float32", weights="dequantised")
    assert isinstance(kept.network.model.layers[1].mlp.down_proj, BlockLinear)
    assert isinstance(kept.network.get_input_embeddings(), BlockEmbedding)
    assert not [x for x in plain.network.modules() if isinstance(x, BlockLinear)]
    names = dict(kept.network.named_modules())
    for name, weight in plain.network.state_dict().items():
        found = names[name.removesuffix(".weight")].weight
        torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-9)
    assert LLM(kept).generate(PROMPT, GREEDY).token_ids == (
        LLM(plain).generate(PROMPT, GREEDY).token_ids
    )
    for model in (kept, plain):
        model.network.set_attn_implementation("eager")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for some in (ids, ids[:, :7]):  # by unpacking rows, and by the codes
            wanted = plain.network(some).logits
            found = kept.network(some).logits
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_the_file(make: Callable[..., Path], kind: str) -> None:
    """Q4_K's scales have a byte each in memory, 3% more; Q5_K's weights 6 bits, 21% more."""
    path = make(kind)
    stored = sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)
    kept = held_bytes(load(path, "cpu"))
    assert kept <= stored * {"Q4_K": 1.03, "Q5_K": 1.21}.get(MIXED.get(kind, (kind,))[0], 1)
    assert kept < 0.6 * held_bytes(load(path, "cpu", weights="dequantised"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", *MIXED])
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_counts_what_is_kept(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str], kind: str, tied: bool
) -> None:
    """It counted every weight in 16 bits, several times what a file takes."""
    path, model = make(kind, tied=tied), load(make(kind, tied=tied), "cpu")
    options = ["--total-memory", "64MiB", "--lengths", "256", "--json"]
    assert main(["plan", "--model", str(path), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weight_bytes"] == held_bytes(model)
    assert found["weight_bytes"] == model_size(model, None).weight_bytes
    assert "of them in its blocks" in found["counted_from"]
    # As `LLM` itself computes what is left for the cache.
    engine = LLM(model, total_memory="64MiB", max_batch=1).engine
    assert found["memory"] >= engine.cache.max_pages * engine.cache.page_bytes


@pytest.mark.slow
def test_a_folder_is_planned_as_its_file(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.gguf").symlink_to(make("Q8_0"))
    printed = []
    for model in (tmp_path, tmp_path / "one.gguf"):
        assert main(["plan", "--model", str(model), "--total-memory", "64MiB"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "one in 64.0 MiB" in printed[0]


@pytest.mark.parametrize("damage", ["cut", "noise", "another format"])
def test_a_damaged_file_is_not_planned(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    data = make("Q6_K").read_bytes()
    path = tmp_path / "bad.gguf"
    damaged = {"cut": data[: len(data) // 2], "noise": b"no gguf" * 999}
    path.write_bytes(damaged[damage] if damage in damaged else with_wrong_header(data, damage))
    capsys.readouterr()  # what the first to make such a file prints
    assert main(["plan", "--model", str(path), "--total-memory", "64MiB"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert "the file may be damaged or truncated; download it again" in line


def test_a_shared_table_is_held_once(make: Callable[..., Path]) -> None:
    model = load(make("Q8_0", tied=True), "cpu")
    head, embedding = model.network.get_output_embeddings(), model.network.get_input_embeddings()
    assert head.codes is embedding.codes
    assert held_bytes(model) < held_bytes(load(make("Q8_0"), "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_check_passes(make: Callable[..., Path], kind: str) -> None:
    """Against transformers' eager attention over the same layers: ragged, in chunks."""
    loaded = load(make(kind), "cpu")
    assert loaded.dtype == torch.bfloat16
    assert failed(loaded) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXED)
def test_files_of_two_formats_are_kept_whole(make: Callable[..., Path], kind: str) -> None:
    network = load(make(kind), "cpu").network
    plain = [name for name, x in network.named_modules() if type(x) in (nn.Linear, nn.Embedding)]
    assert plain == []
    formats = {x.group_scales.shape[1] for x in network.modules() if isinstance(x, BlockLinear)}
    assert formats == {1, 2}  # Q6_K has a scale for each group, the others a minimum, too


#: Of a tensor in the header, behind its name: where a field begins, its bytes, and a wrong value.
WRONG: dict[str, tuple[int, int, int, str]] = {
    "rows of no whole blocks": (4, 8, 255, "not a multiple of Q6_K block size"),
    "another format": (20, 4, int(GGMLQuantizationType.Q4_K), "begins at byte"),
    "a shifted tensor": (24, 8, 0, "begins at byte"),
}


def with_wrong_header(file: bytes, wrong: str) -> bytes:
    """The bytes of a file with a wrong field of one tensor."""
    at, size, value, _ = WRONG[wrong]
    data, name = bytearray(file), b"blk.0.ffn_down.weight"
    field = data.index(name) + len(name) + at
    data[field : field + size] = value.to_bytes(size, "little")
    return bytes(data)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_damaged_header_of_blocks_is_named(
    make: Callable[..., Path], tmp_path: Path, wrong: str
) -> None:
    """A wrong format was not noticed: the bytes of other tensors were read as weights."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(with_wrong_header(make("Q6_K").read_bytes(), wrong))
    with pytest.raises(ModelError, match=WRONG[wrong][-1]) as caught:
        load(path, "cpu")
    assert str(path) in str(caught.value)
    assert "the file may be damaged or truncated; download it again" in str(caught.value)


@pytest.mark.slow
def test_rows_that_are_no_whole_blocks_are_numbers(make: Callable[..., Path]) -> None:
    path = make("Q8_0", intermediate_size=96)
    kept, plain = (load(path, "cpu", weights=weights) for weights in (None, "dequantised"))
    layers = (x.network.model.layers[0].mlp for x in (kept, plain))
    ours, theirs = layers
    assert isinstance(ours.up_proj, BlockLinear)
    assert not isinstance(ours.down_proj, BlockLinear)
    assert torch.equal(ours.down_proj.weight, theirs.down_proj.weight)


@pytest.mark.slow
def test_other_formats_are_dequantised(make: Callable[..., Path]) -> None:
    network = load(make("F16"), "cpu").network
    assert not [x for x in network.modules() if isinstance(x, BlockLinear)]


@pytest.mark.slow
def test_packing_starts_from_the_numbers(make: Callable[..., Path]) -> None:
    model = load(make("Q8_0"), "cpu", weights="int4")
    assert model.weights == "int4"
    assert not [x for x in model.network.modules() if isinstance(x, BlockLinear)]


def test_only_files_with_blocks_are_dequantised(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    message = "weights 'dequantised' is for GGUF files"
    with pytest.raises(ConfigError, match=message):
        load(folder, "cpu", weights="dequantised")
    with pytest.raises(ConfigError, match=message):
        adopt(load(folder, "cpu").network, device="cpu", weights="dequantised")


@pytest.mark.slow
def test_the_log_says_what_is_kept(
    make: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "keyhole"):
        load(make("Q4_0"), "cpu")
    assert any("matrices of" in r.message and "blocks" in r.message for r in caplog.records)


@pytest.mark.slow
def test_the_command_line_compares_both(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make("Q8_0"))
    assert main(["verify", "--model", path, "--device", "cpu", "--weights", "dequantised"]) == 0
    assert "weights dequantised compared with those as stored" in capsys.readouterr().out
