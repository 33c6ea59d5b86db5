"""Every floating format from its bits, and what each makes of a number (`core/precisions.py` has the arithmetic).

Beyond the largest number of the formats of 8 bits there are two conventions. Both are shown, and PyTorch is asked which
one its casts use: versions differ (on a CPU, PyTorch 2.11 makes 500 NaN in e4m3, PyTorch 2.13 makes it 448).
"""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

from stepscope.core.answer import Answer, Cell, Finding, Table, note
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS, FloatFormat
from stepscope.core.options import DEVICES, MEASURING, NUMBERS, Option
from stepscope.questions.question import Question

if TYPE_CHECKING:
    import torch

EIGHT_BITS = {"fp8-e5m2": "float8_e5m2", "fp8-e4m3": "float8_e4m3fn"}
"""The dtypes of PyTorch with 8 bits, by the format."""
SATURATING, NOT_SATURATING, NEITHER = "saturating", "not saturating", "neither"
CASTS = "PyTorch's casts to 8 bits"

_PROPERTIES: dict[str, Callable[[FloatFormat], Cell]] = {
    "format": lambda f: f.name,
    "bits": lambda f: f.stored_bits,
    "exponent bits": lambda f: f.exponent_bits,
    "significand bits": lambda f: f.significand_bits,
    "largest": lambda f: f.largest,
    "smallest normal": lambda f: f.smallest_normal,
    "smallest subnormal": lambda f: f.smallest_subnormal,
    "epsilon": lambda f: f.epsilon,
    "decimal digits": lambda f: round(f.decimal_digits, 2),
    "largest integer": lambda f: f.largest_integer,
    "exp overflows above": lambda f: round(f.exp_overflows_above, 4),
}

_LONGEST = 1_000
"""The most characters that a number may have; Python reads whole numbers of up to 4,300 figures."""


Value = Annotated[str | None, Option("What does each format make of this number? As in 1e-7.", NUMBERS)]
Device = Annotated[
    str,
    Option("Where PyTorch casts --value to 8 bits: auto, cpu, cuda or cuda:N.", MEASURING, complete=DEVICES),
]


def study_formats(*, value: Value = None, device: Device = "cpu") -> Answer:
    """Range, precision and largest integer of every floating format, from its bits."""
    from stepscope.questions.answers import computed_answer, processor_name, table_by
    from stepscope.recording.environment import resolve_device

    chosen, number = resolve_device(device), None
    conventions = {name: cast_convention(name, chosen) for name in EIGHT_BITS}
    tables = [table_by("Formats", FORMATS.values(), _PROPERTIES)]
    bf16, fp16 = FORMATS["bf16"], FORMATS["fp16"]
    findings = [
        note(
            "range-against-precision",
            f"Of the two formats of 16 bits bf16 reaches {bf16.largest:.4g} in steps of {bf16.epsilon:.3g} "
            f"relative to the number, fp16 {fp16.largest:.5g} in steps of {fp16.epsilon:.3g}: "
            f"{bf16.epsilon / fp16.epsilon:.0f} times finer. The smallest number above zero is "
            f"{bf16.smallest_subnormal:.3g} in bf16, {fp16.smallest_subnormal:.3g} in fp16.",
            {
                "bf16_largest": bf16.largest,
                "fp16_largest": fp16.largest,
                "bf16_epsilon": bf16.epsilon,
                "fp16_epsilon": fp16.epsilon,
            },
        ),
        _which_convention(conventions, chosen),
    ]
    if value is not None:
        number, exact = _number(value)
        columns = ("format", "becomes", "error", "relative error", "spacing there", "what happened")
        tables.append(
            Table(
                title=f"What becomes of {value}",
                columns=columns,
                rows=tuple(row for f in FORMATS.values() for row in _becomes(f, number, exact)),
            )
        )
        findings += _lost(value, number, exact)
    casts: dict[str, Callable[[str], Cell]] = {"format": str, "beyond the largest": conventions.__getitem__}
    if number is not None:  # as fp32 has it, which training casts from
        in_fp32 = FORMATS["fp32"].round(number)
        casts["makes of the number"] = lambda name: cast([in_fp32], name, chosen)[0]
    tables.append(table_by(CASTS, EIGHT_BITS, casts))
    return computed_answer(
        chosen,
        study="formats",
        question="What can each floating format hold?" if value is None else f"What does each format make of {value}?",
        device=f"arithmetic; casts on {processor_name(chosen)}",
        settings={} if value is None else {"value": value},
        tables=tables,
        findings=findings,
    )


def _number(value: str) -> tuple[float, Fraction]:
    """The number in fp64, and exactly as it is written: no binary format holds 0.1 exactly."""
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


def _becomes(f: FloatFormat, number: float, exact: Fraction) -> list[tuple[Cell, ...]]:
    """The row of a format, or its two rows where the conventions of formats of 8 bits differ."""
    rounded, cut = f.round(number), f.round(number, saturates=True)
    if f.stored_bits > 8 or rounded == cut:
        return [_row_of(f, f.name, number, exact, rounded)]
    return [
        _row_of(f, f"{f.name}, {NOT_SATURATING}", number, exact, rounded),
        _row_of(f, f"{f.name}, {SATURATING}", number, exact, cut),
    ]


def _row_of(f: FloatFormat, label: str, number: float, exact: Fraction, rounded: float) -> tuple[Cell, ...]:
    error = Fraction(rounded) - exact if math.isfinite(rounded) else None
    shown: Cell = None if error is None else float(error)
    if error and shown == 0:  # fp64 itself has no number that small
        shown = f"{Decimal(error.numerator) / Decimal(error.denominator):.4g}"
    return (
        label,
        rounded,
        shown,
        float(abs(error / exact)) if error is not None and exact else None,
        f.spacing(number),
        _what_happened(f, exact, rounded),
    )


def _what_happened(f: FloatFormat, exact: Fraction, rounded: float) -> str:
    if not math.isfinite(rounded):
        return "overflows"
    if rounded == exact:
        return "exact"
    if rounded == 0:
        return "vanishes"
    if not math.isfinite(f.round(float(exact))):
        return "cut off at the largest"
    return "subnormal: fewer digits" if abs(rounded) < f.smallest_normal else "rounded"


def cast_convention(name: str, device: "torch.device") -> str:
    """Which convention PyTorch's cast to this format of 8 bits uses here: seen by casting, not known beforehand."""
    f = FORMATS[name]
    beyond = [sign * number for number in (2 * f.largest, 1e30, math.inf) for sign in (1, -1)]
    became = cast(beyond, name, device)
    for convention in (SATURATING, NOT_SATURATING):
        right = [f.round(number, saturates=convention == SATURATING) for number in beyond]
        if all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(became, right, strict=True)):
            return convention
    return NEITHER


def cast(numbers: list[float], name: str, device: "torch.device") -> list[float]:
    """What PyTorch makes of numbers of fp32 in this format of 8 bits."""
    import torch

    in_fp32 = torch.tensor(numbers, dtype=torch.float32, device=device)
    return in_fp32.to(getattr(torch, EIGHT_BITS[name])).double().tolist()


def _which_convention(conventions: dict[str, str], device: "torch.device") -> Finding:
    import torch

    clauses = []
    for name, convention in conventions.items():
        f = FORMATS[name]
        if convention == NEITHER:
            became = ", ".join(f"{number:g}" for number in cast([2 * f.largest, math.inf], name, device))
            clauses.append(f"to {name} follows neither convention ({2 * f.largest:g} and infinity become {became})")
        elif convention == SATURATING:
            clauses.append(f"to {name} saturates (beyond {f.largest:g}, {f.largest:g})")
        else:
            clauses.append(f"to {name} does not saturate (beyond {f.largest:g}, {f.round(math.inf):g})")
    where = "the CPU" if device.type == "cpu" else "the GPU"
    return note(
        "cast-convention",
        f"On {where}, a cast of PyTorch {torch.__version__} {'; one '.join(clauses)}.",
        dict(conventions),
    )


def _lost(value: str, number: float, exact: Fraction) -> list[Finding]:
    vanished = [f.name for f in FORMATS.values() if number and f.round(number) == 0]
    overflowed = [
        f.name if f.stored_bits > 8 else f"{f.name} (unless the cast saturates: {f.round(number, saturates=True):g})"
        for f in FORMATS.values()
        if not math.isfinite(f.round(number))
    ]
    kept = [f.name for f in FORMATS.values() if f.round(number) == exact]
    clauses = []
    if vanished:
        clauses.append(f"vanishes in {', '.join(vanished)}")
    if overflowed:
        clauses.append(f"overflows in {', '.join(overflowed)}")
    clauses.append(f"is exact in {', '.join(kept)}" if kept else "is exact in none")
    return [note("value", f"{value.strip()} {', '.join(clauses)}.", {"value": number})]


QUESTION = Question(
    "formats",
    study_formats,
    examples=("--value 1e-7 --only becomes", "--only Formats"),
    shared=("from_", "shown"),
)
