"""Softmax and attention in few bits as a study: by the scale of their inputs, and for a row of one's own."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from stepscope.core.answer import Answer, Cell, Finding, Table, note, warning
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS
from stepscope.core.options import NUMBERS, Numbers, Option, finite_numbers
from stepscope.questions import answers
from stepscope.questions.answers import Deviation, computed_answer, deviation, quoted
from stepscope.questions.question import Question

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Softmax and attention in few bits, as their inputs grow.
#
#     naive    exp(x) / sum(exp(x)): exp overflows above ln of the format's largest number, and inf / inf is NaN
#     safe     exp(x - m) / sum(exp(x - m)) with m = max(x): no exponent is above zero
#     online   the same in one pass over blocks, with a running maximum and a running sum that is rescaled whenever the
#              maximum grows: d <- d exp(m_old - m_new) + sum(exp(block - m_new)) (Milakov and Gimelshein 2018,
#              arXiv:1805.02867, algorithm 3)
#
# Attention's scores q.k of a head of D numbers, each of standard deviation s, have the deviation s^2 sqrt(D): hence the
# division by sqrt(D) (Vaswani et al. 2017, section 3.2.1). It can be done to the scores, or to q before the product.
#
# Shape legend: R rows, W width, H heads, S positions, D head_dim.


NAIVE, SAFE, ONLINE = "naive", "safe", "online"
DIVISIONS = NOT_DIVIDED, AFTER, BEFORE = "not divided", "divided after", "divided before"
WIDTH = 1024
BLOCK = 64
"""Elements per block of the online softmax."""
POSITIONS = 128
_ROWS, _HEADS = 8, 2


@dataclass(frozen=True, kw_only=True)
class ExpLimits:
    """Where exp leaves a format, found by trying on the device."""

    format: str
    logarithm: float
    """ln of the largest number."""
    finite_up_to: float
    infinite_at: float
    """The next number of the format, whose exp is infinite."""
    vanishes_below: float
    """The smallest number whose exp is above zero."""


@dataclass(frozen=True, kw_only=True)
class SoftmaxCase:
    """The result of one softmax in one format on one input."""

    format: str
    way: str
    scale: float
    largest: float
    """The largest element of the input."""
    result: Deviation


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """The result of attention in one format, with one softmax and one way of dividing, on one input."""

    head_dim: int
    format: str
    division: str
    softmax: str
    scale: float
    """Standard deviation of q and k."""
    largest_score: float
    """The largest score, in float64, after the division by sqrt(head_dim) if there is one."""
    largest_weight: float
    """The largest weight that softmax gives one key, in float64, as a mean over the queries; 1 if it picks one key."""
    finite_scores: bool
    result: Deviation
    """The error of attention's output, or the word for what became of it."""


def naive_softmax(x_RW: "Tensor") -> "Tensor":
    """exp(x) / sum(exp(x)), in the input's format."""
    exponentials = x_RW.exp()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def safe_softmax(x_RW: "Tensor") -> "Tensor":
    """Softmax with the maximum of each row subtracted first, in the input's format."""
    return naive_softmax(x_RW - x_RW.amax(dim=-1, keepdim=True))


def online_softmax(x_RW: "Tensor", block: int = BLOCK) -> "Tensor":
    """Softmax with maximum and sum from one pass over blocks, both in the input's format; a second pass divides."""
    maximum = x_RW.new_full((*x_RW.shape[:-1], 1), -math.inf)
    total = maximum.new_zeros(maximum.shape)
    for part in x_RW.split(block, dim=-1):
        larger = maximum.maximum(part.amax(dim=-1, keepdim=True))
        total = total * (maximum - larger).exp() + (part - larger).exp().sum(dim=-1, keepdim=True)
        maximum = larger
    return (x_RW - maximum).exp() / total


SOFTMAXES: "dict[str, Callable[[Tensor], Tensor]]" = {
    NAIVE: naive_softmax,
    SAFE: safe_softmax,
    ONLINE: online_softmax,
    "PyTorch's own": lambda x_RW: x_RW.softmax(dim=-1),
}


def attention_scores(q_HSD: "Tensor", k_HSD: "Tensor", division: str) -> "Tensor":
    """q k^T in the inputs' format, divided by sqrt(D) after the product, before it, or not at all."""
    root = math.sqrt(q_HSD.shape[-1])
    if division == BEFORE:
        q_HSD = q_HSD / root
    scores_HST = q_HSD @ k_HSD.transpose(-2, -1)
    return scores_HST / root if division == AFTER else scores_HST


def exp_limits(name: str, device: "torch.device") -> ExpLimits:
    """Where exp leaves the format of this name."""
    dtype = answers.dtype_of(name)
    last = answers.last_number_where(lambda x: x.exp().isfinite(), dtype, device)
    return ExpLimits(
        format=name,
        logarithm=FORMATS[name].exp_overflows_above,
        finite_up_to=last,
        infinite_at=answers.next_number(last, dtype),
        vanishes_below=-answers.last_number_where(lambda x: (-x).exp() > 0, dtype, device),
    )


def softmax_cases(name: str, scales: Sequence[float], device: "torch.device", seed: int) -> list[SoftmaxCase]:
    """The cases of each softmax in one format: the same random numbers, multiplied by each scale."""
    import torch

    # Made on the CPU: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    x64_RW = torch.randn(_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    cases = []
    for way, softmax in SOFTMAXES.items():
        for scale in scales:
            x_RW = (x64_RW * scale).to(device, answers.dtype_of(name))
            result = deviation(softmax(x_RW), safe_softmax(x_RW.double()), x_RW)
            cases.append(SoftmaxCase(format=name, way=way, scale=scale, largest=x_RW.max().item(), result=result))
    return cases


def attention_cases(head_dim: int, scale: float, device: "torch.device", seed: int) -> list[AttentionCase]:
    """The cases of attention at one scale: in each format, with each softmax and each way of dividing."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (_HEADS, POSITIONS, head_dim)
    q64, k64, v64 = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    cases = []
    for name in answers.FEW_BITS:
        q_HSD, k_HSD, v_HSD = (x.to(device, answers.dtype_of(name)) for x in (q64 * scale, k64 * scale, v64))
        for division in DIVISIONS:
            exact_HST = attention_scores(q_HSD.double(), k_HSD.double(), division)
            exact_weights_HST = safe_softmax(exact_HST)
            scores_HST = attention_scores(q_HSD, k_HSD, division)
            for softmax in (NAIVE, SAFE):
                out_HSD = SOFTMAXES[softmax](scores_HST) @ v_HSD
                cases.append(
                    AttentionCase(
                        head_dim=head_dim,
                        format=name,
                        division=division,
                        softmax=softmax,
                        scale=scale,
                        largest_score=exact_HST.max().item(),
                        largest_weight=exact_weights_HST.amax(dim=-1).mean().item(),
                        finite_scores=bool(scores_HST.isfinite().all().item()),
                        result=deviation(out_HSD, exact_weights_HST @ v_HSD.double(), q_HSD, k_HSD),
                    )
                )
    return cases


# Findings on softmax and attention in few bits, with the figures of the cases.


def softmax_findings(
    limits: list[ExpLimits], softmaxes: list[SoftmaxCase], attentions: list[AttentionCase]
) -> Iterator[Finding]:
    """Findings on the limits of exp, on where the naive softmax breaks, on the other softmaxes, and on attention."""
    for limit in limits:
        yield note(
            "exp-overflows",
            f"In {limit.format} exp is finite up to {limit.finite_up_to:.8g} and infinite at "
            f"{limit.infinite_at:.8g}; ln of the largest number, {FORMATS[limit.format].largest:.6g}, is "
            f"{limit.logarithm:.8g}. Below {limit.vanishes_below:.4g} it is zero.",
            quoted(limit, "logarithm", "finite_up_to", "infinite_at", "vanishes_below"),
        )
    for limit in limits:
        cases = [case for case in softmaxes if case.format == limit.format]
        yield from _naive([case for case in cases if case.way == NAIVE], limit)
        yield from _remedies(cases)
    for head_dim in dict.fromkeys(case.head_dim for case in attentions):
        for name in dict.fromkeys(case.format for case in attentions):
            cases = [case for case in attentions if case.format == name and case.head_dim == head_dim]
            yield from _attention(cases)


def _naive(cases: list[SoftmaxCase], limit: ExpLimits) -> Iterator[Finding]:
    """Findings on where the naive softmax first breaks: by the sum of exponentials, and by an exponential itself."""
    for word, what in (
        ("zero", "only the sum of the exponentials overflows, and a row of the output is zero without a NaN"),
        ("nan", "exp itself overflows, and infinity divided by infinity is NaN"),
    ):
        broken = next((case for case in cases if case.result.word == word), None)
        if broken is not None:
            side = "above" if broken.largest > limit.finite_up_to else "still below"
            yield warning(
                "naive-softmax",
                f"The naive softmax in {broken.format} breaks at a standard deviation of {broken.scale:g}: the largest "
                f"input is {broken.largest:.4g}, {side} {limit.finite_up_to:.4g}; {what}.",
                remedy="subtract the row's maximum first",
                evidence={**quoted(broken, "scale", "largest"), "limit": limit.finite_up_to, "became": word},
            )


def _remedies(cases: list[SoftmaxCase]) -> Iterator[Finding]:
    """A finding: the largest errors of the safe and the online softmax over all scales that the format holds."""
    worst: dict[str, float] = {}
    for way in (SAFE, ONLINE):
        of_way = [case for case in cases if case.way == way and case.result.word != answers.INPUT_OVERFLOWS.word]
        if not of_way or any(case.result.broken for case in of_way):
            return
        worst[way] = max(case.result.error for case in of_way)
    name, largest = cases[0].format, max(case.largest for case in cases if case.way == SAFE)
    yield note(
        "safe-softmax",
        f"With the maximum subtracted the softmax in {name} is finite at every scale, up to inputs "
        f"of {largest:.4g}, and off by at most {worst[SAFE]:.2g}; online, in blocks, by at most {worst[ONLINE]:.2g}.",
        {"largest": largest, "safe_worst": worst[SAFE], "online_worst": worst[ONLINE]},
    )


def _attention(cases: list[AttentionCase]) -> Iterator[Finding]:
    """Findings for one head_dim and format: where each way breaks, and how much error dividing saves before that."""
    cases = [case for case in cases if case.result.word != answers.INPUT_OVERFLOWS.word]
    if not cases:
        return
    first = cases[0]
    breaks = {}
    for division in DIVISIONS:
        for softmax in (NAIVE, SAFE):
            tried = [case for case in cases if case.division == division and case.softmax == softmax]
            breaks[division, softmax] = next((case for case in tried if case.result.broken), None)
    breaking = [
        f"{division} with the {softmax} softmax at {case.scale:g} (largest score {case.largest_score:.4g}, "
        f"{'the output' if case.finite_scores else 'the scores infinite, the output'} {case.result.word})"
        for (division, softmax), case in breaks.items()
        if case is not None
    ]
    if breaking:
        held = [f"{d} with the {s} softmax" for (d, s), case in breaks.items() if case is None]
        rest = f" It stays finite {' and '.join(held)}." if held else ""
        yield warning(
            "attention-breaks",
            f"Attention in {first.format} with head_dim {first.head_dim} breaks, as q and k "
            f"grow, {'; '.join(breaking)}.{rest}",
            remedy="divide by sqrt(head_dim), before the product where scores overflow, and subtract the maximum",
            evidence={
                f"{division}, {softmax}": None if case is None else case.scale
                for (division, softmax), case in breaks.items()
            },
        )
    yield from _division(cases)


def _division(cases: list[AttentionCase]) -> Iterator[Finding]:
    """A finding on what dividing costs with the safe softmax, near inputs of 1 and where it does most harm."""
    safe = [case for case in cases if case.softmax == SAFE and not case.result.broken]
    divided = {case.scale: case for case in safe if case.division == AFTER}
    pairs = [(case, divided[case.scale]) for case in safe if case.division == NOT_DIVIDED and case.scale in divided]
    if not pairs:
        return
    plain, beside = min(pairs, key=lambda pair: abs(math.log(pair[0].scale)))
    spacing = FORMATS[plain.format].spacing(plain.largest_score)
    error, divided_error = plain.result.error, beside.result.error
    yield note(
        "attention-division",
        f"In {plain.format} with head_dim {plain.head_dim}, q and k of standard deviation {plain.scale:g}: "
        f"the largest score is {plain.largest_score:.4g}, where numbers are {spacing:.3g} apart, and the output is off "
        f"by {error:.2g}; divided by sqrt(head_dim) the largest score is {beside.largest_score:.4g} and the "
        f"output off by {divided_error:.2g}.",
        {
            **quoted(plain, "scale", "largest_score"),
            "spacing": spacing,
            "error": error,
            "divided_score": beside.largest_score,
            "divided_error": divided_error,
        },
    )
    plain, beside = max(pairs, key=lambda pair: pair[1].result.error - pair[0].result.error)
    error, divided_error = plain.result.error, beside.result.error
    if error < divided_error:
        yield note(
            "attention-saturated",
            "The division does not always lessen the error: "
            f"in {plain.format} with head_dim {plain.head_dim}, at a standard deviation of {plain.scale:g}, the output "
            f"is off by {error:.2g} without it and by {divided_error:.2g} with it. There softmax gives one key "
            f"{plain.largest_weight:.4g} of the weight on average without it, {beside.largest_weight:.4g} with it: "
            "a weight near 1 hardly heeds how scores are rounded.",
            {
                "scale": plain.scale,
                "error": error,
                "divided_error": divided_error,
                "largest_weight": plain.largest_weight,
                "divided_largest_weight": beside.largest_weight,
            },
        )


SCALES = (0.5, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Standard deviations of softmax's input, and of attention's q and k."""
HEAD_DIMS = (64, 128)


def study_softmax(
    *,
    device: str = "cpu",
    scales: Sequence[float] = SCALES,
    head_dims: Sequence[int] = HEAD_DIMS,
    row: Sequence[float] | None = None,
    seed: int = 0,
) -> Answer:
    """Try every softmax, and attention, in every format by scale; with `row`, also see what each makes of that row.

    The inputs are normal, rounded to the format before anything is done with them; the float64 reference has the
    rounded inputs, except for `row`, whose rounding counts as error. Raises InputError for a device that is not there
    and for a row that is empty or not finite.
    """
    if row is not None and not (row and all(map(math.isfinite, row))):
        raise InputError("the row is empty or not finite: give finite numbers")
    from stepscope.recording.environment import resolve_device

    on = resolve_device(device)
    scales = sorted(scales)
    limits = [exp_limits(name, on) for name in answers.FEW_BITS]
    softmaxes = [case for name in answers.FEW_BITS for case in softmax_cases(name, scales, on, seed)]
    attentions = [
        case for head_dim in head_dims for scale in scales for case in attention_cases(head_dim, scale, on, seed)
    ]
    columns = ("format", "ln of the largest number", "exp is finite up to", "and infinite at", "exp is zero below")
    tables = [
        Table(title="exp in each format", columns=columns, rows=tuple(map(dataclasses.astuple, limits))),
        answers.pivot(
            "Softmax: error by the input's scale",
            ("format", "way"),
            (((case.format, case.way), case.scale, case.result.cell) for case in softmaxes),
        ),
        answers.pivot(
            "Attention: largest score, in float64, by the scale of q and k",
            ("head_dim", "scores"),
            (
                ((case.head_dim, case.division), case.scale, float(f"{case.largest_score:.4g}"))
                for case in attentions
                if case.format == "fp32" and case.softmax == SAFE and case.division in (NOT_DIVIDED, AFTER)
            ),
        ),
        answers.pivot(
            "Attention: error of the output by the scale of q and k",
            ("head_dim", "format", "scores", "softmax"),
            (
                ((case.head_dim, case.format, case.division, case.softmax), case.scale, case.result.cell)
                for case in attentions
            ),
        ),
    ]
    if row is not None:
        tables.append(_of_row(row, on))
    drawn = [c for c in softmaxes if c.way in (NAIVE, SAFE) or (c.way == ONLINE and c.format != "fp32")]
    kept = [case for case in attentions if case.softmax == SAFE and case.format != "fp32"]
    return computed_answer(
        on,
        study="softmax",
        question="Where do softmax and attention break in few bits, and what does subtracting the maximum mend?",
        settings={"width": WIDTH, "block": BLOCK, "positions": POSITIONS, "seed": seed},
        tables=tables,
        panels=(
            answers.curves(
                ((f"{case.format}, {case.way}", case.scale, case.result.plotted) for case in drawn),
                x_title="standard deviation of the input", y_title="relative error of softmax", x_log=True, y_log=True,
            ),
            *(
                answers.curves(
                    (
                        (f"{case.format}, {case.division}", case.scale, case.result.plotted)
                        for case in kept
                        if case.head_dim == head_dim
                    ),
                    x_title="standard deviation of q and k",
                    y_title=f"relative error of attention, head_dim {head_dim}", x_log=True, y_log=True,
                )
                for head_dim in head_dims
            ),
        ),
        findings=softmax_findings(limits, softmaxes, attentions),
    )  # fmt: skip


def _of_row(row: Sequence[float], device: "torch.device") -> Table:
    """What each softmax makes of a row of one's own."""
    import torch

    given_W = torch.tensor(row, dtype=torch.float64)
    right_1W = safe_softmax(given_W)[None]
    rows: list[tuple[Cell, ...]] = []
    for name in answers.FEW_BITS:
        x_1W = given_W.to(device, answers.dtype_of(name))[None]
        for way, softmax in SOFTMAXES.items():
            p_1W = softmax(x_1W).double().cpu()
            off = deviation(p_1W, right_1W, x_1W)
            rows.append((name, way, p_1W.sum().item(), p_1W.max().item(), off.cell))
    shown = ", ".join(f"{number:g}" for number in row[:6]) + (", …" if len(row) > 6 else "")
    columns = ("format", "way", "sum of the probabilities", "largest", "error, with the row's own rounding")
    return Table(title=f"Softmax of {shown}", columns=columns, rows=tuple(rows))


Row = Annotated[
    Numbers | None,
    Option(
        "What does each softmax make of these numbers? As in 10,11.5,89.",
        NUMBERS,
        takes=partial(finite_numbers, option="--row"),
    ),
]


def softmax_by_scale(*, row: Row, scales: Numbers | None, device: str = "cpu") -> Answer:
    """Softmax, naive, safe and online, and attention's scores: where each overflows as its inputs grow."""
    return study_softmax(row=row, device=device, scales=SCALES if scales is None else scales)


QUESTION = Question(
    "softmax",
    softmax_by_scale,
    examples=("--row 10,11.5,89", "--from results/cpu/precision/softmax.json --only 'exp in each format'"),
)
