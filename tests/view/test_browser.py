"""The page in Debian's Chromium, at three widths: what a person does, and that the console stays silent.

``make test-browser`` installs what it needs. With ``AGENTRL_SCREENSHOTS=FOLDER`` the pages are also kept as pictures.
"""

import json
import os
import re
import shutil
from pathlib import Path

import orjson
import pytest

from agentrl.bench.bench_view import viewed
from agentrl.bench.made_run import make_run
from tests.view.conftest import HOSTILE, append, hostile_episode
from tests.view.test_odd_folders import RESULT, said

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: apt-get install chromium"),
]
WIDTHS = {"laptop": (1280, 800), "wide": (1720, 1000), "phone": (390, 844)}
SECONDS = 20_000  # milliseconds, for the slowest machine


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser") / "runs"
    make_run(folder / "first", 640)
    make_run(folder / "second", 320, tokens=40)
    append(folder / "first" / "episodes.jsonl", hostile_episode())
    (folder / "measured").mkdir()
    append(folder / "measured" / "eval-episodes.jsonl", said(0, "length", content="4"), said(1, "stop", content="5"))
    (folder / "measured" / "result.json").write_text(json.dumps(RESULT))
    return folder


@pytest.fixture(scope="module")
def link(runs_folder, tmp_path_factory):
    with viewed(["first", "second", "measured"], runs_folder, tmp_path_factory.mktemp("cache")) as (found, _):
        yield found


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def cookies(browser, link):
    """The session's cookies: the link works once."""
    context = browser.new_context()
    context.new_page().goto(link)
    found = context.cookies()
    context.close()
    return found


class Person:
    """A reader with a window of some width, who notes what the console and the network say."""

    def __init__(self, browser, cookies, link, width, *, dark=False):
        size = WIDTHS[width]
        self.base, self.width = link.split("/?")[0], width
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
        )
        self.context.add_cookies(cookies)
        self.page = self.context.new_page()
        self.page.set_default_timeout(SECONDS)
        self.wrong: list[str] = []
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on(
            "request", lambda asked: asked.url.startswith((self.base, "data:")) or self.wrong.append(asked.url)
        )

    def open(self, where=""):
        self.page.goto(f"{self.base}/#/{where}")
        self.page.locator("#main").wait_for()

    def keep(self, name):
        """Keep a picture, and check that nothing stands out of the window."""
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is too wide"
        if os.environ.get("AGENTRL_SCREENSHOTS"):
            folder = Path(os.environ["AGENTRL_SCREENSHOTS"])
            folder.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=folder / f"view_{name}_{self.width}.png")


@pytest.fixture(params=WIDTHS)
def person(browser, cookies, link, request):
    found = Person(browser, cookies, link, request.param)
    yield found
    found.context.close()
    assert found.wrong == []


def until(page, script):
    """Wait until a JavaScript expression holds; Playwright's own way would need what the page's policy forbids."""
    for _ in range(SECONDS // 50):
        if page.evaluate(script):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never: {script}")


def rows(page):
    return page.locator(".rows .row")


AT_ONCE = """async () => {
  const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  press("j");
  for (let turn = 0; turn < 1000 && !document.querySelector(".row.at"); turn++) await null; // drawn, and not painted
  press("Enter");
}"""


def test_a_key_right_behind_another_finds_what_that_one_changed(person):
    page = person.page
    person.open()
    page.get_by_role("link", name="first").click()
    page.get_by_role("link", name="Episodes", exact=True).click()
    rows(page).nth(3).wait_for()
    page.evaluate(AT_ONCE)
    page.locator(".message.sampled").first.wait_for()


def test_a_run_is_opened_filtered_and_an_episode_read_to_its_tokens(person):
    page = person.page
    person.open()
    page.get_by_role("link", name="first").click()
    page.locator(".u-over").first.wait_for()  # a curve
    person.keep("overview")
    page.get_by_role("link", name="Episodes", exact=True).click()
    rows(page).nth(3).wait_for()
    page.keyboard.press("/")
    page.keyboard.type("reward<0.5 tag:hard")
    until(page, "/of 641/.test(document.querySelector('.count').textContent)")
    assert "q=reward" in page.url
    if person.width != "phone":
        times = "[...document.querySelectorAll('.rows .row > :last-child')]"
        assert not page.evaluate(f"{times}.some((one) => one.scrollWidth > one.clientWidth)"), "times are whole"
    person.keep("episodes")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.locator(".row.at").wait_for()
    page.keyboard.press("Enter")
    page.locator(".message.sampled").first.wait_for()
    assert "calculate" in page.locator(".call").first.inner_text()
    person.keep("episode")
    page.keyboard.press("t")
    token = page.locator(".token").nth(30)
    token.hover()
    said = page.locator(".ledger").inner_text()
    for name in ("id", "position", "behavior logprob", "version", "age", "advantage"):
        assert name in said
    assert "not recorded" in said  # the teacher's logprob
    person.keep("tokens")
    page.keyboard.press("ArrowRight")
    page.get_by_role("radio", name="mask").click()
    page.locator(".token.sampled").first.wait_for()
    before = page.url
    page.keyboard.press("j")
    until(page, f"location.href !== {json.dumps(before)}")
    page.keyboard.press("g")
    page.locator(".lane").nth(7).wait_for()
    person.keep("group")


def test_tokens_are_coloured_by_their_gap_to_the_trainer_where_it_is_kept(person):
    page = person.page
    person.open("run/first/episodes?q=group%3Ag4")
    rows(page).first.click()
    page.locator(".message.sampled").first.wait_for()
    page.keyboard.press("t")
    page.get_by_role("radio", name="gap to trainer").click()
    page.locator(".token[class*=more]").first.hover()
    said = page.locator(".ledger").inner_text()
    assert re.search(r"trainer logprob\s+-?\d+\.\d{4}, gap \+", said), said
    page.locator(".token[class*=less]").first.wait_for()
    person.keep("gap")
    page.goto(f"{person.base}/#/run/first/episodes?q=group%3Ag5")
    rows(page).first.click()
    page.locator(".message.sampled").first.wait_for()
    page.keyboard.press("t")
    page.locator(".token").first.wait_for()
    assert page.get_by_role("radio", name="gap to trainer").is_disabled()


def test_two_checkpoints_and_two_runs_are_compared(person):
    page = person.page
    person.open("run/first/evaluations")
    page.get_by_role("link", name="task by task").click()
    page.locator(".lanes.two .short.sampled").first.wait_for()
    page.locator(".tasks a").nth(1).click()
    until(page, "/task=/.test(location.hash)")
    person.keep("compare")
    page.locator(".side select").nth(2).select_option("second")
    until(page, "/run2=second/.test(location.hash) && /name2=eval/.test(location.hash)")
    page.locator(".lanes.two .lane").nth(1).get_by_text("second").wait_for()
    person.open("run/first?with=second")
    page.locator(".legend b").nth(2).wait_for()
    person.keep("two_runs")


def test_an_evaluation_is_read_from_its_findings_to_its_episodes(person):
    page = person.page
    person.open("run/measured")
    finding = page.locator(".findings article").filter(has=page.get_by_role("heading", name="cut"))
    finding.get_by_role("link", name="Episodes that show it").click()
    until(page, "/1 of 2/.test(document.querySelector('.count').textContent)")
    person.open("run/measured/episodes")
    rows(page).nth(1).wait_for()  # those of the evaluation: there are no others
    person.open("run/measured/evaluations")
    page.get_by_text("20.0% invalid; all wrong 0.200, all right 0.400").first.wait_for()
    page.get_by_role("rowheader", name="hard").wait_for()
    person.keep("evaluation")


def test_a_living_run_is_followed(person, runs_folder):
    page = person.page
    person.open("run/second")
    page.locator(".u-over").first.wait_for()
    step = 1000 + list(WIDTHS).index(person.width)
    metrics = {"step": step, "reward/mean_drawn": 0.9, "rollout/episodes": 32.0}
    with (runs_folder / "second" / "metrics.jsonl").open("ab") as file:
        file.write(orjson.dumps(metrics)[:20])
        file.flush()
        file.write(orjson.dumps(metrics)[20:] + b"\n")
    page.locator(".standing").get_by_text(str(step)).wait_for()
    page.goto(f"{person.base}/#/run/second/episodes")
    rows(page).first.wait_for()
    task = f"train/fresh-{person.width}"
    record = hostile_episode() | {"task_id": task, "error": None, "stop_reason": "terminated", "reward": 0.5}
    record["trajectories"]["assistant"]["nodes"][-1]["message"]["content"] = f"just said {person.width}"
    append(runs_folder / "second" / "episodes.jsonl", record)
    page.locator(".rows").get_by_text(f"just said {person.width}").wait_for()


def test_what_a_model_said_is_text(person):
    page = person.page
    person.open("run/first/episodes?q=group%3Ag-hostile")
    rows(page).first.click()
    page.locator(".message.sampled").last.get_by_text("onerror").wait_for()
    assert page.locator(".message.sampled .said").last.inner_text() == HOSTILE
    page.keyboard.press("t")
    page.locator(".token").first.wait_for()
    page.keyboard.press("g")
    page.locator(".lane").first.wait_for()
    assert page.title() != "taken" and page.locator("main img").count() == 0


def test_the_table_scrolls_to_its_end_and_sorts(person):
    page = person.page
    person.open("run/first/episodes")
    rows(page).first.wait_for()
    page.locator(".grid").evaluate("grid => grid.scrollTo(0, grid.scrollHeight)")
    until(
        page,
        "[...document.querySelectorAll('.rows .row')].some(row => row.ariaRowIndex === '641' && row.innerText.trim())",
    )
    assert rows(page).count() < 60  # only those in the window are drawn
    if person.width != "phone":
        page.get_by_role("columnheader", name="length").get_by_role("button").click()
        page.locator("[aria-sort=descending]").wait_for()
        assert "sort=-length" in page.url


def test_help_dark_colours_and_a_wrong_filter(browser, cookies, link):
    person = Person(browser, cookies, link, "laptop", dark=True)
    page = person.page
    person.open("run/first")
    page.locator(".u-over").first.wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    person.keep("dark")
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_text("next, previous episode").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.keyboard.press("e")
    page.keyboard.press("/")
    page.locator("#search").fill("rewad<1")
    page.get_by_role("alert").get_by_text("did you mean 'reward'").wait_for()
    assert [said for said in person.wrong if "400" not in said] == []  # the browser notes the refused question
    person.context.close()


def test_every_control_has_a_name_for_a_screen_reader(person):
    page = person.page
    for where in ("run/first", "run/first/episodes", "run/first/evaluations", "compare?run1=first", ""):
        person.open(where)
        page.wait_for_timeout(300)
        nameless = page.evaluate(
            """[...document.querySelectorAll('button, a[href], input, select')].filter(one => {
                const label = one.closest('label') || (one.id && document.querySelector(`label[for="${one.id}"]`));
                const said = one.textContent.trim() || (label && label.textContent.trim());
                return !(one.getAttribute('aria-label') || said);
            }).map(one => one.outerHTML)"""
        )
        assert nameless == []


def test_the_static_copy_opens_from_a_file(browser, runs_folder, tmp_path):
    from agentrl.view.shown_runs import shown_runs
    from agentrl.view.static_copy import write_copy

    write_copy(
        shown_runs(["first"], runs_folder, tmp_path / "cache"), tmp_path / "copy.html", query="tag:hard", limit=20
    )
    page = browser.new_page()
    wrong: list[str] = []
    page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"file://{tmp_path / 'copy.html'}")
    page.locator(".u-over").first.wait_for()
    page.get_by_role("link", name="Episodes", exact=True).click()
    rows(page).first.click()
    page.locator(".message.sampled").first.wait_for()
    page.keyboard.press("t")
    page.locator(".token").first.wait_for()
    page.get_by_role("link", name="group").click()
    page.locator(".lane").first.wait_for()
    assert wrong == []
    page.close()
