"""`stepscope study NAME` for the precision lab: one answer, shown, written as JSON, drawn, or read again."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from stepscope.cli.given_numbers import Numbers
from stepscope.cli.output import draw, emit, present, progress, stdout_kept_clean
from stepscope.cli.verb import verb
from stepscope.core.answer import Answer, decode_answer, encode_answer
from stepscope.core.bounded_file import read_document
from stepscope.core.errors import EXIT_INTERRUPTED, InputError
from stepscope.engine.request import Tell

_Decorator = Callable[[Callable[..., Answer]], Callable[..., None]]


def answer(
    run: Callable[[Tell], Answer],
    *,
    study: str,
    read: Path | None,
    save: Path | None,
    json: bool,
    only: str | None = None,
) -> None:
    """Run the experiment, or read one, and show it, or the part of it that `only` names.

    One that was interrupted shows what it has, and ends the command with the code of an interrupt.
    """
    if json and only is not None:
        raise InputError("--json writes the whole answer: leave out --only")
    if save is not None:
        from stepscope.report.plots.save import check_target

        check_target(save)
    if read is None:
        with stdout_kept_clean(), progress() as tell:
            found = run(tell)
    else:
        found = _read(read, study)
    draw(found, save)
    if json:
        emit(encode_answer(found))
    else:
        present(found, only=only)
    if read is None and any(finding.kind == "interrupted" for finding in found.findings):
        raise typer.Exit(EXIT_INTERRUPTED)


def _read(path: Path, study: str) -> Answer:
    try:
        data = read_document(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    found = decode_answer(data, str(path))
    if found.study != study:
        raise InputError(f"{path} is of the study {found.study}: read it with `stepscope study {found.study}`")
    return found


def study_verb(study: str, *examples: str, plot: bool = True, **usual: str) -> _Decorator:
    """A decorator that makes a verb of a function that answers: its options, and those that every study has.

    A parameter `tell` of the function is no option: it is told of progress. plot: whether the answer has curves.
    """
    shared = inspect.signature(_every_study).parameters.values()

    def make(run: Callable[..., Answer]) -> Callable[..., None]:
        parameters = inspect.signature(run).parameters

        @functools.wraps(run)
        def made(*, from_: Path | None, only: str | None, save: Path | None = None, json: bool, **asked: Any) -> None:
            answer(
                lambda tell: run(**asked, **({"tell": tell} if "tell" in parameters else {})),
                study=study, read=from_, save=save, json=json, only=only,
            )  # fmt: skip

        own = [parameter for parameter in parameters.values() if parameter.name != "tell"]
        own += [parameter for parameter in shared if plot or parameter.name != "save"]
        made.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        return verb(f"study {study}", *examples, **usual)(made)

    return make


def _every_study(*, from_: Path | None, only: str | None, save: Path | None, json: bool) -> None:
    """The options of every study, as the parameters of a verb."""


@study_verb("formats", "stepscope study formats --value 1e-7 --only becomes", "stepscope study formats --only Formats")
def formats_study(*, value: str | None, device: str = "cpu") -> Answer:
    """Range, precision and largest integer of every floating format, from its bits."""
    from stepscope.numerics.formats import study_formats

    return study_formats(value, device)


@study_verb(
    "accumulation",
    "stepscope study accumulation --only findings",
    "stepscope study accumulation --addend 0.1 --count 5000",
)
def accumulation_study(*, addend: float | None, count: int | None) -> Answer:
    """Sums of many small numbers in every pair of accumulator and addend: where they stop growing, and why."""
    from stepscope.numerics.accumulation import study_accumulation

    return study_accumulation(addend=addend, count=count)


@study_verb(
    "normalisation",
    "stepscope study normalisation --scales 0.1,10,300 --widths 256,4096",
    "stepscope study normalisation --from results/cpu/precision/normalisation.json --save normalisation.svg",
)
def normalisation_study(
    *, scales: Numbers | None, widths: Numbers | None, epsilon: float | None, device: str = "cpu"
) -> Answer:
    """RMSNorm and LayerNorm in fp16, bf16 and fp32: where squares overflow and epsilon vanishes, and the safe way."""
    from stepscope.numerics.normalisation.study import study_normalisation

    given = {"scales": scales, "widths": widths, "epsilon": epsilon}
    return study_normalisation(device=device, **_given(given))


@study_verb(
    "softmax",
    "stepscope study softmax --row 10,11.5,89",
    "stepscope study softmax --from results/cpu/precision/softmax.json --only 'exp in each format'",
)
def softmax_study(*, row: Numbers | None, scales: Numbers | None, device: str = "cpu") -> Answer:
    """Softmax, naive, safe and online, and attention's scores: where each overflows as its inputs grow."""
    from stepscope.numerics.softmax.study import study_softmax

    return study_softmax(row=row, device=device, **_given({"scales": scales}))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
