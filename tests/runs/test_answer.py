"""A run in words, to the letter: what its table and the lines below it say where there is more to say."""

from typing import Any

import msgspec
import pytest

from stepscope.core.environment import Extent, GpuSamples
from stepscope.core.evidence import Energy, Evidence
from stepscope.core.run import Repeat, Run
from stepscope.rendering.renderers import render
from stepscope.runs.answer import answer_run
from stepscope.runs.metrics import summarise
from stepscope.runs.run_sets import answer_set, sets_of
from stepscope.runs.tables import TableQuery, build_table
from tests.conftest import make_run, workload

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


ENERGY = Energy(energy_j=1500.0, steps=20, duration_s=2.5, of="gpu", are_samples=True)
DURING = GpuSamples(
    count=24, period_s=0.1,
    sm_clock_mhz=Extent(lowest=1755, median=1965, highest=1980),
    power_w=Extent(lowest=312.4, median=598.6, highest=702.0),
    temperature_c=Extent(lowest=41, median=47.5, highest=52),
)  # fmt: skip


def with_figures(energy: Energy | None, during: GpuSamples | None = None, **changes: Any) -> Run:
    run = make_run(workload(batch_size=4, seq_len=128), step=[0.125] * 20, **changes)
    assert run.environment is not None
    environment = msgspec.structs.replace(run.environment, during=during)
    return msgspec.structs.replace(run, environment=environment, evidence=Evidence(energy=energy))


def said(run: Run) -> list[str]:
    """The lines of the answer on energy and on the GPU while the steps ran."""
    lines = [line.text for line in answer_run(run).tables[0].notes]
    return [line for line in lines if " W." in line or line.startswith("While")]


def test_energy_is_said_with_whose_it_is_and_over_what():
    assert said(with_figures(ENERGY, DURING)) == [
        "75 J a step, 146.5 mJ a token, by the counter of the whole GPU over 20 steps in 2.5 s: 600 W.",
        "While the steps ran: SM clock 1,965 MHz (1,755 to 1,980), power 599 W (312 to 702), temperature 48 °C (41 to "
        "52); medians of 24 readings, one every 100 ms.",
    ]
    after = Energy(energy_j=0.9, steps=1200, duration_s=2.0, of="cpu-packages", are_samples=False)
    assert said(with_figures(after)) == [
        "750 uJ a step, 1.465 uJ a token, by the counter of the processor's packages, without memory over 1,200 steps "
        "that ran after those in 2 s: 0.45 W."
    ]


def test_what_nobody_read_is_not_said_and_null_in_the_summary():
    blind = GpuSamples(count=3, period_s=0.1)
    for run in (with_figures(None), with_figures(None, blind)):
        assert said(run) == []
        summary = summarise(run)
        figures = ("joules_per_step", "joules_per_token", "sm_clock_mhz", "power_w", "temperature_c")
        assert {name: summary[name] for name in figures} == dict.fromkeys(figures)


def test_steps_that_took_turns_with_anothers_have_no_energy():
    assert said(with_figures(ENERGY, beside="20260101T000000.000-other")) == []
    assert summarise(with_figures(ENERGY, beside="20260101T000000.000-other"))["joules_per_step"] is None


def test_a_table_shows_energy_clocks_and_power():
    values = ("joules_per_step", "joules_per_token", "sm_clock", "power", "temperature")
    table = build_table([with_figures(ENERGY, DURING)], TableQuery(rows=("model",), values=values))
    assert table.columns[1:] == (
        "joules_per_step (J)", "joules_per_token (mJ)", "sm_clock (MHz)", "power (W)", "temperature (°C)",
    )  # fmt: skip
    assert table.rows[0][1:] == ("75.00", "146.48", "1,965", "599", "48")
    assert build_table([make_run(step=[1.0] * 5)], TableQuery(rows=("model",), values=values)).rows[0][1:] == ("-",) * 5


def test_a_run_with_them_reads_back_and_one_from_before_reads_without_them():
    run = with_figures(ENERGY, DURING)
    stored = msgspec.json.encode(run)
    assert msgspec.json.decode(stored, type=Run) == run
    before = msgspec.json.decode(stored)
    del before["environment"]["during"], before["evidence"]["energy"]
    old = msgspec.json.decode(msgspec.json.encode(before), type=Run)
    assert old.evidence.energy is None and old.environment is not None and old.environment.during is None
    assert said(old) == [] and old.environment.differences(run.environment or old.environment) == {}


def in_a_set(number: int, step_s: float, energy_j: float) -> Run:
    run, steps = with_figures(msgspec.structs.replace(ENERGY, energy_j=energy_j)), make_run(step=[step_s] * 5)
    return msgspec.structs.replace(
        run, id=f"run-{number}", repeat=Repeat(set="s", number=number, of=3), samples=steps.samples
    )  # fmt: skip


def test_a_set_says_what_a_step_costs_and_a_table_shows_its_process_in_the_middle():
    runs = [in_a_set(1, 0.010, 1000.0), in_a_set(2, 0.030, 2000.0), in_a_set(3, 0.020, 1800.0)]
    (found,) = sets_of(runs)
    (line,) = [line.text for line in answer_set(found).tables[0].notes if " J a step" in line.text]
    assert line == "80 J a step, the mean of 3 processes (50 J to 100 J)."
    assert found.document.joules_per_step == [50.0, 100.0, 90.0]
    table = build_table(runs, TableQuery(rows=("model",), values=("step",)))
    assert table.rows[0][1] == "20.00" and "Every cell is of several processes" in table.notes[0].text
