"""The verb of a question: its answer is made, measured by a sweep, or read; then shown, written as JSON, drawn."""

import functools
import inspect
from pathlib import Path
from typing import Any

import click

from stepscope.app.cli.output import Presentation, progress, stdout_kept_clean, sweep_progress
from stepscope.core.answer import Answer
from stepscope.core.errors import EXIT_DEVICE_FAILED, EXIT_INTERRUPTED, InputError, warn
from stepscope.core.options import GIVEN, Rule, Verb
from stepscope.questions.question import Cells, Question, Result, read_answer

_TOOLS = ("tell", "options_in")
"""Parameters of a question that are no options: what is told of progress, and what reads the options of a workload."""


def verb_of(question: Question) -> Verb:
    """The verb of a question: its options, and those that it shares with others."""
    parameters = inspect.signature(question.measure).parameters
    stated = [parameter for name, parameter in parameters.items() if name not in _TOOLS]
    # What shows an answer comes after what is stored.
    records = [getattr(parameter.annotation, "__dataclass_fields__", ()) for parameter in stated]
    place = next((i for i, fields in enumerate(records, 1) if "from_" in fields), len(stated))
    stated[place:place] = [inspect.signature(_shared).parameters[name] for name in question.shared]

    @functools.wraps(question.measure)
    def run(**options: Any) -> int | None:
        shared = {name: options.pop(name) for name in question.shared}
        save, stored = shared.pop("save", None), shared.pop("from_", None)
        shown = shared.get("shown") or Presentation(**shared)
        if stored is not None:
            return _show(Result(answer=read_answer(stored, question.name)), shown, save)
        if shown.only is not None and question.titles is not None and "--from" not in GIVEN.get():
            titles, only = question.titles(), shown.only.casefold()
            if not only or not any(only in title.casefold() for title in (*titles, "findings")):
                named = ", ".join(map(repr, titles))
                raise InputError(f"--only {shown.only!r} names no table: there are {named}, and findings")
        with stdout_kept_clean(), progress() as tell:
            if "tell" in parameters:
                options["tell"] = tell
            if "options_in" in parameters:
                from stepscope.app.verbs.run import options_in

                options["options_in"] = options_in
            measured = question.measure(**options)
        if isinstance(measured, Cells):
            return _sweep(measured, shown, save)
        return _show(Result(answer=measured) if isinstance(measured, Answer) else measured, shown, save)

    run.__signature__ = inspect.Signature(stated)  # type: ignore[attr-defined]
    conflicts = (Rule("alone", ("--from",)),) if "from_" in question.shared else ()
    name = f"study {question.name}"
    examples = tuple(f"stepscope {name} {options}".strip() for options in question.examples)
    return Verb(name, run, examples, conflicts, question.defaults)


def _shared(
    *, from_: Path | None, shown: Presentation, save: Path | None, style: str, brief: bool = False, json: bool
) -> None:
    """Options that a question may share, as the parameters of a verb."""


def _show(result: Result, shown: Presentation, save: Path | None) -> int:
    """Show a result. One just measured that ended early has the exit code of an interrupt, or of a device that
    failed."""
    shown.show(result.answer, document=result.document, save=save)
    kinds = {finding.kind for finding in result.answer.findings} if "--from" not in GIVEN.get() else set[str]()
    if "interrupted" in kinds:
        return EXIT_INTERRUPTED
    if "ended-early" in kinds:
        return EXIT_DEVICE_FAILED
    if result.hint:
        warn(result.hint)
    if result.fault:
        raise InputError(result.fault)
    return result.exit_code


def _sweep(cells: Cells, shown: Presentation, save: Path | None) -> int:
    """Measure the cells, and show the answer from their runs."""
    from stepscope.app.verbs.sweep import measure_and_report, report_runs, sweep_exit_code
    from stepscope.core.run import Run
    from stepscope.engine.sweep import run_sweep
    from stepscope.engine.sweep_plan import Policy

    def report(runs: list[Run]) -> None:
        result = cells.answer(runs)
        if cells.lists_runs:
            report_runs(runs, result.answer, shown)
        else:
            _show(result, shown, save)

    if len(cells.around) == 1:
        with cells.around[0]:
            measure_and_report(cells.plan, Policy(), report)
    runs: list[Run] = []
    with sweep_progress() as tell:
        for context in cells.around:
            with context:
                runs += run_sweep(cells.plan, Policy(fresh=True), tell)
    report(runs)
    raise click.exceptions.Exit(sweep_exit_code(runs))
