"""Predictions of memory as Answers: whether a step fits, what its peak is made of, what would make it fit, and how far
predictions are off stored runs."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from stepscope.allocations.prediction.estimate import HeldTensor, KeptTensor, MemoryEstimate, estimate, kept_by_block
from stepscope.allocations.prediction.fit import (
    GRAPH_SAFETY,
    KEPT_FREE_FOR_GROUPED,
    MOST_GPUS,
    MOST_SEARCHED,
    OF_COMPILED_PARTS,
    FakeEstimate,
    Fit,
    Largest,
    Plan,
    budget_of_memory,
    budget_of_total,
    safety_of,
    will_fit,
)
from stepscope.allocations.prediction.layouts import memory_of_ranks
from stepscope.core.answer import (
    PROSE,
    TEXT,
    Answer,
    Cell,
    Frame,
    Guide,
    Line,
    Panel,
    Point,
    Table,
    as_lines,
    table_of,
    text,
)
from stepscope.core.attention_support import is_predicted
from stepscope.core.checkpointing import group_of
from stepscope.core.errors import InputError
from stepscope.core.evidence import PhaseMemory
from stepscope.core.formulas.spelled import cell_name, describe_model, describe_workload
from stepscope.core.formulas.transformer import moment_bytes, parameter_count, recomputed_flops, state_bytes, step_flops
from stepscope.core.layout import SHARDINGS, Layout, layout_of
from stepscope.core.parts import REFERENCE
from stepscope.core.precisions import PRECISIONS
from stepscope.core.run import Run
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.units import GIB, format_bytes, format_share
from stepscope.core.workloads import TextbookWorkload, Workload, by_sizes

_SYMBOLS = {
    "batch_size": "B", "seq_len": "S", "d_model": "M", "d_ff": "F", "heads": "H", "head_dim": "D",
    "key_width": "K", "qkv_width": "(M + 2 K)", "gate_up_width": "2 F", "bytes": "bytes",
}  # fmt: skip

AnyFit = Fit[MemoryEstimate] | Fit[FakeEstimate]

_OF_CUDA_GRAPHS = (
    "CUDA graphs hold memory in a pool of their own, which is not predicted: these figures are those of the "
    "same step without them. Leave some per cent more free."
)

_OF_STEP_GRAPHS = (
    f"CUDA graphs hold a pool of their own, beside what the steps before left of other segments: both are in what is "
    f"reserved, and {100 * GRAPH_SAFETY:g} % are kept free. It was up to 1.4 % more in four steps that were measured."
)


def answer_fit(fit: AnyFit, *, searched: bool = True) -> Answer:
    """The Answer on whether a step fits, with its peak's parts, the peaks of the phases and plans; without a budget, on
    its peak alone. searched: whether the search for plans came to its end."""
    tables = [text(verdict(fit), *doubts(fit), *_sizes(fit))]
    if fit.fits is False and isinstance(fit.workload, TextbookWorkload):
        tables.append(_terms(fit.workload, fit.estimate))
    tables.append(_category_table(fit))
    phases = {
        **_by_phase(fit.estimate),
        "reserved by the allocator": _phases(fit.estimate).reserved_peak or None,
        "in the host's memory": (fit.estimate.host_bytes if isinstance(fit.estimate, MemoryEstimate) else None) or None,
    }
    tables.append(_phase_table(fit, {name: size for name, size in phases.items() if size is not None}))
    if isinstance(fit.workload, TextbookWorkload) and fit.fits is not False:
        tables += [text(sentence) for sentence in _reasons(fit.workload)]
    if fit.workload.graph == "step":
        tables.append(text(Line(_OF_STEP_GRAPHS, "care")))
    elif fit.workload.compile in ("reduce-overhead", "max-autotune"):
        tables.append(text(Line(_OF_CUDA_GRAPHS, "care")))
    if isinstance(fit.workload, TextbookWorkload) and fit.workload.compile == "blocks":
        tables.append(text(Line(OF_COMPILED_PARTS, "care")))
    if fit.fits is False and (searched or fit.plans):
        tables += _ways(fit)
    return _answer(f"Does it fit into {fit.budget.said}?" if fit.budget else "What is the peak?", fit.workload, tables)


def answer_fits(fits: Sequence[Sequence[AnyFit]], names: Sequence[str] = ()) -> Answer:
    """The Answer on several steps: a row for each, by what varies among them, with its peak, and for each budget
    whether it fits and what is left. fits: of each step, by budget. names: those of several budgets."""
    first = [of_step[0] for of_step in fits]
    described = [_described(fit.workload) for fit in first]
    varied = [name for name in described[0] if len({one[name] for one in described if one[name]}) > 1]
    budgets = [fit.budget for fit in fits[0] if fit.budget is not None]
    of = [f" {name}" for name in names] if len(budgets) > 1 else [""] * len(budgets)
    verdicts = [column for name in of for column in (f"fits{name}", (f"left{name}", "B"))]
    rows: list[tuple[Cell, ...]] = []
    computed = [("FLOPs again", "%")] if "checkpointing" in varied and first[0].workload.sizes else []
    for values, of_step in zip(described, fits, strict=True):
        judged = [cell for fit in of_step if fit.budget for cell in (_fits_word(fit), fit.margin_bytes)]
        peak = of_step[0].peak_bytes, of_step[0].estimate.peak_phase
        again = [by_sizes(of_step[0].workload, _flops_again)] if computed else []
        rows.append((*(values[name] for name in varied), *peak, *again, *judged))
    columns = (*((name, TEXT) for name in varied), ("peak", "B"), "in", *computed, *verdicts)
    shared = {name: max(one[name] for one in described) for name in described[0] if name not in varied}
    said = [f"{name} {value}" for name, value in shared.items() if value not in ("", *_USUAL) or name in _SAID]
    alike = ", ".join(word for word in said if not word.endswith(" "))
    lead = [Line(alike, "strong")] if alike else []
    for i, budget in enumerate(budgets):
        count = sum(of_step[i].fits is True for of_step in fits)
        lead.append(Line(f"{count} of {len(fits)} steps fit into {budget.said}."))
    if varied == ["checkpointing"]:
        lead.append(
            Line(_least_peaks([(values["checkpointing"], fit) for values, fit in zip(described, first, strict=True)]))
        )
    into = " or ".join(budget.said for budget in budgets)
    return Answer(
        study="fit",
        question=f"Which of these steps fit into {into}?" if into else "What is the peak of each of these steps?",
        lead=tuple(lead),
        tables=(table_of(*columns, rows=rows),),
        panels=(_panel_of_peaks(first, described, varied),),
    )


_MOMENTS = {
    "after initialisation": (True, False, False),
    "before the first optimizer's step": (True, True, False),
    "after it, and before each later one": (True, True, True),
}
"""Moments of training, by which of parameters, gradients and optimizer states are there. AdamW makes its states in the
first step; gradients go when the next step begins."""


def answer_moments(steps: Sequence[TextbookWorkload]) -> Answer:
    """The Answer on what one rank holds around the optimizer's step, by part, in each of these strategies, with the
    peak of a step. Raises InputError for a strategy that no prediction is of."""
    rows: list[tuple[Cell, ...]] = []
    sums: list[Line] = []
    for step in steps:
        layout, memory = layout_of(step), memory_of_ranks(step)
        if layout is None:
            raise InputError(f"no prediction is of --parallel {step.parallel} with {step.dtype}: leave it out")
        states = memory.states(layout)
        for moment, there in _MOMENTS.items():
            parts = [size if is_there else 0 for size, is_there in zip(states, there, strict=True)]
            rows.append((step.parallel, moment, *parts, sum(parts)))
        shared = step.parallel != NOT_PARALLEL
        peak = memory.needs(layout, exactly=True).peak if shared else estimate(step).peak_bytes
        rows.append((step.parallel, "peak of a later step, with activations", None, None, None, peak))
        sums.append(Line(f"{step.parallel}: {_states_spelled(step, layout, states)}"))
    columns = (("strategy", TEXT), ("moment", TEXT), *((name, "B") for name in _PARTS), ("together", "B"))
    return Answer(
        study="fit",
        question="What does one rank hold around the optimizer's step, by part?",
        lead=(
            Line(f"Predicted for {describe_model(steps[0])}, {steps[0].dtype}.", "strong"),
            *sums,
            Line(f"The batch of {steps[0].batch_size} is shared by the ranks; with none, one process runs it all."),
            *([Line(_OF_BLOCKS, "care")] if steps[0].compile == "blocks" else []),
        ),
        tables=(table_of(*columns, rows=rows),),
    )


_PARTS = ("parameters", "gradients", "optimizer states")
_OF_BLOCKS = "Compiled blocks are predicted as they run without: what compiled kernels keep and take is unknown."


def _states_spelled(step: TextbookWorkload, layout: Layout, states: Sequence[int]) -> str:
    """The closed form of each part with its numbers: parameters x bytes of one, divided by the ranks that share it."""
    count, sharding = parameter_count(step.model), SHARDINGS[layout.sharding]
    precision = PRECISIONS[step.dtype]
    twice = 2 if layout.ranks > 1 and sharding.buckets else 1
    each = (precision.weights, twice * precision.weights, state_bytes(step))
    shares = (sharding.parameters, sharding.gradients, sharding.moments)
    return "; ".join(
        f"{part} {count:,} x {size} B" + (f" / {layout.shard} ranks" if is_shared and layout.shard > 1 else "")
        + f" = {format_bytes(held)}" + (" with the buckets that stay" if part == "gradients" and twice > 1 else "")
        for part, size, is_shared, held in zip(_PARTS, each, shares, states, strict=True)
    ) + "."  # fmt: skip


def _flops_again(workload: TextbookWorkload) -> float:
    """FLOPs that backward runs again, as a share of the step's model FLOPs."""
    return recomputed_flops(workload) / step_flops(workload)


def _least_peaks(fits: Sequence[tuple[str, AnyFit]]) -> str:
    """Which checkpointing has the least peak, of all and of one level; within 1 % that of the fewest known FLOPs."""

    def best(among: Sequence[tuple[str, AnyFit]]) -> str:
        least = min(fit.peak_bytes for _, fit in among)
        near = [one for one in among if one[1].peak_bytes <= 1.01 * least]
        name, fit = min(near, key=lambda one: (by_sizes(one[1].workload, _flops_again) or 0.0, one[1].peak_bytes))
        return f"{name}, {format_bytes(fit.peak_bytes)}"

    groups = [one for one in fits if group_of(one[0])]
    differs = groups and best(groups) != best(fits)
    of_groups = f" Of groups of blocks alone (every-K) it is that of {best(groups)}." if differs else ""
    counted = ", to 1 %, with the fewest FLOPs again" if fits[0][1].workload.sizes is not None else ""
    return f"The least peak{counted} is that of {best(fits)}.{of_groups}"


def _fits_word(fit: AnyFit) -> str:
    return "yes" if fit.fits else f"no, {fit.fails_in}"


_FIRST = ("batch_size", "seq_len", "dtype", "phase", "attention")
_SAID = (*_FIRST, "optimizer")
_USUAL = ("none", "eager", "apart", REFERENCE, NOT_PARALLEL, "1")


def _described(workload: Workload) -> dict[str, str]:
    """What may vary among steps, by the names of options, in words; empty where a step has no such thing."""
    fields = {"model": workload.name, **{name: str(value) for name, value in workload.arguments.items()}}
    for name in (*_FIRST, *workload.__struct_fields__):
        if name not in ("model", "factory", "arguments", "code", "by_factory", "seed"):
            value = getattr(workload, name)
            fields.setdefault(name, "" if value is None else str(value))
    return fields


def _panel_of_peaks(fits: Sequence[AnyFit], described: Sequence[dict[str, str]], varied: Sequence[str]) -> Panel:
    """The peaks over the sequence or the batch, where one varies; else as bars."""
    axis = next((name for name in ("seq_len", "batch_size") if name in varied), None)
    points: list[Point] = []
    for fit, values in zip(fits, described, strict=True):
        line = ", ".join(values[name] for name in varied if name != axis and values[name]) or fit.workload.name
        x = float(values[axis]) if axis else 0.0
        points.append(Point(line=line, x=x, y=fit.peak_bytes / GIB, name="" if axis else line))
    return Panel(
        x_title=axis or "", y_title="predicted peak (GiB)", points=tuple(points), kind="curves" if axis else "bars"
    )


def fit_document(fit: AnyFit, answer: Answer | None = None) -> dict[str, object]:
    """The contract of `stepscope fit --json`, in which the textbook's step has no keys of what is predicted of a user's
    module alone."""
    document = msgspec.to_builtins(fit)
    apart = ["longest_is_the_models", *(() if fit.not_searched else ("not_searched",))]
    if fit.workload.sizes is not None:
        apart += ["kept_free_bytes", "largest_batch", "longest_sequence", "is_bound"]
    for key in apart:
        del document[key]
    return document if answer is None else {**document, "answer": msgspec.to_builtins(answer)}


def _answer(question: str, workload: Workload, tables: Sequence[Table]) -> Answer:
    lead = (Line(describe_model(workload), "strong"), Line(describe_workload(workload)))
    return Answer(study="fit", question=question, lead=lead, tables=tuple(tables))


def peak_in_words(fit: AnyFit) -> str:
    """The peak, or a bound of it, with its phase."""
    most = "is at most" if fit.is_bound else "is"
    return f"The peak {most} {format_bytes(fit.peak_bytes)}, in the {fit.estimate.peak_phase} phase"


def verdict(fit: AnyFit) -> Line:
    """The peak, and whether it fits, in one line."""
    peak = peak_in_words(fit)
    if fit.budget is None or fit.margin_bytes is None:
        how = "Say --memory, as in --memory 80GiB, or --device, as in --device H100, to hear whether it fits."
        return Line(f"{peak}. {how}", "strong")
    into = fit.budget.said
    of_user = isinstance(fit.estimate, FakeEstimate)
    kept = format_bytes(fit.kept_free_bytes or 0)
    if fit.fits:
        left = f"{format_bytes(fit.margin_bytes)} are left{f', {kept} kept free' if of_user else ''}"
        return Line(f"It fits into {into}. {peak}: {left}.", "good")
    where = f"it would run out of memory in the {fit.fails_in} phase"
    if fit.margin_bytes < 0:
        missing = f"{format_bytes(-fit.margin_bytes)} are missing"
        return Line(f"It does not fit into {into}: {where}. {peak}: {missing}.", "bad")
    free = f"{kept} are" if of_user else f"{100 * safety_of(fit.workload):g} % is"
    reserved = _phases(fit.estimate).reserved_peak
    cache = f", but not what the allocator caches ({format_bytes(reserved)} in all)" if reserved else ""
    alone = f"{peak}: that alone would fit{cache}"
    return Line(f"It does not safely fit into {into}: {where}, when {free} kept free. {alone}.", "bad")


def doubts(fit: AnyFit) -> Iterator[Line]:
    """Sentences on what fake tensors do not show of a user's module."""
    unseen = fit.estimate.unseen if isinstance(fit.estimate, FakeEstimate) else None
    if isinstance(fit.estimate, FakeEstimate) and fit.estimate.basis:
        alone = (
            " Of another sequence or precision it tells nothing: give the model, its batch and its loss, as in "
            "--module train.py:make."
        )
        kernels = " Another kind of card may take other kernels."
        yield Line(f"{fit.estimate.basis}{kernels}{alone if unseen is None else ''}", "care")
    if unseen is None:
        return
    if unseen.at_most:
        yield Line(
            f"The shapes of {', '.join(unseen.at_most)} depend on data: each was counted as if every element were "
            "chosen, so that the peak is a bound, and the truth may be far lower.",
            "care",
        )
    if unseen.recurrent:
        yield Line(
            "The step has recurrent layers, for which cuDNN takes workspaces: each is counted at the most that was "
            "measured, so that the peak is a bound.",
            "care",
        )
    if unseen.convolutions:
        yield Line(
            "The step has convolutions. What cuDNN takes for them is counted by what was measured on an H200, mostly "
            f"as an upper bound, and {format_bytes(unseen.workspace_bytes)} are kept free besides: a few took more.",
            "care",
        )
    if unseen.without_state_bytes:
        yield Line(
            f"The step uses {format_bytes(unseen.without_state_bytes)} of parameters that its module does not "
            "register, as those of a plain list: they and their gradients are counted, and no optimizer state of them, "
            "since --optimizer updates what the module registers. Return an optimizer of your own to have it counted.",
            "care",
        )
    elif unseen.outside_bytes:
        yield Line(
            f"The step trains {format_bytes(unseen.outside_bytes)} of parameters that its module does not register, as "
            "those of a plain list: they are counted at the peak, and not among the parameters of the model.",
            "care",
        )
    if unseen.grouped_flex:
        yield Line(
            "The step calls FlexAttention with keys that several query heads share, of which one that was measured "
            f"needed 0.85 % more than is predicted: {100 * KEPT_FREE_FOR_GROUPED:g} % more is kept free.",
            "care",
        )
    if unseen.compiled:
        yield Line(OF_COMPILED_PARTS, "care")
    if unseen.bucket_bytes:
        lie = "in which the gradients lie" if unseen.grads_in_buckets else "beside the gradients"
        yield Line(
            f"DistributedDataParallel has buckets of {format_bytes(unseen.bucket_bytes)}, {lie}: they are counted "
            "among the gradients.",
            "care",
        )
    if unseen.custom:
        yield Line(
            f"{', '.join(unseen.custom)} are not PyTorch's: what their kernels take for themselves is not known, and "
            "more memory is kept free.",
            "care",
        )


def sizes_that_fit(fit: AnyFit) -> list[str]:
    """The largest sizes that fit, each in words, as far as they were looked for."""
    sizes = {"the longest sequence": fit.longest_sequence, "the largest batch": fit.largest_batch}
    is_bound = isinstance(fit.estimate, FakeEstimate) and bool(fit.estimate.basis) and fit.estimate.unseen is None
    return [
        f"{name} that fits is {'at least ' if size >= MOST_SEARCHED - 1 or is_bound else ''}{size:,}"
        for name, size in sizes.items()
        if size
    ]


def _sizes(fit: AnyFit) -> list[Line]:
    decides = fit.largest_batch if fit.largest_batch is not None else fit.longest_sequence
    if decides == 0:
        return [Line("Not even the smallest batch fits.", "bad")]
    known = ", ".join(reversed(sizes_that_fit(fit)))
    bound = ", and the model takes no longer one" if fit.longest_is_the_models else ""
    lines = [Line(f"{known.capitalize()}{bound}.")] if known else []
    return [*lines, Line(fit.not_searched)] if fit.not_searched else lines


def _category_table(fit: AnyFit) -> Table:
    parts = sorted(fit.categories.items(), key=lambda item: -item[1])
    rows: list[tuple[Cell, ...]] = [(category, count, count / fit.peak_bytes) for category, count in parts if count]
    rows.append(("together", fit.peak_bytes, None))
    columns = (f"at the peak ({fit.estimate.peak_phase})", ("memory", "B"), ("share", "%"))
    return table_of(*columns, rows=rows, rules=(len(rows) - 1,))


def _phases(estimate: MemoryEstimate | FakeEstimate) -> MemoryEstimate | PhaseMemory:
    return estimate.memory if isinstance(estimate, FakeEstimate) else estimate


def _by_phase(estimate: MemoryEstimate | FakeEstimate) -> dict[str, int | None]:
    """The figures of the phases by their names in tables."""
    phases = _phases(estimate)
    return {
        "before the step": phases.after_parameters,
        "forward peak": phases.forward_peak,
        "saved for backward": phases.saved_for_backward,
        "backward peak": phases.backward_peak,
        "optimizer peak": phases.optimizer_peak,
    }


def answer_second(first: MemoryEstimate | FakeEstimate, second: FakeEstimate) -> Answer:
    """The Answer with the prediction by the symbolic model beside the one by fake tensors."""
    others = {**_by_phase(second), "peak": second.peak_bytes}
    table = table_of(
        "two predictions",
        ("symbolic model", "B"),
        ("fake tensors", "B"),
        ("difference", "{:+.3f} %"),
        rows=[
            (name, one, other, (one / other - 1) * 100)
            for name, one in {**_by_phase(first), "peak": first.peak_bytes}.items()
            if one is not None and (other := others[name]) is not None
        ],
    )
    return Answer(study="fit", question="", tables=(table,))


def _states(workload: TextbookWorkload) -> dict[str, int]:
    """Bytes of each parameter that a step needs at any batch size, by what they are for."""
    precision = PRECISIONS[workload.dtype]
    parts = {"parameters": precision.weights}
    if workload.phase != "forward":
        parts["gradients"] = precision.weights
    if workload.phase == "train":
        parts["two moments of AdamW"] = 2 * moment_bytes(workload)
        if masters := state_bytes(workload) - 2 * moment_bytes(workload):
            parts["master weights" if masters == 4 else "rest of master weights"] = masters
    return parts


def _reasons(workload: TextbookWorkload) -> Iterator[str]:
    """The bytes that a step needs for each parameter, at any batch size, multiplied out, and what is largest of what
    its blocks keep."""
    count, parts = parameter_count(workload.model), _states(workload)
    terms = [f"{name} {each} B x {count:,} = {format_bytes(each * count)}" for name, each in parts.items()]
    each = sum(parts.values())
    together = f"; together {each} B x {count:,} = {format_bytes(each * count)}" if len(terms) > 1 else ""
    yield f"At any batch size: {' + '.join(terms)}{together}."
    if workload.phase == "forward" or workload.checkpointing != "none":
        return
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
        each = max(squares, key=lambda tensor: tensor.bytes_each)
        alike = all(tensor.bytes_each == each.bytes_each for tensor in squares)
        words += (
            f"; {format_share(square / block)} of it are the {count} tensors of attention with {_product(squares[0])} "
            f"elements (x {each.itemsize} B = {format_bytes(each.bytes_each)} {'each' if alike else 'at most'}), which "
            "grow with the square of the sequence"
        )
    else:
        words += f"; the largest tensors have {_product(largest)} elements"
    yield words + ". `stepscope fit --tensors` lists them all."


_GROUPS: tuple[tuple[str, Callable[[tuple[str, ...]], bool]], ...] = (
    ("scores", lambda names: names.count("seq_len") == 2 and "heads" in names),
    ("feed-forward", lambda names: "d_ff" in names or "gate_up_width" in names),
    ("stream, norms, q, k, v", lambda names: not {"d_model", "key_width", "qkv_width"}.isdisjoint(names)),
)
"""What blocks keep, by the dimensions of the tensors."""


def _kind_of(tensor: KeptTensor) -> str:
    if tensor.cast_copy:
        return "copies of weights"
    return next((kind for kind, is_one in _GROUPS if is_one(tensor.dimensions)), "rows and masks")


def _terms(workload: TextbookWorkload, estimate: MemoryEstimate | FakeEstimate) -> Table:
    """What a step needs, term by term, each with its formula and its numbers."""
    config, count = workload.model, parameter_count(workload.model)
    rows: list[tuple[Cell, ...]] = [
        (name, "P", f"{count:,} x {each} B", each * count) for name, each in _states(workload).items()
    ]
    if workload.phase != "forward":
        if workload.checkpointing == "none":
            rows += _kept_terms(workload)
        else:
            kept = _phases(estimate).saved_for_backward
            rows.append((f"kept for backward, checkpointing {workload.checkpointing}", "", "", kept))
    if workload.loss == REFERENCE:
        size = PRECISIONS[workload.dtype].products if workload.phase == "forward" else 4
        sizes = (workload.micro_batch_size, workload.seq_len, config.vocabulary)
        numbers = f"{' x '.join(map(str, sizes))} x {size} B"
        rows.append(("logits", "B x S x V", numbers, math.prod(sizes) * size))
    together = sum(size for *_, size in rows if isinstance(size, int))
    rows.append(("together", "", "", together))
    note = (
        "Not all of it is there at one time: gradients come while what is kept goes. The peak below is that of the "
        "step as it is played through, request by request."
    )
    columns = ("term", ("formula", TEXT), ("with its numbers", TEXT), ("memory", "B"))
    return table_of(*columns, rows=rows, rules=(len(rows) - 1,), notes=as_lines(note))


def _kept_terms(workload: TextbookWorkload) -> Iterator[tuple[Cell, ...]]:
    """What all blocks keep for backward, by kind: each kind with its largest tensors multiplied out."""
    layers, by_kind = workload.model.layers, dict[str, list[KeptTensor]]()
    for tensor in kept_by_block(workload):
        by_kind.setdefault(_kind_of(tensor), []).append(tensor)
    for kind, tensors in by_kind.items():
        alike = dict[tuple[tuple[str, ...], tuple[int, ...], int], int]()
        for tensor in tensors:
            key = (tensor.dimensions, tensor.sizes, tensor.itemsize)
            alike[key] = alike.get(key, 0) + tensor.count
        formulas = [
            (
                " x ".join([*[str(n)] * (n > 1), *(_SYMBOLS[name] for name in names)]),
                " x ".join([*[str(n)] * (n > 1), *map(str, sizes), f"{each} B"]),
            )
            for (names, sizes, each), n in alike.items()
        ]
        more = " + ..." if len(formulas) > 1 else ""
        formula, numbers = formulas[0]
        total = layers * sum(tensor.total_bytes for tensor in tensors)
        yield f"kept by blocks: {kind}", f"L x {formula}{more}", f"{layers} x {numbers}{more}", total


def _phase_table(fit: AnyFit, phases: dict[str, int]) -> Table:
    """The figures of a steady step's phases; where it does not fit, with what the memory leaves of each."""
    if fit.fits is not False or fit.budget is None:
        return table_of("phase by phase", ("memory", "B"), rows=phases.items())
    usable = fit.budget.usable_bytes
    peaks = ("before the step", "forward peak", "backward peak", "optimizer peak")
    rows = [(name, size, usable - size if name in peaks else None) for name, size in phases.items()]
    first = f"The first step fails in its {fit.fails_in} phase."
    if fit.workload.phase == "train":
        first = f"{first} It has no optimizer state before its optimizer phase; these are figures of a later step."
    return table_of("phase by phase", ("memory", "B"), ("left", "B"), rows=rows, notes=as_lines(first))


def _product(tensor: KeptTensor) -> str:
    symbols = " x ".join(_SYMBOLS[name] for name in tensor.dimensions)
    return f"{symbols} = {' x '.join(map(str, tensor.sizes))}"


def _ways(fit: AnyFit) -> Iterator[Table]:
    """Single changes with what each leaves and costs, enough or not; and the plans that are none of these."""
    if fit.ways:
        yield table_of(
            "way out",
            ("peak", "B"),
            "fits",
            ("price", PROSE),
            ("option", TEXT),
            rows=[
                (way.change, way.peak_bytes, "yes" if way.fits else "no", way.price, way.options) for way in fit.ways
            ],
            notes=as_lines("What a change costs in time is not known before it is measured."),
        )
    alone = {way.options for way in fit.ways if way.fits}
    plans = [plan for plan in fit.plans if plan.options not in alone]
    if plans or not fit.plans:
        yield _plans(fit, plans)


_YES = {True: "yes", False: "no"}


def _plans(fit: AnyFit, plans: Sequence[Plan]) -> Table:
    if not plans:
        sharded = f", and not with its state sharded over {MOST_GPUS} GPUs"
        return text(
            Line(
                "No change that stepscope knows makes it fit: not all of them together"
                f"{sharded if fit.workload.sizes is not None else ''}. A smaller model, a shorter sequence "
                "or more memory is needed.",
                "care",
            )
        )
    costs = any(plan.extra_flops_fraction is not None for plan in plans)
    return table_of(
        "change that makes it fit",
        ("peak", TEXT),
        *([("FLOPs more", "%")] if costs else []),
        "option",
        rows=[
            (
                plan.change,
                format_bytes(plan.peak_bytes) + (" each" if (plan.gpus or 1) > 1 else ""),
                *([plan.extra_flops_fraction] if costs else []),
                plan.options,
            )
            for plan in plans
        ],
    )


def answer_tensors(workload: TextbookWorkload, kept: Sequence[KeptTensor]) -> Answer:
    """The Answer on what a block keeps, each size with its arithmetic; the residual stream and the scores by name."""
    config = workload.model
    rows: list[tuple[Cell, ...]] = []
    for tensor in kept:
        name = ", ".join(tensor.operators) + (" (copy of a weight)" if tensor.cast_copy else "")
        symbols = " x ".join(_SYMBOLS[part] for part in tensor.dimensions)
        rows.append((name, symbols, _multiplied(tensor.sizes, tensor.itemsize), tensor.count, tensor.total_bytes))
    together = sum(tensor.total_bytes for tensor in kept)
    rows += [
        ("one block", "", "", sum(tensor.count for tensor in kept), together),
        (f"{config.layers} blocks", "", "", None, config.layers * together),
    ]
    columns = ("kept for backward by", "shape", ("size of each", TEXT), ("times", TEXT), ("together", "B"))
    again = f"With checkpointing {workload.checkpointing} a block has all of this only while backward runs it again."
    notes = as_lines(again) if workload.checkpointing != "none" else ()
    table = table_of(*columns, rows=rows, rules=(len(kept),), notes=notes)
    return _answer("What does a block keep for backward?", workload, [_by_name(workload, kept), table])


def answer_held(fit: Fit[FakeEstimate], held: Sequence[HeldTensor]) -> Answer:
    """The Answer on the tensors of a user's step that are alive at its peak, the largest first."""
    shown = [each for each in held if each.total_bytes >= _LEAST_SHOWN * fit.peak_bytes]
    rows: list[tuple[Cell, ...]] = []
    for each in shown:
        shape = f"{each.dtype}[{', '.join(map(str, each.shape))}]" if each.dtype else ""
        rows.append((each.category, each.name, shape, each.count, each.total_bytes))
    if left := held[len(shown) :]:
        rows.append(("smaller ones", "", "", sum(each.count for each in left), sum(each.total_bytes for each in left)))
    rows.append(("together", "", "", sum(each.count for each in held), fit.peak_bytes))
    columns = (
        f"at the peak ({fit.estimate.peak_phase})",
        ("tensor", TEXT),
        ("shape", TEXT),
        ("times", ","),
        ("memory", "B"),
    )
    table = table_of(*columns, rows=rows, rules=(len(rows) - 1,))
    lead = text(Line(f"{peak_in_words(fit)}.", "strong"), *doubts(fit))
    return _answer("What does the step hold at its peak?", fit.workload, [lead, table])


_LEAST_SHOWN = 0.002
"""Share of the peak from which tensors that are alike have a row of their own."""


def _multiplied(sizes: Sequence[int], itemsize: int) -> str:
    return f"{' x '.join(map(str, sizes))} x {itemsize} B = {format_bytes(math.prod(sizes) * itemsize)}"


def _by_name(workload: TextbookWorkload, kept: Sequence[KeptTensor]) -> Table:
    """The tensors that questions ask for by name, multiplied out: of the residual stream, and the saved scores."""
    batch, length, config = workload.micro_batch_size, workload.seq_len, workload.model
    residual = PRECISIONS[workload.dtype].residual
    of_stream = [
        tensor.count
        for tensor in kept
        if tensor.dimensions == ("batch_size", "seq_len", "d_model")
        and (tensor.itemsize, tensor.operators[0]) in [(residual, norm) for norm in _NORMS]
    ]
    stream = _multiplied((batch, length, config.d_model), residual)
    rows: list[tuple[Cell, ...]] = [("a tensor of the residual stream", "B x S x M", stream, sum(of_stream))]
    scores = [tensor for tensor in kept if _kind_of(tensor) == "scores"]
    for tensor in scores:
        name = f"a saved matrix of scores ({', '.join(tensor.operators)})"
        rows.append((name, "B x H x S x S", _multiplied(tensor.sizes, tensor.itemsize), tensor.count))
    if not scores:
        whole = _multiplied((batch, config.heads, length, length), PRECISIONS[workload.dtype].products)
        rows.append((f"a matrix of scores, which {workload.attention} does not keep", "B x H x S x S", whole, 0))
    return table_of("tensor", "shape", ("size of each", TEXT), ("kept by a block", TEXT), rows=rows)


_NORMS = ("Pow", "Norm", "RmsNorm", "AddRmsNorm")
"""Operators of a norm that keep what it is given: the residual stream, or a copy of it in fp32."""


def answer_largest(rows: Sequence[Largest], memory: str) -> Answer:
    """The Answer on the largest batch and the longest sequence of each model."""
    first = rows[0].workload
    table = table_of(
        "model",
        ("parameters", ","),
        (f"batch at sequence {first.seq_len}", TEXT),
        (f"sequence at batch {first.batch_size}", TEXT),
        rows=[
            (
                largest.workload.model.name,
                parameter_count(largest.workload.model),
                str(largest.batch_size or "none"),
                str(largest.seq_len or "none"),
            )
            for largest in rows
        ],
    )
    choices = describe_workload(first).split(" tokens, ", 1)[1]
    lead = (Line(f"The largest that fits into {memory}: {choices}."),)
    return Answer(study="fit", question="What is the largest that fits?", lead=lead, tables=(table,))


# Predictions beside what stored runs measured.


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One run beside its prediction."""

    run_id: str
    workload: TextbookWorkload
    predicted: MemoryEstimate
    measured_peak: int | None
    """Measured peak bytes; None where the run ended before its peak."""
    measured_reserved: int | None
    ran: bool
    foretold: bool | None
    """Whether it was predicted to fit into the memory it had; None where that is not known."""
    error: float | None
    """Predicted over measured peak, less one."""


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """All comparisons of predicted with measured memory, and their errors."""

    median_error: float | None
    worst_error: float | None
    verdicts: int
    """Runs whose memory is known, so that a verdict could be right or wrong."""
    verdicts_right: int
    wrongly_said_to_fit: tuple[str, ...]
    """Runs that were predicted to fit and ran out of memory."""
    comparisons: tuple[Comparison, ...]
    apart: tuple[Comparison, ...] = ()
    """Runs that were used to correct the symbolic model: shown, and never counted."""


def accuracy_of(comparisons: Sequence[Comparison], apart: Sequence[Comparison] = ()) -> Accuracy:
    """The errors of comparisons, and how many verdicts were right."""
    errors = [one.error for one in comparisons if one.error is not None]
    judged = [one for one in comparisons if one.foretold is not None]
    return Accuracy(
        median_error=statistics.median(map(abs, errors)) if errors else None,
        worst_error=max(errors, key=abs, default=None),
        verdicts=len(judged),
        verdicts_right=sum(one.foretold == one.ran for one in judged),
        wrongly_said_to_fit=tuple(one.run_id for one in judged if one.foretold and not one.ran),
        comparisons=tuple(comparisons),
        apart=tuple(apart),
    )


def compare(runs: Sequence[Run], apart: Sequence[Run] = ()) -> Accuracy:
    """Every run on a GPU that finished its steps or ran out of memory, beside its prediction."""
    return accuracy_of(tuple(_compared(runs)), tuple(_compared(apart)))


def _compared(runs: Sequence[Run]) -> Iterator[Comparison]:
    for run in runs:
        workload, memory, environment = run.workload, run.evidence.memory, run.environment
        peak = memory.allocated_peak if memory else None
        ended = run.status == "out-of-memory" or (run.status == "done" and peak is not None)
        if not is_predicted(workload) or environment is None or environment.device_type != "cuda" or not ended:
            continue
        budget = None
        if environment.memory_limit_bytes:
            budget = budget_of_memory(environment.memory_limit_bytes)
        elif environment.memory_bytes:
            budget = budget_of_total(environment.memory_bytes, environment.device_name)
        predicted = estimate(workload)
        yield Comparison(
            run_id=run.id,
            workload=workload,
            predicted=predicted,
            measured_peak=peak,
            measured_reserved=memory.reserved_peak if memory else None,
            ran=run.status == "done",
            foretold=will_fit(workload, budget, predicted) if budget is not None else None,
            error=predicted.peak_bytes / peak - 1 if peak else None,
        )


def answer_accuracy(accuracy: Accuracy) -> Answer:
    """The Answer with each run beside its prediction, and the errors over all runs."""
    tables = [_comparison_table("cell", accuracy.comparisons, accuracy_sentences(accuracy))]
    if accuracy.apart:
        tables.append(_comparison_table("apart: corrected by", accuracy.apart))
    return Answer(study="fit", question="", tables=tuple(tables), panels=accuracy_panels(accuracy))


def _comparison_table(head: str, comparisons: Sequence[Comparison], notes: Sequence[str] = ()) -> Table:
    verdicts = {None: "", True: "fits", False: "does not fit"}
    return table_of(
        head, ("measured", "B"), ("predicted", "B"), ("error", "{:+.2f} %"), "verdict",
        rows=[
            (
                cell_name(each.workload), each.measured_peak or "OOM", each.predicted.peak_bytes,
                each.error * 100 if each.error is not None else None,
                verdicts[each.foretold] + ("" if each.foretold in (None, each.ran) else ", wrongly"),
            )
            for each in comparisons
        ],
        notes=as_lines(*notes),
    )  # fmt: skip


def accuracy_sentences(accuracy: Accuracy) -> list[str]:
    """Sentences on the median and the worst error, and on wrong verdicts."""
    sentences: list[str] = []
    judged = [each for each in accuracy.comparisons if each.error is not None]
    worst = max(judged, key=lambda each: abs(each.error or 0.0), default=None)
    if worst is not None:
        sentences.append(
            f"{len(judged)} peaks predicted: the median error is {(accuracy.median_error or 0.0) * 100:.3f} %, the "
            f"worst {(worst.error or 0.0) * 100:+.2f} % ({cell_name(worst.workload)})."
        )
    if accuracy.verdicts:
        wrong = len(accuracy.wrongly_said_to_fit)
        sentences.append(
            f"{accuracy.verdicts_right} of {accuracy.verdicts} verdicts came true; "
            + (f"{wrong} said to fit ran out of memory." if wrong else "none that was said to fit ran out of memory.")
        )
    return sentences


BANDS = (0.02, 0.06)
"""Shares of the measured peak: what the median error is held to, and what the worst is."""
_WIDER = 1.25
"""The axes go so much beyond the points."""


def accuracy_panels(accuracy: Accuracy) -> tuple[Panel, ...]:
    """Every run whose peak was measured; those that the prediction was corrected by stand apart."""
    judged = [each for each in accuracy.comparisons if each.measured_peak]
    apart = [each for each in accuracy.apart if each.measured_peak]
    both = [(each, False) for each in judged] + [(each, True) for each in apart]
    if not both:
        return ()
    peaks = [size / GIB for each, _ in both for size in (each.predicted.peak_bytes, each.measured_peak) if size]
    ends = (min(peaks) / _WIDER, max(peaks) * _WIDER)
    reach = 100 * _WIDER * max(BANDS[-1], *(abs(each.error or 0.0) for each, _ in both))
    frame = Frame(
        heading="Peak memory, predicted and measured",
        note=_counted(accuracy, len(apart)),
        line_title="model",
        style_title="what ran",
        x_ends=ends,
    )
    about_diagonal = [
        Guide(x=ends, y=tuple(at * (1 - band) for at in ends), to=tuple(at * (1 + band) for at in ends))
        for band in reversed(BANDS)
    ]
    about_zero = [
        Guide(x=ends, y=(-100 * band,) * 2, to=(100 * band,) * 2, name=f"±{100 * band:g} %") for band in reversed(BANDS)
    ]
    with_ends = msgspec.structs.replace(frame, y_ends=ends, guides=(*about_diagonal, Guide(x=ends, y=ends)))

    def points(height: Callable[[Comparison], float]) -> tuple[Point, ...]:
        return tuple(
            Point(
                x=(each.measured_peak or 0) / GIB, y=height(each), line=each.workload.model.name,
                style=_what_ran(each.workload), name=cell_name(each.workload), apart=hollow,
            )
            for each, hollow in both
        )  # fmt: skip

    upper = Panel(
        x_title="measured peak (GiB)",
        y_title="predicted peak (GiB)",
        kind="points",
        x_log=True,
        y_log=True,
        points=points(lambda each: each.predicted.peak_bytes / GIB),
        frame=with_ends,
    )
    lower = msgspec.structs.replace(
        upper,
        y_title="error of the prediction (%)",
        y_log=False,
        points=points(lambda each: 100 * (each.error or 0.0)),
        frame=msgspec.structs.replace(frame, y_ends=(-reach, reach), guides=(*about_zero, Guide(y=(0.0,)))),
    )
    return upper, lower


def _what_ran(workload: TextbookWorkload) -> str:
    """Phase and kind of step, in words few enough for shapes."""
    phase = "inference" if workload.phase == "forward" else "training"
    compiled = ", compiled" if workload.compile != "eager" else ""
    checkpointed = ", checkpointed" if workload.checkpointing != "none" else ""
    return phase + compiled + checkpointed


def _counted(accuracy: Accuracy, apart: int) -> str:
    """How many cells judge the prediction, and their median and worst error; how many it was corrected by."""
    corrected = f"{apart} that it was corrected by, hollow" if apart else ""
    worst, median = accuracy.worst_error, accuracy.median_error
    if worst is None or median is None:
        return corrected
    count = sum(each.error is not None for each in accuracy.comparisons)
    judged = f"{count} cells judge: median error {median:.2%}, worst {abs(worst):.2%}"
    return "; ".join(part for part in (judged.replace("%", " %"), corrected) if part)
