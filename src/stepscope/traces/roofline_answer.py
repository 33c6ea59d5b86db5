"""The roofline as parts of an answer, as a panel, and as plain data."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec

from stepscope.core.answer import TEXT, Line, Panel, Point, Table, as_lines, table_of, text
from stepscope.core.errors import name_shown
from stepscope.core.formulas.operator_rules import is_product
from stepscope.core.units import format_rate, format_share, ms_text
from stepscope.traces.roofline import FamilyRoof, OperatorRoof, Peak, Roofline

OPERATORS_SHOWN = 12
_SHAPES_SHOWN = 3
_NEARLY_ALL, _HARDLY_ANY = 0.995, 0.005
_SURELY_BELOW = 0.99
_LINES = 8
"""Lines that a plot tells apart: the roofs, and the busiest families."""
_RATES = (("FLOP/B", ".3g"), ("TFLOP/s", "TFLOP/s of FLOP/s"), ("GB/s", "GB/s of B/s"))


def roofline_tables(roofline: Roofline, top: int = OPERATORS_SHOWN) -> tuple[Table, ...]:
    """The families with a sentence each, then the operators that take most of the device's time."""
    sentences: list[str] = []
    if any(each.work for each in roofline.operators):
        sentences = [family_sentence(each, roofline.steps) for each in roofline.families if each.device_ns]
    if (passes := pass_sentence(roofline)) is not None:
        sentences.append(passes)
    cautions = [Line(words, "aside") for words in _cautions(roofline)]
    heading, families = text(*_heading(roofline)), _family_table(roofline)
    if not roofline.operators:
        return heading, msgspec.structs.replace(families, notes=(*as_lines(*sentences), *cautions))
    left = roofline.operators[top:]
    rest_ns = sum(each.device_ns for each in left) / roofline.steps
    more = [f"{len(left)} more take {ms_text(rest_ns, 2, 3)} ms a step."] if left else []
    return (
        heading,
        msgspec.structs.replace(families, notes=as_lines(*sentences)),
        msgspec.structs.replace(_operator_table(roofline, top), notes=as_lines(*more, *cautions)),
    )


def roofline_panel(roofline: Roofline) -> Panel | None:
    """The families' work against the device's roofs, on logarithmic axes; None where none has a place there."""
    families = [
        Point(line=each.family, x=each.intensity, y=each.flops_per_s)
        for each in roofline.families
        if each.intensity and each.flops_per_s
    ]
    memory = roofline.peaks.bytes_per_s
    if not families or memory is None:
        return None
    used = {each.arithmetic for each in roofline.operators if each.flops}
    peaks = {name: peak.rate for name, peak in roofline.peaks.flops_per_s.items() if name in used}
    ridges = [rate / memory.rate for rate in peaks.values()]
    places = [*(point.x for point in families), *ridges]
    roofs = [
        Point(line=f"roof, {name}", x=x, y=min(rate, x * memory.rate))
        for name, rate in peaks.items()
        for x in sorted({min(places) / 2, rate / memory.rate, max(places) * 2})
    ]
    shown = families[: _LINES - len(peaks)]
    return Panel(x_title="FLOP/B", y_title="FLOP/s", points=(*roofs, *shown), x_log=True, y_log=True)


def family_sentence(family: FamilyRoof, steps: int) -> str:
    """What the family takes, how dense its work is, and what holds it back."""
    takes = ms_text(family.device_ns / steps, 2, 3)
    sentence = f"{family.family[0].upper()}{family.family[1:]} kernels take {takes} ms a step"
    if max(family.coverage, family.verdict_share or 0.0) < _HARDLY_ANY:
        return f"{sentence}; {'the work of nearly all of them' if family.covered_ns else 'their work'} is not known."
    if family.intensity is not None:
        sentence += f" at {family.intensity:.3g} FLOP/B"
    if family.covered_ns and family.coverage < _NEARLY_ALL:
        sentence += f" (work known for {format_share(family.coverage)} of it)"
    if family.verdict is not None and family.verdict_share is not None:
        sentence += f": {family.verdict}"
        if family.verdict_share < _NEARLY_ALL:
            sentence += f" in {format_share(family.verdict_share)} of it"
        if family.over_bound is not None:
            sentence += f", {family.over_bound:.2f} times their bound of {ms_text(family.bound_ns / steps, 2, 3)} ms"
    else:
        sentence += "; their bound is not known"
    return sentence + "."


def pass_sentence(roofline: Roofline) -> str | None:
    """Backward over forward, in time and in FLOPs; None where one of them did not run."""
    passes = roofline.passes
    if not passes.time_ratio:
        return None
    forward, backward = (ms_text(ns / roofline.steps, 2, 3) for ns in (passes.forward_ns, passes.backward_ns))
    sentence = (
        f"Backward takes {passes.time_ratio:.2f} times forward ({backward} against {forward} ms a step of kernels)"
    )
    if passes.flops_ratio:
        sentence += f" for {passes.flops_ratio:.2f} times its matrix FLOPs"
    return sentence + "."


def _heading(roofline: Roofline) -> Iterator[Line | str]:
    where = ", ".join(roofline.devices) or "a device the trace does not name"
    yield Line(f"Roofline of {where}: work, and the least time it takes there", "strong")
    used = {each.arithmetic for each in roofline.operators if each.flops}
    rates = [
        f"{name} {format_rate(peak.rate, 'FLOP/s')} ({peak.source})"
        for name, peak in roofline.peaks.flops_per_s.items()
        if name in used
    ]
    if (memory := roofline.peaks.bytes_per_s) is not None:
        rates.append(f"device memory {format_rate(memory.rate, 'B/s')} ({memory.source})")
    yield f"Peaks: {'; '.join(rates or ['none known, so that nothing has a bound'])}."
    convention = next((each.work.convention for each in roofline.operators if each.work), None)
    if convention is None:
        yield f"No work is known: {_why_unknown(roofline)}."
    else:
        share = roofline.covered_ns / roofline.busy_ns if roofline.busy_ns else 0.0
        yield f"Work is known for {format_share(share)} of device time ({convention})."
        yield from _assumed(roofline)
    yield from _open_products(roofline)


def _why_unknown(roofline: Roofline) -> str:
    if not roofline.recorded:
        return "the trace holds no operators with shapes (torch.profiler, record_shapes)"
    if not roofline.shaped:
        return "the operators in this trace have no shapes (torch.profiler, record_shapes)"
    if not roofline.operators:
        return "of no kernel is it known which operator launched it, so the shapes of operators do not tell"
    return "the operators that launched kernels have no shapes, or no rule counts them"


def _open_products(roofline: Roofline) -> Iterator[str]:
    """What multiplied, and left no record of how much."""
    found = [each for each in roofline.operators if each.is_open and is_product(each.operator)]
    if found:
        calls = sum(each.calls for each in found) / roofline.steps
        share = sum(each.device_ns for each in found) / roofline.busy_ns if roofline.busy_ns else 0.0
        names = ", ".join(sorted({name_shown(each.operator.removeprefix("aten::")) for each in found}))
        yield (
            f"The record leaves open the sizes of {calls:g} products a step: their FLOPs are missing ({names}; "
            f"{format_share(share)} of device time)."
        )


def _assumed(roofline: Roofline) -> Iterator[str]:
    """Attention of which the record does not say whether it is causal."""
    for sight in ("assumed causal", "assumed not causal"):
        found = [each for each in roofline.operators if each.sight == sight and _is_half(each)]
        if found:
            calls = sum(each.calls for each in found) / roofline.steps
            yield (
                f"Attention is {sight} in {calls:g} calls a step, whose record does not say it: torch.profiler with "
                "record_shapes says it since PyTorch 2.1."
            )


def _is_half(operator: OperatorRoof) -> bool:
    """Whether its FLOPs depend on whether it is causal."""
    return operator.work is not None and operator.work.convention.causal == "half"


def _cautions(roofline: Roofline) -> Iterator[str]:
    """How to read a verdict, and why a time may be shorter than its bound."""
    if any(each.is_launch_bound for each in roofline.operators):
        yield "Launch-bound: the host takes longer over a call than the device; under a profiler the more so."
    below = [each for each in roofline.operators if (each.over_bound or 1.0) < _SURELY_BELOW]
    by_flops = [(each.compute_ns or 0.0) >= (each.memory_ns or 0.0) for each in below]
    if not all(by_flops):
        yield "In less time than their bound by bytes: operands stayed in the L2 cache, or were broadcast views."
    if any(by_flops):
        yield "In less time than their bound by FLOPs: causal attention counted full, or a peak of other shapes."


def _family_table(roofline: Roofline) -> Table:
    return table_of(
        "family, a step", ("ms", "ms of ns"), ("of it known", "%"), *_RATES, ("bound ms", "ms of ns"),
        ("x bound", ".2f"), ("mostly", TEXT), ("bwd/fwd", ".2f"),
        rows=[
            (
                each.family,
                each.device_ns / roofline.steps,
                each.coverage if each.covered_ns else None,
                *_rates(each),
                each.bound_ns / roofline.steps if each.bound_ns else None,
                each.over_bound,
                each.mostly,
                each.backward_over_forward,
            )
            for each in roofline.families
        ],
    )  # fmt: skip


def _operator_table(roofline: Roofline, top: int) -> Table:
    labels = _labels(roofline.operators[:top])
    return table_of(
        "operator", "phase", ("calls", "g"), ("ms a step", "ms of ns"), ("host us", "us of ns"),
        ("device us", "us of ns"), *_RATES, ("x bound", ".2f"), ("verdict", TEXT),
        rows=[
            (
                label,
                each.phase,
                each.calls / roofline.steps,
                each.device_ns / roofline.steps,
                each.host_ns,
                each.device_ns / each.calls,
                *_rates(each),
                each.over_bound,
                each.verdict,
            )
            for each, label in zip(roofline.operators[:top], labels, strict=True)
        ],
    )  # fmt: skip


def _rates(roof: FamilyRoof | OperatorRoof) -> tuple[float | None, float | None, float | None]:
    """FLOP/B, FLOP/s and B/s; no FLOP/s where the work is of bytes alone."""
    return roof.intensity, roof.flops_per_s if roof.flops else None, roof.bytes_per_s


def _labels(operators: Sequence[OperatorRoof]) -> list[str]:
    """A label for each row. Those alike in one phase have their family behind them or, where that is one, a number."""
    labels = [operator_label(each) for each in operators]
    alike: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
    for i, each in enumerate(operators):
        alike[labels[i], each.phase].append(i)
    for rows in alike.values():
        by_family = len({operators[i].family for i in rows}) == len(rows)
        for number, i in enumerate(rows if len(rows) > 1 else (), 1):
            labels[i] += f" ({operators[i].family if by_family else number})"
    return labels


def operator_label(operator: OperatorRoof) -> str:
    """`bmm fp32 48x512x64 48x64x512`: the operator, what its products are computed in, and the first shapes."""
    name = name_shown(operator.operator.removeprefix("aten::"))
    product = operator.family in {"matrix multiplication", "attention (fused)", "convolution"}
    arithmetic = operator.arithmetic if product else None
    sight = operator.sight if _is_half(operator) and operator.sight != "causal" else None
    return " ".join(part for part in (name, arithmetic, name_shown(shapes_label(operator.shapes)), sight) if part)


def shapes_label(shapes: str | None) -> str:
    """The first shapes of a call, `48x512x64 48x64x512`, from their JSON text."""
    try:
        read: Any = json.loads(shapes or "[]")
    except (ValueError, RecursionError):
        return ""
    found = [_shape(each) for each in cast("list[Any]", read) if each] if isinstance(read, list) else []
    return " ".join(found[:_SHAPES_SHOWN]) + (" .." if len(found) > _SHAPES_SHOWN else "")


def _shape(shape: object) -> str:
    if not isinstance(shape, list):
        return "?"
    sizes = cast("list[Any]", shape)
    return f"[{len(sizes)} tensors]" if isinstance(sizes[0], list) else "x".join(map(str, sizes))


def roofline_as_json(roofline: Roofline) -> dict[str, Any]:
    """Plain data. Counts, times (ns), FLOPs and bytes are per step, `host_ns` per call; rates are per second."""
    steps = roofline.steps
    passes = roofline.passes
    return {
        "devices": list(roofline.devices),
        "steps": steps,
        **_per_step(roofline, steps, "busy_ns", "covered_ns"),
        "peaks": {
            "flops_per_s": {name: _peak(peak) for name, peak in roofline.peaks.flops_per_s.items()},
            "bytes_per_s": _peak(roofline.peaks.bytes_per_s) if roofline.peaks.bytes_per_s else None,
        },
        "passes": {
            **_per_step(passes, steps, "forward_ns", "backward_ns"),
            "time_ratio": passes.time_ratio,
            **_per_step(passes, steps, "forward_flops", "backward_flops"),
            "flops_ratio": passes.flops_ratio,
        },
        "families": [_family(each, steps) for each in roofline.families],
        "operators": [_operator(each, steps) for each in roofline.operators],
    }


def _family(family: FamilyRoof, steps: int) -> dict[str, Any]:
    return {
        "family": family.family,
        **_per_step(family, steps, "device_ns", "forward_ns", "backward_ns"),
        "backward_over_forward": family.backward_over_forward,
        "coverage": family.coverage,
        "flops": family.flops / steps,
        "bytes": family.bytes_moved / steps,
        **_against_the_roof(family),
        "bound_ns": family.bound_ns / steps if family.bound_ns else None,
        "over_bound": family.over_bound,
        "verdict": family.verdict,
        "verdict_share": family.verdict_share,
    }


def _operator(operator: OperatorRoof, steps: int) -> dict[str, Any]:
    return {
        **{name: getattr(operator, name) for name in ("operator", "shapes", "dtypes", "phase", "family", "kernel")},
        "values": operator.values,
        "arithmetic": operator.arithmetic,
        **_per_step(operator, steps, "calls", "kernels", "device_ns"),
        "host_ns": operator.host_ns,
        "dry_share": operator.dry_share,
        "flops": operator.flops / steps if operator.flops is not None else None,
        "bytes": operator.bytes_moved / steps if operator.bytes_moved is not None else None,
        "convention": str(operator.work.convention) if operator.work else None,
        "attention": operator.sight,
        "work_open": operator.is_open,
        **_against_the_roof(operator),
        "bound_ns": operator.bound_ns / steps if operator.bound_ns is not None else None,
        "over_bound": operator.over_bound,
        "verdict": operator.verdict,
    }


def _per_step(totals: object, steps: int, *names: str) -> dict[str, float]:
    return {name: getattr(totals, name) / steps for name in names}


def _against_the_roof(roof: FamilyRoof | OperatorRoof) -> dict[str, float | None]:
    return {name: getattr(roof, name) for name in ("intensity", "flops_per_s", "bytes_per_s")}


def _peak(peak: Peak) -> dict[str, Any]:
    return {"rate": peak.rate, "source": peak.source}
