"""Where the Answer of a question comes from. Each function makes a Source: Material -> Answer or None."""

from collections.abc import Mapping

import msgspec

from stepscope.analysis.comparisons.attention.answer import answer_steps
from stepscope.analysis.comparisons.attention.cells import StepCell
from stepscope.analysis.comparisons.compiling.answer import answer_compile
from stepscope.analysis.comparisons.compiling.cells import CompileCell
from stepscope.analysis.comparisons.compiling.cells import pair_up as compiled_pairs
from stepscope.analysis.comparisons.kernels.answer import answer_kernels
from stepscope.analysis.comparisons.kernels.cells import CapturedCell
from stepscope.analysis.comparisons.precision.answer import answer_speed
from stepscope.analysis.comparisons.precision.cells import TimedCell
from stepscope.analysis.comparisons.precision.cells import pair_up as speed_pairs
from stepscope.analysis.comparisons.warmup import answer_warmup
from stepscope.analysis.runs.table_panels import table_panels
from stepscope.analysis.runs.tables import Statistic, TableQuery, answer_table
from stepscope.core.answer import Answer, Panel
from stepscope.core.errors import InputError
from stepscope.core.evidence import TRACE_TOOLS
from stepscope.core.run import Run
from stepscope.core.workload import DTYPES, Workload
from stepscope.memory.answer import answer_memory
from stepscope.memory.at_moment import moment_at
from stepscope.memory.explain import explain
from stepscope.memory.prediction.answer import answer_peak, answer_tensors
from stepscope.memory.prediction.estimate import estimate
from stepscope.memory.prediction.kept_tensors import kept_by_block
from stepscope.memory.snapshot import read_snapshot
from stepscope.writeup.material import Found, Material
from stepscope.writeup.question import Source

PLAIN = {"attention": "reference", "compile": "eager", "checkpointing": "none"}
"""The choices of a step of which the first questions ask."""


def stored(study: str, only: tuple[str, ...] = (), like: str = "", *, plot: bool = True) -> Source:
    """The last stored answer of a study, or those of its tables whose titles hold one of these words.

    like: a word in its question or among its settings, where one answer of several is meant. plot: whether its plot
    belongs to the question.
    """

    def source(material: Material) -> Answer | None:
        found = [answer for answer, _ in material.answers if answer.study == study]
        meant = [answer for answer in found if like in answer.question or like in answer.settings.values()]
        if not found:
            return None
        part = _part(max(meant or found, key=lambda answer: answer.date), only)
        return part if plot else msgspec.structs.replace(part, panels=())

    return source


def table(
    rows: str, columns: str = "", value: str = "step", statistic: Statistic = "median", speedup: str | None = None, *,
    where: Mapping[str, str],
) -> Source:  # fmt: skip
    """The table of the largest sweep with such runs, and its plot."""
    query = TableQuery(
        rows=_names(rows), columns=_names(columns), values=_names(value), statistic=statistic, speedup=speedup
    )

    def source(material: Material) -> Answer | None:
        for found in material.folders(**where):
            runs = [run for run, _ in found]
            compared = {getattr(run.workload, name, None) for run in runs for name in query.columns[:1]}
            if speedup is not None and not {speedup} < compared:
                continue
            try:
                return _where_measured(answer_table(runs, query, bare=False), runs, _panels(runs, query))
            except InputError:  # the folder mixes experiments: a smaller one may not
                continue
        return None

    return source


def warmup(material: Material) -> Answer | None:
    """The steps of one workload after different numbers of warm-up steps."""
    for found in material.folders(phase="train"):
        by_key: dict[str, dict[int, Found]] = {}
        for run, directory in found:
            if run.settings.warmup_floor == run.settings.warmup_cap:
                by_key.setdefault(run.workload.key, {})[run.settings.warmup_floor] = (run, directory)
        best = max(by_key.values(), key=len, default={})
        if len(best) > 1:
            return answer_warmup([best[count][0] for count in sorted(best)])
    return None


def kernels(letters: str) -> Source:
    """Questions of the study of kernels, of the sweep with most captures."""

    def source(material: Material) -> Answer | None:
        folders: list[list[CapturedCell]] = []
        for found in material.folders(dtype="fp32", **PLAIN):
            cells: list[CapturedCell] = []
            for run, directory in found:
                digests = [material.digest(run, directory, tool) for tool in TRACE_TOOLS]
                wanted = next((digest for digest in digests if digest is not None), None)
                if wanted is not None:
                    other = next((digest for digest in digests if digest not in (None, wanted)), None)
                    cells.append(CapturedCell(run=run, digest=wanted, other=other))
            folders.append(cells)
        best = max(folders, key=_breadth, default=[])
        answer = answer_kernels(best, letters) if best else None
        return answer if answer is not None and answer.tables else None

    return source


def _breadth(cells: list[CapturedCell]) -> tuple[int, int]:
    return len({cell.run.workload.phase for cell in cells}), len(cells)


def speed(material: Material) -> Answer | None:
    """Precision: the same step in fp32 and fewer bits."""
    for found in material.folders(phase="forward-backward,train", attention="reference", compile="eager"):
        if len({run.workload.dtype for run, _ in found if isinstance(run.workload, Workload)}) > 1:
            cells = [TimedCell(run=run, digest=material.digest(run, directory, "kineto")) for run, directory in found]
            return answer_speed(speed_pairs(cells, DTYPES))
    return None


def compiled(material: Material) -> Answer | None:
    """The model, eager beside compiled."""
    for found in _both(material, "compile", "eager"):
        cells = [CompileCell(run=run, digest=material.digest(run, directory, "kineto")) for run, directory in found]
        return answer_compile(compiled_pairs(cells))
    return None


def attention_steps(material: Material) -> Answer | None:
    """A training step with one attention beside another."""
    for found in _both(material, "attention", "reference", phase="train", compile="eager"):
        cells = [StepCell(run=run, digest=material.digest(run, directory, "kineto")) for run, directory in found]
        return answer_steps(cells)
    return None


def recorded_memory(material: Material) -> Answer | None:
    """What the largest recorded step of training held at its peak, and its timeline."""
    recorded = [
        (run, directory / run.artifacts["memory"])
        for run, directory in material.runs
        if "memory" in run.artifacts and run.status == "done" and run.workload.phase == "train"
    ]
    recorded = [(run, file) for run, file in recorded if file.is_file()]
    if not recorded:
        return None
    _, file = max(recorded, key=lambda pair: pair[1].stat().st_size)
    explained = explain(read_snapshot(file))
    return answer_memory(explained, moment_at(explained, None))


def kept_tensors(material: Material) -> Answer | None:
    """The sizes of what the largest measured step keeps for backward, by arithmetic."""
    workload = _largest(material)
    return answer_tensors(workload, kept_by_block(workload)) if workload is not None else None


def arithmetic_of_peak(material: Material) -> Answer | None:
    """The bytes of parameters, gradients, optimizer and activations of that step, by arithmetic."""
    workload = _largest(material)
    return answer_peak(estimate(workload), workload) if workload is not None else None


def _largest(material: Material) -> Workload | None:
    steps = [
        run.workload for found in material.folders(phase="train", **PLAIN) for run, _ in found
        if run.status == "done" and isinstance(run.workload, Workload)
    ]  # fmt: skip
    return max(steps, key=lambda one: (one.model.d_model * one.model.layers, one.seq_len, one.dtype), default=None)


def _both(material: Material, field: str, base: str, **wanted: str) -> list[list[Found]]:
    """The folders in which some runs have the base's value of a field, and others another; most values first."""
    found = [(runs, {getattr(run.workload, field) for run, _ in runs}) for runs in material.folders(**wanted)]
    kept = [(runs, values) for runs, values in found if {base} < values and _pairs(runs, field, base)]
    return [runs for runs, _ in sorted(kept, key=lambda pair: -_pairs(pair[0], field, base))]


def _pairs(found: list[Found], field: str, base: str) -> int:
    """How many runs have a counterpart of the base's value."""
    alike = [run.workload.words(field) for run, _ in found if getattr(run.workload, field) == base]
    return sum(run.workload.words(field) in alike for run, _ in found if getattr(run.workload, field) != base)


def _panels(runs: list[Run], query: TableQuery) -> tuple[Panel, ...]:
    try:
        return table_panels(runs, query)
    except InputError:  # the fields make no axis
        return ()


def _where_measured(answer: Answer, runs: list[Run], panels: tuple[Panel, ...]) -> Answer:
    """The table of runs with its plot, and with what the lead of another study says."""
    where = [run.environment for run in runs if run.environment is not None]
    devices = ", ".join(dict.fromkeys(one.device_name for one in where))
    versions = where[-1].versions if where else {}
    return msgspec.structs.replace(
        answer, panels=panels, device=devices, versions=dict(versions), date=max(run.day for run in runs)
    )


def _part(answer: Answer, only: tuple[str, ...]) -> Answer:
    if not only:
        return answer
    kept = tuple(one for one in answer.tables if any(word.casefold() in one.title.casefold() for word in only))
    return msgspec.structs.replace(answer, tables=kept)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()
