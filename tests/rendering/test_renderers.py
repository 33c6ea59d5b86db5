"""One answer, as each renderer says it."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from stepscope.core.answer import (
    PROSE,
    TEXT,
    Answer,
    Cell,
    Doubted,
    Line,
    decode_answer,
    encode_answer,
    note,
    table_of,
    text,
)
from stepscope.core.errors import InputError
from stepscope.core.units import UNITS
from stepscope.rendering import renderers
from stepscope.rendering.cells import is_figures
from tests.shown import shown

ANSWER = Answer(
    study="demo",
    question="What does it take?",
    device="a CPU",
    versions={"torch": "2.13.0"},
    tables=(
        table_of(
            "phase", ("time", "s"), ("ms", "ms of ns"), ("memory", "B"), ("share", "%"), ("why", PROSE),
            rows=[
                ("forward", 0.0012, 1_234_567, 2**30, 0.25, "=1+1"),
                ("a|b", Doubted(0.5, "!"), None, "OOM", math.nan, None),
            ],
            rules=(1,),
            notes=(Line("Half of it.", "aside"),),
        ),
        text("Said between."),
        table_of("name", ("calls", TEXT), rows=[("x", 12_345)], title="Calls"),
    ),
    findings=(note("demo", "It is so."),),
    origin=("Run 1",),
)  # fmt: skip


def test_the_terminal():
    assert [line.rstrip() for line in shown(ANSWER).splitlines() if line.strip()] == [
        "What does it take?",
        "a CPU; torch 2.13.0",
        " phase         time      ms     memory    share   why",
        " ─────────────────────────────────────────────────────",
        " forward     1.2 ms   1.235   1.00 GiB   25.0 %   =1+1",
        " a|b       500 ms !                OOM    nan %",
        "Half of it.",
        "Said between.",
        "Calls",
        " name    calls",
        " ─────────────",
        " x      12,345",
        "It is so.",
        "Run 1",
    ]


def test_markdown_escapes_a_pipe_and_marks_a_doubt():
    assert renderers.render(ANSWER, "markdown") == (
        "What does it take?\n\na CPU; torch 2.13.0\n\n"
        "| phase | time | ms | memory | share | why |\n"
        "| --- | ---: | ---: | ---: | ---: | --- |\n"
        "| forward | 1.2 ms | 1.235 | 1.00 GiB | 25.0 % | =1+1 |\n"
        "| a\\|b | 500 ms ! |  | OOM | nan % |  |\n\n"
        "Half of it.\n\nSaid between.\n\n**Calls**\n\n"
        "| name | calls |\n| --- | ---: |\n| x | 12,345 |\n\nIt is so.\n\nRun 1\n"
    )


def test_html_is_tables_and_paragraphs():
    assert renderers.render(ANSWER, "html").splitlines() == [
        '<div class="stepscope">',
        '<p style="margin:0.3em 0;font-weight:bold">What does it take?</p>',
        '<p style="margin:0.3em 0">a CPU; torch 2.13.0</p>',
        "<table>",
        "<thead><tr>"
        + "".join(
            f'<th style="text-align:{side}">{head}</th>'
            for head, side in zip(
                ("phase", "time", "ms", "memory", "share", "why"), ("left", *["right"] * 4, "left"), strict=True
            )
        )
        + "</tr></thead>",
        "<tbody>",
        '<tr><td style="text-align:left">forward</td><td style="text-align:right">1.2 ms</td>'
        '<td style="text-align:right">1.235</td><td style="text-align:right">1.00 GiB</td>'
        '<td style="text-align:right">25.0 %</td><td style="text-align:left">=1+1</td></tr>',
        '<tr><td style="text-align:left;border-top:1px solid">a|b</td>'
        '<td style="text-align:right;border-top:1px solid">500 ms !</td>'
        '<td style="text-align:right;border-top:1px solid"></td>'
        '<td style="text-align:right;border-top:1px solid">OOM</td>'
        '<td style="text-align:right;border-top:1px solid">nan %</td>'
        '<td style="text-align:left;border-top:1px solid"></td></tr>',
        "</tbody>",
        "</table>",
        '<p style="margin:0.3em 0;opacity:0.7">Half of it.</p>',
        '<p style="margin:0.3em 0">Said between.</p>',
        '<p style="margin:0.3em 0;font-weight:bold">Calls</p>',
        "<table>",
        '<thead><tr><th style="text-align:left">name</th><th style="text-align:right">calls</th></tr></thead>',
        "<tbody>",
        '<tr><td style="text-align:left">x</td><td style="text-align:right">12,345</td></tr>',
        "</tbody>",
        "</table>",
        '<p style="margin:0.3em 0">It is so.</p>',
        '<p style="margin:0.3em 0">Run 1</p>',
        "</div>",
    ]


class Parsed(HTMLParser):
    """The tags of a page, in order, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert all(name in ("class", "style") for name, _ in attrs)
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_from_a_foreign_file_is_text():
    """Whatever the texts of an answer hold, its page has the tags that we wrote, and the texts are read as they are."""
    evil = "</td><script>alert('x')</script> & <img src=x onerror=\"y\"> \x1b[2J \u202e ± ─"
    seen = "</td><script>alert('x')</script> & <img src=x onerror=\"y\"> \\u001b[2J \\u202e ± ─"
    table = table_of(evil, (evil, "s"), rows=[(evil, 1.0)], title=evil, notes=(Line(evil),))
    finding = note(evil, evil, remedy=evil)
    answer = Answer(
        study="demo", question=evil, device=evil, versions={evil: evil}, tables=(table,), findings=(finding,),
        checked=True, asides=(evil,), origin=(evil,),
    )  # fmt: skip
    page = renderers.render(answer, "html")
    assert page.isascii()
    parsed = Parsed(page)
    assert set(parsed.tags) == {"div", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert parsed.text.count(seen) == 14
    with_lead = Parsed(renderers.render(msgspec.structs.replace(answer, lead=(Line(evil, "bad"),)), "html"))
    assert with_lead.text.count(seen) == 11


def test_a_name_of_several_lines_breaks_no_table():
    named = table_of("a\nb", ("=1+1", "s"), rows=[("c\nd", 1.0)], title="e\nf", notes=(Line("g\nh"),))
    found = Answer(study="demo", question="", tables=(named,), origin=("i\nj",))
    assert renderers.render(found, "markdown") == (
        "**e f**\n\n| a b | =1+1 |\n| --- | ---: |\n| c d | 1 s |\n\ng h\n\ni j\n"
    )
    assert renderers.render(found, "csv").startswith('"a\nb",\'=1+1 (s)\n')


@pytest.mark.parametrize(
    "unit", ["zz", "x", "1000000000.3f", "{:q}", "{:.2f", "{} {}", "{0.__class__}", "{:.2f} {:.2f}", "s of B"]
)
def test_an_answer_with_a_unit_that_does_not_exist_is_damaged(unit: str):
    document = json.loads(encode_answer(ANSWER))
    document["tables"][0]["units"][1] = unit
    with pytest.raises(InputError, match="here is damaged: the table '' has a unit that does not exist"):
        decode_answer(json.dumps(document).encode(), "here")
    document["tables"][0]["units"] = ["s"]
    with pytest.raises(InputError, match="not a unit for each column; write it again with --json"):
        decode_answer(json.dumps(document).encode(), "here")


def test_an_answer_with_a_fraction_where_it_counts_is_damaged():
    found = Answer(study="demo", question="", tables=(table_of(("a", "d"), title="t", rows=[(2.5,)]),))
    with pytest.raises(InputError, match=r"here is damaged: the table 't' has 2\.5 where it counts"):
        decode_answer(encode_answer(found).encode(), "here")


def test_no_table_is_made_in_a_unit_that_does_not_exist():
    with pytest.raises(ValueError, match="no unit 'bytes'"):
        table_of(("peak", "bytes"), rows=[(None,)])


@pytest.mark.parametrize("unit", [*UNITS, "", ",", ".2f", ",.0f", ".3g", "g", "d", ",d", "{:+.3f} %", TEXT, PROSE])
def test_an_answer_is_read_again_in_every_unit(unit: str):
    rows: list[tuple[Cell, ...]] = [(2,)] if unit.endswith("d") else [(1.5,), (2,)]
    found = Answer(study="demo", question="", tables=(table_of(("a", unit), rows=rows),))
    assert decode_answer(encode_answer(found).encode(), "here") == found
    assert shown(found)


def test_columns_of_one_name_are_told_apart_by_programs():
    twice = table_of("ms", "from", ("from", "s"), "from", rows=[(1, 2, 3, 4)])
    found = Answer(study="demo", question="", tables=(twice,))
    assert json.loads(renderers.render(found, "jsonl")) == {"ms": 1, "from": 2, "from (s)": 3, "from 2": 4}
    assert renderers.render(found, "csv") == "ms,from,from (s),from 2\n1,2,3,4\n"


def test_a_head_that_names_its_unit_names_it_once():
    rates = table_of(("model FLOP/s", "FLOP/s"), ("steps", "s"), rows=[(1e12, 2.5)])
    assert renderers.render(Answer(study="demo", question="", tables=(rates,)), "csv").startswith(
        "model FLOP/s,steps (s)\n"
    )


def test_csv_has_bare_figures_in_units_that_its_heads_name():
    assert renderers.render(ANSWER, "csv") == (
        "phase\nphase,time (s),time (s) doubt,ms,memory (B),share (%),why\n"
        "forward,0.0012,,1.234567,1073741824,25.0,'=1+1\n"
        "a|b,0.5,!,,OOM,nan,\n\n"
        "Calls\nname,calls\nx,12345\n\n"
    )


def test_json_lines_name_their_table_and_hold_no_nan():
    first, second, third = map(json.loads, renderers.render(ANSWER, "jsonl").splitlines())
    assert first == {
        "table": "phase", "phase": "forward", "time (s)": 0.0012, "time (s) doubt": None, "ms": 1.234567,
        "memory (B)": 2**30, "share (%)": 25.0, "why": "=1+1",
    }  # fmt: skip
    assert second["share (%)"] == "nan" and (second["time (s)"], second["time (s) doubt"]) == (0.5, "!")
    assert second["ms"] is None
    assert third == {"table": "Calls", "name": "x", "calls": 12_345}


def test_a_part_is_a_table_by_its_title_or_first_head():
    assert [table.columns for table in ANSWER.part("calls").tables] == [("name", "calls")]
    assert [table.columns[0] for table in ANSWER.part("PHASE").tables] == ["phase"]
    assert "It is so." in shown(ANSWER.part("findings")) and "What does" not in shown(ANSWER.part("findings"))
    with pytest.raises(InputError, match="--only 'nothing' names no table: there are 'phase', 'Calls', and findings"):
        ANSWER.part("nothing")


def test_a_renderer_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file in the folder is a style; nothing else names it."""
    folder = Path(renderers.__file__).parent
    assert set(renderers.STYLES) == {"terminal", *(file.stem for file in folder.glob("*.py") if file.stem[0] != "_")}
    (tmp_path / "shout.py").write_text("def render(answer):\n    return answer.question.upper()\n")
    monkeypatch.setattr(renderers, "__path__", [*renderers.__path__, str(tmp_path)])
    assert renderers.render(ANSWER, "shout") == "WHAT DOES IT TAKE?"


def test_figures_that_are_not_finite_stay_figures_when_an_answer_is_read_back():
    table = table_of("format", "error", rows=[("fp16", math.inf), ("bf16", 0.5), ("fp8", math.nan)])
    table = msgspec.structs.replace(table, units=())
    answer = Answer(study="demo", question="", tables=(table,))
    again = decode_answer(encode_answer(answer).encode(), "here")
    assert is_figures(again.tables[0], 1) and not is_figures(again.tables[0], 0)
    assert shown(again) == shown(answer)
    assert renderers.render(again, "markdown") == renderers.render(answer, "markdown")


def test_doubts_of_figures_stand_beside_them_for_programs():
    rows = [("a", Doubted(0.5, "!"), 1), ("b", 0.25, 2), ("c", Doubted(0.125, "*"), 3)]
    answer = Answer(study="demo", question="", tables=(table_of("run", ("step", "s"), "calls", rows=rows),))
    assert renderers.render(answer, "csv").splitlines() == [
        "run,step (s),step (s) doubt,calls", "a,0.5,!,1", "b,0.25,,2", "c,0.125,*,3",
    ]  # fmt: skip
    lines = [json.loads(line) for line in renderers.render(answer, "jsonl").splitlines()]
    assert [line["step (s) doubt"] for line in lines] == ["!", None, "*"]
