"""The digest of a capture, stored beside its run: its tables, in kilobytes instead of megabytes.

Captures of many cells are too large to keep with the results. Their digests are small, and every table over cells is
made from them.
"""

import gzip
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from stepscope.core import run_directory
from stepscope.core.answer import Finding
from stepscope.core.environment import give_pages_back
from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.files import check_no_pointer, decode_document, read_named
from stepscope.core.run import Run
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.summary import AttentionRow, KernelRow, PhaseSummary, TraceSummary
from stepscope.traces.table import TraceTable

# Reads any capture that stepscope knows, told apart by its content rather than its name.


def read_trace(path: Path, *, launch_sizes: bool = True) -> TraceTable:
    """The TraceTable of a Kineto trace, an nsys export or report, or of the capture in a run directory.

    launch_sizes: whether the grid, block and registers of kernels are needed, where they take time to read.

    Raises InputError, naming the file and the remedy, for everything that is no whole capture.
    """
    try:
        capture = find_capture(path)
        head = b""
        if not capture.is_dir():
            with capture.open("rb") as file:
                head = file.read(64)
            check_no_pointer(capture, head)
        # Each reader takes a while to import: NumPy, or types of events.
        if not _is_json(capture, head):
            from stepscope.traces.readers.nsys import read_nsys  # noqa: PLC0415

            table = read_nsys(capture, head, launch_sizes=launch_sizes)
            if table is not None:
                return table
        from stepscope.traces.readers.kineto import read_kineto  # noqa: PLC0415

        return read_kineto(capture)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _is_json(path: Path, head: bytes) -> bool:
    """Whether a file that begins with `head` is JSON, also in gzip; a report of nsys is one by its name."""
    if head.startswith(b"\x1f\x8b"):
        with suppress(OSError, EOFError, zlib.error), gzip.open(path) as file:
            head = file.read(len(head))
    return head.lstrip()[:1] in (b"{", b"[") and path.suffix not in (".nsys-rep", ".qdrep", ".qdstrm")


def find_capture(path: Path) -> Path:
    """The capture at a path: the file itself, a parquetdir, or the one that a run directory holds."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no such file") from None
    if not path.is_dir():
        if not path.is_file():  # a capture is read from its start more than once
            raise InputError(f"{path}: a pipe or device, not a file: write the capture to a file first")
        exported = path.with_name(run_directory.EXPORT_FILE)
        return exported if path.name == run_directory.STREAM_FILE and exported.is_file() else path
    if any(path.glob("*.parquet")):
        return path
    for name in run_directory.CAPTURE_FILES:
        if (path / name).exists():
            return path / name
    remedy = " (measure it again with --record kineto)" if (path / run_directory.RUN_FILE).exists() else ""
    raise InputError(f"{path}: this directory holds no trace{remedy}")


_TOOLS = {"Kineto": "kineto", "Nsight Systems": "nsys"}


class FamilyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel family within one phase, per step."""

    family: str
    phase: str
    calls: float
    busy_ns: float


class PlaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel family within one module, per step. All layers count as one module (`blocks.*.attention`)."""

    module: str
    family: str
    busy_ns: float


class RoofRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel family against the device's peaks, per step. A field is None if work or peak is unknown.

    `verdict` holds for more than half of the family's time.
    """

    family: str
    device_ns: float
    intensity: float | None
    bound_ns: float | None
    over_bound: float | None
    verdict: str | None


class TraceDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of one capture. Totals are in nanoseconds over the whole capture; rows are per step."""

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
    """The longest kernels of each phase."""
    top_without_products: tuple[KernelRow, ...]
    attention: tuple[AttentionRow, ...]
    findings: tuple[Finding, ...]
    roofs: tuple[RoofRow, ...] = ()
    """Families against the device's peaks; empty if the capture has no operators with shapes."""
    places: tuple[PlaceRow, ...] = ()
    """Families by module; empty in older digests, and if no kernel has a module."""
    top_together: tuple[KernelRow, ...] = ()
    """The longest kernels of forward and backward together. Older digests have none."""
    softmax_kernels: tuple[KernelRow, ...] = ()
    """The kernels of softmax in forward. Older digests have none."""
    generated: tuple[FamilyRow, ...] = ()
    """The part of `families` that a compiler generated. Older digests have none: to them it is a family of its own."""

    @property
    def tool(self) -> str:
        """The profiler's name, as in `--tool` and file names."""
        return _TOOLS[self.profiler]

    def phase(self, name: str) -> PhaseSummary | None:
        """The phase of that name, or None."""
        return next((phase for phase in self.phases if phase.phase == name), None)


KEPT_ROWS = 14
"""The number of kernels kept of each ranking."""


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
        roofs=tuple(
            RoofRow(
                family=roof.family,
                device_ns=roof.device_ns / summary.steps,
                intensity=roof.intensity,
                bound_ns=roof.bound_ns / summary.steps if roof.bounded_ns else None,
                over_bound=roof.over_bound,
                verdict=roof.mostly,
            )
            for roof in (summary.roofline.families if summary.roofline else ())
            if roof.device_ns
        ),
        places=tuple(PlaceRow(**row) for row in summary.places.iter_rows(named=True)) if summary.has_modules else (),
        top_together=tuple(summary.top_together(KEPT_ROWS)),
        softmax_kernels=tuple(summary.softmax_kernels(KEPT_ROWS)),
        generated=tuple(FamilyRow(**row) for row in summary.generated.iter_rows(named=True)),
    )


def save_digest(digest: TraceDigest, directory: Path) -> Path:
    """Write the digest into a run directory. Raises StepscopeError if it cannot be written."""
    target = directory / run_directory.DIGEST_FILE.format(tool=digest.tool)
    try:
        run_directory.write_atomically(msgspec.json.format(msgspec.json.encode(digest), indent=1) + b"\n", target)
    except OSError as error:
        raise StepscopeError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def load_digest(directory: Path, tool: str = "kineto") -> TraceDigest | None:
    """The digest in a run directory, or None if there is none. Raises InputError if it cannot be read."""
    file = directory / run_directory.DIGEST_FILE.format(tool=tool)
    if not file.is_file():
        return None
    return decode_document(
        read_named(file), TraceDigest, str(file), holds="digest of a capture", again="with --keep-digests"
    )


# Reads a capture, with the run that left it.


def load_capture(path: Path, *, say: Callable[[str], None], launch_sizes: bool = True) -> TraceSummary:
    """Read and attribute a capture, with the run it belongs to where one lies beside it.

    `launch_sizes`: as in `read_trace`. `say` is told in one line why a run beside it is left out.
    """
    attribution = attribute(read_trace(path, launch_sizes=launch_sizes))
    attribution.self_check()
    run, folder = None, find_capture(path).parent
    if (folder / run_directory.RUN_FILE).is_file():
        try:
            run = run_directory.load_run(folder)
        except InputError as error:
            say(f"the run beside the capture is left out: {error}")
    return TraceSummary(attribution=attribution, run=run)


# What the capture of a stored run says, from the capture itself or from the digest that was kept of it.


def digest_beside(
    run: Run, directory: Path, tool: str, *, say: Callable[[str], None], keep: bool = False
) -> TraceDigest | None:
    """The digest of a run's capture, made anew if the capture is there, else the kept one, or None.

    say: is told what is left out. keep: whether a digest that was made is written beside the run.
    """
    capture = directory / run.artifacts.get(tool, "-")
    on_cpu = run.environment is None or run.environment.device_type == "cpu"
    if not capture.is_file():
        kept, stream = load_digest(directory, tool), directory / run_directory.STREAM_FILE
        if kept is not None or tool != "nsys" or on_cpu or not stream.is_file():
            return kept
        capture = stream  # nsys recorded, and could not import there: its own importer reads the stream
    if tool == "nsys" and on_cpu:
        return None  # on a CPU Nsight Systems records ranges alone
    give_pages_back()
    summary = load_capture(capture, say=say)
    digest = digest_of(summary, check_trace(summary))
    if keep:
        save_digest(digest, directory)
    return digest
