"""The stages in which a step becomes a run, in the order in which `step.py` calls them."""

import contextlib
import dataclasses
import fcntl
import gc
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from stepscope.core import evidence, interrupts
from stepscope.core.checkpointing import OFFLOAD, of_fewer_layers, offload_of, selective_of
from stepscope.core.device_spec import find_device_spec, overridden_spec
from stepscope.core.environment import GpuReading
from stepscope.core.errors import InputError, one_line
from stepscope.core.formulas import Work
from stepscope.core.formulas.transformer import known_work
from stepscope.core.parts import AUTO
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import STEP
from stepscope.core.run import Settings
from stepscope.core.run_directory import KINETO_FILE, MEMORY_FILE, RANK_FOLDER
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.units import format_seconds
from stepscope.core.user_model import code_folder, file_of, unmet
from stepscope.core.workloads import GRAPH_WARMUP, TextbookWorkload, by_sizes
from stepscope.engine.draft import Draft
from stepscope.engine.request import WAITS, Stage, begun_now
from stepscope.recording import driven, ranges
from stepscope.recording.capture import capture_range
from stepscope.recording.ceilings import ceilings_for, load_ceilings, supported_dtypes
from stepscope.recording.compilation import CompilationWatch, compile_report, reset_compilation
from stepscope.recording.device import HostLoad, is_out_of_memory
from stepscope.recording.environment import launcher, read_environment
from stepscope.recording.held_tensors import local_part, tensors_within
from stepscope.recording.nvml import LEAST_S, EnergyMeter, GpuSampler, gpu_sampled, nvml_kept_open, read_gpu
from stepscope.recording.observe import whole_bytes
from stepscope.recording.precision import probe_relative_error, with_kernels
from stepscope.recording.step import Step
from stepscope.recording.timer import Measurement, Progress, StepFailed, measure, measure_one, timed_steps
from stepscope.recording.updates import applied_updates, read_updates
from stepscope.runs.metrics import devices, model_flops_per_s
from stepscope.training.attention import chosen_attention
from stepscope.training.making import make_parts, make_step
from stepscope.training.training_step import StepParts

if TYPE_CHECKING:
    from stepscope.recording.memory_history import MemoryCapture

# What a run does without where its time is limited.


def is_over(draft: Draft, needs_s: float, what: str = "") -> bool:
    """Whether the run's limit leaves less than so many seconds. what: is not known then, which becomes a note."""
    over = draft.limit is not None and draft.limit.left_s() < needs_s
    if over and what:
        draft.note(f"{what}: --seconds {draft.request.settings.seconds:g} bounds the whole run, and its time was over")
    return over


# Makes the step on the device, and later releases its memory.


def build(draft: Draft) -> None:
    """Make the step on the device."""
    workload, device = draft.request.workload, draft.device
    draft.begin("build", workload.name)
    if workload.compile != "eager":
        reset_compilation()
    draft.held_before_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    draft.built, built_workload = make_step(workload, device, draft.load, draft.ranks)
    draft.set(workload=built_workload)
    if workload.attention == AUTO:
        draft.set_evidence(attention=by_sizes(workload, lambda sized: chosen_attention(sized, device.type)))
    if workload.factory:
        found, absent = (getattr(draft.built, name, ()) for name in ("found", "absent"))
        draft.set_evidence(parts=found, absent=absent, unmet=unmet(workload))


_LOOK_S = 0.05
"""How often a process looks whether its turn has come. A lock that it waits for would keep a signal waiting, too."""


def wait_for_its_turn(draft: Draft) -> None:
    """Run the first steps, which compile and capture, beside other processes; then wait until those before this one
    have ended, so that the steps that are timed have the device for themselves."""
    turn = draft.request.turn
    if turn is None:
        return
    draft.begin("get ready")
    timed_steps(draft.step, draft.timing, GRAPH_WARMUP)
    draft.begin(WAITS)
    with Path(turn.file).open() as file:
        while not _is_free(file):
            interrupts.check()
            time.sleep(_LOOK_S)
    # How far processes drift is reckoned from when they began: one that waited begins with its turn.
    draft.set(created=begun_now())


def _is_free(file: IO[str]) -> bool:
    """Whether nobody holds the file's lock any more."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(draft: Draft) -> None:
    """Release the step's memory: later stages need it, or must not run beside it."""
    draft.built = None
    gc.collect()  # a step and its phases refer to each other
    if draft.device.type == "cuda":
        torch.cuda.empty_cache()


# Finds the rates that this device really reaches, for the dtype of the step.


def find_ceilings(draft: Draft) -> None:
    """Measure the ceilings, or take those that are stored for this device and build."""
    if draft.ranks.ranks > 1 and draft.device.type == "cpu":
        return  # ranks that share a processor would each measure what the others leave it
    stored = load_ceilings(draft.device)
    if not draft.request.ceilings or is_over(draft, 3.0, "measured ceilings" if stored is None else ""):
        draft.set(ceilings=stored)
        return
    draft.begin("ceiling")
    request = draft.request
    dtype = PRECISIONS[request.workload.dtype].multiplies
    with ranges.silenced():  # these steps are not the model's
        ceilings = ceilings_for(
            draft.device,
            [dtype] if dtype in supported_dtypes(draft.device) else [],
            lambda what: draft.tell(Stage(name="ceiling", detail=what)),
            keep=request.memory_limit_bytes is None,
            reached={dtype: (model_flops_per_s(draft.run) or 0.0) / devices(draft.run)},
        )
    draft.set(ceilings=ceilings)


# Reads the environment and the device's datasheet, and counts the work of the step.


def look_round(draft: Draft) -> None:
    """Fill in what is known before anything runs, and write the run for the first time."""
    request = draft.request
    factory = request.workload.factory
    folder = code_folder(file_of(factory)) if factory else None
    environment = read_environment(draft.device, request.memory_limit_bytes, user_code=folder)
    environment = msgspec.structs.replace(environment, node=request.node)
    name, stated = environment.device_name, request.peak_flops_per_s
    spec = overridden_spec(name, request.workload.dtype, stated) if stated else find_device_spec(name)
    draft.set(environment=environment, device_spec=spec, work=known_work(request.workload))
    draft.save(rescue=False)


# Records the allocations of one more step, where it was asked for.


def record_memory(draft: Draft) -> None:
    """Record a step. On a CPU, where nothing else counts allocations, the memory figures are this step's."""
    draft.begin("memory")
    if draft.step.cuda_graphs:
        draft.note("no memory history: tensors of replayed CUDA graphs were allocated when the graphs were made")
        return
    measured = _record(draft).measured
    counted = draft.run.evidence.memory
    if counted is None or counted.allocated_peak is None:
        draft.set_evidence(memory=measured)
    elif counted.allocated_peak != measured.allocated_peak:
        draft.note(
            f"the step whose allocations were recorded peaked at {measured.allocated_peak:,} bytes, "
            f"the observed one at {counted.allocated_peak:,}"
        )


def record_what_filled_the_memory(draft: Draft) -> None:
    """Run the step that ran out of memory once more, recorded, and keep what it has allocated when it fails again. The
    run has ended already, so any error here becomes a note."""
    step = draft.built
    if draft.request.memory is None or step is None or draft.device.type != "cuda" or step.cuda_graphs:
        return
    draft.begin("memory")
    step.loss = None
    step.model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    try:
        capture = _record(draft, out_of_memory=True)
    except KeyboardInterrupt:
        draft.note(f"no memory history: {interrupts.interruption()}")
    except Exception as failure:  # the run failed already: what fails here is only said beside it
        draft.note(f"no memory history: {one_line(failure)}")
    else:
        if capture.failure is None:
            draft.note(f"recorded, the step did not run out of memory: {MEMORY_FILE} holds the whole step")


def _record(draft: Draft, out_of_memory: bool = False) -> "MemoryCapture":
    from stepscope.recording.memory_history import capture_memory  # noqa: PLC0415  (where it was asked for)

    options, environment = draft.request.memory, draft.run.environment
    assert options is not None
    capture = capture_memory(
        draft.step,
        draft.device,
        draft.directory,
        workload=draft.run.workload,
        device_name=environment.device_name if environment else "",
        stacks=options.stacks,
        steps=1 if out_of_memory else options.steps,
        held_before_bytes=draft.held_before_bytes,
        is_out_of_memory=is_out_of_memory if out_of_memory else None,
    )
    draft.keep_files(memory=MEMORY_FILE)
    if options.steps > 1 and capture.failure is None:
        draft.keep_growth()
    return capture


# Gathers evidence of what the timed steps did, from steps that run after them.


def observe(draft: Draft) -> None:
    """Probe the precision, run steps under hooks and the profiler, and keep the evidence."""
    if is_over(draft, 0.5, "precision, memory, operators and profile of a step"):
        return
    draft.begin("observe")
    step, device = draft.step, draft.device
    precision = evidence.Precision(
        float32_matmul=torch.get_float32_matmul_precision(), probe_relative_error=probe_relative_error(device)
    )
    draft.set_evidence(precision=precision)
    observation, memory = driven.observe_step(step, device, draft.held_before_bytes)
    draft.set_evidence(observation=observation, memory=memory)
    draft.set_evidence(operators=driven.step_operators(step, device, draft.timing))
    if draft.run.workload.factory:
        draft.set_evidence(habits=driven.step_habits(step, device))
    if step.cuda_graphs:
        draft.note("allocated peaks: tensors of replayed CUDA graphs count as reserved only")
    if not draft.request.settings.profile:
        return
    if ranges.watched() and device.type == "cuda":
        draft.note("no profile: CUDA lets one profiler in at a time, and a tool watches this process already")
        return
    if is_over(draft, 0.5, "a profile"):
        return
    draft.begin("profile")
    profile = driven.profile_step(step, device, draft.timing, draft.ranks)
    draft.set_evidence(profile=profile, precision=with_kernels(precision, profile))


def count_work(draft: Draft) -> None:
    """Count the FLOPs of a step, which no formula of its sizes says."""
    if draft.step.cuda_graphs:
        draft.note("no FLOPs: what CUDA graphs replay calls no operators that could be counted")
        return
    if is_over(draft, 0.0, "FLOPs"):
        return
    draft.begin("count FLOPs")
    mine, unknown = driven.step_flops(draft.step, draft.timing)
    of_ranks: list[bytes] = draft.ranks.gathered(msgspec.json.encode(mine)) if draft.ranks.backend else []
    work = msgspec.json.decode(of_ranks[0], type=dict[str, Work]) if of_ranks else mine
    for other in of_ranks[1:]:  # each has a part of the batch, and of nothing else
        for phase, more in msgspec.json.decode(other, type=dict[str, Work]).items():
            work[phase] = work[phase] + more if phase in work else more
    draft.set(work=work)
    draft.set_evidence(uncounted=unknown)


# Takes together what the ranks of a step measured.


def take_steps_together(draft: Draft, result: Measurement) -> None:
    """Make the samples of the step those of all ranks, and keep what each measured."""
    environment = draft.run.environment
    parameters, state = kept_bytes(draft.step)
    # The bytes of all parameters of the model, and of those that are trained. Each rank has whole ones, or parts of
    # tensors that say how large the whole is; in a pipeline it has some, and a weight that two stages share is two.
    whole, trained = whole_bytes(draft.step.model.parameters())
    if draft.run.workload.strategy.stages(draft.ranks.ranks) > 1:
        of_ranks: list[tuple[int, int]] = draft.ranks.gathered((whole, trained))
        whole, trained = sum(whole for whole, _ in of_ranks), sum(trained for _, trained in of_ranks)
    mine = evidence.RankFigures(
        rank=draft.ranks.rank,
        host=socket.gethostname(),
        device_name=environment.device_name if environment else "",
        samples=result.samples,
        parameter_bytes=parameters,
        optimizer_bytes=state,
    )
    gathered: list[tuple[bytes, tuple[evidence.Span, ...]]] = draft.ranks.gathered(
        (msgspec.json.encode(mine), result.spans_ns)
    )
    figures = tuple(msgspec.json.decode(one, type=evidence.RankFigures) for one, _ in gathered)
    shared = evidence.RanksEvidence(
        backend=draft.ranks.backend, ranks=figures, threads=draft.ranks.threads, start_s=draft.ranks.start_s,
        started_here=draft.ranks.started_here, correct=draft.correct, whole_parameter_bytes=whole,
        whole_gradient_bytes=trained,
    )  # fmt: skip
    together = evidence.steps_together([spans for _, spans in gathered], one_clock=shared.one_host)
    step = msgspec.structs.replace(result.samples[STEP], values_s=together)
    draft.set(samples={**result.samples, STEP: step}, shared=shared)


def count_traffic(draft: Draft) -> None:
    """Count what this rank sends and receives in a step."""
    if draft.run.workload.graph == "step":
        draft.note("no bytes of collectives: what CUDA graphs replay calls none that could be counted")
        return
    draft.begin("count communication")
    draft.traffic = driven.step_traffic(draft.step, draft.timing)


def bring_the_ranks_together(draft: Draft) -> None:
    """Keep the memory of every rank, and name the files that each recorded."""
    run, shared = draft.run, draft.run.shared
    if shared is None:
        return
    profile = run.evidence.profile
    communication = evidence.Communication(
        calls=draft.traffic,
        communication_s=profile.communication_s if profile else None,
        exposed_s=profile.exposed_s if profile else None,
        computation_s=profile.computation_s if profile else None,
    )
    mine = msgspec.structs.replace(
        shared.ranks[draft.ranks.rank],
        memory=run.evidence.memory,
        artifacts=run.artifacts,
        communication=communication,
    )
    of_ranks: list[bytes] = draft.ranks.gathered(msgspec.json.encode(mine))
    figures = tuple(msgspec.json.decode(one, type=evidence.RankFigures) for one in of_ranks)
    files: dict[str, str] = {}
    for figure in figures:
        if figure.rank:
            folder = RANK_FOLDER.format(rank=figure.rank)
            files |= {f"{kind}-{folder}": f"{folder}/{file}" for kind, file in figure.artifacts.items()}
    draft.set(shared=msgspec.structs.replace(shared, ranks=figures))
    draft.keep_files(**files)
    if not draft.saves:
        with contextlib.suppress(OSError):  # it recorded nothing of its own
            draft.directory.rmdir()


def kept_bytes(step: Step) -> tuple[int, int]:
    """What this rank keeps between steps: its parameters, and its optimizer's state, in bytes. Each storage counts
    once; of a sharded tensor those of this rank's part."""
    optimizer, parameters, state = step.optimizer, list(step.model.parameters()), list[Tensor]()
    if optimizer is not None:
        parameters += [tensor for group in optimizer.param_groups for tensor in group["params"]]
        state += [tensor for _, tensor in tensors_within(optimizer.state)]
    sizes: list[dict[int, int]] = [{}, {}]
    for size, tensors in zip(sizes, (parameters, state), strict=True):
        for local in map(local_part, tensors):
            storage = local.untyped_storage()
            if local.device.type != "meta" and storage.nbytes():
                size[storage.data_ptr()] = storage.nbytes()
    return sum(sizes[0].values()), sum(sizes[1].values())


_MANY = 1_000_000
"""More steps than two seconds hold."""


def time_steps(draft: Draft) -> None:
    """Warm up and measure. Raises StepFailed; what was measured before is in the draft."""
    draft.begin("warm-up")
    step = draft.step
    interrupted = False
    with nvml_kept_open(draft.device), gpu_sampled(draft.device) as sampler:
        readings = _Readings(draft, sampler)
        try:
            result = measure(
                {"step": step},
                device=draft.timing,
                settings=_settings(draft),
                on_progress=lambda progress: _tell(draft, progress),
                before_measuring=readings.before_the_measured_steps,
                peers=draft.ranks,
                limit=draft.limit,
            )["step"]
            draft.set(samples=result.samples, warmup_steady=result.warmup_steady)
            if draft.ranks.backend and not result.interrupted:
                take_steps_together(draft, result)
            interrupted = result.interrupted
        except StepFailed as failure:
            partial = failure.partial["step"]
            draft.set(samples=partial.samples, warmup_steady=partial.warmup_steady)
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
    draft.set_evidence(energy=readings.energy)
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
        try:
            results = measure(
                subjects,
                device=drafts[0].timing,
                settings=_settings(*drafts),
                on_progress=tell,
                before_measuring=before_measuring,
            )
        except StepFailed as failure:
            results = failure.partial
            raise
        finally:
            with interrupts.held():
                for name, result in results.items():
                    drafts[int(name)].set(samples=result.samples, warmup_steady=result.warmup_steady)
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
    if draft.run.evidence.energy is not None or draft.request.settings.seconds < LEAST_S or is_over(draft, LEAST_S):
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
        self._meter = EnergyMeter(draft.device)
        self.energy: evidence.Energy | None = None
        """That of the measured steps, once they are over."""
        self._began_s = 0.0
        """When the measured steps began; 0 before they did."""
        self._compiling = CompilationWatch(draft.device)
        self._updates: int | None = None
        # These stay where the run ends before it measures.
        self._gpu, self._load = self._read_gpu(), HostLoad()

    def _read_gpu(self) -> GpuReading | None:
        """The GPU's state. Processes that wait for their turn leave it alone, and are no others."""
        reading, turn = read_gpu(self._draft.device), self._draft.request.turn
        if reading is None or turn is None or reading.other_processes is None:
            return reading
        return msgspec.structs.replace(reading, other_processes=max(0, reading.other_processes - turn.waiting))

    def before_the_measured_steps(self) -> None:
        """Read once after warm-up, so that what warm-up compiled does not count. The device idles meanwhile, so NVML is
        initialised already."""
        self._draft.stage = "measure"
        self._updates = applied_updates(self._draft.step.optimizer)
        self._compiling.start()
        self._gpu, self._load = self._read_gpu(), HostLoad()
        self._began_s = time.monotonic()
        self._meter.start()

    def read_after(self) -> None:
        draft, environment, end_s = self._draft, self._draft.run.environment, time.monotonic()
        samples = draft.run.samples.get(STEP)
        self.energy = self._meter.read(samples.count if samples else 0, are_samples=True)
        draft.set_evidence(compiled_while_measured=self._compiling.read())
        assert environment is not None
        after, load = self._read_gpu(), self._load.read()
        during = self._sampler.read(self._began_s, end_s) if self._sampler and self._began_s else None
        if during is not None and not self._alone:
            during = msgspec.structs.replace(during, power_w=None)
        versions = environment.versions | launcher()
        read = {"before": self._gpu, "after": after, "during": during, "host": load, "versions": versions}
        draft.set(environment=msgspec.structs.replace(environment, **read))

    def keep_updates(self) -> None:
        """Store how many of the measured steps updated the parameters."""
        step, count = self._draft.step, self._draft.run.samples["step"].count
        if step.optimizer is not None and self._updates is not None and count:
            norm = getattr(step, "gradient_norm", None)  # a step of the user's own has none
            updates = read_updates(step.optimizer, step.scaler, steps=count, before=self._updates, gradient_norm=norm)
            self._draft.set_evidence(updates=updates)


def _tell(draft: Draft, progress: Progress) -> None:
    draft.stage = progress.stage
    detail = f"step {progress.done}, {format_seconds(progress.last_step_s)}"
    draft.tell(Stage(name=progress.stage, detail=detail, fraction=progress.fraction))


# Holds ranks that share a step against one process, before anything is timed.


_LAYERS = 2
"""Layers of the textbook's model that are checked: one block's way of being spread is every block's."""
_VOCABULARY, _SEQUENCE = 32_768, 4096
"""The largest vocabulary and the longest sequence of what is checked. Both change how long the check takes, and nothing
in how a matrix or a batch is spread."""
_SAMPLES = 2
"""Sequences of each rank and micro-batch that are checked. One process runs the whole batch, some fifty times, while
all ranks wait for it: of 24 sequences for each of 8 ranks, longer than what is measured. With two, each rank adds up
over samples, and one process has several ways to split the batch."""


def check_the_ranks(draft: Draft) -> None:
    """Raise an error, which ends the run, where the ranks compute something else than one process does."""
    workload = draft.request.workload
    if workload.parallel == NOT_PARALLEL or workload.phase == "forward":
        return
    draft.begin("check ranks")
    from stepscope.training.parallel.correctness import check_ranks  # noqa: PLC0415  (only where ranks share a step)

    small = by_sizes(workload, _small) or workload

    def make() -> StepParts:
        return dataclasses.replace(make_parts(small, draft.device, draft.load), optimizer=None)

    correct = check_ranks(workload.parallel, make, small, draft.device, draft.ranks)

    def with_smaller_sizes(sized: TextbookWorkload) -> evidence.Correctness:
        # The sizes in which the step that was checked is smaller than the workload's.
        checked, whole = (
            {"layers": w.layers, "vocabulary": w.model.vocabulary, "seq_len": w.seq_len, "batch_size": w.batch_size}
            for w in (_small(sized), sized)
        )
        return msgspec.structs.replace(correct, **{name: n for name, n in checked.items() if n < whole[name]})

    draft.correct = by_sizes(workload, with_smaller_sizes) or correct
    release(draft)
    if not correct.passed:
        raise RuntimeError(_fault_of(correct, workload.parallel))


def _small(workload: TextbookWorkload) -> TextbookWorkload:
    """A step in the same layout that is checked in place of the workload's, as quickly as it may be."""
    stages = workload.strategy.stages(workload.ranks)
    layers = min(max(_LAYERS, stages), workload.layers)
    both_chunks = 2 * workload.ranks  # where ranks share a sequence, each takes two chunks
    micro_batches = workload.strategy.micro_batches(workload.ranks, workload.accumulation)
    vocabulary = min(workload.model.vocabulary, _VOCABULARY)
    # Checkpointing has blocks of every kind that the whole model has.
    last, offloaded = selective_of(workload.checkpointing), offload_of(workload.checkpointing)
    checkpointing = of_fewer_layers(workload.checkpointing, layers)
    if last is not None:
        checkpointing = f"selective-{min(last, layers - 1)}"
    elif offloaded is not None and offloaded < workload.model.layers:
        checkpointing = f"{OFFLOAD}-{min(offloaded, layers - 1)}"
    return msgspec.structs.replace(
        workload,
        model=msgspec.structs.replace(workload.model, layers=layers, vocabulary=vocabulary),
        batch_size=min(workload.batch_size, _SAMPLES * workload.ranks * micro_batches),
        seq_len=min(workload.seq_len, _SEQUENCE // both_chunks * both_chunks),
        compile="eager",
        checkpointing=checkpointing,
    )


def _fault_of(correctness: evidence.Correctness, name: str) -> str:
    """What the ranks compute wrongly, in a line."""
    wrong, allowed, what = correctness.gradient_error, correctness.gradient_allowed, "the gradients of the first step"
    if wrong <= allowed:
        wrong, allowed = correctness.update_error, correctness.update_allowed
        what = f"what {correctness.steps} steps of SGD make of the parameters"
    if wrong <= allowed and correctness.loss_error is not None and correctness.loss_allowed is not None:
        wrong, allowed = correctness.loss_error, correctness.loss_allowed
        what = f"the losses of {correctness.steps} steps of AdamW"
    return (
        f"ranks that share a step by {name} compute something else than one process: {what} differ by {wrong:.2g}, "
        f"where rounding makes up to {allowed:.2g}, most in {correctness.worst}; nothing was timed"
    )


# Takes traces of some more steps. A trace that fails is evidence too: its capture says why.


def trace_by_kineto(draft: Draft) -> None:
    """Trace with torch.profiler."""
    trace = draft.request.trace
    with _captured(draft, "kineto", str(torch.__version__)):
        capture = driven.capture_kineto(
            draft.step,
            draft.device,
            draft.timing,
            draft.directory,
            steps=trace.steps,
            stacks=trace.stacks,
            peers=draft.ranks,
        )
        draft.keep_capture(capture, kineto=KINETO_FILE)


def trace_for_the_watching_tool(draft: Draft) -> None:
    """Run steps with every range, for the tool that watches this process and keeps what it records."""
    with _captured(draft, "nvtx", ""):
        if not ranges.current_emitters():
            raise InputError(ranges.NO_NVTX)
        with capture_range(draft.device):
            samples = driven.trace_nvtx(draft.step, draft.device, draft.timing, draft.request.trace.steps, draft.ranks)
        draft.keep_capture(evidence.Capture(tool="nvtx", tool_version="", samples=samples))


def trace_by_nsys(draft: Draft) -> None:
    """Run the cell again under Nsight Systems. The step is released by then."""
    from stepscope.engine.nsys_trace import trace_under_nsys  # noqa: PLC0415  (other runs do without)

    assert draft.nsys is not None
    draft.begin("trace nsys")
    capture, files = trace_under_nsys(draft.request, draft.nsys, draft.directory, cuda=draft.device.type == "cuda")
    draft.keep_capture(capture, **files)


@contextlib.contextmanager
def _captured(draft: Draft, tool: str, version: str) -> Generator[None]:
    """A context that takes a trace. Whatever the profiler raises is said in a Capture; the times are kept."""
    draft.begin(f"trace {tool}")
    try:
        yield
    except Exception as error:
        draft.keep_capture(evidence.Capture(tool=tool, tool_version=version, failure=one_line(error)))
