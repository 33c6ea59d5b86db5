"""Histories with anything in them: what they say is refused in one line, or explained with sums that hold."""

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stepscope.allocations.answer import memory_document
from stepscope.allocations.at_moment import category_timeline, moment_at
from stepscope.allocations.explain import explain
from stepscope.allocations.snapshot import snapshot_from
from stepscope.core.errors import InputError
from tests.handmade_snapshot import handmade

pytestmark = pytest.mark.slow

WHOLE = {
    (notes, before): handmade().content(notes=notes, before=before)
    for notes in (True, False)
    for before in (True, False)
}
ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "snapshot", "oom", "user_defined", "nonsense",
)  # fmt: skip
NUMBERS = st.one_of(st.integers(0, 2**13), st.sampled_from([2**21, 2**40, 2**62, 0x7F00_0000_0000, 0x7F00_0020_0000]))
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("drop"), st.integers(0, 99)),
        st.tuples(st.just("again"), st.integers(0, 99)),
        st.tuples(st.just("swap"), st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just("action"), st.integers(0, 99), st.sampled_from(ACTIONS)),
        st.tuples(st.sampled_from(["addr", "size", "time_us", "stream"]), st.integers(0, 99), NUMBERS),
        st.tuples(st.just("segment"), st.integers(0, 99)),
        st.tuples(st.just("block"), st.integers(0, 99), st.sampled_from(["inactive", "active_allocated", "odd"])),
        st.tuples(st.just("note"), st.integers(0, 99), NUMBERS),
    ),
    max_size=4,
)


def apply(content: dict[str, Any], change: tuple[Any, ...]) -> None:
    what, index, *more = change
    trace = content["device_traces"][0]
    at = index % len(trace) if trace else 0
    segments = content["segments"]
    if what == "drop":
        del trace[at : at + 1]
    elif what == "again":
        trace[at:at] = trace[at : at + 1]
    elif what == "swap" and trace:
        other = more[0] % len(trace)
        trace[at], trace[other] = trace[other], trace[at]
    elif what == "segment":
        del segments[index % (len(segments) + 1) :]
    elif what == "block" and segments:
        blocks = segments[index % len(segments)]["blocks"]
        blocks[index % len(blocks)]["state"] = more[0]
    elif what == "note":
        tensors = content.get("stepscope", {}).get("tensors", [])
        if tensors:
            tensors[index % len(tensors)]["address"] = more[0]
    elif trace:
        trace[at] = {**trace[at], what: more[0]}


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.booleans(), st.booleans(), CHANGES, st.sampled_from([None, "start", "end", "backward", "0.1ms"]))
@example(False, False, [("swap", 0, 42), ("block", 2, "active_allocated")], None)
@example(False, True, [("again", 9), ("action", 9, "segment_alloc")], None)
def test_every_mutation_is_refused_or_explained(notes: bool, before: bool, changes: list[Any], at: str | None):
    content = copy.deepcopy(WHOLE[notes, before])
    for change in changes:
        apply(content, change)
    try:
        found = explain(snapshot_from(content, "s"))
        found.self_check()
        moment = moment_at(found, at)
    except InputError as refused:
        assert "\n" not in str(refused)
        return
    said = memory_document(found, moment)
    assert said["peak_bytes"] == sum(said["categories"].values())
    assert category_timeline(found).height == found.curve.height
