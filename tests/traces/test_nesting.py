"""Nesting by sorting and searching, against a walk with a stack."""

from itertools import pairwise
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces import nesting
from stepscope.traces.nesting import Nest, in_order, numbered, order_of, place_in, union

pytestmark = pytest.mark.slow

Interval = tuple[int, int, int]
"""Track, start and duration."""

SINCE_1970_NS = 1_790_000_000_000_000_000


def frame(intervals: list[Interval]) -> pl.DataFrame:
    """As `Nest` takes them."""
    schema = {"track": pl.Int64, "start_ns": pl.Int64, "duration_ns": pl.Int64}
    return pl.DataFrame(intervals, schema=schema, orient="row")


def end_of(interval: Interval) -> int:
    """Its end, as Nest sees it: an empty interval lasts a nanosecond."""
    return interval[1] + max(1, interval[2])


def encloses(outer: Interval, inner: Interval) -> bool:
    """Whether it does on the same track."""
    return outer[0] == inner[0] and outer[1] <= inner[1] and end_of(inner) <= end_of(outer)


def innermost_of(sorted_intervals: list[Interval], track: int, time_ns: int) -> int | None:
    """The last begun of those open, by looking at all."""
    found = None
    for position, interval in enumerate(sorted_intervals):
        if interval[0] == track and interval[1] <= time_ns < end_of(interval):
            found = position
    return found


@st.composite
def nested(draw: st.DrawFn) -> list[Interval]:
    """Intervals that nest on each of some tracks; equal starts and ends, empty ones and touching ones among them."""
    origin = draw(st.sampled_from([0, -50, SINCE_1970_NS]))
    scale = draw(st.sampled_from([1, 1, 1000, 10**16]))
    intervals: list[Interval] = []

    def fill(track: int, start: int, end: int, depth: int) -> None:
        at = start
        for _ in range(draw(st.integers(depth == 0, 4 - depth // 2))):
            if at > end:
                return
            first = draw(st.integers(at, end))
            last = draw(st.integers(first, end))
            # An empty interval lasts a nanosecond and must end within what is round it.
            if last == first and scale == 1 and (first == end or depth == 0):
                last += 1
                if last > end and depth:
                    return
            intervals.append((track, origin + first * scale, (last - first) * scale))
            if depth < 4 and last > first:
                fill(track, first, last - (scale == 1 and last == end), depth + 1)
            at = last + (scale == 1 and last == first)

    for track in draw(st.lists(st.integers(-3, 3) | st.just(10**15), unique=True, max_size=3)):
        fill(track, 0, 40, 0)
    return draw(st.permutations(intervals))


def check(intervals: list[Interval], asked: list[tuple[int, int]]) -> None:
    """Compare everything with the plain way."""
    nest = Nest(frame(intervals), "track")
    ordered = [intervals[row] for row in nest.order.to_list()]
    enclosing = [
        [other for other in range(position) if encloses(ordered[other], interval)]
        for position, interval in enumerate(ordered)
    ]
    assert sorted(nest.order.to_list()) == list(range(len(intervals)))
    assert nest.depth.to_list() == [len(around) for around in enclosing]
    assert nest.parent.to_list() == [around[-1] if around else None for around in enclosing]
    own = [interval[2] for interval in ordered]
    for position, around in enumerate(enclosing):
        if around:
            own[around[-1]] -= ordered[position][2]
    assert nest.self_ns(frame(intervals)["duration_ns"]).to_list() == [max(0, left) for left in own]
    check_sums(nest, frame(intervals))
    check_innermost(nest, ordered, asked)


def check_sums(nest: Nest, intervals: pl.DataFrame) -> None:
    """The sums by group are those of the figures of each interval; a group may have no name."""
    group = pl.int_range(intervals.height, eager=True) % 3
    groups = pl.select(pl.when(group > 0).then(group).alias("group"))
    own_ns = nest.self_ns(intervals["duration_ns"]).alias("self_ns")
    each = groups[nest.order].with_columns(own_ns).group_by("group")
    wanted = each.agg(pl.len().cast(pl.Int64).alias("calls"), pl.col("self_ns").sum())
    assert nest.self_sums(intervals["duration_ns"], groups).sort("group").equals(wanted.sort("group"))


def check_innermost(nest: Nest, ordered: list[Interval], asked: list[tuple[int, int]]) -> None:
    """At the moments asked for, and at all starts and ends and beside them."""
    edges = [(track, time) for track, start, duration in ordered for time in (start, start + duration)]
    queries = asked + [(track, time + by) for track, time in edges for by in (-1, 0, 1)]
    moments = pl.DataFrame(queries, schema={"track": pl.Int64, "time": pl.Int64}, orient="row")
    found = nest.innermost_position(moments["track"], moments["time"])
    assert found.to_list() == [innermost_of(ordered, *query) for query in queries]
    rows = nest.innermost(moments["track"], moments["time"])
    assert rows.to_list() == nest.rows(found).to_list()


asked_moments = st.lists(st.tuples(st.integers(-4, 4), st.integers(-100, 100)), max_size=5)


@given(nested(), asked_moments)
def test_nested_intervals(intervals: list[Interval], asked: list[tuple[int, int]]):
    check(intervals, asked)


@pytest.mark.parametrize(("limit", "value"), [("_CLIMB", 1), ("_CHECKED", 0)])
@given(intervals=nested(), asked=asked_moments)
@settings(max_examples=50)
def test_nested_intervals_where_a_climb_is_given_up_or_they_are_too_many_to_be_checked(
    limit: str, value: int, intervals: list[Interval], asked: list[tuple[int, int]]
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, limit, value)
        check(intervals, asked)


@given(intervals=nested(), asked=asked_moments, at_once=st.sampled_from([3, 50]))
def test_moments_merged_with_intervals(intervals: list[Interval], asked: list[tuple[int, int]], at_once: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "_MERGED", 0)
        patch.setattr(nesting, "_AT_ONCE", at_once)
        check(intervals, asked)


crossing = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=25)


@given(crossing, st.sampled_from([("_CLIMB", 1), ("_CLIMB", 40), ("_MERGED", 0)]))
@settings(max_examples=300)
def test_where_intervals_cross_the_last_begun_is_innermost(intervals: list[Interval], limit: tuple[str, int]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, *limit)
        nest = Nest(frame(intervals), "track")
        ordered = [intervals[row] for row in nest.order.to_list()]
        check_innermost(nest, ordered, [])
        for position, parent in enumerate(nest.parent.to_list()):
            around = [other for other in range(position) if encloses(ordered[other], ordered[position])]
            assert parent == (around[-1] if around else None)
        own = nest.self_ns(frame(intervals)["duration_ns"]).to_list()
        check_sums(nest, frame(intervals))
    assert all(0 <= left <= interval[2] for left, interval in zip(own, ordered, strict=True))


@given(crossing)
def test_unchecked_crossings_do_no_harm(intervals: list[Interval]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "_CHECKED", 0)
        nest = Nest(frame(intervals), "track")
        moments = frame(intervals)
        assert len(nest.innermost(moments["track"], moments["start_ns"] + 5)) == len(intervals)


@pytest.mark.parametrize("merged", [0, 1 << 17])
def test_ten_thousand_levels(merged: int, monkeypatch: pytest.MonkeyPatch):
    """Far beyond the ancestors that are tried one by one."""
    monkeypatch.setattr(nesting, "_MERGED", merged)
    levels = 10_000
    intervals = [(7, SINCE_1970_NS + level, 2 * (levels - level)) for level in range(levels)]
    nest = Nest(frame(intervals), "track")
    assert nest.depth.to_list() == list(range(levels))
    assert nest.parent.to_list() == [None, *range(levels - 1)]
    assert nest.self_ns(frame(intervals)["duration_ns"]).to_list() == [2] * levels
    # After the innermost two nanoseconds, one level closes with every nanosecond.
    moments = [SINCE_1970_NS + levels + 1 + after for after in range(0, levels, 97)]
    found = nest.innermost(pl.Series([7] * len(moments)), pl.Series(moments))
    assert found.to_list() == [levels - 2 - after if after < levels - 1 else None for after in range(0, levels, 97)]


def test_times_too_far_apart_for_one_key():
    """(track, time) would not fit into 64 bits: times are ranked instead."""
    far = 2**60
    intervals = [(track, start, 10) for track in range(20) for start in (-far, 0, far)]
    intervals += [(track, -far - 5, 2 * far + 50) for track in range(20)]
    check(
        intervals, [(3, -far + 9), (3, -far + 10), (19, far + 9), (19, far + 10), (19, 2**61), (0, -(2**61)), (99, 5)]
    )


@pytest.mark.parametrize("merged", [0, 1 << 17])
def test_moments_before_and_after_everything_and_on_unknown_tracks(merged: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nesting, "_MERGED", merged)
    nest = Nest(frame([(1, 100, 10), (2, 0, 1000)]), "track")
    tracks = pl.Series([1, 1, 1, 1, 1, 1, 3, None, 1], dtype=pl.Int64)
    times = pl.Series([-(2**62), 0, 99, 109, 110, 2**62, 105, 105, None], dtype=pl.Int64)
    assert nest.innermost(tracks, times).to_list() == [None, None, None, 0, None, None, None, None, None]


def test_no_intervals():
    nest = Nest(frame([]), "track")
    assert nest.innermost(pl.Series([1, 2]), pl.Series([5, 5])).to_list() == [None, None]
    assert nest.depth.to_list() == nest.parent.to_list() == []
    assert nest.parents(pl.Series([], dtype=pl.Int64)).to_list() == []
    assert nest.self_ns(pl.Series([], dtype=pl.Int64)).to_list() == []
    assert union(frame([]), ["track"]).height == union(frame([]), []).height == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-20, 20), st.integers(0, 8)), max_size=25), st.booleans())
def test_union_covers_the_same_moments(intervals: list[Interval], by_track: bool):
    by = ["track"] if by_track else []
    merged = union(frame(intervals), by)
    assert merged["merged"].sum() == len(intervals)

    def moments(rows: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
        return {(track if by_track else 0, time) for track, start, end in rows for time in range(start, end)}

    pieces = [(row.get("track", 0), row["start_ns"], row["end_ns"]) for row in merged.iter_rows(named=True)]
    assert moments(pieces) == moments([(track, start, start + duration) for track, start, duration in intervals])
    for before, after in pairwise(pieces):
        assert before[0] != after[0] or before[2] < after[1], "touching pieces are one"


def test_union_merges_what_overlaps_or_touches():
    merged = union(frame([(1, 0, 5), (1, 5, 5), (1, 3, 1), (1, 11, 1), (2, 4, 4)]), ["track"])
    assert merged.rows() == [(1, 0, 10, 3), (1, 11, 12, 1), (2, 4, 8, 1)]


def test_numbered_tells_combinations_apart_and_null_is_one_of_them():
    rows = pl.DataFrame({"a": [1, 1, None, None, 2], "b": [5, 6, 5, 5, 5]})
    numbers = numbered(rows, ["a", "b"]).to_list()
    assert numbers[2] == numbers[3]
    assert len(set(numbers)) == 4


@pytest.mark.parametrize("merged", [0, 1 << 17])
@given(numbers=st.lists(st.integers(-(2**62), 2**62)), asked=st.lists(st.integers(-(2**62), 2**62)))
@settings(max_examples=50)
def test_orders_and_places_of_whole_numbers(merged: int, numbers: list[int], asked: list[int]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "_MERGED", merged)
        series = pl.Series(numbers, dtype=pl.Int64)
        assert in_order(series).to_list() == sorted(numbers)
        assert [numbers[row] for row in order_of(series).to_list()] == sorted(numbers)
        places = place_in(in_order(series), pl.Series(numbers + asked, dtype=pl.Int64))
        assert places.to_list() == [sum(one <= other for one in numbers) for other in numbers + asked]


@given(st.data(), st.integers(1, 60))
@pytest.mark.parametrize("many", [True, False])
def test_combinations_are_numbered_in_their_order_however_many_rows_there_are(
    many: bool, data: st.DataObject, rows: int
):
    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return data.draw(st.lists(st.one_of(st.none(), values), min_size=rows, max_size=rows))

    frame = pl.DataFrame(
        {"a": column(st.integers(-3, 3)), "b": column(st.sampled_from([0, 5, 2**40])), "c": column(st.booleans())},
        schema={"a": pl.Int64, "b": pl.Int64, "c": pl.Boolean},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "_MERGED", 0 if many else 1 << 20)
        of_two, key = nesting.numbered(frame, ["a", "b"]), nesting.one_key(frame, ["a", "b", "c"])
    first = [(-(2**50) if a is None else a, -1 if b is None else b) for a, b, _ in frame.rows()]
    assert of_two.to_list() == [sorted(set(first)).index(one) for one in first]
    assert key is not None and len(set(zip(key, frame.rows(), strict=True))) == key.n_unique() == len(set(frame.rows()))
