"""Times the steps, and reads clocks, power, the host's load, compilations and updates around them."""

import msgspec

from stepscope.core import interrupts
from stepscope.core.environment import GpuReading
from stepscope.core.units import format_seconds
from stepscope.engine.draft import Draft
from stepscope.engine.request import Stage
from stepscope.measure.compilation import CompilationWatch, compile_report
from stepscope.measure.environment import HostLoad
from stepscope.measure.nvml import nvml_kept_open, read_gpu
from stepscope.measure.timer import Measurement, Progress, StepFailed, measure
from stepscope.measure.updates import applied_updates, read_updates

_SUBJECT = "step"


def time_steps(draft: Draft) -> None:
    """Warm up and measure. Raises StepFailed; what was measured before is in the draft."""
    draft.begin("warm-up")
    step, readings = draft.step, _Readings(draft)
    interrupted = False
    with nvml_kept_open(draft.device):
        readings.read_before()  # stays where the run ends before it measures
        try:
            result = measure(
                {_SUBJECT: step},
                device=draft.timing,
                settings=draft.request.settings,
                on_progress=lambda progress: _tell(draft, progress),
                before_measuring=readings.before_the_measured_steps,
            )[_SUBJECT]
            _keep(draft, result)
            interrupted = result.interrupted
        except StepFailed as failure:
            _keep(draft, failure.partial[_SUBJECT])
            raise
        finally:
            with interrupts.held():
                readings.read_after()
    readings.keep_updates()
    if step.compiled:
        draft.set_evidence(compilation=compile_report(step.forward_module))
    if interrupted:
        draft.stage = "measure" if draft.run.samples["step"].count else "warm-up"
        raise KeyboardInterrupt
    draft.save_meanwhile()  # a process that is killed while it observes then does not lose the times
    draft.set(status="done")


def time_in_turns(*drafts: Draft) -> None:
    """Warm up the steps of several drafts, one after the other, and measure them turn by turn.

    Raises StepFailed, whose subject is the place of the draft; what was measured before is in the drafts.
    """
    subjects = {str(place): draft.step for place, draft in enumerate(drafts)}
    readings = [_Readings(draft) for draft in drafts]
    for draft in drafts:
        draft.stage = "warm-up"
    results: dict[str, Measurement] = {}

    def before_measuring() -> None:
        for reading in readings:
            reading.before_the_measured_steps()

    def tell(progress: Progress) -> None:
        for draft in drafts:
            draft.stage = progress.stage
        _tell(drafts[0], progress)

    with nvml_kept_open(drafts[0].device):
        for reading in readings:
            reading.read_before()
        try:
            results = measure(
                subjects, device=drafts[0].timing, settings=drafts[0].request.settings, on_progress=tell,
                before_measuring=before_measuring,
            )  # fmt: skip
        except StepFailed as failure:
            results = failure.partial
            raise
        finally:
            with interrupts.held():
                for name, result in results.items():
                    _keep(drafts[int(name)], result)
                for reading in readings:
                    reading.read_after()
    if any(result.interrupted for result in results.values()):
        raise KeyboardInterrupt
    compiled = [draft for draft in drafts if draft.step.compiled]
    for draft, reading in zip(drafts, readings, strict=True):
        reading.keep_updates()
        if draft.step.compiled and len(compiled) == 1:
            draft.set_evidence(compilation=compile_report(draft.step.forward_module))
        elif draft.step.compiled:
            draft.note("what torch.compile did: it compiled both steps, and its counters are the process's")
        draft.save_meanwhile()
        draft.set(status="done")


class _Readings:
    """Readings of the machine before and after the measured steps."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._compiling = CompilationWatch(draft.device)
        self._updates: int | None = None
        self._gpu: GpuReading | None = None
        self._load = HostLoad()

    def read_before(self) -> None:
        self._gpu, self._load = read_gpu(self._draft.device), HostLoad()

    def before_the_measured_steps(self) -> None:
        """Read once after warm-up, so that what warm-up compiled does not count. The device idles meanwhile, so NVML is
        initialised already."""
        self._updates = applied_updates(self._draft.step.optimizer)
        self._compiling.start()
        self.read_before()

    def read_after(self) -> None:
        draft, environment = self._draft, self._draft.run.environment
        draft.set_evidence(compiled_while_measured=self._compiling.read())
        assert environment is not None
        after, load = read_gpu(draft.device), self._load.read()
        draft.set(environment=msgspec.structs.replace(environment, before=self._gpu, after=after, host=load))

    def keep_updates(self) -> None:
        """Store how many of the measured steps updated the parameters."""
        step, count = self._draft.step, self._draft.run.samples["step"].count
        if step.optimizer is not None and self._updates is not None and count:
            found = read_updates(step.optimizer, step.scaler, steps=count, before=self._updates)
            self._draft.set_evidence(updates=found)


def _tell(draft: Draft, progress: Progress) -> None:
    draft.stage = progress.stage
    detail = f"step {progress.done}, {format_seconds(progress.last_step_s)}"
    draft.tell(Stage(name=progress.stage, detail=detail, fraction=progress.fraction))


def _keep(draft: Draft, result: Measurement) -> None:
    draft.set(samples=result.samples, warmup_steady=result.warmup_steady)
