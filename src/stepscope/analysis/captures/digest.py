"""What is kept of a capture beside its run: its tables, some kilobytes in place of megabytes.

Captures of many cells are too large to keep with the results; their digests are not, and every table over cells is
made of them.
"""

from pathlib import Path

import msgspec

from stepscope.analysis.captures.summary import AttentionRow, KernelRow, PhaseSummary, TraceSummary
from stepscope.core.bounded_file import read_named
from stepscope.core.document import decode_document
from stepscope.core.errors import StepscopeError
from stepscope.core.finding import Finding
from stepscope.core.run_directory import write_atomically
from stepscope.core.run_files import DIGEST_FILE

_TOOLS = {"Kineto": "kineto", "Nsight Systems": "nsys"}
KEPT_ROWS = 8
"""Kernels kept of each ranking."""


class FamilyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel family within one phase, per step."""

    family: str
    phase: str
    calls: float
    busy_ns: float


class PlaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel family within one module, those of all layers together (`blocks.*.attention`), per step."""

    module: str
    family: str
    busy_ns: float


class RoofRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel family against the device's peaks, per step; None where work or peak is not known.

    `verdict` holds for more than half of the family's time.
    """

    family: str
    device_ns: float
    intensity: float | None
    bound_ns: float | None
    over_bound: float | None
    verdict: str | None


class TraceDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of one capture. Totals in nanoseconds over the whole capture, rows per step."""

    profiler: str
    steps: int
    kernels: int
    busy_ns: int
    union_ns: int
    unattributed_ns: int
    copies: int
    copies_ns: int
    gemm_fraction: float
    phases: tuple[PhaseSummary, ...]
    families: tuple[FamilyRow, ...]
    top: tuple[KernelRow, ...]
    """The kernels of each phase that take longest."""
    top_without_products: tuple[KernelRow, ...]
    attention: tuple[AttentionRow, ...]
    findings: tuple[Finding, ...]
    roofs: tuple[RoofRow, ...] = ()
    """Empty where the capture holds no operators with shapes."""
    places: tuple[PlaceRow, ...] = ()
    """Empty in digests that were kept before there were any, and where no kernel has a module."""
    top_together: tuple[KernelRow, ...] = ()
    """The kernels that take longest in forward and backward together. Older digests have none."""
    softmax_kernels: tuple[KernelRow, ...] = ()
    """The kernels that softmax is made of in forward. Older digests have none."""

    @property
    def tool(self) -> str:
        """The profiler as `--tool` and files' names spell it."""
        return _TOOLS[self.profiler]

    def phase(self, name: str) -> PhaseSummary | None:
        """The phase of that name, or None."""
        return next((phase for phase in self.phases if phase.phase == name), None)


def digest_of(summary: TraceSummary, findings: tuple[Finding, ...]) -> TraceDigest:
    """The digest of a capture."""
    copies, copies_ns = summary.copies
    return TraceDigest(
        profiler=summary.attribution.table.profiler,
        steps=summary.steps,
        kernels=summary.kernel_count,
        busy_ns=summary.busy_ns,
        union_ns=summary.union_ns,
        unattributed_ns=summary.unattributed_ns,
        copies=copies,
        copies_ns=copies_ns,
        gemm_fraction=summary.gemm_fraction,
        phases=summary.phases,
        families=tuple(FamilyRow(**row) for row in summary.families.iter_rows(named=True)),
        top=tuple(row for phase in summary.phase_names for row in summary.top_kernels(phase, KEPT_ROWS)),
        top_without_products=tuple(
            row for phase in summary.phase_names for row in summary.top_kernels(phase, KEPT_ROWS, without_products=True)
        ),
        attention=summary.attention,
        findings=findings,
        roofs=_roofs(summary),
        places=tuple(PlaceRow(**row) for row in summary.places.iter_rows(named=True)) if summary.has_modules else (),
        top_together=tuple(summary.top_together(KEPT_ROWS)),
        softmax_kernels=tuple(summary.softmax_kernels(KEPT_ROWS)),
    )


def _roofs(summary: TraceSummary) -> tuple[RoofRow, ...]:
    if summary.roofline is None:
        return ()
    return tuple(
        RoofRow(
            family=roof.family,
            device_ns=roof.device_ns / summary.steps,
            intensity=roof.intensity,
            bound_ns=roof.bound_ns / summary.steps if roof.bounded_ns else None,
            over_bound=roof.over_bound,
            verdict=roof.mostly,
        )
        for roof in summary.roofline.families
        if roof.device_ns
    )


def save_digest(digest: TraceDigest, directory: Path) -> Path:
    """Write the digest into a run directory. Raises StepscopeError where it cannot be written."""
    target = directory / DIGEST_FILE.format(tool=digest.tool)
    try:
        write_atomically(msgspec.json.format(msgspec.json.encode(digest), indent=1) + b"\n", target)
    except OSError as error:
        raise StepscopeError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def load_digest(directory: Path, tool: str = "kineto") -> TraceDigest | None:
    """The digest in a run directory, or None where there is none. Raises InputError where it cannot be read."""
    file = directory / DIGEST_FILE.format(tool=tool)
    if not file.is_file():
        return None
    return decode_document(
        read_named(file), TraceDigest, str(file), holds="digest of a capture", again="with --keep-digests"
    )
