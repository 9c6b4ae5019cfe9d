"""The page at `/` in a real browser: a question is typed, the stream comes, a round is opened. Skipped where there is
no Chromium with its driver. Set `HF_ADAFUSE_SHOTS` to a folder to look at what the browser shows.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from servers_of_tests import Passes, alone, running
from support.chats import CONFIG, QUESTION

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no Chromium with its driver")
WORDS = ".answer .word[data-round]"
TEXT = QUESTION[0]["content"]


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,860"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    with running() as (service, client):
        browser.get(str(client.base_url).removesuffix("v1/"))
        Page(browser).until("#model option:nth-child(3)")
        yield Page(browser)
    # All that it said was said to this server, and nothing went wrong.
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []


class Page:
    def __init__(self, browser):
        self.browser = browser

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def until(self, selector):
        return WebDriverWait(self.browser, 60).until(lambda _: self.all(selector))

    def ask(self, text, number=1):
        self.all("#input")[0].send_keys(text, Keys.ENTER)
        WebDriverWait(self.browser, 60).until(lambda _: len(self.all(".answers")) == number)
        self.until("#send:not([disabled])")

    def answer(self, number=1):
        return self.browser.execute_script(
            "return [...document.querySelectorAll('.answers')][arguments[0]].querySelector('.text').textContent",
            number - 1,
        )

    def shoot(self, name):
        if folder := os.environ.get("HF_ADAFUSE_SHOTS"):
            self.browser.save_screenshot(str(Path(folder) / f"{name}.png"))


@needs_browser
def test_a_question_its_words_and_a_round(page):
    page.ask(TEXT)
    expected = alone(QUESTION, {"max_new_tokens": 256})
    assert page.answer() == expected.text
    words = page.all(WORDS)
    assert len(words) == sum(len(one.words) for one in expected)
    styles = {word.get_attribute("style") for word in words}
    assert any("var(--m0)" in style for style in styles) and any("var(--m1)" in style for style in styles)
    assert any("--doubt" in style for style in styles)
    words[0].click()
    (aside,) = page.until("#round:not([hidden])")
    assert f"Round 1 of {len(expected)}" in aside.text
    assert len(page.all("#round tbody tr")) == len(expected[0].candidates)
    assert len(page.all("#round tr.won")) == 1
    page.shoot("round")


@needs_browser
def test_the_keyboard_alone(page):
    page.ask(TEXT)
    word = page.all('.word[tabindex="0"]')[0]
    page.browser.execute_script("arguments[0].focus()", word)
    active = page.browser.switch_to.active_element
    active.send_keys(Keys.ARROW_RIGHT)
    active = page.browser.switch_to.active_element
    assert active.get_attribute("class") == "word" and active != word
    active.send_keys(Keys.ENTER)
    page.until("#round:not([hidden])")
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not page.all("#round:not([hidden])") and page.browser.switch_to.active_element == active


@pytest.mark.slow
@needs_browser
def test_members_beside_it_a_second_turn_and_the_dark(page):
    page.all("#alone")[0].click()
    page.all("#theme")[0].click()
    page.ask(TEXT)
    assert len(page.all(".answer")) == 3
    assert page.browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    page.shoot("members")
    first = page.answer()
    page.ask("was", 2)
    chat = [*QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "was"}]
    assert page.answer(2) == alone(chat, {"max_new_tokens": 256}).text
    page.all("#new")[0].click()
    assert not page.all(".answer")


@needs_browser
def test_an_answer_that_is_not_over_is_no_part_of_a_new_chat(page, monkeypatch):
    passes = Passes(monkeypatch)
    page.all("#input")[0].send_keys(TEXT, Keys.ENTER)
    passes.allow(20)
    page.until(".answer .word")
    page.all("#new")[0].click()
    passes.is_open = True
    page.until("#send:not([disabled])")
    page.ask("was")
    assert page.answer() == alone([{"role": "user", "content": "was"}], {"max_new_tokens": 256}).text


@needs_browser
def test_settings(page):
    page.all("#show-settings")[0].click()
    (number,) = page.all("#max_tokens")
    number.clear()
    number.send_keys("5")
    page.all("#num_branches")[0].send_keys("1")
    page.shoot("settings")
    page.ask(TEXT)
    call = {"max_new_tokens": 5, "adafuse_config": CONFIG.changed({"num_branches": 1})}
    assert page.answer() == alone(QUESTION, call).text
    assert "cut at the most tokens" in page.all(".answer")[0].text


def test_the_page_is_one_file_that_needs_no_network():
    page = files("hf_adafuse.serve").joinpath("page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|<link|<script src|@import|url\(|innerHTML", page)
    with running() as (_, client):
        answer = httpx.get(str(client.base_url).removesuffix("v1/"))
    assert answer.text == page and "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_the_page_needs_no_key_but_asks_for_it():
    with running(api_key="secret") as (_, client):
        root = str(client.base_url).removesuffix("v1/")
        assert httpx.get(root).status_code == 200 and httpx.get(f"{root}v1/models").status_code == 401
