"""A prediction of memory for the terminal: does it fit, what is the peak made of, what would make it fit."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.core.evidence import PhaseMemory
from stepscope.core.units import format_bytes, format_share
from stepscope.core.workload import Workload
from stepscope.memory.prediction.accuracy import Accuracy, Comparison
from stepscope.memory.prediction.estimate import MemoryEstimate
from stepscope.memory.prediction.fit import MOST_GPUS, SAFETY, Fit, Plan
from stepscope.memory.prediction.kept_tensors import KeptTensor, kept_by_block
from stepscope.memory.prediction.largest import Largest
from stepscope.report.former import make_table
from stepscope.work.described import cell_name, describe_model, describe_workload
from stepscope.work.transformer import parameter_count

_SYMBOLS = {
    "batch_size": "B", "seq_len": "S", "d_model": "M", "d_ff": "F", "heads": "H", "head_dim": "D",
    "key_width": "K", "bytes": "bytes",
}  # fmt: skip

_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_OF_CUDA_GRAPHS = (
    "CUDA graphs hold memory in a pool of their own, which is not predicted: these figures are those of compile "
    "default. Leave some per cent more free."
)


def render_fit(answer: Fit, workload: Workload) -> RenderableType:
    """The verdict, the peak and its make-up, the peaks of the phases, and the plans."""
    parts = _make_up(answer.estimate, workload, _verdict(answer))
    if not answer.fits:
        parts += [Text(), *_plan_parts(answer)]
    return Group(*parts)


def render_peak(estimate: MemoryEstimate, workload: Workload) -> RenderableType:
    """The peak and its make-up, where nobody said how much memory there is."""
    how = "Say --memory, as in --memory 80GiB, or --device, as in --device H100, to hear whether it fits."
    return Group(*_make_up(estimate, workload, Text(f"{_peak(estimate)}. {how}", style="bold")))


def _make_up(estimate: MemoryEstimate, workload: Workload, verdict: Text) -> list[RenderableType]:
    parts: list[RenderableType] = [
        Text(describe_model(workload), style="bold"),
        Text(describe_workload(workload)),
        Text(),
        verdict,
        Text(),
        _category_table(estimate),
        Text(),
        _phase_table(estimate),
    ]
    reason = _reason(estimate, workload)
    if reason:
        parts += [Text(), Text(reason)]
    if workload.compile in _WITH_CUDA_GRAPHS:
        parts += [Text(), Text(_OF_CUDA_GRAPHS, style="yellow")]
    return parts


def _peak(estimate: MemoryEstimate) -> str:
    return f"The peak is {format_bytes(estimate.peak_bytes)}, in the {estimate.peak_phase} phase"


def render_second(first: MemoryEstimate, memory: PhaseMemory, peak_bytes: int) -> RenderableType:
    """A table of the prediction by the symbolic model beside the one by fake tensors."""
    table = make_table("two predictions", "symbolic model", "fake tensors", "difference", right_from=1)
    rows = (
        ("before the step", first.after_parameters, memory.after_parameters),
        ("forward peak", first.forward_peak, memory.forward_peak),
        ("saved for backward", first.saved_for_backward, memory.saved_for_backward),
        ("backward peak", first.backward_peak, memory.backward_peak),
        ("optimizer peak", first.optimizer_peak, memory.optimizer_peak),
        ("peak", first.peak_bytes, peak_bytes),
    )
    for name, one, other in rows:
        if one is not None and other is not None:
            table.add_row(name, format_bytes(one), format_bytes(other), f"{(one / other - 1) * 100:+.3f} %")
    return table


def _verdict(answer: Fit) -> Text:
    estimate, budget = answer.estimate, answer.budget
    peak = _peak(estimate)
    if answer.fits:
        left = f"{format_bytes(answer.margin_bytes)} are left"
        return Text(f"It fits into {budget.said}. {peak}: {left}.", style="bold green")
    where = f"it would run out of memory in the {answer.fails_in} phase"
    if answer.margin_bytes < 0:
        missing = f"{format_bytes(-answer.margin_bytes)} are missing"
        return Text(f"It does not fit into {budget.said}: {where}. {peak}: {missing}.", style="bold red")
    cache = f", but not what the allocator caches ({format_bytes(estimate.reserved_peak or 0)} in all)"
    return Text(
        f"It does not safely fit into {budget.said}: {where}, when {100 * SAFETY:g} % is kept free. {peak}: that "
        f"alone would fit{cache}.",
        style="bold red",
    )


def _category_table(estimate: MemoryEstimate) -> Table:
    table = make_table(f"at the peak ({estimate.peak_phase})", "memory", "share", right_from=1)
    for category, count in sorted(estimate.categories.items(), key=lambda item: -item[1]):
        table.add_row(category, format_bytes(count), format_share(count / estimate.peak_bytes))
    table.add_section()
    table.add_row("together", format_bytes(estimate.peak_bytes), "")
    return table


def _phase_table(estimate: MemoryEstimate) -> Table:
    table = make_table("phase by phase", "memory", right_from=1)
    rows = {
        "before the step": estimate.after_parameters,
        "forward peak": estimate.forward_peak,
        "saved for backward": estimate.saved_for_backward,
        "backward peak": estimate.backward_peak,
        "optimizer peak": estimate.optimizer_peak,
        "reserved by the allocator": estimate.reserved_peak,
    }
    for name, count in rows.items():
        if count is not None:
            table.add_row(name, format_bytes(count))
    return table


def _reason(estimate: MemoryEstimate, workload: Workload) -> str:
    """What the largest part is, in a sentence."""
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
            f"elements, which grow with the square of the sequence"
        )
    else:
        words += f"; the largest tensors have {_product(largest)} elements"
    return words + ". `stepscope fit --tensors` lists them all."


def _product(tensor: KeptTensor) -> str:
    symbols = " x ".join(_SYMBOLS[name] for name in tensor.dimensions)
    return f"{symbols} = {' x '.join(map(str, tensor.sizes))}"


def _plan_parts(answer: Fit) -> list[RenderableType]:
    if not answer.plans:
        return [
            Text(
                "No change that stepscope knows makes it fit: not all of them together, and not with its state sharded "
                f"over {MOST_GPUS} GPUs. A smaller model, a shorter sequence or more memory is needed.",
                style="yellow",
            )
        ]
    table = make_table("change that makes it fit", "peak", "FLOPs more", "option", right_from=1)
    table.columns[-1].justify = "left"
    for plan in answer.plans:
        table.add_row(*_plan_row(plan))
    return [table]


def _plan_row(plan: Plan) -> tuple[str, str, str, str]:
    peak = format_bytes(plan.peak_bytes) + (" each" if plan.gpus > 1 else "")
    option = plan.options or ("by formula; not run by stepscope yet" if plan.gpus > 1 else "")
    return plan.change, peak, format_share(plan.extra_flops_fraction), option


def render_tensors(workload: Workload, kept: Sequence[KeptTensor]) -> RenderableType:
    """What a block keeps, each size with its arithmetic."""
    config = workload.model
    batch, residual = workload.micro_batch_size, 2 if workload.dtype == "bf16-pure" else 4
    stream = batch * workload.seq_len * config.d_model * residual
    table = make_table("kept for backward by", "shape", "size of each", "times", "together", right_from=2)
    for tensor in kept:
        name = ", ".join(tensor.operators) + (" (copy of a weight)" if tensor.cast_copy else "")
        symbols = " x ".join(_SYMBOLS[part] for part in tensor.dimensions)
        arithmetic = f"{' x '.join(map(str, tensor.sizes))} x {tensor.itemsize} B = {format_bytes(tensor.bytes_each)}"
        table.add_row(name, symbols, arithmetic, str(tensor.count), format_bytes(tensor.total_bytes))
    together = sum(tensor.total_bytes for tensor in kept)
    table.add_section()
    table.add_row("one block", "", "", str(sum(t.count for t in kept)), format_bytes(together))
    table.add_row(f"{config.layers} blocks", "", "", "", format_bytes(config.layers * together))
    parts: list[RenderableType] = [
        Text(describe_model(workload), style="bold"),
        Text(describe_workload(workload)),
        Text(
            f"A tensor of the residual stream is B x S x M = {batch} x {workload.seq_len} x {config.d_model} elements "
            f"of {residual} bytes = {format_bytes(stream)}."
        ),
        Text(),
        table,
    ]
    if workload.checkpointing != "none":
        parts.append(Text(f"With checkpointing {workload.checkpointing} a block keeps this only while it runs again."))
    return Group(*parts)


def render_largest(found: Sequence[Largest], said: str) -> RenderableType:
    """The largest batch and the longest sequence, by model."""
    first = found[0].workload
    table = make_table(
        "model",
        "parameters",
        f"batch at sequence {first.seq_len}",
        f"sequence at batch {first.batch_size}",
        right_from=1,
    )
    for largest in found:
        model = largest.workload.model
        table.add_row(
            model.name,
            f"{parameter_count(model):,}",
            str(largest.batch_size or "none"),
            str(largest.seq_len or "none"),
        )
    choices = describe_workload(first).split(" tokens, ", 1)[1]
    return Group(Text(f"The largest that fits into {said}: {choices}."), table)


def render_accuracy(accuracy: Accuracy) -> RenderableType:
    """Each run beside its prediction, and how far off they are on the whole."""
    table = make_table("cell", "measured", "predicted", "error", "verdict", right_from=1)
    table.columns[-1].justify = "left"
    for comparison in accuracy.comparisons:
        table.add_row(*_comparison_row(comparison))
    sentences = [Text(sentence) for sentence in accuracy_sentences(accuracy)]
    if not accuracy.apart:
        return Group(table, *sentences)
    corrected = make_table("apart: corrected by", "measured", "predicted", "error", "verdict", right_from=1)
    corrected.columns[-1].justify = "left"
    for comparison in accuracy.apart:
        corrected.add_row(*_comparison_row(comparison))
    return Group(table, *sentences, Text(), corrected)


def accuracy_sentences(accuracy: Accuracy) -> list[str]:
    """Median and worst error, and whether a verdict was wrong."""
    sentences = []
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


def _comparison_row(comparison: Comparison) -> tuple[str, str, str, str, str]:
    error = comparison.error
    verdict = "" if comparison.foretold is None else "fits" if comparison.foretold else "does not fit"
    if comparison.foretold is not None and comparison.foretold != comparison.ran:
        verdict += ", wrongly"
    return (
        cell_name(comparison.workload),
        format_bytes(comparison.measured_peak) if comparison.measured_peak else "OOM",
        format_bytes(comparison.predicted.peak_bytes),
        f"{error * 100:+.2f} %" if error is not None else "",
        verdict,
    )
