"""Findings on RMSNorm and LayerNorm in few bits, with the figures of the cases."""

import math
from collections.abc import Iterator

from stepscope.core.finding import Finding, note, warning
from stepscope.core.float_format import FORMATS
from stepscope.questions.against_float64 import DTYPES, INPUT_OVERFLOWS
from stepscope.questions.normalisation.cases import (
    BUILT_IN,
    IN_TURN,
    MEAN,
    NORMS,
    SPREAD,
    SUM,
    UPCAST,
    NormCase,
    NormLimits,
    kind_of_number,
    of_norm,
)


def norm_findings(
    limits: list[NormLimits], by_scale: list[NormCase], by_width: list[NormCase], by_epsilon: list[NormCase]
) -> Iterator[Finding]:
    """Findings on squares and epsilon in each format, where each way breaks, the width, and what upcasting mends."""
    for found in limits:
        yield _square_limit(found)
    for norm in NORMS:
        for name in DTYPES:
            cases = [case for case in of_norm(by_scale, norm) if case.format == name]
            yield from _overflow(cases)
    yield from (_epsilon(found) for found in limits if found.format == "fp16")
    yield from _small(by_epsilon)
    for norm in NORMS:
        for name in DTYPES:
            yield from _growth([case for case in of_norm(by_width, norm) if case.format == name])
    yield from _safe(by_scale)


def _square_limit(found: NormLimits) -> Finding:
    largest = FORMATS[found.format].largest
    return note(
        "squares-overflow",
        f"In {found.format} a square is finite up to {found.largest_square_of:.8g} and infinite from "
        f"{found.overflows_at:.8g} on (the root of the largest number, {largest:.6g}, is {math.sqrt(largest):.8g}); it "
        f"is zero up to {found.vanishes_up_to:.4g}.",
        {
            "largest_square_of": found.largest_square_of, "overflows_at": found.overflows_at,
            "vanishes_up_to": found.vanishes_up_to,
        },
    )  # fmt: skip


def _overflow(cases: list[NormCase]) -> Iterator[Finding]:
    """Findings on where each way of one norm in one format first breaks on large inputs."""
    for way in (MEAN, SUM, IN_TURN):
        own = [case for case in cases if case.way == way]
        broken = next((case for case in own if case.spread.word in ("inf", "nan")), None)
        if broken is None:
            continue
        held = [case.scale for case in own if case.scale < broken.scale and not case.spread.broken]
        last = f"; at {max(held):g} it was finite" if held else ""
        became = {"zero": "a row of zeros, without a NaN", "nan": "NaN"}.get(
            broken.output.word, f"off by {broken.output.error:.3g}"
        )
        yield warning(
            "norm-overflows",
            f"{broken.norm} in {broken.format}, {way}: at a standard deviation of {broken.scale:g} (largest "
            f"element {broken.largest:.4g}, width {broken.width:,}) the {SPREAD[broken.norm]} is "
            f"{'infinite' if broken.spread.word == 'inf' else 'NaN'} and the output {became}{last}.",
            remedy="compute the norm in fp32 and round its output",
            evidence={
                "scale": broken.scale, "largest": broken.largest, "width": broken.width, "output": broken.output.word,
            },
        )  # fmt: skip


def _epsilon(found: NormLimits) -> Finding:
    kind = kind_of_number(found.epsilon, found.format)
    beside = (
        f"Beside a mean of squares of {found.swallowed_from:.4g} or more it changes nothing"
        if found.epsilon
        else "It changes nothing anywhere"
    )
    what = "vanishes" if kind == "zero" else f"becomes {found.epsilon:.6g}, a {kind} number"
    return Finding(
        kind="epsilon",
        severity="note" if found.epsilon else "warning",
        sentence=f"In {found.format} epsilon {what}. {beside}.",
        evidence={"epsilon": found.epsilon, "swallowed_from": found.swallowed_from},
    )


def _small(cases: list[NormCase]) -> Iterator[Finding]:
    """Findings on small inputs in fp16: the worst result of the norm, and the first epsilon with which it breaks."""
    own = [case for case in cases if case.format == "fp16" and case.output.word != INPUT_OVERFLOWS.word]
    naive = [case for case in own if case.way == MEAN]
    safe = {case.epsilon: case for case in own if case.way == UPCAST}
    broken = next((case for case in naive if case.output.broken), None)
    worst = max((case for case in naive if not case.output.broken), key=lambda case: case.output.error, default=None)
    if worst is not None:
        beside = safe[worst.epsilon]
        mean = "comes to zero" if worst.spread.word else f"is off by {worst.spread.error:.3g} of itself"
        yield note(
            "squares-vanish",
            f"RMSNorm in fp16 at a standard deviation of {worst.scale:g} and epsilon {worst.epsilon:g}: "
            f"the mean of squares {mean}, the output is off by {worst.output.error:.3g}; upcast to fp32 by "
            f"{beside.output.error:.3g}.",
            {
                "scale": worst.scale, "epsilon": worst.epsilon, "spread_error": worst.spread.error,
                "output_error": worst.output.error, "upcast_error": beside.output.error,
            },
        )  # fmt: skip
    if broken is not None:
        beside = safe[broken.epsilon]
        held = FORMATS["fp16"].round(broken.epsilon)
        yield warning(
            "epsilon-vanishes",
            f"With epsilon {broken.epsilon:g}, which fp16 holds as {held:g}, RMSNorm in fp16 at "
            f"a standard deviation of {broken.scale:g} gives {broken.output.word}: nothing is left to divide by. "
            f"Upcast to fp32 it is off by {beside.output.error:.3g}.",
            remedy="compute the norm in fp32, or take an epsilon that fp16 holds",
            evidence={
                "scale": broken.scale, "epsilon": broken.epsilon, "output": broken.output.word,
                "upcast_error": beside.output.error,
            },
        )  # fmt: skip


def _growth(cases: list[NormCase]) -> Iterator[Finding]:
    """A finding for one norm and format: the spread's error at the smallest and largest width, in turn and by mean."""
    ends = {}
    for way in (IN_TURN, MEAN):
        own = sorted((case for case in cases if case.way == way), key=lambda case: case.width)
        if len(own) < 2 or own[0].spread.broken or own[-1].spread.broken:
            return
        ends[way] = (own[0], own[-1])
    (first, last), (mean_first, mean_last) = ends[IN_TURN], ends[MEAN]
    half = FORMATS[first.format].spacing(float(last.width)) / 2
    accumulates = "in parts" if first.format == "fp32" else "in fp32"
    yield note(
        "width",
        f"The {SPREAD[first.norm]} of {first.norm} in {first.format}, added in turn, is off by "
        f"{first.spread.error:.2g} of itself at width {first.width:,} and by {last.spread.error:.2g} at "
        f"{last.width:,}; PyTorch's mean, which accumulates {accumulates}, by {mean_first.spread.error:.2g} and "
        f"{mean_last.spread.error:.2g}. The squares are 1 on average, and a sum that has come "
        f"to {last.width:,} takes none below {half:.2g}, half a unit in its last place.",
        {
            "narrow": first.width, "wide": last.width,
            "in_turn_narrow": first.spread.error, "in_turn_wide": last.spread.error,
            "half_unit": half, "mean_narrow": mean_first.spread.error, "mean_wide": mean_last.spread.error,
        },
    )  # fmt: skip


def _safe(cases: list[NormCase]) -> Iterator[Finding]:
    """Findings on what upcasting leaves of the error, over all scales."""
    for name in ("fp16", "bf16"):
        for norm in NORMS:
            own = [c for c in of_norm(cases, norm) if c.format == name and c.output.word != INPUT_OVERFLOWS.word]
            safe = [case for case in own if case.way == UPCAST]
            built_in = [case for case in own if case.way == BUILT_IN]
            if not safe:
                continue
            broken = [case for case in safe if case.output.broken]
            worst = max((case.output.error for case in safe if not case.output.broken), default=math.nan)
            torch_worst = max((case.output.error for case in built_in if not case.output.broken), default=math.nan)
            half = FORMATS[name].epsilon / 2
            held = "breaks at none of" if not broken else f"breaks at {len(broken)} of"
            yield Finding(
                kind="upcast",
                severity="note" if not broken else "warning",
                sentence=f"{norm} upcast from {name} to fp32 {held} {len(safe)} scales; its error is at most "
                f"{worst:.3g}, {'within' if worst <= half else 'beyond'} half a spacing of {name} ({half:.3g}): "
                f"{'' if worst <= half else 'more than '}the rounding of the output. PyTorch's own: {torch_worst:.3g}.",
                evidence={"worst": worst, "half_spacing": half, "built_in_worst": torch_worst, "broken": len(broken)},
            )
