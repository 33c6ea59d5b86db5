"""`stepscope fit`: will it fit, and if not, what would make it fit. Nothing is run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from stepscope.app.cli.options import device_names
from stepscope.app.cli.output import Presentation, check_picture, draw, stdout_kept_clean, warn
from stepscope.core.errors import InputError
from stepscope.core.files import json_document
from stepscope.core.model_config import PRESETS
from stepscope.core.options import BUDGET, Needs, Option, verb, words
from stepscope.core.units import parse_bytes
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.workload_options import OneWorkload

if TYPE_CHECKING:
    from stepscope.allocations.prediction.estimate import MemoryEstimate
    from stepscope.allocations.prediction.fit import Budget, FakeEstimate, Fit
    from stepscope.core.answer import Answer


Memory = Annotated[
    int | None,
    Option("How much PyTorch may allocate, as in 80GiB.", BUDGET, takes=parse_bytes, metavar="SIZE"),
]
Device = Annotated[
    tuple[str, ...] | None,
    Option("A device by its name, as in H100 or 4090; the datasheet's memory.", BUDGET, complete=device_names),
]
Tensors = Annotated[bool, Option("List what a block keeps for backward, with the arithmetic of each size.")]
Sweep = Annotated[bool, Option("The largest batch and the longest sequence that fit, by model: several, or all.")]
Fake = Annotated[bool, Option("Predict a second time, by running the step on PyTorch's fake tensors.")]
Against = Annotated[tuple[Path, ...], Option("Compare with the measured runs in this folder.", metavar="DIR")]
Apart = Annotated[
    tuple[Path, ...],
    Option("With --against: runs shown apart, and not counted (the model was corrected by them).", metavar="DIR"),
]


@verb(
    "fit",
    "stepscope fit --model xl --seq-len 1024 --device H100",
    "stepscope fit --sweep --memory 80GiB",
    conflicts=(
        Needs("--save", "--against", "say which runs to compare with, or leave it out"),
        Needs("--apart", "--against", "say which runs to compare with, or leave it out"),
    ),
    model="small",
    seq_len="512",
)
def fit(
    *,
    said: OneWorkload,
    memory: Memory,
    device: Device = None,
    tensors: Tensors = False,
    sweep: Sweep = False,
    fake: Fake = False,
    against: Against = (),
    apart: Apart = (),
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Predict the peak memory of a step, say whether it fits, and what would make it fit. Needs no GPU."""
    _check_together({"--tensors": tensors, "--sweep": sweep, "--fake": fake}, memory, device, against)
    if against and said.flags:
        raise InputError(f"--against takes its workloads from the runs: leave out {', '.join(said.flags)}")
    if against:
        _compare(against, apart, save, shown)
        return
    own = said.own
    if own is not None:
        asked = [mode for mode, given in (("--tensors", tensors), ("--sweep", sweep), ("--fake", fake)) if given]
        if asked:
            raise InputError(f"{asked[0]} is for the textbook's model: leave it out; a step of your own runs on fakes")
        from stepscope.questions.fit_apart import fit_apart

        _show(fit_apart(own, _budgets(memory, device)), None, runs, shown)
        return
    if sweep:
        names = words(said.said["model"], "--model") if "model" in said.said else list(PRESETS)
        models = _those_that_can_be(names, said)
        budgets = _budgets(memory, device)
        if len(budgets) != 1:
            raise InputError(f"how much memory is there? {_SAY_HOW_MUCH}")
        _print_largest(models, budgets[0], shown)
        return
    workload = said.workload(model="small", seq_len=512)
    if tensors:
        _list_tensors(workload, shown)
    else:
        _answer(workload, _budgets(memory, device), fake, runs, shown)


def _those_that_can_be(names: Iterable[str], said: OneWorkload) -> list[TextbookWorkload]:
    """The workload with each of these models; a model that cannot have what was said is left out, which is said.

    Raises InputError where it is none.
    """
    found: list[TextbookWorkload] = []
    faults: list[str] = []
    for name in names:
        try:
            found.append(OneWorkload({**said.said, "model": name}).workload(seq_len=512))
        except InputError as error:
            faults.append(f"{name}: {error}")
    if not found:
        raise InputError(f"no model is left: {'; '.join(faults)}")
    for fault in faults:
        warn(f"left out, {fault}")
    return found


_SAY_HOW_MUCH = "Say --memory, as in --memory 80GiB, or one --device, as in --device H100"


def _check_together(
    modes: dict[str, bool], memory: int | None, device: tuple[str, ...] | None, against: tuple[Path, ...]
) -> None:
    """Raise InputError where options ask for two answers, or one of them would go unread."""
    asked = [mode for mode, given in modes.items() if given] + (["--against"] if against else [])
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} are different questions: ask one at a time")
    read_nowhere = [option for option, given in (("--memory", memory), ("--device", device)) if given is not None]
    if asked and asked[0] in ("--tensors", "--against") and read_nowhere:
        raise InputError(f"{asked[0]} asks for no budget: leave out {' and '.join(read_nowhere)}")


def _budgets(memory: int | None, devices: tuple[str, ...] | None) -> "list[Budget]":
    """What was said of how much memory there is; nothing asks for the peak alone."""
    from stepscope.allocations.prediction.fit import budget_of_device, budget_of_memory

    if memory is not None and devices is not None:
        raise InputError("--memory and --device both say how much there is: give one of them")
    if memory is not None:
        return [budget_of_memory(memory)]
    return [budget_of_device(device) for device in devices or ()]


def _answer(workload: TextbookWorkload, budgets: "list[Budget]", fake: bool, runs: Path, shown: Presentation) -> None:
    import gc

    # A symbolic step makes a million objects, none of them in a cycle: looking for cycles is a tenth of the time.
    gc.disable()
    from stepscope.allocations.prediction.fit import fit as predict

    fits = [predict(workload, budget) for budget in budgets or [None]]
    gc.enable()
    _show(fits, _by_running(workload) if fake else None, runs, shown)


def _show(
    fits: "Sequence[Fit[MemoryEstimate]] | Sequence[Fit[FakeEstimate]]",
    second: "FakeEstimate | None",
    runs: Path,
    shown: Presentation,
) -> None:
    """Show the predictions of one step, and keep them as forecasts. second: of the textbook's step on fake tensors."""
    from stepscope.allocations.prediction.answer import answer_fit, answer_second, fit_document

    answers = [answer_fit(fit) for fit in fits]
    documents = [fit_document(fit, answer) for fit, answer in zip(fits, answers, strict=True)]
    if second is not None:
        answers.append(answer_second(fits[0].estimate, second))
        for document in documents:
            document["fake"] = msgspec.to_builtins(second)
    answers[-1] = _with_error_bars(answers[-1], runs)
    _keep(runs, fits)
    shown.show(*answers, document=lambda: json_document(documents[0] if len(documents) == 1 else documents))


def _with_error_bars(answer: "Answer", runs: Path) -> "Answer":
    """The answer, and how far forecasts that were kept here were off, where some were measured since."""
    from stepscope.core.run_directory import FORECASTS_FILE

    if not (runs / FORECASTS_FILE).is_file():
        return answer
    from stepscope.runs.history import error_bars, judged_in

    said = error_bars(judged_in(runs)[0])
    return msgspec.structs.replace(answer, asides=(*answer.asides, said)) if said else answer


def _keep(runs: Path, fits: "Sequence[Fit[MemoryEstimate]] | Sequence[Fit[FakeEstimate]]") -> None:
    """Keep the forecast beside the runs that will show whether it came true."""
    from stepscope.core.run_directory import forecast_of_peak, keep_forecasts

    forecasts = [
        forecast_of_peak(
            "fit",
            fit.workload.key,
            fit.peak_bytes,
            budget_bytes=fit.budget.usable_bytes if fit.budget else None,
            fits=fit.fits,
            is_bound=fit.is_bound,
        )
        for fit in fits
    ]
    if fault := keep_forecasts(runs, forecasts):
        warn(fault)


def _by_running(workload: TextbookWorkload) -> "FakeEstimate":
    from stepscope.engine.fake_module import estimate_by_running

    with stdout_kept_clean():
        return estimate_by_running(workload)


def _list_tensors(workload: TextbookWorkload, shown: Presentation) -> None:
    if workload.phase == "forward":
        raise InputError("inference keeps nothing for backward: --tensors needs --phase train or forward-backward")
    from stepscope.allocations.prediction.answer import answer_tensors
    from stepscope.allocations.prediction.estimate import kept_by_block

    kept = kept_by_block(workload)
    rows = [
        {**msgspec.to_builtins(tensor), "bytes_each": tensor.bytes_each, "total_bytes": tensor.total_bytes}
        for tensor in kept
    ]
    shown.show(answer_tensors(workload, kept), document=lambda: json_document(rows))


def _print_largest(workloads: list[TextbookWorkload], budget: "Budget", shown: Presentation) -> None:
    from stepscope.allocations.prediction.answer import answer_largest
    from stepscope.allocations.prediction.fit import largest_that_fits

    found = [largest_that_fits(workload, budget) for workload in workloads]
    rows = [
        {"model": largest.workload.model.name, "batch_size": largest.batch_size, "seq_len": largest.seq_len}
        for largest in found
    ]
    shown.show(answer_largest(found, budget.said), document=lambda: json_document(rows))


def _compare(folders: tuple[Path, ...], apart: tuple[Path, ...], save: Path | None, shown: Presentation) -> None:
    from stepscope.allocations.prediction.answer import answer_accuracy, compare
    from stepscope.core.run_directory import load_runs

    check_picture(save)
    runs, faults = load_runs(list(folders))
    others, other_faults = load_runs(list(apart))
    for fault in [*faults, *other_faults]:
        warn(f"left out: {fault}")
    accuracy = compare(runs, others)
    if not accuracy.comparisons:
        raise InputError(
            f"no run in {', '.join(map(str, folders))} has measured peaks: measure on a GPU, as `stepscope sweep` does"
        )
    answer = answer_accuracy(accuracy)
    shown.show(answer, document=lambda: json_document(accuracy))
    draw(answer, save)
