"""A capture's summary as plain data: what `stepscope trace --json` prints. The first six keys are a contract."""

from typing import Any

from stepscope.analysis.captures.critical_path import CriticalPath
from stepscope.analysis.captures.occupation import Occupation
from stepscope.analysis.captures.range_totals import KernelTotals, range_totals
from stepscope.analysis.captures.summary import Part, TraceSummary
from stepscope.analysis.roofline.answer import roofline_as_json
from stepscope.core.finding import Finding


def trace_as_json(summary: TraceSummary, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Totals in nanoseconds over the whole capture, `ranges`, `idle` and `overlap` among them.

    Per step: `phases`, `families`, `modules`, `attention` and `roles`. `critical_path` is of one step. A summary of a
    part has `part` besides, which says of which; its `ranges` are those that launched some of it.
    """
    copies, copies_ns = summary.copies
    attribution = summary.attribution
    return {
        "kernels": summary.kernel_count,
        "busy_ns": summary.busy_ns,
        "union_ns": summary.union_ns,
        "unattributed_ns": summary.unattributed_ns,
        "ranges": {
            totals.name: {
                "instances": totals.instances,
                "kernels": totals.kernels,
                "busy_ns": totals.busy_ns,
                "gemm_fraction": totals.gemm_fraction,
                "top_kernels": [_kernel(kernel) for kernel in totals.top_kernels or ()],
            }
            for totals in range_totals(attribution, of_a_part=summary.part is not None)
        },
        "findings": [_finding(finding) for finding in findings],
        "profiler": attribution.table.profiler,
        "recorder": attribution.table.recorder,
        "devices": {str(index): name for index, name in attribution.table.devices.items()},
        "steps": summary.steps,
        "gemm_fraction": summary.gemm_fraction,
        "copies": copies,
        "copies_ns": copies_ns,
        "phases": [
            {
                "phase": phase.phase,
                "kernels": phase.kernels,
                "busy_ns": phase.busy_ns,
                "gemm_fraction": phase.gemm_fraction,
                "range_ns": phase.range_ns,
                "products": phase.product_kernels,
                "expected_products": phase.expected_products,
                "unprofiled_s": phase.unprofiled_s,
                "top_kernels": [
                    {"name": row.name, "family": row.family, "calls": row.calls, "busy_ns": row.busy_ns}
                    for row in summary.top_kernels(phase.phase, 10)
                ],
            }
            for phase in summary.phases
        ],
        "families": summary.families.to_dicts(),
        "modules": summary.modules.to_dicts() if summary.has_modules else [],
        "attention": [{"part": row.part, "busy_ns": row.busy_ns, "flops": row.flops} for row in summary.attention],
        "roles": summary.roles,
        "idle": _idle(summary.occupation) if summary.occupation else None,
        "overlap": [
            {
                "device": one.device,
                "communication_ns": one.communication_ns,
                "hidden_ns": one.hidden_ns,
                "exposed_ns": one.exposed_ns,
            }
            for one in summary.overlaps
        ],
        "critical_path": _path(summary.critical_path) if summary.critical_path else None,
        "other_events": attribution.table.other,
        "roofline": roofline_as_json(summary.roofline) if summary.roofline else None,
        **(part_as_json(summary.part) if summary.part else {}),
    }


def part_as_json(part: Part) -> dict[str, Any]:
    """Which part of the capture the other keys are of; `instances` are the ranges that launched some of it."""
    return {"part": {name: getattr(part, name) for name in ("step", "phase", "range", "instances")}}


def _idle(occupied: Occupation) -> dict[str, Any]:
    """Each device's span and its idle time by cause, over the whole capture."""
    names = ("device", "span_ns", "union_ns", "idle_ns")
    return {
        "devices": [{name: getattr(device, name) for name in names} for device in occupied.devices],
        "causes": occupied.by_cause.to_dicts(),
    }


def _path(path: CriticalPath) -> dict[str, Any]:
    return {
        "device": path.device,
        "step": path.step,
        "duration_ns": path.duration_ns,
        "parts": path.by_category.to_dicts(),
    }


def _kernel(kernel: KernelTotals) -> dict[str, Any]:
    return {"name": kernel.name, "calls": kernel.calls, "busy_ns": kernel.busy_ns, "family": kernel.family}


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "sentence": finding.sentence,
        "remedy": finding.remedy,
        "evidence": finding.evidence,
    }
