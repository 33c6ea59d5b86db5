"""Softmax and attention in few bits, as their inputs grow.

    naive    exp(x) / sum(exp(x)): exp overflows above ln of the format's largest number, and inf / inf is NaN
    safe     exp(x - m) / sum(exp(x - m)) with m = max(x): no exponent is above zero
    online   the same in one pass over blocks, with a running maximum and a running sum that is rescaled whenever the
             maximum grows: d <- d exp(m_old - m_new) + sum(exp(block - m_new)) (Milakov and Gimelshein 2018,
             arXiv:1805.02867, algorithm 3)

Attention's scores q.k of a head of D numbers, each of standard deviation s, have the deviation s^2 sqrt(D): hence the
division by sqrt(D) (Vaswani et al. 2017, section 3.2.1). It can be done to the scores, or to q before the product.

Shape legend: R rows, W width, H heads, S positions, D head_dim.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Panel, Point, Table
from stepscope.core.float_format import FORMATS
from stepscope.measure.device import resolve_device
from stepscope.numerics.accumulation import DTYPES
from stepscope.numerics.against_float64 import INPUT_OVERFLOWS, last_number_where, next_number, outcome
from stepscope.numerics.setting import device_name, versions
from stepscope.numerics.softmax_findings import (
    AFTER,
    BEFORE,
    NAIVE,
    NOT_DIVIDED,
    ONLINE,
    SAFE,
    AttentionCase,
    ExpLimits,
    SoftmaxCase,
    softmax_findings,
)

SCALES = (0.5, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Standard deviations of softmax's input, and of attention's q and k."""
HEAD_DIMS = (64, 128)
WIDTH = 1024
BLOCK = 64
"""Elements per block of the online softmax."""
_ROWS, _HEADS, _POSITIONS = 8, 2, 128


def naive_softmax(x_RW: Tensor) -> Tensor:
    exponentials = x_RW.exp()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def safe_softmax(x_RW: Tensor) -> Tensor:
    return naive_softmax(x_RW - x_RW.amax(dim=-1, keepdim=True))


def online_softmax(x_RW: Tensor, block: int = BLOCK) -> Tensor:
    """The maximum and the sum in one pass over blocks, both in the input's format; a second pass divides."""
    maximum = torch.full_like(x_RW[..., :1], -math.inf)
    total = torch.zeros_like(maximum)
    for part in x_RW.split(block, dim=-1):
        larger = torch.maximum(maximum, part.amax(dim=-1, keepdim=True))
        total = total * (maximum - larger).exp() + (part - larger).exp().sum(dim=-1, keepdim=True)
        maximum = larger
    return (x_RW - maximum).exp() / total


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    NAIVE: naive_softmax,
    SAFE: safe_softmax,
    ONLINE: online_softmax,
    "PyTorch's own": lambda x_RW: F.softmax(x_RW, dim=-1),
}


def scores_of(q_HSD: Tensor, k_HSD: Tensor, division: str) -> Tensor:
    """q k^T in the inputs' format, divided by sqrt(D) after the product, before it, or not at all."""
    root = math.sqrt(q_HSD.shape[-1])
    if division == BEFORE:
        q_HSD = q_HSD / root
    scores_HST = q_HSD @ k_HSD.transpose(-2, -1)
    return scores_HST / root if division == AFTER else scores_HST


def study_softmax(
    tell: Callable[..., None] | None = None,
    *,
    device: str = "cpu",
    scales: Sequence[float] = SCALES,
    head_dims: Sequence[int] = HEAD_DIMS,
    row: Sequence[float] | None = None,
    seed: int = 0,
) -> Experiment:
    """Every softmax in every format by scale, then attention; with `row`, also what each makes of that row.

    The inputs are normal, rounded to the format before anything is done with them; the float64 reference has the
    rounded inputs, except for `row`, whose rounding counts as error. Raises InputError for a device that is not there
    and for a row that is empty or not finite.
    """
    if row is not None and not (row and all(map(math.isfinite, row))):
        raise InputError("the row is empty or not finite: give finite numbers")
    where = resolve_device(device)
    scales = sorted(scales)
    limits = [_limits(name, where) for name in DTYPES]
    softmaxes = [case for name in DTYPES for case in _softmax_cases(name, scales, where, seed)]
    attentions = [
        case
        for head_dim in head_dims
        for scale in scales
        for case in _attention_cases(head_dim, scale, where, seed)
    ]  # fmt: skip
    tables = [
        _limits_table(limits),
        _pivot(
            "Softmax: error by the input's scale",
            ("format", "way"),
            scales,
            [((case.format, case.way), case.result.cell) for case in softmaxes],
        ),
        _pivot(
            "Attention: largest score, in float64, by the scale of q and k",
            ("head_dim", "scores"),
            scales,
            [
                ((case.head_dim, case.division), float(f"{case.largest_score:.4g}"))
                for case in attentions
                if case.format == "fp32" and case.softmax == SAFE and case.division in (NOT_DIVIDED, AFTER)
            ],
        ),
        _pivot(
            "Attention: error of the output by the scale of q and k",
            ("head_dim", "format", "scores", "softmax"),
            scales,
            [((case.head_dim, case.format, case.division, case.softmax), case.result.cell) for case in attentions],
        ),
    ]
    if row is not None:
        tables.append(_row_table(row, where))
    return Experiment(
        study="softmax",
        question="Where do softmax and attention break in few bits, and what does subtracting the maximum mend?",
        device=device_name(where),
        versions=versions(),
        settings={"width": WIDTH, "block": BLOCK, "positions": _POSITIONS, "seed": seed},
        tables=tuple(tables),
        panels=(_softmax_panel(softmaxes), *(_attention_panel(attentions, head_dim) for head_dim in head_dims)),
        findings=tuple(softmax_findings(limits, softmaxes, attentions)),
    )


def _limits(name: str, device: torch.device) -> ExpLimits:
    dtype = DTYPES[name]
    last = last_number_where(lambda x: x.exp().isfinite(), dtype, device)
    return ExpLimits(
        format=name,
        logarithm=FORMATS[name].exp_overflows_above,
        finite_up_to=last,
        infinite_at=next_number(last, dtype),
        vanishes_below=-last_number_where(lambda x: (-x).exp() > 0, dtype, device),
    )


def _softmax_cases(name: str, scales: Sequence[float], device: torch.device, seed: int) -> list[SoftmaxCase]:
    # Made on the CPU: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    x64_RW = torch.randn(_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    found = []
    for way, softmax in SOFTMAXES.items():
        for scale in scales:
            x_RW = (x64_RW * scale).to(device, DTYPES[name])
            largest = x_RW.max().item()
            result = INPUT_OVERFLOWS
            if x_RW.isfinite().all():
                result = outcome(softmax(x_RW), safe_softmax(x_RW.double()))
            found.append(SoftmaxCase(format=name, way=way, scale=scale, largest=largest, result=result))
    return found


def _attention_cases(head_dim: int, scale: float, device: torch.device, seed: int) -> list[AttentionCase]:
    generator = torch.Generator().manual_seed(seed)
    shape = (_HEADS, _POSITIONS, head_dim)
    q64, k64, v64 = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    found = []
    for name, dtype in DTYPES.items():
        q_HSD, k_HSD, v_HSD = (x.to(device, dtype) for x in (q64 * scale, k64 * scale, v64))
        holds = bool((q_HSD.isfinite().all() & k_HSD.isfinite().all()).item())
        for division in (NOT_DIVIDED, AFTER, BEFORE):
            exact_HST = scores_of(q_HSD.double(), k_HSD.double(), division)
            exact_weights_HST = safe_softmax(exact_HST)
            scores_HST = scores_of(q_HSD, k_HSD, division)
            for softmax in (NAIVE, SAFE):
                result = INPUT_OVERFLOWS
                if holds:
                    out_HSD = SOFTMAXES[softmax](scores_HST) @ v_HSD
                    result = outcome(out_HSD, exact_weights_HST @ v_HSD.double())
                found.append(
                    AttentionCase(
                        head_dim=head_dim, format=name, division=division, softmax=softmax, scale=scale,
                        largest_score=exact_HST.max().item(),
                        largest_weight=exact_weights_HST.amax(dim=-1).mean().item(),
                        finite_scores=bool(scores_HST.isfinite().all().item()),
                        result=result,
                    )
                )  # fmt: skip
    return found


def _limits_table(limits: list[ExpLimits]) -> Table:
    columns = (
        "format", "ln of the largest number", "exp is finite up to", "and infinite at", "exp is zero below",
    )  # fmt: skip
    rows = tuple(
        (found.format, found.logarithm, found.finite_up_to, found.infinite_at, found.vanishes_below)
        for found in limits
    )  # fmt: skip
    return Table(title="exp in each format", columns=columns, rows=rows)


def _pivot(
    title: str, names: tuple[str, ...], scales: Sequence[float], cells: list[tuple[tuple[str | int, ...], Cell]]
) -> Table:
    """A row for each name; its cells come by ascending scale."""
    rows: dict[tuple[str | int, ...], list[Cell]] = {}
    for name, cell in cells:
        rows.setdefault(name, []).append(cell)
    return Table(
        title=title,
        columns=(*names, *(f"{scale:g}" for scale in scales)),
        rows=tuple((*name, *row) for name, row in rows.items()),
    )


def _row_table(row: Sequence[float], device: torch.device) -> Table:
    given_W = torch.tensor(row, dtype=torch.float64)
    right_1W = safe_softmax(given_W)[None]
    rows: list[tuple[Cell, ...]] = []
    for name, dtype in DTYPES.items():
        x_1W = given_W.to(device, dtype)[None]
        for way, softmax in SOFTMAXES.items():
            p_1W = softmax(x_1W).double().cpu()
            result = outcome(p_1W, right_1W) if x_1W.isfinite().all() else INPUT_OVERFLOWS
            rows.append((name, way, p_1W.sum().item(), p_1W.max().item(), result.cell))
    shown = ", ".join(f"{number:g}" for number in row[:6]) + (", …" if len(row) > 6 else "")
    columns = ("format", "way", "sum of the probabilities", "largest", "error, with the row's own rounding")
    return Table(title=f"Softmax of {shown}", columns=columns, rows=tuple(rows))


def _softmax_panel(cases: list[SoftmaxCase]) -> Panel:
    """What is not finite has no place on the axis: a line ends where its softmax breaks."""
    return Panel(
        x_title="standard deviation of the input",
        y_title="relative error of softmax",
        points=tuple(
            Point(line=f"{case.format}, {case.way}", x=case.scale, y=case.result.error)
            for case in cases
            if case.result.error > 0 and case.way in ((NAIVE, SAFE) if case.format == "fp32" else (NAIVE, SAFE, ONLINE))
        ),
        x_log=True,
        y_log=True,
    )


def _attention_panel(cases: list[AttentionCase], head_dim: int) -> Panel:
    """Curves of attention's error in the 16-bit formats, with the safe softmax."""
    return Panel(
        x_title="standard deviation of q and k",
        y_title=f"relative error of attention, head_dim {head_dim}",
        points=tuple(
            Point(line=f"{case.format}, {case.division}", x=case.scale, y=case.result.error)
            for case in cases
            if case.result.error > 0 and case.head_dim == head_dim and case.softmax == SAFE and case.format != "fp32"
        ),
        x_log=True,
        y_log=True,
    )
