"""A run in words, to the letter: what its table and the lines below it say where there is more to say."""

import pytest

from stepscope.analysis.runs.answer import answer_run
from stepscope.analysis.runs.metrics import summarise
from stepscope.core.run import Run
from stepscope.report.renderers import render
from tests.conftest import make_run

STEADY = [0.010 + 0.0001 * ((37 * i) % 101) for i in range(100)]


def text(run: Run) -> str:
    """The run in Markdown."""
    return render(answer_run(run), "markdown")


def of_steps(count: int) -> Run:
    steps = (STEADY * 3)[:count]
    return make_run(forward=steps, optimizer=[value / 10 for value in steps])


def test_percentiles_have_a_column_once_there_are_steps_enough():
    heads = {count: text(of_steps(count)).split("| phase")[1].splitlines()[0] for count in (59, 60, 299, 300)}
    assert heads[59] == " | median | 95 % interval | mean ± std | share | model FLOP/s |"
    assert heads[60] == heads[299] == " | median | 95 % interval | mean ± std | p95 | share | model FLOP/s |"
    assert heads[300] == " | median | 95 % interval | mean ± std | p95 | p99 | share | model FLOP/s |"


def test_percentiles_are_in_the_summary_or_null():
    many, few = summarise(of_steps(300)), summarise(of_steps(59))
    # 10.0 ms to 20.0 ms by 0.1 ms without 16.4 ms, each three times: the 285th of 300 is 19.5 ms, the 286th 19.6 ms.
    assert many["forward_p95_s"] == pytest.approx(0.0195 + 0.05 * 0.0001)
    assert many["step_p99_s"] == pytest.approx(1.1 * (0.0199 + 0.01 * 0.0001))
    assert few["step_p95_s"] is few["step_p99_s"] is few["forward_p95_s"] is None
