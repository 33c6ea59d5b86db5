"""Names that a profiler wrote without escaping them: at recording, and in what others recorded."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from stepscope.core.profilers import with_texts_escaped
from stepscope.recording.capture import export_kineto
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.readers import json_events
from stepscope.traces.table import TraceTable

NAMES = ['say "hi"', '5" disk', 'a", "b": {', 'ends"', '"', '{"loss": [', 'x", "pid": 3, "tid": 4, y', "plain"]
QUOTED = sum('"' in name for name in NAMES)


def ranges(table: TraceTable) -> list[str]:
    return table.ranges["name"].to_list()


def profiled() -> profile:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for name in NAMES:
            with record_function(name):
                torch.ones(2).add(1)
    return profiler


@pytest.mark.parametrize("block_bytes", [500, 8 << 20])
def test_what_the_profiler_wrote_is_read(tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """As PyTorch exports it, which no reader of JSON takes: every name and time, and a word that names were mended."""
    monkeypatch.setattr(json_events, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "trace.json"
    profiled().export_chrome_trace(str(path))
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_text())
    table = read_trace(path)
    assert ranges(table) == NAMES and table.operators.height >= 2 * len(NAMES)
    assert table.damage.mended == {json_events.UNESCAPED: QUOTED}


def test_what_we_record_is_json(tmp_path: Path):
    path = tmp_path / "trace.json.gz"
    export_kineto(profiled(), path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "user_annotation"] == NAMES
    table = read_trace(path)
    assert ranges(table) == NAMES and table.damage.mended == {}


LAYOUTS = {
    "a field a line": '  {\n    "ph": "X",\n    "cat": "cpu_op",\n    "name": "NAME",\n    "pid": 1,\n    "tid": 2,\n'
    '    "ts": TS,\n    "dur": 3\n    ,\n    "args": {\n      "External id": 5,"Input Dims": [[2, 3], []]\n    }\n  }',
    "an event in lines": '  {\n    "ph": "X", "cat": "cpu_op", "name": "NAME", "pid": 1, "tid": 2,\n'
    '    "ts": TS, "dur": 3,\n    "args": {\n      "External id": 5, "Input type": ["float", ""]\n    }\n  }',
    "an event a line": '{"ph": "X", "cat": "cpu_op", "name": "NAME", "pid": 1, "tid": 2, "ts": TS, "dur": 3}',
}


def written(layout: str, names: list[str]) -> str:
    events = [LAYOUTS[layout].replace("TS", str(10 * n)).replace("NAME", name) for n, name in enumerate(names)]
    return '{\n  "schemaVersion": 1,\n  "traceEvents": [\n' + ",\n".join(events) + '\n  ],\n  "traceName": "t"\n}\n'


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_bytes", [400, 8 << 20])
def test_layouts_of_all_versions(tmp_path: Path, layout: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_events, "BLOCK_BYTES", block_bytes)
    names = [*NAMES[:-2], "C:\\users\\me", "new\nline", "tab\tand\x01more", "aten::mm"]
    path = tmp_path / "trace.json"
    path.write_text(written(layout, names))
    table = read_trace(path)
    assert table.operators["name"].to_list() == names
    assert table.operators["start_ns"].to_list() == [10_000 * n for n in range(len(names))]
    assert sum(table.damage.mended.values()) == len(names) - 1


@given(st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=30), max_size=5))
@settings(max_examples=200)
def test_what_is_json_stays_as_it_is(names: list[str]):
    for layout in LAYOUTS:
        whole = written(layout, [json.dumps(name)[1:-1] for name in names]).encode()
        assert with_texts_escaped(whole) == (whole, 0)
    for indent in (None, 1):
        whole = json.dumps(
            [{"name": name, "pid": 1, "args": {"x": name, "y": [name]}} for name in names], indent=indent
        )
        assert with_texts_escaped(whole.encode()) == (whole.encode(), 0)


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=30))
@settings(max_examples=200)
def test_any_name_of_a_line_of_its_own_becomes_json(name: str):
    """What is not JSON already is made JSON, and making it twice changes nothing."""
    whole, _ = with_texts_escaped(written("a field a line", [name, "last"]).encode())
    assert json.loads(whole)["traceEvents"][1]["name"] == "last"
    assert with_texts_escaped(whole) == (whole, 0)


@pytest.mark.parametrize("block_bytes", [400, 8 << 20])
@pytest.mark.parametrize("broken", ["two\nlines", "\n", "tab\tand\n\nmore\n", "a}, {b\nc"])
@pytest.mark.parametrize("order", [("ph", "name", "pid"), ("pid", "name", "ph"), ("name", "ph", "pid")])
def test_events_that_share_a_line_stay_apart(
    tmp_path: Path, order: tuple[str, ...], broken: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """A line break in a name swallows no event before or after it, where a writer of JSON put all on one line."""
    monkeypatch.setattr(json_events, "BLOCK_BYTES", block_bytes)
    names = ["aten::mm", "aten::add", broken, "aten::mm", "last"]
    events: list[str] = []
    for n, name in enumerate(names):
        fields = {"ph": '"X"', "name": f'"{name}"', "pid": "1"}
        said = ", ".join(f'"{key}": {fields[key]}' for key in order)
        events.append(f'{{{said}, "cat": "cpu_op", "tid": 1, "ts": {n}, "dur": 1, "args": {{"External id": {n}}}}}')
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [' + ", ".join(events) + "]}")
    table = read_trace(path)
    assert table.operators["name"].to_list() == names
    assert table.damage.mended == {json_events.CONTROL: 1}


def test_a_name_that_is_json_itself_is_mended(tmp_path: Path):
    name = json.dumps([{"a": 1}, {"b": 2}])
    path = tmp_path / "trace.json"
    path.write_text(written("a field a line", ["first", name, "last"]))
    assert read_trace(path).operators["name"].to_list() == ["first", name, "last"]
