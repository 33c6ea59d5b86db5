"""The documents as a site: it builds without a warning, holds together, works from disk, and asks no other host."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.conftest import at_length

pytest.importorskip("furo", reason="the extra `docs` is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build as `make docs` does."""
    command = [
        sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-c", DOCS / "site", "-d", site.parent / "read",
        docs, site,
    ]  # fmt: skip
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, env=environment)


LOADS = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
"""The attribute by which each element loads a file."""


class Page(HTMLParser):
    """What a page of the site links to, what it loads, and the places in it that a link can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        self.places |= {said[name] for name in ("id", "name") if name in said}
        if tag == "a" and "href" in said:
            self.links.append(said["href"])
        elif said.get(LOADS.get(tag, "")):
            self.loaded.append(said[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("built") / "site"
    done = build(DOCS, place)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    made = (path for path in site.rglob("*.html") if "gallery" not in path.relative_to(site).parts[:-1])
    return {path.resolve(): Page(path) for path in made}


def test_every_page_of_the_documents_is_a_page_of_the_site(site: Path):
    for document in DOCS.rglob("*.md"):
        assert (site / document.relative_to(DOCS)).with_suffix(".html").is_file(), document


def test_links_inside_the_site_hold(pages: dict[Path, Page]):
    assert len(pages) > 70
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in {"http", "https"}:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.name} links to {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].places | {"top"}, f"{path.name} links to {link}"


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Page]):
    for path, page in pages.items():
        for loaded in page.loaded:
            parts = urlsplit(loaded)
            assert not parts.scheme or parts.scheme == "data", f"{path.name} loads {loaded}"
            assert not parts.netloc, f"{path.name} loads {loaded}"
            assert (path.parent / parts.path).exists(), f"{path.name} loads {loaded}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style.name


def test_the_search_finds_pages_by_their_words(site: Path):
    """The index is a script, which a page opened from disk may load too."""
    index = json.loads(re.sub(r"^Search\.setIndex\(|\)$", "", (site / "searchindex.js").read_text()))
    names = index["docnames"]

    def found(stem: str) -> set[str]:
        held = index["terms"].get(stem, [])
        titled = index["titleterms"].get(stem, [])
        return {names[i] for each in (held, titled) for i in (each if isinstance(each, list) else [each])}

    assert {"glossary", "architecture"} <= found("rooflin")
    assert "capturing" in found("nsight")
    assert "experiments/memory-fit" in found("fit")
    assert "stepscope" in index["objects"]  # functions and records are found by their names


def test_the_api_has_every_public_name(site: Path):
    import stepscope

    places = {place for path in (site / "site" / "api").glob("*.html") for place in Page(path).places}
    public = {name for name in stepscope.__all__ if not name.startswith("__")}
    assert {f"stepscope.{name}" for name in public} <= places


@pytest.mark.long
def test_a_mistake_stops_the_build(tmp_path: Path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(
        "# Here\n\n[gone](nowhere.md), [part](page.md#not-there)\n\n```{toctree}\npage\n```\n\n{py:func}`no.such`\n"
    )
    (docs / "page.md").write_text("# A page\n")
    (docs / "lost.md").write_text("# A page that nobody lists\n")
    done = build(docs, tmp_path / "site")
    assert done.returncode != 0
    for said in ("nowhere.md", "not-there", "lost.md", "isn't included in any toctree"):
        assert said in done.stderr, done.stderr


class Silent:
    field: int
    said: int
    """What it is."""

    def does(self) -> None: ...


def test_a_public_name_without_a_docstring_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(DOCS / "site")
    from parts.docstrings import undocumented, unlisted  # pyright: ignore[reportMissingImports]

    import stepscope

    assert [*undocumented(), *unlisted()] == []
    monkeypatch.setattr(stepscope, "silent", lambda: None, raising=False)
    monkeypatch.setattr(stepscope, "__all__", [*stepscope.__all__, "silent"])
    assert list(undocumented()) == list(unlisted()) == ["stepscope.silent"]
    monkeypatch.setattr(stepscope, "silent", Silent)
    assert list(undocumented()) == ["Silent", "Silent.field", "Silent.does"]


def test_the_gallery_is_of_what_is_kept(monkeypatch: pytest.MonkeyPatch, site: Path):
    monkeypatch.syspath_prepend(DOCS / "site")
    from parts.gallery import GALLERY, can_report  # pyright: ignore[reportMissingImports]

    listed = (site / "site" / "gallery.html").read_text()
    for shown in GALLERY:
        assert all((ROOT / word.split(":")[0]).exists() for word in shown.of.split() if "/" in word), shown
        assert shown.title in listed
        assert (site / "gallery" / f"{shown.file}.html").is_file() == can_report()


def test_docstrings_become_what_sphinx_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(DOCS / "site")
    from parts.docstrings import restructured  # pyright: ignore[reportMissingImports]

    said = ["Add `b`.", "", "    add(1)", "", "a, b: numbers, as in", "`1`.", "Raises: nothing."]
    assert list(restructured(said, frozenset("ab"))) == [
        "Add ``b``.", "", "::", "", "    add(1)", "", "- **a, b**: numbers, as in", "  ``1``.", "  Raises: nothing.",
    ]  # fmt: skip


def test_marks_and_links_become_what_the_site_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(DOCS / "site")
    from parts.blocks import captioned  # pyright: ignore[reportMissingImports]
    from parts.links import linked  # pyright: ignore[reportMissingImports]

    assert "Measured once; kept in results/h200" in captioned("```sh measured=results/h200\nstepscope run\n```\n")
    page = DOCS / "experiments" / "formats.md"
    assert linked("[how](../../CONTRIBUTING.md#tests)", page, DOCS) == "[how](../site/contributing.md#tests)"
    assert linked("[runs](../../results/h200)", page, DOCS) == "runs (`results/h200`)"
    assert linked("[sums](accumulation.md)", page, DOCS) == "[sums](accumulation.md)"


LOOKED_AT = ("index.html", "options.html", "experiments/parity.html", "site/api/functions.html", "site/gallery.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.browser
def test_the_site_works_in_a_browser_from_disk(site: Path, browser: Any):
    """Search, themes and widths, without a word on the console or a request to anywhere."""
    said: list[str] = []
    asked: list[str] = []
    grounds = set[str]()
    for theme, width in (("light", 1440), ("dark", 390)):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        for name in LOOKED_AT:
            page.goto((site / name).as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.goto(f"{(site / 'search.html').as_uri()}?q=roofline")
        page.wait_for_selector("#search-results li a")
        assert "roofline" in page.inner_text("#search-results")
        page.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len(grounds) == 2


# The themes differ in colours: of those a page of code, and one of tables and of text, have what the others have.
OF_EACH_THEME = [("light", LOOKED_AT), ("dark", LOOKED_AT[2:4])]


@pytest.mark.browser
@pytest.mark.parametrize(("theme", "names"), [*OF_EACH_THEME, *at_length(("dark", LOOKED_AT))])
def test_a_keyboard_and_a_screen_reader_find_their_way(site: Path, browser: Any, theme: str, names: tuple[str, ...]):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
    page = browser.new_page(color_scheme=theme)
    for name in names:
        page.goto((site / name).as_uri())
        found = axe.Axe().run(page).response["violations"]
        grave = [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in {"serious", "critical"}]
        assert not grave, (name, grave)
    page.close()
