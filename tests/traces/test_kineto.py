"""Kineto traces of all spellings, made by hand, with figures worked out by hand."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.core.errors import InputError
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.table import DETAIL_SCHEMA, TraceTable
from tests.captures import AUTOGRAD, MAIN, PROCESS, kineto_trace, training_steps

Event = dict[str, Any]
NEW = {"operator": "cpu_op", "kernel": "kernel", "call": "cuda_runtime"}
OLD = {"operator": "Operator", "kernel": "Kernel", "call": "Runtime"}


def event(category: str, name: str, ts: Any, dur: Any, pid: Any = 10, tid: Any = 11, **args: Any) -> Event:  # noqa: PLR0917
    """A complete event; underscores in the names of arguments stand for spaces."""
    given = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": given}


def kernel(ts: Any, dur: Any, correlation: int, name: str = "gemm", **args: Any) -> Event:
    """A kernel on device 0, stream 7."""
    return event("kernel", name, ts, dur, 0, 7, **{"device": 0, "stream": 7, "correlation": correlation, **args})


def launch(ts: Any, correlation: int, name: str = "cudaLaunchKernel", **changes: Any) -> Event:
    """Its launch, of a microsecond."""
    return event("cuda_runtime", name, ts, 1, correlation=correlation) | changes


def read(events: Any, folder: Path) -> TraceTable:
    """The table of these events, of a trace object, or of its text."""
    path = folder / "trace.json"
    trace = {"traceEvents": events} if isinstance(events, list) else events
    path.write_text(trace if isinstance(trace, str) else json.dumps(trace))
    return read_trace(path)


def refused(events: Any, folder: Path) -> str:
    """The one line that says why."""
    with pytest.raises(InputError) as error:
        read(events, folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def times(table: TraceTable, work: pl.DataFrame | None = None) -> list[tuple[int, int]]:
    """Start and duration of the work, or of some of it."""
    return (table.work if work is None else work).select("start_ns", "duration_ns").rows()


def test_values_are_kept_of_operators_whose_work_depends_on_them(tmp_path: Path):
    """Of all others they would be as many texts as there are calls."""
    values = {"Concrete_Inputs": ["", "[2, 2]", "False"]}
    names = ["aten::conv2d", "aten::_flash_attention_forward", "flash_attn::_flash_attn_backward", "aten::add"]
    events = [event("cpu_op", name, start, 1, **values) for start, name in enumerate(names)]
    events += [{**event("cpu_op", "", 9, 1, **values), "name": 7}, event("cpu_op", "aten::conv3d", 10, 1)]
    kept = read(events, tmp_path).operators["values"].to_list()
    assert kept == ['["", "[2, 2]", "False"]'] * 3 + [None] * 3


@pytest.mark.parametrize("spelling", ["new", "old", "list"])
def test_spellings_of_all_versions(tmp_path: Path, spelling: str):
    names = OLD if spelling == "old" else NEW
    external = "external_id" if spelling == "old" else "External_id"
    dims = "Input_dims" if spelling == "old" else "Input_Dims"
    forward = "Fwd_thread_ID" if spelling == "old" else "Fwd_thread_id"
    events = [
        event(names["operator"], "aten::mm", 100.5, 20.25, **{external: 3, "Sequence_number": 9, dims: [[2, 3]]}),
        event(names["operator"], "MmBackward0", 200, 9, tid=12, **{external: 4, "Sequence_number": 9, forward: 1}),
        event(names["call"], "cudaLaunchKernel", 105, 2, **{external: 3, "correlation": 77}),
        event(names["kernel"], "gemm", 130, 40, 0, 7, **{external: 3, "correlation": 77, "device": 0, "stream": 7}),
        event(names["operator"], "ProfilerStep#3", 90, 500),
        {"ph": "s", "cat": "fwdbwd", "id": 1, "pid": 10, "tid": 11, "ts": 100.5, "name": "fwdbwd"},
        {"ph": "f", "cat": "forward_backward", "id": 1, "pid": 10, "tid": 12, "ts": 200, "name": "fwdbwd", "bp": "e"},
        {"ph": "i", "s": "t", "name": "[memory]", "pid": 10, "tid": 11, "ts": 100, "args": {"Bytes": 512}},
        {"ph": "M", "name": "process_name", "pid": 10, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "python_function", "name": "f", "pid": 10, "tid": 11, "ts": 1, "dur": 2},
    ]
    trace = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": events, "pytorch_version": "2.11"}
    table = read(json.dumps(events) if spelling == "list" else trace, tmp_path)
    assert table.work.drop(list(DETAIL_SCHEMA)).rows(named=True) == [
        {
            "start_ns": 130_000, "duration_ns": 40_000, "device": 0, "stream": 7, "kind": "kernel", "name": "gemm",
            "process": 10, "correlation": 77, "external": 3, "graph_node": None,
            "launch_row": 0, "launch_ns": 105_000, "launch_thread": 11,
        }
    ]  # fmt: skip
    assert table.calls.row(0) == (105_000, 2_000, 10, 11, "cudaLaunchKernel", 77, 3)
    assert table.operators.rows() == [
        (100_500, 20_250, 10, 11, "aten::mm", 3, 9, None, "[[2, 3]]", None, None),
        (200_000, 9_000, 10, 12, "MmBackward0", 4, 9, 1, None, None, None),
    ]
    assert table.ranges.rows() == [(90_000, 500_000, 10, 11, "ProfilerStep#3", True)]
    assert sorted(table.links.rows()) == [(1, 100_500, 10, 11, True), (1, 200_000, 10, 12, False)]
    assert sum(table.other.values()) == 3
    if spelling != "list":
        assert (table.devices, table.recorder) == ({0: "NVIDIA H200"}, "pytorch 2.11")


def test_amd(tmp_path: Path):
    gemm = "Cijk_Ailk_Bljk_SB_MT128x64x16_MI32x32x1x2_SN_1LDSB0"
    table = read(
        [
            event("hip_runtime", "hipExtModuleLaunchKernel", 10, 2, correlation=1),
            event("hip_runtime", "hipLaunchKernel", 14, 2, correlation=2),
            event("hip_runtime", "hipMemcpyWithStream", 18, 2, correlation=3),
            event("hip_runtime", "hipMemsetAsync", 22, 2, correlation=4),
            kernel(30, 5, 1, gemm, device=8, stream=0),
            event("concurrent_kernel", "void at::native::add()", 40, 6, 8, 0, device=8, stream=0, correlation=2),
            event("gpu_memcpy", "Memcpy HtoD (Host -> Device)", 50, 7, 8, 0, device=8, stream=0, correlation=3),
            event("gpu_memset", "Memset (Device)", 60, 8, 8, 0, device=8, stream=0, correlation=4),
        ],
        tmp_path,
    )
    assert table.work.select("device", "kind", "launch_ns").rows() == [
        (8, "kernel", 10_000), (8, "kernel", 14_000), (8, "memcpy", 18_000), (8, "memset", 22_000),
    ]  # fmt: skip


def test_what_is_told_of_kernels_and_copies(tmp_path: Path):
    """A damaged count is null: no time depends on it."""
    told = {"grid": [512, 1, 1], "block": [64, 2, 1], "registers per thread": 40, "est. achieved occupancy %": 75}
    odd: dict[str, Any] = {"grid": "wide", "registers per thread": 2**40}
    copy = event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 90, 5, 0, 7, bytes=4096)
    table = read(
        [
            launch(10, 1), kernel(30, 5, 1, **told),
            launch(11, 2), kernel(40, 5, 2, **{**told, "registers per thread": -1, "est. achieved occupancy %": 7.5}),
            launch(12, 3), kernel(50, 5, 3, **odd),
            copy, copy | {"args": {"bytes": 2**70}}, copy | {"args": {"bytes": "many"}},
        ],
        tmp_path,
    )  # fmt: skip
    assert table.work.select("bytes", "grid", "block", "registers", "occupancy").rows() == [
        (None, "[512, 1, 1]", "[64, 2, 1]", 40, 75.0),
        (None, "[512, 1, 1]", "[64, 2, 1]", None, 7.5),
        (None, '"wide"', None, None, None),
        (4096, None, None, None, None),
        (None, None, None, None, None),
        (None, None, None, None, None),
    ]


US = 1_000
EPOCH_US = 1_790_000_000_000_000


@pytest.mark.parametrize(
    ("ts", "dur", "start_ns", "duration_ns"),
    [
        ("100.123", "0.5", 100_123, 500),
        ("100", "7", 100_000, 7_000),
        ("100.0", "7", 100_000, 7_000),
        ("100", "7.25", 100_000, 7_250),
        ("4369072241868.274", "2674.887", 4_369_072_241_868_274, 2_674_887),
        ("8796093022207.999", "1", 8_796_093_022_207_999, 1_000),
        (f"{EPOCH_US}.123", "0.001", EPOCH_US * US + 123, 1),
        (f"{EPOCH_US}.999", "12.345", EPOCH_US * US + 999, 12_345),
        (f"{EPOCH_US}", "12", EPOCH_US * US, 12_000),
        (f"{EPOCH_US * US + 7}", "1234", EPOCH_US * US + 7, 1234),
        (f"{EPOCH_US * US + 7}", "1234.0", EPOCH_US * US + 7, 1234),
        ('"100.123"', '"2"', 100_123, 2_000),
        (f'"{EPOCH_US}.123"', '"1.5"', EPOCH_US * US + 123, 1_500),
        ("-5.5", "1", -5_500, 1_000),
        ("1e3", "1e-3", 1_000_000, 1),
        ("100", "0", 100_000, 0),
        ("100.5", "null", 100_500, 0),
        (f"{EPOCH_US}.5", "null", EPOCH_US * US + 500, 0),
    ],
)
def test_times_are_exact(tmp_path: Path, ts: str, dur: str, start_ns: int, duration_ns: int):
    text = json.dumps([kernel("TS", "DUR", 1), launch("TS", 1)]).replace('"TS"', ts).replace('"DUR"', dur)
    table = read(text, tmp_path)
    assert times(table) == [(start_ns, duration_ns)]
    assert table.work["launch_ns"].item() == start_ns


@given(st.lists(st.tuples(st.integers(-(10**12), 2**43 * 1000 - 1), st.integers(0, 10**10)), min_size=1, max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_decimals_of_a_clock_are_exact(tmp_path: Path, spans: list[tuple[int, int]]):
    """As Kineto writes them, `%d.%03d`, and as JavaScript does, with no decimals where there are none to say."""
    events = [kernel(f"<{start}>", f"<{duration}>", 1) for start, duration in spans]
    for pattern in ("{:.3f}", "{:f}"):
        text = json.dumps(events)
        for span in spans:
            for value in span:
                written = Decimal(value) / 1000
                text = text.replace(f'"<{value}>"', pattern.format(written if "3" in pattern else written.normalize()))
        assert times(read(text, tmp_path)) == spans


def test_integers_and_decimals_mixed(tmp_path: Path):
    """JavaScript writes 100.0 as 100."""
    table = read([kernel(1, 2, 1), kernel(10.5, 3, 2), kernel(20, 0.25, 3), launch(1, 3)], tmp_path)
    assert times(table) == [(1_000, 2_000), (10_500, 3_000), (20_000, 250)]


def test_missing_durations_are_none(tmp_path: Path):
    events = [kernel(1.5, 2.5, 1), kernel(10.5, 3.5, 2), kernel(EPOCH_US + 0.5, 1.5, 3)]
    for row in events[1:]:
        del row["dur"]
    assert [duration for _, duration in times(read(events[:2], tmp_path))] == [2_500, 0]
    assert [duration for _, duration in times(read(events, tmp_path))] == [2_500, 0, 0]
    assert [duration for _, duration in times(read(events[1:], tmp_path))] == [0, 0]


@pytest.mark.parametrize("strange", [{"correlation": "abc"}, {"correlation": [1]}, {"stream": {"a": 1}}, 5, None, "x"])
@pytest.mark.parametrize("ts", [100, 100.5, EPOCH_US + 0.5])
def test_strange_arguments_cost_only_themselves(tmp_path: Path, strange: Any, ts: float):
    """Whatever clock: the events around keep their ids, even those written as text."""
    odd = kernel(ts, 2, 0) | {"args": strange}
    table = read([kernel(ts, 2, 1), odd, kernel(ts, 4, 3) | {"args": {"correlation": "3"}}, launch(ts, 3)], tmp_path)
    assert table.work["duration_ns"].to_list() == [2_000, 2_000, 4_000]
    assert table.work["correlation"].to_list() == [1, None, 3]
    assert table.work["launch_ns"].is_not_null().to_list() == [False, False, True]


@pytest.mark.parametrize("changes", [{"dur": -1}, {"dur": -0.5}, {"ts": EPOCH_US + 0.25, "dur": -0.5}])
def test_a_negative_duration_is_counted_and_none(tmp_path: Path, changes: dict[str, Any]):
    table = read([kernel(1, 2, 1), kernel(3, 4, 2) | changes, launch(1, 2)], tmp_path)
    assert table.work["duration_ns"].to_list() == [2_000, 0]
    assert table.damage.backwards == {"kernels, copies and fills": 1}


@pytest.mark.parametrize(
    "changes",
    [
        *({"ts": ts} for ts in (None, float("nan"), float("inf"), "NaN", "noon", "1e999999999", [1], True, {"a": 1})),
        *({"ts": ts} for ts in (10**30, -(10**30), 1e300, 2**63, 5 * 10**18, EPOCH_US + 0.5, EPOCH_US * US)),
        *({"dur": dur} for dur in ("NaN", "noon", "1e999999999", 2**62, 1e17, [2], 10**30)),
        {"ts": EPOCH_US + 0.5, "dur": "1e999999999"},
    ],
)
@pytest.mark.parametrize("clock_us", [0, 0.5, EPOCH_US, EPOCH_US + 0.5])
def test_a_time_that_is_none_costs_its_own_event_alone(tmp_path: Path, changes: dict[str, Any], clock_us: float):
    """One in ten, on several clocks: the others keep their times to the nanosecond, and it stands at its launch."""
    exact = round(clock_us * 2) * US // 2
    good = [kernel(clock_us + 10 * n, 2, n) for n in range(1, 10)]
    calls = [launch(clock_us + 10 * n - 3, n) for n in range(1, 11)]
    table = read([*good[:4], kernel(clock_us + 100, 4, 10, "the odd one") | changes, *good[4:], *calls], tmp_path)
    assert table.work.height == 10
    odd = table.work.filter(pl.col("name").cast(pl.String) == "the odd one")
    others = table.work.filter(pl.col("name").cast(pl.String) != "the odd one")
    assert times(table, others) == [(exact + 10 * US * n, 2 * US) for n in range(1, 10)]
    is_epoch = changes.get("ts") == EPOCH_US + 0.5 and clock_us >= EPOCH_US
    if "ts" in changes and not is_epoch:
        assert odd["start_ns"].item() == odd["launch_ns"].item() == exact + 97 * US
        assert table.damage.untimed == {"kernels, copies and fills": 1}
    if "dur" in changes:
        assert odd["duration_ns"].item() == 0 and table.damage.endless == {"kernels, copies and fills": 1}


@pytest.mark.parametrize("unit", [1, 1000])
def test_names_of_processes_at_0_do_not_tell_the_unit(tmp_path: Path, unit: int):
    """Times in nanoseconds behind more names of processes, whose time is 0, than there are kernels."""
    names = [{"ph": "M", "name": "process_name", "pid": n, "tid": 0, "ts": 0, "args": {"name": "p"}} for n in range(9)]
    base = EPOCH_US * 1000 // unit
    kernels = [kernel(base + 10_000 * n // unit, 2000 // unit, n) for n in range(1, 4)]
    table = read([*names, *kernels, *(launch(base, n) for n in range(1, 4))], tmp_path)
    assert times(table) == [(EPOCH_US * US + 10_000 * n, 2_000) for n in range(1, 4)]


def test_host_rows_without_a_time_are_left_out_and_counted(tmp_path: Path):
    events = [kernel(10 * n, 2, n) for n in range(1, 6)] + [launch(10 * n - 3, n) for n in range(1, 6)]
    odd = [
        launch(2**63, 9),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 10, "tid": 1, "ts": None, "dur": 1},
    ]
    table = read([*events, *odd], tmp_path)
    assert (table.calls.height, table.operators.height) == (5, 0)
    assert table.damage.untimed == {"calls": 1, "operators": 1}


@pytest.mark.parametrize(
    "odd", [5, None, "x", {"name": ["x"]}, {"args": {"correlation": 2**70}}, {"ph": 3}, {"cat": 1}]
)
def test_an_event_of_strange_types_costs_itself_alone(tmp_path: Path, odd: Any):
    event = kernel(3, 4, 2, "odd") | odd if isinstance(odd, dict) else odd
    table = read([kernel(1, 2, 1), event, launch(0.5, 1)], tmp_path)
    assert times(table)[0] == (1_000, 2_000) and table.work["launch_ns"][0] == 500


def test_an_event_that_is_damaged_changes_no_others_text(tmp_path: Path):
    events = [dict(one) for one in kineto_trace(training_steps())["traceEvents"]]
    damaged = next(one for one in events if one.get("cat") == "user_annotation")
    right = read(events, tmp_path).operators["shapes"].unique().sort()
    damaged |= {"args": -3}
    for more in ([], [{"ph": "M", "name": "labels"}]):
        assert read([*events, *more], tmp_path).operators["shapes"].unique().sort().equals(right)


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_events_of_the_usual_layout_are_read_as_any_others(tmp_path: Path, data: st.DataObject):
    """Events that are decoded as their category's type, and the same ones beside one without a category."""
    events = kineto_trace(training_steps())["traceEvents"]
    begin = data.draw(st.integers(0, len(events) - 40))
    chosen = [dict(one) for one in events[begin : begin + data.draw(st.integers(30, 200))] if one["ph"] != "M"]
    for place in data.draw(st.lists(st.integers(0, len(chosen) - 1), max_size=3)):
        key = data.draw(st.sampled_from(sorted(chosen[place].keys() - {"ph", "cat"})))
        changed = data.draw(st.sampled_from([None, -3, -2.5, 1e30, 2**63, "7", "x", 7.0, [], {}]))
        chosen[place] |= {key: changed}
    usual, any_other = ([*chosen, kernel(5, 2, 1)], [*chosen, kernel(5, 2, 1), {"ph": "M", "name": "labels"}])
    frames = ("work", "calls", "ranges", "operators", "links", "collectives", "counters")
    one, other = read(usual, tmp_path), read(any_other, tmp_path)
    assert all(getattr(one, name).equals(getattr(other, name)) for name in frames)
    assert one.damage == other.damage and one.threads == other.threads


def test_processes_numbered_beyond_63_bits_stay_apart(tmp_path: Path):
    pids = [2**63 + 5, 2**64 - 1, 7]
    table = read([*(launch(1, n, pid=pid) for n, pid in enumerate(pids, 1)), kernel(3, 4, 3)], tmp_path)
    assert table.calls["process"].n_unique() == 3


def test_a_process_is_the_same_as_number_and_as_text(tmp_path: Path):
    calls = [launch(1, 1, pid=123), launch(11, 2, pid="123"), launch(21, 3, pid=123.0)]
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": "123", "tid": "1", "ts": 0, "dur": 9}
    table = read([*calls, operator, *(kernel(10 * n, 2, n) | {"pid": "0", "tid": "7"} for n in (1, 2, 3))], tmp_path)
    assert table.calls["process"].to_list() == [123] * 3
    assert table.operators.select("process", "thread").row(0) == (123, 1)
    assert table.work["launch_ns"].null_count() == 0 and table.work["device"].to_list() == [0] * 3


@pytest.mark.parametrize("base", [2**44, 2**44 * 3, 2**60, -(2**44), 2**63])
def test_large_correlation_ids_are_not_mixed_up(tmp_path: Path, base: int):
    """Ids that are equal but for a multiple of a power of two: each kernel is of its own launch."""
    ids = [5, base + 5, 2 * base + 5] if base < 2**62 else [5, base + 5]
    events = [launch(10 * n, one) for n, one in enumerate(ids, 1)]
    events += [kernel(10 * n + 4, 2, one) for n, one in enumerate(ids, 1)]
    table = read(events, tmp_path)
    assert (table.work["start_ns"] - table.work["launch_ns"]).to_list() == [4_000] * len(ids)


@pytest.mark.parametrize("integers", [1, 1000, 1500])
def test_decimals_after_many_integers_are_exact(tmp_path: Path, integers: int):
    events = [kernel(EPOCH_US + n, 1, n) for n in range(1, integers + 1)]
    late = EPOCH_US + 10_000
    text = json.dumps([*events, kernel("TS", 1, 5000)]).replace('"TS"', f"{late}.123")
    assert times(read(text, tmp_path))[-1] == (late * US + 123, US)


def test_durations_longer_than_any_capture_count_nothing(tmp_path: Path):
    long = 2**61 // 1000
    table = read([kernel(1, long, 1), kernel(1, long, 2), kernel(1, 3, 3)], tmp_path)
    assert table.work["duration_ns"].to_list() == [0, 0, 3_000]
    assert table.damage.endless == {"kernels, copies and fills": 2}


def test_processes_and_threads_named_by_words(tmp_path: Path):
    events = [
        launch(1, 5, pid="rank 0", tid="main"),
        launch(2, 6, pid="rank 0", tid="autograd"),
        event("cpu_op", "aten::mm", 1, 1, "rank 0", "main"),
        kernel(10, 1, 5),
        kernel(12, 1, 6, device=None, stream=None) | {"pid": "GPU 0", "tid": "stream 7"},
    ]
    table = read(events, tmp_path)
    assert table.work["launch_ns"].to_list() == [1_000, 2_000]
    assert table.work["device"].to_list() == [0, -1]
    assert table.work["launch_thread"].n_unique() == 2
    assert table.operators["thread"].item() == table.work["launch_thread"][0]
    assert (table.calls["process"] < 0).all()


def test_kernels_without_launch_and_launches_without_kernel(tmp_path: Path):
    """[13, 15] Both are kept."""
    table = read([kernel(10, 1, 1), kernel(12, 2, 2), kernel(14, 4, 0), launch(1, 2), launch(3, 99)], tmp_path)
    assert table.work.select("duration_ns", "launch_ns").rows() == [(1_000, None), (2_000, 1_000), (4_000, None)]
    assert table.work["launch_row"].to_list() == [None, 0, None]
    assert table.calls.height == 2


def test_of_calls_with_one_id_the_launch_counts(tmp_path: Path):
    for calls in (["cudaStreamIsCapturing", "cudaLaunchKernel"], ["cuLaunchKernelEx", "cudaFuncGetAttributes"]):
        launching = next(number for number, name in enumerate(calls) if "Launch" in name)
        table = read([kernel(10, 1, 4), *(launch(1 + at, 4, name) for at, name in enumerate(calls))], tmp_path)
        assert table.work["launch_ns"].to_list() == [1_000 * (1 + launching)]
        assert table.work.height == 1


def test_a_graph_launch_owns_all_its_kernels(tmp_path: Path):
    """[14]"""
    nodes = [kernel(10 + node, 1, 8, graph_node_id=100 + node) for node in range(3)]
    table = read([*nodes, launch(5, 8, "cudaGraphLaunch")], tmp_path)
    assert table.work["launch_ns"].to_list() == [5_000] * 3
    assert table.work["graph_node"].to_list() == [100, 101, 102]


@pytest.mark.parametrize("behind", [0, 3, 40])
@pytest.mark.parametrize("pids", [(10, 20), ("rank 0", "rank 1")])
def test_merged_ranks_with_the_same_ids(tmp_path: Path, behind: int, pids: tuple[Any, Any]):
    """[12] Every kernel is launched once, by the process of its own device, however far one rank lags."""
    events = []
    for rank, pid in enumerate(pids):
        for number in range(1, 21):
            at = 100 * number + rank * behind
            events.append(launch(at, number, pid=pid))
            events.append(kernel(at + 60, 10, number, device=rank, External_id=number) | {"pid": rank})
    for order in (events, events[::-1], sorted(events, key=lambda row: row["ts"])):
        table = read(order, tmp_path)
        assert table.work.height == 40
        assert ((table.work["start_ns"] - table.work["launch_ns"]) == 60_000).all()
        assert table.work.select("device", "process").n_unique() == 2


def test_one_process_with_two_devices_beside_an_idle_one(tmp_path: Path):
    events = [launch(10 * number, number) for number in range(1, 11)]
    events += [kernel(10 * number + 5, 1, number, device=number % 2) for number in range(1, 11)]
    events += [launch(1, 3, "cudaGetDeviceCount", pid=99)]
    table = read(events, tmp_path)
    assert (table.work["launch_ns"] == table.work["start_ns"] - 5_000).all()
    assert table.work["process"].unique().to_list() == [10]


def test_in_a_cpu_trace_own_times_make_up_the_operators(tmp_path: Path):
    trace = kineto_trace(training_steps())
    trace["traceEvents"] = [row for row in trace["traceEvents"] if row.get("cat") not in ("kernel", "gpu_memcpy")]
    table = read(trace, tmp_path)
    assert table.on_cpu
    assert table.work.height == table.operators.height
    operators = table.operators.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    top = 0
    for thread in (MAIN, AUTOGRAD):
        rows = operators.filter(pl.col("thread") == thread).sort("start_ns", "duration_ns", descending=[False, True])
        reached = 0
        for row in rows.iter_rows(named=True):
            if row["start_ns"] >= reached:
                top += row["duration_ns"]
                reached = row["end_ns"]
    assert int(table.work["duration_ns"].sum()) == top
    # aten::linear 10..90 holds aten::addmm 20..80, which ends before aten::exp begins.
    linear = table.work.filter(pl.col("name").cast(pl.String) == "aten::linear")
    assert linear["duration_ns"].unique().to_list() == [20]
    assert table.work["process"].unique().to_list() == [PROCESS]


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "process_name", "pid": 1}], [{}], [{"ph": "X"}]])
def test_a_trace_of_nothing_is_refused(tmp_path: Path, events: list[Event]):
    assert "none of kernels or operators" in refused(events, tmp_path)


def test_hostile_names_stay_names(tmp_path: Path):
    names = ["", "\x1b[2J\n", "x" * 100_000, "<script>", "\u202e", "{}", "%s"]
    table = read([kernel(1, 1, 1, name) for name in names] + [kernel(1, 1, 1) | {"name": None}], tmp_path)
    assert table.work["name"].to_list()[:-1] == names
    assert read([kernel(1, 1, 1) | {"name": 12}], tmp_path).work["name"].to_list() == ["12"]


def test_counters_of_memory_and_of_copies(tmp_path: Path):
    """Figures that do not fit 64 bits, or are missing, cost only themselves."""
    at = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 5, "tid": 5, "s": "t"}
    said = {"Total Allocated": 700, "Total Reserved": 900, "Device Id": 0, "Device Type": 1}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 7}
    events = [
        launch(1, 2),
        at | {"ts": 1, "args": said},
        at | {"ts": 2, "args": said | {"Total Allocated": 8, "Device Id": -1}},
        at | {"ts": 3, "args": {"Total Allocated": 2**70}},
        at | {"ts": 4},
        at | {"ts": 5, "name": "another instant"},
        copy | {"ts": 10, "dur": 2, "args": {"device": 0, "bytes": 4000}},
        copy | {"ts": 11, "dur": 2, "args": {"device": 0, "bytes": 2000}},
        copy | {"ts": 12, "dur": 2, "args": {"device": 0, "bytes": 2**70}},
    ]
    table = read(events, tmp_path)
    assert table.work.height == 3 and table.other == {"cpu_instant_event": 1}
    by_name = {
        (name, device): values.sort("start_ns").select("start_ns", "value").rows()
        for (name, device), values in table.counters.group_by(pl.col("name").cast(pl.String), "device")
    }
    assert by_name == {
        ("bytes allocated", 0): [(1000, 700)],
        ("bytes reserved", 0): [(1000, 900)],
        ("bytes allocated", -1): [(2000, 8)],
        ("bytes reserved", -1): [(2000, 900)],
        ("copy bandwidth, bytes/s", 0): [
            (10_000, 2_000_000_000), (11_000, 3_000_000_000), (12_000, 1_000_000_000), (13_000, 0),
        ],
    }  # fmt: skip


def _linked_by(how: str, *, operators: bool = True) -> list[Event]:
    """Six kernels, two of each operator, whose rows say of their launches only what `how` says."""
    rows: list[Event] = []
    for n in range(3):
        at = 100 * n + 1
        if operators:
            rows.append(event("cpu_op", "aten::mm", at, 50, External_id=900 + n))
        for k in range(2):
            one, call_at, start = 10 * n + k + 1, at + 5 + 10 * k, at + 60 + 10 * k
            ids: dict[str, Any] = {"External_id": 900 + n} if how == "external" else {}
            if how == "own external":
                ids = {"External_id": one}
            given = {"correlation": one} if how == "calls' correlation" else ids
            if how != "operators":
                rows.append(event("cuda_runtime", "cudaLaunchKernel", call_at, 3, **given))
                rows.append(event("cuda_runtime", "cudaGetDevice", call_at, 0, **given))
            else:
                ids = {"External_id": 900 + n}
            rows.append(event("kernel", "gemm", start, 8, 0, "stream 7" if k else 7, device=0, stream=7, **ids))
            if how in ("arrows", "arrows within", "calls' correlation", "old arrows", "arrows without calls"):
                category = {"old arrows": "async", "arrows within": "AC2G"}.get(how, "ac2g")
                within = how == "arrows within"
                arrow = {"cat": category, "name": category, "id": str(one) if k else one}
                rows.append({"ph": "s", "pid": 10, "tid": 11, "ts": call_at + within, **arrow})
                stream = "stream 7" if how == "old arrows" else 7
                rows.append({"ph": "f", "pid": 0, "tid": stream, "ts": start + 5 * within, "bp": "e", **arrow})
    if how == "arrows without calls":
        rows = [row for row in rows if row["cat"] != "cuda_runtime"]
    return rows


@pytest.mark.parametrize(
    "how",
    [
        "arrows",
        "arrows within",
        "old arrows",
        "calls' correlation",
        "arrows without calls",
        "external",
        "own external",
        "operators",
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_launches_that_no_correlation_id_tells(tmp_path: Path, how: str, backwards: bool):
    """By arrows, by the external id of calls in turn, or by that of operators; each kernel is of its own operator."""
    events = _linked_by(how)
    table = read(events[::-1] if backwards else events, tmp_path)
    work = table.work.sort("start_ns")
    assert work.height == 6
    exact = [(100 * n + 1 + (0 if how == "operators" else 5 + 10 * k)) * US for n in range(3) for k in range(2)]
    assert work["launch_ns"].to_list() == exact
    assert work["launch_thread"].to_list() == [11] * 6 and work["process"].to_list() == [10] * 6
    if "without" not in how and how != "operators":
        assert table.calls["name"].gather(work["launch_row"]).unique().to_list() == ["cudaLaunchKernel"]
        assert work["launch_row"].n_unique() == 6
    else:
        assert work["launch_row"].null_count() == 6
