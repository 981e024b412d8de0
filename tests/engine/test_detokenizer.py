"""Text from tokens: whole characters, nothing lost, nothing after a stop text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.tokenization import Detokenizer, token_bytes
from tests.checkpoints import make_tokenizer

TOKENIZER = make_tokenizer()
TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="�"),
    min_size=1,
    max_size=12,
)


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, stop)
    out = []
    for token in TOKENIZER(text, add_special_tokens=False).input_ids:
        detokenizer.append(token)
        out.append(detokenizer.take(final=False))
    detokenizer.finish()
    out.append(detokenizer.take(final=True))
    return out, detokenizer


@given(TEXT)
def test_pieces_make_the_text_and_hold_whole_characters(text: str) -> None:
    out, detokenizer = pieces(text)
    assert "".join(out) == detokenizer.text == text
    assert all("�" not in piece for piece in out)


@given(TEXT, st.data())
def test_it_does_not_matter_when_the_text_is_asked_for(text: str, data: st.DataObject) -> None:
    detokenizer, seen = Detokenizer(TOKENIZER), ""
    for token in TOKENIZER(text, add_special_tokens=False).input_ids:
        detokenizer.append(token)
        if data.draw(st.booleans()):
            assert detokenizer.text.startswith(seen)
            seen = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text == text


@given(TEXT, st.data())
def test_a_stop_text_cuts_at_its_first_place_and_never_leaks(
    text: str, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : data.draw(st.integers(begin + 1, len(text)))]
    out, detokenizer = pieces(text, (stop, stop + "never"))
    assert detokenizer.stopped
    assert "".join(out) == text[: text.index(stop)]


@given(TEXT)
def test_a_stop_text_that_never_comes_changes_nothing(text: str) -> None:
    out, detokenizer = pieces(text, (text + "x",))
    assert not detokenizer.stopped
    assert "".join(out) == text


def test_an_unfinished_character_comes_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    for token in TOKENIZER("é", add_special_tokens=False).input_ids[:1]:
        detokenizer.append(token)
    assert detokenizer.take(final=False) == ""
    detokenizer.finish()
    assert detokenizer.take(final=True) == "�"


def test_special_tokens_are_not_text() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    for token in TOKENIZER("a</s>b").input_ids:
        detokenizer.append(token)
    assert detokenizer.text == "ab"


@pytest.mark.parametrize(
    ("name", "text", "data"),
    [
        ("<0xC3>", "\ufffd", b"\xc3"),  # SentencePiece
        ("\u013a", "\ufffd", b"\x98"),  # byte-level, a byte that is not printable
        ("\u00e2\u0127\u0134", "\ufffd", b"\xe2\x85\x92"),
        ("\ufffd", "\ufffd", "\ufffd".encode()),
        ("\u2581fox", "fox", b"fox"),
    ],
)
def test_the_bytes_of_a_token(name: str, text: str, data: bytes) -> None:
    class Names:
        def convert_ids_to_tokens(self, token: int) -> str:
            return name

    assert token_bytes(Names(), 7, text) == data
