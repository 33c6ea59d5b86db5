"""Events out of Chrome-trace JSON: any layout gives the same ones, known slips are mended, all else is one error."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.core.errors import InputError
from stepscope.traces.readers import json_events
from stepscope.traces.readers.json_events import read_events
from tests.conftest import at_length

decode = msgspec.json.Decoder(list[dict]).decode
Event = dict[str, Any]


def read(path: Path) -> tuple[list[Event], dict[str, Any]]:
    """All events, and all fields around them."""
    events: list[Event] = []
    fields: dict[str, Any] = {}
    for block in read_events(path, decode):
        if isinstance(block, dict):
            fields |= block
        else:
            events += block
    fields.pop("traceEvents", None)
    return events, fields


def read_text(text: str | bytes, folder: Path) -> tuple[list[Event], dict[str, Any]]:
    """As `read`, of a file with this text."""
    path = folder / "trace.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read(path)


def refused(text: str | bytes, folder: Path) -> str:
    """The one line that says why."""
    with pytest.raises(InputError) as error:
        read_text(text, folder)
    message = str(error.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    assert len(message) < 600
    return message


HOSTILE_TEXTS = st.sampled_from(
    [
        "}, {",
        "},{",
        '"traceEvents": [',
        '{"traceEvents": [',
        "]}",
        '\\"',
        "\\",
        "a\nb",
        "\x00",
        "é",
        "😀",
        "[[[",
        '"',
        "",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-9, 9) | HOSTILE_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE_TEXTS, inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"ph": st.just("X"), "name": HOSTILE_TEXTS | st.text(max_size=5), "ts": st.floats(0, 1e9)},
        optional={"args": st.dictionaries(HOSTILE_TEXTS, VALUES, max_size=3), "cat": st.just("kernel")},
    ),
    max_size=12,
)
FIELDS = st.dictionaries(HOSTILE_TEXTS.filter(lambda key: key != "traceEvents"), VALUES, max_size=3)


def laid_out(draw: st.DataObject, events: list[Event], fields: dict[str, Any]) -> bytes:
    """The trace as one of many writers would write it."""
    choose = draw.draw
    trace: Any = events
    if choose(st.booleans(), "an object"):
        items = list(fields.items())
        place = choose(st.integers(0, len(items)), "place of the events")
        trace = dict([*items[:place], ("traceEvents", events), *items[place:]])
    text = json.dumps(
        trace,
        indent=choose(st.sampled_from([None, 0, 1, 4]), "indent"),
        separators=choose(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]), "separators"),
        sort_keys=choose(st.booleans(), "sorted"),
        ensure_ascii=choose(st.booleans(), "ASCII"),
    ).encode()
    text = choose(st.sampled_from([b"", b"\n  "]), "before") + text + choose(st.sampled_from([b"", b"\n\n"]), "after")
    if choose(st.booleans(), "BOM"):
        text = b"\xef\xbb\xbf" + text
    return gzip.compress(text, 1) if choose(st.booleans(), "gzip") else text


@given(st.data(), EVENTS, FIELDS, st.sampled_from([16, 200, 1000, 4096, 8 << 20]))
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_layout_gives_the_same_events(
    tmp_path: Path, data: st.DataObject, events: list[Event], fields: dict[str, Any], block_bytes: int
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_events, "BLOCK_BYTES", block_bytes)
        found, around = read_text(laid_out(data, events, fields), tmp_path)
    assert found == events
    assert around in (fields, {})


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small texts have many blocks."""
    monkeypatch.setattr(json_events, "BLOCK_BYTES", 200)
    monkeypatch.setattr(json_events, "_TAIL_BYTES", (50, 100))


def numbered(count: int) -> list[Event]:
    """Events that can be told apart."""
    return [{"ph": "X", "name": f"e{number}", "args": {"shapes": [[number], [2, 3]]}} for number in range(count)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("comma", ["},", "} ,\n  "])
def test_a_comma_after_the_last_event_is_forgiven(tmp_path: Path, comma: str):
    for count in (1, 2, 30):
        text = ", ".join(json.dumps(event) for event in numbered(count)).removesuffix("}") + comma
        assert read_text(f'{{"traceEvents": [{text}], "traceName": "t"}}', tmp_path) == (
            numbered(count),
            {"traceName": "t"},
        )
        assert read_text(f"[{text}]", tmp_path)[0] == numbered(count)


@pytest.mark.usefixtures("small_blocks")
def test_lists_of_objects_inside_events_are_no_events(tmp_path: Path):
    """What looks like the gap between two events stands inside one."""
    events = [{"name": str(number), "args": {"list": [{"a": 1}] * 40}} for number in range(20)]
    assert read_text(json.dumps({"traceEvents": events}), tmp_path)[0] == events
    after = {"traceEvents": events, "other": [{"a": 1}] * 40, "traceName": "x"}
    assert read_text(json.dumps(after), tmp_path) == (events, {"other": [{"a": 1}] * 40, "traceName": "x"})
    before = {"other": {"traceEvents": [{"a": 1}] * 40}, "traceEvents": events}
    assert read_text(json.dumps(before), tmp_path)[0] == events


@pytest.mark.usefixtures("small_blocks")
def test_white_space_of_any_length(tmp_path: Path):
    gap = " " * 700
    text = f'{{"a": 1,{gap}"traceEvents"{gap}:{gap}[{gap}{{"n": 1}}{gap},{gap}{{"n": 2}}{gap}]{gap}}}{gap}'
    assert read_text(text, tmp_path) == ([{"n": 1}, {"n": 2}], {"a": 1})


@pytest.mark.usefixtures("small_blocks")
def test_an_event_of_many_blocks(tmp_path: Path):
    events = [*numbered(5), {"name": "}, {" * 3000}, *numbered(5)]
    assert read_text(json.dumps(events), tmp_path)[0] == events


MENDED = [
    (rb'"a\qb"', "a\\qb"),
    (rb'"C:\new\_dir"', "C:\new\\_dir"),
    (rb'"D:\model\x"', "D:\\model\\x"),
    (rb'"\\quoted \" \q"', '\\quoted " \\q'),
    (rb'"\u12"', "\\u12"),
    (b'"tab\there\x01\x1b[0m"', "tab\there\x01\x1b[0m"),
    (b'"two\nlines\\"', None),
    (b'"caf\xe9"', "caf�"),
    (b'"\xff\xfe"', "��"),
    (rb'"\ud83d"', "�"),
    (rb'"\ude00 \ud83d\ude00 \ud83d\ud83d\ude00"', "� 😀 �😀"),
    (rb'"\\ud83d \q"', "\\ud83d \\q"),
    (b"NaN", None),
    (b"-Infinity", None),
    (b"[1, NaN, inf, nan, -inf, 2]", [1, None, None, None, None, 2]),
    (b'{"NaN": "nan NaN, Infinity"}', {"NaN": "nan NaN, Infinity"}),
    (b'["nan \\q", nan]', ["nan \\q", None]),
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("written", "meant"), MENDED, ids=lambda value: repr(value)[:30])
def test_what_profilers_write_wrongly_is_mended(tmp_path: Path, written: bytes, meant: Any):
    if written.endswith(b'\\"'):
        written = written[:-2] + b'"'
        meant = "two\nlines"
    before, after = numbered(20), numbered(30)
    lines = [json.dumps(event).encode() for event in before]
    lines += [b'{"args": {"x": ' + written + b"}}"]
    lines += [json.dumps(event).encode() for event in after]
    expected = [*before, {"args": {"x": meant}}, *after]
    for text in (
        b"[" + b",".join(lines) + b"]",
        b'{"traceEvents": [\n' + b",\n".join(lines) + b'\n], "x": ' + written + b"}",
        b'{"x": ' + written + b', "traceEvents": [' + b", ".join(lines) + b"]}",
    ):
        found, fields = read_text(text, tmp_path)
        assert found == expected
        assert fields in ({}, {"x": meant})


WHOLE = [
    json.dumps({"schema": 1, "traceEvents": numbered(9), "traceName": "a.json"}, indent=1),
    json.dumps({"traceEvents": numbered(9), "nested": [{"a": [1, {}]}, "]"]}),
    json.dumps(numbered(9)),
]


@pytest.mark.parametrize(
    ("block_bytes", "whole"),
    [*((150, whole) for whole in WHOLE), (8 << 20, WHOLE[2]), *at_length(*((8 << 20, whole) for whole in WHOLE[:2]))],
    ids=["blocks-first", "blocks-last", "blocks-list", "list", "first", "last"],
)
def test_a_truncated_trace_is_never_taken_for_a_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: str, block_bytes: int
):
    monkeypatch.setattr(json_events, "BLOCK_BYTES", block_bytes)
    assert len(read_text(whole, tmp_path)[0]) == 9
    for length in range(len(whole)):
        refused(whole[:length], tmp_path)


def test_a_truncated_gzip_is_never_taken_for_a_shorter_one(tmp_path: Path):
    whole = gzip.compress(WHOLE[0].encode())
    for length in range(len(whole)):
        refused(whole[:length], tmp_path)
    assert "truncated" in refused(whole[:-20], tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "empty"),
        (b" \n\t ", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (gzip.compress(b"", mtime=0), "empty"),
        (b"hello", "neither a JSON trace"),
        (b"\x1f", "neither a JSON trace"),
        (b"\x1f\x8b", "truncated"),
        (b"\x1f\x8bno gzip at all", "cannot be read"),
        (gzip.compress(b"hello", mtime=0), "neither a JSON trace"),
        (gzip.compress(gzip.compress(b"[]", mtime=0), mtime=0), "neither a JSON trace"),
        (gzip.compress(b"[]", mtime=0)[:-8] + b"12345678", "cannot be read"),
        (gzip.compress(b"[]", mtime=0) + b"more", "cannot be read"),
        (b"{}", "no \"traceEvents\""),
        (b'{"a": "traceEvents", "b": ["traceEvents", [1]]}', "no \"traceEvents\""),
        (b'{"a": {"traceEvents": []}}', "no \"traceEvents\""),
        (b'{"traceEvents": {}}', "no \"traceEvents\""),
        (b'{"traceEvents": null}', "no \"traceEvents\""),
        (b'{"a": oops, "traceEvents": []}', "broken before its events"),
        (b'{"traceEvents": []} more', "after its events"),
        (b'{"traceEvents": []}{"traceEvents": []}', "after its events"),
        (b'{"traceEvents": [], oops}', "after its events"),
        (b'{"traceEvents": []]', "after its events"),
        (b"[] more", "text follows"),
        (b"[{}][{}]", "text follows"),
        (b"[{}}", "ends in the middle"),
        (b"[{} {}]", "are broken"),
        (b"[{},,{}]", "are broken"),
        (b"[1, 2]", "are broken"),
        (b"[null]", "are broken"),
        (b"[[]]", "are broken"),
        (b'[{"a": }]', "are broken"),
        (b'[{"a": 01}]', "are broken"),
        (b"[{'a': 1}]", "are broken"),
        ('{"traceEvents": []}'.encode("utf-16"), "neither a JSON trace"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: bytes, said: str):
    assert said in refused(text, tmp_path)


@pytest.mark.parametrize("opening", [b"[", b'{"traceEvents": [', b'{"a": ', b'[{"args": '])
@pytest.mark.parametrize("repeated", [b"[", b'{"a":', b'[{"a": '])
def test_endless_nesting_is_refused_at_once(tmp_path: Path, opening: bytes, repeated: bytes):
    began = time.monotonic()
    said = refused(opening + repeated * (20_000_000 // len(repeated)), tmp_path)
    assert "deep" in said
    assert time.monotonic() - began < 5


def test_deep_but_balanced_nesting_is_refused_too(tmp_path: Path):
    deep = b"[" * 100_000 + b"]" * 100_000  # Python 3.12 and later read ten thousand
    assert "deep" in refused(b'[{"a": ' + deep + b"}]", tmp_path)
    assert "deep" in refused(b'{"traceEvents": [], "a": ' + deep + b"}", tmp_path)


@pytest.mark.parametrize("start", ["[", '{"traceEvents": [', '{"a": "'])
def test_an_event_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str):
    monkeypatch.setattr(json_events, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(json_events, "EVENT_LIMIT_BYTES", 1 << 20)
    said = refused(start + '{"name": "' * (start[-1] == "[") + "x" * (4 << 20) + '"}]', tmp_path)
    assert "within 1 MiB" in said


def test_fields_beyond_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_events, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(json_events, "EVENT_LIMIT_BYTES", 1 << 20)
    refused('{"traceEvents": [{}], "a": "' + "x" * (4 << 20) + '"}', tmp_path)


@pytest.mark.parametrize("header", [b'{"a": {"traceEvents": [', b'{"a": "' + rb"\"traceEvents\": ["])
def test_many_false_beginnings_take_no_longer(tmp_path: Path, header: bytes):
    began = time.monotonic()
    refused(header + b'{"traceEvents": [], "b": [' * 2 + b'1, "traceEvents", ' * 400_000, tmp_path)
    assert time.monotonic() - began < 5


@pytest.mark.slow
@pytest.mark.parametrize("inside", [b" ", b"\x00", b'{"ph": "X"}, '])
def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bytes):
    """A hundred thousandth of the size for real; the limit of a gigabyte is lowered to reach it sooner."""
    monkeypatch.setattr(json_events, "_SUSPICIOUS_BYTES", 40 << 20)
    path = tmp_path / "trace.json.gz"
    block = inside * ((4 << 20) // len(inside))
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(b'{"traceEvents": [{}, ')
        for _ in range(20):
            file.write(block)
    assert path.stat().st_size < 1 << 20
    began = time.monotonic()
    with pytest.raises(InputError, match=r"bomb|within|broken"):
        read(path)
    assert time.monotonic() - began < 10


def test_what_compresses_well_is_read_all_the_same(tmp_path: Path):
    events = [{"ph": "X", "name": "same", "args": {"a": 1}}] * 20_000
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(events).encode()))
    assert len(read(path)[0]) == 20_000
