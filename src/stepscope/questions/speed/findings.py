"""What follows from a step run in several dtypes: sentences made from its figures."""

import itertools
from collections.abc import Iterator, Sequence

from stepscope.core.finding import Finding, note, warning
from stepscope.core.units import format_bytes, format_seconds, format_share
from stepscope.questions.compare.doubts import (
    doubtful_runs,
    listed,
    replaced_runs,
    speed_ups_of,
    unlike_environments,
)
from stepscope.questions.speed.cells import Amdahl, SpeedPair, SpeedStudy
from stepscope.runs.metrics import launch_bound_share, median_s, memory_of

_FIGURES = (
    ("forward_peak", "forward-peak", "the peak of forward"),
    ("saved_for_backward", "saved", "what is kept for backward"),
)
"""Memory figures in order of preference: field of PhaseMemory, kind of finding, name. The first known one is used."""
_RISE = 0.001
"""A peak that is higher by less is the same peak: allocators round."""


def speed_findings(study: SpeedStudy, lacking: Sequence[str], unread: int) -> Iterator[Finding]:
    """Every finding: how fast by size, where slower, memory, what bounds the gain, and what to doubt."""
    return itertools.chain(
        _by_size(study), _slower(study), _memory_findings(study), _bounds(study), _doubts(study, lacking, unread)
    )


def _by_size(study: SpeedStudy) -> Iterator[Finding]:
    """The speed-up over the models, for each dtype and shape."""
    for (dtype, shape), pairs in study.lines.items():
        ratios = [pair.speed_up for pair in pairs]
        speed_ups = ", ".join(f"{pair.other.model} {pair.speed_up.value:.2f}" for pair in pairs)
        grows = ""
        if len(pairs) > 1 and all(b.surely_above(a) for a, b in itertools.pairwise(ratios)):
            grows = "; it grows with the model"
        elif any(a.surely_above(b) for a, b in itertools.pairwise(ratios)):
            grows = "; it does not grow with every size"
        yield note(
            "speed-up",
            f"{dtype} against fp32 ({shape}), speed-up of forward and backward: {speed_ups}{grows}.",
            {pair.other.model: pair.speed_up.value for pair in pairs},
        )


def _slower(study: SpeedStudy) -> Iterator[Finding]:
    """Lower precision is said to be faster: where it is not, and what took the gain."""
    for pair in study.pairs:
        if not pair.slower:
            continue
        yield warning(
            "slower",
            f"Against folk wisdom, {pair.label} is slower than in fp32: {format_seconds(pair.other.time_s)} "
            f"for {format_seconds(pair.base.time_s)}{_lost_where(pair)}.",
            {"speed_up": pair.speed_up.value, **_law_evidence(pair.amdahl)},
        )
    if untold := [pair for pair in study.pairs if pair.untold]:
        which = f"{listed(pair.label for pair in untold)} differ{'s' if len(untold) == 1 else ''}"
        said = f"Whether {which} from fp32 cannot be told: {untold[0].speed_up.why_undecided}."
        yield note("cannot-be-told", said, speed_ups_of(untold), remedy="measure more steps: --steps 30")
    if level := [pair for pair in study.pairs if pair.level]:
        which = listed(pair.label for pair in level)
        said = f"No difference from fp32 is measured for {which}: the interval of the speed-up holds 1."
        yield note("no-difference", said, speed_ups_of(level))


def _lost_where(pair: SpeedPair) -> str:
    """The end of a sentence: where the time was lost, by the captures, or by the profiled steps without captures."""
    law = pair.amdahl
    if law is None:
        idle, before = launch_bound_share(pair.other.run), launch_bound_share(pair.base.run)
        if idle is None or before is None:
            return ""
        return f". No kernel runs for {format_share(idle)} of its whole step (fp32: {format_share(before)})"
    base, other = law.base, law.other
    said = f". Its kernels take {format_seconds(other.kernels_s)} for {format_seconds(base.kernels_s)}"
    if base.between_s is None or other.between_s is None:
        return said
    said += f", but for {format_seconds(other.between_s)} (fp32: {format_seconds(base.between_s)}) no kernel runs"
    host_s, before_s = median_s(pair.other.run, "host"), median_s(pair.base.run, "host")
    if host_s and before_s:
        said += f". To issue the whole step the host takes {format_seconds(host_s)} (fp32: {format_seconds(before_s)})"
    return f"{said}, with {other.kernels:,.0f} kernels in forward and backward in place of {base.kernels:,.0f}"


def _memory_findings(study: SpeedStudy) -> Iterator[Finding]:
    """Lower precision is said to halve memory: where the forward peak rises, and the most it falls.

    Where nobody counted a peak (a CPU), what is kept for backward stands for it.
    """
    for dtype in dict.fromkeys(pair.other.value for pair in study.pairs):
        pairs = [pair for pair in study.pairs if pair.other.value == dtype]
        for field, kind, name in _FIGURES:
            changes = {pair: change for pair in pairs if (change := pair.memory_change(field)) is not None}
            if changes:
                yield from _rise(changes, field, kind, name)
                yield from _fall(changes, kind, name)
                break


def _rise(changes: dict[SpeedPair, float], field: str, kind: str, name: str) -> Iterator[Finding]:
    rises = {pair: change for pair, change in changes.items() if change > _RISE}
    if not rises:
        return
    worst = max(rises, key=lambda pair: rises[pair])
    dtype, memory = worst.other.value, worst.base.run.evidence.memory
    more = (memory_of(worst.other.run, field) or 0) - (memory_of(worst.base.run, field) or 0)
    copies = (
        ": autocast keeps 16-bit copies of the weights that products read, of every parameter it would be "
        f"{format_bytes(memory.parameter_bytes / 2)}"
        if memory and dtype in ("bf16", "fp16")
        else ""
    )
    named = listed([f"{pair.other.name} ({change * 100:+.1f} %)" for pair, change in rises.items()])
    yield warning(
        f"{kind}-rises",
        f"Against folk wisdom, {dtype} raises {name} in {len(rises)} of {len(changes)} cells: {named}. In "
        f"{worst.other.name} it is {format_bytes(more)} more{copies}.",
        {pair.other.name: change for pair, change in rises.items()},
    )


def _fall(changes: dict[SpeedPair, float], kind: str, name: str) -> Iterator[Finding]:
    falls = {pair: change for pair, change in changes.items() if change < -_RISE}
    if not falls:
        return
    best = min(falls, key=lambda pair: falls[pair])
    yield note(
        f"{kind}-falls",
        f"{best.other.value} lowers {name} in {len(falls)} of {len(changes)} cells, most in "
        f"{best.other.name}: {falls[best] * 100:+.1f} %.{' Nowhere is it halved.' if falls[best] > -0.5 else ''}",
        {pair.other.name: change for pair, change in falls.items()},
    )


def _bounds(study: SpeedStudy) -> Iterator[Finding]:
    """Which part makes the gain and which one bounds it, in each dtype's least and greatest speed-up."""
    for dtype in dict.fromkeys(pair.other.value for pair in study.pairs):
        explained = [pair for pair in study.pairs if pair.other.value == dtype and pair.amdahl is not None]
        ordered = sorted(explained, key=lambda pair: pair.speed_up.value)
        for pair in dict.fromkeys([*ordered[:1], *ordered[-1:]]):
            law = pair.amdahl
            assert law is not None
            yield note("bound", _law_in_words(pair, law), {"speed_up": pair.speed_up.value, **_law_evidence(law)})


def _law_in_words(pair: SpeedPair, law: Amdahl) -> str:
    peaks = f" (the datasheet's peaks: {pair.peaks_ratio:.1f})" if pair.peaks_ratio else ""
    others = f", the other kernels {law.rest:.2f} times" if law.rest else ""
    products = f"which run {law.products:.2f} times as fast{peaks}" if law.products else "which take no time in it"
    gains = [(law.products_gain_s, "in products"), (law.rest_gain_s, "in other kernels")]
    left = [(law.other.products_s, "products"), (law.other.rest_s, "other kernels")]
    if law.between_gain_s is not None and law.other.between_s is not None:
        gains.append((law.between_gain_s, "where no kernel runs"))
        left.append((law.other.between_s, "without a kernel"))
    won = ", ".join(
        f"{'wins' if gain_s >= 0 else 'loses'} {format_seconds(abs(gain_s))} {part}" for gain_s, part in gains
    )
    now = ", ".join(f"{format_share(part_s / law.other.total_s)} {part}" for part_s, part in left)
    limit = f"; were products free, fp32's rest would bound it at {law.limit:.2f}" if law.limit else ""
    return (
        f"{pair.label}, speed-up {pair.speed_up.value:.2f}: {format_share(law.product_share)} of fp32's time is in "
        f"products, {products}{others}. A step {won}. By products alone the speed-up would be "
        f"{law.by_products_alone:.2f}{limit}. What is left in {pair.other.value} is {now}."
    )


def _law_evidence(law: Amdahl | None) -> dict[str, float | int | str | None]:
    if law is None:
        return {}
    return {
        "product_share": law.product_share,
        "products_speed_up": law.products,
        "rest_speed_up": law.rest,
        "products_gain_s": law.products_gain_s,
        "rest_gain_s": law.rest_gain_s,
        "between_gain_s": law.between_gain_s,
        "by_products_alone": law.by_products_alone,
        "limit": law.limit,
    }


def _doubts(study: SpeedStudy, lacking: Sequence[str], unread: int) -> Iterator[Finding]:
    """What is missing, and what makes a comparison doubtful."""
    if any(cell.parts is not None and not cell.on_gpu for cell in study.cells):
        yield note(
            "on-cpu",
            "On a CPU the kernels are operators, and their times those of a captured step, which the profiler slows: "
            "the parts say what the gain is made of, the medians how large it is.",
        )
    if lacking:
        yield note("dtype-lacking", f"Left out: {', '.join(lacking)}, which a CPU does not have.")
    bare = [cell.label for cell in study.cells if cell.parts is None]
    if bare:
        reason = "polars, which reads them, is not installed" if unread else "none lies beside them that can be read"
        yield note(
            "no-capture",
            f"{len(bare)} of {len(study.cells)} runs are shown without a captured step ({reason}): their share of "
            "products is not known.",
        )
    yield from doubtful_runs(study)
    yield from unlike_environments(study.pairs)
    fused = [cell.label for cell in study.cells if cell.fused_attention]
    if fused:
        yield note(
            "fused-attention", f"Attention is one kernel in {listed(fused)}: its products stand with the other kernels."
        )
    yield from replaced_runs(study)
