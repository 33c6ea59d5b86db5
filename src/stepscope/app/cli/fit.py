"""`stepscope fit`: will it fit, and if not, what would make it fit. Nothing is run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.app.cli.options import words
from stepscope.app.cli.output import Presentation, check_picture, draw, stdout_kept_clean, warn
from stepscope.app.cli.verb import verb
from stepscope.app.cli.workloads import OneWorkload
from stepscope.core.document import json_document
from stepscope.core.errors import InputError
from stepscope.core.model_config import PRESETS
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload, Workload

if TYPE_CHECKING:
    from stepscope.allocations.prediction.accuracy import Accuracy
    from stepscope.allocations.prediction.estimate import MemoryEstimate
    from stepscope.allocations.prediction.fit import Budget, Fit
    from stepscope.allocations.prediction.own_fit import OwnFit, OwnVerdict
    from stepscope.core.answer import Answer
    from stepscope.engine.fake_step import FakeEstimate


@verb(
    "fit",
    "stepscope fit --model xl --seq-len 1024 --device H100",
    "stepscope fit --sweep --memory 80GiB",
    model="small",
    seq_len="512",
)
def fit(
    *,
    said: OneWorkload,
    memory: int | None,
    device: tuple[str, ...] | None = None,
    tensors: bool,
    sweep: bool,
    fake: bool,
    against: tuple[Path, ...] = (),
    apart: tuple[Path, ...] = (),
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
    for option, given in (("--save", save), ("--apart", apart)):
        if given:
            raise InputError(f"{option} belongs to --against: say which runs to compare with, or leave it out")
    own = said.own
    if own is not None:
        asked = [mode for mode, given in (("--tensors", tensors), ("--sweep", sweep), ("--fake", fake)) if given]
        if asked:
            raise InputError(f"{asked[0]} is for the textbook's model: leave it out; a step of your own runs on fakes")
        _answer_own(own, _budgets(memory, device), runs, shown)
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
    from stepscope.allocations.prediction.estimate import estimate
    from stepscope.allocations.prediction.fit import fit as predict

    answers = [predict(workload, budget) for budget in budgets]
    predicted = answers[0].estimate if answers else estimate(workload)
    gc.enable()
    second = _by_running(workload) if fake else None
    from stepscope.allocations.prediction.answer import answer_fit, answer_peak, answer_second

    said = [answer_fit(answer, workload) for answer in answers] or [answer_peak(predicted, workload)]
    if second is not None:
        said.append(answer_second(predicted, second.memory, second.peak_bytes))

    def document() -> str:
        found = [fit_as_json(answer, workload) for answer in answers] or [_peak_as_json(predicted, workload)]
        if second is not None:
            for fields in found:
                fields["fake"] = {"peak_bytes": second.peak_bytes, **msgspec.to_builtins(second)}
        return _as_document(found, said)

    said[-1] = _with_error_bars(said[-1], runs)
    verdicts = [(answer.budget, answer.fits) for answer in answers]
    _keep(runs, workload, predicted.peak_bytes, verdicts)
    shown.show(*said, document=document)


def _as_document(found: "Sequence[dict[str, object]]", answers: "Iterable[Answer]") -> str:
    """The predictions as JSON, each with its answer, which its page shows."""
    both = [{**one, "answer": msgspec.to_builtins(answer)} for one, answer in zip(found, answers, strict=False)]
    return json_document(both[0] if len(both) == 1 else both)


def _with_error_bars(answer: "Answer", runs: Path) -> "Answer":
    """The answer, and how far forecasts that were kept here were off, where some were measured since."""
    from stepscope.core.run_directory import FORECASTS_FILE

    if not (runs / FORECASTS_FILE).is_file():
        return answer
    from stepscope.runs.history import error_bars, judged_in

    said = error_bars(judged_in(runs)[0])
    return msgspec.structs.replace(answer, asides=(*answer.asides, said)) if said else answer


def _keep(
    runs: Path,
    workload: Workload,
    peak_bytes: int,
    verdicts: "Sequence[tuple[Budget, bool]]",
    *,
    is_bound: bool = False,
) -> None:
    """Keep the forecast beside the runs that will show whether it came true."""
    from stepscope.core.forecasts import forecast_of_peak, keep_forecasts

    said = [(budget.usable_bytes, fits) for budget, fits in verdicts] or [(None, None)]
    forecasts = [
        forecast_of_peak("fit", workload.key, peak_bytes, budget_bytes=budget, fits=fits, is_bound=is_bound)
        for budget, fits in said
    ]
    if fault := keep_forecasts(runs, forecasts):
        warn(fault)


def _by_running(workload: TextbookWorkload) -> "FakeEstimate":
    from stepscope.engine.fake_step import estimate_by_running

    with stdout_kept_clean():
        return estimate_by_running(workload)


def _answer_own(workload: FactoryWorkload, budgets: "list[Budget]", runs: Path, shown: Presentation) -> None:
    from stepscope.allocations.prediction.answer import answer_own_fit
    from stepscope.questions.fit_of_own import fit_of_own

    found = fit_of_own(workload, budgets)
    answers = answer_own_fit(found)

    def document() -> str:
        said = [own_fit_as_json(found, verdict) for verdict in found.verdicts] or [own_fit_as_json(found, None)]
        return _as_document(said, answers)

    verdicts = [(verdict.budget, verdict.fits) for verdict in found.verdicts]
    _keep(runs, found.workload, found.estimate.peak_bytes, verdicts, is_bound=bool(found.estimate.unseen.at_most))
    *others, last = answers
    shown.show(*others, _with_error_bars(last, runs), document=document)


def own_fit_as_json(found: "OwnFit", verdict: "OwnVerdict | None") -> dict[str, object]:
    """The contract of `stepscope fit --module --json`: the keys of `fit_as_json`, and what only such a step has."""
    peak, unseen = found.estimate.peak_bytes, found.estimate.unseen
    return {
        "fits": verdict.fits if verdict else None,
        "peak_bytes": peak,
        "categories": found.estimate.categories,
        "plans": msgspec.to_builtins(verdict.plans) if verdict else [],
        "margin_bytes": verdict.budget.usable_bytes - peak if verdict else None,
        "kept_free_bytes": verdict.kept_free_bytes if verdict else None,
        "fails_in": verdict.fails_in if verdict else None,
        "largest_batch": verdict.largest_batch if verdict else None,
        "longest_sequence": verdict.longest_sequence if verdict else None,
        "is_bound": bool(unseen.at_most),
        "budget": msgspec.to_builtins(verdict.budget) if verdict else None,
        "estimate": msgspec.to_builtins(found.estimate),
        "workload": msgspec.to_builtins(found.workload),
    }


def fit_as_json(answer: "Fit", workload: TextbookWorkload) -> dict[str, object]:
    """The contract of `stepscope fit --json`."""
    return {
        "fits": answer.fits,
        "peak_bytes": answer.estimate.peak_bytes,
        "categories": answer.categories,
        "plans": msgspec.to_builtins(answer.plans),
        "margin_bytes": answer.margin_bytes,
        "fails_in": answer.fails_in,
        "budget": msgspec.to_builtins(answer.budget),
        "estimate": msgspec.to_builtins(answer.estimate),
        "workload": msgspec.to_builtins(workload),
    }


def _peak_as_json(predicted: "MemoryEstimate", workload: TextbookWorkload) -> dict[str, object]:
    """The answer as plain data where no memory was given: it has the keys of `fit_as_json`, and no verdict."""
    return {
        "fits": None,
        "peak_bytes": predicted.peak_bytes,
        "categories": predicted.categories,
        "plans": [],
        "margin_bytes": None,
        "fails_in": None,
        "budget": None,
        "estimate": msgspec.to_builtins(predicted),
        "workload": msgspec.to_builtins(workload),
    }


def _list_tensors(workload: TextbookWorkload, shown: Presentation) -> None:
    if workload.phase == "forward":
        raise InputError("inference keeps nothing for backward: --tensors needs --phase train or forward-backward")
    from stepscope.allocations.prediction.answer import answer_tensors
    from stepscope.allocations.prediction.kept_tensors import kept_by_block

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
    from stepscope.allocations.prediction.accuracy import compare
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
    from stepscope.allocations.prediction.answer import answer_accuracy

    answer = answer_accuracy(accuracy)
    shown.show(answer, document=lambda: json_document(_accuracy_as_json(accuracy)))
    draw(answer, save)


def _accuracy_as_json(accuracy: "Accuracy") -> dict[str, object]:
    worst = accuracy.worst
    return {
        "median_error": accuracy.median_error,
        "worst_error": worst.error if worst else None,
        "verdicts": accuracy.verdicts,
        "verdicts_right": accuracy.right,
        "wrongly_said_to_fit": [comparison.run_id for comparison in accuracy.wrongly_said_to_fit],
        **{
            name: [{**msgspec.to_builtins(comparison), "error": comparison.error} for comparison in comparisons]
            for name, comparisons in (("comparisons", accuracy.comparisons), ("apart", accuracy.apart))
        },
    }
