"""`stepscope study NAME` for the precision lab: one answer, shown, written as JSON, drawn, or read again."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.cli import options
from stepscope.cli.output import emit, progress, show, stdout_kept_clean, warn
from stepscope.core.bounded_file import read_document
from stepscope.core.errors import InputError
from stepscope.core.experiment import Experiment, decode_experiment, encode_experiment
from stepscope.studies.request import Tell

Read = Annotated[Path | None, typer.Option("--read", help="Show an answer that --json wrote; nothing is run.")]
Only = Annotated[
    str | None,
    typer.Option("--only", help="Show the tables whose title contains this; `findings` for the sentences alone."),
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the curves: .svg, .png, .html or .json.")]


def answer(
    run: Callable[[Tell], Experiment],
    *,
    study: str,
    read: Path | None,
    plot: Path | None,
    json: bool,
    only: str | None = None,
) -> None:
    """Run the experiment, or read one, and show it, or the part of it that `only` names."""
    if json and only is not None:
        raise InputError("--json writes the whole answer: leave out --only")
    if plot is not None:
        from stepscope.report.plots.save import check_target

        check_target(plot)
    if read is None:
        with stdout_kept_clean(), progress() as tell:
            found = run(tell)
    else:
        found = _read(read, study)
    if plot is not None:
        from stepscope.report.experiment import draw_experiment
        from stepscope.report.plots.save import save_plot

        save_plot(draw_experiment(found), plot)
        warn(f"plotted in {plot}")
    if json:
        emit(encode_experiment(found))
        return
    from stepscope.report.experiment import render_experiment, render_part

    show(render_experiment(found) if only is None else render_part(found, only))


def _read(path: Path, study: str) -> Experiment:
    try:
        data = read_document(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    found = decode_experiment(data, str(path))
    if found.study != study:
        raise InputError(f"{path} is of the study {found.study}: read it with `stepscope study {found.study}`")
    return found


def formats(
    value: Annotated[
        str | None, typer.Option("--value", help="What does each format make of this number? As in 1e-7.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="Where PyTorch casts --value to 8 bits: auto, cpu, cuda or cuda:N.")
    ] = "cpu",
    read: Read = None,
    only: Only = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """Range, precision and largest integer of every floating format, from its bits."""

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.formats import study_formats

        return study_formats(value, device)

    answer(run, study="formats", read=read, plot=plot, json=json, only=only)


def accumulation(read: Read = None, only: Only = None, plot: Plot = None, json: options.Json = False) -> None:
    """Sums of many small numbers in every pair of accumulator and addend: where they stop growing, and why."""

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.accumulation import study_accumulation

        return study_accumulation(tell)

    answer(run, study="accumulation", read=read, plot=plot, json=json, only=only)


def normalisation(
    scales: Annotated[
        str | None, typer.Option("--scales", help="Standard deviations of the input, as in 0.1,10,300.")
    ] = None,
    widths: Annotated[str | None, typer.Option("--widths", help="Numbers in a row, as in 256,4096.")] = None,
    epsilon: Annotated[str | None, typer.Option("--epsilon", help="Added under the root; 1e-5 if left out.")] = None,
    device: options.Device = "cpu",
    read: Read = None,
    only: Only = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """RMSNorm and LayerNorm in fp16, bf16 and fp32: where squares overflow and epsilon vanishes, and the safe way."""

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.given_numbers import positive_integers, positive_number, positive_numbers

        given: dict[str, Any] = {}
        if scales is not None:
            given["scales"] = positive_numbers(scales, "--scales")
        if widths is not None:
            given["widths"] = positive_integers(widths, "--widths", limit=65_536)
        if epsilon is not None:
            given["epsilon"] = positive_number(epsilon, "--epsilon")
        from stepscope.numerics.normalisation import study_normalisation

        return study_normalisation(tell, device=device, **given)

    answer(run, study="normalisation", read=read, plot=plot, json=json, only=only)


def softmax(
    row: Annotated[
        str | None, typer.Option("--row", help="What does each softmax make of these numbers? As in 10,11.5,89.")
    ] = None,
    scales: Annotated[
        str | None, typer.Option("--scales", help="Standard deviations of the inputs, as in 1,4,64.")
    ] = None,
    device: options.Device = "cpu",
    read: Read = None,
    only: Only = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """Softmax, naive, safe and online, and attention's scores: where each overflows as its inputs grow."""

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.given_numbers import finite_numbers, positive_numbers

        given: dict[str, Any] = {}
        if row is not None:
            given["row"] = finite_numbers(row, "--row")
        if scales is not None:
            given["scales"] = positive_numbers(scales, "--scales")
        from stepscope.numerics.softmax import study_softmax

        return study_softmax(tell, device=device, **given)

    answer(run, study="softmax", read=read, plot=plot, json=json, only=only)
