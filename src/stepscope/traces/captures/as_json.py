"""A capture's summary as plain data, which `stepscope trace --json` prints. The first six keys are a contract."""

from typing import Any

from stepscope.core.finding import Finding
from stepscope.traces.captures.critical_path import CriticalPath
from stepscope.traces.captures.details.tables import View, details_as_json
from stepscope.traces.captures.devices import used_devices
from stepscope.traces.captures.occupation import Occupation
from stepscope.traces.captures.range_totals import range_totals
from stepscope.traces.captures.summary import Part, TraceSummary
from stepscope.traces.roofline.answer import roofline_as_json


def trace_as_json(summary: TraceSummary, findings: tuple[Finding, ...], view: View | None = None) -> dict[str, Any]:
    """The summary of a capture as plain data.

    Totals, `ranges`, `idle` and `overlap` are in nanoseconds over the whole capture. `phases`, `families`, `modules`,
    `attention` and `roles` are per step. `critical_path` is of one step. The tables of `details_as_json`, `operators`
    among them, are over the whole capture. The summary of a part also has `part`, which
    names the part. Its `ranges` are the ranges that launched some of it.
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
                **_fields(totals, "instances", "kernels", "busy_ns", "gemm_fraction"),
                "top_kernels": [
                    _fields(kernel, "name", "calls", "busy_ns", "family") for kernel in totals.top_kernels or ()
                ],
            }
            for totals in range_totals(attribution, of_a_part=summary.part is not None)
        },
        "findings": [_fields(finding, "kind", "severity", "sentence", "remedy", "evidence") for finding in findings],
        "profiler": attribution.table.profiler,
        "recorder": attribution.table.recorder,
        "devices": {str(index): name for index, name in attribution.table.devices.items()},
        "used_devices": {str(index): name for index, name in used_devices(attribution).items()},
        "steps": summary.steps,
        "gemm_fraction": summary.gemm_fraction,
        "copies": copies,
        "copies_ns": copies_ns,
        "phases": [
            {
                **_fields(phase, "phase", "kernels", "busy_ns", "gemm_fraction", "range_ns", "found_by"),
                "products": phase.product_kernels,
                "expected_products": phase.expected_products,
                "unprofiled_s": phase.unprofiled_s,
                "top_kernels": [
                    _fields(row, "name", "family", "calls", "busy_ns") for row in summary.top_kernels(phase.phase, 10)
                ],
            }
            for phase in summary.phases
        ],
        "families": summary.families.to_dicts(),
        "other_kernels": [_fields(row, "name", "calls", "busy_ns", "share") for row in summary.other_kernels(20)],
        "modules": summary.modules.to_dicts() if summary.has_modules else [],
        "attention": [_fields(row, "part", "busy_ns", "flops") for row in summary.attention],
        "roles": summary.roles,
        "idle": _idle(summary.occupation) if summary.occupation else None,
        "overlap": [_fields(one, "device", "communication_ns", "hidden_ns", "exposed_ns") for one in summary.overlaps],
        "critical_path": _path(summary.critical_path) if summary.critical_path else None,
        "other_events": attribution.table.other,
        "roofline": roofline_as_json(summary.roofline) if summary.roofline else None,
        **details_as_json(summary, view or View()),
        **(part_as_json(summary.part) if summary.part else {}),
    }


def part_as_json(part: Part) -> dict[str, Any]:
    """The part of the capture that the other keys describe. `instances` are the ranges that launched some of it."""
    return {"part": {**_fields(part, "step", "phase", "range", "instances"), **part.places}}


def _idle(occupied: Occupation) -> dict[str, Any]:
    """Each device's span and its idle time by cause, over the whole capture."""
    return {
        "devices": [_fields(device, "device", "span_ns", "union_ns", "idle_ns") for device in occupied.devices],
        "causes": occupied.by_cause.to_dicts(),
    }


def _path(path: CriticalPath) -> dict[str, Any]:
    return {**_fields(path, "device", "step", "duration_ns", "beside_host_ns"), "parts": path.by_category.to_dicts()}


def _fields(record: object, *names: str) -> dict[str, Any]:
    """The named fields of a record, in this order."""
    return {name: getattr(record, name) for name in names}
