"""Profilers and ranges of the loop's own beside a recording of ours: neither takes anything from the other."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.run_directory import KINETO_FILE
from stepscope.engine.watched_run import watch
from tests.recording.watch.loops import Net, nothing_is_left, train_step

CPU = [ProfilerActivity.CPU]


def linears(profiler: profile) -> int:
    return sum(event.name == "aten::linear" for event in profiler.events() or [])


def watched(tmp_path: Path, loop: Callable[[Callable[[], None]], None], record: str = "kineto") -> Run:
    """The run of a loop, which is given a function that takes a step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    originals = record_function.__enter__, profile.start, vars(torch.autograd.profiler)["_enable_profiler"]
    with watch(record=record, runs=tmp_path, quiet=True) as seen:
        loop(lambda: train_step(model, optimizer))
    assert nothing_is_left(model, optimizer)
    assert originals == (record_function.__enter__, profile.start, vars(torch.autograd.profiler)["_enable_profiler"])
    assert seen.run is not None and seen.directory is not None
    if "kineto" in seen.run.artifacts:
        events = json.loads(gzip.decompress((seen.directory / KINETO_FILE).read_bytes()))["traceEvents"]
        steps = [each for each in events if each.get("cat") == "user_annotation" and each["name"] == STEP]
        assert len(steps) == seen.run.evidence.captures[0].steps == 2
    return seen.run


def traced(run: Run) -> bool:
    return "kineto" in run.artifacts


def plain(step: Callable[[], None]) -> None:
    for _ in range(40):
        step()


def in_a_range_each(step: Callable[[], None]) -> None:
    for i in range(40):
        with record_function(f"step {i}"):
            step()


def beside_a_schedule_that_ends(step: Callable[[], None]) -> None:
    counts: list[int] = []
    once = schedule(wait=2, warmup=1, active=3, repeat=1)
    with profile(activities=CPU, schedule=once, on_trace_ready=lambda p: counts.append(linears(p))) as own:
        for _ in range(45):
            step()
            own.step()
    assert counts == [3 * 2]


def with_a_profiler_now_and_then(step: Callable[[], None]) -> None:
    for i in range(45):
        if i % 9 == 4:
            with record_function("now"), profile(activities=CPU) as own:
                step()
            assert linears(own) == 2
        else:
            step()


@pytest.mark.parametrize("loop", [plain, in_a_range_each, beside_a_schedule_that_ends, with_a_profiler_now_and_then])
def test_a_trace_is_taken_where_the_loop_leaves_room(tmp_path: Path, loop: Callable[[Callable[[], None]], None]):
    run = watched(tmp_path, loop)
    assert traced(run) and not run.evidence.notes and run.evidence.habits is not None and run.samples["step"].count > 15


def test_a_trace_gives_way_and_begins_again(tmp_path: Path):
    counts: list[int] = []

    def loop(step: Callable[[], None]) -> None:
        for i in range(60):
            if 10 <= i <= 30 and i % 2:  # while ours would have begun
                with profile(activities=CPU) as own:
                    step()
                counts.append(linears(own))
            else:
                step()

    run = watched(tmp_path, loop)
    assert set(counts) == {2}, "the loop's own profiles are whole"
    assert traced(run) or run.evidence.notes


def round_it_all(step: Callable[[], None]) -> None:
    with profile(activities=CPU) as own:
        plain(step)
    assert linears(own) == 40 * 2


def in_one_range(step: Callable[[], None]) -> None:
    with record_function("epoch"):
        plain(step)


@pytest.mark.parametrize(
    ("loop", "why"),
    [(round_it_all, "the script's own profiler is on"), (in_one_range, "the script's range 'epoch' is open")],
)
@pytest.mark.parametrize(("record", "name"), [("kineto", "trace kineto"), ("memory", "memory")])
def test_what_cannot_begin_is_said_and_the_rest_is_kept(
    tmp_path: Path, loop: Callable[[Callable[[], None]], None], why: str, record: str, name: str
):
    run = watched(tmp_path, loop, record)
    assert not run.artifacts and run.status == "done"
    assert len(run.evidence.notes) == 1 and run.evidence.notes[0].startswith(f"{name}, since {why}")
    assert run.samples["step"].count > 10 and run.evidence.habits is not None


def test_a_range_that_stays_open_while_a_trace_is_taken_ends_nothing_badly(tmp_path: Path):
    def loop(step: Callable[[], None]) -> None:
        for _ in range(21):
            step()
        with record_function("late"):
            plain(step)

    run = watched(tmp_path, loop)
    assert run.status == "done" and (traced(run) or run.evidence.notes)


@pytest.mark.parametrize("ends", range(12, 30))
def test_a_loop_that_ends_anywhere_keeps_no_half_of_a_trace(tmp_path: Path, ends: int):
    def loop(step: Callable[[], None]) -> None:
        for _ in range(ends):
            step()

    run = watched(tmp_path, loop)
    assert traced(run) or any("trace kineto" in note for note in run.evidence.notes)
    assert traced(run) == (ends >= 22), "ten steps are timed after eight, then one is traced for nothing, and two"
