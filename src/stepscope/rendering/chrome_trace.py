"""Captures written in Chrome's trace format: whole for Perfetto (ui.perfetto.dev), or a part as a smaller capture.

For Perfetto: device work as recorded, and beside it what was made of it. One complete event ("X") or counter ("C") a
line, microseconds from the first event of all captures. Each device is a process with a track of steps, one of idle
gaps with their causes, three a stream (work, phases, modules), one a family, and counters; each process of the host has
a track of ranges a thread. Where there are several ranks, the names of processes begin with the rank's. Perfetto draws
slices of one track nested: where they overlap without nesting, a track goes on in further lanes.
"""

import contextlib
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import polars as pl

from stepscope.core.errors import InputError, printable
from stepscope.core.evidence import TRACE_TOOLS
from stepscope.core.run_directory import CAPTURE_FILES, DIGEST_FILE, RUN_FILE, write_atomically
from stepscope.traces.captures.attribution import ROOT, Attribution, gather, is_node, tells_phase
from stepscope.traces.captures.digest import find_capture
from stepscope.traces.kernels.names import kernel_labels
from stepscope.traces.nesting import Nest, by_thread
from stepscope.traces.table import COPIES, COUNTER_SCHEMA, TraceTable, empty, launches, stepwise

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
    # The first moment of any rank, on the first rank's clock.
    starts: list[int] = []
    for rank in ranks:
        table = rank.attribution.table
        frames = (table.work, table.ranges, table.operators, table.counters)
        firsts = (*(frame["start_ns"].min() for frame in frames), table.work["launch_ns"].min())
        starts += [start - rank.offset_ns for start in firsts if isinstance(start, int)]
    first_ns = min(starts, default=0)
    profilers = sorted({rank.attribution.table.profiler for rank in ranks})
    head = {"profiler": ", ".join(profilers), "origin_ns": first_ns}
    file.write(b'{"displayTimeUnit":"ns","otherData":' + msgspec.json.encode(head) + b',"traceEvents":[\n')
    numbers, written, separator = _Numbers(), 0, b""
    for rank, part in ((one, part) for one in ranks for part in (*_tracks(one), *_counters(one))):
        origin = first_ns + rank.offset_ns
        if isinstance(part, _Counter):
            pid, events = numbers.process(part.group)
            fields = {"ts": _microseconds(pl.col("start_ns") - origin), "args": _object({}, {"value": pl.col("value")})}
            line = _object({"ph": "C", "name": part.title, "pid": pid}, fields)
            texts = [_lines(block, line).encode() for block in part.values.iter_slices(_BLOCK)]
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


def _text(slices: pl.DataFrame, category: str, pid: int, tid: int, origin: int) -> bytes:
    """The slices' events, a line each; further columns, where they are not null, become their arguments."""
    further = [name for name in slices.columns if name not in {"start_ns", "duration_ns", "name"}]
    texts = slices.select(
        _microseconds(pl.col("start_ns") - origin).alias("ts"),
        _microseconds(pl.col("duration_ns")).alias("dur"),
        _json(slices["name"]),
        *(_json(slices[name]) for name in further),
    )
    arguments = _object({}, {name: pl.col(name) for name in further})
    fields = {"ts": pl.col("ts"), "dur": pl.col("dur"), "name": pl.col("name"), "args": arguments}
    return _lines(texts, _object({"ph": "X", "cat": category, "pid": pid, "tid": tid}, fields)).encode()


def _object(head: Mapping[str, object], fields: Mapping[str, pl.Expr | pl.Series]) -> pl.Expr:
    """A JSON object as text: what all rows share, and fields that hold JSON already, without those that are null."""
    shared = msgspec.json.encode(head).decode()[1:-1]
    texts = [pl.concat_str(pl.lit(f'"{name}":'), value) for name, value in fields.items()]
    parts = [*([pl.lit(shared)] if shared else []), *texts]
    inside = pl.concat_str(parts, separator=",", ignore_nulls=True) if parts else pl.lit("")
    return pl.concat_str(pl.lit("{"), inside, pl.lit("}"))


def _lines(frame: pl.DataFrame, line: pl.Expr) -> str:
    return ",\n".join(frame.select(line.alias("line"))["line"].to_list())


def _microseconds(nanoseconds: pl.Expr) -> pl.Expr:
    """Nanoseconds as microseconds in decimal text, exact to the nanosecond."""
    return pl.format("{}.{}", nanoseconds // 1_000, (nanoseconds % 1_000).cast(pl.String).str.zfill(3))


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
    # They nest exactly if none outlasts the last one before it that is one less deep (deep: begun, but not ended,
    # before).
    count = slices.height
    positions = pl.int_range(count, dtype=pl.Int64, eager=True)
    ends = slices["start_ns"] + slices["duration_ns"].clip(lower_bound=1)
    depth = positions - ends.sort().search_sorted(slices["start_ns"], side="right").cast(pl.Int64)
    levels = depth * count + positions
    ordered = levels.sort()
    before = ordered.search_sorted(levels - count, side="right").cast(pl.Int64) - 1
    around = ordered.gather(before.clip(lower_bound=0)) % count
    if not ((depth > 0) & (ends > ends.gather(around))).any():
        return [slices]
    # The first lane in which each nests: by start, outer before inner.
    open_ends: list[list[int]] = []
    numbers: list[int] = []
    for start, duration in slices.select("start_ns", "duration_ns").iter_rows():
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
    numbered_slices = slices.with_columns(pl.Series("lane", numbers))
    return numbered_slices.partition_by("lane", include_key=False, maintain_order=True)


def _tracks(rank: Rank) -> Iterator[_Track]:
    work, gaps = rank.attribution.work, rank.gaps
    if not rank.attribution.table.on_cpu:
        for device in work["device"].unique().sort().to_list():
            gaps_here = gaps.filter(pl.col("device") == device) if gaps is not None else None
            yield from _device_tracks(_device_group(rank, device), work.filter(pl.col("device") == device), gaps_here)
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
    for stream, of_stream in _by_number(work, "stream"):
        places = ["phase", "role", "module", "part", "family", "operator", "step", "correlation", "graph_node"]
        recorded = of_stream.select("start_ns", "duration_ns", "name", *places)
        yield _Track(group=group, title=f"stream {stream}", category="work", slices=recorded)
        phases = _runs(of_stream, ["phase"]).select("start_ns", "duration_ns", pl.col("phase").alias("name"))
        yield _Track(group=group, title=f"stream {stream}: phases", category="phase", slices=phases)
        module = pl.col("module").cast(pl.String).replace(ROOT, _MODEL).alias("name")
        modules = _runs(of_stream, ["module", "phase"]).select("start_ns", "duration_ns", module, "phase")
        yield _Track(group=group, title=f"stream {stream}: modules", category="module", slices=modules)
    for family in work["family"].unique().sort().to_list():
        members = work.filter(pl.col("family") == family)
        for stream, of_stream in _by_number(members, "stream"):
            title = family if members["stream"].n_unique() == 1 else f"{family}, stream {stream}"
            slices = of_stream.select("start_ns", "duration_ns", _labels(of_stream["name"], "name"), "phase", "module")
            yield _Track(group=group, title=title, category="family", slices=slices)


def _host_bits(table: TraceTable) -> tuple[int, int]:
    """Nsight Systems' numbers carry the machine's above those of the system: 24 bits each of process and thread."""
    return (24, 2**24 - 1) if table.profiler == "Nsight Systems" else (0, 2**63 - 1)


def _process_group(rank: Rank, process: int) -> str:
    shift, mask = _host_bits(rank.attribution.table)
    return f"process {(process >> shift) & mask}"


def _host_tracks(rank: Rank) -> Iterator[_Track]:
    table = rank.attribution.table
    _, mask = _host_bits(table)
    kinds = [
        ("ranges", "range", table.ranges.filter("nested")),
        ("ranges across threads", "range", table.ranges.filter(~pl.col("nested"))),
    ]
    if table.on_cpu:
        kinds.append(("operators", "operator", table.operators))
    for title, category, frame in kinds:
        for process, of_process in _by_number(frame, "process"):
            group = rank.named(_process_group(rank, process))
            for thread, slices in _by_number(of_process, "thread"):
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


# A part of a capture as a smaller trace, in the format of torch.profiler that other tools open too.
#
# It holds the part's device work, the calls that launched it, what the host did meanwhile (ranges, operators, calls
# that launch nothing), and the forward operators of the backward operators in it, so that work keeps its phase and
# module. Backward work keeps its module where the thread that ran forward launches some work of the part too. Times are
# microseconds from the first event, exact to the nanosecond.


_CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "graph": "kernel"}
_JSON = "json"
"""Marks columns of text that is JSON already."""
_LEAD_NS = 1_000
"""How long after 0 the first row begins: work at 0 would be taken for work whose time was not collected."""


def write_cut(attribution: Attribution, out: Path, *, source: Path | None = None) -> int:
    """Write the attribution's work as a trace to `out`, compressed if it is named .gz; the number of rows of work.

    `source` is the capture (or its run directory): it is never overwritten. Raises InputError where `out` cannot be
    written, or the part has CPU operators without those that they call.
    """
    if not out.name.endswith((".json", ".json.gz")):
        raise InputError(f"--cut {out}: name a .json or a .json.gz")
    in_a_run = (out.parent / RUN_FILE).exists() and out.name in CAPTURE_FILES
    if in_a_run or (source is not None and _is_part_of(out, source)):
        raise InputError(f"cannot write {out}: it is a capture; name another file")
    text = "".join(_document(attribution)).encode()
    try:
        write_atomically(gzip.compress(text, 1, mtime=0) if out.name.endswith(".gz") else text, out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from None
    return attribution.work.height


def _document(attribution: Attribution) -> Iterator[str]:
    table = attribution.table
    devices = [{"id": index, "name": name} for index, name in sorted(table.devices.items())]
    parts = dict(_parts(attribution))
    starts = [frame["start_ns"].min() for frame in parts.values() if frame.height]
    origin = min((start for start in starts if isinstance(start, int)), default=0) - _LEAD_NS
    head = {"schemaVersion": 1, "deviceProperties": devices, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin}
    yield json.dumps(head)[:-1] + ', "traceEvents": [\n'
    separator = ""
    for category, frame in parts.items():
        if frame.height:
            yield separator + _events(frame, category, origin)
            separator = ",\n"
    links, operators = table.links, parts.get("cpu_op")
    if operators is not None and operators.height and links.height:
        flows = links.join(
            operators.select("process", "thread", "start_ns").unique(),
            on=["process", "thread", "start_ns"],
            how="semi",
        )
        for phase, ends in (("s", flows.filter("begins")), ("f", flows.filter(~pl.col("begins")))):
            if ends.height:
                head = {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"}
                fields = {"id": pl.col("id"), "pid": pl.col("process"), "tid": pl.col("thread")}
                line = _object(head, {**fields, "ts": _microseconds(pl.col("start_ns") - origin)})
                yield separator + _lines(ends, line)
    yield "\n]}\n"


def _parts(attribution: Attribution) -> Iterator[tuple[str, pl.DataFrame]]:
    """The rows of each category, with process and thread as the tools number them."""
    table, work = attribution.table, attribution.work
    shift, mask = _host_bits(table)

    def host(frame: pl.DataFrame) -> pl.DataFrame:
        if shift:
            process = pl.col("process") // 2**shift % (mask + 1)
            frame = frame.with_columns(process.alias("process"), (pl.col("thread") % (mask + 1)).alias("thread"))
        return frame

    if table.on_cpu:
        yield "user_annotation", host(table.ranges)
        yield "cpu_op", host(_closed(table.operators[work["operator_row"].sort()], attribution.busy_ns))
        return
    # The correlation id of each call, with one of its own where it has none.
    known = table.calls["correlation"].fill_null(0)
    largest = known.max()
    row = pl.int_range(1, len(known) + 1, dtype=pl.Int64, eager=True)
    ids = known.zip_with(known != 0, row + (largest if isinstance(largest, int) else 0))
    untold = pl.col("launch_row").is_not_null() & (pl.col("correlation").fill_null(0) == 0)
    if work.select(untold.any()).item():  # arrows or other ids told the launch, and the part has none of them
        correlation = pl.when(untold).then(ids.gather(work["launch_row"])).otherwise("correlation")
        work = work.with_columns(correlation.alias("correlation"))
    # Between the first and the last moment of the part's steps and phases.
    spans = pl.concat(one.select("start_ns", "end_ns") for one in (attribution.instances, attribution.forwards))
    begin, end = spans.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    within = pl.lit(False)
    if begin is not None:
        within = (pl.col("start_ns") >= begin) & (pl.col("start_ns") + pl.col("duration_ns") <= end)
    operators = _operators(attribution, within)
    times = pl.concat([operators.select("start_ns"), work.select(pl.col("launch_ns").alias("start_ns"))]).drop_nulls()
    first, last = times.select(pl.col("start_ns").min(), pl.col("start_ns").max().alias("last")).row(0)
    if first is not None:
        open_then = (pl.col("start_ns") <= last) & (pl.col("start_ns") + pl.col("duration_ns") >= first)
        yield "user_annotation", host(table.ranges.filter(open_then | within))
        yield "cpu_op", host(operators)
        yield "cuda_runtime", host(_calls(attribution, open_then, ids))
    for kind, category in _CATEGORIES.items():
        of_kind = work.filter(pl.col("kind").cast(pl.String) == kind)
        if of_kind.height:
            yield f"{category} {kind}", of_kind.select(
                "start_ns", "duration_ns", "name", pl.col("device").alias("process"), pl.col("stream").alias("thread"),
                "external", "device", "stream", "correlation", "graph_node", "bytes", "registers", "occupancy",
                pl.col("grid", "block").name.prefix(_JSON),
            )  # fmt: skip


def _closed(operators: pl.DataFrame, busy_ns: int) -> pl.DataFrame:
    """The operators of a CPU; raises InputError where their own times are no longer those of the part."""
    nest = by_thread(operators)
    if not nest.height or int(nest.self_ns(operators["duration_ns"]).sum()) != busy_ns:
        raise InputError("--cut: an operator of this part calls one outside it: cut a step, a phase or all")
    return operators


def _operators(attribution: Attribution, within: pl.Expr) -> pl.DataFrame:
    """The operators open at the launches of the work, with all round them, and their forward operators.

    Where no range marks the phases, those that tell them are kept too: all within the steps, and the next backward.
    """
    table, work = attribution.table, attribution.work
    recorded = table.operators
    if not recorded.height:
        return recorded
    rows = work["operator_row"].drop_nulls().unique()
    nest = by_thread(recorded)
    kept = pl.Series([False]).new_from_index(0, recorded.height).scatter(rows, True)
    if attribution.forwards.height:
        after = recorded.filter(is_node(recorded) & (pl.col("start_ns") >= (work["launch_ns"].max() or 0)))["start_ns"]
        near = within | pl.col("start_ns").is_in(after.sort().head(1).implode())
        kept = kept | (recorded.select(near).to_series() & tells_phase(recorded))
    kept = _with_ancestors(kept, nest)
    sequences = recorded.filter(kept & recorded["sequence"].is_not_null()).select("process", "sequence").unique()
    tied = recorded.with_row_index("row").join(sequences, on=["process", "sequence"], how="semi")["row"]
    return recorded.filter(_with_ancestors(kept.scatter(tied, True), nest))


def _with_ancestors(kept: pl.Series, nest: Nest) -> pl.Series:
    """The kept rows and all intervals round them."""
    frontier = kept.gather(nest.order).arg_true()
    while len(frontier):
        above = gather(nest.parent, frontier).drop_nulls().unique()
        rows = nest.rows(above)
        fresh = ~kept.gather(rows) if len(rows) else pl.Series([], dtype=pl.Boolean)
        kept = kept.scatter(rows.filter(fresh), True) if len(rows) else kept
        frontier = above.filter(fresh)
    return kept


def _calls(attribution: Attribution, open_then: pl.Expr, ids: pl.Series) -> pl.DataFrame:
    """The launches of the work, and the calls meanwhile that launch nothing."""
    calls = attribution.table.calls.with_columns(ids.alias("correlation")).with_row_index("row")
    launching = pl.col("row").is_in(attribution.work["launch_row"].drop_nulls().unique().implode())
    return calls.filter(launching | (~launches(calls["name"]) & open_then)).drop("row")


_ARGUMENTS = {
    "external": "External id", "sequence": "Sequence number", "forward_thread": "Fwd thread id",
    "correlation": "correlation", "device": "device", "stream": "stream", "graph_node": "graph node id",
    "bytes": "bytes", "registers": "registers per thread", "occupancy": "est. achieved occupancy %",
    f"{_JSON}grid": "grid", f"{_JSON}block": "block", "shapes": "Input Dims", "dtypes": "Input type",
    "values": "Concrete Inputs",
}  # fmt: skip


def _events(frame: pl.DataFrame, category: str, origin: int) -> str:
    """One complete event a line."""
    arguments = {label: pl.col(name) for name, label in _ARGUMENTS.items() if name in frame.columns}
    texts = frame["name"].cast(pl.String).fill_null("")
    distinct = texts.unique()  # names are few, so each is encoded once
    encoded = pl.Series([json.dumps(name) for name in distinct.to_list()], dtype=pl.String)
    encoded_names = texts.replace_strict(distinct, encoded, return_dtype=pl.String).alias("encoded")
    fields = {"name": encoded_names, "pid": pl.col("process"), "tid": pl.col("thread")}
    times = {
        name: _microseconds(at) for name, at in (("ts", pl.col("start_ns") - origin), ("dur", pl.col("duration_ns")))
    }
    head = {"ph": "X", "cat": category.partition(" ")[0]}
    return _lines(frame, _object(head, {**fields, **times, "args": _object({}, arguments)}))
