"""Which interval encloses which: depth, parents, and the innermost interval open at a moment.

All vectorised, by sorting and binary search: a million intervals take tenths of a second whatever their depth.
Intervals of one track (a thread, say) are pushed and popped, so they nest; tracks are independent of each other.
Where some do cross (ranges of several threads, times cut to microseconds), the last begun counts as the innermost.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import msgspec
import polars as pl

_LARGEST = 2**62
_CLIMB = 40
"""The most ancestors that are tried one by one; ranges and operators of real programs nest less deeply."""
_CHECKED = 1 << 17
"""The most intervals that are always checked for crossings, which takes milliseconds. More are assumed to nest, since
they come from the stack of a thread."""


_AT_ONCE = 1 << 18
"""The most moments that are looked up at once, to save memory and to stay in the processor's caches."""
_MERGED = 1 << 17
"""Moments from which on intervals are merged with them by NumPy; for fewer, its import takes what it saves."""
_LEVELS, _TRACKS, _NEVER = 1 << 6, 1 << 6, -(2**63)
"""The most levels and tracks that are merged one after the other; and the moment that stands for none."""


class _Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Turns (track, time) into one sortable integer, by the span of time or by the rank of times."""

    origin: int
    span: int
    tracks: dict[int, int]
    times: pl.Series | None

    def keys(self, track: pl.Series, time_ns: pl.Series) -> pl.Series:
        """Sortable keys; null where the track holds no interval."""
        number = renumbered(track, self.tracks)
        if self.times is None:
            moment = time_ns.clip(self.origin, self.origin + self.span - 1) - self.origin
        else:
            moment = self.times.search_sorted(time_ns, side="right").cast(pl.Int64)
        return (number * self.span + moment).alias("key")


def _scale(track: pl.Series, start_ns: pl.Series, end_ns: pl.Series) -> _Scale:
    tracks = {value: number for number, value in enumerate(track.unique().sort().to_list())}
    origin, last = cast("int", start_ns.min()) - 1, cast("int", end_ns.max()) + 2
    span = last - origin
    if span * max(1, len(tracks)) < _LARGEST:
        return _Scale(origin=origin, span=span, tracks=tracks, times=None)
    times = pl.concat([start_ns.rename("t"), end_ns.rename("t")]).unique().sort()
    return _Scale(origin=0, span=len(times) + 2, tracks=tracks, times=times)


_FEW_VALUES = 8


def renumbered(values: pl.Series, numbers: dict[int, int]) -> pl.Series:
    """The number of each value, or null. Of few values each is compared with all rows: a fifth of a lookup's time."""
    if not 0 < len(numbers) <= _FEW_VALUES:
        return values.replace_strict(numbers, default=None, return_dtype=pl.Int64)
    number = pl.lit(None, pl.Int64)
    for value, its in numbers.items():
        number = pl.when(values == value).then(pl.lit(its, pl.Int64)).otherwise(number)
    return pl.select(number.alias(values.name)).to_series()


class Nest:
    """Intervals with their nesting. `order` gives their rows sorted, outer before inner; positions refer to that.

    An empty interval counts as one nanosecond.
    """

    def __init__(self, intervals: pl.DataFrame, track: str) -> None:
        """`intervals` has columns `track`, start_ns, duration_ns."""
        self.height, self._intervals, self._track = intervals.height, intervals, track

    @cached_property
    def _sorted(self) -> tuple[_Scale, pl.Series, pl.Series, pl.Series]:
        """The scale of the keys, the rows in order, and the keys of starts and ends in that order."""
        intervals, track = self._intervals, self._intervals[self._track]
        start_ns = intervals["start_ns"]
        end_ns = start_ns + intervals["duration_ns"].clip(lower_bound=1)
        scale = _scale(track, start_ns, end_ns)
        starts, ends = scale.keys(track, start_ns), scale.keys(track, end_ns)
        del start_ns, end_ns  # for a million intervals, what is not needed any more counts
        keys = pl.DataFrame([starts.alias("start"), ends.alias("end")])
        order = keys.select(pl.arg_sort_by("start", "end", descending=[False, True])).to_series()
        return scale, order, keys["start"].gather(order), keys["end"].gather(order)

    @property
    def order(self) -> pl.Series:
        """The rows of the intervals, in order."""
        return self._sorted[1] if self.height else pl.Series(dtype=pl.UInt32)

    @property
    def _starts(self) -> pl.Series:
        return self._sorted[2]

    @property
    def _ends(self) -> pl.Series:
        return self._sorted[3]

    @cached_property
    def depth(self) -> pl.Series:
        """For every position, how many intervals enclose it."""
        if not self.height:
            return pl.Series("depth", dtype=pl.Int64)
        closed = _no_later(self._ends.sort(), self._starts)
        return (pl.int_range(self.height, dtype=pl.Int64, eager=True) - closed).alias("depth")

    @cached_property
    def _levels(self) -> pl.Series:
        """Depth and position of every interval in one integer, sorted."""
        deepest = cast("int", self.depth.max())
        if deepest >= _LEVELS:
            return (self.depth * self.height + pl.int_range(self.height, dtype=pl.Int64, eager=True)).sort()
        levels = [(self.depth == level).arg_true().cast(pl.Int64) for level in range(deepest + 1)]
        return pl.concat([place + level * self.height for level, place in enumerate(levels)], rechunk=True)

    @cached_property
    def crosses(self) -> bool:
        """Whether some intervals do not nest: they end later than the last one before that is a level further out."""
        position, parent = self._nested_unchecked
        return len(position) > 0 and bool((self._ends.gather(parent) < self._ends.gather(position)).any())

    @cached_property
    def nested(self) -> pl.DataFrame:
        """`position` of each interval that another encloses, and its `parent`, the innermost of those."""
        position, parent = self._nested_unchecked
        if self.crosses:
            swept = self._swept_parents()
            position = swept.is_not_null().arg_true().cast(pl.Int64)
            parent = swept.gather(position)
        return pl.DataFrame([position.alias("position"), parent.alias("parent")])

    @cached_property
    def _nested_unchecked(self) -> tuple[pl.Series, pl.Series]:
        """Positions of nested intervals and their parents, if intervals nest: the last earlier one a level further out.

        Both sides are sorted by level, so that none is searched for.
        """
        if not self.height:
            return pl.Series(dtype=pl.Int64), pl.Series(dtype=pl.Int64)
        inner = self._levels.slice(int((self.depth == 0).sum()))
        parent = self._levels.gather(_no_later(self._levels, inner - self.height) - 1)
        return inner % self.height, parent % self.height

    def parents(self, positions: pl.Series) -> pl.Series:
        """Positions of the innermost enclosing intervals, or null.

        Asked of few positions it costs little, even among a million intervals.
        """
        if self.height <= _CHECKED:
            return self.parent.gather(positions)
        return self._unchecked.gather(positions) if len(positions) > self.height // 4 else self._by_level(positions)

    @cached_property
    def _unchecked(self) -> pl.Series:
        """The parents of all positions, if intervals nest."""
        return self._by_position(*self._nested_unchecked)

    def _by_position(self, position: pl.Series, parent: pl.Series) -> pl.Series:
        """Parents in the order of positions, null where there is none."""
        nobody = pl.Series("parent", [None], dtype=pl.Int64).new_from_index(0, self.height)
        return nobody.scatter(position, parent)

    def _by_level(self, positions: pl.Series) -> pl.Series:
        """Positions of the parents, or null, if intervals nest: the last earlier interval that is one level up."""
        depth = self.depth.gather(positions)
        above = (depth - 1) * self.height + positions
        before = self._levels.search_sorted(above, side="right").cast(pl.Int64) - 1
        parent = self._levels.gather(before.clip(lower_bound=0)) % self.height
        return pl.select(pl.when(depth > 0).then(parent)).to_series().alias("parent")

    @cached_property
    def parent(self) -> pl.Series:
        """For every position, that of the innermost enclosing interval, or null."""
        if not self.height:
            return pl.Series("parent", dtype=pl.Int64)
        return self._by_position(self.nested["position"], self.nested["parent"])

    def _swept_parents(self) -> pl.Series:
        """Every interval's parent if intervals cross: a walk along the tracks with a stack of ever earlier ends."""
        ends: list[int] = self._ends.to_list()
        stack: list[int] = []
        parents: list[int | None] = []
        for position, end in enumerate(ends):
            while stack and ends[stack[-1]] < end:
                stack.pop()
            parents.append(stack[-1] if stack else None)
            stack.append(position)
        return pl.Series("parent", parents, dtype=pl.Int64)

    def self_ns(self, durations: pl.Series) -> pl.Series:
        """For every position, the interval's duration (`durations` is by row) less those of its direct children."""
        lasted = durations.gather(self.order)
        inside = self.nested.select("parent", lasted.gather(self.nested["position"]).alias("inner"))
        inside = inside.group_by("parent").agg(pl.col("inner").sum())
        spent = (
            pl.DataFrame({"row": pl.int_range(self.height, dtype=pl.Int64, eager=True)})
            .join(inside, left_on="row", right_on="parent", how="left", maintain_order="left")["inner"]
            .fill_null(0)
        )
        return (lasted - spent).clip(lower_bound=0)

    def self_sums(self, durations: pl.Series, groups: pl.DataFrame) -> pl.DataFrame:
        """`calls` and the sum of self_ns by group; `durations` and `groups` are by row.

        The time of a group's intervals, less that of the intervals inside them: to tell it of each interval first took
        twice as long.
        """
        by, calls = groups.columns, pl.len().cast(pl.Int64).alias("calls")
        if self.height and self.crosses:
            own_ns = self.self_ns(durations).alias("self_ns")
            return groups[self.order].with_columns(own_ns).group_by(by).agg(calls, pl.col("self_ns").sum())
        lasted = groups.with_columns(durations.alias("self_ns")).group_by(by).agg(calls, pl.col("self_ns").sum())
        around, within = (self.rows(self.nested[end]) for end in ("parent", "position"))
        inner = [durations.gather(around).alias("around"), durations.gather(within).alias("inner")]
        spent = pl.DataFrame([*inner, *(groups[name].gather(around) for name in by)])
        spent = spent.filter(pl.col("around") > 0).group_by(by).agg(pl.col("inner").sum())
        both = lasted.join(spent, on=by, how="left", nulls_equal=True)
        return both.with_columns(pl.col("self_ns") - pl.col("inner").fill_null(0)).drop("inner")

    def innermost(self, track: pl.Series, time_ns: pl.Series) -> pl.Series:
        """Row of the innermost interval that is open on that track at that moment (its end excluded), or null."""
        if len(track) >= _MERGED and self.height and (merged := self._merged(track, time_ns)) is not None:
            return merged
        if len(track) <= _AT_ONCE:
            return self.rows(self.innermost_position(track, time_ns))
        pieces = zip(*(column.to_frame().iter_slices(_AT_ONCE) for column in (track, time_ns)), strict=True)
        found = [self.rows(self.innermost_position(*(one.to_series() for one in piece))) for piece in pieces]
        return pl.concat(found, rechunk=True)

    def _merged(self, track: pl.Series, time_ns: pl.Series) -> pl.Series | None:
        """As `innermost`, where intervals of a track do not cross as far as the moments tell, and no two are equal;
        else None."""
        import numpy as np  # noqa: PLC0415  (it takes a while)

        tracks, starts = self._intervals[self._track], self._intervals["start_ns"].to_numpy()
        tracks = tracks.fill_null(_NEVER + 1) if tracks.null_count() else tracks
        ends, order = np.maximum(self._intervals["duration_ns"].to_numpy(), 1), None
        ends, tracks = ends + starts, tracks.to_numpy()
        if (starts[1:] < starts[:-1]).any() or ((starts[1:] == starts[:-1]) & (ends[1:] > ends[:-1])).any():
            order = np.lexsort((-ends, starts))
            tracks, starts, ends = tracks[order], starts[order], ends[order]
        if ((starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1])).any():
            return None
        asked, moments = track.fill_null(_NEVER).to_numpy(), time_ns.fill_null(_NEVER).to_numpy()
        found = np.full(len(moments), -1, np.int32)
        for first in range(0, len(moments), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            different = [asked[first]]
            if (asked[some] != asked[first]).any():
                small = asked[some].min() >= 0 and asked[some].max() < _AT_ONCE  # as tracks are numbered
                different = np.flatnonzero(np.bincount(asked[some])) if small else np.unique(asked[some])
            for number in different:  # a track after the other
                rows = np.flatnonzero(asked[some] == number) if len(different) > 1 else slice(None)
                innermost = _innermost_of((starts, ends, tracks), number, moments[some][rows])
                if innermost is None or len(different) > _TRACKS:
                    return None
                found[some][rows] = innermost
        found = found if order is None else np.where(found < 0, -1, order[found])
        return pl.Series("row", found).cast(pl.UInt32, strict=False)

    def rows(self, positions: pl.Series) -> pl.Series:
        """The rows of the intervals at these positions."""
        if not self.height:
            return pl.Series("row", [None], dtype=pl.UInt32).new_from_index(0, len(positions))
        return self.order.gather(positions).alias("row")

    def innermost_position(self, track: pl.Series, time_ns: pl.Series) -> pl.Series:
        """Position of the innermost interval open at that moment, or null: the last one begun, or if it has ended, one
        of those around it.
        """
        if not self.height:
            return pl.Series("position", [None], dtype=pl.Int64).new_from_index(0, len(track))
        keys = self._sorted[0].keys(track, time_ns)
        known = keys if not keys.null_count() else keys.fill_null(-1)
        at = self._starts.search_sorted(known, side="right").cast(pl.Int64) - 1
        at = at.set(at < 0, None) if cast("int", at.min() or 0) < 0 else at
        holds = self._ends.gather(at) > known
        position = at.set(~holds, None).alias("position")
        left = (~holds).arg_true()  # not where none has begun
        at = at.gather(left)
        for _ in range(_CLIMB):
            if not len(left):
                return position
            at = self.parents(at)
            holds = self._ends.gather(at) > known.gather(left)
            position.scatter(left.filter(holds), at.filter(holds))
            left, at = left.filter(~holds), at.filter(~holds)
        position.scatter(left, self._swept(known.gather(left)))
        return position

    def _swept(self, keys: pl.Series) -> pl.Series:
        """The innermost positions at these keys, however deeply intervals nest: a walk along the track with a stack."""
        starts, ends = self._starts.to_list(), self._ends.to_list()
        stack: list[int] = []
        begun = 0
        innermost: list[int | None] = [None] * len(keys)
        moments = keys.to_list()
        for query in keys.arg_sort().to_list():
            while begun < self.height and starts[begun] <= moments[query]:
                stack.append(begun)
                begun += 1
            while stack and ends[stack[-1]] <= moments[query]:
                stack.pop()
            innermost[query] = stack[-1] if stack else None
        return pl.Series("at", innermost, dtype=pl.Int64)


def _no_later(keys: pl.Series, moments: pl.Series) -> pl.Series:
    """How many of the sorted keys are no later than each of the sorted moments: a walk along both, where to search each
    takes twelve times as long."""
    if keys.null_count() or moments.null_count():
        return keys.search_sorted(moments, side="right").cast(pl.Int64)
    counted = pl.DataFrame(
        [keys.alias("key"), pl.int_range(1, len(keys) + 1, dtype=pl.Int64, eager=True).alias("number")]
    )
    joined = moments.alias("key").to_frame().join_asof(counted, on="key", strategy="backward", check_sortedness=False)
    return joined["number"].fill_null(0)


def _innermost_of(intervals: tuple[Any, Any, Any], track: Any, moments: Any) -> Any:
    """The place of the interval of a track that is innermost at each moment, or -1; None where some cross.

    `intervals`: starts, ends and tracks, by start, outer before inner. They become stretches of the sorted moments;
    each level of depth is then written over those further out.
    """
    import numpy as np  # noqa: PLC0415

    by_time: Any = slice(None)
    if (moments[1:] < moments[:-1]).any():
        by_time = np.argsort(moments, kind="stable")  # of a few sorted runs it takes no time
        moments = moments[by_time]
    held, low, high = _holding(intervals, track, moments)
    ended = np.cumsum(np.bincount(high, minlength=len(moments) + 1))
    depth = np.arange(len(held)) - ended[low]
    innermost, levels = np.full(len(moments), -1), int(depth.max(initial=-1)) + 1
    for level in range(levels):
        some = np.flatnonzero(depth == level)
        begins, stops = low[some], high[some]
        around = innermost[begins]
        if (
            levels > _LEVELS
            or (begins[1:] < stops[:-1]).any()
            or (level and ((around < 0) | (stops > high[around])).any())
        ):
            return None
        # In turn the moments before one of them, which keep what they have, and those within.
        places, lengths = np.full(2 * len(some) + 1, -1), np.empty(2 * len(some) + 1, np.int64)
        places[1::2], lengths[1::2] = some, stops - begins
        lengths[::2] = np.append(begins, len(moments)) - np.append(0, stops)
        written = np.repeat(places, lengths)
        np.copyto(innermost, written, where=written >= 0)
    found = np.empty(len(moments), np.int64)
    found[by_time] = np.append(held, -1)[innermost]
    return found


def _holding(intervals: tuple[Any, Any, Any], track: Any, moments: Any) -> tuple[Any, Any, Any]:
    """The intervals of a track that hold some of these sorted moments: their places, and from which moment to which."""
    import numpy as np  # noqa: PLC0415

    starts, ends, tracks = intervals
    begun = int(starts.searchsorted(moments[-1], side="right"))
    held = np.flatnonzero((ends[:begun] > moments[0]) & (tracks[:begun] == track))
    if len(moments) < len(held):  # the moments before each start, counted from the other side
        before = starts[held].searchsorted(moments, side="right")
        low = np.cumsum(np.bincount(before, minlength=len(held) + 1))[:-1]
    else:
        low = moments.searchsorted(starts[held])
    some = np.flatnonzero(np.append(moments, _LARGEST)[low] < ends[held])  # the next moment is within
    held, low = held[some], low[some]
    return held, low, moments.searchsorted(ends[held])


def numbered(frame: pl.DataFrame, by: list[str]) -> pl.Series:
    """One integer for each distinct combination of the columns `by`, row by row."""
    by = _differing(frame, by)
    scales = _scales([column_of(frame, name) for name in by])
    if scales is not None:
        key, span = _one_key(scales), math.prod(size for _, _, size in scales)
        if span <= _PLACES and len(key) >= _MERGED:
            return _by_place(key, span)
        if len(distinct := key.unique().sort()) <= _FEW_KEYS:
            if cast("int", distinct.max() or 0) > _PLACES:
                return distinct.search_sorted(key, side="left").cast(pl.Int64).alias("number")
            # A place for each key is found sooner than the key among the others.
            places = pl.Series([0], dtype=pl.Int64).new_from_index(0, _PLACES + 1)
            places.scatter(distinct, pl.int_range(len(distinct), eager=True))
            return places.gather(key).alias("number")
    distinct = frame.select(by).unique().sort(by).with_row_index("number")
    joined = frame.select(by).join(distinct, on=by, how="left", maintain_order="left", nulls_equal=True)
    return joined["number"].cast(pl.Int64)


def one_key(frame: pl.DataFrame, by: list[str]) -> pl.Series | None:
    """One integer for each distinct combination of the columns `by`, which may be any; None where 64 bits do not hold
    their values."""
    by = _differing(frame, by)
    scales = _scales([column_of(frame, name) for name in by])
    return None if scales is None else _one_key(scales)


def _differing(frame: pl.DataFrame, by: list[str]) -> list[str]:
    """The columns that have several values, or the first. Eight truth values are one byte, so those always count."""
    truths = [name for name in by if frame.schema[name] == pl.Boolean]
    return [name for name in by if name in truths or not is_one_value(values_of(frame, name))] or by[:1]


_FEW_KEYS, _PLACES = 1 << 12, 1 << 18
_IN_CACHE = 1 << 15
"""Rows whose keys are made at once, so that they stay in the processor's cache meanwhile."""


def _scales(columns: list[pl.Series]) -> list[tuple[pl.Series, int, int]] | None:
    """Each column as whole numbers, with the number that stands for null, the least of all, and how many there may be.
    None where 64 bits do not hold a row's."""
    scales, span = list[tuple[pl.Series, int, int]](), 1
    for column in columns:
        numbers = column.cast(pl.UInt8) if column.dtype == pl.Boolean else column.to_physical()
        if not numbers.dtype.is_integer():
            return None
        low, high = cast("int", numbers.min() or 0), cast("int", numbers.max() or 0)
        span *= high - low + 2
        if span >= _LARGEST or high >= _LARGEST or low <= -_LARGEST:
            return None
        if numbers.null_count() or numbers.dtype == pl.UInt64:
            numbers = numbers.cast(pl.Int64).fill_null(low - 1)
        scales.append((numbers, low - 1, high - low + 2))
    return scales


def _one_key(scales: list[tuple[pl.Series, int, int]]) -> pl.Series:
    """One integer for each row's values, ordered as they are with null first."""
    if len(scales[0][0]) >= _MERGED:
        import numpy as np  # noqa: PLC0415  (it takes a while)

        keys = np.zeros(len(scales[0][0]), np.int64)
        columns = [(numbers.to_numpy(), least, size) for numbers, least, size in scales]
        for first in range(0, len(keys), _IN_CACHE):
            some = keys[first : first + _IN_CACHE]
            for numbers, least, size in columns:
                some *= size
                some += numbers[first : first + _IN_CACHE]
                some -= least
        return pl.Series(keys)
    key = None
    for numbers, least, size in scales:
        place = numbers.cast(pl.Int64) - least
        key = place if key is None else key * size + place
    assert key is not None
    return key


def _by_place(key: pl.Series, span: int) -> pl.Series:
    """The number of each key among the different ones, of many that are less than `span`."""
    import numpy as np  # noqa: PLC0415

    keys, there = key.to_numpy(), np.zeros(span, bool)
    there[keys] = True
    return pl.Series("number", (np.cumsum(there) - 1)[keys])


def by_thread(intervals: pl.DataFrame) -> Nest:
    """The nest of intervals on their threads."""
    return Nest(intervals.with_columns(numbered(intervals, ["process", "thread"]).alias("track")), "track")


def open_rows(intervals: pl.DataFrame, places: pl.DataFrame, time_ns: pl.Series) -> pl.Series:
    """The row of the innermost interval that is open at each moment in its place, or null.

    The columns of `places` (process and thread, say), which the intervals have too, tell the tracks.
    """
    by = places.columns
    track = numbered(pl.concat([intervals.select(by), places]), by)
    nest = Nest(intervals.with_columns(track.head(intervals.height).alias("track")), "track")
    return nest.innermost(track.tail(places.height), time_ns)


def union(intervals: pl.DataFrame, by: list[str], *, touching: bool = True) -> pl.DataFrame:
    """Overlapping intervals of equal `by` merged, and unless told otherwise touching ones.

    Columns: `by`, start_ns, end_ns, and `merged` (how many).
    """
    order = intervals.select(*by, "start_ns", (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"))
    tracks = [] if all(is_one_value(values_of(order, name)) for name in by) else by
    if tracks or not order["start_ns"].is_sorted():
        order = order.sort([*tracks, "start_ns"])
    reached = pl.col("end_ns").cum_max().over(tracks) if tracks else pl.col("end_ns").cum_max()
    before = pl.col("end_ns").cum_max().shift(1).over(tracks) if tracks else pl.col("end_ns").cum_max().shift(1)
    apart = pl.col("start_ns") > before if touching else pl.col("start_ns") >= before
    order = order.with_columns(reached.alias("end_ns"), (before.is_null() | apart).alias("_fresh"))
    # A piece begins with its first row, and ends where the ends up to its last row reach.
    begins = order["_fresh"].arg_true()
    ends = order["_fresh"].shift(-1, fill_value=True)
    return (
        order.select(*by, "start_ns")
        .filter(order["_fresh"])
        .with_columns(
            order["end_ns"].filter(ends),
            (ends.arg_true() - begins + 1).alias("merged"),
        )
    )


def by_stretches(
    frame: pl.DataFrame, columns: list[str], make: Callable[[pl.DataFrame, int], pl.DataFrame]
) -> pl.DataFrame:
    """The frame with the columns that `make` makes of these and the number of their first row, 0; of a frame that is
    held narrow, of a stretch of its rows after the other, so that the whole is never there."""
    stretched = getattr(frame, "stretched", None)
    if stretched is not None:
        return stretched(columns, make)
    made = make(frame.select(columns), 0)
    return pl.concat([frame.drop(made.columns, strict=False), made], how="horizontal")


def column_of(frame: pl.DataFrame, name: str) -> pl.Series:
    """The column. `frame[name]` would write out a column of one value, and the frame would keep what was written."""
    return frame.select(name).to_series()


def values_of(frame: pl.DataFrame, name: str) -> pl.Series:
    """The column of whole numbers, for a look at its values: one row of it where one value is held for all."""
    held = frame.select(name)
    return (held.head(1) if held.estimated_size() < held.height else held).to_series()


def is_one_value(column: pl.Series) -> bool:
    """Whether no two values differ."""
    return not column.null_count() and (not len(column) or bool((column == column[0]).all()))


def in_order(numbers: pl.Series) -> pl.Series:
    """The whole numbers, sorted: many by NumPy, in a fifth of the time."""
    if len(numbers) < _MERGED or numbers.null_count():
        return numbers.sort()
    import numpy as np  # noqa: PLC0415  (it takes a while)

    return pl.Series(numbers.name, np.sort(numbers.to_numpy())).set_sorted()


def order_of(numbers: pl.Series) -> pl.Series:
    """The rows of the whole numbers in their order: of many by NumPy, which makes use of sorted runs."""
    if len(numbers) < _MERGED or numbers.null_count():
        return numbers.arg_sort()
    import numpy as np  # noqa: PLC0415  (it takes a while)

    return pl.Series(np.argsort(numbers.to_numpy(), kind="stable").astype(np.uint32))


def place_in(ordered: pl.Series, numbers: pl.Series) -> pl.Series:
    """How many of the ordered numbers are no larger than each of these: of many by NumPy, in a third of the time."""
    if len(ordered) < _MERGED:
        return ordered.search_sorted(numbers, side="right")
    return pl.Series(ordered.to_numpy().searchsorted(numbers.to_numpy(), side="right"))


def lasting(intervals: pl.DataFrame) -> pl.DataFrame:
    """The intervals with a column duration_ns."""
    return intervals.with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"))
