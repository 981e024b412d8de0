"""Everybody can use it: axe finds nothing at any width in either theme; the keyboard is enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.page.conftest import AXE, FACT, Tab

WIDTHS = (360, 820, 1440)
MARKDOWN = (
    "# Title\n\n**bold** and `code`, [a page](https://example.org)\n\n- one\n- two\n\n> said\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint(1)\n```\n"
)
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
#: Best practice, but where it is narrow an open panel stands in the place of `main`.
_NOT_WITH_PANEL = ["landmark-one-main", "page-has-heading-one", "region"]


def violations(tab: Tab) -> list[str]:
    tab.page.evaluate(AXE.read_text())
    found = tab.page.evaluate(
        """([tags, without]) => axe.run(document, {
          runOnly: { type: "tag", values: tags },
          rules: Object.fromEntries(without.map((name) => [name, { enabled: false }])),
        })""",
        [_TAGS, [] if tab.page.is_visible("main") else _NOT_WITH_PANEL],
    )
    assert len(found["passes"]) > 20
    return [
        f"{one['id']}: {node['html'][:120]} {node['failureSummary'][:200]}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


def opens(tab: Tab, view: str) -> None:
    if not tab.page.is_visible(f"#sidebar [data-opens={view}]"):
        tab.page.click("#menu")
    tab.page.click(f"#sidebar [data-opens={view}]")


@pytest.mark.parametrize(("width", "dark"), list(itertools.product(WIDTHS, (False, True))), ids=str)
def test_axe_finds_nothing(make_tab: Callable[..., Tab], width: int, dark: bool) -> None:
    tab = make_tab(width=width, dark=dark)
    assert tab.page.get_attribute("html", "data-theme") == ("dark" if dark else "light")
    found = {"welcome": violations(tab)}
    tab.ask(FACT, compare=True)
    found["comparison"] = violations(tab)
    tab.page.locator(".read").nth(1).click()
    tab.page.fill("#step", "3")
    found["reading"] = violations(tab)
    tab.page.check("#fold")
    found["folded"] = violations(tab)
    tab.page.click("#panel-close")
    if width < 1180:
        tab.page.click("#menu")
        found["sidebar"] = violations(tab)
        tab.page.click("#sidebar-close")
    for view in ("settings", "documents"):
        opens(tab, view)
        tab.page.wait_for_timeout(200)
        found[view] = violations(tab)
        tab.page.click("#panel-close")
    tab.answers_with(MARKDOWN)
    tab.ask("say it")
    tab.page.click("[aria-label='Edit question'] >> nth=0")
    found["markdown"] = violations(tab)
    assert {place: wrong for place, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_screen(make_tab: Callable[..., Tab], width: int) -> None:
    tab = make_tab(width=width)
    fits = "document.documentElement.scrollWidth <= window.innerWidth"
    assert tab.page.evaluate(fits)
    tab.ask(FACT)
    tab.page.click(".read")
    assert tab.page.evaluate(fits)
    box = tab.page.locator("#panel").bounding_box()
    assert box["x"] + box["width"] <= width


def focused(tab: Tab) -> Any:
    return tab.page.evaluate(
        "document.activeElement.id || document.activeElement.getAttribute('aria-label')"
        " || document.activeElement.innerText.trim()"
    )


def press(tab: Tab, key: str, until: str, most: int = 40) -> None:
    """Presses a key until that has the focus, which must be seen."""
    for _ in range(most):
        tab.page.keyboard.press(key)
        shown = "getComputedStyle(document.activeElement).outlineStyle !== 'none' || "
        shown += "document.activeElement.closest('#ask, .chip, #drop') !== null || "
        shown += "document.activeElement === document.body"
        assert tab.page.evaluate(shown), focused(tab)
        if focused(tab) == until:
            return
    raise AssertionError(f"{key} never comes to {until!r}")


def test_the_keyboard_is_enough(tab: Tab) -> None:
    """Ask, read what was read, change a setting, begin anew, come back: without a mouse."""
    keyboard = tab.page.keyboard
    keyboard.press("Tab")
    assert focused(tab) == "Skip to the question"
    keyboard.press("Enter")
    assert focused(tab) == "question"
    keyboard.type(FACT)
    keyboard.press("Enter")
    tab.done()
    assert focused(tab) == "question"
    press(tab, "Shift+Tab", "What it read")
    keyboard.press("Enter")
    assert tab.page.is_visible("#reading-body")
    assert focused(tab) == "What it read"  # the panel's title
    press(tab, "Tab", "step")
    keyboard.press("ArrowRight")
    assert tab.text("#step-number").startswith("token 3 of")
    press(tab, "Tab", "fold")
    keyboard.press("Space")
    assert tab.page.locator(".fold").count() > 0
    keyboard.press("Escape")
    assert not tab.page.is_visible("#panel")
    assert focused(tab) == "What it read"  # the button that opened it
    press(tab, "Shift+Tab", "Settings")
    keyboard.press("Enter")
    press(tab, "Tab", "token-budget")
    keyboard.type("32")
    keyboard.press("Tab")
    keyboard.press("Escape")
    assert focused(tab) == "Settings"
    assert tab.text("#policy-chip") == "delta · 32"
    press(tab, "Shift+Tab", "new")
    keyboard.press("Enter")
    assert focused(tab) == "question"
    assert tab.page.is_visible("#welcome")
    press(tab, "Shift+Tab", FACT[:60].strip())
    keyboard.press("Enter")
    assert tab.text(".answer .text") == "Moper keeps 42 . done"


def test_the_theme_is_chosen(tab: Tab) -> None:
    tab.page.click("#sidebar [data-opens=settings]")
    tab.page.check("[name=theme][value=dark]", force=True)
    assert tab.page.get_attribute("html", "data-theme") == "dark"
    tab.open()
    assert tab.page.get_attribute("html", "data-theme") == "dark"
    tab.page.emulate_media(color_scheme="dark")
    tab.page.click("#sidebar [data-opens=settings]")
    tab.page.check("[name=theme][value=system]", force=True)
    assert tab.page.get_attribute("html", "data-theme") == "dark"
    tab.page.emulate_media(color_scheme="light")
    tab.wait("document.documentElement.dataset.theme === 'light'")
