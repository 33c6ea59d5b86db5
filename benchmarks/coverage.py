"""What are the intervals and the test for drift worth? Simulated, and on halves of stored runs; before and after.

    python benchmarks/coverage.py [--runs 2000] [--results results/h200] [--json FILE]     # some minutes
    python benchmarks/coverage.py --show FILE        # the tables of a result kept with --json

The simulated steps are an AR(1) process, stationary from its first step: neighbours correlate by rho. The true median
is known, so intervals can be counted that hold it. Each noise is drawn through the same process: normal (deviation 5 %
of the median), lognormal (50 %), and normal with one step in twenty longer by an exponential time (mean: 20
deviations). Half against half is `speedup_over` of the first half of a stored run's steps and the second, an odd last
step left out, of every run with at least 20 steps: A against A, so every interval should hold 1.

"Before" is what stood in stepscope until it reckoned with autocorrelation, kept here as the yardstick: the percentile
bootstrap of the median, and the Mann-Kendall test of independent samples. A drift is a finding at p < 0.01 and a change
above 5 %, as in `not-steady`.
"""

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np

from stepscope.core.run import Run
from stepscope.core.run_directory import load_run
from stepscope.core.samples import CONFIDENCE, Interval, Samples
from stepscope.runs.checks.measurement import not_steady
from stored import keep

RHOS = (0.0, 0.5, 0.9)
DEVIATION = 0.05
LEAST_STEPS = 20
NORMAL = "normal"
NOISES: dict[str, tuple[Callable[[float, random.Random], float], float]] = {
    NORMAL: (lambda level, _: 1 + DEVIATION * level, 1.0),
    "lognormal": (lambda level, _: math.exp(0.5 * level), 1.0),
    "outliers": (
        lambda level, generator: (
            1 + DEVIATION * level + (generator.random() < 0.05) * generator.expovariate(1 / (20 * DEVIATION))
        ),
        0.0,
    ),
}
"""By name: a step's time from the process's level, and the true median (0: simulated)."""


class Coverage(msgspec.Struct, kw_only=True):
    """How often intervals of n steps hold the true median. Shares of one; widths over the median."""

    noise: str
    n: int
    rho: float
    runs: int
    before: float
    before_width: float
    given: float
    """Runs that have an interval: at least five effective samples."""
    after: float
    """Of those that are given."""
    after_width: float


class Drift(msgspec.Struct, kw_only=True):
    """How often a drift is found in n steps that drift by so many standard deviations."""

    n: int
    rho: float
    deviations: float
    runs: int
    before: float
    after: float


class Halves(msgspec.Struct, kw_only=True):
    """Stored runs' first halves against their second."""

    pairs: int
    before: int
    """Intervals that exclude 1."""
    after: int
    untold: int
    """Pairs without an interval after: a half has fewer than five effective samples."""


class Result(msgspec.Struct, kw_only=True):
    """All that the tables show."""

    coverage: list[Coverage]
    drift: list[Drift]
    halves: Halves


def process(generator: random.Random, n: int, rho: float) -> list[float]:
    """A stationary AR(1) process of mean 0 and deviation 1."""
    level = generator.gauss()
    levels: list[float] = []
    for _ in range(n):
        levels.append(level)
        level = rho * level + math.sqrt(1 - rho * rho) * generator.gauss()
    return levels


def bootstrap(values: Iterable[float], generator: random.Random, resamples: int = 400) -> list[float]:
    """Medians of resamples that take the values to be independent."""
    ordered = np.asarray(list(values))
    picks = np.random.default_rng(generator.getrandbits(64)).integers(0, len(ordered), (resamples, len(ordered)))
    return np.median(ordered[picks], axis=1).tolist()


def percentiles(resampled: list[float]) -> Interval:
    """The interval that was given before."""
    ordered = sorted(resampled)
    tail = int((1 - CONFIDENCE) / 2 * len(ordered))
    return Interval(low=ordered[tail], high=ordered[-1 - tail])


def drifts_before(samples: Samples) -> bool:
    """The finding as it was: Mann-Kendall of independent samples."""
    values = np.asarray(samples.values_s)
    n = len(values)
    first, second = np.triu_indices(n, 1)
    differences = values[second] - values[first]
    z = max(0, abs(np.sign(differences).sum()) - 1) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    change = np.median(differences / (second - first)) * n / np.median(values)
    return math.erfc(z / math.sqrt(2)) < 0.01 and bool(abs(change) > 0.05)


def drifts(run: Run, samples: Samples) -> bool:
    """Whether the drift of `not-steady` is found."""
    finding = next(not_steady(msgspec.structs.replace(run, samples={"step": samples})), None)
    return finding is not None and "p_value" in finding.evidence


def of(values: Iterable[float]) -> Samples:
    """Simulated steps."""
    return Samples(values_s=tuple(values), clock="simulated")


def cover(noise: str, n: int, rho: float, runs: int) -> Coverage:
    """One row of the first table."""
    generator = random.Random(f"{noise} {n} {rho}")
    step, truth = NOISES[noise]
    if not truth:
        truth = statistics.median(step(generator.gauss(), generator) for _ in range(400_000))
    before: list[Interval] = []
    after: list[Interval] = []
    for _ in range(runs):
        samples = of(step(level, generator) for level in process(generator, n, rho))
        before.append(percentiles(bootstrap(samples.values_s, generator)))
        interval = samples.interval()
        after += [interval] if interval else []

    def covers(intervals: list[Interval]) -> float:
        return sum(i.low <= truth <= i.high for i in intervals) / max(1, len(intervals))

    def width(intervals: list[Interval]) -> float:
        return statistics.fmean((i.high - i.low) / truth for i in intervals) if intervals else 0.0

    return Coverage(
        noise=noise, n=n, rho=rho, runs=runs, before=covers(before), before_width=width(before),
        given=len(after) / runs, after=covers(after), after_width=width(after),
    )  # fmt: skip


def drift(run: Run, n: int, rho: float, deviations: float, runs: int) -> Drift:
    """One row of the second table."""
    generator = random.Random(f"drift {n} {rho} {deviations}")
    before = after = 0
    for _ in range(runs):
        levels = process(generator, n, rho)
        samples = of(1 + DEVIATION * (level + deviations * i / (n - 1)) for i, level in enumerate(levels))
        before += drifts_before(samples)
        after += drifts(run, samples)
    return Drift(n=n, rho=rho, deviations=deviations, runs=runs, before=before / runs, after=after / runs)


def stored_runs(results: Path) -> list[Run]:
    """The stored runs with enough steps to be halved."""
    runs = [load_run(path) for path in sorted(results.rglob("run.json"))]
    return [run for run in runs if "step" in run.samples and run.samples["step"].count >= LEAST_STEPS]


def halves(runs: list[Run]) -> Halves:
    """The third table."""
    generator = random.Random(1)
    before = after = untold = 0
    for run in runs:
        values = run.samples["step"].values_s
        half = len(values) // 2
        first, second = of(values[:half]), of(values[half : 2 * half])
        medians = zip(*(bootstrap(side.values_s, generator, 2000) for side in (first, second)), strict=True)
        old = percentiles([a / b for a, b in medians])
        before += not old.low <= 1 <= old.high
        ratio = second.speedup_over(first)
        untold += ratio is None or ratio.interval is None
        after += ratio is not None and not ratio.undecided
    return Halves(pairs=len(runs), before=before, after=after, untold=untold)


def simulate(runs: int, results: Path) -> Result:
    """Everything."""
    stored = stored_runs(results)
    cells = [(NORMAL, n, rho) for n in (10, 30, 100) for rho in RHOS]
    cells += [(noise, 30, rho) for noise in ("lognormal", "outliers") for rho in RHOS]
    drifting = [(n, rho, 0.0) for n in (30, 100) for rho in RHOS] + [(30, rho, 5.0) for rho in RHOS]
    return Result(
        # Few of the last have an interval, and those are what counts.
        coverage=[cover(noise, n, rho, runs * 5 if rho > 0.5 and n < 100 else runs) for noise, n, rho in cells],
        drift=[drift(stored[0], *cell, 2 * runs if cell[0] == 30 else runs // 2) for cell in drifting],
        halves=halves(stored),
    )


def render(result: Result) -> str:
    """Three Markdown tables."""
    heads = ("noise", "n", "rho", "before", "after", "given", "width after / before")
    rows = [
        (
            row.noise, str(row.n), f"{row.rho:g}", share(row.before), share(row.after), share(row.given, 0),
            f"{row.after_width / row.before_width:.2f}",
        )
        for row in result.coverage
    ]  # fmt: skip
    text = markdown(heads, rows)
    heads = ("n", "rho", "drift, deviations", "found before", "found after")
    rows = [
        (str(row.n), f"{row.rho:g}", f"{row.deviations:g}", share(row.before), share(row.after)) for row in result.drift
    ]
    text += "\n" + markdown(heads, rows)
    found = result.halves
    heads = ("halves compared", "interval excludes 1 before", "after", "cannot be told after")
    return text + "\n" + markdown(heads, [tuple(map(str, (found.pairs, found.before, found.after, found.untold)))])


def share(value: float, digits: int = 1) -> str:
    """In percent."""
    return f"{value * 100:.{digits}f} %"


def markdown(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table."""
    return "".join("| " + " | ".join(row) + " |\n" for row in (heads, ("---",) * len(heads), *rows))


def main() -> None:
    """Print the tables; with --json also keep what they show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="simulated runs a row; at least 4")
    parser.add_argument("--results", type=Path, default=Path("results/h200"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.show:
        sys.stdout.write(render(msgspec.json.decode(arguments.show.read_bytes(), type=Result)))
        return
    result = simulate(max(4, arguments.runs), arguments.results)
    sys.stdout.write(render(result))
    keep(result, arguments.json)


if __name__ == "__main__":
    main()
