"""Several ranks of one job: who waits for whom, worked out by hand; clocks; and captures that do not fit together."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.core.errors import InputError
from stepscope.core.formulas.communication import KINDS, kind_of, message_bytes
from stepscope.traces.ranks import Job, Rank, captures_in, job_of, load_job, needed_bytes, processes_for, read_ranks
from stepscope.traces.ranks_answer import answer_job, check_job, job_as_json
from tests.captures import GEMM
from tests.engine.test_sweep import wait_for
from tests.public import public_capture
from tests.traces.ranks.jobs import ALL_REDUCE, TRANSFER_NS, Made

LATER_NS = 5_000_000


def load(paths: list[Path]) -> Job:
    return load_job(paths, say=lambda _: None)


def kinds(job: Job) -> set[str]:
    return {finding.kind for finding in check_job(job)}


def test_a_rank_that_computes_longer_is_waited_for(tmp_path: Path):
    job = load(Made(ranks=3, steps=4, later_ns={1: LATER_NS}).write(tmp_path))
    assert [rank.number for rank in job.ranks] == [0, 1, 2] and job.size == 3 and job.steps == 4
    assert [job.waiting_ns(rank) for rank in range(3)] == [4 * LATER_NS, 0, 4 * LATER_NS]
    assert job.waited_for_ns(1) == 8 * LATER_NS and job.last_arrivals(1) == 4
    assert [job.stalled_ns(rank) for rank in range(3)] == [4 * LATER_NS, 0, 4 * LATER_NS]
    assert job.matched.by_sequence and set(job.matched.unmatched.values()) == {0}
    exposed = [rank.exposed_ns for rank in job.ranks]
    assert exposed == [4 * (LATER_NS + TRANSFER_NS), 4 * TRANSFER_NS, 4 * (LATER_NS + TRANSFER_NS)]
    (row,) = job.collectives.to_dicts()
    # nccl-tests: 2 (n - 1) / n bytes on each link for each byte; 25 million floats in 2 ms.
    assert row["bus_bytes_per_s"] == pytest.approx(2 * 2 / 3 * 100e6 / 2e-3)
    assert (row["kind"], row["bytes"], row["calls"], row["skew_ns"]) == ("all-reduce", 100_000_000, 4, LATER_NS)
    (waits,) = (table for table in answer_job(job, (), "here").tables if table.columns[0] == "who waits for whom")
    assert set(waits.rows) == {(f"rank {rank} for rank 1", 4, LATER_NS, LATER_NS) for rank in (0, 2)}


def test_the_straggler_is_named_with_the_module_that_delays_it(tmp_path: Path):
    job = load(Made(ranks=4, steps=4, later_ns={2: LATER_NS}).write(tmp_path))
    (finding,) = [finding for finding in check_job(job) if finding.kind == "straggler"]
    assert finding.sentence == (
        "Rank 2 arrives last at 4 of 4 collectives, by up to 5.00 ms in the median step, 6.3 % of it; for 5.00 ms of "
        "that another rank does nothing but wait. It computes 5.00 ms a step more than the others do, in forward of "
        "layers.1.mlp."
    )
    assert finding.evidence["latest_ns"] == LATER_NS == finding.evidence["excess_ns_a_step"]


def test_ranks_that_keep_step_have_no_straggler(tmp_path: Path):
    job = load(Made(ranks=4, steps=4, later_ns={2: 10_000}).write(tmp_path))
    assert kinds(job) == set()


@pytest.mark.parametrize("sequences", [True, False])
def test_clocks_of_different_hosts_are_set_by_the_ends_of_collectives(tmp_path: Path, sequences: bool):
    made = Made(ranks=3, later_ns={0: LATER_NS}, clocks_ns={1: 40_000_000, 2: -7_000_000}, sequences=sequences)
    job = load(made.write(tmp_path))
    assert [clock.offset_ns for clock in job.matched.clocks] == [0, 40_000_000, -7_000_000]
    assert [job.waiting_ns(rank) for rank in range(3)] == [0, 4 * LATER_NS, 4 * LATER_NS]
    assert kinds(job) == {"straggler", "clocks-moved"}


def test_a_shared_clock_is_left_as_it_is(tmp_path: Path):
    job = load(Made(clocks_ns={1: 30_000}).write(tmp_path))
    clock = job.matched.clocks[1]
    assert (clock.offset_ns, clock.measured_ns, clock.residual_ns) == (0, 30_000, 0)
    assert job.waiting_ns(0) == 4 * 30_000  # as the clock says


@pytest.mark.parametrize(("apart_us", "said"), [(50, True), (1500, False)])
def test_ends_far_apart_do_not_say_that_clocks_are_one(tmp_path: Path, apart_us: int, said: bool):
    """Rank 1 ends earlier, at once and later by turns, so that the median difference is zero."""
    paths = Made(steps=5).write(tmp_path)
    trace = json.loads(paths[1].read_text())
    met = [event for event in trace["traceEvents"] if event["name"] == ALL_REDUCE]
    for event, sign in zip(met, (-1, 1, 0, -1, 1), strict=True):
        event["dur"] += sign * apart_us
    paths[1].write_text(json.dumps(trace))
    lead = " ".join(line.text for line in answer_job(load(paths), (), "it").lead)
    assert ("their clocks count as one" in lead) == said


def test_without_what_the_profiler_says_names_and_order_match(tmp_path: Path):
    job = load(Made(later_ns={1: LATER_NS}, told=False).write(tmp_path))
    assert not job.matched.by_sequence and job.waiting_ns(0) == 4 * LATER_NS
    (row,) = job.collectives.to_dicts()
    assert (row["kind"], row["bytes"], row["bus_bytes_per_s"]) == ("all-reduce", None, None)


def test_waiting_behind_computation_is_no_standing_still(tmp_path: Path):
    paths = Made(later_ns={1: LATER_NS}).write(tmp_path)
    trace = json.loads(paths[0].read_text())
    beside = [
        # On another stream, from 1 ms after the arrival on, for 3 ms of the 5 that this rank waits.
        event | {"name": GEMM, "ts": event["ts"] + 1000, "dur": 3000, "tid": 8,
                 "args": {"device": 0, "stream": 8, "correlation": 10_000 + place}}
        for place, event in enumerate(trace["traceEvents"]) if event["name"] == ALL_REDUCE
    ]  # fmt: skip
    trace["traceEvents"] += beside
    paths[0].write_text(json.dumps(trace))
    job = load(paths)
    assert job.waiting_ns(0) == 4 * LATER_NS
    assert job.stalled_ns(0) == 4 * (LATER_NS - 3_000_000)
    assert job.in_a_step(0) == (LATER_NS, LATER_NS - 3_000_000) and job.in_a_step(1) == (0, 0)


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 20_000_000), min_size=2, max_size=5))
def test_waiting_is_what_the_last_comes_later(tmp_path_factory: pytest.TempPathFactory, later: list[int]):
    made = Made(ranks=len(later), steps=2, later_ns=dict(enumerate(later)))
    job = load(made.write(tmp_path_factory.mktemp("job")))
    assert [job.waiting_ns(rank) for rank in range(len(later))] == [2 * (max(later) - own) for own in later]
    assert sum(job.waited_for_ns(rank) for rank in range(len(later))) == sum(2 * (max(later) - own) for own in later)


def test_a_missing_rank_is_said(tmp_path: Path):
    paths = Made(ranks=4, later_ns={3: LATER_NS}).write(tmp_path)
    job = load(paths[:3])
    assert job.size == 4 and kinds(job) == {"ranks-absent"}
    assert [job.waiting_ns(rank) for rank in range(3)] == [0, 0, 0]


def test_a_rank_whose_capture_cannot_be_true_is_named(tmp_path: Path):
    """As `trace` of that capture alone says it; a job of sound captures has no such finding."""
    paths = Made().write(tmp_path)
    assert not any(rank.doubts for rank in load(paths).ranks)
    trace = json.loads(paths[1].read_text())
    untimed = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"][:2]
    for event in untimed:
        event["ts"] = event["dur"] = 0
    paths[1].write_text(json.dumps(trace))
    (found,) = (one for one in check_job(load(paths)) if one.kind == "times-missing")
    assert found.severity == "error" and found.sentence.startswith("Rank 1: 2 of ")
    assert (found.evidence["ranks"], found.evidence["no_duration"]) == (1, 2)


def test_one_rank_twice_and_ranks_of_two_jobs_are_refused(tmp_path: Path):
    paths = Made().write(tmp_path)
    copy = tmp_path / "again.json"
    copy.write_text(paths[0].read_text())
    with pytest.raises(InputError, match=r"rank 0 is here twice: .*job_0\.json and .*again\.json: give one of them"):
        load([*paths, copy])
    other = Made(ranks=3).write(tmp_path / "other")
    with pytest.raises(InputError, match=r"of different jobs: .* is of 2 ranks and .* of 3"):
        load([paths[0], other[1]])


def test_a_rank_that_was_cut_short(tmp_path: Path):
    paths = Made(steps=4, later_ns={1: LATER_NS}).write(tmp_path)
    short = Made(steps=2, later_ns={1: LATER_NS}).trace(1)
    paths[1].write_text(json.dumps(short))
    job = load(paths)
    assert job.waiting_ns(0) == 2 * LATER_NS and job.matched.unmatched == {0: 2, 1: 0}
    (said,) = [finding.sentence for finding in check_job(job) if finding.kind == "steps-differ"]
    assert "rank 0 has 4 steps from 7 to 10; rank 1 has 2 steps from 7 to 8" in said


def test_ranks_with_more_steps_compute_no_more_in_each(tmp_path: Path):
    """Six steps and three of equal length: what a rank spends a step is even."""
    paths = Made(steps=6).write(tmp_path)
    paths[1].write_text(json.dumps(Made(steps=3).trace(1)))
    job = load(paths)
    assert job.steps == 3 and not [excess for excess in job.excesses(0) if excess.what == "computation"]
    computed = job.times.filter(pl.col("what") == "computation")
    assert computed.height and computed["mean_ns"].to_list() == computed["most_ns"].to_list()
    a_step = computed["most_ns"].sum() / job.steps
    assert [rank.computation_ns / rank.steps for rank in job.ranks] == [a_step, a_step]


def test_communication_of_a_cpu_is_no_computation(tmp_path: Path):
    """Two operators of gloo in autograd's thread, 30 and 20 us; two of computation, 100 and 50 us."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": length, "args": {}}
        for name, begin, length in (
            ("aten::mm", 0, 100), ("c10d::allreduce_", 100, 30), ("aten::mm", 200, 50), ("gloo:all_reduce", 260, 20),
        )
    ]  # fmt: skip
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    (rank,) = load([path]).ranks
    assert (rank.computation_ns, rank.communication_ns, rank.exposed_ns) == (150_000, 50_000, 50_000)
    assert rank.busy_ns == 200_000 and rank.times["duration_ns"].sum() == 150_000


def test_figures_of_collectives_that_cannot_be_are_unknown(tmp_path: Path):
    paths = Made().write(tmp_path)
    for said in ({"In msg nelems": -5, "Out msg nelems": -5}, {"In msg nelems": 2**62, "Group size": 0}):
        for path in paths:
            trace = json.loads(path.read_text())
            for event in trace["traceEvents"]:
                if event["name"] == ALL_REDUCE:
                    event["args"] |= said
            path.write_text(json.dumps(trace))
        (row,) = load(paths).collectives.to_dicts()
        assert (row["bytes"], row["bus_bytes_per_s"], row["group_size"], row["calls"]) == (None, None, 2, 4)


def test_a_copy_and_a_rank_beyond_the_job_are_refused(tmp_path: Path):
    made, nameless = Made(), tmp_path / "x.json"
    paths = made.write(tmp_path)
    trace = made.trace(0)
    del trace["distributedInfo"]
    nameless.write_text(json.dumps(trace))
    with pytest.raises(InputError, match=r"x\.json would be rank 2, but the job has 2 ranks, from 0: leave it out"):
        load([*paths, nameless])
    copy = tmp_path / "y.json"
    copy.write_text(nameless.read_text())
    with pytest.raises(InputError, match=r"x\.json and .*y\.json hold the same work at the same time: give one"):
        load([nameless, copy])


def test_ranks_of_different_steps_meet_nowhere(tmp_path: Path):
    paths = Made(sequences=False).write(tmp_path)
    later = json.loads(paths[1].read_text())
    for event in later["traceEvents"]:
        event["name"] = event["name"].replace("ProfilerStep#", "ProfilerStep#9")
        if "ts" in event:
            event["ts"] += 10_000_000
    paths[1].write_text(json.dumps(later))
    job = load(paths)
    assert kinds(job) == {"steps-differ", "collectives-alone", "clocks-unknown"}
    assert not job.waits.height


def test_a_rank_by_its_files_name_or_its_place(tmp_path: Path):
    made = Made(ranks=2, later_ns={1: LATER_NS})
    named, plain = tmp_path / "trace_rank5.json", tmp_path / "other.json"
    for rank, path in enumerate((named, plain)):
        trace = made.trace(rank)
        del trace["distributedInfo"]
        path.write_text(json.dumps(trace))
    job = load([named, plain])
    assert [rank.number for rank in job.ranks] == [1, 5] and job.size == 2
    assert job.matched.arrivals.height == 8


def test_a_folder_gives_its_captures_in_the_order_of_their_numbers(tmp_path: Path):
    for rank in (10, 9, 1):
        (tmp_path / f"rank{rank}.json.gz").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "config.json").write_text('{"learning_rate": 0.1}')
    (tmp_path / "losses.json").write_text("[1.5, 1.25]")
    (tmp_path / "state.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    (tmp_path / "rank11.json").write_text('{"traceEvents": [{"ph": "X", ')  # damaged: not to be lost unseen
    run = tmp_path / "run-rank2"
    run.mkdir()
    (run / "trace.kineto.json.gz").touch()
    assert [path.name for path in captures_in(tmp_path)] == [
        "rank1.json.gz",
        "rank9.json.gz",
        "rank10.json.gz",
        "rank11.json",
        run.name,
    ]
    assert captures_in(run) == captures_in(tmp_path / "notes.txt") == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind_has_an_example(kind):
    assert kind_of(kind.example) is kind


def test_names_of_collectives():
    given = {
        "_allgather_base": "all-gather", "reduce_scatter_tensor_coalesced": "reduce-scatter",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)": "all-reduce", "all_to_allv": "all-to-all",
        "multimem_all_reduce_kernel": "all-reduce",
        "ncclDevKernel_Broadcast_RING_LL": "broadcast", "nccl:recv 0<-1": "send and receive", "wait": "other",
    }  # fmt: skip
    assert {name: kind_of(name).name for name in given} == given
    assert [message_bytes(3, name) for name in ("BFloat16", "Float8_e4m3fn", "Long", "unknown")] == [6, 3, 24, None]


def test_two_published_ranks_of_128():
    paths = [public_capture(f"hta_sampled_rank-{rank}.json.gz") for rank in (0, 1)]
    job = load(paths)
    # Events of these captures are missing: of each rank's ten collectives, five end when one of the other's does.
    assert (job.size, job.matched.unmatched) == (128, {0: 5, 1: 5})
    # In microseconds: when each of them began on rank 0 and on rank 1, which always came later.
    began = ((125052, 129911), (295662, 298964), (585321, 585405), (1146327, 1168655), (1185890, 1187182))
    assert job.waiting_ns(0) == sum(1000 * (late - early) for early, late in began)
    assert job.waiting_ns(1) == 0
    document = job_as_json(job, check_job(job))
    assert [(row["rank"], row["steps"], row["busy_ns"]) for row in document["ranks"]] == [
        (0, 2, 606_519_000), (1, 2, 651_026_000)
    ]  # fmt: skip
    assert {"straggler", "ranks-absent", "collectives-alone"} == kinds(job)


# Many ranks, in several processes.


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch):
    """Two processes read, however small the captures are."""
    monkeypatch.setattr("stepscope.traces.ranks._FEW_BYTES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


@pytest.mark.usefixtures("apart")
def test_ranks_read_in_processes_are_those_read_here(tmp_path: Path):
    paths = Made(ranks=3, later_ns={1: LATER_NS}).write(tmp_path)
    read = [rank for _, rank in read_ranks(paths) if isinstance(rank, Rank)]
    assert job_as_json(job_of(read), ()) == job_as_json(load(paths), ())
    paths[1].write_text('{"traceEvents": [{"ph": "X", ')
    replies = [rank for _, rank in read_ranks(paths)]
    assert [type(rank) for rank in replies].count(Rank) == 2
    assert any(isinstance(rank, InputError) and "job_1.json: the JSON ends" in str(rank) for rank in replies)


def test_processes_are_bounded_by_cores_captures_and_memory(tmp_path: Path):
    sizes = {"a.json": 2, "a.sqlite": 4, "a.json.gz": 32}
    for name in sizes:
        (tmp_path / name).write_bytes(b" " * 1000)
    assert [needed_bytes(tmp_path / name) for name in sizes] == [1000 * factor for factor in sizes.values()]
    assert processes_for([9 * 10**8] * 64, cores=16) == 4
    assert processes_for([10**9, 10**10], cores=16) == 1
    assert processes_for([10**8] * 64, cores=2) == processes_for([10**8] * 2, cores=16) == 2


EXPORTS_FOR_EVER = """#!/bin/sh
case "$1" in export) echo $$ >"$STARTED.part"; mv "$STARTED.part" "$STARTED"; exec sleep 600;; esac
"""


def test_ctrl_c_shows_what_was_read_and_leaves_no_process(tmp_path: Path):
    """Two ranks are small, and the exporter that reads the third one's report never ends."""
    Made(ranks=3).write(tmp_path / "job")[2].unlink()
    (tmp_path / "job" / "job_2.nsys-rep").write_bytes(b"NSYS" + bytes(5 * 10**6))
    nsys, started = tmp_path / "nsys", tmp_path / "started"
    nsys.write_text(EXPORTS_FOR_EVER)
    nsys.chmod(0o755)
    reader, terminal = os.openpty()
    command = [sys.executable, "-m", "stepscope", "trace", tmp_path / "job"]
    environment = {**os.environ, "STEPSCOPE_NSYS": str(nsys), "STARTED": str(started), "COLUMNS": "200"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal, text=True, start_new_session=True, env=environment
    ) as process:
        os.close(terminal)
        shown = b""
        while b"2 of 3" not in shown or not started.exists():
            shown += os.read(reader, 65536)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        printed, _ = process.communicate(timeout=60)
    with contextlib.suppress(OSError):  # Linux says so where the other side is closed
        while chunk := os.read(reader, 65536):
            shown += chunk
    os.close(reader)
    assert process.returncode == 130 and "2 of 3 ranks" in printed
    assert b"interrupted: 2 of 3 ranks were read, the others are left out" in shown and b"Traceback" not in shown
    wait_for(lambda: not Path("/proc", started.read_text().strip(), "exe").exists())
