"""A part of a capture: parts make up the whole, a range's part is what its totals say, and a wrong name is one line."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from stepscope.core.errors import InputError
from stepscope.traces.captures.answer import answer_trace, trace_as_json
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.part import part_of, range_totals
from stepscope.traces.captures.summary import TraceSummary
from tests.captures import training_steps, write_kineto
from tests.command import stepscope
from tests.shown import shown
from tests.traces.captures.test_answer import has_sound_tables

DATA = Path(__file__).parents[2] / "data"


def summary_of(path: Path) -> TraceSummary:
    return TraceSummary(attribution=attribute(read_trace(path)), run=None)


@pytest.fixture(
    scope="module", params=["kineto_train.json", "idle_streams.json", "idle_item.json", "nsys_train.sqlite"]
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TraceSummary:
    path = tmp_path_factory.mktemp("captures") / request.param
    with gzip.open(DATA / f"{request.param}.gz") as packed, path.open("wb") as target:
        shutil.copyfileobj(packed, target)
    return summary_of(path)


def test_phases_and_steps_make_up_the_whole(whole: TraceSummary):
    phases = [part_of(whole, "it", phase=name) for name in whole.phase_names]
    steps = [part_of(whole, "it", step=number) for number in whole.attribution.work["step"].drop_nulls().unique()]
    assert sum(part.busy_ns for part in phases) == whole.busy_ns
    assert sum(part.kernel_count for part in phases) == whole.kernel_count
    assert sum(part.busy_ns for part in steps) == int(
        whole.attribution.kernels.filter(whole.attribution.kernels["step"].is_not_null())["duration_ns"].sum()
    )
    assert all(part.steps == 1 for part in steps)
    for part in phases:
        (row,) = part.phases
        assert row == next(phase for phase in whole.phases if phase.phase == row.phase)
        assert part.top_kernels(row.phase) == whole.top_kernels(row.phase)
        assert part.occupation is None and part.critical_path is None and part.overlaps == ()


def test_a_ranges_part_is_what_its_totals_say(whole: TraceSummary):
    for totals in range_totals(whole.attribution):
        part = part_of(whole, "it", name=totals.name)
        assert (part.kernel_count, part.busy_ns) == (totals.kernels, totals.busy_ns), totals.name
        assert part.part is not None and (part.part.instances or 0) <= totals.instances
        assert part.gemm_fraction == pytest.approx(totals.gemm_fraction)


def test_its_tables_and_its_json_are_of_the_part(whole: TraceSummary):
    names = [totals.name for totals in range_totals(whole.attribution) if totals.kernels]
    for phase, name in ((whole.phase_names[0], None), (None, names[-1]), (whole.phase_names[-1], names[0])):
        part = part_of(whole, "it", phase=phase, name=name)
        assert part.part is not None
        has_sound_tables(answer_trace(part, (), "it"))
        said = json.loads(json.dumps(trace_as_json(part, ())))
        assert set(said) == {*trace_as_json(whole, ()), "part"}
        assert said["part"] == {"step": None, "phase": phase, "range": name, "instances": part.part.instances}
        assert sum(row["busy_ns"] for row in said["families"]) * said["steps"] == pytest.approx(said["busy_ns"])
        assert all(totals["kernels"] for totals in said["ranges"].values())


def test_the_roofline_of_a_part_has_the_verdicts_of_the_whole():
    """Whether a stream had run dry depends on the work before, which may be of another part."""
    whole = summary_of(DATA / "kineto_train.json.gz")
    part = part_of(whole, "it", phase="backward")
    assert whole.roofline is not None and part.roofline is not None
    assert part.roofline.operators == tuple(each for each in whole.roofline.operators if each.phase == "backward")


def test_an_instance_of_a_range(tmp_path: Path):
    """Two steps of two layers: in forward each attention is a product of 400 ns and an elementwise kernel of 50."""
    part = part_of(summary_of(write_kineto(training_steps(), tmp_path / "t.json")), "it", name="layers.0.attention")
    assert part.part is not None and part.part.instances == 2 and part.kernel_count == 4
    text = shown(answer_trace(part, (), "t.json"))
    assert "Only range layers.0.attention: 2 instances of 2 kernels and 0.5 us each." in text
    table = next(table for table in answer_trace(part, (), "t.json").tables if table.columns[0] == "top of forward")
    assert table.columns[-2:] == ("calls an instance", "us an instance") and table.rows[0][-2:] == (1, 400)


def test_parts_that_share_no_launch_are_refused(tmp_path: Path):
    summary = summary_of(write_kineto(training_steps(), tmp_path / "t.json"))
    with pytest.raises(InputError, match="nothing was launched in all of these in it: leave one out"):
        part_of(summary, "it", name="forward", phase="backward")


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path):
    path = write_kineto(training_steps(), tmp_path / "t.json")
    done = stepscope("trace", path, "--step", 1, "--phase", "backward", "--json")
    said = json.loads(done.stdout)
    assert (said["kernels"], said["steps"], said["part"]["step"]) == (8, 1, 1)
    done = stepscope("trace", path, "--against", path, "--phase", "forward")
    assert "only forward" in done.stdout and "no family changed" in done.stdout and "backward" not in done.stdout
    done = stepscope("trace", path, "--only", "top of forward", "--style", "csv")
    assert done.stdout.splitlines()[0] == "top of forward,family,calls,ms a step,share (%)"
    done = stepscope("trace", path, "--range", "forward", "--save", tmp_path / "t.svg")
    assert done.returncode == 0 and (tmp_path / "t.svg").read_text().startswith("<svg")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--range", "layers.0.atention"], "near are layers.0.attention"),
        (["--range", "zzz"], "no such range in"),
        (["--phase", "fwd"], "there is forward, backward, optimizer"),
        (["--step", "2"], "it has steps 0 to 1"),
        (["--phase", "forward", "--perfetto", "p.json"], "--perfetto shows one whole capture"),
        (["--against", "t.json", "--save", "p.svg"], "--save draws one capture"),
    ],
)
def test_what_is_not_there_is_one_line(tmp_path: Path, options: list[str], words: str):
    done = stepscope("trace", write_kineto(training_steps(), tmp_path / "t.json"), *options)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert words in done.stderr
