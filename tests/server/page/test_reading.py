"""The reading view shows what the engine read, token by token and layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from keyhole import LLM, SamplingParams
from keyhole.eval.tiny_language.tasks import make
from tests.server.page.conftest import FACT, Tab


@pytest.fixture(scope="module")
def wanted(tiny: LLM) -> Any:
    params = SamplingParams(max_tokens=20, temperature=0.0, trace=True)
    return tiny.chat([{"role": "user", "content": FACT}], params)


@pytest.fixture
def view(tab: Tab) -> Tab:
    tab.ask(FACT)
    tab.page.click(".read")
    tab.page.wait_for_selector("#reading-body")
    return tab


def heats(tab: Tab) -> list[str]:
    """Of the prompt, then of the answer."""
    found = [
        tab.page.eval_on_selector_all(
            f"#{part}-text .token", "(all) => all.map((one) => one.dataset.heat)"
        )
        for part in ("prompt", "answer")
    ]
    return found[0] + found[1]


def choose_layer(tab: Tab, layer: str) -> None:
    tab.page.check(f"#layers input[value='{layer}']", force=True)


def expected(wanted: Any, token: int, layers: list[int]) -> list[str]:
    """The heat of every token, from the engine's own record."""
    read = wanted.reads[token]
    share = np.mean([read.shares(layer) for layer in layers], axis=0)
    total = len(wanted.prompt_token_ids) + len(wanted.token_ids)
    levels = [str(level) for level in np.ceil(share * 5 - 1e-4).astype(int)]
    return [*levels, "now", *["later"] * (total - read.length - 1)]


def test_the_text_is_there_token_by_token(view: Tab, wanted: Any) -> None:
    assert len(heats(view)) == len(wanted.prompt_token_ids) + len(wanted.token_ids)
    assert view.text("#prompt-count") == f"{len(wanted.prompt_token_ids)} tokens"
    assert view.page.text_content("#prompt-text").strip() == f"<bos> {FACT}"
    assert view.page.text_content("#answer-text").strip() == "Moper keeps 42 . done <eos>"


@pytest.mark.parametrize("layer", range(6))
def test_heat_is_what_the_layer_read(view: Tab, wanted: Any, layer: int) -> None:
    choose_layer(view, str(layer))
    for token in range(len(wanted.token_ids)):
        view.page.fill("#step", str(token))
        assert heats(view) == expected(wanted, token, [layer])


def test_all_layers_and_the_sparse_ones(view: Tab, wanted: Any) -> None:
    view.page.fill("#step", "2")
    choose_layer(view, "all")
    assert heats(view) == expected(wanted, 2, list(range(6)))
    choose_layer(view, "sparse")
    assert heats(view) == expected(wanted, 2, [3, 4, 5])
    read = wanted.reads[2]
    share = read.shares(3).mean()
    assert f"3 layers read {read.shares(3).sum():.0f} of {read.length}" in view.text("#facts")
    assert f"{100 * share:.1f} %" in view.text("#facts")


def test_the_mouse_previews_and_a_click_pins(view: Tab, wanted: Any) -> None:
    choose_layer(view, "4")
    tokens = view.page.locator("#answer-text .token")
    tokens.nth(4).hover()
    assert heats(view) == expected(wanted, 4, [4])
    view.page.hover("h1")
    assert heats(view) == expected(wanted, 1, [4])  # where it began
    tokens.nth(3).click()
    view.page.hover("h1")
    assert heats(view) == expected(wanted, 3, [4])
    assert view.text("#step-number") == f"token 4 of {len(wanted.token_ids)}"


def test_the_keyboard_steps(view: Tab, wanted: Any) -> None:
    view.page.focus("#step")
    view.page.keyboard.press("ArrowRight")
    view.page.keyboard.press("ArrowRight")
    assert heats(view) == expected(wanted, 3, [3, 4, 5])
    assert "token 4 of" in view.page.get_attribute("#step", "aria-valuetext")
    view.page.focus("#step-back")
    view.page.keyboard.press("Enter")
    assert heats(view) == expected(wanted, 2, [3, 4, 5])
    view.page.focus("#layers input:checked")
    view.page.keyboard.press("ArrowRight")
    assert heats(view) == expected(wanted, 2, list(range(6)))


def test_a_finger_chooses(make_tab: Callable[..., Tab], wanted: Any) -> None:
    tab = make_tab(width=390, has_touch=True)
    tab.ask(FACT)
    tab.page.tap(".read")
    tab.page.locator("#answer-text .token").nth(3).tap()
    assert heats(tab) == expected(wanted, 3, [3, 4, 5])
    tab.page.tap("#step-on")
    assert heats(tab) == expected(wanted, 4, [3, 4, 5])


def test_unread_text_folds(view: Tab, wanted: Any) -> None:
    view.page.fill("#step", "3")
    view.page.check("#fold")
    read = wanted.reads[3].shares(4)[: len(wanted.prompt_token_ids)]
    hidden = view.page.locator(".token[hidden]").count()
    assert 0 < hidden <= (read == 0).sum()
    signs = [int(text.split()[1]) for text in view.texts(".fold")]
    assert sum(signs) == hidden
    view.page.uncheck("#fold")
    assert view.page.locator(".token[hidden], .fold").count() == 0


def test_passages_are_found_one_after_another(view: Tab, wanted: Any) -> None:
    view.page.fill("#step", "3")
    view.page.click("#passage-on")
    starts = np.flatnonzero(np.diff(wanted.reads[3].shares(4) > 0, prepend=False) == 1)
    assert view.text("#passage").startswith("passage 1 of ")
    assert view.text("#passage").endswith(str((len(starts) + 1) // 2))


def test_the_strip_has_a_row_for_each_layer(view: Tab, wanted: Any) -> None:
    """The colour of points of the canvas, against the record."""
    token = 3
    view.page.fill("#step", str(token))
    choose_layer(view, "all")
    read, total = wanted.reads[token], len(wanted.prompt_token_ids) + len(wanted.token_ids)
    points = """([places, total, layers]) => {
      const canvas = document.querySelector("#strip");
      const pen = canvas.getContext("2d");
      return places.map((place) => Array.from({ length: layers }, (_, layer) => {
        const x = Math.floor(((place + 0.5) * canvas.width) / total);
        const y = Math.floor(((layer + 0.5) * canvas.height) / layers);
        return [...pen.getImageData(x, y, 1, 1).data].join();
      }));
    }"""
    places = list(range(2, len(wanted.prompt_token_ids) - 2, 5))
    colors = view.page.evaluate(points, [places, total, 6])
    hot = colors[0][0]  # layer 0 reads everything
    for place, column in zip(places, colors, strict=True):
        for layer, color in enumerate(column):
            assert (color == hot) == (read.shares(layer)[place] == 1), (place, layer)


def test_it_follows_an_answer_that_grows(tab: Tab) -> None:
    tab.page.fill("#question", make("derive", 1000, seed=0).prompt)
    tab.page.press("#question", "Enter")
    tab.page.click(".read")
    tab.wait(
        "document.querySelectorAll('#answer-text .token').length > 10"
        " && Number(document.querySelector('#step').value) > 9"
    )
    tab.page.fill("#step", "3")  # one that is chosen stays
    tab.page.wait_for_timeout(300)
    assert tab.page.input_value("#step") == "3"
    tab.page.click("#stop")
    tab.done()


def test_an_answer_without_a_record_says_so(tab: Tab) -> None:
    tab.page.click("#sidebar [data-opens=settings]")
    tab.page.uncheck("#trace")
    tab.ask(FACT)
    tab.page.click(".read")
    assert "was not recorded" in tab.text("#reading-none")
    assert not tab.page.is_visible("#reading-body")
