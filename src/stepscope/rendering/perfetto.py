"""Captures as a trace for Perfetto (ui.perfetto.dev): device work as recorded, and beside it what was made of it.

The Chrome trace format: one complete event ("X") or counter ("C") a line, microseconds from the first event of all
captures. Each device is a process with a track of steps, one of idle gaps with their causes, three a stream (work,
phases, modules), one a family, and counters; each process of the host has a track of ranges a thread. Where there are
several ranks, the names of processes begin with the rank's. Perfetto draws slices of one track nested: where they
overlap without nesting, a track goes on in further lanes.
"""

import contextlib
import gzip
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import polars as pl

from stepscope.core.errors import InputError, printable
from stepscope.core.evidence import TRACE_TOOLS
from stepscope.core.run_directory import CAPTURE_FILES, DIGEST_FILE, RUN_FILE
from stepscope.traces.captures.attribution import ROOT, Attribution
from stepscope.traces.kernels.names import kernel_labels
from stepscope.traces.read import find_capture
from stepscope.traces.table import COPIES, COUNTER_SCHEMA, empty, stepwise

_BLOCK = 65_536
"""Events turned into text at once: some 30 MB."""

_OF_RUNS = (RUN_FILE, *CAPTURE_FILES, *(DIGEST_FILE.format(tool=tool) for tool in TRACE_TOOLS))
"""What a run directory holds is measured: never written over, whichever capture is read."""

_MODEL = "(model)"
"""What ran in a phase but in no module's range."""


_WAITING = "kernels launched, not started"
"""The counter of the work that is queued for a device. What has no launch record is not counted."""


class Rank(NamedTuple):
    """One capture of those that are written: its label, empty where there is but one, and an Occupation's gaps.

    `offset_ns`: how far its clock is ahead of the first rank's.
    """

    label: str
    attribution: Attribution
    gaps: pl.DataFrame | None = None
    offset_ns: int = 0

    def named(self, group: str) -> str:
        """A group's name, the rank's first."""
        return f"{self.label}: {group}" if self.label else group


@dataclass(frozen=True, kw_only=True)
class _Counter:
    """Values (start_ns, value), each of which holds until the next, under one heading."""

    group: str
    title: str
    values: pl.DataFrame


@dataclass(frozen=True, kw_only=True)
class _Track:
    """Slices (start_ns, duration_ns, name, and any further columns, which become arguments) under one heading."""

    group: str
    title: str
    category: str
    slices: pl.DataFrame


def write_perfetto(ranks: Sequence[Rank], out: Path, *, sources: Sequence[Path] = ()) -> int:
    """Write the trace to `out`, compressed if it is named .gz, whole or not at all; the number of slices in it.

    `sources` are the captures (or their run directories): none is ever overwritten. Raises InputError where
    `out` cannot be written.
    """
    if not out.name:
        raise InputError(f"cannot write {out}: it is no file; name another one")
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        if out.exists() and not out.is_file():
            raise InputError(f"cannot write {out}: it is no file; name another one")
        if out.exists() and (out.parent / RUN_FILE).exists() and out.name in _OF_RUNS:
            raise InputError(f"cannot write {out}: it is part of a run; name another file")
        if any(_is_part_of(out, source) for source in sources):
            raise InputError(f"cannot write {out}: it is the capture itself; name another file")
        with temporary.open("wb") as file:
            if out.name.endswith(".gz"):
                # The lowest level: a million events in two seconds, a sixteenth of their size.
                with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as compressed:
                    written = _write(ranks, compressed)
            else:
                written = _write(ranks, file)
        temporary.replace(out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return written


def _is_part_of(out: Path, source: Path) -> bool:
    """Whether writing there would destroy what was read."""
    if not out.exists():
        return False
    inside = [source / name for name in (*CAPTURE_FILES, RUN_FILE)] if source.is_dir() else []
    capture = find_capture(source)
    inside += list(capture.iterdir()) if capture.is_dir() else [capture]
    return any(file.exists() and file.samefile(out) for file in inside)


@dataclass(kw_only=True)
class _Numbers:
    """Process and thread numbers given out, with the events that name and order them."""

    pids: dict[str, int] = field(default_factory=dict)
    lanes: int = 0

    def process(self, group: str) -> tuple[int, list[dict]]:
        """The process number of a group, and the events that introduce it where it is new."""
        if group in self.pids:
            return self.pids[group], []
        pid = self.pids[group] = len(self.pids) + 1
        return pid, [
            _metadata("process_name", pid, 0, {"name": printable(group)}),
            _metadata("process_sort_index", pid, 0, {"sort_index": pid}),
        ]

    def names(self, track: _Track, lane: int) -> tuple[int, int, list[dict]]:
        """Process and thread number of a lane of a track, and the events that introduce them."""
        pid, events = self.process(track.group)
        self.lanes += 1
        tid = 1_000_000 + self.lanes  # apart from every pid: a thread with its process's number is drawn first
        title = track.title if lane == 0 else f"{track.title} ({lane + 1})"
        events += [
            _metadata("thread_name", pid, tid, {"name": title}),
            _metadata("thread_sort_index", pid, tid, {"sort_index": self.lanes}),
        ]
        return pid, tid, events


def _metadata(what: str, pid: int, tid: int, arguments: dict) -> dict:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}


def _write(ranks: Sequence[Rank], file: IO[bytes] | gzip.GzipFile) -> int:
    first_ns = _origin_ns(ranks)
    profilers = sorted({rank.attribution.table.profiler for rank in ranks})
    head = {"profiler": ", ".join(profilers), "origin_ns": first_ns}
    file.write(b'{"displayTimeUnit":"ns","otherData":' + msgspec.json.encode(head) + b',"traceEvents":[\n')
    numbers, written, separator = _Numbers(), 0, b""
    for rank, part in ((one, part) for one in ranks for part in (*_tracks(one), *_counters(one))):
        origin = first_ns + rank.offset_ns
        if isinstance(part, _Counter):
            pid, events = numbers.process(part.group)
            texts = [_counter_text(block, part.title, pid, origin) for block in part.values.iter_slices(_BLOCK)]
            for text in (*map(msgspec.json.encode, events), *texts):
                file.write(separator + text)
                separator = b",\n"
            continue
        for lane, slices in enumerate(lanes(part.slices)):
            pid, tid, events = numbers.names(part, lane)
            file.write(separator + b",\n".join(msgspec.json.encode(event) for event in events))
            separator = b",\n"
            for block in slices.iter_slices(_BLOCK):
                file.write(separator + _text(block, part.category, pid, tid, origin))
            written += slices.height
    file.write(b"\n]}\n")
    return written


def _origin_ns(ranks: Sequence[Rank]) -> int:
    """The first moment of any rank, on the first rank's clock."""
    first: list[int] = []
    for rank in ranks:
        table = rank.attribution.table
        frames = (table.work, table.ranges, table.operators, table.counters)
        starts = (*(frame["start_ns"].min() for frame in frames), table.work["launch_ns"].min())
        first += [start - rank.offset_ns for start in starts if isinstance(start, int)]
    return min(first, default=0)


def _counter_text(values: pl.DataFrame, title: str, pid: int, origin: int) -> bytes:
    head = msgspec.json.encode({"ph": "C", "name": title, "pid": pid}).decode()[:-1]
    ts = _microseconds(pl.col("start_ns") - origin)
    line = pl.concat_str(pl.lit(f'{head},"ts":'), ts, pl.lit(',"args":{"value":'), "value", pl.lit("}}"))
    return ",\n".join(values.select(line).to_series().to_list()).encode()


def _text(slices: pl.DataFrame, category: str, pid: int, tid: int, origin: int) -> bytes:
    """The slices' events, a line each; further columns, where they are not null, become their arguments."""
    head = msgspec.json.encode({"ph": "X", "cat": category, "pid": pid, "tid": tid}).decode()[:-1]
    further = [name for name in slices.columns if name not in {"start_ns", "duration_ns", "name"}]
    texts = slices.select(
        _microseconds(pl.col("start_ns") - origin).alias("ts"),
        _microseconds(pl.col("duration_ns")).alias("dur"),
        _json(slices["name"]),
        *(_json(slices[name]) for name in further),
    )
    arguments = [pl.lit(f'"{name}":') + pl.col(name) for name in further]
    joined = pl.concat_str(arguments, separator=",", ignore_nulls=True) if arguments else pl.lit("")
    line = [pl.lit(f'{head},"ts":'), "ts", pl.lit(',"dur":'), "dur", pl.lit(',"name":'), "name", pl.lit(',"args":{')]
    return ",\n".join(texts.select(pl.concat_str(*line, joined, pl.lit("}}"))).to_series().to_list()).encode()


def _microseconds(nanoseconds: pl.Expr) -> pl.Expr:
    """Nanoseconds as microseconds in decimal text, exact to the nanosecond."""
    thousandths = (nanoseconds % 1_000).cast(pl.String).str.zfill(3)
    return pl.concat_str((nanoseconds // 1_000).cast(pl.String), pl.lit("."), thousandths)


def _json(values: pl.Series) -> pl.Series:
    """Each value as JSON text, null where it is null; texts are few, so each is encoded once."""
    if values.dtype.is_integer():
        return values.cast(pl.String)
    texts = values.cast(pl.String)
    distinct = texts.unique().drop_nulls()
    encoded = [msgspec.json.encode(printable(text)).decode() for text in distinct.to_list()]
    return texts.replace_strict(distinct, pl.Series(encoded, dtype=pl.String), default=None)


def lanes(slices: pl.DataFrame) -> list[pl.DataFrame]:
    """The slices, dealt out so that within each lane any two are apart or one holds the other; most need one lane."""
    if not slices.height:
        return []
    slices = slices.sort(pl.col("start_ns"), pl.col("duration_ns"), descending=[False, True])
    if _nest(slices):
        return [slices]
    numbers = pl.Series("lane", _lane_numbers(slices["start_ns"].to_list(), slices["duration_ns"].to_list()))
    return slices.with_columns(numbers).partition_by("lane", include_key=False, maintain_order=True)


def _nest(slices: pl.DataFrame) -> bool:
    """Whether slices, by start and outer before inner, are apart or hold one another.

    They do exactly if none outlasts the last one before it that is one less deep (deep: begun, but not ended, before).
    """
    count = slices.height
    positions = pl.int_range(count, dtype=pl.Int64, eager=True)
    ends = slices["start_ns"] + slices["duration_ns"].clip(lower_bound=1)
    depth = positions - ends.sort().search_sorted(slices["start_ns"], side="right").cast(pl.Int64)
    levels = depth * count + positions
    ordered = levels.sort()
    before = ordered.search_sorted(levels - count, side="right").cast(pl.Int64) - 1
    around = ordered.gather(before.clip(lower_bound=0)) % count
    return not ((depth > 0) & (ends > ends.gather(around))).any()


def _lane_numbers(starts_ns: list[int], durations_ns: list[int]) -> list[int]:
    """For slices by start, outer before inner: the first lane in which each nests."""
    open_ends: list[list[int]] = []
    numbers = []
    for start, duration in zip(starts_ns, durations_ns, strict=True):
        for stack in open_ends:
            while stack and stack[-1] <= start:
                stack.pop()
        end = start + duration
        nests = (number for number, stack in enumerate(open_ends) if not stack or stack[-1] >= end)
        number = next(nests, len(open_ends))
        if number == len(open_ends):
            open_ends.append([])
        open_ends[number].append(end)
        numbers.append(number)
    return numbers


def _tracks(rank: Rank) -> Iterator[_Track]:
    work, gaps = rank.attribution.work, rank.gaps
    if not rank.attribution.table.on_cpu:
        for device in work["device"].unique().sort().to_list():
            own = gaps.filter(pl.col("device") == device) if gaps is not None else None
            yield from _device_tracks(_device_group(rank, device), work.filter(pl.col("device") == device), own)
    yield from _host_tracks(rank)


def _device_group(rank: Rank, device: int) -> str:
    name = rank.attribution.table.devices.get(device)
    return rank.named(f"device {device}: {name}" if name else f"device {device}")


def _counters(rank: Rank) -> Iterator[_Counter]:
    """What waits for each device, and what the profiler recorded: copies' bandwidth, the allocators' bytes."""
    table = rank.attribution.table
    waiting = empty(COUNTER_SCHEMA) if table.on_cpu else _waiting(rank.attribution.work)
    for (device, name, process), values in pl.concat([waiting, table.counters]).group_by(
        "device", pl.col("name").cast(pl.String), "process", maintain_order=True
    ):
        assert isinstance(device, int)
        of_host = rank.named(_process_group(rank, process if isinstance(process, int) else 0))
        yield _Counter(
            group=of_host if device < 0 else _device_group(rank, device),
            title=str(name),
            values=values.sort("start_ns", maintain_order=True).unique("start_ns", keep="last", maintain_order=True),
        )


def _waiting(work: pl.DataFrame) -> pl.DataFrame:
    """The counter of kernels that were launched and have not started."""
    known = work.filter((pl.col("launch_ns") <= pl.col("start_ns")) & ~pl.col("kind").is_in(list(COPIES)))
    begins = known.select("device", pl.col("launch_ns").alias("start_ns"), pl.lit(1, pl.Int64).alias("change"))
    ends = known.select("device", "start_ns", pl.lit(-1, pl.Int64).alias("change"))
    return stepwise(pl.concat([begins, ends]), _WAITING)


def _device_tracks(group: str, work: pl.DataFrame, gaps: pl.DataFrame | None) -> Iterator[_Track]:
    work = work.sort("start_ns").with_columns((pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"))
    steps = _spans(work.drop_nulls("step"), ["step"]).select(
        "start_ns", "duration_ns", pl.format("step {}", "step").alias("name")
    )
    yield _Track(group=group, title="steps", category="step", slices=steps)
    if gaps is not None:
        idle = gaps.select(
            "start_ns", "duration_ns", pl.col("cause").alias("name"), "phase", "wait", _labels(gaps["after"], "before")
        )
        yield _Track(group=group, title="idle, by cause", category="idle", slices=idle)
    for stream, own in _by_number(work, "stream"):
        places = ["phase", "role", "module", "part", "family", "operator", "step", "correlation", "graph_node"]
        recorded = own.select("start_ns", "duration_ns", "name", *places)
        yield _Track(group=group, title=f"stream {stream}", category="work", slices=recorded)
        phases = _runs(own, ["phase"]).select("start_ns", "duration_ns", pl.col("phase").alias("name"))
        yield _Track(group=group, title=f"stream {stream}: phases", category="phase", slices=phases)
        module = pl.col("module").cast(pl.String).replace(ROOT, _MODEL).alias("name")
        modules = _runs(own, ["module", "phase"]).select("start_ns", "duration_ns", module, "phase")
        yield _Track(group=group, title=f"stream {stream}: modules", category="module", slices=modules)
    for family in work["family"].unique().sort().to_list():
        members = work.filter(pl.col("family") == family)
        for stream, own in _by_number(members, "stream"):
            title = family if members["stream"].n_unique() == 1 else f"{family}, stream {stream}"
            slices = own.select("start_ns", "duration_ns", _labels(own["name"], "name"), "phase", "module")
            yield _Track(group=group, title=title, category="family", slices=slices)


def _host_bits(rank: Rank) -> tuple[int, int]:
    """Nsight Systems' numbers carry the machine's above those of the system: 24 bits each of process and thread."""
    return (24, 2**24 - 1) if rank.attribution.table.profiler == "Nsight Systems" else (0, 2**63 - 1)


def _process_group(rank: Rank, process: int) -> str:
    shift, mask = _host_bits(rank)
    return f"process {(process >> shift) & mask}"


def _host_tracks(rank: Rank) -> Iterator[_Track]:
    table, (_, mask) = rank.attribution.table, _host_bits(rank)
    kinds = [
        ("ranges", "range", table.ranges.filter("nested")),
        ("ranges across threads", "range", table.ranges.filter(~pl.col("nested"))),
    ]
    if table.on_cpu:
        kinds.append(("operators", "operator", table.operators))
    for title, category, frame in kinds:
        for process, own in _by_number(frame, "process"):
            group = rank.named(_process_group(rank, process))
            for thread, slices in _by_number(own, "thread"):
                yield _Track(
                    group=group,
                    title=f"thread {thread & mask}: {title}",
                    category=category,
                    slices=slices.select("start_ns", "duration_ns", "name"),
                )


def _by_number(frame: pl.DataFrame, column: str) -> Iterator[tuple[int, pl.DataFrame]]:
    """The rows of each number of a column, one after the other, so that only those are held twice."""
    for number in frame[column].unique().sort().drop_nulls().to_list():
        yield number, frame.filter(pl.col(column) == number)


def _runs(work: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Each unbroken run of equal `by` in work that is sorted by start, from its first begin to its last end."""
    numbered = work.with_columns(pl.struct(by).rle_id().alias("run"))
    return _spans(numbered.drop_nulls(by[0]), ["run", *by])


def _spans(work: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """`by`, start_ns and duration_ns of the work of equal `by`, from its first begin to its last end."""
    return work.group_by(by, maintain_order=True).agg(
        pl.col("start_ns").min(), (pl.col("end_ns").max() - pl.col("start_ns").min()).alias("duration_ns")
    )


def _labels(names: pl.Series, alias: str) -> pl.Series:
    """The kernels' short names: the whole one stands on the stream's track."""
    distinct = names.unique().cast(pl.String)
    labels = kernel_labels(distinct.to_list())
    shown = pl.Series([labels[name] for name in distinct.to_list()], dtype=pl.String)
    return names.cast(pl.String).replace_strict(distinct, shown).alias(alias)
