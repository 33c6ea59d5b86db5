"""Whether a step of a user's module fits: its code runs with the user's rights, in a process of its own."""

import contextlib
import ctypes
import gc
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stepscope.allocations.prediction.answer import AnyFit, doubts
from stepscope.allocations.prediction.estimate import (
    DeviceType,
    HeldTensor,
    check_operands,
    estimate,
    estimate_in_blocks,
    rate_in_blocks,
)
from stepscope.allocations.prediction.fit import Budget, FakeEstimate, Fit, SymbolicPredictor, judge
from stepscope.core.answer import Answer, Cell, Line, table_of
from stepscope.core.device_spec import DeviceSpec, device_named
from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import MemoryCategory
from stepscope.core.float_formats import BLOCK_FORMATS, FORMATS, MULTIPLIED_BLOCKS, BlockFormat
from stepscope.core.formulas.spelled import describe_model, describe_workload
from stepscope.core.formulas.transformer import forward_flops, linear_flops, step_flops
from stepscope.core.precisions import Dtype
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.units import counted, format_bytes
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload, Workload
from stepscope.engine.request import Stage, Tell
from stepscope.engine.user_code import answer_apart, ask_apart, tell_asker

if TYPE_CHECKING:
    from torch import nn

    from stepscope.recording.fake_memory import FakeMemory
    from stepscope.recording.step import Recorder
    from stepscope.training.user_module.module_step import UserModule

_Kind = TypeVar("_Kind")


class Request(msgspec.Struct, frozen=True):
    """What the process of its own is asked."""

    workload: FactoryWorkload
    budgets: tuple[Budget, ...]
    device_type: DeviceType
    search: bool
    tensors: bool = False
    """Whether the tensors at the peak are asked for, in place of what fits."""
    forms: tuple[BlockFormat, ...] = ()
    """Formats of blocks whose operands are asked for, in place of what fits."""


class Held(msgspec.Struct, frozen=True):
    """The prediction of a step's peak, and the tensors that are alive at it, the largest first."""

    fit: Fit[FakeEstimate]
    tensors: tuple[HeldTensor, ...]


class InBlocks(msgspec.Struct, frozen=True):
    """What a step holds with the operands of linear layers in a format of blocks."""

    form: BlockFormat | None
    """None for those of its dtype."""
    saved_bytes: int | None
    """What forward keeps for backward."""
    peak_bytes: int
    flops: int
    """FLOPs of a step's products whose operands are in the format."""
    other_flops: int


class OwnInBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """What a step holds and multiplies, with operands of its dtype and in formats of blocks."""

    fit: Fit[FakeEstimate]
    """The prediction without blocks."""
    states: dict[MemoryCategory, int]
    """Bytes on the device before the optimizer's step, by category."""
    rows: tuple[InBlocks, ...]
    layers: int
    """Linear layers whose products take operands in blocks, in the format that fewest take."""
    left: dict[str, str]
    """Why others do not, by path."""
    unknown: tuple[str, ...]
    """Operators whose FLOPs nobody knows, which are not counted."""


_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""


def fit_apart(
    workload: FactoryWorkload,
    budgets: Sequence[Budget],
    device_type: DeviceType = "cuda",
    *,
    search: bool = True,
    tell: Tell | None = None,
    know: Callable[[list[Fit[FakeEstimate]]], object] = lambda _: None,
) -> list[Fit[FakeEstimate]]:
    """The prediction of a step for each budget, or of its peak alone where there is none; with `search` also what would
    make it fit, and the largest sizes. Raises InputError for what cannot be predicted.

    tell: is told what is tried. know: with it, is called with the predictions as far as they are known, whenever that
    is more.
    """
    return _asked(Request(workload, tuple(budgets), device_type, search), list[Fit[FakeEstimate]], tell, know)


def held_apart(workload: FactoryWorkload, tell: Tell) -> Held:
    """What a step holds at its peak on a GPU. Raises InputError for what cannot be predicted."""
    return _asked(Request(workload, (), "cuda", search=False, tensors=True), Held, tell)


def in_blocks_apart(workload: FactoryWorkload, forms: Sequence[BlockFormat], tell: Tell) -> OwnInBlocks:
    """What a step holds and multiplies on a GPU by the format of its operands. Raises InputError as `in_blocks`."""
    check_operands(workload)
    return _asked(Request(workload, (), "cuda", search=False, forms=tuple(forms)), OwnInBlocks, tell)


def _asked(
    request: Request, kind: type[_Kind], tell: Tell | None, know: Callable[[Any], object] = lambda _: None
) -> _Kind:
    """What the request's process answers."""
    factory = request.workload.factory
    what = f"{'--model' if factory.endswith('.json') else '--module'} {factory}"

    def hear(line: bytes) -> None:
        if line.startswith(b"["):
            know(msgspec.json.decode(line, type=list[Fit[FakeEstimate]]))
        elif tell is not None:
            tell(msgspec.json.decode(line, type=Stage))

    if tell is not None:
        tell(Stage(name=f"loading {factory.rpartition(':')[0] or factory}"))
    asked = msgspec.json.encode(request).decode()
    try:
        answer = ask_apart(__name__, asked, what=what, hears=None if tell is None else hear)
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise InputError(f"{what} left no prediction: {error}") from error


def main(request: str) -> str:
    """The prediction as JSON, for `fit_apart`."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # a C library other than glibc
        # A block from 64 KiB on is given back when it is freed: of a step on fake tensors a fifth of the memory would
        # stay, in the gaps that masks and other real tensors leave.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 * 1024)
    gc.disable()
    from stepscope.engine.fake_module import fit_module

    options = msgspec.json.decode(request, type=Request)
    if options.workload.phase == "train":
        importlib.import_module("torch._dynamo")  # an optimizer's first update imports it
    # Each step that is tried ends with a collection: through all that is imported it would take longer than the step.
    gc.freeze()
    gc.enable()

    def tell(what: Stage | list[Fit[FakeEstimate]]) -> None:
        tell_asker(msgspec.json.encode(what))

    if options.tensors:
        return msgspec.json.encode(held_at_peak(options, tell)).decode()
    if options.forms:
        return msgspec.json.encode(in_blocks(options.workload, options.forms, tell)).decode()
    fits = fit_module(
        options.workload, options.budgets, options.device_type, search=options.search, know=tell, tell=tell
    )
    return msgspec.json.encode(fits).decode()


def held_at_peak(request: Request, tell: Tell = lambda _: None) -> Held:
    """The tensors at the peak. Those that are alike but for numbers in their names, as of layers, are one row."""
    from stepscope.engine.fake_module import FakePredictor, at_peak

    predictor = FakePredictor(request.workload, request.device_type, None, tell, describes=True)
    alike: dict[tuple[object, ...], HeldTensor] = {}
    for index, given in at_peak(predictor.first)[1].items():
        each = predictor.first.watch.allocations[index]
        name = re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", each.name)
        if each.category not in _NAMED:
            operator = each.operator.removeprefix("aten.").partition(".")[0]
            name = f"{operator} ({each.name})" if each.name else operator
        key = (each.category, name, each.shape, each.dtype, each.nbytes)
        before = alike.get(key)
        alike[key] = HeldTensor(
            category=each.category,
            name=name,
            shape=each.shape,
            dtype=each.dtype,
            bytes_each=each.nbytes,
            count=1 + (before.count if before else 0),
            total_bytes=given + (before.total_bytes if before else 0),
        )
    return Held(judge(predictor, None), tuple(sorted(alike.values(), key=lambda each: -each.total_bytes)))


_NAMED = ("parameters", "frozen quantised weights", "gradients", "optimizer state", "inputs")
"""Categories whose tensors have names of their own."""


def in_blocks(
    workload: FactoryWorkload,
    forms: Sequence[BlockFormat],
    tell: Tell = lambda _: None,
    module: "Callable[[], UserModule] | None" = None,
) -> OwnInBlocks:
    """What a step holds and multiplies by the format of its operands: one prediction for each.

    module: as in `fit_module`. Raises InputError for what cannot be predicted, a dtype without operands of 16 bits, and
    a format that no linear layer takes.
    """
    from stepscope.engine.fake_module import FakePredictor
    from stepscope.recording.flops import FlopCounts
    from stepscope.training.scaled_products import OperandSizes

    check_operands(workload)
    rows: list[InBlocks] = []
    few: list[OperandSizes] = []

    def predicted(form: BlockFormat | None, told: Tell) -> tuple[FakePredictor, FlopCounts]:
        """Add the row of a format, or of none."""
        counts, sizes = FlopCounts("half"), None if form is None else OperandSizes(form)

        @contextlib.contextmanager
        def around(model: "nn.Module") -> "Iterator[Sequence[Recorder]]":
            with contextlib.nullcontext() if sizes is None else sizes.applied(model), counts.counting():
                yield (counts,) if sizes is None else (counts, sizes)

        found = FakePredictor(workload, "cuda", module, told, around=around)
        if sizes is not None:
            few.append(sizes)
            if not sizes.taken:
                path, why = next(iter(sizes.left.items()), ("", ""))
                words = f"{path}: {why}" if why else "its step calls none"
                whose = f"no linear layer of {found.workload.name} takes operands in {sizes.form.name}"
                raise InputError(f"{whose} ({words}): change the sizes")
        # Where a step has many micro-batches, the prediction runs only a few of them.
        times = workload.accumulation / sum(phase.name == FORWARD for phase in found.first.watch.phases)
        work = {phase: each.flops for phase, each in counts.work.items()}
        others = sum(work.values()) + (times - 1) * (work.get(FORWARD, 0) + work.get(BACKWARD, 0))
        memory, taken = found.estimate.memory, round(times * sizes.flops) if sizes else 0
        rows.append(InBlocks(form, memory.saved_for_backward, found.estimate.peak_bytes, taken, round(others)))
        return found, counts

    plain, counts = predicted(None, tell)
    for form in forms:
        tell(Stage(name=f"running a step with operands in {form.name}"))
        predicted(form, lambda _: None)
    fewest = min(few, key=lambda sizes: len(sizes.taken))
    return OwnInBlocks(
        fit=judge(plain, None),
        states=_states(plain.first.watch),
        rows=tuple(rows),
        layers=len(fewest.taken),
        left=fewest.left,
        unknown=tuple(sorted(counts.unknown)),
    )


def _states(watch: "FakeMemory") -> dict[MemoryCategory, int]:
    """Bytes on the device when the optimizer begins, or the step ends, by category."""
    last = watch.phases[-1]
    alive: set[int] = set()
    for event in watch.events[: last.start if last.name == OPTIMIZER else last.end]:
        if event >= 0:
            alive.add(event)
        else:
            alive.remove(~event)
    states: Counter[MemoryCategory] = Counter()
    for each in (watch.allocations[index] for index in alive):
        states[each.category] += each.nbytes * each.on_device
    return dict(states)


_RATES_SAID = ("bf16", "fp8", "fp6", "fp4")
"""The datasheet's rates that the Answer names."""


def textbook_in_blocks(
    workload: TextbookWorkload, forms: Sequence[BlockFormat], spec: DeviceSpec | None, usable_bytes: int | None
) -> Answer:
    """The Answer on what a step of the textbook's holds by the format of its operands, and the least time of its
    products. Raises InputError for a step that has no such products."""
    check_operands(workload)
    model, passes = workload.model, step_flops(workload) // forward_flops(workload)
    linear, plain = passes * linear_flops(workload), estimate(workload)
    for form in forms:
        if (why := form.unfit(model.d_model, model.d_ff, model.key_width, workload.tokens)) is not None:
            raise InputError(f"{why} ({form.name}): change the sizes")
    rows: list[InBlocks] = []
    for form in (None, *forms):
        found, few = (plain, 0) if form is None else (estimate_in_blocks(workload, form), linear)
        others = step_flops(workload) - few
        rows.append(InBlocks(form, found.saved_for_backward, found.peak_bytes, few, others))
    stay = "A block's linear layers take them; attention and the head stay in 16 bits."
    states = plain.by_phase.get(OPTIMIZER, plain.categories)
    return answer_in_blocks(workload, states, rows, stay, (spec, usable_bytes))


def answer_in_blocks(
    workload: Workload,
    states: Mapping[MemoryCategory, int],
    rows: Sequence[InBlocks],
    stay: str,
    of_device: tuple[DeviceSpec | None, int | None],
) -> Answer:
    """The Answer on what a step holds by the format of its operands, and the least time of its products by the rates of
    a datasheet. states: bytes that do not depend on it. stay: which products take them, in words. of_device: it, and
    how much of its memory is usable."""
    spec, usable_bytes = of_device
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        element = 16 if row.form is None else FORMATS[row.form.element].stored_bits
        bits = (element, 0) if row.form is None else (row.form.bits, row.form.bits - element)
        left = () if usable_bytes is None else (usable_bytes - row.peak_bytes,)
        times = () if spec is None else (least_product_s(row, workload.dtype, spec),)
        name = row.form.name if row.form else workload.dtype
        cells.append((name, *bits, row.saved_bytes, row.peak_bytes, *left, *times))
    columns = ["operands", ("bits of a number", ""), ("of its scale", ""), ("kept for backward", "B"), ("peak", "B")]
    columns += [("left", "B")] if usable_bytes is not None else []
    columns += [("products take at least", "s")] if spec is not None else []
    held = [f"{name} {format_bytes(states[name])}" for name in _STATES if states.get(name)]
    kept = "Their inputs are kept in the format, with its scales; layers of one input keep it once. "
    kept = kept if rows[0].saved_bytes else ""
    lead = [
        Line(f"Predicted for {describe_model(workload)}, {describe_workload(workload)}.", "strong"),
        Line(f"Whatever the operands: {', '.join(held)}. {stay} {kept}No run was compared with these figures."),
    ]
    if spec is not None:
        rates = {name: rate for name, rate in spec.peak_flops_per_s.items() if name in _RATES_SAID}
        said = ", ".join(f"{rate / 1e12:,.6g} of {name}" for name, rate in rates.items())
        without = (
            f" Without one: {spec.name} does not multiply such blocks." if any(row[-1] is None for row in cells) else ""
        )
        again = "without" if workload.sizes is not None else "with"
        lead.append(
            Line(
                f"The time is that of all products at the datasheet's rates, which no step reaches, {again} what is "
                f"computed again: {said} TFLOP/s ({spec.source}).{without}"
            )
        )
    question = "What does the step hold with operands in blocks of few bits?"
    return Answer(study="fit", question=question, lead=tuple(lead), tables=(table_of(*columns, rows=cells),))


_STATES: tuple[MemoryCategory, ...] = ("parameters", "frozen quantised weights", "gradients", "optimizer state")
"""What a step holds whatever the format of its operands, in the order in which it is named."""


def least_product_s(row: InBlocks, dtype: Dtype, spec: DeviceSpec) -> float | None:
    """Seconds of a step's products at a datasheet's rates: those in blocks at the format's, all others at the dtype's.
    None where the device does not multiply such blocks."""
    wide = spec.peak_for(dtype)
    few = wide if row.form is None else rate_in_blocks(row.form, spec)
    return None if few is None or wide is None else row.flops / few + row.other_flops / wide


def fit_in_blocks(
    step: Workload,
    recipe: Sequence[str],
    budgets: Sequence[Budget],
    devices: Sequence[str],
    words: tuple[str, str],
    *,
    dtype_is_given: bool,
    module: "Callable[[], UserModule] | None" = None,
    tell: Tell = lambda _: None,
) -> tuple[Answer, AnyFit]:
    """The Answer on a step with operands in these formats of blocks, and the prediction of it without. A dtype that is
    not given is one whose operands have 16 bits.

    words: what says the formats and the devices, in messages. module: as in `in_blocks`; of another workload of a
    user's module, its factory runs in a process of its own. Raises InputError for several devices, and for what has no
    such products.
    """
    if not recipe:
        raise InputError(f"{words[0]} is an empty list: name at least one format of blocks")
    if len(budgets) > 1:
        raise InputError(f"{words[0]} looks at one device, and {words[1]} names {len(budgets)}: name one")
    forms = [BLOCK_FORMATS[choose(name, MULTIPLIED_BLOCKS, "recipe")] for name in dict.fromkeys(recipe)]
    spec = device_named(devices[0]) if devices else None
    usable = budgets[0].usable_bytes if budgets else None
    if not dtype_is_given:
        step = msgspec.structs.replace(step, dtype="bf16-master" if isinstance(step, TextbookWorkload) else "bf16")
    if isinstance(step, TextbookWorkload):
        return textbook_in_blocks(step, forms, spec, usable), judge(SymbolicPredictor(step), None)
    assert isinstance(step, FactoryWorkload)
    found = in_blocks_apart(step, forms, tell) if module is None else in_blocks(step, forms, tell, module)
    return answer_own_in_blocks(found, spec, usable), found.fit


def answer_own_in_blocks(found: OwnInBlocks, spec: DeviceSpec | None, usable_bytes: int | None) -> Answer:
    """The Answer on what a step of a user's module holds by the format of its operands."""
    stay = f"{counted(found.layers, 'linear layer')} take them; all other products stay in 16 bits"
    if found.left:
        path, why = next(iter(found.left.items()))
        stay += f", among them {counted(len(found.left), 'linear layer')}, as {path}: {why}"
    answer = answer_in_blocks(found.fit.workload, found.states, found.rows, f"{stay}.", (spec, usable_bytes))
    lead = [*answer.lead, *doubts(found.fit)]
    if found.unknown and spec is not None:
        lead.append(Line(f"Nobody knows the FLOPs of {', '.join(found.unknown)}: the time leaves them out.", "care"))
    return msgspec.structs.replace(answer, lead=tuple(lead))


if __name__ == "__main__":
    answer_apart(main)
