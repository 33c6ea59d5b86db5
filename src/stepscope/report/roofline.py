"""The roofline of a capture for the terminal, and as plain data."""

import json
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.analysis.roofline.peaks import Peak
from stepscope.analysis.roofline.roofs import FamilyRoof, OperatorRoof, Roofline
from stepscope.core.errors import printable
from stepscope.core.shown_text import name_shown
from stepscope.core.units import format_rate, format_share, ms_text
from stepscope.report.former import make_table

TOP = 20
_SHAPES_SHOWN = 3
_NEARLY_ALL = 0.995
_SURELY_BELOW = 0.99


def render_roofline(roofline: Roofline, top: int = TOP) -> RenderableType:
    """The families with a sentence each, then the operators that take most of the device's time."""
    parts: list[RenderableType] = [*_heading(roofline), Text(), _family_table(roofline)]
    if any(each.work for each in roofline.operators):
        parts += [Text(family_sentence(each, roofline.steps)) for each in roofline.families if each.device_ns]
    if (passes := pass_sentence(roofline)) is not None:
        parts.append(Text(passes))
    if roofline.operators:
        parts += [Text(), _operator_table(roofline, top)]
        left = len(roofline.operators) - top
        if left > 0:
            rest = sum(each.device_ns for each in roofline.operators[top:])
            parts.append(Text(f"{left} more take {ms_text(rest / roofline.steps, 2, 3)} ms a step."))
    if any(each.is_launch_bound for each in roofline.operators):
        words = "Launch-bound: the host takes longer over a call than the device; under a profiler the more so."
        parts.append(Text(words, style="dim"))
    below = [each for each in roofline.operators if (each.over_bound or 1.0) < _SURELY_BELOW]
    by_flops = [(each.compute_ns or 0.0) >= (each.memory_ns or 0.0) for each in below]
    if not all(by_flops):
        words = "In less time than their bound by bytes: operands stayed in the L2 cache, or were broadcast views."
        parts.append(Text(words, style="dim"))
    if any(by_flops):
        words = "In less time than their bound by FLOPs: causal attention counted full, or a peak of other shapes."
        parts.append(Text(words, style="dim"))
    return Group(*parts)


def family_sentence(family: FamilyRoof, steps: int) -> str:
    """What the family takes, how dense its work is, and what holds it back."""
    takes = ms_text(family.device_ns / steps, 2, 3)
    sentence = f"{family.family[0].upper()}{family.family[1:]} kernels take {takes} ms a step"
    if family.intensity is not None:
        sentence += f" at {_intensity(family.intensity)} FLOP/B"
    if family.covered_ns and family.coverage < _NEARLY_ALL:
        sentence += f" (work known for {format_share(family.coverage)} of it)"
    if family.verdict is not None and family.verdict_share is not None:
        sentence += f": {family.verdict}"
        if family.verdict_share < _NEARLY_ALL:
            sentence += f" in {format_share(family.verdict_share)} of it"
        if family.over_bound is not None:
            sentence += f", {family.over_bound:.2f} times their bound of {ms_text(family.bound_ns / steps, 2, 3)} ms"
    elif family.covered_ns:
        sentence += "; their bound is not known"
    else:
        sentence += "; their work is not known"
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


def as_json(roofline: Roofline) -> dict[str, Any]:
    """Plain data. Counts, times (ns), FLOPs and bytes are per step, `host_ns` per call; rates are per second."""
    steps = roofline.steps
    passes = roofline.passes
    return {
        "devices": list(roofline.devices),
        "steps": steps,
        "busy_ns": roofline.busy_ns / steps,
        "covered_ns": roofline.covered_ns / steps,
        "peaks": {
            "flops_per_s": {name: _peak(peak) for name, peak in roofline.peaks.flops_per_s.items()},
            "bytes_per_s": _peak(roofline.peaks.bytes_per_s) if roofline.peaks.bytes_per_s else None,
        },
        "passes": {
            "forward_ns": passes.forward_ns / steps,
            "backward_ns": passes.backward_ns / steps,
            "time_ratio": passes.time_ratio,
            "forward_flops": passes.forward_flops / steps,
            "backward_flops": passes.backward_flops / steps,
            "flops_ratio": passes.flops_ratio,
        },
        "families": [_family(each, steps) for each in roofline.families],
        "operators": [_operator(each, steps) for each in roofline.operators],
    }


def _family(family: FamilyRoof, steps: int) -> dict[str, Any]:
    return {
        "family": family.family,
        "device_ns": family.device_ns / steps,
        "forward_ns": family.forward_ns / steps,
        "backward_ns": family.backward_ns / steps,
        "backward_over_forward": family.backward_over_forward,
        "coverage": family.coverage,
        "flops": family.flops / steps,
        "bytes": family.bytes_moved / steps,
        "intensity": family.intensity,
        "flops_per_s": family.flops_per_s,
        "bytes_per_s": family.bytes_per_s,
        "bound_ns": family.bound_ns / steps if family.bound_ns else None,
        "over_bound": family.over_bound,
        "verdict": family.verdict,
        "verdict_share": family.verdict_share,
    }


def _operator(operator: OperatorRoof, steps: int) -> dict[str, Any]:
    return {
        "operator": operator.operator,
        "shapes": operator.shapes,
        "dtypes": operator.dtypes,
        "phase": operator.phase,
        "family": operator.family,
        "kernel": operator.kernel,
        "arithmetic": operator.arithmetic,
        "calls": operator.calls / steps,
        "kernels": operator.kernels / steps,
        "device_ns": operator.device_ns / steps,
        "host_ns": operator.host_ns,
        "dry_share": operator.dry_share,
        "flops": operator.flops / steps if operator.flops is not None else None,
        "bytes": operator.bytes_moved / steps if operator.bytes_moved is not None else None,
        "convention": str(operator.work.convention) if operator.work else None,
        "intensity": operator.intensity,
        "flops_per_s": operator.flops_per_s,
        "bytes_per_s": operator.bytes_per_s,
        "bound_ns": operator.bound_ns / steps if operator.bound_ns is not None else None,
        "over_bound": operator.over_bound,
        "verdict": operator.verdict,
    }


def _peak(peak: Peak) -> dict[str, Any]:
    return {"rate": peak.rate, "source": peak.source}


def _heading(roofline: Roofline) -> list[Text]:
    where = printable(", ".join(roofline.devices) or "a device the trace does not name")
    lines = [Text(f"Roofline of {where}: work, and the least time it takes there", style="bold")]
    used = {each.arithmetic for each in roofline.operators if each.flops}
    rates = [
        f"{name} {format_rate(peak.rate, 'FLOP/s')} ({printable(peak.source)})"
        for name, peak in roofline.peaks.flops_per_s.items()
        if name in used
    ]
    if (memory := roofline.peaks.bytes_per_s) is not None:
        rates.append(f"device memory {format_rate(memory.rate, 'B/s')} ({printable(memory.source)})")
    if not rates:
        rates = ["none known, so that nothing has a bound"]
    lines.append(Text(f"Peaks: {'; '.join(rates)}."))
    if not any(each.work for each in roofline.operators):
        lines.append(
            Text("No work is known: the trace holds no operators with shapes (torch.profiler, record_shapes).")
        )
    else:
        share = roofline.covered_ns / roofline.busy_ns if roofline.busy_ns else 0.0
        convention = next(each.work.convention for each in roofline.operators if each.work)
        lines.append(Text(f"Work is known for {format_share(share)} of device time ({convention})."))
    return lines


def _family_table(roofline: Roofline) -> Table:
    table = make_table(
        "family, a step", "ms", "of it known", "FLOP/B", "TFLOP/s", "GB/s", "bound ms", "x bound", "mostly", "bwd/fwd",
        right_from=1,
    )  # fmt: skip
    for each in roofline.families:
        table.add_row(
            each.family,
            ms_text(each.device_ns / roofline.steps, 2, 3),
            format_share(each.coverage) if each.covered_ns else "",
            _intensity(each.intensity),
            _scaled(each.flops_per_s if each.flops else None, 1e12, 2),
            _scaled(each.bytes_per_s, 1e9, 0),
            ms_text(each.bound_ns / roofline.steps, 2, 3) if each.bound_ns else "",
            _ratio(each.over_bound),
            each.mostly or "",
            _ratio(each.backward_over_forward),
        )
    return table


def _operator_table(roofline: Roofline, top: int) -> Table:
    table = make_table(
        "operator", "phase", "calls", "ms a step", "host us", "device us", "FLOP/B", "TFLOP/s", "GB/s", "x bound",
        "verdict", right_from=2, fold_first=True,
    )  # fmt: skip
    for each in roofline.operators[:top]:
        table.add_row(
            operator_label(each),
            each.phase or "",
            f"{each.calls / roofline.steps:g}",
            ms_text(each.device_ns / roofline.steps, 2, 3),
            f"{each.host_ns / 1e3:.1f}",
            f"{each.device_ns / each.calls / 1e3:.1f}",
            _intensity(each.intensity),
            _scaled(each.flops_per_s if each.flops else None, 1e12, 2),
            _scaled(each.bytes_per_s, 1e9, 0),
            _ratio(each.over_bound),
            each.verdict or "",
        )
    return table


def operator_label(operator: OperatorRoof) -> str:
    """`bmm fp32 48x512x64 48x64x512`: the operator, what its products are computed in, and the first shapes."""
    name = name_shown(operator.operator.removeprefix("aten::"))
    product = operator.family in {"matrix multiplication", "attention (fused)"}
    arithmetic = operator.arithmetic if product else None
    return printable(" ".join(part for part in (name, arithmetic, name_shown(_shapes(operator.shapes))) if part))


def _shapes(text: str | None) -> str:
    try:
        read = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return ""
    shapes = [_shape(each) for each in read if each] if isinstance(read, list) else []
    return " ".join(shapes[:_SHAPES_SHOWN]) + (" .." if len(shapes) > _SHAPES_SHOWN else "")


def _shape(shape: object) -> str:
    if not isinstance(shape, list):
        return "?"
    if isinstance(shape[0], list):
        return f"[{len(shape)} tensors]"
    return "x".join(str(side) for side in shape)


def _intensity(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _scaled(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{value / scale:.{digits}f}"
