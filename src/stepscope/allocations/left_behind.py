"""What recorded steps left behind, as tables and as a finding. It needs no polars: a run's checks say it too."""

from stepscope.core.answer import TEXT, Finding, Table, as_lines, note, table_of, warning
from stepscope.core.evidence import LeftBehind, MemoryGrowth
from stepscope.core.units import KIB, counted, format_bytes

SHOWN = 10
SMALL_GROWTH = KIB
"""Bytes a step. A million steps of less leave less than a GiB: a loss that is kept for a plot, as a rule."""


def growth_finding(growth: MemoryGrowth) -> Finding | None:
    """What grows, at which line, and what holds it; None where nothing does."""
    if not growth.left:
        return None
    first, bytes_a_step = growth.left[0], growth.bytes_a_step
    held = f", held by {first.kept_by}" if first.kept_by else ""
    most = f"{format_bytes(first.bytes_a_step)} of it" if len(growth.left) > 1 else "all of it"
    if first.kept_by.startswith(("the graph of", "a graph")):
        remedy = "keep loss.item() or .detach(), never a tensor with its graph; run what is not trained under no_grad()"
    elif first.kept_by:
        remedy = "empty it, keep the last few only, or keep .detach().cpu()"
    else:
        remedy = "stepscope memory --at end --stacks 3 shows where the largest come from"
    say = note if bytes_a_step < SMALL_GROWTH else warning
    return say(
        "memory-grows",
        f"Memory grows by {format_bytes(bytes_a_step)} a step, in each of {counted(len(growth.ends) - 1, 'step')} that "
        f"were recorded: {most} is allocated at {first.site}{held}.",
        {
            "bytes_a_step": bytes_a_step,
            "lines": len(growth.left),
            "first": first.site,
            "kept_by": first.kept_by or None,
        },
        remedy,
    )


def growth_tables(growth: MemoryGrowth | None) -> list[Table]:
    """The bytes at the end of each recorded step, and what each step left behind, the largest first."""
    if growth is None:
        return []
    names = ["before the first", *(f"step {i}" for i in range(1, len(growth.ends)))]
    changes = [None, *(later - earlier for earlier, later in zip(growth.ends, growth.ends[1:], strict=False))]
    collected = (
        f"{format_bytes(growth.collected_bytes)} were then freed by Python's garbage collector: circles of objects "
        "held them, which it finds now and then."
    )
    ends = table_of(
        "allocated at the end of",
        ("allocated", "B"),
        ("change", "B"),
        rows=list(zip(names, growth.ends, changes, strict=True)),
        notes=as_lines(collected) if growth.collected_bytes else (),
    )
    if not growth.left:
        return [ends]
    shown = growth.left[:SHOWN]
    left = table_of(
        "left behind by each step, allocated at", "tensor", "category", "held by", ("a step", "B"), ("tensors", TEXT),
        rows=[
            (one.site, _tensor(one), ", ".join((one.category, *one.other_categories)), one.kept_by or "(not known)",
             one.bytes_a_step, f"{one.tensors_a_step:g}")
            for one in shown
        ],
        notes=as_lines(f"{len(growth.left) - SHOWN} more lines grow.") if len(growth.left) > SHOWN else (),
    )  # fmt: skip
    return [ends, left]


def _tensor(left: LeftBehind) -> str:
    shape = "" if left.shape is None else " x ".join(map(str, left.shape))
    kinds = f" and {counted(left.other_kinds, 'other kind')}" if left.other_kinds else ""
    return f"{' '.join(part for part in (left.name, shape, left.dtype) if part)}{kinds}"
