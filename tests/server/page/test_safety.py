"""Nothing that a model, a user or a file says becomes markup or a script, or loads anything.

At the end of every test `make_tab` finds violations of the Content-Security-Policy, errors, and
requests to other places.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keyhole import LLM
from tests.server.conftest import serving
from tests.server.page.conftest import Tab

ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1><script>window.hit=1</script></svg>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "<style>body { display: none }</style>",
    "<a href='javascript:window.hit=1'>press</a>",
    "[press](javascript:window.hit=1)",
    "[press](data:text/html,<script>window.hit=1</script>)",
    "[press](  java\nscript:window.hit=1)",
    "![](x' onerror='window.hit=1)",
    "![tracked](https://elsewhere.example/pixel.png)",
    "<form action='https://elsewhere.example'><button>press</button></form>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=window.hit=1>",
    "<noscript><p title='</noscript><img src=x onerror=window.hit=1>'>",
    "<details open ontoggle=window.hit=1>x</details>",
    "```html\n<script>window.hit = 1</script>\n```",
    '```"><script>window.hit=1</script>\ncode\n```',
    "`<img src=x onerror=window.hit=1>`",
    "<!--><img src=x onerror=window.hit=1>-->",
    "<base href='https://elsewhere.example/'>",
    "<meta http-equiv=refresh content='0;url=https://elsewhere.example'>",
    "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| <script>window.hit=1</script> | c |",
    "<div id=question style='position:fixed;inset:0'>over everything</div>",
    "&lt;script&gt;window.hit=1&lt;/script&gt;",
    "<a href='https://x.example' target=_self onclick='window.hit=1'>press</a>",
    "{{constructor.constructor('window.hit=1')()}}",
]
LIVE = "script, img, iframe, object, embed, style, form, svg:not(.icon), [onerror], [style]"


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_what_a_model_says_stays_text(tab: Tab, attack: str) -> None:
    tab.answers_with(attack[: len(attack) // 2], attack[len(attack) // 2 :])
    tab.ask("say it")
    tab.page.wait_for_timeout(50)
    answer = tab.page.locator(".answer .text")
    assert answer.locator(LIVE).count() == 0
    for link in answer.locator("a").all():
        assert link.get_attribute("href").startswith(("http://", "https://", "mailto:"))
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert tab.page.evaluate("window.hit") is None
    assert tab.page.is_visible("#question")


def test_markup_in_an_answer_is_shown_as_it_was_written(tab: Tab) -> None:
    tab.answers_with("a <b>bold</b> claim and <script>alert(1)</script>")
    tab.ask("say it")
    assert tab.text(".answer .text") == "a <b>bold</b> claim and <script>alert(1)</script>"


def test_markdown_is_rendered(tab: Tab) -> None:
    text = (
        "# Title\n\n**bold**, *slanted* and `code`\n\n1. one\n2. two\n\n> said\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('<hello>')\n```\n\n"
        "[a page](https://example.org)"
    )
    tab.answers_with(*[text[i : i + 7] for i in range(0, len(text), 7)])
    tab.ask("say it")
    found = {
        selector: tab.page.locator(f".answer .text {selector}").all_inner_texts()
        for selector in ("h3", "strong", "em", "li", "blockquote", "td", "pre", "a")
    }
    assert found == {
        "h3": ["Title"],
        "strong": ["bold"],
        "em": ["slanted"],
        "li": ["one", "two"],
        "blockquote": ["said"],
        "td": ["1", "2"],
        "pre": ["print('<hello>')\n"],
        "a": ["a page"],
    }
    assert tab.text(".code-head span") == "python"
    tab.page.click("[aria-label='Copy code']")
    tab.page.wait_for_selector("text=Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()").strip() == "print('<hello>')"


@pytest.mark.parametrize("attack", [ATTACKS[0], ATTACKS[1], ATTACKS[6]])
def test_what_a_user_says_stays_text_everywhere(tab: Tab, attack: str) -> None:
    """In the message, in the list of conversations, in the title, in the reading view."""
    tokens = [{"id": 1, "text": attack, "length": 1, "layers": [0], "ranges": [[[0, 1]]]}]
    choice = {"keyhole": {"prompt": [attack], "tokens": tokens, "counters": {}}}
    tab.answers_with("yes", choice=choice)
    tab.ask(attack)
    assert tab.text(".bubble") == attack
    assert tab.text("#title") == attack
    tab.page.wait_for_selector("#conversations li")
    assert tab.text("#conversations li span") == attack
    tab.page.click(".read")
    assert tab.page.text_content("#prompt-text") == attack
    assert tab.page.text_content("#answer-text") == attack
    assert tab.page.locator("#messages script, #panel script, main img, #panel img").count() == 0
    assert tab.page.evaluate("window.hit") is None


@pytest.mark.parametrize("attack", [ATTACKS[0], ATTACKS[1]])
def test_names_and_errors_of_documents_stay_text(tab: Tab, attack: str) -> None:
    one = {"id": attack, "status": "failed", "progress": 0, "error": attack, "snippet": attack}
    tab.page.route("**/v1/documents", lambda route: route.fulfill(json={"data": [one]}))
    tab.page.click("#sidebar [data-opens=documents]")
    tab.page.wait_for_selector("#documents-list li.failed")
    assert tab.text("#documents-list strong") == attack
    assert tab.text("#documents-list .error") == attack
    assert tab.text("#documents-list .snippet") == attack
    tab.page.check("#documents-list input")
    assert tab.text("#chosen .tag") == attack
    assert tab.page.evaluate("window.hit") is None


def test_a_document_keeps_a_name_of_markup(tab: Tab, tiny: LLM) -> None:
    name = "<img src=x onerror=window.hit=1>.txt"
    data = {"name": name, "mimeType": "text/plain", "buffer": b"Alma keeps 17 . the old river"}
    tab.page.click("#sidebar [data-opens=documents]")
    tab.page.set_input_files("#file", [data])
    tab.page.wait_for_selector("#documents-list li.ready")
    assert tab.text("#documents-list strong") == name
    tab.page.click(f'[aria-label="Delete {name}"]')
    tab.page.wait_for_selector("#documents-none:visible")
    assert [info.name for info in tiny.documents.list()] == []
    assert tab.page.evaluate("window.hit") is None


def test_injected_scripts_and_styles_do_not_run(tab: Tab) -> None:
    """The policy holds even if text did become markup: here a test breaks in by itself."""
    blocked = tab.page.evaluate(
        """() => {
          const script = document.createElement("script");
          let refused = "";
          try { script.textContent = "window.hit = 1"; } catch (error) { refused = error.name; }
          document.body.append(script);
          const box = document.createElement("div");
          try { box.innerHTML = "<b>x</b>"; } catch (error) { refused += error.name; }
          return refused;
        }"""
    )
    assert blocked == "TypeErrorTypeError"
    assert tab.page.evaluate("window.hit") is None
    found = tab.page.evaluate("window.violations.splice(0)")
    assert {one.split()[0] for one in found} == {"require-trusted-types-for"}
    tab.wrong.clear()


def test_a_key_is_asked_for_and_stays_in_the_tab(
    make_tab: Callable[..., Tab], tiny: LLM, site: str
) -> None:
    tab = make_tab()
    with serving(tiny, api_key=("secret",)) as address:
        asked: list[str] = []
        tab.page.on("request", lambda request: asked.append(request.url))
        tab.page.goto(address)
        tab.page.wait_for_selector("#api-key:focus")
        assert "API key" in tab.text(".toast.error")
        tab.page.fill("#api-key", "secret")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_selector("body[data-ready]")
        tab.ask("Alma keeps 17 . question : Alma keeps ? answer :")
        assert tab.text(".answer .text").startswith("Alma keeps 17")
        assert not any("secret" in url for url in asked)
        kept = tab.page.evaluate("[JSON.stringify(localStorage), document.cookie]")
        assert not any("secret" in text for text in kept)
        assert all(url.startswith(address) for url in asked)
    tab.wrong.clear()  # its own 401, and the other address


def test_the_documentation_of_the_api_is_shown_without_a_network(tab: Tab) -> None:
    tab.page.goto(f"{tab.address}/docs")
    tab.page.wait_for_selector("#operations-default-complete_v1_completions_post")
