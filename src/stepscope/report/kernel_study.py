"""The kernels of many cells side by side: the questions of `stepscope study kernels`, each a table and a sentence."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.analysis.comparisons.comparison import same_but
from stepscope.analysis.doubts import marked
from stepscope.analysis.metrics import median_s
from stepscope.analysis.range_names import PHASES
from stepscope.analysis.trace_digest import TraceDigest
from stepscope.analysis.trace_summary import KernelRow, PhaseSummary
from stepscope.core.run import Run
from stepscope.core.units import format_share, ms_text, ms_text_of_s
from stepscope.report.kernel_label import kernel_label
from stepscope.report.terminal import cell_name, make_table, render_finding


@dataclass(frozen=True, kw_only=True)
class StudiedCell:
    """A run and the digest of its capture; `other` is that of another profiler's capture of the same cell."""

    run: Run
    digest: TraceDigest
    other: TraceDigest | None = None

    @property
    def name(self) -> str:
        return cell_name(self.run.workload)

    @property
    def trains(self) -> bool:
        return self.run.workload.phase != "forward"

    @property
    def as_inference(self) -> tuple[object, ...]:
        """Equal of a training step and the inference of the same model on the same device."""
        return same_but(self.run, phase="forward")

    @property
    def order(self) -> tuple[int, int, str, bool]:
        """Small models first, then by sequence length, dtype, inference before training."""
        workload = self.run.workload
        model = workload.model
        return (model.layers * model.d_model, workload.seq_len, workload.dtype, self.trains)


def render_kernel_study(cells: Iterable[StudiedCell], questions: str = "") -> RenderableType:
    """Tables over all cells; those of the questions named by their letters, or all."""
    ordered = sorted(cells, key=lambda cell: cell.order)
    parts: list[RenderableType] = []
    for letter, (title, make) in QUESTIONS.items():
        if questions and letter not in questions:
            continue
        table, words = make(ordered)
        if table.row_count:
            parts += [Text(f"({letter}) {title}", style="bold"), table, *(Text(line) for line in words), Text()]
    return Group(*(parts[:-1] if not (doubts := _findings(ordered)) else [*parts, *doubts]))


def _times(cells: list[StudiedCell]) -> tuple[Table, list[str]]:
    heads = [f"{phase} ms{what}" for phase in PHASES for what in ("", ", unprofiled")]
    table = make_table("cell", *heads, "traced step", "unprofiled", "slowed", right_from=1)
    ratios = []
    for cell in cells:
        row = [cell.name]
        for name in PHASES:
            phase = cell.digest.phase(name)
            row += [
                ms_text(phase.busy_ns) if phase else "",
                marked(ms_text_of_s(phase.unprofiled_s), cell.run) if phase else "",
            ]
        traced, plain = _traced_step_s(cell), median_s(cell.run, "step")
        slowed = traced / plain if traced and plain else None
        if slowed:
            ratios.append((slowed, cell.name))
        table.add_row(
            *row, ms_text_of_s(traced), marked(ms_text_of_s(plain), cell.run), f"{slowed:.2f}x" if slowed else ""
        )
    words = []
    if ratios:
        least, most = min(ratios), max(ratios)
        words.append(
            f"Under the profiler a step takes {least[0]:.2f} ({least[1]}) to {most[0]:.2f} times ({most[1]}) as long "
            "as without it."
        )
    return table, words


def _traced_step_s(cell: StudiedCell) -> float | None:
    tool = {"Kineto": "kineto"}.get(cell.digest.profiler, "nsys")
    captures = [capture for capture in cell.run.evidence.captures if capture.tool == tool]
    return captures[0].step_s if captures else None


def _top(cells: list[StudiedCell]) -> tuple[Table, list[str]]:
    table = make_table("cell", "phase", "kernel", "calls a step", "share", "matrix products", right_from=3)
    counted = right = 0
    for cell in cells:
        for phase in cell.digest.phases:
            first = next((row for row in cell.digest.top if row.phase == phase.phase), None)
            if first is None or phase.phase not in PHASES:
                continue
            if phase.expected_products is not None:
                counted += 1
                right += phase.product_kernels == phase.expected_products
            table.add_row(
                cell.name, phase.phase, kernel_label(first.name), f"{first.calls:g}",
                format_share(first.share), _products(phase),
            )  # fmt: skip
    words = []
    if counted:
        words.append(
            f"In {right} of {counted} phases the matrix products are as many as the model has: in forward, a layer has "
            "query, key, value, output, gate, up and down, and the two of attention unless they are fused; one more is "
            "the head's. Backward has two for each."
        )
    return table, words


def _products(phase: PhaseSummary) -> str:
    if phase.product_kernels is None:
        return ""
    expected = f" of {phase.expected_products}" if phase.expected_products is not None else ""
    return f"{phase.product_kernels:g}{expected}"


def _without_products(cells: list[StudiedCell]) -> tuple[Table, list[str]]:
    table = make_table("cell", "first", "ms a step", "second", "ms a step", "third", "ms a step")
    for cell in cells:
        rows = [row for row in cell.digest.top_without_products if row.phase == "forward"][:3]
        if rows:
            table.add_row(cell.name, *(text for row in rows for text in _named(row)))
    return table, []


def _named(row: KernelRow) -> tuple[str, str]:
    return kernel_label(row.name), f"{ms_text(row.busy_ns)} ({format_share(row.share)})"


def _fractions(cells: list[StudiedCell]) -> tuple[Table, list[str]]:
    table = make_table("cell", "inference", "training: forward", "backward", "whole step", right_from=1)
    inference = {cell.as_inference: cell.digest for cell in cells if not cell.trains}
    training = [cell for cell in cells if cell.trains]
    falls = 0
    for cell in training:
        alone = inference.get(cell.as_inference)
        forward, backward = cell.digest.phase("forward"), cell.digest.phase("backward")
        if forward and cell.digest.gemm_fraction < forward.gemm_fraction:
            falls += 1
        table.add_row(
            cell.name,
            format_share(alone.gemm_fraction) if alone else "",
            format_share(forward.gemm_fraction) if forward else "",
            format_share(backward.gemm_fraction) if backward else "",
            format_share(cell.digest.gemm_fraction),
        )
    shown = {cell.as_inference for cell in training}
    for cell in cells:
        if cell.as_inference not in shown:
            table.add_row(cell.name, format_share(cell.digest.gemm_fraction), "", "", "")
    words = []
    if training:
        words.append(
            f"Over a whole training step the share is lower than in forward alone in {falls} of {len(training)} cells"
            f"{': the optimizer multiplies no matrices' if falls and _optimizer_without_products(cells) else ''}."
        )
    return table, words


def _optimizer_without_products(cells: list[StudiedCell]) -> bool:
    optimizers = [phase for cell in cells if cell.trains and (phase := cell.digest.phase("optimizer"))]
    return bool(optimizers) and not any(phase.gemm_ns for phase in optimizers)


def _softmax(cells: list[StudiedCell]) -> tuple[Table, list[str]]:
    heads = ("Q K^T ms", "scale, mask ms", "softmax ms", "P V ms", "time ratio", "FLOP ratio", "ratio of ratios")
    table = make_table("cell", *heads, right_from=1)
    costs = []
    for cell in cells:
        if len(cell.digest.attention) != 4:
            continue
        scores, scaling, softmax, output = cell.digest.attention
        products_ns = scores.busy_ns + output.busy_ns
        time_ratio = products_ns / softmax.busy_ns if softmax.busy_ns and products_ns else None
        flop_ratio = (
            (scores.flops + output.flops) / softmax.flops if scores.flops and output.flops and softmax.flops else None
        )
        cost = flop_ratio / time_ratio if flop_ratio and time_ratio else None
        if cost:
            costs.append(cost)
        table.add_row(
            cell.name,
            *(ms_text(row.busy_ns) for row in (scores, scaling, softmax, output)),
            *(f"{ratio:.2f}" if ratio else "" for ratio in (time_ratio, flop_ratio, cost)),
        )
    words = []
    if costs:
        words.append(
            "Time ratio and FLOP ratio: both products over softmax. A FLOP of softmax costs "
            f"{min(costs):.0f} to {max(costs):.0f} times as much as one of a product."
        )
    return table, words


def _families(cells: list[StudiedCell]) -> tuple[Table, list[str]]:
    busiest = _busiest(cells)
    table = make_table("cell", "backward / forward", *(f"{family} ms" for family in busiest), "other ms", right_from=1)
    ratios = []
    for cell in cells:
        forward, backward = cell.digest.phase("forward"), cell.digest.phase("backward")
        ratio = backward.busy_ns / forward.busy_ns if forward and backward and forward.busy_ns else None
        if ratio:
            ratios.append((ratio, cell.name))
        shown = [_family_ns(cell, family) for family in busiest]
        rest = cell.digest.busy_ns / cell.digest.steps - sum(shown)
        table.add_row(
            cell.name, f"{ratio:.2f}" if ratio else "", *(ms_text(ns) if ns else "" for ns in shown), ms_text(rest)
        )
    words = []
    if ratios:
        least, most = min(ratios), max(ratios)
        words.append(
            f"In kernel time backward takes {least[0]:.2f} ({least[1]}) to {most[0]:.2f} times ({most[1]}) as long as "
            f"forward{', for twice the matrix products' if _twice_the_products(cells) else ''}."
        )
    return table, words


def _twice_the_products(cells: list[StudiedCell]) -> bool:
    """Whether each backward ran twice the products of its forward."""
    counts = [
        (forward.product_kernels, backward.product_kernels)
        for cell in cells
        if (forward := cell.digest.phase("forward")) and (backward := cell.digest.phase("backward"))
    ]
    return all(forward is not None and backward == 2 * forward for forward, backward in counts)


def _tools(cells: list[StudiedCell]) -> tuple[Table, list[str]]:
    first = cells[0].digest.profiler if cells else ""
    heads = ("phase", "kernels", "ms", "other ms", "differ", "matrix share", "other", "points")
    table = make_table("cell", *heads, right_from=2)
    times, shares = [], []
    for cell in cells:
        for phase in cell.digest.phases if cell.other else ():
            twin = cell.other.phase(phase.phase) if cell.other else None
            if twin is None or not phase.busy_ns:
                continue
            differ = twin.busy_ns / phase.busy_ns - 1
            points = (twin.gemm_fraction - phase.gemm_fraction) * 100
            times.append(abs(differ))
            shares.append(abs(points))
            same = "" if twin.kernels == phase.kernels else f" and {twin.kernels:g}"
            table.add_row(
                cell.name, phase.phase, f"{phase.kernels:g}{same}", ms_text(phase.busy_ns), ms_text(twin.busy_ns),
                f"{differ * 100:+.2f} %", format_share(phase.gemm_fraction), format_share(twin.gemm_fraction),
                f"{points:+.2f}",
            )  # fmt: skip
    words = []
    if times:
        words.append(
            f"{first} and the other profiler saw different steps of different processes. Kernel time by phase differs "
            f"by at most {max(times) * 100:.2f} %, the share of matrix multiplication by {max(shares):.2f} points."
        )
    return table, words


def _roofs(cells: list[StudiedCell]) -> tuple[Table, list[str]]:
    busiest = _busiest(cells)
    table = make_table("cell, times the bound", *busiest, right_from=1)
    verdicts: dict[str, dict[str, int]] = {}
    for cell in cells:
        roofs = {roof.family: roof for roof in cell.digest.roofs}
        row = []
        for family in busiest:
            roof = roofs.get(family)
            if roof is None or roof.over_bound is None:
                row.append("")
                continue
            verdict = roof.verdict or "mixed"
            row.append(f"{roof.over_bound:.2f} {verdict.removesuffix('-bound')}")
            counts = verdicts.setdefault(family, {})
            counts[verdict] = counts.get(verdict, 0) + 1
        if any(row):
            table.add_row(cell.name, *row)
    words = [
        f"{family[0].upper()}{family[1:]} is "
        + ", ".join(f"{verdict} in {count}" for verdict, count in sorted(counts.items(), key=lambda item: -item[1]))
        + f" of {sum(counts.values())} cells."
        for family, counts in verdicts.items()
    ]
    return table, words


def _busiest(cells: list[StudiedCell]) -> list[str]:
    """The families that take most time over all cells."""
    families = sorted({row.family for cell in cells for row in cell.digest.families})
    return sorted(families, key=lambda family: -sum(_family_ns(cell, family) for cell in cells))[:6]


def _family_ns(cell: StudiedCell, family: str) -> float:
    return sum(row.busy_ns for row in cell.digest.families if row.family == family)


def _findings(cells: list[StudiedCell]) -> list[RenderableType]:
    """Findings that say to take care, each with its cell."""
    lines: list[RenderableType] = []
    for cell in cells:
        lines += [
            Text.assemble(f"{cell.name}: ", render_finding(finding))
            for finding in cell.digest.findings
            if finding.severity != "note"
        ]
    return lines


QUESTIONS: dict[str, tuple[str, Callable[[list[StudiedCell]], tuple[Table, list[str]]]]] = {
    "a": ("Device time by phase, beside the unprofiled measurement", _times),
    "b": ("The kernel that takes longest in each phase", _top),
    "c": ("The longest kernels of forward that are no matrix product", _without_products),
    "d": ("The share of matrix multiplication in kernel time", _fractions),
    "e": ("Softmax beside the two products of attention, in forward", _softmax),
    "f": ("Backward against forward, and where the device's time goes", _families),
    "h": ("Kernel families against the device's peaks: time over the bound, and what bounds it", _roofs),
    "g": ("The same cell by the other profiler", _tools),
}
"""Each question's letter, title and table."""
