"""Plots: what is drawn is what was counted, and what is written is the same on every machine."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vl_convert")

import vl_convert

from stepscope.allocations.at_moment import panel_of, thin
from stepscope.allocations.prediction.answer import Comparison, accuracy_of, accuracy_panels
from stepscope.allocations.prediction.estimate import estimate
from stepscope.core.answer import Answer, Finding, Frame, Guide, Panel, Point, decode_answer, encode_answer
from stepscope.core.errors import InputError
from stepscope.core.evidence import MemoryCategory, PhaseSpan
from stepscope.core.run import Failure, Run
from stepscope.core.run_directory import create_run_directory, save_run
from stepscope.core.units import GIB
from stepscope.rendering.charts import draw_bars, draw_series, log_ticks
from stepscope.rendering.picture import draw_answer
from stepscope.rendering.plots import CATEGORY_COLOURS, Spec, plot_spec, plot_svg, save_plot
from stepscope.runs.answer import answer_run
from stepscope.runs.tables import TableQuery, table_panels
from tests.command import Done, stepscope
from tests.conftest import make_run, workload

pytestmark = pytest.mark.slow

PHASES = (
    PhaseSpan(name="forward", start_us=-50, end_us=400_000),
    PhaseSpan(name="backward", start_us=400_000, end_us=900_000),
    PhaseSpan(name="optimizer", start_us=900_000, end_us=1_000_000),
)


def a_step() -> pl.DataFrame:
    """Parameters stay, activations come and go; the peak is 3.5 GiB at 400 ms."""
    return pl.DataFrame(
        {
            "time_us": [0, 200_000, 400_000, 400_000, 700_000, 1_000_000],
            "parameters": [GIB] * 6,
            "saved for backward": [0, GIB, 2 * GIB, 2 * GIB, GIB, 0],
            "temporaries": [0, 0, GIB // 2, 0, 0, 0],
            "workspaces": [0] * 6,
        }
    )


def timeline(
    live: pl.DataFrame,
    phases: Sequence[PhaseSpan] = (),
    *,
    title: str,
    reserved_bytes: int = 0,
    interactive: bool = False,
) -> Spec:
    """The picture of live memory over time, by the way that `memory --save` takes."""
    panel = panel_of(live, phases, heading=title, reserved_bytes=reserved_bytes)
    return draw_answer(Answer(study="memory", question="", panels=(panel,)), interactive=interactive)


def vega_data(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that the areas are made of, after Vega's own arithmetic, read back from the drawing's scene."""
    scene = vl_convert.vegalite_to_scenegraph(spec)
    areas: list[dict[str, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("marktype") == "area":
                areas.extend([{"name": node.get("name"), "items": node["items"]}])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(scene.get("scenegraph", scene))
    return areas


timelines = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 10**12), st.integers(0, 10**12)), min_size=1, max_size=400
).map(
    lambda rows: pl.DataFrame(
        {
            "time_us": [sum(step for step, _, _ in rows[: i + 1]) for i in range(len(rows))],
            "parameters": [a for _, a, _ in rows],
            "temporaries": [b for _, _, b in rows],
        },
        schema={"time_us": pl.Int64, "parameters": pl.Int64, "temporaries": pl.Int64},
    )
)


def totals(frame: pl.DataFrame) -> list[int]:
    return frame.select(pl.sum_horizontal("parameters", "temporaries")).to_series().to_list()


@settings(deadline=None)
@given(timeline=timelines, points=st.integers(4, 60))
def test_thinning_keeps_the_peak_and_the_ends_and_invents_nothing(timeline: pl.DataFrame, points: int):
    thinned = thin(timeline, points)
    assert thinned.height <= max(points, 1)
    assert max(totals(thinned)) == max(totals(timeline))
    assert min(totals(thinned)) == min(totals(timeline))
    assert thinned.row(0) == timeline.row(0)
    assert thinned.row(-1) == timeline.row(-1)
    rows = timeline.rows()
    at = -1
    for row in thinned.rows():  # a subsequence
        at = rows.index(row, at + 1)


def test_every_part_of_the_time_keeps_its_own_maximum():
    n = 100_000
    timeline = pl.DataFrame({"time_us": range(n), "parameters": [i * 7919 % 10007 for i in range(n)]})
    thinned = thin(timeline, 301)
    assert thinned.height <= 301
    # 100 buckets of 1000 us each.
    by_bucket = [frame.group_by(pl.col("time_us") // 1000).agg(pl.col("parameters").max()).sort("time_us")
                 for frame in (timeline, thinned)]  # fmt: skip
    assert by_bucket[0].equals(by_bucket[1])


def test_areas_stack_to_the_total_and_the_highest_is_the_peak():
    """The upper edge of the topmost area is the total, in pixels; rows of one microsecond are not added up."""
    spec = plot_spec(timeline(a_step(), PHASES, title="a step"))
    areas = vega_data(spec)
    assert len(areas) == 3, "what never holds a byte is not drawn"
    top = areas[-1]["items"]
    # Of all edges, the height over the axis at the bottom (400 px): proportional to the bytes.
    heights = {round(item["x"], 3): 400 - item["y"] for item in areas[0]["items"]}
    one_gib = next(iter(heights.values()))
    assert max(400 - item["y"] for item in top) == pytest.approx(3.5 * one_gib, rel=1e-6)
    at_200_ms = next(item for item in top if item["x"] == pytest.approx(0.2 * 860))
    assert 400 - at_200_ms["y"] == pytest.approx(2 * one_gib, rel=1e-6)
    for lower, upper in pairwise(areas):
        edges = {(i["x"], i["y"]) for i in lower["items"]}
        assert {(i["x"], i["y"] + i["height"]) for i in upper["items"]} & edges


def test_the_drawing_names_phases_peak_and_reserve():
    chart = timeline(a_step(), PHASES, title="a <step> & more", reserved_bytes=5 * GIB)
    svg = plot_svg(plot_spec(chart))
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    for text in ("forward", "backward", "optimizer", "peak 3.50 GiB at 400 ms", "reserved 5.00 GiB", "time (ms)",
                 "live memory (GiB)", "saved for backward: 2.00 GiB", "temporaries: 512.00 MiB",
                 "a &lt;step&gt; &amp; more"):  # fmt: skip
        assert text in texts, text
    assert not any("workspaces" in text for text in texts)


def test_units_follow_the_sizes():
    small = a_step().with_columns(pl.exclude("time_us") // 1024, pl.col("time_us") // 1000)
    svg = plot_svg(plot_spec(timeline(small, title="a small step")))
    assert "live memory (MiB)" in svg
    assert "time (µs)" in svg
    assert "peak 3.50 MiB at 400 µs" in svg


def test_names_of_many_short_phases_never_overlap():
    phases = [PhaseSpan(name=f"micro-batch {i}", start_us=i * 1000, end_us=(i + 1) * 1000) for i in range(1000)]
    svg = plot_svg(plot_spec(timeline(a_step(), phases, title="many")))
    places = [
        (float(m[1]), float(m[2]), len(m[3]))
        for m in re.finditer(r'<text[^>]*transform="translate\(([\d.]+),([\d.]+)\)"[^>]*>(micro-batch \d+)<', svg)
    ]
    assert len(places) > 10
    for x, y, length in places:
        for other_x, other_y, _ in places:
            assert (x, y) == (other_x, other_y) or y != other_y or abs(x - other_x) >= 5.5 * length


def test_nothing_alive_is_nothing_to_plot():
    with pytest.raises(InputError, match="nothing to plot"):
        timeline(a_step().with_columns(pl.exclude("time_us") * 0), title="empty")


def test_a_million_events_make_a_small_drawing():
    n = 1_000_000
    live = pl.DataFrame({"time_us": pl.int_range(n, eager=True)}).with_columns(
        parameters=pl.lit(GIB), temporaries=pl.col("time_us") * 48271 % 2147483647
    )
    peak = int(live.select((pl.col("parameters") + pl.col("temporaries")).max()).item())
    spec = plot_spec(timeline(live, title="a million"))
    (rows,) = [data for data in spec["datasets"].values() if isinstance(data, str)]
    drawn = pl.read_csv(rows.encode())
    assert drawn.height <= 2000
    assert drawn.select((pl.col("parameters") + pl.col("temporaries")).max()).item() == peak


def test_every_category_of_memory_has_a_colour_of_its_own():
    assert set(CATEGORY_COLOURS) == set(get_args(MemoryCategory))
    assert len(set(CATEGORY_COLOURS.values())) == len(CATEGORY_COLOURS)


class Tags(HTMLParser):
    """The tags of a page as a browser would see them: what a script holds is none."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, set[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name for name, _ in attrs}))


@pytest.fixture(scope="module")
def chart() -> Spec:
    return timeline(a_step(), PHASES, title="</script><b>a step", interactive=True)


def test_html_needs_no_network_and_its_text_cannot_end_the_script(tmp_path: Path, chart: Spec):
    save_plot(chart, tmp_path / "plot.html")
    html = (tmp_path / "plot.html").read_text()
    page = Tags()
    page.feed(html)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "b" not in {tag for tag, _ in page.tags}
    assert not {name for _, names in page.tags for name in names} & {"src", "href", "srcset", "data"}
    assert "@import" not in html
    assert "cdn." not in html
    assert "<title>&lt;/script&gt;" in html
    embedded = re.search(r'vegaEmbed\("#plot", (\{.*\}), \{"renderer"', html)
    assert embedded is not None
    spec = json.loads(embedded[1])
    assert {param["name"] for param in spec["params"]} == {"moment", "zoom"}
    assert vl_convert.vegalite_to_svg(spec).startswith("<svg"), "what the page holds can be drawn"


def test_png_has_two_pixels_for_one_of_the_svg(tmp_path: Path, chart: Spec):
    save_plot(chart, tmp_path / "plot.png")
    save_plot(chart, tmp_path / "plot.svg")
    svg = (tmp_path / "plot.svg").read_text()
    width, height = struct.unpack(">II", (tmp_path / "plot.png").read_bytes()[16:24])
    assert (width, height) == tuple(2 * int(n) for n in re.findall(r'<svg[^>]* width="(\d+)" height="(\d+)"', svg)[0])


@pytest.mark.long
def test_the_same_input_gives_the_same_bytes_in_any_process(tmp_path: Path, chart: Spec):
    again = timeline(a_step(), PHASES, title="</script><b>a step", interactive=True)
    for suffix in (".svg", ".png", ".html", ".json"):
        save_plot(chart, tmp_path / f"a{suffix}")
        save_plot(again, tmp_path / f"b{suffix}")
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes(), suffix
    code = """
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from stepscope.rendering.plots import save_plot
from tests.rendering.test_plots import PHASES, a_step, timeline
save_plot(timeline(a_step(), PHASES, title="</script><b>a step", interactive=True), Path(sys.argv[1]))
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c.svg")], check=True, cwd=root)
    assert (tmp_path / "c.svg").read_bytes() == (tmp_path / "a.svg").read_bytes()


def test_clip_paths_of_a_drawing_are_those_it_refers_to():
    spec = plot_spec(timeline(a_step(), PHASES, title="a step"))
    plot_svg(spec)
    svg = plot_svg(spec)
    defined = re.findall(r'id="(clip\d+)"', svg)
    assert len(defined) == len(set(defined)) > 0
    assert set(re.findall(r"url\(#(clip\d+)\)", svg)) <= set(defined)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plot.pdf", r"end its name in one of \.svg, \.png, \.html, \.json"),
        ("plot", "end its name in one of"),
        ("nowhere/plot.svg", "cannot write the plot .*there is no folder .*nowhere, make it first"),
        (f"{'x' * 300}.svg", "cannot write the plot .*too long"),
    ],
)
def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path, chart: Spec, name: str, message: str):
    with pytest.raises(InputError, match=message) as caught:
        save_plot(chart, tmp_path / name)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def cell(batch_size: int, measured_gib: float, error: float, **changes: Any) -> Comparison:
    """A run that was measured, and predicted with this error."""
    ran = workload(batch_size=batch_size, seq_len=128, **changes)
    measured = round(measured_gib * GIB)
    predicted = msgspec.structs.replace(estimate(ran), peak_bytes=round(measured * (1 + error)))
    return Comparison(
        run_id=f"{batch_size}", workload=ran, predicted=predicted, measured_peak=measured, measured_reserved=None,
        ran=True, foretold=None, error=predicted.peak_bytes / measured - 1,
    )  # fmt: skip


def test_accuracy_judges_by_the_cells_that_nothing_was_corrected_by():
    accuracy = accuracy_of(
        comparisons=(cell(1, 2, 0.01), cell(2, 4, -0.03, phase="forward"), cell(4, 60, 0.02)),
        apart=(cell(8, 70, 0.5),),
    )
    panels = accuracy_panels(accuracy)
    note = "3 cells judge: median error 2.00 %, worst 3.00 %; 1 that it was corrected by, hollow"
    assert {panel.frame.note for panel in panels} == {note}
    upper, lower = panels
    assert [round(point.x) for point in upper.points] == [2, 4, 60, 70] == [round(point.x) for point in lower.points]
    assert [point.y for point in upper.points] == pytest.approx([2.02, 3.88, 61.2, 105])
    assert [point.y for point in lower.points] == pytest.approx([1, -3, 2, 50])
    assert [point.apart for point in upper.points] == [False, False, False, True]
    assert upper.frame.x_ends == upper.frame.y_ends == pytest.approx((1.6, 131.25))
    svg = plot_svg(plot_spec(draw_answer(Answer(study="fit", question="", panels=panels))))
    for text in ("measured peak (GiB)", "predicted peak (GiB)", "error of the prediction (%)", "±2 %", "±6 %",
                 "inference", note):  # fmt: skip
        assert f">{text}</text>" in svg, text
    points = re.findall(r'aria-roledescription="point"[^>]*fill-opacity="([\d.]+)"', svg)
    assert sorted(points) == ["0", "0", *["0.75"] * 6], "hollow is what the prediction was corrected by"


def test_accuracy_of_nothing_has_no_panels():
    assert accuracy_panels(accuracy_of(())) == ()


def test_a_panel_with_a_frame_is_read_back_from_its_document():
    guides = (Guide(y=(1.0,), name="limit"), Guide(x=(1.0, 2.0), y=(1.0, 2.0), to=(2.0, 4.0)))
    framed = Panel(
        x_title="x", y_title="y", kind="points", points=(Point(line="a", x=1, y=1, apart=True),),
        frame=Frame(heading="what", note="why", x_ends=(0.0, 2.0), guides=guides),
    )  # fmt: skip
    plain = Panel(x_title="x", y_title="y", points=(Point(line="a", x=1, y=1),))
    answer = Answer(study="fit", question="?", panels=(framed, plain))
    text = encode_answer(answer)
    assert decode_answer(text.encode(), "here") == answer
    assert text.count('"frame"') == 1, "a panel that says nothing more is written as before"


def test_ticks_stand_at_the_lengths_that_were_measured():
    points = tuple(Point(x=2.0**k, y=3.0 * 4.0**k, line="plain") for k in range(7, 13))
    panel = Panel(x_title="sequence length", y_title="saved (MiB)", points=points)
    assert "4,096" in texts_of(draw_series([panel]))


def texts_of(chart: Spec) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", plot_svg(plot_spec(chart)))


def test_a_line_that_ends_in_no_number_is_marked_there():
    points = [Point(line="fp16", x=2.0**k, y=1.0 / 2**k) for k in range(4)]
    panel = Panel(x_title="x", y_title="y", points=(*points, Point(line="fp16", x=16, y=0, missing="inf")))
    assert "inf" in texts_of(draw_series([panel]))
    unsaid = Panel(x_title="x", y_title="y", points=(*points, Point(line="fp16", x=16, y=float("nan"))))
    assert "nan" in texts_of(draw_series([unsaid]))
    with pytest.raises(InputError, match="nothing to plot"):
        draw_series([Panel(x_title="x", y_title="y", points=(Point(line="a", x=1, y=float("inf")),))])


def widths_of(*lines: list[float]) -> list[int]:
    points = tuple(Point(line=str(i), x=x, y=y) for i, ys in enumerate(lines) for x, y in enumerate(ys))
    spec = plot_spec(draw_series([Panel(x_title="x", y_title="y", points=points)]))
    rows = [row for data in spec["datasets"].values() for row in data if "wide" in row]
    return [next(row["wide"] for row in rows if row["line"] == str(i)) for i in range(len(lines))]


def test_a_line_under_another_is_wider_and_so_seen():
    assert widths_of([1, 2, 3], [3, 2, 1]) == [2, 2], "lines that cross are both seen"
    assert widths_of([1, 2, 3], [1, 2.01, 5], [1, 2, 9]) == [10, 6, 2]


def test_a_line_of_many_points_has_no_dots():
    points = tuple(Point(line="long", x=float(x), y=float(x % 7)) for x in range(10_000))
    short = tuple(Point(line="short", x=float(x), y=1.0) for x in range(3))
    svg = plot_svg(plot_spec(draw_series([Panel(x_title="x", y_title="y", points=(*points, *short))])))
    assert svg.count('aria-roledescription="point"') == 3


def test_panels_of_one_quantity_share_a_scale():
    def panel(of: str, *ys: float) -> Panel:
        points = tuple(Point(line="a", x=float(x), y=y) for x, y in enumerate(ys))
        return Panel(x_title="x", y_title=f"error of {of}", points=points)

    def ends(*panels: Panel) -> list[tuple[float, ...]]:
        spec = json.dumps(plot_spec(draw_series(list(panels))))
        return [tuple(map(float, pair)) for pair in re.findall(r'"y".*?"domain": \[([\d.e-]+), ([\d.e-]+)\]', spec)]

    assert len(set(ends(panel("softmax", 1, 2), panel("norm", 2, 9)))) == 1
    assert len(set(ends(panel("softmax", 1, 2), panel("norm", 200, 900)))) == 2, "one would be flat"


def test_bars_show_intervals_doubts_and_what_is_missing():
    points = (
        Point(name="small", line="eager", y=4.0, low=3.9, high=4.2),
        Point(name="small", line="compiled", y=2.0, doubted=True),
        Point(name="xl", line="eager", y=0.0, missing="OOM"),
    )
    chart = draw_bars(Panel(x_title="", y_title="step, ms", points=points, kind="bars"), title="a <b>")
    texts = texts_of(chart)
    assert {"small", "xl", "OOM", "eager", "compiled", "step, ms", "a &lt;b&gt;"} <= set(texts)
    svg = plot_svg(plot_spec(chart))
    assert svg.count('aria-roledescription="bar"') == 2 and 'opacity="0.35"' in svg
    assert svg.count('aria-roledescription="rule mark"') == 1
    with pytest.raises(InputError, match="nothing to plot"):
        draw_bars(Panel(x_title="", y_title="y", points=points[2:], kind="bars"))
    many = tuple(Point(name=str(i), line="a", y=1.0) for i in range(200))
    with pytest.raises(InputError, match="200 bars of 1 colours are more than"):
        draw_bars(Panel(x_title="", y_title="y", points=many, kind="bars"))


def test_a_stack_adds_up():
    points = tuple(Point(name="forward", line=family, y=y) for family, y in (("products", 3.0), ("softmax", 1.0)))
    spec = plot_spec(draw_bars(Panel(x_title="", y_title="ms", points=points, kind="stack")))
    drawn = r'aria-roledescription="bar" d="M[\d.]+,[\d.]+h([\d.]+)'
    widths = [float(width) for width in re.findall(drawn, plot_svg(spec))]
    assert len(widths) == 2 and widths[0] == pytest.approx(3 * widths[1])


def test_a_picture_says_where_and_when_it_was_measured():
    run = make_run(workload(), forward=[0.1] * 6, backward=[0.2] * 6)
    texts = texts_of(draw_answer(answer_run(run)))
    assert any("a CPU; 2026-01-01; stepscope 0.1.0, python 3.11.7, torch 2.13.0" in text for text in texts)
    assert {"forward", "backward", "step", "median, ms"} <= set(texts)
    with pytest.raises(InputError, match="leave out --save"):
        draw_answer(Answer(study="models", question=""))


def test_more_lines_than_colours_are_refused():
    points = tuple(Point(x=1, y=1, line=str(i)) for i in range(9))
    with pytest.raises(InputError, match=r"9 colours .*--where"):
        draw_series([Panel(x_title="x", y_title="y", points=points)])


def test_logarithmic_ticks_are_round():
    assert log_ticks(0.3, 12) == [0.5, 1, 2, 5, 10]
    assert log_ticks(0.003, 900) == [0.01, 0.1, 1, 10, 100]


def timed(seq_len: int, step_ms: float, **changes: Any) -> Run:
    values = [step_ms * 1e-3 * (1 + 0.01 * i) for i in (0, 6, 1, 5, 2, 4, 3)]
    findings = changes.pop("findings", ())
    return make_run(workload(seq_len=seq_len, **changes), step=values, findings=findings)


DOUBT = Finding(kind="noisy", severity="warning", sentence="the samples scatter")
RUNS = [
    timed(128, 2.0), timed(256, 4.0), timed(512, 9.0),
    timed(128, 1.0, dtype="bf16"), timed(256, 2.0, dtype="bf16", findings=(DOUBT,)),
    make_run(
        workload(seq_len=512, dtype="bf16"), status="out-of-memory", failure=Failure(message="no", during="warm-up")
    ),
]  # fmt: skip


def drawn_points(chart: Spec) -> list[dict[str, Any]]:
    spec = plot_spec(chart)
    rows = next(rows for rows in spec["datasets"].values() if rows and "doubted" in rows[0])
    return sorted(rows, key=lambda row: (row["line"], row["x"]))


def drawn_table(query: TableQuery) -> Spec:
    return draw_answer(Answer(study="table", question="", panels=table_panels(RUNS, query)))


def test_a_table_is_plotted_as_it_is_printed():
    chart = drawn_table(TableQuery(rows=("model", "seq_len"), columns=("dtype",)))
    points = drawn_points(chart)
    assert len(points) == 5
    fp32 = [point for point in points if point["style"] == "fp32"]
    assert [(point["x"], round(point["y"], 6)) for point in fp32] == [(128, 2.06), (256, 4.12), (512, 9.27)]
    assert all(point["low"] <= point["y"] <= point["high"] for point in points)
    assert [point["x"] for point in points if point["doubted"]] == [256]
    svg = plot_svg(plot_spec(chart))
    for text in ("step (ms)", "seq_len", "dtype", "not shown: 1 out-of-memory"):
        assert text in svg


def test_columns_are_the_colours_where_rows_have_no_other_field():
    points = drawn_points(
        drawn_table(TableQuery(rows=("seq_len",), columns=("dtype",), values=("step",), statistic="mean-std"))
    )
    assert {point["line"] for point in points} == {"fp32", "bf16"}
    assert all(point["high"] - point["y"] == pytest.approx(point["y"] - point["low"]) for point in points)


def test_percentiles_are_drawn_without_bars():
    runs = [make_run(workload(seq_len=n), step=[n * 1e-5 + i * 1e-6 for i in range(91)]) for n in (128, 256)]
    panel = table_panels(runs, TableQuery(rows=("seq_len",), values=("step",), statistic="p95"))[0]
    assert [point.y for point in panel.points] == pytest.approx([1.28 + 0.0855, 2.56 + 0.0855])
    assert all(point.low is point.high is None for point in panel.points)
    assert panel.frame is not None and panel.frame.note == "p95 of the steps of one process"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"rows": ("model", "dtype"), "columns": ("seq_len",)}, "needs a number .*--rows model,dtype none is one"),
        ({"rows": ("seq_len",), "columns": ("dtype",), "speedup": "fp32"}, "leave out --speedup"),
        ({"rows": ("seq_len", "dtype"), "values": ("peak_memory",)}, "nothing to plot"),
    ],
)
def test_tables_that_are_no_plot_say_why(query: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        drawn_table(TableQuery(**query))


def test_the_verb_plots_what_it_prints(tmp_path: Path):
    for run in RUNS:
        save_run(run, create_run_directory(tmp_path / "runs", run.workload))

    def table(*options: str) -> Done:
        return stepscope("table", "runs", *options, cwd=tmp_path)

    printed = table("--columns", "dtype")
    plotted = table("--columns", "dtype", "--save", "table.svg")
    assert (plotted.returncode, plotted.stdout) == (0, printed.stdout)
    assert plotted.stderr.startswith("stepscope: plotted in table.svg: medians with 95 % intervals of one process")
    assert plotted.stderr.endswith("; not shown: 1 out-of-memory\n")
    assert "step (ms)" in (tmp_path / "table.svg").read_text()
    for options, says in (
        (("--columns", "dtype", "--save", "table.pdf"), "end its name in one of .svg"),
        (("--rows", "model,dtype", "--columns", "seq_len", "--save", "other.svg"), "needs a number to go by"),
        (("--columns", "dtype", "--save", "no/such/place.png"), "cannot write the plot no/such/place.png"),
    ):
        refused = table(*options)
        assert (refused.returncode, refused.stdout) == (2, "")
        (line,) = refused.stderr.splitlines()
        assert says in line
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "table.svg"}


def test_a_machine_without_the_libraries_is_told_in_one_line():
    code = """
import sys
from pathlib import Path
sys.modules["vl_convert"] = None
from stepscope.core.errors import InputError
from stepscope.core.answer import Answer, Panel, Point
from stepscope.rendering.picture import draw_svg
from stepscope.rendering.plots import check_target
panel = Panel(x_title="", y_title="", points=(Point(line="a", y=1.0),), kind="points")
for plot in (lambda: check_target(Path("x.svg")), lambda: draw_svg(Answer(study="", question="", panels=(panel,)))):
    try:
        plot()
    except InputError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == 2 * "cannot plot without vl_convert: pip install vl-convert-python\n"


def test_a_long_subtitle_stays_inside_its_picture():
    """In lines of its own, none of which is wider than the picture."""
    note = "Floor: products at a large one's rate and the optimizer's bytes, one after the other. " * 3
    panel = Panel(
        x_title="", y_title="ms", kind="bars", frame=Frame(note=note.strip()),
        points=tuple(Point(line=line, name="step", y=1.0) for line in ("by hand", "ours")),
    )  # fmt: skip
    chart = draw_answer(Answer(study="run", question="Which is faster?", device="NVIDIA H200", panels=(panel,)))
    lines = chart["title"]["subtitle"]
    assert " ".join(lines) == f"NVIDIA H200; {note.strip()}"
    svg = plot_svg(plot_spec(chart))
    (width,) = re.findall(r'width="(\d+)"', svg)[:1]
    assert max(map(len, lines)) * 6.2 < float(width)
