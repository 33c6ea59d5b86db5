"""Tables of details on captures that others published, against sums over the raw JSON."""

import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import polars as pl
import pytest

from stepscope.core.units import Window
from stepscope.rendering.chrome_trace import write_cut
from stepscope.traces.captures.answer import trace_as_json
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.details import (
    copy_totals,
    graph_replays,
    host_calls,
    kernel_times,
    operator_totals,
    operator_tree,
    range_tree,
)
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.part import first_event_ns, part_of
from stepscope.traces.captures.summary import TraceSummary
from tests.public import public_capture
from tests.traces.captures.details.raw import KINETO, Event, events_of, kernels_of

pytestmark = pytest.mark.slow

CALLS = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "runtime", "driver"}


@pytest.fixture(scope="module", params=KINETO)
def capture(request: pytest.FixtureRequest) -> tuple[TraceSummary, list[Event]]:
    path = public_capture(f"{request.param}.json.gz")
    return TraceSummary(attribution=attribute(read_trace(path)), run=None), events_of(path)


def test_durations_of_kernels(capture: tuple[TraceSummary, list[Event]]):
    summary, events = capture
    spent = defaultdict(list)
    for kernel in kernels_of(events):
        spent[kernel["name"]].append(kernel["ns"])
    found = kernel_times(summary.attribution)
    by_name = found.group_by("name").agg(pl.col("calls").sum(), pl.col("busy_ns").sum(), pl.len())
    assert {name: (calls, busy) for name, calls, busy, _ in by_name.iter_rows()} == {
        name: (len(times), sum(times)) for name, times in spent.items()
    }
    of_one_family = found.join(by_name.filter(pl.col("len") == 1), on="name", how="semi")
    for row in of_one_family.iter_rows(named=True):
        times = spent[row["name"]]
        assert (row["min_ns"], row["median_ns"], row["max_ns"]) == (min(times), statistics.median(times), max(times))
        assert row["deviation_ns"] == (pytest.approx(statistics.stdev(times)) if len(times) > 1 else None)


def test_bytes_of_copies(capture: tuple[TraceSummary, list[Event]]):
    summary, events = capture
    moved = [event for event in events if event["cat"] in ("gpu_memcpy", "gpu_memset", "memcpy", "memset")]
    found = copy_totals(summary.attribution)
    assert found["calls"].sum() == len(moved)
    assert found["busy_ns"].sum() == sum(event["ns"] for event in moved)
    assert found["bytes"].sum() == sum(event["args"].get("bytes", 0) for event in moved)
    copies = Counter(event["name"].split()[1] for event in moved if event["name"].startswith("Memcpy"))
    directions = found.filter(pl.col("direction") != "fill").group_by("direction").agg(pl.col("calls").sum())
    assert dict(directions.iter_rows()) == copies


def test_calls_of_the_host(capture: tuple[TraceSummary, list[Event]]):
    summary, events = capture
    spent = defaultdict(list)
    for event in events:
        if event["cat"] in CALLS:
            spent[event["name"]].append(event["ns"])
    found = host_calls(summary.attribution, summary.attribution.table.calls)
    assert {row["name"]: (row["calls"], row["total_ns"], row["max_ns"]) for row in found.iter_rows(named=True)} == {
        name: (len(times), sum(times), max(times)) for name, times in spent.items()
    }
    synchronising = found.filter(pl.col("name").str.contains("Synchronize"))
    assert (synchronising["waits"] == synchronising["calls"]).all()
    assert (synchronising["waited_ns"] == synchronising["total_ns"]).all()


def test_operators_and_their_tree(capture: tuple[TraceSummary, list[Event]]):
    summary, _ = capture
    table, work = summary.attribution.table, summary.attribution.work
    found, tree = operator_totals(summary), operator_tree(summary.attribution)
    calls = Counter(dict(table.operators["name"].cast(pl.String).value_counts().iter_rows()))
    assert calls == Counter(dict(found.group_by("name").agg(pl.col("calls").sum()).iter_rows()))
    inside = work.filter(pl.col("operator_row").is_not_null())
    assert found["busy_ns"].sum() == inside["duration_ns"].sum() == tree["self_device_ns"].sum()
    assert found["kernels"].sum() == inside.height == tree.filter(pl.col("depth") == 0)["kernels"].sum()
    assert tree.filter(pl.col("depth") == 0)["device_ns"].sum() == inside["duration_ns"].sum()
    assert tree["calls"].sum() == table.operators.height


def test_ranges_hold_what_their_children_hold(capture: tuple[TraceSummary, list[Event]]):
    summary, _ = capture
    tree = range_tree(summary.attribution)
    rows = tree.to_dicts()
    for row in rows:
        inner = [one for one in rows if one["path"][:-1] == row["path"]]
        assert row["device_ns"] == row["self_device_ns"] + sum(one["device_ns"] for one in inner)
        assert row["kernels"] >= sum(one["kernels"] for one in inner)


def test_a_replay_has_the_kernels_of_its_call(capture: tuple[TraceSummary, list[Event]]):
    summary, events = capture
    launched = {event["args"]["correlation"] for event in events if event["name"].endswith("GraphLaunch")}
    each = Counter(event["args"]["correlation"] for event in kernels_of(events))
    counts = Counter(each[correlation] for correlation in launched if each[correlation])
    found = Counter()
    for row in graph_replays(summary.attribution).iter_rows(named=True):
        found[row["kernels"]] += row["replays"]
    assert found == counts


def test_json_is_plain(capture: tuple[TraceSummary, list[Event]]):
    said = json.loads(json.dumps(trace_as_json(capture[0], ())))
    assert {"name", "shapes", "calls", "kernels", "busy_ns", "flops", "bytes", "bound"} <= set(said["operators"][0])


def totals(summary: TraceSummary, *columns: str) -> list[tuple]:
    """Calls, time and bytes by columns."""
    keys = [pl.col(column).cast(pl.String) for column in columns]
    sums = [pl.len(), pl.col("duration_ns").sum(), pl.col("bytes").sum(), pl.col("occupancy").sum()]
    return summary.attribution.work.group_by(keys).agg(sums).sort(columns, nulls_last=True).rows()


@pytest.mark.parametrize("selection", ["all", "step", "half"])
def test_a_cut_reads_as_its_part(capture: tuple[TraceSummary, list[Event]], selection: str, tmp_path: Path):
    """Where no range marks the phases they follow from all operators, so a cut may find others: only marked ones."""
    whole = capture[0]
    steps = whole.attribution.work["step"].drop_nulls()
    if selection == "step" and not len(steps):
        pytest.skip("no step is marked")
    half = Window(0, round(float(whole.attribution.work["start_ns"].median())) - first_event_ns(whole.attribution) + 1)  # type: ignore[arg-type]
    asked = {"all": {}, "step": {"step": steps.max()}, "half": {"between": half}}[selection]
    part = part_of(whole, "it", **asked) if asked else whole
    target = tmp_path / "cut.json.gz"
    assert write_cut(part.attribution, target) == part.attribution.work.height
    cut = TraceSummary(attribution=attribute(read_trace(target)), run=None)
    assert (cut.kernel_count, cut.busy_ns, cut.union_ns) == (part.kernel_count, part.busy_ns, part.union_ns)
    for column in ("name", "kind", "stream", "device", "grid", "family"):
        assert totals(cut, column) == totals(part, column), column
    if not whole.attribution.passes:
        for columns in (["phase"], ["module"], ["part", "role"]):
            assert totals(cut, *columns) == totals(part, *columns), columns
