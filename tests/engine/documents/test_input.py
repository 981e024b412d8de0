"""Odd documents and names: a right answer, or an error that says what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keyhole import LLM, SamplingParams
from keyhole.errors import ConfigError, KeyholeError, RequestError
from keyhole.models.model import Model

FEW = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture
def stored(model: Model, tmp_path: Path) -> LLM:
    """The model of all engine tests, with a store of its own and one document in it."""
    own = LLM(model, page_size=8, documents=tmp_path / "store")
    own.documents.add("note", "the lamp is green")
    return own


GARBAGE = "".join(map(chr, range(32))) + "\x7f\u2028\ufffd\U0001f511" * 9


@pytest.mark.slow
@pytest.mark.parametrize("text", ["A", "\n", GARBAGE, "x" * 65], ids=["one", "blank", "odd", "65"])
def test_any_text_that_has_tokens_is_stored_and_answers_as_a_prefill_would(
    text: str, stored: LLM
) -> None:
    stored.documents.add("odd", text)
    assert stored.documents.store.source("odd") == text
    assert stored.documents.verify() == []
    for names in (["odd"], ["odd", "note"], ["note", "odd", "odd"]):
        found = stored.ask("which?", names, params=FEW)
        wanted = stored.ask("which?", names, params=FEW, reuse="recompute")
        assert found.token_ids == wanted.token_ids  # short documents are computed again whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lamp \udcff", "not valid Unicode: surrogates not allowed at character 5"),
        (b"lamp", "text, a list of token ids, .*, not bytes"),
        (None, "text, a list of token ids, .*, not None"),
        ({"prompt_token_ids": []}, "the document is empty"),
        ({"prompt_token_ids": [5, -1]}, "token id -1"),
        ({"text": "lamp"}, "only the key 'prompt_token_ids'"),
    ],
)
def test_what_is_no_text_is_refused(text: Any, message: str, stored: LLM) -> None:
    with pytest.raises(KeyholeError, match=message):
        stored.documents.add("odd", text)
    assert [info.name for info in stored.documents.list()] == ["note"]


@pytest.mark.parametrize("size", [0, -3, 2.5, "16", True, 10**12])
def test_a_block_has_tokens(size: Any, stored: LLM) -> None:
    """Sizes that are none used to end in errors of torch."""
    with pytest.raises(ConfigError, match=r"block_size .* must be at least 1 and at most 16,384"):
        stored.documents.add("odd", "text", block_size=size)


@pytest.mark.parametrize("metadata", [{"pages": (1, 5)}, {1: "one"}])
def test_metadata_that_json_changes_is_refused(metadata: Any, stored: LLM) -> None:
    """The error said that 15 bytes are more than 4,096."""
    with pytest.raises(ConfigError, match="with text as keys and without tuples"):
        stored.documents.add("odd", "text", metadata=metadata)


@pytest.mark.parametrize("name", [5, None, True, b"note", np.array(5)])
def test_a_name_is_text(name: Any, stored: LLM) -> None:
    """A number ended in an AttributeError."""
    for use in (stored.documents.get, stored.documents.text, stored.documents.remove):
        with pytest.raises(ConfigError, match=r"document name .* must be text"):
            use(name)
    with pytest.raises(ConfigError, match=r"document name .* must be text"):
        stored.documents.verify(["note", name])


@pytest.mark.parametrize("names", [5, "note", b"note", np.array(5)])
def test_names_to_verify_are_a_list(names: Any, stored: LLM) -> None:
    """A number ended in a TypeError, and a text was taken for the names of its letters."""
    with pytest.raises(ConfigError, match=r"documents .* must be a list of names"):
        stored.documents.verify(names)


@pytest.mark.parametrize(
    "names", [[3], ["note", None], [["note"]], iter(()), 3, None, np.array("note")]
)
def test_names_are_text(names: Any, stored: LLM) -> None:
    """A number used to end in an AttributeError, no names of an iterator in one of numpy."""
    with pytest.raises(RequestError, match="must be a list of at least one stored name"):
        stored.ask("which?", names, params=FEW)


@pytest.mark.parametrize("make", [iter, np.array, dict.fromkeys])
def test_names_may_come_from_any_iterable(make: Any, stored: LLM) -> None:
    """An iterator was used up by the check and ended in an error of numpy, as did an array."""
    given = stored.ask("which?", make(["note"]), params=FEW)
    assert given.token_ids == stored.ask("which?", ["note"], params=FEW).token_ids
