"""The HTML of a page: whole, alone, and without a word of anybody's taken for markup."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from stepscope.core.answer import TEXT, Answer, Frame, Line, Node, Panel, Point, Slice, table_of, warning
from stepscope.core.errors import InputError
from stepscope.rendering.pages import Figure, Page, Section
from stepscope.rendering.pages.html import bar_rows, curves, heat, lanes, render_page, tiles
from stepscope.rendering.pages.named import page_named

ROOT = Path(__file__).parents[3]
HOSTILE = (
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"><svg onload=alert(1)>',
    "javascript:alert(1)", "\u202egnp.exe", "x" * 10_000, "{{ 7 * 7 }}", "{% raw %}", "a\x00b\x1b[31m",
    "' onmouseover='alert(1)", "<!--", "]]>", "&lt;b&gt;",
)  # fmt: skip


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._within = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._within = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        self.text += "" if self._within else data


def hostile_page(name: str) -> Page:
    """A page in which every text of a user's is this one."""
    answer = Answer(
        study="run", question=name, lead=(Line(name),), asides=(name,), origin=(name,),
        tables=(table_of(name, (name, "s"), title=name, rows=[(name, 1.5)] * 9, notes=(Line(name),)),),
        panels=(
            Panel(x_title="", y_title="ms", kind="bars", points=(Point(line=name[:40], name=name, y=1.0),)),
            Panel(x_title=name, y_title=name, frame=Frame(heading=name, line_title=name, style_title=name), points=(
                Point(line=name[:40], style=name[:40], y=1.0), Point(line="b", style="t", y=1.0, missing=name[:40]))),
            Panel(x_title=name, y_title="", points=(), kind="icicle",
                  nodes=(Node(name, 2.0), Node(name, 1.0, 0, "family"))),
            Panel(x_title="", y_title="", points=(), kind="timeline", slices=(Slice(name, 0.0, 1.0, name, name),)),
            Panel(x_title=name, y_title="", kind="heat", points=(Point(line=name, name=name, y=0.0, missing=name),),
                  frame=Frame(heading=name, line_title=name)),
        ),
    )  # fmt: skip
    return Page(
        title=name, kind="run", sentence=name, figures=(Figure(name=name, value=name, note=name),),
        findings=(warning("kind", name, remedy=name),), sections=(Section(title=name, answer=answer),),
        reproduce=(name,),
    )  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: name[:12])
def test_a_text_is_never_markup(name: str):
    page = render_page(hostile_page(name))
    plain = Elements(render_page(hostile_page("harmless")))
    found = Elements(page)
    assert [tag for tag, _ in found.found] == [tag for tag, _ in plain.found], "no element came of a text"
    for tag, attributes in found.found:
        assert not any(attribute.startswith("on") for attribute in attributes), (tag, attributes)
    assert "49" not in found.text or name != "{{ 7 * 7 }}"
    assert page.count("<script>") == 1


def test_a_page_needs_nothing_else():
    page = render_page(page_named([str(ROOT / "results" / "h200" / "plain")], Path("runs"), lambda _: None))
    for tag, attributes in Elements(page).found:
        for name in ("src", "href", "xlink:href", "action", "data"):
            value = attributes.get(name) or ""
            assert not value or value.startswith("#"), (tag, name, value)
    assert "default-src 'none'" in page and "unsafe-eval" not in page
    assert not re.search(r"url\((?!#)", page) and "@import" not in page
    assert len(page.encode()) < 3_000_000


def test_figures_sort_by_value_and_not_by_text():
    table = table_of("cell", ("step", "s"), ("peak", "B"), rows=[("a", 0.5, 3 * 2**30), ("b", 2e-3, None)])
    answer = Answer(study="x", question="", tables=(table,))
    page = Page(title="t", kind="answer", sentence="s", sections=(Section(title="T", answer=answer),))
    cells = [attributes for tag, attributes in Elements(render_page(page)).found if tag == "td"]
    assert [cell.get("data-value") for cell in cells] == [None, "0.5", "3221225472", None, "0.002", None]


def test_the_figures_of_a_row_have_one_unit():
    rows = [("a", 363e-6, "0.30 to 0.41 ms", 3 * 2**30), ("b", 2.5, "", 2**20)]
    table = table_of("part", ("median", "s"), ("interval", TEXT), ("held", "B"), ("p95", "s"), ("then", "B"),
                     rows=[(*rows[0], 460.1e-6, 2**29), (*rows[1], 0.02, 64)])  # fmt: skip
    page = Page(title="t", kind="answer", sentence="s", sections=(
        Section(title="T", answer=Answer(study="x", question="", tables=(table,))),))  # fmt: skip
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", render_page(page))
    assert cells[:6] == ["a", "0.363 ms", "0.30 to 0.41 ms", "3.00 GiB", "0.4601 ms", "0.50 GiB"]
    assert cells[6:] == ["b", "2.5 s", "", "1.00 MiB", "0.02 s", "64 B"], "64 B are nothing in MiB"


def test_one_thing_has_one_colour_in_all_charts():
    from stepscope.rendering.plots import PALETTE, colours_of

    assert colours_of(["backward", "step"])[0] == colours_of(["forward", "backward"])[1]
    assert colours_of(["x", "forward", "y"]) == [PALETTE[1], PALETTE[0], PALETTE[2]], "others take what is left"
    slices = (Slice("s", 0.0, 1.0, "softmax", "k"), Slice("s", 1.0, 9.0, "copy/cast", "k"))
    _, hues = lanes(Panel(x_title="ms", y_title="", points=(), kind="timeline", slices=slices))
    nodes = (Node("all", 9.0), Node("softmax", 9.0, 0, "family"))
    (_, tile) = tiles(Panel(x_title="", y_title="", points=(), kind="icicle", nodes=nodes))
    assert tile.hue == hues["softmax"] != hues["copy/cast"], "whatever is longest"


def test_the_parts_of_an_icicle_lie_within_their_parents():
    nodes = (Node("all", 10.0), Node("a", 6.0, 0, "phase"), Node("m", 6.0, 1, "module"), Node("f", 2.0, 2, "family"),
             Node("b", 4.0, 0, "phase"))  # fmt: skip
    placed = tiles(Panel(x_title="", y_title="", points=(), kind="icicle", nodes=nodes))
    assert [(one.left, one.width, one.depth) for one in placed] == [
        (0.0, 1.0, 0), (0.0, 0.6, 1), (0.0, 0.6, 2), (0.0, 0.2, 3), (0.6, 0.4, 1),
    ]  # fmt: skip
    assert placed[3].hue == 0 and placed[1].hue == -1
    assert placed[1].said == "6 ms, 60.0 %"


def test_lanes_are_shares_of_the_time_and_idle_causes_have_colours_of_their_own():
    slices = (
        Slice("s", 1.0, 3.0, "gemm", "k"),
        Slice("s", 3.0, 4.0, "copy", "", 7),
        Slice("idle", 4.0, 5.0, "idle: data"),
    )
    panel = Panel(
        x_title="ms", y_title="", points=(), kind="timeline", slices=slices, frame=Frame(x_ends=(1.0, 5.0))
    )  # fmt: skip
    found, hues = lanes(panel)
    assert [lane.name for lane in found] == ["s", "idle"]
    assert [(bar.left, bar.width) for bar in found[0].bars] == [(0.0, 500.0), (500.0, 250.0)]
    assert found[0].bars[1].said == "7 short pieces of work, most of them copy: 1 ms"
    assert hues == {"gemm": 0, "copy": 1, "idle: data": 10}


def test_a_row_of_bars_has_its_share_of_the_track_its_interval_and_its_doubt():
    points = (
        Point(line="a", name="x", y=50.0, low=25.0, high=100.0), Point(line="b", name="x", y=-100.0, doubted=True),
        Point(line="a", name="y", y=0.0, missing="OOM"), Point(line="b", name="y", y=math.inf),
    )  # fmt: skip
    panel = Panel(x_title="", y_title="%", points=points, kind="bars")
    first, second, third, fourth = bar_rows(panel)
    assert (first.name, second.name, third.name, fourth.text) == ("x", "", "y", "inf")
    assert first.strips[0][:2] == (50.0, 25.0) and first.between == (62.5, 37.5) and first.text == "50"
    assert first.strips[0].said == "x, a: 50 (25 to 100)"
    assert second.strips[0][:2] == (0.0, 50.0) and second.strips[0].doubted and second.between is None
    assert third.strips == () and third.text == "OOM"
    logarithmic = (Point(line="a", name="x", y=1.5), Point(line="a", name="y", y=15.0))  # the axis: 1 to 18
    found = bar_rows(msgspec.structs.replace(panel, points=logarithmic, y_log=True))
    assert found[0].strips[0][:2] == (0.0, pytest.approx(100 * math.log(1.5) / math.log(18), abs=1e-3))
    (stacked,) = bar_rows(msgspec.structs.replace(panel, points=(
        Point(line="a", name="x", y=3.0), Point(line="b", name="x", y=1.0)), kind="stack"))  # fmt: skip
    assert [one[:2] for one in stacked.strips] == [(0.0, 75.0), (75.0, 25.0)] and stacked.text == "4"
    with pytest.raises(InputError, match="nothing to plot"):
        bar_rows(msgspec.structs.replace(panel, points=points[2:]))


def test_a_curve_stands_where_its_figures_are_on_either_scale():
    points = (
        Point(line="a", x=1.0, y=10.0, low=1.0, high=100.0), Point(line="a", x=100.0, y=100.0, doubted=True),
        Point(line="b", x=10.0, y=0.0, missing="OOM"),
    )  # fmt: skip
    found = curves([Panel(x_title="n", y_title="ms", points=points, x_log=True, y_log=True)])
    (chart,) = found.charts
    assert (chart.left, chart.bottom, chart.width, chart.height) == (70, 408, 726, 454)
    low, high = math.log(1 / 1.2), math.log(120)
    y = [408 - 400 * (math.log(value) - low) / (high - low) for value in (10, 100, 1)]
    line, interval = chart.curves
    assert line.path == f"M84.0,{y[0]:.1f}L696.0,{y[1]:.1f}" and interval.path == f"M84.0,{y[2]:.1f}V{y[1]:.1f}"
    assert [(dot.x, dot.y, dot.hollow) for dot in chart.dots] == [
        (84.0, round(y[0], 1), False), (696.0, round(y[1], 1), True),
    ]  # fmt: skip
    assert chart.x_ticks == [(84.0, "1"), (390.0, "10"), (696.0, "100")], "values that are few and round are the ticks"
    assert [(word.x, word.said) for word in chart.words] == [(390.0, "OOM")]
    assert [name for name, _ in found.lines] == ["a", "b"] and found.styles == []
    linear = curves([Panel(x_title="n", y_title="ms", points=points[:2], x_log=False, y_log=False)])
    assert [text for _, text in linear.charts[0].y_ticks] == ["0", "20", "40", "60", "80", "100"]
    many = [Point(line=str(line), x=1.0, y=1.0) for line in range(9)]
    with pytest.raises(InputError, match="more than a plot can tell apart"):
        curves([Panel(x_title="n", y_title="ms", points=tuple(many))])


def test_a_heat_map_is_a_table_with_a_strength_in_each_cell():
    points = (
        Point(line="a", name="1024", y=4.0), Point(line="a", name="512", y=2.0),
        Point(line="b", name="512", y=0.0, missing="OOM"), Point(line="b", name="1024", y=12_345.0),
    )  # fmt: skip
    found = heat(Panel(x_title="n", y_title="", points=points, kind="heat"))
    assert found.columns == ("512", "1024"), "numbers by their size"
    assert found.rows[0] == ("a", (("2", 0.0), ("4", pytest.approx(2 / 12_343))))
    assert found.rows[1][1][0] == ("OOM", None) and found.rows[1][1][1] == ("12,345", 1.0)
