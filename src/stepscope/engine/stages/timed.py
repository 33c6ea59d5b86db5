"""Times the steps, and reads clocks, power, energy, the host's load, compilations and updates around them."""

import time

import msgspec

from stepscope.core import interrupts
from stepscope.core.environment import GpuReading
from stepscope.core.errors import InputError
from stepscope.core.range_names import STEP
from stepscope.core.run import Settings
from stepscope.core.units import format_seconds
from stepscope.core.workload import GRAPH_WARMUP
from stepscope.engine.draft import Draft
from stepscope.engine.request import Stage
from stepscope.engine.stages.ranks import take_steps_together
from stepscope.recording.compilation import CompilationWatch, compile_report
from stepscope.recording.energy import LEAST_S, EnergyMeter
from stepscope.recording.environment import HostLoad
from stepscope.recording.gpu_samples import GpuSampler, gpu_sampled
from stepscope.recording.launcher import launcher
from stepscope.recording.nvml import nvml_kept_open, read_gpu
from stepscope.recording.timer import Measurement, Progress, StepFailed, measure, measure_one
from stepscope.recording.updates import applied_updates, read_updates

_SUBJECT = "step"
_MANY = 1_000_000
"""More steps than two seconds hold."""


def time_steps(draft: Draft) -> None:
    """Warm up and measure. Raises StepFailed; what was measured before is in the draft."""
    draft.begin("warm-up")
    step = draft.step
    interrupted = False
    with nvml_kept_open(draft.device), gpu_sampled(draft.device) as sampler:
        readings = _Readings(draft, sampler)
        readings.read_before()  # stays where the run ends before it measures
        try:
            result = measure(
                {_SUBJECT: step},
                device=draft.timing,
                settings=_settings(draft),
                on_progress=lambda progress: _tell(draft, progress),
                before_measuring=readings.before_the_measured_steps,
                peers=draft.ranks,
            )[_SUBJECT]
            _keep(draft, result)
            if not result.interrupted:
                take_steps_together(draft, result)
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
    readings.keep_energy()
    draft.save_meanwhile()  # a process that is killed while it observes then does not lose the times
    draft.set(status="done")


def time_in_turns(*drafts: Draft) -> None:
    """Warm up the steps of several drafts, one after the other, and measure them turn by turn.

    Raises StepFailed, whose subject is the place of the draft; what was measured before is in the drafts.
    """
    subjects = {str(place): draft.step for place, draft in enumerate(drafts)}
    for draft in drafts:
        draft.stage = "warm-up"
    readings: list[_Readings] = []
    results: dict[str, Measurement] = {}

    def before_measuring() -> None:
        for reading in readings:
            reading.before_the_measured_steps()

    def tell(progress: Progress) -> None:
        for draft in drafts:
            draft.stage = progress.stage
        _tell(drafts[0], progress)

    with nvml_kept_open(drafts[0].device), gpu_sampled(drafts[0].device) as sampler:
        readings += [_Readings(draft, sampler, alone=False) for draft in drafts]
        for reading in readings:
            reading.read_before()
        try:
            results = measure(
                subjects, device=drafts[0].timing, settings=_settings(*drafts), on_progress=tell,
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


def _settings(*drafts: Draft) -> Settings:
    """How the steps are measured. Raises InputError if a step is measured before it is replayed as was asked."""
    settings = drafts[0].request.settings
    if all(draft.request.workload.graph == "none" for draft in drafts):
        return settings
    if settings.warmup_cap < GRAPH_WARMUP:
        raise InputError(
            f"--graph step runs {GRAPH_WARMUP - 1} steps as they are and captures the next: "
            f"{settings.warmup_cap} steps of warm-up are too few; say --warmup {GRAPH_WARMUP}"
        )
    return msgspec.structs.replace(settings, warmup_floor=max(settings.warmup_floor, GRAPH_WARMUP))


def measure_energy(draft: Draft) -> None:
    """Run more steps for the counter of energy, where the measured ones were too short for it.

    They are no samples. Whoever asks for less than LEAST_S of steps gets no more.
    """
    if draft.ranks.ranks > 1 or draft.run.evidence.energy is not None or draft.request.settings.seconds < LEAST_S:
        return
    settings = Settings(warmup_floor=0, warmup_cap=0, steps_floor=1, steps_cap=_MANY, seconds=LEAST_S)
    with nvml_kept_open(draft.device):
        meter = EnergyMeter(draft.device)
        if not meter.start():
            return
        draft.begin("energy")
        steps = measure_one(draft.step, device=draft.timing, settings=settings)[STEP].count
        draft.set_evidence(energy=meter.read(steps, are_samples=False))


class _Readings:
    """Readings of the machine before, while and after the measured steps run."""

    def __init__(self, draft: Draft, sampler: GpuSampler | None, *, alone: bool = True) -> None:
        """alone: whether no other step takes turns with this one. Power would be that of both."""
        self._draft, self._sampler, self._alone = draft, sampler, alone
        self._meter, self._energy = EnergyMeter(draft.device), None
        self._began_s = 0.0
        """When the measured steps began; 0 before they did."""
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
        self._began_s = time.monotonic()
        self._meter.start()

    def read_after(self) -> None:
        draft, environment, end_s = self._draft, self._draft.run.environment, time.monotonic()
        samples = draft.run.samples.get(STEP)
        self._energy = self._meter.read(samples.count if samples else 0, are_samples=True)
        draft.set_evidence(compiled_while_measured=self._compiling.read())
        assert environment is not None
        after, load = read_gpu(draft.device), self._load.read()
        during = self._sampler.read(self._began_s, end_s) if self._sampler and self._began_s else None
        if during is not None and not self._alone:
            during = msgspec.structs.replace(during, power_w=None)
        versions = environment.versions | launcher()
        read = {"before": self._gpu, "after": after, "during": during, "host": load, "versions": versions}
        draft.set(environment=msgspec.structs.replace(environment, **read))

    def keep_energy(self) -> None:
        """Store the energy of the measured steps, which were not cut short."""
        self._draft.set_evidence(energy=self._energy)

    def keep_updates(self) -> None:
        """Store how many of the measured steps updated the parameters."""
        step, count = self._draft.step, self._draft.run.samples["step"].count
        if step.optimizer is not None and self._updates is not None and count:
            norm = getattr(step, "gradient_norm", None)  # a step of the user's own has none
            found = read_updates(step.optimizer, step.scaler, steps=count, before=self._updates, gradient_norm=norm)
            self._draft.set_evidence(updates=found)


def _tell(draft: Draft, progress: Progress) -> None:
    draft.stage = progress.stage
    detail = f"step {progress.done}, {format_seconds(progress.last_step_s)}"
    draft.tell(Stage(name=progress.stage, detail=detail, fraction=progress.fraction))


def _keep(draft: Draft, result: Measurement) -> None:
    draft.set(samples=result.samples, warmup_steady=result.warmup_steady)
