"""Events read into columns: the same as a plain reader of the same pickle finds, whatever the version wrote."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from benchmarks.recording_allocator import RecordingAllocator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.allocations import plain_pickle
from stepscope.allocations.explain import explain
from stepscope.allocations.plain_pickle import Columns, Odd, read_plain_pickle, read_with_columns
from stepscope.allocations.snapshot import snapshot_from
from stepscope.core.errors import InputError
from tests.allocations.test_replay import CONFIGURATIONS, STEPS, recorded

DATA = Path(__file__).parents[1] / "data"
FIELDS = {
    **dict.fromkeys(("addr", "size", "stream", "time_us", "device_free"), 0),
    "user_metadata": "",
    "pool_id": None,
}
SITES = [{"name": f"f{i}", "filename": f"/home/me/{i % 3}.py", "line": i} for i in range(12)]


def in_columns(path: Path, block_bytes: int = 1 << 22, cut: list[int] | None = None) -> Any:
    """What the process apart makes of a pickle, made here with blocks of so many bytes. `cut` gets how many events were
    regular."""

    def content(stream: Any) -> Any:
        unpickler = plain_pickle._ColumnsUnpickler(stream)
        made = unpickler.content()
        (cut if cut is not None else []).append(unpickler._cutter.count)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_pickle, "_CUT_FROM_BYTES", block_bytes)
        return plain_pickle._load(path, None, content)


def told(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events as a plain reader finds them, with the defaults of fields that their version did not write."""
    fields = {"action": "", **FIELDS}
    return [
        {**{name: event.get(name, other) for name, other in fields.items()}, "frames": [*event.get("frames", ())]}
        for event in trace
    ]


def found(events: Any) -> list[dict[str, Any]]:
    return [
        {**{name: getattr(event, name) for name in ("action", *FIELDS)}, "frames": [*event.frames]} for event in events
    ]


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    setting=CONFIGURATIONS,
    steps=STEPS,
    protocol=st.integers(0, 5),
    numbers=st.tuples(st.integers(0, 7), st.integers(0, 3), st.integers(0, 12)),
    unwritten=st.sets(st.sampled_from(["time_us", "user_metadata", "frames"])),
    block_bytes=st.sampled_from([100, 600, 1 << 22]),
)
def test_generated_snapshots_against_a_plain_reader(  # noqa: PLR0917 - what is generated
    tmp_path: Path, setting: Any, steps: list[Any], protocol: int, numbers: Any, unwritten: set[str], block_bytes: int
):
    """Allocators of every setting; versions of every kind of field; some devices without a history, some with."""
    device, more, depth = numbers
    allocator, layout = recorded(setting, [], steps)
    stacks = [[SITES[(at + i) % 12] for i in range(depth)] for at in range(4)]
    traces: list[list[dict[str, Any]]] = [[] for _ in range(device)]
    for each in range(1 + more):
        trace = [
            {**event, "frames": stacks[at % 4], "user_metadata": "ab"[at % 2]}
            for at, event in enumerate(allocator.events)
        ]
        if each % 2:
            trace += [{"action": "oom", "device_free": 7 + each, "size": 5, "stream": 0, "frames": stacks[0]}]
            trace = [{**event, "pool_id": (0, at % 2)} for at, event in enumerate(trace)]
        traces.append([{name: value for name, value in event.items() if name not in unwritten} for event in trace])
    content = allocator.snapshot(segments_before=layout, device_traces=traces)
    content["segments"] = [
        {**segment, "blocks": [{**block, "frames": stacks[0]} for block in segment["blocks"]]}
        for segment in content["segments"]
    ]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    read = in_columns(path, block_bytes)
    plain: Any = pickle.loads(path.read_bytes())
    assert read["segments"] == plain["segments"] and all(isinstance(each, Columns) for each in read["device_traces"])
    snapshot, plainly = (snapshot_from(each, "s", device=device) for each in (read, plain))
    assert found(snapshot.events) == found(plainly.events) == told(plain["device_traces"][device])
    for other in snapshot.others:
        assert found(other.events) == told(plain["device_traces"][other.device])
    assert explain(snapshot).allocations.equals(explain(plainly).allocations)


@pytest.mark.parametrize("name", ["default", "train_bf16"])
def test_real_snapshots_come_as_columns_through_the_process_apart(name: str):
    path = DATA / f"snapshot_{name}.pickle.gz"
    content: Any = read_with_columns(path)
    assert all(isinstance(trace, Columns) for trace in content["device_traces"])
    plain: Any = read_plain_pickle(path)
    events = [told(trace) for trace in plain["device_traces"] if trace]
    assert [found(snapshot_from(content, "s").events)] == events
    cut: list[int] = []
    assert [found(snapshot_from(in_columns(path, 50_000, cut), "s").events)] == events
    assert cut[0] > 0.95 * len(events[0])


def handmade(**changes: Any) -> dict[str, Any]:
    allocator = RecordingAllocator()
    allocator.free(allocator.malloc(1000))
    content = allocator.snapshot()
    content["device_traces"][0][1] |= changes
    return content


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": "1000"}, r"Expected `int`, got `str` - at `device_traces\[0\]\[1\].size`"),
        ({"addr": -1}, r"Expected `int` >= 0"),
        ({"time_us": 2**63}, "Integer value out of range|Expected `int` <="),
        ({"action": 7}, "Expected `str`, got `int`"),
        ({"pool_id": (0, 1, 2)}, "of length 2"),
        ({"frames": 7}, "`frames` holds no list"),
    ],
)
def test_what_no_column_holds_is_told_as_ever(tmp_path: Path, changes: dict[str, Any], said: str):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(handmade(**changes), protocol=4))
    with pytest.raises((Odd, InputError)):
        in_columns(path)
    with pytest.raises(InputError, match=said):
        explain(snapshot_from(read_with_columns(path), "s"))


PLACE = b"\x8c\x0ddevice_traces\x94]\x94]\x94"


@pytest.mark.parametrize(
    "more",
    [
        b"\x8c\x01xQ",
        b"K\x00Q",
        b"}b",
        b")R",
        b")\x81",
        b"}\x8c\x01aK\x01s\x86b",
        b"(K\x01\x90",
        b"\x8c\x01ah\x00s",
        b"cos\nsystem\n",
    ],
)
def test_nothing_can_be_done_to_a_list_of_events_but_to_fill_it(tmp_path: Path, more: bytes):
    """Instructions that ask for, build, call or set something, in the place of an event and on the list itself."""
    path = tmp_path / "s.pickle"
    for program in (
        b"\x80\x04}" + PLACE + more + b"aas.",
        b"\x80\x04}" + PLACE + b"(" + more + b"eas.",
        b"\x80\x04}" + PLACE + more + b".",
    ):
        path.write_bytes(program)
        with pytest.raises((Odd, InputError)):
            in_columns(path)


@pytest.mark.parametrize("content", [{}, {"segments": []}, [], {"device_traces": ()}, {"device_traces": {}}])
def test_no_list_of_histories_is_left_to_the_plain_way(tmp_path: Path, content: Any):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(Odd):
        in_columns(path)
    assert read_with_columns(path) == content


def test_an_emptied_list_of_frames_is_filled_again_for_its_block(tmp_path: Path):
    """PyTorch writes the stack of an event and of its block once."""
    content = handmade()
    stack = SITES[:]
    for event in content["device_traces"][0]:
        event["frames"] = stack
    content["segments"][0]["blocks"][0]["frames"] = stack
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(content, protocol=4))
    assert in_columns(path)["segments"] == content["segments"]
