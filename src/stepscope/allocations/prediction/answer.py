"""Predictions of memory as Answers: whether a step fits, what its peak is made of, and what would make it fit."""

from collections.abc import Sequence

import msgspec

from stepscope.allocations.prediction.accuracy import Accuracy, Comparison, accuracy_panels
from stepscope.allocations.prediction.estimate import MemoryEstimate
from stepscope.allocations.prediction.fit import MOST_GPUS, SAFETY, Fit, Largest
from stepscope.allocations.prediction.kept_tensors import KeptTensor, kept_by_block
from stepscope.allocations.prediction.own_fit import (
    CONVOLUTION_WORKSPACE_BYTES,
    MOST_SEARCHED,
    OwnEstimate,
    OwnFit,
    OwnVerdict,
    Unseen,
)
from stepscope.core.answer import TEXT, Answer, Cell, Line, Table, as_lines, table_of, text
from stepscope.core.evidence import PhaseMemory
from stepscope.core.formulas.spelled import cell_name, describe_model, describe_workload
from stepscope.core.formulas.transformer import moment_bytes, parameter_count
from stepscope.core.precisions import PRECISIONS
from stepscope.core.units import format_bytes, format_share
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload

_SYMBOLS = {
    "batch_size": "B", "seq_len": "S", "d_model": "M", "d_ff": "F", "heads": "H", "head_dim": "D",
    "key_width": "K", "bytes": "bytes",
}  # fmt: skip

_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_OF_CUDA_GRAPHS = (
    "CUDA graphs hold memory in a pool of their own, which is not predicted: these figures are those of the "
    "same step without them. Leave some per cent more free."
)


def answer_fit(found: Fit, workload: TextbookWorkload) -> Answer:
    """The Answer on whether a step fits: verdict, the peak and its parts, the peaks of the phases, and the plans."""
    plans = [] if found.fits else [_plans(found)]
    return _answer(
        f"Does it fit into {found.budget.said}?", workload, _make_up(found.estimate, workload, _verdict(found)), plans
    )


def answer_peak(estimate: MemoryEstimate, workload: TextbookWorkload) -> Answer:
    """The Answer with the peak and its parts, where the memory of the device is not known."""
    how = "Say --memory, as in --memory 80GiB, or --device, as in --device H100, to hear whether it fits."
    verdict = Line(f"{_peak(estimate)}. {how}", "strong")
    return _answer("What is the peak?", workload, _make_up(estimate, workload, verdict))


def _answer(question: str, workload: TextbookWorkload, *tables: Sequence[Table]) -> Answer:
    return Answer(
        study="fit", question=question,
        lead=(Line(describe_model(workload), "strong"), Line(describe_workload(workload))),
        tables=tuple(table for group in tables for table in group),
    )  # fmt: skip


def _make_up(estimate: MemoryEstimate, workload: TextbookWorkload, verdict: Line) -> list[Table]:
    parts = [text(verdict), _category_table(estimate), _phase_table(estimate), text(state_formula(workload))]
    reason = _reason(estimate, workload)
    if reason:
        parts.append(text(reason))
    if workload.compile in _WITH_CUDA_GRAPHS or workload.graph == "step":
        parts.append(text(Line(_OF_CUDA_GRAPHS, "care")))
    return parts


def _peak(estimate: MemoryEstimate) -> str:
    return f"The peak is {format_bytes(estimate.peak_bytes)}, in the {estimate.peak_phase} phase"


def answer_second(first: MemoryEstimate, memory: PhaseMemory, peak_bytes: int) -> Answer:
    """The Answer with the prediction by the symbolic model beside the one by fake tensors."""
    predicted = (
        ("before the step", first.after_parameters, memory.after_parameters),
        ("forward peak", first.forward_peak, memory.forward_peak),
        ("saved for backward", first.saved_for_backward, memory.saved_for_backward),
        ("backward peak", first.backward_peak, memory.backward_peak),
        ("optimizer peak", first.optimizer_peak, memory.optimizer_peak),
        ("peak", first.peak_bytes, peak_bytes),
    )
    table = table_of(
        "two predictions", ("symbolic model", "B"), ("fake tensors", "B"), ("difference", "{:+.3f} %"),
        rows=[
            (name, one, other, (one / other - 1) * 100)
            for name, one, other in predicted
            if one is not None and other is not None
        ],
    )  # fmt: skip
    return Answer(study="fit", question="", tables=(table,))


def _verdict(answer: Fit) -> Line:
    estimate, budget = answer.estimate, answer.budget
    peak = _peak(estimate)
    if answer.fits:
        left = f"{format_bytes(answer.margin_bytes)} are left"
        return Line(f"It fits into {budget.said}. {peak}: {left}.", "good")
    where = f"it would run out of memory in the {answer.fails_in} phase"
    if answer.margin_bytes < 0:
        missing = f"{format_bytes(-answer.margin_bytes)} are missing"
        return Line(f"It does not fit into {budget.said}: {where}. {peak}: {missing}.", "bad")
    cache = f", but not what the allocator caches ({format_bytes(estimate.reserved_peak or 0)} in all)"
    return Line(
        f"It does not safely fit into {budget.said}: {where}, when {100 * SAFETY:g} % is kept free. {peak}: that "
        f"alone would fit{cache}.",
        "bad",
    )


def _category_table(estimate: MemoryEstimate) -> Table:
    parts = sorted(estimate.categories.items(), key=lambda item: -item[1])
    rows: list[tuple[Cell, ...]] = [(category, count, count / estimate.peak_bytes) for category, count in parts]
    rows.append(("together", estimate.peak_bytes, None))
    columns = (f"at the peak ({estimate.peak_phase})", ("memory", "B"), ("share", "%"))
    return table_of(*columns, rows=rows, rules=(len(rows) - 1,))


def _phase_table(estimate: MemoryEstimate) -> Table:
    figures = {
        "before the step": estimate.after_parameters,
        "forward peak": estimate.forward_peak,
        "saved for backward": estimate.saved_for_backward,
        "backward peak": estimate.backward_peak,
        "optimizer peak": estimate.optimizer_peak,
        "reserved by the allocator": estimate.reserved_peak,
        "in the host's memory": estimate.host_bytes or None,
    }
    return table_of("phase by phase", ("memory", "B"), rows=[row for row in figures.items() if row[1] is not None])


def state_formula(workload: TextbookWorkload) -> str:
    """A sentence with the bytes that a step needs for each parameter, at any batch size, multiplied out."""
    count = parameter_count(workload.model)
    precision = PRECISIONS[workload.dtype]
    parts = {"parameters": precision.weights}
    if workload.phase != "forward":
        parts["gradients"] = precision.weights
    if workload.phase == "train":
        parts["two moments of AdamW"] = 2 * moment_bytes(workload)
        if precision.masters:
            parts["master weights"] = precision.masters
    terms = [f"{name} {each} B x {count:,} = {format_bytes(each * count)}" for name, each in parts.items()]
    each = sum(parts.values())
    together = f"; together {each} B x {count:,} = {format_bytes(each * count)}" if len(terms) > 1 else ""
    return f"At any batch size: {' + '.join(terms)}{together}."


def _reason(estimate: MemoryEstimate, workload: TextbookWorkload) -> str:
    """A sentence that names the largest part of the peak."""
    if not estimate.saved_for_backward or workload.checkpointing != "none":
        return ""
    kept = kept_by_block(workload)
    block = sum(tensor.total_bytes for tensor in kept)
    largest = kept[0]
    layers = workload.model.layers
    squares = [tensor for tensor in kept if tensor.dimensions.count("seq_len") == 2 and "heads" in tensor.dimensions]
    words = (
        f"Each of the {layers} blocks keeps {format_bytes(block)} for backward, {format_bytes(layers * block)} together"
    )
    if squares:
        square = sum(tensor.total_bytes for tensor in squares)
        count = sum(tensor.count for tensor in squares)
        words += (
            f"; {format_share(square / block)} of it are the {count} tensors of attention with {_product(squares[0])} "
            f"elements ({_size(squares)}), which grow with the square of the sequence"
        )
    else:
        words += f"; the largest tensors have {_product(largest)} elements"
    return words + ". `stepscope fit --tensors` lists them all."


def _size(tensors: Sequence[KeptTensor]) -> str:
    largest = max(tensors, key=lambda tensor: tensor.bytes_each)
    same = all(tensor.bytes_each == largest.bytes_each for tensor in tensors)
    return f"x {largest.itemsize} B = {format_bytes(largest.bytes_each)} {'each' if same else 'at most'}"


def _product(tensor: KeptTensor) -> str:
    symbols = " x ".join(_SYMBOLS[name] for name in tensor.dimensions)
    return f"{symbols} = {' x '.join(map(str, tensor.sizes))}"


def _plans(answer: Fit) -> Table:
    if not answer.plans:
        return text(Line(
            "No change that stepscope knows makes it fit: not all of them together, and not with its state sharded "
            f"over {MOST_GPUS} GPUs. A smaller model, a shorter sequence or more memory is needed.",
            "care",
        ))  # fmt: skip
    return table_of(
        "change that makes it fit", ("peak", TEXT), ("FLOPs more", "%"), "option",
        rows=[
            (
                plan.change, format_bytes(plan.peak_bytes) + (" each" if plan.gpus > 1 else ""),
                plan.extra_flops_fraction, plan.options,
            )
            for plan in answer.plans
        ],
    )  # fmt: skip


def answer_tensors(workload: TextbookWorkload, kept: Sequence[KeptTensor]) -> Answer:
    """The Answer on what a block keeps, each size with its arithmetic."""
    config = workload.model
    batch, residual = workload.micro_batch_size, PRECISIONS[workload.dtype].residual
    stream = batch * workload.seq_len * config.d_model * residual
    rows: list[tuple[Cell, ...]] = []
    for tensor in kept:
        name = ", ".join(tensor.operators) + (" (copy of a weight)" if tensor.cast_copy else "")
        symbols = " x ".join(_SYMBOLS[part] for part in tensor.dimensions)
        arithmetic = f"{' x '.join(map(str, tensor.sizes))} x {tensor.itemsize} B = {format_bytes(tensor.bytes_each)}"
        rows.append((name, symbols, arithmetic, tensor.count, tensor.total_bytes))
    together = sum(tensor.total_bytes for tensor in kept)
    rows += [
        ("one block", "", "", sum(tensor.count for tensor in kept), together),
        (f"{config.layers} blocks", "", "", None, config.layers * together),
    ]
    columns = ("kept for backward by", "shape", ("size of each", TEXT), ("times", TEXT), ("together", "B"))
    again = (
        [f"With checkpointing {workload.checkpointing} a block has all of this only while backward runs it again."]
        if workload.checkpointing != "none"
        else []
    )
    table = table_of(*columns, rows=rows, rules=(len(kept),), notes=as_lines(*again))
    said = _answer("What does a block keep for backward?", workload, [table])
    formula = (
        f"A tensor of the residual stream is B x S x M = {batch} x {workload.seq_len} x {config.d_model} elements "
        f"of {residual} bytes = {format_bytes(stream)}."
    )
    return msgspec.structs.replace(said, lead=(*said.lead, Line(formula)))


def answer_largest(found: Sequence[Largest], said: str) -> Answer:
    """The Answer on the largest batch and the longest sequence of each model."""
    first = found[0].workload
    table = table_of(
        "model", ("parameters", ","), (f"batch at sequence {first.seq_len}", TEXT),
        (f"sequence at batch {first.batch_size}", TEXT),
        rows=[
            (
                largest.workload.model.name, parameter_count(largest.workload.model),
                str(largest.batch_size or "none"), str(largest.seq_len or "none"),
            )
            for largest in found
        ],
    )  # fmt: skip
    choices = describe_workload(first).split(" tokens, ", 1)[1]
    lead = (Line(f"The largest that fits into {said}: {choices}."),)
    return Answer(study="fit", question="What is the largest that fits?", lead=lead, tables=(table,))


def answer_accuracy(accuracy: Accuracy) -> Answer:
    """The Answer with each run beside its prediction, and the errors over all runs."""
    tables = [_comparison_table("cell", accuracy.comparisons, accuracy_sentences(accuracy))]
    if accuracy.apart:
        tables.append(_comparison_table("apart: corrected by", accuracy.apart))
    return Answer(study="fit", question="", tables=tuple(tables), panels=accuracy_panels(accuracy))


def _comparison_table(head: str, comparisons: Sequence[Comparison], notes: Sequence[str] = ()) -> Table:
    return table_of(
        head, ("measured", "B"), ("predicted", "B"), ("error", "{:+.2f} %"), "verdict",
        rows=[
            (
                cell_name(each.workload), each.measured_peak or "OOM", each.predicted.peak_bytes,
                each.error * 100 if each.error is not None else None, _foretold(each),
            )
            for each in comparisons
        ],
        notes=as_lines(*notes),
    )  # fmt: skip


def _foretold(comparison: Comparison) -> str:
    if comparison.foretold is None:
        return ""
    verdict = "fits" if comparison.foretold else "does not fit"
    return verdict if comparison.foretold == comparison.ran else f"{verdict}, wrongly"


def accuracy_sentences(accuracy: Accuracy) -> list[str]:
    """Sentences on the median and the worst error, and on wrong verdicts."""
    sentences: list[str] = []
    worst, median = accuracy.worst, accuracy.median_error
    if worst is not None and median is not None and worst.error is not None:
        sentences.append(
            f"{len(accuracy.errors)} peaks predicted: the median error is {median * 100:.3f} %, the worst "
            f"{worst.error * 100:+.2f} % ({cell_name(worst.workload)})."
        )
    if accuracy.verdicts:
        wrong = len(accuracy.wrongly_said_to_fit)
        sentences.append(
            f"{accuracy.right} of {accuracy.verdicts} verdicts came true; "
            + (f"{wrong} said to fit ran out of memory." if wrong else "none that was said to fit ran out of memory.")
        )
    return sentences


# The Answer on the memory of a step of a user's own module.


def answer_own_fit(found: OwnFit) -> list[Answer]:
    """An Answer for each budget; one on the peak alone where there is none."""
    estimate = found.estimate
    what = Line(_described(found.workload))
    doubts = [Line(sentence, "care") for sentence in _doubts(estimate.unseen)]
    tables = [_categories(estimate), _phases(estimate)]
    if not found.verdicts:
        lead = (what, Line(f"{_own_peak(estimate)}."), *doubts)
        return [Answer(study="fit", question="What does this step need?", lead=lead, tables=tuple(tables))]
    return [
        Answer(
            study="fit", question="Does this step fit?",
            lead=(what, _said(verdict, estimate), *doubts, *_sizes(verdict)),
            tables=(*tables, *([_own_plans(verdict)] if verdict.plans else [])),
        )
        for verdict in found.verdicts
    ]  # fmt: skip


def _described(workload: FactoryWorkload) -> str:
    model = workload.model
    inputs = ", ".join(f"{name} {tensor}" for name, tensor in model.inputs.items())
    return f"{model.name}: {model.parameters or 0:,} parameters; {inputs}; {', '.join(workload.words('model'))}"


def _own_peak(estimate: OwnEstimate) -> str:
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
        return Line(
            f"It fits into {budget.said}. {_own_peak(estimate)}: {format_bytes(left)} are left, {kept}.", "good"
        )
    where = f"it would run out of memory in the {verdict.fails_in} phase"
    if left < 0:
        said = f"{_own_peak(estimate)}: {format_bytes(-left)} are missing."
        return Line(f"It does not fit into {budget.said}: {where}. {said}", "bad")
    return Line(f"It does not safely fit into {budget.said}: with {kept}, {where}. {_own_peak(estimate)}.", "bad")


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


def _own_plans(verdict: OwnVerdict) -> Table:
    rows = [(plan.change, format_bytes(plan.peak_bytes), plan.options) for plan in verdict.plans]
    return table_of("change that makes it fit", ("peak", TEXT), "option", rows=rows)
