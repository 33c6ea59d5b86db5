"""Softmax and attention in few bits as a study: by the scale of their inputs, and for a row of one's own."""

import dataclasses
import math
from collections.abc import Sequence

import torch

from stepscope.core.answer import Answer, Cell, Table
from stepscope.core.errors import InputError
from stepscope.questions.against_float64 import DTYPES, deviation
from stepscope.questions.answers import computed_answer, curves, pivot
from stepscope.questions.softmax.cases import (
    AFTER,
    BLOCK,
    NAIVE,
    NOT_DIVIDED,
    ONLINE,
    POSITIONS,
    SAFE,
    SOFTMAXES,
    WIDTH,
    attention_cases,
    exp_limits,
    safe_softmax,
    softmax_cases,
)
from stepscope.questions.softmax.findings import softmax_findings
from stepscope.recording.device import resolve_device

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
    on = resolve_device(device)
    scales = sorted(scales)
    limits = [exp_limits(name, on) for name in DTYPES]
    softmaxes = [case for name in DTYPES for case in softmax_cases(name, scales, on, seed)]
    attentions = [
        case for head_dim in head_dims for scale in scales for case in attention_cases(head_dim, scale, on, seed)
    ]
    columns = ("format", "ln of the largest number", "exp is finite up to", "and infinite at", "exp is zero below")
    tables = [
        Table(title="exp in each format", columns=columns, rows=tuple(map(dataclasses.astuple, limits))),
        pivot(
            "Softmax: error by the input's scale",
            ("format", "way"),
            (((case.format, case.way), case.scale, case.result.cell) for case in softmaxes),
        ),
        pivot(
            "Attention: largest score, in float64, by the scale of q and k",
            ("head_dim", "scores"),
            (
                ((case.head_dim, case.division), case.scale, float(f"{case.largest_score:.4g}"))
                for case in attentions
                if case.format == "fp32" and case.softmax == SAFE and case.division in (NOT_DIVIDED, AFTER)
            ),
        ),
        pivot(
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
            curves(
                ((f"{case.format}, {case.way}", case.scale, case.result.plotted) for case in drawn),
                x_title="standard deviation of the input", y_title="relative error of softmax", x_log=True, y_log=True,
            ),
            *(
                curves(
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


def _of_row(row: Sequence[float], device: torch.device) -> Table:
    """What each softmax makes of a row of one's own."""
    given_W = torch.tensor(row, dtype=torch.float64)
    right_1W = safe_softmax(given_W)[None]
    rows: list[tuple[Cell, ...]] = []
    for name, dtype in DTYPES.items():
        x_1W = given_W.to(device, dtype)[None]
        for way, softmax in SOFTMAXES.items():
            p_1W = softmax(x_1W).double().cpu()
            off = deviation(p_1W, right_1W, x_1W)
            rows.append((name, way, p_1W.sum().item(), p_1W.max().item(), off.cell))
    shown = ", ".join(f"{number:g}" for number in row[:6]) + (", …" if len(row) > 6 else "")
    columns = ("format", "way", "sum of the probabilities", "largest", "error, with the row's own rounding")
    return Table(title=f"Softmax of {shown}", columns=columns, rows=tuple(rows))
