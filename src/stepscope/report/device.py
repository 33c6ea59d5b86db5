"""A device for the terminal: datasheet beside measured."""

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.core.device_spec import DeviceReport
from stepscope.core.units import format_bytes, format_rate, format_share
from stepscope.report.terminal import describe_environment, make_table


def render_device(report: DeviceReport) -> RenderableType:
    """Peaks by dtype, measured ceilings, and their ratio."""
    environment, spec, ceilings = report.environment, report.spec, report.ceilings
    table = make_table("rate", "datasheet", "measured", "share", "by", right_from=1)
    table.columns[-1].justify = "left"
    rows = [
        (f"matrix product {dtype}", spec.peak_flops_per_s.get(dtype) if spec else None, ceiling, "FLOP/s")
        for dtype, ceiling in ceilings.matmul.items()
    ]
    if ceilings.copy:
        rows.append(("memory (copy)", spec.peak_bytes_per_s if spec else None, ceilings.copy, "B/s"))
    for name, peak, ceiling, unit in rows:
        table.add_row(
            name,
            format_rate(peak, unit) if peak else "unknown",
            format_rate(ceiling.rate, unit),
            format_share(ceiling.rate / peak) if peak else "",
            f"{ceiling.operation}, median of {ceiling.samples}",
        )
    facts = [f"{format_bytes(environment.memory_bytes)} of memory" if environment.memory_bytes else ""]
    facts += [f"{environment.multiprocessors} multiprocessors" if environment.multiprocessors else ""]
    facts += [f"L2 {format_bytes(environment.l2_bytes)}" if environment.l2_bytes else ""]
    facts += [f"driver {environment.driver}" if environment.driver else ""]
    return Group(
        Text(describe_environment(environment), style="bold"),
        Text(", ".join(fact for fact in facts if fact)),
        Text(f"Datasheet: {spec.source}." if spec else "No datasheet is known for this device; none is guessed."),
        table,
        Text(f"Ceilings measured {ceilings.measured_at}, kept for later runs."),
    )
