"""What a run's page shows of a trace of which only the digest was kept: tables and icicles, and no timeline."""

from collections.abc import Iterator

from stepscope.core.answer import Answer, Cell, Panel, Table, as_lines, table_of
from stepscope.core.page import Section
from stepscope.core.units import counted
from stepscope.traces.captures.digest import TraceDigest
from stepscope.traces.captures.panels import digest_icicles
from stepscope.traces.kernels.names.label import kernel_labels


def sections_of_digest(digest: TraceDigest, *, on_cpu: bool) -> tuple[Section, ...]:
    """Where the time went, the longest kernels, and how near the families come to the device's peaks."""
    noun = "operator" if on_cpu else "kernel"
    found = (
        ("Where the time went", digest_icicles(digest, noun), [_phases(digest, noun)]),
        ("The longest kernels", [], list(_longest(digest))),
        ("Against the device's peaks", [], [_roofs(digest)]),
    )
    sections = (_section(title, panels, [table for table in tables if table.rows]) for title, panels, tables in found)
    return tuple(one for one in sections if one.answer.panels or one.answer.tables)


def _section(title: str, panels: list[Panel], tables: list[Table]) -> Section:
    answer = Answer(study="trace", question="", tables=tuple(tables), panels=tuple(panels))
    return Section(title=title, answer=answer)


def _phases(digest: TraceDigest, noun: str) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (phase.phase, phase.kernels, phase.busy_ns, phase.gemm_fraction) for phase in digest.phases
    ]
    steps = counted(digest.steps, "step")
    kept = f"From the digest of a trace by {digest.profiler} over {steps}; the trace itself is not kept here."
    return table_of(
        "phase, a step", (f"{noun}s", "g"), (f"{noun} time ms", "ms of ns"), ("matrix share", "%"), rows=rows,
        notes=as_lines(kept),
    )  # fmt: skip


def _longest(digest: TraceDigest) -> Iterator[Table]:
    labels = kernel_labels(row.name for row in digest.top)
    for phase in dict.fromkeys(row.phase for row in digest.top):
        yield table_of(
            f"top of {phase}", "family", ("calls", "g"), ("ms a step", "ms of ns"), ("share", "%"),
            rows=[
                (labels[row.name], row.family, row.calls, row.busy_ns, row.share)
                for row in digest.top
                if row.phase == phase
            ],
        )  # fmt: skip


def _roofs(digest: TraceDigest) -> Table:
    return table_of(
        "family", ("ms a step", "ms of ns"), ("FLOP/B", ".3g"), ("bound ms", "ms of ns"), ("times its bound", ".2f"),
        "mostly",
        rows=[
            (row.family, row.device_ns, row.intensity, row.bound_ns, row.over_bound, row.verdict)
            for row in digest.roofs
        ],
    )  # fmt: skip
