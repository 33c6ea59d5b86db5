"""Verbs that look one thing up: `device`, `kernel` and `models`."""

from pathlib import Path
from typing import Annotated

from stepscope.app.cli.output import Presentation, progress, stdout_kept_clean
from stepscope.core.answer import Answer, table_of
from stepscope.core.device_spec import DeviceReport
from stepscope.core.errors import InputError
from stepscope.core.files import decode_document, json_document, read_named
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.model_config import EDITIONS, PRESETS
from stepscope.core.options import MEASURING, Argument, Option, verb

Again = Annotated[bool, Option("Measure anew even if ceilings are stored.", MEASURING)]


@verb("device", "stepscope device", "stepscope device --from results/h200/device.json")
def device(*, device: str, again: Again = False, from_: Path | None, shown: Presentation) -> None:
    """Name the device, its datasheet peaks, and the ceilings measured on it (stored for later runs)."""
    if from_ is None:
        from stepscope.questions.device import study_device

        with stdout_kept_clean(), progress() as tell:
            report = study_device(device, again, tell)
    else:
        kind = "report of `stepscope device --json`"
        report = decode_document(read_named(from_), DeviceReport, str(from_), holds=kind)
    from stepscope.questions.device import answer_device

    shown.show(answer_device(report), document=lambda: json_document(report))


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
