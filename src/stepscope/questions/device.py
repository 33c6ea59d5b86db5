"""What a device promises, and what it reaches."""

from stepscope.core.answer import TEXT, Answer, Cell, Line, as_lines, table_of
from stepscope.core.device_spec import DeviceReport, find_device_spec
from stepscope.core.units import counted, format_bytes, format_rate
from stepscope.engine.request import Stage, Tell
from stepscope.recording.ceilings import ceilings_for, supported_dtypes
from stepscope.recording.environment import read_environment, resolve_device


def answer_device(report: DeviceReport) -> Answer:
    """Peaks by dtype, measured ceilings, and their ratio."""
    environment, spec, ceilings = report.environment, report.spec, report.ceilings
    measured = [
        (f"matrix product {dtype}", spec.peak_flops_per_s.get(dtype) if spec else None, ceiling, "FLOP/s")
        for dtype, ceiling in ceilings.matmul.items()
    ]
    if ceilings.copy:
        measured.append(("memory (copy)", spec.peak_bytes_per_s if spec else None, ceilings.copy, "B/s"))
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            format_rate(peak, unit) if peak else "unknown",
            format_rate(ceiling.rate, unit),
            ceiling.rate / peak if peak else None,
            f"{ceiling.operation}, median of {ceiling.samples}",
        )
        for name, peak, ceiling, unit in measured
    ]
    facts = (
        f"{format_bytes(environment.memory_bytes)} of memory" if environment.memory_bytes else "",
        counted(environment.multiprocessors, "multiprocessor") if environment.multiprocessors else "",
        f"L2 {format_bytes(environment.l2_bytes)}" if environment.l2_bytes else "",
        f"driver {environment.driver}" if environment.driver else "",
    )
    source = f"Datasheet: {spec.source}." if spec else "No datasheet is known for this device; none is guessed."
    return Answer(
        study="device",
        question=f"What does {environment.device_name} promise, and what does it reach?",
        device=environment.device_name,
        versions=environment.versions,
        lead=as_lines(Line(environment.described, "strong"), ", ".join(fact for fact in facts if fact), source),
        tables=(table_of("rate", ("datasheet", TEXT), ("measured", TEXT), ("share", "%"), "by", rows=rows),),
        origin=(f"Ceilings measured {ceilings.measured_at}, kept for later runs.",),
    )


# What does this device promise, and what does it reach?


def study_device(name: str, again: bool, tell: Tell) -> DeviceReport:
    """The device's environment, datasheet and ceilings; measures (and stores) what is not stored, or all if `again`."""
    device = resolve_device(name)
    environment = read_environment(device)
    ceilings = ceilings_for(
        device, supported_dtypes(device), lambda what: tell(Stage(name="ceiling", detail=what)), again=again
    )
    spec = find_device_spec(environment.device_name)
    return DeviceReport(environment=environment, spec=spec, ceilings=ceilings)
