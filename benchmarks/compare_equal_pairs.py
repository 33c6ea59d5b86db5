"""How often does a comparison say that equal steps differ, where what is measured drifts? Simulated.

    python benchmarks/compare_equal_pairs.py [--pairs 1000] [--json FILE]        # minutes; Ctrl-C keeps what is done
    python benchmarks/compare_equal_pairs.py --show FILE       # the tables of a result kept with --json

First table: two sets of processes of one step, as runs with their times, go through `compare`. Their logarithms follow
one noise along time, of deviation 2 %: independent; correlated from neighbour to neighbour by rho (AR(1)); or of power
1 / frequency, a window of a series 64 times as long. The sets were measured one after the other, the second a day
later, or in turns. "Before" is Welch's interval alone, as it was until times were looked at. "Found" is the share of
pairs that are called different where they do differ, by twice the half-width that the intervals have on average.

Second table: one process a side, by the steps alone. Each process is a window of its own of the same noises; `w + 1/f`
is white noise on top. "Before" is the interval of the ratio as it was until slow waves were looked at.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from stepscope.core.files import decode_document
from stepscope.core.model_config import configure
from stepscope.core.run import Run, Settings
from stepscope.core.samples import Ratio, Samples
from stepscope.core.workloads import TextbookWorkload
from stepscope.questions.compare import Side, SideComparison, compare_sides
from stepscope.runs.index import known
from stored import keep

DEVIATION = 0.02
LONGER = 64
SIDES = (5, 10, 20)
STEPS = (30, 100, 300, 1000)
PACE_S, DAY_S = 30.0, 86_400.0
AFTER, LATER, TURNS = "one after the other", "the second a day later", "in turns"
BASE = Run(
    id="", created="", status="done", workload=TextbookWorkload(model=configure("tiny")), settings=Settings(),
    samples={},
)  # fmt: skip

Noise = Callable[[np.random.Generator, int], np.ndarray]


def correlated(rho: float) -> Noise:
    """AR(1) noise of deviation 1."""

    def noise(generator: np.random.Generator, count: int) -> np.ndarray:
        drawn = generator.normal(size=count)
        for place in range(1, count):
            drawn[place] = rho * drawn[place - 1] + math.sqrt(1 - rho * rho) * drawn[place]
        return drawn

    return noise


def pink(generator: np.random.Generator, count: int) -> np.ndarray:
    """A window of noise of power 1 / frequency, of deviation 1 over the whole series."""
    length = LONGER * count
    frequencies = np.fft.rfftfreq(length)
    amplitudes = np.concatenate([[0.0], frequencies[1:] ** -0.5])
    waves = (generator.normal(size=len(frequencies)) + 1j * generator.normal(size=len(frequencies))) * amplitudes
    series = np.fft.irfft(waves, length)
    first = generator.integers(0, length - count + 1)
    return series[first : first + count] / series.std()


NOISES: dict[str, Noise] = {
    "independent": correlated(0.0), "rho 0.3": correlated(0.3), "rho 0.5": correlated(0.5), "1/f": pink,
}  # fmt: skip
OF_STEPS: dict[str, Noise] = {
    "independent": correlated(0.0), "rho 0.5": correlated(0.5), "rho 0.9": correlated(0.9), "1/f": pink,
    "w + 1/f": lambda generator, count: (pink(generator, count) + generator.normal(size=count)) / math.sqrt(2),
}  # fmt: skip


class OfSets(msgspec.Struct, kw_only=True):
    """So many pairs of sets of one noise, size and order. Shares of one."""

    noise: str
    order: str
    side: int
    pairs: int
    before: float
    """Equal pairs that Welch's interval alone calls different."""
    after: float
    untold: float
    """Equal pairs of which it is said that it cannot be told, since the sides did not take turns."""
    wider: float
    """How many times as wide the interval is, the median."""
    found: float
    """Pairs that differ by twice the mean half-width, and are called different."""


class OfSteps(msgspec.Struct, kw_only=True):
    """So many pairs of processes of one noise and length. Shares of one."""

    noise: str
    steps: int
    pairs: int
    before: float
    after: float
    given: float
    """Pairs that have an interval."""
    wider: float
    """How many times as wide the ratio's interval is, the median."""


class Result(msgspec.Struct, kw_only=True):
    """All that the tables show."""

    pairs: int
    sets: list[OfSets] = []
    steps: list[OfSteps] = []


def places_of(order: str, side: int) -> tuple[list[int], list[int]]:
    """The places along the noise that the processes of each side have."""
    if order == TURNS:
        return [*range(0, 2 * side, 2)], [*range(1, 2 * side, 2)]
    return [*range(side)], [*range(side, 2 * side)]


def side_of(name: str, levels: np.ndarray, begun_s: list[float], change: float = 0.0) -> Side:
    """A side of a comparison: a run a process."""
    runs: list[tuple[Run, Path]] = []
    for number, (level, begun) in enumerate(zip(levels, begun_s, strict=True)):
        step = Samples(values_s=(0.1 * math.exp(DEVIATION * level + change),), clock="simulated")
        created = datetime.fromtimestamp(1.7e9 + begun, UTC).isoformat()
        run = msgspec.structs.replace(BASE, id=f"{name}{number}", created=created, samples={"step": step})
        runs.append((run, Path(name)))
    return Side(name=name, kind="path", runs=tuple(runs))


def compared(generator: np.random.Generator, noise: Noise, order: str, side: int, change: float) -> SideComparison:
    """Two sides that differ by this logarithm, compared."""
    levels, places = noise(generator, 2 * side), places_of(order, side)
    late = DAY_S if order == LATER else 0.0
    first, second = (
        [PACE_S * place + pause for place in found] for found, pause in zip(places, (0, late), strict=True)
    )
    return compare_sides(
        side_of("a", levels[places[0]], first), side_of("b", levels[places[1]], second, change)
    )  # fmt: skip


def of_sets(name: str, order: str, side: int, pairs: int) -> OfSets:
    """One row of the first table."""
    generator = np.random.default_rng([17, side, [*NOISES].index(name), len(order)])
    equal = [compared(generator, NOISES[name], order, side, 0.0) for _ in range(pairs)]
    changes = [change for one in equal for change in one.changes if change is not None and change.interval is not None]
    half_width = statistics.fmean(math.log(c.interval.high / c.interval.low) / 2 for c in changes if c.interval)
    unlike = [compared(generator, NOISES[name], order, side, 2 * half_width) for _ in range(pairs)]
    return OfSets(
        noise=name, order=order, side=side, pairs=pairs,
        before=sum(c.seemed or (c.widened == 1 and c.decided) for c in changes) / pairs,
        after=sum(one.stands[0] for one in equal) / pairs, untold=sum(c.may_be_drift for c in changes) / pairs,
        wider=statistics.median(c.widened for c in changes), found=sum(one.stands[0] for one in unlike) / pairs,
    )  # fmt: skip


def of_steps(name: str, steps: int, pairs: int) -> OfSteps:
    """One row of the second table."""
    generator = np.random.default_rng([19, steps, [*OF_STEPS].index(name)])

    def process() -> Samples:
        levels = OF_STEPS[name](generator, steps)
        return Samples(values_s=tuple((0.1 * np.exp(DEVIATION * levels)).tolist()), clock="simulated")

    before: list[Ratio] = []
    after: list[Ratio] = []
    for _ in range(pairs):
        one, other = process(), process()
        ratio, plain = one.speedup_over(other), _plain(one).speedup_over(_plain(other))
        assert ratio is not None and plain is not None
        before.append(plain)
        after.append(ratio)
    both = [(a.interval, b.interval) for a, b in zip(after, before, strict=True) if a.interval and b.interval]
    return OfSteps(
        noise=name, steps=steps, pairs=pairs, before=sum(not one.undecided for one in before) / pairs,
        after=sum(not one.undecided for one in after) / pairs, given=len(both) / pairs,
        wider=statistics.median(math.log(a.high / a.low) / math.log(b.high / b.low) for a, b in both) if both else 1.0,
    )  # fmt: skip


def _plain(samples: Samples) -> Samples:
    """The samples, as if no slow wave had been looked for."""
    found = known(samples)
    return msgspec.structs.replace(found, known=msgspec.structs.replace(found.known, wandering=1.0))


def rows(pairs: int) -> Iterator[tuple[str, Callable[[], OfSets | OfSteps]]]:
    """Every row, with its name."""
    for order in (AFTER, LATER, TURNS):
        for name in NOISES:
            for side in SIDES:
                yield f"{name}, {order}, {side} a side", lambda n=name, o=order, s=side: of_sets(n, o, s, pairs)
    for name in OF_STEPS:
        for steps in STEPS:
            yield f"{name}, {steps} steps", lambda n=name, s=steps: of_steps(n, s, pairs)


def simulate(pairs: int, path: Path | None) -> Result:
    """Every row, kept as soon as it is there; those that are done where it is interrupted."""
    result, every = Result(pairs=pairs), [*rows(pairs)]
    for number, (name, row) in enumerate(every, 1):
        sys.stderr.write(f"\r{number} of {len(every)}: {name:<50}")
        try:
            found = row()
        except KeyboardInterrupt:
            sys.stderr.write("\ninterrupted: what is done is kept\n")
            break
        if isinstance(found, OfSets):
            result.sets.append(found)
        else:
            result.steps.append(found)
        keep(result, path)
    sys.stderr.write("\n")
    return result


def render(result: Result) -> str:
    """The tables in Markdown."""
    lines = [
        "| noise | measured | a side | differ before | differ after | cannot be told | interval wider | found |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.noise} | {row.order} | {row.side} | {_share(row.before)} | {_share(row.after)} | "
        f"{_share(row.untold)} | {row.wider:.2f} | {_share(row.found)} |"
        for row in result.sets
    ]
    lines += [
        "", "| noise of the steps | steps | differ before | differ after | have an interval | interval wider |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    lines += [
        f"| {row.noise} | {row.steps:,} | {_share(row.before)} | {_share(row.after)} | {row.given * 100:.0f} % | "
        f"{row.wider:.2f} |"
        for row in result.steps
    ]
    return "\n".join(lines) + "\n"


def _share(share: float) -> str:
    return f"{share * 100:.1f} %"


def main() -> None:
    """Print the tables; with --json also keep what they show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path)
    arguments = parser.parse_args()
    if arguments.show:
        result = decode_document(
            arguments.show.read_bytes(), Result, str(arguments.show), holds="result of this benchmark"
        )
    else:
        result = simulate(max(1, arguments.pairs), arguments.json)
    sys.stdout.write(render(result))


if __name__ == "__main__":
    main()
