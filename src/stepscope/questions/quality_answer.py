"""The tables and panels of the study: every run with its final figures, and losses by step."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from stepscope.core.answer import Cell, Finding, Panel, Table, note, warning
from stepscope.core.units import counted
from stepscope.questions.answers import curves, pivot, table_by

# Findings on the runs of the study, with their figures.


@dataclass(frozen=True, kw_only=True)
class FinalLoss:
    """The loss by which runs are judged after their last step, in words."""

    column: str
    """The head of its column."""
    where: str
    """Its place in a sentence: a run ends so much above fp32 there."""
    evidence: str
    """The word for it in the names of the figures that a sentence quotes."""
    unit: str
    """The unit of every loss; empty where it is not known."""
    axis: str
    """The unit on the axis of a panel."""
    decimals: int | None
    """The decimals of a loss in a table; None for four significant digits."""
    held_out: bool
    """Whether no run trains on what it is judged by."""


Kind = Literal["parameters in fp32", "parameters in bf16", "whole steps"]
"""What a run is drawn with."""


@dataclass(frozen=True, kw_only=True)
class RunJudged:
    """The figures of one run."""

    name: str
    of_starts: bool
    """Whether it is fp32 from the parameters of another seed: a yardstick."""
    kind: Kind
    losses: list[float]
    """Smoothed losses by step. They end early where the run was stopped because nothing was finite any more."""
    final_loss: float
    """The loss by which the run is judged after its last step."""
    departs: int | None
    not_finite_from: int | None
    skipped_steps: int | None
    zero_gradients: float | None
    swallowed: float | None

    def at(self, step: int) -> float | None:
        """The smoothed loss at a step, counted from 1; None where the run had been stopped."""
        return self.losses[step - 1] if step <= len(self.losses) else None

    def above(self, reference: "RunJudged", step: int) -> float | None:
        mine, other = self.at(step), reference.at(step)
        return None if mine is None or other is None else mine - other

    @property
    def last(self) -> float:
        """Smoothed loss at the end; NaN where it was lost on the way."""
        return math.nan if self.not_finite_from is not None else self.losses[-1]


@dataclass(frozen=True, kw_only=True)
class RunsJudged:
    """All runs of a study, and what they are judged by."""

    reference: RunJudged
    others: tuple[RunJudged, ...]
    apart: list[float] | None
    """`departure.starts_apart` at each step; None where there is nothing to compare."""
    steps: int
    window: int
    reach: int
    seed: int
    final: FinalLoss
    bar: float
    """The final loss of a model that has learned nothing."""
    same_starts: bool = False
    """Whether no run has another start, since the factory makes the same parameters whatever the seed."""

    @property
    def all(self) -> tuple[RunJudged, ...]:
        return (self.reference, *self.others)

    @property
    def starts(self) -> tuple[RunJudged, ...]:
        return tuple(each for each in self.others if each.of_starts)

    @property
    def variants(self) -> tuple[RunJudged, ...]:
        return tuple(each for each in self.others if not each.of_starts)

    @property
    def learned(self) -> bool:
        """Whether fp32 has learned anything."""
        return self.reference.final_loss < self.bar

    @property
    def starts_final(self) -> float:
        """The most that the final losses of two fp32 runs differ."""
        losses = [each.final_loss for each in (self.reference, *self.starts)]
        return max(losses) - min(losses)


def quality_findings(
    outcomes: RunsJudged, learned: Finding, *, left_out: dict[str, str], interrupted: str | None, planned: int
) -> Iterator[Finding]:
    """Findings on every run, and on what they say together.

    learned: the finding on whether fp32 has learned anything. left_out: variants that do not run here, and why.
    interrupted: the run in which the user stopped the study.
    """
    if interrupted is not None:
        yield warning(
            "interrupted",
            f"Interrupted in {interrupted}: {len(outcomes.all)} of {planned} runs ended, and only they are here.",
            {"runs": len(outcomes.all), "planned": planned, "interrupted": interrupted},
        )
    yield learned
    if outcomes.apart is None:
        yield _no_yardstick(outcomes)
        if outcomes.reference.not_finite_from is None:
            yield from (_beside(each, outcomes) for each in outcomes.variants)
    else:
        yield _yardstick(outcomes)
        for each in outcomes.variants:
            yield _beside(each, outcomes)
        yield from _within(outcomes)
        if outcomes.learned:
            yield from _against_wisdom(outcomes)
    for name, reason in left_out.items():
        yield note("not-run", f"{name} was not run: {reason}.", {"run": name})


def _no_yardstick(outcomes: RunsJudged) -> Finding:
    if outcomes.same_starts:
        return warning(
            "no-yardstick",
            "No departure is told: the factory makes the same parameters whatever PyTorch's seed is, so no other start "
            "shows how large a difference must be to mean something.",
            {"runs": len(outcomes.all)},
            remedy="let PyTorch's seed decide the parameters: the factory then calls no torch.manual_seed and loads no "
            "checkpoint",
        )
    lost = [each for each in (outcomes.reference, *outcomes.starts) if each.not_finite_from is not None]
    failed = [each.name for each in lost]
    slower = "choose a lower learning rate (--learning-rate)"
    if any(each.not_finite_from == 1 for each in lost):  # before the first update, which no rate has a part in
        slower = "mend the loss or the batch: it is not finite in the first step, before any update"
    why = f"the loss of {_listed(failed)} does not stay finite" if failed else "no run from another start ended"
    return warning(
        "no-yardstick",
        f"No departure is told: {why}, so there is nothing to hold a difference against.",
        remedy=slower if failed else "let the study run on",
        evidence={"runs": len(outcomes.all)},
    )


def _yardstick(outcomes: RunsJudged) -> Finding:
    assert outcomes.apart is not None
    unit = f" {outcomes.final.unit}" if outcomes.final.unit else ""
    seeds = ", ".join(str(outcomes.seed + i) for i in range(len(outcomes.starts) + 1))
    return note(
        "starts-apart",
        f"fp32 from the parameters of seeds {seeds}, over the same batches, ends up to "
        f"{outcomes.apart[-1]:.2g}{unit} apart in training (smoothed over {counted(outcomes.window, 'step')}, within "
        f"the last {outcomes.reach + 1}) and {outcomes.starts_final:.2g} {outcomes.final.where}. A run departs at the "
        "first step from which on its smoothed loss is farther from fp32's than these are from each other within "
        f"{outcomes.reach} steps of there, for {outcomes.reach} steps or more and to the end; or from which on its "
        "loss is not finite.",
        {
            "training": outcomes.apart[-1],
            outcomes.final.evidence: outcomes.starts_final,
            "window": outcomes.window,
            "reach": outcomes.reach,
        },
    )


def _beside(each: RunJudged, outcomes: RunsJudged) -> Finding:
    """The finding on a run beside fp32; on the run alone where nothing tells which difference means something."""
    known, judged = _known(each), outcomes.apart is not None
    kind = "run-beside-fp32" if each.departs is None else "run-departs"
    if each.not_finite_from is not None:
        kind, since = "run-lost", each.not_finite_from
        text = f"The loss of {each.name} is not finite from step {since} on{known}."
        if judged:
            text = f"{each.name} departs at step {each.departs}; from step {since} on its loss is not finite{known}."
    elif judged:
        difference, starts = each.final_loss - outcomes.reference.final_loss, outcomes.starts_final
        times = f"{abs(difference) / starts:.2g} times" if starts else "more than" if difference else "no more than"
        departs = "does not depart from fp32" if each.departs is None else f"departs from fp32 at step {each.departs}"
        text = f"{each.name} {departs}: it {_ends(each, outcomes)} ({times} what starts change){known}."
    else:
        text = f"{each.name} {_ends(each, outcomes)}{known}."
    return note(kind, text, _figures(each, outcomes))


def _figures(each: RunJudged, outcomes: RunsJudged) -> dict[str, float | int | str | None]:
    return {
        "run": each.name, "departs": each.departs, "training_loss": each.last,
        f"{outcomes.final.evidence}_loss": each.final_loss, "not_finite_from": each.not_finite_from,
        "skipped_steps": each.skipped_steps, "zero_gradients": each.zero_gradients, "swallowed": each.swallowed,
    }  # fmt: skip


def _ends(each: RunJudged, outcomes: RunsJudged) -> str:
    training = each.last - outcomes.reference.last
    final = each.final_loss - outcomes.reference.final_loss
    return f"ends {_signed(training)} fp32 in training, {_signed(final)} it {outcomes.final.where}"


def _signed(difference: float) -> str:
    if not difference:
        return "level with"
    return f"{abs(difference):.2g} {'above' if difference >= 0 else 'below'}"


def _known(each: RunJudged) -> str:
    """The end of a sentence: what else was counted of a run."""
    parts = []
    if each.skipped_steps is not None:
        parts.append(f"{each.skipped_steps} steps were skipped")
    if each.swallowed is not None:
        parts.append(f"{100 * each.swallowed:.3g} % of its last updates changed nothing")
    return "; " + ", ".join(parts) if parts else ""


def _within(outcomes: RunsJudged) -> Iterator[Finding]:
    """A finding for the case that no run departs from fp32."""
    if not outcomes.variants or any(each.departs is not None for each in outcomes.variants):
        return
    farthest = max(outcomes.variants, key=lambda each: abs(each.final_loss - outcomes.reference.final_loss))
    difference = farthest.final_loss - outcomes.reference.final_loss
    nothing = "no step" if all(each.kind == "whole steps" for each in outcomes.variants) else "no precision"
    count = len(outcomes.variants)
    departs = f"None of {count} runs departs" if count > 1 else f"{farthest.name} does not depart"
    yield note(
        "nothing-beyond-the-start",
        f"{departs}: at this size and length {nothing} changes the "
        f"training more than another start does. Farthest {outcomes.final.where} is {farthest.name}, "
        f"{_signed(difference)} fp32.",
        {"runs": len(outcomes.variants), "farthest": farthest.name, "difference": difference},
    )


def _against_wisdom(outcomes: RunsJudged) -> Iterator[Finding]:
    """Findings that contradict what is commonly said."""
    runs = {each.name: each for each in outcomes.variants}
    reference = outcomes.reference
    unscaled = runs.get("fp16-unscaled")
    if unscaled is not None and unscaled.departs is None and unscaled.zero_gradients is not None:
        zeros, usual = 100 * unscaled.zero_gradients, 100 * (reference.zero_gradients or 0.0)
        yield note(
            "wisdom-contradicted",
            "fp16 is said to need a loss scale. Here it trains as well without: "
            f"{zeros:.3g} % of the gradients' elements, embeddings' left out, are zero at the end, where in fp32 "
            f"{usual:.3g} % are, and what is lost does not show in the loss.",
            {"run": unscaled.name, "zero_gradients": zeros, "zero_gradients_fp32": usual},
        )
    nearest = runs.get("bf16-pure")
    if nearest is not None and nearest.departs is None and nearest.swallowed is not None:
        yield note(
            "wisdom-contradicted",
            "Parameters in bf16 are said to need a remedy. Here they train as well rounded to nearest, though "
            f"{100 * nearest.swallowed:.3g} % of the last updates change nothing.",
            {"run": nearest.name, "swallowed": nearest.swallowed},
        )
    for name in ("tf32", "bf16", "fp16"):
        mixed = runs.get(name)
        if mixed is not None and mixed.departs is not None:
            yield note(
                "wisdom-contradicted",
                f"{name} is said to train as fp32 does. Here it departs at step {mixed.departs}.",
                {"run": name, "departs": mixed.departs},
            )
    if outcomes.final.held_out:
        yield from _better_on_other_text(outcomes)
    yield from _remedies(runs)


def _better_on_other_text(outcomes: RunsJudged) -> Iterator[Finding]:
    """Findings on runs that fit the training text worse than fp32, and held-out text better by more than starts do."""
    reference = outcomes.reference
    for each in outcomes.variants:
        gained = reference.final_loss - each.final_loss
        memorised = reference.final_loss - reference.last
        if each.departs is None or not each.last > reference.last:
            continue
        if not memorised > gained > outcomes.starts_final:
            continue
        yield note(
            "wisdom-contradicted",
            f"Lost precision is said to cost quality. Here {each.name} departs above fp32 in training and "
            f"ends {gained:.2g} below it on held-out text: there fp32 loses {reference.final_loss:.4g} for "
            f"{reference.last:.4g} in training, {each.name} {each.final_loss:.4g} for {each.last:.4g}. Where "
            "fp32 knows its training text so much better than other text, less exact updates may even help.",
            {
                "run": each.name,
                "gained": gained,
                "validation_loss": each.final_loss,
                "training_loss": each.last,
                "fp32_validation_loss": reference.final_loss,
                "fp32_training_loss": reference.last,
            },
        )


def _remedies(runs: dict[str, RunJudged]) -> Iterator[Finding]:
    """A finding on which remedies keep training in bf16 close to fp32, where it departs without one."""
    nearest = runs.get("bf16-pure")
    remedies = [each for name, each in runs.items() if name.startswith("bf16-pure-")]
    if nearest is None or nearest.departs is None or not remedies:
        return
    kept = [each.name for each in remedies if each.departs is None]
    lost = [each.name for each in remedies if each.departs is not None]
    text = f"{_listed(kept)} {'does' if len(kept) == 1 else 'do'} not" if kept else "no remedy keeps it"
    but = f"; {_listed(lost)} {'departs' if len(lost) == 1 else 'depart'} too" if lost and kept else ""
    yield note(
        "bf16-remedies",
        f"Where bf16-pure departs from fp32, {text}{but}.",
        {each.name: each.departs for each in (nearest, *remedies)},
    )


def _listed(names: list[str]) -> str:
    """Names in a sentence: a; a and b; a, b and c."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


RUNS, BY_STEP, ABOVE = "Runs", "Training loss, smoothed", "More than fp32, smoothed"

_POINTS = 30
"""Points per curve of smoothed losses, whose means include the steps between points."""
_COLUMNS = 8


def tables_of(outcomes: RunsJudged) -> tuple[Table, ...]:
    """A table of the runs, and two of their losses by step."""
    return (_runs_table(outcomes), *_by_step(outcomes))


def _figure(value: float | None, outcomes: RunsJudged) -> Cell:
    """A loss, or a difference of losses, as a table shows it; without a sign if that is zero."""
    if value is None:
        return None
    decimals = outcomes.final.decimals
    return (float(f"{value:.4g}") if decimals is None else round(value, decimals)) + 0.0


def _runs_table(outcomes: RunsJudged) -> Table:
    reference = outcomes.reference

    def percent(share: float | None) -> Cell:
        return None if share is None else float(f"{100 * share:.3g}")

    def more(each: RunJudged) -> Cell:
        return None if each is reference else _figure(each.final_loss - reference.final_loss, outcomes)

    return table_by(
        RUNS,
        outcomes.all,
        {
            "run": lambda each: each.name,
            "training loss at the end, smoothed": lambda each: _figure(each.last, outcomes),
            outcomes.final.column: lambda each: _figure(each.final_loss, outcomes),
            "more than fp32": more,
            "departs at step": lambda each: _departs(each, outcomes),
            "skipped steps": lambda each: each.skipped_steps,
            "gradients of zero, %": lambda each: percent(each.zero_gradients),
            "updates lost, %": lambda each: percent(each.swallowed),
        },
    )


def _departs(each: RunJudged, outcomes: RunsJudged) -> Cell:
    if each is outcomes.reference or each.of_starts or outcomes.apart is None:
        return None
    return "no" if each.departs is None else each.departs


def _by_step(outcomes: RunsJudged) -> Iterator[Table]:
    steps = _places(outcomes.steps, _COLUMNS)

    def table(title: str, figures: dict[str, Callable[[int], float | None]]) -> Table:
        cells = (
            ((name,), f"step {step}", _figure(at(step), outcomes)) for name, at in figures.items() for step in steps
        )
        return pivot(title, ("run",), cells)

    yield table(BY_STEP, {each.name: each.at for each in outcomes.all})
    above = {each.name: functools.partial(each.above, outcomes.reference) for each in outcomes.others}
    apart = outcomes.apart
    yield table(ABOVE, above | ({} if apart is None else {"starts apart, at most": lambda step: apart[step - 1]}))


def _places(steps: int, count: int) -> list[int]:
    """Up to `count` steps from 1 to `steps`, evenly spread; the last step is among them."""
    return sorted({round(steps * i / count) for i in range(1, count + 1)})


def panels_of(outcomes: RunsJudged) -> Iterator[Panel]:
    """Panels of the losses, and of their difference from fp32's: first with parameters in fp32, then in bf16, then of
    whole steps."""
    reference = outcomes.reference
    starts, variants = outcomes.starts, outcomes.variants
    axis = f", {outcomes.final.axis}" if outcomes.final.axis else ""
    steps = _places(outcomes.steps, _POINTS)
    for i, kind in enumerate(get_args(Kind)):
        shown = tuple(each for each in variants if each.kind == kind)
        if not shown and (i or variants):
            continue
        for y_title, lines, figure in (
            (f"training loss, smoothed{axis}", (reference, *starts, *shown), RunJudged.at),
            ("more than fp32", (*starts, *shown), lambda each, step: each.above(reference, step)),
        ):
            points = (
                (each.name, float(step), y) for each in lines for step in steps if (y := figure(each, step)) is not None
            )
            yield curves(points, x_title=f"step, {kind}", y_title=y_title)


# When a training run departs from another: smoothed losses, and what another start alone changes of them.
#
# Losses of single steps jump with their batches, and even fp32 ends elsewhere where it starts from other parameters. So
# a difference means something only where it is larger than what starts do, and stays so:
#
#     A run departs at the first step from which on, for the last tenth of the run or longer, its smoothed loss is
#     farther from that of fp32 than runs of fp32 from different starts, over the same batches, are from each other,
#     there or up to a tenth of the run away from there; or from which on its loss is not finite.
#
# Steps count from 1.


def window_of(steps: int) -> int:
    """Steps that a smoothed loss is the mean of: a twentieth of the run."""
    return max(1, steps // 20)


def reach_of(steps: int) -> int:
    """A tenth of the run: how far away starts are looked at, and how long a difference must last."""
    return max(1, steps // 10)


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """The mean of the finite ones among the last `window` losses, fewer at the beginning; NaN where none is."""
    means = []
    for end in range(1, len(losses) + 1):
        finite = [loss for loss in losses[max(0, end - window) : end] if math.isfinite(loss)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return means


def not_finite_from(losses: Sequence[float]) -> int | None:
    """The step from which on no loss is finite."""
    last = max((step for step, loss in enumerate(losses, start=1) if math.isfinite(loss)), default=0)
    return last + 1 if last < len(losses) else None


def starts_apart(runs: Sequence[Sequence[float]], reach: int) -> list[float]:
    """At each step, how far two of these smoothed runs are apart at most, there or up to `reach` steps away."""
    apart = [
        max(abs(one - other) for one, other in itertools.combinations(at_step, 2))
        for at_step in zip(*runs, strict=True)
    ]
    return [max(apart[max(0, i - reach) : i + reach + 1]) for i in range(len(apart))]


def departure(
    losses: Sequence[float], reference: Sequence[float], apart: Sequence[float], *, window: int, reach: int
) -> int | None:
    """The step at which a run departs, by the rule above; None where it does not.

    losses: of the run, as they are; it may have been stopped early, once nothing was finite. reference: smoothed losses
    of fp32; apart: `starts_apart`.
    """
    run = smoothed(losses, window)
    within = [i for i, loss in enumerate(run, start=1) if abs(loss - reference[i - 1]) <= apart[i - 1]]
    beyond_from = max(within, default=0) + 1
    lost = not_finite_from(losses)
    if lost is not None:
        # The mean outlives the last finite loss by a window.
        return min(lost, beyond_from)
    return beyond_from if beyond_from <= len(reference) - reach + 1 else None
