"""`stepscope study attention`: calls of each implementation by sequence length and head_dim, judged and timed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.app.cli.output import Presentation, stdout_kept_clean, warn
from stepscope.app.cli.questions import Answering
from stepscope.app.cli.studies.steps import STUDY, check_only, read_steps
from stepscope.core import interrupts
from stepscope.core.answer import Answer
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DEVICE_FAILED, EXIT_DONE, EXIT_INTERRUPTED, InputError
from stepscope.core.files import read_named
from stepscope.core.options import CALLS, MEASURING, STORED, WORKLOAD, Option, completed, refuse_beside, verb
from stepscope.core.parts import ATTENTIONS
from stepscope.engine.request import Tell

if TYPE_CHECKING:
    from stepscope.core.attention_call import AttentionTimings
    from stepscope.questions.attention import GateMatrix

# `stepscope study attention-gate`: is each implementation of attention right? The whole matrix, nothing timed.


_GATE_SECONDS = 120.0


FIGURES = Option("A file that --figures or --json wrote: nothing is measured.", STORED, metavar="FILE")
Attentions = Annotated[tuple[str, ...] | None, Option("", WORKLOAD, choices=tuple(ATTENTIONS))]
Dtypes = Annotated[tuple[str, ...] | None, Option("", WORKLOAD, choices=("fp32", "bf16", "fp16"))]
EveryShape = Annotated[bool, Option("Every length with every head_dim: 58 shapes, not 16; on a GPU 64, not 22.", CALLS)]
GateSeconds = Annotated[
    float | None, Option("Seconds for the whole matrix; the rest is not reached.", MEASURING, least=0)
]


@verb(
    "study attention-gate",
    "stepscope study attention-gate --attention sdpa,flash --dtype bf16 --figures gate.json",
    "stepscope study attention-gate --from results/h200/attention/gate.json",
)
def attention_gate(
    *,
    attention: Attentions,
    dtype: Dtypes,
    every_shape: EveryShape = False,
    device: str,
    seconds: GateSeconds,
    workers: int | None,
    from_: Annotated[Path | None, FIGURES],
    figures: Path | None,
    shown: Presentation,
) -> None:
    """Whether each implementation of attention is right: every dtype and shape, judged by float64.

    Exit code 0 where all that was judged is right, 1 where one is wrong, 2 where nothing was judged.
    """
    if from_ is not None:
        refuse_beside("--from")
        show_matrix(read_matrix(from_), shown)
        return
    from stepscope.core.run_directory import write_atomically
    from stepscope.questions.attention import (
        GATE_DTYPES,
        GateMatrix,
        encode_matrix,
        gate_dtypes_of,
        implementations_of,
        judge_matrix,
        shapes_of,
    )
    from stepscope.recording.device import resolve_device
    from stepscope.recording.environment import read_environment

    names = implementations_of(attention or list(ATTENTIONS))
    wanted = gate_dtypes_of(dtype or GATE_DTYPES)
    found = resolve_device(device)
    environment = read_environment(found)

    def keep(matrix: GateMatrix) -> None:
        if figures is not None:
            write_atomically(encode_matrix(matrix), figures)

    if figures is not None:
        check_place(figures)
    with stdout_kept_clean(), interrupts.keeping():
        matrix = judge_matrix(
            names,
            dtypes=wanted,
            shapes=shapes_of(every_shape, found.type),
            device=str(found),
            workers=usual_workers(found.type) if workers is None else workers,
            seconds=_GATE_SECONDS if seconds is None else seconds,
            device_name=environment.device_name,
            versions=environment.versions,
            on_answer=keep,
        )
    keep(matrix)
    show_matrix(matrix, shown)
    if 0 < matrix.reached < matrix.calls:
        warn(f"{matrix.calls - matrix.reached} of {matrix.calls} calls were not reached: give it more --seconds")
    if matrix.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(report.failures for report in matrix.reports):
        raise typer.Exit(EXIT_CHECK_FAILED)
    if not any(report.passed for report in matrix.reports):
        raise InputError(f"the gate judged nothing: {why_nothing(matrix)}")


def why_nothing(matrix: "GateMatrix") -> str:
    """Why no call of the matrix was judged, in one line."""
    if not matrix.reached:
        return f"none of {matrix.calls} calls was reached: give it more --seconds, or --workers"
    reasons: dict[str, None] = {}
    for report in matrix.reports:
        for verdict in report.verdicts:
            reasons.setdefault(f"attention {report.implementation} {verdict.reason}")
    first, *others = reasons
    more = ", the others as said above" if others else ""
    return f"{first}{more}: choose another --attention, --dtype or --device"


def show_matrix(matrix: "GateMatrix", shown: Presentation) -> None:
    """Show the matrix of verdicts."""
    from stepscope.questions.attention import encode_matrix
    from stepscope.questions.attention_answer import answer_gate

    versions = ", ".join(f"{name} {version}" for name, version in matrix.versions.items())
    verdicts = [verdict for report in matrix.reports for verdict in report.verdicts]
    unsupported = sum(verdict.outcome == "not supported" for verdict in verdicts)
    besides = f", and {unsupported} are not supported" if unsupported else ""
    judged = f"{matrix.reached - unsupported} of {matrix.calls} calls were judged{besides}"
    answer = answer_gate(matrix.reports, f"{matrix.device_name}; {versions}", origin=judged)
    shown.show(answer, document=lambda: encode_matrix(matrix).decode())


def usual_workers(device_type: str) -> int:
    """Processes that compile side by side: on a GPU all cores but two; on a CPU one for each two."""
    cores = os.cpu_count() or 1
    return max(1, cores - 2 if device_type == "cuda" else cores // 2)


def check_place(place: Path) -> None:
    """Raises InputError where the file cannot be written, before anything is measured."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("ab"):
            pass
    except OSError as error:
        raise InputError(f"cannot write {place}: {error.strerror or error}; choose another --figures") from error


def read_matrix(place: Path) -> "GateMatrix":
    """The matrix that `--figures` or `--json` wrote."""
    from stepscope.questions.attention import decode_matrix

    return decode_matrix(read_named(place), str(place))


def kind_of(data: bytes) -> str:
    """What a file says of itself; empty where it says nothing, or is no JSON."""
    import msgspec

    class Kind(msgspec.Struct):
        kind: str = ""

    try:
        return msgspec.json.decode(data, type=Kind).kind
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


Compile = Annotated[tuple[str, ...] | None, Option("", WORKLOAD, choices=("none", "default"))]
BatchSize = Annotated[int | None, Option("Sequences.", WORKLOAD)]
Heads = Annotated[int | None, Option("Heads of the queries.", CALLS)]
KvHeads = Annotated[int | None, Option("Heads of keys and values, where they have fewer: a divisor of --heads.", CALLS)]
HeadDim = Annotated[tuple[int, ...] | None, Option("Numbers in a head.", CALLS)]
Causal = Annotated[
    bool | None,
    Option("Whether a query sees only keys up to its own position, or all.", CALLS, spelled="--causal/--full"),
]
Launches = Annotated[
    str | None,
    Option(
        "hidden (the device's own time) or shown (as on an idle device).", CALLS, complete=completed("hidden", "shown")
    ),
]
Preset = Annotated[
    str | None,
    Option("seeds: the write-ups' grid, batch 8, no heads, fp32, naive.", CALLS, complete=completed("seeds")),
]
Steps = Annotated[int | None, Option("Exactly this many passes of each cell.", MEASURING, least=1)]
Seconds = Annotated[float | None, Option("Seconds for each cell.", MEASURING, least=0)]
Budget = Annotated[float | None, Option("Seconds for the whole grid; the rest is not reached.", MEASURING, least=0)]


@verb(
    "study attention",
    "stepscope study attention --seq-len 1024,4096 --attention reference,sdpa,flash --figures calls.json",
    "stepscope study attention --from calls.json --only 'Peak memory' --save calls.svg",
)
def attention(
    *,
    seq_len: tuple[int, ...] | None,
    batch_size: BatchSize,
    dtype: Dtypes,
    attention: Attentions,
    compile: Compile,
    head_dim: HeadDim,
    heads: Heads,
    kv_heads: KvHeads,
    causal: Causal,
    launches: Launches,
    preset: Preset,
    device: str,
    steps: Steps,
    seconds: Seconds,
    budget: Budget,
    workers: int | None,
    keep_digests: bool,
    from_: Annotated[tuple[Path, ...], FIGURES] = (),
    figures: Path | None,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Attention by each implementation: right or wrong, time, memory and TFLOP/s by sequence length and head_dim."""
    answering = Answering(study=STUDY, shown=shown, save=save)
    if from_:
        refuse_beside("--from", "--keep-digests")
        _read(from_, keep_digests, answering)
        return
    if keep_digests:
        raise InputError("--keep-digests says nothing without --from and a folder of runs: leave it out")
    if shown.only is not None:
        from stepscope.questions.attention_answer import TITLES

        check_only(shown.only, TITLES)
    from stepscope.core.attention_call import encode_timings
    from stepscope.core.run_directory import write_atomically
    from stepscope.questions.attention import (
        check_runnable,
        compiles_of,
        grid_groups,
        launches_of,
        measure_grid,
        sizes_for,
    )
    from stepscope.recording.device import resolve_device

    found = resolve_device(device)
    usual = sizes_for(found.type, preset)
    groups = grid_groups(
        seq_lens=seq_len or usual.seq_lens,
        head_dims=head_dim or usual.head_dims,
        implementations=attention or usual.implementations,
        dtypes=dtype or usual.dtypes,
        batch_size=usual.batch_size if batch_size is None else batch_size,
        heads=usual.heads if heads is None else heads,
        key_heads=kv_heads,
        causal=usual.causal if causal is None else causal,
        compiles=compiles_of(compile) if compile else usual.compiles,
    )
    check_runnable(groups, found.type)
    hidden = usual.launches if launches is None else launches_of(launches)
    if figures is not None:
        check_place(figures)
    ended: list[int] = []
    unreached: list[int] = []

    def keep(timings: "AttentionTimings") -> None:
        if figures is not None:
            write_atomically(encode_timings(timings), figures)

    def run(tell: Tell) -> Answer:
        from stepscope.questions.attention_answer import answer_attention

        with interrupts.keeping():
            timings, interrupted = measure_grid(
                groups,
                device=device,
                seconds=usual.seconds if seconds is None else seconds,
                steps=steps,
                launches=hidden,
                budget_s=budget,
                workers=usual_workers(found.type) if workers is None else workers,
                preset=preset or "",
                tell=tell,
                on_rows=keep,
            )
        ended.append(_exit_code(timings, interrupted))
        if all(row.outcome == "not reached" and budget is not None for row in timings.timings):
            unreached.append(len(timings.timings))
        if not timings.timings:
            raise KeyboardInterrupt  # before the first row
        return answer_attention(timings)

    answering.run(run)
    if unreached:
        raise InputError(f"none of the {unreached[0]} cells was reached in --budget {budget:g}: give it more seconds")
    if figures is not None:
        warn(f"the figures are in {figures}: --from shows them again")
    raise typer.Exit(ended[0])


def _exit_code(timings: "AttentionTimings", interrupted: bool) -> int:
    if interrupted:
        return EXIT_INTERRUPTED
    outcomes = {row.outcome for row in timings.timings}
    if "failed" in outcomes:
        return EXIT_DEVICE_FAILED
    return EXIT_CHECK_FAILED if "wrong" in outcomes else EXIT_DONE


def _refuse(mode: str, given: Mapping[str, object]) -> None:
    """Options that say nothing in this mode."""
    useless = [option for option, value in given.items() if value is not None]
    if useless:
        raise InputError(f"{', '.join(useless)} says nothing with {mode}: leave it out")


def _read(places: tuple[Path, ...], keep: bool, answering: Answering) -> None:
    """Whatever a study of attention wrote: timings, an answer; runs or the gate's matrix, which have a verb too."""
    if any(place.is_dir() for place in places):
        for place in places:
            if not place.is_dir():
                raise InputError(f"no runs at {place}: it is no folder")
        read_steps(places, keep, answering)
        return
    _refuse("a file", {"--keep-digests": keep or None})
    place, *others = places
    if others:
        raise InputError("--from shows one file at a time: give one, or folders of runs")
    data = read_named(place)
    match kind_of(data):
        case "attention-timings":
            from stepscope.core.attention_call import decode_timings
            from stepscope.questions.attention_answer import answer_attention

            answering.show(answer_attention(decode_timings(data, str(place))))
        case "attention-gate":
            _refuse("the gate's matrix", {"--save": answering.save, "--only": answering.shown.only})
            show_matrix(read_matrix(place), answering.shown)
        case _:
            answering.read(place)
