"""What is written for Perfetto: valid, complete, and drawn rightly."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stepscope.core.errors import InputError, printable
from stepscope.rendering.chrome_trace import Rank, lanes, write_perfetto
from stepscope.traces.captures.attribution import Attribution, attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.occupation import occupation
from stepscope.traces.table import COUNTER_SCHEMA
from tests.handmade_trace import GEMM, REDUCE, SOFTMAX, of_a_cpu, traced, work
from tests.public import public_capture

HOSTILE = 'ker"nel\\<é\x00\n\u2028{"ph":"B"}>'


def planted() -> Attribution:
    return traced(
        [
            work(10_000, 20_000, launch=1_000),
            work(15_000, 30_000, launch=2_000, stream=20, name=REDUCE),
            work(40_000, 50_001, launch=35_000, name=SOFTMAX),
            work(45_000, 60_000, launch=36_000, stream=8, name=SOFTMAX),
            work(70_000, 80_000, launch=65_000, name=HOSTILE),
        ],
        ranges=[
            ("step", 0, 90_000),
            ("forward", 500, 34_000),
            ("backward", 34_500, 70_000),
            ("blocks.0", 600, 1_500),
        ],
        devices={0: "NVIDIA H200"},
    )


def rank_of(attribution: Attribution, label: str = "") -> Rank:
    found = occupation(attribution)
    return Rank(label, attribution, found.gaps if found else None)


def written(captures: Attribution | list[Rank], out: Path, **others: Any) -> dict[str, list[dict]]:
    """The slices by title of their track."""
    ranks = [rank_of(captures)] if isinstance(captures, Attribution) else captures
    count = write_perfetto(ranks, out, **others)
    events = events_of(out)
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == count and {event["ph"] for event in events} <= {"X", "M", "C"}
    tracks: dict[str, list[dict]] = {}
    for event in slices:
        tracks.setdefault(f"{groups[event['pid']]} | {titles[event['pid'], event['tid']]}", []).append(event)
    assert all(laminar([(e["ts"], e["ts"] + e["dur"]) for e in track]) for track in tracks.values())
    return tracks


def events_of(out: Path) -> list[dict]:
    data = gzip.decompress(out.read_bytes()) if out.name.endswith(".gz") else out.read_bytes()
    return json.loads(data)["traceEvents"]


def counters(out: Path) -> dict[str, list[tuple[float, int]]]:
    """The values of each counter over time, by its process and name."""
    events = events_of(out)
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event["ph"] == "C":
            found.setdefault(f"{groups[event['pid']]} | {event['name']}", []).append(
                (event["ts"], event["args"]["value"])
            )
    return found


def laminar(intervals: Sequence[tuple[float, float]]) -> bool:
    """Whether any two are apart or one holds the other."""
    return not any(a[0] < b[0] < a[1] < b[1] for a in intervals for b in intervals)


def test_every_track_by_hand(tmp_path: Path):
    tracks = written(planted(), tmp_path / "out.json")
    gpu = "device 0: NVIDIA H200 | "
    assert {title: [(e["ts"], e["dur"], e["name"]) for e in track] for title, track in tracks.items()} == {
        f"{gpu}steps": [(10.0, 70.0, "step 0")],
        f"{gpu}idle, by cause": [(30.0, 10.0, "launch-bound"), (60.0, 10.0, "launch-bound")],
        f"{gpu}stream 7": [(10.0, 10.0, GEMM), (40.0, 10.001, SOFTMAX), (70.0, 10.0, printable(HOSTILE))],
        f"{gpu}stream 7: phases": [(10.0, 10.0, "forward"), (40.0, 40.0, "backward")],
        f"{gpu}stream 7: modules": [(10.0, 10.0, "blocks.0"), (40.0, 40.0, "(model)")],
        f"{gpu}stream 8": [(45.0, 15.0, SOFTMAX)],
        f"{gpu}stream 8: phases": [(45.0, 15.0, "backward")],
        f"{gpu}stream 8: modules": [(45.0, 15.0, "(model)")],
        f"{gpu}stream 20": [(15.0, 15.0, REDUCE)],
        f"{gpu}stream 20: phases": [(15.0, 15.0, "forward")],
        f"{gpu}stream 20: modules": [(15.0, 15.0, "(model)")],
        f"{gpu}matrix multiplication": [(10.0, 10.0, tracks[f"{gpu}matrix multiplication"][0]["name"])],
        f"{gpu}softmax, stream 7": [(40.0, 10.001, "softmax_warp_forward")],
        f"{gpu}softmax, stream 8": [(45.0, 15.0, "softmax_warp_forward")],
        f"{gpu}communication": [(15.0, 15.0, tracks[f"{gpu}communication"][0]["name"])],
        f"{gpu}other": [(70.0, 10.0, tracks[f"{gpu}other"][0]["name"])],
        "process 1 | thread 11: ranges": [
            (0.0, 90.0, "step"),
            (0.5, 33.5, "forward"),
            (0.6, 0.9, "blocks.0"),
            (34.5, 35.5, "backward"),
        ],
    }
    recorded = tracks[f"{gpu}stream 7"][0]["args"]
    assert recorded == {
        "phase": "forward", "role": "forward", "module": "blocks.0", "family": "matrix multiplication", "step": 0,
        "correlation": 1,
    }  # fmt: skip
    assert tracks[f"{gpu}idle, by cause"][0]["args"]["before"] == "softmax_warp_forward"


def test_times_are_exact_and_relative(tmp_path: Path):
    origin = 1_763_700_000_123_456_789
    rows = [
        work(origin, origin + 7, launch=origin),
        work(origin + 1_000_000_001, origin + 1_000_001_002, launch=origin),
    ]
    out = tmp_path / "out.json"
    tracks = written(traced(rows), out)
    assert [(e["ts"], e["dur"]) for e in tracks["device 0 | stream 7"]] == [(0.0, 0.007), (1_000_000.001, 1.001)]
    assert json.loads(out.read_text())["otherData"] == {"profiler": "Kineto", "origin_ns": origin}


def test_compressed_is_the_same(tmp_path: Path):
    plain = written(planted(), tmp_path / "out.json")
    assert written(planted(), tmp_path / "out.json.gz") == plain
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.json.gz"]


def test_overlapping_slices_go_on_in_another_lane(tmp_path: Path):
    """Programmatic dependent launch, or a graph's branches: kernels overlap on one stream."""
    tracks = written(traced([work(0, 10, launch=0), work(8, 20, launch=0), work(15, 30, launch=0)]), tmp_path / "out")
    assert [e["ts"] for e in tracks["device 0 | stream 7"]] == [0.0, 0.015]
    assert [e["ts"] for e in tracks["device 0 | stream 7 (2)"]] == [0.008]


def test_a_cpu_trace_has_its_operators(tmp_path: Path):
    on_cpu = of_a_cpu((0, 10, 1, 11, "aten::linear"), (2, 5, 1, 11, "aten::mm"))
    tracks = written(on_cpu, tmp_path / "out.json")
    assert {title: [e["name"] for e in track] for title, track in tracks.items()} == {
        "process 1 | thread 11: operators": ["aten::linear", "aten::mm"]
    }


def test_an_empty_capture_is_valid_json(tmp_path: Path):
    assert written(traced([]), tmp_path / "out.json") == {}


def test_the_capture_is_never_overwritten(tmp_path: Path):
    capture, link = tmp_path / "trace.kineto.json.gz", tmp_path / "link"
    capture.write_text("precious")
    link.symlink_to(capture)
    for out, source in ((capture, capture), (link, capture), (capture, link), (capture, tmp_path)):
        with pytest.raises(InputError, match="it is the capture itself; name another file"):
            write_perfetto([rank_of(planted())], out, sources=[source])
    assert capture.read_text() == "precious" and link.is_symlink()
    write_perfetto([rank_of(planted())], tmp_path / "other.json", sources=[tmp_path])


def test_what_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for out in (tmp_path, Path("/dev/null"), tmp_path / "missing" / "out.json", tmp_path / ("n" * 300)):
        with pytest.raises(InputError, match="cannot write"):
            write_perfetto([rank_of(planted())], out)
    (tmp_path / "out.json").write_text("older")
    monkeypatch.setattr("stepscope.rendering.chrome_trace._text", _disk_full)
    with pytest.raises(InputError, match="No space left"):
        write_perfetto([rank_of(planted())], tmp_path / "out.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.json", "older")]


def _disk_full(*_: object) -> bytes:
    raise OSError(28, "No space left on device")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=30))
def test_lanes_hold_every_slice_once_and_nest(intervals: list[tuple[int, int]]):
    slices = pl.DataFrame(
        [(start, length, number) for number, (start, length) in enumerate(intervals)],
        schema={"start_ns": pl.Int64, "duration_ns": pl.Int64, "number": pl.Int64},
        orient="row",
    )
    dealt = lanes(slices)
    assert sorted(n for lane in dealt for n in lane["number"].to_list()) == list(range(len(intervals)))
    for lane in dealt:
        assert laminar([(s, s + d) for s, d in lane.select("start_ns", "duration_ns").iter_rows()])
    whole = [(start, start + length) for start, length in intervals]
    assert len(dealt) == (0 if not whole else 1) or not laminar(whole)


@given(st.text(max_size=20))
def test_any_name_comes_back_as_it_may_be_shown(tmp_path_factory: pytest.TempPathFactory, name: str):
    out = tmp_path_factory.mktemp("any") / "out.json"
    write_perfetto([rank_of(traced([work(0, 5, launch=0, name=name)], ranges=[(name, 0, 9)]))], out)
    names = [e["name"] for e in events_of(out) if e["ph"] == "X"]
    assert names.count(printable(name)) >= 2
    assert all(each.isprintable() for each in names)


def test_what_waits_for_the_device_is_counted(tmp_path: Path):
    """Two are launched before the first starts; a launch that is later than its kernel says nothing."""
    rows = [
        work(10, 20, launch=1),
        work(20, 30, launch=2),
        work(40, 50, launch=35, device=1),
        work(60, 61, launch=70),
        work(80, 90, launch=75, kind="memcpy"),
    ]
    written(traced(rows), tmp_path / "out.json")
    assert counters(tmp_path / "out.json") == {
        "device 0 | kernels launched, not started": [(0.0, 1), (0.001, 2), (0.009, 1), (0.019, 0)],
        "device 1 | kernels launched, not started": [(0.034, 1), (0.039, 0)],
    }


def test_recorded_counters_stand_beside_their_device(tmp_path: Path):
    recorded = pl.DataFrame(
        [(5, 1, 0, "bytes allocated", 100), (7, 1, 0, "bytes allocated", 50), (5, 1, -1, "bytes allocated", 8)],
        schema=COUNTER_SCHEMA,
        orient="row",
    )
    planted_one = traced([work(5, 10)], devices={0: "NVIDIA H200"})
    with_counters = replace(planted_one, table=replace(planted_one.table, counters=recorded))
    written(with_counters, tmp_path / "out.json")
    assert counters(tmp_path / "out.json") == {
        "device 0: NVIDIA H200 | bytes allocated": [(0.0, 100), (0.002, 50)],
        "process 1 | bytes allocated": [(0.0, 8)],
    }


def test_ranks_stand_beside_each_other_on_one_clock(tmp_path: Path):
    first, second = (traced([work(at, at + 5, launch=at - 3)], ranges=[("forward", at - 4, at)]) for at in (104, 204))
    tracks = written([rank_of(first, "rank 0"), rank_of(second, "rank 1")], tmp_path / "out.json")
    begins = {title: track[0]["ts"] for title, track in tracks.items()}
    assert begins["rank 0: device 0 | stream 7"] == 0.004 and begins["rank 1: device 0 | stream 7"] == 0.104
    assert begins["rank 0: process 1 | thread 11: ranges"] == 0.0
    assert begins["rank 1: process 1 | thread 11: ranges"] == 0.1
    assert set(counters(tmp_path / "out.json")) == {
        f"rank {rank}: device 0 | kernels launched, not started" for rank in (0, 1)
    }


@pytest.mark.parametrize("name", ["tracelens_h100_qwen.json.gz", "nsys_ai_h100_2gpu_1s.sqlite.gz"])
def test_a_published_capture_is_exported_whole(tmp_path: Path, name: str):
    attribution = attribute(read_trace(public_capture(name)))
    tracks = written(attribution, tmp_path / "out.json.gz")
    recorded = [event for track in tracks.values() for event in track if event["cat"] == "work"]
    assert len(recorded) == attribution.work.height
    titles = {title.rpartition(" | ")[2] for title in counters(tmp_path / "out.json.gz")}
    memory = {"bytes allocated", "bytes reserved"} if name.startswith("tracelens") else set()
    assert titles == {"kernels launched, not started", "copy bandwidth, bytes/s", *memory}
