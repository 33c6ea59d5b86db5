"""The verbs that look one thing up: `device`, `kernel`, `models` and `memory`."""

from pathlib import Path
from typing import Annotated

from stepscope.app.cli.output import Presentation, check_picture, draw, json_line, progress, stdout_kept_clean
from stepscope.core.answer import Answer, table_of
from stepscope.core.device_spec import DeviceReport
from stepscope.core.environment import give_pages_back
from stepscope.core.errors import InputError
from stepscope.core.files import decode_document, json_document, read_named
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.model_config import PRESETS
from stepscope.core.options import MEASURING, STORED, Argument, Option, completed, file_or_run, verb
from stepscope.core.range_names import PHASES as CAPTURED_PHASES
from stepscope.core.run_directory import find_place

Again = Annotated[bool, Option("Measure anew even if ceilings are stored.", MEASURING)]


@verb("device", "stepscope device", "stepscope device --from results/h200/device.json")
def device(*, device: str, again: Again = False, from_: Path | None, shown: Presentation) -> None:
    """Name the device, its datasheet peaks, and the ceilings measured on it (stored for later runs)."""
    report = _measure(device, again) if from_ is None else _load(from_)
    from stepscope.questions.device import answer_device

    shown.show(answer_device(report), document=lambda: json_document(report))


def _measure(device: str, again: bool) -> DeviceReport:
    from stepscope.questions.device import study_device

    with stdout_kept_clean(), progress() as tell:
        return study_device(device, again, tell)


def _load(path: Path) -> DeviceReport:
    return decode_document(read_named(path), DeviceReport, str(path), holds="report of `stepscope device --json`")


# `stepscope kernel`: what a kernel's name says.


@verb(
    "kernel",
    "stepscope kernel ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn",
    "stepscope kernel sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3 --json",
)
def kernel(
    name: Annotated[str, Argument(help="The kernel's name as a profiler shows it.")], *, shown: Presentation
) -> None:
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
    """List the presets: name, parameters and every size."""
    rows = [
        {"name": c.name, "parameters": parameter_count(c), **c.sizes, "head_dim": c.head_dim} for c in PRESETS.values()
    ]
    columns = [(name, "," if i else "") for i, name in enumerate(rows[0])]
    sizes = table_of(*columns, rows=[tuple(row.values()) for row in rows])
    shown.show(Answer(study="models", question="", tables=(sizes,)), document=lambda: json_document(rows))


# `stepscope memory`: where the memory of a recorded step went, to the byte.


Device = Annotated[
    int | None, Option("Which device of a snapshot of several (default: the one that held most).", STORED)
]
At = Annotated[
    str | None,
    Option(
        "Another moment than the peak: 12ms, 12000us, start, end, or a phase for its peak.",
        complete=completed("start", "end", *CAPTURED_PHASES),
    ),
]
Stacks = Annotated[int | None, Option("Print the call stacks of so many of the largest allocations.", least=1)]


@verb("memory", "stepscope memory last --at backward", "stepscope memory snapshot.pickle --save memory.html")
def memory(
    file: Annotated[str, file_or_run("A snapshot of torch.cuda.memory._dump_snapshot (.pickle, gzip too)")],
    *,
    at: At,
    device: Device,
    runs: Path,
    stacks: Stacks,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Where the memory went: the peak by category, tensor, line of code and block, every byte accounted for."""
    give_pages_back()
    check_picture(save)
    from stepscope.allocations.answer import answer_memory, memory_as_json
    from stepscope.allocations.at_moment import moment_at
    from stepscope.allocations.explain import explain
    from stepscope.allocations.snapshot import read_snapshot

    explained = explain(read_snapshot(find_place(file, runs), device=device))
    explained.self_check()
    moment = moment_at(explained, at)
    answer = answer_memory(explained, moment, stacks or 0)
    shown.show(answer, document=lambda: json_line(memory_as_json(explained, moment)))
    draw(answer, save)
