"""`--style bars`: bars and sparklines in 80 columns, in blocks or in ASCII, with every figure beside them."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stepscope.core.answer import MEASURED_STEP, Answer, Frame, Panel, Point
from stepscope.rendering.renderers import bars
from stepscope.rendering.terminal import render_answer

ROOT = Path(__file__).parents[2]

PHASES = Panel(
    x_title="", y_title="median, ms", kind="bars",
    points=(
        Point(line="median", name="forward", y=10), Point(line="median", name="backward", y=20, doubted=True),
        Point(line="median", name="optimizer", y=0, missing="OOM"), Point(line="median", name="step", y=40),
    ),
)  # fmt: skip


def test_bars_are_as_long_as_their_share():
    text = bars.render(Answer(study="run", question="What?", panels=(PHASES,)))
    found = {line.split()[0]: line for line in text.splitlines() if line}
    room = 80 - len("optimizer") - 14
    assert found["step"].count("█") == room
    assert found["forward"].count("█") == room // 4 and " 10" in found["forward"]
    assert found["backward"].endswith("*"), "a doubted figure has its mark, and no colour alone"
    assert found["optimizer"].endswith("OOM")
    assert max(map(len, text.splitlines())) <= 80


@given(st.floats(0, 1), st.integers(1, 80), st.booleans())
def test_a_bar_is_never_longer_than_its_room(share: float, width: int, blocks: bool):
    bar = bars.bar_of(share, width, blocks=blocks)
    assert len(bar) <= width
    assert blocks or bar.isascii()


@given(st.lists(st.floats(-1e9, 1e9), max_size=300), st.integers(1, 60), st.booleans())
def test_a_sparkline_has_its_extremes(values: list[float], width: int, blocks: bool):
    line = bars.sparkline(values, width, blocks=blocks)
    assert len(line) == min(len(values), width)
    assert blocks or line.isascii()


def test_levels_rise_with_the_values():
    assert bars.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, blocks=True) == "▁▂▃▄▅▆▇█"
    assert bars.sparkline([0, 7], 8, blocks=False) == "_@"
    assert bars.sparkline([5, 5, 5], 8, blocks=True) == "▁▁▁"
    assert bars.sparkline([0, 0, 8, 8], 2, blocks=True) == "▁█", "neighbours share a character where room is short"


@pytest.mark.parametrize(("encoding", "block"), [("utf-8", "█"), ("ascii", "#")])
def test_a_pipe_gets_what_its_encoding_can_say(encoding: str, block: str):
    run = next((ROOT / "results/cpu/first").iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "show", str(run), "--style", "bars"], check=True, capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    text = done.stdout.decode(encoding)
    assert block * 20 in text and "\x1b" not in text
    assert "?" not in text.partition("median, ms")[2].partition("\n\n")[0]


def test_colours_say_nothing_that_the_text_does_not():
    answer = Answer(study="run", question="What?", panels=(PHASES,))
    text = bars.coloured(answer)
    assert text.plain == bars.render(answer)
    of = {text.plain[span.start : span.end].strip("█▏▎▍▌▋▊▉")[:9]: str(span.style) for span in text.spans}
    styles = [str(span.style) for span in text.spans]
    assert styles == ["cyan", "yellow", "red", "green"], "a phase, a doubted bar, a missing one, the step"
    assert of["optimizer"] == "red"


def test_a_terminal_shows_every_step_of_a_run_and_a_pipe_the_tables_alone():
    curve = Panel(
        x_title=MEASURED_STEP, y_title="ms", kind="curves", frame=Frame(heading="Every measured step"),
        points=tuple(Point(line="step", x=place, y=value) for place, value in enumerate((1.0, 1.0, 8.0, 1.0))),
    )  # fmt: skip
    answer = Answer(study="run", question="What?", panels=(PHASES, curve))
    assert bars.step_by_step(answer)[0] == "Every measured step, ms"
    assert bars.step_by_step(answer)[1].endswith(("▁▁█▁", "__@_"))
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(render_answer(answer, drawn=True))
    assert "Every measured step, ms" in console.file.getvalue()  # type: ignore[attr-defined]
    assert bars.step_by_step(Answer(study="s", question="", panels=(PHASES,))) == []
