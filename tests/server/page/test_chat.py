"""Chat in the browser: streaming, stop, edit, answer again, copy, conversations, comparison."""

from __future__ import annotations

from keyhole.eval.tiny_language.tasks import make
from tests.server.page.conftest import BUDGET, FACT, Tab

OTHER = FACT.replace("question : Moper", "question : Josa")
#: Its answer takes hundreds of steps.
LONG = make("derive", 1000, seed=0).prompt


def test_an_answer_comes_with_its_counters(tab: Tab) -> None:
    tab.ask(FACT)
    assert tab.text(".user .bubble") == FACT
    assert tab.text(".answer .text") == "Moper keeps 42 . done"
    assert tab.text(".answer .label") == f"delta · {BUDGET} tokens"
    line = tab.text(".counters")
    assert "6 tokens" in line
    assert "% of keys read" in line
    assert "KiB read" in line or "MiB read" in line
    assert tab.text("#meter-rate") != "–"
    assert tab.text("#meter-layers") == "0"
    assert 0 < float(tab.page.eval_on_selector("#meter-bar", "(bar) => bar.value")) < 1


def test_text_and_counters_grow_while_it_answers_and_stop_ends_it(tab: Tab) -> None:
    tab.page.fill("#question", LONG)
    tab.page.press("#question", "Enter")
    grows = "document.querySelector('.text')?.innerText.split(' ').length > 8"
    tab.wait(grows)
    assert tab.page.is_visible("#meter")
    assert float(tab.text("#meter-rate")) > 0
    tab.page.click("#stop")
    tab.done()
    assert "Stopped." in tab.text(".answer")
    said = tab.text(".text")
    tab.page.wait_for_timeout(300)
    assert tab.text(".text") == said
    assert len(said.split()) < 400
    tab.ask(FACT)  # the next one is not concerned
    assert tab.texts(".answer .text")[-1].endswith("done")


def test_a_question_is_edited_and_asked_again(tab: Tab) -> None:
    tab.ask(FACT)
    tab.ask(OTHER)
    assert len(tab.texts(".bubble")) == 2
    tab.page.locator("[aria-label='Edit question']").first.click()
    field = tab.page.locator(".edit textarea")
    assert field.input_value() == FACT
    field.fill(FACT.replace("question : Moper", "question : Nomar"))
    tab.page.click("text=Ask again")
    tab.done()
    assert len(tab.texts(".bubble")) == 1
    assert tab.text(".answer .text") == "Nomar keeps 54 . done"


def test_escape_leaves_a_question_as_it_was(tab: Tab) -> None:
    tab.ask(FACT)
    tab.page.click("[aria-label='Edit question']")
    tab.page.fill(".edit textarea", "something else")
    tab.page.press(".edit textarea", "Escape")
    assert tab.text(".bubble") == FACT


def test_an_answer_is_given_again(tab: Tab) -> None:
    tab.ask(FACT)
    tab.page.click("[aria-label='Answer again']")
    tab.done()
    assert tab.texts(".answer .text") == ["Moper keeps 42 . done"]
    assert [one["messages"] for one in tab.asked] == 2 * [[{"role": "user", "content": FACT}]]


def test_questions_and_answers_are_copied(tab: Tab) -> None:
    tab.ask(FACT)
    for name, wanted in (("answer", "Moper keeps 42 . done"), ("question", FACT)):
        tab.page.click(f"[aria-label='Copy {name}']")
        tab.page.wait_for_selector("text=Copied")
        assert tab.page.evaluate("navigator.clipboard.readText()").strip() == wanted


def test_conversations_stay_in_the_browser(tab: Tab) -> None:
    tab.ask(FACT)
    tab.page.click("#new")
    tab.ask(OTHER)
    tab.wait("document.querySelectorAll('#conversations li').length === 2")
    tab.open()
    tab.wait("document.querySelectorAll('#conversations li').length === 2")
    tab.page.locator("#conversations li button").nth(2).click()
    assert tab.text(".answer .text") == "Moper keeps 42 . done"
    tab.page.click(".answer .read")  # what it read was kept, too
    assert "all" in tab.text("#facts") or "read" in tab.text("#facts")
    tab.page.click("#panel-close")
    tab.page.locator("#conversations li").nth(1).hover()
    tab.page.locator("#conversations li button").nth(3).click()
    tab.wait("document.querySelectorAll('#conversations li').length === 1")
    assert tab.page.is_visible("#welcome")


def test_the_whole_conversation_is_asked(tab: Tab) -> None:
    tab.ask(FACT)
    tab.ask(OTHER)
    assert [message["role"] for message in tab.asked[1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    assert tab.asked[1]["messages"][1]["content"].strip() == "Moper keeps 42 . done"


def test_settings_go_with_a_question(tab: Tab) -> None:
    tab.page.click("#sidebar [data-opens=settings]")
    tab.page.select_option("#policy", "streaming_llm")
    tab.page.fill("#token-budget", "48")
    tab.page.fill("#max-tokens", "3")
    tab.page.fill("#seed", "7")
    tab.page.fill("#system", "the quiet field .")
    tab.page.uncheck("#trace")
    assert tab.text("#policy-chip") == "streaming_llm · 48"
    tab.ask(FACT)
    assert tab.asked[0]["keyhole"] == {
        "trace": False,
        "policy": "streaming_llm",
        "token_budget": 48,
    }
    assert (tab.asked[0]["max_tokens"], tab.asked[0]["seed"]) == (3, 7)
    assert tab.asked[0]["messages"][0] == {"role": "system", "content": "the quiet field ."}
    assert "Ended at the limit" in tab.text(".answer")
    tab.open()  # they are kept
    assert tab.text("#policy-chip") == "streaming_llm · 48"
    tab.page.click("#sidebar [data-opens=settings]")
    assert tab.page.input_value("#max-tokens") == "3"
    assert not tab.page.is_checked("#trace")


def test_policies_that_cannot_run_are_named_with_the_reason(tab: Tab) -> None:
    tab.page.click("#sidebar [data-opens=settings]")
    offered = tab.texts("#policy option")
    assert offered[0] == "as the server: delta"
    assert "full" in offered
    assert "quest" not in offered
    tab.page.click("#unavailable summary")
    assert "quest" in tab.text("#unavailable ul")


def test_equal_answers_are_said_to_be_equal(tab: Tab) -> None:
    tab.ask(FACT, compare=True)
    assert tab.texts(".answer .label") == ["full attention", f"delta · {BUDGET} tokens"]
    assert tab.texts(".answer .text") == 2 * ["Moper keeps 42 . done"]
    assert tab.texts(".note") == 2 * ["Both answers are the same, 5 words."]
    shares = tab.texts(".counters")
    assert "100.0 % of keys read" in shares[0]
    assert "100.0 % of keys read" not in shares[1]
    tab.page.click("[aria-label='Answer again'] >> nth=0")
    tab.done()
    assert len(tab.texts(".answer")) == 2


def test_the_first_word_that_differs_is_marked(tab: Tab) -> None:
    """A window of 16 tokens does not see the fact."""
    tab.page.click("#sidebar [data-opens=settings]")
    tab.page.select_option("#policy", "sliding_window")
    tab.page.fill("#token-budget", "16")
    tab.page.click("#panel-close")
    tab.ask(FACT, compare=True)
    full, sparse = tab.texts(".answer .text")
    words = list(zip(full.split(), sparse.split(), strict=False))
    place = next(i for i, (a, b) in enumerate(words) if a != b)
    assert tab.texts("mark") == list(words[place])
    assert (
        tab.texts(".note")[0] == f"The first difference is word {place + 1}: “{words[place][0]}”."
    )


def test_an_error_of_the_server_is_said(tab: Tab) -> None:
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body='data: {"error": {"message": "no <b>room</b>", "code": null}}\n\n',
            content_type="text/event-stream",
        ),
    )
    tab.ask(FACT)
    assert "no <b>room</b>" in tab.text(".answer .error")
