"""A search for the fastest step as an answer: what each change gave, what its end gave, and the words that use it."""

from collections.abc import Iterator

import msgspec

from stepscope.core import answer
from stepscope.core.formulas.spelled import cell_name, describe_workload, run_call, run_command, script_lines
from stepscope.core.samples import INTERVALS
from stepscope.core.study_results import NAMED, NEAR, Tuned, change_words
from stepscope.core.units import counted, format_bytes, format_milliseconds, format_seconds, format_share
from stepscope.core.workloads import Workload
from stepscope.runs.run_sets import interval_text

STUDY = "tune"
GAVE, SIDES, LOSSES = "What each change gave", "The end, in processes of their own", "Losses"
_SHOWN_STEPS = (1, 2, 5, 10, 20, 30, 40, 50)
_TONES = {"taken": "good", "not right": "bad", "failed": "bad", "doubted": "bad"}


def answer_tuned(tuned: Tuned) -> answer.Answer:
    """What the search tried and found, as far as it came."""
    return answer.Answer(
        study=STUDY,
        question=f"Which choices make the step of {cell_name(tuned.asked)} fastest?",
        device=tuned.device,
        versions=tuned.versions,
        settings={"intervals": INTERVALS},
        lead=tuple(_lead(tuned)),
        tables=tuple(table for table in (_gave(tuned), _sides(tuned), _losses(tuned)) if table.rows),
        panels=tuple(_panels(tuned)),
        findings=tuple(_findings(tuned)),
        checked=True,
        asides=tuple(_words(tuned)),
        origin=(f"Runs in {tuned.folder}",) if tuned.folder else (),
    )


def _lead(tuned: Tuned) -> Iterator[answer.Line]:
    yield answer.Line(f"Asked for: {_said(tuned, tuned.asked)}.")
    if tuned.baseline != tuned.asked:
        yield answer.Line(f"It does not fit, so the search began with: {_said(tuned, tuned.baseline)}.")
    if tuned.best == tuned.baseline:
        until = ", until it was interrupted" if tuned.interrupted else ": it stays as it is"
        raced = any(tried.ratio is not None for tried in tuned.tried)
        yield answer.Line(f"No change {'made it surely faster' if raced else 'was raced'}{until}.", "strong")
        return
    yield answer.Line(f"Fastest: {_said(tuned, tuned.best)}.")
    change = tuned.confirmed
    if change is None or tuned.baseline_s is None or tuned.best_s is None:
        yield answer.Line(
            "It was not confirmed in processes of its own, so how much faster it is stays open.", "strong"
        )
        yield from _how_soon(tuned)
        return
    times = f"{format_milliseconds(tuned.baseline_s)} to {format_milliseconds(tuned.best_s)} ms a step"
    if change.interval is not None:
        low, high = 1 / change.interval.high, 1 / change.interval.low
        sure = f"interval {low:.2f} to {high:.2f}" if change.decided else f"undecided, interval {low:.2f} to {high:.2f}"
    else:
        sure = "too few processes for an interval"
    yield answer.Line(
        f"{times}: {1 / change.ratio:.2f} times as fast ({sure}; {counted(change.processes[1], 'process')} a side).",
        "strong",
    )
    yield from _how_soon(tuned)


def _how_soon(tuned: Tuned) -> Iterator[answer.Line]:
    """When the best step until then was near the end, and when the search ended; nothing where that is not known."""
    if tuned.near_end_s is not None:
        yield answer.Line(
            f"Within {100 * NEAR:.0f} % of the end in {tuned.near_end_s:.0f} s, ended after {tuned.seconds:.0f} s."
        )


def _said(tuned: Tuned, workload: Workload) -> str:
    """The workload in words; of a model that is yet to be made, the batch is not known."""
    if tuned.own_optimizer:
        of_user = {"optimizer": tuned.own_optimizer, "by_factory": ("optimizer",)}
        workload = msgspec.structs.replace(workload, **of_user)
    return f"{workload.name}: {describe_workload(workload).removeprefix('batch unknown, ')}"


def _gave(tuned: Tuned) -> answer.Table:
    rows: list[tuple[answer.Cell, ...]] = []
    tones: dict[int, str] = {}
    for number, tried in enumerate(tuned.tried):
        why = "" if tried.verdict == "not reached" else tried.why  # which a finding says once
        rows.append((
            tried.round, change_words(tried.change), tried.step_s, tried.ratio, interval_text(tried.interval),
            tried.verdict, why,
        ))  # fmt: skip
        if tried.verdict in _TONES:
            tones[number] = _TONES[tried.verdict]
    how = "the two steps took turns in one process, and each step is set beside its neighbour of the best until then"
    if tuned.asked.ranks > 1:
        how = "each step ran in a process for each rank, and its median is set beside that of the best until then"
    reached = sum(1 for tried in tuned.tried if tried.ratio is not None)
    raced = f"{counted(reached, 'race')}: {how}. The races of a round are judged together (Holm). " if reached else ""
    return answer.table_of(
        "round", ("change", answer.PROSE), ("step", "s"), ("of the best", "{:.3f} x"), ("95 % interval", answer.TEXT),
        ("verdict", answer.TEXT), ("why", answer.PROSE),
        title=GAVE, rows=rows, tones=tones,
        notes=answer.as_lines(f"{raced}The whole search took {format_seconds(tuned.seconds)}."),
    )  # fmt: skip


def _sides(tuned: Tuned) -> answer.Table:
    rows: list[tuple[answer.Cell, ...]] = []
    if tuned.confirmed is not None:
        rows = [
            ("baseline", tuned.baseline_s, tuned.baseline_peak_bytes),
            ("fastest", tuned.best_s, tuned.best_peak_bytes),
        ]
    return answer.table_of("step", ("typical time", "s"), ("peak of tensors", "B"), title=SIDES, rows=rows)


def _losses(tuned: Tuned) -> answer.Table:
    length = max((len(curve.losses) for curve in tuned.curves), default=0)
    rows = [
        (str(step), *(curve.losses[step - 1] if step <= len(curve.losses) else None for curve in tuned.curves))
        for step in (*(shown for shown in _SHOWN_STEPS if shown < length), *((length,) if length else ()))
    ]
    verdict = ": those of the fastest stay as near to the baseline's as other starts of it do"
    if tuned.departs_at is not None:
        verdict = ": those of the fastest depart"
    elif tuned.why_no_losses:
        verdict = ""
    return answer.table_of(
        "step",
        *((curve.name, "{:.4f}") for curve in tuned.curves),
        title=LOSSES,
        rows=rows,
        notes=answer.as_lines(f"Before each step's update, in {counted(length, 'step')} of training{verdict}."),
    )


def _panels(tuned: Tuned) -> Iterator[answer.Panel]:
    points = [
        answer.Point(line=curve.name, x=float(step), y=loss)
        for curve in tuned.curves
        for step, loss in enumerate(curve.losses, start=1)
    ]
    if points:
        yield answer.Panel(x_title="step", y_title="loss", points=tuple(points), x_log=False, y_log=False)


def _findings(tuned: Tuned) -> Iterator[answer.Finding]:
    if tuned.interrupted:
        yield answer.warning(
            "interrupted",
            "The search was interrupted: what it had not reached is not in it.",
            remedy="the same command goes on where this one stopped",
            evidence={},
        )
    if tuned.doubt:
        yield answer.error(
            "baseline-doubted",
            f"In the run of the step by itself a check found an error: {tuned.doubt}",
            remedy="mend it first: a race in which it shows again is not taken",
            evidence={},
        )
    late = sum(tried.verdict == "not reached" for tried in tuned.tried)
    if late:
        yield answer.note(
            "not-reached",
            f"{counted(late, 'change')} had to be left out: {format_seconds(tuned.budget_s)} have no time for "
            f"{'it' if late == 1 else 'them'} and for the end in processes of its own.",
            remedy=f"a --budget of over {format_seconds(tuned.needed_s)} has time for one more; what is measured "
            "already is not measured again",
            evidence={"not_reached": late, "needed_s": tuned.needed_s},
        )
    refused = [tried for tried in tuned.tried if tried.verdict == "refused" and tried.round.startswith(NAMED)]
    for tried in refused:
        yield answer.error(
            "named-refused",
            f"{change_words(tried.change)} takes no part: {tried.why}",
            remedy="mend it, or leave it out",
            evidence={},
        )
    if tuned.best != tuned.baseline and tuned.confirmed is None and not tuned.interrupted:
        yield answer.warning(
            "not-confirmed",
            f"{format_seconds(tuned.budget_s)} have no time to train and confirm what the races found.",
            remedy=f"a --budget of over {format_seconds(tuned.needed_s)}: what is measured is not measured again",
            evidence={"needed_s": tuned.needed_s},
        )
    wrong = [tried for tried in tuned.tried if tried.verdict == "not right"]
    if wrong:
        yield answer.warning(
            "losses-depart",
            f"{counted(len(wrong), 'change')} made the step faster and its losses wrong: "
            f"{wrong[0].why}. It was taken back.",
            remedy="study quality and study parity say where the precision is lost",
            evidence={"taken_back": len(wrong)},
        )
    if tuned.best != tuned.baseline and tuned.why_no_losses:
        yield answer.warning(
            "losses-not-compared",
            f"Losses could not be compared: {tuned.why_no_losses}.",
            remedy="train both, and compare their losses",
            evidence={},
        )
    change = tuned.confirmed
    if change is not None and change.decided and change.share > 0:
        yield answer.error(
            "slower-when-confirmed",
            f"In processes of their own the fastest step was {format_share(change.share)} slower than the baseline.",
            remedy="keep the step that you asked for; tune again on a quiet machine",
            evidence={"ratio": change.ratio},
        )
    if change is not None and not change.decided:
        yield answer.warning(
            "undecided-when-confirmed",
            "In processes of their own neither step was surely faster.",
            remedy="the same command with --fresh, on a quiet machine",
            evidence={"ratio": change.ratio},
        )
    more = (tuned.best_peak_bytes or 0) - (tuned.baseline_peak_bytes or 0)
    if tuned.best_peak_bytes and tuned.baseline_peak_bytes and more > tuned.baseline_peak_bytes // 50:
        yield answer.note(
            "more-memory",
            f"The fastest step takes {format_bytes(more)} more memory.",
            remedy="--memory SIZE leaves out what needs more",
            evidence={"more_bytes": more},
        )


def _words(tuned: Tuned) -> Iterator[str]:
    """The command line, and the line of Python, that use what was found."""
    if tuned.best == tuned.baseline:
        return
    command, call = run_command(tuned.best), run_call(tuned.best)
    if command is not None:
        yield f"Measure it: {command}"
    if call is not None:
        yield f"In Python: {call}"
    lines = script_lines(tuned.best)
    if lines:
        yield "In your script:"
        yield from (f"    {line}" for line in lines)
