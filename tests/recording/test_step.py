"""Who runs a step, and who is told: one function runs its phases, and a loop that is not ours tells the same."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from stepscope.core.evidence import MemoryNotes
from stepscope.recording import ranges
from stepscope.recording.driven import observe_step
from stepscope.recording.memory_history import MemoryRecorder, capture_memory
from stepscope.recording.observe import Observer, OperatorCounts, distinct_in
from stepscope.recording.step import Phase, Recorder, drive
from stepscope.training.training_step import TrainingStep
from tests.conftest import mini
from tests.measures import SOURCE
from tests.recording.test_capture import Recorder as Emitted
from tests.recording.test_memory_capture import notes_of, read
from tests.recording.watch.loops import Diary

CPU = torch.device("cpu")


class Written:
    """A step whose phases write into a diary; one of them may fail."""

    def __init__(self, told: list[str], *names: str, failing: str = "") -> None:
        self.phases = [Phase(name=name, run=lambda name=name: self._run(name)) for name in names]
        self._told, self._failing = told, failing

    def prepare(self) -> None: ...

    def _run(self, name: str) -> None:
        self._told.append(f"run {name}")
        if name == self._failing:
            raise MemoryError


def test_a_recorder_is_told_of_every_phase():
    diary, second = Diary(), Diary()
    drive(Written(diary.told, "forward", "backward"), diary, second)
    assert diary.told == [
        "step",
        "forward",
        "run forward",
        "/forward",
        "backward",
        "run backward",
        "/backward",
        "/step",
    ]
    assert second.told == [each for each in diary.told if not each.startswith("run")]


def test_a_phase_that_fails_is_told_and_nothing_after_it():
    diary, emitted = Diary(), Emitted()
    with ranges.emitted_to(emitted), pytest.raises(MemoryError):
        drive(Written(diary.told, "forward", "backward", "optimizer", failing="backward"), diary)
    assert diary.told[-3:] == ["backward", "run backward", "failed backward"]
    assert emitted.pushed == [("forward",), ("backward",)] and not emitted.open


def test_a_step_without_phases_is_a_step():
    diary = Diary()
    drive(Written(diary.told), diary)
    assert diary.told == ["step", "/step"]


def test_one_place_runs_phases():
    """And one makes of phases others, which replay them."""
    found = sorted(file for file in SOURCE.glob("**/*.py") if re.search(r"\bphase\.run", file.read_text()))
    assert found == [SOURCE / "recording/step.py", SOURCE / "training/training_step.py"]


def a_loop_of_its_own(step: TrainingStep, recorder: Recorder) -> None:
    """Forward, backward and optimizer as people write them, with marks round each."""
    tokens, targets = next(batch for batch in step.batches if batch[0] is step.tokens)
    recorder.step_begins()
    recorder.phase_begins("forward")
    with ranges.named_range("forward"):
        step.loss = step.forward_module(tokens, targets)
    recorder.phase_ends("forward")
    recorder.phase_begins("backward")
    with ranges.named_range("backward"):
        assert step.loss is not None
        step.loss.backward()
        step.loss = step.loss.detach()
    recorder.phase_ends("backward")
    recorder.phase_begins("optimizer")
    with ranges.named_range("optimizer"):
        assert step.optimizer is not None
        step.optimizer.step()
        step.optimizer.zero_grad(set_to_none=True)
    recorder.phase_ends("optimizer")
    recorder.step_ends()


def warmed() -> TrainingStep:
    step = TrainingStep(mini(), CPU)
    for _ in range(2):
        step.prepare()
        drive(step)
    return step


def test_hooks_see_the_same_in_a_loop_of_its_own():
    driven, memory = observe_step(warmed(), CPU)
    step = warmed()
    distinct = distinct_in(step)
    step.prepare()
    with Observer(step, CPU).running() as seen:
        a_loop_of_its_own(step, seen)
    assert seen.observation(distinct, seen.graphs_alive) == driven
    assert seen.saved_bytes == memory.saved_for_backward


def test_allocations_are_the_same_in_a_loop_of_its_own(tmp_path: Path):
    step = warmed()
    expected = capture_memory(step, CPU, tmp_path, workload=step.workload).measured
    there = notes_of(read(tmp_path))
    step = warmed()
    step.prepare()
    recorder = MemoryRecorder(step, CPU)
    with recorder.running():
        a_loop_of_its_own(step, recorder)
    assert recorder.save(tmp_path, workload=step.workload) == expected
    assert categories(notes_of(read(tmp_path))) == categories(there)


def categories(notes: MemoryNotes) -> list[tuple[str, str, int]]:
    return [(note.category, note.name, note.bytes) for note in notes.tensors]


def test_operators_are_counted_as_the_profiler_itself_lists_them():
    """By its own events, which are slow to make; also where a call makes one of its own name."""
    counts = OperatorCounts(CPU)

    def twice(inside: int) -> None:
        with record_function("twice"):
            for _ in range(inside):
                with record_function("twice"):
                    torch.ones(3).add_(1)

    with counts.profiler:
        torch.ones(2).exp()  # before all phases: nobody's
        for phase in ("forward", "backward", "forward"):
            counts.phase_begins(phase)
            for inside in (0, 1, 2):
                twice(inside)
            weight = torch.ones(4, 4, requires_grad=True)
            (weight @ weight).exp().sum().backward()
            counts.phase_ends(phase)
    calls = counts.counted().calls
    begun = [event for event in counts.profiler.events() or [] if event.name.startswith("stepscope operators of ")]
    starts = sorted((event.time_range.start, event.name.rpartition(" ")[2]) for event in begun)
    listed: dict[str, Counter[str]] = {name: Counter() for _, name in starts}
    for event in counts.profiler.events() or []:
        phase = [name for start, name in starts if start <= event.time_range.start][-1:]
        if phase and not event.name.startswith(("stepscope operators of ", "autograd::engine::")):
            listed[phase[0]][event.name] += 1
    assert calls == {name: dict(counted) for name, counted in listed.items()}
    assert calls["backward"]["twice"] == 1 + 1 + 3 and calls["forward"]["twice"] == 2 * calls["backward"]["twice"]
