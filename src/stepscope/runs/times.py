"""Times of phases as rows of a table, and what their intervals mean. Of a run, or of any work that was timed alone."""

from collections.abc import Iterable, Mapping

from stepscope.core.answer import TEXT, Answer, Cell, Table, as_lines, table_of
from stepscope.core.environment import Environment
from stepscope.core.range_names import STEP
from stepscope.core.samples import CONFIDENCE, FEWEST_FOR_PERCENTILE, OF_ONE_PROCESS, Samples
from stepscope.core.units import counted, format_milliseconds


def time_table(
    timed: Mapping[str, Samples], notes: Iterable[str], rates: Mapping[str, float | None] | None = None
) -> Table:
    """A row for each of the parts that was timed: median, interval, mean, and share of the step.

    Percentiles have a column where there is one. rates: the FLOP/s of each part, for a column of its own.
    """
    named = {name: samples for name, samples in timed.items() if any(samples.values_s)}
    step_s = named[STEP].median_s if STEP in named else None
    shown = [head for head in FEWEST_FOR_PERCENTILE if any(samples.percentile_s(head) for samples in named.values())]
    rows: list[tuple[Cell, ...]] = []
    for name, samples in named.items():
        percentiles = [samples.percentile_s(head) for head in shown]
        rate = [] if rates is None else [rates.get(name)]
        share = samples.median_s / step_s if step_s and samples.median_s is not None else None
        rows.append((name, samples.median_s, _interval(samples), _mean(samples), *percentiles, share, *rate))
    return table_of(
        "phase", ("median", "s"), (f"{CONFIDENCE * 100:.0f} % interval", TEXT), ("mean ± std", TEXT),
        *((head, "s") for head in shown), ("share", "%"), *([] if rates is None else [("model FLOP/s", "FLOP/s")]),
        rows=rows, tones={i: "strong" for i, row in enumerate(rows) if row[0] == STEP}, notes=as_lines(*notes),
    )  # fmt: skip


def _interval(samples: Samples) -> str:
    interval = samples.interval()
    return f"{format_milliseconds(interval.low)} to {format_milliseconds(interval.high)} ms" if interval else ""


def _mean(samples: Samples) -> str:
    deviation = f" ± {format_milliseconds(samples.stdev_s)}" if samples.stdev_s is not None else ""
    return f"{format_milliseconds(samples.mean_s or 0)}{deviation} ms"


def about_steps(samples: Samples, steady: bool | None) -> str:
    """How many steps were measured after how many warm-up steps."""
    words = {True: "steady", False: "not steady", None: "too few to tell whether steady"}[steady]
    return (
        f"{counted(samples.count, 'step')} {OF_ONE_PROCESS} measured after "
        f"{counted(len(samples.warmup_s), 'warm-up step')} ({words})"
    )


def about_intervals(named: Mapping[str, Samples], more: str) -> list[str]:
    """What the intervals are of, or why there is none, and what to do for `more` steps."""
    without = {name: samples for name, samples in named.items() if samples.count and samples.why_no_interval}
    lines: list[str] = []
    if len(without) < len(named):
        step = named.get(STEP)
        told = step is not None and step.effective_count is not None and STEP not in without
        worth = f"; its steps are worth {step.effective_count:.0f} independent ones" if step and told else ""
        lines.append(f"The intervals are those {OF_ONE_PROCESS}: another may differ by more{worth}.")
    if without:
        name, samples = list(without.items())[-1]
        lines.append(f"No interval for {', '.join(without)}: of {name}, {samples.why_no_interval}. Take more: {more}.")
    return lines


def answer_times(samples: Mapping[str, Samples], steady: bool | None, where: Environment) -> Answer:
    """The Answer on work that was timed alone: its phases by name, and the step that they make up."""
    step = samples[STEP]
    named = {name: found for name, found in samples.items() if name not in (STEP, "host")}
    clocks = ", ".join(dict.fromkeys(found.clock for found in named.values()))
    notes = (
        f"{about_steps(step, steady)}; step by {step.clock} round a synchronised region, phases by {clocks}.",
        *about_intervals({**named, STEP: step}, "steps=N"),
    )
    table = time_table({**named, STEP: step}, notes)
    return Answer(
        study="measure", question=f"How long {'do' if len(named) > 1 else 'does'} {' and '.join(named)} take?",
        device=where.device_name, versions=where.versions, lead=as_lines(where.described), tables=(table,),
    )  # fmt: skip
