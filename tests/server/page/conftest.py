"""The page in Debian's Chromium, driven by Playwright; `make test-page` sets both up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keyhole import LLM, Delta
from tests.server.conftest import serving

ROOT = Path(__file__).parents[3]
AXE = ROOT / ".venv-page" / "axe.min.js"
BUDGET = 64
_FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
#: A fact in a text that is longer than the budget, as the bundled model reads it.
FACT = (
    "the old river falls . Alma keeps 17 . rain over the quiet field . Moper keeps 42 . a young "
    "wolf sings near the hill . Josa keeps 93 . winter morning waits by a grey stone . Nomar keeps "
    "54 . a bird sleeps under the bridge . often the summer rain turns . the fox runs over a loud "
    "road . never a cloud by the garden . tree and stone and wind . question : Moper keeps ? "
    "answer :"
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM("tiny", Delta(token_budget=BUDGET), documents=tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="session")
def site(tiny: LLM) -> Iterator[str]:
    with serving(tiny) as address:
        yield address


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="`make test-page` sets it up")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=_FLAGS, headless=True
        )
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page of the browser, the bodies that it sent for answers, and what went wrong in it."""

    page: Any
    address: str
    asked: list[Any] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def on_request(self, request: Any) -> None:
        """Records requests; no request may go to another host."""
        if not request.url.startswith((self.address, "data:")):
            self.wrong.append(f"asked {request.url}")
        if request.url.endswith("/completions"):
            self.asked.append(request.post_data_json)

    def open(self) -> None:
        self.page.goto(self.address)
        self.page.wait_for_selector("body[data-ready]")

    def ask(self, text: str, *, compare: bool = False) -> None:
        """Asks and waits for the whole answer."""
        self.page.set_checked("#compare", compare)
        self.page.fill("#question", text)
        self.page.press("#question", "Enter")
        self.done()

    def wait(self, condition: str) -> None:
        """Until a condition in JavaScript is true."""
        self.page.wait_for_function(f"() => {condition}")

    def done(self) -> None:
        self.page.wait_for_selector("#send:visible")
        self.page.wait_for_selector(".answer.running", state="detached")

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def text(self, selector: str) -> str:
        (found,) = self.texts(selector)
        return found

    def answers_with(self, *pieces: str, choice: dict[str, Any] | None = None) -> None:
        """Makes the server answer with this text, whatever the question."""
        chunks = [{"choices": [{"delta": {"content": piece}} | (choice or {})]} for piece in pieces]
        usage = {"completion_tokens": len(pieces), "keyhole": {}}
        events = [json.dumps(one) for one in [*chunks, {"choices": [], "usage": usage}]]
        body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )


@pytest.fixture
def make_tab(chromium: Any, site: str) -> Iterator[Callable[..., Tab]]:
    """New tabs, each with storage of its own; in the end nothing may have gone wrong in them."""
    made: list[tuple[Any, Tab]] = []

    def make(*, width: int = 1280, dark: bool = False, **options: Any) -> Tab:
        theme = "dark" if dark else "light"
        context = chromium.new_context(
            viewport={"width": width, "height": 840},
            color_scheme=theme,
            permissions=["clipboard-read", "clipboard-write"],
            reduced_motion="reduce",
            **options,
        )
        context.set_default_timeout(30_000)
        tab = Tab(context.new_page(), site)
        tab.page.add_init_script(
            "window.violations = [];"
            "document.addEventListener('securitypolicyviolation',"
            " (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));"
        )
        tab.page.on("pageerror", lambda error: tab.wrong.append(str(error)))
        tab.page.on(
            "console", lambda said: tab.wrong.append(said.text) if said.type == "error" else None
        )
        tab.page.on("request", tab.on_request)
        made.append((context, tab))
        tab.open()
        return tab

    yield make
    for context, tab in made:
        violations = tab.page.evaluate("window.violations")
        context.close()
        assert (tab.wrong, violations) == ([], [])


@pytest.fixture
def tab(make_tab: Callable[..., Tab]) -> Tab:
    return make_tab()
