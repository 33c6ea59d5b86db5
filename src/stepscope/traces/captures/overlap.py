"""The communication that hides behind computation, per device, in exact nanoseconds.

Communication is the union of the kernels of that family. Computation is the union of all other kernels and whole graphs
(copies and fills are neither). Hidden is the intersection of the two, exposed is the rest. A collective's kernel also
spins while it waits for its peers, so exposed time includes both the network and the slowest rank.
"""

from dataclasses import dataclass

import polars as pl

from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.captures.intervals import covered_ns, length_ns, pieces


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Communication and computation on one device.

    `by_kernel`: name, calls, busy_ns, hidden_ns of each communication kernel, the most exposed first. Its times are
    sums, in which each of several concurrent collectives counts.
    """

    device: int
    name: str | None
    communication_ns: int
    computation_ns: int
    hidden_ns: int
    by_kernel: pl.DataFrame

    @property
    def exposed_ns(self) -> int:
        """The time of communication during which no computation ran."""
        return self.communication_ns - self.hidden_ns

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of the communication, from 0 to 1; None without communication."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None


def overlap(attribution: Attribution) -> tuple[Overlap, ...]:
    """The overlap on each device; empty for a CPU trace, since its operators' times are nested."""
    kernels = attribution.kernels
    if attribution.table.on_cpu:
        return ()
    return tuple(
        _overlap_on(kernels.filter(pl.col("device") == device), device, attribution.table.devices.get(device))
        for device in kernels["device"].unique().sort().to_list()
    )


def _overlap_on(kernels: pl.DataFrame, device: int, name: str | None) -> Overlap:
    communicates = pl.col("family") == "communication"
    collectives = kernels.filter(communicates)
    computation = pieces(kernels.filter(~communicates))
    communication = pieces(collectives)
    ends = collectives["start_ns"] + collectives["duration_ns"]
    by_kernel = (
        collectives.select("name", "duration_ns", covered_ns(computation, collectives["start_ns"], ends))
        .group_by(pl.col("name").cast(pl.String))
        .agg(
            pl.len().alias("calls"),
            pl.col("duration_ns").sum().alias("busy_ns"),
            pl.col("covered_ns").sum().alias("hidden_ns"),
        )
        .sort(pl.col("busy_ns") - pl.col("hidden_ns"), "name", descending=[True, False])
    )
    return Overlap(
        device=device,
        name=name,
        communication_ns=length_ns(communication),
        computation_ns=length_ns(computation),
        hidden_ns=int(covered_ns(computation, communication["start_ns"], communication["end_ns"]).sum()),
        by_kernel=by_kernel,
    )
