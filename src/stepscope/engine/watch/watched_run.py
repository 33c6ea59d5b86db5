"""One Watch and the Run that it makes of a loop that is not ours."""

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from stepscope.analysis.runs.checks import check_run
from stepscope.analysis.runs.metrics import summarise
from stepscope.core.environment import GpuReading
from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.core.evidence import Evaluated, Updates
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.run import Run
from stepscope.core.run_directory import save_run
from stepscope.core.units import counted
from stepscope.engine.watch.draft import WatchedDraft
from stepscope.engine.watch.request import WatchRequest
from stepscope.measure import ranges
from stepscope.measure.changes import Changes
from stepscope.measure.environment import HostLoad
from stepscope.measure.gpu_samples import sampler_of
from stepscope.measure.launcher import launcher
from stepscope.measure.nvml import read_gpu
from stepscope.measure.updates import most_updates
from stepscope.measure.watch.after import LookedAtSteps, ObservedStep, RangedSteps, RecordedMemory, TracedSteps
from stepscope.measure.watch.finder import backward_has_run
from stepscope.measure.watch.found import Found
from stepscope.measure.watch.several import Loose
from stepscope.measure.watch.stopwatch import Stopwatch, marks_for
from stepscope.measure.watch.subject import WatchedStep
from stepscope.measure.watch.timed import TimedSteps
from stepscope.measure.watch.watch import Stage, Watch

_MARKS_A_STEP = 8
"""The number of events made beforehand for each step and micro-batch: two for each of its parts."""
_MOST_MARKS = 20_000

Say = Callable[[str], None]
"""Says one line to the user."""


class WatchedRun:
    """The run of one loop. A Watch tells it what a step is; the loop's owner tells it when the loop has ended."""

    def __init__(
        self,
        request: WatchRequest,
        say: Say,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.request = request
        self.run: Run | None = None
        """The run; None until its times are complete, or the loop has ended."""
        self.why_not: str | None = None
        """The reason why nothing was measured."""
        self.was_told = False
        """Whether the user was told the reason at once."""
        self.watch = Watch(self, step_of=request.step_of, model=model, optimizer=optimizer)
        self._say = say
        self._draft: WatchedDraft | None = None
        self._timed: TimedSteps | None = None
        self._readings: _Readings | None = None

    @property
    def directory(self) -> Path | None:
        """The run's directory; None where nothing was measured."""
        return self._draft.directory if self._draft is not None else None

    def start(self) -> None:
        self.watch.start()

    def found(self, found: Found, first_step: int) -> Sequence[Stage]:
        """Make the run's directory, and return the stages for the steps that follow."""
        device = next(found.model.parameters()).device
        if device.type not in ("cpu", "cuda"):
            raise InputError(f"the model is on {device}, and a loop is watched on a CPU or a CUDA GPU")
        draft = self._draft = WatchedDraft(self.request, found, device)
        if not found.roots:
            draft.note(
                f"forward, which counts as rest: the loop calls no module that holds what trains; model(x) in place of "
                f"model.forward(x) makes {found.name} one"
                if not isinstance(found.model, Loose)
                else "forward, which counts as rest: what trains belongs to no module"
            )
        settings, phases = self.request.settings, self.watch.phases
        marks = _MARKS_A_STEP * max(1, found.forwards, found.backwards) * (settings.steps_cap + settings.warmup_cap)
        readings = self._readings = _Readings(draft, found, self.watch)
        timed = self._timed = TimedSteps(
            Stopwatch(marks_for(device, min(marks, _MOST_MARKS))),
            settings,
            between=self.request.between,
            before_measuring=readings.read_before,
            after_measuring=self._keep_times,
        )
        step = WatchedStep(found)
        looked = LookedAtSteps(
            step, phases, device, keep=draft.keep_habits, keep_work=draft.keep_work, changes=lambda: readings.changes
        )
        stages: list[Stage] = [timed, ObservedStep(step, phases, device, draft.keep_memory), looked]
        trace, memory = self.request.trace, self.request.memory
        if "kineto" in trace.tools:
            keep, stacks = draft.keep_trace, trace.stacks
            stages.append(TracedSteps(step, device, draft.directory, steps=trace.steps, stacks=stacks, keep=keep))
        if ranges.watched():
            stages.append(RangedSteps(step, phases, device, steps=trace.steps, keep=draft.keep_capture))
        if memory is not None:
            workload, name, keep = draft.run.workload, draft.device_name, draft.keep_recorded_memory
            recorded = RecordedMemory(
                step, phases, device, draft.directory,
                stacks=memory.stacks, steps=memory.steps, workload=workload, device_name=name, keep=keep,
            )  # fmt: skip
            stages.append(recorded)
        return stages

    def unclear_step(self, reason: str) -> None:
        """Say once why nothing is measured; the loop goes on alone."""
        self.why_not, self.was_told = reason, True
        helps = not self.request.step_of and self.watch.optimizer_stepped
        remedy = "; --step-of CLASS, of a model or an optimizer, says whose step counts" if helps else ""
        self._say(f"nothing is measured, since it cannot be told what a step is: {reason}{remedy}")

    def stage_failed(self, stage: str, error: Exception) -> None:
        """Note that a stage failed. What was measured before stays."""
        if self._draft is None:
            self.why_not, self.was_told = one_line(error), True
            self._say(f"nothing is measured: {one_line(error)}")
        else:
            self._draft.note(f"{stage}, which failed: {one_line(error)}")

    def stages_over(self) -> None:
        """Finish the run: everything is measured, and the loop goes on."""
        self._finish()

    def end(self, error: BaseException | None = None) -> Run | None:
        """End the watch with the loop, which an exception may have ended. Returns the run, or None if nothing was
        measured."""
        watch, draft = self.watch, self._draft
        failed_in, stage, under_way = watch.phases.failed, watch.stage, watch.running
        watch.stop()
        if self._readings is not None:
            self._readings.close()
        if draft is not None and draft.run.status == "done" and isinstance(error, Exception):
            draft.say_ended_by(error)
        if draft is None:
            self.why_not = self.why_not or self._why_nothing()
        elif under_way:
            draft.stage = stage
            times = draft.run.samples.get("step")
            if isinstance(error, KeyboardInterrupt):
                draft.interrupt()
            elif error is not None and not isinstance(error, SystemExit) and draft.run.status == "unfinished":
                draft.fail(error, stage, failed_in)
            elif draft.run.status == "unfinished" and (times is None or not times.count):
                self.why_not = self._why_nothing()
                shutil.rmtree(draft.directory, ignore_errors=True)
                self._draft = None
                return None
            left = [stage for stage in (stage, *watch.left_out) if stage != TimedSteps.name]
            if left:
                fewer = f"; --steps 2:{watch.steps // 2} leaves steps for that" if watch.steps >= 8 else ""
                draft.note(f"{', '.join(left)}, since the loop ended before{fewer}")
            self._finish()
        elif self.run is not None and self.run is not draft.run:  # What ended the loop has come to be known.
            self._finish()
        return self.run

    def _why_nothing(self) -> str:
        if self.watch.optimizer_stepped or self._draft is not None:
            ended, between = f"the loop ended after {counted(self.watch.steps, 'step')}", self.request.between
            if between is None or self.watch.steps > between[0]:
                return f"{ended}, before any was timed"
            first, last = between[0], between[1] - 1
            if first == last:
                return f"step {first} was not reached, since {ended}"
            return f"none of the steps {first} to {last} was reached, since {ended}"
        why = "no optimizer of PyTorch stepped in this process"
        if not backward_has_run():
            return why
        inside = "call watched.step() where a step ends"
        if self.request.program:
            inside = f"put `with stepscope.watch() as watched:` round the loop, and {inside}"
        return f"{why}; if the loop changes its weights by hand, {inside}"

    def _keep_times(self) -> None:
        """Keep the times, which nothing that follows can take away."""
        timed, draft, readings = self._timed, self._draft, self._readings
        assert timed is not None and draft is not None and readings is not None
        samples = timed.samples()
        count, asked = samples["step"].count, self.request.settings.steps_floor
        draft.set(samples=samples, warmup_steady=timed.steady)
        draft.say_timed_steps(
            self.watch.steps - count if count else None,
            forwards=timed.entered(FORWARD, count), backwards=timed.entered(BACKWARD, count),
            evaluated=_evaluated(timed.evaluations(count), self.watch.phases.evaluated.values()),
        )  # fmt: skip
        readings.read_after(count, whole=bool(timed.measured))
        if count < asked:
            missing = f"{asked - count} of the {asked} steps" if count else counted(asked, "step")
            draft.note(f"{missing} that {'was' if asked == 1 else 'were'} asked for, since the loop ended before")
        if count >= asked:
            draft.set(status="done")
            draft.save_meanwhile()

    def _finish(self) -> None:
        """Write the run with its findings."""
        draft = self._draft
        assert draft is not None
        if draft.run.status == "unfinished":
            draft.set(status="done")
        run = msgspec.structs.replace(draft.run, summary=summarise(draft.run))
        self.run = draft.run = msgspec.structs.replace(run, findings=check_run(run))
        try:
            save_run(self.run, draft.directory)
        except StepscopeError as error:
            self._say(str(error))


def _evaluated(seconds: Sequence[float], called: Iterable[tuple[str, str]]) -> Evaluated | None:
    """What was called with gradients off in the timed steps, of which each took so many seconds for it."""
    took = [each for each in seconds if each]
    if not took:
        return None
    named = list(called)
    return Evaluated(
        modules=tuple(dict.fromkeys(name for name, _ in named)), where=next((line for _, line in named if line), ""),
        steps=len(took), of=len(seconds), median_s=statistics.median(took),
    )  # fmt: skip


class _Readings:
    """Readings of the machine, of updates and of compilations before and after the timed steps."""

    def __init__(self, draft: WatchedDraft, found: Found, watch: Watch) -> None:
        self._draft, self._found, self._watch = draft, found, watch
        self._gpu: GpuReading | None = None
        self._load: HostLoad | None = None
        self._counted: int | None = None
        self.changes: Changes | None = None
        """The parameters as they were before the timed steps."""
        self._compiling = None
        self._sampler = sampler_of(draft.device)
        self._began_s = 0.0

    def read_before(self) -> None:
        device = self._draft.device
        if "torch._dynamo" in sys.modules:  # Otherwise nothing compiles. Importing it takes a second.
            from stepscope.measure.compilation import CompilationWatch  # noqa: PLC0415

            self._compiling = CompilationWatch(device)
            self._compiling.start()
        self._counted = most_updates(self._found.optimizer)
        training = [parameter for parameter in self._found.model.parameters() if parameter.requires_grad]
        self.changes = Changes(training, self._found.optimizers)
        self._gpu, self._load = read_gpu(device), HostLoad()
        self._began_s = time.monotonic()

    def read_after(self, steps: int, *, whole: bool) -> None:
        """whole: whether the steps that count are those that followed `read_before`. Where the loop ended in warm-up,
        they are earlier ones, in which nobody counted updates."""
        draft, environment, end_s = self._draft, self._draft.run.environment, time.monotonic()
        if self._load is None or environment is None:
            return
        after, load = read_gpu(draft.device), self._load.read()
        # The energy of so many steps is not known: the GPU may still run earlier ones when the counter is read.
        during = self._sampler.read(self._began_s, end_s) if self._sampler else None
        versions = environment.versions | launcher()
        read = {"before": self._gpu, "after": after, "during": during, "host": load, "versions": versions}
        draft.set(environment=msgspec.structs.replace(environment, **read))
        now = most_updates(self._found.optimizer)
        # The step that passes between the reading and the first that counts had its update too.
        if now is not None and self._counted is not None and steps and whole:
            draft.set_evidence(updates=Updates(steps=steps, applied=min(steps, now - self._counted)))
        if self._compiling is not None:
            from stepscope.measure.compilation import compile_report  # noqa: PLC0415

            draft.set_evidence(compiled_while_measured=self._compiling.read())
            report = compile_report(self._found.forward_module)
            if self._found.compiled or report.frames_total:  # A loop may compile parts of its model, or its loss.
                draft.set_evidence(compilation=report)

    def close(self) -> None:
        """End what still reads the GPU."""
        if self._sampler is not None:
            self._sampler.close()
