"""Samples of which only the statistics are kept: what lists and tables of many runs read."""

import msgspec

from stepscope.core.samples import FEWEST_FOR_PERCENTILE, Interval, Samples


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """The statistics of some samples, in seconds; None as in Samples."""

    count: int
    median_s: float | None
    mean_s: float | None
    stdev_s: float | None
    percentiles_s: tuple[float | None, ...]
    """As FEWEST_FOR_PERCENTILE names them."""
    effective_count: float | None
    interval: Interval | None
    why_no_interval: str | None
    wandering: float
    first_s: float | None
    smallest_s: float | None
    largest_s: float | None


class KnownSamples(Samples, frozen=True, kw_only=True):
    """The statistics of samples, without the samples. Nothing that needs each of them can be asked."""

    known: Figures

    def __post_init__(self) -> None:
        """There are no values to check: they were, when the figures were made of them."""

    @property
    def count(self) -> int:
        return self.known.count

    @property
    def median_s(self) -> float | None:
        return self.known.median_s

    @property
    def mean_s(self) -> float | None:
        return self.known.mean_s

    @property
    def stdev_s(self) -> float | None:
        return self.known.stdev_s

    @property
    def first_s(self) -> float | None:
        return self.known.first_s

    @property
    def smallest_s(self) -> float | None:
        return self.known.smallest_s

    @property
    def largest_s(self) -> float | None:
        return self.known.largest_s

    @property
    def effective_count(self) -> float | None:
        return self.known.effective_count

    @property
    def why_no_interval(self) -> str | None:
        return self.known.why_no_interval

    @property
    def wandering(self) -> float:
        return self.known.wandering

    def percentile_s(self, name: str) -> float | None:
        """The percentile of this name (p95, p99), as it was found."""
        return self.known.percentiles_s[tuple(FEWEST_FOR_PERCENTILE).index(name)]

    def interval(self) -> Interval | None:
        """The confidence interval of the median, as it was found."""
        return self.known.interval


def known(samples: Samples) -> KnownSamples:
    """The statistics of these samples."""
    if isinstance(samples, KnownSamples):
        return samples
    figures = Figures(
        count=samples.count,
        median_s=samples.median_s,
        mean_s=samples.mean_s,
        stdev_s=samples.stdev_s,
        percentiles_s=tuple(map(samples.percentile_s, FEWEST_FOR_PERCENTILE)),
        effective_count=samples.effective_count,
        interval=samples.interval(),
        why_no_interval=samples.why_no_interval,
        wandering=samples.wandering,
        first_s=samples.first_s,
        smallest_s=samples.smallest_s,
        largest_s=samples.largest_s,
    )
    return KnownSamples(values_s=(), clock=samples.clock, known=figures)
