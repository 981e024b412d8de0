"""The page's pictures in docs/: small, and taken again with UPDATE_PICTURES=1."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keyhole import LLM
from keyhole.eval.tiny_language.tasks import make
from tests.server.page.conftest import ROOT, Tab

IMAGES = ROOT / "docs" / "images"
NAMES = ("page-reading", "page-compare", "page-documents", "page-phone")
MOST_BYTES = 300_000


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_small(name: str) -> None:
    data = (IMAGES / f"{name}.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < MOST_BYTES


@pytest.mark.skipif("UPDATE_PICTURES" not in os.environ, reason="UPDATE_PICTURES=1 takes them")
def test_take_them(make_tab: Callable[..., Tab], tiny: LLM) -> None:
    fact = make("recall", 500, seed=3).prompt
    tab = make_tab(width=1360)
    tab.ask(fact)
    tab.page.click(".read")
    tab.page.fill("#step", "2")
    tab.page.mouse.move(0, 0)
    _take(tab, "page-reading")
    phone = make_tab(width=390, dark=True)
    phone.ask(fact)
    phone.page.click(".read")
    phone.page.fill("#step", "2")
    _take(phone, "page-phone")
    tab = make_tab(width=1360, dark=True)
    tab.page.click("#sidebar [data-opens=settings]")
    tab.page.select_option("#policy", "sliding_window")
    tab.page.click("#panel-close")
    tab.ask(make("recall", 160, seed=5).prompt, compare=True)
    _take(tab, "page-compare")
    tab = make_tab(width=1360)
    tab.page.click("#sidebar [data-opens=documents]")
    item = make("recall", 300, seed=3)
    files = [
        {"name": f"{name}.txt", "mimeType": "text/plain", "buffer": text.encode()}
        for name, text in (
            ("handbook", item.prompt.split(" question")[0]),
            ("letters", make("recall", 400, seed=2).prompt.split(" question")[0]),
        )
    ]
    tab.page.set_input_files("#file", files)
    tab.wait("document.querySelectorAll('#documents-list li.ready').length == 2")
    tab.page.check("#documents-list input >> nth=0")
    tab.ask(f"question{item.prompt.split('question')[1]}")
    assert tab.text(".answer .text") == item.answer
    tab.page.click(".sources summary")
    _take(tab, "page-documents")
    for info in tiny.documents.list():
        tiny.documents.remove(info.name)


def _take(tab: Tab, name: str) -> None:
    tab.page.evaluate("document.querySelectorAll('.toast').forEach((one) => one.remove())")
    tab.page.screenshot(path=Path(IMAGES / f"{name}.png"))
