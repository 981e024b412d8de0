"""Searches stored documents by meaning: a `Retriever` with sentence embeddings.

A transformers encoder in a folder, such as one of sentence-transformers, computes a vector per
passage of a text: the mean of its last hidden states. sqlite-vec compares vectors by their cosine.
Needs the extra `keyhole[embeddings]`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from keyhole.config import is_count, require
from keyhole.documents.search import Found, Listing, SearchTable
from keyhole.errors import ConfigError, first_line

if TYPE_CHECKING:
    import apsw

_WAIT_MS = 60_000
#: Passages that are encoded at once.
_BATCH = 16
#: Tokens that a passage shares with the one before it, so that no sentence is cut in both.
_OVERLAP = 32
_SNIPPET = 200
#: Every tokenizer has at least one of them; transformers makes an empty one without.
_WORDS = ("tokenizer.json", "vocab*", "*.model")
#: Positions that BERT-like models leave unused before a text, and space for special tokens around
#: it and for a word that is cut, whose parts may be more tokens.
_UNUSED, _ROOM = 2, 4
_SCHEMA = """
CREATE TABLE IF NOT EXISTS passages (name TEXT, digest TEXT, text TEXT, vector BLOB);
CREATE INDEX IF NOT EXISTS names ON passages (name, digest);
PRAGMA secure_delete = ON;
"""
# With min(), SQLite takes the other columns from the row of the minimum: the best passage.
_SEARCH = """
SELECT name, 1 - min(vec_distance_cosine(vector, ?)) AS score, text FROM passages
GROUP BY name ORDER BY score DESC, name LIMIT ?
"""


class SentenceEncoder:
    """A model of transformers in a folder, with mean pooling; nothing is downloaded.

    ConfigError for a folder without a model, with another pooling, or with pickled weights.
    digest: of the folder's contents.
    """

    def __init__(self, folder: str | Path) -> None:
        for name in ("apsw", "sqlite_vec"):
            if importlib.util.find_spec(name) is None:
                raise ConfigError(
                    "search by embeddings needs more packages: pip install 'keyhole[embeddings]'"
                )
        place = Path(folder)
        if not str(folder) or not place.is_dir():
            raise ConfigError(f"embeddings {str(folder)!r} must be a folder with an encoder")
        modules = _json(place / "modules.json") or []
        _check_modules(place, modules)
        place = place / next((one.get("path", "") for one in modules), "")
        if not any(any(place.glob(pattern)) for pattern in _WORDS):
            raise ConfigError(f"embeddings {str(folder)!r} has no tokenizer: download its files")
        named: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            config = AutoConfig.from_pretrained(place, **named)
            require(
                not config.is_encoder_decoder,
                "embeddings",
                str(folder),
                "an encoder without a decoder",
            )
            self._tokenizer = AutoTokenizer.from_pretrained(place, **named)
            loaded: Any = AutoModel.from_pretrained(
                place,
                config=config,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, with their names
                **named,
            )
            self._model, report = loaded[0].eval(), loaded[1]
        except ConfigError:
            raise
        except Exception as error:  # transformers, safetensors, tokenizers, the file system
            raise ConfigError(
                f"embeddings {str(folder)!r} cannot be loaded: {first_line(error)}"
            ) from error
        _check_weights(folder, self._model, report)
        if not self._tokenizer.is_fast:
            raise ConfigError(f"embeddings {str(folder)!r} needs a fast tokenizer")
        prompts = (_json(place / "config_sentence_transformers.json") or {}).get("prompts") or {}
        self._query = str(prompts.get("query") or "")
        self._passage = str(prompts.get("document") or prompts.get("passage") or "")
        settings = _json(place / "sentence_bert_config.json") or {}
        self._lower = bool(settings.get("do_lower_case"))
        stated = settings.get("max_seq_length")
        positions = getattr(config, "max_position_embeddings", None)
        require(not stated or is_count(stated), "max_seq_length", stated, "a whole number >= 1")
        most = min([length for length in (stated, positions) if length], default=512)
        prefix = max(len(self._tokenizer.tokenize(text)) for text in (self._query, self._passage))
        self._limit = min(most, self._tokenizer.model_max_length) - _UNUSED
        self._most = self._limit - _ROOM - prefix
        least = _OVERLAP + _UNUSED + _ROOM + prefix
        require(self._most > _OVERLAP, "max_position_embeddings", most, f"above {least}")
        self.digest = _digest(place)

    def passages(self, text: str) -> list[str]:
        """Overlapping parts of the text, each short enough for the model."""
        found = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        spans = found["offset_mapping"]
        step = self._most - _OVERLAP
        starts = range(0, max(len(spans) - _OVERLAP, 1), step)
        parts = [spans[start : start + self._most] for start in starts]
        return [text[part[0][0] : part[-1][1]] for part in parts if part] or [text]

    def query(self, text: str) -> np.ndarray:
        """The vector of a query, float32 [D]; a query that is too long is truncated."""
        vector: np.ndarray = self._encode([self._query + self.passages(text)[0]])[0]
        return vector

    def vectors(self, passages: Sequence[str]) -> np.ndarray:
        """The vector of each passage, float32 [n, D]."""
        texts = [self._passage + passage for passage in passages]
        parts = [texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH)]
        return np.concatenate([self._encode(part) for part in parts])

    @torch.inference_mode()
    def _encode(self, texts: list[str]) -> np.ndarray:
        if self._lower:
            texts = [text.lower() for text in texts]
        given = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._limit, return_tensors="pt"
        )
        states = self._model(**given).last_hidden_state
        weights = given["attention_mask"].unsqueeze(-1).to(states.dtype)
        mean: np.ndarray = ((states * weights).sum(1) / weights.sum(1)).numpy()
        return mean


class EmbeddingSearch(SearchTable):
    """Documents with a passage near the query's meaning; score: the cosine, from -1 to 1.

    path: the table's file, which can be rebuilt from the texts at any time.
    """

    def __init__(self, path: Path, encoder: SentenceEncoder) -> None:
        super().__init__(path)
        self._encoder = encoder

    def _update(self, documents: Listing, text: Callable[[str], str | None]) -> None:
        with self._table() as table:
            # Passages of another encoder are computed again.
            wanted = {info.name: f"{info.digest} {self._encoder.digest}" for info in documents()}
            rows = set(table.execute("SELECT DISTINCT name, digest FROM passages"))
            gone = rows - wanted.items()
            table.executemany("DELETE FROM passages WHERE name = ? AND digest = ?", gone)
            for name, digest in sorted(wanted.items() - rows):
                found = text(name)
                if found is not None:
                    passages = self._encoder.passages(found)
                    vectors = self._encoder.vectors(passages)
                    made = [
                        (name, digest, passage, vector.tobytes())
                        for passage, vector in zip(passages, vectors, strict=True)
                    ]
                    table.executemany("INSERT INTO passages VALUES (?, ?, ?, ?)", made)

    def search(self, query: str, top_k: int) -> list[Found]:
        """See `Retriever`."""
        require(is_count(top_k), "top_k", top_k, "at least 1")
        if not query.strip():
            return []
        vector = self._encoder.query(query).tobytes()
        with self._table() as table:
            rows: list[Any] = table.execute(_SEARCH, (vector, top_k)).fetchall()
        return [
            Found(name=name, score=score, snippet=text[:_SNIPPET] + "…" * (len(text) > _SNIPPET))
            for name, score, text in rows
        ]

    def _connect(self) -> apsw.Connection:
        import apsw
        import sqlite_vec

        connection = apsw.Connection(str(self._path))
        try:
            connection.set_busy_timeout(_WAIT_MS)
            connection.enable_load_extension(True)
            connection.load_extension(sqlite_vec.loadable_path())
            connection.enable_load_extension(False)
            connection.execute(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    def _code(self, error: Exception) -> int | None:
        import apsw

        return getattr(error, "result", -1) if isinstance(error, apsw.Error) else None


def _json(path: Path) -> Any:
    """The JSON of a file; None if it is missing."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def _check_modules(folder: Path, modules: list[dict[str, Any]]) -> None:
    """ConfigError for unsupported modules of sentence-transformers."""
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(
                f"embeddings {str(folder)!r} has a module {kind!r}, which is not supported"
            )
        if kind == "Pooling":
            settings = _json(folder / module.get("path", "") / "config.json") or {}
            others = [
                name
                for name, value in settings.items()
                if name.startswith("pooling_mode") and value not in (False, "mean")
            ]
            if set(others) - {"pooling_mode_mean_tokens"}:
                raise ConfigError(
                    f"embeddings {str(folder)!r} pools by {', '.join(others)}; only mean pooling "
                    "is supported"
                )
            if settings.get("include_prompt") is False:
                raise ConfigError(
                    f"embeddings {str(folder)!r} leaves prompts out of the mean "
                    "(include_prompt: false), which is not supported"
                )


def _check_weights(folder: str | Path, model: Any, report: dict[str, Any]) -> None:
    """ConfigError for weights that the files lack, which would be drawn at random, or that are NaN.

    report: of transformers. Weights of a pooler are not used.
    """
    lacking = [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])]
    absent = sorted(name for name in lacking if "pooler" not in name)
    if absent:
        raise ConfigError(
            f"embeddings {str(folder)!r} is damaged: {len(absent)} weights are missing or of "
            f"another shape, the first is {absent[0]}"
        )
    for name, weight in model.named_parameters():
        if "pooler" not in name and not weight.isfinite().all():
            raise ConfigError(
                f"embeddings {str(folder)!r} is damaged: {name} has numbers that are not finite"
            )


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:32]
