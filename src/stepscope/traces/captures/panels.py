"""A capture as an icicle of where its time went, and as a timeline of what ran when."""

from collections.abc import Iterable, Iterator

import polars as pl

from stepscope.core.answer import Frame, Node, Panel, Slice
from stepscope.core.shown_text import middle_cut, name_shown
from stepscope.traces.captures.attribution import ROOT, Attribution
from stepscope.traces.captures.digest import TraceDigest
from stepscope.traces.captures.occupation import Occupation
from stepscope.traces.captures.summary import LAYERS_TOGETHER, NO_MODULE, OUTSIDE, TraceSummary
from stepscope.traces.kernels.names.label import kernel_labels

_SMALLEST_SHARE = 0.0005
"""The smallest share of the whole that an icicle shows: below it a part is no wider than a hair."""
_BUCKETS = 1_500
"""Stretches of a timeline in which short work is drawn together: about the pixels of a wide screen."""
_LONGEST_NAME = 80
IDLE = "idle: "
"""What the kind of a gap begins with; the cause follows."""


def icicle_panel(summary: TraceSummary) -> Panel | None:
    """Kernel time of a step by phase, module and family, each within the one before; None where nothing ran."""
    steps = max(1, summary.steps)
    module = pl.when(pl.col("module").is_null()).then(pl.lit(NO_MODULE)).otherwise(LAYERS_TOGETHER)
    rows = (
        summary.attribution.kernels.group_by(
            pl.col("phase").cast(pl.String).fill_null(OUTSIDE),
            module.alias("module"),
            pl.col("family").cast(pl.String),
        )
        .agg(pl.col("duration_ns").sum() / steps / 1e6)
        .sort("duration_ns", "phase", "module", "family", descending=[True, False, False, False])
    )
    noun = "operator" if summary.attribution.table.on_cpu else "kernel"
    if rows["module"].is_in([ROOT, NO_MODULE]).all():  # no module is known: a level of them would say nothing
        plain = (((phase, family), time_ms) for phase, _, family, time_ms in rows.iter_rows())
        return _icicle(plain, noun, "Time by phase and family")
    ways = (((phase, *_modules(path), family), time_ms) for phase, path, family, time_ms in rows.iter_rows())
    return _icicle(ways, noun, "Time by phase, module and family")


def digest_icicles(digest: TraceDigest, noun: str) -> list[Panel]:
    """What the digest of a capture keeps of its time: by phase and family, and by module and family."""
    phases = (((row.phase, row.family), row.busy_ns / 1e6) for row in digest.families)
    places = (((*_modules(row.module), row.family), row.busy_ns / 1e6) for row in digest.places)
    found = _icicle(phases, noun, "Time by phase and family"), _icicle(places, noun, "Time by module and family", 1)
    return [panel for panel in found if panel is not None]


def _icicle(ways: Iterable[tuple[tuple[str, ...], float]], noun: str, heading: str, phases: int = 2) -> Panel | None:
    """An icicle of times in milliseconds, each with the way from the outermost part to its own. `phases`: the depth of
    phases; 1 where the ways name none."""
    times: dict[tuple[str, ...], float] = {}
    levels: dict[tuple[str, ...], str] = {}
    for named, time_ms in ways:
        way: tuple[str, ...] = ("a step", *named)
        for depth in range(1, len(way) + 1):
            part = way[:depth]
            times[part] = times.get(part, 0.0) + time_ms
            levels.setdefault(part, _level(depth, len(way), phases))
    if not times:
        return None
    least = times["a step",] * _SMALLEST_SHARE
    nodes: list[Node] = []
    places: dict[tuple[str, ...], int] = {}
    for part in sorted((part for part, time in times.items() if time >= least), key=lambda part: _order(part, times)):
        places[part] = len(nodes)
        parent = places.get(part[:-1], -1)
        nodes.append(Node(name_shown(str(part[-1])), times[part], parent, levels[part]))
    note = f"{noun} time of a step in ms, the layers of a model together; parts below {_SMALLEST_SHARE:.2%} left out"
    return Panel(
        x_title="ms a step", y_title="", points=(), kind="icicle", nodes=tuple(nodes),
        frame=Frame(heading=heading, note=note),
    )  # fmt: skip


def _modules(path: str) -> list[str]:
    """The modules from the outermost in, a layer's number with the list that it is in."""
    if path in (ROOT, NO_MODULE):
        return [{ROOT: "(the model itself)", NO_MODULE: "(no module known)"}[path]]
    parts: list[str] = []
    for part in path.split("."):
        if part == "*" and parts:
            parts[-1] += ".*"
        else:
            parts.append(part)
    return parts


def _level(depth: int, length: int, phases: int) -> str:
    return {phases: "phase", 1: "all", length: "family"}.get(depth, "module")


def _order(part: tuple[str, ...], times: dict[tuple[str, ...], float]) -> list[tuple[float, str]]:
    """Parents before children, and of those on one level the longest first."""
    return [(-times[part[:depth]], part[depth - 1]) for depth in range(1, len(part) + 1)]


def timeline_panel(ranks: Iterable[tuple[str, Attribution, Occupation | None, int]]) -> Panel | None:
    """What ran when, a lane for each stream of each rank, and one for the time without work by its cause.

    `ranks`: a rank's name (empty for one alone), what it did, when its devices were idle, and what its clock is ahead
    in nanoseconds. Each shows its first step. Work shorter than a hair is drawn together. None on a CPU, whose
    operators call one another.
    """
    shown = [
        (name, _first_step(attribution), occupation, offset_ns)
        for name, attribution, occupation, offset_ns in ranks
        if not attribution.table.on_cpu
    ]
    shown = [one for one in shown if one[1].height]
    if not shown:
        return None
    begin_ns = min(int(work["start_ns"].min()) - offset for _, work, _, offset in shown)  # type: ignore[arg-type]
    end_ns = max(_end_ns(work) - offset for _, work, _, offset in shown)
    bucket_ns = max(1, (end_ns - begin_ns) // _BUCKETS)
    slices: list[Slice] = []
    for name, work, occupation, offset in shown:
        several = work["device"].n_unique() > 1
        for (device, stream), own in work.group_by("device", "stream", maintain_order=True):
            of_device = f"device {device}, " if several else ""
            lane = ", ".join(part for part in (name, f"{of_device}stream {stream}") if part)
            slices += _work(own, lane, begin_ns + offset, bucket_ns)
        if occupation is not None:
            ends = (int(work["start_ns"].min()), _end_ns(work))  # type: ignore[arg-type]
            slices += _idle(occupation, f"{name}, idle" if name else "idle", begin_ns + offset, ends, bucket_ns)
    note = f"one step; work shorter than {bucket_ns / 1e3:.3g} us is drawn together"
    return Panel(
        x_title="ms", y_title="", points=(), kind="timeline", slices=tuple(slices),
        frame=Frame(heading="What ran when", note=note, x_ends=(0.0, (end_ns - begin_ns) / 1e6)),
    )  # fmt: skip


def _first_step(attribution: Attribution) -> pl.DataFrame:
    """The work of the first step, or all of it where no step is known, by its start."""
    work = attribution.work.filter(pl.col("duration_ns") > 0)
    first = work["step"].drop_nulls().min()
    own = work.filter(pl.col("step") == first) if isinstance(first, int) else work
    return own.sort("device", "stream", "start_ns")


def _end_ns(work: pl.DataFrame) -> int:
    return int(work.select((pl.col("start_ns") + pl.col("duration_ns")).max()).item())


def _work(work: pl.DataFrame, lane: str, begin_ns: int, bucket_ns: int) -> Iterator[Slice]:
    """The work of a stream: what is long by its name, what is short by the family of most of it."""
    long = work.filter(pl.col("duration_ns") >= bucket_ns)
    labels = kernel_labels(long["name"].cast(pl.String).unique().to_list())
    for start, duration, family, name in long.select(
        "start_ns", "duration_ns", pl.col("family").cast(pl.String), pl.col("name").cast(pl.String)
    ).iter_rows():
        begin = (start - begin_ns) / 1e6
        label = middle_cut(name_shown(labels[name]), _LONGEST_NAME)
        yield Slice(lane, begin, begin + duration / 1e6, family, label)
    bucket = ((pl.col("start_ns") - begin_ns) // bucket_ns).alias("bucket")
    short = (
        work.filter(pl.col("duration_ns") < bucket_ns)
        .group_by(bucket, pl.col("family").cast(pl.String))
        .agg(pl.col("duration_ns").sum(), pl.len().alias("count"))
        .sort("bucket", "duration_ns", "family", descending=[False, True, False])
        .group_by("bucket", maintain_order=True)
        .agg(pl.col("family").first(), pl.col("duration_ns").sum(), pl.col("count").sum())
    )
    for place, family, busy_ns, count in short.iter_rows():
        begin = place * bucket_ns / 1e6
        yield Slice(lane, begin, begin + min(busy_ns, bucket_ns) / 1e6, family, "", count)


def _idle(occupation: Occupation, lane: str, begin_ns: int, ends: tuple[int, int], bucket_ns: int) -> Iterator[Slice]:
    """The gaps that are wide enough to be seen."""
    gaps = occupation.gaps.filter(
        (pl.col("duration_ns") >= bucket_ns) & pl.col("start_ns").is_between(*ends, closed="left")
    )
    for start, duration, cause, wait in gaps.select(
        "start_ns", "duration_ns", pl.col("cause").cast(pl.String), pl.col("wait").cast(pl.String)
    ).iter_rows():
        begin = (start - begin_ns) / 1e6
        yield Slice(lane, begin, begin + duration / 1e6, f"{IDLE}{cause}", name_shown(str(wait)) if wait else "")
