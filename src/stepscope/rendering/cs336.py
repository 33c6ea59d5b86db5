"""The questions of Stanford CS336, assignment 2 (systems), and where the Answer of each comes from.

Each function makes a Source: Material -> Answer or None.
"""

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stepscope.allocations.answer import answer_memory
from stepscope.allocations.at_moment import moment_at
from stepscope.allocations.explain import explain
from stepscope.allocations.prediction.answer import answer_fit, answer_tensors
from stepscope.allocations.prediction.estimate import estimate_quickly, kept_by_block
from stepscope.allocations.prediction.fit import budget_of_memory, budget_of_total, fit
from stepscope.allocations.snapshot import read_snapshot
from stepscope.core.answer import Answer, Cell, Line, Panel, as_lines, known_columns, table_of
from stepscope.core.errors import InputError
from stepscope.core.evidence import TRACE_TOOLS
from stepscope.core.figures import doubting_kinds
from stepscope.core.formulas.spelled import cell_name, parameters_of
from stepscope.core.formulas.transformer import recomputed_flops, step_flops
from stepscope.core.model_config import EDITIONS, configure
from stepscope.core.range_names import PHASES
from stepscope.core.run import Run
from stepscope.core.units import counted, format_share
from stepscope.core.workloads import DTYPES, TextbookWorkload
from stepscope.questions import parallel as ranks
from stepscope.questions.attention_step import StepCell, answer_steps
from stepscope.questions.compile import CompileCell, answer_compile
from stepscope.questions.compile import pair_up as compiled_pairs
from stepscope.questions.kernels import CapturedCell, answer_kernels
from stepscope.questions.parallel import SharedCell, answer_parallel, part_of
from stepscope.questions.speed import TimedCell, answer_speed
from stepscope.questions.speed import pair_up as speed_pairs
from stepscope.questions.warmup import answer_warmup, most_warmups
from stepscope.rendering.writeup import Assignment, Chosen, Found, Material, Measure, Question, Source, made_of
from stepscope.runs.metrics import peak_bytes, samples_of
from stepscope.runs.tables import Statistic, TableQuery, answer_table, build_records, table_panels
from stepscope.traces.kernels.families import explain_kernel
from stepscope.traces.kernels.names import kernel_label
from stepscope.traces.ranks import captures_in, load_job
from stepscope.traces.ranks_answer import answer_job, check_job

PLAIN: dict[str, str] = {"attention": "reference", "compile": "eager", "checkpointing": "none"}
"""The choices of a step of which the first questions ask."""
_GRID = ("model", "seq_len", "phase")
"""The fields over which they ask."""


def stored(study: str, only: tuple[str, ...] = (), like: str = "", *, plot: bool = True) -> Source:
    """The last stored answer of a study, or those of its tables whose titles hold one of these words.

    like: a word in its question or among its settings, where one answer of several is meant. plot: whether its plot
    belongs to the question.
    """

    def source(material: Material) -> Answer | None:
        answers = [(answer, file) for answer, file in material.answers if answer.study == study]
        meant = [one for one in answers if like in one[0].question or like in one[0].settings.values()]
        if not answers:
            return None
        newest, place = max(meant or answers, key=lambda one: (one[0].date, one[1]))
        words = [word.casefold() for word in only]
        tables = tuple(one for one in newest.tables if not words or any(word in one.title.casefold() for word in words))
        shown = msgspec.structs.replace(newest, tables=tables, panels=newest.panels if plot else ())
        others = [(file, (answer, file) in meant) for answer, file in answers if file != place]
        left = {file: "an older one" if alike else "another question" for file, alike in others}
        return made_of(shown, {place: ""}, left, material.within)

    return source


def table(
    rows: str,
    columns: str = "",
    value: str = "step",
    statistic: Statistic = "median",
    speedup: str | None = None,
    *,
    where: Mapping[str, str],
    says: Callable[[list[Run]], str] | None = None,
    widest: bool = False,
    timed: bool = True,
) -> Source:
    """The table of the largest sweep with such runs, with the cells that others of its conditions have beside it, its
    plot, and what it `says` in a sentence. widest: of the sweep with most cells, out of memory or not. timed: whether
    runs must have been measured by equal settings."""
    query = TableQuery(
        rows=_names(rows), columns=_names(columns), values=_names(value), statistic=statistic, speedup=speedup
    )

    def source(material: Material) -> Answer | None:
        vary = tuple(dict.fromkeys((*query.rows, *query.columns)))
        for chosen in material.folders(where, widest=widest, vary=vary, timed=timed):
            runs = [run for run, _ in chosen.runs]
            compared = {getattr(run.workload, name, None) for run in runs for name in query.columns[:1]}
            if (query.columns and len(compared) < 2) or (speedup is not None and speedup not in compared):
                continue
            try:
                records = build_records(runs, query)
                measured = {name for record in records for name, figure in record.items() if figure is not None}
                if not any(name in measured or f"{name}_median_s" in measured for name in query.values):
                    continue
                panels: tuple[Panel, ...] = ()
                with contextlib.suppress(InputError):  # the fields make no axis
                    panels = table_panels(runs, query)
                # Where it was measured, as the answers of other studies say it.
                machines = [run.environment for run in runs if run.environment is not None]
                answer = msgspec.structs.replace(
                    answer_table(runs, query, bare=False),
                    panels=panels,
                    device=", ".join(dict.fromkeys(where.limited_device for where in machines)),
                    versions=dict(machines[-1].versions) if machines else {},
                    date=max(run.day for run in runs),
                )
                if says is not None and (said := says(runs)):
                    first, *others = answer.tables
                    first = msgspec.structs.replace(first, notes=(*as_lines(said), *first.notes))
                    answer = msgspec.structs.replace(answer, tables=(first, *others))
                return chosen.beside(answer)
            except InputError:  # the folder mixes experiments: a smaller one may not
                continue
        return None

    return source


def how_much_they_vary(runs: list[Run]) -> str:
    """The largest deviation of a phase over its cells, in a sentence."""
    shares = [
        (samples.stdev_s / samples.mean_s, name, run)
        for run in runs
        if run.status == "done"
        for name in PHASES
        if (samples := samples_of(run, name)) is not None
        if samples.stdev_s is not None and samples.mean_s
    ]
    if not shares:
        return "Too few steps were measured to say how much they vary."
    share, name, run = max(shares, key=lambda one: one[0])
    middle = statistics.median(share for share, _, _ in shares)
    return (
        f"Over the steps of one process the standard deviation of a phase is {format_share(middle)} of "
        f"its mean in the middle of all cells, and at most {format_share(share)} ({name} of {cell_name(run.workload)})."
    )


def which_run_out(runs: list[Run]) -> str:
    """Which cells ran out of memory, in a sentence."""
    out = [cell_name(run.workload) for run in runs if run.status == "out-of-memory"]
    return f"Out of memory: {', '.join(out)}." if out else f"None of these {len(runs)} cells runs out of memory."


def what_bits_change(runs: list[Run]) -> str:
    """How many times fp32's peak that of bf16 is, phase by phase, in a sentence."""
    peaks = {
        (run.workload.phase, "-".join(run.workload.words("dtype")), run.workload.dtype): peak
        for run in runs
        if (peak := peak_bytes(run))
    }
    said: list[str] = []
    for phase in dict.fromkeys(phase for phase, _, _ in peaks):
        cells = [cell for one, cell, dtype in peaks if one == phase and dtype == "fp32"]
        ratios = [
            peaks[phase, cell, "bf16"] / peaks[phase, cell, "fp32"] for cell in cells if (phase, cell, "bf16") in peaks
        ]
        if ratios:
            ends = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
            said.append(f"{' to '.join(ends)} times in {counted(len(ratios), 'cell')} of phase {phase}")
    return f"The peak in bf16 beside fp32's: {', '.join(said)}." if said else ""


def warmup(material: Material) -> Answer | None:
    """The steps of one workload after different numbers of warm-up steps."""
    sweeps = [(most_warmups(run for run, _ in chosen.runs), chosen) for chosen in material.folders({"phase": "train"})]
    runs, chosen = max(sweeps, key=lambda each: len(each[0]), default=([], None))
    if chosen is None or len(runs) < 2:
        return None
    used = [found for found in chosen.runs if found[0] in runs]
    return replace(chosen, runs=used, left={}).beside(answer_warmup(runs))


def captured(material: Material, models: str = "") -> Chosen | None:
    """The plain steps in fp32 of which there are captures, and those that ran out of memory: of the folder with most
    phases and cells, and of others what it lacks. models: those asked about; empty: all."""

    def phases(runs: list[Run]) -> int:
        return len({run.workload.phase for run in runs if run.evidence.captures})

    def keep(run: Run) -> bool:
        return bool(run.evidence.captures) or run.status == "out-of-memory"

    wanted = _of(models, {"dtype": "fp32", **_PHASES})
    folders = material.folders(wanted, widest=True, first=phases, keep=keep, vary=_GRID)
    return next(iter(folders), None)


def kernels(letters: str, models: str = "") -> Source:
    """Questions of the study of kernels, of the sweep with most captures."""

    def source(material: Material) -> Answer | None:
        chosen = captured(material, models)
        cells: list[CapturedCell] = []
        for run, directory in chosen.runs if chosen else ():
            digests = [material.digest(run, directory, tool) for tool in TRACE_TOOLS]
            wanted = next((digest for digest in digests if digest is not None), None)
            if wanted is not None:
                other = next((digest for digest in digests if digest not in (None, wanted)), None)
                cells.append(CapturedCell(run=run, digest=wanted, other=other))
        if chosen is None or not cells:
            return None
        out = [run for run, _ in chosen.runs if run.status == "out-of-memory"]
        return chosen.beside(answer_kernels(cells, letters, out))

    return source


def speed(material: Material, models: str = "") -> Answer | None:
    """Precision: the same step in fp32 and fewer bits, of the folder with most models. A capture says why: what of the
    step are products, which alone become faster."""
    studies = [
        (chosen, [TimedCell(run=run, digest=material.digest(run, at, "kineto")) for run, at in chosen.runs])
        for chosen in material.folders(_of(models, {"phase": "forward-backward,train", "accumulation": "1", **PLAIN}))
        if len({run.workload.dtype for run, _ in chosen.runs}) > 1
    ]

    def worth(study: tuple[Chosen, list[TimedCell]]) -> tuple[bool, int]:
        _, cells = study
        return (
            2 * sum(cell.digest is not None for cell in cells) > len(cells),
            len({cell.run.workload.name for cell in cells}),
        )

    chosen, cells = max(studies, key=worth, default=(None, []))
    return chosen.beside(answer_speed(speed_pairs(cells, DTYPES))) if chosen else None


def beside(
    cell: Callable[..., Any], answer: Callable[[list[Any]], Answer], field: str, base: str, **wanted: str
) -> Source:
    """The answer on the cells of a sweep that measured the base's value of a field beside others."""

    def source(material: Material) -> Answer | None:
        for chosen in _both(material, field, base, **wanted):
            cells = [cell(run=run, digest=material.digest(run, at, "kineto")) for run, at in chosen.runs]
            return chosen.beside(answer(cells))
        return None

    return source


def parallel(kinds: Sequence[str], *titles: str, of: str = "") -> Source:
    """What the study of strategies found of these kinds, with these tables, in the largest folder with ranks. of: how
    the name of a strategy begins without which the folder does not answer."""

    def source(material: Material) -> Answer | None:
        for chosen in material.folders({"phase": "train"}):
            runs = [run for run, _ in chosen.runs]
            shared = any(run.shared is not None and run.workload.parallel.startswith(of) for run in runs)
            if shared and any(run.workload.ranks == 1 for run in runs):
                with contextlib.suppress(InputError):  # no batch was measured both ways
                    part = part_of(answer_parallel(SharedCell(run=run) for run in runs), kinds, titles)
                    return chosen.beside(part)
        return None

    return source


def traced_ranks(material: Material) -> Answer | None:
    """Where the time of the ranks of a fully sharded step goes, by their captures; of the newest that has them all."""
    traced = [
        (run, directory)
        for run, directory in material.runs
        if run.workload.parallel.startswith("fsdp") and (directory / "rank-1").is_dir()
    ]
    for run, directory in sorted(traced, key=lambda one: one[0].created, reverse=True):
        with contextlib.suppress(InputError):  # damaged, or not of all ranks
            job = load_job(captures_in(directory), say=lambda _: None)
            left = {other.parent: "an older one" for _, other in traced if other != directory}
            answer = answer_job(job, check_job(job), cell_name(run.workload))
            shares = [rank.exposed_ns / max(1, rank.end_ns - rank.start_ns) for rank in job.ranks]
            ends = dict.fromkeys(map(format_share, (min(shares), max(shares))))
            said = (
                f"{cell_name(run.workload)}: all-gathers and reduce-scatters together are waited for, while a rank "
                f"computes nothing, for {' to '.join(ends)} of a step; what else they take ends behind computing."
            )
            first, *others = answer.tables
            first = msgspec.structs.replace(first, notes=(*as_lines(said), *first.notes))
            answer = msgspec.structs.replace(answer, tables=(first, *others))
            return Chosen(runs=[(run, directory)], left=left, within=material.within).beside(answer)
    return None


def growth_of_checkpointing(_: Material) -> Answer:
    """What the step of the newer xl keeps by depth, for groups of blocks and for calls that hold calls, by
    arithmetic; nothing needs to have been measured."""
    steps = [
        TextbookWorkload(
            model=configure(_XL, layers=layers), batch_size=4, seq_len=2048, dtype="bf16", phase="train",
            checkpointing=checkpointing,
        )
        for layers in (16, 32, 64)
        for checkpointing in ("every-1", "every-2", "every-4", "nested-2")
    ]  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for step in steps:
        predicted = estimate_quickly(step)
        again = recomputed_flops(step) / step_flops(step)
        kept = predicted.saved_for_backward
        rows.append((step.layers, step.checkpointing, kept, predicted.peak_bytes, predicted.peak_phase, again))
    table = table_of(
        "layers", "checkpointing", ("there more when forward ends", "B"), ("peak", "B"), "in",
        ("FLOPs again", "%"),
        rows=rows,
        notes=(
            Line(f"Predicted for {_XL} at 4 x 2048 in bf16, without the allocator's remainders.", "strong"),
            Line("Groups keep an input each, so they grow with the number of layers. Calls of halves (nested-2) keep "
                 "two when forward ends, and in backward one for each level of halving: the levels grow with the "
                 "logarithm of the layers, and with them what runs again."),
        ),
    )  # fmt: skip
    return Answer(study="fit", question="", tables=(table,))


def recorded_memory(material: Material, models: str = "") -> Answer | None:
    """What the largest recorded step held at its peak, and its timeline: of training, where that was recorded to its
    end; else as far as memory sufficed, or of forward."""
    recorded = [
        (run, directory, file)
        for run, directory in material.runs
        if not models or run.workload.name in models.split(",")
        if "memory" in run.artifacts and (file := directory / run.artifacts["memory"]).is_file()
    ]

    def worth(one: tuple[Run, Path, Path]) -> tuple[bool, bool, bool, bool, float, int]:
        run, _, file = one
        whole, train = run.status == "done", run.workload.phase == "train"
        plain = all(getattr(run.workload, name, value) == value for name, value in PLAIN.items())
        return whole and train, whole, train, plain, parameters_of(run.workload) or 0, file.stat().st_size

    run, directory, file = max(recorded, key=worth, default=(None, None, None))
    if run is None or directory is None or file is None:
        return None
    explained = explain(read_snapshot(file))
    left = {other.parent: "smaller, or less of a step" for _, other, _ in recorded if other.parent != directory.parent}
    chosen = Chosen(runs=[(run, directory)], left=left, within=material.within)
    return chosen.beside(answer_memory(explained, moment_at(explained, None)))


def kept_tensors(material: Material, models: str = "") -> Answer | None:
    """The sizes of what the largest measured step keeps for backward, by arithmetic."""
    if (largest := _largest(material, models)) is None:
        return None
    run, workload = largest
    return _predicted(answer_tensors(workload, kept_by_block(workload)), run)


def arithmetic_of_peak(material: Material, models: str = "") -> Answer | None:
    """The bytes of parameters, gradients, optimizer and activations of that step, by arithmetic."""
    if (largest := _largest(material, models)) is None:
        return None
    run, workload = largest
    on_cpu = run.environment is not None and run.environment.device_type == "cpu"
    return _predicted(answer_fit(fit(workload, device_type="cpu" if on_cpu else "cuda")), run)


def why_out(material: Material, models: str = "") -> Answer | None:
    """The arithmetic of the smallest step that ran out of memory in the widest sweep, against the memory it had."""
    for folder in material.folders(_of(models, _TRAIN), widest=True):
        out = [
            (run, run.workload)
            for run, _ in folder.runs
            if run.status == "out-of-memory" and run.workload.sizes is not None
        ]
        if not out:
            continue
        run, workload = min(out, key=lambda each: (each[1].sizes.d_model * each[1].layers, each[1].seq_len))
        where, budget = run.environment, None
        if where is not None and where.memory_limit_bytes:
            budget = budget_of_memory(where.memory_limit_bytes)
        elif where is not None and where.memory_bytes:
            budget = budget_of_total(where.memory_bytes, where.device_name)
        return _predicted(answer_fit(fit(workload, budget)), run)
    return None


def kernel_names(material: Material, models: str = "") -> Answer | None:
    """What the names of the longest kernels say, of the sweep with most captures."""
    wanted = ("family", "library", "does", "layout", "products", "cut")
    rows: dict[str, tuple[str | None, ...]] = {}
    chosen = captured(material, models)
    for run, directory in chosen.runs if chosen else ():
        digest = next(filter(None, (material.digest(run, directory, tool) for tool in TRACE_TOOLS)), None)
        for row in digest.top if digest is not None else ():
            label = kernel_label(row.name)
            if label not in rows:
                lines = dict(explain_kernel(row.name).lines)
                rows[label] = (label, *(lines.get(heading) for heading in wanted))
    table = known_columns("The longest kernels, by their names", ("kernel", *wanted), tuple(rows.values()))
    return Answer(study="kernel", question="", tables=(table,)) if rows else None


def _predicted(answer: Answer, run: Run) -> Answer:
    """A prediction, which says that it is one and of which step, without what it says to the command line."""
    predicted = Line(f"Predicted by arithmetic for {cell_name(run.workload)}; nothing here was measured.", "strong")
    tables = [table for table in answer.tables if table.rows]
    first = msgspec.structs.replace(tables[0], notes=(predicted, *tables[0].notes))
    return msgspec.structs.replace(answer, tables=(first, *tables[1:]))


def _of(models: str, wanted: Mapping[str, str]) -> dict[str, str]:
    """What is wanted of runs, of these models alone where some are named."""
    return {**wanted, "model": models} if models else dict(wanted)


def _largest(material: Material, models: str = "") -> tuple[Run, TextbookWorkload] | None:
    """The largest measured step of training whose sizes are known, with its workload."""

    def size(step: tuple[Run, TextbookWorkload]) -> tuple[int, int, bool]:
        _, workload = step
        return workload.sizes.d_model * workload.layers, workload.seq_len, workload.dtype == "fp32"

    steps = [
        (run, run.workload)
        for folder in material.folders(_of(models, {"phase": "train", **PLAIN}))
        for run, _ in folder.runs
        if run.status == "done" and run.workload.sizes is not None
    ]
    return max(steps, key=size, default=None)


def _both(material: Material, field: str, base: str, **wanted: str) -> list[Chosen]:
    """The folders in which some runs have the base's value of a field, and others another; most values first."""
    folders = [
        (chosen, {getattr(run.workload, field) for run, _ in chosen.runs}) for chosen in material.folders(wanted)
    ]
    kept = [chosen for chosen, values in folders if {base} < values and _pairs(chosen.runs, field, base)]

    def worth(chosen: Chosen) -> tuple[bool, int]:
        """A sweep of this field before one of many, of which a few cells differ in it."""
        runs = chosen.runs
        paired = {tuple(run.workload.words(field)) for run, _ in runs if getattr(run.workload, field) != base}
        of_it = [run for run, _ in runs if tuple(run.workload.words(field)) in paired]
        return 2 * len(of_it) > len(runs), _pairs(runs, field, base)

    return sorted(kept, key=worth, reverse=True)


_UNDOUBTED = 1_000
"""How many doubted pairs a pair that nothing doubts is worth."""


def _pairs(cells: list[Found], field: str, base: str) -> int:
    """How many runs that no finding doubts have such a counterpart of the base's value; a doubted one counts little."""
    alike = [run.workload.words(field) for run, _ in cells if getattr(run.workload, field) == base]
    others = [run for run, _ in cells if getattr(run.workload, field) != base and run.workload.words(field) in alike]
    return sum(1 if doubting_kinds(run) else _UNDOUBTED for run in others)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


# The assignment, and what measures each question.


def _answer(study: str, cost: int, full: str = "", small: str | None = None, **more: Any) -> Measure:
    """A study that leaves its answer as JSON."""
    words, less = (f"study {study} {options}".strip() for options in (full, full if small is None else small))
    return Measure(study, cost, words, less, "answer", **{"takes_memory": False, **more})


_WARMUP = Measure(
    "warmup",
    20,
    "study warmup --model small --seq-len 512",
    "study warmup --model tiny --seq-len 64",
    implied="--phase train --dtype fp32",
    takes_memory=False,
    takes_s=20,
    small_s=30,
)
_STEPS = Measure(
    "step-time",
    60,
    "sweep --model small,medium,large,xl,2.7B --seq-len 128,256,512,1024",
    "sweep --model tiny --seq-len 64,128,256 --steps 5",
    small_s=25,
)
_KERNELS = Measure(
    "kernels",
    50,
    "sweep --model small,medium,large --seq-len 128,512,1024 --dtype fp32 --phase forward,train --record kineto",
    "sweep --model tiny --seq-len 64,128 --phase forward,train --steps 5 --record kineto",
    small_s=40,
)
_SPEED = Measure(
    "precision-speed",
    40,
    "study speed --model small,medium,large,xl,2.7B --seq-len 512 --dtype fp32,bf16",
    "study speed --model tiny --seq-len 64 --dtype fp32,bf16 --steps 5",
    implied="--phase forward-backward",
    together=("dtype",),
    small_s=20,
)
_MEMORY = Measure(
    "memory",
    45,
    "sweep --model 2.7B --seq-len 128,256,512 --dtype fp32,bf16 --phase forward,train",
    "sweep --model tiny --seq-len 64,128 --dtype fp32,bf16 --phase forward,train --steps 5",
    of_memory=True,
)
_RECORDED = Measure(
    "memory-recorded",
    30,
    "sweep --model 2.7B --seq-len 512 --phase forward,train --record memory",
    "sweep --model tiny --seq-len 64 --phase forward,train --steps 5 --record memory",
    takes_s=15,
    small_s=25,
)
_COMPILE = Measure(
    "compile",
    55,
    "study compile --model small,medium,large --seq-len 512",
    "study compile --model tiny --seq-len 32 --phase forward,forward-backward --steps 5",
    implied="--phase forward,train --compile eager,default --dtype bf16",
    takes_s=30,
    small_s=120,
)
_ATTENTION = _answer(
    "attention",
    35,
    "--preset cs336-2025",
    "--preset cs336-2025 --seq-len 64,128,256 --head-dim 16,32 --batch-size 1 --seconds 0.05",
    takes_memory=True,
    takes_s=180,
    small_s=40,
)
_FLASH = Measure(
    "attention-flash",
    36,
    "study attention --seq-len 1024,4096,16384 --head-dim 64,128 --attention reference,flash --dtype bf16 "
    "--batch-size 1 --causal",
    "study attention --seq-len 64,128,256 --head-dim 16,32 --batch-size 1 --heads 2 "
    "--attention reference,sdpa,flash-tiled --causal --seconds 0.05",
    "answer",
    takes_s=90,
    small_s=30,
)
_FLASH_STEP = Measure(
    "attention-step",
    38,
    "study attention-step --model large --seq-len 1024 --attention reference,flash",
    "study attention-step --model tiny --seq-len 64 --attention reference,sdpa --steps 5",
    implied="--phase train --dtype bf16",
    together=("attention",),
    takes_s=20,
    small_s=30,
)
_COLLECTIVES = Measure(
    "collectives",
    32,
    "study collectives --ranks 2",
    "study collectives --ranks 2 --backend gloo --largest 64KiB --seconds 0.05",
    "answer",
    gpus=2,
    takes_s=60,
    takes_memory=False,
    small_s=20,
)
_RANKS = Measure(
    "parallel",
    58,
    "study parallel --model large --ranks 2",
    "study parallel --model tiny --seq-len 32 --parallel ddp-naive,ddp-flat,ddp-overlap,ddp-bucketed,zero1 --ranks 2 "
    "--steps 5 --device cpu",
    implied="--phase train --dtype bf16 --seq-len 512 --batch-size 8",
    gpus=2,
    takes_s=300,
    small_s=120,
)
_PLAN = Measure(
    "plan",
    4,
    "plan --model llama3-405B --ranks 1024 --device H100 --seq-len 8192 --batch-size 1024",
    "plan --model small --ranks 8 --batch-size 64",
    "answer",
    takes_memory=False,
)

_BY_LENGTH = ("forward, ms", "backward, ms", "memory", "without a time")
_TRAIN = {"phase": "train", "dtype": "fp32", **PLAIN}
_PHASES = {"phase": "forward,train", **PLAIN}

_TIMES = table(
    "model,seq_len",
    value="forward,backward,optimizer",
    statistic="mean-std",
    where=_TRAIN,
    says=how_much_they_vary,
    widest=True,
)
_PEAKS = table("model,seq_len", "phase", "peak_memory", where={"dtype": "fp32", **_PHASES}, timed=False)


def _peaks_beside(dtype: str) -> Source:
    return table(
        "model,seq_len,phase",
        "dtype",
        "peak_memory",
        speedup="fp32",
        where={"dtype": f"fp32,{dtype}", **_PHASES},
        says=what_bits_change,
        timed=False,
    )


_PEAKS_BY_DTYPE, _PEAKS_BY_FP16 = _peaks_beside("bf16"), _peaks_beside("fp16")
_BY_ATTENTION = beside(StepCell, answer_steps, "attention", "reference", phase="train", compile="eager")
_COMPILED = beside(CompileCell, lambda cells: answer_compile(compiled_pairs(cells)), "compile", "eager")
_SENDING = parallel(ranks.DATA_PARALLEL, ranks.STRONG, ranks.PHASES, ranks.COMMUNICATION)

ASSIGNMENT = Assignment(
    title="CS336 assignment 2: systems",
    parts={
        "Timing a step": (
            Question("benchmarking-b", "How long do forward and backward of each model take, and how much do they "
                     "vary?", _STEPS, _TIMES, "times"),
            Question("benchmarking-c", "What do the figures become without warm-up steps, or with few?", _WARMUP,
                     warmup),
            Question("benchmarking-lengths", "How does a training step grow with the sequence, and which cells run out "
                     "of memory?", _STEPS, table("model", "seq_len", where=_TRAIN, says=which_run_out, widest=True),
                     "memory"),
        ),
        "Kernels of a step": (
            Question("kernels-a", "How long is each phase in the profile, and is that what the timer says?", _KERNELS,
                     kernels("a")),
            Question("kernels-b", "Which kernel takes longest in forward, how often is it called, and is it the same "
                     "with backward?", _KERNELS, kernels("bj")),
            Question("kernels-c", "Which kernels other than matrix products take time in forward?", _KERNELS,
                     kernels("ck")),
            Question("kernels-d", "Which share of the time are matrix products, in inference and in a training step?",
                     _KERNELS, kernels("d")),
            Question("kernels-e", "How does softmax compare with the matrix products of attention, in time and in "
                     "FLOPs?", _KERNELS, kernels("ei")),
            Question("kernels-f", "How long is backward beside forward, in kernel time and by the timer, and why is it "
                     "nearer to forward in small models?", _KERNELS, kernels("f")),
            Question("kernels-h", "What bounds the kernels: arithmetic, memory or their launch?", _KERNELS,
                     kernels("h")),
            Question("kernels-names", "What do the names of the kernels say?", _KERNELS, kernel_names),
        ),
        "Mixed precision": (
            Question("accumulation", "What becomes of a sum of many small numbers in 16 bits?",
                     _answer("accumulation", 1), stored("accumulation")),
            Question("precision-a", "Which dtype has each part of the model under autocast?",
                     _answer("autocast", 2, "--dtype fp16 --rules cuda"),
                     stored("autocast", ("modules",), like="fp16")),
            Question("precision-b", "Which parts of normalisation are sensitive to few bits, and is bf16 treated as "
                     "fp16 is?", _answer("normalisation", 3),
                     stored("normalisation", ("squares", "error of the output by"))),
            Question("formats", "What can each format of few bits hold, and how finely?", _answer("formats", 5),
                     stored("formats")),
            Question("underflow", "Which gradients does fp16 lose, and what does scaling the loss keep?",
                     _answer("underflow", 6, "--model small", "--model tiny"), stored("underflow")),
            Question("softmax", "What does softmax do in few bits, and why is the largest subtracted first?",
                     _answer("softmax", 7), stored("softmax")),
            Question("precision-c", "How much faster are forward and backward in bf16, by the size of the model?",
                     _SPEED, speed, "times"),
        ),
        "Memory": (
            Question("memory-a", "How does memory develop over a training step, and what is it at the peak?", _RECORDED,
                     recorded_memory, "memory"),
            Question("memory-b", "What is the peak by context length, of forward alone and of the full step?", _MEMORY,
                     _PEAKS, "memory"),
            Question("memory-c", "Does mixed precision change the peak?", _MEMORY,
                     lambda material: _PEAKS_BY_DTYPE(material) or _PEAKS_BY_FP16(material), "memory"),
            Question("memory-d", "How large are the tensors that a step keeps for backward, among them those of the "
                     "residual stream?", _STEPS, kept_tensors),
            Question("memory-e", "What do parameters, gradients, optimizer and activations add up to?", _STEPS,
                     arithmetic_of_peak),
            Question("memory-f", "Why do the largest models run out of memory, in which phase, and what would help?",
                     _STEPS, why_out, "out"),
        ),
        "Attention": (
            Question("attention-a", "What do forward and backward of plain attention take by sequence length and "
                     "width, in time and memory, and where does memory run out?", _ATTENTION,
                     stored("attention", (*_BY_LENGTH, "powers"), "full")),
            Question("flash", "How does FlashAttention compare by length and width?", _FLASH,
                     stored("attention", _BY_LENGTH, "causal")),
            Question("flash-step", "What does another attention change in the whole training step?", _FLASH_STEP,
                     _BY_ATTENTION),
        ),
        "Compilation": (
            Question("compile-a", "What does torch.compile give attention alone?", _ATTENTION,
                     stored("attention", ("beside compiled",), "full", plot=False)),
            Question("compile-b", "What does torch.compile give the whole model, in forward and in a training step?",
                     _COMPILE, _COMPILED),
        ),
        "Several GPUs": (
            Question("all-reduce", "How long does an all-reduce take by size and number of processes?", _COLLECTIVES,
                     stored("collectives")),
            Question("data-parallel", "What do data-parallel steps spend on communication, and what do one message, "
                     "overlap with backward and buckets change?", _RANKS, _SENDING),
            Question("sharding", "What does sharding the optimizer's state, or everything, save and cost?", _RANKS,
                     parallel(ranks.SHARDED, ranks.STRONG, ranks.MEMORY)),
            Question("accounting", "What does each GPU need of memory and links by layout, and which layout is "
                     "fastest?", _PLAN, stored("plan", like="fastest")),
        ),
    },
)  # fmt: skip


# The edition of April 2026 (handout 26.1.1): other models, lengths and numbers of GPUs, and questions of its own.


_XL = EDITIONS["cs336-2026"]["xl"]
_MODELS_26 = ",".join(("tiny", *EDITIONS["cs336-2026"].values()))
"""The models of the edition, and the one that the small commands measure."""
_STEPS_26 = replace(
    _STEPS, name="step-time-2026", full="sweep --model small,medium,large,cs336-2026-xl,10B --seq-len 512"
)
_KERNELS_26 = replace(
    _KERNELS,
    name="kernels-2026",
    full="sweep --model small,large --seq-len 256,512,1024,2048 --dtype fp32 --phase forward,train --record kineto",
)
_SPEED_26 = replace(
    _SPEED,
    name="precision-speed-2026",
    full="study speed --model small,medium,large,cs336-2026-xl,10B --seq-len 512 --dtype fp32,bf16",
)
_MEMORY_26 = replace(
    _MEMORY,
    name="memory-2026",
    full="sweep --model cs336-2026-xl --seq-len 128,2048 --dtype fp32,bf16 --phase forward,train",
)
_RECORDED_26 = replace(
    _RECORDED,
    name="memory-recorded-2026",
    full="sweep --model cs336-2026-xl --seq-len 128,2048 --phase forward,train --record memory",
)
_LEVELS = Measure(
    "checkpointing",
    46,
    "sweep --model cs336-2026-xl --batch-size 4 --seq-len 2048 --dtype bf16 --phase train "
    "--checkpointing none,every-1,every-2,every-4",
    "sweep --model tiny --seq-len 64 --dtype bf16 --phase train --checkpointing none,every-1,every-2,every-4 --steps 5",
    of_memory=True,
)
_FLASH_26 = replace(_FLASH, name="attention-flash-2026", full="study attention --preset cs336-2026", takes_s=240)
_COLLECTIVES_26 = replace(
    _COLLECTIVES,
    name="all-reduce-2026",
    full="study collectives --ranks 2,4,6 --sizes 1MB,10MB,100MB,1GB",
    small="study collectives --ranks 2,4,6 --backend gloo --sizes 64KiB,1MiB --seconds 0.05",
    gpus=6,
)
_RANKS_26 = replace(_RANKS, name="parallel-2026", full="study parallel --model cs336-2026-xl --ranks 2")
_CLOSED_FORMS = Measure(
    "closed-forms",
    5,
    "plan --explain --model cs336-2026-xl --ranks 8 --device B200 --batch-tokens 65536",
    "plan --explain --model cs336-2026-xl --ranks 8 --device B200 --batch-tokens 65536",
    "answer",
    takes_memory=False,
)
# Its search tries more where the caches of the compilers hold what it compiles: TORCHINDUCTOR_CACHE_DIR and
# TRITON_CACHE_DIR name empty ones.
_FASTEST = Measure(
    "fastest-step",
    70,
    "tune --model 8B --seq-len 32768 --batch-size 2 --dtype bf16-master --kernels fused --ranks 2 --parallel fsdp2 "
    "--budget 10min",
    "tune --model tiny --seq-len 64 --ranks 2 --parallel ddp --device cpu --budget 30s",
    "answer",
    gpus=2,
    takes_s=600,
    takes_memory=False,
    small_s=60,
)
_FSDP_TRACED = Measure(
    "fsdp-traced",
    59,
    "sweep --model cs336-2026-xl --seq-len 512 --dtype bf16 --phase train --parallel fsdp2 --ranks 2 --record kineto",
    "sweep --model tiny --seq-len 64 --phase train --parallel fsdp-textbook --ranks 2 --device cpu --steps 5 "
    "--record kineto",
    gpus=2,
    takes_s=60,
    small_s=40,
)


def _of_xl(rows: str, columns: str, lengths: str, where: Mapping[str, str], **more: Any) -> Source:
    """The peaks of xl at these lengths; where none of it was measured, of tiny, which small commands measure."""
    asked = table(rows, columns, "peak_memory", where={**where, "model": _XL, "seq_len": lengths}, timed=False, **more)
    others = table(rows, columns, "peak_memory", where={**where, "model": "tiny"}, timed=False, **more)
    return lambda material: asked(material) or others(material)


def _asked(old: str, measure: Measure, asks: str = "", source: Source | None = None) -> Question:
    """A question of the older edition, measured as this one has it."""
    one = next(question for question in ASSIGNMENT.questions if question.id == old)
    return replace(one, measure=measure, asks=asks or one.asks, source=source or one.source)


def _kernels_26() -> tuple[Question, ...]:
    """The questions on kernels, of two sizes at lengths above 128 up to the longest that fits."""
    letters = {"a": "a", "b": "bj", "c": "ck", "d": "d", "e": "ei", "f": "f", "h": "h"}
    sources = {f"kernels-{letter}": kernels(asked, _MODELS_26) for letter, asked in letters.items()}
    sources["kernels-names"] = partial(kernel_names, models=_MODELS_26)
    older = [_asked(name, _KERNELS_26, source=source) for name, source in sources.items()]
    two = {**_TRAIN, "model": "tiny,small,large"}
    longest = table("model", "seq_len", where=two, says=which_run_out, widest=True)
    asks = "Which context is the longest that fits, of two sizes at lengths above 128?"
    return (*older, Question("kernels-longest", asks, _KERNELS_26, longest, "memory"))


OF_2026 = Assignment(
    title=f"CS336 assignment 2: systems, 2026, whose xl is {_XL} here",
    parts={
        "Timing a step": (
            _asked("benchmarking-b", _STEPS_26, "How long do forward, backward and the optimizer's step of each model "
                   "take, and how much do they vary?",
                   table("model,seq_len", value="forward,backward,optimizer", statistic="mean-std",
                         where={**_TRAIN, "model": _MODELS_26}, says=how_much_they_vary, widest=True)),
            _asked("benchmarking-c", _WARMUP),
        ),
        "Kernels of a step": _kernels_26(),
        "Mixed precision": (
            *(one for one in ASSIGNMENT.parts["Mixed precision"] if one.measure is not _SPEED),
            _asked("precision-c", _SPEED_26, source=partial(speed, models=_MODELS_26)),
        ),
        "Memory": (
            _asked("memory-a", _RECORDED_26, source=partial(recorded_memory, models=_MODELS_26)),
            _asked("memory-b", _MEMORY_26, "What is the peak of xl at 128 and 2048 tokens, of forward alone and of the "
                   "full step?", _of_xl("model,seq_len", "phase", "128,2048", {**_PHASES, "dtype": "fp32"})),
            _asked("memory-c", _MEMORY_26, "Does mixed precision change the peak of xl at 128 and 2048 tokens?",
                   _of_xl("model,seq_len,phase", "dtype", "128,2048", {**_PHASES, "dtype": "fp32,bf16"},
                          speedup="fp32", says=what_bits_change)),
            *(_asked(f"memory-{letter}", _STEPS_26, source=partial(source, models=_MODELS_26))
              for letter, source in zip("def", (kept_tensors, arithmetic_of_peak, why_out), strict=True)),
            Question("checkpointing-level", "Which single level of checkpointing needs least memory for xl at "
                     "4 x 2048, beside none and blocks of other sizes?", _LEVELS,
                     _of_xl("model,seq_len", "checkpointing", "2048",
                            {**PLAIN, "phase": "train", "dtype": "bf16",
                             "checkpointing": "none,every-1,every-2,every-4"}, says=which_run_out, widest=True),
                     "memory"),
            Question("checkpointing-nested", "Which checkpointing needs least memory where calls may hold calls, and "
                     "how does it grow with the number of layers?", _LEVELS, growth_of_checkpointing),
        ),
        "Attention": (
            *(one for one in ASSIGNMENT.parts["Attention"] if one.id == "attention-a"),
            _asked("flash", _FLASH_26, "How does FlashAttention compare with attention written out, from 128 to 65,536 "
                   "tokens, by width and dtype?"),
        ),
        "Compilation": ASSIGNMENT.parts["Compilation"],
        "Several GPUs": (
            _asked("all-reduce", _COLLECTIVES_26, "How long does an all-reduce of 1 MB to 1 GB take on 2, 4 and 6 "
                   "processes?"),
            Question("naive-ddp", "Which share of a step does naive data parallelism spend on communication, and what "
                     "do one message and overlap change?", _RANKS_26, _SENDING),
            Question("sharded-optimizer", "What do parameters and the optimizer's state take on each rank, with and "
                     "without sharding, and what does sharding cost?", _RANKS_26,
                     parallel(ranks.SHARDED, ranks.STRONG, ranks.MEMORY, of="zero")),
            Question("fsdp", "What does FSDP save, and how much of its communication ends behind computing?", _RANKS_26,
                     parallel(ranks.SHARDED, ranks.PHASES, ranks.COMMUNICATION, ranks.MEMORY, of="fsdp")),
            Question("fsdp-in-time", "Do the all-gathers of FSDP end in time, by the traces of its ranks?",
                     _FSDP_TRACED, traced_ranks),
            Question("closed-forms", "How many GPUs can share a feed-forward layer by DP, FSDP, TP and both before "
                     "communication bounds it, and what does the other ring of all-reduce take?", _CLOSED_FORMS,
                     stored("plan", ("numbers put in", "formulas", "all-reduce"), like="feed-forward")),
            Question("fastest-step", "What is the fastest step of two GPUs that a search of ten minutes finds, in "
                     "which it compiles what the caches of its compilers lack?", _FASTEST, stored("tune")),
        ),
    },
)  # fmt: skip
