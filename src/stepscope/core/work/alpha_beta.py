"""Latency and bandwidth of a link, fitted to times over sizes: t(S) = alpha + S / beta (Hockney 1994).

Sizes span six orders of magnitude, so errors count relative to the time: the sum of ((alpha + S / beta) / t - 1)^2 is
smallest. It is linear in alpha and 1 / beta, so two equations solve it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LatencyAndBandwidth:
    """A line through times over sizes."""

    latency_s: float
    bytes_per_s: float | None
    """None where time does not grow with size: all messages were too small."""
    residual: float
    """The root of the mean square of the relative errors."""
    count: int
    """How many sizes it is of."""

    def seconds(self, message_bytes: float) -> float:
        """How long a message of this size takes."""
        return self.latency_s + (message_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


def fit_latency_and_bandwidth(times: Sequence[tuple[float, float]]) -> LatencyAndBandwidth | None:
    """The line through pairs of bytes and seconds; None of less than two sizes. Neither parameter is below zero."""
    known = [(size, seconds) for size, seconds in times if seconds > 0]
    if len({size for size, _ in known}) < 2:
        return None
    # One row a size: alpha (1 / t) + slope (S / t) = 1.
    rows = [(1 / seconds, size / seconds) for size, seconds in known]
    aa, ab, bb = (math.fsum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (math.fsum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    alpha, slope = (bb * a1 - ab * b1) / determinant, (aa * b1 - ab * a1) / determinant
    if alpha < 0:
        alpha, slope = 0.0, b1 / bb
    elif slope <= 0:
        alpha, slope = a1 / aa, 0.0
    errors = [alpha * by_alpha + slope * by_slope - 1 for by_alpha, by_slope in rows]
    return LatencyAndBandwidth(
        latency_s=alpha, bytes_per_s=1 / slope if slope else None, count=len(rows),
        residual=math.sqrt(math.fsum(error * error for error in errors) / len(rows)),
    )  # fmt: skip
