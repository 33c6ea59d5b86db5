"""What does each graph break and each recompilation of a user's module cost? Ranked, and what follows.

The module is compiled and timed in a process of its own.
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import msgspec

from stepscope.core.answer import Answer, Cell, Finding, Table, error, measured_answer, note, warning
from stepscope.core.errors import InputError
from stepscope.core.figures import digits, median_ms, milliseconds
from stepscope.core.run import Settings
from stepscope.core.samples import Ratio
from stepscope.core.study_results import CompiledStep, CompilePrices, GraphBreak, PricedBreak, Recompilation
from stepscope.core.units import counted, format_bytes, format_seconds
from stepscope.core.workloads import FactoryWorkload
from stepscope.engine.sweep_plan import Cell as SweepCell
from stepscope.engine.user_code import answer_apart, ask_apart
from stepscope.questions.comparison import table_of_rows, times_as_fast, within

BREAKS, AGAIN, SHAPES = (
    "What each graph break costs a step in which no other could be avoided, the dearest first",
    "What was compiled again, the slowest first",
    "Compiled as it is, without the breaks that can be avoided, and for any shape",
)
_SHOWN = 12
_NAMED = 3
_CLEAN = "breaks avoided"


def price_of_breaks(cells: Sequence[SweepCell], device: str) -> Answer:
    """The price of each graph break and recompilation of the one module in these cells."""
    if len(cells) > 1:
        raise InputError("--prices takes one workload: give one value for each option")
    workload = cells[0].workload
    assert isinstance(workload, FactoryWorkload)
    return answer_prices(compile_prices(workload, device, cells[0].settings))


def answer_prices(prices: CompilePrices) -> Answer:
    """The whole answer, of a module's step."""
    slowest = sorted(prices.recompilations, key=lambda each: (-each.seconds, each.place))
    again = Table(
        title=AGAIN,
        columns=("where", "function", "guard that failed", "in step", "s"),
        rows=tuple((one.place, one.function, one.guard, one.step, digits(one.seconds)) for one in slowest[:_SHOWN]),
    )
    return measured_answer(
        prices.environment,
        study="compile",
        question=f"What does each graph break and each recompilation of {prices.module} cost?",
        date=prices.date,
        settings={"module": prices.module, "steps watched": prices.steps},
        tables=(_breaks(prices), again, _variants(prices)),
        findings=chain(_findings(prices), _recompilations(prices, slowest)),
    )


def _breaks(prices: CompilePrices) -> Table:
    rows: list[dict[str, Cell]] = []
    for each in prices.ranked:
        slow, fast = each.with_them, each.without
        peaks = [step.peak_bytes if step else None for step in (slow, fast)]
        rows.append(
            {
                "where": ", ".join(dict.fromkeys(one.place for one in each.breaks)),
                "why": why(each.breaks[0]),
                "avoided by": each.how or "nothing here",
                "pieces with it": slow.pieces if slow else None,
                "without": fast.pieces if fast else None,
                "saved B more": each.saved_bytes,
                "peak B more": peaks[0] - peaks[1] if peaks[0] is not None and peaks[1] is not None else None,
                "ms with it": median_ms(slow.samples) if slow else None,
                "ms without": median_ms(fast.samples) if fast else None,
                "costs ms": milliseconds(each.decided_s) if each.decided_s else None,
                **within("without it, times as fast", "", speed_up(slow, fast)),
                "its function eagerly ms": median_ms(each.eagerly.samples) if each.eagerly else None,
                "price": f"not measurable: {each.why_not}" if each.why_not else None,
            }
        )
    return table_of_rows(BREAKS, rows, known=True)


def _variants(prices: CompilePrices) -> Table:
    named = {"as it is": prices.as_it_is, _CLEAN: prices.clean, "dynamic=True": prices.dynamic}
    rows: list[dict[str, Cell]] = []
    for name, step in named.items():
        if step is None or (name == _CLEAN and step == prices.as_it_is):
            continue
        ratio = speed_up(prices.as_it_is, step) if step is not prices.as_it_is else None
        rows.append(
            {
                "compiled": name,
                "pieces": step.pieces,
                "graphs": step.graphs,
                "compiling s": None if name == _CLEAN else digits(step.compile_s),
                "saved B": step.saved_bytes,
                "peak B": step.peak_bytes,
                "ms": median_ms(step.samples),
                **within("times as fast", "", ratio),
            }
        )
    return table_of_rows(SHAPES, rows, known=True)


def why(one: GraphBreak) -> str:
    """The first words of dynamo's reason, and what it was about."""
    head, _, explained = one.reason.partition(" Explanation:")
    about = re.search(r"`([\w.]+)`", explained)
    return f"{head[:120]}: {about[1]}" if about and about[1] not in head else head[:120]


def speed_up(slow: CompiledStep | None, fast: CompiledStep | None) -> Ratio | None:
    """How many times as fast the second step is; None where one was not timed."""
    if slow is None or fast is None or slow.samples is None or fast.samples is None:
        return None
    return fast.samples.speedup_over(slow.samples)


def _findings(prices: CompilePrices) -> Iterator[Finding]:
    priced = [each for each in prices.ranked if not each.why_not]
    for each in priced[:_NAMED]:
        yield _price(each)
    for each in prices.breaks:
        if each.why_not:
            eagerly = speed_up(prices.clean, each.eagerly)
            faster = times_as_fast(eagerly, ".2f", "[]") if eagerly else ""
            alone = f" Left to run eagerly, its function makes the step {faster}." if faster else ""
            yield note(
                "break-without-price",
                f"What the graph break at {each.breaks[0].place} costs is not measurable: {each.why_not} "
                f"({why(each.breaks[0])}).{alone}",
            )
    if not prices.breaks:
        yield note("no-graph-break", "Nothing breaks the graph of the step.")


def _price(each: PricedBreak) -> Finding:
    assert each.with_them is not None and each.without is not None
    places = ", ".join(dict.fromkeys(one.place for one in each.breaks))
    ratio = speed_up(each.with_them, each.without)
    faster = times_as_fast(ratio, ".2f", "[]") if ratio else ""
    if ratio is None:
        cost = "was not timed"
    elif not each.decided_s:
        cost = f"costs no time that can be told ({ratio.why_undecided})"
    elif each.decided_s > 0:
        cost = f"costs {format_seconds(each.decided_s)} a step: without it the step is {faster}"
    else:
        cost = f"wins {format_seconds(-each.decided_s)} a step: without it the step is {faster}"
    saved = each.saved_bytes
    memory = f" It keeps {format_bytes(abs(saved))} {'more' if saved > 0 else 'less'} for backward." if saved else ""
    return (warning if each.decided_s > 0 else note)(
        "break-price",
        f"The graph break at {places} ({why(each.breaks[0])}) {cost}. A forward calls {each.with_them.pieces:g} "
        f"compiled graphs with it, {each.without.pieces:g} without.{memory}",
        {"costs_s": each.decided_s, "pieces": each.pieces, "saved_bytes": saved},
        f"torch._dynamo.config.{each.how}, or leave the line out of forward",
    )


def _recompilations(prices: CompilePrices, again: Sequence[Recompilation]) -> Iterator[Finding]:
    """What was compiled again, the slowest first, and what one graph for any shape would save."""
    if prices.gave_up_at:
        yield error(
            "recompile-limit",
            f"torch.compile reached its limit of recompilations in the first {prices.steps} steps, and ran a function "
            f"eagerly from there on. The guard that failed: {prices.gave_up_at}.",
            {"recompilations": len(again)},
            "inputs of fewer shapes; torch._dynamo.mark_dynamic for a dimension that changes; "
            "torch._dynamo.config.recompile_limit",
        )
    if not again:
        return
    first, total = again[0], sum(each.seconds for each in prices.recompilations)
    steps = len({each.step for each in again})
    yield warning(
        "recompilation-price",
        f"{counted(len(again), 'recompilation')} took {format_seconds(total)} and delayed {steps} of the first "
        f"{prices.steps} steps. The slowest, {format_seconds(first.seconds)}, was of {first.function} at "
        f"{first.place}: {first.guard}.",
        {"recompilations": len(again), "seconds": total, "steps": steps},
        "inputs of fewer shapes; torch._dynamo.mark_dynamic for a dimension that changes",
    )
    dynamic = prices.dynamic
    if dynamic is None:
        return
    ratio = speed_up(prices.as_it_is, dynamic)
    times = "" if ratio is None else f"; the step is {times_as_fast(ratio, '.2f', '[]')}"
    if ratio is not None and ratio.undecided:
        times = f"; whether the step is faster cannot be told ({ratio.why_undecided})"
    yield note(
        "dynamic-shapes",
        f"Compiled with dynamic=True, {counted(dynamic.graphs, 'graph')} took {format_seconds(dynamic.compile_s)} to "
        f"compile, as it is {counted(prices.as_it_is.graphs, 'graph')} and "
        f"{format_seconds(prices.as_it_is.compile_s)}{times}.",
        {"graphs": dynamic.graphs, "compile_s": dynamic.compile_s},
    )


class _Request(msgspec.Struct, frozen=True):
    workload: FactoryWorkload
    device: str
    settings: Settings
    timed: bool
    backend: str


def compile_prices(
    workload: FactoryWorkload, device: str = "auto", settings: Settings | None = None, *, backend: str = "inductor"
) -> CompilePrices:
    """The prices; without settings nothing is timed, and pieces and bytes are counted alone.

    Raises InputError for a factory that gives no module, and for a step that cannot be compiled.
    """
    what = f"{'--model' if workload.factory.endswith('.json') else '--module'} {workload.factory}"
    request = _Request(workload, device, settings or Settings(), settings is not None, backend)
    answer = ask_apart(__name__, msgspec.json.encode(request).decode(), what=what)
    return msgspec.json.decode(answer, type=CompilePrices)


def main(request: str) -> str:
    """The prices as JSON, for `compile_prices`."""
    from stepscope.questions.steps import step_of
    from stepscope.recording.compile_prices import Pricing
    from stepscope.recording.environment import read_environment, resolve_device
    from stepscope.recording.precision import matmul_precision

    options = msgspec.json.decode(request, type=_Request)
    device = resolve_device(options.device)
    eager = msgspec.structs.replace(options.workload, compile="eager")

    make = functools.partial(step_of, eager, device)
    # What the module prints in each of some hundred steps tells nothing.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), matmul_precision(eager.dtype):
        pricing = Pricing(make, device, settings=options.settings if options.timed else None, backend=options.backend)
        clean, breaks = pricing.breaks()
        dynamic = pricing.dynamic()
    prices = CompilePrices(
        module=type(make().model).__name__, as_it_is=pricing.as_it_is, clean=clean, breaks=breaks,
        recompilations=pricing.recompilations, gave_up_at=pricing.gave_up_at, steps=pricing.steps, dynamic=dynamic,
        environment=read_environment(device), date=datetime.now(UTC).date().isoformat(),
    )  # fmt: skip
    return msgspec.json.encode(prices).decode()


if __name__ == "__main__":
    answer_apart(main)
