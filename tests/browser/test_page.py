"""Pages in a real browser: nothing fails, everything is drawn, sorts, filters, opens and is named; nothing runs that a
run brought along."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stepscope.core.run_directory import load_run, save_run
from stepscope.rendering.pages.html import render_page
from stepscope.rendering.pages.index import page_of_index
from stepscope.rendering.pages.named import page_named
from stepscope.runs.index import list_runs
from tests.command import stepscope
from tests.conftest import at_length
from tests.rendering.page.test_render import HOSTILE, hostile_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGES = {
    "run": str(next((RESULTS / "h200" / "loops").glob("*LlamaForCausalLM*"))),
    "sweep": str(RESULTS / "h200" / "plain"),
    "snapshot": str(next((RESULTS / "h200" / "memory-recorded").glob("*tiny*")) / "memory.pickle.gz"),
    "ranks": str(RESULTS / "h200-x2" / "ranks" / "late-0"),
}
DESKTOP, PHONE = (1440, 1000), (390, 844)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
    with sync_api.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found: dict[str, Path] = {}
    for name, what in PAGES.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(render_page(page_named([what], Path("runs"), lambda _: None)))
    for file in [*RESULTS.glob("h200/plain/*/run.json"), *RESULTS.glob("h200/memory/**/run.json")]:
        shutil.copytree(
            file.parent, folder / "runs" / file.parent.name, ignore=lambda _, names: {*names} - {"run.json"}
        )
    again = load_run(next(RESULTS.glob("h200/plain/*small*bf16*/run.json")))
    (folder / "runs" / "again").mkdir()  # a workload with a history of two
    save_run(msgspec.structs.replace(again, id="again", created="2027-01-01T00:00:00Z"), folder / "runs" / "again")
    found["index"] = folder / "index.html"
    found["index"].write_text(render_page(page_of_index(folder / "runs")))
    return found


class Opened:
    """A page that is open, and what the browser said of it."""

    def __init__(self, browser: "Browser", file: Path, size: tuple[int, int] = DESKTOP, scheme: Any = "light") -> None:
        self._context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        self.page: Page = self._context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self._requested(request.url))
        self.page.goto(file.as_uri())

    def _requested(self, url: str) -> None:
        if not url.startswith("file:"):
            self.said.append(f"asked for {url[:80]}")

    def __enter__(self) -> "Page":
        return self.page

    def __exit__(self, *_: object) -> None:
        self._context.close()
        assert self.said == []


ALL = (*PAGES, "index")


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [
        *((name, DESKTOP, "light") for name in ("run", "snapshot", "index")),
        *((name, PHONE, "dark") for name in ("sweep", "ranks", "index")),
        *at_length(*((name, PHONE, "dark") for name in ("run", "snapshot"))),
        *at_length(*((name, DESKTOP, "light") for name in ("sweep", "ranks"))),
        *at_length(*((name, DESKTOP, "dark") for name in ALL), *((name, PHONE, "light") for name in ALL)),
    ],
    ids=str,
)
def test_a_page_is_whole(browser: "Browser", files: dict[str, Path], name: str, size: tuple[int, int], scheme: str):
    from axe_playwright_python.sync_playwright import Axe

    with Opened(browser, files[name], size, scheme) as page:
        first = page.locator("details.fold:not([open])").first
        if name != "index":
            box = first.bounding_box()
            assert box is not None and box["y"] < 3 * size[1], "the details begin within three screens"
        if first.count():
            page.get_by_role("button", name="Unfold all").click()
        assert page.locator("details:not([open])").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], "nothing is wider than the screen"
        pictures = page.locator("figure.plot .scroll svg, figure.timeline svg")
        for place in range(pictures.count()):
            box = pictures.nth(place).bounding_box()
            assert box is not None and box["width"] > 50 and box["height"] > 10
            assert pictures.nth(place).locator("path, rect").count() > 0
        found = Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, re.findall(r"\d+", ground))) > 384
        assert light == (scheme == "light")


def test_a_table_sorts_by_value_filters_and_copies(browser: "Browser", files: dict[str, Path]):
    with Opened(browser, files["sweep"]) as page:
        page.locator("summary", has_text="Cells").click()
        table = page.locator(".table", has=page.locator("th", has_text="step ms")).first
        step = table.locator("th", has_text="step ms")
        place = step.evaluate("head => head.cellIndex")

        def values() -> list[float]:
            texts = table.locator(f"tbody tr:visible td:nth-child({place + 1})").all_inner_texts()
            return [float(text.replace(",", "").split()[0]) for text in texts]

        step.locator("button").click()
        assert values() == sorted(values(), reverse=True) and step.get_attribute("aria-sort") == "descending"
        step.locator("button").press("Enter")
        assert values() == sorted(values()) and len(values()) == 20
        table.get_by_role("searchbox").fill("bf16")
        assert len(values()) == 10
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        table.get_by_role("button", name="Copy").click()
        table.get_by_role("button", name="Copied").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert len(copied.splitlines()) == 11 and copied.splitlines()[1].count("\t") == 8


def test_the_index_sorts_filters_pages_and_compares_by_keyboard(browser: "Browser", files: dict[str, Path]):
    runs = list_runs([files["index"].parent / "runs"]).runs
    assert len(runs) > 60
    with Opened(browser, files["index"]) as page:
        rows, count = page.locator("#all tbody tr"), page.locator("#count")
        assert count.inner_text() == f"1 to 50 of {len(runs)} runs" and rows.count() == 50
        assert rows.first.locator(".spark path").count() == 1, "a history of two"
        head = page.locator("#all th", has_text="step ms")
        head.locator("button").focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        place = head.evaluate("head => head.cellIndex")
        first = rows.first.locator("td").nth(place).inner_text()
        slowest = max(step.median_s for run in runs if (step := run.samples.get("step")) and step.median_s)
        assert float(first.replace(",", "")) == pytest.approx(slowest * 1e3, rel=1e-3)
        page.get_by_role("button", name="Next").press("Enter")
        assert count.inner_text().startswith("51 to ")
        page.get_by_role("searchbox").fill("2.7B bf16 plain")
        matching = [
            run for run in runs if all(word in f"{run.id} {run.tag}".lower() for word in ("2.7b", "bf16", "plain"))
        ]
        assert count.inner_text() == f"1 to {len(matching)} of {len(matching)} runs, of {len(runs)} in all"
        for box in rows.get_by_role("checkbox").all()[:2]:
            box.focus()
            page.keyboard.press("Space")
        page.get_by_role("button", name="Compare").press("Enter")
        comparison = page.locator("#comparison")
        ratio = comparison.locator("tr", has_text="step / base").locator("td").nth(1).inner_text()
        steps = [
            float(one.replace(",", ""))
            for one in comparison.locator("tr", has_text="step ms").locator("td").all_inner_texts()
        ]
        assert float(ratio.split()[0]) == pytest.approx(steps[1] / steps[0], rel=5e-3)
        judged = stepscope(*shlex.split(comparison.locator("code").inner_text())[1:])
        assert judged.returncode == 0, judged.stderr
        page.get_by_role("button", name="Clear").press("Enter")
        assert not comparison.is_visible()


def test_the_contents_stay_and_lead_by_keyboard(browser: "Browser", files: dict[str, Path]):
    with Opened(browser, files["run"]) as page:
        part = page.locator("section", has=page.locator("h2", has_text="Environment")).locator("details")
        assert part.get_attribute("open") is None
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        link = page.get_by_role("navigation").get_by_role("link", name="Environment")
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Environment":
                break
        page.keyboard.press("Enter")
        # A browser tells a page of its new fragment when it comes to it: what follows from that is waited for.
        opened = page.locator("section", has=page.locator("h2", has_text="Environment")).locator("details[open]")
        opened.wait_for()  # a link opens what it leads to
        page.locator("nav [aria-current]", has_text="Environment").wait_for()
        bar, at = page.locator(".bar").bounding_box(), part.bounding_box()
        assert bar is not None and at is not None and bar["y"] == 0 and link.is_visible()
        assert bar["height"] <= at["y"] < 600, "and the bar does not cover it"
        part.locator("summary").focus()
        page.keyboard.press("Enter")
        assert part.get_attribute("open") is None


def test_print_unfolds_everything_in_black_on_white(browser: "Browser", files: dict[str, Path]):
    with Opened(browser, files["run"], scheme="dark") as page:
        row = page.locator("td", has_text="operands of the forward").or_(page.locator("td", has_text="GPU before"))
        assert not row.first.is_visible()
        page.emulate_media(media="print")
        assert row.first.bounding_box() is not None and not page.locator(".bar").is_visible()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_an_icicle_opens_by_click_and_key(browser: "Browser", files: dict[str, Path]):
    with Opened(browser, files["run"]) as page:
        figure = page.locator(".icicle")
        backward = figure.get_by_role("button", name=re.compile("^backward: ")).first
        before = backward.bounding_box()
        backward.focus()
        page.keyboard.press("Enter")
        after = backward.bounding_box()
        assert before is not None and after is not None and after["width"] > 1.3 * before["width"]
        assert "backward: " in figure.locator(".way").inner_text()
        assert figure.get_by_role("button", name=re.compile("^forward: ")).count() == 0, "what is beside it is put away"
        page.keyboard.press("Escape")
        again = backward.bounding_box()
        assert again is not None and again["width"] == pytest.approx(before["width"])


def test_a_timeline_zooms(browser: "Browser", files: dict[str, Path]):
    with Opened(browser, files["ranks"]) as page:
        page.evaluate("document.querySelector('.timeline').closest('details').open = true")
        figure = page.locator(".timeline")
        whole = figure.locator(".ends").inner_text()
        figure.get_by_role("button", name="Zoom in").click()
        assert figure.locator(".ends").inner_text() != whole
        boxes = {svg.get_attribute("viewBox") for svg in figure.locator("svg").all()}
        assert boxes == {"250 0 500 20"}, "all lanes show one window"
        figure.get_by_role("button", name="All").click()
        assert figure.locator(".ends").inner_text() == whole


def test_the_theme_is_chosen_and_remembered(browser: "Browser", files: dict[str, Path]):
    with Opened(browser, files["sweep"]) as page:
        page.get_by_role("button", name="Dark").click()
        assert page.locator("html").get_attribute("data-theme") == "dark"
        page.reload()
        assert page.locator("html").get_attribute("data-theme") == "dark"


RUN_BY_BROWSERS = ("</", '">', "'", "javascript:")
"""How names begin of which a browser could make more than text, one of each way. test_render.py reads every page for
them."""


@pytest.mark.parametrize(
    "name",
    [one for name in HOSTILE for one in at_length(name, long=not name.startswith(RUN_BY_BROWSERS))],
    ids=lambda name: name[:12],
)
def test_nothing_runs_that_a_run_brought_along(browser: "Browser", tmp_path: Path, name: str):
    file = tmp_path / "page.html"
    file.write_text(render_page(hostile_page(name)))
    with Opened(browser, file) as page:
        assert page.locator("script").count() == 1
        assert page.evaluate("document.querySelectorAll('img, iframe, object, [onload], [onerror]').length") == 0
        for button in page.locator("main button:visible").all()[:6]:
            button.click()
        assert page.locator("h1").inner_text() != ""
