"""`stepscope memory`: its contract in JSON, its text, and one clear line for what it cannot read."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.recording_allocator import MIB, RecordingAllocator

from stepscope.core.run_directory import create_run_directory, save_run
from tests.command import Done, stepscope
from tests.conftest import make_run, mini
from tests.handmade_snapshot import START_US, handmade
from tests.shown import check_golden

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[2] / "golden" / "memory.txt"
Content = dict[str, Any]


def memory(*arguments: object, cwd: Path | None = None) -> Done:
    return stepscope("memory", *arguments, cwd=cwd)


def spoken(path: Path, *options: object) -> dict[str, Any]:
    done = memory(path, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_contract(tmp_path: Path):
    said = spoken(handmade().write(tmp_path / "s.pickle"))
    assert list(said)[:5] == ["peak_bytes", "peak_time_us", "allocations", "largest", "categories"]
    assert said["peak_bytes"] == 25 * MIB + 4096 == sum(said["categories"].values())
    assert said["peak_time_us"] == 50 and said["start_time_us"] == START_US + 10
    assert said["allocations"] == 7 and said["alive"] == 10
    assert said["categories"] == {
        "parameters": 4 * MIB, "gradients": 0, "optimizer state": 8 * MIB, "saved for backward": 10 * MIB - 200,
        "cast copies": 0, "inputs": 4096, "temporaries": 3 * MIB, "workspaces": 0, "rounding": 200,
    }  # fmt: skip
    largest = said["largest"][0]
    assert (largest["bytes"], largest["requested_bytes"]) == (5 * MIB, 5 * MIB - 100)
    assert largest["site"] == "me/model.py:12 forward"
    assert largest["frames"][0] == "/home/me/model.py:12 forward" and len(largest["frames"]) == 3
    assert largest["tensor"] == {"name": "result", "shape": [5, 7], "dtype": "float32", "operator": "Exp"}
    assert [one["bytes"] for one in said["largest"]] == sorted((one["bytes"] for one in said["largest"]), reverse=True)
    held = said["reserved"]
    parts = ("allocated_bytes", "awaiting_free_bytes", "cached_bytes", "fragmented_bytes")
    assert held["reserved_bytes"] == sum(held[part] for part in parts) == said["reserved_peak_bytes"]
    assert said["measured"]["forward_peak"] == said["peak_bytes"]
    assert said["exact"] is True and said["by_notes"] is True


def test_another_moment_has_the_same_shape(tmp_path: Path):
    path = handmade().write(tmp_path / "s.pickle")
    peak, backward = spoken(path), spoken(path, "--at", "backward")
    assert list(peak) == list(backward)
    assert backward["moment"] == "the peak of backward" and backward["peak_time_us"] == 200
    assert spoken(path, "--at", "0.05ms")["peak_bytes"] == peak["peak_bytes"]


def test_the_stacks_of_the_largest_allocations(tmp_path: Path):
    path = handmade().write(tmp_path / "s.pickle")
    done = memory(path, "--stacks", "1")
    assert done.returncode == 0, done.stderr
    _, _, after = done.stdout.partition("Stack 1: result of Exp 5 x 7 float32\n")
    head, rule, *frames = after.splitlines()[:5]
    assert head.strip() == "5.00 MiB, saved for backward: called from" and set(rule.strip()) == {"─"}
    assert [frame.strip() for frame in frames] == spoken(path)["largest"][0]["frames"]
    assert "Stack 2" not in done.stdout and "Stack 1" not in memory(path).stdout
    refused = memory(path, "--stacks", "0")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr


def test_text(tmp_path: Path):
    """What a reader sees. STEPSCOPE_UPDATE_GOLDEN=1 writes it anew."""
    path = handmade(layers=3).write(tmp_path / "s.pickle", before=False)
    done = memory(path.name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_golden(done.stdout, GOLDEN)


def test_a_run_by_its_name(tmp_path: Path):
    """A run directory, a part of its name, and the newest."""
    out = tmp_path / "runs"
    run = make_run(mini(), forward=[0.1] * 6)
    directory = create_run_directory(out, run.workload)
    save_run(run, directory)
    none = memory("last", "--runs", out)
    assert none.returncode == 2 and "measure it again with --record memory" in none.stderr
    with gzip.open(directory / "memory.pickle.gz", "wb") as file:
        pickle.dump(handmade().content(), file)
    answers = [
        memory(*arguments, "--json").stdout
        for arguments in ((directory,), ("last", "--runs", out), (directory.name[:12], "--runs", out))
    ]
    assert answers[0] and answers[0] == answers[1] == answers[2]
    unknown = memory("nobody", "--runs", out)
    assert unknown.returncode == 2 and unknown.stderr.count("\n") == 1


def test_devices(tmp_path: Path):
    """The one that held most, unless one is chosen."""
    content = handmade().content(notes=False, before=False)
    other = RecordingAllocator(time_us=START_US)
    other.malloc(3 * MIB)
    content["segments"] += [{**segment, "device": 1} for segment in other.segments()]
    content["device_traces"] = [content["device_traces"][0], other.events, []]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(content))
    assert spoken(path)["device"] == 0 and any("--device" in note for note in spoken(path)["notes"])
    other_open = spoken(path, "--device", 1)
    assert other_open["peak_bytes"] == 3 * MIB and other_open["devices"] == spoken(path)["devices"]
    assert [(use["device"], use["peak_bytes"]) for use in other_open["devices"]] == [
        (0, spoken(path)["peak_bytes"]), (1, 3 * MIB),
    ]  # fmt: skip
    listed = memory(path).stdout
    assert " 0 (this one) " in listed and "peak reserved" in listed
    for device in (2, 3, -1):
        done = memory(path, "--device", device)
        assert done.returncode == 2 and "those with a history are 0, 1" in done.stderr


def test_older_versions_are_read(tmp_path: Path):
    """Keys that came later are missing: metadata, annotations, settings, requested sizes, addresses of blocks."""
    content = handmade().content(notes=False, before=False, annotations=False)
    peak = handmade().allocator.peak
    for key in ("allocator_settings", "external_annotations"):
        del content[key]
    for event in content["device_traces"][0]:
        for key in ("user_metadata", "compile_context"):
            del event[key]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(content))
    assert spoken(path)["peak_bytes"] == peak
    for segment in content["segments"]:
        for block in segment["blocks"]:
            del block["requested_size"], block["address"], block["frames"]
        del segment["is_expandable"], segment["segment_type"]
    for event in content["device_traces"][0]:
        del event["time_us"], event["frames"]
    path.write_bytes(pickle.dumps(content))
    said = spoken(path)
    assert said["peak_bytes"] == peak and any("no times" in note for note in said["notes"])


def test_names_of_any_bytes(tmp_path: Path):
    hostile = "\x1b[2J\x1b]0;owned\x07\r\n" + "x" * 5000
    step = handmade()
    step.at(600, hostile, {"name": hostile, "filename": hostile, "line": 2**40})
    step.note(step.allocator.malloc(9 * MIB), bytes=9 * MIB, category="inputs", name=hostile, shape=(1,) * 500)
    done = memory(step.write(tmp_path / "s.pickle"), "--at", "end")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "\r" not in done.stdout and max(map(len, done.stdout.splitlines())) < 500


def without(key: str) -> Callable[[Content], object]:
    return lambda content: content.pop(key)


def in_event(**changes: Any) -> Callable[[Content], object]:
    """In the first allocation."""
    return lambda content: content["device_traces"][0][1].update(changes)


def in_segment(**changes: Any) -> Callable[[Content], object]:
    return lambda content: content["segments"][0].update(changes)


def in_block(**changes: Any) -> Callable[[Content], object]:
    return lambda content: content["segments"][0]["blocks"][0].update(changes)


def in_notes(**changes: Any) -> Callable[[Content], object]:
    return lambda content: content["stepscope"].update(changes)


def emptied(content: Content) -> None:
    content["device_traces"] = [[], []]


WRONG: dict[str, tuple[Callable[[Content], object], str]] = {
    "no history": (emptied, "_record_memory_history"),
    "no traces at all": (without("device_traces"), "stepscope run --record memory"),
    "neither": (lambda content: content.clear(), "no memory snapshot: it holds a dict without segments"),
    "traces are a number": (lambda content: content.update(device_traces=5), "`device_traces`"),
    "a trace is a text": (lambda content: content.update(device_traces=["x"]), "`device_traces[0]`"),
    "segments are a dict": (lambda content: content.update(segments={}), "`segments`"),
    "an event is a number": (lambda content: content["device_traces"][0].append(7), "`device_traces[0][22]`"),
    "an address is a text": (in_event(addr="0x7f"), "`device_traces[0][1].addr`"),
    "a size below zero": (in_event(size=-1), "`device_traces[0][1].size`"),
    "a size beyond all memory": (in_event(size=2**80), "`device_traces[0][1].size`"),
    "a time that is none": (in_event(time_us=None), "`device_traces[0][1].time_us`"),
    "an action that is a list": (in_event(action=[]), "`device_traces[0][1].action`"),
    "frames that are a number": (in_event(frames=3), "`frames` holds no list"),
    "a frame that is a text": (in_event(frames=["main"]), "`frames[...]`"),
    "a line that is a text": (in_event(frames=[{"name": "f", "filename": "f", "line": "9"}]), "`frames[...].line`"),
    "blocks that do not fill": (in_segment(total_size=1), "do not fill it"),
    "a block elsewhere": (in_block(address=5), "a block at 0x5"),
    "a block without a size": (in_block(size=None), "`segments[0].blocks[0].size`"),
    "settings of a text": (lambda content: content.update(allocator_settings="x"), "`allocator_settings`"),
    "notes of the future": (in_notes(version=99), "upgrade stepscope"),
    "notes without sense": (in_notes(tensors=[{"address": 1}]), "`stepscope.tensors[0]`"),
    "a category of their own": (in_notes(phases=[{"name": "x", "start_us": "y", "end_us": 1}]), "`stepscope.phases[0]"),
    "a workload of no sense": (in_notes(workload={"model": {}}), "`stepscope.workload"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line(tmp_path: Path, what: str):
    content = handmade().content()
    change, expected = WRONG[what]
    change(content)
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(content))
    done = memory(path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"stepscope: {path}: "), done.stderr
    assert expected in done.stderr and done.stdout == ""


class _Touches:
    """Unpickled, leaves a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self._path}",))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "the file is empty"),
        (b"\x80\x04", "cut short"),
        (b"plain text", "no pickle"),
        (gzip.compress(pickle.dumps([1, 2]), mtime=0)[:-4], "cut short"),
        (pickle.dumps(7), "it holds a int"),
        (pickle.dumps([]), "holds no history"),
        (pickle.dumps([{"device": 0, "address": 0, "total_size": 0, "blocks": []}]), "holds no history"),
    ],
)
def test_what_is_no_snapshot_is_one_line(tmp_path: Path, data: bytes, expected: str):
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    done = memory(path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert expected in done.stderr, done.stderr


def test_a_malicious_pickle_is_refused_and_nothing_runs(tmp_path: Path):
    mark = tmp_path / "mark"
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({**handmade().content(), "more": _Touches(mark)}))
    done = memory(path)
    assert done.returncode == 2 and f"{os.system.__module__}.system" in done.stderr
    assert done.stderr.count("\n") == 1 and not mark.exists()


def test_wrong_options_are_one_line(tmp_path: Path):
    path = handmade().write(tmp_path / "s.pickle")
    for options, expected in (
        (("--at", "teatime"), "cannot tell which moment"),
        (("--at", "9s"), "after the history"),
        (("--save", tmp_path / "p.docx"), "plot"),
        (("--device", "zero"), "device"),
    ):
        done = memory(path, *options)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and expected in done.stderr, done.stderr


def test_a_plot(tmp_path: Path):
    pytest.importorskip("vl_convert")
    path = handmade().write(tmp_path / "s.pickle")
    done = memory(path, "--save", tmp_path / "p.svg", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_bytes"] and "saved for backward" in (tmp_path / "p.svg").read_text()


def test_reading_needs_no_torch(tmp_path: Path):
    path = handmade().write(tmp_path / "s.pickle")
    program = (
        "import sys\nfrom stepscope.app.cli.app import app\n"
        "app(['memory', sys.argv[1]], standalone_mode=False)\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
