"""Searches by sentence embeddings: against transformers itself, with a small random encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, BertConfig, BertModel, PreTrainedTokenizerFast

from keyhole import ConfigError
from keyhole.documents import embeddings
from keyhole.documents.embeddings import EmbeddingSearch, SentenceEncoder
from tests.documents.test_search import TEXTS, info, infos

_WORDS = sorted(
    {word for text in TEXTS.values() for word in text.lower().replace(".", " ").split()}
)
_MOST = 64

#: Of float32 sums in another order: a batch against one text at a time; scores are at most 1.
ROUNDING = 1e-5


def make_encoder(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A BERT with random weights and a token for each word of TEXTS."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_WORDS, *(f"w{n}" for n in range(100))]
    tokenizer = Tokenizer(
        models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(names),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=_MOST,
        initializer_range=0.5,
        **overrides,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> SentenceEncoder:
    return SentenceEncoder(folder)


@pytest.fixture
def table(tmp_path: Path, encoder: SentenceEncoder) -> EmbeddingSearch:
    made = EmbeddingSearch(tmp_path / "embeddings.sqlite", encoder)
    made.update(lambda: infos(TEXTS), TEXTS.get)
    return made


def cosine(folder: Path, one: str, other: str) -> float:
    """As the model card of any such encoder has it, a text at a time."""
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    vectors = []
    for text in (one, other):
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        vectors.append(states[0].mean(0))
    return float(torch.nn.functional.cosine_similarity(*vectors, dim=0))


def test_scores_are_cosines_of_mean_pooled_states(folder: Path, table: EmbeddingSearch) -> None:
    query = "a green lamp"
    expected = {name: cosine(folder, query, text) for name, text in TEXTS.items()}
    found = table.search(query, 10)
    assert [one.name for one in found] == sorted(expected, key=lambda name: -expected[name])
    assert {one.name: one.score for one in found} == pytest.approx(expected, abs=ROUNDING)
    assert table.search(query, 2) == found[:2]


def test_a_text_finds_itself(table: EmbeddingSearch) -> None:
    for name, text in TEXTS.items():
        best, *_ = table.search(text, 1)
        assert (best.name, best.snippet) == (name, text)
        assert best.score == pytest.approx(1.0, abs=ROUNDING)


def test_a_long_text_is_found_by_any_of_its_parts(tmp_path: Path, encoder: SentenceEncoder) -> None:
    words = [f"w{n % 100}" for n in range(400)]
    text = " ".join(words)
    passages = encoder.passages(text)
    assert len(passages) > 8
    assert all(passage in text for passage in passages)
    assert all(any(f" {w} " in f" {p} " for p in passages) for w in words)
    table = EmbeddingSearch(tmp_path / "embeddings.sqlite", encoder)
    table.update(lambda: infos({"long": text, "lamp": TEXTS["lamp"]}), {"long": text, **TEXTS}.get)
    for passage in passages:
        (best,) = table.search(passage, 1)
        assert best.name == "long"
        assert best.snippet == passage[:200] + "…" * (len(passage) > 200)
        assert best.score == pytest.approx(1.0, abs=ROUNDING)


def test_what_is_searched_follows_what_is_stored(
    tmp_path: Path, table: EmbeddingSearch, encoder: SentenceEncoder
) -> None:
    texts = {name: text for name, text in TEXTS.items() if name != "lamp"} | {"new": TEXTS["lamp"]}
    read: list[str] = []

    def text(name: str) -> str | None:
        read.append(name)
        return texts.get(name)

    table.update(lambda: infos(texts), text)
    assert read == ["new"]
    assert table.search(TEXTS["lamp"], 1)[0].name == "new"
    assert b"stands on a table" in (tmp_path / "embeddings.sqlite").read_bytes()
    table.update(lambda: [info("gone", "x")], lambda _: None)
    assert table.search("lamp", 5) == []
    assert b"stands on a table" not in (tmp_path / "embeddings.sqlite").read_bytes()


def test_another_encoder_makes_all_passages_anew(tmp_path: Path, table: EmbeddingSearch) -> None:
    other = SentenceEncoder(make_encoder(tmp_path / "other", seed=1))
    again = EmbeddingSearch(tmp_path / "embeddings.sqlite", other)
    again.update(lambda: infos(TEXTS), TEXTS.get)
    assert again.search(TEXTS["lamp"], 9)[0].score == pytest.approx(1.0, abs=ROUNDING)
    assert len(again.search("lamp", 9)) == len(TEXTS)


def test_a_damaged_table_is_made_again(tmp_path: Path, encoder: SentenceEncoder) -> None:
    path = tmp_path / "embeddings.sqlite"
    path.write_bytes(b"no table at all, but long enough to be taken for one" * 40)
    table = EmbeddingSearch(path, encoder)
    table.update(lambda: infos(TEXTS), TEXTS.get)
    assert table.search(TEXTS["lamp"], 1)[0].name == "lamp"


def test_nothing_is_found_by_nothing(table: EmbeddingSearch) -> None:
    assert table.search(" \n", 3) == []
    with pytest.raises(ConfigError, match="top_k 0 must be at least 1"):
        table.search("x", 0)


def test_a_folder_of_sentence_transformers_is_read(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    kinds = ["models.Transformer", "models.Pooling", "models.Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"type": f"sentence_transformers.{kind}", "path": path}
        for kind, path in zip(kinds, paths, strict=True)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    pooling.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}')
    prompts = {"prompts": {"query": "green ", "document": "red "}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    encoder = SentenceEncoder(tmp_path)
    plain = SentenceEncoder(make_encoder(tmp_path / "plain"))
    assert encoder.query("lamp") == pytest.approx(plain.query("green lamp"), abs=ROUNDING)
    assert encoder.vectors(["lamp"]) == pytest.approx(plain.vectors(["red lamp"]), abs=ROUNDING)
    pooling.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    with pytest.raises(ConfigError, match="pools by pooling_mode_cls_token; only mean"):
        SentenceEncoder(tmp_path)
    modules[2]["type"] = "sentence_transformers.models.Dense"
    pooling.write_text('{"pooling_mode": "mean"}')
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="has a module 'Dense', which is not supported"):
        SentenceEncoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "number", "why"),
    [
        ("encoder.layer.1.output.dense.weight", None, "1 weights are missing or of another shape"),
        ("encoder.layer.1.output.dense.weight", torch.ones(2, 2), "missing or of another shape"),
        ("encoder.layer.1.output.dense.bias", torch.full((32,), torch.nan), "bias has numbers"),
        ("pooler.dense.weight", None, None),
    ],
)
def test_weights_that_are_missing_are_not_drawn(
    tmp_path: Path, name: str, number: torch.Tensor | None, why: str | None
) -> None:
    """Vectors were other ones at every start, or none."""
    file = make_encoder(tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights | ({} if number is None else {name: number}), file, {"format": "pt"})
    if why is None:
        assert SentenceEncoder(tmp_path).vectors(["lamp"]).all()
        return
    with pytest.raises(ConfigError, match=f"is damaged: .*{why}"):
        SentenceEncoder(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_no_traceback(tmp_path: Path, file: str) -> None:
    (make_encoder(tmp_path) / file).write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        SentenceEncoder(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers made an empty one, and all texts had the same vector."""
    for file in make_encoder(tmp_path).glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        SentenceEncoder(tmp_path)


def test_settings_of_a_folder_are_followed_or_refused(tmp_path: Path) -> None:
    """Letters stayed large, and a length beyond the model's ended in a traceback."""
    settings = make_encoder(tmp_path) / "sentence_bert_config.json"
    settings.write_text('{"max_seq_length": 999, "do_lower_case": true}')
    encoder = SentenceEncoder(tmp_path)
    assert (encoder.vectors(["GREEN Lamp"]) == encoder.vectors(["green lamp"])).all()
    assert len(encoder.passages("lamp " * 300)) > 1
    settings.write_text('{"max_seq_length": "60"}')
    with pytest.raises(ConfigError, match="max_seq_length '60' must be a whole number"):
        SentenceEncoder(tmp_path)
    settings.unlink()
    module = {"type": "sentence_transformers.models.Pooling", "path": ""}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"include_prompt": False}))
    with pytest.raises(ConfigError, match="leaves prompts out of the mean"):
        SentenceEncoder(tmp_path)


def test_what_is_no_encoder_is_refused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="'some/hub-name' must be a folder"):
        SentenceEncoder("some/hub-name")
    with pytest.raises(ConfigError, match="has no tokenizer: download its files"):
        SentenceEncoder(tmp_path)
    make_encoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")  # never unpickled
    with pytest.raises(ConfigError, match="cannot be loaded"):
        SentenceEncoder(tmp_path)
    monkeypatch.setattr(embeddings.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"keyhole\[embeddings\]"):
        SentenceEncoder(folder)
