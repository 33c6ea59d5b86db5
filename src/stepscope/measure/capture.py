"""Traces of some steps, taken after the timed ones: what a profiler shows, and what its watching costs."""

import contextlib
import gzip
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity

from stepscope.core import interrupts
from stepscope.core.evidence import Capture
from stepscope.core.run import Settings
from stepscope.core.samples import Samples
from stepscope.measure import ranges
from stepscope.measure.backward_ranges import BackwardRanges, SequenceNotes
from stepscope.measure.device import Device, Mark
from stepscope.measure.timer import Phase, StepFailed, Subject, measure

MARKING = "mark backward"
"""The phase, and its range, in which backward is prepared for its ranges. It gives no work to the device."""
AFTER_CAPTURE_S = 1.0
KINETO_FILE = "trace.kineto.json.gz"
_COMPRESSION = 6  # gzip's own default; Python's 9 takes twice as long for one per cent


class TracedStep(Subject, Protocol):
    """What tracing asks of a step, beyond what timing asks."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def compiled(self) -> bool: ...

    @property
    def loss(self) -> torch.Tensor | None: ...


def capture_kineto(
    step: TracedStep, device: torch.device, timing: Device, directory: Path, *, steps: int, stacks: bool = False
) -> Capture:
    """Trace steps with torch.profiler into `trace.kineto.json.gz`: operators with shapes and sequence numbers,
    kernels, and ranges of the step, its phases, modules and the parts of attention.
    """
    with ranges.emitted_to(ranges.ProfilerEmitter()), details(step):
        with _profiler(device, stacks):  # the first session pays for the profiler's own start, and is thrown away
            timed_steps(step, timing, 1)
        with _profiler(device, stacks) as profiler:
            samples = timed_steps(step, timing, steps)
    _export(profiler, directory / KINETO_FILE)
    return Capture(tool="kineto", tool_version=str(torch.__version__), samples=samples, artifact="kineto")


def trace_nvtx(step: TracedStep, device: torch.device, timing: Device, steps: int) -> dict[str, Samples]:
    """Steps for an NVTX tool that watches: besides the ranges of a Kineto trace, those of modules in backward.

    Timed by the host alone: what the phases took on the device is for the trace to say.
    """
    watching = ranges.current_emitters()
    if step.compiled:
        return _whole_steps(step, timing, steps)
    marked = _BackwardMarked(step, watching)
    try:
        with ranges.emitted_to(marked.notes), details(step):
            return _whole_steps(marked, timing, steps)
    finally:
        marked.release()


@contextlib.contextmanager
def capture_range(device: torch.device) -> Iterator[None]:
    """What a tool records that was told to wait for the CUDA profiler's API (nsys: `-c cudaProfilerApi`)."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        # `--capture-range-end=stop-shutdown` sends SIGTERM when the range ends, which is to be as Ctrl-C elsewhere.
        # Here it only says that the tool is done. The sleep leaves it time: ended at once, kernels are lost.
        with interrupts.expected():
            torch.cuda.profiler.stop()
            time.sleep(AFTER_CAPTURE_S)


class _Unmarked:
    """A device that is asked to synchronise and nothing else.

    Reading an event calls cudaEventElapsedTime_v2, new in CUDA 12.8. An importer of Nsight Systems that is older knows
    no name for it, and drops the kernels of the whole buffer that such a call lies in.
    """

    clock_name = "none"

    def __init__(self, device: Device) -> None:
        self.synchronize = device.synchronize

    def mark(self) -> Mark:
        return None

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        return 0.0


def _whole_steps(subject: Subject, timing: Device, steps: int) -> dict[str, Samples]:
    samples = timed_steps(subject, _Unmarked(timing), steps)
    return {name: samples[name] for name in ("step", "host")}


class _BackwardMarked:
    """A step with one phase more: between forward and backward, the nodes of the graph are given their ranges.

    A phase of its own, so that the time this takes is neither forward's nor backward's.
    """

    def __init__(self, step: TracedStep, emitters: tuple[ranges.Emitter, ...]) -> None:
        self._step = step
        self.notes = SequenceNotes(path for path, _ in step.model.named_modules() if path)
        self._backward = BackwardRanges(emitters)
        self.phases: list[Phase] = []
        for phase in step.phases:
            if phase.name == "backward":
                self.phases.append(Phase(name=MARKING, run=self._mark))
                self.phases.append(Phase(name=phase.name, run=lambda run=phase.run: self._run_backward(run)))
            else:
                self.phases.append(phase)

    def prepare(self) -> None:
        self.release()
        self.notes.clear()
        self._step.prepare()

    def release(self) -> None:
        self._backward.release()

    def _mark(self) -> None:
        self.notes.closed = True  # what checkpointing runs again during backward made none of these nodes
        loss = self._step.loss
        if loss is not None and loss.grad_fn is not None:
            self._backward.attach(loss.grad_fn, self.notes)

    def _run_backward(self, run: Callable[[], object]) -> None:
        try:
            run()
        finally:
            self._backward.close()
            # Another micro-batch may follow in the same step, with a graph of its own.
            self.release()
            self.notes.clear()


def details(step: TracedStep) -> contextlib.AbstractContextManager[None]:
    """Ranges inside the model. A compiled step has phases alone: hooks on modules inside the compiled one would make
    it compile anew, and what is traced would not be what was timed."""
    return ranges.detailed(step.model) if not step.compiled else contextlib.nullcontext()


def timed_steps(subject: Subject, timing: Device, steps: int) -> dict[str, Samples]:
    """Exactly so many steps, by the one timing loop."""
    settings = Settings(warmup_floor=0, warmup_cap=0, steps_floor=steps, steps_cap=steps, seconds=0)
    try:
        result = measure({"step": subject}, device=timing, settings=settings)["step"]
    except StepFailed as failure:
        raise failure.__cause__ or failure from None
    if result.interrupted:
        raise KeyboardInterrupt
    return result.samples


def _profiler(device: torch.device, stacks: bool) -> torch.profiler.profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, record_shapes=True, with_stack=stacks, acc_events=True)


def _export(profiler: torch.profiler.profile, target: Path) -> None:
    """Write the Chrome trace compressed; the name appears when the file is whole."""
    plain, compressed = (target.with_name(f".{target.name}.{os.getpid()}.{part}") for part in ("json", "tmp"))
    with _removed(plain, compressed):
        profiler.export_chrome_trace(str(plain))
        _check_whole(plain)
        with plain.open("rb") as source, gzip.open(compressed, "wb", compresslevel=_COMPRESSION) as packed:
            packed.writelines(_portable(line, target.name) for line in source)
        compressed.replace(target)


def _portable(line: bytes, name: str) -> bytes:
    """The line without the machine's name or the file's place: a run directory can be shown to others."""
    if b'"host_name"' in line or b'"traceName"' in line:
        line = re.sub(rb'"host_name": *"[^"]*"', b'"host_name": ""', line)
        line = re.sub(rb'"traceName": *"[^"]*"', b'"traceName": "' + name.encode() + b'"', line)
    return line


def _check_whole(file: Path) -> None:
    # The profiler writes from C++ and does not say when the disk is full: the file then just ends.
    with file.open("rb") as source:
        source.seek(max(0, file.stat().st_size - 64))
        if not source.read().rstrip().endswith(b"}"):
            raise OSError(f"the trace was cut short after {file.stat().st_size} bytes: is the disk full?")


@contextlib.contextmanager
def _removed(*files: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for file in files:
            file.unlink(missing_ok=True)
