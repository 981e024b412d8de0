"""Documents in the browser: dropped, listed, searched, asked about, removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from keyhole import LLM
from tests.server.page.conftest import Tab

FACTS = "Alma keeps 17 . the old river falls . Moper keeps 42 . young wolf sings . " * 3
OTHERS = "Nomar inhabits Porto . a quiet bird waits . Josa owns plank . summer rain . " * 3


def file(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "mimeType": "text/plain", "buffer": text.encode()}


@pytest.fixture
def panel(tab: Tab, tiny: LLM) -> Iterator[Tab]:
    tab.page.click("#sidebar [data-opens=documents]")
    yield tab
    for info in tiny.documents.list():
        tiny.documents.remove(info.name)


def names(tab: Tab) -> list[str]:
    return tab.texts("#documents-list strong")


def ready(tab: Tab, count: int) -> None:
    tab.wait(f"document.querySelectorAll('#documents-list li.ready').length === {count}")


def test_files_are_chosen_listed_and_removed(panel: Tab) -> None:
    panel.page.wait_for_selector("text=No documents yet.")
    panel.page.set_input_files("#file", [file("facts.txt", FACTS), file("others.md", OTHERS)])
    ready(panel, 2)
    assert names(panel) == ["facts.txt", "others.md"]
    assert "tokens" in panel.texts("#documents-list small")[0]
    panel.page.click("[aria-label='Delete facts.txt']")
    ready(panel, 1)
    assert names(panel) == ["others.md"]


def test_files_are_dropped(panel: Tab) -> None:
    drop = """(zone) => {
      const data = new DataTransfer();
      data.items.add(new File([TEXT], "dropped.txt", { type: "text/plain" }));
      zone.dispatchEvent(new DragEvent("dragover", { dataTransfer: data, bubbles: true }));
      const isOver = zone.classList.contains("over");
      const dropped = { dataTransfer: data, bubbles: true, cancelable: true };
      zone.dispatchEvent(new DragEvent("drop", dropped));
      return [isOver, zone.classList.contains("over")];
    }""".replace("TEXT", repr(FACTS))
    assert panel.page.eval_on_selector("#drop", drop) == [True, False]
    ready(panel, 1)
    assert names(panel) == ["dropped.txt"]


def test_a_file_that_cannot_be_read_is_said(panel: Tab) -> None:
    panel.page.set_input_files("#file", [file("picture.png", "no text")])
    panel.page.wait_for_selector(".toast.error")
    assert "picture.png" in panel.text(".toast.error")
    assert names(panel) == []
    assert panel.wrong == [
        "Failed to load resource: the server responded with a status of 415 "
        "(Unsupported Media Type)"
    ]
    panel.wrong.clear()


def test_progress_is_shown_while_documents_are_encoded(panel: Tab) -> None:
    states = [
        {"id": "slow.txt", "status": "encoding", "progress": 0.25, "tokens": 400, "error": None},
        {"id": "slow.txt", "status": "ready", "progress": 1, "tokens": 400, "error": None},
    ]
    panel.page.route(
        "**/v1/documents",
        lambda route: route.fulfill(json={"data": [states.pop(0) if states[1:] else states[0]]}),
    )
    panel.page.click("#panel-close")
    panel.page.click("#sidebar [data-opens=documents]")
    panel.page.wait_for_selector("#documents-list progress")
    assert panel.page.eval_on_selector("#documents-list progress", "(bar) => bar.value") == 0.25
    ready(panel, 1)
    assert panel.page.locator("#documents-list progress").count() == 0
    panel.page.unroute("**/v1/documents")


def test_documents_are_found_by_their_words(panel: Tab) -> None:
    panel.page.set_input_files("#file", [file("facts.txt", FACTS), file("others.md", OTHERS)])
    ready(panel, 2)
    panel.page.fill("#find", "plank")
    panel.wait("document.querySelectorAll('#documents-list li').length === 1")
    assert names(panel) == ["others.md"]
    assert "plank" in panel.text(".snippet")
    panel.page.fill("#find", "nowhere")
    panel.page.wait_for_selector("text=No document has these words.")


def test_a_chat_asks_chosen_documents(panel: Tab) -> None:
    panel.page.set_input_files("#file", [file("facts.txt", FACTS), file("others.md", OTHERS)])
    ready(panel, 2)
    panel.page.check("#documents-list input[value='facts.txt']")
    assert panel.texts("#chosen .tag") == ["facts.txt"]
    panel.ask("question : Moper keeps ? answer :")
    assert panel.text(".answer .text").startswith("Moper keeps 42")
    assert panel.text(".sources summary") == "1 document read"
    panel.page.click(".sources summary")
    assert "facts.txt" in panel.text(".sources h4")
    assert "Moper keeps 42" in " ".join(panel.texts(".sources blockquote"))


def test_a_chat_searches_all_documents(panel: Tab) -> None:
    panel.page.set_input_files("#file", [file("facts.txt", FACTS), file("others.md", OTHERS)])
    ready(panel, 2)
    panel.page.check("#search-all")
    assert panel.page.is_disabled("#documents-list input[value='facts.txt']")
    panel.ask("question : Moper keeps ? answer :")
    assert panel.asked[0]["documents"] == {"search": {"query": None, "top_k": 4}}
    assert panel.text(".answer .text").startswith("Moper keeps 42")
