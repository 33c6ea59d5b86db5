"""Runs a driven step under each instrument, by `drive` or by the timer, and returns what the instrument shows."""

from pathlib import Path

import torch

from stepscope.core.evidence import (
    Capture,
    CollectiveCalls,
    Habits,
    PhaseMemory,
    ProfiledStep,
    StepObservation,
    StepOperators,
)
from stepscope.core.formulas import Work
from stepscope.core.run_directory import KINETO_FILE
from stepscope.core.samples import Samples
from stepscope.recording import ranges
from stepscope.recording.capture import export_kineto, kineto_session, profiled_step, profiler_for
from stepscope.recording.device import Device
from stepscope.recording.observe import Observer, OperatorCounts, PhasePeaks, distinct_in, parameter_bytes
from stepscope.recording.step import Driven, Step, drive, optimizers_of
from stepscope.recording.timer import ALONE, Peers, timed_steps


def observe_step(step: Step, device: torch.device, held_before_bytes: int = 0) -> tuple[StepObservation, PhaseMemory]:
    """Run a step under hooks, and on a GPU another for its memory by phase (bytes as PhaseMemory defines them).

    held_before_bytes: what the process had allocated on the device before the step was made.
    """
    distinct = distinct_in(step)
    step.prepare()
    with ranges.silenced():
        with Observer(step, device).running() as observer:
            drive(step, observer)
        step.prepare()
        graphs_alive = observer.graphs_alive
        memory = PhaseMemory(parameter_bytes=parameter_bytes(step), saved_for_backward=observer.saved_bytes)
        if device.type == "cuda":
            peaks = PhasePeaks(step, device, held_before_bytes)
            drive(step, peaks)
            memory = peaks.memory()
    return observer.observation(distinct, graphs_alive), memory


def step_operators(step: Driven, device: torch.device, timing: Device) -> StepOperators:
    """Run a step under torch.profiler, and count the operators that the host called."""
    step.prepare()
    timing.synchronize()
    counts = OperatorCounts(device)
    with ranges.silenced(), counts.profiler:
        drive(step, counts)
    timing.synchronize()
    return counts.counted()


def step_habits(step: Step, device: torch.device) -> Habits | None:
    """Run a few steps and look at what each does beside what was asked for; None for steps of CUDA graphs."""
    if step.cuda_graphs:
        return None
    from stepscope.recording.habits import STEPS, HabitsRecorder  # noqa: PLC0415  (for models of a user's own alone)

    compiled = step.compiled or step.compiles_parts
    recorder = HabitsRecorder(
        step.model,
        step.forward_module,
        optimizers_of(step),
        device,
        roots=lambda: step.loss,
        compiled=compiled,
    )
    try:
        with ranges.silenced():
            for _ in range(STEPS):
                step.prepare()
                drive(step, recorder)
    finally:
        recorder.close()
    if recorder.failure is not None:
        raise recorder.failure
    return recorder.habits()


def step_flops(step: Driven, timing: Device) -> tuple[dict[str, Work], dict[str, int]]:
    """Run a step and count its FLOPs by phase, and the calls of what no formula covers."""
    from stepscope.recording.flops import FlopCounts  # noqa: PLC0415  (for steps that no formula counts)

    step.prepare()
    with ranges.silenced(), FlopCounts().running() as counts:
        drive(step, counts)
    timing.synchronize()
    return counts.work, dict(counts.unknown)


def step_traffic(step: Driven, timing: Device) -> tuple[CollectiveCalls, ...]:
    """Run a step that ranks share, and count the collectives that this one calls."""
    from stepscope.recording.flops import TrafficCounts  # noqa: PLC0415  (for steps that ranks share)

    step.prepare()
    with ranges.silenced(), torch.compiler.set_stance("force_eager"), TrafficCounts() as counts:
        drive(step, counts)
    timing.synchronize()
    return counts.counted


def profile_step(step: Driven, device: torch.device, timing: Device, peers: Peers = ALONE) -> ProfiledStep:
    """Profile two steps and report the second: the first pays for the profiler's own start. All `peers` begin each
    together: a profiler starts at its own time in each process."""
    with profiler_for(device, events=False):
        timed_steps(step, timing, 1, peers=peers)
    with profiler_for(device) as profiler:
        samples = timed_steps(step, timing, 1, peers=peers)
    return profiled_step(profiler, device, samples["step"].values_s[0])


def capture_kineto(
    step: Step,
    device: torch.device,
    timing: Device,
    directory: Path,
    *,
    steps: int,
    stacks: bool = False,
    peers: Peers = ALONE,
) -> Capture:
    """Trace steps with torch.profiler into `trace.kineto.json.gz`, after a session that pays for the profiler's start
    and is thrown away. All `peers` begin each step together."""
    with kineto_session(step, device, stacks=stacks):
        timed_steps(step, timing, 1, peers=peers)
    with kineto_session(step, device, stacks=stacks) as profiler:
        samples = timed_steps(step, timing, steps, peers=peers)
    export_kineto(profiler, directory / KINETO_FILE)
    return Capture(tool="kineto", tool_version=str(torch.__version__), samples=samples, artifact="kineto")


def trace_nvtx(
    step: Step, device: torch.device, timing: Device, steps: int, peers: Peers = ALONE
) -> dict[str, Samples]:
    """Run steps for an NVTX tool that watches, with every range; those of a compiled step are its phases alone. All
    `peers` begin each step together.

    Timed by the host alone: what the phases took on the device is for the trace to say.
    """
    from stepscope.recording.backward_ranges import BackwardMarks, Unmarked  # noqa: PLC0415  (where a tool watches)

    timing = Unmarked(timing)
    if step.compiled:
        samples = timed_steps(step, timing, steps, peers=peers)
    else:
        with BackwardMarks(step).running() as marks:
            samples = timed_steps(step, timing, steps, marks, peers=peers)
    return {name: samples[name] for name in ("step", "host")}
