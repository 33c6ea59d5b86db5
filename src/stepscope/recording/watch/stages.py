"""The stages after the timed steps: one counts the step's memory; in others a profiler or the allocator records.

Each takes the instruments of a driven step and puts them round the next steps of the loop.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from stepscope.core.evidence import Capture, Habits, PhaseMemory
from stepscope.core.formulas import Work
from stepscope.core.range_names import BACKWARD, EVALUATION, FORWARD, PHASES, REST, STEP
from stepscope.core.run_directory import KINETO_FILE
from stepscope.core.workloads import Workload
from stepscope.recording import ranges
from stepscope.recording.backward_ranges import BackwardMarks
from stepscope.recording.capture import capture_range, export_kineto, kineto_session
from stepscope.recording.flops import FlopCounts
from stepscope.recording.habits import STEPS, HabitsRecorder, RestLines
from stepscope.recording.memory_history import MemoryRecorder
from stepscope.recording.observe import PhasePeaks, parameter_bytes
from stepscope.recording.step import Phase, Recorder, Step
from stepscope.recording.updates import Changes
from stepscope.recording.watch.loop import LoopStep, weakly, weakly_each
from stepscope.recording.watch.phases import Phases, ScriptProfilers
from stepscope.recording.watch.stopwatch import Stopwatch, marks_for


class WatchedStep:
    """A Step (`recording/step.py`) that nobody drives: it has no phases that could be run. It keeps nothing of the
    loop alive."""

    phases: Sequence[Phase] = ()
    blocks: Sequence[nn.Module] = ()
    batches: Sequence[Any] = ()
    batch: Any = None
    scaler: torch.amp.GradScaler | None = None
    compiles_parts = False
    cuda_graphs = False
    loss: torch.Tensor | None = None

    forward_module: nn.Module = weakly()
    model: nn.Module = weakly()
    optimizer: torch.optim.Optimizer | None = weakly()
    optimizers: Sequence[torch.optim.Optimizer] = weakly_each()
    """All optimizers that step in a step, the one that ends it first."""

    def __init__(self, step: LoopStep) -> None:
        self.forward_module, self.model, self.compiled = step.forward_module, step.model, step.compiled
        self.optimizer, self.optimizers = step.optimizer, step.optimizers

    def named_tensors(self, batch: Any) -> Sequence[tuple[str, torch.Tensor]]:
        return ()  # The batch of a watched step is not known before the step runs.

    def prepare(self) -> None:
        pass


_MOST_TRIES = 3
"""How often a recording begins anew after it has given way."""


class EmittedRanges(Recorder):
    """Emits a range for each phase, and for the step where that is wanted, to the profilers that listen."""

    def __init__(self, *, step: bool = True) -> None:
        self._with_step = step
        self._open = contextlib.ExitStack()
        self._phase = contextlib.ExitStack()

    def step_begins(self) -> None:
        if self._with_step:
            self._open.enter_context(ranges.named_range(STEP))

    def phase_begins(self, name: str) -> None:
        if name in PHASES:
            self._phase.enter_context(ranges.named_range(name))

    def phase_ends(self, name: str) -> None:
        self._phase.close()

    def step_ends(self) -> None:
        self._phase.close()
        self._open.close()


class ForwardUntilBackward(Recorder):
    """Tells other recorders of a step whose forward lasts until backward begins, so that it includes the loss.

    A watched model's forward ends before the loop computes the loss. The graph that autograd keeps is complete only
    then.
    """

    def __init__(self, step: Step, phases: Phases, *recorders: Recorder) -> None:
        self._step, self._phases, self._recorders = step, phases, recorders
        self._forward_open = False

    def step_begins(self) -> None:
        self._phases.keeps_roots = True
        for recorder in self._recorders:
            recorder.step_begins()

    def phase_begins(self, name: str) -> None:
        if name not in PHASES:
            return
        if name == BACKWARD:
            roots = self._phases.roots
            self._step.loss = roots[0] if isinstance(roots, (tuple, list)) and roots else None
        self._end_forward()
        self._forward_open = name == FORWARD
        for recorder in self._recorders:
            recorder.phase_begins(name)

    def phase_ends(self, name: str) -> None:
        if name not in PHASES or name == FORWARD:
            return
        for recorder in reversed(self._recorders):
            recorder.phase_ends(name)
        self._step.loss = None

    def phase_failed(self, name: str) -> None:
        for recorder in reversed(self._recorders):
            recorder.phase_failed(name)

    def step_ends(self) -> None:
        self._end_forward()
        self._phases.keeps_roots = False
        for recorder in reversed(self._recorders):
            recorder.step_ends()

    def _end_forward(self) -> None:
        if self._forward_open:
            self._forward_open = False
            for recorder in reversed(self._recorders):
                recorder.phase_ends(FORWARD)


class ObservedStep:
    """The stage of one step whose memory is counted by phase, on a GPU. It resets the allocator's peaks."""

    name = "the memory of each phase"

    def __init__(
        self, step: Step, phases: Phases, device: torch.device, keep: Callable[[PhaseMemory], None], *more: Recorder
    ) -> None:
        """more: other recorders of that step, which allocate nothing on the device."""
        self._step, self._phases, self._device, self._keep = step, phases, device, keep
        self._peaks: PhasePeaks | None = None
        self.recorders = more

    def begins(self, step: int) -> None:
        self._keep(PhaseMemory(parameter_bytes=parameter_bytes(self._step)))
        if self._device.type == "cuda":
            self._peaks = PhasePeaks(self._step, self._device)
            self.recorders = (ForwardUntilBackward(self._step, self._phases, self._peaks), *self.recorders)

    def is_over(self, step: int) -> bool:
        if self._peaks is not None:
            # We know only of our own step which tensors should be there: a loop may keep any others.
            self._keep(msgspec.structs.replace(self._peaks.memory(), resident_expected=None))
        return True

    def ends(self) -> None:
        pass


class LookedAtSteps:
    """The stage of steps that are looked at for habits that cost time or memory. It also counts the FLOPs of one
    step."""

    name = "what the loop does"

    def __init__(
        self,
        step: WatchedStep,
        phases: Phases,
        device: torch.device,
        *,
        keep: Callable[[Habits], None],
        keep_work: Callable[[dict[str, Work], dict[str, int]], None],
        changes: Callable[[], Changes | None],
        inside_compiled: Callable[[], bool],
    ) -> None:
        """changes: gives the parameters as they were before the timed steps. inside_compiled: tells whether a step ends
        inside of what is compiled, which puts PyTorch's modes back as they were when it began."""
        self._step, self._phases, self._device, self._inside_compiled = step, phases, device, inside_compiled
        self._keep, self._keep_work, self._changes = keep, keep_work, changes
        self._habits: HabitsRecorder | None = None
        self._work = _CountedWork()
        self._rest = RestLines()
        self._done = 0
        self.recorders: tuple[Recorder, ...] = ()

    def begins(self, step: int) -> None:
        if self._inside_compiled():
            raise RuntimeError("a step ends inside of what torch.compile has compiled")
        watched, phases = self._step, self._phases
        phases.keeps_roots = phases.keeps_inputs = True
        dynamo = sys.modules.get("torch._dynamo.utils")
        self._compiled = watched.compiled or (dynamo is not None and dynamo.counters["frames"]["total"] > 0)
        self._habits = HabitsRecorder(
            watched.model,
            watched.forward_module,
            watched.optimizers,
            self._device,
            roots=lambda: phases.roots,
            inputs=lambda: phases.inputs,
            compiled=self._compiled,
            changes=self._changes(),
        )
        self.recorders = (self._habits, self._work, self._rest)

    def is_over(self, step: int) -> bool:
        self._done += 1
        self._work.open.close()
        if self._done == 1 and not self._compiled and not is_in_torch_dispatch_mode():
            self._work.start()
        return self._done >= STEPS

    def ends(self) -> None:
        self._phases.keeps_roots = self._phases.keeps_inputs = False
        recorder, self._habits, self.recorders = self._habits, None, ()
        if recorder is not None:
            recorder.close()  # a loop may end within a step: what was opened last is then open, and closed first
        self._work.open.close()
        rest_lines = self._rest.lines()
        if recorder is None:
            return
        if (work := self._work.work()) is not None:
            self._keep_work(*work)
        if (habits := recorder.habits()) is not None:
            self._keep(msgspec.structs.replace(habits, rest_lines=rest_lines))
        if recorder.failure is not None:
            raise recorder.failure


class _CountedWork(Recorder):
    """Counts the FLOPs of one step. Work between two phases counts to the phase before it: the loss, for instance, to
    forward. Work after the update is no part of the model's work."""

    def __init__(self) -> None:
        self._counts: FlopCounts | None = None
        self.open = contextlib.ExitStack()
        """Close it to count no more."""
        self._part = REST
        self._whole = False

    def start(self) -> None:
        self._counts = self.open.enter_context(FlopCounts().counting())

    def work(self) -> tuple[dict[str, Work], dict[str, int]] | None:
        """The work of each phase, and the calls of operators that no formula covers; None where no step was counted."""
        if self._counts is None or not self._whole:
            return None
        counted = {name: work for name, work in self._counts.work.items() if name in PHASES}
        return counted, dict(self._counts.unknown)

    def phase_begins(self, name: str) -> None:
        if self._counts is not None:
            self._part = name
            self._counts.phase_begins(name)

    def phase_ends(self, name: str) -> None:
        if self._counts is not None and name not in (FORWARD, BACKWARD):
            self._part = REST
            self._counts.phase_begins(REST)

    def evaluation_begins(self) -> None:
        if self._counts is not None:
            self._counts.phase_begins(EVALUATION)

    def evaluation_ends(self) -> None:
        if self._counts is not None:
            self._counts.phase_begins(self._part)

    def step_ends(self) -> None:
        self._whole = self._counts is not None


class _Recording:
    """What the stages that record have in common: they give way to what the script itself starts."""

    def __init__(self, profilers: ScriptProfilers) -> None:
        self._profilers = profilers
        self._open = contextlib.ExitStack()
        self._tries = _MOST_TRIES
        self.gave_way = False

    def give_way(self) -> None:
        self.gave_way = True
        with contextlib.suppress(Exception):  # This runs inside the loop, which an error of ours must not end.
            self._stop()

    def _stop(self) -> None:
        with self._profilers.ours(None):
            self._open.close()

    def _left_off(self) -> bool:
        """Whether the recording has given way. Raises RuntimeError where that was once too often."""
        self._tries -= self.gave_way
        if self.gave_way and not self._tries:
            self.gave_way = False
            raise RuntimeError(f"the script's own profiler, or a range of its, ended it {_MOST_TRIES} times")
        return self.gave_way


class TracedSteps(_Recording):
    """The stage of steps that torch.profiler traces. A first session, which is slow to start, is thrown away."""

    name = "trace kineto"

    def __init__(
        self,
        step: Step,
        device: torch.device,
        directory: Path,
        profilers: ScriptProfilers,
        *,
        steps: int,
        stacks: bool,
        keep: Callable[[Capture], None],
        inside_compiled: Callable[[], bool],
    ) -> None:
        super().__init__(profilers)
        self._step, self._device, self._directory, self._keep = step, device, directory, keep
        self._steps, self._stacks, self._inside_compiled = steps, stacks, inside_compiled
        self._profiler: torch.profiler.profile | None = None
        self._stopwatch = Stopwatch(marks_for(device, 0))
        self._first = True
        self.recorders: tuple[Recorder, ...] = ()

    def blocked(self) -> str | None:
        if self._stacks and sys.getprofile() is not None:
            return "a profiler of Python is on, which one with stacks would end"
        return self._profilers.profiling()

    def begins(self, step: int) -> None:
        if self._inside_compiled():  # The range of the compiled region would be open, and the profiler would crash.
            raise RuntimeError("a step ends inside of what torch.compile has compiled")
        self.gave_way, self._first = False, True
        self.recorders = (EmittedRanges(), self._stopwatch)
        self._open_session()

    def is_over(self, step: int) -> bool:
        if self.gave_way:
            return True
        if not self._first and self._stopwatch.count < self._steps:
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._stop()
        if self._first:
            self._first = False
            self._open_session()
            return False
        return True

    def ends(self) -> None:
        self._stop()
        profiler, self._profiler = self._profiler, None
        # What is not whole, since the loop has ended, is not kept.
        if self._left_off() or self._first or self._stopwatch.count < self._steps or profiler is None:
            return
        export_kineto(profiler, self._directory / KINETO_FILE)
        samples = {STEP: self._stopwatch.samples(0)[STEP]}
        version = str(torch.__version__)
        self._keep(Capture(tool="kineto", tool_version=version, samples=samples, artifact="kineto"))

    def _open_session(self) -> None:
        with self._profilers.ours(self.give_way):
            session = kineto_session(self._step, self._device, stacks=self._stacks)
            self._profiler = self._open.enter_context(session)
        self._stopwatch.drop_all_but(0)
        self._stopwatch.break_off()


class RangedSteps:
    """The stage of steps that emit every range, for an NVTX tool that the user has started."""

    name = "trace nvtx"

    def __init__(
        self, step: Step, phases: Phases, device: torch.device, *, steps: int, keep: Callable[[Capture], None]
    ) -> None:
        self._step, self._phases, self._device, self._keep, self._steps = step, phases, device, keep, steps
        self._open = contextlib.ExitStack()
        self._done = 0
        self.recorders: tuple[Recorder, ...] = ()

    def begins(self, step: int) -> None:
        inner: list[Recorder] = [EmittedRanges()]
        self._open.enter_context(capture_range(self._device))
        if not self._step.compiled:
            inner.insert(0, self._open.enter_context(BackwardMarks(self._step).running()))
        self.recorders = (ForwardUntilBackward(self._step, self._phases, *inner),)

    def is_over(self, step: int) -> bool:
        self._done += 1
        return self._done >= self._steps

    def ends(self) -> None:
        self._open.close()
        if self._done >= self._steps:
            self._keep(Capture(tool="nvtx", tool_version=""))


class RecordedMemory(_Recording):
    """The stage of one step in which every allocation is recorded, or of several, to see what they leave behind."""

    name = "memory"

    def __init__(
        self,
        step: Step,
        phases: Phases,
        device: torch.device,
        directory: Path,
        profilers: ScriptProfilers,
        *,
        stacks: str,
        steps: int,
        workload: Workload,
        device_name: str,
        keep: Callable[[PhaseMemory], None],
    ) -> None:
        super().__init__(profilers)
        self._step, self._phases, self._device, self._directory = step, phases, device, directory
        self._stacks, self._workload, self._device_name, self._keep = stacks, workload, device_name, keep
        self._steps, self._done = steps, 0
        self._recorder: MemoryRecorder | None = None
        self.recorders: tuple[Recorder, ...] = ()

    def blocked(self) -> str | None:
        return self._profilers.recording_memory() if self._device.type == "cuda" else self._profilers.profiling()

    def begins(self, step: int) -> None:
        self.gave_way, self._done = False, 0
        recorder = MemoryRecorder(self._step, self._device, stacks=self._stacks, several=self._steps > 1)
        with self._profilers.ours(self.give_way):
            self._recorder = self._open.enter_context(recorder.running())
        self.recorders = (ForwardUntilBackward(self._step, self._phases, recorder, EmittedRanges(step=False)),)

    def is_over(self, step: int) -> bool:
        self._done += 1
        if not self.gave_way and self._done < self._steps:
            return False
        if self._recorder is not None and not self.gave_way:
            self._recorder.steps_over()
        return True

    def ends(self) -> None:
        self._stop()
        recorder, self._recorder, self.recorders = self._recorder, None, ()
        if not self._left_off() and recorder is not None and self._done >= self._steps:
            self._keep(recorder.save(self._directory, workload=self._workload, device_name=self._device_name))
