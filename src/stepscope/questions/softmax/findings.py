"""Findings on softmax and attention in few bits, with the figures of the cases."""

import math
from collections.abc import Iterator

from stepscope.core.finding import Finding, note, warning
from stepscope.core.float_format import FORMATS
from stepscope.questions.against_float64 import INPUT_OVERFLOWS
from stepscope.questions.softmax.cases import (
    AFTER,
    DIVISIONS,
    NAIVE,
    NOT_DIVIDED,
    ONLINE,
    SAFE,
    AttentionCase,
    ExpLimits,
    SoftmaxCase,
)


def softmax_findings(
    limits: list[ExpLimits], softmaxes: list[SoftmaxCase], attentions: list[AttentionCase]
) -> Iterator[Finding]:
    """Findings on the limits of exp, on where the naive softmax breaks, on the other softmaxes, and on attention."""
    for found in limits:
        yield _limit(found)
    for found in limits:
        own = [case for case in softmaxes if case.format == found.format]
        yield from _naive([case for case in own if case.way == NAIVE], found)
        yield from _remedies(own)
    for head_dim in dict.fromkeys(case.head_dim for case in attentions):
        for name in dict.fromkeys(case.format for case in attentions):
            own = [case for case in attentions if case.format == name and case.head_dim == head_dim]
            yield from _attention(own)


def _limit(found: ExpLimits) -> Finding:
    return note(
        "exp-overflows",
        f"In {found.format} exp is finite up to {found.finite_up_to:.8g} and infinite at "
        f"{found.infinite_at:.8g}; ln of the largest number, {FORMATS[found.format].largest:.6g}, is "
        f"{found.logarithm:.8g}. Below {found.vanishes_below:.4g} it is zero.",
        {
            "logarithm": found.logarithm, "finite_up_to": found.finite_up_to, "infinite_at": found.infinite_at,
            "vanishes_below": found.vanishes_below,
        },
    )  # fmt: skip


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
                evidence={
                    "scale": broken.scale, "largest": broken.largest, "limit": limit.finite_up_to, "became": word,
                },
            )  # fmt: skip


def _remedies(cases: list[SoftmaxCase]) -> Iterator[Finding]:
    """A finding: the largest errors of the safe and the online softmax over all scales that the format holds."""
    worst: dict[str, float] = {}
    for way in (SAFE, ONLINE):
        own = [case for case in cases if case.way == way and case.result.word != INPUT_OVERFLOWS.word]
        if not own or any(case.result.broken for case in own):
            return
        worst[way] = max(case.result.error for case in own)
    name, largest = cases[0].format, max(case.largest for case in cases if case.way == SAFE)
    yield note(
        "safe-softmax",
        f"With the maximum subtracted the softmax in {name} is finite at every scale, up to inputs "
        f"of {largest:.4g}, and off by at most {worst[SAFE]:.2g}; online, in blocks, by at most {worst[ONLINE]:.2g}.",
        {"largest": largest, "safe_worst": worst[SAFE], "online_worst": worst[ONLINE]},
    )


def _attention(cases: list[AttentionCase]) -> Iterator[Finding]:
    """Findings for one head_dim and format: where each way breaks, and how much error dividing saves before that."""
    cases = [case for case in cases if case.result.word != INPUT_OVERFLOWS.word]
    if not cases:
        return
    first = cases[0]
    breaks = {}
    for division in DIVISIONS:
        for softmax in (NAIVE, SAFE):
            own = [case for case in cases if case.division == division and case.softmax == softmax]
            breaks[division, softmax] = next((case for case in own if case.result.broken), None)
    said = [
        f"{division} with the {softmax} softmax at {case.scale:g} (largest score {case.largest_score:.4g}, "
        f"{'the output' if case.finite_scores else 'the scores infinite, the output'} {case.result.word})"
        for (division, softmax), case in breaks.items()
        if case is not None
    ]
    if said:
        held = [f"{d} with the {s} softmax" for (d, s), case in breaks.items() if case is None]
        rest = f" It stays finite {' and '.join(held)}." if held else ""
        yield warning(
            "attention-breaks",
            f"Attention in {first.format} with head_dim {first.head_dim} breaks, as q and k "
            f"grow, {'; '.join(said)}.{rest}",
            remedy="divide by sqrt(head_dim), before the product where scores overflow, and subtract the maximum",
            evidence={
                f"{division}, {softmax}": None if case is None else case.scale
                for (division, softmax), case in breaks.items()
            },
        )  # fmt: skip
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
            "scale": plain.scale, "largest_score": plain.largest_score, "spacing": spacing, "error": error,
            "divided_score": beside.largest_score, "divided_error": divided_error,
        },
    )  # fmt: skip
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
                "scale": plain.scale, "error": error, "divided_error": divided_error,
                "largest_weight": plain.largest_weight, "divided_largest_weight": beside.largest_weight,
            },
        )  # fmt: skip
