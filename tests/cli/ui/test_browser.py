"""The page in a real Chromium, by playwright; skipped where one of the two is not installed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mpctl.cli.ui.server import UiServer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

FIRST = {"model": "llama-3-8b", "gpus": "8xh100", "runtime": "megatron-core", "tp": "2", "zero": "1"}
WAIT = 60_000  # milliseconds, of a busy machine


@pytest.fixture
def server() -> Iterator[UiServer]:
    with UiServer(0, FIRST) as found:
        threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture
def page(server: UiServer) -> Iterator[Any]:
    """A page that fails the test where its script or its policy complains."""
    wrong: list[str] = []
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        made = context.new_page()
        made.set_default_timeout(WAIT)
        made.on("pageerror", lambda error: wrong.append(str(error)))
        made.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        made.goto(server.link)
        answered(made, "fits")
        yield made
        browser.close()
    assert not [words for words in wrong if "net::ERR_INTERNET_DISCONNECTED" not in words]


def answered(page: Any, words: str) -> None:
    """Wait for a verdict with these words."""
    page.wait_for_function("words => document.getElementById('verdict').textContent.includes(words)", arg=words)


def choose(page: Any, name: str, value: str) -> None:
    page.wait_for_selector(f"input[name={name}][value='{value}']", state="attached")
    page.check(f"input[name={name}][value='{value}']", force=True)


def test_a_choice_changes_plan_link_and_history(page: Any) -> None:
    choose(page, "tp", "4")
    page.wait_for_function("() => location.hash.includes('tp=4')")
    page.wait_for_function("() => document.getElementById('plan').textContent.includes('tp 4')")
    page.go_back()
    page.wait_for_function("() => document.getElementById('plan').textContent.includes('tp 2')")
    page.reload()
    answered(page, "fits")
    assert page.is_checked("input[name=tp][value='2']")


def test_an_illegal_choice_is_grey_and_says_why(page: Any) -> None:
    page.wait_for_selector("input[name=pp][value='8'][aria-disabled=true]", state="attached")
    choose(page, "pp", "8")
    answered(page, "does not divide")
    assert "stale" in page.get_attribute("#plan", "class")
    choose(page, "pp", "1")
    answered(page, "fits")


def test_typing_pins_search_and_copies(page: Any) -> None:
    page.click("#pin")
    page.fill("input[name='seq-length']", "4096")
    page.wait_for_function("() => document.getElementById('plan').textContent.includes('sequence 4,096')")
    page.click("#pin")
    page.wait_for_function("() => document.getElementById('pins').textContent.includes('Compared with 1: ')")
    assert "≠ 4096" in page.inner_text("#pins")
    page.fill("input[name=tokens]", "1T")
    page.fill("input[name=price]", "2.5")
    page.wait_for_function("() => document.getElementById('run').textContent.includes('price')")
    page.click("#copy")
    page.wait_for_function("() => document.getElementById('told').textContent.startsWith('copied')")
    assert "--seq-length 4096" in page.evaluate("navigator.clipboard.readText()")
    page.select_option("#target", "megatron")
    page.wait_for_function("() => document.getElementById('told').textContent.includes('Megatron')")
    assert "--seq-length 4096" in page.evaluate("navigator.clipboard.readText()")
    page.click("#pins button >> nth=0")
    page.wait_for_function("() => !location.hash.includes('seq-length')")


def test_a_search_shows_points_that_load(page: Any) -> None:
    page.click("#search")
    page.wait_for_function("() => document.getElementById('progress').value > 0")
    page.wait_for_selector("#found svg.chart")
    points = page.locator("#found use[role=button]")
    assert points.count() > 20 and page.locator("#found use[tabindex='0']").count() == 1
    points.last.click(force=True)  # drawn last, so no other point covers it
    wanted = points.last.get_attribute("aria-label")
    assert wanted is not None
    shows(page, wanted)
    page.locator("#found use[tabindex='0']").focus()
    for key in ("End", "ArrowLeft"):
        page.keyboard.press(key)
    wanted = page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Enter")
    shows(page, wanted)
    page.click("#found table button >> nth=0")
    answered(page, "fits")


def shows(page: Any, words: str) -> None:
    """Wait for the plan with the step time of a point's words."""
    seconds = words.split(", ")[-2]
    page.wait_for_function("words => document.getElementById('step').textContent.startsWith(words)", arg=seconds)


def test_a_search_can_be_cancelled(page: Any) -> None:
    page.fill("input[name=model]", "llama-3-70b")
    page.fill("input[name=gpus]", "64xh100")
    page.wait_for_function("() => document.getElementById('plan').textContent.includes('llama-3-70b: tp 2 x dp 32')")
    page.click("#search")
    page.wait_for_function("() => document.getElementById('progress').value > 0")
    page.click("#search")
    page.wait_for_function("() => document.getElementById('told').textContent == 'search cancelled'")
    assert page.inner_text("#search") == "Search from here" and page.query_selector("#found table") is None


def test_the_map_of_ranks_answers(page: Any) -> None:
    page.wait_for_selector("#map.live")
    page.hover("#map li >> nth=0")
    page.wait_for_function("() => document.getElementById('said').textContent.includes('rank 0')")


def test_a_hostile_link_and_a_second_tab(page: Any, server: UiServer) -> None:
    second = page.context.new_page()
    second.goto(f"{server.link}#tp=<img src=x onerror=alert(1)>&model=llama-3-8b&nothing=1&gpus=8xh100&pp={'9' * 5000}")
    second.wait_for_function("() => document.getElementById('verdict').textContent != 'starting'", timeout=WAIT)
    assert second.query_selector("main img") is None
    choose(page, "tp", "8")
    page.wait_for_function("() => document.getElementById('plan').textContent.includes('tp 8')")
    assert "tp=8" not in second.url


def test_a_server_that_is_lost_is_said(page: Any) -> None:
    page.context.set_offline(True)
    choose(page, "tp", "4")
    page.wait_for_function("() => document.getElementById('told').textContent.includes('Is mpctl ui still running?')")


def test_a_phone_needs_no_sideways_scrolling_and_names_are_there(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    tree = page.aria_snapshot()
    for words in ('radiogroup "tp (tensor)"', "status", 'button "Search from here"', 'textbox "Sequence"'):
        assert words in tree, tree
