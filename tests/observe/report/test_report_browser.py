"""The page in a real browser: Chromium, driven by playwright. `make test-all` installs both."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from infsample_rl.observe.report.page import write_report

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPENING_S = 5.0  # longest; on 2 cores at rest it takes 1.3


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        if CHROMIUM is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium is installed")
        yield playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )


@pytest.fixture
def opened(browser):
    """Opens a file in a window of a width; afterwards nothing was asked of a network, and nothing went wrong."""
    troubles, contexts = [], []

    def open_page(path, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        window = context.new_page()
        window.on("console", lambda message: troubles.append(message.text))
        window.on("pageerror", lambda error: troubles.append(str(error)))
        window.on("request", lambda request: troubles.append(request.url) if request.url != path.as_uri() else None)
        window.goto(path.as_uri())
        window.wait_for_selector("main", state="attached")
        return window

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture
def page(recorded_run, opened):
    write_report([recorded_run], recorded_run / "report.html")
    return opened(recorded_run / "report.html")


def test_every_part_of_the_page_is_drawn(page):
    titles = page.locator("section h2").all_inner_texts()
    assert titles == [
        "Learning", "Policy and update", "Who decoded when", "Length prediction", "Time", "Memory", "Completions",
        "Every metric", "Settings", "Versions",
    ]  # fmt: skip
    assert page.locator("figure.chart svg path.line").count() > 20
    assert page.locator("g.sample").count() == 16


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(recorded_run, opened, width, scheme):
    write_report([recorded_run], recorded_run / "report.html")
    page = opened(recorded_run / "report.html", width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_hovering_a_bar_tells_of_its_sample(page):
    page.locator("g.sample rect").first.hover()
    said = page.locator(".tip").inner_text()
    assert "sample 8" in said and "tokens, ended by itself" in said and "reward" in said and "Answer: " in said


def test_steps_that_gave_drafted_tokens_are_a_stripe_of_their_bar(recorded_run, opened):
    groups = [json.loads(line) for line in (recorded_run / "samples.jsonl").read_text().splitlines()]
    shown = next(group for group in groups if group["step"] == groups[-1]["step"])
    row, start, end, *rest = shown["samples"][0]["stays"][0]
    spans = [[start + (end - start) // 4, start + (end - start) // 2, 20]]
    shown["samples"][0]["stays"][0] = [row, start, end, *rest, spans]
    (recorded_run / "samples.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    write_report([recorded_run], recorded_run / "report.html")
    page = opened(recorded_run / "report.html")
    stripe, bar = page.locator("rect.accepted").bounding_box(), page.locator("g.sample rect").first.bounding_box()
    assert stripe["x"] - bar["x"] == pytest.approx(bar["width"] / 4, abs=1.5)
    assert stripe["width"] == pytest.approx(bar["width"] / 4, abs=1.5)
    assert bar["y"] < stripe["y"] and stripe["y"] + stripe["height"] < bar["y"] + bar["height"]
    page.locator("g.sample rect").first.hover()
    assert "20 of its tokens" in page.locator(".tip").inner_text()


def test_completions_are_filtered_by_kind_step_and_words(page):
    shown, kind, step = (
        page.locator("article.completion"),
        page.locator("#completions select").nth(0),
        page.locator("#completions select").nth(1),
    )
    assert shown.count() == 12
    kind.select_option("b")
    assert shown.count() == 2 and page.locator(".tag.best").count() == 2  # all recorded rewards of one step are equal
    step.select_option("2")
    assert shown.count() == 1 and "step 2" in shown.first.inner_text()
    kind.select_option("")
    step.select_option("")
    page.locator("#completions input").fill("no such words anywhere")
    assert shown.count() == 0 and "none matches" in page.locator("#completions").inner_text()


def test_markup_in_a_completion_is_shown_as_text_and_does_nothing(recorded_run, opened):
    hostile = (
        "</script><img src=http://203.0.113.1/x onerror='document.title=1'><svg "
        "onload=document.title=1><script>document.title=1</script>"
    )
    record = json.loads((recorded_run / "completions.jsonl").read_text().splitlines()[0])
    (recorded_run / "completions.jsonl").write_text(
        json.dumps(record | {"response": hostile, "prompt": hostile}) + "\n"
    )
    write_report([recorded_run], recorded_run / "report.html")
    page = opened(recorded_run / "report.html")
    assert page.locator("article.completion > pre").inner_text() == hostile
    assert page.locator("img").count() == 0 and page.title() == "kk_tiny"


def test_runs_are_compared_line_by_line(recorded_run, opened, tmp_path):
    other = shutil.copytree(recorded_run, tmp_path / "other")
    write_report([recorded_run, other], tmp_path / "both.html")
    page = opened(tmp_path / "both.html", 390)
    assert page.locator("#learning figure").first.locator("path.line").count() == 2 + 2  # in the plot and in its legend
    assert page.locator("#figures table th").all_inner_texts() == ["", "recorded", "other"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_folder_with_next_to_nothing_is_a_page(tmp_path, opened):
    (tmp_path / "metrics.jsonl").write_text("")
    write_report([tmp_path], tmp_path / "report.html")
    assert "5 things missing or damaged" in opened(tmp_path / "report.html").locator("body").inner_text()


def test_ten_thousand_completions_open_and_are_searched_at_once(large_run, opened):
    write_report([large_run], large_run / "report.html")
    started = time.monotonic()
    page = opened(large_run / "report.html")
    page.wait_for_selector("#learning svg path.line")
    assert page.locator("article.completion").count() == 15 and time.monotonic() - started < OPENING_S
    started = time.monotonic()
    page.locator("#completions input").fill("question 499")
    assert 0 < page.locator("article.completion").count() <= 15 and time.monotonic() - started < OPENING_S
