"""One Watch and the Run that it makes of a loop that is not ours."""

import atexit
import contextlib
import functools
import hashlib
import inspect
import math
import os
import shutil
import socket
import statistics
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import nn

from stepscope.core.device_spec import find_device_spec
from stepscope.core.environment import GpuReading
from stepscope.core.errors import (
    InputError,
    choose,
    install_places,
    named_line,
    one_line,
    portable_path,
    warn,
)
from stepscope.core.evidence import (
    Evaluated,
    Evidence,
    PhaseMemory,
    SourceFile,
    Updates,
    WatchedLoop,
)
from stepscope.core.formulas import Work
from stepscope.core.precisions import Dtype
from stepscope.core.range_names import BACKWARD, FORWARD, STEP
from stepscope.core.run import Run
from stepscope.core.run_directory import KINETO_FILE, MEMORY_FILE, RescuedRun, create_run_directory, save_run
from stepscope.core.units import counted, format_seconds
from stepscope.core.user_model import code_folder
from stepscope.core.workloads import Input, UserModel, WatchedWorkload
from stepscope.engine.draft import RunDraft
from stepscope.engine.request import MemoryRequest, TraceRequest
from stepscope.engine.traced_loop import Sketch, keep_traced
from stepscope.engine.trackers import ScriptTrackers, trackers_named
from stepscope.engine.watched_script import WatchRequest, checked_steps, settings_between, when_imported
from stepscope.recording import ranges
from stepscope.recording.device import HostLoad, host_memory
from stepscope.recording.environment import launcher, read_environment
from stepscope.recording.nvml import free_memory, gpu_uuid, read_gpu, sampler_of
from stepscope.recording.updates import Changes, most_updates
from stepscope.recording.watch.finder import next_backward
from stepscope.recording.watch.loop import CallSeen, LoopStep, Loose, ModuleSeen, class_name, weakly, weakly_each
from stepscope.recording.watch.phases import ScriptProfilers
from stepscope.recording.watch.stages import (
    LookedAtSteps,
    ObservedStep,
    RangedSteps,
    RecordedMemory,
    TracedSteps,
    WatchedStep,
)
from stepscope.recording.watch.stopwatch import SOON_STEADY, Stopwatch, TimedSteps, marks_for
from stepscope.recording.watch.watch import Stage, StepCount, Watch, watching
from stepscope.runs.checks import check_run
from stepscope.runs.live import LiveFigures, process_began, rate_words, write_live
from stepscope.runs.metrics import at_pace, median_s, summarise, write_metrics
from stepscope.training.user_module.user_code import source_digest, structure_digest

# Drafts the run of a watched loop: its workload as it was seen, and what the stages add.


class WatchedDraft(RunDraft):
    """The draft of a watched loop's run. When it is made, it makes the directory and writes the first record."""

    def __init__(self, request: WatchRequest, step: LoopStep, device: torch.device) -> None:
        self.device, self._request = device, request
        self._model = weakref.ref(step.model)
        self.loop = _loop(step)
        workload = watched_workload(step, self.loop, request.program)
        directory = create_run_directory(request.runs, workload)
        script = getattr(sys.modules["__main__"], "__file__", None)
        self.loop = msgspec.structs.replace(self.loop, library=_library(), sources=_sources(script, directory))
        environment = read_environment(device, user_code=code_folder(script))
        run = Run(
            id=directory.name,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            tag=request.tag,
            status="unfinished",
            workload=workload,
            settings=request.settings,
            environment=environment,
            device_spec=find_device_spec(environment.device_name),
            evidence=Evidence(loop=self.loop),
        )
        super().__init__(run, directory)
        save_run(run, directory, rescue=False)

    @property
    def model(self) -> torch.nn.Module | None:
        return self._model()

    def keep_memory(self, memory: PhaseMemory) -> None:
        """Keep a step's memory figures, unless those of a recorded step say more."""
        if memory.forward_peak is not None or self.run.evidence.memory is None:
            self.set_evidence(memory=memory)

    def keep_work(self, work: dict[str, Work], unknown: dict[str, int]) -> None:
        """Keep a step's FLOPs. Without a forward, those that were counted are no step's."""
        if not self.loop.modules:
            return
        self.set(work=work)
        self.set_evidence(uncounted=unknown)

    def keep_recorded_memory(self, memory: PhaseMemory) -> None:
        """Keep the recorded step's memory figures on a CPU, where nothing else counts allocations."""
        self.keep_files(memory=MEMORY_FILE)
        counted = self.run.evidence.memory
        if counted is None or counted.allocated_peak is None:
            self.set_evidence(memory=memory)
        if self._request.memory is not None and self._request.memory.steps > 1:
            self.keep_growth()


def watched_workload(step: LoopStep, loop: WatchedLoop, program: str) -> WatchedWorkload:
    """The loop as an experiment, described by one of its steps."""
    model = step.model
    world = int(os.environ.get("WORLD_SIZE", "1") or 1)
    script = getattr(sys.modules.get("__main__"), "__file__", None)  # a notebook has none
    return WatchedWorkload(
        model=UserModel(
            name=step.name,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            inputs=_inputs(step.roots[0], step.batches) if step.roots else {},
            structure=structure_digest(model),
            source=source_digest(model, [Path(script) if script is not None else None]),
        ),
        dtype=_dtype(loop),
        compile="default" if step.compiled else "eager",
        optimizer=class_name(step.optimizer) if step.optimizer is not None else None,
        accumulation=step.micro_batches,
        program=program,
        rank=int(os.environ.get("RANK", "0")) if world > 1 else None,
        world_size=world,
    )


_LIBRARIES = {
    "transformers": ("transformers/trainer.py",),
    "lightning": ("lightning/pytorch/loops/", "pytorch_lightning/loops/"),
    "accelerate": ("accelerate/",),
    "torchtitan": ("torchtitan/",),
}
"""Files that are on the stack while a library's code runs a step, the one that uses another first."""
_MOST_SOURCES, _LARGEST_SOURCE = 200, 1 << 20


def _library() -> str:
    """The library whose code the end of this step is in."""
    files = {portable_path(frame.f_code.co_filename) for frame, _ in traceback.walk_stack(inspect.currentframe())}
    return next((name for name, starts in _LIBRARIES.items() if any(file.startswith(starts) for file in files)), "")


def _sources(script: str | None, directory: Path) -> tuple[SourceFile, ...]:
    """The script and the modules of its folder that are imported, without what is installed there."""
    if script is None:
        return ()
    folder, main = code_folder(script), Path(script).resolve()
    files = [main]
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py") and not name.startswith(install_places()):
            file = Path(name).resolve()
            if file.is_relative_to(folder) and "site-packages" not in file.parts:
                files.append(file)
    sources: list[SourceFile] = []
    for file in list(dict.fromkeys(files))[:_MOST_SOURCES]:
        with contextlib.suppress(OSError):
            if file.stat().st_size <= _LARGEST_SOURCE:
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                path = os.path.relpath(file, directory.resolve()).encode(errors="backslashreplace").decode()
                sources.append(SourceFile(path=path, digest=digest))
    return tuple(sources)


def _loop(step: LoopStep) -> WatchedLoop:
    dtypes: dict[str, int] = {}
    for parameter in step.model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + parameter.numel()
    return WatchedLoop(
        why=step.why,
        modules=tuple(class_name(root.module) for root in step.roots),
        optimizers=tuple(class_name(optimizer) for optimizer in step.optimizers),
        forwards=step.forwards,
        backwards=step.backwards,
        evaluations=step.evaluations,
        autocast=next((root.autocast for root in step.roots if root.autocast), None),
        parameter_dtype=max(dtypes, key=lambda name: dtypes[name], default=""),
        module_forwards=tuple(root.calls for root in step.roots),
        optimizer_models=tuple(" and ".join(step.models_of(optimizer)) for optimizer in step.optimizers),
        optimizer_steps=tuple(step.steps_of(optimizer) for optimizer in step.optimizers),
        trainable=step.trainable,
        tokens=_tokens(step.batches),
        in_backward=step.in_backward,
    )


def _dtype(loop: WatchedLoop) -> Dtype:
    if loop.autocast is not None:
        return "fp16" if loop.autocast == "float16" else "bf16"
    if loop.parameter_dtype == "bfloat16":
        return "bf16-pure"
    return "tf32" if torch.get_float32_matmul_precision() != "highest" and torch.cuda.is_available() else "fp32"


def _tokens(calls: Sequence[CallSeen]) -> int | None:
    """The token ids that these calls took, where they differ in length."""
    ids = [
        next((t.shape for t in call.inputs.values() if len(t.shape) == 2 and t.dtype in ("int64", "int32")), None)
        for call in calls
    ]
    shapes = [shape for shape in ids if shape is not None]
    return sum(map(math.prod, shapes)) if len({length for _, length in shapes}) > 1 else None


def _inputs(root: ModuleSeen, calls: Sequence[CallSeen]) -> dict[str, Input]:
    """The tensors of a whole step, in which the root is called on samples that differ: the samples of all these calls,
    each as large as the largest. A call that takes one sample without a dimension for the batch counts as one."""
    largest = {name: max(tensors, key=lambda tensor: tensor.shape) for name, tensors in root.inputs.items()}
    first = next((tensor.shape[0] for tensor in largest.values() if tensor.shape), None)
    inputs: dict[str, Input] = {}
    for name, tensor in largest.items():
        shape = tensor.shape
        if root.takes_one_sample:
            shape = (max(1, len(calls)), *shape)
        elif shape and shape[0] == first:
            took = [call.inputs[name].shape[0] for call in calls if name in call.inputs and call.inputs[name].shape]
            shape = (sum(took) or shape[0], *shape[1:])
        inputs[name] = Input(shape, tensor.dtype)
    return inputs


_MARKS_A_STEP = 8
"""The number of events made beforehand for each step and micro-batch: two for each of its parts."""
_MOST_MARKS = 20_000

Say = Callable[[str], None]
"""Says one line to the user."""
Show = Callable[[LiveFigures], None]
"""Shows live figures to the user."""


# Figures of the loop as it runs, from the first step that is known until the script ends.


_EVERY_S, _WINDOW_S = 1.0, 10.0
_FEWEST_OF_A_BAR = 10
"""So many turns a progress bar makes before its pace is compared with that of the steps."""
_TRAINERS = ("transformers.trainer", "lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


class _Live:
    """Writes the figures of a loop into its run's folder once a second, from a thread of its own; and shows them."""

    def __init__(self, draft: WatchedDraft, count: StepCount, show: Show | None, say: Say) -> None:
        self._draft, self._count, self._show, self._say = draft, count, show, say
        self._window: deque[tuple[int, float, float]] = deque()
        """What was counted in the last seconds, of different steps."""
        self._bars: weakref.WeakKeyDictionary[Any, tuple[float, int]] = weakref.WeakKeyDictionary()
        """How far each of the script's bars, and the loop, were when it was first seen."""
        self._last_step, self._trainer = _trainers_last_step(count.read()[0])
        self._gpu = gpu_uuid(draft.device) if draft.device.type == "cuda" else None
        self._stage, self._over = "measuring", threading.Event()
        self._figures = LiveFigures(
            run=draft.run.id, written="", stage="measuring", step=0, idle_s=0.0,
            memory="allocated by PyTorch at most" if self._gpu is not None else "resident memory",
            rank=int(os.environ.get("RANK", "0") or 0), world_size=int(os.environ.get("WORLD_SIZE", "1") or 1),
            host=socket.gethostname(), pid=os.getpid(), pid_began=process_began(os.getpid()) or "",
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="stepscope-live", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Count alone, since everything is measured."""
        self._count.go_on()
        self._stage, self._window = "running", deque([self._count.read()])

    def stop(self) -> None:
        """Take off what counts. No more figures come but the last."""
        self._over.set()
        self._thread.join(timeout=_WINDOW_S)
        self._count.stop()

    def write_last(self) -> None:
        """Write the last figures, beside a run that is complete."""
        self._stage = "over"
        with contextlib.suppress(Exception), free_memory(self._gpu) as left:
            write_live(self._read(left), self._draft.directory)

    def _run(self) -> None:
        try:
            is_told = False
            with free_memory(self._gpu) as left:
                while not self._over.wait(_EVERY_S):
                    live = self._read(left)
                    if self._show is not None:
                        self._show(live)
                    try:
                        write_live(live, self._draft.directory)
                    except OSError as error:  # The disk may be full for a while.
                        if not is_told:
                            self._say(f"live figures cannot be written: {one_line(error)}")
                        is_told = True
        except Exception as error:  # The script goes on, whatever becomes of its figures.
            if not self._over.is_set():
                self._say(f"no more live figures: {one_line(error)}")

    def _read(self, left: Callable[[], int | None]) -> LiveFigures:
        """The figures as they are now."""
        draft, window, now = self._draft, self._window, self._count.read()
        steps, ended_s, _ = now
        if steps and (not window or window[-1][0] != steps):
            window.append(now)
            while len(window) > 2 and window[1][1] < ended_s - _WINDOW_S:
                window.popleft()
        step_s = share = None
        if len(window) > 1 and (between := window[-1][0] - window[0][0]) > 0:
            passed_s = window[-1][1] - window[0][1]
            step_s = passed_s / between or None
            share = (window[-1][2] - window[0][2]) / passed_s if self._count.waits and passed_s else None
        step_s = step_s or median_s(draft.run, STEP)
        samples, tokens, mfu = at_pace(draft.run, step_s) if step_s else (None, None, None)
        if self._gpu is not None:
            memory = torch.cuda.memory_stats_as_nested_dict(draft.device)["allocated_bytes"]["all"]["peak"], left()
        else:
            memory = host_memory()
        steps_left, steps_of = self._steps_left(steps)
        return msgspec.structs.replace(
            self._figures, written=datetime.now(UTC).isoformat(timespec="milliseconds"), stage=self._stage,
            step=steps, idle_s=max(0.0, time.monotonic() - ended_s) if ended_s else 0.0, step_s=step_s,
            samples_per_s=samples, tokens_per_s=tokens, mfu=mfu, data_share=share, memory_bytes=memory[0],
            memory_left_bytes=memory[1], steps_left=steps_left, steps_of=steps_of,
        )  # fmt: skip

    def _steps_left(self, steps: int) -> tuple[int | None, str]:
        """Steps to go, and who knows: the trainer, or of the script's progress bars that which lasts longest."""
        if self._last_step is not None:
            return max(0, self._last_step - steps), self._trainer
        longest: tuple[int | None, str] = None, ""
        for bar in progress_bars():
            done, before = self._bars.setdefault(bar, (bar.n, steps))
            if bar.n - done >= _FEWEST_OF_A_BAR and steps > before:
                left = round((bar.total - bar.n) * (steps - before) / (bar.n - done))
                longest = max(longest, (left, "the script's progress bar"), key=lambda each: each[0] or -1)
        return longest


def progress_bars() -> list[Any]:
    """The bars of tqdm that the script shows, and that know their end."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return [bar for bar in list(getattr(tqdm, "_instances", ())) if bar.total and not bar.disable]


def _trainers_last_step(steps: int) -> tuple[int | None, str]:
    """The step after which the trainer that called this ends, counted as the loop's steps are, and the trainer's name.
    The trainer counts the step that ends now only when the optimizer has returned."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_globals.get("__name__") not in _TRAINERS or "self" not in frame.f_code.co_varnames:
            continue
        trainer: Any = frame.f_locals.get("self")
        with contextlib.suppress(Exception):  # It is another library's, whose versions differ.
            state: Any = getattr(trainer, "state", None)
            if hasattr(state, "max_steps"):
                return steps + state.max_steps - state.global_step - 1, "the Trainer"
            if len(trainer.optimizers) == 1:
                return steps + int(trainer.estimated_stepping_batches) - trainer.global_step - 1, "Lightning"
    return None, ""


class WatchedRun:
    """The run of one loop. A Watch tells it what a step is; the loop's owner tells it when the loop has ended."""

    def __init__(
        self,
        request: WatchRequest,
        say: Say,
        show: Show | None = None,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """show: is called with the figures of the loop once a second, from another thread."""
        self.request = request
        self.run: Run | None = None
        """The run; None until its times are complete, or the loop has ended."""
        self.why_not: str | None = None
        """The reason why nothing was measured."""
        self.saved_in: Path | None = None
        """The directory that holds the run as it was saved last."""
        self.was_told = False
        """Whether the user was told the reason at once."""
        records = bool(request.trace.tools or request.memory)
        self._profilers = ScriptProfilers() if records else None
        self.watch = Watch(self, step_of=request.step_of, model=model, optimizer=optimizer, profilers=self._profilers)
        self._say, self._show = say, show
        self._trackers = ScriptTrackers(request.log, say)
        self._draft: WatchedDraft | None = None
        self._count: StepCount | None = None
        self._live: _Live | None = None
        self._timed: TimedSteps | None = None
        self._readings: _Readings | None = None
        self._sketch: Sketch | None = None

    @property
    def directory(self) -> Path | None:
        """The run's directory; None where nothing was measured."""
        return self._draft.directory if self._draft is not None else None

    def start(self) -> None:
        # Dynamo breaks its graph at what the watch wraps, where it compiles a whole step, and goes on behind it. To
        # make any optimizer imports its rules.
        rules = "torch._dynamo.trace_rules"
        when_imported(rules, lambda: sys.modules[rules].add("stepscope.recording"))
        self.watch.start()

    def stages_for(self, loop: LoopStep, first_step: int) -> Sequence[Stage]:
        """Make the run's directory, and return the stages for the steps that follow."""
        device = next(loop.model.parameters()).device
        if device.type not in ("cpu", "cuda"):
            raise InputError(f"the model is on {device}, and a loop is watched on a CPU or a CUDA GPU")
        draft = self._draft = WatchedDraft(self.request, loop, device)
        if not loop.roots:
            draft.note(
                f"forward, which counts as rest: the loop calls no module that holds what trains; model(x) in place of "
                f"model.forward(x) makes {loop.name} one"
                if not isinstance(loop.model, Loose)
                else "forward, which counts as rest: what trains belongs to no module"
            )
        settings, phases = self.request.settings, self.watch.phases
        marks = _MARKS_A_STEP * max(1, loop.forwards, loop.backwards) * (settings.steps_cap + settings.warmup_cap)
        readings = self._readings = _Readings(draft, loop)
        # Where a profiler has been on a GPU, its library slows down what is launched afterwards.
        slowed = device.type == "cuda" and "kineto" in self.request.trace.tools
        more = self.request.between is None and settings.steps_floor < settings.steps_cap
        step = WatchedStep(loop)
        stages = self._asked(step, draft, device)
        if stages and more:  # The loop may be short: warm-up leaves steps for what was asked.
            settings = msgspec.structs.replace(settings, warmup_cap=min(settings.warmup_cap, SOON_STEADY))
        timed = self._timed = TimedSteps(
            Stopwatch(marks_for(device, min(marks, _MOST_MARKS))),
            settings,
            between=self.request.between,
            before_measuring=readings.read_before,
            after_measuring=self._keep_times,
            in_two_parts=more,
        )
        looked = LookedAtSteps(
            step,
            phases,
            device,
            keep=lambda habits: draft.set_evidence(habits=habits),
            keep_work=draft.keep_work,
            changes=lambda: readings.changes,
            inside_compiled=lambda: self.watch.step_is_compiled,
        )
        self._sketch = Sketch(loop, phases, lambda: self.watch.step_is_compiled)
        observed = ObservedStep(step, phases, device, draft.keep_memory, self._sketch)
        if os.environ.get("RANK", "0") == "0":
            self._count = StepCount(self.watch, loop)
            self._live = _Live(draft, self._count, self._show, self._say)
        # What was asked for comes first, and the rest of what is timed last, for which the loop may be too short.
        return [timed, *stages, observed, looked, *([timed] if more and not slowed else [])]

    def _asked(self, step: WatchedStep, draft: WatchedDraft, device: torch.device) -> list[Stage]:
        """The stages that record what was asked for."""
        trace, memory, phases, profilers = self.request.trace, self.request.memory, self.watch.phases, self._profilers
        stages: list[Stage] = []
        if "kineto" in trace.tools and profilers is not None:
            keep = functools.partial(draft.keep_capture, kineto=KINETO_FILE)
            traced = TracedSteps(
                step, device, draft.directory, profilers, steps=trace.steps, stacks=trace.stacks, keep=keep,
                inside_compiled=lambda: self.watch.step_is_compiled,
            )  # fmt: skip
            stages.append(traced)
        if ranges.watched():
            stages.append(RangedSteps(step, phases, device, steps=trace.steps, keep=draft.keep_capture))
        if memory is not None and profilers is not None:
            environment = draft.run.environment
            recorded = RecordedMemory(
                step, phases, device, draft.directory, profilers, stacks=memory.stacks, steps=memory.steps,
                workload=draft.run.workload, device_name=environment.device_name if environment else "",
                keep=draft.keep_recorded_memory,
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

    def step(self) -> None:
        """Note that the loop itself says that a step has ended."""
        if self._count is not None:
            self._count.mark()
        self.watch.step()

    def loop_gone(self) -> None:
        """End with the loop, whose model or optimizer is no more. Where nothing of it was timed, the next one is
        watched."""
        if self.end() is None and not self.was_told:
            self._draft = self._timed = self._readings = self.why_not = None
            self.watch = Watch(self, step_of=self.request.step_of, profilers=self._profilers)
            self.watch.start()

    def end(self, error: BaseException | None = None) -> Run | None:
        """End the watch with the loop, which an exception may have ended. Returns the run, or None if nothing was
        measured."""
        live, self._live, self._count = self._live, None, None
        if live is not None:
            live.stop()
        run = self._end(error)
        if live is not None:
            live.write_last()
        return run

    def _end(self, error: BaseException | None) -> Run | None:
        watch, draft = self.watch, self._draft
        failed_in, stage, under_way = watch.phases.failed, watch.stage, watch.running
        watch.stop()
        if self._readings is not None and self._readings.sampler is not None:
            self._readings.sampler.close()
        if draft is not None and draft.run.status == "done" and isinstance(error, Exception):
            loop = draft.run.evidence.loop or draft.loop
            draft.set_evidence(loop=msgspec.structs.replace(loop, ended_by=named_line(error)))
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
            # The stages that the loop left no steps for, and those that could not begin.
            left = {name: reason for name, reason in watch.left_out.items() if name != TimedSteps.name}
            for name, reason in left.items():
                if reason is not None:
                    draft.note(f"{name}, since {reason}")
            too_short = [name for name, reason in left.items() if reason is None]
            if too_short:
                fewer = f"; --steps 2:{watch.steps // 2} leaves steps for that" if self.request.between else ""
                draft.note(f"{', '.join(too_short)}, since the loop ended before{fewer}")
            self._finish()
        elif self.run is not None and self.run is not draft.run:  # What ended the loop has come to be known.
            self._finish()
        return self.run

    def trace(self, *, goes_on: bool = True) -> None:
        """Trace the loop's step for predictions, and keep that beside the run; Ctrl-C is raised unless it goes on."""
        sketch, self._sketch = self._sketch, None
        keep_traced(sketch, self.run, self.directory, self._say, goes_on=goes_on)

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
        if not next_backward():
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
        count, requested = samples["step"].count, self.request.settings.steps_floor
        draft.set(samples=samples, warmup_steady=timed.steady)
        forwards, backwards = timed.entered(FORWARD, count), timed.entered(BACKWARD, count)
        usual = max((forwards.count(each) for each in set(forwards)), default=0)
        vary = bool(forwards) and 10 * usual < 9 * len(forwards)
        loop = msgspec.structs.replace(
            draft.loop,
            first_step=timed.spans[0][0] if timed.spans else None,
            timed_steps=tuple(timed.spans),
            backwards_between=(min(backwards), max(backwards)) if backwards else None,
            forwards_between=(min(forwards), max(forwards)) if forwards else None,
            forwards_mean=statistics.fmean(forwards) if vary else None,
            evaluated=_evaluated(timed.evaluations(count), self.watch.phases.evaluated.values()),
            saved=self.watch.saves.of(timed.spans),
        )
        draft.set_evidence(loop=loop)
        readings.read_after(count, whole=bool(timed.measured))
        if count < requested:
            missing = f"{requested - count} of the {requested} steps" if count else counted(requested, "step")
            draft.note(f"{missing} that {'was' if requested == 1 else 'were'} asked for, since the loop ended before")
        if count >= requested:
            draft.set(status="done")
            self._hand_out(draft.run, last=False)
            # The process may be killed before the rest is known.
            known = draft.run
            draft.note("what follows these steps, which is written once it is over")
            draft.run = _judged(draft.run)
            draft.save_meanwhile()
            draft.run = known

    def finish(self) -> None:
        """Write the run with its findings, and say so, since the loop may go on for days."""
        self._finish()
        if self._live is not None:
            self._live.go_on()
        if self.run is not None and (words := rate_words(self.run)) and os.environ.get("RANK", "0") == "0":
            steps = counted(self.run.samples["step"].count, "step")
            shown = f": stepscope show {self.saved_in}" if self.saved_in is not None else ""
            self._say(f"measured: {words}, by {steps}; the script goes on alone{shown}")

    def _finish(self) -> None:
        """Write the run with its findings: everything is measured, or the loop has ended."""
        draft = self._draft
        assert draft is not None
        if draft.run.status == "unfinished":
            draft.set(status="done")
        self.run = draft.run = _judged(draft.run)
        try:
            self.saved_in = save_run(self.run, draft.directory).parent
        except RescuedRun as error:
            self.saved_in = error.directory
            self._say(str(error))
        self._hand_out(self.run, last=True)

    def _hand_out(self, run: Run, *, last: bool) -> None:
        """Write the run's figures where they were asked for."""
        if (directory := self.directory) is not None:
            self._trackers.write(run, directory, self.watch.steps, last=last)
        if self.request.metrics is not None and os.environ.get("RANK", "0") == "0":
            try:
                write_metrics([run], self.request.metrics)
            except InputError as error:
                if last:  # Until then it may still become possible.
                    self._say(str(error))


def _judged(run: Run) -> Run:
    """The run with its figures and findings."""
    run = msgspec.structs.replace(run, summary=summarise(run))
    return msgspec.structs.replace(run, findings=check_run(run))


def _evaluated(seconds: Sequence[float], called: Iterable[tuple[str, str]]) -> Evaluated | None:
    """What was called with gradients off in the timed steps, of which each took so many seconds for it."""
    took = [each for each in seconds if each]
    if not took:
        return None
    named = list(called)
    return Evaluated(
        modules=tuple(dict.fromkeys(name for name, _ in named)),
        where=next((line for _, line in named if line), ""),
        steps=len(took),
        of=len(seconds),
        median_s=statistics.median(took),
    )


class _Readings:
    """Readings of the machine, of updates and of compilations before and after each part of the timed steps."""

    _optimizer: torch.optim.Optimizer | None = weakly(or_none=True)
    _root: nn.Module | None = weakly(or_none=True)
    _optimizers: Sequence[torch.optim.Optimizer] = weakly_each()

    def __init__(self, draft: WatchedDraft, step: LoopStep) -> None:
        self._draft, self._is_compiled = draft, step.compiled
        self._optimizer, self._root = step.optimizer, step.forward_module
        self._optimizers = step.optimizers
        self._gpu: GpuReading | None = None
        self._load: HostLoad | None = None
        self._counted: int | None = None
        self.changes: Changes | None = None
        """The parameters as they were before the timed steps."""
        self._read = 0
        """Steps of the parts that are over."""
        self._compiling = None
        self.sampler = sampler_of(draft.device)
        self._began_s = 0.0

    def read_before(self) -> None:
        device = self._draft.device
        if "torch._dynamo" in sys.modules:  # Otherwise nothing compiles. Importing it takes a second.
            from stepscope.recording.compilation import CompilationWatch  # noqa: PLC0415

            self._compiling = CompilationWatch(device)
            self._compiling.start()
        self._counted = most_updates(self._optimizer)
        if self.changes is None and (model := self._draft.model) is not None:
            training = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self.changes = Changes(training, self._optimizers)
        self._gpu, self._load = self._gpu or read_gpu(device), self._load or HostLoad()
        self._began_s = self._began_s or time.monotonic()

    def read_after(self, steps: int, *, whole: bool) -> None:
        """Keep what was read; so many steps have been timed, those of the part before this one included.

        whole: whether the steps that count are those that followed `read_before`. Where the loop ended in warm-up,
        they are earlier ones, in which nobody counted updates."""
        draft, environment, end_s = self._draft, self._draft.run.environment, time.monotonic()
        if self._load is None or environment is None:
            return
        after, load = read_gpu(draft.device), self._load.read()
        # The energy of so many steps is not known: the GPU may still run earlier ones when the counter is read.
        during = self.sampler.read(self._began_s, end_s) if self.sampler else None
        versions = environment.versions | launcher()
        read = {"before": self._gpu, "after": after, "during": during, "host": load, "versions": versions}
        draft.set(environment=msgspec.structs.replace(environment, **read))
        now, new, evidence = most_updates(self._optimizer), steps - self._read, draft.run.evidence
        self._read = steps
        # The step that passes between the reading and the first that counts had its update too.
        if now is not None and self._counted is not None and new and whole:
            applied = min(new, now - self._counted) + (evidence.updates.applied if evidence.updates is not None else 0)
            draft.set_evidence(updates=Updates(steps=steps, applied=applied))
        if self._compiling is not None and (root := self._root) is not None:
            from stepscope.recording.compilation import compile_report  # noqa: PLC0415

            earlier, compiled = evidence.compiled_while_measured, self._compiling.read()
            both = earlier + compiled if earlier is not None and compiled is not None else compiled
            draft.set_evidence(compiled_while_measured=both)
            report = compile_report(root)
            if self._is_compiled or report.frames_total:  # A loop may compile parts of its model, or its loss.
                draft.set_evidence(compilation=report)


# Two lines round a loop: `with stepscope.watch(model, optimizer) as watched:`.


class Watched:
    """A loop that is watched while the block runs, and what was measured of it.

    Its steps end with the optimizer's steps. Where no optimizer of PyTorch steps, `step()` says so.
    """

    def __init__(self, watched: WatchedRun, say: Say) -> None:
        self._watched, self._say = watched, say
        self._open = False

    @property
    def run(self) -> Run | None:
        """The run, once it was measured; None before that, and if nothing was measured."""
        return self._watched.run

    @property
    def directory(self) -> Path | None:
        """The directory of the run; None if nothing was measured."""
        return self._watched.directory

    @property
    def why_not(self) -> str | None:
        """The reason, in words, why nothing was measured; None if something was."""
        return self._watched.why_not

    def step(self) -> None:
        """Say that a step ends here. From the first call on, no other end counts."""
        self._watched.step()

    def start(self) -> None:
        """Begin to watch, as the `with` block does."""
        if watching():
            self._watched.why_not = "another watch is running in this process"
            self._say(f"nothing is measured here: {self._watched.why_not}")
            return
        self._open = True
        atexit.register(self.end)
        self._watched.start()

    def end(self, error: BaseException | None = None) -> None:
        """End watching, as the `with` block does, perhaps by an exception. Ctrl-C is raised after the run is kept."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.end)
        run = self._watched.end(error)
        if run is None:
            if not self._watched.was_told:
                self._say(f"nothing was measured: {self.why_not}")
        else:
            self._say(f"{self!r}; saved in {self._watched.saved_in}")
            self._watched.trace(goes_on=not threading.main_thread().is_alive())  # at exit nothing is left to stop

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(error)

    def __repr__(self) -> str:
        run = self.run
        if run is None:
            return f"nothing measured{f': {self.why_not}' if self.why_not else ''}"
        samples = run.samples.get("step")
        median = samples.median_s if samples is not None else None
        if samples is None or median is None:
            return f"{run.workload.model.name}: {run.status}, no step was timed"
        return f"{run.workload.model.name}: {format_seconds(median)} a step, the median of {samples.count}"


def watch(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: tuple[int, int] | None = None,
    record: Iterable[str] = (),
    memory_steps: int = 1,
    runs: str | Path = "runs",
    tag: str | None = None,
    log: str | Iterable[str] = (),
    step_of: str | None = None,
    quiet: bool = False,
) -> Watched:
    """Watch the training loop inside a `with` block, and measure some of its steps.

        with stepscope.watch(model, optimizer) as watched:
            for batch in loader: ...
        print(watched.run.summary)

    steps: the first step that is timed, and the first after it that is not; the loop's first step is 0. If steps is
    left out, 10 to 100 steps are timed, once they are steady.
    record: `kineto` or `memory`, which record some more steps.
    memory_steps: how many steps `memory` records; 3 or more show what grows from step to step.
    model, optimizer: whose steps are measured; if neither is given, the loop itself shows them.
    step_of: the name of the class of either, where a loop has several.
    runs: where the run's directory is made.
    tag: a word to find the run by.
    log: `wandb`, `mlflow` or `tensorboard`, whose active run gets the figures under `stepscope/`.
    quiet: say nothing on stderr.

    `watched.run` is None if nothing was measured; `watched.why_not` then says why.

    Raises InputError if the model is no module, the optimizer is no optimizer, or steps begin before the third.
    """
    _check(model, nn.Module, "the model is a {}: give a torch.nn.Module")
    _check(optimizer, torch.optim.Optimizer, "the optimizer is a {}: give one of PyTorch's, or none and call step()")
    recorded = tuple(dict.fromkeys([record] if isinstance(record, str) else record))
    for name in recorded:
        choose(name, ("memory", "kineto"), "record")
    between = checked_steps(*steps) if steps is not None else None
    request = WatchRequest(
        runs=Path(runs).absolute(),
        settings=settings_between(between),
        between=between,
        trace=TraceRequest(tools=("kineto",) if "kineto" in recorded else ()),
        memory=MemoryRequest(steps=memory_steps) if "memory" in recorded else None,
        step_of=step_of,
        tag=tag,
        log=trackers_named(log),
    )
    say: Say = (lambda _: None) if quiet else warn
    return Watched(WatchedRun(request, say, model=model, optimizer=optimizer), say)


def _check(argument: object, expected: type, message: str) -> None:
    if argument is not None and not isinstance(argument, expected):
        raise InputError(message.format(type(argument).__name__))
