"""A job's ranks as plain data, which `stepscope trace RANK0 RANK1 --json` prints."""

from typing import Any

import msgspec
import polars as pl

from stepscope.core.finding import Finding
from stepscope.traces.ranks.job import Job


def job_as_json(job: Job, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The ranks, their collectives and who waits for whom. Times are in nanoseconds over the whole capture."""
    clocks = {clock.rank: clock for clock in job.matched.clocks}
    return {
        "ranks": [
            {
                "rank": rank.number,
                "source": rank.source,
                "device": rank.device,
                "steps": rank.steps,
                "kernels": rank.kernels,
                "busy_ns": rank.busy_ns,
                "union_ns": rank.union_ns,
                "idle_ns": rank.idle_ns,
                "computation_ns": rank.computation_ns,
                "communication_ns": rank.communication_ns,
                "exposed_communication_ns": rank.exposed_ns,
                "waiting_ns": job.waiting_ns(rank.number),
                "stalled_ns": job.stalled_ns(rank.number),
                "waited_for_ns": job.waited_for_ns(rank.number),
                "last_arrivals": job.last_arrivals(rank.number),
                "unmatched_collectives": job.matched.unmatched[rank.number],
                "clock_offset_ns": clocks[rank.number].offset_ns,
                "clock_residual_ns": clocks[rank.number].residual_ns,
            }
            for rank in job.ranks
        ],
        "world_size": job.size,
        "collectives": job.collectives.drop("transfer_ns")
        .with_columns(pl.Series("transfer_ns", job.collectives["transfer_ns"] / job.collectives["calls"]))
        .to_dicts(),
        "matched_by": "sequence" if job.matched.by_sequence else "order",
        "waits": job.waits.to_dicts(),
        "uneven": job.times.to_dicts(),
        "findings": [msgspec.to_builtins(finding) for finding in findings],
    }
