"""`stepscope study NAME` for the precision lab: one answer, shown, written as JSON, drawn, or read again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.cli.output import draw, emit, present, progress, stdout_kept_clean
from stepscope.cli.verb import verb
from stepscope.core.bounded_file import read_document
from stepscope.core.errors import InputError
from stepscope.core.experiment import Experiment, decode_experiment, encode_experiment
from stepscope.engine.request import Tell


def answer(
    run: Callable[[Tell], Experiment],
    *,
    study: str,
    read: Path | None,
    save: Path | None,
    json: bool,
    only: str | None = None,
) -> None:
    """Run the experiment, or read one, and show it, or the part of it that `only` names."""
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
        emit(encode_experiment(found))
    else:
        present(found, only=only)


def _read(path: Path, study: str) -> Experiment:
    try:
        data = read_document(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    found = decode_experiment(data, str(path))
    if found.study != study:
        raise InputError(f"{path} is of the study {found.study}: read it with `stepscope study {found.study}`")
    return found


@verb("study formats", "stepscope study formats --value 1e-7 --only becomes", "stepscope study formats --only Formats")
def formats(
    *,
    value: str | None,
    device: str = "cpu",
    from_: Path | None,
    only: str | None,
    save: Path | None,
    json: bool,
) -> None:
    """Range, precision and largest integer of every floating format, from its bits."""

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.formats import study_formats

        return study_formats(value, device)

    answer(run, study="formats", read=from_, save=save, json=json, only=only)


@verb("study accumulation", "stepscope study accumulation", "stepscope study accumulation --only findings")
def accumulation(*, from_: Path | None, only: str | None, save: Path | None, json: bool) -> None:
    """Sums of many small numbers in every pair of accumulator and addend: where they stop growing, and why."""

    def run(tell: Tell) -> Experiment:
        from stepscope.numerics.accumulation import study_accumulation

        return study_accumulation(tell)

    answer(run, study="accumulation", read=from_, save=save, json=json, only=only)


@verb(
    "study normalisation",
    "stepscope study normalisation --scales 0.1,10,300 --widths 256,4096",
    "stepscope study normalisation --from results/cpu/precision/normalisation.json --save normalisation.svg",
)
def normalisation(
    *,
    scales: str | None,
    widths: str | None,
    epsilon: str | None,
    device: str = "cpu",
    from_: Path | None,
    only: str | None,
    save: Path | None,
    json: bool,
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

    answer(run, study="normalisation", read=from_, save=save, json=json, only=only)


@verb(
    "study softmax",
    "stepscope study softmax --row 10,11.5,89",
    "stepscope study softmax --from results/cpu/precision/softmax.json --only 'exp in each format'",
)
def softmax(
    *,
    row: str | None,
    scales: str | None,
    device: str = "cpu",
    from_: Path | None,
    only: str | None,
    save: Path | None,
    json: bool,
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

    answer(run, study="softmax", read=from_, save=save, json=json, only=only)
