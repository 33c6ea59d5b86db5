"""Trends of runs: what belongs together, and what is said of a change."""

from typing import Any

import msgspec

from stepscope.core.run import Repeat, Run
from stepscope.runs.history import answer_history, answer_trend, trends_of
from tests.conftest import make_run, workload


def runs(count: int, first: int = 0, scale: float = 1.0, *, torch: str = "2.13.0", **changes: Any) -> list[Run]:
    """Runs a day apart, with a little noise that is the same each time, at a commit a day."""
    found: list[Run] = []
    for i in range(first, first + count):
        run = make_run(step=[scale * (1 + 0.001 * (i * 7 % 5))] * 6, **changes)
        assert run.environment is not None
        where = msgspec.structs.replace(
            run.environment, git_commit=f"{i:040d}", git_dirty=i == 9, versions={"torch": torch}
        )
        created = f"2026-{1 + i // 28:02d}-{1 + i % 28:02d}T00:00:00+00:00"
        found.append(msgspec.structs.replace(run, id=f"r{i}", created=created, environment=where))
    return found


def test_a_slower_commit_is_dated_with_what_else_changed():
    [trend] = trends_of(runs(10) + runs(10, 10, 1.1, torch="2.14.0"))
    [change] = trend.changes
    assert (change.before.run.id, change.after.run.id) == ("r9", "r10")
    assert change.before.commit == "0000000000+"
    assert change.environment == ("torch 2.13.0 -> 2.14.0",)
    assert abs(change.share - 0.1) < 0.005
    [finding] = answer_history([trend]).findings
    assert finding.severity == "warning"
    assert "10.0 % slower by 2026-01-11 between 0000000000+ and 0000000000" in finding.sentence
    assert "torch 2.13.0 -> 2.14.0 changed at the same time" in finding.sentence
    assert answer_trend(trend).table("runs").rows[10][-1] == "new level"
    assert trend.document.changes[0].before == "r9"


def test_runs_of_one_set_are_one_point():
    repeated = [
        msgspec.structs.replace(run, repeat=Repeat(set="s", number=i + 1, of=5)) for i, run in enumerate(runs(5))
    ]
    [trend] = trends_of(repeated + runs(2, 5))
    assert [len(moment.runs.runs) for moment in trend.moments] == [5, 1, 1]


def test_other_workloads_and_fixed_warm_ups_are_other_trends():
    settings = make_run(step=[1.0]).settings
    fixed = runs(2, settings=msgspec.structs.replace(settings, warmup_floor=0, warmup_cap=0))
    assert len(trends_of(runs(2) + runs(2, of=workload(seq_len=64)) + fixed)) == 3


def test_a_run_without_samples_is_counted_apart():
    failed = make_run(status="out-of-memory")
    [trend] = trends_of([*runs(2), failed])
    assert (len(trend.moments), trend.unmeasured) == (2, 1)
    assert "1 run without a measured step left out." in [line.text for line in answer_history([trend]).tables[0].notes]
    [alone] = trends_of([failed])
    assert answer_trend(alone).panels == ()
