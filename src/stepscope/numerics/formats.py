"""Every floating format from its bits, and what each makes of a number (`core/float_format.py` has the arithmetic)."""

import math

from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Table
from stepscope.core.finding import Finding
from stepscope.core.float_format import FORMATS, FloatFormat
from stepscope.numerics.setting import versions

_PROPERTIES = (
    "format", "bits", "exponent bits", "significand bits", "largest", "smallest normal", "smallest subnormal",
    "epsilon", "decimal digits", "largest integer", "exp overflows above",
)  # fmt: skip


def study_formats(value: str | None = None) -> Experiment:
    """The formats; with `value`, what each makes of it. Raises InputError for what is no finite number."""
    tables = [Table(title="Formats", columns=_PROPERTIES, rows=tuple(_row(f) for f in FORMATS.values()))]
    findings = [_range_against_precision()]
    number = None if value is None else _finite(value)
    if number is not None:
        columns = ("format", "becomes", "error", "relative error", "spacing there", "what happened")
        tables.append(
            Table(
                title=f"What becomes of {value}",
                columns=columns,
                rows=tuple(_becomes(f, number) for f in FORMATS.values()),
            )
        )
        findings += _lost(number)
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


def _finite(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"--value {value!r} is no number: write one as in 1e-7") from None
    if not math.isfinite(number):
        raise InputError(f"--value {value!r} is not finite: every format with infinities keeps it as it is")
    return number


def _becomes(f: FloatFormat, number: float) -> tuple[Cell, ...]:
    rounded = f.round(number)
    error = rounded - number if math.isfinite(rounded) else None
    relative = abs(error / number) if error is not None and number else None
    return (f.name, rounded, error, relative, f.spacing(number), _what_happened(f, number, rounded))


def _what_happened(f: FloatFormat, number: float, rounded: float) -> str:
    if not math.isfinite(rounded):
        return "overflows"
    if rounded == number:
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


def _lost(number: float) -> list[Finding]:
    vanished = [f.name for f in FORMATS.values() if number and f.round(number) == 0]
    overflowed = [f.name for f in FORMATS.values() if not math.isfinite(f.round(number))]
    exact = [f.name for f in FORMATS.values() if f.round(number) == number]
    said = []
    if vanished:
        said.append(f"vanishes in {', '.join(vanished)}")
    if overflowed:
        said.append(f"overflows in {', '.join(overflowed)}")
    said.append(f"is exact in {', '.join(exact)}" if exact else "is exact in none")
    return [
        Finding(kind="value", severity="note", sentence=f"{number!r} {', '.join(said)}.", evidence={"value": number})
    ]
