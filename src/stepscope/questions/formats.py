"""Every number format from its bits, and what each makes of a number (`core/float_formats.py` has the arithmetic).

Beyond the largest number of the formats of 8 bits there are two conventions. Both are shown, and PyTorch is asked which
one its casts use: versions differ (on a CPU, PyTorch 2.11 makes 500 NaN in e4m3, PyTorch 2.13 makes it 448).

Formats of blocks are tried on numbers of the standard normal distribution: its quantiles make one block, in which one
number is then another; and many blocks at random tell what each rule for the scale costs.

A GPU's own products of blocks are raced against bf16's, and compared with the simulation that all other studies use
(`training/scaled_products.py`): each format in a process of its own, since one was seen to end its process.
"""

import itertools
import math
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

import msgspec

import stepscope
from stepscope.core.answer import Answer, Cell, Finding, Table, note
from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.core.figures import Figure, digits, milliseconds, tera
from stepscope.core.float_formats import BLOCK_FORMATS, FORMATS, SCALE_RULES, BlockFormat, FloatFormat, round_block
from stepscope.core.options import DEVICES, MEASURING, NUMBERS, Option
from stepscope.questions.answers import table_by
from stepscope.questions.question import Question

if TYPE_CHECKING:
    import torch

    from stepscope.engine.request import Tell

EIGHT_BITS = {
    "fp8-e5m2": "float8_e5m2",
    "fp8-e4m3": "float8_e4m3fn",
    "fp8-e5m2fnuz": "float8_e5m2fnuz",
    "fp8-e4m3fnuz": "float8_e4m3fnuz",
}
"""The dtypes of PyTorch with 8 bits, by the format."""
OUTLIER = "100"
"""The number in a block of normal ones where none is asked about."""
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


def _shape(form: BlockFormat, *, weight: bool) -> str:
    rows = form.rows if weight or form.square else 1
    return "tensor" if not rows else "row" if not form.size else f"{rows} x {form.size}"


def _reach(number: FloatFormat) -> float:
    return math.log2(number.largest) - math.log2(number.smallest_subnormal)


def _scale_of(form: BlockFormat) -> str:
    element = FORMATS[form.element]
    if form.powers_of_two:
        power = "floor(log2(max))"
        return f"2**({power} - {element.largest_exponent})" if element.largest_exponent else f"2**{power}"
    share = f"max / {element.largest:g}"
    return f"{share} / the tensor's, which is max / {element.largest * 448:g}" if form.tensor_scale else share


_BLOCKS: dict[str, Callable[[BlockFormat], Cell]] = {
    "format": lambda b: b.name,
    "elements": lambda b: b.element,
    "scale": lambda b: b.scale + (", and fp32 for the tensor" if b.tensor_scale else ""),
    "block": lambda b: _shape(b, weight=False),
    "block of a weight": lambda b: _shape(b, weight=True),
    "bits each": lambda b: b.bits,
    "range in a block, 2**": lambda b: round(_reach(FORMATS[b.element]), 2),
    "range over blocks, 2**": lambda b: round(_reach(FORMATS[b.element]) + _reach(FORMATS[b.scale]), 2),
    "scale of a block": _scale_of,
}

_LONGEST = 1_000
"""The most characters that a number may have; Python reads whole numbers of up to 4,300 figures."""


Value = Annotated[str | None, Option("What does each format make of this number? As in 1e-7.", NUMBERS)]
Device = Annotated[
    str | None,
    Option(
        "Where PyTorch casts to 8 bits, too, --value among them, and a GPU multiplies: auto, cpu, cuda or cuda:N.",
        MEASURING,
        complete=DEVICES,
    ),
]


def study_formats(*, value: Value = None, device: Device = None, tell: "Tell | None" = None) -> Answer:
    """Range, precision and codes of every number format, from its bits; and what formats of blocks make of a block."""
    number, value = None, None if value is None else value.strip()
    tables = [
        table_by("Formats", FORMATS.values(), _PROPERTIES),
        _codes(),
        table_by("Blocks", BLOCK_FORMATS.values(), _BLOCKS),
        _rules(),
    ]
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
    in_block, found = _in_a_block(value or OUTLIER, float(OUTLIER) if number is None else number)
    tables.append(in_block)
    findings.append(found)
    answer = Answer(
        study="formats",
        question="What can each floating format hold?" if value is None else f"What does each format make of {value}?",
        device="arithmetic",
        date=datetime.now(UTC).date().isoformat(),
        versions={"stepscope": stepscope.__version__, "python": platform.python_version()},
        settings={} if value is None else {"value": value},
        tables=tuple(tables),
        findings=tuple(findings),
    )
    return answer if device is None else _with_device(answer, device, number, tell)


def _with_device(answer: Answer, device: str, number: float | None, tell: "Tell | None") -> Answer:
    """The answer, what PyTorch's casts to 8 bits make of a number on a device, and its products of blocks."""
    import torch

    from stepscope.questions.answers import processor_name
    from stepscope.recording.environment import resolve_device

    chosen = resolve_device(device)
    conventions = {name: cast_convention(name, chosen) for name in EIGHT_BITS}
    casts: dict[str, Callable[[str], Cell]] = {"format": str, "beyond the largest": conventions.__getitem__}
    if number is not None:  # as fp32 has it, which training casts from
        in_fp32 = FORMATS["fp32"].round(number)
        casts["makes of the number"] = lambda name: cast([in_fp32], name, chosen)[0]
    products, refused = measure_products(chosen, tell)
    tables = [table_by(CASTS, EIGHT_BITS, casts)]
    if products:
        tables.append(table_by(PRODUCTS, products, _PRODUCT))
    return msgspec.structs.replace(
        answer,
        device=f"{answer.device}; casts on {processor_name(chosen)}",
        versions={**answer.versions, "torch": str(torch.__version__)},
        tables=(*answer.tables, *tables),
        findings=(*answer.findings, _which_convention(conventions, chosen), *_of_products(products, refused)),
    )


def _codes() -> Table:
    """What the codes of formats of 8 bits and fewer mean, each decoded."""
    rows: list[tuple[Cell, ...]] = []
    for f in FORMATS.values():
        if f.code_bits <= 8:
            numbers = [f.decode(code) for code in range(2**f.code_bits)]
            known = [number for number in numbers if math.isfinite(number)]
            count = (len(numbers), len(set(known)), known.count(0.0), sum(map(math.isinf, numbers)))
            rows.append((f.name, *count, sum(map(math.isnan, numbers)), min(known), max(known)))
    columns = ("format", "codes", "numbers", "zeros", "infinities", "NaN", "least", "largest")
    return Table(title="Codes of 8 bits and fewer", columns=columns, rows=tuple(rows))


def _rules() -> Table:
    """The error of normal numbers in formats whose scales are powers of two, by the rule that chooses them."""
    draw, fp32 = random.Random(0), FORMATS["fp32"]
    blocks = [[fp32.round(draw.gauss(0, 1)) for _ in range(32)] for _ in range(256)]
    rows: list[tuple[Cell, ...]] = []
    for form in (form for form in BLOCK_FORMATS.values() if form.powers_of_two):
        errors: list[Cell] = []
        for rule in SCALE_RULES:
            rounded = [number for block in blocks for number in round_block(block, form, rule)]
            errors.append(digits(_error([*itertools.chain(*blocks)], rounded)))
        rows.append((form.name, *errors))
    title = "Error of normal numbers by the rule for the scale, %"
    return Table(title=title, columns=("format", *SCALE_RULES), rows=tuple(rows))


def _error(values: Sequence[float], rounded: Sequence[float]) -> float:
    if not all(map(math.isfinite, rounded)):
        return math.nan
    return 100 * math.dist(values, rounded) / math.hypot(*values)


def _vanished(values: Sequence[float], rounded: Sequence[float]) -> Figure | None:
    if not all(map(math.isfinite, rounded)):
        return None
    gone = sum(after == 0 != before for before, after in zip(values, rounded, strict=True))
    return digits(100 * gone / len(values))


_QUOTED = ("mxfp8", "mxfp4", "nvfp4")
"""The formats of blocks that the sentence is about."""


def _in_a_block(value: str, number: float) -> tuple[Table, Finding]:
    """What a number becomes in a block of normal ones, and what it does to them."""
    rows: list[tuple[Cell, ...]] = []
    named: dict[str, Figure | None] = {}
    clauses: list[str] = []
    fp32 = FORMATS["fp32"]
    in_fp32 = fp32.round(number)
    for form in BLOCK_FORMATS.values():
        count = form.size or 128
        normal = [fp32.round(statistics.NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
        becomes, *kept = round_block([in_fp32, *normal[1:]], form)
        others, without = normal[1:], round_block(normal, form)[1:]
        lost = [_vanished(others, part) for part in (kept, without)]
        errors = (digits(error) if math.isfinite(error := _error(others, part)) else error for part in (kept, without))
        rows.append((form.name, becomes, *lost, *errors))
        if form.name in _QUOTED:
            named[form.name] = lost[0]
            clauses.append(f"{becomes:g} in {form.name}, where {lost[0]} % of the others vanish ({lost[1]} without it)")
    columns = (
        "format",
        "becomes",
        "others that vanish, %",
        "without it, %",
        "error of the others, %",
        "error without it, %",
    )
    does = f"becomes {'; '.join(clauses)}"
    if not math.isfinite(in_fp32):
        beyond = "is infinite in fp32, and " if math.isfinite(number) else ""
        does, named = f"{beyond}makes NaN of all others", {}
    found = note("in-a-block", f"{value} in a block of normal numbers {does}.", {**named})
    return Table(title=f"A block of normal numbers with {value} in it", columns=columns, rows=tuple(rows)), found


def _number(value: str) -> tuple[float, Fraction | None]:
    """The number in fp64, and exactly as it is written: no binary format holds 0.1 exactly. Infinities and NaN are
    numbers of no size."""
    if len(value) > _LONGEST:
        raise InputError(f"--value has {len(value):,} characters: write at most {_LONGEST:,}, as in 1e-7")
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"--value {value!r} is no number: write one as in 1e-7") from None
    figures = [character for character in value.casefold().partition("e")[0] if character.isdigit()]
    if not math.isfinite(number) and not figures:
        return number, None
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


def _becomes(f: FloatFormat, number: float, exact: Fraction | None) -> list[tuple[Cell, ...]]:
    """The row of a format, or its two rows where the conventions of formats of 8 bits differ."""
    rounded, cut = f.round(number), f.round(number, saturates=True)
    if f.stored_bits > 8 or _same(rounded, cut):
        return [_row_of(f, f.name, number, exact, rounded)]
    return [
        _row_of(f, f"{f.name}, {NOT_SATURATING}", number, exact, rounded),
        _row_of(f, f"{f.name}, {SATURATING}", number, exact, cut),
    ]


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _row_of(f: FloatFormat, label: str, number: float, exact: Fraction | None, rounded: float) -> tuple[Cell, ...]:
    happened = _what_happened(f, number, exact, rounded)
    if exact is None or happened == _NOTHING:
        return label, None if happened == _NOTHING else rounded, None, None, None, happened
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
        happened,
    )


_NOTHING = "no code for it"


def _what_happened(f: FloatFormat, number: float, exact: Fraction | None, rounded: float) -> str:
    never_nan = f.top in ("numbers", "two's complement")
    if (f.top == "scale" and number <= 0) or (math.isnan(number) and never_nan):
        return _NOTHING
    if _same(rounded, number) if exact is None else rounded == exact:
        is_other_zero = rounded == 0 and math.copysign(1, rounded) != math.copysign(1, number)
        return "loses its sign" if is_other_zero else "exact"
    if not math.isfinite(rounded):
        return "overflows" if exact is not None else "becomes NaN"
    if abs(number) > f.largest and abs(rounded) == f.largest:
        return "cut off at the largest"
    if rounded == 0:
        return "vanishes"
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


_LOST = {
    _NOTHING: "has no code in",
    "vanishes": "vanishes in",
    "loses its sign": "loses its sign in",
    "overflows": "overflows in",
    "becomes NaN": "becomes NaN in",
    "cut off at the largest": "is cut off in",
}


def _lost(value: str, number: float, exact: Fraction | None) -> list[Finding]:
    """The sentence of a number: where it is lost, and where it is exact."""
    places: dict[str, list[str]] = {}
    for f in FORMATS.values():
        rounded, cut = f.round(number), f.round(number, saturates=True)
        happened = _what_happened(f, number, exact, rounded)
        name = f.name
        if happened in ("overflows", "becomes NaN") and f.stored_bits <= 8 and f.top != "scale":
            name += f" (unless the cast saturates: {cut:g})"
        if happened == "cut off at the largest":
            name += f" ({rounded:g})"
        places.setdefault(happened, []).append(name)
    clauses = [f"{words} {', '.join(places[happened])}" for happened, words in _LOST.items() if happened in places]
    clauses.append(f"is exact in {', '.join(places['exact'])}" if "exact" in places else "is exact in none")
    return [note("value", f"{value} {'; '.join(clauses)}.", {"value": number})]


# Products of operands in blocks, as the GPU itself has them.


PRODUCTS = "Products in blocks"
SIZE = 4096
"""Rows, columns and addends of the products."""


class BlockProduct(msgspec.Struct, frozen=True, kw_only=True):
    """A product of normal numbers in a format of blocks: the library's, beside the simulation's in fp32."""

    format: str
    outliers: bool
    """Whether each 257th number of a row of the left operand is 100 times as large."""
    fast: bool
    """Whether Tensor Cores may add up in fewer bits."""
    call_s: float
    bf16_s: float
    """Of the same product in bf16."""
    size: int
    operands_equal: bool
    """Whether PyTorch's casts give the operands of the simulation, bit for bit."""
    equal: float
    """The share of the results that are the simulation's, bit for bit in bf16."""
    within_one: float
    """The share that is at most one number of bf16 away."""
    library_off: float
    """From the exact product of the rounded operands: ||C - exact|| / ||exact||."""
    simulation_off: float
    lost: float
    """The library's error from the exact product of the operands before they were rounded."""


_PRODUCT: dict[str, Callable[[BlockProduct], Cell]] = {
    "format": lambda p: p.format,
    "numbers": lambda p: "with outliers" if p.outliers else "normal",
    "sums": lambda p: "in fewer bits" if p.fast else "in fp32",
    "call (ms)": lambda p: milliseconds(p.call_s),
    "TFLOP/s": lambda p: tera(2 * p.size**3 / p.call_s),
    "times as fast as bf16": lambda p: digits(p.bf16_s / p.call_s),
    "operands as simulated": lambda p: "yes" if p.operands_equal else "no",
    "results as simulated, %": lambda p: digits(100 * p.equal),
    "or next to it, %": lambda p: digits(100 * p.within_one),
    "off by, %": lambda p: digits(100 * p.library_off),
    "simulation off by, %": lambda p: digits(100 * p.simulation_off),
    "with the operands' rounding, %": lambda p: digits(100 * p.lost),
}


def measure_products(device: "torch.device", tell: "Tell | None") -> tuple[list[BlockProduct], dict[str, str]]:
    """The products of a device in each format that the library multiplies, and why it has no others."""
    from stepscope.engine.request import Stage
    from stepscope.engine.user_code import ask_apart
    from stepscope.training.scaled_products import MULTIPLIED_ON, product_fault

    products: list[BlockProduct] = []
    refused: dict[str, str] = {}
    for name in MULTIPLIED_ON:
        if (fault := product_fault(BLOCK_FORMATS[name], device)) is not None:
            refused[name] = fault
            continue
        if tell is not None:
            tell(Stage(name=f"products in {name}"))
        try:
            told = ask_apart("stepscope.questions.formats", name, str(device), what=f"the product in {name}")
        except StepscopeError as error:
            refused[name] = str(error).removesuffix(": let it return instead")
        else:
            products += msgspec.json.decode(told, type=list[BlockProduct])
    return products, refused


def main(name: str, device: str) -> str:
    """The products in one format, as JSON, for the process that asked. Raises InputError where the library refuses."""
    import torch

    try:
        return msgspec.json.encode([*judge_products(name, torch.device(device), SIZE)]).decode()
    except (RuntimeError, ValueError) as error:
        raise InputError(f"PyTorch {torch.__version__} refuses the product in {name}: {one_line(error)}") from error


def judge_products(name: str, device: "torch.device", size: int) -> Iterator[BlockProduct]:
    """Square products of a size in one format, timed and compared with the simulation."""
    import torch

    from stepscope.core.run import Settings
    from stepscope.recording.leads import median_call_s
    from stepscope.recording.precision import matmul_precision
    from stepscope.training.scaled_products import BlockOperand, block_product, round_blocks

    form, draw = BLOCK_FORMATS[name], torch.Generator(device).manual_seed(0)
    settings = Settings(warmup_floor=3, warmup_cap=10, warmup_seconds=0.1, steps_floor=3, steps_cap=100, seconds=0.2)
    for outliers in (False, True):
        x, w = (torch.randn(size, size, device=device, generator=draw).bfloat16() for _ in range(2))
        if outliers:
            x[:, ::257] *= 100
        left, right = round_blocks(x, form), round_blocks(w, form, weight=True)
        a, b = BlockOperand.of(x, form), BlockOperand.of(w, form, weight=True)
        same = torch.equal(a.numbers(), left) and torch.equal(b.numbers(), right)
        with matmul_precision("fp32"):
            simulated = (left @ right.t()).bfloat16()
        exact, whole = left.double() @ right.double().t(), x.double() @ w.double().t()
        bf16_s = median_call_s(lambda x=x, w=w: x @ w.t(), device, settings)
        for fast in (False, True) if form.scale == "fp32" and not form.size else (False,):
            call = block_product(a, b, fast=fast)
            result = call()
            apart = (_order(result) - _order(simulated)).abs()
            yield BlockProduct(
                format=name,
                outliers=outliers,
                fast=fast,
                call_s=median_call_s(call, device, settings),
                bf16_s=bf16_s,
                size=size,
                operands_equal=same,
                equal=float((apart == 0).double().mean()),
                within_one=float((apart <= 1).double().mean()),
                library_off=_distance(result, exact),
                simulation_off=_distance(simulated, exact),
                lost=_distance(result, whole),
            )


def _order(numbers: "torch.Tensor") -> "torch.Tensor":
    """Numbers of bf16 as integers that count them from zero."""
    import torch

    codes = numbers.view(torch.int16).int()
    return torch.where(codes < 0, -(codes & 0x7FFF), codes)


def _distance(numbers: "torch.Tensor", exact: "torch.Tensor") -> float:
    return float((numbers.double() - exact).norm() / exact.norm())


def _of_products(products: Sequence[BlockProduct], refused: dict[str, str]) -> Iterator[Finding]:
    """What products in blocks give, by the format; and one sentence of those that there are not."""
    for name in dict.fromkeys(product.format for product in products):
        normal = [product for product in products if product.format == name and not product.outliers]
        in_fp32, sums = normal[0], " in fp32 and in fewer bits" if len(normal) > 1 else " in fp32"
        times, equal, off = (
            " and ".join(f"{figure(row):.3g}" for row in normal)
            for figure in (lambda row: 1e3 * row.call_s, lambda row: 100 * row.equal, lambda row: 100 * row.library_off)
        )
        yield note(
            "product-in-blocks",
            f"With sums{sums} a square product of {in_fp32.size:,} in {name} takes {times} ms, "
            f"in bf16 {1e3 * in_fp32.bf16_s:.3g}. {equal} % of the results are the simulation's, bit for bit in bf16. "
            f"From the exact product of the rounded operands they are off by {off} %, the simulation's by "
            f"{100 * in_fp32.simulation_off:.3g} %; rounding the operands costs {100 * in_fp32.lost:.3g} %.",
            {
                "format": name,
                "call_s": in_fp32.call_s,
                "bf16_s": in_fp32.bf16_s,
                "equal": in_fp32.equal,
                "library_off": in_fp32.library_off,
                "simulation_off": in_fp32.simulation_off,
                "lost": in_fp32.lost,
            },
        )
    if refused:
        said = [
            f"{', '.join(name for name in refused if refused[name] == why)} ({why})"
            for why in dict.fromkeys(refused.values())
        ]
        yield note("no-product-in-blocks", f"Simulated alone, here: {'; '.join(said)}.", {**refused})


QUESTION = Question(
    "formats",
    study_formats,
    examples=("--value 1e-7 --only becomes", "--only Formats"),
    shared=("from_", "shown"),
)


if __name__ == "__main__":
    from stepscope.engine.user_code import answer_apart

    answer_apart(main)
