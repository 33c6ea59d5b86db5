"""Does a comparison see what is there, and nothing else? One step in many processes, against itself and made slower.

    python benchmarks/processes.py [--rounds 60] [--slower 0.03] [--json FILE]        # half an hour on two cores
    python benchmarks/processes.py --show FILE       # the tables of a result kept with --json

The step is that of docs/examples/delayed.py, whose backward can be made slower by a known time; each round starts four
processes afresh: the step, the slower step, the step in turns with itself, and in turns with the slower one. A
comparison draws so many processes a side at random from all rounds, none on both sides; the draws share processes, so
a hundred of them are worth less than a hundred times as many processes.

What Welch's interval is worth for processes whose times do not follow the normal law is simulated besides.
"""

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope.core.files import decode_document
from stepscope.core.processes import Change, Processes, change_of_pairs
from stepscope.core.run import Repeat, Run, Settings
from stepscope.core.run_directory import load_run
from stepscope.core.workloads import FactoryWorkload
from stepscope.engine.sweep import run_sweep
from stepscope.engine.sweep_plan import Cell, Policy, SweepPlan
from stepscope.engine.workload_options import OneWorkload
from stepscope.runs.run_sets import paired_ratios
from stored import keep

FACTORY = str(Path(__file__).parents[1] / "docs" / "examples" / "delayed.py") + ":make"
SETTINGS = Settings(
    warmup_floor=10, warmup_cap=10, steps_floor=100, steps_cap=100, seconds=0, warmup_seconds=5, profile=False
)
PARTS = ("forward", "backward", "optimizer", "step")
SIDES = (5, 10)
SIMULATED = 2000

LAWS: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda generator: generator.gauss(0, 1),
    "one in ten much slower": lambda generator: generator.gauss(0, 1) + (generator.random() < 0.1) * 8,
    "two levels": lambda generator: generator.gauss(0, 0.2) + 2 * (generator.random() < 0.5),
    "exponential": lambda generator: generator.expovariate(1),
}
"""By name: the logarithm of a process's time, in hundredths."""


class Drawn(msgspec.Struct, kw_only=True):
    """So many comparisons of processes drawn at random."""

    what: str
    paired: bool
    side: int
    """Processes a side."""
    comparisons: int
    slower: int
    """Comparisons that found the second side slower, 1 being outside the interval."""
    faster: int
    named_backward: int
    """Those that found it slower and whose largest change is backward's."""
    ratio: float
    """The median of the ratios found."""


class Simulated(msgspec.Struct, kw_only=True):
    """How often equal sides seemed to differ."""

    law: str
    side: int
    comparisons: int
    differed: int


class Result(msgspec.Struct, kw_only=True):
    """The benchmark's result. Seconds a process, by part of the step."""

    environment: str
    rounds: int
    delay_ms: float
    alone: dict[str, list[float]]
    slower: dict[str, list[float]]
    turns_same: dict[str, list[float]]
    """The ratio of neighbouring steps, a process each."""
    turns_slower: dict[str, list[float]]
    other_cores: float | None
    """Cores that others kept busy, the median over the processes."""
    drawn: list[Drawn]
    simulated: list[Simulated]


def workload(backward_ms: float) -> FactoryWorkload:
    """The step of the example, with this delay."""
    found = OneWorkload({"module": FACTORY, "arg": (f"backward_ms={backward_ms:.4f}",)}).user_workload
    assert found is not None
    return found


def measure(rounds: int, slower: float) -> Result:
    """Measure so many rounds, and draw comparisons from them."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (first,) = run_sweep(SweepPlan(cells=(Cell(workload=workload(0), settings=SETTINGS),), out=folder))
        delay_ms = slower * (first.samples["step"].median_s or 0) * 1e3
        plain, slow = workload(0), workload(delay_ms)
        sides = {"alone": (plain, None), "slower": (slow, None), "same": (plain, plain), "turns": (plain, slow)}
        cells = [
            Cell(workload=one, against=other, settings=SETTINGS, repeat=Repeat(set=name, number=number, of=rounds))
            for number in range(1, rounds + 1)
            for name, (one, other) in sides.items()
        ]
        runs = run_sweep(SweepPlan(cells=tuple(cells), out=folder), Policy(), _say)
        by_set: dict[str, list[Run]] = {name: [] for name in sides}
        for run in runs:
            if run.status == "done" and run.repeat is not None:
                by_set[run.repeat.set].append(run)
        ratios = {name: _ratios(by_set[name], place) for name in ("same", "turns")}
    where = runs[0].environment
    others = [run.environment.host.other_cores for run in runs
              if run.environment and run.environment.host and run.environment.host.other_cores is not None]  # fmt: skip
    result = Result(
        environment=where.described if where else "", rounds=rounds, delay_ms=delay_ms, alone=_medians(by_set["alone"]),
        slower=_medians(by_set["slower"]), turns_same=ratios["same"], turns_slower=ratios["turns"],
        other_cores=statistics.median(others) if others else None, drawn=[], simulated=simulated(),
    )  # fmt: skip
    result.drawn = drawn(result)
    return result


def _say(state: object) -> None:
    ended = getattr(state, "ended", 0)
    sys.stderr.write(f"\r{ended} processes")


def _medians(runs: Sequence[Run]) -> dict[str, list[float]]:
    return {part: [run.samples[part].median_s or 0.0 for run in runs] for part in PARTS}


def _ratios(runs: Sequence[Run], place: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for run in runs:
        other = load_run(place / str(run.beside))
        for part in PARTS:
            ratios = paired_ratios(run, other, part)
            if ratios is not None and ratios.median_s is not None:
                found[part].append(ratios.median_s)
    return found


def drawn(result: Result, comparisons: int = 100) -> list[Drawn]:
    """A hundred comparisons of each kind, drawn by one seed."""
    generator = random.Random(17)
    found: list[Drawn] = []
    for side in SIDES:
        kinds: tuple[tuple[str, bool, Callable[[], dict[str, Change | None]]], ...] = (
            ("the same", False, lambda side=side: _apart(result.alone, result.alone, side, generator)),
            ("slower", False, lambda side=side: _apart(result.alone, result.slower, side, generator)),
            ("the same", True, lambda side=side: _in_turns(result.turns_same, side, generator)),
            ("slower", True, lambda side=side: _in_turns(result.turns_slower, side, generator)),
        )
        for what, paired, draw in kinds:
            changes = [draw() for _ in range(comparisons)]
            steps = [(change, change["step"]) for change in changes]
            slower = [parts for parts, step in steps if step and step.decided and step.ratio > 1]
            found.append(Drawn(
                what=what, paired=paired, side=side, comparisons=comparisons, slower=len(slower),
                faster=sum(bool(step and step.decided and step.ratio < 1) for _, step in steps),
                named_backward=sum(_largest(parts, result) == "backward" for parts in slower),
                ratio=statistics.median(step.ratio for _, step in steps if step),
            ))  # fmt: skip
    return found


def _apart(
    before: dict[str, list[float]], after: dict[str, list[float]], side: int, generator: random.Random
) -> dict[str, Change | None]:
    places = generator.sample(range(min(len(before["step"]), len(after["step"]))), 2 * side)
    return {
        part: Processes(tuple(after[part][i] for i in places[side:])).change_from(
            Processes(tuple(before[part][i] for i in places[:side]))
        )
        for part in PARTS
    }


def _in_turns(ratios: dict[str, list[float]], side: int, generator: random.Random) -> dict[str, Change | None]:
    places = generator.sample(range(len(ratios["step"])), side)
    return {part: change_of_pairs([ratios[part][i] for i in places]) for part in PARTS}


def _largest(parts: dict[str, Change | None], result: Result) -> str:
    """The phase that lost most time."""
    lost = {
        part: change.share * statistics.median(result.alone[part])
        for part, change in parts.items()
        if part != "step" and change is not None
    }
    return max(lost, key=lambda part: lost[part])


def simulated() -> list[Simulated]:
    """How often two sides of one law seem to differ."""
    generator = random.Random(5)
    found: list[Simulated] = []
    for law, draw in LAWS.items():
        for side in SIDES:

            def processes(draw: Callable[[random.Random], float] = draw, side: int = side) -> Processes:
                return Processes(tuple(math.exp(0.01 * draw(generator)) for _ in range(side)))

            changes = [processes().change_from(processes()) for _ in range(SIMULATED)]
            differed = sum(change is not None and change.decided for change in changes)
            found.append(Simulated(law=law, side=side, comparisons=SIMULATED, differed=differed))
    return found


def render(result: Result) -> str:
    """The tables in Markdown."""
    step = Processes(tuple(result.alone["step"]))
    pairs = change_of_pairs(result.turns_same["step"])
    busy = f"; others kept {result.other_cores:.1f} cores busy" if result.other_cores is not None else ""
    lines = [
        result.environment,
        "",
        f"A step of {(step.typical_s or 0) * 1e3:.2f} ms, and one whose backward takes {result.delay_ms:.2f} ms more; "
        f"{result.rounds} processes of each kind{busy}.",
        f"Between processes the step deviates by {(step.deviation or 0) * 100:.1f} %, and the ratio of two that take "
        f"turns by {((pairs.deviation if pairs else 0) or 0) * 100:.1f} %.",
        "",
        "| compared | processes a side | ratio | slower | faster | no difference | named backward |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.what}, {'in turns' if one.paired else 'apart'} | {one.side} | {one.ratio:.3f} | {one.slower} | "
        f"{one.faster} | {one.comparisons - one.slower - one.faster} | "
        f"{f'{one.named_backward} of {one.slower}' if one.slower else ''} |"
        for one in result.drawn
    ]
    lines += [
        "",
        "| law of the processes (simulated) | processes a side | equal sides seemed to differ |",
        "|---|---:|---:|",
    ]
    lines += [f"| {one.law} | {one.side} | {one.differed / one.comparisons * 100:.1f} % |" for one in result.simulated]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--slower", type=float, default=0.03)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path)
    arguments = parser.parse_args()
    if arguments.show:
        data = arguments.show.read_bytes()
        result = decode_document(data, Result, str(arguments.show), holds="result of this benchmark")
    else:
        result = measure(arguments.rounds, arguments.slower)
        keep(result, arguments.json)
    sys.stdout.write(render(result))


if __name__ == "__main__":
    main()
