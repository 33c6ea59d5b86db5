"""Every floating format from its bits, and what each makes of a number (`core/float_format.py` has the arithmetic)."""

import math
from fractions import Fraction

from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Table
from stepscope.core.finding import Finding
from stepscope.core.float_format import FORMATS, FloatFormat
from stepscope.numerics.setting import versions

_PROPERTIES = (
    "format", "bits", "exponent bits", "significand bits", "largest", "smallest normal", "smallest subnormal",
    "epsilon", "decimal digits", "largest integer", "exp overflows above",
)  # fmt: skip

_LONGEST = 1_000
"""Characters of a number; Python reads whole numbers of up to 4,300 figures."""


def study_formats(value: str | None = None) -> Experiment:
    """The formats; with `value`, what each makes of it. Raises InputError for what is no finite number."""
    tables = [Table(title="Formats", columns=_PROPERTIES, rows=tuple(_row(f) for f in FORMATS.values()))]
    findings = [_range_against_precision()]
    if value is not None:
        number, exact = _number(value)
        columns = ("format", "becomes", "error", "relative error", "spacing there", "what happened")
        tables.append(
            Table(
                title=f"What becomes of {value}",
                columns=columns,
                rows=tuple(_becomes(f, number, exact) for f in FORMATS.values()),
            )
        )
        findings += _lost(value, number, exact)
    return Experiment(
        study="formats",
        question="What can each floating format hold?" if value is None else f"What does each format make of {value}?",
        device="arithmetic alone, no device",
        versions=versions(),
        settings={} if value is None else {"value": value},
        tables=tuple(tables),
        findings=tuple(findings),
    )


def _row(f: FloatFormat) -> tuple[Cell, ...]:
    return (
        f.name, f.stored_bits, f.exponent_bits, f.significand_bits, f.largest, f.smallest_normal, f.smallest_subnormal,
        f.epsilon, round(f.decimal_digits, 2), f.largest_integer, round(f.exp_overflows_above, 4),
    )  # fmt: skip


def _number(value: str) -> tuple[float, Fraction]:
    """As fp64 has it, and exactly as it is written: 0.1 is no number of any format here."""
    if len(value) > _LONGEST:
        raise InputError(f"--value has {len(value):,} characters: write at most {_LONGEST:,}, as in 1e-7")
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"--value {value!r} is no number: write one as in 1e-7") from None
    figures = [character for character in value.casefold().partition("e")[0] if character.isdigit()]
    if not math.isfinite(number) and not figures:
        raise InputError(f"--value {value!r} is not finite: every format with infinities keeps it as it is")
    fp64 = FORMATS["fp64"]
    if not math.isfinite(number):
        raise InputError(
            f"--value {value!r} is beyond the largest number of fp64, {fp64.largest:g}: write a smaller one"
        )
    if number == 0 and any(int(figure) for figure in figures):
        raise InputError(
            f"--value {value!r} is zero in fp64, whose smallest number is {fp64.smallest_subnormal:g}: "
            "write a larger one"
        )
    return number, Fraction(value.strip()) if number else Fraction(0)


def _becomes(f: FloatFormat, number: float, exact: Fraction) -> tuple[Cell, ...]:
    rounded = f.round(number)
    error = Fraction(rounded) - exact if math.isfinite(rounded) else None
    return (
        f.name, rounded, None if error is None else float(error),
        float(abs(error / exact)) if error is not None and exact else None,
        f.spacing(number), _what_happened(f, exact, rounded),
    )  # fmt: skip


def _what_happened(f: FloatFormat, exact: Fraction, rounded: float) -> str:
    if not math.isfinite(rounded):
        return "overflows"
    if rounded == exact:
        return "exact"
    if rounded == 0:
        return "vanishes"
    return "subnormal: fewer digits" if abs(rounded) < f.smallest_normal else "rounded"


def _range_against_precision() -> Finding:
    bf16, fp16 = FORMATS["bf16"], FORMATS["fp16"]
    return Finding(
        kind="range-against-precision",
        severity="note",
        sentence=f"Of the two formats of 16 bits bf16 reaches {bf16.largest:.4g} in steps of {bf16.epsilon:.3g} "
        f"relative to the number, fp16 {fp16.largest:.5g} in steps of {fp16.epsilon:.3g}: "
        f"{bf16.epsilon / fp16.epsilon:.0f} times finer. The smallest number above zero is "
        f"{bf16.smallest_subnormal:.3g} in bf16, {fp16.smallest_subnormal:.3g} in fp16.",
        evidence={
            "bf16_largest": bf16.largest, "fp16_largest": fp16.largest,
            "bf16_epsilon": bf16.epsilon, "fp16_epsilon": fp16.epsilon,
        },
    )  # fmt: skip


def _lost(value: str, number: float, exact: Fraction) -> list[Finding]:
    vanished = [f.name for f in FORMATS.values() if number and f.round(number) == 0]
    overflowed = [f.name for f in FORMATS.values() if not math.isfinite(f.round(number))]
    kept = [f.name for f in FORMATS.values() if f.round(number) == exact]
    said = []
    if vanished:
        said.append(f"vanishes in {', '.join(vanished)}")
    if overflowed:
        said.append(f"overflows in {', '.join(overflowed)}")
    said.append(f"is exact in {', '.join(kept)}" if kept else "is exact in none")
    return [
        Finding(
            kind="value", severity="note", sentence=f"{value.strip()} {', '.join(said)}.", evidence={"value": number}
        )
    ]
