"""The answer of a bench: right or wrong first, then who is faster and how sure that is, beside what the device can.

On the way to it: `bench_records.py` reads --shape and --size, `bench_functions.py` finds the functions and makes the
Asked, `bench_calls.py` judges and times (`run_bench`), and what it found is a Bench of `bench_records.py`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.core import answer
from stepscope.core.precisions import PRECISIONS, Dtype
from stepscope.core.processes import standing
from stepscope.core.samples import Interval
from stepscope.core.units import counted, format_bytes, format_seconds, format_share
from stepscope.questions.bench_records import Bench, ResultError, Timing, Verdict, Work, size_words
from stepscope.questions.tuning_races import p_value_of

RIGHT, TIME, CEILING = "Right or wrong, beside float64", "Time in turns", "Beside what the device can"
LESS_EXACT = 2.0
"""From so many times the yardstick's error on it is said: kernels of stepscope's own may not have more."""
NO_DIFFERENCE = 0.01
"""A difference below it is none that anybody would use, however sure it is."""


def answer_bench(bench: Bench) -> answer.Answer:
    """Tables, a curve over sizes where there are several, and what follows."""
    function = next(iter(bench.functions))
    return answer.Answer(
        study="bench",
        question=f"Is {function} right, and is it faster?",
        device=bench.environment.device_name,
        date=bench.created[:10],
        versions=dict(bench.environment.versions),
        settings={
            "dtype": bench.dtype,
            "phases": "forward and backward" if bench.backward else "forward",
            "reference": bench.reference or None,
            **bench.arguments,
        },
        lead=tuple(_lead(bench)),
        tables=tuple(table for table in (_right(bench), _time(bench), _ceiling(bench)) if table.rows),
        panels=tuple(_panels(bench)),
        findings=tuple(_findings(bench)),
    )


def verdict_of(bench: Bench, function: str) -> str:
    """A function's verdict in a word or two."""
    judged = [verdict for verdict in bench.verdicts if verdict.function == function]
    if not bench.reference:
        return "not judged"
    if any(verdict.judged == "wrong" for verdict in judged):
        return "wrong"
    right = sum(verdict.judged == "right" for verdict in judged)
    return f"right in {right} of {counted(len(judged), 'case')}" if right else "not judged"


def decided(bench: Bench) -> dict[tuple[str, str], bool]:
    """By function and inputs, whether its ratio to the first one stands when all are asked at once (Holm)."""
    rows = [row for row in bench.timings if row.ratio is not None and row.function != _base(bench, row)]
    stands = standing(p_value_of(row.ratio or 1.0, row.interval) for row in rows)
    return {(row.function, row.inputs): stand for row, stand in zip(rows, stands, strict=True)}


def _base(bench: Bench, row: Timing) -> str:
    """The function that ratios of this size are to: the first that has a time."""
    return next(
        (one.function for one in bench.timings if one.inputs == row.inputs and one.ratio is not None), row.function
    )


def _lead(bench: Bench) -> Iterator[answer.Line]:
    judged = next(iter(bench.functions))
    verdict = verdict_of(bench, judged)
    tone: answer.Tone = "bad" if verdict == "wrong" else "good" if verdict.startswith("right") else "care"
    where = f"{bench.environment.device_name}, {bench.dtype}, {'forward and backward' if bench.backward else 'forward'}"
    yield answer.Line(f"{bench.functions[judged]} on {where}", "strong")
    if verdict == "wrong":
        first = bench.wrong(judged)[0]
        yield answer.Line(f"Wrong, so it has no time: {first.case} ({first.inputs}): {first.reason}.", "bad")
        return
    yield answer.Line(
        f"{verdict[0].upper()}{verdict[1:]}{' beside float64' if bench.reference else ': no reference was given'}.",
        tone,
    )
    stands = decided(bench)
    for row in bench.timings:
        if row.ratio is not None and row.function != judged and _base(bench, row) == judged:
            yield answer.Line(f"{_where(row)}{_contest(judged, row, stands[row.function, row.inputs])}.")


def _where(row: Timing) -> str:
    return f"{size_words(row.sizes)}: " if row.sizes else ""


def _contest(name: str, row: Timing, stands: bool) -> str:
    """Who is faster, by how much and how sure that is."""
    ratio, interval = row.ratio or 1.0, row.interval
    if interval is None:
        few = f"too few pairs were timed to tell {name} from {row.function}"
        return f"{few}, which took {ratio:.4g} times as long in them: --seconds makes more"
    if not stands:
        return (
            f"no difference from {row.function} can be told, which takes {ratio:.3f} times as long{_within(interval)}"
        )
    if abs(ratio - 1) < NO_DIFFERENCE:
        return (
            f"{name} and {row.function} take equally long, to within {format_share(NO_DIFFERENCE)}{_within(interval)}"
        )
    if ratio > 1:
        return f"{name} is {ratio:.2f} times as fast as {row.function}{_within(interval)}"
    inverse = Interval(low=1 / interval.high, high=1 / interval.low)
    return f"{name} takes {1 / ratio:.2f} times as long as {row.function}{_within(inverse)}"


def _within(interval: Interval) -> str:
    return f" (95 %: {interval.low:.3f} to {interval.high:.3f})"


def _right(bench: Bench) -> answer.Table:
    """A row for each case of the function that is asked about, and one for each of the others: what came nearest to its
    bound."""
    judged = next(iter(bench.functions))
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in bench.verdicts:
        groups.setdefault((verdict.function, verdict.case if verdict.function == judged else ""), []).append(verdict)
    rows: list[tuple[answer.Cell, ...]] = []
    tones: dict[int, answer.Tone] = {}
    rules: list[int] = []
    order = ("not judged", "right", "refused", "wrong")
    for (function, case), verdicts in sorted(groups.items(), key=lambda one: one[0][0] != judged):
        # The gravest, and of those the one nearest to its bound.
        verdict = max(verdicts, key=lambda one: (order.index(one.judged), max(map(_share, one.errors), default=0.0)))
        worst = max(verdict.errors, key=_share, default=None)
        if function != judged and not rules:
            rules.append(len(rows))
        if verdict.judged != "right":
            tones[len(rows)] = "bad" if verdict.judged == "wrong" else "care"
        bits = {one.repeats for one in verdicts if one.judged == "right"}
        rows.append(
            (
                function,
                case or verdict.case,
                verdict.inputs,
                verdict.judged,
                *((worst.result, worst.error, worst.allowed, worst.rival) if worst is not None else (None,) * 4),
                None if verdict.judged != "right" else "no" if False in bits else "yes",
                verdict.reason if verdict.judged != "not judged" else None,
            )
        )
    columns = (
        "function", *((name, answer.TEXT) for name in ("case", "inputs", "verdict", "nearest to its bound")),
        ("error", ".2g"), ("allowed", ".2g"), ("yardstick's", ".2g"), ("same bits", answer.TEXT), ("why", answer.PROSE),
    )  # fmt: skip
    return _shown(RIGHT, columns, rows, tones=tones, rules=tuple(rules))


def _share(error: ResultError) -> float:
    return math.inf if error.error is None else error.error / (error.allowed or 1)


def _shown(
    title: str, columns: Sequence[tuple[str, str] | str], rows: Sequence[tuple[answer.Cell, ...]], **more: Any
) -> answer.Table:
    """The table without the columns in which no row has anything."""
    kept = [i for i in range(len(columns)) if any(row[i] not in (None, "") for row in rows)]
    return answer.table_of(
        *(columns[i] for i in kept), title=title, rows=[tuple(row[i] for i in kept) for row in rows], **more
    )


def _time(bench: Bench) -> answer.Table:
    rows: list[tuple[answer.Cell, ...]] = []
    tones: dict[int, answer.Tone] = {}
    rules: list[int] = []
    for i, row in enumerate(bench.timings):
        if i and row.inputs != bench.timings[i - 1].inputs:
            rules.append(len(rows))
        if row.outcome != "measured":
            tones[len(rows)] = "bad" if row.outcome in ("wrong", "failed") else "care"
        within = f"{row.interval.low:.3f} to {row.interval.high:.3f}" if row.interval is not None else None
        is_base = row.function == _base(bench, row)
        rows.append((
            size_words(row.sizes) or row.inputs, row.function,
            row.forward.median_s if row.forward else None, row.backward.median_s if row.backward else None, row.seconds,
            None if is_base else row.ratio, None if is_base else within,
            row.host.median_s if row.host else None, row.first_s, row.saved_bytes, row.beyond_bytes,
            row.outcome if row.outcome != "measured" else "", row.reason if row.outcome != "wrong" else "",
        ))  # fmt: skip
    columns = (
        ("inputs", answer.TEXT), ("function", answer.TEXT), ("forward", "s"), ("backward", "s"), ("both", "s"),
        ("as long", "{:.3f} x"), ("95 % interval", answer.TEXT), ("host", "s"), ("first call", "s"),
        ("saved", "B"), ("peak beyond", "B"), ("no time", answer.TEXT), ("why", answer.PROSE),
    )  # fmt: skip
    hidden = [row for row in bench.timings if row.forward is not None and not row.hidden]
    notes = [
        answer.Line(
            "Medians; as long: beside the first function, pass by pass in turns. saved: what autograd keeps beside "
            "inputs and outputs.",
            "aside",
        )
    ]
    if hidden and bench.environment.device_type == "cuda":
        notes.append(
            answer.Line(
                "The host was slower than the device where launches could not be hidden: those times hold launches.",
                "care",
            )
        )
    return _shown(TIME, columns, rows, tones=tones, rules=tuple(rules), notes=tuple(notes))


def _ceiling(bench: Bench) -> answer.Table:
    """Rates beside the ceilings that were measured here: what the roofline allows at this intensity."""
    works = {work.inputs: work for work in bench.works}
    rows: list[tuple[answer.Cell, ...]] = []
    for row in bench.timings:
        work, seconds = works.get(row.inputs), row.seconds
        if work is None or not seconds:
            continue
        flops, moved = work.flops, work.moved_bytes
        limit = roofline_s(bench, work)
        rows.append((
            size_words(row.sizes) or row.inputs, row.function, flops / seconds if flops else None, moved / seconds,
            flops / moved if flops else None, *((limit[1], limit[0] / seconds) if limit else (None, None)),
        ))  # fmt: skip
    columns = (
        ("inputs", answer.TEXT), ("function", answer.TEXT), ("FLOP/s", "FLOP/s"), ("B/s", "B/s"),
        ("FLOP a byte", ".1f"), ("bound by", answer.TEXT), ("of the roofline", "%"),
    )  # fmt: skip
    of = (
        "FLOPs of matrix products, causal attention as half of the square. Bytes: inputs, outputs, their gradients and "
        "what the reference keeps for backward, once."
    )
    return _shown(CEILING, columns, rows, notes=(answer.Line(of, "aside"),))


def reached_rates(bench: Bench, dtype: Dtype) -> dict[str, float]:
    """The highest rates of what was timed, as `ceilings_for` asks: FLOP/s by dtype, B/s of a copy."""
    works = {work.inputs: work for work in bench.works}
    timed = [(works[row.inputs], row.seconds) for row in bench.timings if row.seconds and row.inputs in works]
    return {
        PRECISIONS[dtype].multiplies: max(((work.flops or 0) / seconds for work, seconds in timed), default=0.0),
        "copy": max((work.moved_bytes / seconds for work, seconds in timed), default=0.0),
    }


def roofline_s(bench: Bench, work: Work) -> tuple[float, str] | None:
    """The least time that the ceilings measured here allow this work, and what bounds it; None without ceilings."""
    if bench.copy_bytes_s is None:
        return None
    by_memory = work.moved_bytes / bench.copy_bytes_s
    by_products = (work.flops or 0) / bench.matmul_flops_s if bench.matmul_flops_s else 0.0
    return (by_products, "products") if by_products > by_memory else (by_memory, "memory")


def _panels(bench: Bench) -> Iterator[answer.Panel]:
    names = bench.timings[0].sizes if bench.timings else {}
    varied = [name for name in names if len({row.sizes[name] for row in bench.timings}) > 1]
    if len(varied) != 1:
        return
    name = varied[0]
    points = [
        answer.Point(
            line=row.function,
            x=float(row.sizes[name]),
            y=row.seconds or 0.0,
            missing="" if row.seconds else row.outcome,
            doubted=False,
        )
        for row in bench.timings
    ]
    yield answer.Panel(
        x_title=name,
        y_title="time (s)",
        points=tuple(points),
        x_log=True,
        y_log=True,
        frame=answer.Frame(heading="Forward and backward" if bench.backward else "Forward"),
    )


def _findings(bench: Bench) -> Iterator[answer.Finding]:
    if not bench.reference:
        yield answer.warning(
            "not-judged",
            "Nothing judged these functions: their times are of whatever they compute.",
            {},
            "--against or --reference names a function that is right in float64",
        )
    for function, names in bench.left_out.items():
        yield answer.note(
            "argument-left-out",
            f"{function} has no parameter {' and '.join(names)}, and was called without.",
            {"arguments": len(names)},
        )
    for function in bench.functions:
        wrong = bench.wrong(function)
        if wrong:
            yield answer.error(
                "wrong",
                f"{function} is wrong in {counted(len(wrong), 'case')}, first with {wrong[0].case} "
                f"({wrong[0].inputs}): {wrong[0].reason}.",
                {"cases": len(wrong)},
            )
            if all(v.case == "fully masked rows" for v in wrong):
                yield answer.note(
                    "masked-rows",
                    f"{function} is right but for rows that the mask hides whole: those should be zeros, as PyTorch "
                    "has them.",
                )
        refused = _of(bench, function, "refused")
        if refused and not wrong:
            yield answer.warning(
                "refuses",
                f"{function} refuses {' and '.join(dict.fromkeys(v.case for v in refused))}: {refused[0].reason}.",
                {"cases": len(refused)},
            )
        other_bits = [verdict for verdict in _of(bench, function, "right") if verdict.repeats is False]
        if other_bits:
            yield answer.note(
                "not-deterministic",
                f"{function} gives other bits when it is called again ({other_bits[0].case}): it is right each time.",
                {"cases": len(other_bits)},
            )
    unjudged = [v for v in bench.verdicts if v.judged == "not judged"]
    for reason in dict.fromkeys(v.reason for v in unjudged):
        cases = list(dict.fromkeys(v.case for v in unjudged if v.reason == reason))
        yield answer.note("case-not-judged", f"Nobody was judged on {' and '.join(cases)}: {reason}.", {})
    if bench.interpreted:
        yield answer.warning(
            "interpreted",
            f"{' and '.join(bench.interpreted)} ran in Triton's interpreter on the CPU: judged, and not timed.",
            remedy="a GPU times it",
        )
    yield from _less_exact(bench)
    for row in bench.timings:
        if row.first_s is not None and row.seconds and row.first_s > max(1.0, 100 * row.seconds):
            yield answer.note(
                "compiles",
                f"{_where(row)}{row.function} needed {format_seconds(row.first_s)} for its first call, to compile and "
                f"to choose: as long as {row.first_s / row.seconds:,.0f} later ones.",
                {"first_s": row.first_s},
            )
    yield from _of_the_device(bench)
    if bench.interrupted:
        yield answer.warning(
            "interrupted",
            "The bench was interrupted: what it had not reached is not in it.",
            {},
            "the same command begins again",
        )


def _of(bench: Bench, function: str, judged: str) -> list[Verdict]:
    return [v for v in bench.verdicts if v.function == function and v.judged == judged]


def _less_exact(bench: Bench) -> Iterator[answer.Finding]:
    """Functions that are right, and further off than the yardstick."""
    for function in bench.functions:
        errors = [(v, e) for v in _of(bench, function, "right") for e in v.errors if e.error and e.rival]
        if bench.wrong(function) or function == bench.yardstick or not errors:
            continue
        verdict, error = max(errors, key=lambda one: (one[1].error or 0.0) / (one[1].rival or 1.0))
        times = (error.error or 0.0) / (error.rival or 1.0)
        if times > LESS_EXACT:
            yield answer.note(
                "less-exact",
                f"{function} is right, and up to {times:.1f} times as far off as {bench.yardstick or bench.reference}: "
                f"the {error.result} with {verdict.case}, {error.error:.2g} beside {error.rival:.2g}.",
                {"times": times},
            )


def _of_the_device(bench: Bench) -> Iterator[answer.Finding]:
    """What is left: how far the fastest right function is from what this device can."""
    for work in bench.works:
        timed = [row for row in bench.timings if row.inputs == work.inputs and row.seconds]
        limit = roofline_s(bench, work)
        if not timed or limit is None:
            continue
        best = min(timed, key=lambda row: row.seconds or math.inf)
        share = limit[0] / (best.seconds or math.inf)
        flops = f"{work.flops / 1e9:,.3g} GFLOP and " if work.flops else ""
        cached = share > 1 and limit[1] == "memory"
        outrun = ": the data lie in a cache, which is faster than memory" if cached else ""
        yield answer.note(
            "roofline",
            f"{_where(best) or 'Of these '}{best.function} is the fastest, and reaches {format_share(share)} of what "
            f"{limit[1]} allow{'s' if limit[1] == 'memory' else ''} here: {format_seconds(limit[0])} for "
            f"{flops}{format_bytes(work.moved_bytes)}{outrun}.",
            {"share": share},
        )
