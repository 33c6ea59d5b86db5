"""The question every other study asks in passing: what does one step of this workload take, here?"""

import contextlib
import gc
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch

from stepscope.analysis.runs.checks import check_run
from stepscope.analysis.runs.metrics import summarise
from stepscope.core import interrupts
from stepscope.core.device_spec import find_device_spec, overridden_spec, product_dtype
from stepscope.core.environment import GpuReading
from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.core.evidence import Capture, Evidence, Precision
from stepscope.core.run import Failure, Run, Status
from stepscope.core.run_directory import create_run_directory, save_run
from stepscope.core.units import format_seconds
from stepscope.engine.device_failure import failing_module, is_out_of_memory, let_go, portable_traceback
from stepscope.engine.nsys_trace import NO_NVTX, nsys_for, trace_under_nsys
from stepscope.engine.request import MemoryRequest, Stage, StepRequest, Tell
from stepscope.measure import ranges
from stepscope.measure.capture import KINETO_FILE, capture_kineto, capture_range, trace_nvtx
from stepscope.measure.ceilings import ceilings_for
from stepscope.measure.compilation import CompilationWatch, compile_report, reset_compilation
from stepscope.measure.device import limit_memory, resolve_device, timing_device
from stepscope.measure.environment import HostLoad, read_environment
from stepscope.measure.memory_history import MEMORY_FILE, MemoryCapture, capture_memory
from stepscope.measure.nsys import Nsys
from stepscope.measure.nvml import nvml_kept_open, read_gpu
from stepscope.measure.observe import observe_step
from stepscope.measure.operators import step_operators
from stepscope.measure.precision import matmul_precision, probe_relative_error, with_kernels
from stepscope.measure.profile import profile_step
from stepscope.measure.timer import Measurement, Progress, StepFailed, measure
from stepscope.measure.updates import applied_updates, read_updates
from stepscope.models.attention import chosen_attention
from stepscope.models.training_step import TrainingStep, check_supported
from stepscope.work.transformer import phase_work

FAILURE_FILE = "failure.txt"
_SUBJECT = "step"


def measure_step(
    request: StepRequest, tell: Tell = lambda _: None, began: Callable[[Path], None] = lambda _: None
) -> tuple[Run, Path]:
    """Measure one workload and save its run; returns the run and its directory, which `began` is told at once.

    A workload that the device cannot run as asked, or a place that cannot be written, raises InputError before
    anything is measured. A failure of the device is no exception: it is the run's status, with where it happened.
    """
    device = resolve_device(request.device)
    check_supported(request.workload, device)
    limit_memory(device, request.memory_limit_bytes)
    nsys = nsys_for(request, device.type)
    with interrupts.held():
        directory = create_run_directory(Path(request.out), request.workload)
        began(directory)
        try:
            with matmul_precision(request.workload.dtype):
                run = _StepStudy(request, device, directory, tell, nsys).run()
        except InputError:
            shutil.rmtree(directory, ignore_errors=True)  # nothing was measured: nothing is left behind
            raise
        if run.status == "interrupted":
            with contextlib.suppress(StepscopeError):  # whoever interrupted it may not wait for the statistics
                save_run(run, directory, rescue=False)
        run = msgspec.structs.replace(run, summary=summarise(run))
        run = msgspec.structs.replace(run, findings=check_run(run))
        save_run(run, directory)
    return run, directory


class _StepStudy:
    """One run in the making: `_run` holds what is known so far, and is what remains if a stage fails."""

    def __init__(
        self, request: StepRequest, device: torch.device, directory: Path, tell: Tell, nsys: Nsys | None
    ) -> None:
        self._nsys = nsys
        self._request, self._device, self._directory = request, device, directory
        self._display = tell
        self._timing = timing_device(device)
        self._stage = "start"
        self._step: TrainingStep | None = None
        self._held_before_bytes = 0
        self._before: GpuReading | None = None
        self._load = HostLoad()
        self._compiling: CompilationWatch | None = None
        self._updates_before: int | None = None
        self._run = Run(
            id=directory.name,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            tag=request.tag,
            sweep=request.sweep,
            status="unfinished",
            workload=request.workload,
            settings=request.settings,
        )

    def run(self) -> Run:
        try:
            with interrupts.keeping():
                self._study()
        except KeyboardInterrupt:
            if self._run.status == "unfinished":
                self._end("interrupted", Failure(message="interrupted by the user", during=self._stage))
            elif self._run.status == "done" and self._run.failure is None:
                self._interrupted_after_the_steps()
        return self._run

    def _study(self) -> None:
        try:
            self._look_round()
            self._build()
            self._measure()
            if self._observe() and self._trace():
                self._measure_ceilings()
        except StepFailed as failure:
            interrupts.check()  # a library may have made another exception of Ctrl-C's
            cause = failure.__cause__ or failure
            self._fail(cause, failure.stage, failure.phase)
            if is_out_of_memory(cause):
                let_go(failure)
                self._record_what_filled_the_memory()
        except StepscopeError:
            raise
        except Exception as error:  # whatever the device or a library raises becomes the run's status
            interrupts.check()
            self._fail(error, self._stage, None)

    def _look_round(self) -> None:
        request, device = self._request, self._device
        environment = read_environment(device, request.memory_limit_bytes)
        name, dtype = environment.device_name, request.workload.dtype
        spec = (
            overridden_spec(name, dtype, request.peak_flops_per_s)
            if request.peak_flops_per_s
            else find_device_spec(name)
        )
        self._set(environment=environment, device_spec=spec, work=phase_work(request.workload))
        save_run(self._run, self._directory, rescue=False)

    def _build(self) -> None:
        self._begin("build", self._request.workload.model.name)
        if self._request.workload.compile != "eager":
            reset_compilation()
        self._held_before_bytes = self._allocated_bytes()
        self._step = TrainingStep(self._request.workload, self._device)
        if self._request.workload.attention == "auto":
            self._set_evidence(attention=chosen_attention(self._request.workload, self._device.type))

    def _measure(self) -> None:
        assert self._step is not None
        self._begin("warm-up")
        self._compiling = CompilationWatch(self._device)
        interrupted = False
        with nvml_kept_open(self._device):
            self._read_before()  # stays where the run ends before it measures
            try:
                result = measure(
                    {_SUBJECT: self._step},
                    device=self._timing,
                    settings=self._request.settings,
                    on_progress=self._tell_progress,
                    before_measuring=self._before_the_measured_steps,
                )[_SUBJECT]
                self._keep(result)
                interrupted = result.interrupted
            except StepFailed as failure:
                self._keep(failure.partial[_SUBJECT])
                raise
            finally:
                with interrupts.held():
                    self._set_evidence(compiled_while_measured=self._compiling.read())
                    self._read_after()
        self._keep_updates()
        if self._step.compiled:
            self._set_evidence(compilation=compile_report(self._step.forward_module))
        if interrupted:
            self._stage = "measure" if self._run.samples["step"].count else "warm-up"
            raise KeyboardInterrupt
        # On disk from here on: whatever kills the process while it observes does not take the times along. Where the
        # disk refuses, the save at the end says so, and finds another place.
        with contextlib.suppress(StepscopeError):
            save_run(self._run, self._directory, rescue=False)
        self._set(status="done")

    def _observe(self) -> bool:
        """Gather the evidence; False when the user interrupted it.

        The times are safe already: what fails here is noted, and the run stays done.
        """
        try:
            self._begin("observe")
            assert self._step is not None
            precision = Precision(
                float32_matmul=torch.get_float32_matmul_precision(),
                probe_relative_error=probe_relative_error(self._device),
            )
            self._set_evidence(precision=precision)
            observation, memory = observe_step(self._step, self._device, self._held_before_bytes)
            self._set_evidence(observation=observation, memory=memory)
            self._set_evidence(operators=step_operators(self._step, self._device, self._timing))
            if self._step.cuda_graphs:
                self._note("allocated peaks: tensors of replayed CUDA graphs count as reserved only")
            if self._request.settings.profile and ranges.watched() and self._device.type == "cuda":
                self._note("no profile: CUDA lets one profiler in at a time, and a tool watches this process already")
            elif self._request.settings.profile:
                self._begin("profile")
                profile = profile_step(self._step, self._device, self._timing)
                self._set_evidence(profile=profile, precision=with_kernels(precision, profile))
        except KeyboardInterrupt:
            self._interrupted_after_the_steps()
            return False
        except Exception as error:  # a library's failure here must not cost the times; it is said in the notes
            self._note(f"{self._stage} failed after the timed steps: {one_line(error)}")
        return True

    def _trace(self) -> bool:
        """Take the traces that were asked for; False when the user interrupted it. As above, the times are safe."""
        tools = self._request.trace.tools
        try:
            if "kineto" in tools:
                self._trace_by_kineto()
            if ranges.watched():
                self._trace_for_the_watching_tool()
            if self._request.memory is not None:
                self._trace_memory(self._request.memory)
            self._release()
            if self._nsys is not None:
                self._begin("trace nsys")
                capture, kept = trace_under_nsys(
                    self._request, self._nsys, self._directory, cuda=self._device.type == "cuda"
                )
                self._keep_capture(capture, kept)
        except KeyboardInterrupt:
            self._interrupted_after_the_steps()
            return False
        return True

    def _trace_by_kineto(self) -> None:
        assert self._step is not None
        self._begin("trace kineto")
        trace, kept = self._request.trace, {}
        try:
            capture = capture_kineto(
                self._step, self._device, self._timing, self._directory, steps=trace.steps, stacks=trace.stacks
            )
            kept = {"kineto": KINETO_FILE}
        except Exception as error:
            capture = Capture(tool="kineto", tool_version=str(torch.__version__), failure=one_line(error))
        self._keep_capture(capture, kept)

    def _trace_for_the_watching_tool(self) -> None:
        """The user started the tool, and keeps what it records: here are steps with every range."""
        assert self._step is not None
        self._begin("trace nvtx")
        failure, samples = None, {}
        try:
            if not ranges.current_emitters():
                raise InputError(NO_NVTX)
            with capture_range(self._device):
                samples = trace_nvtx(self._step, self._device, self._timing, self._request.trace.steps)
        except Exception as error:
            failure = one_line(error)
        self._keep_capture(Capture(tool="nvtx", tool_version="", samples=samples, failure=failure))

    def _trace_memory(self, asked: MemoryRequest) -> None:
        """Record the allocations of one more step. Where nobody counted them before (CPU), the figures are its own."""
        assert self._step is not None
        self._begin("memory")
        if self._step.cuda_graphs:
            self._note("no memory history: tensors of replayed CUDA graphs were allocated when the graphs were made")
            return
        try:
            capture = self._capture_memory(self._step, asked)
        except Exception as error:  # as above: said in the notes
            self._note(f"no memory history: {one_line(error)}")
            return
        self._set(artifacts={**self._run.artifacts, "memory": MEMORY_FILE})
        counted = self._run.evidence.memory
        if counted is None or counted.allocated_peak is None:
            self._set_evidence(memory=capture.measured)
        elif counted.allocated_peak != capture.measured.allocated_peak:
            self._note(
                f"the step whose allocations were recorded peaked at {capture.measured.allocated_peak:,} bytes, "
                f"the observed one at {counted.allocated_peak:,}"
            )

    def _capture_memory(self, step: TrainingStep, asked: MemoryRequest, out_of_memory: bool = False) -> MemoryCapture:
        environment = self._run.environment
        return capture_memory(
            step,
            self._device,
            self._directory,
            workload=self._request.workload,
            device_name=environment.device_name if environment else "",
            stacks=asked.stacks,
            held_before_bytes=self._held_before_bytes,
            is_out_of_memory=is_out_of_memory if out_of_memory else None,
        )

    def _record_what_filled_the_memory(self) -> None:
        """Memory ran out during a step, unrecorded. Run the step once more, recorded, and keep what it has allocated
        when it fails again."""
        asked, step = self._request.memory, self._step
        if asked is None or step is None or self._device.type != "cuda" or step.cuda_graphs:
            return
        self._begin("memory")
        step.loss = None
        step.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        try:
            capture = self._capture_memory(step, asked, out_of_memory=True)
        except KeyboardInterrupt:
            self._note("no memory history: interrupted by the user")
        except Exception as failure:  # the run has ended already, for another reason
            self._note(f"no memory history: {one_line(failure)}")
        else:
            self._set(artifacts={**self._run.artifacts, "memory": MEMORY_FILE})
            if capture.failure is None:
                self._note("recorded, the step did not run out of memory: memory.pickle.gz holds the whole step")

    def _keep_capture(self, capture: Capture, kept: Mapping[str, str] = MappingProxyType({})) -> None:
        self._set_evidence(captures=(*self._run.evidence.captures, capture))
        self._set(artifacts={**self._run.artifacts, **kept})

    def _release(self) -> None:
        """Give the step's memory back: what follows needs it, or must not stand beside it."""
        self._step = None
        gc.collect()  # a step and its phases refer to each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure_ceilings(self) -> None:
        """Last, so that the step met a process as cold as its warm-up setting says, and its memory is free again."""
        try:
            self._begin("ceiling")
            with ranges.silenced():  # these steps are no steps of the model
                ceilings = ceilings_for(
                    self._device,
                    [product_dtype(self._request.workload.dtype)],
                    lambda what: self._tell(Stage(name="ceiling", detail=what)),
                    keep=self._request.memory_limit_bytes is None,
                )
            self._set(ceilings=ceilings)
        except KeyboardInterrupt:
            self._interrupted_after_the_steps()
        except Exception as error:  # as above
            self._note(f"no measured ceiling: {one_line(error)}")

    def _before_the_measured_steps(self) -> None:
        """Read, once, what the readings after the measured steps are held against.

        Warm-up is over, and with it what it compiled. The device idles meanwhile, so NVML is initialised already.
        """
        assert self._step is not None and self._compiling is not None
        self._updates_before = applied_updates(self._step.optimizer)
        self._compiling.start()
        self._read_before()

    def _keep_updates(self) -> None:
        """Whether the optimizer updated the parameters in each of the measured steps."""
        step, samples = self._step, self._run.samples["step"]
        if step is None or step.optimizer is None or self._updates_before is None or not samples.count:
            return
        found = read_updates(step.optimizer, step.scaler, steps=samples.count, before=self._updates_before)
        self._set_evidence(updates=found)

    def _read_before(self) -> None:
        self._before, self._load = read_gpu(self._device), HostLoad()

    def _read_after(self) -> None:
        assert self._run.environment is not None
        self._set(
            environment=msgspec.structs.replace(
                self._run.environment, before=self._before, after=read_gpu(self._device), host=self._load.read()
            )
        )

    def _fail(self, error: BaseException, during: str, phase: str | None) -> None:
        status: Status = "out-of-memory" if is_out_of_memory(error) else "failed"
        try:
            (self._directory / FAILURE_FILE).write_text(portable_traceback(error))
            self._set(artifacts={**self._run.artifacts, "failure": FAILURE_FILE})
        except OSError:
            pass  # the failure itself is in run.json; only its traceback found no room
        module = failing_module(self._step.model, error.__traceback__) if self._step is not None else None
        self._end(status, Failure(message=one_line(error), during=during, phase=phase, module=module))

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _tell_progress(self, progress: Progress) -> None:
        self._stage = progress.stage
        self._tell(
            Stage(
                name=progress.stage,
                detail=f"step {progress.done}, {format_seconds(progress.last_step_s)}",
                fraction=progress.fraction,
            )
        )

    def _tell(self, stage: Stage) -> None:
        interrupts.check()
        with contextlib.suppress(OSError):  # a display that is gone, or full, is no concern of the measurement
            self._display(stage)

    def _keep(self, result: Measurement) -> None:
        self._set(samples=result.samples, warmup_steady=result.warmup_steady)

    def _begin(self, stage: str, detail: str = "") -> None:
        self._stage = stage
        self._tell(Stage(name=stage, detail=detail))

    def _end(self, status: Status, failure: Failure) -> None:
        self._set(status=status, failure=failure)

    def _interrupted_after_the_steps(self) -> None:
        """The times are whole, so the run is done; that evidence is missing is said, and the exit code is Ctrl-C's."""
        self._end("done", Failure(message="interrupted by the user, after the timed steps", during=self._stage))

    def _note(self, note: str) -> None:
        self._set_evidence(notes=(*self._run.evidence.notes, note))

    def _set(self, **changes: object) -> None:
        self._run = msgspec.structs.replace(self._run, **changes)

    def _set_evidence(self, **changes: object) -> None:
        evidence: Evidence = msgspec.structs.replace(self._run.evidence, **changes)
        self._set(evidence=evidence)
