"""Verbs that look one thing up: `device`, `kernel` and `models`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.app.cli.output import Presentation, progress, stdout_kept_clean
from stepscope.core.answer import TEXT, Answer, Cell, Line, as_lines, table_of
from stepscope.core.device_spec import DeviceReport, find_device_spec
from stepscope.core.errors import InputError
from stepscope.core.files import decode_document, json_document, read_named
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.model_config import EDITIONS, PRESETS
from stepscope.core.options import MEASURING, Argument, Option, verb
from stepscope.core.units import counted, format_bytes, format_rate

if TYPE_CHECKING:
    from stepscope.engine.request import Tell

Again = Annotated[bool, Option("Measure anew even if ceilings are stored.", MEASURING)]


@verb("device", "stepscope device", "stepscope device --from results/h200/device.json")
def device(*, device: str, again: Again = False, from_: Path | None, shown: Presentation) -> None:
    """Name the device, its datasheet peaks, and the ceilings measured on it (stored for later runs)."""
    if from_ is None:
        with stdout_kept_clean(), progress() as tell:
            report = _report_of(device, again, tell)
    else:
        kind = "report of `stepscope device --json`"
        report = decode_document(read_named(from_), DeviceReport, str(from_), holds=kind)
    shown.show(_answer_device(report), document=lambda: json_document(report))


def _report_of(name: str, again: bool, tell: "Tell") -> DeviceReport:
    """The device's environment, datasheet and ceilings; measures (and stores) what is not stored, or all if `again`."""
    from stepscope.engine.request import Stage
    from stepscope.recording.ceilings import ceilings_for, supported_dtypes
    from stepscope.recording.environment import read_environment, resolve_device

    device = resolve_device(name)
    environment = read_environment(device)
    ceilings = ceilings_for(
        device, supported_dtypes(device), lambda what: tell(Stage(name="ceiling", detail=what)), again=again
    )
    spec = find_device_spec(environment.device_name)
    return DeviceReport(environment=environment, spec=spec, ceilings=ceilings)


def _answer_device(report: DeviceReport) -> Answer:
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


# `stepscope kernel`: what a kernel's name says.


@verb(
    "kernel",
    "stepscope kernel ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn",
    "stepscope kernel sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3 --json",
)
def kernel(name: Annotated[str, Argument("The kernel's name as a profiler shows it.")], *, shown: Presentation) -> None:
    """Explain a kernel by its name: library, types, layout, tile, and which product of a step it is."""
    from stepscope.traces.kernels.families import answer_kernel, explain_kernel

    if not name.strip():
        raise InputError("the kernel's name is empty: give it as the profiler shows it, in quotes")
    # Bytes that are no text reach a program as surrogates, which JSON cannot hold.
    explanation = explain_kernel(name.encode(errors="replace").decode())
    shown.show(answer_kernel(explanation), document=lambda: json_document(explanation))


# `stepscope models`: the presets with their sizes.


@verb("models", "stepscope models", "stepscope models --json")
def models(*, shown: Presentation) -> None:
    """List the presets: name, parameters, sizes, and what each edition of CS336's assignment calls them."""
    called = {edition: {preset: name for name, preset in names.items()} for edition, names in EDITIONS.items()}
    rows = [
        {
            "name": name,
            "parameters": parameter_count(config),
            **config.sizes,
            "head_dim": config.head_dim,
            **{edition: names.get(name) for edition, names in called.items()},
        }
        for name, config in PRESETS.items()
    ]
    columns = [(name, "" if name in ("name", *EDITIONS) else ",") for name in rows[0]]
    sizes = table_of(*columns, rows=[tuple(row.values()) for row in rows])
    shown.show(Answer(study="models", question="", tables=(sizes,)), document=lambda: json_document(rows))
