"""The Answer on the memory of a step of a user's own module."""

from stepscope.allocations.prediction.own_fit import (
    CONVOLUTION_WORKSPACE_BYTES,
    MOST_SEARCHED,
    OwnEstimate,
    OwnFit,
    OwnVerdict,
    Unseen,
)
from stepscope.core.answer import TEXT, Answer, Line, Table, table_of
from stepscope.core.own_workload import OwnWorkload
from stepscope.core.units import format_bytes


def answer_own_fit(found: OwnFit) -> list[Answer]:
    """An Answer for each budget; one on the peak alone where there is none."""
    estimate = found.estimate
    what = Line(_described(found.workload))
    doubts = [Line(sentence, "care") for sentence in _doubts(estimate.unseen)]
    tables = [_categories(estimate), _phases(estimate)]
    if not found.verdicts:
        lead = (what, Line(f"{_peak(estimate)}."), *doubts)
        return [Answer(study="fit", question="What does this step need?", lead=lead, tables=tuple(tables))]
    return [
        Answer(
            study="fit", question="Does this step fit?",
            lead=(what, _said(verdict, estimate), *doubts, *_sizes(verdict)),
            tables=(*tables, *([_plans(verdict)] if verdict.plans else [])),
        )
        for verdict in found.verdicts
    ]  # fmt: skip


def _described(workload: OwnWorkload) -> str:
    model = workload.model
    inputs = ", ".join(f"{name} {tensor}" for name, tensor in model.inputs.items())
    return f"{model.name}: {model.parameters or 0:,} parameters; {inputs}; {', '.join(workload.words('model'))}"


def _peak(estimate: OwnEstimate) -> str:
    most = "is at most" if estimate.unseen.at_most else "is"
    return f"The peak {most} {format_bytes(estimate.peak_bytes)}, in the {estimate.peak_phase} phase"


def _doubts(unseen: Unseen) -> list[str]:
    found: list[str] = []
    if unseen.at_most:
        found.append(
            f"The shapes of {', '.join(unseen.at_most)} depend on data: each was counted as if every element were "
            "chosen, so that the peak is a bound, and the truth may be far lower."
        )
    if unseen.convolutions:
        found.append(
            f"The step has convolutions, for which cuDNN takes workspaces: {format_bytes(unseen.workspace_bytes)} are "
            "kept free beside the peak, the bytes of the largest one's operands and "
            f"{format_bytes(CONVOLUTION_WORKSPACE_BYTES)}."
        )
    if unseen.custom:
        found.append(
            f"{', '.join(unseen.custom)} are not PyTorch's: what their kernels take for themselves is not known, and "
            "more memory is kept free."
        )
    return found


def _said(verdict: OwnVerdict, estimate: OwnEstimate) -> Line:
    budget, left = verdict.budget, verdict.budget.usable_bytes - estimate.peak_bytes
    kept = f"{format_bytes(verdict.kept_free_bytes)} kept free"
    if verdict.fits:
        return Line(f"It fits into {budget.said}. {_peak(estimate)}: {format_bytes(left)} are left, {kept}.", "good")
    where = f"it would run out of memory in the {verdict.fails_in} phase"
    if left < 0:
        said = f"{_peak(estimate)}: {format_bytes(-left)} are missing."
        return Line(f"It does not fit into {budget.said}: {where}. {said}", "bad")
    return Line(f"It does not safely fit into {budget.said}: with {kept}, {where}. {_peak(estimate)}.", "bad")


def _sizes(verdict: OwnVerdict) -> list[Line]:
    sizes = {"the largest batch": verdict.largest_batch, "the longest sequence": verdict.longest_sequence}
    decides = verdict.largest_batch if verdict.largest_batch is not None else verdict.longest_sequence
    if decides == 0:
        return [Line("Not even the smallest batch fits.", "bad")]
    known = [
        f"{name} that fits is {'at least ' if size >= MOST_SEARCHED - 1 else ''}{size:,}"
        for name, size in sizes.items() if size
    ]  # fmt: skip
    bound = ", and the model takes no longer one" if verdict.longest_is_the_models else ""
    return [Line(f"{', '.join(known).capitalize()}{bound}.")] if known else []


def _categories(estimate: OwnEstimate) -> Table:
    parts = sorted(estimate.categories.items(), key=lambda item: -item[1])
    rows = [(name, count, count / estimate.peak_bytes) for name, count in parts if count]
    columns = (f"at the peak ({estimate.peak_phase})", ("memory", "B"), ("share", "%"))
    return table_of(*columns, rows=[*rows, ("together", estimate.peak_bytes, None)], rules=(len(rows),))


def _phases(estimate: OwnEstimate) -> Table:
    memory = estimate.memory
    figures = {
        "before the step": memory.after_parameters,
        "forward peak": memory.forward_peak,
        "saved for backward": memory.saved_for_backward,
        "backward peak": memory.backward_peak,
        "optimizer peak": memory.optimizer_peak,
        "reserved by the allocator": memory.reserved_peak or None,
    }
    return table_of("phase by phase", ("memory", "B"), rows=[row for row in figures.items() if row[1] is not None])


def _plans(verdict: OwnVerdict) -> Table:
    rows = [(plan.change, format_bytes(plan.peak_bytes), plan.options) for plan in verdict.plans]
    return table_of("change that makes it fit", ("peak", TEXT), "option", rows=rows)
